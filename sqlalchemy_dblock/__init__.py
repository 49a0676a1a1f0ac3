"""A distributed lock whose only server is the database that the application already has: for SQLAlchemy.

Speaks the same protocol over the same table as the Django app `dblock`, so that the two exclude each other.
"""

from __future__ import annotations

from dblock.core.errors import (
    InvalidKey,
    LockError,
    LockLost,
    LockNotHeld,
    LockStoreError,
    LockTimeout,
    UnsupportedDatabase,
)
from dblock.core.values import LockInfo
from sqlalchemy_dblock.locks import AsyncLock, Lock, db_lock, reap
from sqlalchemy_dblock.table import locks, metadata

__all__ = [
    "AsyncLock",
    "InvalidKey",
    "Lock",
    "LockError",
    "LockInfo",
    "LockLost",
    "LockNotHeld",
    "LockStoreError",
    "LockTimeout",
    "UnsupportedDatabase",
    "db_lock",
    "locks",
    "metadata",
    "reap",
]
