"""The slots of a pool: how many connections are lent at a time, and to which waiter the next one goes.

First come, first served, waiters with priority before others. A notification reserves a slot: otherwise a thread that
returns a connection and wants one again would be faster than the notified waiter. For a moment only, since that waiter
may claim the slot late (a blocked event loop), or never.

Rule: every entry ends with its flow, or by time; a lost notification costs the others a pause.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Final
from weakref import ref

from dblock.core import clock
from dblock.core.wakeup.registry import Wakeup

RESERVATION: Final = 0.1
"""Seconds for which a slot is reserved for a notified waiter."""


class SlotWaiter(Wakeup):
    """A waiter for a slot; the waiting call keeps it alive."""

    __slots__ = ("priority", "until")

    def __init__(self, until: float, *, priority: bool = False) -> None:
        super().__init__()
        self.until, self.priority = until, priority


class Slots:
    """The slots of a pool for one purpose; callers hold the pool's lock."""

    def __init__(self, most: float) -> None:
        self.most = most
        self.lent = set[int]()
        """The ids of the connections; an interrupted caller may have lost one."""
        self._lines = OrderedDict[ref[SlotWaiter], None](), OrderedDict[ref[SlotWaiter], None]()
        """The waiters that have not been notified: with priority, and others."""
        self._notified = dict[ref[SlotWaiter], float]()
        """The notified waiters that have not claimed their slots yet, and until when these are reserved."""

    def has_room(self) -> bool:
        """Whether a slot is free or reserved."""
        return len(self.lent) < self.most

    def has_line(self, *, priority: bool = False) -> bool:
        """Whether a newcomer, with or without priority, has to queue behind others."""
        return any(self._next(line) is not None for line in (self._lines[:1] if priority else self._lines) if line)

    def may_enter(self, *, priority: bool) -> bool:
        """Whether a newcomer may have a slot at once."""
        if not (self._notified or self._lines[0] or self._lines[1]):  # mostly
            return len(self.lent) < self.most
        return self._has_room_to_spare() and not self.has_line(priority=priority)

    def try_claim(self, waiter: SlotWaiter) -> bool:
        """Claim a slot for a waiter: the one that its notification reserved, else one that is free."""
        reserved = self._notified.pop(ref(waiter), None) is not None
        return self.has_room() if reserved else self._has_room_to_spare()

    def join(self, waiter: SlotWaiter, *, again: bool = False) -> None:
        """Enqueue behind all waiters of the same kind, or with `again` before them."""
        line = self._lines[not waiter.priority]
        line[ref(waiter)] = None
        line.move_to_end(ref(waiter), last=not again)
        self._notify_next()

    def leave(self, waiter: SlotWaiter, *, served: bool) -> None:
        """Dequeue. A waiter that was not served may have been notified, so the next one is notified instead."""
        for each in (*self._lines, self._notified):
            _ = each.pop(ref(waiter), None)
        if not served:
            self._notify_next()

    def free(self, connection: int) -> bool:
        """Free the slot of a connection; False if it had none."""
        if connection not in self.lent:
            return False
        self.lent.remove(connection)
        if self._lines[0] or self._lines[1]:
            self._notify_next()
        return True

    def _notify_next(self) -> None:
        """Notify the next waiters, one for each free slot."""
        for line in self._lines:
            while line and self._has_room_to_spare() and (waiter := self._next(line)) is not None:
                del line[ref(waiter)]
                self._notified[ref(waiter)] = clock.now() + RESERVATION
                waiter.notify()

    def _has_room_to_spare(self) -> bool:
        if not self._notified:
            return self.has_room()
        now = clock.now()
        self._notified = {waiter: end for waiter, end in self._notified.items() if end > now and self._waits(waiter)}
        return len(self.lent) + len(self._notified) < self.most

    def _next(self, line: OrderedDict[ref[SlotWaiter], None]) -> SlotWaiter | None:
        """The first waiter; dead entries before it are removed."""
        while line:
            found = self._waits(next(iter(line)))
            if found is not None:
                return found
            _ = line.popitem(last=False)
        return None

    @staticmethod
    def _waits(waiter: ref[SlotWaiter]) -> SlotWaiter | None:
        """The waiter; None if its call was interrupted, its time is up, or its event loop does not run."""
        found = waiter()
        return found if found is not None and clock.now() < found.until and found.responsive() else None
