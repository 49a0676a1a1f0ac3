"""The SQLAlchemy face: `db_lock` and its two kinds of lock."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Any, TypeVar, Unpack, cast, overload

from sqlalchemy import Engine

from dblock.core import runtime
from dblock.core.holding.flow import Hold, current_task
from dblock.core.lock import entering, leaving, operations
from dblock.core.lock.base import BaseLock
from dblock.core.lock.locks import AsyncLock as CoreAsyncLock
from dblock.core.lock.locks import Attaching, SyncLock, refuse_interrupt, refuses
from dblock.core.options import Given, explained
from dblock.core.protocol.drive import adrive, drive
from dblock.core.protocol.steps import Cancel, Steps
from dblock.core.tokens import Sequencer, Token, valid_sequencer, valid_token
from dblock.core.validation import valid_retention
from dblock.core.values import SHARE, Seconds, key_of_share, slot_of
from sqlalchemy_dblock.connections import in_greenlet_of_its_own
from sqlalchemy_dblock.store import INSTEAD, EngineStore, own_store, store_for

if TYPE_CHECKING:
    from sqlalchemy import Connection
    from sqlalchemy.ext.asyncio import (
        AsyncConnection,
        AsyncEngine,
        AsyncSession,
        async_scoped_session,
        async_sessionmaker,
    )
    from sqlalchemy.orm import Session, scoped_session, sessionmaker

    from dblock.core.lock.guarded import AsyncGuarded, Guarded
    from dblock.core.lock.key_template import NoKey
    from dblock.core.protocol.reaping import Reaped

T = TypeVar("T")
S = TypeVar("S", bound="Session")
A = TypeVar("A", bound="AsyncSession")


class Options(Given, total=False):
    """The keyword arguments of `db_lock`, whose docstring explains them."""

    session: Session | AsyncSession | scoped_session[Any] | async_scoped_session[Any] | None


class _EngineLock(BaseLock):
    """The common base of both kinds of lock over an engine."""

    _face_options = ("session",)

    def __init__(self, engine: Engine, key: str, *unnamed: object, session: Any = None, **options: Any) -> None:
        super().__init__(key, *unnamed, **options)
        self._engine = engine
        self._own_store = own_store(engine)
        # A weak reference: an application that drops a session during its transaction ends that, and the renewal.
        self._given_session: Callable[[], Any] | None = None
        if session is not None:
            given = _transactions().valid_session(session, asynchronous=engine.dialect.is_async)
            self._given_session = weakref.ref(getattr(given, "sync_session", given))

    def __getstate__(self) -> object:
        raise TypeError(
            "a lock over an engine cannot be pickled, as the engine cannot: send the key, or detach()'s token"
        )

    def _store(self) -> EngineStore:
        store_override = runtime.current.store_override
        return self._own_store if store_override is None else cast("EngineStore", store_override(self))

    @property
    def _session(self) -> Any:
        return None if self._given_session is None else self._given_session()

    def _defers(self, hold: Hold, *, last: bool) -> bool:
        session = self._session
        if session is None and hold.transactions and hold.store.database.dialect.single_writer:
            session = hold.transactions[0]()  # a session that guards it: no other one can write before it has ended
        return session is not None and self.options.release == "auto" and _transactions().keep_until_end(hold, session)

    def _guarded(self, given: Any) -> None:
        hold = self._hold()
        if hold is not None and hasattr(given, "get_bind"):  # a session, not a connection
            session = given.registry() if hasattr(given, "registry") else given
            hold.transactions = (weakref.ref(session),)


_NO_ATOMIC = "atomic() is of Django's locks: with SQLAlchemy it is `{} lock.begin(given):`, and given is {}"


class Begins:
    """What locks of an Engine, and several of them, have: guarded blocks."""

    @overload
    def begin(self, given: Engine, /) -> Guarded[Connection]: ...
    @overload
    def begin(self, given: sessionmaker[S] | scoped_session[S] | S, /) -> Guarded[S]: ...
    def begin(self, given: Any, /) -> Guarded[Any]:
        """A `with` that takes the lock, and gives a session or connection whose transaction the lock guards.

        The transaction begins after the lock was taken, and is committed before the lock is released. LockTimeout and
        LockLost mean that nothing was committed; once it has been committed, no error of the lock is raised. With a
        scoped_session or a Session it is a decorator too: the function knows its session.

        Args:
            given: a sessionmaker, scoped_session or Session, or an Engine, of the lock's database.

        Raises InvalidRequestError for a session whose transaction is open already, or a body that commits
        by itself.
        """
        from sqlalchemy_dblock.guarded import Begun  # noqa: PLC0415 - only where it is used

        return Begun(self, given)

    if not TYPE_CHECKING:  # hidden from type checkers
        atomic = refuses(_NO_ATOMIC.format("with", "a sessionmaker, a Session or the Engine"))


class AsyncBegins:
    """What locks of an AsyncEngine, and several of them, have: guarded blocks."""

    @overload
    def begin(self, given: AsyncEngine, /) -> AsyncGuarded[AsyncConnection]: ...
    @overload
    def begin(self, given: async_sessionmaker[A] | async_scoped_session[A] | A, /) -> AsyncGuarded[A]: ...
    def begin(self, given: Any, /) -> AsyncGuarded[Any]:
        """An `async with` of a transaction that the lock guards; as `begin()` of the lock of an Engine."""
        from sqlalchemy_dblock.guarded import AsyncBegun  # noqa: PLC0415 - likewise

        return AsyncBegun(self, given)

    if not TYPE_CHECKING:  # hidden from type checkers
        atomic = refuses(_NO_ATOMIC.format("async with", "an async_sessionmaker, an AsyncSession or the AsyncEngine"))


class Lock(_EngineLock, Begins, SyncLock):
    """A lock over the database of an Engine; made by `db_lock`."""

    def __init__(self, engine: Engine, key: str, *unnamed: object, **options: Any) -> None:
        super().__init__(engine, key, *unnamed, **options)
        refuse_interrupt(self.options.interrupt)

    def _drive(self, steps: Steps[T], cancel: Cancel | None = None) -> T:
        if current_task() is not None:
            text = f"the lock of an Engine blocks the event loop while the database answers: {INSTEAD}"
            warnings.warn(text, RuntimeWarning, stacklevel=3)  # Python shows it once
        return super()._drive(steps, cancel)

    def guard(self, session_or_connection: Session | Connection | None = None) -> None:
        """Keep the key until the open transaction ends, whatever happens: no other tenure begins before.

        Verifies the tenure and pins it, under any isolation level. So the writes of the transaction can be committed
        only before the next holder begins. `session_or_connection` is of the lock's own database; by default that of
        `session=`.

        Raises LockLost if this flow no longer holds the lock, StaleSnapshot if the transaction reads as of a moment
        before it was taken, ValueError in autocommit mode.
        """
        given = self._session if session_or_connection is None else session_or_connection
        transactions = _transactions()
        connection = transactions.connection_of(given)
        hold, step = self._drive(operations.guarding(self))
        self._drive(operations.guarded(self, hold, transactions.pin(self._store(), self._engine, connection, step)))
        self._guarded(given)


class AsyncLock(_EngineLock, AsyncBegins, CoreAsyncLock):
    """A lock over the database of an AsyncEngine, with coroutines for methods; made by `db_lock`."""

    async def guard(self, session_or_connection: AsyncSession | AsyncConnection | None = None) -> None:
        """Keep the key until the open transaction ends, whatever happens: no other tenure begins before."""
        given = self._session if session_or_connection is None else session_or_connection
        hold, step = await self._adrive(operations.guarding(self))
        store, engine, transactions = self._store(), self._engine, _transactions()
        pinned = await in_greenlet_of_its_own(
            lambda: transactions.pin(store, engine, transactions.connection_of(given), step)
        )
        await self._adrive(operations.guarded(self, hold, pinned))
        self._guarded(given)


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
    inner = _sync_engine(engine)
    if key is ...:
        from dblock.core.lock.key_template import NoKey  # noqa: PLC0415 - only for decorators

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
    merged: Options = {"ttl": known.ttl, "grace": known.grace, "min_hold": known.min_hold, **options}
    lock = _of(engine, known, merged) if known.kind else db_lock(engine, known.tenure.key, **merged)
    if isinstance(lock, Lock):
        return lock._drive(entering.attach(lock, known))
    return Attaching(lock, lock._adrive(entering.attach(lock, known)))


def _of(engine: Any, token: Token, options: Options) -> Lock | AsyncLock:
    """The lock of a reader, of a writer or of a permit."""
    from sqlalchemy_dblock.rwlocks import db_rwlock  # noqa: PLC0415 - likewise
    from sqlalchemy_dblock.semaphores import db_semaphore  # noqa: PLC0415 - likewise

    key, slot = key_of_share(token.tenure.key), slot_of(token.tenure.key)
    if slot is not None:
        permit: Lock | AsyncLock = db_semaphore(engine, key, slot + 1, **options).permit()
        return permit
    rw: Any = db_rwlock(engine, key, **options)
    lock: Lock | AsyncLock = rw.read() if SHARE in token.tenure.key else rw.write()
    return lock


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
    steps = _reaping(engine, retention)
    return drive(steps).locks if isinstance(engine, Engine) else _areap(steps)


async def _areap(steps: Steps[Reaped]) -> int:
    return (await adrive(steps)).locks


def reaped(engine: Engine, retention: Seconds | None) -> Reaped:
    """Reap; returns the number of rows of each table."""
    return drive(_reaping(engine, retention))


def _reaping(engine: Engine | AsyncEngine, retention: Seconds | None) -> Steps[Reaped]:
    from dblock.core.observing import observers  # noqa: PLC0415 - only for observing and reaping

    store = store_for(_sync_engine(engine))
    seconds = valid_retention(store.retention if retention is None else retention)
    return observers.reap_and_report(store, seconds, Lock)


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
    store = store_for(_sync_engine(engine))
    steps = leaving.release_all(store)
    return drive(steps) if isinstance(engine, Engine) else adrive(steps)


def _transactions() -> Any:
    """The module, imported only where a session is used."""
    from sqlalchemy_dblock import transactions  # noqa: PLC0415

    return transactions


def _sync_engine(engine: Engine | AsyncEngine) -> Engine:
    inner = getattr(engine, "sync_engine", engine)
    if not isinstance(inner, Engine) or hasattr(engine, "sync_connection"):
        hint = ""
        if hasattr(engine, "in_transaction"):  # a Session or a Connection
            its = "bind" if hasattr(engine, "sync_session") else "get_bind()"
            its = "engine" if hasattr(engine, "engine") else its
            hint = f": its `.{its}`, since the lock has connections of its own"
        kind = type(engine).__name__  # and no more: a URL may have a password
        raise TypeError(f"an Engine or an AsyncEngine comes first, as in db_lock(engine, key), not {kind}{hint}")
    if inner is engine and inner.dialect.is_async:
        raise TypeError("this is the `sync_engine` of an AsyncEngine: pass the AsyncEngine itself")
    return inner
