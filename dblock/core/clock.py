"""The local clock that trust is measured with.

Rule: it is only ever compared with itself, never with a database's or another machine's clock. It must not be set, and
it must go on while the machine sleeps: on Linux CLOCK_MONOTONIC stops during suspend, while the lease in the database
runs on, so CLOCK_BOOTTIME it is (clock_gettime(2)); elsewhere the monotonic clock.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial

_BOOTTIME: int | None = getattr(time, "CLOCK_BOOTTIME", None)

now: Callable[[], float] = time.monotonic if _BOOTTIME is None else partial(time.clock_gettime, _BOOTTIME)
"""Seconds since some fixed moment of this machine."""
