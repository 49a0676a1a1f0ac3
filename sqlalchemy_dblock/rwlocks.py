"""The SQLAlchemy face of read-write locks: `db_rwlock` and its locks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Generic, TypeVar, Unpack, overload

from sqlalchemy import Engine

from dblock.core.lock.rwlock import NoLock, Reads, Writes, downgrade
from dblock.core.share_keys import refuse_several
from sqlalchemy_dblock.face import AsyncLock, Lock, Options, _sync_engine

if TYPE_CHECKING:
    from sqlalchemy.ext.asyncio import AsyncEngine


class ReadLock(Reads, Lock):
    """The lock of a reader over the database of an Engine; made by `db_rwlock(engine, key).read()`."""


class WriteLock(Writes, Lock):
    """The lock of a writer over the database of an Engine; made by `db_rwlock(engine, key).write()`."""

    def downgrade(self) -> None:
        """Hold it as a reader from now on; no other writer gets in between. Raises LockNotHeld or LockLost."""
        self._drive(downgrade(self))


class AsyncReadLock(Reads, AsyncLock):
    """The lock of a reader over the database of an AsyncEngine."""


class AsyncWriteLock(Writes, AsyncLock):
    """The lock of a writer over the database of an AsyncEngine."""

    async def downgrade(self) -> None:
        """Hold it as a reader from now on; no other writer gets in between. Raises LockNotHeld or LockLost."""
        await self._adrive(downgrade(self))


R = TypeVar("R")
W = TypeVar("W")


class ReadWriteLock(NoLock, Generic[R, W]):
    """A read-write lock: many readers at a time, or one writer; made by `db_rwlock`."""

    def __init__(self, engine: Engine, key: str, reads: type[R], writes: type[W], options: dict[str, Any]) -> None:
        self._engine, self._key, self._options = engine, key, options
        self._reads: Any = reads
        self._writes: Any = writes
        _ = self.write()  # bad options are refused here

    @property
    def key(self) -> str:
        """The key of the lock."""
        return self._key

    def read(self) -> R:
        """A lock to read under: held beside other readers, and beside no writer."""
        lock: R = self._reads(self._engine, self._key, **self._options)
        return lock

    def write(self) -> W:
        """A lock to write under: held alone."""
        lock: W = self._writes(self._engine, self._key, **self._options)
        return lock

    def __repr__(self) -> str:
        return f"<ReadWriteLock {self._key!r}>"


@overload
def db_rwlock(engine: Engine, key: str, **options: Unpack[Options]) -> ReadWriteLock[ReadLock, WriteLock]: ...
@overload
def db_rwlock(
    engine: AsyncEngine, key: str, **options: Unpack[Options]
) -> ReadWriteLock[AsyncReadLock, AsyncWriteLock]: ...
def db_rwlock(engine: Any = None, key: Any = None, **options: Any) -> Any:  # noqa: D417 - they are there
    """A read-write lock on `key`: `read()` and `write()` make the locks, which are used as those of `db_lock`.

    Who waits is served first come, first served; readers that wait side by side enter together. A thread or task that
    writes may read; one that reads gets LockUpgradeRefused when it wants to write.

    Args:
        engine: an Engine or an AsyncEngine, as of `db_lock`; the methods are coroutines for an AsyncEngine.
        key: 1 to 230 characters. As a decorator's, a format string over the arguments of the call.

    Keyword Args:
        fair: False: a reader enters before writers in the queue, while no writer has the key.
        others: as of `db_lock`.

    Raises:
        InvalidKey, UnsupportedDatabase, TypeError, ValueError: as `db_lock`.
        WrongKind: by acquire(): the key is that of a plain lock or of a semaphore.
    """
    refuse_several(engine, "db_rwlock")
    inner = _sync_engine(engine)
    if inner is engine:
        return ReadWriteLock(inner, key, ReadLock, WriteLock, options)
    return ReadWriteLock(inner, key, AsyncReadLock, AsyncWriteLock, options)
