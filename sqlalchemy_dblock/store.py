"""Runs one statement of the protocol for an Engine or an AsyncEngine, on the raw driver's cursor.

Rule: an asynchronous driver is run by the same code, inside the greenlet in which SQLAlchemy adapts it to DB-API.
"""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import Callable, Coroutine
from typing import Any, NamedTuple, cast

from sqlalchemy import URL, Engine, exc
from sqlalchemy.pool import SingletonThreadPool

from dblock.core import runtime
from dblock.core.errors import SynchronousOnlyOperation
from dblock.core.holding.flow import current_task
from dblock.core.lock.base_store import BaseStore
from dblock.core.protocol.drive import plain_task, to_its_end
from dblock.core.protocol.sending import Database
from dblock.core.protocol.steps import Execute, Rows
from dblock.core.protocol.store import Subscription
from dblock.core.statements import dialect_for
from dblock.core.statements.base import Tables
from dblock.core.validation import valid_history, valid_quarantine, valid_reaping, valid_tables
from dblock.core.values import Seconds
from dblock.core.wakeup.registry import Wakeups
from dblock.core.worker import start
from dblock.drivers.listening import subscribed
from dblock.drivers.tried import refuse_untried
from sqlalchemy_dblock.connections import EnginePool, in_greenlet_of_its_own, source_for
from sqlalchemy_dblock.listening import SUBSCRIPTIONS

INSTEAD = "use the lock of an AsyncEngine, or a thread (asyncio.to_thread)"


_MISTAKES = (exc.ProgrammingError, exc.NotSupportedError, exc.InvalidRequestError, exc.ArgumentError, RuntimeError)
"""Mistakes of the client, as SQLAlchemy and drivers raise them while they connect."""


class Options(NamedTuple):
    """The execution options of an engine, checked."""

    tables: Tables
    listens: bool
    retention: Seconds
    reaping: tuple[float, float] | None
    history: int
    quarantine: float


def _options(engine: Engine) -> Options:
    """The options of an engine; TypeError or ValueError for an invalid one."""
    get = engine.get_execution_options().get
    schema, translated = get("dblock_schema"), get("schema_translate_map") or {}
    listens, retention = get("dblock_listen", True), get("dblock_retention", 3600.0)
    if not isinstance(listens, bool):
        raise TypeError(f"the execution option dblock_listen is True or False, not {listens!r}")
    return Options(
        valid_tables(get("dblock_prefix", ""), translated.get(schema, schema)),
        listens,
        retention,
        valid_reaping(get("dblock_reap_every"), retention, "dblock_reap_every"),
        valid_history(get("dblock_history", 0), "the execution option dblock_history"),
        valid_quarantine(get("dblock_failover_quarantine", "auto"), "the execution option dblock_failover_quarantine"),
    )


