"""The lock's connections for one engine.

They are opened as the engine's pool opens its own (same credentials, same events) but never taken from that pool; see
`dblock.core.connections.pool`. `engine.dispose()` closes them. At most as many are in use as the engine's own pool may
have, and an engine with a NullPool keeps none.

A database in memory lives in the engine's own connection: there the statement joins the caller's transaction if one is
open, and commits on its own if not.
"""

from __future__ import annotations

import asyncio
import math
import threading
import time
import weakref
from collections.abc import Callable, Coroutine
from types import NoneType
from typing import Any, TypeVar

from sqlalchemy import Dialect, Engine, NullPool, QueuePool, StaticPool, event
from sqlalchemy.pool import ConnectionPoolEntry
from sqlalchemy.util import await_only, greenlet_spawn

from dblock.core import clock, runtime, timing
from dblock.core.connections.connection import PooledConnection
from dblock.core.connections.pool import KEPT, AutocommitPool
from dblock.core.errors import PoolExhausted
from dblock.core.protocol.drive import plain_task
from dblock.core.statements import DIALECTS
from dblock.core.wakeup.registry import Wakeup
from dblock.drivers.tls import Tls

T = TypeVar("T")


class EnginePool(AutocommitPool):
    """The lock's connections to a server or a file, beside the engine's pool."""

    def __init__(self, engine: Engine) -> None:
        self._dialect = engine.dialect
        local = DIALECTS[engine.dialect.name].single_writer
        keep = 0 if isinstance(engine.pool, NullPool) else KEPT
        loop: Callable[[], object] = asyncio._get_running_loop if engine.dialect.is_async else NoneType
        super().__init__(_most(engine), keep, local=local, loop=loop)
        runtime.current.add_pool(self)
        self._engine = weakref.ref(engine)
        self._theirs = engine.pool._invoke_creator, engine.pool.dispatch
        """What opens connections of the engine's own pool, and the pool's events."""
        self._tasks = set[asyncio.Task[None]]()
        """Tasks, kept so that they are not collected before they have ended."""
        event.listen(engine, "engine_disposed", lambda _: self.close_all())
        self._tls = Tls()
        if not local:
            event.listen(engine, "do_connect", self._connect)

    def open(self, connection: PooledConnection) -> None:
        """Open it as the engine's pool does."""
        if self._dialect.is_async:
            await_only(self._open_in_time(connection))
        else:
            self._open(connection)

    async def _open_in_time(self, connection: PooledConnection) -> None:
        """Open it; TimeoutError, as some drivers have none."""
        async with asyncio.timeout(timing.DEFAULT.surely_answered):
            await greenlet_spawn(self._open, connection)

    def _open(self, connection: PooledConnection) -> None:
        from dblock.drivers import sessions  # noqa: PLC0415 - with the first connection

        engine = self._engine()
        if engine is not None:  # the application may have registered event handlers meanwhile
            self._theirs = engine.pool._invoke_creator, engine.pool.dispatch
        create, dispatch = self._theirs

        def creator(rec: ConnectionPoolEntry) -> Any:
            rec.info["dblock"] = connection
            connection.raw = create(rec)  # at once: SQLAlchemy drops it if a listener of `connect` fails
            return connection.raw

        try:  # in a pool without limits: an opening that hangs delays no other
            fairy = NullPool(creator, dialect=self._dialect, _dispatch=dispatch).connect()
            driver: Any = fairy.driver_connection
            fairy.detach()
            self._tls.opened(driver)
            connection.raw.rollback()  # a transaction that a listener of the application may have begun
            self._dialect.set_isolation_level(connection.raw, "AUTOCOMMIT")
            wait = await_only if self._dialect.is_async else sessions.at_once
            prepares = getattr(driver, "prepare_threshold", 0) is not None  # psycopg's
            sessions.set_up(connection, self._dialect.name, driver, wait, may_prepare=prepares)
        except BaseException:
            self._tls.forget()
            raise

    def _connect(self, dialect: Dialect, record: Any, positional: list[Any], options: dict[str, Any]) -> Any:
        """Connect with options of the driver for the lock alone, if a connection of the lock is being opened."""
        opening: PooledConnection | None = record and record.info.get("dblock")
        if opening is None:
            return None
        from dblock.drivers import sessions  # noqa: PLC0415 - with the first connection

        changed = sessions.options(dialect.driver, options, opening.purpose) | self._tls.options(options)
        ours = options | changed  # SQLAlchemy 2.0 has one dictionary for all connections
        listeners = list(dialect.dispatch.do_connect)
        for listen in listeners[listeners.index(self._connect) + 1 :]:  # which SQLAlchemy will not ask any more
            if (made := listen(dialect, record, positional, ours)) is not None:
                return made
        return dialect.connect(*positional, **ours)

    def in_background(self, work: Callable[[PooledConnection], None], connection: PooledConnection) -> None:
        """Do the work in a thread, or in a task of the connection's event loop."""
        if not self._dialect.is_async:
            super().in_background(work, connection)
            return
        loop: Any = connection.loop
        try:
            if not loop.is_running():  # and perhaps never will: end its session now
                connection.cut()
            loop.call_soon_threadsafe(self._begin, work, connection)
        except RuntimeError:  # it is closed
            self._close(connection, broken=True)

    def _begin(self, work: Callable[[PooledConnection], None], connection: PooledConnection) -> None:
        task = plain_task(greenlet_spawn(work, connection))
        self._tasks.add(task)

        def ended(_: object) -> None:
            self._tasks.discard(task)
            if task.cancelled():  # with its event loop, perhaps before it began
                self._close(connection, broken=True)

        task.add_done_callback(ended)

    def close(self, connection: PooledConnection, *, broken: bool) -> None:
        """Close it, in an orderly way if it is whole and its event loop runs here; not asyncpg's, which would wait.

        Else without waiting: a task that is cancelled again and again would not end.
        """
        loop: Any = connection.loop
        here = loop is self.loop()
        if loop is None or (here and not broken and self._dialect.driver != "asyncpg"):
            self._dialect.do_close(connection.raw)
            return
        driver = connection.raw.driver_connection
        if hasattr(driver, "stop"):  # aiosqlite's thread, which replies to the running loop
            stopped = driver.stop()
            if not here:
                await_only(stopped)
        elif here or not loop.is_running():
            connection.cut()  # aiomysql's and asyncmy's end no session without their loop
            _end(driver)
        else:
            loop.call_soon_threadsafe(_end, driver)

    def wait(self, waiter: Wakeup, seconds: float) -> None:
        """Wait in this thread or task."""
        if self._dialect.is_async:
            await_only(waiter.wait_async(seconds))
        else:
            super().wait(waiter, seconds)


