"""Engines of all kinds: in memory, without a pool, with a used-up pool, disposed of, of other databases."""

from __future__ import annotations

import asyncio
import gc
import itertools
import re
import sqlite3
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, cast

import psycopg
import pytest
from sqlalchemy import Engine, NullPool, StaticPool, create_engine, event, text
from sqlalchemy.engine import make_url
from sqlalchemy.exc import MissingGreenlet
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine
from sqlalchemy.orm import Session

from dblock.core import runtime
from dblock.core.holding.flow import Hold
from dblock.core.protocol.steps import Execute, Rows
from dblock.core.wakeup.registry import Wakeup
from dblock.drivers.tried import TRIED
from sqlalchemy_dblock import (
    AsyncLock,
    InvalidKey,
    Lock,
    LockStoreError,
    StoreUnreachable,
    UnsupportedDatabase,
    db_leader,
    db_lock,
    db_locks,
    db_rwlock,
    db_semaphore,
    metadata,
    reap,
)
from sqlalchemy_dblock.connections import EnginePool
from sqlalchemy_dblock.store import store_for
from tests.conftest import INNODB, SERVERS, own_engine, ready, run, timed, url
from tests.support.lab import cycle, together, until
from tests.support.servers import free_port
from tests.support.subjects import EVERY, PSYCOPG2, Actor, Subject

PREPARING = [
    each for each in EVERY if (each.variant, each.database) == ("sqlalchemy", "postgresql") and each != PSYCOPG2
]


def test_the_kind_of_engine_decides_the_kind_of_lock() -> None:
    """And what is no engine is refused."""
    assert type(db_lock(create_engine("sqlite://"), "k")) is Lock
    assert type(db_lock(create_async_engine("sqlite+aiosqlite://"), "k")) is AsyncLock
    untyped: list[Any] = [db_lock, db_rwlock, db_semaphore, db_leader, db_locks]
    for wrong, given in itertools.product(
        untyped,
        (("postgresql://me:secret@host/db", "k"), ("a",), (), (None, "k")),
    ):
        with pytest.raises(
            TypeError, match=r"an Engine or an AsyncEngine comes first, as in db_lock\(engine, key\)"
        ) as caught:
            wrong(*given)
        assert "secret" not in str(caught.value)
    for wrong in untyped[1:4]:
        with pytest.raises(InvalidKey):
            wrong(create_engine("sqlite://"))


@pytest.mark.parametrize(
    ("said", "outage"),
    [
        (RuntimeError("'cryptography' package is required"), False),  # PyMySQL
        (psycopg.ProgrammingError('missing "=" after'), False),
        (psycopg.NotSupportedError("libpq is too old"), False),
        (MissingGreenlet("greenlet_spawn has not been called"), False),
        (psycopg.OperationalError("connection refused"), True),
        (RuntimeError("is bound to a different event loop"), True),
        (OSError("no route to host"), True),
    ],
    ids=str,
)
def test_whatever_a_driver_says_at_connecting_is_an_error_of_the_store(said: Exception, outage: bool) -> None:
    """A mistake of the client's side is told at once; what may pass is an outage, and part of the wait."""
    tries = list[int]()

    def connect() -> None:
        tries.append(1)
        raise said

    engine = create_engine("postgresql+psycopg://", creator=connect)
    with pytest.raises(LockStoreError, match=re.escape(str(said))) as caught:
        db_lock(engine, "k", timeout=0.1).acquire()
    assert (len(tries) > 1) == outage == isinstance(caught.value, StoreUnreachable)


def test_an_opening_that_is_given_up_does_not_cancel_its_caller(monkeypatch: pytest.MonkeyPatch) -> None:
    """The process stands still, between looking at the time and waiting, for longer than an opening may last."""
    timed(monkeypatch, statement_timeout=1.0)
    wait, stalls = EnginePool.wait, [2.5]

    def late(pool: EnginePool, waiter: Wakeup, seconds: float) -> None:
        if stalls:
            time.sleep(stalls.pop())
        wait(pool, waiter, seconds)

    async def hangs() -> None:
        await asyncio.sleep(60)

    async def acquire() -> None:
        engine = create_async_engine("postgresql+asyncpg://", async_creator=hangs)
        with pytest.raises(StoreUnreachable):
            await db_lock(engine, "k", timeout=0.3).acquire()
        assert not stalls

    monkeypatch.setattr(EnginePool, "wait", late)
    asyncio.run(acquire())


