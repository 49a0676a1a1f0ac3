"""The base of the stores of both faces.

It runs a statement on a connection of the lock's own, within a deadline, and translates the driver's errors.

Rule: the class of an error that is raised here says what it means for the protocol; its cause is the driver's error.
"""

from __future__ import annotations

import asyncio
import math
import time
from itertools import chain
from typing import Final, Protocol, TypeVar

from dblock.core import runtime
from dblock.core.connections.connection import PooledConnection
from dblock.core.connections.tracebacks import leave_out_driver
from dblock.core.errors import LockError, LockStoreError, PoolExhausted, StoreUnanswered, StoreUnreachable
from dblock.core.lock import failures
from dblock.core.protocol.sending import Database
from dblock.core.protocol.steps import Execute, Rows, Runner, Sleep, Wait
from dblock.core.statements.base import Failure, Statement, on_server, perform, without_secrets

E = TypeVar("E", bound=LockError)
_ANSWERS: Final = frozenset({int, float, str, type(None)})
"""The types of SQLite's values."""


class ConnectionSource(Protocol):
    """The source of connections for statements."""

    def take(self, until: float, *, critical: bool) -> PooledConnection:
        """A connection for a statement; PoolExhausted or StoreUnreachable if there is none until that local time."""
        ...

    def give(self, connection: PooledConnection) -> None:
        """Return a connection after a statement that was answered or refused."""
        ...

    def drop(self, connection: PooledConnection, *, others: bool) -> None:
        """Discard a connection in an unknown state; `others`: and the idle ones, which may be broken too."""
        ...


class BaseStore(Runner):
    """A database, and the lock's connections to it."""

    database: Database
    pin: Statement | None = None
    """The statement `pin` for sessions of the caller, once it has been needed."""
    asynchronous = False
    pins = True
    """Whether guard() can pin a row in a transaction of the caller."""
    _source: ConnectionSource
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
    """What is raised while connections are opened, beside errors of the driver and of the source."""
    _mistakes: tuple[type[BaseException], ...]
    """Errors that are mistakes of the client, so that retrying does not help."""

    @property
    def location(self) -> object:
        """The database that the store leads to at present; None: always the same one."""
        return None

    def execute(self, step: Execute) -> Rows:
        """Run the statement in this thread (or greenlet)."""
        now, timing, statement = self.database.now(), self.database.timing, step.statement
        until = timing.answer_by(now, step.until, critical=statement.critical)
        try:
            connection = self._source.take(until, critical=statement.critical)
        except (PoolExhausted, StoreUnreachable, *self._errors, *self._connect_errors) as error:  # type: ignore[misc]
            refused = self._not_connected(error, step)
            raise refused from refused.__cause__
        if step.location is not None and step.location != connection.location:
            self._source.give(connection)
            raise LockStoreError(f"{self._described} is another one than the one that was meant")
        deadlines, latency = runtime.current.deadlines, self.database.latency
        latency.answered = max(latency.answered, connection.idle_since)
        watched, in_time = connection.wire is not None, True
        # On SQLite, for other writers: half of the rest, so that the holder can be read; then the protocol tries again.
        patience = max(1, math.ceil(min(timing.single_try, (until - now) / 2) * 1000))
        try:
            try:
                if watched:
                    deadlines.arm(connection.cut, until)
                if 0 < connection.busy_timeout != patience:
                    _bound_sqlite(connection, patience)
                rows = self._perform(connection, step)
                if statement.owners:
                    rows = without_secrets(statement, rows)
            finally:
                if watched:
                    in_time = deadlines.disarm(connection.cut)
        except self._errors as error:
            leave_out_driver(error)
            if not in_time:
                self._source.drop(connection, others=False)
                unanswered = self._error(StoreUnanswered, failures.LATE, step, seconds=until - now)
                unanswered.late = until - now
                raise unanswered from error
            return self._refused(connection, error, step)
        except UnicodeError:
            self._source.give(connection)
            raise LockStoreError(failures.UNSTORABLE.format(database=self._described)) from None
        except BaseException:  # interrupted during the answer
            self._source.drop(connection, others=False)
            raise
        answered = self.database.now()
        latency.observe(answered - now, answered)
        self._source.give(connection)
        return rows

    def _not_connected(self, error: BaseException, step: Execute) -> LockError:
        """The lock's error for a step that has got no connection; its cause is the driver's error, if there is one."""
        if isinstance(error, PoolExhausted | StoreUnreachable):
            described = self._error(type(error), "{database}: {error}", step, error=error)
            described.late = error.late
            return described
        cause = error.__cause__ or error
        if isinstance(cause, self._errors):
            leave_out_driver(error)
        if self.database.dialect.classify(cause) is Failure.LOCKED:
            refused = self.error(cause, step)
        else:
            # Nothing was sent; and a mistake of the client is no outage.
            mistake = isinstance(error, self._mistakes) and "event loop" not in str(error)
            detail = f"{type(error).__name__}: {' '.join(str(error).split())}"
            raises = LockStoreError if mistake else StoreUnreachable
            refused = self._error(raises, failures.UNREACHABLE, step, detail=detail)
        refused.__cause__ = cause
        return refused

    def _refused(self, connection: PooledConnection, error: BaseException, step: Execute) -> Rows:
        """The answer that a driver's error is, or else raise the lock's error."""
        failure = self.database.dialect.classify(error)
        if failure.closes:
            self._source.drop(connection, others=True)
        else:
            self._source.give(connection)
        if failure is Failure.DUPLICATE:
            return []
        raise self.error(error, step) from error

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
        words |= {"create_table": self._create_table, "rename_tables": self._rename_tables}
        return self._error(failure.raises, failure.text, step, why_locked=self._why_locked(error), **words)

    def _error(self, raises: type[E], text: str, step: Execute, **words: object) -> E:
        """The lock's error with that text, which names the database and what the statement does."""
        text = text.format(database=self._described, what=failures.what(step), **words)
        return raises(text, key=failures.key_of(step))

    def _why_locked(self, error: BaseException) -> str:
        """A likely reason why the whole database is locked, for messages."""
        return "somebody's transaction, your own perhaps, has been writing all the time"

    def _perform(self, connection: PooledConnection, step: Execute) -> Rows:
        statement = step.statement
        if connection.mariadb is not None:
            statement = on_server(statement, mariadb=connection.mariadb, certified=connection.certified)
        if connection.prepared is not None:
            return connection.prepared(statement, step.parameters)
        cursor = connection.raw.cursor()
        if hasattr(cursor, "row_factory"):  # SQLite's, on a connection of the caller
            cursor.row_factory = None
        try:
            rows = perform(cursor, statement, step.parameters, self._paramstyle)
        finally:
            cursor.close()
        if self.database.dialect.single_writer:
            # sqlite3 converts by the declared type of a column, if its connection was opened with `detect_types`.
            for value in chain.from_iterable(rows):
                if type(value) not in _ANSWERS:
                    raise self._error(LockStoreError, failures.CONVERTED, step, type=type(value).__name__)
        if connection.commits:
            connection.raw.commit()
            connection.commits = False
        return rows


def _bound_sqlite(connection: PooledConnection, milliseconds: int) -> None:
    """Let its statements wait so long for other writers."""
    cursor = connection.raw.cursor()
    cursor.execute(f"PRAGMA busy_timeout = {milliseconds}")
    cursor.close()
    connection.busy_timeout = milliseconds
