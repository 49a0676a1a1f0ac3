"""A distributed lock over the application's database, for SQLAlchemy.

It uses the same protocol and table as the Django app `dblock`, so that the locks of both exclude each other.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from dblock.core.errors import (
    InvalidKey,
    InvalidToken,
    LockDeadlock,
    LockError,
    LockLost,
    LockNotHeld,
    LockRevoked,
    LockStoreError,
    LockTimeout,
    LockUpgradeRefused,
    PermitNotHeld,
    PoolExhausted,
    StaleSnapshot,
    StoreBusy,
    StoreConflict,
    StoreLocked,
    StoreReadOnly,
    StoreUnanswered,
    StoreUnreachable,
    SynchronousOnlyOperation,
    UnsupportedDatabase,
    WrongKind,
)
from dblock.core.tokens import Sequencer
from dblock.core.values import LockInfo

if TYPE_CHECKING:
    from dblock.core.observing.observers import observe
    from dblock.majority.protocol import QuorumUnavailable
    from sqlalchemy_dblock.creating import create_tables
    from sqlalchemy_dblock.fences import FencedMixin, fenced_update
    from sqlalchemy_dblock.kinds import (
        AsyncLocks,
        AsyncPermit,
        AsyncReadLock,
        AsyncWriteLock,
        Locks,
        Permit,
        ReadLock,
        WriteLock,
        attach,
        check_sequencer,
        db_leader,
        db_lock,
        db_locks,
        db_rwlock,
        db_semaphore,
        reap,
        release_all,
    )
    from sqlalchemy_dblock.place import AsyncLock, Lock
    from sqlalchemy_dblock.quorum import AsyncQuorumLock, QuorumLock, db_quorum_lock
    from sqlalchemy_dblock.table import lock_events, lock_waiters, locks, metadata, metadata_for

__all__ = [
    "AsyncLock",
    "AsyncLocks",
    "AsyncPermit",
    "AsyncQuorumLock",
    "AsyncReadLock",
    "AsyncWriteLock",
    "FencedMixin",
    "InvalidKey",
    "InvalidToken",
    "Lock",
    "LockDeadlock",
    "LockError",
    "LockInfo",
    "LockLost",
    "LockNotHeld",
    "LockRevoked",
    "LockStoreError",
    "LockTimeout",
    "LockUpgradeRefused",
    "Locks",
    "Permit",
    "PermitNotHeld",
    "PoolExhausted",
    "QuorumLock",
    "QuorumUnavailable",
    "ReadLock",
    "Sequencer",
    "StaleSnapshot",
    "StoreBusy",
    "StoreConflict",
    "StoreLocked",
    "StoreReadOnly",
    "StoreUnanswered",
    "StoreUnreachable",
    "SynchronousOnlyOperation",
    "UnsupportedDatabase",
    "WriteLock",
    "WrongKind",
    "attach",
    "check_sequencer",
    "create_tables",
    "db_leader",
    "db_lock",
    "db_locks",
    "db_quorum_lock",
    "db_rwlock",
    "db_semaphore",
    "fenced_update",
    "lock_events",
    "lock_waiters",
    "locks",
    "metadata",
    "metadata_for",
    "observe",
    "reap",
    "release_all",
]

_HOMES = {
    **dict.fromkeys(("AsyncLock", "Lock"), "sqlalchemy_dblock.place"),
    **dict.fromkeys(("lock_events", "lock_waiters", "locks", "metadata", "metadata_for"), "sqlalchemy_dblock.table"),
    **dict.fromkeys(("AsyncQuorumLock", "QuorumLock", "db_quorum_lock"), "sqlalchemy_dblock.quorum"),
    **dict.fromkeys(("FencedMixin", "fenced_update"), "sqlalchemy_dblock.fences"),
    "create_tables": "sqlalchemy_dblock.creating",
    "QuorumUnavailable": "dblock.majority.protocol",
    "observe": "dblock.core.observing.observers",
}
"""Modules that are loaded when one of their names is used; all other names are in `sqlalchemy_dblock.kinds`."""


if not TYPE_CHECKING:  # type checkers see every name

    def __getattr__(name: str) -> Any:
        if name not in __all__:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        home = importlib.import_module(_HOMES.get(name, "sqlalchemy_dblock.kinds"))
        value = globals()[name] = getattr(home, name)
        return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
