"""What the contract suite runs against: every variant, face, driver and database, behind one way of calling.

A `Subject` makes locks; an `Actor` is a flow of control (a thread, or an asyncio task) in which they are used, so that
a test can be two holders at once and stay a plain function.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import inspect
import os
import queue
import threading
import time
import weakref
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Future
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from functools import cache, cached_property, wraps
from typing import Any

from django.db import connections
from sqlalchemy import create_engine
from sqlalchemy.ext.asyncio import create_async_engine

import dblock
import sqlalchemy_dblock
from dblock.core.protocol.sending import Database
from dblock.core.statements import DIALECTS
from tests.conftest import ALIASES, INNODB, run, url
from tests.support.eager import EAGER, eager_task_factory
from tests.support.steps import no_store


@dataclass(frozen=True)
class Subject:
    """One cell of the matrix."""

    variant: str
    face: str
    database: str
    driver: str = ""

    def __str__(self) -> str:
        return "-".join(part for part in (self.variant, self.face, self.database, self.driver) if part)

    @cached_property
    def engine(self) -> Any:
        return self._made()

    @property
    def url(self) -> str:
        """SQLAlchemy's name of the database."""
        return url(self.database, self.driver)

    def _made(self, **options: Any) -> Any:
        if self.face == "async":
            return create_async_engine(self.url, **options)
        made = create_engine(self.url, **options)
        weakref.finalize(self, made.dispose).atexit = False
        return made

    def over(self, **options: Any) -> Subject:
        """The same over an engine that was made with these options."""
        own = replace(self)
        vars(own)["engine"] = own._made(**options)
        return own

    @property
    def alias(self) -> str:
        """Django's name of the database."""
        return ALIASES[self.database]

    def api(self, name: str, *args: Any, **options: Any) -> Any:
        """Call a public function of this variant, for this database: `db_rwlock`, `attach`, `release_all`..."""
        if self.variant == "django":
            home = dblock.db_lock if name == "attach" else dblock
            called = name if name.startswith("db_") else self.method(name)
            return getattr(home, called)(*args, using=self.alias, **options)
        return getattr(sqlalchemy_dblock, name)(self.engine, *args, **options)

    def lock(self, key: str, **options: Any) -> Any:
        """A lock of this variant on this database."""
        return self.api("db_lock", key, **options)

    def reap(self, retention: float) -> Any:
        return self.api("reap", retention=retention)

    @property
    def protocol(self) -> Database:
        return Database(no_store, DIALECTS[self.database])

    def method(self, name: str) -> str:
        """How a method is called on this face."""
        return f"a{name}" if (self.variant, self.face) == ("django", "async") else name

    async def ask(self, lock: Any, name: str, *args: Any) -> Any:
        """Call a lock's method in a coroutine that serves either face, see `Actor.do`."""
        found = getattr(lock, self.method(name))(*args)
        return await found if inspect.isawaitable(found) else found

    @asynccontextmanager
    async def within(self, lock: Any) -> AsyncIterator[Any]:
        """The lock's block, in such a coroutine."""
        if self.face == "async":
            async with lock as entered:
                yield entered
        else:
            with lock as entered:
                yield entered

    async def pause(self, seconds: float) -> None:
        """Let time pass in such a coroutine."""
        if self.face == "async":
            await asyncio.sleep(seconds)
        else:
            time.sleep(seconds)  # noqa: ASYNC251 - there is no event loop

    def aside(self, body: Callable[[], object]) -> Callable[[], Any]:
        """A body of a block that waits for other flows: in a thread, where it would keep them from running."""
        return body if self.face == "sync" else lambda: asyncio.to_thread(body)

    def run(self, sql: str, **parameters: object) -> list[tuple[Any, ...]]:
        """Run a statement as a stranger to all locks."""
        return run(self.database, sql, **parameters)

    def row(self, key: str) -> dict[str, Any]:
        """A key's row as it is stored."""
        names = "lock_key, owner, fence, count, ttl, acquired_at, expires_at, label, host, pid, thread, program"
        [values] = self.run(f"SELECT {names} FROM locks WHERE lock_key = :key", key=key)
        return dict(zip(names.split(", "), values, strict=True))


