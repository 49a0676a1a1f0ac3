"""What the stores of both faces share.

A statement runs on a connection of the lock's own and is answered within a bound, and a driver's error becomes one of
ours, in one place.

Rule: an error that leaves here says what it means for the protocol by its class, and has the driver's error as its
cause.
"""

from __future__ import annotations

import math
import time
from typing import Final, Protocol

from dblock.core import runtime
from dblock.core.connections.pool import PooledConnection
from dblock.core.errors import LockError, StoreConflict
from dblock.core.face.failures import SCHEMA, key_of, late, schema_error, store_error, unreachable, unstorable
from dblock.core.protocol.sending import Database
from dblock.core.protocol.steps import Execute, Rows, Sleep, Wait
from dblock.core.statements.base import Failure, Statement, perform

_SPENT: Final = frozenset({Failure.DISCONNECTED, Failure.SPENT})
"""After these the connection is of no more use."""


class ConnectionSource(Protocol):
    """Where the connections for statements come from."""

    def take(self, until: float, *, keeps: bool, urgent: bool = False) -> PooledConnection:
        """One for a statement; StoreConflict if there is none until that local time."""
        ...

    def give(self, connection: PooledConnection) -> None:
        """The statement has succeeded."""
        ...

    def give_after_error(self, connection: PooledConnection) -> None:
        """It was refused."""
        ...

    def drop(self, connection: PooledConnection, *, others: bool) -> None:
        """What became of it is not known; `others`: nor whether those that wait still lead anywhere."""
        ...


class BaseStore:
    """A database, and the connections of the lock to it."""

    database: Database
    pin: Statement | None = None
    """The statement `pin` as sessions of the caller's are to run it, once somebody has asked for it."""
    asynchronous = False
    pins = True
    """Can guard() pin a row in a transaction of the caller's?"""
    _source: ConnectionSource
    name: str
    """Which database it is, without what a log should not show."""
    _described: str
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
        now, timing = self.database.now(), self.database.timing
        until = self._until(step, now)
        try:
            connection = self._source.take(until, keeps=step.statement.keeps, urgent=step.statement.urgent)
        except StoreConflict as error:
            raise type(error)(f"{self._described}: {error}", key=key_of(step)) from None
        except self._connect_errors as error:
            cause = error.__cause__ or error
            if self.database.dialect.classify(cause) is Failure.LOCKED:
                raise self.error(cause, step) from cause
            raise unreachable(error, database=self._described) from cause
        deadlines = runtime.current.deadlines
        try:
            deadlines.watch(connection, until)
            if connection.busy_timeout:
                _bound_sqlite(connection, min(timing.sqlite_busy, (until - now) / 2))
            rows = self._perform(connection, step)
        except self._errors as error:
            failure = self.database.dialect.classify(error)
            if not deadlines.answered(connection):
                self._source.drop(connection, others=True)
                raise late(step, until - now, database=self._described) from error
            self._give_back(connection, failure)
            if failure is Failure.DUPLICATE:
                return []
            raise self.error(error, step) from error
        except UnicodeError:
            _ = deadlines.answered(connection)
            self._source.give_after_error(connection)
            raise unstorable(database=self._described) from None
        except BaseException:  # interrupted half-way through an answer
            _ = deadlines.answered(connection)
            self._source.drop(connection, others=False)
            raise
        if not deadlines.answered(connection):
            self._source.drop(connection, others=False)
            return rows
        try:
            self._source.give(connection)
        except self._errors as error:  # in memory this is what commits
            self._source.give_after_error(connection)
            raise self.error(error, step) from error
        return rows

    def _until(self, step: Execute, now: float) -> float:
        """The local time after which whoever sends it goes on without an answer."""
        timing = self.database.timing
        longest = timing.keeping_answer if step.statement.keeps else timing.answer
        return now + max(timing.least_answer, min(step.until - now, longest))

    def _give_back(self, connection: PooledConnection, failure: Failure) -> None:
        if failure in _SPENT:
            self._source.drop(connection, others=True)
        else:
            self._source.give_after_error(connection)

    def pause(self, step: Sleep | Wait) -> None:
        """Let time pass in this thread."""
        if isinstance(step, Wait):
            step.wakeup.wait(step.seconds)
        else:
            time.sleep(step.seconds)

    async def apause(self, step: Sleep | Wait) -> None:
        """Let time pass in the running task."""
        if isinstance(step, Wait):
            await step.wakeup.wait_async(step.seconds)
        else:
            import asyncio  # noqa: PLC0415 - a third of the core's import time, for those who do not use it

            await asyncio.sleep(step.seconds)

    def error(self, error: BaseException, step: Execute) -> LockError:
        """What a driver's error means."""
        failure = self.database.dialect.classify(error)
        if failure in SCHEMA:
            return schema_error(failure, error, step, self)
        return store_error(failure, error, step, self)

    def _why_locked(self, error: BaseException) -> str:
        """What may have locked the whole database."""
        return "somebody's transaction, your own perhaps, has been writing all the time"

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
