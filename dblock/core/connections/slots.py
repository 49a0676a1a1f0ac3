"""How many connections are lent at a time, and who gets the next one: whoever came first.

Those who go on with something that they have begun are served before those who begin. A call says "look", and keeps
room for a moment: a thread that has just given a connection back, and wants one again, would be faster than whoever was
called. For a moment only, since that one may not look for a long time (a blocked event loop), or never.

Rule: every entry ends with its flow, or by time; a call that is lost costs the others a pause.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Final
from weakref import ref

from dblock.core import clock
from dblock.core.wakeup.registry import Wakeup

MOMENT: Final = 0.1
"""Seconds for which room is kept for whoever was called."""


class Place(Wakeup):
    """One in the line; it lives with whoever waits there."""

    __slots__ = ("until", "urgent")

    def __init__(self, until: float, *, urgent: bool = False) -> None:
        super().__init__()
        self.until, self.urgent = until, urgent


class Slots:
    """Those of a pool for one purpose; whoever uses them has the pool's lock."""

    def __init__(self, most: float) -> None:
        self.most = most
        self.lent = set[int]()
        """The ids of the connections; whoever was interrupted may have lost one."""
        self._lines = OrderedDict[ref[Place], None](), OrderedDict[ref[Place], None]()
        """Those who wait, and have not been called: the urgent ones, and the others."""
        self._called = dict[ref[Place], float]()
        """Those who were called and have not looked yet, and the local time until which room is kept for them."""

    def has_room(self) -> bool:
        """Is there one that is not lent?"""
        return len(self.lent) < self.most

    def has_line(self, *, urgent: bool = False) -> bool:
        """Is whoever comes, or whoever comes with something urgent, behind others?"""
        return any(self._next(line) is not None for line in (self._lines[:1] if urgent else self._lines) if line)

    def may_enter(self, *, urgent: bool) -> bool:
        """May whoever comes have one at once?"""
        if not (self._called or self._lines[0] or self._lines[1]):  # mostly
            return len(self.lent) < self.most
        return self._has_room_to_spare() and not self.has_line(urgent=urgent)

    def looks(self, place: Place) -> bool:
        """May one that waits have one now? Room was kept if it was called; else what is to spare, if a call is lost."""
        called = self._called.pop(ref(place), None) is not None
        return self.has_room() if called else self._has_room_to_spare()

    def join(self, place: Place, *, again: bool = False) -> None:
        """Wait to be called, behind all others of one's kind, or `again`, before them."""
        line = self._lines[not place.urgent]
        line[ref(place)] = None
        line.move_to_end(ref(place), last=not again)
        self._call()

    def leave(self, place: Place, *, served: bool) -> None:
        """Wait no more. Whoever has not been served may have been called: the next one is."""
        for each in (*self._lines, self._called):
            _ = each.pop(ref(place), None)
        if not served:
            self._call()

    def free(self, connection: int) -> bool:
        """One is lent no more; False if it was not."""
        if connection not in self.lent:
            return False
        self.lent.remove(connection)
        if self._lines[0] or self._lines[1]:
            self._call()
        return True

    def _call(self) -> None:
        """Let the next ones look, as far as there is room."""
        for line in self._lines:
            while line and self._has_room_to_spare() and (place := self._next(line)) is not None:
                del line[ref(place)]
                self._called[ref(place)] = clock.now() + MOMENT
                place.notify()

    def _has_room_to_spare(self) -> bool:
        if not self._called:
            return self.has_room()
        now = clock.now()
        self._called = {place: end for place, end in self._called.items() if end > now and self._waits(place)}
        return len(self.lent) + len(self._called) < self.most

    def _next(self, line: OrderedDict[ref[Place], None]) -> Place | None:
        """The first one; those who wait no more are struck out."""
        while line:
            found = self._waits(next(iter(line)))
            if found is not None:
                return found
            _ = line.popitem(last=False)
        return None

    @staticmethod
    def _waits(place: ref[Place]) -> Place | None:
        """Nobody waits there who was interrupted and forgot it, whose time is up, or whose event loop does not run."""
        found = place()
        return found if found is not None and clock.now() < found.until and found.responsive() else None
