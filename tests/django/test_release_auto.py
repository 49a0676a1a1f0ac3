"""`release="auto"`: a lock that was taken and left inside a transaction is kept until that has ended.

What goes for sessions of SQLAlchemy too: `tests.contract.test_kept`.
"""

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

from dblock import LockTimeout, db_lock, observe
from dblock.core import runtime
from dblock.core.observing.events import Kind
from tests.conftest import SERVERS, each_of, ready, run, timed
from tests.contract.test_guard import Rival, rival
from tests.support.lab import cycle, renews

__all__ = ["rival"]


database = each_of(["sqlite", "postgresql"])
"""A server, and SQLite for the rules of its one writer."""


@pytest.fixture(autouse=True)
def _hurried(monkeypatch: pytest.MonkeyPatch) -> None:
    """On SQLite a try beside a writer, of whom each test has one, takes all of its time."""
    timed(monkeypatch, answer_grace=0.3)


def test_a_min_hold_counts_for_the_transaction_that_keeps_the_key(database: str, alias: str) -> None:
    """What runs once a minute runs once in a transaction; after the `min_hold` the transaction's flow enters again."""

    @db_lock("k", using=alias, timeout=0, min_hold=60, on_busy="skip", otherwise="skipped")
    def send() -> str:
        return "sent"

    with transaction.atomic(alias):
        assert [send(), send()] == ["sent", "skipped"]
        began = time.monotonic()
        cycle(db_lock("short", using=alias, min_hold=0.3))
        for timeout in (0, 0.1):
            assert not db_lock("short", using=alias, timeout=timeout).acquire()
        if alias == "default":  # where a transaction that waits would keep all others from writing
            with pytest.raises(LockTimeout, match="inside a transaction"), db_lock("short", using=alias, timeout=5):
                pass
            time.sleep(0.3)
        for patience in (5, None):
            cycle(db_lock("short", using=alias, timeout=patience))
        assert 0.3 <= time.monotonic() - began < 5
    if alias != "default":  # where the lock was part of the transaction
        assert send() == "skipped"


def test_in_a_notebook(database: str, alias: str, rival: Rival, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whose cells run on an event loop, where Django lets synchronous code use the database if it is told to."""
    monkeypatch.setenv("DJANGO_ALLOW_ASYNC_UNSAFE", "1")

    async def cell() -> None:
        with transaction.atomic(alias):
            with db_lock("k", using=alias) as lock:
                assert lock.verify()
            assert not await asyncio.to_thread(rival.gets_in)
        assert await asyncio.to_thread(rival.gets_in)
        connections[alias].close()

    asyncio.run(cell())


def test_what_was_taken_before_is_given_back_at_once(database: str, alias: str, rival: Rival) -> None:
    """The transaction is younger than the tenure; whatever becomes of it, the key is free."""
    for fails in (False, True):
        lock = db_lock("k", using=alias)
        lock.acquire()
        with contextlib.suppress(ZeroDivisionError), transaction.atomic(alias):
            lock.release()
            assert database == "sqlite" or rival.gets_in()
            _ = 1 / (not fails)
        assert rival.gets_in()


@pytest.mark.parametrize("database", ["postgresql"], indirect=True)
def test_it_is_renewed_until_then(database: str, alias: str, rival: Rival) -> None:
    """However long the transaction takes after the block."""
    with transaction.atomic(alias):
        cycle(db_lock("k", using=alias, ttl=2))
        [hold] = runtime.current.watchdog._holds
        assert renews(hold, soon=False)
        assert not rival.gets_in()
    assert rival.gets_in()


def test_a_closed_connection_ends_the_transaction(database: str, alias: str, rival: Rival) -> None:
    """And with it the reason to keep the lock."""
    with pytest.raises((ZeroDivisionError, DatabaseError, InterfaceError)), transaction.atomic(alias):
        cycle(db_lock("k", using=alias))
        connections[alias].close()
        raise ZeroDivisionError
    assert rival.gets_in()


def test_the_key_is_free_for_on_commit(database: str, alias: str, rival: Rival) -> None:
    """Hooks run after the commit; one that takes the lock itself finds it free, and so does everybody."""
    seen: list[object] = []

    def hook() -> None:
        seen.append(rival.gets_in())
        with db_lock("k", using=alias, timeout=5) as lock:
            seen.append(lock.count)

    with transaction.atomic(alias):
        transaction.on_commit(hook, using=alias)
        cycle(db_lock("k", using=alias))
    assert seen == [True, 1]
    assert rival.gets_in()


def test_it_is_told_when_that_has_ended(database: str, alias: str) -> None:
    """Once, with the transaction that keeps it, and not before: by signals, metrics and the history alike."""
    told = list[tuple[str, int]]()
    stop = observe(lambda event: told.append((str(event.kind), event.depth)), Kind.ACQUIRED, Kind.RELEASED)
    for fails in (False, True):
        with contextlib.suppress(ZeroDivisionError), transaction.atomic(alias):
            for _ in range(2):
                cycle(db_lock("k", using=alias))
            assert told == [("acquired", 1), ("acquired", 2), ("released", 1)]
            _ = 1 / 0 if fails else None
        assert told[3:] == [("released", 0)]
        told.clear()
    stop()


@pytest.mark.parametrize("database", ["postgresql"], indirect=True)
def test_transactions_of_two_databases(request: pytest.FixtureRequest, rival: Rival) -> None:
    """Kept until the last of those that were open has ended, whichever that is."""
    for name in SERVERS:
        ready(request, name)
    for first, second in itertools.permutations(SERVERS, 2):
        with transaction.atomic(first):
            with transaction.atomic(second):
                cycle(db_lock("k", using="postgresql"))
                assert not rival.gets_in()
            assert not rival.gets_in()
        assert rival.gets_in()
    for name in SERVERS:
        connections[name].close()


@pytest.mark.parametrize("database", ["postgresql"], indirect=True)
def test_another_threads_transaction_does_not_count(database: str, alias: str, rival: Rival) -> None:
    """A lock is kept by transactions of its own thread only."""
    block = transaction.atomic(alias)
    with ThreadPoolExecutor(1) as elsewhere:
        elsewhere.submit(block.__enter__).result()
        cycle(db_lock("k", using=alias))
        assert rival.gets_in()
        elsewhere.submit(block.__exit__, None, None, None).result()
        elsewhere.submit(connections.close_all).result()


# -- Django's TestCase


def test_the_blocks_of_a_test_case_do_not_count(database: str, alias: str, rival: Rival) -> None:
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
                cycle(lock)
                seen.append(lock.locked())
            seen.append(lock.locked())
            with pytest.raises(ZeroDivisionError), transaction.atomic(alias):
                cycle(lock)
                raise ZeroDivisionError
            seen.append(lock.locked())
            if database != "sqlite":
                seen.append(rival.gets_in())

    result = unittest.TestResult()
    unittest.TestSuite([Case("test")]).run(result)
    assert result.wasSuccessful(), result.errors + result.failures
    assert seen == [False, True, False, True, False, False, *([True] if database != "sqlite" else [])]
    assert not run(database, "SELECT lock_key FROM locks WHERE owner IS NOT NULL")
