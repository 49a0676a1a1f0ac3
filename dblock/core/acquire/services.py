"""The services of a process for its waiters: heartbeats, clean-up in the background, notifications of the database.

Rule: a waiter works without them: it then sends its own heartbeats, and polls.
"""

from __future__ import annotations

from typing import Any

from dblock.core.acquire.listener import Listener
from dblock.core.protocol.queue import QueuePlace
from dblock.core.watchdog.watchdog import Watchdog


class WaiterServices:
    """The services of a process for the waiters of one database; none without a watchdog."""

    def __init__(
        self, watchdog: Watchdog | None = None, listener: Listener | None = None, store: Any = None, loop: Any = None
    ) -> None:
        """`listener`: None if the database cannot notify the process; `loop`: the event loop, None for threads."""
        self.watchdog, self.listener, self._store, self._loop = watchdog, listener, store, loop

    @property
    def queues_locally(self) -> bool:
        """Whether the flows of the process wait for a key in one local queue; else each waits alone."""
        return self.watchdog is not None

    @property
    def notifications_ready(self) -> bool:
        """Whether the database notifies the process now, whichever process releases the key."""
        return self.listener is not None and self.listener.ready

    def listen(self) -> None:
        """Begin to listen for notifications, unless the process does already. Once it does, every waiter polls."""
        if self.listener is not None:
            self.listener.want()

    def keep(self, place: QueuePlace) -> bool:
        """Send heartbeats for a place in the queue; False if the waiter has to."""
        if self.watchdog is not None:
            self.watchdog.keep(self._store, self._loop, place)
        return self.watchdog is not None

    def leave(self, owner: str) -> None:
        """End the heartbeats of a place."""
        if self.watchdog is not None:
            self.watchdog.leave(self._store, self._loop, owner)

    def withdraw(self, key: str, owner: str) -> bool:
        """In the background delete the place of a token, and release the key, if given, where it was granted to it.

        False if the waiter has to.
        """
        if self.watchdog is not None:
            self.watchdog.withdraw(self._store, self._loop, key, owner)
        return self.watchdog is not None
