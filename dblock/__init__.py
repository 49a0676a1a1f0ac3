"""A distributed lock whose only server is the database that the application already has: the Django app.

Names are resolved on first use, so that `import dblock.core` needs neither Django nor its settings.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # where type checkers find the names of `__all__`
    from dblock.core.errors import *
    from dblock.core.observing.observers import observe
    from dblock.core.tokens import Sequencer
    from dblock.core.values import LockInfo
    from dblock.fences import FencedModel, afenced_update, fenced_update
    from dblock.kinds import *
    from dblock.majority.protocol import QuorumUnavailable
    from dblock.place import Lock
    from dblock.quorum import QuorumLock, db_quorum_lock
    from dblock.signals import *

__version__ = "1.0.0"

__all__ = [
    "FencedModel",
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
    "acheck_sequencer",
    "afenced_update",
    "areap",
    "arelease_all",
    "check_sequencer",
    "db_leader",
    "db_lock",
    "db_locks",
    "db_quorum_lock",
    "db_rwlock",
    "db_semaphore",
    "fenced_update",
    "lock_acquired",
    "lock_at_risk",
    "lock_contended",
    "lock_forced",
    "lock_gave_up",
    "lock_lost",
    "lock_reaped",
    "lock_released",
    "observe",
    "reap",
    "release_all",
]

_HOMES = {
    **dict.fromkeys(("FencedModel", "afenced_update", "fenced_update"), "dblock.fences"),
    **dict.fromkeys(("QuorumLock", "db_quorum_lock"), "dblock.quorum"),
    **dict.fromkeys((name for name in __all__ if name.startswith("lock_")), "dblock.signals"),
    "Lock": "dblock.place",
    "LockInfo": "dblock.core.values",
    "QuorumUnavailable": "dblock.majority.protocol",
    "Sequencer": "dblock.core.tokens",
    "observe": "dblock.core.observing.observers",
}
"""Modules of the names that are neither errors nor in `dblock.kinds`."""


def _home(name: str) -> str:
    errors = importlib.import_module("dblock.core.errors")
    return _HOMES.get(name) or ("dblock.core.errors" if hasattr(errors, name) else "dblock.kinds")


if not TYPE_CHECKING:  # a type checker is to know every name

    def __getattr__(name: str) -> Any:
        if name not in __all__:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        try:
            home = importlib.import_module(_home(name))
        except ModuleNotFoundError as error:
            if str(error.name).partition(".")[0] not in {"django", "asgiref"}:
                raise
            hint = f"dblock.{name} is for Django, which is not installed; for SQLAlchemy there is sqlalchemy_dblock"
            raise ModuleNotFoundError(hint, name=error.name) from error
        value = getattr(home, name)
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    """The names that `__getattr__` can resolve now, since inspect.getmembers(), freezegun and others read them all."""
    return sorted({*globals(), *(name for name in __all__ if _resolvable(_home(name)))})


def _resolvable(home: str) -> bool:
    if home == "dblock.fences":  # a model, which Django refuses to define before its apps are loaded
        registry = sys.modules.get("django.apps")
        return registry is not None and bool(registry.apps.apps_ready)
    return home.startswith(("dblock.core.", "dblock.majority.")) or importlib.util.find_spec("django") is not None
