"""Operations on a lock between entering and leaving it.

Rule: a function here acts for the flow that runs it, on that flow's hold and on no other's.
"""

from __future__ import annotations

from functools import partial

from dblock.core import runtime
from dblock.core.errors import LockStoreError
from dblock.core.holding.flow import Hold
from dblock.core.lock.base import BaseLock
from dblock.core.lock.bookkeeping import find_out
from dblock.core.lock.refusals import stale_snapshot
from dblock.core.protocol import tenures
from dblock.core.protocol.steps import Execute, Parameters, Steps, call, undone
from dblock.core.tokens import Sequencer
from dblock.core.validation import valid_ttl
from dblock.core.values import Grant, LockInfo, Seconds, Tenure


def extend(lock: BaseLock, ttl: Seconds | None) -> Steps[None]:
    """Let the lease end `ttl` seconds from now, by default the lock's own ttl; raises LockLost."""
    seconds = lock._ttl if ttl is None else valid_ttl(ttl)
    hold = lock._own_hold("extend")
    _ = lock._surely_held()
    database, before = lock._place.store().database, hold.lease.ttl
    # The statement may take effect though its answer is lost: from now on the new lease is trusted, and no longer one.
    hold.lease.reset(seconds, Grant(hold.tenure, database.now(), seconds).trusted_until)

    def renew_for_less() -> None:
        hold.lease.reset(min(before, seconds), hold.lease.trusted_until)
        _ = runtime.current.watchdog.wake()

    try:
        extending = partial(tenures.extend, database, hold.tenure, seconds, hold.lease.grace)
        grant = yield from undone(extending, renew_for_less)
    except LockStoreError as error:
        if hold.lease.remaining() <= 0:
            raise lock._lost(hold) from error
        raise
    if grant is None:
        yield from find_out(hold)
    if grant is None or not hold.lease.lengthen(grant):
        raise lock._lost(hold)
    _ = runtime.current.watchdog.add(hold)  # its renewal may be due earlier now


def verify(lock: BaseLock) -> Steps[bool]:
    """True if the row still shows this flow's tenure; else raises LockLost."""
    hold = lock._surely_held()
    if not (yield from look_after(hold)):
        raise lock._lost(hold)
    return True


def look_after(hold: Hold) -> Steps[bool]:
    """Whether the row still shows the tenure; else the hold is lost from now on."""
    if (yield from tenures.verify(hold.store.database, hold.tenure)):
        return True
    yield from find_out(hold)
    return False


def guard(lock: BaseLock, given: object = None, *, awaits: bool = False) -> Steps[None]:
    """Pin this flow's hold in the caller's transaction; check that it still exists and that the transaction sees it.

    `given`: what guard() was given; `awaits`: whether an asynchronous driver runs this.
    """
    hold = lock._surely_held()
    store = hold.store
    if store.pin is None:
        store.pin = yield from tenures.pin(store.database)
    hold.grant.guarded = True
    known: Parameters = {"key": hold.tenure.key, "fence": hold.tenure.fence, "life": hold.lease.ttl + hold.lease.grace}
    step = Execute(store, store.pin, known)
    pinned, error = yield from call(lock._place.apin if awaits else lock._place.pin, hold, given, step)
    if error is not None:
        try:
            raise error
        finally:
            del error  # it refers to this frame
    _ = yield from verify(lock)
    if not (pinned and pinned[0][0]):  # what the transaction reads is older than the tenure
        raise stale_snapshot(lock, hold)


def check_sequencer(lock: BaseLock, sequencer: Sequencer) -> Steps[Sequencer]:
    """The sequencer, if the tenure that it names is alive; else raises LockLost."""
    key, _, fence = sequencer
    info = yield from tenures.inspect(lock._place.store().database, key)
    if info is None or info.fence != fence or info.state != "held" or not info.owner:  # no owner during `min_hold`
        raise lock._lost_tenure(fence, tenures.loss_of(Tenure(key, "", fence), info))
    return sequencer


def owned(lock: BaseLock) -> Steps[bool]:
    """Whether this flow holds the lock, according to the database."""
    hold = lock._hold()
    if hold is None or hold.lease.remaining() <= 0:
        return False
    return (yield from tenures.verify(lock._place.store().database, hold.tenure))


def locked(lock: BaseLock) -> Steps[bool]:
    """Whether any flow of any process holds it."""
    info = yield from inspect(lock)
    return info is not None and info.state == "held" and not info.waits


def inspect(lock: BaseLock) -> Steps[LockInfo | None]:
    """The row, without the owner's token; None if there is none."""
    info = yield from lock._inspect()
    return None if info is None else info.masked()
