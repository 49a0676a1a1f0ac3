"""What the process of a waiter does for it.

Rule: a waiter gets on without: it then keeps its place and looks for itself.
"""

from __future__ import annotations

from typing import Protocol

from dblock.core.acquire.local_queue import LocalQueue, LocalWaiter, TakeAttempt
from dblock.core.wakeup.registry import Wakeup


class WaiterServices(Protocol):
    """What the process of a waiter does for it."""

    def keep(self, owner: str, wakeup: Wakeup, /) -> bool:
        """See to it that a place in the queue, named by its owner token, is kept; False if the waiter has to.

        `wakeup` is the waiter's, and tells whether it can still answer.
        """
        ...

    def leave(self, owner: str, /) -> None:
        """The place is needed no more."""
        ...

    def enter(self, waiter: LocalWaiter, take_attempt: TakeAttempt | None, /) -> LocalQueue | None:
        """Wait with those of this process who want the key too; None where everybody waits alone."""
        ...

    def listen(self) -> None:
        """Begin to listen, if need be."""
        ...

    @property
    def channel(self) -> str:
        """Where the process listens, or soon will; empty where it cannot."""
        ...

    @property
    def called(self) -> bool:
        """Does the database call it there now, from wherever the key is given back?"""
        ...


class PollingOnly:
    """Nobody attends to the waiter: it keeps its place and looks for itself."""

    channel = ""
    called = False

    def keep(self, owner: str, wakeup: Wakeup) -> bool:
        return False

    def leave(self, owner: str) -> None:
        pass

    def enter(self, waiter: LocalWaiter, take_attempt: TakeAttempt | None) -> LocalQueue | None:
        return None

    def listen(self) -> None:
        pass
