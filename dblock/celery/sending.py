"""Where a locked task is sent: its key is made, and where the lock begins with the message, it is taken.

All ways lead through `Celery.send_task`: `delay` and `apply_async`, canvas, beat, `retry()`, and the call by name; and
none of its signals can refuse a message, or answer with another result. So that method is wrapped, once, when the first
task is locked; messages of other tasks pass.

    a new call              takes a place; where somebody has it: joins, is refused or waits, as `on_busy` says
    its id is given before  (canvas, replace): takes a place if it can, and is sent in any case
    its own retry()         carries the lock of the run on, if that is for the same key
    sent back, busy         as it is

Rule: a lock without a message is given back, and a message is left out only if another one stands for it.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from typing import Any, Final

from celery import Celery, signals
from celery._state import get_current_task
from celery.backends.base import DisabledBackend
from celery.exceptions import Reject
from celery.utils import uuid
from celery.utils.time import maybe_iso8601, maybe_make_aware

from dblock.celery.header import Header
from dblock.celery.places import Carried, give_up, let_go, take
from dblock.celery.running import current_run, is_bound, spec_of
from dblock.celery.spec import OnBusy, OnRetry, Scope, Spec, refuse_others
from dblock.core.errors import LockTimeout

_HANGING: Final = ("chain", "chord", "group_id", "link", "link_error")
"""What may hang on a message; no other message can stand for one that has any of it."""
_POSITIONAL: Final = tuple(inspect.signature(Celery.send_task).parameters)[4:]
"""What may follow name, args and kwargs."""


def _see_to_what_is_sent() -> None:
    send_task = Celery.send_task

    @functools.wraps(send_task)
    def send(app: Any, name: str, args: Any = None, kwargs: Any = None, *others: Any, **options: Any) -> Any:
        options |= zip(_POSITIONAL, others, strict=False)
        # As send_task does not: before the app is finalized, nobody knows which tasks lock.
        tasks = app.tasks if app.autofinalize else app._tasks
        task = options.get("task_type") or tasks.get(name)
        spec, run = None if task is None else spec_of(task), current_run()
        bare = functools.partial(send_task, app, name, args, kwargs)
        if spec is None or (run is not None and run.sending_back == options.get("task_id")):
            return bare(**options)
        return _send(bare, spec, task, (args, kwargs), options)

    Celery.send_task = send


_see_to_what_is_sent()


def _send(send: Callable[..., Any], spec: Spec, task: Any, call: tuple[Any, Any], options: dict[str, Any]) -> Any:
    refuse_others(options, task)
    given_before, task_id = bool(options.get("task_id")), options.get("task_id") or uuid()
    options["task_id"] = task_id
    key = spec.key(task, tuple(call[0] or ()), dict(call[1] or {}), bound=is_bound(task))
    delay, token, carried, again = _delay(options), "", None, _is_again(task, task_id)
    try:
        if again:
            carried, token = _goes_along(spec, task, key, delay)
        if spec.scope is not Scope.RUN and not token and not (again and spec.on_retry is OnRetry.RELEASE):
            try:
                token = take(spec, task, key, task_id, delay)
            except LockTimeout as busy:
                hanging = given_before or any(options.get(name) for name in _HANGING)
                if not hanging and spec.on_busy in {OnBusy.RAISE, OnBusy.WAIT}:
                    raise
                result = _first(spec, task, key, busy)
                if result is not None and not hanging:
                    return result
        options["headers"] = Header(str(task_id), token).into(options.get("headers"))
        return send(**options)
    except BaseException:
        if carried is not None:
            carried.keep()
        elif token:
            give_up(spec, task, task_id, token)
        raise


def _is_again(task: Any, task_id: str) -> bool:
    """Whether the running task sends itself again, with `retry()`."""
    running = get_current_task()
    return running is not None and running.name == task.name and running.request.id == task_id


def _goes_along(spec: Spec, task: Any, key: str, delay: float) -> tuple[Carried | None, str]:
    """The lock, and its token, that this run passes on to the message that it sends in its own place.

    If the run has not come to its lock yet (`before_start`), the lock is as it came.
    """
    run = getattr(task.request, "dblock_run", None)
    if run is None or not run.begun:
        came = Header.of(task.request.headers, task.request.id)
        if spec.on_retry is OnRetry.KEEP and came.is_for(spec.queue_key(key)):
            return None, came.token
        if came.token:
            give_up(spec, task, task.request.id, came.token)
        return None, ""
    carried = run.carried
    same = carried is not None and carried.lock is not None and run.lock is carried.lock and run.key == key
    if carried is None or not same or spec.on_retry is OnRetry.RELEASE:
        return None, ""
    return carried, carried.carry_on(delay)


def _first(spec: Spec, task: Any, key: str, busy: LockTimeout) -> Any:
    """The result of the task of the same kind that has the key; nobody else's message can stand for this one.

    Nor can one that has a result, because its process was killed: its lock is about to end.
    """
    run, holder, first = current_run(), busy.holder, ""
    if holder is not None and holder.label == spec.label_of(task):
        first = holder.identity.celery_task_id
    elif holder is None and run is not None and run.spec is spec and run.key == key:
        first = run.task.request.id
    result = task.AsyncResult(first) if first else None
    dead = result is not None and not isinstance(result.backend, DisabledBackend) and result.ready()
    return None if dead else result


def _delay(options: dict[str, Any]) -> float:
    """Seconds until the task is due; Celery takes a time without a zone for one of UTC."""
    eta = options.get("eta")
    if isinstance(eta, str):
        eta = maybe_iso8601(eta)
    if isinstance(eta, datetime):
        eta = maybe_make_aware(eta).timestamp() - datetime.now(UTC).timestamp()
        return max(0.0, float(eta))
    return max(0.0, float(options.get("countdown") or 0.0))


_revoking: Final = ThreadPoolExecutor(1, "revoked")


def _revoked(sender: Any = None, request: Any = None, **_said: Any) -> None:
    """Nobody runs a message that was revoked or has expired; what a killed run held ends with its lease."""
    spec = spec_of(sender)
    token = "" if spec is None else Header.of(getattr(request, "headers", None), request.id).token
    if spec is not None and token:  # not in the thread that serves the broker
        _ = _revoking.submit(give_up, spec, sender, request.id, token)


def _over(sender: Any = None, state: str = "", retval: Any = None, **_: Any) -> None:
    """Handle the end of a run: it may have been interrupted around a lock, or before it came to the one it carries."""
    spec = spec_of(sender)
    run = None if spec is None else getattr(sender.request, "dblock_run", None)
    for lock in () if run is None else run.entered:
        let_go(lock)
    token = "" if spec is None else Header.of(sender.request.headers, sender.request.id).token
    goes_on = state == "RETRY" or (isinstance(retval, Reject) and retval.requeue)
    if spec is not None and token and not goes_on and not (run is not None and run.begun):
        give_up(spec, sender, sender.request.id, token)


_ = signals.task_revoked.connect(_revoked, dispatch_uid="dblock.celery.revoked", weak=False)
_ = signals.task_postrun.connect(_over, dispatch_uid="dblock.celery.over", weak=False)
