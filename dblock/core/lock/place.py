"""Where a lock stands: what a face says of the database there, and of the caller's transactions on it.

Rule: a lock asks its place, and nothing else of its face. One place may serve any number of locks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from dblock.core.holding.flow import Hold, HoldObserver
from dblock.core.protocol.steps import Execute, Rows
from dblock.core.protocol.store import Store
from dblock.core.values import TTL


class Place:
    """The place of a lock. Each face has its own; what is here holds where a face says nothing else."""

    options: tuple[str, ...] = ()
    """The options of `db_lock` that only this face has."""

    def store(self) -> Store:
        """The database of the lock's row."""
        raise NotImplementedError

    def ttl(self) -> float:
        """The default of `ttl`."""
        return TTL

    def timeout(self) -> float | None:
        """The default of `timeout`."""
        return 10.0

    def slow_wait(self) -> float:
        """The default of `slow_wait`."""
        return 5.0

    def refuse_to_block(self) -> None:
        """Raise or warn where the caller's thread must not wait for a database, as it runs an event loop."""

    def opened(self, lock: HoldObserver, hold: Hold) -> None:
        """Called when a tenure begins, to record what `defers` will need."""

    def defers(self, lock: HoldObserver, hold: Hold, *, last: bool) -> bool:
        """Whether a transaction of the caller keeps the hold until it ends; if so, its end will release it.

        `last`: no other entry is left.
        """
        return False

    def pin(self, hold: Hold, given: Any, step: Execute) -> Rows:
        """Run the statement `pin` in the caller's transaction; `given`: what guard() was given."""
        raise NotImplementedError

    async def apin(self, hold: Hold, given: Any, step: Execute) -> Rows:
        """The same on an event loop."""
        raise NotImplementedError

    def who_began(self) -> str:
        """What may have begun the caller's transaction implicitly, as the end of a sentence."""
        return ""

    def receivers(self, lock: HoldObserver, of: str, known: Mapping[str, object]) -> Sequence[Callable[[], object]]:
        """Whom of the face to tell what the option `of` is a callback for, and what is known of it."""
        return ()
