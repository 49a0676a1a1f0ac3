"""Names of the host, process, program and task that run this code.

Rule: they are for people who inspect a lock. The protocol compares owner tokens, never these names: pools may give all
threads one name, and containers may share a host name and pid 1.
"""

from __future__ import annotations

import os
import socket
import sys
from contextvars import ContextVar
from pathlib import PurePath
from typing import Any, Final

from dblock.core.validation import TEXT_LENGTH


def process_identity() -> dict[str, Any]:
    """Host, pid and program, by the names of the statements' parameters."""
    path = PurePath(sys.argv[0] if sys.argv and sys.argv[0] else sys.executable or "python")
    program = path.parent.name if path.name == "__main__.py" else path.name
    if program.startswith("-"):  # python -c
        program = "python"
    return {"host": storable(socket.gethostname()), "pid": os.getpid(), "program": storable(program)}


acting_for: Final[ContextVar[str]] = ContextVar("dblock_acting_for", default="")
"""The id of the Celery task, not sent yet, to which locks belong that are taken meanwhile."""


def celery_task_id() -> str:
    """The id of the Celery task that this thread runs, else empty; this does not import Celery."""
    if told := acting_for.get():
        return storable(told)
    task = getattr(sys.modules.get("celery"), "current_task", None)
    return storable(str(task.request.id or "")) if task else ""


def storable(text: str) -> str:
    """`text` without what a column cannot store."""
    return text.encode("utf-8", "replace").decode().replace("\0", "")[:TEXT_LENGTH]
