"""What a task whose run was left out has for a result, and the signals about tasks that lock.

Rule: what is told of a holder is for people: no token, nothing that lets anybody act for it.
"""

from __future__ import annotations

from typing import Any, Final

from celery.utils.dispatch import Signal

from dblock.core.errors import LockTimeout

task_skipped = Signal(name="task_skipped", providing_args={"task_id", "key", "result"})
"""Sender: the task. Its run was left out, because somebody else held the key; `result` is what it has instead."""

place_lost = Signal(name="place_lost", providing_args={"task_id", "key", "error"})
"""Sender: the task. The lock that its message carried had ended (`error`, a LockLost) before a worker came to it."""

SKIPPED: Final = "dblock_skipped"


def skip_result(task: Any, busy: LockTimeout) -> dict[str, Any]:
    """What `on_busy="skip"` puts in a result's place; as JSON can say it.

    `{"dblock_skipped": true, "key": ..., "task": ..., "holder": {"task_id": ..., "label": ..., "host": ..., "pid": ...,
    "program": ..., "held_for": seconds} or null}`; the label of a locked task begins with its name.
    """
    holder = busy.holder
    return {
        SKIPPED: True,
        "key": busy.key,
        "task": task.name,
        "holder": holder
        and {
            "task_id": holder.identity.celery_task_id,
            "label": holder.label,
            "host": holder.identity.host,
            "pid": holder.identity.pid,
            "program": holder.identity.program,
            "held_for": round(holder.age, 3),
        },
    }


def skipped(result: Any) -> bool:
    """Whether this stands in a result's place because the key was busy."""
    return isinstance(result, dict) and result.get(SKIPPED) is True