@pytest.mark.parametrize(
    "name",
    [
        *("postgresql+pg8000", "postgresql+psycopg2cffi", "mysql+mysqlconnector", "mysql+cymysql"),
        *("mariadb+mariadbconnector", "sqlite+pysqlcipher", "oracle+oracledb", "mssql+pyodbc"),
    ],
)
def test_untried_drivers_and_other_databases_are_refused(name: str) -> None:
    """Before any connection is made, with the names of those that are tried."""
    where = make_url(f"{name}://host/db")
    dialect = where.get_dialect()()
    engine = Engine(NullPool(lambda: pytest.fail("it connects"), dialect=dialect), dialect, where)
    words = "PostgreSQL, MySQL, MariaDB or SQLite"
    if dialect.name in TRIED:
        words = f"{dialect.driver}, .*{', '.join(TRIED[dialect.name])}"
    with pytest.raises(UnsupportedDatabase, match=words):
        db_lock(engine, "k")


def test_a_connection_is_no_engine(engine: Engine) -> None:
    """Sync or async, a session neither: the lock has connections of its own. It is told where there is an engine."""
    asynchronous = create_async_engine("sqlite+aiosqlite://")
    untyped: list[Any] = [db_lock, lambda wrong, _: reap(wrong)]

    def refused(wrong: Any, words: str) -> None:
        for call in untyped:
            with pytest.raises(TypeError, match=words):
                call(wrong, "k")

    async def main() -> None:
        async with asynchronous.connect() as connection:
            refused(connection, "comes first, as in .*, not AsyncConnection: its `.engine`")
        await asynchronous.dispose()

    asyncio.run(main())
    with engine.connect() as connection:
        refused(connection, "comes first, as in .*, not Connection: its `.engine`")
    refused(Session(), r"its `.get_bind\(\)`")
    refused(AsyncSession(), "its `.bind`")
    refused(asynchronous.sync_engine, "pass the AsyncEngine itself")


def test_a_decorator_names_its_engine(engine: Engine) -> None:
    """A bare one cannot know it; with it, the key may be left out."""

    def function() -> bool:
        return held.locked()

    wrong: Any = db_lock
    with pytest.raises(TypeError, match="comes first"):
        wrong(function)
    held = db_lock(engine, f"{__name__}.{function.__qualname__}")
    assert db_lock(engine)(function)() is True
    assert not held.locked()

    async def coroutine() -> None: ...

    with pytest.raises(TypeError, match="async engine"):
        db_lock(engine)(coroutine)
    with pytest.raises(TypeError, match="sync engine"):
        db_lock(create_async_engine("sqlite+aiosqlite://"), "k")(function)  # type: ignore[type-var]


def test_several_locks_that_are_made_already(engine: Engine) -> None:
    """They have an engine and options of their own: a key beside them has none."""
    with pytest.raises(TypeError, match="ttl is for keys"):
        db_locks(db_lock(engine, "a"), ttl=3)  # type: ignore[call-overload]
    with pytest.raises(TypeError, match="'b' needs an engine"):
        db_locks(db_lock(engine, "a"), "b")  # type: ignore[call-overload]


@pytest.mark.parametrize("pool", [None, StaticPool], ids=["default", "static"])
def test_in_memory_the_lock_shares_the_callers_connection(pool: Any) -> None:
    """It commits on its own outside transactions, and joins one that is open."""
    engine = own_engine("sqlite://", poolclass=pool)
    metadata.create_all(engine)
    with Session(engine) as session:
        session.execute(text("CREATE TABLE t (n INTEGER)"))
        session.execute(text("INSERT INTO t VALUES (1)"))
        with db_lock(engine, "k") as lock:
            session.execute(text("INSERT INTO t VALUES (2)"))
            assert lock.verify()
        session.rollback()
        assert session.execute(text("SELECT count(*) FROM t")).scalar() == 0
        session.rollback()
    lock = db_lock(engine, "k")
    with lock:
        assert lock.inspect()
        with engine.connect() as connection:
            connection.rollback()  # must not take a committed tenure along
        assert lock.verify()
    assert not lock.locked()


