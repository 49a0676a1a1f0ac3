"""What the process of a waiter does for it.

Rule: a waiter gets on without: it then keeps its place and looks for itself.
"""

from __future__ import annotations

from typing import Protocol

from dblock.core.protocol.queue import Place


class WaiterServices(Protocol):
    """What the process of a waiter does for it."""

    @property
    def shared(self) -> bool:
        """Do its flows wait for a key together? Where they do not, each waits alone."""
        ...

    def holds(self, key: str, /) -> bool:
        """Does a flow of this process hold that key, who may hand it over?"""
        ...

    def holder(self, key: str, /) -> tuple[str, str, float] | None:
        """The flow of this process that holds it, if one does: its thread or task, its label, for how many seconds."""
        ...

    def keep(self, place: Place, /) -> bool:
        """See to it that a place in the queue is kept; False if the waiter has to."""
        ...

    def leave(self, owner: str, /, *, served: bool = False) -> None:
        """The place is needed no more; `served`: the key was granted there, and its row is to be deleted some time."""
        ...

    @property
    def tidies(self) -> bool:
        """Does it delete the row of a place that was served?"""
        ...

    def listen(self) -> None:
        """Begin to listen, if need be."""
        ...

    @property
    def channel(self) -> str:
        """Where the database may call the process, now or soon; empty where nobody can."""
        ...

    @property
    def called(self) -> bool:
        """Does the database call it there now, from wherever the key is given back?"""
        ...


class PollingOnly:
    """Nobody attends to the waiter: it keeps its place and looks for itself."""

    shared = tidies = False
    channel = ""
    called = False

    def holds(self, key: str) -> bool:
        return False

    def holder(self, key: str) -> tuple[str, str, float] | None:
        return None

    def keep(self, place: Place) -> bool:
        return False

    def leave(self, owner: str, *, served: bool = False) -> None:
        pass

    def listen(self) -> None:
        pass