FAMILY: dict[str, Callable[[Callable[..., Any]], Any]] = {
    "lock": lambda api: api("db_lock", "k"),
    "several": lambda api: api("db_locks", "a", "b"),
    "reader": lambda api: api("db_rwlock", "rw").read(),
    "writer": lambda api: api("db_rwlock", "rw").write(),
    "permit": lambda api: api("db_semaphore", "s", permits=1).permit(),
    "semaphore": lambda api: api("db_semaphore", "s", permits=1),
    "leader": lambda api: api("db_leader", "l"),
}
"""What has a block, given the `api` of a subject."""


LONG = os.environ.get("DBLOCK_FAULTS", "short") == "long"
"""The contract's own numbers, or as many as fit into a run of the suite."""
PRODUCT = bool(os.environ.get("DBLOCK_PRODUCT"))
"""Whether the contract runs in every cell, whatever a test is about: `make product`."""
PSYCOPG2 = Subject("sqlalchemy", "sync", "postgresql", "psycopg2")
"""On the axes of the contract, and in `tests/servers/test_listener.py`."""
EVERY = tuple(
    [Subject("django", face, database) for face in ("sync", "async") for database in ALIASES]
    + [Subject("sqlalchemy", "sync", database) for database in ALIASES]
    + [PSYCOPG2]
    + [
        Subject("sqlalchemy", "async", database, driver)
        for database, drivers in {
            "sqlite": ("aiosqlite",),
            "postgresql": ("psycopg", "asyncpg"),
            **dict.fromkeys(INNODB, ("aiomysql", "asyncmy")),
        }.items()
        for driver in drivers
    ]
)
_TWINS = {
    Subject("django", "sync", "mysql"),
    Subject("django", "async", "mariadb"),
    Subject("sqlalchemy", "async", "mariadb", "asyncmy"),
    Subject("sqlalchemy", "async", "mysql", "aiomysql"),
}
"""Faces and drivers that speak to the other of MariaDB and MySQL as well."""
_THREADED = Subject("django", "async", "mariadb")
"""Django's asynchronous face has the synchronous one's connections: one of the servers is enough."""
_LEFT_OUT = set[Subject]() if LONG else {PSYCOPG2, _THREADED} | (_TWINS if "mysql" in INNODB else set())
MATRIX = tuple(each for each in EVERY if each not in _LEFT_OUT)
"""Every database and face, and all but one of the drivers; all drivers, and all of their pairs, in `make faults`."""


class Twin(Subject):
    """The same database through another engine or alias."""

    @property
    def alias(self) -> str:
        return f"{ALIASES[self.database]}_twin"


@cache
def twin(subject: Subject) -> Twin:
    """The twin of a subject, which keeps its engine."""
    return Twin(subject.variant, subject.face, subject.database, subject.driver)


