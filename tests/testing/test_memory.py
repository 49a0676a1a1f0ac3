"""Locks in memory: the protocol as it is, a clock that the test moves, waits that cost nothing."""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from importlib import import_module
from typing import Any

import pytest
from django.db import connections, transaction
from sqlalchemy import create_engine
from sqlalchemy.engine import Engine
from sqlalchemy.ext.asyncio import create_async_engine

import dblock
import sqlalchemy_dblock
from dblock import LockLost, LockNotHeld, LockStoreError, LockTimeout, testing
from dblock.core import runtime
from dblock.core.errors import Reason
from dblock.core.runtime import Runtime
from tests.conftest import own_engine
from tests.support.lab import apart, cycle, in_child, there

NOWHERE = "/nonexistent/never.sqlite3"


@pytest.fixture
def engine() -> Engine:
    """Of a database that is not there."""
    return create_engine(f"sqlite:///{NOWHERE}")


@pytest.fixture
def locks() -> Iterator[testing.Memory]:
    with testing.memory() as memory:
        yield memory


Make = Callable[..., Any]


@pytest.fixture(params=["django", "sqlalchemy"])
def db_lock(request: pytest.FixtureRequest, engine: Engine) -> Make:
    """That of either face, both over databases that are not there."""
    if request.param == "sqlalchemy":
        return lambda key, **options: sqlalchemy_dblock.db_lock(engine, key, **options)
    return lambda key, **options: dblock.db_lock(key, using="postgresql", **options)


def hold(lock: Any) -> int:
    with lock:
        return int(lock.fence)


@contextlib.contextmanager
def at_once(seconds: float = 5) -> Iterator[None]:
    """Nobody waits for real: far below the ten seconds of the wait, far above what a busy machine needs."""
    before = time.monotonic()
    yield
    assert time.monotonic() - before < seconds


def test_no_database_is_asked(locks: testing.Memory, db_lock: Make) -> None:
    """Everything that a lock can do, over databases that do not exist."""
    lock = db_lock("k", label="mine")
    with lock, lock:
        assert (lock.count, lock.state, lock.verify(), lock.owned(), lock.locked()) == (2, "held", True, True, True)
        assert lock.inspect().label == "mine"
        assert lock.remaining == 29.0
        lock.extend(60)
        assert lock.remaining == 59.0
    assert not lock.locked()
    fences = [hold(lock) for _ in range(3)]
    assert fences == sorted(set(fences))


def test_both_faces_share_one_memory(locks: testing.Memory, engine: Engine) -> None:
    """As a Django site and a service that point at the same database."""
    with dblock.db_lock("k", using="mariadb"):
        with pytest.raises(LockTimeout):
            apart(lambda: hold(sqlalchemy_dblock.db_lock(engine, "k", timeout=0)))


def test_on_an_event_loop(locks: testing.Memory) -> None:
    """Both faces' asynchronous locks: held, waited for in vain, handed on from task to task, lost."""
    engine = create_async_engine(f"sqlite+aiosqlite:///{NOWHERE}")
    makers = [
        lambda key, **options: sqlalchemy_dblock.db_lock(engine, key, **options),
        lambda key, **options: dblock.db_lock(key, using="postgresql", **options),
    ]

    async def use(make: Make) -> None:
        order: list[int] = []
        states: list[str] = []

        async def turn(number: int) -> None:
            async with make("k"):
                order.append(number)
                await asyncio.sleep(0.01)

        await asyncio.gather(*map(turn, range(4)))
        assert order == [0, 1, 2, 3]
        with locks.busy("k"):
            with pytest.raises(LockTimeout):
                await turn(4)
        async with locks.busy("k", ttl=3):
            await turn(5)
        with pytest.raises(LockLost):
            async with make("k") as lock:
                await locks.atake_away("k")
                states.append(lock.state)
        with pytest.raises(LockLost):
            async with make("k", interrupt=True), locks.busy("other"):
                locks.take_away("k")
                await asyncio.sleep(10)
        assert states == ["lost"], "said in there, LockLost would hide that it is not so"

    with at_once():
        for make in makers:
            asyncio.run(use(make))


