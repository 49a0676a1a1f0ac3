"""`release="auto"`: a lock that was taken and left inside a transaction is kept until that has ended."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import time
import unittest
from concurrent.futures import ThreadPoolExecutor

import pytest
from django.db import DatabaseError, InterfaceError, connections, transaction
from django.test import TestCase

from dblock import LockNotHeld, LockStoreError, LockTimeout, db_lock, observe
from dblock.core import runtime
from dblock.core.observing.events import Kind
from tests.conftest import SERVERS, ready, run, timed
from tests.support.lab import renews


@pytest.fixture(params=["sqlite", "postgresql"])
def database(request: pytest.FixtureRequest) -> str:
    """A server, and SQLite for the rules of its one writer."""
    return ready(request, request.param)


@pytest.fixture(autouse=True)
def _hurried(monkeypatch: pytest.MonkeyPatch) -> None:
    """On SQLite a try beside a writer, of whom each test has one, takes all of its time."""
    timed(monkeypatch, answer_grace=0.3)


def others_get_in(alias: str, key: str = "k") -> bool:
    """Whether another thread gets the key without waiting. On SQLite the writer leaves it no room."""

    def attempt() -> bool:
        lock = db_lock(key, using=alias)
        try:
            if acquired := lock.acquire(blocking=False):
                lock.release()
        except LockStoreError:
            if alias != "default":
                raise
            return False
        finally:
            connections.close_all()
        return acquired

    with ThreadPoolExecutor(1) as elsewhere:
        return elsewhere.submit(attempt).result()


def test_it_is_kept_until_the_commit(database: str, alias: str) -> None:
    """Others come in at once afterwards, not before; for this thread it is over when its block is left."""
    lock = db_lock("k", using=alias)
    with transaction.atomic(alias):
        with lock:
            assert lock.verify()
        assert lock.state is None
        with pytest.raises(LockNotHeld):
            lock.release()
        assert not others_get_in(alias)
        with transaction.atomic(alias):
            pass
        assert not others_get_in(alias)
    assert others_get_in(alias)


def test_a_min_hold_counts_for_the_transaction_that_keeps_the_key(database: str, alias: str) -> None:
    """What runs once a minute runs once in a transaction; after the `min_hold` the transaction's flow enters again."""

    @db_lock("k", using=alias, timeout=0, min_hold=60, on_busy="skip", otherwise="skipped")
    def send() -> str:
        return "sent"

    with transaction.atomic(alias):
        assert [send(), send()] == ["sent", "skipped"]
        began = time.monotonic()
        with db_lock("short", using=alias, min_hold=0.3):
            pass
        for timeout in (0, 0.1):
            assert not db_lock("short", using=alias, timeout=timeout).acquire()
        if alias == "default":  # where a transaction that waits would keep all others from writing
            with pytest.raises(LockTimeout, match="inside a transaction"), db_lock("short", using=alias, timeout=5):
                pass
            time.sleep(0.3)
        for patience in (5, None):
            with db_lock("short", using=alias, timeout=patience):
                pass
        assert 0.3 <= time.monotonic() - began < 5
    if alias != "default":  # where the lock was part of the transaction
        assert send() == "skipped"


def test_it_is_kept_until_the_rollback(database: str, alias: str) -> None:
    """Whether an exception leaves the block, or somebody asked for it."""
    with pytest.raises(ZeroDivisionError), transaction.atomic(alias):
        with db_lock("k", using=alias):
            pass
        assert not others_get_in(alias)
        raise ZeroDivisionError
    assert others_get_in(alias)
    with transaction.atomic(alias):
        with db_lock("k", using=alias):
            pass
        transaction.set_rollback(True, using=alias)
        assert not others_get_in(alias)
    assert others_get_in(alias)
    with pytest.raises(ZeroDivisionError), transaction.atomic(alias), db_lock("k", using=alias):
        raise ZeroDivisionError
    assert others_get_in(alias)