class Actor:
    """A flow of control that does what it is told, one thing after the other."""

    def __init__(self, subject: Subject) -> None:
        self.subject = subject
        self._start: Callable[[Callable[[], Any], Future[Any]], object]
        if subject.face == "sync":
            self._work: queue.SimpleQueue[Any] = queue.SimpleQueue()
            self._thread = threading.Thread(target=self._serve, daemon=True)
            self._thread.start()
            self._start = lambda function, done: self._work.put((function, done))
        else:
            inbox: asyncio.Queue[Any] = asyncio.Queue()
            self._task = asyncio.run_coroutine_threadsafe(_aserve(inbox), _loop())
            self._start = lambda function, done: _loop().call_soon_threadsafe(inbox.put_nowait, (function, done))

    def close(self) -> None:
        """End the flow, and with it what it may still hold."""
        if self.subject.face == "sync":
            self._work.put(None)
        else:
            self._task.cancel()

    def end(self) -> None:
        """End the flow, and wait until it is over."""
        self.close()
        if self.subject.face == "sync":
            self._thread.join(30)
        else:
            _ = concurrent.futures.wait([self._task], 30)

    def start(self, function: Callable[[], Any]) -> Future[Any]:
        """Begin `function` without waiting for its end; what it answers is awaited.

        On a synchronous face a coroutine has nothing to wait for: it is run at once. So one serves either face.
        """
        done: Future[Any] = Future()
        self._start(function, done)
        return done

    def do(self, function: Callable[[], Any]) -> Any:
        """Run `function` to its end."""
        return self.start(function).result(60)

    def begin(self, lock: Any, name: str, *args: Any, **kwargs: Any) -> Future[Any]:
        """Call a lock's method, under its name on this face, without waiting for its end."""
        return self.start(lambda: getattr(lock, self.subject.method(name))(*args, **kwargs))

    def call(self, lock: Any, name: str, *args: Any, **kwargs: Any) -> Any:
        """The same, to its end."""
        return self.begin(lock, name, *args, **kwargs).result(60)

    def hold(self, lock: Any, *args: Any, **kwargs: Any) -> Any:
        """Acquire it, which succeeds; the lock."""
        assert self.call(lock, "acquire", *args, **kwargs) is True
        return lock

    def get(self, lock: Any, name: str) -> Any:
        """Read a lock's attribute."""
        return self.do(lambda: getattr(lock, name))

    def enter(self, lock: Any, body: Callable[[], Any] = lambda: None) -> Future[Any]:
        """Run `body` inside `with` or `async with`, without waiting for its end."""
        if self.subject.face == "sync":

            def block() -> Any:
                with lock:
                    return at_once(body())

            return self.start(block)

        async def ablock() -> Any:
            async with lock:
                result = body()
                return await result if inspect.isawaitable(result) else result

        return self.start(ablock)

    def within(self, lock: Any, body: Callable[[], Any] = lambda: None) -> Any:
        """The same, to its end."""
        return self.enter(lock, body).result(60)

    def decorate(self, lock: Any, function: Callable[..., Any]) -> Callable[..., Any]:
        """`function` decorated by the lock, to be called in this flow; an `async def` on asynchronous faces."""
        if self.subject.face == "sync":
            decorated = lock(function)
        else:

            @wraps(function)
            async def coroutine(*args: Any, **kwargs: Any) -> Any:
                return function(*args, **kwargs)

            decorated = lock(coroutine)
        return lambda *args, **kwargs: self.do(lambda: decorated(*args, **kwargs))

    def _serve(self) -> None:
        while self._serve_one():
            pass
        if self.subject.variant == "django":
            connections.close_all()  # as Django does at the end of a request, and a well-behaved thread for itself

    def _serve_one(self) -> bool:
        if (work := self._work.get()) is None:
            return False
        function, done = work
        try:
            done.set_result(at_once(function()))
        except BaseException as error:
            done.set_exception(error)
        return True  # and nothing of it is kept until there is something else to do


Actors = Callable[[int], list[Actor]]
"""Makes so many of them."""


def at_once(found: Any) -> Any:
    """What a coroutine comes to that has nothing to wait for; anything else as it is."""
    if not inspect.iscoroutine(found):
        return found
    try:
        found.send(None)
    except StopIteration as end:
        return end.value
    raise RuntimeError("it waits, on a synchronous face")


async def _aserve(inbox: asyncio.Queue[Any]) -> None:
    while True:
        await _aserve_one(inbox)


async def _aserve_one(inbox: asyncio.Queue[Any]) -> None:
    function, done = await inbox.get()
    try:
        result = function()
        done.set_result(await result if inspect.isawaitable(result) else result)
    except BaseException as error:
        done.set_exception(error)


def _loop() -> asyncio.AbstractEventLoop:
    global _shared
    if _shared is None:
        _shared = asyncio.new_event_loop()
        if EAGER:
            _shared.set_task_factory(eager_task_factory)
        threading.Thread(target=_shared.run_forever, daemon=True).start()
    return _shared


_shared: asyncio.AbstractEventLoop | None = None
