"""What a worker says at its start about settings that do not go together with locks.

Rule: it warns and goes on: which of them matters, its operator knows.
"""

from __future__ import annotations

from typing import Any

from celery import signals
from celery.backends.base import DisabledBackend

from dblock.celery.running import spec_of
from dblock.celery.spec import OnBusy, Scope, Spec
from dblock.core.log import warn
from dblock.core.validation import valid_ttl


def problems(app: Any) -> list[str]:
    """In sentences, those of each locked task and those of the app."""
    specs = {task.name: (task, spec) for task in app.tasks.values() if (spec := spec_of(task)) is not None}
    found = [text for task, spec in specs.values() for text in _of_task(app, task, spec)]
    visible = (app.conf.broker_transport_options or {}).get("visibility_timeout")
    limits = [limit for task, _ in specs.values() if (limit := _limit(app, task)) is not None]
    if visible is not None and limits and visible < max(limits):
        found.append(
            f"the broker delivers a message again after {visible:g} s (visibility_timeout), and tasks may run for "
            f"{max(limits):g} s (time_limit): such a task is run again, once its first run has ended"
        )
    return found


def _of_task(app: Any, task: Any, spec: Spec) -> list[str]:
    found = []
    limit, renew = _limit(app, task), spec.options.get("renew", True)
    life = spec.options.get("max_hold") if renew else spec.lock(task, "any").ttl
    if life is not None and limit is not None and valid_ttl(life) < limit:
        name = "max_hold" if renew else "ttl, which nobody renews (renew=False)"
        found.append(
            f"task {task.name} may run for {limit:g} s (time_limit), and loses its lock after {valid_ttl(life):g} s: "
            f"its {name} is less"
        )
    joins = spec.scope is not Scope.RUN and spec.on_busy not in {OnBusy.RAISE, OnBusy.WAIT}
    if joins and isinstance(app.backend, DisabledBackend):
        found.append(
            f"a second call of task {task.name} returns the result of the first one, which nobody can get without a "
            "result backend"
        )
    return found


def _limit(app: Any, task: Any) -> float | None:
    found = task.time_limit or app.conf.task_time_limit
    return None if found is None else float(found)


def _say(sender: Any, **_: Any) -> None:
    for text in problems(sender.app):
        warn("%s", text)


_ = signals.worker_ready.connect(_say, dispatch_uid="dblock.celery.checks", weak=False)