def test_in_a_notebook(database: str, alias: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whose cells run on an event loop, where Django lets synchronous code use the database if it is told to."""
    monkeypatch.setenv("DJANGO_ALLOW_ASYNC_UNSAFE", "1")

    async def cell() -> None:
        with transaction.atomic(alias):
            with db_lock("k", using=alias) as lock:
                assert lock.verify()
            assert not others_get_in(alias)
        assert others_get_in(alias)
        connections[alias].close()

    asyncio.run(cell())


def test_an_inner_rollback_is_not_the_end(database: str, alias: str) -> None:
    """The lock was taken inside a savepoint that is undone; the outer block is still open."""
    with transaction.atomic(alias):
        with pytest.raises(ZeroDivisionError), transaction.atomic(alias):
            with db_lock("k", using=alias):
                pass
            raise ZeroDivisionError
        assert not others_get_in(alias)
    assert others_get_in(alias)


def test_what_was_taken_before_is_given_back_at_once(database: str, alias: str) -> None:
    """The transaction is younger than the tenure; whatever becomes of it, the key is free."""
    for fails in (False, True):
        lock = db_lock("k", using=alias)
        lock.acquire()
        try:
            with transaction.atomic(alias):
                lock.release()
                if database != "sqlite":
                    assert others_get_in(alias)
                if fails:
                    raise ZeroDivisionError
        except ZeroDivisionError:
            pass
        assert others_get_in(alias)


def test_release_now(database: str, alias: str) -> None:
    """Given back without regard to transactions; but what was left to one stays that, though it is entered again."""
    lock = db_lock("k", using=alias, release="now")
    with transaction.atomic(alias):
        with lock:
            pass
        assert not lock.locked()
        if database != "sqlite":
            assert others_get_in(alias)
        with db_lock("k", using=alias):
            pass
        with lock:
            pass
        assert lock.locked()
        assert not others_get_in(alias)
    assert others_get_in(alias)


def test_the_same_transaction_enters_again(database: str, alias: str) -> None:
    """The same tenure, with the same fence, is still given back at the end."""
    fences = []
    with transaction.atomic(alias):
        for _ in range(3):
            with db_lock("k", using=alias) as lock:
                fences.append(lock.fence)
                assert lock.count == 1
                with db_lock("k", using=alias) as inner:
                    assert (inner.fence, inner.count) == (lock.fence, 2)
            assert not others_get_in(alias)
    assert len(set(fences)) == 1
    assert others_get_in(alias)


def test_what_is_held_beyond_the_transaction_stays_held(database: str, alias: str) -> None:
    """Left once and entered again inside; the last release, outside, is the one that counts."""
    lock = db_lock("k", using=alias)
    with transaction.atomic(alias):
        with lock:
            pass
        lock.acquire()
    assert lock.verify()
    assert not others_get_in(alias)
    lock.release()
    assert others_get_in(alias)


@pytest.mark.parametrize("database", ["postgresql"], indirect=True)
def test_it_is_renewed_until_then(database: str, alias: str) -> None:
    """However long the transaction takes after the block."""
    with transaction.atomic(alias):
        with db_lock("k", using=alias, ttl=2):
            pass
        [hold] = runtime.current.watchdog._holds
        assert renews(hold, soon=False)
        assert not others_get_in(alias)
    assert others_get_in(alias)


def test_the_next_transaction_is_another_one(database: str, alias: str) -> None:
    """Nothing of the first is left on the connection or in the thread."""
    lock = db_lock("k", using=alias)
    with transaction.atomic(alias), lock:
        first = lock.fence
    lock.acquire()
    assert lock.fence != first
    with transaction.atomic(alias):
        pass
    assert lock.verify()
    lock.release()
    with transaction.atomic(alias), lock:
        assert not others_get_in(alias)
    assert others_get_in(alias)


def test_a_closed_connection_ends_the_transaction(database: str, alias: str) -> None:
    """And with it the reason to keep the lock."""
    with pytest.raises((ZeroDivisionError, DatabaseError, InterfaceError)), transaction.atomic(alias):
        with db_lock("k", using=alias):
            pass
        connections[alias].close()
        raise ZeroDivisionError
    assert others_get_in(alias)


def test_the_key_is_free_for_on_commit(database: str, alias: str) -> None:
    """Hooks run after the commit; one that takes the lock itself finds it free, and so does everybody."""
    seen: list[object] = []

    def hook() -> None:
        seen.append(others_get_in(alias))
        with db_lock("k", using=alias, timeout=5) as lock:
            seen.append(lock.count)

    with transaction.atomic(alias):
        transaction.on_commit(hook, using=alias)
        with db_lock("k", using=alias):
            pass
    assert seen == [True, 1]
    assert others_get_in(alias)


def test_it_is_told_when_that_has_ended(database: str, alias: str) -> None:
    """Once, with the transaction that keeps it, and not before: by signals, metrics and the history alike."""
    told = list[tuple[str, int]]()
    stop = observe(lambda event: told.append((str(event.kind), event.depth)), Kind.ACQUIRED, Kind.RELEASED)
    for fails in (False, True):
        with contextlib.suppress(ZeroDivisionError), transaction.atomic(alias):
            for _ in range(2):
                with db_lock("k", using=alias):
                    pass
            assert told == [("acquired", 1), ("acquired", 2), ("released", 1)]
            _ = 1 / 0 if fails else None
        assert told[3:] == [("released", 0)]
        told.clear()
    stop()


def test_transactions_of_two_databases(request: pytest.FixtureRequest) -> None:
    """Kept until the last of those that were open has ended, whichever that is."""
    for name in SERVERS:
        ready(request, name)
    for first, second in itertools.permutations(SERVERS, 2):
        with transaction.atomic(first):
            with transaction.atomic(second):
                with db_lock("k", using="postgresql"):
                    pass
                assert not others_get_in("postgresql")
            assert not others_get_in("postgresql")
        assert others_get_in("postgresql")
    for name in SERVERS:
        connections[name].close()


@pytest.mark.parametrize("database", ["postgresql"], indirect=True)
def test_another_threads_transaction_does_not_count(database: str, alias: str) -> None:
    """A lock is kept by transactions of its own thread only."""
    block = transaction.atomic(alias)
    with ThreadPoolExecutor(1) as elsewhere:
        elsewhere.submit(block.__enter__).result()
        with db_lock("k", using=alias):
            pass
        assert others_get_in(alias)
        elsewhere.submit(block.__exit__, None, None, None).result()
        elsewhere.submit(connections.close_all).result()


# -- Django's TestCase


def test_the_blocks_of_a_test_case_do_not_count(database: str, alias: str) -> None:
    """A lock left inside a test is given back at once; inside an atomic() of the test's, at the end of that."""
    seen: list[object] = []

    class Case(TestCase):
        databases = {alias}  # noqa: RUF012

        @classmethod
        def setUpTestData(cls) -> None:
            with db_lock("k", using=alias) as lock:
                pass
            seen.append(lock.locked())

        def test(self) -> None:
            lock = db_lock("k", using=alias)
            assert connections[alias].in_atomic_block
            with lock:
                seen.append(lock.verify())
            seen.append(lock.locked())
            with transaction.atomic(alias):
                with lock:
                    pass
                seen.append(lock.locked())
            seen.append(lock.locked())
            with pytest.raises(ZeroDivisionError), transaction.atomic(alias):
                with lock:
                    pass
                raise ZeroDivisionError
            seen.append(lock.locked())
            if database != "sqlite":
                seen.append(others_get_in(alias))

    result = unittest.TestResult()
    unittest.TestSuite([Case("test")]).run(result)
    assert not result.errors, result.errors[0][1]
    assert not result.failures, result.failures[0][1]
    assert result.testsRun == 1
    assert seen == [False, True, False, True, False, False, *([True] if database != "sqlite" else [])]
    assert not run(database, "SELECT lock_key FROM locks WHERE owner IS NOT NULL")
