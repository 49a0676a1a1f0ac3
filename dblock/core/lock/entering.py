"""Entering a lock: taking it, re-entering it, or entering it by a token.

Rule: whatever interrupts an entry, afterwards the count in the row and that of the hold agree, or the lease expires.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from types import EllipsisType
from typing import TypeVar

from dblock.core import runtime
from dblock.core.acquire import handover
from dblock.core.acquire.request import Refused, Request
from dblock.core.acquire.slow import SlowWait
from dblock.core.errors import LockError, Loss, Reason
from dblock.core.holding.flow import Block, Entry, Flow, Hold
from dblock.core.identity import celery_task_id
from dblock.core.lock.base import BaseLock, Taking
from dblock.core.lock.bookkeeping import begin_hold, forget, site_of, who_we_are
from dblock.core.lock.leaving import _release, leave
from dblock.core.protocol import tenures
from dblock.core.protocol.sending import Database
from dblock.core.protocol.steps import Steps, sleep
from dblock.core.protocol.store import Store
from dblock.core.tokens import Token
from dblock.core.values import Grant, LockInfo


def acquire(
    lock: BaseLock,
    timeout: float | None,
    kind: str = "acquire",
    flow: Flow | None = None,
    *,
    granted: Grant | None = None,
) -> Steps[Hold | Refused]:
    """The hold of this flow, else the refusal. `flow`: this flow, if known; `granted`: what has been taken already."""
    entry, observers, flow = Entry(lock, kind), runtime.current.watchdog.observers, flow or lock._running_flow()
    begin = _acquire if granted is None else functools.partial(_begin_granted, granted)
    if observers is None:
        steps = begin(lock, timeout, entry, flow)
    else:
        steps = observers.acquire(lock, entry, functools.partial(begin, lock, timeout, entry, flow), _release)
    for hook in runtime.current.acquire_hooks:
        steps = hook(lock, timeout, steps)
    return steps


def _begin_granted(
    granted: Grant, lock: BaseLock, _timeout: float | None, entry: Entry, flow: Flow, _contended: object = None
) -> Steps[Hold | Refused]:
    """Hold what has been taken."""
    yield from ()
    return begin_hold(lock, flow, granted, entry, None, store=lock._store())


def _acquire(
    lock: BaseLock,
    timeout: float | None,
    entry: Entry,
    flow: Flow,
    contended: Callable[[LockInfo | None], None] | None = None,
) -> Steps[Hold | Refused]:
    if lock.forked_from is not None:
        raise lock._forked()
    store, ttl = lock._store(), lock._ttl
    database, resource = store.database, (store, lock._key)
    hold = flow.holds.get(resource)
    if hold is not None and hold.is_snapshot:
        hold = None  # a callback that sees a copy of the hold is another flow
    if hold is not None and hold.lease.remaining() > 0:
        lock._check_kind(hold)
        timeout = yield from _until_it_may_reenter(hold, timeout)
    if hold is not None and hold.lease.remaining() > 0 and hold.refuses(lock):
        if (refused := (yield from _refused_by_itself(lock, hold, flow, timeout))) is not None:
            return refused
    elif hold is not None:
        if (yield from _reenter(lock, database, hold, ttl, entry)):
            return hold
        _end_before_another(hold)
    site, request = runtime.current.site(store), request_of(lock, store, flow, ttl)
    found: Grant | Refused | None = None
    known = runtime.current.watchdog.hold_of(store, lock._key)
    if known is not None and known.kind != lock._kind:
        lock._check_kind(known)
    try:
        found = yield from lock._take(
            Taking(
                site,
                request,
                timeout,
                functools.partial(runtime.current.waiter_services, store),
                held_in_process=known is not None,
                held=lambda: [
                    each.tenure.owner for each in flow.holds.values() if each is not hold and not each.lease.loss
                ],
                contended=contended,
                slow_wait=SlowWait(lock._slow_wait),
            )
        )
        if isinstance(found, Grant):
            if hold is not None and hold.entries:
                _end_before_another(hold)
            return begin_hold(lock, flow, found, entry, hold, store=store)
    except BaseException:
        begun = flow.holds.get(resource)
        # Interrupted between the grant and the registration of the hold.
        if isinstance(found, Grant) and (begun is None or begun.tenure != found.tenure):
            with contextlib.suppress(LockError):
                yield from handover.undo_take(site, found.tenure.key, found.tenure.owner)
        raise
    return found


def _refused_by_itself(lock: BaseLock, hold: Hold, flow: Flow, timeout: float | None) -> Steps[Refused | None]:
    """Raise LockDeadlock if a flow would wait for its own hold without end; None if it waits in the queue.

    A reader would get in beside itself, and so waits here where `min_hold` lasts longer than its timeout.
    """
    reads = bool(hold.reading and lock._reading)
    if reads and timeout is not None and not hold.locks():
        if timeout:
            hold.store.database.before_waiting()
            yield from sleep(timeout)
        return Refused((yield from tenures.look(hold.store.database, hold.tenure.key)))
    if reads or (timeout is None and hold.endless):
        from dblock.core.lock.failures import waits_for_itself  # noqa: PLC0415 - only for the error

        raise waits_for_itself(lock, flow)
    return None


def _until_it_may_reenter(hold: Hold, timeout: float | None) -> Steps[float | None]:
    """Wait for the end of the `min_hold`, where there is time for that; returns the time that is left."""
    closed = hold.closed_for()
    if not closed or (timeout is not None and timeout < closed):
        return timeout
    hold.store.database.before_waiting()
    yield from sleep(closed)
    return None if timeout is None else timeout - closed


def request_of(lock: BaseLock, store: Store, flow: Flow, ttl: float) -> Request:
    """What the statements show of a flow that acquires the lock."""
    options = lock.options
    return Request(
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


def _end_before_another(hold: Hold) -> None:
    """End a hold before a new tenure begins: its blocks have lost it."""
    _ = hold.lease.lose(Loss(Reason.EXPIRED))
    runtime.current.watchdog.announce(hold)


def enter(lock: BaseLock, timeout: float | EllipsisType | None = ...) -> Steps[None]:
    """Begin a `with`: take or re-enter the lock; the entry of an attach() becomes the block's. Raises LockTimeout.

    `timeout` is the lock's own by default. With `on_busy="skip"` the call of a decorated function is marked as skipped
    instead.
    """
    steps = enter_block(lock, lock._timeout if isinstance(timeout, EllipsisType) else timeout)
    if lock.options.on_busy == "raise":
        return steps
    from dblock.core.lock.key_template import or_skip  # noqa: PLC0415 - for those who decorate

    return or_skip(lock, steps)


def enter_block(lock: BaseLock, timeout: float | None) -> Steps[None]:
    """The same, whatever `on_busy` says."""
    flow = lock._running_flow()
    hold = lock._hold_here(flow)
    if hold is not None and hold.entries[-1].kind == "attach" and hold.entries[-1].lock is lock:
        hold.entries[-1] = Entry(lock, "with")
    else:
        found = yield from acquire(lock, timeout, "with", flow)
        if isinstance(found, Refused):
            from dblock.core.lock.failures import timed_out  # noqa: PLC0415 - only for the error

            raise (yield from timed_out(lock, found)) from found.busy
        hold = found
    lock._blocks.append(Block(hold.entries[-1], hold))


L = TypeVar("L", bound=BaseLock)


def attach(lock: L, token: Token) -> Steps[L]:
    """Enter the tenure of a token, as a hold of this flow; raises LockLost if it is over."""
    if lock.options.on_busy != "raise":
        raise TypeError("on_busy is for decorators: attach() enters a tenure that exists")
    steps, observers = _attach(lock, token), runtime.current.watchdog.observers
    return steps if observers is None else observers.attach(lock, steps, _release)


def _attach(lock: L, token: Token) -> Steps[L]:
    store, flow, tenure = lock._store(), lock._running_flow(), token.tenure
    database, entry = store.database, Entry(lock, "attach")
    attached = yield from tenures.attach(database, tenure, who_we_are(), token.ttl, token.grace, counted=token.counted)
    if attached is None:
        loss = yield from tenures.why_lost(database, tenure)
        raise lock._lost_tenure(tenure.fence, loss)
    grant, count = attached
    hold = flow.holds.get((store, lock._key))
    if hold is not None and hold.tenure == tenure and hold.lease.lengthen(grant):
        hold.shared_entries = count - len(hold.entries) - 1
        hold.entries = [*hold.entries, entry]
    else:
        if hold is not None:
            _ = hold.lease.lose(Loss(Reason.EXPIRED))
        hold = begin_hold(lock, flow, grant, entry, hold, store=store, others=count - 1)
    if hold.lease.remaining() <= 0:  # the answer came too late
        kept = hold.entries[:-1]
        if not kept:
            forget(hold)
        hold.entries = kept
        _ = yield from leave(hold)
        raise lock._lost(hold)
    return lock


def adopt(lock: BaseLock, token: Token) -> Steps[bool]:
    """Hold the tenure of a token as its only holder, as if it had been taken here, with a lease of the lock's own ttl.

    False if another bearer is in it: for a token that may be delivered twice, and that one bearer uses at a time.
    Raises LockLost if the tenure is over.
    """
    steps, observers = _adopt(lock, token), runtime.current.watchdog.observers
    return steps if observers is None else observers.attach(lock, steps, _release)


def _adopt(lock: BaseLock, token: Token) -> Steps[bool]:
    store, flow, tenure = lock._store(), lock._running_flow(), token.tenure
    database = store.database
    adopted = yield from tenures.adopt(database, tenure, who_we_are(), lock._ttl, lock.options.grace)
    if adopted is None:
        info = yield from tenures.look(database, tenure.key)
        if info is not None and (info.owner, info.fence) == (tenure.owner, tenure.fence) and info.remaining > 0:
            return False
        loss = yield from tenures.why_lost(database, tenure)
        raise lock._lost_tenure(tenure.fence, loss)
    known = flow.holds.get((store, lock._key))
    # Another bearer may have kept the token, and attach beside this flow.
    grant, bearers = adopted
    begin_hold(lock, flow, grant, Entry(lock, "attach"), known, store=store, others=0).bearers = bearers
    return True


def _reenter(lock: BaseLock, database: Database, hold: Hold, ttl: float, entry: Entry) -> Steps[bool]:
    """Re-enter a hold of this flow; False if it is over. The `min_hold` that ends later counts."""
    if hold.lease.remaining() <= 0:
        return False
    begins = not hold.locks()
    if hold.shared_entries is not None:
        attached = yield from tenures.attach(database, hold.tenure, who_we_are(), ttl, hold.lease.grace)
        if attached is None or not hold.lease.lengthen(attached[0]):
            return False
        _count_min_hold(hold, lock, begins=begins)
        hold.shared_entries = attached[1] - len(hold.entries) - 1
        hold.entries = [*hold.entries, entry]
        return True
    kept = hold.open_entries()
    try:
        grant = yield from tenures.reenter(database, hold.tenure, len(kept), ttl, hold.lease.grace)
        if grant is None:
            return False
        if hold.lease.lengthen(grant):
            runtime.current.watchdog.add(hold)  # the watchdog may have dropped it
            _count_min_hold(hold, lock, begins=begins)
            hold.entries = [*kept, entry]  # no signal handler runs between this and our return
            return True
    except (GeneratorExit, LockError):
        raise
    except BaseException:  # interrupted: the count in the row goes back to that of the hold
        if kept:  # an open transaction that keeps it counts as one, before and after
            until = database.now() + database.timing.undo_timeout
            with contextlib.suppress(LockError):
                _ = yield from handover.free(site_of(hold), hold.record, len(kept) + 1, until)
        raise
    if hold.lease.loss is None or hold.lease.loss.reason is not Reason.RELEASED:  # else release_all() releases it
        _ = yield from handover.free(site_of(hold), hold.record, len(kept) + 1)  # the answer came too late
    return False


def _count_min_hold(hold: Hold, lock: BaseLock, *, begins: bool) -> None:
    """`min_hold` counts from the beginning of the outermost block; `begins`: that is the one that `lock` enters."""
    if begins:
        hold.started = hold.lease.now() - hold.lease.acquired
    if lock.options.min_hold:
        hold.min_hold = max(hold.min_hold, hold.started + lock.options.min_hold)
