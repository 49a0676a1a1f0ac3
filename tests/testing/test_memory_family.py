"""The locks of the family in memory: what waits in vain takes no real time."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
from sqlalchemy import create_engine

from dblock.core.errors import LockTimeout, WrongKind
from dblock.testing import memory
from sqlalchemy_dblock import db_leader, db_locks, db_rwlock, db_semaphore

ENGINE = create_engine("sqlite://")


def briefly(function: Callable[[], Any]) -> Any:
    """Its result, in far less time than it waits for by the clock of the locks."""
    begun = time.monotonic()
    result = function()
    assert time.monotonic() - begun < 20
    return result


def test_a_wait_for_permits_of_the_same_thread() -> None:
    """It ends with its timeout, by the clock of the locks; one without end is refused."""
    with memory() as locks:
        sem = db_semaphore(ENGINE, "k", 2, ttl=3600)
        for held, n in ((1, 2), (2, 1)):
            assert sem.acquire()
            begun = locks.clock.now()
            assert briefly(partial(sem.acquire, timeout=300, n=n)) is False
            assert locks.clock.now() - begun >= 299
            assert len(sem.held) == held
        with pytest.raises(RuntimeError, match="nobody will ever give back"):
            briefly(lambda: sem.acquire(timeout=None))


def test_min_hold_of_a_permit() -> None:
    """It is waited for by the clock of the locks."""
    with memory() as locks:
        sem = db_semaphore(ENGINE, "k", 1, min_hold=60, timeout=300)
        with sem:
            pass
        begun = locks.clock.now()

        def again() -> None:
            with sem:
                pass

        briefly(again)
        assert locks.clock.now() - begun >= 59


def test_a_writer_waits_for_a_reader_whose_thread_has_ended() -> None:
    with memory():
        reading = threading.Thread(target=db_rwlock(ENGINE, "k").read().acquire)
        reading.start()
        reading.join()
        with pytest.raises(LockTimeout):
            briefly(db_rwlock(ENGINE, "k", timeout=20).write().__enter__)


def test_a_permit_that_another_thread_releases_is_waited_for() -> None:
    """For real, as that thread is at work."""
    with memory():
        sem = db_semaphore(ENGINE, "k", 1)
        held, go = threading.Event(), threading.Event()

        def work() -> None:
            with sem:
                held.set()
                go.wait(20)

        working = threading.Thread(target=work)
        working.start()
        assert held.wait(20)
        threading.Timer(0.3, go.set).start()
        assert sem.acquire(timeout=300) is True
        sem.release()
        working.join()


def test_a_busy_semaphore() -> None:
    """All its permits are in use, until the block ends, or for as long as the lease of somebody who has died."""
    with memory() as locks:
        sem = db_semaphore(ENGINE, "k", 3, ttl=3600)
        with locks.busy(sem, label="import"):
            assert sem.acquire(blocking=False) is False
            assert briefly(partial(sem.acquire, timeout=300)) is False
            assert sem.available() == 0
            assert [info.label for info in sem.holders()] == ["import"] * 3
            with pytest.raises(LockTimeout):
                briefly(sem.permit().__enter__)
        assert sem.available() == 3
        with locks.busy(sem, ttl=60):
            begun = locks.clock.now()
            assert briefly(partial(sem.acquire, timeout=300, n=2)) is True
            assert locks.clock.now() - begun >= 59
        with pytest.raises(RuntimeError, match="cannot make 'k' busy: it is held by"), locks.busy(sem):
            pytest.fail("unreachable")
        assert len(sem.held) == 2
        with pytest.raises(TypeError, match="give busy.. the semaphore itself"), locks.busy("k"):
            pytest.fail("unreachable")


def test_a_busy_read_write_lock() -> None:
    """A writer has it, or a reader if it is the reader's lock that is busy."""
    with memory() as locks:
        rw = db_rwlock(ENGINE, "k")
        for busy in (rw, rw.write(), "k"):
            with locks.busy(busy):
                assert rw.read().acquire(blocking=False) is False
                assert briefly(partial(rw.write().acquire, timeout=300)) is False
                with pytest.raises(WrongKind):
                    db_semaphore(ENGINE, "k").acquire()
            with rw.write():
                pass
        with locks.busy(rw.read()):
            assert rw.write().acquire(blocking=False) is False
            with rw.read(), pytest.raises(RuntimeError, match="cannot make 'k' busy: it is held by"), locks.busy("k"):
                pytest.fail("unreachable")
        with rw.write():
            pass


def test_a_busy_leader() -> None:
    """Another candidate leads, until the block ends."""
    with memory() as locks:
        leader = db_leader(ENGINE, "mail")
        with locks.busy(leader, label="worker 2"):
            assert briefly(partial(leader.campaign, timeout=300)) is False
            found = leader.leader()
            assert found is not None
            assert found.label == "worker 2"
        assert leader.campaign(timeout=0)
        with pytest.raises(RuntimeError, match="cannot make 'mail' busy: it is held by"), locks.busy(leader):
            pytest.fail("unreachable")
        locks.clock.advance(3600)
        assert leader.is_leader
        leader.resign()


def test_a_key_that_is_busy_as_a_plain_lock() -> None:
    """Another kind of lock on it is refused, as on any key of a lock."""
    semaphore, rw = db_semaphore(ENGINE, "k", 3), db_rwlock(ENGINE, "k")
    with memory() as locks:
        with locks.busy("k"):
            for acquire in (semaphore.acquire, rw.read().acquire, rw.write().acquire):
                with pytest.raises(WrongKind, match="'k' is the key of a lock, not of a"):
                    acquire()
        with pytest.raises(WrongKind, match="give each its own key"):
            semaphore.acquire()
        with pytest.raises(TypeError, match=r"a busy\(...\) of its own for each key"):
            locks.busy(db_locks(ENGINE, "a", "b"))  # type: ignore[arg-type]