# -- the clock


def test_leases_are_renewed_while_the_clock_moves(locks: testing.Memory, db_lock: Make) -> None:
    """For as long as the lock is held, by any span."""
    with db_lock("k") as lock:
        for seconds in (31, timedelta(hours=1), 0.5, 0):
            locks.clock.advance(seconds)
            assert (lock.state, lock.verify()) == ("held", True)
        assert 18 < lock.remaining <= 29
    assert locks.clock.now() == pytest.approx(3631.5)


def test_a_lease_that_is_not_renewed_ends(locks: testing.Memory, db_lock: Make) -> None:
    """`renew=False`: others get the key when the ttl is over, not before; the holder knows a margin earlier."""
    lock, other = db_lock("k", renew=False, ttl=30), db_lock("k", timeout=0)
    assert lock.acquire()
    locks.clock.advance(28.9)
    assert lock.state == "held"
    locks.clock.advance(0.2)
    assert lock.state == "lost"
    assert not apart(other.acquire)
    locks.clock.advance(1)
    assert apart(lambda: hold(other)) > lock.fence
    with pytest.raises(LockLost) as caught:
        lock.release()
    assert caught.value.reason is Reason.TAKEN_OVER


def test_frozen_renewal(locks: testing.Memory, db_lock: Make) -> None:
    """At risk after half of the ttl, lost before its end; each callback has run once when the clock stands again."""
    told: list[Any] = []
    lock = db_lock("k", on_lost=lambda _, reason: told.append(reason), on_at_risk=lambda _: told.append("risk"))
    assert lock.acquire()
    with locks.frozen_renewal():
        locks.clock.advance(14)
        assert lock.state == "held"
        assert told == []
        locks.clock.advance(2)
        assert (lock.state, told) == ("at_risk", ["risk"])
        locks.clock.advance(14)
        assert (lock.state, told) == ("lost", ["risk", Reason.UNREACHABLE])
    locks.clock.advance(100)
    assert told == ["risk", Reason.UNREACHABLE]
    with pytest.raises(LockLost):
        lock.release()
    [attempt] = locks.history
    assert attempt.outcome == "lost"


def test_renewal_goes_on_after_the_frost(locks: testing.Memory, db_lock: Make) -> None:
    """In time: nothing is lost."""
    with db_lock("k") as lock:
        with locks.frozen_renewal():
            locks.clock.advance(20)
        locks.clock.advance(60)
        assert lock.verify()


@pytest.mark.parametrize("seconds", [-1, -0.001, float("nan"), float("inf"), timedelta(seconds=-1)])
def test_the_clock_never_goes_back(locks: testing.Memory, seconds: Any) -> None:
    """Neither does the one of a database that the protocol may rely on."""
    with pytest.raises(ValueError, match="goes forward"):
        locks.clock.advance(seconds)
    assert locks.clock.now() == 0


def test_fences_grow_though_the_clock_stands(locks: testing.Memory, db_lock: Make) -> None:
    """Through the deletion of the row, too."""
    lock = db_lock("k")
    fences = [hold(lock) for _ in range(1100)]  # the last one is ahead of the clock, which then moves
    assert locks.clock.now() == 0
    locks.clock.advance(0.001)
    assert dblock.reap(retention=0, using="postgresql") == 1
    fences += [hold(lock) for _ in range(3)]
    assert fences == sorted(set(fences))


# -- somebody else has the key


def test_a_busy_key_is_a_timeout_at_once(locks: testing.Memory, db_lock: Make) -> None:
    """With as much time gone on the clock as was to be waited; who holds it is in the error; then it is free."""
    with at_once(), locks.busy("k", label="nightly import", host="worker-7"):
        for timeout in (10.0, 3600.0, 0):
            before = locks.clock.now()
            with pytest.raises(LockTimeout, match="worker-7.*nightly import") as caught:
                hold(db_lock("k", timeout=timeout))
            assert there(caught.value.holder).identity.host == "worker-7"
            assert locks.clock.now() - before == pytest.approx(timeout)
        assert not db_lock("k").acquire(blocking=False)
        hold(db_lock("another"))
    hold(db_lock("k", timeout=0))


