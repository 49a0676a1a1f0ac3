"""The SQLAlchemy face: `db_lock` and its two kinds of lock."""

from __future__ import annotations

from types import EllipsisType
from typing import TYPE_CHECKING, Any, overload

from sqlalchemy import Engine

from dblock.core import protocol
from dblock.core.drivers import adrive, drive
from dblock.core.faces import AsyncLock as CoreAsyncLock
from dblock.core.faces import SyncLock
from dblock.core.values import Seconds, valid_retention
from sqlalchemy_dblock.store import EngineStore, store_for

if TYPE_CHECKING:
    from collections.abc import Coroutine

    from sqlalchemy.ext.asyncio import AsyncEngine


class Lock(SyncLock):
    """A lock over the database of an Engine; made by `db_lock`."""

    def __init__(self, engine: Engine, key: str, **options: Any) -> None:
        super().__init__(key, **options)
        self._engine_store = store_for(engine)

    def _store(self) -> EngineStore:
        return self._engine_store


class AsyncLock(CoreAsyncLock):
    """A lock over the database of an AsyncEngine, with coroutines for methods; made by `db_lock`."""

    def __init__(self, engine: AsyncEngine, key: str, **options: Any) -> None:
        super().__init__(key, **options)
        self._engine_store = store_for(engine.sync_engine)

    def _store(self) -> EngineStore:
        return self._engine_store


@overload
def db_lock(
    engine: Engine,
    key: str,
    *,
    ttl: Seconds | None = None,
    timeout: Seconds | EllipsisType | None = ...,
    renew: bool = True,
    label: str = "",
) -> Lock: ...
@overload
def db_lock(
    engine: AsyncEngine,
    key: str,
    *,
    ttl: Seconds | None = None,
    timeout: Seconds | EllipsisType | None = ...,
    renew: bool = True,
    label: str = "",
) -> AsyncLock: ...
def db_lock(
    engine: Engine | AsyncEngine,
    key: str,
    *,
    ttl: Seconds | None = None,
    timeout: Seconds | EllipsisType | None = ...,
    renew: bool = True,
    label: str = "",
) -> Lock | AsyncLock:
    """A lock on `key` in the database of `engine`, not yet taken; its methods are coroutines for an AsyncEngine.

    Args:
        engine: an Engine or an AsyncEngine of PostgreSQL, MySQL, MariaDB or SQLite. The lock opens connections of its
            own, in the way that the engine does.
        key: 1 to 255 characters, compared code point by code point. As a decorator's, a format string over the
            arguments of the call.
        ttl: life of the lease in seconds or as a timedelta; 30 by default. Never the wait.
        timeout: longest wait in seconds, 0 to try once, None for ever; 10 by default. Never the life.
        renew: reserved for renewal, which this version does not do: the lease ends after ttl unless extended, and
            leaving the block after that raises LockLost.
        label: free text of up to 255 characters for whoever inspects the lock.

    Raises:
        InvalidKey: the key cannot be stored exactly on every database.
        UnsupportedDatabase: the engine's is another database.
        TypeError, ValueError: any other argument makes no sense.
    """
    options = {"ttl": ttl, "timeout": timeout, "renew": renew, "label": label}
    if isinstance(engine, Engine):
        return Lock(engine, key, **options)
    _ = _sync_engine(engine)
    return AsyncLock(engine, key, **options)


@overload
def reap(engine: Engine, *, retention: Seconds = 3600.0) -> int: ...
@overload
def reap(engine: AsyncEngine, *, retention: Seconds = 3600.0) -> Coroutine[Any, Any, int]: ...
def reap(engine: Engine | AsyncEngine, *, retention: Seconds = 3600.0) -> int | Coroutine[Any, Any, int]:
    """Delete the rows that have been free or expired for longer than `retention` seconds; how many there were.

    To be awaited for an AsyncEngine. Safe to run at any time, any number of times at once.
    """
    store = store_for(_sync_engine(engine))
    steps = protocol.reap(store.database, valid_retention(retention))
    return drive(steps, store) if isinstance(engine, Engine) else adrive(steps, store)


def _sync_engine(engine: Engine | AsyncEngine) -> Engine:
    inner = getattr(engine, "sync_engine", engine)
    if not isinstance(inner, Engine):
        raise TypeError(f"db_lock takes an Engine or an AsyncEngine, not {type(engine).__name__}")
    return inner
