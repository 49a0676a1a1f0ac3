"""Runs one statement of the protocol for an Engine or an AsyncEngine, on the raw driver's cursor.

Rule: an asynchronous driver is run by the same code, inside the greenlet in which SQLAlchemy adapts it to DB-API.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from dataclasses import asdict
from functools import partial
from typing import Any, cast

from sqlalchemy import URL, Engine
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.pool import SingletonThreadPool
from sqlalchemy.util import greenlet_spawn

from dblock.core import runtime
from dblock.core.errors import SynchronousOnlyOperation, UnsupportedDatabase
from dblock.core.face.executor import BaseStore
from dblock.core.holding.flow import current_task
from dblock.core.protocol.drive import to_its_end
from dblock.core.protocol.sending import Database
from dblock.core.protocol.steps import Execute, Rows
from dblock.core.statements import DIALECTS, dialect_for
from dblock.core.statements.base import Tables
from dblock.core.validation import valid_history, valid_reaping, valid_tables
from dblock.core.wakeup.listener import Subscription
from dblock.core.wakeup.registry import Wakeups
from sqlalchemy_dblock.connections import EnginePool, InMemory, is_in_memory, rest

INSTEAD = "use the lock of an AsyncEngine, or a thread (asyncio.to_thread)"


class EngineStore(BaseStore):
    """The database of one engine."""

    _create_table = "create it with sqlalchemy_dblock.metadata.create_all(engine), or with Alembic"
    _rename_tables = (
        "give dblock's other names, with metadata_for(prefix=, schema=) and the execution options dblock_prefix and "
        "dblock_schema of the engine"
    )

    def __init__(self, engine: Engine) -> None:
        name = engine.dialect.name
        if name not in DIALECTS:
            raise UnsupportedDatabase(f"the engine speaks {name}; the lock needs PostgreSQL, MySQL, MariaDB or SQLite")
        options = engine.get_execution_options()
        tables = valid_tables(options.get("dblock_prefix", ""), options.get("dblock_schema"))
        self.asynchronous: bool = engine.dialect.is_async
        refuse_waiting = None if self.asynchronous else _not_on_an_event_loop
        self.database = Database(dialect_for(name, tables), refuse_waiting=refuse_waiting)
        if tables != Tables():
            names = ", ".join(f"{option}={value!r}" for option, value in asdict(tables).items() if value)
            self._create_table = f"create it with sqlalchemy_dblock.metadata_for({names}).create_all(engine)"
        self._source = InMemory(engine) if is_in_memory(engine) else EnginePool(engine)
        if isinstance(engine.pool, SingletonThreadPool):
            self._create_table += (
                "; each thread has a database in memory of its own, unless the engine is made with "
                'poolclass=StaticPool and connect_args={"check_same_thread": False}'
            )
        self.renewable = isinstance(self._source, EnginePool)
        url = engine.url
        self.name = str(URL.create(url.drivername, host=_host(url), port=url.port, database=url.database))
        self._described = described(url)
        self._dialect, self._driver = engine.dialect, engine.dialect.driver
        self._listens = options.get("dblock_listen", True)
        if not isinstance(self._listens, bool):
            raise TypeError(f"the execution option dblock_listen is True or False, not {self._listens!r}")
        self.retention = options.get("dblock_retention", 3600.0)
        self.reaping = valid_reaping(options.get("dblock_reap_every"), self.retention, "dblock_reap_every")
        history = valid_history(options.get("dblock_history", 0), "the execution option dblock_history")
        self.history = history if self.renewable else 0
        if self.history:
            from dblock.core.face import observing  # noqa: PLC0415 - off by default

            observing.record()
        self._tasks: set[asyncio.Task[None]] = set()
        self._paramstyle = "named" if name == "sqlite" else _paramstyle(engine.dialect.paramstyle)
        self._errors = (engine.dialect.loaded_dbapi.Error, OSError, *_untranslated(engine.dialect.driver))
        # An engine that two event loops use for the first time at once says so that a lock is bound to one of them, and
        # PyMySQL for what it needs another package.
        self._connect_errors = (*self._errors, SQLAlchemyError, RuntimeError)

    def subscribe(self, channel: str, wakeups: Wakeups) -> Subscription | None:
        """Listen on a connection of its own; None for drivers that cannot, behind a pooler, and if told not to."""
        from sqlalchemy_dblock.listening import SUBSCRIPTIONS  # noqa: PLC0415 - only where somebody waits

        make = SUBSCRIPTIONS.get((self._driver, self.asynchronous))
        rings = self.database.dialect.queue.hear is not None
        if not (make or rings) or not self._listens or not isinstance(self._source, EnginePool):
            return None
        connection = self._source.open_apart(self.database.now() + self.database.timing.answer)
        close = partial(self._source.terminate, connection)
        try:
            if make is None:
                from dblock.core.face.bell import hang_up  # noqa: PLC0415 - on databases that have one

                return hang_up(self, connection, close, channel, wakeups)
            if connection.wired:
                return make(connection.raw.driver_connection if self.asynchronous else connection.raw, channel, close)
        except BaseException:
            close()
            raise
        close()
        return None

    def in_background(self, function: Callable[[], None]) -> Callable[[], bool]:
        """Run it in a thread, or in a task of the running event loop."""
        if not self.asynchronous:
            thread = threading.Thread(target=function, name="dblock listener", daemon=True)
            thread.start()
            return thread.is_alive
        self._tasks = {task for task in self._tasks if not task.get_loop().is_closed()}
        task = asyncio.get_running_loop().create_task(greenlet_spawn(function))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return lambda: not task.done()

    def rest(self, seconds: float) -> None:
        """Sleep there."""
        rest(seconds, self._dialect)

    async def aexecute(self, step: Execute) -> Rows:
        """Run the statement on the running event loop."""
        work: Coroutine[Any, Any, Rows] = greenlet_spawn(self.execute, step)
        if self._driver != "aiosqlite":
            return await work
        # Broken off there, it goes on: what it has written is committed when its cursor is collected, whenever that is.
        cancelled: list[BaseException] = []
        try:
            return await to_its_end(work, cancelled)
        finally:
            if cancelled:
                raise cancelled[-1]


def _not_on_an_event_loop() -> None:
    if current_task() is not None:
        raise SynchronousOnlyOperation(f"You cannot wait for a lock from an async context - {INSTEAD}.")


def own_store(engine: Engine) -> EngineStore:
    """The one store of an engine, whoever asks first; it lives and dies with the engine."""
    kept = vars(engine)
    store: EngineStore = kept.get("_dblock_store") or kept.setdefault("_dblock_store", EngineStore(engine))
    return store


def store_for(engine: Engine) -> EngineStore:
    """The store of an engine; in a test perhaps another one."""
    store, stand_in = own_store(engine), runtime.current.stand_in
    return store if stand_in is None else cast("EngineStore", stand_in(None))


def described(url: URL) -> str:
    """A database, for people: no password, wherever in its URL that is."""
    query = {name: value for name, value in url.query.items() if name in {"host", "port", "unix_socket"}}
    return str(URL.create(url.drivername, url.username, None, _host(url), url.port, url.database, query))


def _host(url: URL) -> str | None:
    """Without what was the end of a password that has an `@` in it."""
    return url.host and url.host.rpartition("@")[2]


def _untranslated(driver: str) -> tuple[type[BaseException], ...]:
    """Errors of a driver that SQLAlchemy's adapter, by its version, may let pass as they are."""
    if driver != "asyncpg":
        return ()
    from asyncpg import InterfaceError, InternalClientError, PostgresError  # noqa: PLC0415 - only where it is in use

    return InterfaceError, InternalClientError, PostgresError


def _paramstyle(style: str) -> str:
    """PyMySQL and its kin announce `format` but take names as well."""
    return "pyformat" if style == "format" else style
