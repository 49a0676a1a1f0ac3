"""What others do to a test's locks: they hold a key, take a lock away, keep renewals from happening.

All of it works in memory and over a real database, under any test runner.

Rule: what is done here is what would be done elsewhere: a stranger's tenure is begun and ended by the protocol's own
statements, so that waiters are woken as ever.
"""

from __future__ import annotations

import contextlib
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any, Final, Self
from unittest import mock

from dblock.core import runtime
from dblock.core.acquire import handover
from dblock.core.acquire.acquiring import acquire
from dblock.core.acquire.request import Request
from dblock.core.acquire.sharing import Sharing, held_shares, share
from dblock.core.acquire.waiting import Attempt
from dblock.core.deliveries import deliveries
from dblock.core.errors import LockError, LockNotHeld, Reason
from dblock.core.holding.flow import Hold, current_task
from dblock.core.lock.base import BaseLock
from dblock.core.lock.bookkeeping import find_out
from dblock.core.lock.leading import BaseLeader
from dblock.core.lock.permits import BaseSemaphore
from dblock.core.lock.rwlock import NoLock
from dblock.core.protocol import tenures
from dblock.core.protocol.drive import adrive, drive
from dblock.core.protocol.steps import Steps
from dblock.core.protocol.store import Store
from dblock.core.validation import valid_key, valid_text, valid_ttl
from dblock.core.values import Grant, KeyKind, Seconds
from dblock.faces import made
from dblock.operating.administration import force_release

TTL: Final = 300.0
"""Seconds for which a key stays busy at most on a real database, where a test that was killed frees nothing."""
ENDLESS: Final = 1e8
"""Seconds for which it does in memory, where nobody renews it."""
STRANGER: Final = "stranger"
"""What the owner tokens of others begin with."""
PATIENCE: Final = 5.0
"""Seconds for which a test waits for its callbacks to end, and a stranger for a database that is slow."""
Asked = BaseLock | BaseSemaphore[Any] | NoLock[Any, Any] | BaseLeader
"""A lock, a semaphore, a read-write lock, or a candidate."""


class Busy:
    """Somebody else who holds a key, for a block: `with`, or `async with`."""

    def __init__(self, store: Store, request: Request, lock: BaseLock | None) -> None:
        """`lock` acquires what is held; without it the key is, by a writer if it is that of a read-write lock."""
        self._key, self._store, self._request, self._lock = request.key, store, request, lock
        self._grants: list[Grant] = []

    def _begin(self) -> Steps[None]:
        lock, database = self._lock, self._store.database
        info = yield from tenures.inspect(database, self._key)
        kind = lock._kind if lock is not None else KeyKind(info.kind) if info is not None else KeyKind.LOCK
        if kind is KeyKind.SEMAPHORE and lock is None:
            raise TypeError(f"{self._key!r} is the key of a semaphore: give busy() the semaphore itself")
        reading = 0 if lock is None else lock._reading
        if kind is not KeyKind.LOCK and not reading:
            shares = yield from held_shares(database, self._key, until=database.now() + PATIENCE)
            if shares:
                info = yield from tenures.inspect(database, shares[0])
        if info is not None and info.state == "held":
            raise RuntimeError(f"cannot make {self._key!r} busy: it is held by {info}")
        site, request = runtime.current.site(self._store), self._request._replace(kind=int(kind), reading=reading)
        # The first statement may have to open a connection.
        attempt = Attempt(request, site, PATIENCE)
        if lock is not None:
            found = yield from lock._take(attempt)
        else:
            found = yield from (
                share(Sharing(attempt), Sharing.write) if kind is KeyKind.READ_WRITE else acquire(attempt)
            )
        if not isinstance(found, Grant):
            raise RuntimeError(f"cannot make {self._key!r} busy: others were faster")  # noqa: TRY004 - no wrong type
        self._grants = [found, *getattr(lock, "_granted", ())]

    def _end(self) -> Steps[None]:
        grants, self._grants = self._grants, []
        for grant in grants:
            with contextlib.suppress(LockError):  # it ends by itself
                _ = yield from handover.end(runtime.current.site(self._store), grant)

    def __enter__(self) -> Self:
        if not _in_memory(self._store) and current_task() is not None:
            raise RuntimeError(f"busy({self._key!r}) asks the database: on an event loop write `async with`")
        drive(self._begin())
        return self

    def __exit__(self, *_: object) -> None:
        drive(self._end())

    async def __aenter__(self) -> Self:
        await adrive(self._begin())
        return self

    async def __aexit__(self, *_: object) -> None:
        await adrive(self._end())


