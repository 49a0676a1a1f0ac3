"""The place of SQLAlchemy's locks, an engine and the transactions of its sessions; and the locks that stand there."""

from __future__ import annotations

import asyncio
import warnings
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar, cast, overload

from sqlalchemy import Engine

from dblock.core import runtime
from dblock.core.holding.flow import Hold, HoldObserver
from dblock.core.lock.locks import AsyncLock as CoreAsyncLock
from dblock.core.lock.locks import Operations, SyncLock, refuse_interrupt, refuses
from dblock.core.lock.place import Place
from dblock.core.options import Given
from dblock.core.protocol.steps import Execute, Rows
from sqlalchemy_dblock import transactions
from sqlalchemy_dblock.connections import in_greenlet_of_its_own
from sqlalchemy_dblock.guarded import AsyncBegun, Begun
from sqlalchemy_dblock.store import INSTEAD, EngineStore, own_store

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

S = TypeVar("S", bound="Session")
A = TypeVar("A", bound="AsyncSession")


class Options(Given, total=False):
    """The keyword arguments of `db_lock`, whose docstring explains them."""

    session: Session | AsyncSession | scoped_session[Any] | async_scoped_session[Any] | None


class EnginePlace(Place):
    """An engine, and perhaps a session whose transaction keeps what is left inside it."""

    options = ("session",)

    def __init__(self, engine: Engine, session: Any = None) -> None:
        self._engine = engine
        self._store = own_store(engine)
        # A weak reference: an application that drops a session during its transaction ends that, and the renewal.
        self._given_session: Callable[[], Any] | None = None
        if session is not None:
            given = transactions.valid_session(session, asynchronous=engine.dialect.is_async)
            self._given_session = weakref.ref(getattr(given, "sync_session", given))

    def __getstate__(self) -> object:
        raise TypeError(
            "a lock over an engine cannot be pickled, as the engine cannot: send the key, or detach()'s token"
        )

    def store(self) -> EngineStore:
        """That of the engine."""
        store_override = runtime.current.store_override
        return self._store if store_override is None else cast("EngineStore", store_override)

    def refuse_to_block(self) -> None:
        """Warn on an event loop."""
        if asyncio._get_running_loop() is not None:
            text = f"the lock of an Engine blocks the event loop while the database answers: {INSTEAD}"
            warnings.warn(text, RuntimeWarning, stacklevel=4)  # Python shows it once

    def defers(self, lock: HoldObserver, hold: Hold, *, last: bool) -> bool:
        """Whether the session's transaction is open; its end releases."""
        session = self._given_session and self._given_session()
        if session is None and hold.transactions and hold.store.database.dialect.single_writer:
            session = hold.transactions[0]()  # a session that guards it: no other one can write before it has ended
        return session is not None and lock.options.release == "auto" and transactions.keep_until_end(hold, session)

    def pin(self, hold: Hold, given: Any, step: Execute) -> Rows:
        """Run it in the transaction of a session or connection, by default of `session=`."""
        given = self._given_session and self._given_session() if given is None else given
        rows = transactions.pin(self.store(), self._engine, transactions.connection_of(given), step)
        if hasattr(given, "get_bind"):  # a session, not a connection
            hold.transactions = (weakref.ref(given.registry() if hasattr(given, "registry") else given),)
        return rows

    async def apin(self, hold: Hold, given: Any, step: Execute) -> Rows:
        """In a greenlet, as SQLAlchemy runs an asynchronous driver."""
        rows: Rows = await in_greenlet_of_its_own(self.pin, hold, given, step)
        return rows


def sync_engine(engine: Engine | AsyncEngine) -> Engine:
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
        return AsyncBegun(self, given)

    if not TYPE_CHECKING:  # hidden from type checkers
        atomic = refuses(_NO_ATOMIC.format("async with", "an async_sessionmaker, an AsyncSession or the AsyncEngine"))


class Guards(Operations):
    """The guard of a lock, of several, and of the term of a leader, over an Engine."""

    def guard(self, session_or_connection: Session | Connection | None = None) -> None:
        """Keep the key until the open transaction ends, whatever happens: no other tenure begins before.

        Verifies the tenure and pins it, under any isolation level. So the writes of the transaction can be committed
        only before the next holder begins. Several locks are all kept. `session_or_connection` is of the lock's own
        database; by default that of `session=`.

        Raises LockLost if this flow no longer holds the lock, StaleSnapshot if the transaction reads as of a moment
        before it was taken, ValueError in autocommit mode.
        """
        self._drive(self._guard(session_or_connection))


class AsyncGuards(Operations):
    """The guard of a lock, of several, and of the term of a leader, over an AsyncEngine."""

    async def guard(self, session_or_connection: AsyncSession | AsyncConnection | None = None) -> None:
        """Keep the key until the open transaction ends, whatever happens: no other tenure begins before."""
        await self._adrive(self._guard(session_or_connection, awaits=True))


class Lock(Begins, Guards, SyncLock):
    """A lock over the database of an Engine; made by `db_lock`."""

    def __init__(self, engine: Engine, key: str, *unnamed: object, session: Any = None, **options: Any) -> None:
        super().__init__(EnginePlace(engine, session), key, *unnamed, **options)
        if self.options.interrupt:
            refuse_interrupt()


class AsyncLock(AsyncBegins, AsyncGuards, CoreAsyncLock):
    """A lock over the database of an AsyncEngine, with coroutines for methods; made by `db_lock`."""

    def __init__(self, engine: Engine, key: str, *unnamed: object, session: Any = None, **options: Any) -> None:
        super().__init__(EnginePlace(engine, session), key, *unnamed, **options)
