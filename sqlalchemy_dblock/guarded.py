"""The SQLAlchemy face of guarded blocks: `begin()` of a lock, or of several."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Generator
from contextlib import asynccontextmanager, contextmanager
from typing import Any, TypeVar

from sqlalchemy import Connection, Engine, event
from sqlalchemy.exc import InvalidRequestError

from dblock.core.errors import LockError
from dblock.core.holding.flow import Hold
from dblock.core.lock.guarded import AsyncGuarded, BaseGuarded, Guarded
from sqlalchemy_dblock.connections import in_greenlet_of_its_own
from sqlalchemy_dblock.transactions import connection_of

T = TypeVar("T")


class _OfGiven(BaseGuarded[T]):
    """A block of what begin() was given: a factory, whose own begin() gives a session or a connection; or a session."""

    _asynchronous = False

    def __init__(self, lock: Any, given: Any) -> None:
        super().__init__(lock)
        self._given, made = given, getattr(given, "class_", given)  # of a sessionmaker: the class of its sessions
        # A registry is not asked: where functions are decorated, there is no task yet whose session it would give.
        is_session = hasattr(given, "get_bind") and not isinstance(given, type)
        self._makes = made is not given or isinstance(getattr(given, "sync_engine", given), Engine)
        asynchronous = hasattr(made, "stream") or hasattr(made, "sync_engine")
        if not (self._makes or is_session) or asynchronous != self._asynchronous:
            its = (
                "AsyncEngine, its async_sessionmaker or AsyncSession"
                if self._asynchronous
                else "Engine, its sessionmaker or Session"
            )
            raise TypeError(f"begin() of this lock takes an {its}, of the lock's database, not {type(given).__name__}")

    def _session(self) -> Any:
        """What was given, or the registry's session of this thread or task; None of what makes sessions."""
        if self._makes:
            return None
        return self._given.registry() if hasattr(self._given, "registry") else self._given

    def _refuse(self) -> None:
        """Raise InvalidRequestError for a session whose transaction is open already, or that of its Connection."""
        session = self._session()
        bind = getattr(self._given, "kw", {}).get("bind") if session is None else session.bind
        bind = getattr(bind, "sync_connection", bind)
        if isinstance(bind, Connection) and bind.in_transaction():
            raise InvalidRequestError(
                "A transaction is already begun on the Connection of this Session, which joins it, and the block would "
                "commit nothing: end the open one first, or bind the Session to the Engine"
            )
        if session is not None and session.in_transaction():
            raise InvalidRequestError(
                "A transaction is already begun on this Session, and begin() of a lock begins one of its own after the "
                "lock was taken: end the open one first (each statement begins one, a query too), or give begin() the "
                "sessionmaker"
            )

    def _templates(self, function: Callable[..., Any]) -> Any:
        """The key of a decorator; raises TypeError where the function could not get at its session."""
        if self._makes:
            raise TypeError(
                "the decorated function could not get at its session: write `with lock.begin(...) as session:` inside "
                "it, or give begin() a scoped_session"
            )
        return super()._templates(function)


class Begun(_OfGiven[T], Guarded[T]):
    """A lock, and a transaction of its database that is guarded by it: a `with`, which gives the session."""

    def _begin(self, holds: list[Hold]) -> Generator[T]:
        session = self._session()
        with (session or self._given).begin() as begun, _uncommitted(_connection(session or begun)):
            self._lock.guard(session or begun)
            yield session or begun
            self._committing(holds)


class AsyncBegun(_OfGiven[T], AsyncGuarded[T]):
    """The same for the lock of an AsyncEngine: an `async with`."""

    _asynchronous = True

    @asynccontextmanager
    async def _begin(self, holds: list[Hold]) -> AsyncGenerator[T]:
        session = self._session()
        async with (session or self._given).begin() as begun:
            with _uncommitted(await in_greenlet_of_its_own(_connection, session or begun)):
                await self._lock.guard(session or begun)
                yield session or begun
                self._committing(holds)


def _connection(given: Any) -> Connection:
    """That of the transaction which has begun; raises ValueError for one of two phases."""
    if getattr(getattr(given, "sync_session", given), "twophase", False):
        raise ValueError("a guarded block is not for two-phase sessions: use `with`, prepare under it, and use fences")
    return connection_of(given)


@contextmanager
def _uncommitted(connection: Connection) -> Generator[None]:
    """Refuse a body that commits by itself, after which nothing guards it: SQLAlchemy its next statement, this its end.

    Nor does an error of the lock come out of such a body, since it would say that nothing was committed.
    """
    commits: list[Connection] = []
    note = commits.append
    event.listen(connection, "commit", note)  # a session's body may also commit by its connection
    error: LockError | None = None
    try:
        yield
    except LockError as raised:
        error = raised
        if not commits:
            raise
    finally:
        if event.contains(connection, "commit", note):  # not if an interrupt has left this to the garbage collector
            event.remove(connection, "commit", note)
    if commits:
        raise InvalidRequestError(
            "the body of a guarded block has committed its transaction by itself, which ended the guard; that commit "
            "stands: leave the commit to the end of the block"
        ) from error
