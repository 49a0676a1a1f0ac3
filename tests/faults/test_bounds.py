"""No statement takes longer than its caller has, whatever strangers and servers do."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import math
import os
import socket
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import pytest
from sqlalchemy import Engine, create_engine
from sqlalchemy.engine import make_url
from sqlalchemy.ext.asyncio import create_async_engine
from sqlalchemy.util import greenlet_spawn

from dblock import LockStoreError, LockTimeout
from dblock import db_lock as django_lock
from dblock.core import runtime
from dblock.core.errors import StoreUnreachable
from dblock.core.wakeup.registry import Wakeups
from dblock.drivers import sessions
from dblock.store import _stores
from sqlalchemy_dblock import db_lock
from sqlalchemy_dblock.store import store_for
from tests.conftest import MYSQL_DRIVER, POOLER, SERVERS, each_of, observer, own_engine, run, timed, url
from tests.faults.conftest import ALL_WIRES, SEVERAL_WIRES, Wire, make_read_only, name_of, proxied
from tests.support.lab import DRIVEN, LONG, SOME, cycle, expire, hold_of, renews, threads, until
from tests.support.subjects import MATRIX, Actor, Subject

pytestmark = pytest.mark.exact

TRY = 0.3
"""Seconds in which a try is to be answered."""
EXACT = 0.05
"""Seconds by which a timeout may be exceeded."""


subject = each_of(MATRIX)


@contextlib.contextmanager
def strangers(database: str, sql: dict[str, str]) -> Iterator[None]:
    """Somebody's transaction that has run a statement, for as long as the block lasts."""
    with observer(database).connect() as connection:
        connection.exec_driver_sql(sql[database])
        try:
            yield
        finally:
            if sql[database] == LOCK_TABLES:
                connection.exec_driver_sql("UNLOCK TABLES")
            connection.rollback()


FOR_UPDATE = "SELECT * FROM locks FOR UPDATE"
LOCK_TABLES = "LOCK TABLES locks WRITE, lock_waiters WRITE"
ROW = {"postgresql": FOR_UPDATE, "mariadb": FOR_UPDATE, "mysql": FOR_UPDATE, "sqlite": "BEGIN IMMEDIATE"}
TABLE = {
    "postgresql": "LOCK TABLE locks, lock_waiters IN ACCESS EXCLUSIVE MODE",
    "mariadb": LOCK_TABLES,
    "mysql": LOCK_TABLES,
    "sqlite": "BEGIN EXCLUSIVE",
}


def takes_at_most(seconds: float, attempt: Callable[[], bool]) -> bool:
    """Whether one of a few attempts succeeds in that time, as it should when nothing else happens on the machine."""
    for _ in range(20):
        start = time.monotonic()
        if attempt() and time.monotonic() - start < seconds:
            return True
    return False


def refused(actor: Actor, lock: Any, *, silent: bool, **options: Any) -> Callable[[], bool]:
    """An attempt, true if the acquire fails as it must: it answers False, or raises where it is `silent`.

    MySQL's shortest wait for a table's lock is a second, and behind a pooler no setting of a session bounds it: these
    are `silent`, and a busy machine may be.
    """

    def attempt() -> bool:
        try:
            assert actor.call(lock, "acquire", **options) is False
        except LockStoreError:
            return silent
        return True

    return attempt


@pytest.mark.parametrize(
    ("subject", "lock"),
    [*((each, ROW) for each in DRIVEN), *((each, TABLE) for each in SOME)],
    indirect=["subject"],
    ids=[*(f"{each}-row" for each in DRIVEN), *(f"{each}-table" for each in SOME)],
)
def test_a_strangers_lock(subject: Subject, actors: Callable[..., Actor], lock: dict[str, str]) -> None:
    """Of the row, the table or the whole database: a try answers at once, a timeout is exact, and both say no.

    LockTimeout says that somebody else's transaction was in the way, and is caused by what the driver said.
    """
    actor = actors(subject)
    wanted = subject.lock("k", ttl=2)  # MySQL may carry out a take that nobody waits for any more
    actor.within(wanted)  # connected, and there is a row
    silent = subject.database == "mysql" or (POOLER and lock is TABLE)
    with strangers(subject.database, lock):
        assert takes_at_most(TRY, refused(actor, wanted, silent=silent, blocking=False))
        assert takes_at_most(0.4 + EXACT, refused(actor, wanted, silent=silent, timeout=0.4))
        if lock is TABLE:
            assert takes_at_most(0.4 + EXACT, refused(actor, subject.lock("new"), silent=silent, timeout=0.4))
            if not (silent or subject.driver):  # drivers of asyncio may hear of nothing in so short a time
                with pytest.raises(LockTimeout, match=r"another transaction|locked") as why:
                    actor.within(subject.lock("k", timeout=0.1))
                assert isinstance(why.value.__cause__, LockStoreError)
    assert actor.call(wanted, "acquire", timeout=20) is True
    actor.call(wanted, "release")


