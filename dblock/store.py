"""Runs one statement of the protocol for Django, on the raw driver's cursor.

Rule: the raw cursor, because Django's neither prepares statements on PostgreSQL nor may refuse a release inside a
transaction that is to be rolled back. Statements of the lock are therefore not in `connection.queries`.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, cast

from asgiref.sync import sync_to_async
from django.db import DatabaseError, connections
from django.db.backends.base.base import BaseDatabaseWrapper
from django.db.transaction import TransactionManagementError
from django.db.utils import InterfaceError
from django.utils.connection import ConnectionDoesNotExist

from dblock.conf import settings
from dblock.connections import connection_for, is_beside, keeps_others_from_writing
from dblock.core import loopback
from dblock.core.errors import LockStoreError, LockTimeout, UnsupportedDatabase
from dblock.core.holds import Hold
from dblock.core.protocol import Database
from dblock.core.statements import DIALECTS
from dblock.core.statements.base import Cursor, Failure, perform
from dblock.core.steps import Execute, Rows
from dblock.core.store import store_error, unreachable, unstorable
from dblock.listening import psycopg_ear

if TYPE_CHECKING:
    from dblock.core.listener import Ear
    from dblock.prepared import mariadb, psycopg

    Prepared = mariadb.Prepared | psycopg.Prepared

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
        try:
            connection = connection_for(self._alias)
        except (DatabaseError, InterfaceError, OSError) as error:
            raise unreachable(error, place=self._place) from (error.__cause__ or error)
        errors = (connection.Database.Error, OSError)  # type: ignore[attr-defined]
        try:
            return _perform(connection, step)
        except errors as error:
            failure = self.database.dialect.classify(error)
            if failure is Failure.DUPLICATE:
                return []
            if failure is Failure.LOST:
                _discard(connection)
            raise self.error(error, step) from error
        except UnicodeError:
            raise unstorable(place=self._place) from None
        except BaseException:  # interrupted half-way through an answer
            _discard(connection)
            raise

    def error(self, error: BaseException, step: Execute) -> LockStoreError:
        """What a driver's error means."""
        failure = self.database.dialect.classify(error)
        return store_error(failure, error, step, create_table=self._create_table, place=self._place)

    def same_database(self, alias: str) -> bool:
        """Is `alias` the database that the lock's rows live in, perhaps under another name?"""
        ours, theirs = connections[self._alias].settings_dict, connections[alias].settings_dict
        return alias == self._alias or all(ours[name] == theirs[name] for name in ("ENGINE", "NAME", "HOST", "PORT"))

    asynchronous = False

    @property
    def renewable(self) -> bool:
        """A database in memory may be another one in another thread; and its tables are locked during transactions."""
        connection = connections[self._alias]
        return connection.vendor != "sqlite" or not connection.is_in_memory_db()  # type: ignore[attr-defined]

    def end_thread(self) -> None:
        """Close the connections of this thread, which only the lock has used."""
        connections.close_all()

    def hear(self, channel: str) -> Ear | None:
        """Listen on a connection of its own; None for drivers that cannot, behind a pooler, and if told not to."""
        if not settings().LISTEN:
            return None
        connection = connections.create_connection(self._alias)
        settings_dict = connection.settings_dict
        options = {name: value for name, value in settings_dict["OPTIONS"].items() if name != "pool"}
        connection.settings_dict = {**settings_dict, "OPTIONS": options}  # it would keep a place in the pool
        try:
            connection.ensure_connection()
            if not hasattr(connection.connection, "pgconn"):  # psycopg 2
                connection.close()
                return None
            connection.set_autocommit(True)
            return psycopg_ear(connection.connection, channel, connection.close)
        except BaseException:
            connection.close()
            raise

    def hear_neighbours(self) -> Ear | None:
        """Listen to the processes of this machine."""
        return loopback.ear()

    def in_background(self, function: Callable[[], None]) -> Callable[[], bool]:
        """Run it in a thread."""
        thread = threading.Thread(target=function, name="dblock listener", daemon=True)
        thread.start()
        return thread.is_alive

    def rest(self, seconds: float) -> None:
        """Sleep in that thread."""
        time.sleep(seconds)

    def before_waiting(self) -> None:
        """Refuse to wait inside a SQLite transaction."""
        if keeps_others_from_writing(self._alias):
            raise LockTimeout(
                f"the key is held, and waiting for it inside a transaction would keep {self._place} locked against its "
                "holder: take the lock before the transaction begins"
            )

    async def aexecute(self, step: Execute) -> Rows:
        """Run the statement in the thread that Django's async code shares, for its length only."""
        return await sync_to_async(self.execute, thread_sensitive=True)(step)


