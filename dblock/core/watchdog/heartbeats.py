"""Heartbeats for the places of waiters in the queues of one database, one statement for all that are due.

Rule: it fails softly. A failed heartbeat is repeated at the next interval, or its waiter joins anew.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from dblock.core.errors import LockError
from dblock.core.protocol import queue
from dblock.core.protocol.queue import Place
from dblock.core.protocol.steps import Steps
from dblock.core.protocol.store import Store


@dataclass(slots=True, eq=False)
class KeptPlace:
    """A place in a queue that gets heartbeats."""

    place: Place
    store: Store
    loop: Any
    due: float
    """The local time of its next heartbeat; infinity while one is under way: a database that hangs gets no second."""

    def abandoned(self) -> bool:
        """Whether its flow shows no activity: it was interrupted while it left, or its event loop is closed."""
        database = self.store.database
        if self.loop is not None and self.loop.is_closed():
            return True
        return database.now() > self.place.seen + database.timing.unresponsive_after


def heartbeat(store: Store, kept: Sequence[KeptPlace]) -> Steps[None]:
    """Extend the places."""
    database = store.database
    began, interval = database.now(), database.timing.heartbeat_interval
    try:
        yield from queue.heartbeat(database, [each.place for each in kept], began + interval / 2)
    except LockError as error:
        database.away(error)
    finally:
        for each in kept:
            each.due = began + interval