def test_connections_are_made_as_the_engine_makes_its_own(sqlite: object) -> None:
    """With its events, also those that were registered after the lock was made: a password, a PRAGMA.

    They are not the caller's: the lock can be taken and given back while the engine's pool is used up.
    """
    engine = own_engine("sqlite", pool_size=1, max_overflow=0, pool_timeout=0.1)
    lock, seen = db_lock(engine, "k"), list[str]()
    with engine.connect():
        event.listen(engine, "do_connect", lambda *_: seen.append("do_connect"))
        event.listen(engine, "connect", lambda *_: seen.append("connect"))
        with lock:
            assert lock.verify()
        assert {"do_connect", "connect"} <= set(seen)


@pytest.mark.direct
@pytest.mark.parametrize("pool", [None, NullPool])
def test_no_connection_outlives_the_engine(postgresql: object, pool: Any) -> None:
    """`dispose()` closes the lock's connections too; with a NullPool none is kept at all."""
    name = "disposable"
    engine = create_engine(url("postgresql"), connect_args={"application_name": name}, poolclass=pool)
    cycle(db_lock(engine, "k"))
    counted = f"SELECT count(*) FROM pg_stat_activity WHERE application_name LIKE '%{name}'"
    assert until(lambda: run("postgresql", counted) == [(0 if pool else 1,)])
    engine.dispose()
    assert until(lambda: run("postgresql", counted) == [(0,)])
    cycle(db_lock(engine, "k"))  # and it can be used again
    engine.dispose()


@pytest.mark.direct
def test_what_ends_after_the_disposal_keeps_no_connection(postgresql: object) -> None:
    """The place of a waiter whose time is up is deleted in the background, and leases are renewed; until it is used."""

    async def main() -> None:
        engine, other = (create_async_engine(url("postgresql")) for _ in range(2))
        source: Any = store_for(engine.sync_engine)._source
        async with db_lock(other, "k"):
            assert not await asyncio.create_task(db_lock(engine, "k", timeout=0.3).acquire())
            await engine.dispose()
            while run("postgresql", "SELECT count(*) FROM lock_waiters") != [(0,)]:  # noqa: ASYNC110 - by a task of ours
                await asyncio.sleep(0.01)
            await asyncio.sleep(0.1)
            assert source._idle == []
        async with db_lock(engine, "k", ttl=1.5) as lock:
            await engine.dispose()
            lease = cast("Hold", lock._hold_here()).lease
            begun = lease.renewed
            while lease.renewed == begun:  # noqa: ASYNC110 - by a task of ours
                await asyncio.sleep(0.01)
            await asyncio.sleep(0.1)
            assert source._idle == []
        assert len(source._idle) == 1
        await engine.dispose()
        await other.dispose()

    asyncio.run(main())


@pytest.mark.parametrize("driver", ["aiomysql", "asyncmy"])
@pytest.mark.parametrize("database", INNODB, indirect=True)
def test_event_loops_that_are_gone_leave_no_session(
    monkeypatch: pytest.MonkeyPatch, database: str, driver: str
) -> None:
    """Each session ends when the lock is used in the next loop, not when the collector has found its transport."""
    monkeypatch.setattr(sys, "unraisablehook", lambda _: None)  # drivers complain of lost loops, and are kept for it
    counted = "SELECT id FROM information_schema.processlist WHERE db = DATABASE()"
    before = len(run(database, counted))

    def use() -> bool:
        engine = create_async_engine(url(database, driver))

        async def main() -> None:
            async with db_lock(engine, "k"):
                pass

        for _ in range(4):
            asyncio.run(main())
        left = until(lambda: len(run(database, counted)) <= before + 1)
        asyncio.run(engine.dispose())
        return left

    gc.disable()
    try:
        assert use(), "the last loop's"
    finally:
        gc.enable()
        gc.collect()


