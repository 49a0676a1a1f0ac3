"""What can be done with a lock, each operation written once, as steps for whoever drives them.

Rule: a function here acts for the flow that runs it, on that flow's hold and on no other's.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from typing import Any, TypeVar, cast

from dblock.core import runtime
from dblock.core.acquire import acquiring, handover
from dblock.core.acquire.acquiring import Refused
from dblock.core.acquire.local_queue import Request
from dblock.core.acquire.site import Site
from dblock.core.errors import LockError, LockStoreError, Reason, StaleSnapshot, StoreBusy
from dblock.core.face.base import BaseLock
from dblock.core.holding.flow import Block, Entry, Flow, Hold
from dblock.core.holding.lease import Loss
from dblock.core.identity import celery_task_id
from dblock.core.log import warn
from dblock.core.protocol import tenures
from dblock.core.protocol.drive import Store
from dblock.core.protocol.steps import Execute, Rows, Steps
from dblock.core.protocol.tenures import Database
from dblock.core.runtime import current_flow
from dblock.core.statements.base import Values
from dblock.core.tokens import Sequencer, Token, token_text
from dblock.core.values import Grant, LockInfo, margin

L = TypeVar("L", bound=BaseLock)


def acquire(lock: BaseLock, timeout: float | None, kind: str = "acquire") -> Steps[Refused | None]:
    """None when acquired; else why not."""
    if lock.forked_from is not None:
        raise lock._forked()
    store, flow, ttl = lock._store(), current_flow(), lock._ttl
    database, place, entry = store.database, (store, lock._key), Entry(lock, kind)
    hold = flow.holds.get(place)
    if hold is not None and hold.is_snapshot:
        hold = None  # a callback that looks at its lock's hold is a flow of its own
    if hold is not None:
        if (yield from _reenter(lock, database, hold, ttl, entry)):
            return None
        _ = hold.lease.lose(Loss(Reason.EXPIRED))  # a new tenure follows; whoever entered before has lost this one
        runtime.current.watchdog.announce(hold)
    options, site = lock.options, runtime.current.site(store)
    request = Request(
        key=lock._key,
        ttl=ttl,
        life=ttl + options.grace,
        label=options.label,
        fair=int(options.fair),
        flow=flow.name,
        task=celery_task_id(),
        **flow.who,
    )
    found: Grant | Refused | None = None
    try:
        found = yield from acquiring.acquire(
            site,
            request,
            timeout,
            functools.partial(runtime.current.attendant, store),
            held_in_process=runtime.current.watchdog.holds(store, lock._key),
            held=lambda: [other.tenure.owner for other in flow.holds.values() if other.lease.loss is None],
        )
        if isinstance(found, Grant):
            _ = _begin(lock, flow, found, entry, hold)
            return None
    except BaseException:
        known = flow.holds.get(place)
        # Interrupted when it was granted, and not held yet?
        if isinstance(found, Grant) and (known is None or known.tenure != found.tenure):
            with contextlib.suppress(LockError):
                yield from handover.give_back(site, lock._key, found.tenure.owner)
        raise
    return found


def enter(lock: BaseLock) -> Steps[None]:
    hold = lock._hold()
    if hold is not None and hold.entries[-1].kind == "attach" and hold.entries[-1].lock is lock:
        hold.entries[-1] = Entry(lock, "with")
    else:
        refused = yield from acquire(lock, lock._timeout, "with")
        if refused is not None:
            raise lock._timed_out(refused) from refused.busy
        hold = cast("Hold", lock._hold_here())
    lock._blocks.append(Block(hold.entries[-1], hold))


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


def release(lock: BaseLock) -> Steps[None]:
    """Leave the hold of this flow by the last entry that is not a `with`, if there is such."""
    if lock.forked_from is not None:
        raise lock._forked()
    hold = lock._own_hold("release")
    last = next((each for each in reversed(hold.entries) if each.kind != "with"), hold.entries[-1])
    yield from _release(lock, hold, last)


def _release(lock: BaseLock, hold: Hold, left: Entry) -> Steps[None]:
    in_time = hold.lease.remaining() > 0
    if not in_time:
        runtime.current.watchdog.announce(hold)
    kept, through = hold.open_entries(but=left), left.lock or lock
    if not kept and in_time and through._defers(hold):
        hold.leaving, hold.entries = through, kept
        return
    try:
        if not kept:
            _forget(hold)
        hold.leaving, hold.entries = through, kept
        if not in_time and hold.lease.grace:  # freeing the row would open the key before its time
            released = False
        else:
            released = yield from _leave(hold)
    except (GeneratorExit, LockError):
        raise
    except BaseException:
        hold.entries = kept
        yield from _leave_after_all(hold)
        raise
    if not (released and in_time):
        if not released:
            yield from _find_out(hold)
        raise lock._lost(hold)
    hold.leaving = None


def extend(lock: BaseLock, ttl: float) -> Steps[None]:
    if lock.forked_from is not None:
        raise lock._forked()
    hold = lock._own_hold("extend")
    lock.check()
    database, before = lock._store().database, hold.lease.ttl
    # It may take effect and its answer never come: from now on no more is trusted than the new lease gives.
    hold.lease.reset(ttl, database.now() + ttl - margin(ttl))
    try:
        if hold.shared_entries is None:
            grant = yield from tenures.extend(database, hold.tenure, ttl, hold.lease.grace)
        else:  # others may rely on a longer lease than ours
            sent, alive = yield from tenures.renew(
                database, [(hold.tenure, ttl + hold.lease.grace)], database.now() + database.timing.patience
            )
            grant = Grant(hold.tenure, sent, ttl) if alive is None else None
    except BaseException as error:
        hold.lease.reset(min(before, ttl), hold.lease.trusted_until)
        runtime.current.watchdog.look()
        if isinstance(error, LockStoreError) and hold.lease.remaining() <= 0:
            raise lock._lost(hold) from error
        raise
    if grant is None:
        yield from _find_out(hold)
    if grant is None or not hold.lease.lengthen(grant):
        raise lock._lost(hold)
    runtime.current.watchdog.add(hold)  # it may be due earlier now


def verify(lock: BaseLock) -> Steps[bool]:
    lock.check()
    hold = lock._hold()
    if hold is not None and not (yield from tenures.verify(lock._store().database, hold.tenure)):
        yield from _find_out(hold)
        raise lock._lost(hold)
    return True


def guarding(lock: BaseLock) -> Steps[tuple[Hold, Execute]]:
    """The hold of this flow, and the statement that pins it in the transaction in which it is run."""
    lock.check()
    hold = cast("Hold", lock._hold())
    store = hold.store
    if store.pin is None:
        store.pin = yield from tenures.pin(store.database)
    known = {"key": hold.tenure.key, "fence": hold.tenure.fence, "life": hold.lease.life}
    return hold, Execute(store.pin, Values.of(store.pin, known))


def guarded(lock: BaseLock, hold: Hold, pinned: Rows) -> Steps[None]:
    """See that the hold is still ours, now that its statement `pin` has answered, and that its transaction sees it."""
    if not pinned:
        yield from _find_out(hold)
        raise lock._lost(hold)
    _ = yield from verify(lock)
    if not pinned[0][0]:
        raise StaleSnapshot(
            f"this transaction began to read before {lock._key!r} (fence {hold.tenure.fence}) was taken, so that it "
            "does not see what was written until then: take the lock and then begin the transaction, or call guard() "
            f"before anything else in it, or use READ COMMITTED{lock._who_began()}",
            key=lock._key,
        )


def detach(lock: BaseLock) -> Steps[str]:
    if lock.forked_from is not None:
        raise lock._forked()
    hold = lock._own_hold("detach")
    lock.check()
    database, count = hold.store.database, len(hold.entries) if hold.shared_entries is None else 0
    if not (
        yield from tenures.detach(database, hold.tenure, hold.lease.ttl, hold.lease.grace, count=count, who=hold.who)
    ):
        yield from _find_out(hold)
        raise lock._lost(hold)
    entry, kept = hold.entries[-1], hold.entries[:-1]
    hold.shared_entries = hold.shared_entries or 0
    hold.unused_tokens += bool(kept)
    entry.detached = True
    if not kept:
        _forget(hold)
    hold.entries = kept
    if not kept:
        _freed(hold)
    return token_text(Token(hold.tenure, hold.lease.ttl, hold.lease.grace, hold.min_hold))


def attach(lock: L, token: Token) -> Steps[L]:
    store, flow, tenure = lock._store(), current_flow(), token.tenure
    database, entry = store.database, Entry(lock, "attach")
    attached = yield from tenures.attach(database, tenure, _who_we_are(), token.ttl, token.grace)
    if attached is None:
        loss = Loss(*(yield from tenures.why_lost(database, tenure)))
        raise lock._lost_tenure(tenure.fence, loss)
    grant, count = attached
    hold = flow.holds.get((store, lock._key))
    if hold is not None and hold.tenure == tenure and hold.lease.lengthen(grant):
        hold.shared_entries = count - len(hold.entries) - 1
        hold.entries = [*hold.entries, entry]
    else:
        if hold is not None:
            _ = hold.lease.lose(Loss(Reason.EXPIRED))
        hold = _begin(lock, flow, grant, entry, hold, others=count - 1)
    if hold.lease.remaining() <= 0:  # the answer came too late to be of use
        kept = hold.entries[:-1]
        if not kept:
            _forget(hold)
        hold.entries = kept
        _ = yield from _leave(hold)
        raise lock._lost(hold)
    return lock


def check_sequencer(lock: BaseLock, fence: int) -> Steps[Sequencer]:
    info = yield from inspect(lock)
    if info is None or info.fence != fence or info.state != "held" or not info.owner:  # nobody's, during `min_hold`
        taken = info is not None and info.fence != fence
        given_back = info is not None and not info.owner
        why = Reason.GONE if info is None else Reason.TAKEN_OVER if taken else Reason.EXPIRED
        loss = Loss(Reason.FREED if given_back and not taken else why)
        raise lock._lost_tenure(fence, loss)
    return Sequencer(lock._key, "exclusive", fence)


def owned(lock: BaseLock) -> Steps[bool]:
    hold = lock._hold()
    if hold is None or hold.lease.remaining() <= 0:
        return False
    return (yield from tenures.verify(lock._store().database, hold.tenure))


def locked(lock: BaseLock) -> Steps[bool]:
    info = yield from inspect(lock)
    return info is not None and info.state == "held"


def inspect(lock: BaseLock) -> Steps[LockInfo | None]:
    info = yield from tenures.inspect(lock._store().database, lock._key)
    return None if info is None else info.masked()


def look_after(hold: Hold) -> Steps[None]:
    """A transaction that the tenure was part of may have taken it away."""
    if not (yield from tenures.verify(hold.store.database, hold.tenure)):
        yield from _find_out(hold)


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
            _freed(hold)
    return given


def finish(hold: Hold) -> Steps[None]:
    """The transaction that kept a hold has ended: give it back, unless its flow has entered it again."""
    hold.deferred = False
    if not hold.entries:
        try:
            _forget(hold)
            released = yield from _leave(hold)
        except (GeneratorExit, LockError):
            raise
        except BaseException:
            yield from _leave_after_all(hold)
            raise
        # In SQLite a rollback takes back a take that was part of the transaction: nothing was lost.
        if not (released or hold.store.database.dialect.single_writer):
            yield from _find_out(hold)


def _begin(
    lock: BaseLock, flow: Flow, grant: Grant, entry: Entry, outer: Hold | None, *, others: int | None = None
) -> Hold:
    """The flow holds a tenure from now on."""
    store = lock._store()
    hold = Hold(store, flow, grant, entry, outer if outer and outer.open_entries() else None)
    hold.shared_entries = others
    if store.asynchronous:
        hold.loop = sys.modules["asyncio"].get_running_loop()
    for over in list(flow.holds.values()) if flow.holds else ():
        if over.lease.loss is not None and not over.wanted:  # nobody has left it, and nobody will
            _forget(over)
    try:
        lock._opened(hold)
        runtime.current.watchdog.add(hold)
        flow.holds[store, lock._key] = hold  # last: no signal handler runs between this and our return
    except BaseException:
        runtime.current.watchdog.discard(hold)
        hold.entries = []
        raise
    return hold


def _reenter(lock: BaseLock, database: Database, hold: Hold, ttl: float, entry: Entry) -> Steps[bool]:
    """Enter a hold of this flow once more; False if it is over."""
    if hold.lease.remaining() <= 0:
        return False
    if hold.shared_entries is not None:
        attached = yield from tenures.attach(database, hold.tenure, _who_we_are(), ttl, hold.lease.grace)
        if attached is None or not hold.lease.lengthen(attached[0]):
            return False
        hold.shared_entries = attached[1] - len(hold.entries) - 1
        hold.entries = [*hold.entries, entry]
        return True
    kept = hold.open_entries()
    try:
        grant = yield from tenures.reenter(database, hold.tenure, len(kept), ttl, hold.lease.grace)
        if grant is None:
            return False
        if hold.lease.lengthen(grant):
            runtime.current.watchdog.add(hold)  # it may have been given up
            hold.entries = [*kept, entry]  # no signal handler runs between this and our return
            return True
    except (GeneratorExit, LockError):
        raise
    except BaseException:  # interrupted: the row's count goes back to ours
        if kept:  # an open transaction that keeps it counts as one, before and after
            with contextlib.suppress(LockError):
                _ = yield from handover.release(_site(hold), hold.tenure, len(kept) + 1)
        raise
    _ = yield from handover.release(_site(hold), hold.tenure, len(kept) + 1)  # the answer came too late to be of use
    return False


def _leave(hold: Hold) -> Steps[bool]:
    """Tell the database that an entry was left; False if the tenure was over before.

    The last one's hold has been forgotten: whatever becomes of the statement, this flow holds the key no more. Whoever
    begins to wait from now on is not left waiting for us; whoever did before, we see.
    """
    if hold.lease.loss is not None and hold.lease.loss.reason is Reason.RELEASED:
        return False  # whoever gave it up gives it back, all of its entries
    if hold.entries:
        return (yield from _lower(hold))
    if hold.shared_entries is None and not hold.min_hold:
        return (yield from handover.pass_on(_site(hold), hold.tenure, hold.ticket, hold.handovers))
    try:
        return (yield from _lower(hold))
    finally:
        _freed(hold)


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
        return (yield from handover.leave(_site(hold), hold.tenure, hold.min_hold, alone=alone))
    return (yield from handover.release(_site(hold), hold.tenure, entered + 1, hold.ticket))


def _leave_after_all(hold: Hold) -> Steps[None]:
    """Interrupted while an entry was being left: it is left, where sending that twice is harmless."""
    entered = len(hold.entries)
    if not entered:
        _forget(hold)
    if hold.shared_entries is not None or (hold.lease.grace and hold.lease.remaining() <= 0):
        return  # it ends with its lease
    with contextlib.suppress(LockError):  # nothing replaces the interrupt
        if hold.min_hold and not entered:
            _ = yield from handover.leave(_site(hold), hold.tenure, hold.min_hold, alone=True)
        else:
            _ = yield from handover.release(_site(hold), hold.tenure, entered + 1)


def _find_out(hold: Hold) -> Steps[None]:
    """The database says that the tenure is over: why?"""
    try:
        loss = Loss(*(yield from tenures.why_lost(hold.store.database, hold.tenure)))
    except LockError:
        loss = Loss(Reason.EXPIRED)
    hold.lease.explain(loss)
    runtime.current.watchdog.announce(hold)


def _unused(hold: Hold) -> Steps[bool]:
    """Has nobody come yet with a token of this tenure? Whoever attaches writes into the row who that is."""
    info = yield from tenures.inspect(hold.store.database, hold.tenure.key)
    if info is None:
        return False
    who = info.identity
    return (who.host, who.pid, who.thread) == (hold.who["host"], hold.who["pid"], hold.who["thread"])


def _site(hold: Hold) -> Site:
    return runtime.current.site(hold.store)


def _freed(hold: Hold) -> None:
    """The key was given back to the database, not to a flow of this process."""
    _ = _site(hold).local_queues.freed(hold.tenure.key)


def _forget(hold: Hold) -> None:
    runtime.current.watchdog.discard(hold)
    flow, place = hold.flow(), (hold.store, hold.tenure.key)
    if flow is not None and flow.holds.get(place) is hold:
        outer = next((each for each in hold.outers() if each.open_entries()), None)
        if outer is None:
            _ = flow.holds.pop(place, None)
        else:
            flow.holds[place] = outer


def _who_we_are() -> dict[str, Any]:
    return {**current_flow().who, "task": celery_task_id()}
