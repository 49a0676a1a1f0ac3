"""What the flows of one process share of a database, above all its local queues.

Rule: there is one site for each store of the process (`dblock.core.runtime`).
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable
from typing import Final

from dblock.core.acquire.local_queue import LocalQueues
from dblock.core.errors import LockStoreError
from dblock.core.protocol import queue
from dblock.core.protocol.sending import Database
from dblock.core.protocol.steps import Steps
from dblock.core.wakeup.local_socket import LocalSockets
from dblock.core.wakeup.registry import Message, Wakeups

CONTENDED: Final = 1000
"""Most keys that are marked as contended."""
REMEMBERED: Final = 100
"""Most keys of semaphores, and slots of each, that a process remembers to have left; also most keys of `Site.ended`."""
NEIGHBOURS: Final = 8
"""After so many hand-overs in a row to and from flows of this machine, the key's holder is expected to be one too."""


class Site:
    """A database, and the waiters of this process."""

    def __init__(self, database: Database, wakeups: Wakeups, sockets: Callable[[], LocalSockets]) -> None:
        self.database = database
        self.wakeups = wakeups
        self.local_queues = LocalQueues(database)
        self.slots: dict[str, list[int]] = {}
        """By key of a semaphore, the slots that this process has left, the last one last: the first to try."""
        self.trying = LocalQueues(database)
        """By key of a semaphore, the flows that try to get a permit without its queue, in the order of their coming."""
        self.ended: dict[str, float] = {}
        """By key of a read-write lock, until when the row behind its shares is there, where that is needed."""
        self._contended: dict[str, tuple[float, int]] = {}
        """The local time at which a key was last found contended, and its hand-overs in a row inside this machine."""
        self.sockets = sockets
        """The sockets by which flows of this process are notified; made when first needed."""

    def note_left(self, semaphore: str, slot: int) -> None:
        """Remember the slot that was left."""
        left = self.slots.setdefault(semaphore, [])
        left[:] = [*left[-REMEMBERED:], slot]
        if len(self.slots) > REMEMBERED:
            _ = self.slots.pop(next(iter(self.slots)), None)

    def tell(self, channel: str, message: Message) -> Steps[bool]:
        """Notify a waiter in this process, on this machine, or through the database; a lost message costs it a poll.

        Returns whether it is on this machine, as far as is known.
        """
        sockets = self.sockets()
        ours = not channel or channel.startswith(sockets.channel)
        if (ours and self.wakeups.notify(message)) or not channel:
            return True
        here = sockets.notify(channel, message.text())
        if not here:
            with contextlib.suppress(LockStoreError):
                yield from queue.call(self.database, channel.partition(".")[0], message)
        return here

    def leave_to_parent(self) -> None:
        """Keep no waiter in a forked child: they are the parent's."""
        self.local_queues.leave_to_parent()
        self.trying.leave_to_parent()
        self.database.latency.leave_to_parent()

    def note_contention(self, key: str) -> None:
        """Mark the key as contended. A flow that is granted the key does not: otherwise the mark would never decay."""
        if len(self._contended) >= CONTENDED:
            self._contended.clear()
        self._contended[key] = self.database.now(), self._mark(key)[1]

    def note_handover(self, key: str, *, here: bool) -> None:
        """Record whether a marked key was handed over inside this machine, where no notification needs the database."""
        since, in_a_row = self._mark(key)
        if since > -math.inf:
            self._contended[key] = since, min(in_a_row + 1, NEIGHBOURS) if here else 0

    def expects_contention(self, key: str) -> bool:
        """Whether a flow of this process waits for that key or tries to take it, or other processes probably wait.

        An estimate, which saves two statements when it is right.
        """
        return key in self.local_queues or (key in self._contended and self._mark(key)[0] > -math.inf)

    def expects_neighbour(self, key: str) -> bool:
        """Whether the holder of a marked key is probably on this machine, so that its release notifies waiters here.

        An estimate, which saves polls when it is right.
        """
        return self._mark(key)[1] >= NEIGHBOURS

    def _mark(self, key: str) -> tuple[float, int]:
        """The mark of a contended key, if it is recent."""
        since, in_a_row = self._contended.get(key, (-math.inf, 0))
        return (since, in_a_row) if self.database.now() < since + self.database.timing.attention else (-math.inf, 0)
