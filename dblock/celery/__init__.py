"""Celery: tasks that lock, and what a Celery app adds to its beat schedule.

    locked_task           a task whose runs, or whose messages, take turns
    LockTask              the base class of such a task
    current_lock          what the running task holds; TaskLock for annotations
    skipped               whether a result is what `on_busy="skip"` put in its place
    task_skipped          Celery signals: somebody else held the key, and the task's run was left out
    place_lost            the lock that a message carried had ended before a worker came to it
    beat_schedule         for the reaper: app.conf.beat_schedule = {**beat_schedule(every=60), ...}
    PersistentScheduler   celery beat -S dblock.celery:PersistentScheduler: any number run, and one is active
    DatabaseScheduler     the same for the schedule of django-celery-beat
    SingleBeat            mixed in before another scheduler, the same
    reaper                makes the task that it calls, in an app without Django

Rule: importing this imports no Celery, so that settings may use it too; the names that need it are resolved at first
use.
"""

from __future__ import annotations

import importlib
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from dblock.celery.beat import PersistentScheduler, SingleBeat
    from dblock.celery.database_beat import DatabaseScheduler
    from dblock.celery.decorator import locked_task
    from dblock.celery.reaping import reaper
    from dblock.celery.results import place_lost, skipped, task_skipped
    from dblock.celery.task import LockTask, TaskLock, current_lock

__all__ = [
    "DatabaseScheduler",
    "LockTask",
    "PersistentScheduler",
    "SingleBeat",
    "TaskLock",
    "beat_schedule",
    "current_lock",
    "locked_task",
    "place_lost",
    "reaper",
    "skipped",
    "task_skipped",
]


def beat_schedule(every: float | timedelta = 600.0, **arguments: Any) -> dict[str, dict[str, Any]]:
    """An entry that has `dblock.reap_expired` run every so many seconds, to be merged into a schedule.

    Args:
        every: seconds between two runs; a message that nobody has fetched by the next one is dropped.
        arguments: those of the task: `using`, `retention`.
    """
    seconds = every.total_seconds() if isinstance(every, timedelta) else float(every)
    entry = {"task": "dblock.reap_expired", "schedule": seconds, "kwargs": arguments, "options": {"expires": seconds}}
    return {"dblock.reap_expired": entry}


_HOMES: Final = {
    **dict.fromkeys(("LockTask", "TaskLock", "current_lock"), "task"),
    **dict.fromkeys(("PersistentScheduler", "SingleBeat"), "beat"),
    **dict.fromkeys(("place_lost", "skipped", "task_skipped"), "results"),
    "DatabaseScheduler": "database_beat",
    "locked_task": "decorator",
    "reaper": "reaping",
}
"""Modules that are loaded when one of their names is used."""


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
