"""Entering a lock: taking it, re-entering it, or entering it by a token.

Rule: whatever interrupts an entry, afterwards the flow holds what it held before, and nothing more is renewed.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Mapping
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
from dblock.core.lock.bookkeeping import begin_hold, forget
from dblock.core.lock.key_template import or_skip
from dblock.core.lock.leaving import _release
from dblock.core.lock.refusals import timed_out, waits_for_itself
from dblock.core.observing.observers import acquire_and_report, observers
from dblock.core.protocol import tenures
from dblock.core.protocol.sending import Database
from dblock.core.protocol.steps import Steps, sleep, undone_after
from dblock.core.protocol.store import Store
from dblock.core.tokens import Token
from dblock.core.values import SHARE, Grant, LockInfo, key_of_share, slot_of


def acquire(
    lock: BaseLock,
    timeout: float | None,
    kind: str = "acquire",
    flow: Flow | None = None,
    *,
    end: Callable[[], object] | None = None,
) -> Steps[Hold | Refused]:
    """The hold of this flow, else the refusal. `flow`: this flow, if known; `end`: a reference to the block's end."""
    entry, flow = Entry(lock, kind, end), flow or lock._running_flow()
    begin = type(lock)._acquires or _acquire
    if observers:
        steps = acquire_and_report(lock, entry, functools.partial(begin, lock, timeout, entry, flow), _release)
    else:
        steps = begin(lock, timeout, entry, flow)
    for hook in runtime.current.acquire_hooks:
        steps = hook(lock, timeout, steps)
    return steps


