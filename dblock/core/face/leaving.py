"""Leaving a lock: by the end of a `with`, by hand, when a transaction ends, to the bearer of a token, or all at once.

Rule: an entry is left once, whatever interrupts that; the last one's hold is forgotten before the database is told.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, TypeVar

from dblock.core import runtime
from dblock.core.acquire import handover
from dblock.core.errors import LockError, Reason, StoreBusy
from dblock.core.face.base import BaseLock
from dblock.core.face.bookkeeping import find_out, forget, freed, site_of
from dblock.core.holding.flow import Block, Entry, Hold
from dblock.core.log import warn
from dblock.core.protocol import tenures
from dblock.core.protocol.steps import Steps
from dblock.core.protocol.store import Store
from dblock.core.runtime import current_flow
from dblock.core.tokens import Token, token_text

if TYPE_CHECKING:
    from dblock.core.events import How

T = TypeVar("T")


def leave_block(lock: BaseLock) -> Steps[None]:
    """Leave the innermost `with` of this very lock, whatever has become of its hold.

    It belongs to the lock object: where the flow that leaves holds nothing, it is the only one that is open, wherever
    that was entered (a pool of threads may run the end of a block elsewhere than its beginning).
    """
    if lock.forked_from is not None:
        raise lock._forked()
    block = _innermost(lock)
    try:
        yield from release(lock) if block is None else _leave_block(lock, block)
    except (GeneratorExit, LockError):
        raise
    except BaseException:  # interrupted: a block is left once
        if block is not None and block.entry in block.hold.entries:
            with contextlib.suppress(LockError):
                yield from _release(lock, block.hold, block.entry)
        raise
    finally:
        if block is not None:
            lock._blocks = [each for each in lock._blocks if each is not block]


def release(lock: BaseLock) -> Steps[None]:
    """Leave the hold of this flow by the last entry that is not a `with`, if there is such."""
    if lock.forked_from is not None:
        raise lock._forked()
    hold = lock._own_hold("release")
    last = next((each for each in reversed(hold.entries) if each.kind != "with"), hold.entries[-1])
    yield from _release(lock, hold, last)


def detach(lock: BaseLock) -> Steps[str]:
    """Leave the innermost entry to whoever bears the token that this returns; raises LockLost if the lease is over."""
    if lock.forked_from is not None:
        raise lock._forked()
    hold = lock._own_hold("detach")
    return (yield from _observed(hold, _detach(lock, hold), "detached"))


def _detach(lock: BaseLock, hold: Hold) -> Steps[str]:
    _ = lock._surely_held()
    entry, kept = hold.entries[-1], hold.entries[:-1]
    staying = max(len(kept), int(hold.deferred))  # what a transaction keeps counts as one entry, if there is no other
    database, count = hold.store.database, staying + 1 if hold.shared_entries is None else 0
    if not (
        yield from tenures.detach(database, hold.tenure, hold.lease.ttl, hold.lease.grace, count=count, who=hold.who)
    ):
        yield from find_out(hold)
        raise lock._lost(hold)
    hold.shared_entries = hold.shared_entries or 0
    hold.unused_tokens += bool(staying)
    entry.detached = True
    if not staying:
        forget(hold)
    hold.entries = kept
    if not staying:
        freed(hold)
    return token_text(Token(hold.tenure, hold.lease.ttl, hold.lease.grace, hold.min_hold))


def share(lock: BaseLock) -> str:
    """A token with which others may enter beside this flow, while somebody is in: who leaves last frees the key."""
    hold = lock._own_hold("share")
    _ = lock._surely_held()
    hold.shared_entries = hold.shared_entries or 0
    return token_text(Token(hold.tenure, hold.lease.ttl, hold.lease.grace, hold.min_hold))


def finish(hold: Hold) -> Steps[None]:
    """The transaction that kept a hold has ended: give it back, unless its flow has entered it again."""
    return _observed(hold, _finish(hold))


def _finish(hold: Hold) -> Steps[None]:
    hold.kept_by = ()
    if not hold.entries:
        try:
            forget(hold)
            released = yield from leave(hold)
        except (GeneratorExit, LockError):
            raise
        except BaseException:
            yield from _leave_after_all(hold)
            raise
        # In SQLite a rollback takes back a take that was part of the transaction: nothing was lost.
        if not (released or hold.store.database.dialect.single_writer):
            yield from find_out(hold)


def release_all(store: Store) -> Steps[int]:
    """Give back all that this process holds in one database; how many.

    Whoever still works under one of them has lost it before anybody else can have it. A row that somebody has locked is
    passed over after a while, and a database that fails is not asked again: what is left ends with its lease, which
    nobody renews, if it is not given back by another call, or at the end of the process.
    """
    given = 0
    for hold in runtime.current.watchdog.give_up(store):
        runtime.current.watchdog.giving_back(hold)
        try:
            yield from runtime.leave_for_good(runtime.current.site(store), hold)
            given += 1
        except LockError as error:
            warn("could not give %r back: %s", hold.tenure.key, error)
            if not isinstance(error, StoreBusy):
                break
        finally:
            freed(hold)
    return given


def _innermost(lock: BaseLock) -> Block | None:
    """The `with` of this very lock that ends now; None if it has none, or has left it otherwise."""
    flow = current_flow()
    here = [block for block in lock._blocks if block.hold.flow() is flow]
    if here or lock._hold_here() is not None:
        return here[-1] if here else None
    blocks = lock._open_blocks()
    if len(blocks) > 1:
        for block in blocks:  # somebody's cannot be left any more: it ends with its lease
            block.hold.lease.renewing = False
        raise lock._not_held("leave", of=len(blocks))
    return blocks[0] if blocks else None


def _leave_block(lock: BaseLock, block: Block) -> Steps[None]:
    """Leave by an open `with`, unless that was handed over, or its hold released by hand."""
    entry, hold = block
    if entry.detached:
        return
    if entry not in hold.entries:  # it was released by hand
        yield from release(lock)
        return
    flow = hold.flow()
    if flow is not None and flow.holds.get((hold.store, hold.tenure.key)) is not hold:
        # Its tenure had ended, and another one has begun since.
        hold.entries = [each for each in hold.entries if each is not entry]
        raise lock._lost(hold)
    yield from _release(lock, hold, entry)


def _release(lock: BaseLock, hold: Hold, left: Entry) -> Steps[None]:
    """Leave one entry, the last one when an open transaction has ended; raises LockLost if the lease is over."""
    return _observed(hold, _leave_entry(lock, hold, left))


def _observed(hold: Hold, steps: Steps[T], how: How = "released") -> Steps[T]:
    observers = runtime.current.watchdog.observers
    return steps if observers is None else observers.leave(hold, steps, how)


def _leave_entry(lock: BaseLock, hold: Hold, left: Entry) -> Steps[None]:
    in_time = hold.lease.remaining() > 0
    if not in_time:
        runtime.current.watchdog.announce(hold)
    kept, through = hold.open_entries(but=left), left.lock or lock
    put_off = in_time and (through._defers(hold, last=not kept) or hold.deferred)
    if put_off and not kept:
        hold.leaving, hold.entries = through, kept
        return
    try:
        if not kept:
            forget(hold)
        hold.leaving, hold.entries = through, kept
        if not in_time and hold.lease.grace:  # freeing the row would open the key before its time
            released = False
        else:
            released = yield from leave(hold)
    except (GeneratorExit, LockError):
        raise
    except BaseException:
        hold.entries = kept
        yield from _leave_after_all(hold)
        raise
    if not (released and in_time):
        if not released:
            yield from find_out(hold)
        raise lock._lost(hold)
    hold.leaving = None


def leave(hold: Hold) -> Steps[bool]:
    """Tell the database that an entry was left; False if the tenure was over before.

    The last one's hold has been forgotten: whatever becomes of the statement, this flow holds the key no more. Whoever
    begins to wait in this process from now on expects no hand-over; who did before is in the local queue.
    """
    if hold.lease.loss is not None and hold.lease.loss.reason is Reason.RELEASED:
        return False  # whoever gave it up gives it back, all of its entries
    if hold.entries:
        return (yield from _lower(hold))
    if hold.shared_entries is None and not hold.min_hold:
        return (yield from handover.pass_on(site_of(hold), hold.held))
    try:
        return (yield from _lower(hold))
    finally:
        freed(hold)


def _lower(hold: Hold) -> Steps[bool]:
    """Lower the count in the row by one; False if the tenure was over before."""
    database, entered = hold.store.database, len(hold.entries)
    if hold.unused_tokens and not entered and (yield from _unused(hold)):
        # It is left to the bearer of a token, who has one more ttl.
        count = 0 if hold.shared_entries else 1
        return (
            yield from tenures.detach(
                database, hold.tenure, hold.lease.ttl, hold.lease.grace, count=count, who=hold.who
            )
        )
    alone = hold.shared_entries is None
    if not alone or (hold.min_hold and not entered):
        return (yield from handover.leave(site_of(hold), hold.tenure, hold.min_hold, alone=alone))
    return (yield from handover.release(site_of(hold), hold.held, entered + 1))


def _leave_after_all(hold: Hold) -> Steps[None]:
    """Interrupted while an entry was being left: it is left, where sending that twice is harmless."""
    entered, over, loss = len(hold.entries), hold.lease.remaining() <= 0, hold.lease.loss
    if not entered:
        forget(hold)
    if loss is not None and loss.reason is Reason.RELEASED:
        return  # whoever gave it up gives it back
    if hold.shared_entries is not None or (hold.lease.grace and over):
        return  # it ends with its lease
    with contextlib.suppress(LockError):  # nothing replaces the interrupt
        if hold.min_hold and not entered:
            _ = yield from handover.leave(site_of(hold), hold.tenure, hold.min_hold, alone=True)
        else:
            _ = yield from handover.free(site_of(hold), hold.held, entered + 1)


def _unused(hold: Hold) -> Steps[bool]:
    """Has nobody come yet with a token of this tenure? Whoever attaches writes into the row who that is."""
    info = yield from tenures.look(hold.store.database, hold.tenure.key)
    if info is None:
        return False
    who = info.identity
    return (who.host, who.pid, who.thread) == (hold.who["host"], hold.who["pid"], hold.who["thread"])
