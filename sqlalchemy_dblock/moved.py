"""The SQLAlchemy face of a lock on a key that moves from one database to another."""

from __future__ import annotations

from dblock.core.lock.by_key import AsyncMoved, SyncMoved
from sqlalchemy_dblock.face import AsyncLock, Lock


class MovedLock(SyncMoved, Lock):
    """A lock that is held in all databases of its key; `db_lock` makes it where a function gives several Engines."""


class AsyncMovedLock(AsyncMoved, AsyncLock):
    """The same for AsyncEngines, with coroutines for methods."""
