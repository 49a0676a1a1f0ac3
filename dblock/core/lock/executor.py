"""The base of the stores of both faces.

It runs a statement on a connection of the lock's own, within a deadline, and translates the driver's errors.

Rule: the class of an error that is raised here says what it means for the protocol; its cause is the driver's error.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable
from typing import Final, Protocol, TypeVar

from dblock.core import runtime
from dblock.core.connections.connection import PooledConnection
from dblock.core.connections.tracebacks import leave_out_driver
from dblock.core.errors import LockError, LockStoreError, PoolExhausted, StoreUnreachable
from dblock.core.lock import failures
from dblock.core.protocol.sending import Database
from dblock.core.protocol.steps import Execute, Rows, Sleep, Wait
from dblock.core.statements.base import Failure, Statement, on_server, perform, without_secrets

_ANSWERS: Final = frozenset({int, float, str, type(None)})
"""The types of SQLite's values."""


T = TypeVar("T")


class ConnectionSource(Protocol):
    """The source of connections for statements."""

    def take(self, until: float, *, critical: bool, priority: bool = False) -> PooledConnection:
        """A connection for a statement; PoolExhausted or StoreUnreachable if there is none until that local time."""
        ...

    def give(self, connection: PooledConnection) -> None:
        """Return a connection after a statement that succeeded."""
        ...

    def give_after_error(self, connection: PooledConnection) -> None:
        """Return a connection after a statement that was refused."""
        ...

    def drop(self, connection: PooledConnection, *, others: bool) -> None:
        """Discard a connection in an unknown state; `others`: and the idle ones, which may be broken too."""
        ...


