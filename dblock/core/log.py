"""The log `dblock`: what goes wrong where no caller can be given an exception.

Rule: logging never raises.
"""

from __future__ import annotations

import contextlib
import logging

log = logging.getLogger("dblock")
log.addHandler(logging.NullHandler())


def warn(message: str, *args: object, exc_info: bool = False) -> None:
    """Log; but a handler or filter that fails must not end what goes on."""
    with contextlib.suppress(Exception):
        log.warning(message, *args, exc_info=exc_info)
