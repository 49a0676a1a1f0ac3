"""The Django face of semaphores: `db_semaphore` and its `Semaphore`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Unpack

from dblock.core.lock.permits import AsyncSemaphore, IsPermit, SyncSemaphore
from dblock.core.share_keys import refuse_several
from dblock.place import Both, Lock, Options


class Permit(IsPermit, Lock):
    """A permit of a semaphore: a lock, with a `slot`."""


class Semaphore(Both, SyncSemaphore):
    """A semaphore over a database of Django's; made by `db_semaphore`.

    Use it as `with` or `async with`, which give the permit; as a decorator of `def` and `async def`; or through its
    methods, each of which has an asynchronous twin that begins with an `a`.
    """

    if TYPE_CHECKING:

        @property
        def held(self) -> list[Permit]: ...

        def permit(self) -> Permit: ...

        def __enter__(self) -> Permit: ...

        async def __aenter__(self) -> Permit: ...

    aacquire = AsyncSemaphore.acquire
    arelease = AsyncSemaphore.release
    aavailable = AsyncSemaphore.available
    aholders = AsyncSemaphore.holders
    if not TYPE_CHECKING:
        __aenter__ = AsyncSemaphore.__aenter__


def db_semaphore(key: str, permits: int = 1, **options: Unpack[Options]) -> Semaphore:
    """A semaphore: at most `permits` permits of `key` are held at a time, in all processes.

    Each caller takes one of its own first `permits` slots, which are numbered from 0. So while programs with different
    numbers run, at most the greatest of them are in, and nothing is stored that would have to be changed.

    Args:
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
    refuse_several(options.get("using"), "db_semaphore")
    return Semaphore(Permit, key, permits, **options)
