"""The methods of a majority lock, synchronous and asynchronous; those that are not here are as of a lock."""

from __future__ import annotations

from dblock.core.lock.locks import AsyncLock, SyncLock
from dblock.core.values import LockInfo
from dblock.majority.base import BaseQuorumLock


class SyncQuorumLock(BaseQuorumLock, SyncLock):
    """A majority lock whose methods block the calling thread.

    What asks the databases is true of a majority of them, and raises QuorumUnavailable if too few answer.
    """

    def inspect(self) -> dict[str, LockInfo | None]:  # type: ignore[override]
        """The key's row in each database that answers, by its name."""
        return self._drive(self._rows())


class AsyncQuorumLock(BaseQuorumLock, AsyncLock):
    """A majority lock whose methods are coroutines; see SyncQuorumLock for what each does.

    `self` may be any majority lock, so that a synchronous one can use these methods as its asynchronous twins.
    """

    async def inspect(self: BaseQuorumLock) -> dict[str, LockInfo | None]:  # type: ignore[override]
        """The key's row in each database that answers, by its name."""
        return await self._adrive(self._rows())
