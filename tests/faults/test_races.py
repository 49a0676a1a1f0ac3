"""`acquire` broken off at any moment, and `release` against renewal (requirements 12 and 13)."""

from __future__ import annotations

import asyncio
import random
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from dblock.core import runtime
from dblock.core.errors import LockLost, LockStoreError
from dblock.core.runtime import current_flow
from sqlalchemy_dblock import attach
from tests.conftest import run
from tests.faults.conftest import NOISY
from tests.support.lab import FEW, alive, hold_of, keeper_rests, no_thread, remaining, renews, threads, times, until
from tests.support.strikes import play
from tests.support.subjects import MATRIX, Actor, Subject

ASYNC = [cell for cell in MATRIX if cell.face == "async" and cell.driver not in {"", "asyncmy"}]

pytestmark = [pytest.mark.usefixtures("pruned_soon"), *NOISY]


def kept() -> list[str]:
    """The keys that the watchdog of this process renews."""
    return [hold.tenure.key for hold in list(runtime.current.watchdog._holds)]


def idle() -> bool:
    """No thread of ours is left."""
    return not threads()


def test_an_acquire_that_times_out_leaves_nothing(subject: Subject, actors: Callable[..., Actor]) -> None:
    """A wait of random length on a key that becomes free at a random moment: True and held, or False and nothing."""
    run(subject.database, "DELETE FROM locks")
    chance, outcomes, done = random.Random(), list[bool](), threading.Event()

    def churn() -> None:
        other = subject.lock("k", ttl=30)
        while not done.is_set():
            with other:
                time.sleep(chance.uniform(0.01, 0.06))
            time.sleep(chance.uniform(0, 0.01))

    churning = actors(subject).start(churn)
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
        churning.result(20)
    assert set(outcomes) == {True, False}
    assert kept() == []
    assert until(lambda: alive(subject) == 0, 4)  # a take whose answer came too late ends after one ttl


async def releases_win(subject: Subject, count: int) -> None:
    """The renewal is due at the moment of each release: nothing is extended afterwards, and nothing goes on."""
    chance, rows, watchdog = random.Random(), dict[str, Any](), runtime.current.watchdog
    for n in range(count):
        lock = subject.lock(f"k{n % 100}", ttl=30)
        assert await subject.ask(lock, "acquire")
        hold = hold_of(lock)
        hold.lease.due = 0.0
        watchdog.wake()
        await subject.pause(chance.uniform(0, 0.003))
        await subject.ask(lock, "release")
        assert hold not in watchdog._holds
        if n >= count - 20:
            rows[lock.key] = subject.row(lock.key)
            assert rows[lock.key]["owner"] is None
    deadline = time.monotonic() + 2
    while not all(keeper_rests(each) for each in list(watchdog._keepers.values())):
        assert time.monotonic() < deadline
        await subject.pause(0.01)
    for key, row in rows.items():
        assert subject.row(key) == row
    assert alive(subject) == 0
    assert kept() == []


def test_a_release_against_a_renewal_wins(subject: Subject) -> None:
    play(releases_win(subject, times(80, 10_000)))
    assert until(idle, 20), threads()


@pytest.mark.parametrize("subject", ASYNC, indirect=True, ids=str)
def test_an_async_release_against_a_renewal_wins(subject: Subject) -> None:
    """On an event loop, where the renewals are tasks of it."""

    async def main() -> None:
        await releases_win(subject, times(40, 10_000))
        await subject.engine.dispose()

    asyncio.run(main())
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


def test_a_watchdog_that_could_not_start_starts_later(sqlite: object, monkeypatch: pytest.MonkeyPatch) -> None:
    """No thread to be had at one take: the key is given back; the next takes are renewed."""
    subject = Subject("sqlalchemy", "sync", "sqlite")
    assert until(idle, 20)
    lock = subject.lock("k", ttl=2)
    with monkeypatch.context() as patch:
        no_thread(patch, lambda name: name == "dblock watchdog")
        with pytest.raises(LockStoreError, match="'k'.*can't start new thread"):
            lock.acquire()
        assert lock.state is None
        assert not lock.locked()
        token = subject.lock("k", renew=False)
        assert token.acquire()
        with pytest.raises(LockStoreError, match="'k'.*can't start new thread"):
            attach(subject.engine, token.detach())
        assert not lock.locked()
    with lock:
        assert renews(hold_of(lock), soon=False)
    assert until(idle, 20)
