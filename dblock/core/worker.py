"""Threads of the background. All are daemons, so none keeps a process from ending.

A `Worker` works in rounds: it is started when there is something to do, sleeps between two rounds, and ends when it has
nothing to do. `start` runs one piece of work in a thread of its own.

Rule: a thread that cannot be started now (out of threads, or the interpreter is ending) is started by the next need.
"""

from __future__ import annotations

import contextlib
import math
import sys
import threading
from collections.abc import Callable

from dblock.core import clock, timing


def start(work: Callable[[], object], name: str) -> Callable[[], bool]:
    """Run the work in a thread of that name; returns whether it still runs. RuntimeError if it cannot be started."""
    thread = threading.Thread(target=work, name=f"dblock {name}", daemon=True)
    thread.start()
    return thread.is_alive


class BinarySemaphore:
    """A flag that any thread sets, any number of times; it wakes the waiting thread once.

    A signal handler may set it, also one that interrupts `set` or `wait`.

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


class Worker:
    """A thread that works in rounds, for as long as there is something to do."""

    def __init__(
        self, name: str, refused: Callable[[RuntimeError], object] = bool, *, exit_priority: int | None = None
    ) -> None:
        """`refused` logs that the thread cannot be started, and why.

        `exit_priority`: that of `close` among what a child of multiprocessing does at its end, which is without atexit.
        """
        self._name, self._refused, self._exit_priority = f"dblock {name}", refused, exit_priority
        self._thread: threading.Thread | None = None
        self._woken = BinarySemaphore()
        self._lock = threading.RLock()  # a signal handler may wake it
        self.wakes_at = math.inf
        """The next round begins by that local time: a caller with earlier work wakes the thread.

        Infinity while none is sure to come: without a thread, and during the round after which it may end.
        """

    def round(self) -> float:
        """Do what is due; returns the local time of the next round, infinity if there is nothing to do."""
        raise NotImplementedError

    def close(self) -> None:
        """Do what is left at the end of the process."""

    def wake(self) -> RuntimeError | None:
        """Begin a round now, as something is due earlier than planned; returns why no thread can be started for it."""
        self._woken.set()
        util = sys.modules.get("multiprocessing.util")
        if util is not None and (priority := self._exit_priority) is not None:
            self._exit_priority = None  # once
            util.Finalize(None, self.close, exitpriority=priority)
        with self._lock:  # a thread that is about to end decides so under it
            thread = self._thread
            if thread is not None and (thread.ident is None or thread.is_alive()):  # it is being started, or runs
                return None
            try:
                self._thread = threading.Thread(target=self._work, name=self._name, daemon=True)
                self._thread.start()
            except BaseException as error:
                self._thread = None  # the next one who needs it tries again
                if not isinstance(error, RuntimeError):
                    raise
                _ = self._refused(error)
                return error
        return None

    def wake_by(self, moment: float) -> None:
        """Begin a round at that local time at the latest."""
        if moment < self.wakes_at:
            _ = self.wake()

    def _work(self) -> None:
        with self._lock:  # not before `wake` has returned
            if self._thread is not threading.current_thread():
                return  # its start was interrupted: another one is started when needed
        quiet = False  # whether there was nothing to do, and nothing has come since
        try:
            while True:
                latest = clock.now() + timing.DEFAULT.attention
                # What comes during a round, and is due after the next one has begun, wakes it only if none may follow.
                # Else a process that takes thousands of locks looks at all of them again and again.
                self.wakes_at = math.inf if quiet else latest
                moment = self.round()
                with self._lock:
                    if quiet and moment == math.inf and not self._woken.is_set():
                        self._thread = None  # what comes from now on starts another one
                        return
                self.wakes_at = min(moment, latest)
                quiet = not self._woken.wait(self.wakes_at - clock.now()) and moment == math.inf
        finally:
            self.wakes_at = math.inf  # also if an error ends this thread
