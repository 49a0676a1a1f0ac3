"""A distributed lock over the application's database, for SQLAlchemy.

It uses the same protocol and table as the Django app `dblock`, so that the locks of both exclude each other.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dblock.core.errors import (
    InvalidKey,
    InvalidToken,
    LockDeadlock,
    LockError,
    LockLost,
    LockNotAcquiredWarning,
    LockNotHeld,
    LockRevoked,
    LockStoreError,
    LockTimeout,
    PoolExhausted,
    Reason,
    StaleSnapshot,
    StoreBusy,
    StoreConflict,
    StoreLocked,
    StoreReadOnly,
    StoreUnanswered,
    SynchronousOnlyOperation,
    UnsupportedDatabase,
)
from dblock.core.tokens import Sequencer
from dblock.core.values import LockInfo
from sqlalchemy_dblock.face import AsyncLock, Lock, attach, check_sequencer, db_lock, reap, release_all

if TYPE_CHECKING:
    from dblock.core.events import Event, Kind
    from dblock.core.lock.leading import Term
    from dblock.core.lock.observing import observe
    from sqlalchemy_dblock.creating import create_tables
    from sqlalchemy_dblock.fences import FencedMixin, fenced_update
    from sqlalchemy_dblock.leaders import AsyncLeader, Leader, db_leader
    from sqlalchemy_dblock.several import AsyncLocks, Locks, db_locks
    from sqlalchemy_dblock.table import lock_events, lock_waiters, locks, metadata, metadata_for

__all__ = [
    "AsyncLeader",
    "AsyncLock",
    "AsyncLocks",
    "Event",
    "FencedMixin",
    "InvalidKey",
    "InvalidToken",
    "Kind",
    "Leader",
    "Lock",
    "LockDeadlock",
    "LockError",
    "LockInfo",
    "LockLost",
    "LockNotAcquiredWarning",
    "LockNotHeld",
    "LockRevoked",
    "LockStoreError",
    "LockTimeout",
    "Locks",
    "PoolExhausted",
    "Reason",
    "Sequencer",
    "StaleSnapshot",
    "StoreBusy",
    "StoreConflict",
    "StoreLocked",
    "StoreReadOnly",
    "StoreUnanswered",
    "SynchronousOnlyOperation",
    "Term",
    "UnsupportedDatabase",
    "attach",
    "check_sequencer",
    "create_tables",
    "db_leader",
    "db_lock",
    "db_locks",
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


if not TYPE_CHECKING:  # type checkers see every name

    def __getattr__(name: str) -> Any:
        """Import on first use what loads much of SQLAlchemy (the dialects, the ORM), and what few applications need."""
        if name in {"lock_events", "lock_waiters", "locks", "metadata", "metadata_for"}:
            from sqlalchemy_dblock import table as home  # noqa: PLC0415
        elif name == "create_tables":
            from sqlalchemy_dblock import creating as home  # noqa: PLC0415
        elif name in {"FencedMixin", "fenced_update"}:
            from sqlalchemy_dblock import fences as home  # noqa: PLC0415
        elif name in {"AsyncLeader", "Leader", "db_leader"}:
            from sqlalchemy_dblock import leaders as home  # noqa: PLC0415
        elif name in {"AsyncLocks", "Locks", "db_locks"}:
            from sqlalchemy_dblock import several as home  # noqa: PLC0415
        elif name == "Term":
            from dblock.core.lock import leading as home  # noqa: PLC0415
        elif name in {"Event", "Kind"}:
            from dblock.core import events as home  # noqa: PLC0415
        elif name == "observe":
            from dblock.core.lock import observing as home  # noqa: PLC0415
        else:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return getattr(home, name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
