"""The SQLAlchemy face of several locks at once: `db_locks` and its two kinds of locks."""

from __future__ import annotations

from types import EllipsisType
from typing import TYPE_CHECKING, Any, Unpack, overload

from sqlalchemy import Engine

from dblock.core.lock import several
from dblock.core.lock.several import SyncLocks
from dblock.core.validation import valid_key, valid_timeout
from sqlalchemy_dblock.kinds import db_lock
from sqlalchemy_dblock.place import AsyncBegins, AsyncLock, Begins, Lock, Options, sync_engine

if TYPE_CHECKING:
    from sqlalchemy.ext.asyncio import AsyncEngine


class Locks(Begins, SyncLocks):
    """Several locks over Engines that are taken together; made by `db_locks`."""


class AsyncLocks(AsyncBegins, several.AsyncLocks):
    """Several locks over AsyncEngines, with coroutines for methods; made by `db_locks`."""


@overload
def db_locks(engine: Engine, /, *keys: str | Lock, **options: Unpack[Options]) -> Locks: ...
@overload
def db_locks(engine: AsyncEngine, /, *keys: str | AsyncLock, **options: Unpack[Options]) -> AsyncLocks: ...
@overload
def db_locks(first: Lock, /, *locks: Lock, timeout: Any = ..., on_busy: Any = ..., otherwise: Any = ...) -> Locks: ...
@overload
def db_locks(
    first: AsyncLock, /, *locks: AsyncLock, timeout: Any = ..., on_busy: Any = ..., otherwise: Any = ...
) -> AsyncLocks: ...
def db_locks(first: Any = None, /, *keys: Any, **options: Any) -> Locks | AsyncLocks:  # noqa: D417 - they are there
    """Several locks that are taken together, or not at all.

    Args:
        first: an Engine or an AsyncEngine, for the keys that follow; or a lock.
        keys: keys of 1 to 255 characters, or locks made by `db_lock`, also of several engines. As a decorator's, the
            keys are format strings over the arguments of the call; a key that comes twice is taken once.

    Keyword Args:
        timeout: longest wait for all of them, in seconds; as of `db_lock`.
        on_busy, otherwise: as of `db_lock`.
        others: as of `db_lock`, for each of the locks of the keys; a callback is called with one lock.

    Raises:
        InvalidKey, UnsupportedDatabase, TypeError, ValueError: as `db_lock`.
    """
    timeout = options.pop("timeout", ...)
    bundle = {name: options.pop(name) for name in ("on_busy", "otherwise") if name in options}
    own = 10.0 if isinstance(timeout, EllipsisType) else valid_timeout(timeout)
    made: list[Any] = [first] if isinstance(first, Lock | AsyncLock) else []
    make: Any = db_lock
    _, *others = several.once((first, *keys))
    for each in others:
        if isinstance(each, Lock | AsyncLock):
            made.append(each)
        elif made and made[0] is first:
            raise TypeError(f"the key {each!r} needs an engine: db_locks(engine, *keys), or locks alone")
        else:
            made.append(make(first, valid_key(each), timeout=timeout, **options))
    if made and made[0] is first and options:
        raise TypeError(f"{min(options)} is for keys: give it to each db_lock()")
    if not (made and made[0] is first):
        engine: Any = first
        _ = sync_engine(engine)
    kinds = {isinstance(each, AsyncLock) for each in made}
    if len(kinds) > 1:
        raise TypeError("locks of an Engine and of an AsyncEngine cannot be taken together: one of them blocks")
    return AsyncLocks(made, own, **bundle) if kinds == {True} else Locks(made, own, **bundle)
