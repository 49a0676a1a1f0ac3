"""Where a task and a beat get their locks: from a database of Django's, or from an engine of SQLAlchemy's.

Rule: neither framework is imported before a lock is asked for.
"""

from __future__ import annotations

import sys
from typing import Any, Literal


def made_of(engine: Any, kind: Literal["db_lock", "db_semaphore", "db_leader"], key: str, **options: Any) -> Any:
    """What that function of the face makes: over that engine, or without one over Django's database."""
    if engine is not None:
        import sqlalchemy_dblock  # noqa: PLC0415 - needs SQLAlchemy

        engine = valid_engine(engine() if callable(engine) else engine)
        return getattr(sqlalchemy_dblock, kind)(engine, key, **options)
    import dblock  # noqa: PLC0415 - a package imports none above it

    return getattr(dblock, kind)(key, **options)


def valid_engine(engine: Any) -> Any:
    """An Engine, a function that returns one, or None; TypeError otherwise."""
    class_ = getattr(sys.modules.get("sqlalchemy"), "Engine", ())
    if not (engine is None or isinstance(engine, class_) or (callable(engine) and not hasattr(engine, "engine"))):
        raise TypeError(f"engine is an Engine of SQLAlchemy's, or a function that returns one, not {engine!r}")
    return engine
