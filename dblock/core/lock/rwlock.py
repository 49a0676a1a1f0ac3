"""The locks of a read-write lock: many flows read at a time, or one writes.

Rule: a flow that writes may read, and then holds the one tenure twice. A flow that reads is refused to write.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Generic, TypeVar

from dblock.core import runtime
from dblock.core.acquire import handover
from dblock.core.acquire.request import Refused
from dblock.core.acquire.sharing import Sharing, held_shares, leave_shares, share
from dblock.core.acquire.waiting import Attempt
from dblock.core.errors import LockError
from dblock.core.lock import entering
from dblock.core.lock.base import BaseLock
from dblock.core.lock.bookkeeping import find_out
from dblock.core.lock.locks import refuses
from dblock.core.protocol import tenures
from dblock.core.protocol.sending import pauses
from dblock.core.protocol.steps import Steps, sleep
from dblock.core.share_keys import valid_shared_key
from dblock.core.values import Grant, KeyKind, LockInfo

R = TypeVar("R")
W = TypeVar("W")


class NoLock(Generic[R, W]):
    """The base of both faces' `ReadWriteLock`, which is no lock itself and says so where it is used as one."""

    _locks_by = "read() or write()"
    """What makes its locks."""

    def __init__(self, key: str, reads: Callable[[], R], writes: Callable[[], W]) -> None:
        self._key, self._reads, self._writes = key, reads, writes
        _ = writes()  # bad options are refused here

    @property
    def key(self) -> str:
        """The key of the lock."""
        return self._key

    def read(self) -> R:
        """A lock to read under: held beside other readers, and beside no writer."""
        return self._reads()

    def write(self) -> W:
        """A lock to write under: held alone."""
        return self._writes()

    def __repr__(self) -> str:
        return f"<ReadWriteLock {self._key!r}>"

    if not TYPE_CHECKING:  # hidden from type checkers
        __enter__ = __exit__ = __aenter__ = __aexit__ = __call__ = atomic = begin = refuses(
            "a read-write lock is held by a reader or a writer: use .read() or .write()"
        )


class Reads(BaseLock):
    """The lock of a reader, which holds it beside other readers, and beside no writer."""

    _kind, _valid_key, _reading = KeyKind.READ_WRITE, staticmethod(valid_shared_key), 1

    def _take(self, attempt: Attempt) -> Steps[Grant | Refused]:
        return share(Sharing(attempt), Sharing.read)

    def _inspect(self) -> Steps[LockInfo | None]:
        """The row of this flow if it reads; else of the reader whose row comes first, else None."""
        database, hold = self._place.store().database, self._hold()
        if hold is not None and (hold.reading or any(lock._reading for lock in hold.locks())):  # a writer may read
            return (yield from tenures.inspect(database, hold.tenure.key))
        readers = yield from held_shares(database, self._key, 100)
        return (yield from tenures.inspect(database, readers[0])) if readers else None


class Writes(BaseLock):
    """The lock of a writer, which holds it alone."""

    _kind, _valid_key = KeyKind.READ_WRITE, staticmethod(valid_shared_key)

    def _take(self, attempt: Attempt) -> Steps[Grant | Refused]:
        return share(Sharing(attempt), Sharing.write)

    def _inspect(self) -> Steps[LockInfo | None]:
        """The key's row; that a reader comes through the queue at this moment is no writer."""
        info = yield from tenures.inspect(self._place.store().database, self._key)
        return replace(info, owner=None, remaining=min(info.remaining, 0.0)) if info and info.reading else info


def downgrade(lock: Writes) -> Steps[None]:
    """Let this flow's hold be a reader's from now on, without a moment in which another writer could come between.

    The row of the reader is inserted first, and then the door is released.
    """
    hold = lock._own_hold("downgrade")
    if hold.reading:
        return
    _ = lock._surely_held()
    if hold.deferred:
        raise LockError(f"{lock._key!r} cannot be downgraded while a transaction keeps it", key=lock._key)
    watchdog, site = runtime.current.watchdog, runtime.current.site(hold.store)
    attempt = entering.attempt_of(lock, hold.store, hold.flow() or lock._running_flow(), None)
    attempt.request = attempt.request._replace(ttl=hold.lease.ttl, life=hold.lease.ttl + hold.lease.grace)
    sharing, growing = Sharing(attempt), pauses()
    while (grant := (yield from sharing.downgrade(hold.tenure))) is None:
        # The tenure is over; or another statement has locked the door's row at this moment.
        if hold.lease.remaining() <= 0 or not (yield from tenures.verify(hold.store.database, hold.tenure)):
            yield from find_out(hold)
            raise lock._lost(hold)
        yield from sleep(hold.store, next(growing))
    if not watchdog.discard(hold) or hold.lease.remaining() <= 0:  # the answer came too late: what is lost stays so
        yield from leave_shares(site, [grant])
        raise lock._lost(hold)
    written = hold.exchange(grant)
    _ = watchdog.add(hold)
    _ = yield from handover.pass_on(site, written)
