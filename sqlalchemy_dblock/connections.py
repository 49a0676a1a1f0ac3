"""The connections of the lock for one engine.

They are opened as the engine's pool opens its own (same credentials, same events) but never taken from that pool; see
`dblock.core.connections.pool`. `engine.dispose()` closes them. As many are in use at a time as the engine's own pool
may have, and an engine with a NullPool keeps none.

A database in memory lives in the engine's own connection: there the statement joins the caller's transaction if one is
open, and commits on its own if not.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import sqlite3
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any

from sqlalchemy import Dialect, Engine, NullPool, QueuePool, StaticPool, event
from sqlalchemy.pool import PoolProxiedConnection
from sqlalchemy.util import await_only, greenlet_spawn

from dblock.core import clock, runtime
from dblock.core.connections.pool import KEPT, AutocommitPool, Opening, PooledConnection
from dblock.core.connections.slots import Place
from dblock.core.errors import PoolExhausted
from dblock.core.holding.flow import current_task
from dblock.core.statements import DIALECTS
from dblock.drivers.sessions import set_up


class EnginePool(AutocommitPool):
    """Connections beside the engine's pool, to a server or a file."""

    def __init__(self, engine: Engine) -> None:
        super().__init__(_most(engine), 0 if isinstance(engine.pool, NullPool) else KEPT)
        runtime.current.add_pool(self)
        self._dialect = engine.dialect
        # A pool of its own, without limits: one that hangs in the opening must not keep others from it.
        self._source = NullPool(engine.pool._creator, dialect=engine.dialect, _dispatch=engine.pool.dispatch)
        self._first: PooledConnection | None = None
        """The one that is being opened before SQLAlchemy knows the server."""
        self._known = False
        event.listen(engine, "engine_disposed", lambda _: self.close_all())

    def open(self, connection: PooledConnection) -> None:
        """As the engine's pool does; alone at first, while SQLAlchemy gets to know the server.

        It does so under a lock that belongs to one event loop, and whoever waits for that in another is never woken.
        """
        while self._dialect.is_async and not self._known:
            if not self._goes_first(connection):
                rest(0.002, self._dialect)
                continue
            try:
                self._open(connection)
                self._known = True
            finally:
                if self._first is connection:
                    self._first = None
            return
        self._open(connection)

    def _goes_first(self, connection: PooledConnection) -> bool:
        with self._mutex:
            if self._first is None or self.is_over(self._first.loop):  # whose loop was closed in the midst of it
                self._first = connection
            return self._first is connection

    def _open(self, connection: PooledConnection) -> None:
        fairy = self._source.connect()
        driver: Any = fairy.driver_connection
        connection.raw = fairy.dbapi_connection
        fairy.detach()
        try:
            connection.raw.rollback()  # what a listener of the user's may have begun
            self._dialect.set_isolation_level(connection.raw, "AUTOCOMMIT")
            self._set_up(connection, driver)
        except BaseException:
            self.terminate(connection)
            raise

    def _set_up(self, connection: PooledConnection, driver: Any) -> None:
        kind = self._dialect.driver
        if kind == "asyncpg":
            from dblock.drivers import asyncpg  # noqa: PLC0415 - only where it is in use

            unnamed = asyncpg.Unnamed(driver)
            set_up(connection, self._dialect.name, driver, lambda sql: await_only(unnamed.ask(sql)))
            if not connection.wired:
                connection.prepared = lambda step: await_only(unnamed.execute(step))
            return
        set_up(connection, self._dialect.name, driver)
        wired = connection.wired
        if kind in {"psycopg", "psycopg_async"}:
            from dblock.drivers import psycopg  # noqa: PLC0415 - imports the driver, which need not be installed

            runner = psycopg.prepared_for(driver, prepare=wired and driver.prepare_threshold is not None)
            if not wired:
                driver.prepare_threshold = None  # behind a pooler, psycopg must not prepare on its own either
            if runner is not None:
                asynchronous, run = self._dialect.is_async, runner
                connection.prepared = (lambda step: await_only(run.aexecute(step))) if asynchronous else run.execute
        elif kind in {"pymysql", "mysqldb"}:
            from dblock.drivers import mariadb  # noqa: PLC0415 - only where it is in use

            prepared = mariadb.prepared_for(driver)
            connection.prepared = None if prepared is None else prepared.execute

    def close(self, connection: PooledConnection) -> None:
        """In order; but for asyncpg, which would wait until the server has hung up."""
        if self._dialect.driver == "asyncpg":
            connection.cut()
            self.terminate(connection)
        else:
            self._dialect.do_close(connection.raw)

    def terminate(self, connection: PooledConnection) -> None:
        """Without asking the server, and without waiting: a task that is cancelled again and again never gets there."""
        driver = connection.raw.driver_connection if self._dialect.is_async else None
        if driver is None:
            self._dialect.do_terminate(connection.raw)
        elif hasattr(driver, "stop"):  # aiosqlite has a thread, which is told and not waited for
            _ = driver.stop()
        else:
            _ = _hang_up(driver)()

    def abandon(self, connection: PooledConnection) -> None:
        """Close the socket without asking the event loop that it belongs to; where that still runs, in it."""
        driver = connection.raw.driver_connection
        loop: Any = connection.loop
        with contextlib.suppress(Exception):
            if hasattr(driver, "stop"):  # aiosqlite: its thread answers to the loop that runs now
                await_only(driver.stop())
                return
            if self.is_over(loop):
                connection.cut()  # aiomysql's and asyncmy's end no session without their loop
                _ = _hang_up(driver)()
            else:
                loop.call_soon_threadsafe(_hang_up(driver))

    def loop(self) -> object:
        """The running one, for asynchronous drivers."""
        task = current_task() if self._dialect.is_async else None
        return None if task is None else task.get_loop()

    def in_background(self, work: Callable[[], PooledConnection]) -> Any:
        """In a thread or a task; a file needs neither."""
        if self._dialect.is_async:
            return asyncio.get_running_loop().create_task(greenlet_spawn(work))
        if not DIALECTS[self._dialect.name].single_writer:
            return super().in_background(work)
        opening = Opening(work)
        opening.run()
        return opening

    def await_background(self, future: Any, seconds: float) -> bool:
        """In this thread or task."""
        if isinstance(future, Opening):
            return super().await_background(future, seconds)
        return bool(await_only(asyncio.wait({future}, timeout=seconds))[0])

    def break_off(self, future: Any, seconds: float) -> None:
        """A task can be cancelled, so that it keeps no other from being the first."""
        if not isinstance(future, Opening):
            _ = future.get_loop().call_later(seconds, future.cancel)

    def leave_to_parent(self) -> Any:
        """In a forked child, whose parent may be opening its first one."""
        self._first = None
        return super().leave_to_parent()

    def wait(self, place: Place, seconds: float) -> None:
        """In this thread or task."""
        if self._dialect.is_async:
            await_only(place.wait_async(seconds))
        else:
            super().wait(place, seconds)


