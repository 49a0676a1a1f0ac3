"""What can be done with a lock, each operation written once, as steps for whoever drives them.

Rule: a function here acts for the flow that runs it, on that flow's hold and on no other's.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any, TypeVar

from dblock.core import acquiring, lines, protocol, queue
from dblock.core.base import BaseLock
from dblock.core.errors import LockError, Reason
from dblock.core.flows import Flow, current_flow
from dblock.core.holds import Entry, Hold, Loss, entry_numbers
from dblock.core.identity import celery_task_id
from dblock.core.keeper import keeper
from dblock.core.protocol import Database
from dblock.core.steps import Steps
from dblock.core.tokens import Sequencer, Token, token_text
from dblock.core.values import Grant, LockInfo, margin

L = TypeVar("L", bound=BaseLock)


def acquire(lock: BaseLock, timeout: float | None, kind: str = "acquire") -> Steps[LockInfo | bool | None]:
    """True when acquired; else the holder that we saw last, if any."""
    if lock.forked_from is not None:
        raise lock._forked()
    store, flow, ttl = lock._store(), current_flow(), lock._ttl
    database, place, entry = store.database, (store, lock._key), Entry(lock, kind, next(entry_numbers))
    hold = flow.holds.get(place)
    if hold is not None and hold.view:
        hold = None  # a callback that looks at its lock's hold is a flow of its own
    if hold is not None:
        if (yield from _reenter(lock, database, hold, ttl, entry)):
            return True
        _ = hold.lose(Loss(Reason.EXPIRED))  # a new tenure follows; whoever entered before has lost this one
        keeper.announce(hold)
    wish = {
        **flow.who,
        "key": lock._key,
        "ttl": ttl,
        "life": ttl + lock.options.grace,
        "label": lock.options.label,
        "task": celery_task_id(),
        "fair": int(lock.options.fair),
    }
    found = yield from acquiring.acquire(
        database,
        wish,
        timeout,
        functools.partial(keeper.attendant, store),
        ours=keeper.holds(store, lock._key),
        entangled=any(other.store is store and other.loss is None for other in flow.holds.values()),
    )
    if not isinstance(found, Grant):
        return found
    _ = _begin(lock, flow, found, entry, hold)
    return True


def enter(lock: BaseLock) -> Steps[None]:
    hold = lock._hold()
    if hold is not None and hold.entries[-1][:2] == (lock, "attach"):
        hold.entries[-1] = Entry(lock, "with", next(entry_numbers))
        return
    acquired = yield from acquire(lock, lock._timeout, "with")
    if acquired is not True:
        holder = acquired if isinstance(acquired, LockInfo) else None
        raise lock._timed_out(holder)


def leave_block(lock: BaseLock) -> Steps[None]:
    flow = current_flow()
    if flow.detached:  # is the innermost block of this lock one whose hold was handed over?
        hold = lock._hold()
        handed = [entry for entry in flow.detached if entry.lock is lock]
        open_ = [entry for entry in hold.entries if entry[:2] == (lock, "with")] if hold else []
        if handed and (not open_ or handed[-1].number > open_[-1].number):
            flow.detached.remove(handed[-1])
            return
    hold = lock._hold()
    if hold is not None and not _inside(lock, hold):
        for outer in hold.outers():
            if _inside(lock, outer):  # the block's tenure ended, and another one began since
                outer.entries.remove(next(entry for entry in outer.entries if entry[:2] == (lock, "with")))
                raise lock._lost(outer)
    yield from release(lock)


def release(lock: BaseLock) -> Steps[None]:
    if lock.forked_from is not None:
        raise lock._forked()
    flow, hold = current_flow(), lock._own_hold("release")
    in_time = hold.remaining() > 0
    if not in_time:
        keeper.announce(hold)
    hold.left = hold.entries.pop()
    if not hold.entries and in_time and hold.left.lock._defers(hold):
        return
    if not in_time and hold.grace:  # freeing the row would open the key before its time
        if not hold.entries:
            _forget(flow, hold)
        released = False
    else:
        released = yield from _leave(lock, flow, hold)
    if not (released and in_time):
        if not released:
            yield from _find_out(hold)
        raise lock._lost(hold)
    hold.left = None


def extend(lock: BaseLock, ttl: float) -> Steps[None]:
    if lock.forked_from is not None:
        raise lock._forked()
    hold = lock._own_hold("extend")
    lock.check()
    database, before = lock._store().database, hold.ttl
    # It may take effect and its answer never come: from now on no more is trusted than the new lease gives.
    hold.reset(ttl, database.now() + ttl - margin(ttl))
    try:
        if hold.others is None:
            grant = yield from protocol.extend(database, hold.tenure, ttl, hold.grace)
        else:  # others may rely on a longer lease than ours
            sent, alive = yield from protocol.renew(
                database, [(hold.tenure, ttl + hold.grace)], database.now() + protocol.PATIENCE
            )
            grant = Grant(hold.tenure, sent, ttl) if alive is None else None
    except BaseException:
        hold.reset(min(before, ttl), hold.trusted_until)
        keeper.look()
        raise
    if grant is None:
        yield from _find_out(hold)
    if grant is None or not hold.lengthen(grant):
        raise lock._lost(hold)
    keeper.add(hold)  # it may be due earlier now


def verify(lock: BaseLock) -> Steps[bool]:
    lock.check()
    hold = lock._hold()
    if hold is not None and not (yield from protocol.verify(lock._store().database, hold.tenure)):
        yield from _find_out(hold)
        raise lock._lost(hold)
    return True


def guard(lock: BaseLock, pin: Callable[[Hold], bool]) -> Steps[None]:
    """Pin the tenure with `pin`, which runs the statement in the caller's transaction; then see that it is ours."""
    lock.check()
    hold = lock._hold()
    if hold is not None and not pin(hold):
        yield from _find_out(hold)
        raise lock._lost(hold)
    _ = yield from verify(lock)


