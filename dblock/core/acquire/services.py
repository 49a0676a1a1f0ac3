"""The services of a process for its waiters.

Rule: a waiter works without them: it then sends its own heartbeats, and polls.
"""

from __future__ import annotations

from dblock.core.protocol.queue import QueuePlace


class WaiterServices:
    """The services of a process for its waiters; here none: `dblock.core.runtime.ProcessServices` has them."""

    queues_locally = False
    """Whether the flows of the process wait for a key in one local queue; else each waits alone."""

    @property
    def channel(self) -> str:
        """Where the database notifies the process, now or soon; empty if it cannot."""
        return ""

    @property
    def notifications_ready(self) -> bool:
        """Whether the database notifies the process there now, whichever process releases the key."""
        return False

    def holds(self, key: str) -> bool:
        """Whether a flow of this process holds that key, so that it may hand it over."""
        return False

    def keep(self, place: QueuePlace) -> bool:
        """Send heartbeats for a place in the queue; False if the waiter has to."""
        return False

    def leave(self, owner: str) -> None:
        """End the heartbeats of a place."""

    def withdraw(self, key: str, owner: str) -> bool:
        """In the background delete the place of a token, and release the key, if given, where it was granted to it.

        False if the waiter has to.
        """
        return False

    def listen(self) -> None:
        """Begin to listen for notifications of the database, unless it does already."""
