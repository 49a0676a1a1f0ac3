"""The kinds of SQLAlchemy's locks, with a function for each; and functions for what concerns all of them."""

from __future__ import annotations

from collections.abc import Coroutine
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar, Unpack, cast, overload

from sqlalchemy import Engine

from dblock.core.lock import entering, leaving, operations
from dblock.core.lock.key_template import NoKey
from dblock.core.lock.leading import AsyncLeader as CoreAsyncLeader
from dblock.core.lock.leading import Options as LeaderOptions
from dblock.core.lock.leading import SyncLeader
from dblock.core.lock.locks import Attaching
from dblock.core.lock.permits import AsyncSemaphore as CoreAsyncSemaphore
from dblock.core.lock.permits import IsPermit, SyncSemaphore
from dblock.core.lock.rwlock import NoLock, Reads, Writes, downgrade
from dblock.core.lock.several import AsyncLocks as CoreAsyncLocks
from dblock.core.lock.several import SyncLocks, once
from dblock.core.observing.observers import reap_and_report
from dblock.core.options import explained
from dblock.core.protocol.drive import adrive, drive
from dblock.core.protocol.steps import Steps
from dblock.core.share_keys import refuse_several
from dblock.core.tokens import Sequencer, valid_sequencer, valid_token
from dblock.core.validation import valid_key, valid_retention
from dblock.core.values import Seconds, key_of_share
from sqlalchemy_dblock.place import AsyncBegins, AsyncGuards, AsyncLock, Begins, Guards, Lock, Options, sync_engine
from sqlalchemy_dblock.store import store_for

if TYPE_CHECKING:
    from sqlalchemy.ext.asyncio import AsyncEngine

    from dblock.core.protocol.reaping import Reaped


R = TypeVar("R")
W = TypeVar("W")


class ReadLock(Reads, Lock):
    """The lock of a reader over the database of an Engine; made by `db_rwlock(engine, key).read()`."""


class WriteLock(Writes, Lock):
    """The lock of a writer over the database of an Engine; made by `db_rwlock(engine, key).write()`."""

    def downgrade(self) -> None:
        """Hold it as a reader from now on; no other writer gets in between. Raises LockNotHeld or LockLost."""
        self._drive(downgrade(self))


class AsyncReadLock(Reads, AsyncLock):
    """The lock of a reader over the database of an AsyncEngine."""


class AsyncWriteLock(Writes, AsyncLock):
    """The lock of a writer over the database of an AsyncEngine."""

    async def downgrade(self) -> None:
        """Hold it as a reader from now on; no other writer gets in between. Raises LockNotHeld or LockLost."""
        await self._adrive(downgrade(self))


class ReadWriteLock(NoLock[R, W]):
    """A read-write lock: many readers at a time, or one writer; made by `db_rwlock`."""


@overload
def db_lock(engine: Engine, key: str, **options: Unpack[Options]) -> Lock: ...
@overload
def db_lock(engine: AsyncEngine, key: str, **options: Unpack[Options]) -> AsyncLock: ...
@overload
def db_lock(engine: Engine | AsyncEngine, **options: Unpack[Options]) -> NoKey: ...
def db_lock(  # noqa: D417 - they are
    engine: Any = None, key: Any = ..., *unnamed: object, **options: Any
) -> Lock | AsyncLock | NoKey:
    """A lock on `key` in the database of `engine`, not yet taken; its methods are coroutines for an AsyncEngine.

    Args:
        engine: an Engine or an AsyncEngine of PostgreSQL, MySQL, MariaDB or SQLite. The lock opens connections of its
            own, as the engine does.
        key: 1 to 255 characters, compared code point by code point. As a decorator's, a format string over the
            arguments of the call; without one, as `@db_lock(engine)`, the module and the qualified name of the
            function.

    Keyword Args:
        session: a Session (AsyncSession for an AsyncEngine). If the lock is left while the session's transaction is
            open, it is kept until that has ended, by commit or rollback.
        release: "auto"; "now" releases the lock without regard to `session`.
        See `Given` for all others.

    Raises:
        InvalidKey: the key cannot be stored exactly on every database.
        UnsupportedDatabase: the engine is for another database.
        TypeError, ValueError: another argument is invalid.
    """
    inner = sync_engine(engine)
    if key is ...:
        return NoKey(lambda name: db_lock(engine, name, **options))
    return (Lock if inner is engine else AsyncLock)(inner, key, *unnamed, **options)


db_lock.__doc__ = explained(db_lock.__doc__)


