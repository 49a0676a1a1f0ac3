"""How many connections are lent at a time, and who gets the next one: whoever came first, as a rule.

Rule: a call only says "look", and no room is kept for whoever was called: it may not look for a long time (a blocked
event loop), or never. So a call that is lost costs the others a pause.
"""

from __future__ import annotations

from collections import OrderedDict
from weakref import ref

from dblock.core import clock
from dblock.core.wakeup.registry import Wakeup


class Place(Wakeup):
    """One in the line; it lives with whoever waits there."""

    __slots__ = ("until",)

    def __init__(self, until: float) -> None:
        super().__init__()
        self.until = until


class Slots:
    """Those of a pool for one purpose; whoever uses them has the pool's lock."""

    def __init__(self, most: float) -> None:
        self.most = most
        self.lent = set[int]()
        """The ids of the connections; whoever was interrupted may have lost one."""
        self._line = OrderedDict[ref[Place], None]()
        """Those who wait, and have not been called."""

    def has_room(self) -> bool:
        """Is there one for whoever looks?"""
        return len(self.lent) < self.most

    def has_line(self) -> bool:
        """Is whoever comes behind others?"""
        while self._line and self._waits(next(iter(self._line))) is None:
            _ = self._line.popitem(last=False)
        return bool(self._line)

    def join(self, place: Place, *, first: bool) -> None:
        """Wait to be called, behind all others or before them."""
        self._line[ref(place)] = None
        self._line.move_to_end(ref(place), last=not first)
        if len(self._line) == 1:  # else whoever has come before was called if there is room
            self._call()

    def leave(self, place: Place, *, served: bool) -> None:
        """Wait no more. Whoever has not been served may have been called: the next one is."""
        _ = self._line.pop(ref(place), None)
        if not served:
            self._call()

    def free(self, connection: int) -> bool:
        """One is lent no more; False if it was not."""
        if connection not in self.lent:
            return False
        self.lent.remove(connection)
        if self._line:
            self._call()
        return True

    def _call(self) -> None:
        """Let the next one look, if there is room."""
        called = None
        while called is None and self._line and self.has_room():
            called = self._waits(self._line.popitem(last=False)[0])
            if called is not None:
                called.notify()

    @staticmethod
    def _waits(place: ref[Place]) -> Place | None:
        """Nobody waits there who was interrupted and forgot it, whose time is up, or whose event loop does not run."""
        found = place()
        return found if found is not None and clock.now() < found.until and found.responsive() else None
