"""The interface that a face implements: a database, and how statements run on it.

Rule: modules below `runtime` know no more than this about how a statement gets to the database.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from dblock.core.protocol.sending import Database
from dblock.core.protocol.steps import Runner
from dblock.core.statements.base import Statement
from dblock.core.wakeup.registry import Wakeups


class Subscription(Protocol):
    """A connection that listens."""

    def listen(self, seconds: float, /) -> Sequence[str]:
        """The next messages, as soon as there are any; empty after so many seconds. Raises when it has broken."""
        ...

    def ask(self, until: float, /) -> None:
        """Probe the server; raises unless it answers by that local time."""
        ...

    def close(self) -> None: ...


class Store(Runner, Protocol):
    """A database, and how statements run on it; a store and a key identify a lock's row."""

    database: Database
    """The protocol's view of the database."""
    pin: Statement | None
    """The statement `pin` for sessions of the caller, once it has been needed."""
    asynchronous: bool
    """Whether statements run only on an event loop."""

    @property
    def location(self) -> object:
        """The database that it leads to now, for comparison; None if it always leads to the same one."""
        ...

    @property
    def reaping(self) -> tuple[float, float] | None:
        """Mean interval of reaping by this process, and the retention, in seconds; None if it does not reap."""
        ...

    @property
    def history(self) -> int:
        """Number of events of its keys to keep in `lock_events`; 0: this process records none."""
        ...

    @property
    def renewable(self) -> bool:
        """Whether a connection of another thread sees the same rows; if not: no renewal, queue, listener, reaping."""
        ...

    def subscribe(self, channel: str, wakeups: Wakeups, /) -> Subscription | None:
        """Begin to listen for notifications of the database; None if that does not work."""
        ...

    def in_background(self, function: Callable[[], None], /) -> Callable[[], bool]:
        """Run a function in a thread or in a task of the running event loop; the result says whether it still runs."""
        ...