class EngineStore(BaseStore):
    """The database of one engine, and of engines that its `execution_options()` has made with the same `Options`."""

    _create_table = "create it with sqlalchemy_dblock.create_tables(engine), or with Alembic"
    _rename_tables = (
        "give dblock's other names, with metadata_for(prefix=, schema=) and the execution options dblock_prefix and "
        "dblock_schema of the engine"
    )
    # RuntimeError: an engine that two event loops use for the first time at once reports that a lock is bound to one of
    # them, and PyMySQL reports a missing package.
    _connect_errors = (exc.SQLAlchemyError, RuntimeError)

    def __init__(self, engine: Engine, options: Options) -> None:
        name, tables = engine.dialect.name, options.tables
        refuse_untried(name, engine.dialect.driver, "the engine")
        self.asynchronous: bool = engine.dialect.is_async
        self.database = Database(
            weakref.ref(self),
            dialect_for(name, tables),
            before_waiting=(lambda: None) if self.asynchronous else _not_on_an_event_loop,
            quarantine=lambda: options.quarantine,
        )
        self._source = source_for(engine)
        if isinstance(engine.pool, SingletonThreadPool):
            self._create_table += (
                "; each thread has a database in memory of its own, unless the engine is made with "
                'poolclass=StaticPool and connect_args={"check_same_thread": False}'
            )
        self.renewable = isinstance(self._source, EnginePool)
        url = engine.url
        self.name = str(URL.create(url.drivername, host=_host(url), port=url.port, database=url.database))
        self._described = described(url)
        self._driver = engine.dialect.driver
        self._listens, self.retention, self.reaping = options.listens, options.retention, options.reaping
        self.history = options.history if self.renewable else 0
        if not self.database.dialect.single_writer:  # where a transaction can pin a key
            from dblock.operating import pins  # noqa: F401, PLC0415 # pyright: ignore[reportUnusedImport] - sets a hook
        if self.history:
            from dblock.operating import history  # noqa: PLC0415 - off by default

            history.record()
        self._tasks: set[asyncio.Task[None]] = set()
        style = engine.dialect.paramstyle
        # PyMySQL and its kin announce `format` but take names as well.
        self._paramstyle = "named" if name == "sqlite" else "pyformat" if style == "format" else style
        self._errors = (engine.dialect.loaded_dbapi.Error, OSError, *_untranslated(engine.dialect.driver))
        dbapi = engine.dialect.loaded_dbapi
        self._mistakes = (dbapi.ProgrammingError, dbapi.NotSupportedError, *_MISTAKES)

    def subscribe(self, channel: str, wakeups: Wakeups) -> Subscription | None:
        """Listen on a connection of its own; None behind a pooler, or if it is switched off."""
        if not self._listens or not isinstance(self._source, EnginePool):
            return None
        make: Any = SUBSCRIPTIONS.get((self._driver, self.asynchronous))  # None where KILL QUERY notifies
        return subscribed(self, self._source, make, channel, wakeups)

    def in_background(self, function: Callable[[], None]) -> Callable[[], bool]:
        """Run a function in a thread, or in a task of the running event loop."""
        if not self.asynchronous:
            return start(function, "listener")
        self._tasks = {task for task in self._tasks if not task.get_loop().is_closed()}
        task = plain_task(in_greenlet_of_its_own(function))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return lambda: not task.done()

    async def aexecute(self, step: Execute) -> Rows:
        """Run the statement on the running event loop."""
        work: Coroutine[Any, Any, Rows] = in_greenlet_of_its_own(self.execute, step)
        if self._driver != "aiosqlite":
            return await work
        # A cancelled statement continues there: it is committed when its cursor is collected, whenever that is.
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
    """The only store of an engine, made when first needed; it lives as long as the engine.

    An engine made by another one's `execution_options()`, for a tenant perhaps, shares that engine's connections, and
    its store too if the options are the same: a flow holds its locks through any of them.
    """
    store: EngineStore | None = vars(engine).get("_dblock_store")
    if store is None:
        root, options = engine, _options(engine)
        while (made_of := getattr(root, "_proxied", None)) is not None:
            root = made_of
        stores: dict[Options, EngineStore] = vars(root).setdefault("_dblock_stores", {})
        store = stores.get(options) or stores.setdefault(options, EngineStore(root, options))
        vars(engine)["_dblock_store"] = store
    return store


def store_for(engine: Engine) -> EngineStore:
    """The store of an engine; in a test perhaps its replacement."""
    store, store_override = own_store(engine), runtime.current.store_override
    return store if store_override is None else cast("EngineStore", store_override)


def described(url: URL) -> str:
    """Name of a database for people, without a password, wherever in its URL that is."""
    query = {name: value for name, value in url.query.items() if name in {"host", "port", "unix_socket"}}
    return str(URL.create(url.drivername, url.username, None, _host(url), url.port, url.database, query))


def _host(url: URL) -> str | None:
    """The host without the end of a password that contains an `@`."""
    return url.host and url.host.rpartition("@")[2]


def _untranslated(driver: str) -> tuple[type[BaseException], ...]:
    """Errors of a driver that SQLAlchemy's adapter, in some versions, does not translate."""
    if driver != "asyncpg":
        return ()
    from asyncpg import InterfaceError, InternalClientError, PostgresError  # noqa: PLC0415 - only where it is in use

    return InterfaceError, InternalClientError, PostgresError
