"""The connections that the statements of the lock run on, for one engine: who opens, keeps and closes them.

Rule: they are opened as the engine's pool opens its own (same credentials, same events) but never taken from that pool:
a caller who has used up the pool must still be able to give a lock back. Each is in autocommit mode for its whole life,
so that nothing has to be reset between two uses; a pool's reset would be one more round trip. They wait in a stack, the
warmest on top, and `engine.dispose()` closes them. No more are in use at a time than the engine's own pool may have. An
engine with a NullPool keeps none.

A database in memory lives in the engine's own connection: there the statement joins the caller's transaction if one is
open, and commits on its own if not.

A forked child starts with an empty stack and leaves its parent's connections alone: closing one would end the parent's
session. Connections of an event loop that is gone are dropped likewise.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import time
import weakref
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from sqlalchemy import Engine, NullPool, QueuePool, StaticPool, event
from sqlalchemy.pool import PoolProxiedConnection
from sqlalchemy.util import await_only

from dblock.core.flows import current_task

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from dblock.core.steps import Execute, Rows

PATIENCE = 30.0
"""Seconds to wait for one of the connections that are in use, as SQLAlchemy's pools do; then one more is opened."""
KEPT = 5
"""How many idle connections an engine keeps for its locks, as many as SQLAlchemy's pools do by default."""


@dataclass(slots=True, eq=False, weakref_slot=True)
class Link:
    """A DB-API connection for one statement."""

    raw: Any
    prepared: Callable[[Execute], Rows] | None = None
    """Runs statements prepared, where the driver allows it and no pooler is in between."""
    loop: object = None
    """The event loop that it belongs to, for asynchronous drivers."""
    epoch: int = 0
    """How often the engine had been disposed of when it was opened."""
    joined: bool = False
    """Is the statement part of a transaction of the caller's?"""
    lent: PoolProxiedConnection | None = None
    """What to give back to the engine's own pool."""


class Links(Protocol):
    """Where an executor gets its connections from."""

    def take(self) -> Link: ...
    def give(self, link: Link) -> None: ...
    def give_after_error(self, link: Link) -> None: ...
    def drop(self, link: Link) -> None: ...


def links_for(engine: Engine) -> Links:
    """The connections for an engine, by where its database lives."""
    return InMemory(engine) if engine.dialect.name == "sqlite" and _in_memory(engine) else Stack(engine)


class Stack:
    """Connections beside the engine's pool, to a server or a file."""

    def __init__(self, engine: Engine) -> None:
        self._dialect = engine.dialect
        self._pool = engine.pool.recreate()
        self._keep = 0 if isinstance(engine.pool, NullPool) else KEPT
        self._idle: list[Link] = []
        self._out: weakref.WeakSet[Link] = weakref.WeakSet()
        self._most = _most(engine)
        self._epoch = 0
        _stacks.add(self)
        event.listen(engine, "engine_disposed", lambda _: self._dispose())

    def take(self) -> Link:
        """An idle connection of this event loop, or a new one."""
        loop = self._loop()
        pause = waited = 0.001
        while len(self._out) >= self._most and waited < PATIENCE:
            self._rest(pause)
            pause = min(pause * 2, 0.05)
            waited += pause
        while self._idle:
            try:
                link = self._idle.pop()
            except IndexError:  # another thread was faster
                break
            if link.loop is loop:
                self._out.add(link)
                return link
            _cut(link)
        link = Link(None, loop=loop, epoch=self._epoch)
        self._out.add(link)  # before it is open, so that no more than these are opened at once
        try:
            return self._open(link)
        except BaseException:
            self._out.discard(link)
            raise

    def give(self, link: Link) -> None:
        """Keep a connection for the next statement."""
        self._out.discard(link)
        if len(self._idle) < self._keep:
            self._idle.append(link)
            if link.epoch != self._epoch:  # the engine was disposed of meanwhile
                self._close_idle()
        else:
            self._dialect.do_close(link.raw)

    give_after_error = give  # a statement that was refused in autocommit mode leaves nothing behind

    def drop(self, link: Link) -> None:
        """Close a connection in an unknown state, and those that waited as long: they broke with it."""
        self._out.discard(link)
        for each in (link, *self._emptied()):
            with contextlib.suppress(Exception):
                self._dialect.do_terminate(each.raw)

    def _dispose(self) -> None:
        self._epoch += 1
        self._close_idle()

    def _close_idle(self) -> None:
        loop = self._loop()
        for link in self._emptied():
            if link.loop is loop:
                self._dialect.do_close(link.raw)
            else:
                _cut(link)

    def _emptied(self) -> Iterator[Link]:
        """What waits, one by one: another thread may be putting more there."""
        with contextlib.suppress(IndexError):
            while True:
                yield self._idle.pop()

    def forget(self) -> None:
        """In a forked child: leave everything to the parent."""
        _parents.append(self._idle)
        self._idle = []
        self._out.clear()
        self._pool = self._pool.recreate()

    def _open(self, link: Link) -> Link:
        fairy = self._pool.connect()
        driver: Any = fairy.driver_connection
        link.raw = fairy.dbapi_connection
        fairy.detach()
        try:
            return self._set_up(link, driver)
        except BaseException:
            self._dialect.do_terminate(link.raw)
            raise

    def _set_up(self, link: Link, driver: Any) -> Link:
        link.raw.rollback()  # what a listener of the user's may have begun
        self._dialect.set_isolation_level(link.raw, "AUTOCOMMIT")
        if self._dialect.name == "sqlite":
            if _ask(link.raw, "PRAGMA journal_mode") == "wal":
                _ = _ask(link.raw, "PRAGMA synchronous = NORMAL")
            _ = _ask(link.raw, "PRAGMA busy_timeout = 250")  # the protocol tries again, without blocking a thread
        elif self._dialect.driver in {"psycopg", "psycopg_async"} and driver.prepare_threshold is not None:
            from dblock.prepared import psycopg  # noqa: PLC0415 - imports the driver, which need not be installed

            prepared = psycopg.prepared_for(driver, _ask(link.raw, "SELECT pg_backend_pid()"))
            if prepared is None:
                driver.prepare_threshold = None  # behind a pooler, psycopg must not prepare on its own either
            elif self._dialect.is_async:
                link.prepared = lambda step: await_only(prepared.aexecute(step))
            else:
                link.prepared = prepared.execute
        elif self._dialect.driver in {"pymysql", "mysqldb"} and self._keep:
            from dblock.prepared import mariadb  # noqa: PLC0415 - only where it is in use

            runner = mariadb.prepared_for(driver)
            link.prepared = None if runner is None else runner.execute
        return link

    def open_apart(self) -> Link:
        """A connection that is never given back."""
        return self._open(Link(None, loop=self._loop(), epoch=self._epoch))

    def close(self, link: Link) -> None:
        """Close it."""
        self._dialect.do_terminate(link.raw)

    def _rest(self, seconds: float) -> None:
        if self._dialect.is_async:
            await_only(asyncio.sleep(seconds))
        else:
            time.sleep(seconds)

    def _loop(self) -> object:
        task = current_task() if self._dialect.is_async else None
        return None if task is None else task.get_loop()