def detach(lock: BaseLock) -> Steps[str]:
    if lock.forked_from is not None:
        raise lock._forked()
    flow, hold = current_flow(), lock._own_hold("detach")
    lock.check()
    if not (yield from protocol.detach(hold.store.database, hold.tenure, hold.ttl, hold.grace)):
        yield from _find_out(hold)
        raise lock._lost(hold)
    entry = hold.entries.pop()
    hold.others = hold.others or 0
    hold.tokens += bool(hold.entries)
    if entry.kind == "with":
        flow.detached.append(entry)
    if not hold.entries:
        _forget(flow, hold)
        _ = lines.freed(hold.store.database, hold.tenure.key)
    return token_text(Token(hold.tenure, hold.ttl, hold.grace, hold.min_hold))


def attach(lock: L, token: Token) -> Steps[L]:
    store, flow, tenure = lock._store(), current_flow(), token.tenure
    database, entry = store.database, Entry(lock, "attach", next(entry_numbers))
    attached = yield from protocol.attach(database, tenure, _who_we_are(), token.ttl, token.grace)
    if attached is None:
        loss = Loss(*(yield from protocol.why_lost(database, tenure)))
        raise lock._lost_tenure(tenure.fence, loss)
    grant, count = attached
    hold = flow.holds.get((store, lock._key))
    if hold is not None and hold.tenure == tenure and hold.lengthen(grant):
        hold.entries.append(entry)
    else:
        if hold is not None:
            _ = hold.lose(Loss(Reason.EXPIRED))
        hold = _begin(lock, flow, grant, entry, hold)
    hold.others = count - len(hold.entries)
    if hold.remaining() <= 0:  # the answer came too late to be of use
        _ = hold.entries.pop()
        _ = yield from _leave(lock, flow, hold)
        raise lock._lost(hold)
    return lock


def check_sequencer(lock: BaseLock, fence: int) -> Steps[Sequencer]:
    info = yield from inspect(lock)
    if info is None or info.fence != fence or info.state != "held":
        taken = info is not None and info.fence != fence
        given_back = info is not None and info.owner is None
        why = Reason.GONE if info is None else Reason.TAKEN_OVER if taken else Reason.EXPIRED
        loss = Loss(Reason.FREED if given_back and not taken else why)
        raise lock._lost_tenure(fence, loss)
    return Sequencer(lock._key, "exclusive", fence)


def owned(lock: BaseLock) -> Steps[bool]:
    hold = lock._hold()
    if hold is None or hold.remaining() <= 0:
        return False
    return (yield from protocol.verify(lock._store().database, hold.tenure))


def locked(lock: BaseLock) -> Steps[bool]:
    info = yield from inspect(lock)
    return info is not None and info.state == "held"


def inspect(lock: BaseLock) -> Steps[LockInfo | None]:
    info = yield from protocol.inspect(lock._store().database, lock._key)
    return None if info is None else info.masked()


def look_after(hold: Hold) -> Steps[None]:
    """A transaction that the tenure was part of may have taken it away."""
    if not (yield from protocol.verify(hold.store.database, hold.tenure)):
        yield from _find_out(hold)


def finish(flow: Flow, hold: Hold) -> Steps[None]:
    """The transaction that kept a hold has ended: give it back, unless its flow has entered it again."""
    hold.deferred = False
    if not hold.entries:
        lock = BaseLock(hold.tenure.key)
        released = yield from _leave(lock, flow, hold)
        # In SQLite a rollback takes back a take that was part of the transaction: nothing was lost.
        if not released and hold.store.database.dialect.name != "sqlite":
            yield from _find_out(hold)


