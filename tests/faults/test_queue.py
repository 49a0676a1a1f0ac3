"""Waiters and holders that die, servers that restart, connections that break: the queue goes on (11, 15, 20, 22)."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import pytest
from sqlalchemy import create_engine, text
from sqlalchemy.exc import DBAPIError
from sqlalchemy.ext.asyncio import create_async_engine

from dblock.core import runtime, timing
from dblock.core.runtime import ProcessServices
from sqlalchemy_dblock import LockTimeout, db_lock, metadata
from tests.conftest import DATABASES, INNODB, SELDOM, observer, run, timed, url
from tests.contract.test_queue import LATER, WAITERS, listen_in, wait_for, waiters
from tests.contract.test_rwlock import rwlock
from tests.contract.test_semaphore import semaphore
from tests.support.lab import FEW, LONG, SYNC, Remote, alive, hold_of, renews, times, together, until
from tests.support.servers import MariaDB, MySQL, PostgreSQL, Server
from tests.support.subjects import Actor, Subject

pytestmark = pytest.mark.filterwarnings("ignore::ResourceWarning")  # of drivers whose server went away


PLACE = 1.2
"""Seconds for which a place in the queue lasts."""
SHORT_PLACES = f"setattr(timing, 'DEFAULT', timing.DEFAULT._replace(waiter_ttl={PLACE}))"
"""The same in another process."""
DYING = [*((each, False) for each in FEW), *((each, True) for each in (FEW if LONG else FEW[1:2]))]


@pytest.mark.parametrize("subject", FEW, indirect=True, ids=str)
def test_the_next_has_the_key_when_its_holder_was_killed(subject: Subject) -> None:
    """kill -9 the holder: within ttl + 1 s."""
    ttl = 0.6
    with Remote(subject) as remote:
        remote.do(f"(lock := subject.lock('k', ttl={ttl})).acquire()")
        actor = Actor(subject)
        lock = subject.lock("k", timeout=60)
        waiting_ = actor.start(lock.acquire)
        assert until(lambda: waiters(subject) == 1)
        remote.kill()
        killed = time.monotonic()
        assert waiting_.result(30) is True
        assert time.monotonic() - killed <= ttl + 1
        actor.call(lock, "release")
        actor.close()


@pytest.mark.parametrize(("subject", "with_holder"), DYING, indirect=["subject"], ids=str)
def test_dead_waiters_are_passed_over_together(
    subject: Subject, monkeypatch: pytest.MonkeyPatch, with_holder: bool
) -> None:
    """kill -9 the first k of many waiters: the next live one holds within one place in the queue, not k of them.

    Also if their holder dies with them, whose lease ends before their places do.
    """
    timed(monkeypatch, waiter_ttl=PLACE)
    k = times(5, 19)
    holder = subject.lock("k", ttl=60)
    with Remote(subject) as remote:  # an unfair flow stands alone, as if it were a process of its own
        remote.do(SHORT_PLACES)
        if with_holder:
            remote.do("(lock := subject.lock('k', ttl=0.8)).acquire()")
        else:
            assert holder.acquire()
        for n in range(k):
            remote.do(
                f"(w{n} := __import__('threading').Thread(target=lambda: subject.lock('k', timeout=99, fair=False)"
                ".acquire(), daemon=True)).start()"
            )
        assert until(lambda: waiters(subject) == k, 20)
        actor = Actor(subject)
        lock = subject.lock("k", timeout=60)
        waiting_ = actor.start(lock.acquire)
        assert until(lambda: waiters(subject) == k + 1)
        remote.kill()
        released = time.monotonic()
        if not with_holder:
            holder.release()
        assert waiting_.result(30) is True
        assert time.monotonic() - released <= PLACE + 0.5
        actor.call(lock, "release")
        actor.close()


MAKE = "({0} := __import__('tests.contract.test_{1}', fromlist=['*']).{1}(subject, {2}, ttl=60))"


@pytest.mark.parametrize("subject", FEW, indirect=True, ids=str)
def test_a_dead_head_of_the_queue_delays_others_by_a_place(subject: Subject, monkeypatch: pytest.MonkeyPatch) -> None:
    """kill -9 who waits for permits, of which it has collected one, or for readers: it held the door as a waiter."""
    timed(monkeypatch, waiter_ttl=PLACE)
    holders: list[Any] = [semaphore(subject, 2, "permits", ttl=60), rwlock(subject, "pages", ttl=60).read()]
    later: list[Any] = [semaphore(subject, 2, "permits", timeout=30), rwlock(subject, "pages", timeout=30).read()]
    for holder in holders:
        assert holder.acquire()
    actors = [Actor(subject) for _ in later]
    with Remote(subject) as remote:
        remote.do(SHORT_PLACES)
        remote.do(MAKE.format("collects", "semaphore", "2, 'permits'"))
        remote.do(MAKE.format("pages", "rwlock", "'pages'"))
        for target in ("collects.acquire(timeout=60, n=2)", "pages.write().acquire(timeout=60)"):
            remote.do(f"__import__('threading').Thread(target=lambda: {target}, daemon=True).start()")
        assert until(lambda: alive(subject) == 5), "the holders, the doors, and what was collected"
        time.sleep(1.5 * PLACE)
        assert alive(subject) == 5
        entering = [actor.start(lock.acquire) for actor, lock in zip(actors, later, strict=True)]
        time.sleep(0.3)
        assert not any(each.done() for each in entering)
        remote.kill()
        killed = time.monotonic()
        assert [each.result(30) for each in entering] == [True, True]
        assert time.monotonic() - killed <= PLACE + 0.5
    for actor, lock in zip(actors, later, strict=True):
        actor.call(lock, "release")
        actor.close()
    for holder in holders:
        holder.release()


@pytest.mark.parametrize("subject", [each for each in SYNC if each.database != "sqlite"], indirect=True, ids=str)
def test_a_hand_over_that_meets_a_strangers_lock(subject: Subject, monkeypatch: pytest.MonkeyPatch) -> None:
    """On the row of the first waiter: that one has the key when the stranger has gone, and was not left asleep."""
    timed(monkeypatch, **SELDOM)
    holder, actor = subject.lock("k", ttl=60), Actor(subject)
    assert holder.acquire()
    sent = listen_in(subject, monkeypatch)
    lock, waiting_ = wait_for(subject, actor, fair=False)  # as if in another process
    services = runtime.current.waiter_services(lock._place.store())
    assert isinstance(services, ProcessServices)
    listener = services._listener
    assert until(lambda: listener is None or listener.ready or listener._unavailable)  # and everybody polls once
    sent.clear()
    runtime.current.wakeups.notify_all()
    assert until(lambda: "queue_status" in dict(sent))
    with observer(subject.database).begin() as stranger:
        stranger.execute(text("SELECT owner FROM lock_waiters FOR UPDATE"))
        holder.release()
        assert subject.row("k")["owner"] is None
    assert waiting_.result(10) is True
    actor.call(lock, "release")
    actor.close()


LEVELS = [
    ("postgresql", "read committed"),
    ("postgresql", "repeatable read"),
    ("postgresql", "serializable"),
    *itertools.product(INNODB, ("read committed", "repeatable read", "serializable")),
    ("sqlite", ""),
]


@pytest.mark.parametrize(("database", "level"), LEVELS, indirect=["database"])
@pytest.mark.parametrize("timeout", [0.0, 60.0])
def test_a_crowd_takes_a_missing_row(database: str, level: str, timeout: float) -> None:
    """At once, under each isolation level: one wins, then the next; no deadlock or duplicate key reaches anybody."""
    options: dict[str, Any] = {"pool_size": 100} if database != "sqlite" else {}
    if database == "postgresql":
        options["connect_args"] = {"options": f"-c default_transaction_isolation={level.replace(' ', chr(92) + ' ')}"}
    elif database in INNODB:
        options["connect_args"] = {"init_command": f"SET SESSION TRANSACTION ISOLATION LEVEL {level.upper()}"}
    engine = create_engine(url(database), **options)
    size = times(30, 100)
    got, failed = list[int](), threading.Semaphore(0)

    def take(number: int) -> None:
        lock = db_lock(engine, "k", timeout=timeout, fair=number % 2 == 0)  # half in a line, half alone
        try:
            with lock:
                got.append(lock.fence)
                for _ in range(0 if timeout else size - 1):
                    assert failed.acquire(timeout=60)
        except LockTimeout:
            failed.release()

    assert together(*(partial(take, number) for number in range(size))) == []
    engine.dispose()
    assert len(got) == (size if timeout else 1)
    assert got == sorted(set(got))
    # A join whose answer came too late leaves a place that ends by its time.
    places = f"SELECT count(*) FROM lock_waiters WHERE expires_at > {LATER[database]}"
    assert until(lambda: run(database, places, seconds=0) == [(0,)], timing.DEFAULT.waiter_ttl)


@pytest.fixture(params=[PostgreSQL, MariaDB, *([MySQL] if MySQL.installed() else [])])
def server(request: pytest.FixtureRequest) -> Iterator[Server]:
    """A server of its own, which a test may restart."""
    server = request.param()
    try:
        server.prepare()
        server.start()
        yield server
    finally:
        server.close()


def test_waits_go_on_when_the_database_restarts(server: Server) -> None:
    """During a hold with its renewals and two waits: the holder keeps its lock, the waiters get it then."""
    if isinstance(server, MariaDB):
        server.create_database("dblock")
        place = f"mysql+pymysql://root@127.0.0.1:{server.port}/dblock?ssl_disabled=true"
    else:
        place = f"postgresql+psycopg://dblock@127.0.0.1:{server.port}/postgres"
    engine = create_engine(place)
    metadata.create_all(engine)
    order, done = list[str](), list[threading.Thread]()

    def wait(name: str) -> None:
        own = create_engine(place)  # or it would stand in a line with the other one
        with db_lock(own, "k", ttl=20, timeout=60):
            order.append(name)
        own.dispose()

    holder = db_lock(engine, "k", ttl=20 if isinstance(server, MySQL) else 6)  # which takes its time to start
    assert holder.acquire()
    for name in ("first", "second"):
        done.append(threading.Thread(target=wait, args=(name,)))
        done[-1].start()
        assert until(lambda: len(_tickets(place)) == len(done))
    for how in ("in order", "crash"):
        import signal

        server.stop(signal.SIGTERM if how == "in order" else signal.SIGKILL)
        time.sleep(0.3)
        server.start()
        assert renews(hold_of(holder))
        assert order == []
    assert holder.verify()
    holder.release()
    for thread in done:
        thread.join(30)
    assert sorted(order) == ["first", "second"]
    engine.dispose()


def _tickets(place: str) -> list[int]:
    engine = create_engine(place)
    try:
        with contextlib.suppress(DBAPIError), engine.connect() as connection:
            return [ticket for (ticket,) in connection.execute(text("SELECT ticket FROM lock_waiters"))]
        return []
    finally:
        engine.dispose()


def test_a_listener_that_is_killed_again_and_again(postgresql: object, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each hand-over between processes arrives within the interval at which waiters poll anyway."""
    timed(monkeypatch, poll_notified=1.0)
    subject = Subject("sqlalchemy", "sync", "postgresql")
    stop = threading.Event()

    def kill() -> None:
        while not stop.wait(0.05):
            run("postgresql", "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE query LIKE 'LISTEN%'")

    killer = threading.Thread(target=kill)
    killer.start()
    slowest, lock = 0.0, db_lock(subject.engine, "k", timeout=60)
    try:
        with Remote(subject) as remote:
            remote.do("(lock := subject.lock('k', timeout=60)).key")
            for _ in range(times(40, 1000)):
                remote.do("lock.acquire()")
                waiting_: list[float] = []
                thread = threading.Thread(target=_time, args=(lock, waiting_))
                thread.start()
                assert until(lambda: waiters(subject) == 1)
                begun = time.monotonic()
                remote.do("lock.release()")
                thread.join(30)
                slowest = max(slowest, waiting_[0] - begun)
    finally:
        stop.set()
        killer.join()
        subject.engine.dispose()
    assert slowest < 1.0 * 1.25 + 0.5


