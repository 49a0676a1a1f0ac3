"""A database as the flows of one process share it.

Rule: all that they share of it hangs here, and the process (`dblock.core.runtime`) has one for each of its stores.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

from dblock.core.acquire.local_queue import LocalQueues
from dblock.core.protocol.sending import Database
from dblock.core.wakeup.local_socket import LocalSockets
from dblock.core.wakeup.registry import Wakeups


class Site:
    """The rows, and those of this process who want them."""

    def __init__(self, database: Database, wakeups: Wakeups, sockets: Callable[[], LocalSockets]) -> None:
        self.database = database
        self.wakeups = wakeups
        self.local_queues = LocalQueues(database)
        self.slow_waits: dict[str, float] = {}
        """When a wait for a key was last logged."""
        self._sockets = sockets

    @functools.cached_property
    def sockets(self) -> LocalSockets:
        """Where flows of this process are called; made when somebody needs it."""
        return self._sockets()
