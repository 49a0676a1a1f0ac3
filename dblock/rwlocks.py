"""The Django face of read-write locks: `db_rwlock` and its locks."""

from __future__ import annotations

from typing import Any, Unpack

from dblock.core.lock.rwlock import NoLock, Reads, Writes, downgrade
from dblock.core.share_keys import refuse_several
from dblock.locks import Lock, Options


class ReadLock(Reads, Lock):
    """The lock of a reader over a database of Django's; made by `db_rwlock(key).read()`."""


class WriteLock(Writes, Lock):
    """The lock of a writer over a database of Django's; made by `db_rwlock(key).write()`."""

    def downgrade(self) -> None:
        """Hold it as a reader from now on; no other writer gets in between. Raises LockNotHeld or LockLost."""
        self._drive(downgrade(self))

    async def adowngrade(self) -> None:
        """The asynchronous twin of `downgrade`."""
        await self._adrive(downgrade(self))


class ReadWriteLock(NoLock):
    """A read-write lock: many readers at a time, or one writer; made by `db_rwlock`."""

    def __init__(self, key: str, options: dict[str, Any]) -> None:
        self._key, self._options = key, options
        _ = self.write()  # bad options are refused here

    @property
    def key(self) -> str:
        """The key of the lock."""
        return self._key

    def read(self) -> ReadLock:
        """A lock to read under: held beside other readers, and beside no writer."""
        return ReadLock(self._key, **self._options)

    def write(self) -> WriteLock:
        """A lock to write under: held alone."""
        return WriteLock(self._key, **self._options)

    def __repr__(self) -> str:
        return f"<ReadWriteLock {self._key!r}>"


def db_rwlock(key: str, **options: Unpack[Options]) -> ReadWriteLock:
    """A read-write lock on `key`: `read()` and `write()` make the locks, which are used as those of `db_lock`.

    Who waits is served first come, first served; readers that wait side by side enter together. A thread or task that
    writes may read; one that reads gets LockUpgradeRefused when it wants to write.

    Args:
        key: 1 to 230 characters. As a decorator's, a format string over the arguments of the call.

    Keyword Args:
        fair: False: a reader enters before writers in the queue, while no writer has the key.
        others: as of `db_lock`.

    Raises:
        InvalidKey, UnsupportedDatabase, TypeError, ValueError: as `db_lock`.
        WrongKind: by acquire(): the key is that of a plain lock or of a semaphore.
    """
    refuse_several(options.get("using"), "db_rwlock")
    return ReadWriteLock(key, {**options})
