"""A distributed lock whose only server is the database that the application already has: the Django app.

Names are resolved on first use, so that `import dblock.core` needs neither Django nor its settings.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
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
    from dblock.locks import Lock, areap, db_lock, reap

__version__ = "0.1.0"

__all__ = [
    "InvalidKey",
    "Lock",
    "LockError",
    "LockInfo",
    "LockLost",
    "LockNotHeld",
    "LockStoreError",
    "LockTimeout",
    "UnsupportedDatabase",
    "areap",
    "db_lock",
    "reap",
]

_HOMES = {
    **dict.fromkeys(("Lock", "areap", "db_lock", "reap"), "dblock.locks"),
    "LockInfo": "dblock.core.values",
}


if not TYPE_CHECKING:  # a type checker is to know every name

    def __getattr__(name: str) -> Any:
        if name not in __all__:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        value = getattr(importlib.import_module(_HOMES.get(name, "dblock.core.errors")), name)
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
