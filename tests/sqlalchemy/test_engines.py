"""Engines of all kinds: in memory, without a pool, with a used-up pool, disposed of, of other databases."""

from __future__ import annotations

import asyncio
import gc
import itertools
import re
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any, cast
from unittest.mock import MagicMock

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
    LockTimeout,
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
from tests.conftest import INNODB, SERVERS, ready, run, timed, url
from tests.support.lab import together, until
from tests.support.servers import free_port


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


@pytest.mark.parametrize(("make", "its"), [(Session, "get_bind()"), (AsyncSession, "bind")])
def test_a_session_is_no_engine(make: Any, its: str) -> None:
    """It is told where there is one."""
    with pytest.raises(TypeError, match=f"its `.{re.escape(its)}`"):
        db_lock(make(), "k")


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


UNTRIED = [
    "postgresql+pg8000",
    "postgresql+psycopg2cffi",
    "mysql+mysqlconnector",
    "mysql+cymysql",
    "mariadb+mariadbconnector",
    "sqlite+pysqlcipher",
]


@pytest.mark.parametrize("name", UNTRIED)
def test_untried_drivers_are_refused(name: str) -> None:
    """Before any connection is made, with the names of those that are tried."""
    where = make_url(f"{name}://host/db")
    dialect = where.get_dialect()()
    engine = Engine(NullPool(lambda: pytest.fail("it connects"), dialect=dialect), dialect, where)
    with pytest.raises(UnsupportedDatabase, match=f"{dialect.driver}, .*{', '.join(TRIED[dialect.name])}"):
        db_lock(engine, "k")


def test_a_connection_is_no_engine() -> None:
    """Sync or async, a session neither: the lock has connections of its own."""
    message = "comes first, as in .*, not {}: its `.engine`"
    plain = create_engine("sqlite://")
    with plain.connect() as connection, pytest.raises(TypeError, match=message.format("Connection")):
        db_lock(connection, "k")  # type: ignore[call-overload]
    plain.dispose()

    async def main() -> None:
        engine = create_async_engine("sqlite+aiosqlite://")
        async with engine.connect() as connection:
            with pytest.raises(TypeError, match=message.format("AsyncConnection")):
                db_lock(connection, "k")  # type: ignore[call-overload]
            with pytest.raises(TypeError, match=message.format("AsyncConnection")):
                reap(connection)  # type: ignore[call-overload]
        with pytest.raises(TypeError, match="pass the AsyncEngine itself"):
            db_lock(engine.sync_engine, "k")
        await engine.dispose()

    asyncio.run(main())


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


@pytest.mark.filterwarnings("ignore:No driver name specified:sqlalchemy.exc.SAWarning")
@pytest.mark.parametrize("name", ["oracle+oracledb", "mssql+pyodbc"])
def test_other_databases_are_refused(name: str) -> None:
    """Before any connection is made."""
    driver = MagicMock(paramstyle="named", version="9.0.0", __version__="9.0.0")
    engine = create_engine(f"{name}://host/db", module=driver)
    with pytest.raises(UnsupportedDatabase, match="PostgreSQL, MySQL, MariaDB or SQLite"):
        db_lock(engine, "k")


@pytest.mark.parametrize("pool", [None, StaticPool], ids=["default", "static"])
def test_in_memory_the_lock_shares_the_callers_connection(pool: Any) -> None:
    """It commits on its own outside transactions, and joins one that is open."""
    options = {"poolclass": pool} if pool else {}
    engine = create_engine("sqlite://", **options)
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
    engine.dispose()


def test_a_used_up_pool_does_not_matter(database: str) -> None:
    """The lock's connections are not the caller's: it can be taken and given back while none is left."""
    engine = create_engine(url(database), pool_size=1, max_overflow=0, pool_timeout=0.1)
    with engine.connect(), db_lock(engine, "k") as lock:
        assert lock.verify()
    engine.dispose()


def test_connections_are_made_as_the_engine_makes_its_own(database: str) -> None:
    """With its events, also those that were registered after the lock was made: a password, a PRAGMA."""
    engine = create_engine(url(database))
    lock, seen = db_lock(engine, "k"), list[str]()
    event.listen(engine, "do_connect", lambda *_: seen.append("do_connect"))
    event.listen(engine, "connect", lambda *_: seen.append("connect"))
    with lock:
        assert {"do_connect", "connect"} <= set(seen)
    engine.dispose()


