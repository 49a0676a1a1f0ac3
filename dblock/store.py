"""Runs one statement of the protocol for Django, on the raw driver's cursor.

Rule: the raw cursor, because Django's neither prepares statements on PostgreSQL nor may refuse a release inside a
transaction that is to be rolled back. Statements of the lock are therefore not in `connection.queries`.
"""

from __future__ import annotations

import weakref
from functools import cache
from typing import TYPE_CHECKING, Any

from asgiref.sync import sync_to_async
from django.db import DatabaseError, connections
from django.db.backends.base.base import BaseDatabaseWrapper
from django.db.utils import InterfaceError
from django.utils.asyncio import async_unsafe
from django.utils.connection import ConnectionDoesNotExist

from dblock.connections import connection_for, is_beside
from dblock.core.errors import UnsupportedDatabase
from dblock.core.protocol import Database
from dblock.core.statements import DIALECTS
from dblock.core.statements.base import perform
from dblock.core.steps import Execute, Rows
from dblock.core.store import store_error, unreachable

if TYPE_CHECKING:
    from dblock.prepared import Prepared

_prepared: weakref.WeakKeyDictionary[Any, Prepared | None] = weakref.WeakKeyDictionary()


class DjangoStore:
    """The database of one alias."""

    def __init__(self, alias: str) -> None:
        try:
            vendor = connections[alias].vendor
        except ConnectionDoesNotExist as error:
            known = ", ".join(sorted(connections))
            raise UnsupportedDatabase(f"DATABASES has no alias {alias!r}, only {known}") from error
        if vendor not in DIALECTS:
            raise UnsupportedDatabase(
                f"database {alias!r} is {vendor}; the lock needs PostgreSQL, MySQL, MariaDB or SQLite"
            )
        self.database = Database(DIALECTS[vendor])
        self._alias = alias
        self._place = f"database {alias!r}"
        self._create_table = f"add 'dblock' to INSTALLED_APPS and run `manage.py migrate dblock --database {alias}`"

    def execute(self, step: Execute) -> Rows:
        """Run the statement in this thread."""
        connection = self._connect()
        errors = (connection.Database.Error, OSError)  # type: ignore[attr-defined]
        try:
            return _perform(connection, step)
        except errors as error:
            _discard(connection)
            ours = store_error(self.database.dialect, error, create_table=self._create_table, place=self._place)
            if ours is None:
                return []
            raise ours from error
        except BaseException:  # interrupted half-way through an answer
            _discard(connection)
            raise

    async def aexecute(self, step: Execute) -> Rows:
        """Run the statement in the thread that Django's async code shares, for its length only."""
        return await sync_to_async(self.execute, thread_sensitive=True)(step)

    @async_unsafe("A lock cannot be taken here: use `async with db_lock(...)` and the methods that begin with an `a`.")
    def _connect(self) -> BaseDatabaseWrapper:
        try:
            return connection_for(self._alias)
        except (DatabaseError, InterfaceError, OSError) as error:
            raise unreachable(error, place=self._place) from (error.__cause__ or error)


def _perform(connection: BaseDatabaseWrapper, step: Execute) -> Rows:
    raw: Any = connection.connection
    if connection.vendor == "sqlite":
        return perform(raw.cursor(), step.statement, step.parameters, "named")
    if connection.vendor == "postgresql" and hasattr(raw, "pgconn"):
        return _perform_psycopg(connection, raw, step)
    with raw.cursor() as cursor:
        return perform(cursor, step.statement, step.parameters, "pyformat")


def _perform_psycopg(connection: BaseDatabaseWrapper, raw: Any, step: Execute) -> Rows:
    from psycopg import Cursor  # noqa: PLC0415 - only where it is in use

    from dblock.prepared import prepared_for  # noqa: PLC0415

    cursor: Any = Cursor(raw)  # not Django's, which interpolates parameters itself
    if raw not in _prepared:
        _prepared[raw] = None
        if _outlives_request(connection):
            [(backend_pid,)] = cursor.execute("SELECT pg_backend_pid()").fetchall()
            _prepared[raw] = prepared_for(raw, backend_pid)
    prepared = _prepared[raw]
    return perform(cursor, step.statement, step.parameters, "pyformat") if prepared is None else prepared.execute(step)


def _outlives_request(connection: BaseDatabaseWrapper) -> bool:
    """Is it worth while to prepare statements on this connection?"""
    settings = connection.settings_dict
    return is_beside(connection) or settings["CONN_MAX_AGE"] != 0 or bool(settings["OPTIONS"].get("pool"))


def _discard(connection: BaseDatabaseWrapper) -> None:
    """Close a connection in an unknown state, unless a transaction of the caller's depends on it."""
    if connection.in_atomic_block:
        return
    try:
        connection.close()
    except Exception:  # noqa: BLE001 - it is broken anyway
        connection.connection = None


store_for = cache(DjangoStore)
"""The one store of an alias."""