def test_tasks_that_share_one_database_in_memory() -> None:
    """One connection for all: they take turns, one statement at a time, beside readers."""

    async def main() -> None:
        engine = create_async_engine("sqlite+aiosqlite://")
        async with engine.begin() as connection:
            await connection.run_sync(metadata.create_all)
        inside, fences = list[int](), list[int]()

        async def work(number: int) -> None:
            async with db_lock(engine, "k", timeout=20) as lock:
                inside.append(number)
                if number % 2:
                    async with engine.connect() as connection:
                        await connection.execute(text("SELECT * FROM locks"))
                await asyncio.sleep(0.005)
                assert inside == [number]
                inside.clear()
                fences.append(lock.fence)

        await asyncio.gather(*(work(number) for number in range(12)))
        assert len(set(fences)) == 12
        assert await db_lock(engine, "k").locked() is False
        await engine.dispose()

    asyncio.run(main())


def test_threads_that_share_one_database_in_memory() -> None:
    """With a StaticPool, as SQLAlchemy's documentation has it."""
    engine = own_engine("sqlite://", poolclass=StaticPool, connect_args={"check_same_thread": False})
    metadata.create_all(engine)
    inside, done = list[int](), list[int]()

    def work(number: int) -> None:
        for _ in range(5):
            with db_lock(engine, "k", timeout=30):
                inside.append(number)
                assert inside == [number]
                inside.clear()
                done.append(number)

    assert together(*(partial(work, number) for number in range(6))) == []
    assert len(done) == 30


def test_a_missing_table_names_its_cure(tmp_path: Path) -> None:
    """`create_tables`, with the driver's error as the cause."""
    engine = own_engine(f"sqlite:///{tmp_path}/empty.sqlite3")
    with pytest.raises(LockStoreError, match="create_tables") as caught:
        db_lock(engine, "k").acquire()
    assert isinstance(caught.value.__cause__, sqlite3.OperationalError)


def test_an_unreachable_server_is_a_typed_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the password in its message. Each try ends with it, whatever refers to the errors meanwhile."""
    timed(monkeypatch, single_try=0.25)  # nobody listens there
    server = f"127.0.0.1:{free_port()}"
    engine = create_engine(f"postgresql+psycopg://user:s3cret@{server}/db", pool_size=1, max_overflow=0)
    errors = list[BaseException]()
    for _ in range(3):
        with pytest.raises(LockStoreError, match="cannot connect") as caught:
            db_lock(engine, "k").acquire(blocking=False)
        assert "s3cret" not in str(caught.value)
        errors.append(caught.value)
    pool = store_for(engine)._source
    assert isinstance(pool, EnginePool)
    assert not any(pool._in_use)


@pytest.mark.direct
@pytest.mark.exact
@pytest.mark.parametrize("name", SERVERS)
def test_a_database_that_does_not_exist(request: pytest.FixtureRequest, name: str) -> None:
    """The driver's own words are told, though the last of the tries may have ended with the time."""
    ready(request, name)
    engine = own_engine(make_url(url(name)).set(database="nowhere"))
    for timeout in (0, 0.7) * 2:
        with pytest.raises(LockStoreError, match="does not exist|Unknown database") as caught:
            db_lock(engine, "k").acquire(timeout=timeout)
        assert isinstance(caught.value.__cause__, engine.dialect.loaded_dbapi.Error)


@pytest.mark.direct
@pytest.mark.parametrize(
    ("database", "discard"),
    [("postgresql", "DISCARD ALL"), ("mariadb", "DEALLOCATE PREPARE dblock_take")],
    indirect=["database"],
)
def test_prepared_statements_survive_a_discard(database: str, discard: str) -> None:
    """Somebody's clean-up on the lock's connection costs one more exchange, nothing else."""
    engine = own_engine(database)
    lock = db_lock(engine, "k")
    for _ in range(5):
        cycle(lock)
    [connection] = store_for(engine)._source._idle  # type: ignore[attr-defined]
    assert connection.prepared is not None
    connection.raw.cursor().execute(discard)
    with lock:
        assert lock.verify()


@pytest.mark.direct
@pytest.mark.parametrize("subject", PREPARING, indirect=True, ids=str)
def test_a_prepared_statement_that_fits_no_more(subject: Subject, actor: Actor) -> None:
    """Somebody has changed the table meanwhile: another session is opened."""
    lock = subject.lock("k", timeout=2)
    pool: Any = lock._place.store()._source
    for size in (300, 255):
        for changed in (False, False, True, True):
            if changed:
                for column in ("label", "host"):
                    run("postgresql", f'ALTER TABLE locks ALTER {column} TYPE varchar({size}) COLLATE "C"')
            assert actor.call(lock, "acquire")
            assert actor.call(lock, "locked")
            actor.call(lock, "release")
            assert all(each.prepared is not None for each in pool._idle)


