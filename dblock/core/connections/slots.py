"""The slots of a pool for one purpose: how many connections are in use at a time, and which waiter gets the next one.

First come, first served, waiters with priority before others. A waiter stays in the line until it has a slot or its
time is up. The free slots are reserved for the first waiters: otherwise a thread that returns a connection and wants
one again would be faster than a notified waiter. A waiter that has missed a poll (its event loop is blocked, its call
was interrupted) is passed over until it polls.

Rule: a lost notification costs a poll interval; no entry outlives the time of its waiter.
"""

from __future__ import annotations

from weakref import ref

from dblock.core import clock, timing
from dblock.core.connections.connection import IDLE, LENT, PooledConnection
from dblock.core.wakeup.registry import Wakeup

CROWD = 50
"""From so many waiters on each polls less often, so that there are no more polls in all."""
LONGER = 10
"""Up to this factor."""


class SlotWaiter(Wakeup):
    """A waiter for a slot."""

    __slots__ = ("polls_by", "priority", "until")

    def __init__(self, until: float, *, priority: bool = False) -> None:
        super().__init__()
        self.until, self.priority = until, priority
        self.attend(timing.DEFAULT.local_poll)

    def attend(self, interval: float) -> None:
        """Clear its notification; it polls again after the interval, unless it cannot."""
        _ = self.consume()
        self.polls_by = clock.now() + 2 * interval


class Slots:
    """The slots for one purpose; callers hold the pool's lock."""

    def __init__(self, most: float) -> None:
        self.most = most
        self.lent = dict[int, ref[PooledConnection]]()
        """The connections that occupy a slot, by id; an interrupted caller may have lost one."""
        self.line = list[SlotWaiter]()

    def lend(self, connection: PooledConnection) -> PooledConnection:
        """Lend a connection that is idle or new; returns it."""
        if connection.stage is IDLE:
            connection.move(LENT)
        connection.slots = self
        self.lent[id(connection)] = ref(connection)
        return connection

    def free(self, connection: PooledConnection) -> None:
        """Free the slot of the connection, if it has one still."""
        freed = self.lent.pop(id(connection), None)
        connection.slots = None
        if freed is not None and self.line:
            self._notify()

    def occupants(self) -> list[PooledConnection]:
        """The connections that occupy a slot."""
        return [connection for each in list(self.lent.values()) if (connection := each()) is not None]

    def has_room(self, waiter: SlotWaiter | None) -> bool:
        """Whether a slot is free that is not reserved for others; `waiter` is None for a caller outside the line."""
        if waiter is None and not self.line:
            return len(self.lent) < self.most
        return waiter in self._first()

    def poll_interval(self) -> float:
        """Seconds between two polls of a waiter: more in a crowd, whose polls would take the time of its work."""
        return timing.DEFAULT.local_poll * min(max(len(self.line) / CROWD, 1.0), LONGER)

    def join(self, waiter: SlotWaiter, *, first: bool = False) -> None:
        """Enqueue: behind all, with priority behind those that have it too, or as the first."""
        behind = 0 if first else len(self.line)
        if waiter.priority and not first:
            behind = next((place for place, each in enumerate(self.line) if not each.priority), behind)
        self.line.insert(behind, waiter)

    def leave(self, waiter: SlotWaiter) -> None:
        """Dequeue; what was reserved for it goes to the next waiter."""
        if self._remove(waiter):
            self._notify()

    def _notify(self) -> None:
        for waiter in self._first():
            if not waiter.notified():
                waiter.notify()

    def _first(self) -> list[SlotWaiter]:
        """The waiters that the free slots are reserved for; those before them whose time is up are removed."""
        now, free = clock.now(), self.most - len(self.lent)
        first, over = list[SlotWaiter](), list[SlotWaiter]()
        for waiter in self.line if free > 0 else ():
            if now >= waiter.until or waiter.closed():
                over.append(waiter)
            elif waiter.responsive() and now < waiter.polls_by:
                first.append(waiter)
                if len(first) >= free:
                    break
        for waiter in over:
            _ = self._remove(waiter)
        return first

    def _remove(self, waiter: SlotWaiter) -> bool:
        try:
            self.line.remove(waiter)
        except ValueError:
            return False
        return True
