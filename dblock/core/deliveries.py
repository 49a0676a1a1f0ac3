"""Calls of the application's code: log handlers, callbacks of locks, observers of events, receivers of signals.

Such code may block, so the threads that keep leases alive and the event loops that renewals run on only enqueue each
call here. One thread makes the calls in the order in which they were enqueued. A call that takes long delays those
behind it, and nothing else: what ends the body under a lost lock is not called here, but by the watching thread (see
`Watchdog.announce`).

When the process ends, the calls that are left are made first, unless they take longer than `Timing.patience`.

Rule: `put` never waits, and never runs code of the application.
"""

from __future__ import annotations

import contextlib
import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Final

from dblock.core import timing
from dblock.core.worker import Worker

PENDING: Final = 100_000
"""Longest queue of calls; beyond it the oldest are dropped."""
DROPPED: Final = "%d calls of log handlers, callbacks and observers of locks were dropped: one of them took too long"
"""What is logged of that, when the others have been made."""


class Deliveries(Worker):
    """The calls of one process."""

    def __init__(self) -> None:
        self.forked()

    def forked(self) -> None:
        """Empties the queue in a forked child, which does not have the thread; the parent makes the pending calls."""
        super().__init__("deliveries", exit_priority=-1)  # after the watchdog
        self._calls = deque[Callable[[], object]](maxlen=PENDING)
        self._calling = False
        """Whether a call is under way."""
        self._dropped = 0

    @property
    def pending(self) -> bool:
        """Whether a call is enqueued or under way."""
        return bool(self._calls) or self._calling

    def put(self, call: Callable[[], object]) -> None:
        """Enqueue a call for the thread. If none can be started, the next caller and the watchdog try again."""
        with self._lock:
            if len(self._calls) == PENDING:
                self._dropped += 1
            self._calls.append(call)
        _ = self.wake()

    def flush(self, seconds: float) -> bool:
        """Wait until all calls have been made; False if that takes longer, or one of them asks for it."""
        end = time.monotonic() + seconds
        while self.pending:
            if time.monotonic() > end or threading.current_thread() is self._thread:
                return False
            if self.wake() is not None:  # no thread can be started: the interpreter is ending, say
                _ = self._make_next()
            else:
                time.sleep(0.002)
        return True

    def close(self) -> None:
        """Make the remaining calls at the end of the process."""
        _ = self.flush(timing.DEFAULT.patience)

    def round(self) -> float:
        """Make all calls."""
        self._calling = True
        while self._make_next():
            pass
        self._calling = False
        return math.inf

    def _make_next(self) -> bool:
        """Make the first call that is left, or say how many were dropped; False if there is nothing to do."""
        with self._lock:
            if self._calls:
                call = self._calls.popleft()
            elif self._dropped:
                call, self._dropped = partial(logging.getLogger("dblock").warning, DROPPED, self._dropped), 0
            else:
                return False
        with contextlib.suppress(BaseException):  # sys.exit() in a callback ends no thread that others need
            _ = call()
        return True


deliveries = Deliveries()
"""The calls of this process; a fork empties the queue."""
