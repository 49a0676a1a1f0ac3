"""A semaphore that wakes a thread that waits for work.

Rule: a signal handler may set it, also one that interrupts `set` or `wait`.
"""

from __future__ import annotations

import contextlib
import threading


class BinarySemaphore:
    """A flag that any thread sets, any number of times; it wakes the waiting thread once.

    Not `SimpleQueue.get(timeout)`: before Python 3.13 a signal that interrupts it when its time is up makes it wait for
    ever, as it goes on with the rest of the time, which is negative. So does stopping and continuing a process that
    handles SIGCONT.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        _ = self._lock.acquire()

    def set(self) -> None:
        """Wake the thread that waits, or that waits next."""
        with contextlib.suppress(RuntimeError):  # it is set already
            self._lock.release()

    def is_set(self) -> bool:
        """Whether it is set."""
        return not self._lock.locked()

    def wait(self, seconds: float) -> bool:
        """Wait at most so many seconds and clear the flag; returns whether it was set."""
        return self._lock.acquire(timeout=max(seconds, 0.0))
