"""The lock that a message carries: taken by the sender, held by the worker that runs it, released when that has ended.

Rule: the lock is where the message is. Between a sender and a worker nobody keeps it: it is a lease of `queue_ttl`
seconds from the moment at which the task is due. Its token is good for one run, however often the message comes.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from datetime import UTC, datetime
from typing import Any, Final

from celery.backends.base import DisabledBackend
from celery.utils.time import maybe_iso8601, maybe_make_aware

from dblock.celery.results import place_lost
from dblock.core import runtime
from dblock.core.acquire import handover
from dblock.core.errors import LockError, LockLost, LockStoreError, LockTimeout, Reason
from dblock.core.identity import acting_for, storable
from dblock.core.lock.entering import attach
from dblock.core.lock.locks import SyncLock
from dblock.core.log import warn
from dblock.core.tokens import valid_token
from dblock.core.values import Grant


def take(task: Any, key: str, task_id: str, delay: float) -> str:
    """The token of a new lock for the message of task `task_id`, due in `delay` seconds; raises LockTimeout."""
    lock = task.spec.queue_lock(task, task.spec.queue_key(key), task.spec.timeout, task.spec.queue_ttl + delay)
    if lock._hold_here() is not None:  # it would be entered once more
        why = f"{lock.key!r} is held by the flow that sends {task.name}"
        raise LockTimeout(why, key=lock.key, holder=lock.inspect())
    before = acting_for.set(task_id)
    try:
        with lock:
            return str(lock.detach())
    finally:
        acting_for.reset(before)


def first_result(task: Any, busy: LockTimeout) -> Any:
    """The result of the task of the same kind that has the key; None if somebody else has it.

    None also if that task has a result, because its process was killed: its lock is about to end.
    """
    holder = busy.holder
    if holder is None or holder.label != task.spec.label_of(task) or not holder.identity.celery_task_id:
        return None
    result = task.AsyncResult(holder.identity.celery_task_id)
    return None if not isinstance(result.backend, DisabledBackend) and result.ready() else result


def accept(task: Any, lock: SyncLock, text: str) -> LockError | None:
    """Hold the lock of the message that this run has come with; else why it does not hold it.

    LockLost: its lease has ended. LockTimeout: an earlier run of the same task has used it, which is under way or was
    killed within the last ttl, or has sent the message by `retry()` and is about to end. LockStoreError: the database
    is away.
    """
    who = f"{task.name}[{task.request.id}]"
    try:
        _ = lock._drive(attach(lock, valid_token(text)))
    except LockLost as lost:
        if lost.reason is Reason.USED:
            return LockTimeout(f"another run of task {who} is under way, or has died", key=lost.key)
        reason = "the process that ran the task before was killed, or the message waited longer than queue_ttl"
        why = f"its lease has ended: {reason}" if lost.reason is Reason.EXPIRED else str(lost)
        warn("the lock of task %s was over before it ran: %s", who, why)
        _ = place_lost.send(task, task_id=task.request.id, key=lost.key, error=lost)
        return lost
    except (LockStoreError, LockTimeout) as busy:  # the keys may be closed after a failover
        return busy
    return None


def give_up(task: Any, task_id: Any, text: str) -> None:
    """Release the lock of a message that nobody will run, if it was taken for that task, and its token was not used.

    What fails here ends with its lease.
    """
    token = valid_token(text)
    lock: SyncLock = task.spec.queue_lock(task, token.tenure.key, 0)
    try:
        info = lock.inspect()
        if info is not None and info.identity.celery_task_id == storable(str(task_id)):
            _ = lock._drive(handover.end(runtime.current.site(lock._place.store()), Grant(token.tenure)))
    except LockError as error:
        warn("the lock of a message of %s that nobody will run ends with its lease: %s", task.name, error)


def let_go(lock: SyncLock) -> None:
    """Release a lock that a run should have released: it was interrupted on its way in or out."""
    with suppress(LockError):
        hold = lock._hold_here()
        if lock._blocks:
            lock.__exit__(None, None, None)
        elif hold is not None and hold.entered_by(lock):
            lock.release()


def due_in(options: dict[str, Any]) -> float:
    """Seconds until the task is due; Celery takes a time without a zone for one of UTC."""
    if (eta := maybe_iso8601(options.get("eta"))) is not None:
        return max(0.0, float(maybe_make_aware(eta).timestamp() - datetime.now(UTC).timestamp()))
    return max(0.0, float(options.get("countdown") or 0.0))


elsewhere: Final = ThreadPoolExecutor(1, "revoked")
"""Gives up the locks of revoked messages, as the thread that hears of them serves the broker."""
