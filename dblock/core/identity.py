"""Who is running this code, as far as it helps a person who looks at a lock."""

from __future__ import annotations

import os
import socket
import sys
import threading
from functools import lru_cache
from pathlib import PurePath

from dblock.core.flows import current_task
from dblock.core.values import TEXT_LENGTH, Identity


def identity() -> Identity:
    """The identity of the running flow."""
    host, program = _process()
    task = current_task()
    name = threading.current_thread().name if task is None else f"task {task.get_name()}"
    return Identity(host, os.getpid(), _storable(name), program, _storable(_celery_task_id()))


@lru_cache(maxsize=1)
def _process() -> tuple[str, str]:
    path = PurePath(sys.argv[0] if sys.argv and sys.argv[0] else sys.executable or "python")
    name = path.parent.name if path.name == "__main__.py" else path.name
    return _storable(socket.gethostname()), _storable(name)


def _celery_task_id() -> str:
    """The id of the Celery task that this thread is running, without importing Celery."""
    celery = sys.modules.get("celery")
    task = getattr(celery, "current_task", None)
    return str(task.request.id or "") if task else ""


def _storable(text: str) -> str:
    return text.encode("utf-8", "replace").decode().replace("\0", "")[:TEXT_LENGTH]
