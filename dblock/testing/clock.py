"""The clock of locks in memory: of the database and of those who trust in leases, at once.

Rule: it stands still. A test moves it; a flow that waits in vain moves it on to the end of its wait; and while somebody
waits for a flow of the test's own, which may be at work, it goes along with the real one.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager
from datetime import timedelta

from dblock.core.clock import now as real
from dblock.core.values import Seconds


class Clock:
    """Seconds since the locks of a test have been in memory."""

    def __init__(self, move: Callable[[float], None]) -> None:
        """`move` moves it, and sees to what is due on the way."""
        self._move = move
        self._mutex = threading.RLock()
        self._time = 0.0
        self._runs_since: float | None = None
        self._running = 0

    def now(self) -> float:
        """Seconds since `memory()` began."""
        with self._mutex:
            return self._time if self._runs_since is None else self._time + real() - self._runs_since

    def advance(self, seconds: Seconds) -> None:
        """Let time pass: leases are renewed on the way, or end, and `on_lost` and `on_at_risk` have been called.

        A flow that waits for a lock in another thread or task finds out as soon as it runs. Raises ValueError for a
        negative number: neither of the two clocks that this stands for is ever set back.
        """
        span = seconds.total_seconds() if isinstance(seconds, timedelta) else float(seconds)
        if not 0 <= span < float("inf"):
            raise ValueError(f"the clock of locks goes forward, by a number of seconds, not by {seconds!r}")
        self._move(span)

    def set_forward(self, seconds: float) -> None:
        """Move it, and do nothing else."""
        with self._mutex:
            self._time += seconds

    @contextmanager
    def running(self) -> Generator[None]:
        """Let it go along with the real one."""
        with self._mutex:
            self._running += 1
            self._runs_since = real() if self._runs_since is None else self._runs_since
        try:
            yield
        finally:
            with self._mutex:
                self._running -= 1
                if not self._running:
                    self._time, self._runs_since = self.now(), None

    def __repr__(self) -> str:
        return f"<Clock at {self.now():.3f} s>"
