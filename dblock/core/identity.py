"""Who is running this code.

Rule: for people who look at a lock. The protocol only ever compares it with what the same flow has written before.
"""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Generator
from contextlib import contextmanager
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


_acting_for: Final[ContextVar[str]] = ContextVar("dblock_acting_for", default="")


@contextmanager
def acting_for(task_id: str) -> Generator[None]:
    """What is locked in this block is the Celery task's with that id, which has yet to be sent."""
    before = _acting_for.set(task_id)
    try:
        yield
    finally:
        _acting_for.reset(before)


def celery_task_id() -> str:
    """The id of the Celery task that this thread is running, or nothing; Celery is not imported for it."""
    if told := _acting_for.get():
        return storable(told)
    task = getattr(sys.modules.get("celery"), "current_task", None)
    return storable(str(task.request.id or "")) if task else ""


def storable(text: str) -> str:
    """`text` without what a column cannot take."""
    return text.encode("utf-8", "replace").decode().replace("\0", "")[:TEXT_LENGTH]
