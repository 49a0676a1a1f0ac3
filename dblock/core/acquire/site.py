"""What the flows of one process share of a database.

Rule: there is one site for each store of the process (`dblock.core.runtime`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING

from dblock.core.acquire.local_queue import LocalQueues
from dblock.core.protocol.sending import Database
from dblock.core.wakeup.registry import Wakeups

if TYPE_CHECKING:
    from dblock.core.wakeup.local_socket import LocalSockets


class Site:
    """A database, and the waiters of this process."""

    def __init__(self, database: Database, wakeups: Wakeups, sockets: Callable[[], LocalSockets]) -> None:
        self.database = database
        self.wakeups = wakeups
        self.local_queues = LocalQueues(database)
        self.slow_waits: dict[str, float] = {}
        """The local time at which a wait for a key was last logged."""
        self.slots: dict[str, list[int]] = {}
        """By key of a semaphore, the slots that this process has left, the last one last: the first to try."""
        self.ended: set[str] = set()
        """Keys of read-write locks whose row behind the shares has been made, where that is needed."""
        self._sockets = sockets

    @functools.cached_property
    def sockets(self) -> LocalSockets:
        """The sockets by which flows of this process are notified; made when first needed."""
        return self._sockets()
