"""What the stores of both faces share.

A statement runs on a connection of the lock's own and is answered within a bound, and a driver's error becomes one of
ours, in one place.

Rule: an error that leaves here says what it means for the protocol by its class, and has the driver's error as its
cause.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Final, Protocol

from dblock.core import runtime
from dblock.core.connections.pool import PooledConnection
from dblock.core.errors import (
    LockError,
    LockStoreError,
    StaleSnapshot,
    StoreBusy,
    StoreConflict,
    StoreLocked,
    StoreUnanswered,
)
from dblock.core.protocol.steps import Execute, Rows
from dblock.core.protocol.tenures import Database
from dblock.core.statements.base import Failure, Statement, perform


class ConnectionSource(Protocol):
    """Where the connections for statements come from."""

    def take(self, until: float, *, keeps: bool) -> PooledConnection:
        """One for a statement; StoreConflict if there is none until that local time."""
        ...

    def give(self, connection: PooledConnection) -> None:
        """The statement has succeeded."""
        ...

    def give_after_error(self, connection: PooledConnection) -> None:
        """It was refused."""
        ...

    def drop(self, connection: PooledConnection) -> None:
        """What became of it is not known."""
        ...


class BaseStore:
    """A database, and the connections of the lock to it."""

    database: Database
    pin: Statement | None = None
    """The statement `pin` as sessions of the caller's are to run it, once somebody has asked for it."""
    asynchronous = False
    _source: ConnectionSource
    _place: str
    """Which database it is, for people."""
    _create_table: str
    """What makes the table."""
    _rename_tables: str
    """What gives the tables other names."""
    _paramstyle: str
    _errors: tuple[type[BaseException], ...]
    """The driver's."""
    _connect_errors: tuple[type[BaseException], ...]

    def execute(self, step: Execute) -> Rows:
        """Run the statement in this thread (or greenlet)."""
        keeps, now, timing = step.statement.keeps, self.database.now(), self.database.timing
        longest = timing.keeping_answer if keeps else timing.answer
        until = now + max(timing.least_answer, min(step.until - now, longest))
        try:
            connection = self._source.take(until, keeps=keeps)
        except StoreConflict as error:
            raise StoreConflict(f"{self._place}: {error}", key=_key(step)) from None
        except self._connect_errors as error:
            cause = error.__cause__ or error
            if self.database.dialect.classify(cause) is Failure.LOCKED:
                raise self.error(cause, step) from cause
            raise unreachable(error, place=self._place) from cause
        answered = self._watch(connection, until)
        try:
            if connection.busy_timeout:
                _bound_sqlite(connection, min(timing.sqlite_busy, (until - now) / 2))
            rows = self._perform(connection, step)
        except self._errors as error:
            failure = self.database.dialect.classify(error)
            if not answered():
                self._source.drop(connection)
                raise late(step, until - now, place=self._place) from error
            (self._source.drop if failure in _SPENT else self._source.give_after_error)(connection)
            if failure is Failure.DUPLICATE:
                return []
            raise self.error(error, step) from error
        except UnicodeError:
            _ = answered()
            self._source.give_after_error(connection)
            raise unstorable(place=self._place) from None
        except BaseException:  # interrupted half-way through an answer
            _ = answered()
            self._source.drop(connection)
            raise
        if not answered():
            self._source.drop(connection)
            return rows
        try:
            self._source.give(connection)
        except self._errors as error:  # in memory this is what commits
            self._source.give_after_error(connection)
            raise self.error(error, step) from error
        return rows

    def error(self, error: BaseException, step: Execute) -> LockError:
        """What a driver's error means."""
        failure = self.database.dialect.classify(error)
        if failure in _SCHEMA:
            return schema_error(failure, error, step, self)
        return store_error(failure, error, step, self)

    def _why_locked(self, error: BaseException) -> str:
        """What may have locked the whole database."""
        return "somebody's transaction, your own perhaps, has been writing all the time"

    def _watch(self, connection: PooledConnection, until: float) -> Callable[[], bool]:
        """Cut the connection at that local time, unless the function that this returns has been called: False then."""
        if connection.wire < 0:
            return _always
        deadlines = runtime.current.deadlines
        deadlines.watch(connection, until)
        return lambda: deadlines.answered(connection)

    def _perform(self, connection: PooledConnection, step: Execute) -> Rows:
        if connection.prepared is not None:
            return connection.prepared(step)
        cursor = connection.raw.cursor()
        try:
            return perform(cursor, step.statement, step.parameters, self._paramstyle)
        finally:
            cursor.close()


