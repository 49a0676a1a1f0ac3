"""Eager tasks on every interpreter: `asyncio.eager_task_factory`, and the same by hand on Python 3.11."""

from __future__ import annotations

import asyncio
import os
from contextvars import copy_context
from typing import Any

EAGER = os.environ.get("DBLOCK_EAGER", "") not in {"", "0"}
"""Whether the actors of the contract suite run on an event loop whose tasks are eager."""


def _by_hand(loop: Any, coroutine: Any, **options: Any) -> Any:
    """A task that has run its first step, with itself as the current task, before this returns; as CPython 3.12 does.

    The task in Python of CPython 3.11 schedules its first step as the last callback of its loop.
    """
    if not loop.is_running():
        return asyncio.Task(coroutine, loop=loop, **options)
    context = options.pop("context", None) or copy_context()
    tasks: Any = asyncio.tasks
    parent = asyncio.current_task(loop)
    task = tasks._PyTask(coroutine, loop=loop, context=context, **options)
    first = loop._ready.pop()
    assert first._callback == task._Task__step
    if parent is not None:
        tasks._leave_task(loop, parent)
    try:
        context.run(task._Task__step)
    finally:
        if parent is not None:
            tasks._enter_task(loop, parent)
    return task


eager_task_factory: Any = getattr(asyncio, "eager_task_factory", _by_hand)
