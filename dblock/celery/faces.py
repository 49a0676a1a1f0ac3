"""The two kinds of locks that a task can have: over a database of Django's, or over an engine of SQLAlchemy's.

Rule: neither framework is imported before a task asks for its lock.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Protocol

from dblock.core.lock.leading import SyncLeader

if TYPE_CHECKING:
    from dblock.core.lock.locks import SyncLock


class Face(Protocol):
    """Where locks come from."""

    def lock(self, key: str, **options: Any) -> SyncLock:
        """One that is not taken yet; `options` are those of `db_lock`."""
        ...

    def permit(self, key: str, permits: int, **options: Any) -> SyncLock:
        """The same, for one of so many permits."""
        ...

    def leader(self, name: str, **options: Any) -> SyncLeader:
        """A candidate; `options` are those of `db_leader`."""
        ...


class DjangoFace:
    """Locks of Django's `db_lock`; `instead` says what to write without Django."""

    def __init__(self, instead: str) -> None:
        self._instead = instead

    def lock(self, key: str, **options: Any) -> SyncLock:
        """One that is not taken yet."""
        with self._settings():
            from dblock.locks import db_lock  # noqa: PLC0415 - needs Django

            return db_lock(key, **options)

    def permit(self, key: str, permits: int, **options: Any) -> SyncLock:
        """A permit that is not taken yet."""
        with self._settings():
            from dblock.semaphores import db_semaphore  # noqa: PLC0415 - needs Django

            permit: SyncLock = db_semaphore(key, permits, **options).permit()
            return permit

    def leader(self, name: str, **options: Any) -> SyncLeader:
        """A candidate."""
        with self._settings():
            from dblock.leaders import db_leader  # noqa: PLC0415 - needs Django

            return db_leader(name, **options)

    @contextlib.contextmanager
    def _settings(self) -> Iterator[None]:
        from django.core.exceptions import ImproperlyConfigured  # noqa: PLC0415 - needs Django

        from dblock import conf  # noqa: PLC0415 - needs Django

        try:
            _ = conf.settings()
            yield
        except ImproperlyConfigured as error:
            raise ImproperlyConfigured(f"{error} (Without Django: {self._instead}.)") from error


class EngineFace:
    """Locks of SQLAlchemy's `db_lock` over one engine, which a function may make in each process."""

    def __init__(self, engine: Any) -> None:
        self._given = engine

    def lock(self, key: str, **options: Any) -> SyncLock:
        """One that is not taken yet."""
        from sqlalchemy_dblock import db_lock  # noqa: PLC0415 - needs SQLAlchemy

        return self._synchronous(db_lock(self._engine(), key, **options))

    def permit(self, key: str, permits: int, **options: Any) -> SyncLock:
        """A permit that is not taken yet."""
        from sqlalchemy_dblock import db_semaphore  # noqa: PLC0415 - needs SQLAlchemy

        return self._synchronous(db_semaphore(self._engine(), key, permits, **options).permit())

    def leader(self, name: str, **options: Any) -> SyncLeader:
        """A candidate."""
        from sqlalchemy_dblock import db_leader  # noqa: PLC0415 - needs SQLAlchemy

        leader = db_leader(self._engine(), name, **options)
        if not isinstance(leader, SyncLeader):
            raise TypeError(_NO_ASYNC)
        return leader

    def _engine(self) -> Any:
        return self._given() if callable(self._given) else self._given

    def _synchronous(self, lock: Any) -> SyncLock:
        from sqlalchemy_dblock import Lock  # noqa: PLC0415 - needs SQLAlchemy

        if not isinstance(lock, Lock):
            raise TypeError(_NO_ASYNC)
        return lock


_NO_ASYNC = "a task runs in a thread: bind= takes an Engine, not an AsyncEngine"


def face_for(bind: Any, instead: str = "locked_task(..., bind=engine)") -> Face:
    """The face for `locked_task(bind=...)`: Celery's bool, an Engine, or a function that returns one."""
    if isinstance(bind, bool):
        return DjangoFace(instead)
    if hasattr(bind, "sync_engine"):
        raise TypeError(_NO_ASYNC)
    engine = getattr(sys.modules.get("sqlalchemy"), "Engine", ())
    if not (isinstance(bind, engine) or (callable(bind) and not hasattr(bind, "engine"))):
        raise TypeError(f"bind= is Celery's True or False, an Engine, or a function that returns one, not {bind!r}")
    return EngineFace(bind)
