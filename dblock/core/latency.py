"""Distance of a database, measured by the statements that it has answered.

The distance is the shortest recent response time, as BBR estimates a path (Cardwell et al., BBR, ACM Queue 14(5), 2016,
RTprop): a row lock, a flush of the disk or a busy server makes an answer later, nothing makes it earlier.

Rule: it only decides whether to send a statement, and how long that may take. Trust in a lease never rests on it.
"""

from __future__ import annotations

import math

from dblock.core import timing


class Latency:
    """The measured distance of one database."""

    __slots__ = ("_asked", "_before", "_least", "_until", "answered", "distance")

    def __init__(self) -> None:
        self._least = self._before = math.inf
        self._until = self.distance = 0.0
        """`distance`: seconds of a round trip; 0.0 while nothing is known."""
        self.answered = -math.inf
        """The local time of the last answer."""
        self._asked = math.inf

    def first_asked(self, now: float) -> float:
        """Local time at which this process first waited for an answer; minus infinity if it has had one."""
        if self.answered > -math.inf:
            return -math.inf
        self._asked = min(self._asked, now)
        return self._asked

    def leave_to_parent(self) -> None:
        """Reset in a forked child, which has no connection yet; the distance stays."""
        self.answered, self._asked = -math.inf, math.inf

    def observe(self, seconds: float, now: float) -> None:
        """Record that a statement was answered after `seconds`, at the local time `now`."""
        self.answered = now
        if now >= self._until:
            self._before, self._least, self._until = self._least, seconds, now + timing.DEFAULT.surely_answered
        elif seconds < self._least:
            self._least = seconds
        self.distance = min(self._least, self._before)
