"""What a worker says at its start, and `dblock doctor`, about settings that do not go together with locks.

Rule: it only warns: the operator knows which of these problems matter.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from celery import current_app, signals
from celery.app.utils import find_app
from celery.backends.base import DisabledBackend

from dblock.celery.options import Spec
from dblock.celery.task import LockTask
from dblock.core.log import warn
from dblock.core.validation import valid_ttl


class Problem(NamedTuple):
    """A problem in one sentence, and what mends it in another."""

    text: str
    hint: str


def app_of(name: str | None) -> Any:
    """The app that `celery -A name` would be given, the current one by default, with the tasks that a worker has."""
    app = current_app._get_current_object() if name is None else find_app(name)
    app.loader.import_default_modules()
    return app


def problems(app: Any) -> list[Problem]:
    """The problems of each locked task, and those of the app."""
    tasks = [task for task in app.tasks.values() if isinstance(task, LockTask)]
    found = [problem for task in tasks for problem in _of_task(app, task, task.spec)]
    visible = (app.conf.broker_transport_options or {}).get("visibility_timeout")
    longest = max((_limit(app, task) or 0.0 for task in tasks), default=0.0)
    if visible is not None and visible < longest:
        text = (
            f"the broker delivers a message again after {visible:g} s (visibility_timeout), and tasks may run for "
            f"{longest:g} s (time_limit): such a task is run again, once its first run has ended"
        )
        found.append(Problem(text, f"broker_transport_options = {{'visibility_timeout': {2 * longest:g}}}"))
    return found


def _of_task(app: Any, task: Any, spec: Spec) -> Iterator[Problem]:
    limit, renew, queued = _limit(app, task), spec.options.get("renew", True), spec.scope != "run"
    life = spec.options.get("max_hold") if renew else spec.options.get("ttl") or spec.lock(task, "any").ttl
    if life is not None and limit is not None and valid_ttl(life) < limit:
        name = "max_hold" if renew else "ttl, which nobody renews (renew=False)"
        yield Problem(
            f"task {task.name} may run for {limit:g} s (time_limit), and loses its lock after {valid_ttl(life):g} s: "
            f"its {name} is less",
            f"Lower its time_limit, or raise its {name.partition(',')[0]} above that.",
        )
    if queued and limit is not None and spec.queue_ttl < limit:
        yield Problem(
            f"a message of task {task.name} may have to wait for a run of {limit:g} s (time_limit), and loses its "
            f"place after {spec.queue_ttl:g} s (queue_ttl)",
            "Let queue_ttl be longer than messages ever wait.",
        )
    if queued and spec.on_busy not in {"raise", "wait"} and isinstance(app.backend, DisabledBackend):
        yield Problem(
            f"a second call of task {task.name} returns the result of the first one, which nobody can get without a "
            "result backend",
            "Set result_backend, or on_busy='raise' or 'wait'.",
        )


def _limit(app: Any, task: Any) -> float | None:
    found = task.time_limit or app.conf.task_time_limit
    return None if found is None else float(found)


def _say(sender: Any, **_: Any) -> None:
    for text, hint in problems(sender.app):
        warn("%s. %s", text, hint)


_ = signals.worker_ready.connect(_say, dispatch_uid="dblock.celery.checks", weak=False)
