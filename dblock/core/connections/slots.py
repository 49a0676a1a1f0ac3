"""How many connections are lent at a time, and who gets the next one: whoever came first.

Rule: a call only says "look". Whoever stands in the line enters by itself, once there is room for more than those who
stand before it. So a call that is lost costs a pause, and a place ends with the frame that waits there, and with its
time.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Iterator
from weakref import ref

from dblock.core import clock
from dblock.core.wakeup.registry import Wakeup


class Place(Wakeup):
    """One in the line; it lives with whoever waits there."""

    __slots__ = ("_until",)

    def __init__(self, until: float) -> None:
        super().__init__()
        self._until = until

    def counts(self) -> bool:
        """Does its flow still wait? Not when its time is up, nor while its event loop does not run."""
        return clock.now() < self._until and self.responsive()


class Slots:
    """Those of a pool for one purpose; whoever uses them has the pool's lock."""

    def __init__(self, most: float) -> None:
        self.most = most
        self.lent = set[int]()
        """The ids of the connections; whoever was interrupted may have lost one."""
        self._line = deque[ref[Place]]()

    def has_room(self, place: Place | None = None) -> bool:
        """For whoever has that place in the line, or has only just come."""
        room = self.most - len(self.lent)
        if self._line and room > 0:
            for other in self._places():
                if other is place or room <= 0:
                    break
                room -= 1
        return room > 0

    def join(self, place: Place) -> None:
        """Stand in the line, behind all others."""
        self._line.append(ref(place))

    def leave(self, place: Place) -> None:
        """Stand there no more."""
        with contextlib.suppress(ValueError):
            self._line.remove(ref(place))
        self.call()

    def free(self, connection: int) -> bool:
        """One is lent no more; False if it was not."""
        if connection not in self.lent:
            return False
        self.lent.remove(connection)
        self.call()
        return True

    def call(self) -> None:
        """Let the first one look: there may be room."""
        if self._line:
            for place in self._places():
                place.notify()
                break

    def _places(self) -> Iterator[Place]:
        """Those that count, from the first; of a copy, since a signal handler may come and go meanwhile."""
        while self._line and self._line[0]() is None:
            _ = self._line.popleft()
        for each in tuple(self._line):
            place = each()
            if place is not None and place.counts():
                yield place
