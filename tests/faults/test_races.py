"""`acquire` broken off at any moment, and `release` against renewal (requirements 12 and 13)."""

from __future__ import annotations

import asyncio
import random
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
from sqlalchemy.ext.asyncio import create_async_engine

from dblock.core import runtime
from dblock.core.errors import LockLost, LockStoreError
from dblock.core.runtime import current_flow
from sqlalchemy_dblock import attach, db_lock
from tests.conftest import run, url
from tests.support.lab import FEW, alive, hold_of, keeper_rests, remaining, renews, threads, times, until
from tests.support.subjects import MATRIX, Subject

ASYNC = [(cell.database, cell.driver) for cell in MATRIX if cell.driver not in {"", "asyncmy"}]

pytestmark = [
    pytest.mark.usefixtures("pruned_soon"),
    pytest.mark.filterwarnings("ignore::ResourceWarning"),  # of drivers that were interrupted while they connected
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]


def kept() -> list[str]:
    """The keys that the watchdog of this process renews."""
    return [hold.tenure.key for hold in list(runtime.current.watchdog._holds)]


def idle() -> bool:
    """No thread of ours is left."""
    return not threads()


def test_an_acquire_that_times_out_leaves_nothing(subject: Subject) -> None:
    """A wait of random length on a key that becomes free at a random moment: True and held, or False and nothing."""
    run(subject.database, "DELETE FROM locks")
    chance, outcomes, done = random.Random(), list[bool](), threading.Event()

    def churn() -> None:
        other = subject.lock("k", ttl=30)
        while not done.is_set():
            with other:
                time.sleep(chance.uniform(0.01, 0.06))
            time.sleep(chance.uniform(0, 0.01))
        if subject.variant == "django":
            from django.db import connections

            connections.close_all()

    thread = threading.Thread(target=churn)
    thread.start()
    try:
        for _ in range(times(30, 1000)):
            lock = subject.lock("k", ttl=3)
            if chance.random() < 0.7:
                until(lock.locked)  # the other one's turn has come
            try:
                outcomes.append(lock.acquire(timeout=chance.uniform(0, 0.05)))
            except LockStoreError:  # no answer in so short a time
                outcomes.append(False)
            assert outcomes[-1] == (lock.state == "held")
            if outcomes[-1]:
                assert lock.verify()
                lock.release()
            assert not current_flow().holds
    finally:
        done.set()
        thread.join()
    assert set(outcomes) == {True, False}
    assert kept() == []
    assert until(lambda: alive(subject) == 0, 4)  # a take whose answer came too late ends after one ttl


def test_a_release_against_a_renewal_wins(subject: Subject) -> None:
    """The renewal is due at the moment of the release: nothing is extended afterwards, and nothing goes on."""
    chance, rows = random.Random(), dict[str, Any]()
    count = times(80, 10_000)
    for n in range(count):
        lock = subject.lock(f"k{n % 100}", ttl=30)
        assert lock.acquire()
        hold = hold_of(lock)
        hold.lease.due = 0.0
        runtime.current.watchdog.wake()
        time.sleep(chance.uniform(0, 0.003))
        lock.release()
        assert hold not in runtime.current.watchdog._holds
        if n >= count - 20:
            rows[lock.key] = subject.row(lock.key)
            assert rows[lock.key]["owner"] is None
    assert until(lambda: all(keeper_rests(each) for each in runtime.current.watchdog._keepers.values()), 2)
    for key, row in rows.items():
        assert subject.row(key) == row
    assert alive(subject) == 0
    assert kept() == []
    assert until(idle, 20), threads()


@pytest.mark.parametrize("subject", FEW, indirect=True, ids=str)
def test_a_successor_is_not_renewed_by_its_predecessor(subject: Subject) -> None:
    """Released against its renewal and taken at once for a short time by a stranger: that lease ends on time."""
    chance = random.Random()
    stranger = subject.lock("k", ttl=0.3, renew=False)
    for _ in range(times(3, 100)):
        lock = subject.lock("k", ttl=30)
        assert lock.acquire()
        hold_of(lock).lease.due = 0.0
        runtime.current.watchdog.wake()
        time.sleep(chance.uniform(0, 0.003))
        lock.release()
        assert stranger.acquire()
        time.sleep(0.05)
        assert remaining(subject) <= 0.26
        time.sleep(0.25)
        with pytest.raises(LockLost):
            stranger.release()


@pytest.mark.parametrize(("database", "driver"), ASYNC, indirect=["database"])
def test_an_async_release_against_a_renewal_wins(database: str, driver: str) -> None:
    """The same on an event loop, where the renewals are tasks of it."""
    subject, chance = Subject("sqlalchemy", "sync", database), random.Random()
    engine = create_async_engine(url(database, driver))

    async def main() -> None:
        for n in range(times(40, 10_000)):
            lock = db_lock(engine, f"k{n % 20}", ttl=30)
            assert await lock.acquire()
            hold = hold_of(lock)
            hold.lease.due = 0.0
            runtime.current.watchdog.wake()
            await asyncio.sleep(chance.uniform(0, 0.003))
            await lock.release()
            assert hold not in runtime.current.watchdog._holds
        rows = run(database, "SELECT * FROM locks ORDER BY lock_key")
        await asyncio.sleep(0.2)
        assert not any(keeper.tasks for keeper in runtime.current.watchdog._keepers.values())
        assert run(database, "SELECT * FROM locks ORDER BY lock_key") == rows
        await engine.dispose()

    asyncio.run(main())
    assert alive(subject) == 0
    assert kept() == []
    assert until(idle, 20), threads()


def test_a_watchdog_that_could_not_start_starts_later(sqlite: object, monkeypatch: pytest.MonkeyPatch) -> None:
    """No thread to be had at one take: the key is given back; the next takes are renewed."""
    subject = Subject("sqlalchemy", "sync", "sqlite")
    assert until(idle, 20)
    start: Callable[[threading.Thread], None] = threading.Thread.start

    def fail(thread: threading.Thread) -> None:
        if thread.name == "dblock watchdog":
            raise RuntimeError("can't start new thread")
        start(thread)

    lock = subject.lock("k", ttl=0.6)
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", fail)
        with pytest.raises(LockStoreError, match="'k'.*can't start new thread"):
            lock.acquire()
        assert lock.state is None
        assert not lock.locked()
        token = subject.lock("k", renew=False)
        assert token.acquire()
        with pytest.raises(LockStoreError, match="'k'.*can't start new thread"):
            attach(subject.engine, token.detach())
        assert not lock.locked()
    try:
        assert subject.lock("other", ttl=2).acquire()
        assert renews(hold_of(subject.lock("other")), soon=False)
        assert subject.lock("other").state == "held"
        subject.lock("other").release()
    finally:
        if runtime.current.watchdog._thread is not None and not runtime.current.watchdog._thread.is_alive():
            runtime.current.watchdog._thread = None  # or the tests that follow would fail too
    assert until(idle, 20)
    subject.engine.dispose()
