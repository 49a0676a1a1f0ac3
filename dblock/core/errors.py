"""What can go wrong, as the caller sees it.

    LockError
    |- LockTimeout            (TimeoutError)   somebody else held the key for as long as we were told to wait
    |- LockLost                                the lease ended before the work did
    |- LockNotHeld            (RuntimeError)   released, extended or used by a flow that does not hold it
    |- InvalidKey             (ValueError)     refused before any I/O
    |- UnsupportedDatabase                     not PostgreSQL, MySQL, MariaDB or SQLite, or too old a one
    '- LockStoreError                          the database failed; the driver's error is the `__cause__`
       |- StoreConflict                        nothing happened, trying again may help
       '- StoreUnanswered                      the connection broke: the statement may or may not have happened

Rule: every error keeps its facts as attributes and survives pickling, because Celery and multiprocessing carry
exceptions between processes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dblock.core.values import LockInfo


class LockError(Exception):
    """The root of everything that dblock raises on purpose; `key` is the lock's key where there is one."""

    key: str | None

    def __init__(self, message: str = "", *, key: str | None = None) -> None:
        super().__init__(message)
        self.key = key


class LockTimeout(LockError, TimeoutError):
    """The lock was not free within `timeout` seconds; `holder` says who had it when we last looked."""

    holder: LockInfo | None

    def __init__(self, message: str = "", *, key: str | None = None, holder: LockInfo | None = None) -> None:
        super().__init__(message, key=key)
        self.holder = holder


class LockLost(LockError):
    """The lease ended (or may have ended) while the holder still relied on it."""


class LockNotHeld(LockError, RuntimeError):
    """This thread or task does not hold the lock."""


class InvalidKey(LockError, ValueError):
    """A key is 1 to 255 characters of text without NUL."""


class UnsupportedDatabase(LockError):
    """The database, its version or the driver cannot carry the protocol."""


class LockStoreError(LockError):
    """The database could not do what the lock needed; the driver's error is the `__cause__`."""


class StoreConflict(LockStoreError):
    """The database refused for a passing reason (deadlock, serialization, busy) and changed nothing."""


class StoreUnanswered(LockStoreError):
    """The connection broke before the answer: the statement may have been committed, or not."""