class InMemory:
    """The engine's own connection to a SQLite database in memory."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._static: PoolProxiedConnection | None = None
        event.listen(engine, "engine_disposed", self._forget)

    def take(self) -> Link:
        """The connection that the caller in this thread uses too."""
        if isinstance(self._engine.pool, StaticPool):
            # There is one connection for all: it is never checked in from here, since that would roll back for all.
            lent = None
            fairy = self._static = self._static or self._engine.raw_connection()
        else:
            lent = fairy = self._engine.raw_connection()
        driver: Any = fairy.driver_connection
        return Link(fairy.dbapi_connection, joined=driver.in_transaction, lent=lent)

    def give(self, link: Link) -> None:
        """Commit, unless that is the caller's to do."""
        if not link.joined:
            link.raw.commit()
        if link.lent is not None:
            link.lent.close()

    def give_after_error(self, link: Link) -> None:
        """Undo, unless that is the caller's to do."""
        if not link.joined:
            link.raw.rollback()
        if link.lent is not None:
            link.lent.close()

    drop = give_after_error

    def _forget(self, _: Engine) -> None:
        self._static = None


_stacks: weakref.WeakSet[Stack] = weakref.WeakSet()
_parents: list[Any] = []
"""In a forked child: the parent's connections, kept so that nothing finalizes them."""


def _after_fork_in_child() -> None:
    for stack in list(_stacks):
        stack.forget()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork_in_child)


def _most(engine: Engine) -> float:
    """How many connections statements may use at once: as many as the engine's own pool allows."""
    pool = engine.pool
    if isinstance(pool, QueuePool) and pool._max_overflow >= 0:
        return max(1, pool.size() + pool._max_overflow)
    return math.inf


def _ask(raw: Any, sql: str) -> Any:
    cursor = raw.cursor()
    try:
        cursor.execute(sql)
        row = cursor.fetchone()
        return row[0] if row else None
    finally:
        cursor.close()


def _cut(link: Link) -> None:
    """Close the socket of a connection whose event loop is not the running one, without asking that loop."""
    driver = link.raw.driver_connection
    with contextlib.suppress(Exception):
        if hasattr(driver, "pgconn"):  # psycopg
            driver.pgconn.finish()
        elif hasattr(driver, "stop"):  # aiosqlite: its thread answers to the loop that runs now, which must hear it
            await_only(driver.stop())
        else:  # asyncpg, aiomysql and asyncmy
            getattr(driver, "terminate", driver.close)()


def _in_memory(engine: Engine) -> bool:
    database = engine.url.database or ""
    return (
        not database or ":memory:" in database or "mode=memory" in database or engine.url.query.get("mode") == "memory"
    )