class BaseStore:
    """A database, and the lock's connections to it."""

    database: Database
    pin: Statement | None = None
    """The statement `pin` for sessions of the caller, once it has been needed."""
    asynchronous = False
    pins = True
    """Whether guard() can pin a row in a transaction of the caller."""
    _source: ConnectionSource
    name: str
    """Name of the database, without secrets, for events and logs."""
    _described: str
    """Name of the database in messages."""
    _create_table: str
    """How to create the tables, for messages."""
    _rename_tables: str
    """How to give the tables other names, for messages."""
    _paramstyle: str
    _errors: tuple[type[BaseException], ...]
    """The driver's errors."""
    _connect_errors: tuple[type[BaseException], ...]
    _mistakes: tuple[type[BaseException], ...]
    """Errors that are mistakes of the client, so that retrying does not help."""

    @property
    def location(self) -> object:
        """The database that the store leads to at present; None: always the same one."""
        return None

    def execute(self, step: Execute) -> Rows:
        """Run the statement in this thread (or greenlet)."""
        now, timing = self.database.now(), self.database.timing
        until = timing.answer_by(now, step.until, critical=step.statement.critical)
        connection = self._connection(step, until)
        deadlines, latency = runtime.current.deadlines, self.database.latency
        latency.answered = max(latency.answered, connection.opened)
        try:
            deadlines.arm(connection, until)
            if connection.busy_timeout:
                _bound_sqlite(connection, min(timing.single_try, (until - now) / 2))  # then the protocol tries again
            rows = self._perform(connection, step)
            if step.statement.owners:
                rows = without_secrets(step.statement, rows)
        except self._errors as error:
            leave_out_driver(error)
            if not deadlines.disarm(connection):
                self._source.drop(connection, others=False)
                raise failures.late(step, until - now, database=self._described) from error
            failure = self.database.dialect.classify(error)
            if failure.closes:
                self._source.drop(connection, others=True)
            else:
                self._source.give_after_error(connection)
            if failure is Failure.DUPLICATE:
                return []
            raise self.error(error, step) from error
        except UnicodeError:
            _ = deadlines.disarm(connection)
            self._source.give_after_error(connection)
            raise failures.unstorable(database=self._described) from None
        except BaseException:  # interrupted during the answer
            _ = deadlines.disarm(connection)
            self._source.drop(connection, others=False)
            raise
        answered = self.database.now()
        latency.observe(answered - now, answered)
        if not deadlines.disarm(connection):
            self._source.drop(connection, others=False)
            return rows
        try:
            self._source.give(connection)
        except self._errors as error:  # for a database in memory this commits
            self._source.give_after_error(connection)
            raise self.error(error, step) from error
        return rows

    def _connection(self, step: Execute, until: float) -> PooledConnection:
        """A connection for a step, to the database that it is for."""
        try:
            connection = self._source.take(until, critical=step.statement.critical, priority=step.statement.priority)
        except (PoolExhausted, StoreUnreachable) as error:
            described = type(error)(f"{self._described}: {error}", key=failures.key_of(step))
            described.late = error.late
            raise described from None
        except self._connect_errors as error:
            cause = error.__cause__ or error
            if isinstance(cause, self._errors):
                leave_out_driver(error)
            if self.database.dialect.classify(cause) is Failure.LOCKED:
                raise self.error(cause, step) from cause
            mistake = isinstance(error, self._mistakes) and "event loop" not in str(error)
            raise failures.unreachable(error, step, database=self._described, mistake=mistake) from cause
        if step.location not in {None, connection.location}:
            self._source.give(connection)
            raise LockStoreError(f"{self._described} is another one than the one that was meant")
        return connection

    def _begin_to_listen(self, connection: PooledConnection, begin: Callable[[], T]) -> T:
        """Run `begin`, which makes a connection listen, with a deadline as for a statement."""
        until = self.database.now() + self.database.timing.statement_timeout
        return runtime.current.deadlines.bound(connection, until, begin)

    def pause(self, step: Sleep | Wait) -> None:
        """Sleep or wait in this thread."""
        if isinstance(step, Wait):
            step.wakeup.wait(step.seconds)
        else:
            time.sleep(step.seconds)

    async def apause(self, step: Sleep | Wait) -> None:
        """Sleep or wait in the running task."""
        if isinstance(step, Wait):
            await step.wakeup.wait_async(step.seconds)
        else:
            await asyncio.sleep(step.seconds)

    def error(self, error: BaseException, step: Execute) -> LockError:
        """The lock's error for a driver's error."""
        dialect = self.database.dialect
        failure, words = dialect.classify(error), failures.described(error, step, dialect)
        text = failure.text.format(
            database=self._described,
            why_locked=self._why_locked(error),
            create_table=self._create_table,
            rename_tables=self._rename_tables,
            **words,
        )
        return failure.raises(text, key=failures.key_of(step))

    def _why_locked(self, error: BaseException) -> str:
        """A likely reason why the whole database is locked, for messages."""
        return "somebody's transaction, your own perhaps, has been writing all the time"

    async def aexecute(self, step: Execute) -> Rows:
        """Run the statement on the running event loop."""
        raise NotImplementedError

    def _perform(self, connection: PooledConnection, step: Execute) -> Rows:
        if connection.mariadb is not None:
            step = step._replace(
                statement=on_server(step.statement, mariadb=connection.mariadb, certified=connection.certified)
            )
        if connection.prepared is not None:
            return connection.prepared(step)
        cursor = connection.raw.cursor()
        if hasattr(cursor, "row_factory"):  # SQLite's, on a connection of the caller
            cursor.row_factory = None
        try:
            rows = perform(cursor, step.statement, step.parameters, self._paramstyle)
        finally:
            cursor.close()
        if self.database.dialect.single_writer:
            self._check_types(rows, step)
        return rows

    def _check_types(self, rows: Rows, step: Execute) -> None:
        """Raise LockStoreError for a value that a converter of the application has replaced.

        sqlite3 converts by the declared type of a column, if its connection was opened with `detect_types`.
        """
        for row in rows:
            for value in row:
                if type(value) not in _ANSWERS:
                    raise failures.converted(value, step, database=self._described)


def _bound_sqlite(connection: PooledConnection, seconds: float) -> None:
    """Let a statement wait so many seconds for other writers; half of the rest, so that the holder can be read."""
    milliseconds = max(1, math.ceil(seconds * 1000))
    if milliseconds != connection.busy_timeout:
        cursor = connection.raw.cursor()
        cursor.execute(f"PRAGMA busy_timeout = {milliseconds}")
        cursor.close()
        connection.busy_timeout = milliseconds