def _time(lock: Any, got: list[float]) -> None:
    assert lock.acquire()
    got.append(time.monotonic())
    lock.release()


@pytest.mark.parametrize("database", DATABASES, indirect=True)
def test_no_wake_up_is_lost(database: str) -> None:
    """Processes with several threads on two keys, whose waiters poll after an hour only."""
    with contextlib.ExitStack() as stack:
        crowd = [
            stack.enter_context(Remote(Subject(variant, "sync", database)))
            for variant in ("sqlalchemy", "django", "sqlalchemy")
        ]
        count = times(30, 11_200)
        for number, remote in enumerate(crowd):
            remote.send(f"contend(subject, {number}, {count})")
        assert [remote.answer(3600) for remote in crowd] == [3 * count] * 3
    assert run(database, WAITERS) == [(0,)]


@pytest.mark.direct
@pytest.mark.parametrize("driver", ["psycopg", "asyncpg"])
def test_a_thousand_waiters_cost_a_listener_and_a_connection(
    postgresql: object, monkeypatch: pytest.MonkeyPatch, driver: str
) -> None:
    """Tasks of one process that want one key: one place in the queue; all are served in the order of their coming."""
    timed(monkeypatch, listen_after=0.0, attention=20.0, linger=20.0)  # nobody passes the first, who tries to take it
    sessions = "SELECT count(*) FROM pg_stat_activity WHERE application_name LIKE '%crowd'"
    name = {"application_name": "crowd"}
    engine = create_async_engine(
        url("postgresql", driver), connect_args=name if driver == "psycopg" else {"server_settings": name}
    )
    subject = Subject("sqlalchemy", "sync", "postgresql")
    holder = subject.lock("k")
    served, seen = list[int](), list[tuple[Any, int, int]]()

    async def one(number: int) -> None:
        async with db_lock(engine, "k", timeout=60):
            served.append(number)

    async def main() -> None:
        async with db_lock(engine, "connects"):  # else the second waiter may open one more, while the first one's opens
            pass
        crowd = [asyncio.create_task(one(number)) for number in range(1000)]
        for _ in range(100):
            await asyncio.sleep(0.1)
            [(count,)] = run("postgresql", sessions)
            seen.append((count, waiters(subject), len(served)))
            if [each[1:] for each in seen[-7:]] == [(1, 0)] * 7:
                break
        await asyncio.to_thread(lambda: thread.submit(holder.release).result())
        await asyncio.gather(*crowd)
        await engine.dispose()

    with ThreadPoolExecutor(1) as thread:
        assert thread.submit(holder.acquire).result()
        asyncio.run(main())
    subject.engine.dispose()
    assert max(count for count, _, _ in seen) == 2
    assert [each[1:] for each in seen[-7:]] == [(1, 0)] * 7
    assert served == list(range(1000))
