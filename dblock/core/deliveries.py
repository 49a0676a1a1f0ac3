"""Calls of the application's code: log handlers, callbacks of locks, observers of events, receivers of signals.

Such code may block, so the threads that keep leases alive and the event loops that renewals run on only enqueue each
call here. One thread makes the calls in the order in which they were enqueued, and ends when the queue is empty. While
a call takes longer than `Timing.patience`, another thread makes the calls behind it.

When the process ends, the calls that are left are made first, unless they take longer than `Timing.patience`.

Rule: `put` never waits, and never runs code of the application.
"""

from __future__ import annotations

import contextlib
import logging
import math
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Final

from dblock.core import timing

PENDING: Final = 100_000
"""Longest queue of calls; beyond it the oldest are dropped."""
NAME: Final = "dblock deliveries"
"""Name of the threads."""
MOST: Final = 8
"""Most threads, including those whose calls never return."""


class Deliveries:
    """The calls of one process."""

    def __init__(self) -> None:
        self._finalized = self._ends = False
        """Whether `close` is registered for the end of a child of multiprocessing; whether it has been called."""
        self.forked()

    def forked(self) -> None:
        """Empties the queue in a forked child, which has none of the threads; the parent makes the pending calls."""
        self._calls = deque[Callable[[], object]]()
        self._mutex = threading.RLock()  # a signal handler may log
        self._thread: threading.Thread | None = None
        """The thread that takes the next call."""
        self._threads = set[threading.Thread]()
        """That thread, and the threads whose calls take too long."""
        self._begun = math.inf
        """The local time at which the last call began."""
        self._dropped = 0
        self._finalized = False

    @property
    def pending(self) -> bool:
        """Whether a call is enqueued or under way."""
        return bool(self._calls or self._threads)

    def put(self, call: Callable[[], object]) -> None:
        """Enqueue a call for another thread."""
        with self._mutex:
            if len(self._calls) >= PENDING:
                _ = self._calls.popleft()
                self._dropped += 1
            self._calls.append(call)
            self.look()
        if self._ends and self._thread is None:  # Python 3.12 starts no thread any more
            self._call_all_here()

    def look(self) -> None:
        """Start a thread if calls are left and no thread takes them."""
        with self._mutex:
            delayed = time.monotonic() > self._begun + timing.DEFAULT.patience and len(self._threads) < MOST
            if not self._calls or not (self._thread is None or delayed):
                return
            util = sys.modules.get("multiprocessing.util")
            if util is not None and not self._finalized:  # a child of multiprocessing ends without atexit
                self._finalized = True
                util.Finalize(None, self.close, exitpriority=-1)  # after the watchdog
            thread = threading.Thread(target=self._call_all, name=NAME, daemon=True)
            self._threads.add(thread)
            try:
                thread.start()
            except BaseException as error:
                if thread.ident is None:  # else it was interrupted, and the thread runs
                    self._threads.discard(thread)
                if not isinstance(error, RuntimeError):  # out of threads, or the interpreter is ending
                    raise
                return  # the next call, or the watchdog, tries again
            self._thread, self._begun = thread, math.inf

    def is_calling(self) -> bool:
        """Whether the running thread is making such a call."""
        return threading.current_thread() in self._threads

    def flush(self, seconds: float) -> bool:
        """Wait until all calls have been made; False if that takes longer."""
        end = time.monotonic() + seconds
        while self.pending:
            if time.monotonic() > end:
                return False
            self.look()
            time.sleep(0.002)
        return True

    def close(self) -> None:
        """Make the remaining calls at the end of the process."""
        self._ends = True
        self.look()
        if self._thread is None:
            self._call_all_here()
        _ = self.flush(timing.DEFAULT.patience)

    def _call_all(self) -> None:
        me = threading.current_thread()
        while (call := self._next(me)) is not None:
            _call(call)
            del call

    def _call_all_here(self) -> None:
        while self._calls:
            with contextlib.suppress(IndexError):
                _call(self._calls.popleft())

    def _next(self, me: threading.Thread) -> Callable[[], object] | None:
        with self._mutex:
            if self._thread is me and (self._calls or self._dropped):
                self._begun = time.monotonic()
                return self._calls.popleft() if self._calls else self._tell_dropped
            if self._thread is me:
                self._thread, self._begun = None, math.inf
            self._threads.discard(me)
            return None

    def _tell_dropped(self) -> None:
        dropped, self._dropped = self._dropped, 0
        text = "%d calls of log handlers, callbacks and observers of locks were dropped: one of them took too long"
        logging.getLogger("dblock").warning(text, dropped)


def _call(call: Callable[[], object]) -> None:
    with contextlib.suppress(BaseException):  # sys.exit() in a callback ends no thread that others need
        _ = call()


deliveries = Deliveries()
"""The calls of this process; a fork empties the queue."""
