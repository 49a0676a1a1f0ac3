"""The Django face of a lock on a key that moves from one database to another."""

from __future__ import annotations

from typing import Self

from dblock.core.lock.by_key import AsyncMoved, SyncMoved, aenter
from dblock.locks import Lock


class MovedLock(SyncMoved, Lock):
    """A lock that is held in all databases of its key; `db_lock` makes it where `using` gives several."""

    aacquire = AsyncMoved.acquire
    arelease = AsyncMoved.release
    aextend = AsyncMoved.extend
    averify = AsyncMoved.verify
    aowned = AsyncMoved.owned
    alocked = AsyncMoved.locked
    ainspect = AsyncMoved.inspect
    __aexit__ = AsyncMoved.__aexit__

    async def __aenter__(self) -> Self:
        await aenter(self)
        return self
