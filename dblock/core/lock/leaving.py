"""Leaving a lock: at the end of a `with`, by release() or detach(), at the end of a transaction, or by release_all().

Rule: an entry is left once, whatever interrupts that; with the last one the hold is removed before the row is changed.
"""

from __future__ import annotations

import contextlib
from functools import partial
from typing import Any

from dblock.core import runtime
from dblock.core.acquire import handover
from dblock.core.errors import AWAY, LockError, LockLost, LockStoreError, Loss, Reason
from dblock.core.holding.flow import Block, Entry, Hold
from dblock.core.lock.base import BaseLock
from dblock.core.lock.bookkeeping import find_out, forget, innermost, take_out
from dblock.core.observing.observers import leave_and_report
from dblock.core.protocol import tenures
from dblock.core.protocol.steps import Steps, at_once, undone
from dblock.core.protocol.store import Store
from dblock.core.tokens import Token, new_secret, token_text

Entered = list[tuple[Any, Block]]
"""Locks, and how each was entered, in the order in which they are left."""


def leave_block(lock: BaseLock, block: Block) -> Steps[None]:
    """Leave a `with` of this very lock object, whatever the state of its hold."""
    if lock.forked_from is not None:
        raise lock._not_held("release")
    entry, hold = block

    def leave() -> Steps[None]:
        try:
            if hold.detached:
                return
            if entry in hold.entries:
                yield from leave_entry(lock, hold, entry)
            else:  # left by release()
                yield from release(lock)
        finally:
            lock._blocks = [each for each in lock._blocks if each.entry is not entry]

    def leave_interrupted() -> Steps[None]:
        with contextlib.suppress(LockError):  # nothing replaces the interrupt
            yield from leave_entry(lock, hold, entry)

    return undone(leave, leave_interrupted, LockError)


def end_block(lock: BaseLock, opened: list[Block]) -> Steps[None]:
    """Leave the `with` that ends: the only one of those `opened` for its end that is open, else the innermost.

    A `with` belongs to the lock object: if this flow holds nothing, it is that of another one, where that can be told.
    """
    opened[:] = filter(lock._blocks.__contains__, opened)
    if len(opened) == 1:
        return leave_block(lock, opened.pop())
    flow = lock._running_flow()
    mine = [block for block in lock._blocks if block.hold.flow() is flow]
    if not mine and lock._hold_here() is None and (blocks := lock._open_blocks()):
        mine = [innermost([(block.hold.flow, block) for block in blocks], [lock.key])[1]]
    return leave_block(lock, mine[-1]) if mine else release(lock)


def leave_each(entered: Entered, error: BaseException | None = None, store: Store | None = None) -> Steps[None]:
    """Leave several locks at once: those of `db_locks`, or permits. Raises an interrupt, else the first error.

    Each is left, whatever leaving another one raises, and also if an interrupt comes between two of them. A database
    that could not release one of them is asked for no other: the rest ends with its leases.

    With `error`, which its caller raises, an error of a lock becomes a note on that; `store`: the one that it is of.
    """
    errors = [error] if error is not None else []
    away: dict[Store, LockError] = {store: error} if store is not None and isinstance(error, AWAY) else {}

    def leave_those(those: Entered) -> Steps[None]:
        for lock, block in those:
            block.hold.away = away.get(block.hold.store)
            try:
                yield from leave_block(lock, block)
            except LockError as raised:
                failed = raised.__cause__ if isinstance(raised, LockLost) else raised
                if isinstance(failed, AWAY):
                    _ = away.setdefault(block.hold.store, failed)
                if errors:
                    errors[0].add_note(str(raised))
                errors.append(raised)
            finally:
                block.hold.away = None

    def leave_rest() -> Steps[None]:
        return leave_those([each for each in entered if each[1].entry in each[1].hold.entries])

    yield from undone(partial(leave_those, entered), leave_rest)
    if errors and error is None:
        raise errors[0]


def release(lock: BaseLock) -> Steps[None]:
    """Leave this flow's hold."""
    entry, hold = block_to_release(lock)
    yield from leave_entry(lock, hold, entry)


def block_to_release(lock: BaseLock) -> Block:
    """What release() leaves: the last entry that is not a `with`, if there is one, else the last."""
    hold = lock._own_hold("release")
    return Block(next((each for each in reversed(hold.entries) if each.kind != "with"), hold.entries[-1]), hold)


def leave_entry(lock: BaseLock, hold: Hold, left: Entry) -> Steps[None]:
    """Leave one entry of this flow, if that has not happened yet; an open transaction may defer the last one.

    Raises LockLost if the lease is over.
    """
    if left not in hold.entries:
        return at_once(None)
    return leave_and_report(hold, lock._leaves(hold, left), "released")


