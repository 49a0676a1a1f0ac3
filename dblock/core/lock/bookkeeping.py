"""Bookkeeping of a flow's holds: in the flow, in the watchdog, and in the local queue.

Rule: a function here acts for the flow that runs it, on that flow's hold and on no other's.
"""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Sequence
from typing import Any, TypeVar

from dblock.core import runtime
from dblock.core.errors import LockError, LockNotHeld, LockStoreError, Loss, Reason
from dblock.core.holding.flow import Block, Entry, Flow, Hold, is_over
from dblock.core.lock.base import BaseLock
from dblock.core.protocol import tenures
from dblock.core.protocol.steps import Steps
from dblock.core.protocol.store import Store
from dblock.core.runtime import current_flow
from dblock.core.values import Grant

B = TypeVar("B", bound=tuple[Any, ...])


def innermost(blocks: Sequence[B], keys: Sequence[str], instead: str = "make an object for each block") -> B:
    """Of the open blocks of an object the one that ends here; each of them begins with the reference to its flow.

    It is asked where nothing tells which: a `with` knows its block (`dblock.core.lock.blocks`), an ExitStack does not.
    That is the innermost of this flow. A flow that has none ends the only one, or the only one whose flow is over, as
    a pool may run the beginning and the end of a block in different threads. Raises LockNotHeld if there are several:
    the bodies of all but one still run. Those of one lock whose flows are over are then renewed no more: no code can
    leave one of them.
    """
    flow = current_flow().ref
    if mine := [each for each in blocks if each[0] is flow]:
        return mine[-1]
    found = blocks
    if len(blocks) > 1:
        _ = gc.collect()  # the flow of a call that ran in a copied context is part of a cycle with that context
        found = [each for each in blocks if is_over(each[0])]
    if len(found) == 1:
        return found[0]
    for each in found:
        if isinstance(each[1], Block):
            each[1].hold.lease.renewing = False
    why = "no block of it is open"
    if blocks:
        why = (
            f"{len(blocks)} blocks of this object are open in other threads or tasks, and which of them ends here "
            "cannot be told: where a pool of threads runs a block's beginning and its end (FastAPI's dependencies, "
            f"AnyIO, sync_to_async), {instead}"
        )
    raise LockNotHeld(f"cannot leave {', '.join(map(repr, keys))}: {why}", key=keys[0] if len(keys) == 1 else None)


def begin_hold(
    lock: BaseLock, store: Store, flow: Flow, grant: Grant, entry: Entry, *, outer: Hold | None = None
) -> Hold:
    """Register a new hold of the flow; LockStoreError if it would not be renewed, as no thread can be started."""
    hold = Hold(store, flow, grant, entry, lock.options, outer=outer)
    hold.kind, hold.reading = lock._kind, lock._reading
    if store.asynchronous:
        hold.loop = asyncio.get_running_loop()
    flow.takes += 1
    if 2 * flow.takes >= len(flow.holds):  # so that the cost of a take does not grow with their number
        flow.takes = 0
        for over in list(flow.holds.values()):
            if over.lease.loss is not None and not over.can_be_released:  # its blocks have not left, and cannot
                forget(over)
    try:
        lock._place.opened(lock, hold)
        refused = runtime.current.watchdog.add(hold)
        if refused is not None and hold.lease.renewing and "shutdown" not in str(refused):  # the interpreter is ending
            why = f"no thread can be started to renew its lease: {refused}"
            raise LockStoreError(f"gave {lock.key!r} back: {why}", key=lock.key) from refused  # noqa: TRY301 - undone below
        flow.holds[store, lock._key] = hold  # last: no signal handler runs between this and our return
    except BaseException:
        _ = runtime.current.watchdog.discard(hold)
        hold.entries = []
        raise
    return hold


def forget(hold: Hold) -> None:
    """Remove a hold from the flow and the watchdog; a lost hold further out takes its place in the flow.

    The caller that removes it from the watchdog releases it: if `release_all` was faster, that does.
    """
    if not runtime.current.watchdog.discard(hold):
        _ = hold.lease.lose(Loss(Reason.RELEASED))
    take_out(hold)


def take_out(hold: Hold) -> None:
    """Remove a hold from the flow alone."""
    flow, resource = hold.flow(), (hold.store, hold.key)
    if flow is not None and flow.holds.get(resource) is hold:
        outer = next((each for each in hold.outers if each.open_entries()), None) if hold.outers else None
        if outer is None:
            _ = flow.holds.pop(resource, None)
        else:
            flow.holds[resource] = outer


def find_out(hold: Hold) -> Steps[LockError | None]:
    """Read from the database why the tenure is over, and mark the hold lost; the error if it did not say."""
    failed = None
    try:
        loss = yield from tenures.why_lost(hold.store.database, hold.tenure)
    except LockError as error:
        failed, loss = error, Loss(Reason.EXPIRED)
    hold.lease.explain(loss)
    runtime.current.watchdog.announce(hold)
    return failed
