"""What wakes a thread that waits for work.

Rule: it may be set by a signal handler that interrupts whoever sets it or waits.
"""

from __future__ import annotations

import contextlib
import threading


class BinarySemaphore:
    """Set by anybody, any number of times; whoever waits is woken once.

    `SimpleQueue.get(timeout)` would do, but before Python 3.13 a signal that interrupts it when its time is up makes it
    wait for ever: it goes on with what is left of the time, which is negative. So does a process that is stopped
    and continued, if it handles SIGCONT.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        _ = self._lock.acquire()

    def set(self) -> None:
        """Wake whoever waits, or will."""
        with contextlib.suppress(RuntimeError):  # it is set already
            self._lock.release()

    def wait(self, seconds: float) -> bool:
        """Was it set within so many seconds? Takes that back."""
        return self._lock.acquire(timeout=max(seconds, 0.0))
