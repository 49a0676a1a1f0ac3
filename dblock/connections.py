"""The connections of the lock for one alias of DATABASES.

They are opened as Django opens its own, from the same settings, but belong to the lock, see
`dblock.core.connections.pool`: not to a thread, nor to the psycopg pool of `OPTIONS["pool"]`. At most MOST are in use
at a time for taking and waiting, and MOST for keeping and giving back. They outlive requests, whatever CONN_MAX_AGE
says. But none is kept to a database that a test runner has turned the alias to, since it will be dropped.

SQLite has one writer: beside a write transaction of the same thread nothing can be written, so there, and for databases
in memory, the statement joins the caller's transaction. So it does on the caller's connection in autocommit mode if the
file has a rollback journal, where an unfinished SELECT of the caller's would block the commit of a second connection.

After a fork no connection of the parent is used or closed in the child: closing would end the parent's session.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from typing import Any, Final, TypeVar

from django.db import connections
from django.db.backends.base.base import BaseDatabaseWrapper
from django.utils.connection import ConnectionDoesNotExist

from dblock.core import clock, runtime, timing
from dblock.core.connections.connection import PooledConnection
from dblock.core.connections.pool import KEPT, AutocommitPool
from dblock.core.errors import PoolExhausted
from dblock.drivers import sessions
from dblock.drivers.tls import Tls

T = TypeVar("T")
MOST: Final = 5
"""How many connections are in use at a time for taking and waiting, at most; and for keeping and giving back."""

of_parents: list[Any] = []
"""In a forked child: the connections of the parent's own, kept so that nothing finalizes them."""


def valid_alias(using: object) -> str:
    """An alias of DATABASES; Django's ConnectionDoesNotExist otherwise."""
    alias = str(using)
    if alias not in connections:
        raise ConnectionDoesNotExist(f"DATABASES has no alias {using!r}, only {', '.join(sorted(connections))}")
    return alias


class DjangoPool(AutocommitPool):
    """Connections of the lock's own to a server or a file."""

    def __init__(self, alias: str) -> None:
        self._vendor = connections[alias].vendor
        super().__init__(MOST, local=self._vendor == "sqlite")
        self.alias = alias
        self._location: object = None
        self.lanes = Lane("take"), Lane("keep")
        """Threads for the statements of asynchronous code, the critical ones second: the application's may be busy."""
        self._tls = Tls()
        runtime.current.add_pool(self)

    def leave_to_parent(self) -> Any:
        """In a forked child, which has none of the threads."""
        self.lanes = Lane("take"), Lane("keep")
        return super().leave_to_parent()

    def take(self, until: float, *, critical: bool) -> PooledConnection:
        """As any pool does; but a test runner may have turned the alias to another database."""
        now = location(connections.settings[self.alias])
        if now != self._location:
            self.close_all()
            self._location = now
            self._keep = KEPT if _configured.setdefault(self.alias, now) == now else 0
        return super().take(until, critical=critical)

    def open(self, connection: PooledConnection) -> None:
        """As Django does, from the same settings."""
        wrapper = connection.lent = connections.create_connection(self.alias)
        connection.location = location(wrapper.settings_dict)
        options = {name: value for name, value in wrapper.settings_dict["OPTIONS"].items() if name != "pool"}
        if self._vendor == "sqlite":
            options["timeout"] = timing.DEFAULT.single_try  # for what `init_command` does
            options["detect_types"] = 0  # the lock's answers are numbers and texts
        else:
            driver = wrapper.Database.__name__.lower()  # type: ignore[attr-defined]
            options |= sessions.options(driver, options, connection.purpose) | self._tls.options(options)
        wrapper.settings_dict = {**wrapper.settings_dict, "OPTIONS": options, "AUTOCOMMIT": True}
        wrapper.inc_thread_sharing()
        try:
            wrapper.ensure_connection()
            connection.raw = raw = wrapper.connection
            self._tls.opened(raw)
            raw.rollback()  # what a receiver of `connection_created` may have begun
            wrapper._set_autocommit(True)  # type: ignore[attr-defined]  # and changed
            sessions.set_up(connection, self._vendor, raw)
        except BaseException:
            self._tls.forget()
            raise

    def close(self, connection: PooledConnection, *, broken: bool) -> None:
        """Also in a thread whose event loop runs, where Django's own `close` raises."""
        wrapper = connection.lent
        try:
            wrapper._close()
        finally:
            wrapper.connection = None


