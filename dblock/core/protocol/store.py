"""What the core needs of a face: a database, and who runs statements on it.

Rule: what is below `runtime` knows no more than this of how a statement gets to the database.
"""

from __future__ import annotations

from typing import Protocol

from dblock.core.protocol.sending import Database
from dblock.core.protocol.steps import Execute, Rows, Sleep, Wait
from dblock.core.statements.base import Statement
from dblock.core.wakeup.listener import NotificationSource


class Store(NotificationSource, Protocol):
    """A database, and who runs statements on it; a lock's row is found by its store and its key."""

    @property
    def database(self) -> Database:
        """The protocol's view of it."""
        ...

    @property
    def name(self) -> str:
        """Which database it is, for people; no secret."""
        ...

    pin: Statement | None
    """The statement `pin` as sessions of the caller's are to run it, once somebody has asked for it."""

    def execute(self, step: Execute, /) -> Rows:
        """Run one statement in this thread; the driver's errors come out as LockStoreErrors."""
        ...

    async def aexecute(self, step: Execute, /) -> Rows:
        """Run one statement on the running event loop."""
        ...

    def pause(self, step: Sleep | Wait, /) -> None:
        """Let time pass in this thread."""
        ...

    async def apause(self, step: Sleep | Wait, /) -> None:
        """Let time pass in the running task."""
        ...

    @property
    def asynchronous(self) -> bool:
        """Can it run statements on an event loop only?"""
        ...

    @property
    def reaping(self) -> tuple[float, float] | None:
        """After how many seconds, as a rule, this process reaps again, and the retention; None if others see to it."""
        ...

    @property
    def history(self) -> int:
        """How many events of its keys are kept in `lock_events`; 0: none are written down by this process."""
        ...

    @property
    def renewable(self) -> bool:
        """Does another thread's connection see the same rows? If not: no renewal, local queue, listener, reaping."""
        ...
