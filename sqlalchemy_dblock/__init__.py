"""A distributed lock whose only server is the database that the application already has: for SQLAlchemy.

Speaks the same protocol over the same table as the Django app `dblock`, so that the two exclude each other.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

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

if TYPE_CHECKING:
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


if not TYPE_CHECKING:  # a type checker is to know every name

    def __getattr__(name: str) -> Any:
        """The table, when asked for: naming its types loads the dialects of three databases."""
        if name not in {"locks", "metadata"}:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        from sqlalchemy_dblock import table  # noqa: PLC0415

        return getattr(table, name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
