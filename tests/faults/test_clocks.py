"""Wrong clocks of applications, and what the caller's own transactions do to the lock (requirements 8, 9 and 10)."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from sqlalchemy import text
from sqlalchemy.orm import Session

from tests.conftest import ALIASES, run
from tests.support.lab import FEW, SYNC, Remote, remaining, until
from tests.support.subjects import Subject

WRONG = {"django": "3600", "sqlalchemy": "-3600"}


@pytest.mark.parametrize("subject", FEW, indirect=True, ids=str)
def test_a_clock_wrong_by_an_hour_changes_nothing(subject: Subject) -> None:
    """Take, hold, renewal, wait, expiry and fences between two processes an hour apart: as with right clocks."""
    with Remote(subject, DBLOCK_TEST_SHIFT=WRONG[subject.variant], TZ="Pacific/Auckland") as other:
        lock = subject.lock("k", ttl=20)
        assert abs(other.do("time.time()") - time.time()) > 3500
        other.do("(lock := subject.lock('k', ttl=20))")
        assert other.do("lock.acquire()")
        assert 18 < other.do("lock.remaining") <= 20
        assert 18 < remaining(subject) < 20.01
        assert (lock.acquire(blocking=False), lock.acquire(timeout=0.2)) == (False, False)
        info = lock.inspect()
        assert info is not None
        assert 0 <= info.age < 2
        assert 18 < info.remaining <= 20
        fence = other.do("lock.fence")
        # Else the release grants the key to the caller whose time was up: its place is deleted in the background.
        assert until(lambda: not run(subject.database, "SELECT 1 FROM lock_waiters"))
        other.do("lock.release()")
        assert lock.acquire(blocking=False)
        assert fence < lock.fence
        began = time.monotonic()
        assert other.do("lock.acquire(timeout=0.3)") is False
        assert 0.25 < time.monotonic() - began < 1
        other.do("setattr(timing, 'DEFAULT', timing.DEFAULT._replace(**SELDOM).checked())")
        other.send("lock.acquire(timeout=60)")
        time.sleep(0.1)
        lock.release()
        assert other.answer() is True, "it was notified: it polls once in ten hours"
        other.do("setattr(timing, 'DEFAULT', timing.Timing())")
        assert other.do("lock.fence") > fence
        assert other.do("lock.verify()")
        other.do("lock.extend(1.5)")
        ends = subject.row("k")["expires_at"]
        assert until(lambda: subject.row("k")["expires_at"] > ends), "it is renewed"
        assert other.do("lock.state") == "held"
        assert lock.acquire(blocking=False) is False
        other.kill()
        began = time.monotonic()
        assert lock.acquire(timeout=15)
        assert time.monotonic() - began < 1.5 + 1
        lock.release()


@contextmanager
def stepping(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let the wall clock of this process jump by up to a day, many times a second."""
    right, done, offset = time.time, threading.Event(), [0.0]

    def step() -> None:
        while not done.wait(0.01):
            offset[0] = random.uniform(-86400, 86400)

    thread = threading.Thread(target=step)
    with monkeypatch.context() as patch:
        patch.setattr(time, "time", lambda: right() + offset[0])
        patch.setattr(time, "time_ns", lambda: int((right() + offset[0]) * 1e9))
        thread.start()
        try:
            yield
        finally:
            done.set()
            thread.join()


@pytest.mark.parametrize("subject", FEW, indirect=True, ids=str)
def test_a_clock_that_is_stepped_changes_nothing(subject: Subject, monkeypatch: pytest.MonkeyPatch) -> None:
    """During take, hold, renewal and wait: held as long as it should be, and waited for as long as was asked."""
    ttl, heard = 0.6, list[Any]()
    lock = subject.lock("k", ttl=ttl, on_lost=lambda *told: heard.append(told))
    rival, refused = subject.lock("k"), list[Any]()

    def wait() -> None:
        began = time.monotonic()
        refused.extend([rival.acquire(timeout=0.8), time.monotonic() - began])
        if subject.variant == "django":
            from django.db import connections

            connections.close_all()

    with stepping(monkeypatch):
        assert lock.acquire()
        thread = threading.Thread(target=wait)
        thread.start()
        end = time.monotonic() + 1.0
        while time.monotonic() < end:
            assert lock.state == "held"
            assert 0 < lock.remaining <= ttl
            time.sleep(0.01)
        assert 0 < remaining(subject) < ttl + 0.01
        thread.join()
        assert refused[0] is False
        assert 0.75 < refused[1] < 1.6
        lock.release()
        assert rival.acquire(timeout=0)
        rival.release()
    assert heard == []