@overload
def attach(engine: Engine, token: str, **options: Unpack[Options]) -> Lock: ...
@overload
def attach(engine: AsyncEngine, token: str, **options: Unpack[Options]) -> Attaching[AsyncLock]: ...
def attach(engine: Engine | AsyncEngine, token: str, **options: Unpack[Options]) -> Lock | Attaching[AsyncLock]:
    """The lock of a token of `detach()`, held by this flow: same tenure, same fence, renewed by this process.

    A token is good once. Leave the lock with `release()`, or use it in a `with`; for an AsyncEngine `await` it, or use
    it in an `async with`. `options` are those of `db_lock`; `ttl`, `grace` and `min_hold` are by default those of the
    lock that was detached.

    Raises InvalidToken for any other text, LockLost if the token was used (`Reason.USED`) or the tenure is over.
    """
    known = valid_token(token)
    del token  # an error report may show the locals
    kinds: tuple[Any, ...] = (db_lock, db_rwlock, db_semaphore)
    lock: Lock | AsyncLock = entering.lock_of(known, options, *(partial(kind, engine) for kind in kinds))
    if isinstance(lock, Lock):
        return lock._drive(entering.attach(lock, known))
    return Attaching(lock, lock._adrive(entering.attach(lock, known)))


@overload
def db_rwlock(engine: Engine, key: str, **options: Unpack[Options]) -> ReadWriteLock[ReadLock, WriteLock]: ...
@overload
def db_rwlock(
    engine: AsyncEngine, key: str, **options: Unpack[Options]
) -> ReadWriteLock[AsyncReadLock, AsyncWriteLock]: ...
def db_rwlock(engine: Any = None, key: Any = None, **options: Any) -> Any:  # noqa: D417 - they are there
    """A read-write lock on `key`: `read()` and `write()` make the locks, which are used as those of `db_lock`.

    Who waits is served first come, first served; readers that wait side by side enter together. A thread or task that
    writes may read; one that reads gets LockUpgradeRefused when it wants to write.

    Args:
        engine: an Engine or an AsyncEngine, as of `db_lock`; the methods are coroutines for an AsyncEngine.
        key: 1 to 230 characters. As a decorator's, a format string over the arguments of the call.

    Keyword Args:
        fair: False: a reader enters before writers in the queue, while no writer has the key.
        others: as of `db_lock`.

    Raises:
        InvalidKey, UnsupportedDatabase, TypeError, ValueError: as `db_lock`.
        WrongKind: by acquire(): the key is that of a plain lock or of a semaphore.
    """
    refuse_several(engine, "db_rwlock")
    inner = sync_engine(engine)
    reads, writes = (ReadLock, WriteLock) if inner is engine else (AsyncReadLock, AsyncWriteLock)
    return ReadWriteLock(key, partial(reads, inner, key, **options), partial(writes, inner, key, **options))


class Locks(Begins, Guards, SyncLocks):
    """Several locks over Engines that are taken together; made by `db_locks`."""


class AsyncLocks(AsyncBegins, AsyncGuards, CoreAsyncLocks):
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
    given, make, locks = once((first, *keys)), cast("Any", db_lock), (Lock, AsyncLock)
    is_lock = isinstance(first, locks)
    if not is_lock:
        _ = sync_engine(given.pop(0))
    named = [each for each in given if not isinstance(each, locks)]
    if is_lock and named:
        raise TypeError(f"the key {named[0]!r} needs an engine: db_locks(engine, *keys), or locks alone")
    if is_lock and options:
        raise TypeError(f"{min(options)} is for keys: give it to each db_lock()")
    made = [make(first, valid_key(each), timeout=timeout, **options) if each in named else each for each in given]
    kinds = {isinstance(each, AsyncLock) for each in made}
    if len(kinds) > 1:
        raise TypeError("locks of an Engine and of an AsyncEngine cannot be taken together: one of them blocks")
    return AsyncLocks(made, timeout, **bundle) if kinds == {True} else Locks(made, timeout, **bundle)


class Permit(IsPermit, Lock):
    """A permit of a semaphore over an Engine: a lock, with a `slot`."""


class AsyncPermit(IsPermit, AsyncLock):
    """A permit of a semaphore over an AsyncEngine: a lock, with a `slot`."""


class Semaphore(SyncSemaphore[Permit]):
    """A semaphore over the database of an Engine; made by `db_semaphore`."""


class AsyncSemaphore(CoreAsyncSemaphore[AsyncPermit]):
    """A semaphore over the database of an AsyncEngine, with coroutines for methods; made by `db_semaphore`."""


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


class Leader(Guards, SyncLeader):
    """A candidate over the database of an Engine; made by `db_leader`."""


