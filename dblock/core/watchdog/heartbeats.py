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
from dblock.core.protocol.steps import Steps
from dblock.core.protocol.store import Store
from dblock.core.wakeup.registry import Wakeup


@dataclass(slots=True)
class Place:
    """A place in a queue that is to be kept."""

    store: Store
    loop: Any
    wakeup: Wakeup
    """Of the flow that waits there."""
    due: float


class Heartbeat:
    """Places in the queues of one database that are to be kept by one statement."""

    def __init__(self, store: Store, owners: Sequence[str], leave: Callable[[str], None]) -> None:
        self.store = store
        self.leases = list(owners)
        self._leave = leave
        self.answered = False

    def steps(self) -> Steps[None]:
        """Keep them."""
        try:
            database = self.store.database
            until = database.now() + database.timing.heartbeat_interval / 2
            yield from queue.heartbeat(database, self.leases, until)
        except LockError as error:
            warn("could not keep %d places in queues, trying again: %s", len(self.leases), error)
        finally:
            self.answered = True

    def set_reason_if_lost(self, reason: Reason) -> None:
        """A place has none: its waiter joins anew."""

    def give_up(self) -> None:
        """Nobody can run this."""
        self.answered = True
        for owner in self.leases:
            self._leave(owner)