@contextmanager
def callers_transaction(subject: Subject) -> Iterator[Any]:
    """A transaction of the caller's in which something has been read already; yields what runs SQL in it."""
    if subject.variant == "django":
        from django.db import connections, transaction

        with transaction.atomic(ALIASES[subject.database]):
            with connections[ALIASES[subject.database]].cursor() as cursor:
                cursor.execute("SELECT count(*) FROM ledger")
                cursor.fetchall()
                yield cursor.execute
    else:
        with Session(subject.engine) as session, session.begin():
            session.execute(text("SELECT count(*) FROM ledger"))
            yield lambda sql: session.execute(text(sql))


def test_a_lease_taken_in_an_old_transaction_counts_from_now(subject: Subject) -> None:
    """The transaction's own clock stands still since its start; the lease does not end by it."""
    with subject.lock("k"):
        pass  # the row exists
    for key in ("k", "new"):
        with callers_transaction(subject):
            time.sleep(0.5)
            lock = subject.lock(key, ttl=1.0, release="now")
            assert lock.acquire()
            info = lock.inspect()
            assert info is not None
            assert 0.8 < info.remaining <= 1.0
            assert info.age < 0.2
            if (subject.variant, subject.database) != ("django", "sqlite"):  # which joins the transaction
                assert 0.8 < remaining(subject, key) < 1.01
            assert 0.7 < lock.remaining <= 0.9
            lock.extend(2.0)
            info = lock.inspect()
            assert info is not None
            assert 1.8 < info.remaining <= 2.0
            lock.release()


class Rollback(Exception):
    """Ends a transaction."""


@pytest.mark.parametrize("subject", SYNC, indirect=True, ids=str)
def test_the_callers_rollback_does_not_release(subject: Subject) -> None:
    """An independent lock taken inside a transaction that is rolled back is held until its `with` ends."""
    if (subject.variant, subject.database) == ("django", "sqlite"):
        pytest.skip("inside a transaction on SQLite the lock joins it")
    outside = subject.lock("k", ttl=60, release="now")
    rival = Subject("sqlalchemy", "sync", subject.database)
    transaction = callers_transaction(subject)
    sql = transaction.__enter__()
    with outside as lock:
        if subject.database != "sqlite":
            sql("INSERT INTO ledger (n) VALUES (1)")
        row = subject.row("k")
        with pytest.raises(Rollback):
            transaction.__exit__(Rollback, Rollback(), None)
            raise Rollback
        assert subject.row("k") == row
        assert lock.state == "held"
        assert lock.verify()
        threads_see = list[bool]()
        thread = threading.Thread(target=lambda: threads_see.append(rival.lock("k").acquire(blocking=False)))
        thread.start()
        thread.join()
        assert threads_see == [False]
        rival.engine.dispose()
    assert run(subject.database, "SELECT n FROM ledger") == []
    assert subject.row("k")["owner"] is None


@pytest.mark.parametrize("subject", SYNC, indirect=True, ids=str)
def test_a_lock_of_the_transaction_is_kept_until_its_rollback(subject: Subject) -> None:
    """`release="auto"`, left inside the transaction: held until that is rolled back, then free at once."""
    if subject.variant == "sqlalchemy":
        with Session(subject.engine) as session:
            session.begin()
            with subject.lock("k", ttl=60, session=session):
                pass
            assert subject.row("k")["owner"] is not None
            session.rollback()
    elif subject.database == "sqlite":
        pytest.skip("inside a transaction on SQLite the lock joins it")
    else:
        from django.db import transaction

        def transact() -> None:
            with transaction.atomic(ALIASES[subject.database]):
                with subject.lock("k", ttl=60):
                    pass
                assert subject.row("k")["owner"] is not None
                raise Rollback

        with pytest.raises(Rollback):
            transact()
    assert until(lambda: subject.row("k")["owner"] is None, 0.1)
