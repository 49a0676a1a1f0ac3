"""Who is running this code.

Rule: for people who look at a lock. The protocol only ever compares it with what the same flow has written before.
"""

from __future__ import annotations

import os
import socket
import sys
from pathlib import PurePath
from typing import Any

from dblock.core.validation import TEXT_LENGTH


def process_identity() -> dict[str, Any]:
    """Host, pid and program, by the names of the statements' parameters."""
    path = PurePath(sys.argv[0] if sys.argv and sys.argv[0] else sys.executable or "python")
    program = path.parent.name if path.name == "__main__.py" else path.name
    if program.startswith("-"):  # python -c
        program = "python"
    return {"host": storable(socket.gethostname()), "pid": os.getpid(), "program": storable(program)}


def celery_task_id() -> str:
    """The id of the Celery task that this thread is running, or nothing; Celery is not imported for it."""
    task = getattr(sys.modules.get("celery"), "current_task", None)
    return storable(str(task.request.id or "")) if task else ""


def storable(text: str) -> str:
    """`text` without what a column cannot take."""
    return text.encode("utf-8", "replace").decode().replace("\0", "")[:TEXT_LENGTH]