HELD = {"release": (), "extend": (25,), "acquire": (), "detach": ()}
NOT_WAITED_FOR = ("sqlite", "acquire")
"""A lock is entered again beside a writer of SQLite: the count is left as it is."""
TRIED = [
    (each, what)
    for each in DRIVEN
    for what in HELD
    if (what == "extend" or each in SOME) and (each.database, what) != NOT_WAITED_FOR
]


@pytest.mark.parametrize(("subject", "what"), TRIED, indirect=["subject"], ids=str)
def test_a_strangers_lock_on_what_is_held(
    subject: Subject, actors: Callable[..., Actor], what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is waited for up to a bound, and an error of ours says so; afterwards the same works."""
    actor, lock = actors(subject), subject.lock("k", ttl=20)
    actor.call(lock, "acquire")
    with strangers(subject.database, ROW), monkeypatch.context() as patch:
        timed(patch, retry_budget=0.2)
        with pytest.raises(LockStoreError):
            actor.call(lock, what, *HELD[what])
    if what != "release":  # which has left it to its end
        # MySQL may execute the detach when the client has given up: then it is sent again, with the same secret.
        assert what == "detach" or actor.call(lock, "verify") is True
        actor.call(lock, what, *HELD[what])
        if what == "acquire":
            actor.call(lock, "release")
        if what != "detach":
            actor.call(lock, "release")
            assert subject.row("k")["owner"] is None


@pytest.mark.parametrize("wire", SEVERAL_WIRES, indirect=True, ids=name_of)
@pytest.mark.parametrize("swallowed", [0, 6], ids=["no answer", "not its end"])
def test_a_server_that_does_not_answer(wire: Wire, swallowed: int) -> None:
    """Nobody is held for longer than asked for: neither over a connection that was good, nor over a new one.

    Nor if what the statement says has come, and the end of the answer never does: on PostgreSQL the last six bytes are
    `ReadyForQuery`. The statement is prepared: it was sent often before.
    """
    lock, held = wire.subject.lock("k"), wire.subject.lock("held", ttl=20)
    for _ in range(8):
        wire.actor.within(lock)
    wire.actor.call(held, "acquire")

    def failing(**options: Any) -> Callable[[], bool]:
        def attempt() -> bool:
            with contextlib.suppress(LockStoreError):
                _ = wire.actor.call(lock, "acquire", **options)
                assert swallowed, "it has the answer"
            return True

        return attempt

    wire.proxy.black_hole, wire.proxy.swallowing = not swallowed, swallowed
    first = {"timeout": 0.5} if swallowed else {"blocking": False}
    start = time.monotonic()
    _ = failing(**first)()
    assert time.monotonic() - start < 2
    if not swallowed:
        assert takes_at_most(TRY, failing(blocking=False))
    assert takes_at_most(0.5 + EXACT, failing(timeout=0.5))
    wire.proxy.black_hole, wire.proxy.swallowing = False, 0
    wire.proxy.cut()
    after = wire.subject.lock("other") if swallowed else lock  # a take may have been executed
    assert until(lambda: wire.actor.call(after, "acquire", timeout=20), 20)
    wire.actor.call(after, "release")
    wire.actor.call(held, "release")


SILENT = (
    *("postgresql", "mariadb"),
    *(f"postgresql+{driver}" for driver in ("psycopg", "psycopg2", "asyncpg", "psycopg_async")),
    *(f"mysql+{driver}" for driver in (MYSQL_DRIVER, "aiomysql", "asyncmy")),
)
"""Two aliases of Django's, and SQLAlchemy's drivers."""


def test_openings_that_are_never_answered_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """The server accepts the connection and says nothing: the driver closes it, though the try has ended long ago.

    An opening of a connection to listen on ends too.
    """
    timed(monkeypatch, statement_timeout=0.6)
    with ThreadPoolExecutor(len(SILENT)) as pool:
        for where, ended in {where: pool.submit(opening_ends, where) for where in SILENT}.items():
            assert ended.exception() is None, where


def opening_ends(where: str) -> None:
    _ = _stores.pop(f"{where}_wire", None)  # else it may have answered an earlier test, and not be taken for away
    port = int(os.environ.get(f"DBLOCK_TEST_{where.upper()}_WIRE", "0"))
    with socket.create_server(("127.0.0.1", port)) as silent:
        address = f"{where}://nobody@127.0.0.1:{silent.getsockname()[1]}/locks"

        def ended() -> bool:
            opened, _ = silent.accept()
            with opened, contextlib.suppress(ConnectionResetError):
                opened.settimeout(4)
                while opened.recv(1000):
                    pass
            return True

        async def attempt() -> None:
            with pytest.raises(LockStoreError, match="no connection"):
                await db_lock(create_async_engine(address), "k").acquire(blocking=False)
            assert await asyncio.to_thread(ended)

        if where.endswith(("asyncpg", "async", "aiomysql", "asyncmy")):
            asyncio.run(attempt())
            return
        lock: Any = db_lock(create_engine(address), "k") if "+" in where else django_lock("k", using=f"{where}_wire")
        with pytest.raises(LockStoreError, match="no connection"):
            lock.acquire(blocking=False)
        assert ended()
        store, begun = lock._place.store(), time.monotonic()
        with pytest.raises((*store._errors, *store._connect_errors)):
            store.subscribe("channel", Wakeups())
        assert time.monotonic() - begun < 5


def test_the_applications_own_bounds(postgresql: object, monkeypatch: pytest.MonkeyPatch) -> None:
    """A shorter one is kept, and its own connections have its own, also where SQLAlchemy keeps what it is given."""
    given = list[Any]()
    where = make_url(url("postgresql", "psycopg2"))
    for own, ours in ((None, 10), (3, 3), ("4", "4"), (60, 10)):
        engine = create_engine(where, connect_args={} if own is None else {"connect_timeout": own})
        monkeypatch.setattr(engine.dialect, "connect", partial(connected, given, engine.dialect.connect))
        for _ in range(2):
            with db_lock(engine, "k"), engine.connect():
                pass
            engine.dispose()
        assert given == [ours, own] * 2
        given.clear()


def connected(given: list[Any], connect: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
    given.append(options.get("connect_timeout"))
    return connect(*arguments, **options)


@pytest.mark.direct
@pytest.mark.parametrize("driver", ["asyncpg", "psycopg"])
def test_closing_what_is_silent(postgresql: object, driver: str) -> None:
    """Idle connections whose server is silent: closing them, in order or not, waits for nobody."""
    with proxied("postgresql", driver, create_async_engine) as (proxy, engine):

        async def hold(key: str) -> None:
            async with db_lock(engine, key):
                await asyncio.sleep(0.3)

        async def main() -> None:
            pool: Any = store_for(engine.sync_engine)._source
            for end in (pool.close_all, lambda: pool.drop(pool.take(math.inf, critical=False), others=True)):
                await asyncio.gather(*map(hold, "abcde"))
                assert len(pool._idle) > 2
                proxy.black_hole = True
                start = time.monotonic()
                await greenlet_spawn(end)
                assert time.monotonic() - start < 1
                proxy.black_hole = False
                proxy.cut()
            await engine.dispose()

        asyncio.run(main())


@pytest.mark.direct
@pytest.mark.parametrize("ends", ["cancelled", "late", "loop closed"])
@pytest.mark.parametrize("driver", ["asyncpg", "psycopg"])
def test_a_first_connection_that_nobody_answers(
    postgresql: object, monkeypatch: pytest.MonkeyPatch, driver: str, ends: str
) -> None:
    """Whatever becomes of the flow that waits for it, the engine's locks work soon after the server answers again."""
    timed(monkeypatch, statement_timeout=1.0)
    with proxied("postgresql", driver, create_async_engine) as (proxy, engine):

        async def first() -> None:
            begun = time.monotonic()
            with pytest.raises((TimeoutError, StoreUnreachable)):
                async with asyncio.timeout(0.3 if ends == "cancelled" else None):
                    _ = await db_lock(engine, "k", timeout=20 if ends == "cancelled" else 0.3).acquire()
            assert time.monotonic() - begun < 2.5, "longer than a second for leaving nothing behind"

        async def then() -> None:
            proxy.black_hole = False
            async with db_lock(engine, "k", timeout=10):
                pass
            await engine.dispose()

        async def both() -> None:
            await first()
            await then()

        proxy.black_hole = True
        if ends == "loop closed":
            for coroutine in (first(), then()):
                loop = asyncio.new_event_loop()
                loop.run_until_complete(coroutine)
                loop.close()
                gc.collect()
        else:
            asyncio.run(both())


@pytest.mark.direct
@pytest.mark.parametrize("database", SERVERS, indirect=True)
def test_a_session_that_cannot_be_set_up(monkeypatch: pytest.MonkeyPatch, database: str) -> None:
    """A server that lets us in and then is silent keeps no thread."""
    timed(monkeypatch, statement_timeout=1.0)
    with proxied(database) as (proxy, engine):
        sets_up = sessions._set_up

        def unheard(*given: Any) -> None:
            proxy.black_hole = True
            sets_up(*given)

        with monkeypatch.context() as patch:
            patch.setattr(sessions, "_set_up", unheard)
            with pytest.raises(StoreUnreachable):
                db_lock(engine, "k", timeout=0.3).acquire()
            assert until(lambda: not threads("dblock connect"), 5)
        proxy.black_hole = False
        cycle(db_lock(engine, "k", timeout=10))


def test_an_exclusive_writer_on_a_new_connection(engine: Engine) -> None:
    """A rollback journal, and a process that has not connected yet: a try has its answer in time, and it is False."""
    engine.dispose()
    with contextlib.closing(sqlite3.connect(str(engine.url.database), isolation_level=None)) as stranger:
        stranger.execute("BEGIN EXCLUSIVE")
        for timeout, most in ((0, TRY), (0.5, 0.5 + EXACT)):

            def attempt(timeout: float = timeout) -> bool:
                fresh = create_engine(engine.url)
                got = db_lock(fresh, "k").acquire(timeout=timeout)
                fresh.dispose()
                return got is False

            assert takes_at_most(most, attempt)


def test_asynchronous_code_beside_a_busy_executor(postgresql: object) -> None:
    """The application's jobs fill the loop's own threads: the statements of the lock have theirs."""

    async def main() -> None:
        loop = asyncio.get_running_loop()
        loop.set_default_executor(ThreadPoolExecutor(1))
        stop = threading.Event()
        job = loop.run_in_executor(None, stop.wait, 20)
        try:
            async with django_lock("k", using="postgresql", timeout=1):
                assert not job.done()
        finally:
            stop.set()
            await job

    asyncio.run(main())


@pytest.mark.direct
def test_a_stuck_take_keeps_no_renewal_and_no_release(postgresql: object) -> None:
    """An engine with one connection, which a take keeps busy: what is held is renewed and given back all the same."""
    with proxied("postgresql", pool_size=1, max_overflow=0) as (_, engine):
        held = db_lock(engine, "held", ttl=1.5)
        held.acquire()
        source = store_for(engine)._source
        stuck = source.take(time.monotonic() + 1e9, critical=False)  # as a statement that is not answered
        assert renews(hold_of(held))
        assert held.state == "held"
        assert not db_lock(engine, "k").acquire(blocking=False)
        with pytest.raises(LockTimeout, match="all 1 connections of the lock are in use"):
            db_lock(engine, "k", timeout=0.1).__enter__()
        held.release()
        source.give(stuck)
    assert run("postgresql", "SELECT owner FROM locks WHERE lock_key = 'held'") == [(None,)]


@pytest.fixture
def read_only(database: str) -> Iterator[Callable[[bool], None]]:
    """Turns a server into one that takes no writes, as around a promotion."""
    if database == "mariadb":  # whose root may write all the same
        run(database, "CREATE USER IF NOT EXISTS app@'%'")
        run(database, "GRANT ALL ON *.* TO app@'%'")
        run(database, "REVOKE READ ONLY ADMIN, SUPER ON *.* FROM app@'%'")

    def switch(on: bool) -> None:
        make_read_only(observer(database), on)
        if database == "postgresql":  # which reads its files when it comes to it
            shown = [("on" if on else "off",)]
            assert until(lambda: run(database, "SHOW default_transaction_read_only") == shown)
            time.sleep(0.2)

    yield switch
    switch(False)


@pytest.mark.direct
@pytest.mark.parametrize("database", SERVERS, indirect=True)
def test_a_server_that_takes_no_writes_for_a_moment(
    database: str, read_only: Callable[[bool], None], actors: Callable[..., Actor]
) -> None:
    """Waiters wait on, holders keep what they have by their own clock, and are renewed when it is over."""
    engine = own_engine(url(database).replace("root@", "app@") if database == "mariadb" else url(database))
    holder, waiter, taker = (actors(Subject("sqlalchemy", "sync", database)) for _ in range(3))
    held, wanted = db_lock(engine, "held", ttl=6), db_lock(engine, "held", timeout=30)
    other = db_lock(engine, "free", timeout=30)
    holder.do(held.acquire)
    waiting = waiter.start(wanted.acquire)
    assert until(lambda: runtime.current.site(store_for(engine)).local_queues.get("held"))
    read_only(True)
    taking = taker.start(other.acquire)
    hold = holder.do(lambda: hold_of(held))
    assert not renews(hold, within=0.7)
    assert not taking.done()
    assert not waiting.done()
    assert holder.get(held, "state") in {"held", "at_risk"}
    read_only(False)
    assert taking.result(30) is True
    assert renews(hold)
    assert until(lambda: holder.get(held, "state") == "held", 5)
    holder.do(held.release)
    assert waiting.result(30) is True
    waiter.do(wanted.release)
    taker.do(other.release)


def crowded(wire: Wire, actors: list[Actor]) -> Any:
    """The pool of the lock's connections, several of which are idle."""
    pool = wire.subject.lock("k")._place.store()._source

    def burst() -> bool:
        locks = [wire.subject.lock(f"other {n}") for n, _ in enumerate(actors)]
        for method in ("acquire", "release"):
            for begun in [actor.begin(lock, method) for actor, lock in zip(actors, locks, strict=True)]:
                begun.result(20)
        return len(pool._idle) > 2

    assert until(burst, 20)
    return pool


@pytest.mark.parametrize("wire", SEVERAL_WIRES, indirect=True, ids=name_of)
def test_connections_that_the_network_has_forgotten(
    wire: Wire, actors: Callable[..., Actor], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The database is healthy and the key free: a try gets it, a second is enough to wait, a release is prompt."""
    lock, crowd = wire.subject.lock("k"), [actors(wire.subject) for _ in range(5)]
    wire.actor.within(lock)
    timed(monkeypatch, trusted_idle=0.0)

    def takes_and_releases(**options: Any) -> tuple[float, float]:
        """Seconds; infinite for a key that is not got."""
        pool = crowded(wire, crowd)
        wire.proxy.forget()
        forgotten = list(pool._idle)
        start = time.monotonic()
        got = False
        with contextlib.suppress(StoreUnreachable):  # a busy machine opens a connection late: the next chance counts
            got = wire.actor.call(lock, "acquire", **options)
        took = time.monotonic() - start
        assert until(lambda: not any(each in forgotten for each in pool._idle)), "the others were asked, and ended"
        if not got:
            return math.inf, math.inf
        wire.proxy.forget()
        start = time.monotonic()
        try:
            wire.actor.call(lock, "release")
        except StoreUnreachable:  # the same
            expire(wire.direct)
            return math.inf, math.inf
        return took, time.monotonic() - start

    chances = 10
    assert any(takes_and_releases(blocking=False)[0] < TRY for _ in range(chances))
    in_a_second = (takes_and_releases(timeout=1) for _ in range(chances))  # as many as are needed
    assert any(took < 1 and released < 0.5 for took, released in in_a_second)
    assert wire.direct.row("k")["owner"] is None


FAR = [
    (wire, delay)
    for wire in SEVERAL_WIRES
    for delay in (0.02, 0.08)
    if LONG or delay == 0.02 or wire == SEVERAL_WIRES[0]
]
"""The round trips to a server far away: the longer one over each wire in `make faults`."""


@pytest.mark.parametrize(
    ("wire", "delay"), FAR, indirect=["wire"], ids=[f"{name_of(wire)}-{delay}" for wire, delay in FAR]
)
def test_an_idle_connection_to_a_server_far_away(wire: Wire, delay: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """A round trip of 20 and of 80 ms: it is asked, has time to answer, is kept, and a try has its answer in time."""
    wire.proxy.delay = delay
    lock = wire.subject.lock("k")
    for _ in range(8):  # prepared
        assert wire.actor.call(lock, "acquire", timeout=20)
        wire.actor.call(lock, "release")
    timed(monkeypatch, trusted_idle=0.0)

    def tries() -> bool:
        opened, asked = wire.proxy.accepted, wire.proxy.round_trips
        got = wire.actor.call(lock, "acquire", blocking=False)
        assert wire.proxy.round_trips - asked >= 2
        kept = wire.proxy.accepted == opened
        if got:
            wire.actor.call(lock, "release")
        return got is True and kept

    assert any(tries() for _ in range(5))


@pytest.mark.parametrize("wire", ALL_WIRES, indirect=True, ids=name_of)
def test_a_renewal_over_a_connection_that_the_network_has_forgotten(
    wire: Wire, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It is renewed at the first try, and the holder hears of nothing."""
    lock, hold = wire.acquired(ttl=30, timeout=20)
    timed(monkeypatch, trusted_idle=0.0)
    assert renews(hold)
    caplog.clear()
    wire.proxy.forget()
    assert renews(hold)
    assert caplog.messages == []
    wire.actor.call(lock, "release")
