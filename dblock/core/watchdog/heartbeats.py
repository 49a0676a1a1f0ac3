"""Keeping the places of waiters in the queues of one database, one statement for all that are due.

Rule: it fails softly. A place that could not be kept is tried again at the next heartbeat, or its waiter joins anew.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from dblock.core.errors import LockError, Reason
from dblock.core.log import warn
from dblock.core.protocol import queue
from dblock.core.protocol.queue import Place
from dblock.core.protocol.steps import Steps
from dblock.core.protocol.store import Store


@dataclass(slots=True)
class KeptPlace:
    """A place in a queue that is to be kept."""

    place: Place
    store: Store
    loop: Any
    due: float
    served: bool = False
    """Was the key granted there? Then its row is of no more use."""

    def abandoned(self) -> bool:
        """Has its flow not been seen for long? It was interrupted on its way out, or has ended with its event loop."""
        database = self.store.database
        return not self.served and database.now() > self.place.seen + database.timing.unresponsive_after


class Heartbeat:
    """Places in the queues of one database that are to be kept by one statement."""

    def __init__(self, store: Store, kept: Sequence[KeptPlace], leave: Callable[[str], None]) -> None:
        self.store = store
        self.leases = [each.place for each in kept if not each.served]
        self._served = [each.place.owner for each in kept if each.served]
        self._leave = leave
        self.answered = False

    def steps(self) -> Steps[None]:
        """Keep them, and delete those that were served."""
        database = self.store.database
        until = database.now() + database.timing.heartbeat_interval / 2
        try:
            if self.leases:
                yield from queue.heartbeat(database, self.leases, until)
            if self._served:
                yield from queue.leave_queue(database, self._served, until - database.now())
                for owner in self._served:
                    self._leave(owner)
        except LockError as error:
            warn("could not keep %d places in queues, trying again: %s", len(self.leases), error)
        finally:
            self.answered = True

    def set_reason_if_lost(self, reason: Reason) -> None:
        """A place has none: its waiter joins anew."""

    def give_up(self) -> None:
        """Nobody can run this."""
        self.answered = True
        for owner in (*self._served, *(place.owner for place in self.leases)):
            self._leave(owner)