class AsyncLeader(AsyncGuards, CoreAsyncLeader):
    """A candidate over the database of an AsyncEngine, with coroutines for methods; made by `db_leader`."""


@overload
def db_leader(engine: Engine, name: str, **options: Unpack[LeaderOptions]) -> Leader: ...
@overload
def db_leader(engine: AsyncEngine, name: str, **options: Unpack[LeaderOptions]) -> AsyncLeader: ...
def db_leader(engine: Any = None, name: Any = None, **options: Unpack[LeaderOptions]) -> Leader | AsyncLeader:
    """A candidate for the leadership of `name`: of all candidates in all processes one leads at a time.

    Args:
        engine: an Engine or an AsyncEngine, as of `db_lock`; the methods are coroutines for an AsyncEngine.
        name: the key of the lock that the leader holds; 1 to 255 characters.

    Keyword Args:
        ttl: seconds after which another candidate is elected if the leader has died; 15 by default.
        timeout: longest wait of a `with` in seconds; None, the default, waits for ever.
        label: free text for people who inspect who leads.
        on_elected: called with the leader in the thread or task that campaigns, before that goes on.
        on_deposed: called once, in another thread, with the leader and a `Reason` when a term ends by itself.
        on_at_risk: called likewise, with the leader, when a renewal is late.
        on_revoke: called likewise, with the leader and by whom and why, when somebody asks it to resign.
        interrupt: cancel the task of an `async with`, or of an `async def` of `run`, when the term ends.
        grace, min_hold, max_hold: as of `db_lock`. `max_hold` bounds a term.

    Raises:
        InvalidKey, UnsupportedDatabase, TypeError, ValueError: as `db_lock`.
    """
    if isinstance(engine, Engine):
        return Leader(partial(db_lock, engine), name, **options)
    return AsyncLeader(partial(db_lock, engine), name, **options)


@overload
def check_sequencer(engine: Engine, sequencer: str) -> Sequencer: ...
@overload
def check_sequencer(engine: AsyncEngine, sequencer: str) -> Coroutine[Any, Any, Sequencer]: ...
def check_sequencer(engine: Engine | AsyncEngine, sequencer: str) -> Sequencer | Coroutine[Any, Any, Sequencer]:
    """Key, mode and fence of a sequencer whose tenure is alive, according to the database.

    It does not prove who sent the sequencer, which is no secret. Await it for an AsyncEngine. Raises InvalidToken for
    any other text, LockLost once the tenure is over.
    """
    known = valid_sequencer(sequencer)
    lock = db_lock(engine, key_of_share(known.key))
    steps = operations.check_sequencer(lock, known)
    return lock._drive(steps) if isinstance(lock, Lock) else lock._adrive(steps)


@overload
def reap(engine: Engine, *, retention: Seconds | None = None) -> int: ...
@overload
def reap(engine: AsyncEngine, *, retention: Seconds | None = None) -> Coroutine[Any, Any, int]: ...
def reap(engine: Engine | AsyncEngine, *, retention: Seconds | None = None) -> int | Coroutine[Any, Any, int]:
    """Delete the rows that have been free or expired for longer than `retention` seconds; returns their number.

    The default is the engine's execution option dblock_retention (one hour). Await it for an AsyncEngine. Safe to run
    at any time, any number of times at once.
    """
    steps = reaping(engine, retention)
    return drive(steps).locks if isinstance(engine, Engine) else _areap(steps)


async def _areap(steps: Steps[Reaped]) -> int:
    return (await adrive(steps)).locks


def reaping(engine: Engine | AsyncEngine, retention: Seconds | None) -> Steps[Reaped]:
    """The steps of `reap`."""
    store = store_for(sync_engine(engine))
    seconds = valid_retention(store.retention if retention is None else retention)
    return reap_and_report(store, seconds, Lock)


@overload
def release_all(engine: Engine) -> int: ...
@overload
def release_all(engine: AsyncEngine) -> Coroutine[Any, Any, int]: ...
def release_all(engine: Engine | AsyncEngine) -> int | Coroutine[Any, Any, int]:
    """Release all locks that this process holds through the engine, in any thread or task; returns their number.

    For the end of a process whose work is done, in the hooks of its server and before `engine.dispose()`: a flow that
    still works under one of them finds it lost (`Reason.RELEASED`) before another flow can get it. Await it for an
    AsyncEngine. Raises no error of the database: a lock that could not be released within some seconds expires.
    """
    steps = leaving.release_all(store_for(sync_engine(engine)))
    return drive(steps) if isinstance(engine, Engine) else adrive(steps)