def _bound_sqlite(connection: PooledConnection, seconds: float) -> None:
    """Let a statement wait so long for other writers; half of what is left, so that it can be seen who has the key."""
    milliseconds = max(1, math.ceil(seconds * 1000))
    if milliseconds != connection.busy_timeout:
        cursor = connection.raw.cursor()
        cursor.execute(f"PRAGMA busy_timeout = {milliseconds}")
        cursor.close()
        connection.busy_timeout = milliseconds


def _always() -> bool:
    return True


_INDEXES: Final = ("locks_pin ON locks (lock_key)", "lock_waiters_queue ON lock_waiters (lock_key, ticket)")
"""Those that statements name."""

_SCHEMA: Final = frozenset({Failure.NO_TABLE, Failure.OTHER_TABLE})
"""These tell of the tables, not of the statement."""

_SPENT: Final = frozenset({Failure.LOST, Failure.READ_ONLY})
"""After these the connection is of no more use: the server is gone, or another one takes the writes now."""


def schema_error(failure: Failure, error: BaseException, step: Execute, store: BaseStore) -> LockStoreError:
    """The error to raise from the driver's `error` of `step`: the tables are not as they should be."""
    dialect, place = store.database.dialect, store._place
    names = [f"`{dialect.tables.name(each, '')}`" for each in ("locks", "lock_waiters") if each in step.statement.sql]
    if failure is Failure.NO_TABLE:
        text = f"{place} has no table {' or no table '.join(names)}: {store._create_table}"
        return LockStoreError(text, key=_key(step))
    detail = _first_line(error)
    missing = next((index for index in _INDEXES if index.partition(" ")[0] in detail), "")
    make = f" ({dialect.tables.named(f'CREATE UNIQUE INDEX {missing}', dialect.quote)})" if missing else ""
    return LockStoreError(
        f"{' or '.join(names)} in {place} is not as dblock made it: {type(error).__name__}: {detail}. If it is "
        f"dblock's, run its migrations to their end{make}; if it is another application's, {store._rename_tables}",
        key=_key(step),
    )


def store_error(failure: Failure, error: BaseException, step: Execute, store: BaseStore) -> LockError:
    """The error to raise from the driver's `error` of `step`, which means `failure`."""
    key, what, place = _key(step), _what(step), store._place
    detail = f"{type(error).__name__}: {_first_line(error)}"
    kind: type[LockError]
    match failure:
        case Failure.CONFLICT | Failure.READ_ONLY:
            kind, text = StoreConflict, f"{place} kept refusing to {what}: {detail}"
        case Failure.LOCKED:
            kind, text = StoreLocked, f"{place} kept refusing to {what}: {detail}; {store._why_locked(error)}"
        case Failure.BUSY:
            kind, text = StoreBusy, f"{place} could not {what}, because another transaction has locked it: {detail}"
        case Failure.STALE:
            hint = "the transaction has read what others have changed since: take the lock, and then begin it"
            kind, text = StaleSnapshot, f"{place} refused to {what}: {detail}; {hint}"
        case Failure.LOST:
            kind, text = StoreUnanswered, f"{place} did not answer when asked to {what}: {detail}"
        case _:
            kind, text = LockStoreError, f"{place} refused to {what}: {detail}"
    return kind(text, key=key)


def late(step: Execute, seconds: float, *, place: str) -> StoreUnanswered:
    """The error for a statement that was not answered in time."""
    return StoreUnanswered(f"{place} did not answer within {seconds:.2g} s when asked to {_what(step)}", key=_key(step))


def unstorable(*, place: str) -> LockStoreError:
    """The error for text that the connection's character set lacks; the driver's would quote the whole statement."""
    return LockStoreError(
        f"{place} is connected with a character set that lacks characters of the key or label: use UTF-8"
    )


def unreachable(error: BaseException, *, place: str) -> StoreConflict:
    """The error for a connection that could not be opened: nothing was sent."""
    return StoreConflict(f"cannot connect to {place}: {type(error).__name__}: {str(error).strip()}")


def _first_line(error: BaseException) -> str:
    """What a driver says, without the statement that it may quote below."""
    return str(error).strip().partition("\n")[0]


def _key(step: Execute) -> str | None:
    key: Any = step.parameters.get("key")
    return None if key is None else str(key)


def _what(step: Execute) -> str:
    key = _key(step)
    return f"{step.statement.name} {key!r}" if key else step.statement.name
