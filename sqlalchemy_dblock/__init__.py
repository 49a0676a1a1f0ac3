"""A distributed lock over the application's database, for SQLAlchemy.

It uses the same protocol and table as the Django app `dblock`, so that the locks of both exclude each other.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from dblock.core import errors as _errors

if TYPE_CHECKING:  # where type checkers find the names of `__all__`
    from dblock.core.errors import *
    from dblock.core.observing.observers import observe
    from dblock.core.tokens import Sequencer
    from dblock.core.values import LockInfo
    from dblock.majority.protocol import QuorumUnavailable
    from sqlalchemy_dblock.creating import create_tables
    from sqlalchemy_dblock.fences import FencedMixin, fenced_update
    from sqlalchemy_dblock.kinds import *
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
    **dict.fromkeys(__all__, "sqlalchemy_dblock.kinds"),
    **dict.fromkeys(vars(_errors), "dblock.core.errors"),
    **dict.fromkeys(("lock_events", "lock_waiters", "locks", "metadata", "metadata_for"), "sqlalchemy_dblock.table"),
    **dict.fromkeys(("AsyncQuorumLock", "QuorumLock", "db_quorum_lock"), "sqlalchemy_dblock.quorum"),
    **dict.fromkeys(("FencedMixin", "fenced_update"), "sqlalchemy_dblock.fences"),
    "create_tables": "sqlalchemy_dblock.creating",
    "LockInfo": "dblock.core.values",
    "QuorumUnavailable": "dblock.majority.protocol",
    "Sequencer": "dblock.core.tokens",
    "observe": "dblock.core.observing.observers",
}
"""Modules of the names, loaded when a name is used."""


if not TYPE_CHECKING:  # type checkers see every name

    def __getattr__(name: str) -> Any:
        if name not in __all__:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        value = globals()[name] = getattr(importlib.import_module(_HOMES[name]), name)
        return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