def test_no_room_for_prepared_statements(mariadb: object) -> None:
    """A MariaDB server whose max_prepared_stmt_count is used up still locks."""
    engine = own_engine("mariadb")
    run("mariadb", "SET GLOBAL max_prepared_stmt_count = 0")
    try:
        lock = db_lock(engine, "k")
        for _ in range(2):
            with lock:
                assert lock.verify()
    finally:
        run("mariadb", "SET GLOBAL max_prepared_stmt_count = 16382")


@pytest.mark.timeout(300)
@pytest.mark.parametrize("driver", ["psycopg", "asyncpg"])
def test_a_crowd_uses_no_more_connections_than_the_pool_may_have(postgresql: object, driver: str) -> None:
    """Hundreds of tasks that want locks at once, all of them the same one or each another, and all get theirs."""
    name = {"application_name": "small pool"}
    options = {"server_settings": name} if driver == "asyncpg" else name
    engine = create_async_engine(url("postgresql", driver), pool_size=3, max_overflow=2, connect_args=options)
    most = 0

    async def one(key: str) -> None:
        async with db_lock(engine, key, timeout=120):
            pass

    async def count(done: asyncio.Event) -> None:
        nonlocal most
        while not done.is_set():
            [(sessions,)] = await asyncio.to_thread(
                run, "postgresql", "SELECT count(*) FROM pg_stat_activity WHERE application_name LIKE '%small pool'"
            )
            assert isinstance(sessions, int)
            most = max(most, sessions)
            await asyncio.sleep(0.01)

    async def main() -> None:
        done = asyncio.Event()
        counting = asyncio.create_task(count(done))
        await asyncio.gather(*(one(f"k{n}") for n in range(200)))
        await asyncio.gather(*(one("k") for _ in range(100)))
        done.set()
        await counting
        await engine.dispose()

    asyncio.run(main())
    assert 0 < most <= 2 * (3 + 2) + 1  # for taking, for giving back, and one to listen with


@contextmanager
def away_from(engine: Engine, key: str = "") -> Iterator[list[object]]:
    """The database is away from when it is asked for that key on, or at once; the keys that it is asked for."""
    store, asked = store_for(engine), list[object]()
    execute = store.execute

    def refuse(step: Execute) -> Rows:
        asked.append(step.parameters.get("key"))
        if not key or key in asked:
            raise StoreUnreachable("nothing listens")
        return execute(step)

    with pytest.MonkeyPatch.context() as away:
        timed(away, retry_budget=0.05)
        away.setattr(store, "execute", refuse)
        yield asked


@pytest.mark.parametrize("kind", ["db_locks", "permits"])
def test_a_database_that_is_away_is_not_asked_for_each_of_several(kind: str, engine: Engine) -> None:
    """The release of the first waits for it; the others are renewed no more, and the error says so."""
    held: Any = db_locks(engine, "a", "b", "c") if kind == "db_locks" else db_semaphore(engine, "k", permits=3)
    all_of_it = {} if kind == "db_locks" else {"n": 3}
    assert held.acquire(**all_of_it)
    with away_from(engine) as asked, pytest.raises(StoreUnreachable) as caught:
        held.release(**all_of_it)
    assert len(set(asked)) == 1
    assert ["is left to its lease" in note for note in caught.value.__notes__] == [True, True]
    assert not any(hold.store is store_for(engine) for hold in runtime.current.watchdog._holds)


def test_a_database_that_is_away_is_asked_again_later(engine: Engine) -> None:
    """Not for what was taken before it went away; but for a lock that its flow has entered before, and leaves then."""
    outer, locks = db_lock(engine, "a"), db_locks(engine, "a", "b", timeout=0)
    assert outer.acquire()
    with away_from(engine, "b") as asked, pytest.raises(StoreUnreachable) as caught:
        _ = locks.acquire()
    assert "a" not in asked[asked.index("b") :]
    assert ["is left to its lease" in note for note in caught.value.__notes__] == [True]
    outer.release()
    assert not outer.locked()