def _acquire(
    lock: BaseLock,
    timeout: float | None,
    entry: Entry,
    flow: Flow,
    contended: Callable[[LockInfo | None], None] | None = None,
) -> Steps[Hold | Refused]:
    if lock.forked_from is not None:
        raise lock._forked()
    store, ttl = lock._place.store(), lock._ttl
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
    site = runtime.current.site(store)
    found: Grant | Refused | None = None
    known = runtime.current.watchdog.hold_of(store, lock._key)
    if known is not None and known.kind != lock._kind:
        lock._check_kind(known)
    try:
        found = yield from lock._take(
            Attempt(
                site,
                request_of(lock, store, flow, ttl),
                timeout,
                functools.partial(runtime.current.waiter_services, store),
                lambda: [each.tenure.owner for each in flow.holds.values() if each is not hold and not each.lease.loss],
                contended,
                SlowWait(lock._slow_wait),
                held_in_process=known is not None,
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

    A reader would get in beside itself there, and so waits here.
    """
    reads = bool(hold.reading and lock._reading)
    if reads and timeout is not None:
        if timeout:
            hold.store.database.before_waiting()
            yield from sleep(hold.store, timeout)
        return Refused((yield from tenures.look(hold.store.database, hold.tenure.key)))
    if reads or (timeout is None and hold.endless):
        raise waits_for_itself(lock, flow)
    return None


def _until_it_may_reenter(hold: Hold, timeout: float | None) -> Steps[float | None]:
    """Wait for the end of the `min_hold`, where there is time for that; returns the time that is left."""
    closed = hold.closed_for()
    if not closed or (timeout is not None and timeout < closed):
        return timeout
    hold.store.database.before_waiting()
    yield from sleep(hold.store, closed)
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


def enter(lock: BaseLock, its: Loaded) -> Steps[Hold | None]:
    """Begin a `with`: take or re-enter the lock; the entry of an attach() becomes the block's. Raises LockTimeout.

    `its`: what the `with` has loaded. With `on_busy="skip"` the call of a decorated function is marked as skipped
    instead.
    """
    steps = enter_block(lock, lock._timeout, its.end, its.opened)
    return steps if lock.options.on_busy == "raise" else or_skip(lock, steps)


def enter_block(
    lock: BaseLock,
    timeout: float | None,
    end: Callable[[], object] | None = None,
    opened: list[Block] | None = None,
) -> Steps[Hold]:
    """The same, whatever `on_busy` says; `end`: a reference to the end of the block, which is added to `opened`."""
    flow = lock._running_flow()
    hold = lock._hold_here(flow)
    if hold is not None and hold.entries[-1].kind == "attach" and hold.entries[-1].lock is lock:
        hold.entries[-1] = Entry(lock, "with", end)
    else:
        found = yield from acquire(lock, timeout, "with", flow, end=end)
        if isinstance(found, Refused):
            raise found.error or (yield from timed_out(lock, found)) from found.busy
        hold = found
    if lock.options.interrupt and (task := current_task()) is not None:
        hold.cancelling = task.cancelling()
    block = Block(hold.entries[-1], hold)
    if lock._blocks:
        lock._blocks = [each for each in lock._blocks if each.entry.lock is not None]
    lock._blocks.append(block)
    if opened is not None:
        opened.append(block)
    return hold


L = TypeVar("L", bound=BaseLock)


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
    """Hold the tenure of a token, which is good once; raises LockLost if it was used (Reason.USED), or is over."""
    if lock.options.on_busy != "raise":
        raise TypeError("on_busy is for decorators: attach() enters a tenure that exists")
    entry = Entry(lock, "attach")
    begin = functools.partial(_attach, lock, token, entry)
    _ = yield from acquire_and_report(lock, entry, begin, _release) if observers else begin()
    return lock


def _attach(lock: BaseLock, token: Token, entry: Entry, _contended: object = None) -> Steps[Hold]:
    store, flow, tenure = lock._place.store(), lock._running_flow(), token.tenure
    database, site, resource = store.database, runtime.current.site(store), (store, lock._key)
    request = request_of(lock, store, flow, lock._ttl)
    owner = request.new_owner()
    found: Grant | Loss | None = None

    def begin() -> Steps[Hold]:
        nonlocal found
        found = yield from tenures.attach(database, tenure, owner, request.parameters(tenure.owner))
        if isinstance(found, Loss):
            raise lock._lost_tenure(tenure.fence, found)
        known = flow.holds.get(resource)
        if known is not None:
            _ = known.lease.lose(Loss(Reason.EXPIRED))
        return begin_hold(lock, flow, found, entry, known, store=store)

    def undo(error: BaseException) -> Steps[None] | None:
        begun = flow.holds.get(resource)
        refused = isinstance(error, LockError) and not isinstance(found, Grant)
        if refused or (begun is not None and begun.tenure.owner == owner):
            return None
        return handover.undo_take(site, tenure.key, owner)  # interrupted, or it cannot be renewed

    hold = yield from undone_after(begin, undo)
    if hold.lease.remaining() <= 0:  # the answer came too late
        forget(hold)
        hold.entries = []
        _ = yield from handover.end(site, hold.grant)
        raise lock._lost(hold)
    return hold


def _reenter(lock: BaseLock, database: Database, hold: Hold, ttl: float, entry: Entry) -> Steps[bool]:
    """Re-enter a hold of this flow; False if it is over. The `min_hold` that ends later counts.

    The lease gets longer here only if no renewal does that.
    """
    lease = hold.lease
    if lease.remaining() <= 0:
        return False
    begins, kept = not hold.locks(), hold.open_entries()
    term = () if lease.renewing and ttl <= lease.ttl else (ttl, ttl + lease.grace)
    grant = yield from tenures.set_count(database, hold.tenure, len(kept) + 1, *term)
    if grant is None or not lease.lengthen(grant):
        return False
    _ = runtime.current.watchdog.add(hold)  # the watchdog may have dropped it
    count_min_hold(hold, lock, begins=begins)
    hold.entries = [*kept, entry]  # no signal handler runs between this and our return
    return True


def count_min_hold(hold: Hold, lock: BaseLock, *, begins: bool) -> None:
    """`min_hold` counts from the beginning of the outermost block; `begins`: that is the one that `lock` enters."""
    if begins:
        hold.started = hold.lease.now() - hold.lease.acquired
    if lock.options.min_hold:
        hold.min_hold = max(hold.min_hold, hold.started + lock.options.min_hold)
