"""The SQLAlchemy face of semaphores: `db_semaphore` and its two kinds of semaphore."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, Unpack, overload

from sqlalchemy import Engine

from dblock.core.lock import permits as core
from dblock.core.lock.permits import IsPermit, SyncSemaphore
from dblock.core.share_keys import refuse_several
from sqlalchemy_dblock.place import AsyncLock, Lock, Options, sync_engine

if TYPE_CHECKING:
    from sqlalchemy.ext.asyncio import AsyncEngine


class Permit(IsPermit, Lock):
    """A permit of a semaphore over an Engine: a lock, with a `slot`."""


class AsyncPermit(IsPermit, AsyncLock):
    """A permit of a semaphore over an AsyncEngine: a lock, with a `slot`."""


class Semaphore(SyncSemaphore):
    """A semaphore over the database of an Engine; made by `db_semaphore`."""

    if TYPE_CHECKING:

        @property
        def held(self) -> list[Permit]: ...

        def permit(self) -> Permit: ...

        def __enter__(self) -> Permit: ...


class AsyncSemaphore(core.AsyncSemaphore):
    """A semaphore over the database of an AsyncEngine, with coroutines for methods; made by `db_semaphore`."""

    if TYPE_CHECKING:

        @property
        def held(self) -> list[AsyncPermit]: ...

        def permit(self) -> AsyncPermit: ...

        async def __aenter__(self) -> AsyncPermit: ...


@overload
def db_semaphore(engine: Engine, key: str, permits: int = 1, **options: Unpack[Options]) -> Semaphore: ...
@overload
def db_semaphore(engine: AsyncEngine, key: str, permits: int = 1, **options: Unpack[Options]) -> AsyncSemaphore: ...
def db_semaphore(engine: Any = None, key: Any = None, permits: int = 1, **options: Any) -> Any:  # noqa: D417 - they are there
    """A semaphore: at most `permits` permits of `key` are held at a time, in all processes.

    Each caller takes one of its own first `permits` slots, which are numbered from 0. So while programs with different
    numbers run, at most the greatest of them are in, and nothing is stored that would have to be changed.

    Args:
        engine: an Engine or an AsyncEngine, as of `db_lock`; the methods are coroutines for an AsyncEngine.
        key: 1 to 230 characters. As a decorator's, a format string over the arguments of the call.
        permits: 1 to 10,000.

    Keyword Args:
        fair: False: take a free permit before those that wait.
        others: as of `db_lock`, without `interrupt` and `reentrant`: a permit belongs to the semaphore object, and
            each acquire is a further permit.

    Raises:
        InvalidKey, UnsupportedDatabase, TypeError, ValueError: as `db_lock`.
        WrongKind: by acquire(): the key is that of a plain lock or of a read-write lock.
    """
    refuse_several(engine, "db_semaphore")
    inner = sync_engine(engine)
    if inner is engine:
        return Semaphore(partial(Permit, inner), key, permits, **options)
    return AsyncSemaphore(partial(AsyncPermit, inner), key, permits, **options)