def busy(
    key: str | Asked, bind: Any = None, *, ttl: Seconds | None = None, label: str = "", host: str = "elsewhere"
) -> Busy:
    """Somebody else on another machine holds the key in this block, a `with` or an `async with`.

    In memory nobody waits for real for that: the `timeout` of a waiter is over at once.

    Args:
        key: what is held. The key of a lock; or the lock itself, a semaphore, all permits of which are held, a
            read-write lock, which a writer holds, or a candidate of `db_leader`, beside which another one leads. The
            key of a read-write lock will do once it has been used.
        bind: the database alias, Engine or AsyncEngine where; by default where Django's `db_lock` has its keys. Of no
            account in memory, and for a lock itself.
        ttl: the holder has died, and the key is free after so many seconds, of the clock of locks in memory or of the
            real one. By default it is held as long as the block lasts (on a real database, for five minutes at most).
        label: what the holder says of itself.
        host: where it runs.

    Raises:
        RuntimeError: the key is held.
        TypeError: it is the key of a semaphore, whose number of permits no row knows; or several keys at once.
    """
    seconds = None if ttl is None else valid_ttl(ttl)
    label, host = valid_text(label, "label"), valid_text(host, "host")
    if hasattr(key, "_members"):
        raise TypeError("busy() takes one key: have a busy(...) of its own for each key of db_locks() or of a majority")
    lock: Any = key if isinstance(key, BaseLock) else key.write() if isinstance(key, NoLock) else None
    if isinstance(key, BaseLeader):
        lock = key._lock
    if isinstance(key, BaseSemaphore):
        lock = key.permit()
        vars(lock)["_wanted"] = key.permits
    name = valid_key(key) if lock is None else lock.key
    store = _store(name, bind) if lock is None else lock._place.store()
    lease = (ENDLESS if _in_memory(store) else TTL) if seconds is None else seconds
    return Busy(store, Request(name, lease, lease, label, 1, STRANGER, host, 1, "", "somebody else", ""), lock)


def take_away(key: str) -> None:
    """Free a key that this process holds, as an administrator might, and let the holder know.

    Its `state` is `lost`, `check()` and the end of its `with` raise LockLost, and `on_lost` has been called. Raises
    LockNotHeld if no flow of this process holds it. On an event loop `atake_away` does it.
    """
    for hold in _holds(key):
        if not _in_memory(hold.store) and (hold.store.asynchronous or current_task() is not None):
            raise RuntimeError(f"take_away({key!r}) asks the database: on an event loop write `await atake_away(...)`")
        drive(_taking_away(hold))
    await_callbacks()


async def atake_away(key: str) -> None:
    """The asynchronous twin of `take_away`; `on_lost` may still be running."""
    for hold in _holds(key):
        await adrive(_taking_away(hold))


@contextmanager
def frozen_renewal() -> Generator[None]:
    """No lease of this process is renewed in this block, as if the database did not answer.

    A lock that is held reads `at_risk` when half of its ttl has passed and `lost` before the end of it, in memory by
    the clock that the test moves, else by the real one.
    """

    def keep_back(_keeper: Any, holds: list[Hold]) -> None:
        for hold in holds:
            hold.lease.reason_if_lost = Reason.UNREACHABLE

    with mock.patch.object(runtime.current.watchdog, "_renew", keep_back):
        yield


def await_callbacks() -> None:
    """Wait until the callbacks have ended that were told of a lost lock, or of one at risk."""
    _ = deliveries.flush(PATIENCE)


def _holds(key: str) -> list[Hold]:
    """The holds of this process."""
    found = [hold for hold in list(runtime.current.watchdog._holds) if hold.key == key]
    if not found:
        raise LockNotHeld(f"cannot take {key!r} away: no thread or task of this process holds it", key=key)
    return found


def _taking_away(hold: Hold) -> Steps[None]:
    """As by `force_release`; and its holder finds out now, not by its next renewal."""
    (key, _, fence), watchdog = hold.tenure, runtime.current.watchdog
    _ = yield from force_release(hold.store, key, fence, "taken away by a test")
    yield from find_out(hold)
    _ = watchdog.discard(hold)
    runtime.current.site(hold.store).local_queues.released(key)


def _in_memory(store: Store) -> bool:
    """Whether the test moves its clock."""
    return store is runtime.current.store_override


def _store(key: str, bind: Any) -> Any:
    """Where the locks of an alias or an engine live."""
    if runtime.current.store_override is not None:
        return runtime.current.store_override
    try:
        return made(bind, "db_lock", key)._place.store()
    except ModuleNotFoundError as error:
        raise TypeError("without Django say where: busy(key, engine), or record(engine)") from error
