"""Where a task and a beat get their locks: from a database of Django's, or from an engine of SQLAlchemy's.

Rule: neither framework is imported before a lock is asked for.
"""

from __future__ import annotations

import sys
from typing import Any, Final, Literal

from dblock.core.lock.leading import SyncLeader
from dblock.core.lock.locks import SyncLock

_NO_ASYNC: Final = "a task runs in a thread: engine= takes an Engine, not an AsyncEngine"


def lock_of(engine: Any, key: str, permits: int | None, **options: Any) -> SyncLock:
    """A lock that is not taken yet, or one of so many permits; `options` are those of `db_lock`."""
    if permits is not None:
        options["permits"] = permits
    made = _make("db_lock" if permits is None else "db_semaphore", engine, key, **options)
    lock: SyncLock = made if permits is None else made.permit()
    return lock


def leader_of(engine: Any, name: str, **options: Any) -> SyncLeader:
    """A candidate; `options` are those of `db_leader`."""
    leader: SyncLeader = _make("db_leader", engine, name, **options)
    return leader


def _make(kind: Literal["db_lock", "db_semaphore", "db_leader"], engine: Any, *arguments: Any, **options: Any) -> Any:
    if engine is not None:
        import sqlalchemy_dblock  # noqa: PLC0415 - needs SQLAlchemy

        engine = engine() if callable(engine) else engine
        if hasattr(engine, "sync_engine"):
            raise TypeError(_NO_ASYNC)
        return getattr(sqlalchemy_dblock, kind)(engine, *arguments, **options)
    from django.core.exceptions import ImproperlyConfigured  # noqa: PLC0415 - needs Django

    import dblock  # noqa: PLC0415 - a package imports none above it
    from dblock import conf  # noqa: PLC0415 - needs Django

    try:
        _ = conf.settings()
    except ImproperlyConfigured as error:
        raise ImproperlyConfigured(f"{error} (Without Django: engine=, a SQLAlchemy Engine.)") from error
    return getattr(dblock, kind)(*arguments, **options)


def valid_engine(engine: Any) -> Any:
    """An Engine, a function that returns one, or None; TypeError otherwise."""
    if hasattr(engine, "sync_engine"):
        raise TypeError(_NO_ASYNC)
    class_ = getattr(sys.modules.get("sqlalchemy"), "Engine", ())
    if not (engine is None or isinstance(engine, class_) or (callable(engine) and not hasattr(engine, "engine"))):
        raise TypeError(f"engine is an Engine of SQLAlchemy's, or a function that returns one, not {engine!r}")
    return engine
