"""What a task whose run was left out has for a result.

Rule: what is told of a holder is for people: no token, nothing that lets anybody act for it.
"""

from __future__ import annotations

from typing import Any, Final

from dblock.core.errors import LockTimeout

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
