"""The slots of a pool for one purpose: how many connections are in use at a time, and which waiter gets the next one.

First come, first served, waiters of a higher rank before others. The free slots are reserved for the first waiters:
otherwise a thread that returns a connection and wants one again would be faster than a notified waiter. A waiter that
has missed a poll (its event loop is blocked, its call was interrupted) is passed over until it polls.

Rule: a lost notification costs a poll interval; a waiter that an interrupt has left in the line keeps nobody waiting.
"""

from __future__ import annotations

import contextlib
from bisect import insort

from dblock.core import clock, timing
from dblock.core.wakeup.registry import Wakeup


class SlotWaiter(Wakeup):
    """A waiter for a slot."""

    __slots__ = ("error", "home", "polls_by", "rank", "since", "until")

    def __init__(self, until: float, home: object = None, *, rank: int = 0) -> None:
        """`home`: its event loop; waiters of a higher rank are served first."""
        super().__init__()
        self.since, self.until, self.home, self.rank = clock.now(), until, home, rank
        self.error: BaseException | None = None
        """Why the connection that it has asked for could not be opened."""
        _ = self.attend()

    def attend(self) -> float:
        """Clear its notification; returns the seconds until it polls again, unless it cannot or its time is up.

        The longer it has waited, the more: the polls of a crowd would take the time of its work.
        """
        _ = self.consume()
        now, times = clock.now(), timing.DEFAULT
        interval = min(max(times.local_poll, now - self.since), times.attention)
        self.polls_by = min(now + 2 * interval, self.until)
        return interval


class Slots:
    """The slots for one purpose; callers hold the pool's lock."""

    def __init__(self, most: float) -> None:
        self.most = most
        self.lent = set[int]()
        """The connections that occupy a slot, by id; one that an interrupted caller has lost, until it is collected."""
        self.line = list[SlotWaiter]()

    def join(self, waiter: SlotWaiter) -> None:
        """Enqueue, behind those of its rank."""
        while self.line and self.line[0].until <= clock.now():  # an interrupt has left it there
            del self.line[0]
        insort(self.line, waiter, key=lambda each: -each.rank)

    def leave(self, waiter: SlotWaiter) -> None:
        """Dequeue."""
        with contextlib.suppress(ValueError):
            self.line.remove(waiter)

    def first(self) -> list[SlotWaiter]:
        """The waiters that the free slots are reserved for."""
        now, free, first = clock.now(), self.most - len(self.lent), list[SlotWaiter]()
        for waiter in self.line if free > 0 else ():
            if now < waiter.polls_by:
                first.append(waiter)
                if len(first) >= free:
                    break
        return first
