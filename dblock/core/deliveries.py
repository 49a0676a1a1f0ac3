"""Calls of the application's code: log handlers, callbacks of locks, observers of events, receivers of signals.

Such code may block, so the threads that keep leases alive and the event loops that renewals run on only enqueue each
call here. One thread makes the calls in the order in which they were enqueued, and ends when the queue is empty. A call
that takes long delays those behind it, and nothing else: what ends the body under a lost lock is not called here, but
by the watching thread (see `Watchdog.announce`).

When the process ends, the calls that are left are made first, unless they take longer than `Timing.patience`.

Rule: `put` never waits, and never runs code of the application.
"""

from __future__ import annotations

import contextlib
import logging
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Final

from dblock.core import timing

PENDING: Final = 100_000
"""Longest queue of calls; beyond it the oldest are dropped."""
NAME: Final = "dblock deliveries"
"""Name of the thread."""


class Deliveries:
    """The calls of one process."""

    def __init__(self) -> None:
        self.forked()

    def forked(self) -> None:
        """Empties the queue in a forked child, which does not have the thread; the parent makes the pending calls."""
        self._calls = deque[Callable[[], object]]()
        self._mutex = threading.RLock()  # a signal handler may log
        self._thread: threading.Thread | None = None
        """The thread that makes the calls; None while there is nothing to do, or none can be started."""
        self._dropped = 0
        self._finalized = False
        """Whether `close` is registered for the end of a child of multiprocessing."""

    @property
    def pending(self) -> bool:
        """Whether a call is enqueued or under way."""
        return bool(self._calls) or self._thread is not None

    @property
    def stranded(self) -> bool:
        """Whether calls are left for which no thread could be started."""
        return bool(self._calls) and self._thread is None

    def put(self, call: Callable[[], object]) -> None:
        """Enqueue a call for the thread."""
        with self._mutex:
            if len(self._calls) >= PENDING:
                _ = self._calls.popleft()
                self._dropped += 1
            self._calls.append(call)
        self.start()

    def start(self) -> None:
        """Start the thread if calls are left and it does not run. If that fails, the next caller tries again.

        A watchdog that runs is one, once a second.
        """
        with self._mutex:
            if not self._calls or self._thread is not None:
                return
            util = sys.modules.get("multiprocessing.util")
            if util is not None and not self._finalized:  # a child of multiprocessing ends without atexit
                self._finalized = True
                util.Finalize(None, self.close, exitpriority=-1)  # after the watchdog
            self._thread = threading.Thread(target=self._work, name=NAME, daemon=True)
            try:
                self._thread.start()
            except BaseException as error:
                self._thread = None  # if it runs nevertheless, it ends at once
                if not isinstance(error, RuntimeError):  # out of threads, or the interpreter is ending
                    raise

    def is_calling(self) -> bool:
        """Whether the running thread is making such a call."""
        return threading.current_thread() is self._thread

    def flush(self, seconds: float) -> bool:
        """Wait until all calls have been made; False if that takes longer."""
        end = time.monotonic() + seconds
        while self.pending:
            if time.monotonic() > end:
                return False
            self.start()
            if (call := self._next(None)) is not None:  # no thread can be started: the interpreter is ending, say
                _make(call)
            else:
                time.sleep(0.002)
        return True

    def close(self) -> None:
        """Make the remaining calls at the end of the process."""
        _ = self.flush(timing.DEFAULT.patience)

    def _work(self) -> None:
        while (call := self._next(threading.current_thread())) is not None:
            _make(call)

    def _next(self, thread: threading.Thread | None) -> Callable[[], object] | None:
        """The next call for that thread; None if there is none, or another thread makes the calls."""
        with self._mutex:
            if self._thread is not thread:
                return None
            if self._calls:
                return self._calls.popleft()
            if self._dropped:
                dropped, self._dropped = self._dropped, 0
                return partial(_tell_dropped, dropped)
            self._thread = None
            return None


def _make(call: Callable[[], object]) -> None:
    with contextlib.suppress(BaseException):  # sys.exit() in a callback ends no thread that others need
        _ = call()


def _tell_dropped(dropped: int) -> None:
    text = "%d calls of log handlers, callbacks and observers of locks were dropped: one of them took too long"
    logging.getLogger("dblock").warning(text, dropped)


deliveries = Deliveries()
"""The calls of this process; a fork empties the queue."""