def _begin(lock: BaseLock, flow: Flow, grant: Grant, entry: Entry, outer: Hold | None) -> Hold:
    """The flow holds a tenure from now on."""
    store = lock._store()
    hold = Hold(store, flow.ref, grant, entry, outer if outer and outer.entries else None)
    if store.asynchronous:
        hold.loop = sys.modules["asyncio"].get_running_loop()
    if not store.renewable:
        hold.renewing = False
    flow.holds[store, lock._key] = hold
    lock._opened(hold)
    keeper.add(hold)
    return hold


def _reenter(lock: BaseLock, database: Database, hold: Hold, ttl: float, entry: Entry) -> Steps[bool]:
    """Enter a hold of this flow once more; False if it is over."""
    if hold.remaining() <= 0:
        return False
    if hold.others is not None:
        attached = yield from protocol.attach(database, hold.tenure, _who_we_are(), ttl, hold.grace)
        if attached is None or not hold.lengthen(attached[0]):
            return False
        hold.others = attached[1] - len(hold.entries) - 1
        hold.entries.append(entry)
        return True
    count = len(hold.entries)
    try:
        grant = yield from protocol.reenter(database, hold.tenure, count, ttl, hold.grace)
    except (GeneratorExit, LockError):
        raise
    except BaseException:  # interrupted: the row's count goes back to ours
        if count:  # an open transaction that keeps it counts as one, before and after
            _ = yield from queue.release(database, hold.tenure, count + 1)
        raise
    if grant is None:
        return False
    if not hold.lengthen(grant):  # the answer came too late to be of use
        _ = yield from queue.release(database, hold.tenure, count + 1)
        return False
    hold.entries.append(entry)
    return True


def _leave(lock: BaseLock, flow: Flow, hold: Hold) -> Steps[bool]:
    """Tell the database that the innermost entry was left; False if the tenure was over before."""
    if hold.entries:
        return (yield from _lower(flow, hold))
    # Forgotten before the statement is sent: whatever becomes of it, this flow holds the key no more. Whoever begins to
    # wait from now on is not left waiting for us; whoever did before, we see.
    _forget(flow, hold)
    database, tenure = hold.store.database, hold.tenure
    if hold.others is None and not hold.min_hold:
        return (yield from queue.pass_on(database, tenure, hold.ticket, hold.turns))
    try:
        return (yield from _lower(flow, hold))
    finally:
        _ = lines.freed(database, tenure.key)


def _lower(flow: Flow, hold: Hold) -> Steps[bool]:
    """Lower the count in the row by one; False if the tenure was over before."""
    database, entered = hold.store.database, len(hold.entries)
    if hold.tokens and not entered and (yield from _unused(flow, hold)):
        # It is left to the bearer of a token, who has one more ttl.
        return (yield from protocol.detach(database, hold.tenure, hold.ttl, hold.grace))
    alone = hold.others is None
    if not alone or (hold.min_hold and not entered):
        return (yield from queue.leave(database, hold.tenure, hold.min_hold, alone=alone))
    try:
        return (yield from queue.release(database, hold.tenure, entered + 1, hold.ticket))
    except (GeneratorExit, LockError):
        raise
    except BaseException:  # interrupted: once more, since sending it twice is harmless
        _ = yield from queue.release(database, hold.tenure, entered + 1)
        raise


def _find_out(hold: Hold) -> Steps[None]:
    """The database says that the tenure is over: why?"""
    try:
        loss = Loss(*(yield from protocol.why_lost(hold.store.database, hold.tenure)))
    except LockError:
        loss = Loss(Reason.EXPIRED)
    if not hold.lose(loss):
        hold.loss = loss  # now we know better
    keeper.announce(hold)


def _unused(flow: Flow, hold: Hold) -> Steps[bool]:
    """Has nobody come yet with a token of this tenure? Whoever attaches writes into the row who that is."""
    info = yield from protocol.inspect(hold.store.database, hold.tenure.key)
    if info is None:
        return False
    who = info.identity
    return (who.host, who.pid, who.thread) == (flow.who["host"], flow.who["pid"], flow.who["thread"])


def _inside(lock: BaseLock, hold: Hold) -> bool:
    """Is a `with` of this very lock one of those that the hold was entered by?"""
    return any(entry[:2] == (lock, "with") for entry in hold.entries)


def _forget(flow: Flow, hold: Hold) -> None:
    keeper.discard(hold)
    place = (hold.store, hold.tenure.key)
    if flow.holds.get(place) is hold:
        outer = next((each for each in hold.outers() if each.entries), None)
        if outer is None:
            del flow.holds[place]
        else:
            flow.holds[place] = outer


def _who_we_are() -> dict[str, Any]:
    return {**current_flow().who, "task": celery_task_id()}