@pytest.mark.parametrize("timeout", [0.001, 0.0051, 0.5, 2, 10.001, 12.5, 3600])
@pytest.mark.parametrize("begun", [0.0, 1e3 / 7])
def test_the_time_is_up_by_any_clock(locks: testing.Memory, db_lock: Make, begun: float, timeout: float) -> None:
    """A pause that is shorter than the clock resolves is none."""
    locks.clock.advance(begun)
    with at_once(), locks.busy("k"):
        assert not db_lock("k", timeout=timeout).acquire()


def test_a_holder_that_died(locks: testing.Memory, db_lock: Make) -> None:
    """`ttl`: the key is free when that is over, for a waiter that waits until then."""
    with at_once(), locks.busy("k", ttl=3):
        with pytest.raises(LockTimeout):
            hold(db_lock("k", timeout=2.5))
        hold(db_lock("k", timeout=2.5))
        assert locks.clock.now() == pytest.approx(3)
    with locks.busy("k", ttl=3):
        locks.clock.advance(3.1)
        hold(db_lock("k", timeout=0))


def test_a_key_stays_busy_for_as_long_as_the_block_lasts(locks: testing.Memory, db_lock: Make) -> None:
    """However far the clock moves."""
    with locks.busy("k"):
        locks.clock.advance(timedelta(days=1))
        assert db_lock("k").locked()
        with pytest.raises(RuntimeError, match="cannot make 'k' busy: it is held by elsewhere"):
            with locks.busy("k"):
                pass
        assert db_lock("k").locked()
    assert not db_lock("k").locked()


def test_a_key_that_the_test_holds_cannot_be_made_busy(locks: testing.Memory, db_lock: Make) -> None:
    """Which is no LockTimeout, for which a test may be waiting."""
    with db_lock("k"), pytest.raises(RuntimeError, match="cannot make 'k' busy") as caught, locks.busy("k"):
        pass
    assert not isinstance(caught.value, dblock.LockError)