@pytest.mark.direct
@pytest.mark.parametrize("pool", [None, NullPool])
def test_no_connection_outlives_the_engine(postgresql: object, pool: Any) -> None:
    """`dispose()` closes the lock's connections too; with a NullPool none is kept at all."""
    name = "disposable"
    options = {"poolclass": pool} if pool else {}
    engine = create_engine(url("postgresql"), connect_args={"application_name": name}, **options)
    with db_lock(engine, "k"):
        pass
    counted = f"SELECT count(*) FROM pg_stat_activity WHERE application_name LIKE '%{name}'"
    assert until(lambda: run("postgresql", counted) == [(0 if pool else 1,)])
    engine.dispose()
    assert until(lambda: run("postgresql", counted) == [(0,)])
    with db_lock(engine, "k"):  # and it can be used again
        pass
    engine.dispose()


@pytest.mark.direct
def test_what_ends_after_the_disposal_keeps_no_connection(database: str) -> None:
    """The place of a waiter whose time is up is deleted in the background, and leases are renewed; until it is used."""
    driver = {"sqlite": "aiosqlite", "postgresql": "psycopg", **dict.fromkeys(INNODB, "aiomysql")}[database]

    async def main() -> None:
        engine, other = (create_async_engine(url(database, driver)) for _ in range(2))
        source: Any = store_for(engine.sync_engine)._source
        async with db_lock(other, "k"):
            assert not await asyncio.create_task(db_lock(engine, "k", timeout=0.3).acquire())
            await engine.dispose()
            while run(database, "SELECT count(*) FROM lock_waiters") != [(0,)]:  # noqa: ASYNC110 - by a task of ours
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


@pytest.mark.parametrize("driver", ["psycopg", "asyncpg"])
def test_event_loops_come_and_go(postgresql: object, driver: str) -> None:
    """An engine that serves one loop after the other does not mix up their connections."""
    # asyncpg cannot close a connection whose loop is closed; with a pool, dispose() must come first, as for any engine.
    options = {"poolclass": NullPool} if driver == "asyncpg" else {}
    engine = create_async_engine(url("postgresql", driver), **options)

    async def main() -> int | None:
        async with db_lock(engine, "k") as lock:
            return lock.fence

    fences = [asyncio.run(main()) for _ in range(3)]
    assert fences == sorted(set(fences), key=lambda fence: fence or 0)
    gc.collect()
    asyncio.run(engine.dispose())


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


@pytest.mark.parametrize("reads", [False, True])
def test_tasks_that_share_one_database_in_memory(reads: bool) -> None:
    """One connection for all: they take turns, one statement at a time, beside readers."""

    async def main() -> None:
        engine = create_async_engine("sqlite+aiosqlite://")
        async with engine.begin() as connection:
            await connection.run_sync(metadata.create_all)
        inside, fences = list[int](), list[int]()

        async def work(number: int) -> None:
            async with db_lock(engine, "k", timeout=20) as lock:
                inside.append(number)
                if reads:
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
    engine = create_engine("sqlite://", poolclass=StaticPool, connect_args={"check_same_thread": False})
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
    engine.dispose()


def test_a_missing_table_names_its_cure(tmp_path: Path) -> None:
    """`create_tables`, with the driver's error as the cause."""
    import sqlite3

    engine = create_engine(f"sqlite:///{tmp_path}/empty.sqlite3")
    with pytest.raises(LockStoreError, match="create_tables") as caught:
        db_lock(engine, "k").acquire()
    assert isinstance(caught.value.__cause__, sqlite3.OperationalError)
    engine.dispose()


