"""The methods of a majority lock, synchronous and asynchronous; those that are not here are as of a lock."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Self, TypeVar

from dblock.core.errors import LockTimeout
from dblock.core.lock import entering
from dblock.core.lock.blocks import Loaded, block_begin
from dblock.core.lock.locks import AsyncLock, SyncLock, Timeout, refuse_interrupt, refuses
from dblock.core.values import LockInfo, Seconds
from dblock.majority.base import BaseQuorumLock

T = TypeVar("T")


class SyncQuorumLock(BaseQuorumLock, SyncLock):
    """A majority lock whose methods block the calling thread."""

    def _refuse_event_loop(self) -> None:
        """Raise SynchronousOnlyOperation where waiting for other threads would block an event loop."""
        for lock in self._members:
            with contextlib.suppress(LockTimeout):  # of a SQLite database: its transaction is this flow's
                lock._store().database.before_waiting()

    def acquire(self, blocking: bool = True, timeout: Timeout = ...) -> bool:
        """Take the lock in a majority of the databases, or re-enter it; False if others held it all the time.

        As `Lock.acquire`. Raises QuorumUnavailable if fewer than a majority could be asked.
        """
        self._refuse_event_loop()
        return super().acquire(blocking, timeout)

    def extend(self, ttl: Seconds | None = None) -> None:
        """Let the leases end `ttl` seconds from now: sets, never adds. Raises LockLost, or QuorumUnavailable."""
        self._drive(self._extend(ttl))

    def verify(self) -> bool:
        """True if a majority of the databases still shows this flow's tenures; raises LockLost or QuorumUnavailable."""
        return self._drive(self._verify())

    def owned(self) -> bool:
        """The same without LockLost: False then."""
        return self._drive(self._owned())

    def locked(self) -> bool:
        """Whether a majority of the databases shows a holder; raises QuorumUnavailable if too few answer."""
        return self._drive(self._locked())

    def inspect(self) -> dict[str, LockInfo | None]:  # type: ignore[override]
        """The key's row in each database that answers, by its name."""
        return self._drive(self._rows())

    @block_begin
    def __enter__(self, its: Loaded | None = None) -> Self:
        refuse_interrupt(self.options.interrupt)
        self._refuse_event_loop()
        self._drive(entering.enter(self, its))
        return self

    if not TYPE_CHECKING:  # hidden from type checkers
        __aenter__ = __aexit__ = refuses("this lock blocks its thread: use `with`, or AsyncEngines")


class AsyncQuorumLock(BaseQuorumLock, AsyncLock):
    """A majority lock whose methods are coroutines; see SyncQuorumLock for what each does.

    `self` may be any majority lock, so that a synchronous one can use these methods as its asynchronous twins.
    """

    async def extend(self: BaseQuorumLock, ttl: Seconds | None = None) -> None:
        """Let the leases end `ttl` seconds from now."""
        await self._adrive(self._extend(ttl))

    async def verify(self: BaseQuorumLock) -> bool:
        """True if a majority of the databases still shows this flow's tenures."""
        return await self._adrive(self._verify())

    async def owned(self: BaseQuorumLock) -> bool:
        """The same without LockLost: False then."""
        return await self._adrive(self._owned())

    async def locked(self: BaseQuorumLock) -> bool:
        """Whether a majority of the databases shows a holder."""
        return await self._adrive(self._locked())

    async def inspect(self: BaseQuorumLock) -> dict[str, LockInfo | None]:  # type: ignore[override]
        """The key's row in each database that answers, by its name."""
        return await self._adrive(self._rows())