def _perform(connection: BaseDatabaseWrapper, step: Execute) -> Rows:
    raw: Any = connection.connection
    if connection.vendor == "sqlite":
        return perform(raw.cursor(), step.statement, step.parameters, "named")
    prepared = _prepared.get(raw, ...)
    if prepared is ...:
        prepared = _prepared[raw] = _prepare(connection, raw)
    if prepared is not None:
        return prepared.execute(step)
    if hasattr(raw, "pgconn"):
        return perform(_cursor(raw), step.statement, step.parameters, "pyformat", prepare=False)
    with raw.cursor() as cursor:
        return perform(cursor, step.statement, step.parameters, "pyformat")


def _prepare(connection: BaseDatabaseWrapper, raw: Any) -> Prepared | None:
    if not _outlives_request(connection):
        return None
    if connection.vendor == "mysql":
        from dblock.prepared import mariadb  # noqa: PLC0415 - only where it is in use

        return mariadb.prepared_for(raw)
    if not hasattr(raw, "pgconn"):
        return None
    from dblock.prepared import psycopg  # noqa: PLC0415 - imports the driver, only where it is in use

    [(backend_pid,)] = _cursor(raw).execute("SELECT pg_backend_pid()").fetchall()
    return psycopg.prepared_for(raw, backend_pid)


def _cursor(raw: Any) -> Any:
    """A plain cursor: Django's interpolates parameters itself."""
    from psycopg import Cursor  # noqa: PLC0415 - only where it is in use

    return Cursor(raw)


def _outlives_request(connection: BaseDatabaseWrapper) -> bool:
    """Is it worth while to prepare statements on this connection?"""
    settings = connection.settings_dict
    return is_beside(connection) or settings["CONN_MAX_AGE"] != 0 or bool(settings["OPTIONS"].get("pool"))


def _discard(connection: BaseDatabaseWrapper) -> None:
    """Close a connection in an unknown state, unless a transaction of the caller's may depend on it.

    SQLite is in this process: its connection is never in the middle of an answer.
    """
    if connection.in_atomic_block or connection.vendor == "sqlite":
        return
    try:
        connection.close()
    except Exception:  # noqa: BLE001 - it is broken anyway
        connection.connection = None


def pin(store: DjangoStore, alias: str, hold: Hold) -> bool:
    """Run the statement `pin` in the transaction that is open on `alias`; False if that found the tenure over."""
    connection = connections[alias]
    if not connection.in_atomic_block:
        raise TransactionManagementError("guard() keeps the lock until the transaction ends: call it inside atomic()")
    if not store.same_database(alias):
        raise ValueError(f"guard(using={alias!r}): the lock lives in another database, which this one cannot keep")
    statement = store.database.dialect.pin
    parameters = {**hold.tenure._asdict(), "life": hold.life}
    try:
        with connection.cursor() as cursor:
            return bool(perform(cast("Cursor", cursor), statement, parameters, "pyformat"))
    except (DatabaseError, InterfaceError) as error:
        cause = error.__cause__ or error
        raise store.error(cause, Execute(statement, parameters)) from cause


def store_for(alias: str) -> DjangoStore:
    """The one store of an alias, whoever asks first."""
    return _stores.get(alias) or _stores.setdefault(alias, DjangoStore(alias))


_stores: dict[str, DjangoStore] = {}