def detach(lock: BaseLock, secret: str = "", ttl: float | None = None) -> Steps[str]:
    """Leave the hold to the bearer of the returned token, for one `ttl`, by default the hold's own.

    `secret`: that of the token, if it has been given away already. Raises LockLost if the lease is over.
    """
    hold = lock._own_hold("detach")
    steps = _detach(lock, hold, secret or hold.secret or new_secret(), ttl)
    return (yield from leave_and_report(hold, steps, "detached"))


def _detach(lock: BaseLock, hold: Hold, secret: str, ttl: float | None) -> Steps[str]:
    _, lease = lock._surely_held(), hold.lease
    database, watchdog = hold.store.database, runtime.current.watchdog
    if len(hold.open_entries()) > 1 or hold.deferred:
        inside = "a transaction keeps it" if hold.deferred else "it is entered more than once here"
        why = f"{lock._key!r} cannot be detached while {inside}: the token passes on all of it, to one bearer"
        raise LockError(why, key=lock._key)
    token = Token(hold.tenure._replace(owner=secret), lease.ttl, lease.grace, hold.min_hold, kind=hold.kind)
    life = (lease.ttl if ttl is None else ttl) + lease.grace
    hold.secret = secret

    def give_to_bearer() -> Steps[Loss | None]:
        if not watchdog.discard(hold):  # release_all() was faster
            raise lock._lost(hold)
        detached = yield from tenures.detach(database, hold.tenure, secret, life)
        return None if detached else (yield from tenures.why_lost(database, hold.tenure))

    def watch_again() -> None:
        if lease.loss is None:  # else it is told, or release_all() releases it
            _ = watchdog.add(hold)  # its next renewal finds out whether it is handed over

    loss = yield from undone(give_to_bearer, watch_again)
    if loss is not None and loss.reason is not Reason.USED:  # used: the first sending was not answered
        lease.explain(loss)
        raise lock._lost(hold)
    hold.detached = True
    take_out(hold)
    hold.entries = []
    runtime.current.site(hold.store).local_queues.released(hold.tenure.key)
    return token_text(token)


def finish(hold: Hold) -> Steps[None]:
    """Release a hold whose transaction has ended, unless its flow has entered it again."""

    def steps() -> Steps[None]:
        hold.kept_by = ()
        if not hold.entries:
            released = yield from leave(hold, [])
            # In SQLite a rollback undoes a take that was part of the transaction: nothing was lost.
            if not (released or hold.store.database.dialect.single_writer):
                yield from find_out(hold)

    return leave_and_report(hold, steps(), "released")


def release_all(store: Store) -> Steps[int]:
    """Release all locks that this process holds in one database; returns their number.

    A flow that still works under one of them finds it lost before another flow can get it.
    """
    current = runtime.current
    return (yield from current.give_back(store, current.watchdog.give_up(store)))


def leave_once(lock: BaseLock, hold: Hold, left: Entry) -> Steps[None]:
    """Leave one entry of a hold that is one row."""
    in_time = hold.lease.remaining() > 0
    if not in_time:
        runtime.current.watchdog.announce(hold)
    kept, through = hold.open_entries(but=left), left.lock or lock
    put_off = in_time and (through._place.defers(through, hold, last=not kept) or hold.deferred)
    hold.leaving = through
    if put_off and not kept:
        hold.entries = kept
        return
    try:
        released = yield from leave(hold, kept)
    except LockStoreError as failed:
        if in_time:
            raise
        raise lock._lost(hold) from failed
    if not (released and in_time):
        untold = None
        if not (released or hold.away or (hold.lease.loss and hold.lease.loss.reason is Reason.RELEASED)):
            untold = yield from find_out(hold)
        raise lock._lost(hold) from untold
    hold.leaving = None


def leave(hold: Hold, kept: list[Entry]) -> Steps[object]:
    """Leave an entry, in the flow and in the row, but for those `kept`; the answer is false if the tenure was over.

    With the last entry the hold is removed: whatever the result of the statement, this flow no longer holds the key. A
    flow of this process that begins to wait from now on expects no hand-over; earlier ones are in the local queue.
    """
    if not kept:
        forget(hold)
    hold.entries, lease = kept, hold.lease
    if lease.loss is not None and lease.loss.reason is Reason.RELEASED:
        return at_once(False)  # release_all() releases it
    if lease.grace and lease.remaining() <= 0:  # a release would open the key before the grace is over
        return at_once(False)
    if hold.away is not None:
        why = f"{hold.shown!r} is left to its lease, as its database is away"
        raise LockStoreError(why, key=hold.key) from hold.away
    if kept:
        return tenures.set_count(hold.store.database, hold.tenure, len(kept))
    return handover.pass_on(runtime.current.site(hold.store), hold.grant, min_hold=hold.min_hold)
