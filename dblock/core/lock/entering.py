"""Entering a lock: taking it, re-entering it, or entering it by a token.

Rule: whatever interrupts an entry, afterwards the flow holds what it held before, and nothing more is renewed.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Mapping
from types import EllipsisType
from typing import Any, TypeVar

from dblock.core import runtime
from dblock.core.acquire import handover
from dblock.core.acquire.request import Refused, Request
from dblock.core.acquire.slow import SlowWait
from dblock.core.acquire.waiting import Attempt
from dblock.core.errors import LockError, Loss, Reason
from dblock.core.holding.flow import Block, Entry, Flow, Hold, current_task
from dblock.core.identity import celery_task_id
from dblock.core.lock.base import BaseLock
from dblock.core.lock.blocks import Loaded
from dblock.core.lock.bookkeeping import begin_hold
from dblock.core.lock.key_template import NO_SKIP
from dblock.core.lock.leaving import leave_entry
from dblock.core.lock.refusals import timed_out, waits_for_itself
from dblock.core.observing.observers import acquire_and_report
from dblock.core.protocol import tenures
from dblock.core.protocol.steps import Steps, sleep, undone
from dblock.core.protocol.store import Store
from dblock.core.tokens import Token
from dblock.core.values import SHARE, Grant, LockInfo, key_of_share, slot_of

L = TypeVar("L", bound=BaseLock)


def acquire(
    lock: BaseLock,
    timeout: float | None,
    kind: str = "acquire",
    flow: Flow | None = None,
    end: Callable[[], object] | None = None,
) -> Steps[Hold | Refused]:
    """The hold of this flow, else the refusal.

    `flow`: this flow, if known; `end`: a reference to the end of the block.
    """
    entry, flow = Entry(lock, kind, end), flow or lock._running_flow()
    begin = functools.partial(lock._acquires, timeout, entry, flow)
    steps = acquire_and_report(lock, entry, begin, leave_entry)
    for hook in runtime.current.acquire_hooks:
        steps = hook(lock, timeout, steps)
    return steps


def take_or_reenter(
    lock: BaseLock,
    timeout: float | None,
    entry: Entry,
    flow: Flow,
    contended: Callable[[LockInfo | None], None] | None = None,
    *,
    token: Token | None = None,
) -> Steps[Hold | Refused]:
    """Re-enter the lock, or take it; with a `token` take over the tenure that it is for."""
    if lock.forked_from is not None:
        raise lock._not_held("acquire")
    store = lock._place.store()
    resource = (store, lock._key)
    hold = flow.holds.get(resource)
    if hold is not None and hold.is_snapshot:
        hold = None  # a callback that sees a copy of the hold is another flow
    if hold is not None and token is None:
        entered = yield from _reenter(lock, hold, flow, timeout, entry)
        if entered is not None:
            return entered
    attempt = attempt_of(lock, store, flow, timeout, hold)
    attempt.contended = contended
    found: Grant | Refused | None = None
    try:
        found = yield from (lock._take(attempt) if token is None else _take_over(lock, attempt, token))
        if isinstance(found, Grant):
            if hold is not None and hold.entries:
                _end_before_another(hold)
            return begin_hold(lock, store, flow, found, entry, outer=hold)
    except BaseException:
        begun = flow.holds.get(resource)
        # Interrupted between the grant and the registration of the hold.
        if isinstance(found, Grant) and (begun is None or begun.tenure != found.tenure):
            with contextlib.suppress(LockError):
                yield from handover.undo_take(attempt.site, found.tenure.key, found.tenure.owner)
        raise
    return found


def _reenter(
    lock: BaseLock, hold: Hold, flow: Flow, timeout: float | None, entry: Entry
) -> Steps[Hold | Refused | None]:
    """Enter a hold of this flow once more; None if it is over, or the flow has to wait as others do.

    A `min_hold` that keeps the flow out is waited for, if there is time. Raises LockDeadlock if the flow would wait for
    its own hold without end.
    """
    lease, database = hold.lease, hold.store.database
    if lease.remaining() > 0:
        lock._check_kind(hold)
        closed = hold.closed_for()
        if closed and (timeout is None or timeout >= closed):
            database.before_waiting()
            yield from sleep(hold.store, closed)
    if lease.remaining() > 0 and hold.refuses(lock):
        reads = hold.reading and lock._reading  # in the queue it would get in beside itself
        if timeout is None and (reads or hold.endless):
            raise waits_for_itself(lock, flow)
        if not reads:
            return None
        if timeout:
            database.before_waiting()
            yield from sleep(hold.store, timeout)
        return Refused((yield from tenures.inspect(database, hold.tenure.key)))
    if lease.remaining() > 0:
        begins, kept, ttl = not hold.locks(), hold.open_entries(), lock._ttl
        # The lease gets longer here only if no renewal does that.
        term = () if lease.renewing and ttl <= lease.ttl else (ttl, ttl + lease.grace)
        grant = yield from tenures.set_count(database, hold.tenure, len(kept) + 1, *term)
        lease.renewing = hold.renews  # again, if nobody could leave it any more
        if grant is not None and lease.lengthen(grant):
            _ = runtime.current.watchdog.add(hold)  # the watchdog may have dropped it
            count_min_hold(hold, lock, begins=begins)
            hold.entries = [*kept, entry]  # no signal handler runs between this and our return
            return hold
    _end_before_another(hold)
    return None


def _take_over(lock: BaseLock, attempt: Attempt, token: Token) -> Steps[Grant | Refused]:
    """The tenure of a token, which is good once; raises LockLost if it was used (Reason.USED), or is over."""
    site, tenure, owner = attempt.site, token.tenure, attempt.request.new_owner()
    database, parameters = site.database, attempt.request.parameters(tenure.owner)
    attaching = functools.partial(tenures.attach, database, tenure, owner, parameters)
    undo = functools.partial(handover.undo_take, site, tenure.key, owner)
    found = yield from undone(attaching, undo, LockError)
    if isinstance(found, Grant) and database.now() >= found.trusted_until:  # the answer came too late
        _ = yield from handover.end(site, found)
        found = Loss(Reason.EXPIRED)
    if isinstance(found, Loss):
        raise lock._lost_tenure(tenure.fence, found)
    return found


def attempt_of(lock: BaseLock, store: Store, flow: Flow, timeout: float | None, but: Hold | None = None) -> Attempt:
    """An attempt of a flow to acquire the lock; `but`: a hold of it that is no reason not to wait.

    Raises WrongKind if the process holds the key as another kind of lock.
    """
    options, ttl, known = lock.options, lock._ttl, runtime.current.watchdog.hold_of(store, lock._key)
    if known is not None and known.kind != lock._kind:
        lock._check_kind(known)
    request = Request(
        key=lock._key,
        ttl=ttl,
        life=ttl + options.grace,
        label=options.label,
        fair=int(options.fair),
        flow=flow.name,
        task=celery_task_id(),
        starts_on_place_lease=store.renewable and options.renew and not options.grace and options.max_hold > ttl,
        kind=int(lock._kind),
        reading=lock._reading,
        **flow.who,
    )
    return Attempt(
        request,
        runtime.current.site(store),
        timeout,
        functools.partial(runtime.current.waiter_services, store),
        lambda: [each.tenure.owner for each in flow.holds.values() if each is not but and not each.lease.loss],
        slow_wait=SlowWait(lock._slow_wait),
        held_in_process=known is not None,
    )


def _end_before_another(hold: Hold) -> None:
    """End a hold before a new tenure begins: its blocks have lost it."""
    _ = hold.lease.lose(Loss(Reason.EXPIRED))
    runtime.current.watchdog.announce(hold)


def enter(
    lock: BaseLock, its: Loaded | None, timeout: float | EllipsisType | None = ..., *, part: bool = False
) -> Steps[Hold]:
    """Begin a `with`: take or re-enter the lock; the entry of an attach() becomes the block's. Raises LockTimeout.

    `its`: what the `with` has loaded, if it is one; `part`: it is part of a larger block, which the caller notes for
    its end. `timeout` is by default the lock's own.
    """
    if lock.options.on_busy != "raise":
        raise TypeError(NO_SKIP)
    flow, end = lock._running_flow(), None if its is None else its.end
    hold = lock._hold_here(flow)
    if hold is not None and hold.entries[-1].kind == "attach" and hold.entries[-1].lock is lock:
        hold.entries[-1] = Entry(lock, "with", end)
    else:
        longest = lock._timeout if isinstance(timeout, EllipsisType) else timeout
        found = yield from acquire(lock, longest, "with", flow, end=end)
        if isinstance(found, Refused):
            raise found.error or (yield from timed_out(lock, found)) from found.busy
        hold = found
    if lock.options.interrupt and (task := current_task()) is not None:
        hold.cancelling = task.cancelling()
    block = Block(hold.entries[-1], hold)
    if lock._blocks:
        lock._blocks = [each for each in lock._blocks if each.entry.lock is not None]
    lock._blocks.append(block)
    if its is not None and not part:
        its.opened.append(block)
    return hold


def lock_of(token: Token, options: Mapping[str, Any], lock: Callable[..., Any], rwlock: Any, semaphore: Any) -> Any:
    """The lock that a token is for, of its kind, with `ttl`, `grace` and `min_hold` of the one that was detached.

    `lock`, `rwlock` and `semaphore` make those of a face.
    """
    options = {"ttl": token.ttl, "grace": token.grace, "min_hold": token.min_hold, **options}
    key, slot = key_of_share(token.tenure.key), slot_of(token.tenure.key)
    if not token.kind:
        return lock(key, **options)
    if slot is not None:
        return semaphore(key, slot + 1, **options).permit()
    made = rwlock(key, **options)
    return made.read() if SHARE in token.tenure.key else made.write()


def attach(lock: L, token: Token) -> Steps[L]:
    """Hold the tenure of a token; raises LockLost."""
    if lock.options.on_busy != "raise":
        raise TypeError("on_busy is for decorators: attach() enters a tenure that exists")
    entry = Entry(lock, "attach")
    begin = functools.partial(take_or_reenter, lock, None, entry, lock._running_flow(), token=token)
    _ = yield from acquire_and_report(lock, entry, begin, leave_entry)
    return lock


def count_min_hold(hold: Hold, lock: BaseLock, *, begins: bool) -> None:
    """`min_hold` counts from the beginning of the outermost block; `begins`: that is the one that `lock` enters."""
    if begins:
        hold.started = hold.lease.now() - hold.lease.acquired
    if lock.options.min_hold:
        hold.min_hold = max(hold.min_hold, hold.started + lock.options.min_hold)