def _hang_up(driver: Any) -> Callable[[], object]:
    """What closes an asynchronous connection to a server at once: psycopg's; asyncpg's, aiomysql's, asyncmy's."""
    hang_up: Callable[[], object] = (
        driver.pgconn.finish if hasattr(driver, "pgconn") else getattr(driver, "terminate", driver.close)
    )
    return hang_up


class InMemory:
    """The engine's own connection to a SQLite database in memory."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._static: PoolProxiedConnection | None = None
        self._out = weakref.WeakSet[PooledConnection]()
        self._mutex = threading.RLock()
        event.listen(engine, "engine_disposed", self._forget)

    def take(self, until: float, *, keeps: bool, urgent: bool = False) -> PooledConnection:
        """The connection that the caller in this thread uses too; one statement of the lock at a time on it."""
        connection = PooledConnection()
        if not isinstance(self._engine.pool, StaticPool):
            fairy = connection.lent = self._engine.raw_connection()
        else:  # there is one connection for all: it is never checked in from here, since that would roll back for all
            while not self._enter(connection):
                if clock.now() > until:
                    raise PoolExhausted("the one connection to the database in memory is in use")
                rest(0.001, self._engine.dialect)
            try:
                fairy = self._static = self._static or self._engine.raw_connection()
            except BaseException:
                self._leave(connection)
                raise
        driver: Any = fairy.driver_connection
        connection.raw, connection.joined = fairy.dbapi_connection, driver.in_transaction
        return connection

    def give(self, connection: PooledConnection) -> None:
        """Commit, unless that is the caller's to do."""
        try:
            if not connection.joined:
                connection.raw.commit()
        except sqlite3.Error:
            raise  # to be undone, which leaves as well
        except BaseException:  # interrupted: done or not
            self._leave(connection)
            raise
        self._leave(connection)

    def give_after_error(self, connection: PooledConnection) -> None:
        """Undo, unless that is the caller's to do."""
        try:
            if not connection.joined:
                connection.raw.rollback()
        finally:
            self._leave(connection)

    def drop(self, connection: PooledConnection, *, others: bool) -> None:
        """SQLite is in this process: a connection is never in the middle of an answer."""
        self.give_after_error(connection)

    def _enter(self, connection: PooledConnection) -> bool:
        with self._mutex:
            if free := not self._out:
                self._out.add(connection)
        return free

    def _leave(self, connection: PooledConnection) -> None:
        self._out.discard(connection)
        if connection.lent is not None:
            connection.lent.close()

    def _forget(self, _: Engine) -> None:
        self._static = None


def rest(seconds: float, dialect: Dialect) -> None:
    """Sleep in this thread, or in this task."""
    if dialect.is_async:
        await_only(asyncio.sleep(seconds))
    else:
        time.sleep(seconds)


def _most(engine: Engine) -> float:
    """How many connections statements may use at once: as many as the engine's own pool allows."""
    pool = engine.pool
    if isinstance(pool, QueuePool) and pool._max_overflow >= 0:
        return max(1, pool.size() + pool._max_overflow)
    return math.inf


def is_in_memory(engine: Engine) -> bool:
    """Does each connection see a database of its own, or share the process's memory?"""
    database = engine.url.database or ""
    return DIALECTS[engine.dialect.name].single_writer and (
        not database or ":memory:" in database or "mode=memory" in database or engine.url.query.get("mode") == "memory"
    )