def test_a_wait_that_would_never_end(locks: testing.Memory, db_lock: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """`timeout=None` on a busy key is an error, which says so; it leaves nothing behind."""
    # A day on its clock, with a line in the log for each minute, would take seconds of a busy processor.
    monkeypatch.setattr(import_module("dblock.testing.memory"), "LONGEST", 3600.0)
    with at_once(), locks.busy("k"), pytest.raises(RuntimeError, match="nobody will ever give back"):
        hold(db_lock("k", timeout=None))
    hold(db_lock("k", timeout=0))


def test_taken_away(locks: testing.Memory, db_lock: Make) -> None:
    """The holder has lost it, and has been told; the key is free; its late release leaves the next one alone."""
    told: list[Any] = []

    def tell(lost: Any, reason: Reason) -> None:
        time.sleep(0.05)  # `take_away` waits for that
        told.append((lost.key, reason))

    lock = db_lock("k", on_lost=tell)
    assert lock.acquire()
    locks.take_away("k")
    assert (lock.state, told) == ("lost", [("k", Reason.FREED)])
    with pytest.raises(LockLost):
        lock.check()
    with pytest.raises(LockNotHeld):
        locks.take_away("k")
    other = locks.busy("k")
    other.__enter__()
    with pytest.raises(LockLost, match="freed by somebody .taken away by a test.; it was taken over by") as caught:
        lock.release()
    assert caught.value.reason is Reason.FREED
    assert caught.value.holder is not None
    assert db_lock("k").locked()
    other.__exit__(None, None, None)
    with pytest.raises(LockNotHeld, match="no thread or task of this process holds it"):
        locks.take_away("k")


def test_release_all_leaves_strangers_alone(locks: testing.Memory) -> None:
    """It gives back what this process holds."""
    lock = dblock.db_lock("mine", using="postgresql")
    with locks.busy("k"):
        assert lock.acquire()
        assert dblock.release_all() == 1
        assert dblock.db_lock("k").locked()
        assert not lock.locked()


# -- the test's own threads and tasks


def test_threads_take_turns(locks: testing.Memory, db_lock: Make) -> None:
    """A wait for a thread that is at work is real, and ends when the key is given back: nobody's time is up early."""
    inside, seen = [0], list[int]()

    def work() -> None:
        with db_lock("k", timeout=10):
            inside[0] += 1
            seen.append(inside[0])
            time.sleep(0.01)
            inside[0] -= 1

    with ThreadPoolExecutor(12) as pool:
        for turn in [pool.submit(work) for _ in range(12)]:
            turn.result(20)
    assert seen == [1] * 12
    assert locks.clock.now() < 10


def test_a_wait_for_a_thread_that_keeps_the_key(locks: testing.Memory, db_lock: Make) -> None:
    """It lasts as long as it was to, by the real clock, along which that of the locks goes."""
    with db_lock("k") as lock:
        before = time.monotonic()
        with pytest.raises(LockTimeout):
            apart(lambda: hold(db_lock("k", timeout=0.3)))
        assert time.monotonic() - before >= 0.28
        assert locks.clock.now() == pytest.approx(0.3, abs=0.1)
        assert lock.verify()


def test_a_thread_that_ended_without_releasing(locks: testing.Memory, db_lock: Make) -> None:
    """Its lease ends; a flow that waits for that does so in vain, and at once."""
    apart(db_lock("k", ttl=30).acquire)
    with at_once():
        hold(db_lock("k", timeout=60))
    assert 29 < locks.clock.now() < 32
    apart(db_lock("x", ttl=30).acquire)
    with at_once(), pytest.raises(LockTimeout):
        hold(db_lock("x", timeout=20))


def test_min_hold(locks: testing.Memory, db_lock: Make) -> None:
    """Nothing but time ends it."""
    hold(db_lock("k", min_hold=20))
    with at_once():
        hold(db_lock("k", timeout=30))
    assert locks.clock.now() == pytest.approx(20, abs=0.1)


def test_a_task_waits_for_the_thread_that_runs_it(locks: testing.Memory) -> None:
    """That cannot give back anything meanwhile: the wait is in vain."""

    async def wait() -> None:
        with pytest.raises(LockTimeout):
            async with dblock.db_lock("k", using="postgresql", timeout=10):
                pass

    with dblock.db_lock("k", using="postgresql"), at_once():
        asyncio.run(wait())


# -- transactions


def test_the_callers_transaction_is_of_no_account(sqlite: object, locks: testing.Memory) -> None:
    """Kept until it ends, as ever; taken back by no rollback; and guard() checks the tenure."""
    lock = dblock.db_lock("k", using="default")
    with transaction.atomic():
        with lock:
            lock.guard()
        assert lock.locked()
        outcomes = [locks.history[0].outcome]
    assert not lock.locked()
    assert [*outcomes, locks.history[0].outcome] == ["held", "released"]
    assert lock.acquire()
    with transaction.atomic():
        lock.release()
        assert not lock.locked(), "the transaction began later"
    with contextlib.suppress(ZeroDivisionError), lock:
        with transaction.atomic():
            lock.guard()
            raise ZeroDivisionError
    assert lock.acquire()
    locks.take_away("k")
    with pytest.raises(LockLost), transaction.atomic():
        lock.guard()
    with pytest.raises(LockLost):
        lock.release()
    with lock.atomic():
        locks.take_away("k")  # too late: the guard has seen that it was held
    with lock, pytest.raises(transaction.TransactionManagementError, match="call it inside atomic"):
        lock.guard()
    connections.close_all()


def test_a_session(sqlite: object, locks: testing.Memory) -> None:
    """Likewise."""
    from sqlalchemy.orm import Session

    engine = own_engine("sqlite://")
    with Session(engine) as session:
        session.connection()
        with sqlalchemy_dblock.db_lock(engine, "k", session=session) as lock:
            lock.guard()
        assert lock.locked()
        session.commit()
        assert not lock.locked()
    with sqlalchemy_dblock.db_lock(engine, "k").begin(engine):
        locks.take_away("k")


# -- beginning and ending


def test_nothing_is_left(engine: Engine) -> None:
    """No thread, no runtime, no follower, no row anywhere; also when the test fails inside."""
    before, threads = runtime.current, set(threading.enumerate())
    with contextlib.suppress(ZeroDivisionError), testing.memory() as locks:
        with sqlalchemy_dblock.db_lock(engine, "k", on_lost=lambda *_: None):
            locks.clock.advance(100)
            raise ZeroDivisionError
    assert runtime.current is before
    assert not before.acquire_hooks
    assert before.store_override is None
    assert type(before) is Runtime
    assert set(threading.enumerate()) <= threads
    assert locks.history[0].outcome == "released"


def test_what_is_held_at_the_end_is_lost(db_lock: Make) -> None:
    """Its holder knows; and nothing of it is sent to the real database."""
    told: list[Any] = []
    left, block = db_lock("left", on_lost=lambda _, reason: told.append(reason)), db_lock("block")
    with testing.memory() as locks:
        left.acquire()
        block.__enter__()
        other = locks.busy("busy").__enter__()
    other.__exit__(None, None, None)
    assert told == [Reason.RELEASED]
    assert [attempt.outcome for attempt in locks.history] == ["lost", "lost"]
    with pytest.raises(LockNotHeld):
        left.release()
    with pytest.raises(LockLost, match="given all its locks back"):
        block.__exit__(None, None, None)
    assert left.state is None


def test_a_thread_that_outlives_it(db_lock: Make) -> None:
    """If it holds, it has lost the lock; if it waits, it is told why it waits no more."""
    taken, go_on = threading.Event(), threading.Event()

    def keep() -> Any:
        with db_lock("k") as lock:
            taken.set()
            go_on.wait(10)
            return lock.state

    with ThreadPoolExecutor(2) as pool:
        with testing.memory():
            keeper = pool.submit(keep)
            taken.wait()
            waiter = pool.submit(lambda: hold(db_lock("k", timeout=60)))
            while not runtime.current.wakeups._registered:
                time.sleep(0.001)
        with at_once(), pytest.raises(LockStoreError, match=r"memory\(\) has ended"):
            waiter.result(20)
        go_on.set()
        with pytest.raises(LockLost):
            keeper.result(20)


def test_what_it_refuses(sqlite: object, engine: Engine) -> None:
    """At once: to begin inside another one, and while a lock is held elsewhere; and majorities."""
    before = runtime.current
    with testing.memory():
        with pytest.raises(RuntimeError, match=r"memory\(\) was called inside memory\(\)"), testing.memory():
            pytest.fail("unreachable")
        cycle(dblock.db_lock("in memory", using="postgresql"))
        majority = sqlalchemy_dblock.db_quorum_lock([engine, engine, engine], "k")
        with at_once(), pytest.raises(RuntimeError, match=r"memory\(\) has no majority locks"), majority:
            pytest.fail("unreachable")
    assert runtime.current is before
    with dblock.db_lock("k", using="default") as lock:
        with pytest.raises(RuntimeError, match=r"memory\(\) was called while this process holds 'k'"), testing.memory():
            pytest.fail("unreachable")
        assert lock.verify()
    assert runtime.current is before
    with testing.memory():
        pass


def test_observers_hear_of_it(db_lock: Make) -> None:
    """Those of before, too; and one that begins inside it goes on afterwards."""
    before, inside = list[str](), list[str]()
    stops = [dblock.observe(lambda event: before.append(event.kind), "acquired")]
    with testing.memory(), db_lock("k"):
        stops.append(dblock.observe(lambda event: inside.append(event.kind), "acquired", "released"))
    with testing.memory(), db_lock("k"):
        pass
    for stop in stops:
        stop()
    assert before == ["acquired"] * 2
    assert inside == ["released", "acquired", "released"]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_forked_child(engine: Engine) -> None:
    """It asks no database either, and owns nothing of its parent's."""
    with testing.memory(), sqlalchemy_dblock.db_lock(engine, "k") as lock:

        def child() -> tuple[bool, bool, bool]:
            with sqlalchemy_dblock.db_lock(engine, "other") as other:
                return lock.locked(), lock.owned(), other.verify()

        assert in_child(child) == (True, False, True)
        assert lock.verify()
