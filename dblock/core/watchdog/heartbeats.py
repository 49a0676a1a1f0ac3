"""Heartbeats for the places of waiters in the queues of one database, one statement for all that are due.

Rule: it fails softly. A failed heartbeat is repeated at the next interval, or its waiter joins anew.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from dblock.core.errors import LockError, Reason
from dblock.core.protocol import queue
from dblock.core.protocol.queue import Place
from dblock.core.protocol.steps import Steps
from dblock.core.protocol.store import Store


@dataclass(slots=True)
class KeptPlace:
    """A place in a queue that gets heartbeats."""

    place: Place
    store: Store
    loop: Any
    due: float
    served: bool = False
    """Whether the key was granted to it; then its row is no longer needed."""

    def abandoned(self) -> bool:
        """Whether its flow shows no activity: it was interrupted while it left, or its event loop is closed."""
        database = self.store.database
        if self.loop is not None and self.loop.is_closed():
            return True
        return not self.served and database.now() > self.place.seen + database.timing.unresponsive_after


class Heartbeat:
    """One statement for the heartbeats of many places."""

    def __init__(self, store: Store, kept: Sequence[KeptPlace], leave: Callable[[str], None]) -> None:
        self.store = store
        self.leases = [each.place for each in kept if not each.served]
        self._served = [each.place.owner for each in kept if each.served]
        self._leave = leave
        self.answered = False

    def steps(self) -> Steps[None]:
        """Extend the places, and delete those that were served."""
        database = self.store.database
        until = database.now() + database.timing.heartbeat_interval / 2
        try:
            if self.leases:
                yield from queue.heartbeat(database, self.leases, until)
            if self._served:
                _ = yield from queue.leave_queue(database, self._served, until - database.now())
                for owner in self._served:
                    self._leave(owner)
        except LockError as error:
            database.away(error)
        finally:
            self.answered = True

    def set_reason_if_lost(self, reason: Reason) -> None:
        """Does nothing: a waiter that loses its place joins anew."""

    def give_up(self) -> None:
        """Called if the steps cannot be run."""
        self.answered = True
        for owner in (*self._served, *(place.owner for place in self.leases)):
            self._leave(owner)
