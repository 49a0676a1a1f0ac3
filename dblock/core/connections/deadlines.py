"""Statements that are not answered in time.

Their connection is cut, so that whatever call of whatever driver waits for the answer ends with an error. One thread
for the process, for those of an event loop as well. A statement that is answered costs an entry in a dictionary: the
thread sleeps until the earliest moment that it knows, and is only woken for an earlier one.

Rule: whoever takes an entry out of the dictionary, the thread or the statement itself, decides: a connection that was
cut is never used again.
"""

from __future__ import annotations

import math
import threading
from typing import Final, Protocol

from dblock.core import clock
from dblock.core.log import warn
from dblock.core.semaphore import BinarySemaphore

LINGER: Final = 1.0
"""Seconds for which the thread goes on when there is nothing to watch."""


class Cuttable(Protocol):
    """A connection."""

    wire: int
    """The descriptor by which it can be cut; less than 0: it cannot be."""

    def cut(self) -> None:
        """End whatever waits for an answer on it."""
        ...


class Deadlines:
    """Until when the statements of this process that are under way are to be answered."""

    def __init__(self) -> None:
        self._due: dict[Cuttable, float] = {}
        self._wake_at = math.inf
        """The local time at which the thread looks again; never, while it looks or there is none."""
        self._look_again = BinarySemaphore()
        self._lock = threading.RLock()  # a signal handler may send a statement
        self._thread: threading.Thread | None = None

    def watch(self, connection: Cuttable, moment: float) -> None:
        """Cut it at that local time, where it can be, unless its statement has been answered."""
        if connection.wire >= 0:
            self._due[connection] = moment
            if moment < self._wake_at:
                self._look()

    def answered(self, connection: Cuttable) -> bool:
        """The statement has ended; False if the connection was cut."""
        return connection.wire < 0 or self._due.pop(connection, None) is not None

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
                warn("cannot watch over statements: %s", error)

    def _watch(self) -> None:
        idle = False
        while True:
            self._wake_at = math.inf  # whoever begins during the look makes us look again
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
