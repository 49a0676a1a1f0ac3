"""Deadlines of statements.

A statement that is not answered in time has its connection cut, so that the driver's call that waits for the answer
ends with an error. One thread does so for the whole process, event loops included. A statement that is answered in time
costs a dictionary entry: the thread sleeps until the earliest known deadline, and is woken only for an earlier one.

Rule: the side that removes the entry, the thread or the statement, decides the outcome. A connection that was cut is
never used again.
"""

from __future__ import annotations

import math
import threading
from typing import Final, Protocol

from dblock.core import clock
from dblock.core.log import warn
from dblock.core.semaphore import BinarySemaphore

LINGER: Final = 1.0
"""Seconds for which the thread lives on without a deadline."""


class Cuttable(Protocol):
    """A connection."""

    shutdown_fd: int
    """The descriptor by which it can be cut; less than 0 if it cannot be."""

    def cut(self) -> None:
        """End the call that waits for an answer on it."""
        ...


class Deadlines:
    """The deadlines of the statements of this process that are under way."""

    def __init__(self) -> None:
        self._due: dict[Cuttable, float] = {}
        self._wake_at = math.inf
        """The local time at which the thread wakes; infinity while it is awake or does not exist."""
        self._look_again = BinarySemaphore()
        self._lock = threading.RLock()  # a signal handler may send a statement
        self._thread: threading.Thread | None = None

    def arm(self, connection: Cuttable, moment: float) -> None:
        """Cut the connection at that local time, if it can be, unless its statement has ended by then."""
        if connection.shutdown_fd >= 0:
            self._due[connection] = moment
            if moment < self._wake_at:
                self._look()

    def disarm(self, connection: Cuttable) -> bool:
        """Remove the deadline, as the statement has ended; False if the connection was cut."""
        return connection.shutdown_fd < 0 or self._due.pop(connection, None) is not None

    def _look(self) -> None:
        self._look_again.set()
        with self._lock:  # a thread that is about to end decides so under it
            if self._thread is not None and (self._thread.ident is None or self._thread.is_alive()):
                return
            self._thread = threading.Thread(target=self._watch, name="dblock deadlines", daemon=True)
            try:
                self._thread.start()
            except BaseException as error:
                self._thread = None  # the next statement tries again
                if not isinstance(error, RuntimeError):  # out of threads, or the interpreter is ending
                    raise
                warn("cannot watch the deadlines of statements: %s", error)

    def _watch(self) -> None:
        idle = False
        while True:
            self._wake_at = math.inf  # a deadline that is set during this round starts another one
            now = clock.now()
            soonest = now + LINGER
            for connection, moment in list(self._due.items()):
                if moment > now:
                    soonest = min(soonest, moment)
                elif self._due.pop(connection, None) is not None:
                    connection.cut()
                del connection
            with self._lock:
                if idle and not self._due:
                    self._thread = None
                    return
            idle = not self._due
            self._wake_at = soonest
            if self._look_again.wait(soonest - now):
                idle = False