def _end(driver: Any) -> None:
    """Close an asynchronous connection at once: psycopg's; asyncpg's, aiomysql's, asyncmy's."""
    if hasattr(driver, "pgconn"):
        driver.pgconn.finish()
    else:
        getattr(driver, "terminate", driver.close)()


class InMemory:
    """The engine's own connection to a SQLite database in memory."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._out = weakref.WeakSet[PooledConnection]()
        self._mutex = threading.RLock()

    def take(self, until: float, *, critical: bool) -> PooledConnection:
        """The connection that the caller in this thread also uses; one statement of the lock at a time on it."""
        connection, pool = PooledConnection(), self._engine.pool
        known: Any
        if isinstance(pool, StaticPool):  # one connection for all threads: its return to the pool rolls back for all
            while not self._enter(connection):
                if clock.now() > until:
                    raise PoolExhausted("the one connection to the database in memory is in use")
                rest(0.001, self._engine.dialect)
            try:  # only now: the application may have disposed of the engine meanwhile
                known = self._engine.pool._do_get()
            except BaseException:
                self.give(connection)
                raise
        else:
            known = connection.lent = self._engine.raw_connection()
        connection.raw, connection.commits = known.dbapi_connection, not known.driver_connection.in_transaction
        return connection

    def give(self, connection: PooledConnection) -> None:
        """Let others have it, without what was not committed."""
        try:
            if connection.commits:
                connection.raw.rollback()
        finally:
            self._out.discard(connection)
            if connection.lent is not None:
                connection.lent.close()

    def drop(self, connection: PooledConnection, *, others: bool) -> None:
        """The same: SQLite is in this process, so a connection is never in the middle of an answer."""
        self.give(connection)

    def _enter(self, connection: PooledConnection) -> bool:
        with self._mutex:
            if free := not self._out:
                self._out.add(connection)
        return free


def source_for(engine: Engine) -> EnginePool | InMemory:
    """The lock's connections for an engine, one for all options of its stores."""
    if "_dblock_source" not in vars(engine):
        _ = vars(engine).setdefault("_dblock_source", InMemory(engine) if is_in_memory(engine) else EnginePool(engine))
    source: EnginePool | InMemory = vars(engine)["_dblock_source"]
    return source


async def in_greenlet_of_its_own(work: Callable[..., T], *given: Any) -> T:
    """Run the work in a greenlet whose parent is the event loop's.

    An eager task that an event handler of SQLAlchemy creates begins inside the greenlet of that handler, which waits
    for its own result when the loop continues: the task must not return there.
    """
    from greenlet import getcurrent  # noqa: PLC0415 - only asynchronous engines need it

    spawned: Coroutine[Any, Any, T] = greenlet_spawn(work, *given)
    return await (spawned if getcurrent().parent is None else plain_task(spawned))


def rest(seconds: float, dialect: Dialect) -> None:
    """Sleep in this thread, or in this task."""
    if dialect.is_async:
        await_only(asyncio.sleep(seconds))
    else:
        time.sleep(seconds)


def _most(engine: Engine) -> float:
    """Most connections in use at once, as in the engine's own pool."""
    pool = engine.pool
    if isinstance(pool, QueuePool) and pool._max_overflow >= 0:
        return max(1, pool.size() + pool._max_overflow)
    return math.inf


def is_in_memory(engine: Engine) -> bool:
    """Whether the database is in memory: each connection has its own, or all share the process's."""
    database = engine.url.database or ""
    return DIALECTS[engine.dialect.name].single_writer and (
        not database or ":memory:" in database or "mode=memory" in database or engine.url.query.get("mode") == "memory"
    )