def test_an_unreachable_server_is_a_typed_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the password in its message, after a bounded number of tries."""
    timed(monkeypatch, single_try=0.25)  # nobody listens there
    engine = create_engine("postgresql+psycopg://user:s3cret@127.0.0.1:1/db")
    with pytest.raises(LockStoreError, match="cannot connect") as caught:
        db_lock(engine, "k").acquire(blocking=False)
    assert "s3cret" not in str(caught.value)


@pytest.mark.direct
@pytest.mark.exact
@pytest.mark.parametrize("name", SERVERS)
def test_a_database_that_does_not_exist(request: pytest.FixtureRequest, name: str) -> None:
    """The driver's own words are told, though the last of the tries may have ended with the time."""
    ready(request, name)
    engine = create_engine(make_url(url(name)).set(database="nowhere"))
    for timeout in (0, 0.7) * 2:
        with pytest.raises(LockStoreError, match="does not exist|Unknown database") as caught:
            db_lock(engine, "k").acquire(timeout=timeout)
        assert isinstance(caught.value.__cause__, engine.dialect.loaded_dbapi.Error)
    engine.dispose()


def test_a_foreign_writer_on_sqlite_is_part_of_the_wait(tmp_path: Path) -> None:
    """Somebody keeps the database's one write lock: the time is up, LockTimeout says why, and nothing is left."""
    engine = create_engine(f"sqlite:///{tmp_path}/busy.sqlite3")
    metadata.create_all(engine)
    with engine.connect() as connection:
        connection.exec_driver_sql("BEGIN IMMEDIATE")
        assert db_lock(engine, "k").acquire(timeout=0.1) is False
        with pytest.raises(LockTimeout, match="locked"), db_lock(engine, "k", timeout=0.1):
            pytest.fail("unreachable")
        connection.rollback()
    with db_lock(engine, "k"):
        pass
    engine.dispose()


def test_two_engines_of_one_database_are_rivals(database: str) -> None:
    """A hold is found by its engine; through another one the same thread waits like anybody."""
    one, two = create_engine(url(database)), create_engine(url(database))
    with db_lock(one, "k"), pytest.raises(LockTimeout, match="MainThread"), db_lock(two, "k", timeout=0):
        pytest.fail("unreachable")
    one.dispose()
    two.dispose()


@pytest.mark.direct
@pytest.mark.parametrize(
    ("database", "discard"),
    [("postgresql", "DISCARD ALL"), ("mariadb", "DEALLOCATE PREPARE dblock_take")],
    indirect=["database"],
)
def test_prepared_statements_survive_a_discard(database: str, discard: str) -> None:
    """Somebody's clean-up on the lock's connection costs one more exchange, nothing else."""
    engine = create_engine(url(database))
    lock = db_lock(engine, "k")
    for _ in range(5):
        with lock:
            pass
    [connection] = store_for(engine)._source._idle  # type: ignore[attr-defined]
    assert connection.prepared is not None
    connection.raw.cursor().execute(discard)
    with lock:
        assert lock.verify()
    engine.dispose()


@pytest.mark.direct
def test_an_async_engine_prepares_too(postgresql: object) -> None:
    """With psycopg, on the connection of an event loop."""

    async def take() -> None:
        engine = create_async_engine(url("postgresql"))
        async with db_lock(engine, "k"):
            pass
        [connection] = store_for(engine.sync_engine)._source._idle  # type: ignore[attr-defined]
        assert connection.prepared is not None
        await engine.dispose()

    asyncio.run(take())


@pytest.mark.direct
def test_a_prepared_statement_that_fits_no_more(postgresql: object) -> None:
    """Somebody has changed the table meanwhile: another session is opened."""
    engine = create_engine(url("postgresql"))
    lock = db_lock(engine, "k", timeout=2)
    for _ in range(2):
        with lock:
            assert lock.locked()
    try:
        run("postgresql", 'ALTER TABLE locks ALTER label TYPE varchar(300) COLLATE "C"')
        for _ in range(2):
            with lock:
                assert lock.locked()
    finally:
        run("postgresql", 'ALTER TABLE locks ALTER label TYPE varchar(255) COLLATE "C"')
        engine.dispose()


@pytest.mark.direct
def test_a_changed_column_under_asyncpg(postgresql: object) -> None:
    """A plan that is out of date is an error of asyncpg itself; the next session makes a new one."""

    async def main() -> None:
        engine = create_async_engine(url("postgresql", "asyncpg"))
        try:
            for change in ("300", "255"):
                for number in range(2):
                    async with db_lock(engine, f"before {change} {number}") as lock:
                        assert await lock.locked()
                for column in ("label", "host"):
                    run("postgresql", f'ALTER TABLE locks ALTER {column} TYPE varchar({change}) COLLATE "C"')
                async with db_lock(engine, f"after {change}", timeout=2) as lock:
                    assert await lock.locked()
        finally:
            await engine.dispose()

    asyncio.run(main())