class Lane:
    """As many threads as connections."""

    def __init__(self, name: str) -> None:
        self._threads = ThreadPoolExecutor(MOST, f"dblock-{name}")

    async def run(self, work: Callable[[], T], until: float) -> T:
        """Run it in one of the threads; PoolExhausted if none has become free by that local time."""
        try:
            begun = self._threads.submit(copy_context().run, work)
        except RuntimeError as refused:
            if "shutdown" not in str(refused):  # out of threads: one that there is may do it yet
                raise
            return work()  # the interpreter is ending: what is held is given back all the same
        running = asyncio.wrap_future(begun)
        try:
            _ = await asyncio.wait((running,), timeout=max(until - clock.now(), 0.0))
        except BaseException:
            _ = running.cancel()
            raise
        if begun.cancel():
            raise PoolExhausted(f"all {MOST} connections of the lock are in use")
        return await running


class DjangoSQLite(DjangoPool):
    """Connections for the statements on a SQLite database: the lock's own, or the caller's."""

    def take(self, until: float, *, critical: bool) -> PooledConnection:
        """The caller's in memory, in a transaction, and with a rollback journal; else one of the lock's own."""
        caller = connections[self.alias]
        inherited = any(caller.connection is parent for parent in of_parents)
        if caller.is_in_memory_db() or (not inherited and in_sqlite_transaction(caller)):  # type: ignore[attr-defined]
            return self._callers(caller)
        own = super().take(until, critical=critical)
        if own.wal or inherited:
            return own
        super().give(own)
        return self._callers(caller)

    @staticmethod
    def _callers(caller: BaseDatabaseWrapper) -> PooledConnection:
        where = location(caller.settings_dict)
        caller.ensure_connection()
        raw: Any = caller.connection
        cursor = raw.cursor()
        cursor.row_factory = None
        [patience] = cursor.execute("PRAGMA busy_timeout").fetchone()
        return PooledConnection(raw, location=where, joined=True, busy_timeout=patience, lent=patience)

    def give(self, connection: PooledConnection) -> None:
        """Give it back to the pool, or give the caller's its own busy_timeout back."""
        if not connection.joined:
            super().give(connection)
        elif connection.busy_timeout != connection.lent:
            connection.raw.execute(f"PRAGMA busy_timeout = {connection.lent}")

    def drop(self, connection: PooledConnection, *, others: bool) -> None:
        """SQLite is in this process: a connection is never in the middle of an answer."""
        self.give(connection)


def location(settings: Mapping[str, Any]) -> tuple[str, ...]:
    """The database that the settings of an alias lead to. A test runner changes them while it runs."""
    return tuple(str(settings[name]) for name in ("ENGINE", "NAME", "HOST", "PORT"))


def in_sqlite_transaction(caller: BaseDatabaseWrapper) -> bool:
    """Whether it holds the database's one write lock, or its next statement will take it."""
    if caller.connection is None:
        return not caller.settings_dict["AUTOCOMMIT"]
    return caller.in_atomic_block or not caller.autocommit or bool(caller.connection.in_transaction)


_configured: dict[str, tuple[str, ...]] = {}
"""The databases of the aliases as the settings have them."""


def note_configured() -> None:
    """Note the databases of all aliases, before a test runner turns them to others."""
    _configured.update((alias, location(settings)) for alias, settings in connections.settings.items())
