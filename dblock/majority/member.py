"""Steps of a majority lock on one of its databases.

What is held there is an ordinary hold of the calling flow, which the watchdog renews.

Rule: a tenure that was begun is returned, held or given back, whatever interrupts the steps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar, cast

from dblock.core import runtime
from dblock.core.acquire import handover
from dblock.core.acquire.request import Refused
from dblock.core.acquire.slow import SlowWait
from dblock.core.acquire.waiting import Attempt
from dblock.core.errors import (
    LockError,
    LockLost,
    LockNotHeld,
    LockStoreError,
    StoreBusy,
    StoreConflict,
    StoreUnanswered,
    StoreUnreachable,
)
from dblock.core.holding.flow import Block, Flow, Hold
from dblock.core.lock import entering, leaving, operations
from dblock.core.lock.base import BaseLock
from dblock.core.lock.refusals import quarantined
from dblock.core.protocol import tenures
from dblock.core.protocol.steps import Rows, Steps, undone
from dblock.core.values import Grant, LockInfo
from dblock.majority import protocol

if TYPE_CHECKING:
    from dblock.core.protocol.sending import Database
    from dblock.core.protocol.store import Store

T = TypeVar("T")


class No(NamedTuple):
    """A database has not granted."""

    why: str
    held: LockInfo | None = None
    """The holder, if somebody else has it."""
    busy: bool = False
    """Whether it can be asked: others have the key."""


def take(
    lock: BaseLock, timeout: float | None, proposed: int = 0, slow_wait: SlowWait | None = None
) -> Steps[Grant | No]:
    """Take the key in one database, if that counts (`protocol.standing`); with the proposed fence if it is free.

    Raises StoreBusy if nobody holds it, and a transaction keeps it from being taken.
    """
    store = lock._store()
    database = store.database
    said: Rows = ()
    found: Grant | Refused | None = None
    likely = runtime.current.site(store).expects_contention(lock.key)
    if proposed and not likely and runtime.current.watchdog.hold_of(store, lock.key) is None and database.answers():
        found, said = yield from _take_at_once(lock, proposed)
    if found is None:
        found = yield from _take_or_wait(lock, timeout, slow_wait or SlowWait())
    if isinstance(found, Refused):
        return (yield from _why_not(lock, found))
    undo = partial(give_back, lock, found.tenure.owner)
    left = yield from undone(partial(protocol.standing, database, lock._ttl, _soon(database), said), undo)
    if not left:
        return found
    yield from undo()
    return No(f"new, or restarted: counts in {left:.1f} s")


def _take_at_once(lock: BaseLock, proposed: int) -> Steps[tuple[Grant | None, Rows]]:
    """Take a key that is free, with what its database says of itself."""
    store, flow = lock._store(), cast("Flow", lock._flow)
    request = entering.request_of(lock, store, flow, lock._ttl)
    owner, database = request.new_owner(), store.database
    taking = partial(protocol.take, database, request.parameters(owner), proposed, _soon(database))
    try:
        found = yield from undone(taking, partial(give_back, lock, owner), but=LockStoreError)
    except (StoreConflict, StoreUnreachable):
        return None, ()
    except StoreUnanswered:
        _ = runtime.current.waiter_services(store).withdraw(lock.key, owner)
        raise
    return found or (None, ())


def _take_or_wait(lock: BaseLock, timeout: float | None, slow_wait: SlowWait) -> Steps[Grant | Refused]:
    store, flow = lock._store(), cast("Flow", lock._flow)
    return lock._take(
        Attempt(
            runtime.current.site(store),
            entering.request_of(lock, store, flow, lock._ttl),
            timeout,
            partial(runtime.current.waiter_services, store),
            lambda: [each.tenure.owner for each in flow.holds.values() if not each.lease.loss],
            slow_wait=slow_wait,
            held_in_process=runtime.current.watchdog.hold_of(store, lock.key) is not None,
        )
    )


def _why_not(lock: BaseLock, refused: Refused) -> Steps[No]:
    holder, busy = refused
    if busy is not None:
        raise busy
    if holder is not None and holder.state == "held":
        return No(f"held by {holder}", holder.masked(), busy=True)
    if closed := (yield from quarantined(lock, refused)):
        return No(closed)
    if holder is None:
        return No("others were faster", busy=True)
    raise StoreBusy("nobody holds it, but somebody's transaction guards it or has locked its row", key=lock.key)


def confirm(lock: BaseLock, grant: Grant, fence: int, until: float) -> Steps[Grant | None]:
    """Confirm a tenure; one that is not known to be confirmed is given back."""
    confirming = partial(protocol.confirm, lock._store().database, grant, fence, lock._ttl, until)
    return undone(confirming, partial(give_back, lock, grant.tenure.owner, again=True))


def give_back(lock: BaseLock, owner: str, *, again: bool = False) -> Steps[None]:
    """Free the tenure of an attempt, whichever fence it has; raises nothing. `again`: a statement may be under way."""
    return handover.undo_take(runtime.current.site(lock._store()), lock.key, owner, again=again)


def undo(lock: BaseLock, found: object) -> Steps[None]:
    """Give back what a database has granted too late."""
    if isinstance(found, Grant):
        yield from give_back(lock, found.tenure.owner)


def hold(lock: BaseLock, flow: Flow, grant: Grant, kind: str, alive: Callable[[], object]) -> Steps[Hold]:
    """Hold what has been confirmed, for the flow, until `alive` gives None; no I/O."""
    found = yield from entering.acquire(lock, None, kind, flow, granted=grant, end=alive)
    return cast("Hold", found)


def leave(lock: BaseLock, held: Hold) -> Steps[bool]:
    """Leave what is held of one database; False if it was lost."""
    return _kept(leaving.leave_entry(lock, Block(entry, held)) for entry in held.entries)


def extend(ttl: float, lock: BaseLock, held: Hold) -> Steps[bool]:
    """Let the lease in one database end `ttl` seconds from now; False if it was lost."""
    database = held.store.database
    longest = protocol.standing(database, ttl, _soon(database))
    return _kept(iter([longest, operations.extend(lock, ttl)]))


def verify(lock: BaseLock, _: Hold) -> Steps[bool]:
    """Whether the row of one database still shows the tenure."""
    return _kept(iter([operations.verify(lock)]))


def _kept(several: Iterator[Steps[Any]]) -> Steps[bool]:
    """Whether these steps, one after the other, find the tenure there."""
    try:
        for steps in several:
            yield from steps
    except (LockLost, LockNotHeld):
        return False
    return True


def look(lock: BaseLock, limit: float) -> Steps[LockInfo | None]:
    """The row of one database."""
    database = lock._store().database
    return tenures.look(database, lock.key, database.now() + limit)


def short(error: LockError, store: Store) -> str:
    """An error without its advice, and without the name of its database, which is shown beside it."""
    text = str(error).partition(";")[0]
    for name in (getattr(store, "_described", ""), store.name):
        text = text.replace(f" to {name}:", ":", 1).removeprefix(f"{name}: ").removeprefix(f"{name} ")
    return text


def listed(answers: Mapping[str, str]) -> str:
    """What each database has said, in one line."""
    return "; ".join(f"{name}: {answer}" for name, answer in answers.items())


def _soon(database: Database) -> float:
    """The local time until which a statement without waiting is tried."""
    return database.now() + database.timing.single_try
