"""The locks of either face, for what serves both: tasks, commands, health checks and the test kit.

Rule: neither framework is imported before a lock is asked for.
"""

from __future__ import annotations

from typing import Any, Literal

Kind = Literal["db_lock", "db_rwlock", "db_semaphore", "db_leader"]


def made(bind: Any, kind: Kind, *given: Any, **options: Any) -> Any:
    """What that function makes: over an Engine or AsyncEngine, or in Django's database of an alias, None by default."""
    if bind is None or isinstance(bind, str):
        import dblock  # noqa: PLC0415 - a package imports none above it

        return getattr(dblock, kind)(*given, **({} if bind is None else {"using": bind}), **options)
    import sqlalchemy_dblock  # noqa: PLC0415 - needs SQLAlchemy

    return getattr(sqlalchemy_dblock, kind)(bind, *given, **options)
