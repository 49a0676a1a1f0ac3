"""Deadlines of statements.

A statement that is not answered in time has its connection cut, so that the driver's call that waits for the answer
ends with an error. One thread does so for the whole process, event loops included. A statement that is answered in time
costs a dictionary entry: the thread sleeps until the earliest known deadline, and is woken only for an earlier one.

Rule: the side that removes the entry, the thread or the statement, decides the outcome. A connection that was cut is
never used again.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import TypeVar

from dblock.core import clock, timing
from dblock.core.connections.connection import PooledConnection
from dblock.core.log import warn
from dblock.core.worker import Worker

T = TypeVar("T")
Cut = Callable[[], object]
"""What is called at a deadline, `PooledConnection.cut` for example. It waits for nothing, and raises nothing."""


class Deadlines(Worker):
    """The deadlines of the statements of this process that are under way."""

    def __init__(self) -> None:
        super().__init__("deadlines", partial(warn, "cannot watch the deadlines of statements: %s"))
        self._due: dict[Cut, float] = {}
        self._used = False
        """Whether there was a deadline since the last round, so that the thread goes on for another one."""

    def arm(self, cut: Cut, moment: float) -> None:
        """Call `cut` at that local time, unless the statement has ended by then."""
        self._due[cut], self._used = moment, True
        if moment < self.wakes_at:
            _ = self.wake()

    def disarm(self, cut: Cut) -> bool:
        """Remove the deadline, as the statement has ended; False if its connection was cut."""
        with self._lock:
            return self._due.pop(cut, None) is not None

    def bound(self, connection: PooledConnection, ask: Callable[[], T], moment: float | None = None) -> T:
        """What `ask` returns, which waits for answers on the connection; TimeoutError if it was cut, at that time.

        By default it has as long as a statement.
        """
        if connection.wire is None:
            return ask()
        try:
            self.arm(connection.cut, clock.now() + timing.DEFAULT.statement_timeout if moment is None else moment)
            answer = ask()
        finally:
            in_time = self.disarm(connection.cut)
        if not in_time:
            raise TimeoutError("the server did not answer in time")
        return answer

    def round(self) -> float:
        now, used, self._used = clock.now(), self._used, False
        soonest = now + timing.DEFAULT.attention if used else math.inf
        for cut, moment in list(self._due.items()):
            if moment > now:
                soonest = min(soonest, moment)
                continue
            with self._lock:  # it is not late if its statement has ended, and the connection perhaps sends another one
                if late := self._due.get(cut) == moment:
                    del self._due[cut]
            if late:
                _ = cut()
        return soonest
