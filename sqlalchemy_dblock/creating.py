"""`create_tables`: make the lock's tables, also in processes that start at the same moment on an empty database.

Rule: the processes make them one after the other, under a lock of the database itself. If another program makes them at
the same moment (Alembic, Django's migrate), a statement fails, and is retried.
"""

from __future__ import annotations

from collections.abc import Coroutine, Generator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final, overload

from sqlalchemy import Connection, Engine, Table
from sqlalchemy.exc import DBAPIError

from dblock.core.protocol.sending import pauses
from dblock.core.statements import DIALECTS
from dblock.core.statements.base import Failure
from sqlalchemy_dblock.connections import in_greenlet_of_its_own, rest
from sqlalchemy_dblock.place import sync_engine
from sqlalchemy_dblock.table import metadata_for

if TYPE_CHECKING:
    from sqlalchemy.ext.asyncio import AsyncEngine

TRIES: Final = 10
"""Attempts of a process that does not get its turn, or collides with another program that makes the tables."""
TURN: Final = 10
"""Seconds for which a process waits for its turn on MySQL and MariaDB; then the attempt has failed."""
NAME: Final = "dblock_create_tables"
NUMBER: Final = int.from_bytes(b"dblock")


@overload
def create_tables(engine: Engine) -> None: ...
@overload
def create_tables(engine: AsyncEngine) -> Coroutine[Any, Any, None]: ...
def create_tables(engine: Engine | AsyncEngine) -> Coroutine[Any, Any, None] | None:
    """Make the missing tables and indexes of the lock, under the names given by the engine's options.

    For the start of a process. Any number of processes may do so at the same moment, also on an empty database. It
    makes no schema, and changes no existing table. Where all tables exist it needs the rights of the lock only. Await
    it for an AsyncEngine.

    Raises SQLAlchemy's error if the database refuses, for lack of rights for example.
    """
    inner = sync_engine(engine)
    if inner is not engine:
        return in_greenlet_of_its_own(_create, inner)
    _create(inner)
    return None


def _create(engine: Engine) -> None:
    growing = pauses()
    for left in reversed(range(TRIES)):
        try:
            with _turn(engine) as connection:
                _make(connection, engine)
                connection.commit()
        except DBAPIError:
            if not left:
                raise
        else:
            return
        rest(next(growing), engine.dialect)


def _make(connection: Connection, engine: Engine) -> None:
    options = engine.get_execution_options()  # the schema is translated by SQLAlchemy, if it is
    made = metadata_for(options.get("dblock_prefix", ""), options.get("dblock_schema"))
    for table in made.sorted_tables:
        # The lock needs no rights on the table of the history where none is kept.
        if table.name.endswith("lock_events") and not (options.get("dblock_history") or _may_see(connection, table)):
            continue
        table.create(connection, checkfirst=True)
        for index in table.indexes:  # of a table whose process was killed before it made them
            index.create(connection, checkfirst=True)


def _may_see(connection: Connection, table: Table) -> bool:
    """Whether the database says if the table exists: MySQL and MariaDB do not without a right on it."""
    try:
        _ = connection.dialect.has_table(connection, table.name, schema=connection.schema_for_object(table))
    except DBAPIError as error:
        if error.orig is None or DIALECTS[connection.dialect.name].classify(error.orig) is not Failure.NO_RIGHT:
            raise
        return False
    return True


@contextmanager
def _turn(engine: Engine) -> Generator[Connection]:
    """A connection in whose transaction no other process makes the tables."""
    with engine.connect() as connection:
        match engine.dialect.name:
            case "postgresql":
                # A snapshot that is older than the turn would not show the tables that others have made.
                _ = connection.execution_options(isolation_level="READ COMMITTED")
                _ = connection.exec_driver_sql(f"SELECT pg_advisory_xact_lock({NUMBER})")
                yield connection
            case "sqlite":
                if not connection.connection.driver_connection.in_transaction:  # type: ignore[union-attr]
                    _ = connection.exec_driver_sql("BEGIN IMMEDIATE")
                yield connection
            case _:
                _ = connection.exec_driver_sql(f"SELECT GET_LOCK('{NAME}', {TURN})")
                try:
                    yield connection
                finally:
                    if not connection.invalidated:
                        _ = connection.exec_driver_sql(f"SELECT RELEASE_LOCK('{NAME}')")
