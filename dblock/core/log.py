"""The logger `dblock`: problems that no caller can be given as an exception.

Handlers, filters and the record factory are code of the application: they run in another thread (`deliveries`), in a
copy of the context of the code that logs. A record shows the thread and time of that code.

Rule: logging neither raises nor waits, and foreign text cannot forge a line.
"""

from __future__ import annotations

import contextlib
import logging
import sys
from contextvars import copy_context
from typing import Any

from dblock.core.deliveries import deliveries
from dblock.core.text import printable

log = logging.getLogger("dblock")
log.addHandler(logging.NullHandler())


def warn(message: str, *args: object, exc_info: bool = False) -> None:
    """Log a warning from the delivery thread."""
    _log_later(logging.WARNING, message, args, sys.exc_info() if exc_info else None)


def inform(message: str, *args: object) -> None:
    """Log at INFO from the delivery thread."""
    if log.isEnabledFor(logging.INFO):
        _log_later(logging.INFO, message, args, None)


def _log_later(level: int, message: str, args: tuple[object, ...], error: Any) -> None:
    path, line, function, _ = log.findCaller(stacklevel=3)
    record = logging.LogRecord(log.name, level, path, line, message, args, error, function)
    context = copy_context()
    deliveries.put(lambda: context.run(_log, record, args))


def _log(record: logging.LogRecord, args: tuple[object, ...]) -> None:
    with contextlib.suppress(Exception):
        if log.isEnabledFor(record.levelno):
            record.msg, *rest = one_line(record.msg, *args)
            record.args = tuple(rest)
            log.handle(logging.makeLogRecord(vars(record)))


def one_line(message: str, *args: object) -> tuple[object, ...]:
    """Arguments for a logger: unchanged, as handlers group by them, unless the formatted line is not printable."""
    text = message % args if args else message
    shown = printable(text)
    return (message, *args) if shown == text else ("%s", shown)