def test_no_room_for_prepared_statements(mariadb: object) -> None:
    """A MariaDB server whose max_prepared_stmt_count is used up still locks."""
    engine = create_engine(url("mariadb"))
    run("mariadb", "SET GLOBAL max_prepared_stmt_count = 0")
    try:
        lock = db_lock(engine, "k")
        for _ in range(2):
            with lock:
                assert lock.verify()
    finally:
        run("mariadb", "SET GLOBAL max_prepared_stmt_count = 16382")
    engine.dispose()


@pytest.mark.timeout(300)
@pytest.mark.parametrize("driver", ["psycopg", "asyncpg"])
def test_a_crowd_uses_no_more_connections_than_the_pool_may_have(postgresql: object, driver: str) -> None:
    """A thousand tasks that want locks at once, all of them the same one or each another, and all get theirs."""
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
        await asyncio.gather(*(one(f"k{n}") for n in range(500)))
        await asyncio.gather(*(one("k") for _ in range(200)))
        done.set()
        await counting
        await engine.dispose()

    asyncio.run(main())
    assert 0 < most <= 2 * (3 + 2) + 1  # for taking, for giving back, and one to listen with


def test_connections_that_fail_use_up_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server that is not there: each try ends with its error, whatever refers to the errors meanwhile."""
    timed(monkeypatch, single_try=0.25)  # nobody listens there
    engine = create_engine(f"postgresql+psycopg://dblock@127.0.0.1:{free_port()}/postgres", pool_size=1, max_overflow=0)
    errors = list[BaseException]()
    for _ in range(3):
        with pytest.raises(LockStoreError) as caught:
            db_lock(engine, "k", timeout=0).acquire()
        errors.append(caught.value)
    pool = store_for(engine)._source
    assert isinstance(pool, EnginePool)
    assert not any(pool._in_use)


@pytest.mark.parametrize("kind", ["db_locks", "permits"])
def test_a_database_that_is_away_is_not_asked_for_each_of_several(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The release of the first waits for it; the others are renewed no more, and the error says so."""
    timed(monkeypatch, retry_budget=0.05)
    engine = create_engine(f"sqlite:///{tmp_path}/locks.sqlite3")
    metadata.create_all(engine)
    held: Any = db_locks(engine, "a", "b", "c") if kind == "db_locks" else db_semaphore(engine, "k", permits=3)
    all_of_it = () if kind == "db_locks" else (3,)
    assert held.acquire(**({} if kind == "db_locks" else {"n": 3}))
    store, asked = store_for(engine), set[object]()

    def refused(step: Execute) -> Rows:
        asked.add(step.parameters.get("key"))
        raise StoreUnreachable("nothing listens")

    monkeypatch.setattr(store, "execute", refused)
    with pytest.raises(StoreUnreachable) as caught:
        held.release(*all_of_it)
    assert len(asked) == 1
    assert ["is left to its lease" in note for note in caught.value.__notes__] == [True, True]
    assert not any(hold.store is store for hold in runtime.current.watchdog._holds)
    engine.dispose()


def test_a_database_that_is_away_is_asked_again_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not for what was taken before it went away; but for a lock that its flow has entered before, and leaves then."""
    timed(monkeypatch, retry_budget=0.05)
    engine = create_engine(f"sqlite:///{tmp_path}/locks.sqlite3")
    metadata.create_all(engine)
    outer, locks, asked = db_lock(engine, "a"), db_locks(engine, "a", "b", timeout=0), list[object]()
    store = store_for(engine)
    execute = store.execute

    def refused(step: Execute) -> Rows:
        asked.append(step.parameters.get("key"))
        if "b" in asked:
            raise StoreUnreachable("nothing listens")
        return execute(step)

    assert outer.acquire()
    with monkeypatch.context() as away, pytest.raises(StoreUnreachable) as caught:
        away.setattr(store, "execute", refused)
        _ = locks.acquire()
    assert "a" not in asked[asked.index("b") :]
    assert ["is left to its lease" in note for note in caught.value.__notes__] == [True]
    outer.release()
    assert not outer.locked()
    engine.dispose()
