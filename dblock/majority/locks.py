"""The methods of a majority lock, synchronous and asynchronous; those that are not here are as of a lock."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dblock.core.lock.locks import AsyncLock, SyncLock, refuses
from dblock.core.values import LockInfo, Seconds
from dblock.majority.base import BaseQuorumLock


class SyncQuorumLock(BaseQuorumLock, SyncLock):
    """A majority lock whose methods block the calling thread."""

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

    if not TYPE_CHECKING:  # hidden from type checkers
        __aenter__ = __aexit__ = refuses("this lock blocks its thread: use `with`, or AsyncEngines")


class AsyncQuorumLock(BaseQuorumLock, AsyncLock):
    """A majority lock whose methods are coroutines; see SyncQuorumLock for what each does.

    `self` may be any majority lock, so that a synchronous one can use these methods as its asynchronous twins.
    """

    async def owned(self: BaseQuorumLock) -> bool:
        """The same without LockLost: False then."""
        return await self._adrive(self._owned())

    async def locked(self: BaseQuorumLock) -> bool:
        """Whether a majority of the databases shows a holder."""
        return await self._adrive(self._locked())

    async def inspect(self: BaseQuorumLock) -> dict[str, LockInfo | None]:  # type: ignore[override]
        """The key's row in each database that answers, by its name."""
        return await self._adrive(self._rows())
