"""Waiters and holders that die, servers that restart, connections that break: the queue goes on (11, 15, 20, 22)."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import signal
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any

import pytest
from sqlalchemy import create_engine, text
from sqlalchemy.ext.asyncio import create_async_engine

from dblock.core import runtime, timing
from sqlalchemy_dblock import LockTimeout, db_lock
from tests.conftest import DATABASES, INNODB, SELDOM, SERVERS, observer, own_engine, run, timed, url
from tests.contract.test_queue import WAITERS, listen_in, wait_for, waiters
from tests.faults import test_crash
from tests.support.failover import KINDS, locking
from tests.support.lab import FEW, LATER, LONG, SYNC, Remote, cycle, hold_of, renews, times, together, until
from tests.support.subjects import Actor, Subject

pytestmark = pytest.mark.filterwarnings("ignore::ResourceWarning")  # of drivers whose server went away


PLACE = 1.2
"""Seconds for which a place in the queue lasts."""
SHORT_PLACES = f"setattr(timing, 'DEFAULT', timing.DEFAULT._replace(waiter_ttl={PLACE}))"
"""The same in another process."""
DYING = [*((each, False) for each in FEW), *((each, True) for each in (FEW if LONG else FEW[1:2]))]


@pytest.mark.parametrize("subject", FEW, indirect=True, ids=str)
def test_the_next_has_the_key_when_its_holder_was_killed(subject: Subject, actors: Callable[..., Actor]) -> None:
    """kill -9 the holder: within ttl + 1 s."""
    ttl = 0.6
    with Remote(subject) as remote:
        remote.do(f"(lock := subject.lock('k', ttl={ttl})).acquire()")
        actor, lock = actors(subject), subject.lock("k", timeout=60)
        waiting_ = actor.start(lock.acquire)
        assert until(lambda: waiters(subject) == 1)
        remote.kill()
        killed = time.monotonic()
        assert waiting_.result(30) is True
        assert time.monotonic() - killed <= ttl + 1
        actor.call(lock, "release")


@pytest.mark.parametrize(("subject", "with_holder"), DYING, indirect=["subject"], ids=str)
def test_dead_waiters_are_passed_over_together(
    subject: Subject, actors: Callable[..., Actor], monkeypatch: pytest.MonkeyPatch, with_holder: bool
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
        actor, lock = actors(subject), subject.lock("k", timeout=60)
        waiting_ = actor.start(lock.acquire)
        assert until(lambda: waiters(subject) == k + 1)
        remote.kill()
        released = time.monotonic()
        if not with_holder:
            holder.release()
        assert waiting_.result(30) is True
        assert time.monotonic() - released <= PLACE + 0.5
        actor.call(lock, "release")


@pytest.mark.parametrize("subject", [each for each in SYNC if each.database != "sqlite"], indirect=True, ids=str)
def test_a_hand_over_that_meets_a_strangers_lock(
    subject: Subject, actors: Callable[..., Actor], monkeypatch: pytest.MonkeyPatch
) -> None:
    """On the row of the first waiter: that one has the key when the stranger has gone, and was not left asleep."""
    timed(monkeypatch, **SELDOM)
    holder, actor = subject.lock("k", ttl=60), actors(subject)
    assert holder.acquire()
    sent = listen_in(subject, monkeypatch)
    lock, waiting_ = wait_for(subject, actor, fair=False)  # as if in another process
    listener = runtime.current.waiter_services(lock._place.store()).listener
    assert until(lambda: listener is None or listener.ready or listener._rests_until > 1e9)  # and everybody polls once
    sent.clear()
    runtime.current.wakeups.notify_all()
    assert until(lambda: "queue_status" in dict(sent))
    with observer(subject.database).begin() as stranger:
        stranger.execute(text("SELECT owner FROM lock_waiters FOR UPDATE"))
        holder.release()
        assert subject.row("k")["owner"] is None
    assert waiting_.result(10) is True
    actor.call(lock, "release")


LEVELS = [*itertools.product(SERVERS, ("read committed", "repeatable read", "serializable")), ("sqlite", "")]


@pytest.mark.parametrize(("database", "level"), LEVELS, indirect=["database"])
@pytest.mark.parametrize("timeout", [0.0, 60.0])
def test_a_crowd_takes_a_missing_row(database: str, level: str, timeout: float) -> None:
    """At once, under each isolation level: one wins, then the next; no deadlock or duplicate key reaches anybody."""
    options: dict[str, Any] = {"pool_size": 100} if database != "sqlite" else {}
    if database == "postgresql":
        options["connect_args"] = {"options": f"-c default_transaction_isolation={level.replace(' ', chr(92) + ' ')}"}
    elif database in INNODB:
        options["connect_args"] = {"init_command": f"SET SESSION TRANSACTION ISOLATION LEVEL {level.upper()}"}
    engine = own_engine(database, **options)
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
    assert len(got) == (size if timeout else 1)
    assert got == sorted(set(got))
    # A join whose answer came too late leaves a place that ends by its time.
    places = f"SELECT count(*) FROM lock_waiters WHERE expires_at > {LATER[database]}"
    assert until(lambda: run(database, places, seconds=0) == [(0,)], timing.DEFAULT.waiter_ttl)


@pytest.mark.parametrize("kind", KINDS)
def test_waits_go_on_when_the_database_restarts(kind: str) -> None:
    """During a hold with its renewals and two waits: the holder keeps its lock, the waiters get it then."""
    with locking(*test_crash.SERVERS[kind]) as (server, engine), ThreadPoolExecutor(2) as pool:

        def wait() -> None:
            own = create_engine(engine.url)  # or it would stand in a line with the other one
            cycle(db_lock(own, "k", ttl=20, timeout=60))
            own.dispose()

        def places() -> int:
            with engine.connect() as connection:
                return len(connection.execute(text("SELECT ticket FROM lock_waiters")).all())

        holder = db_lock(engine, "k", ttl=20 if kind == "mysql" else 6)  # which takes its time to start
        assert holder.acquire()
        waiting = list[Future[None]]()
        for number in (1, 2):
            waiting.append(pool.submit(wait))
            assert until(lambda: places() == number)  # noqa: B023
        for how in (signal.SIGTERM, signal.SIGKILL):
            server.stop(how)
            time.sleep(0.3)
            server.start()
            assert renews(hold_of(holder))
            assert not any(each.done() for each in waiting)
        assert holder.verify()
        holder.release()
        for each in waiting:
            each.result(30)


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
        with Remote(subject) as remote, ThreadPoolExecutor(1) as pool:
            remote.do("(lock := subject.lock('k', timeout=60)).key")
            for _ in range(times(40, 1000)):
                remote.do("lock.acquire()")
                waiting_ = pool.submit(_time, lock)
                assert until(lambda: waiters(subject) == 1)
                begun = time.monotonic()
                remote.do("lock.release()")
                slowest = max(slowest, waiting_.result(30) - begun)
    finally:
        stop.set()
        killer.join()
    assert slowest < 1.0 * 1.25 + 0.5


def _time(lock: Any) -> float:
    """When it was acquired."""
    with lock:
        return time.monotonic()


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
    assert max(count for count, _, _ in seen) == 2
    assert [each[1:] for each in seen[-7:]] == [(1, 0)] * 7
    assert served == list(range(1000))
