"""The Django face: `db_lock` and its `Lock`."""

from __future__ import annotations

import functools
import inspect
import os
from collections.abc import Callable
from types import EllipsisType
from typing import Any, Self, TypeVar

from django.core.exceptions import SynchronousOnlyOperation
from django.db import router

from dblock import conf
from dblock.core import protocol
from dblock.core.drivers import adrive, drive
from dblock.core.faces import AsyncLock, SyncLock
from dblock.core.flows import current_task
from dblock.core.steps import Steps
from dblock.core.values import Seconds, valid_retention, valid_timeout, valid_ttl
from dblock.store import DjangoStore, store_for

T = TypeVar("T")
F = TypeVar("F", bound=Callable[..., Any])


class Lock(SyncLock):
    """A lock over a database of Django's; made by `db_lock`.

    Use it as `with`, as `async with`, as a decorator of `def` and `async def`, or through its methods, each of which
    has an asynchronous twin that begins with an `a`.
    """

    def __init__(
        self,
        key: str,
        *,
        ttl: Seconds | None,
        timeout: Seconds | EllipsisType | None,
        renew: bool,
        using: str | None,
        label: str,
    ) -> None:
        super().__init__(key, ttl=ttl, timeout=timeout, renew=renew, label=label)
        self._using = using
        if using is not None:
            _ = store_for(using)

    @functools.cached_property
    def using(self) -> str:
        """The database alias that the lock's row lives in."""
        return self._using or default_alias()

    def _default_ttl(self) -> float:
        return valid_ttl(conf.settings().TTL, "DBLOCK['TTL']")

    def _default_timeout(self) -> float | None:
        return valid_timeout(conf.settings().TIMEOUT, "DBLOCK['TIMEOUT']")

    def _drive(self, steps: Steps[T]) -> T:
        # As django.utils.asyncio.async_unsafe, without the exception that it raises and catches each time.
        if current_task() is not None and not os.environ.get("DJANGO_ALLOW_ASYNC_UNSAFE"):
            raise SynchronousOnlyOperation(
                "A lock cannot block an event loop: use `async with` and the methods that begin with an `a`."
            )
        return drive(steps, self._store())

    def _store(self) -> DjangoStore:
        return store_for(self.using)

    aacquire = AsyncLock.acquire
    arelease = AsyncLock.release
    aextend = AsyncLock.extend
    averify = AsyncLock.verify
    aowned = AsyncLock.owned
    alocked = AsyncLock.locked
    ainspect = AsyncLock.inspect
    __aexit__ = AsyncLock.__aexit__

    async def __aenter__(self) -> Self:
        await self._adrive(self._enter_steps())
        return self

    def __call__(self, function: F) -> F:
        """Decorate a `def` or an `async def`: each call holds the lock; the key is formatted with its arguments."""
        if inspect.iscoroutinefunction(function):
            return AsyncLock.__call__(self, function)
        return super().__call__(function)


def db_lock(
    key: str,
    *,
    ttl: Seconds | None = None,
    timeout: Seconds | EllipsisType | None = ...,
    renew: bool = True,
    using: str | None = None,
    label: str = "",
) -> Lock:
    """A lock on `key`, not yet taken.

    Args:
        key: 1 to 255 characters, compared code point by code point. As a decorator's, a format string over the
            arguments of the call.
        ttl: life of the lease in seconds or as a timedelta; DBLOCK["TTL"] (30) by default. Never the wait.
        timeout: longest wait in seconds, 0 to try once, None for ever; DBLOCK["TIMEOUT"] (10) by default. Never the
            life.
        renew: reserved for renewal, which this version does not do: the lease ends after ttl unless extended, and
            leaving the block after that raises LockLost.
        using: database alias; by default DBLOCK["USING"], else where the database routers write `dblock.Lock`.
        label: free text of up to 255 characters for whoever inspects the lock.

    Raises:
        InvalidKey: the key cannot be stored exactly on every database.
        UnsupportedDatabase: the alias does not exist or is not PostgreSQL, MySQL, MariaDB or SQLite.
        TypeError, ValueError: any other argument makes no sense.
    """
    return Lock(key, ttl=ttl, timeout=timeout, renew=renew, using=using, label=label)


def reap(*, retention: Seconds | None = None, using: str | None = None) -> int:
    """Delete the rows that have been free or expired for longer than `retention` seconds; how many there were.

    By default as long as DBLOCK["RETENTION"] (one hour) says. Safe to run at any time, any number of times at once.
    """
    steps, store = _reaping(retention, using)
    return drive(steps, store)


async def areap(*, retention: Seconds | None = None, using: str | None = None) -> int:
    """The asynchronous twin of `reap`."""
    steps, store = _reaping(retention, using)
    return await adrive(steps, store)


def _reaping(retention: Seconds | None, using: str | None) -> tuple[Steps[int], DjangoStore]:
    store = store_for(using or default_alias())
    seconds = valid_retention(conf.settings().RETENTION if retention is None else retention)
    return protocol.reap(store.database, seconds), store


def default_alias() -> str:
    """DBLOCK["USING"], else where the database routers write the model."""
    from dblock.models import Lock as Row  # noqa: PLC0415 - needs the app registry; importing this module must not

    return conf.settings().USING or router.db_for_write(Row)
