"""The locks of the family in memory: what waits in vain takes no real time."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from sqlalchemy import create_engine

from dblock.core.errors import LockTimeout, WrongKind
from dblock.testing import Memory, memory
from sqlalchemy_dblock import db_leader, db_locks, db_rwlock, db_semaphore
from tests.support.lab import apart, cycle, there
from tests.testing.test_memory import at_once

ENGINE = create_engine("sqlite://")


@pytest.fixture
def locks() -> Iterator[Memory]:
    """Each test takes far less time than it waits for by the clock of the locks."""
    with at_once(15), memory() as locks:
        yield locks


def test_a_wait_for_permits_of_the_same_thread(locks: Memory) -> None:
    """It ends with its timeout, by the clock of the locks; one without end is refused."""
    sem = db_semaphore(ENGINE, "k", 2, ttl=3600)
    for held, n in ((1, 2), (2, 1)):
        assert sem.acquire()
        begun = locks.clock.now()
        assert sem.acquire(timeout=300, n=n) is False
        assert locks.clock.now() - begun >= 299
        assert len(sem.held) == held
    with pytest.raises(RuntimeError, match="nobody will ever give back"):
        sem.acquire(timeout=None)


def test_min_hold_of_a_permit(locks: Memory) -> None:
    """It is waited for by the clock of the locks."""
    sem = db_semaphore(ENGINE, "k", 1, min_hold=60, timeout=300)
    cycle(sem)
    begun = locks.clock.now()
    cycle(sem)
    assert locks.clock.now() - begun >= 59


def test_a_writer_waits_for_a_reader_whose_thread_has_ended(locks: Memory) -> None:
    apart(db_rwlock(ENGINE, "k").read().acquire)
    with pytest.raises(LockTimeout):
        db_rwlock(ENGINE, "k", timeout=20).write().__enter__()


def test_a_permit_that_another_thread_releases_is_waited_for(locks: Memory) -> None:
    """For real, as that thread is at work."""
    sem = db_semaphore(ENGINE, "k", 1)
    held, go = threading.Event(), threading.Event()

    def work() -> None:
        with sem:
            held.set()
            go.wait(20)

    with ThreadPoolExecutor(1) as pool:
        pool.submit(work)
        assert held.wait(20)
        threading.Timer(0.3, go.set).start()
        assert sem.acquire(timeout=300) is True
        sem.release()


def test_a_busy_semaphore(locks: Memory) -> None:
    """All its permits are in use, until the block ends, or for as long as the lease of somebody who has died."""
    sem = db_semaphore(ENGINE, "k", 3, ttl=3600)
    with locks.busy(sem, label="import"):
        assert sem.acquire(blocking=False) is False
        assert sem.acquire(timeout=300) is False
        assert sem.available() == 0
        assert [info.label for info in sem.holders()] == ["import"] * 3
        with pytest.raises(LockTimeout):
            sem.permit().__enter__()
    assert sem.available() == 3
    with locks.busy(sem, ttl=60):
        begun = locks.clock.now()
        assert sem.acquire(timeout=300, n=2) is True
        assert locks.clock.now() - begun >= 59
    with pytest.raises(RuntimeError, match="cannot make 'k' busy: it is held by"), locks.busy(sem):
        pytest.fail("unreachable")
    assert len(sem.held) == 2
    with pytest.raises(TypeError, match="give busy.. the semaphore itself"), locks.busy("k"):
        pytest.fail("unreachable")


def test_a_busy_read_write_lock(locks: Memory) -> None:
    """A writer has it, or a reader if it is the reader's lock that is busy."""
    rw = db_rwlock(ENGINE, "k")
    for busy in (rw, rw.write(), "k"):
        with locks.busy(busy):
            assert rw.read().acquire(blocking=False) is False
            assert rw.write().acquire(timeout=300) is False
            with pytest.raises(WrongKind):
                db_semaphore(ENGINE, "k").acquire()
        cycle(rw.write())
    with locks.busy(rw.read()):
        assert rw.write().acquire(blocking=False) is False
        with rw.read(), pytest.raises(RuntimeError, match="cannot make 'k' busy: it is held by"), locks.busy("k"):
            pytest.fail("unreachable")
    cycle(rw.write())


def test_a_busy_leader(locks: Memory) -> None:
    """Another candidate leads, until the block ends."""
    leader = db_leader(ENGINE, "mail")
    with locks.busy(leader, label="worker 2"):
        assert leader.campaign(timeout=300) is False
        assert there(leader.leader()).label == "worker 2"
    assert leader.campaign(timeout=0)
    with pytest.raises(RuntimeError, match="cannot make 'mail' busy: it is held by"), locks.busy(leader):
        pytest.fail("unreachable")
    locks.clock.advance(3600)
    assert leader.is_leader
    leader.resign()


def test_a_key_that_is_busy_as_a_plain_lock(locks: Memory) -> None:
    """Another kind of lock on it is refused, as on any key of a lock."""
    semaphore, rw = db_semaphore(ENGINE, "k", 3), db_rwlock(ENGINE, "k")
    with locks.busy("k"):
        for acquire in (semaphore.acquire, rw.read().acquire, rw.write().acquire):
            with pytest.raises(WrongKind, match="'k' is the key of a lock, not of a"):
                acquire()
    with pytest.raises(WrongKind, match="give each its own key"):
        semaphore.acquire()
    with pytest.raises(TypeError, match=r"a busy\(...\) of its own for each key"):
        locks.busy(db_locks(ENGINE, "a", "b"))  # type: ignore[arg-type]
