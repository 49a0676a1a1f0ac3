"""Over real databases: what was locked, strangers who hold a key, locks that are taken away, renewal that is frozen."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from sqlalchemy import Engine, StaticPool, create_engine

import sqlalchemy_dblock
from dblock import LockError, LockLost, LockNotHeld, LockTimeout, testing
from dblock.core import runtime
from dblock.core.errors import Reason
from tests.conftest import ALIASES, each_of, own_engine
from tests.support.lab import PAIR_OF_FACES, SOME, cycle, hold_of, renews, until, without
from tests.support.subjects import Actor, Subject

subject = each_of(SOME)


def bind(subject: Subject) -> Any:
    """Where its locks live, as the kit is told."""
    return ALIASES[subject.database] if subject.variant == "django" else subject.engine


@contextlib.contextmanager
def held_by(actor: Actor, busy: testing.Busy) -> Iterator[None]:
    """A stranger holds a key meanwhile: an actor begins and ends that."""
    kind = "" if actor.subject.face == "sync" else "a"
    actor.do(getattr(busy, f"__{kind}enter__"))
    try:
        yield
    finally:
        actor.do(lambda: getattr(busy, f"__{kind}exit__")(None, None, None))


def take_away(actor: Actor, key: str) -> None:
    kit = testing.take_away if actor.subject.face == "sync" else testing.atake_away
    actor.do(lambda: kit(key))


def test_busy(subject: Subject, actor: Actor, other: Actor) -> None:
    """Nobody gets the key until the block ends; then the waiter is notified at once, and the row is as ever."""
    with testing.record(bind(subject)) as locks:
        with held_by(actor, locks.busy("k", label="nightly import", host="worker-7")):
            assert actor.call(subject.lock("k"), "acquire", blocking=False) is False
            with pytest.raises(LockTimeout, match="worker-7.*nightly import"):
                actor.within(subject.lock("k", timeout=0.05))
            row = subject.row("k")
            seen = [row[name] for name in ("host", "label", "program", "ttl")]
            assert seen == ["worker-7", "nightly import", "somebody else", 300]
            with pytest.raises(RuntimeError, match="cannot make 'k' busy: it is held by worker-7"):
                held_by(other, locks.busy("k")).__enter__()
            lock = subject.lock("k", timeout=20)
            waiting = other.begin(lock, "acquire")
            time.sleep(0.1)
            assert not waiting.done()
        assert waiting.result(20) is True
        other.call(lock, "release")
    assert [attempt.outcome for attempt in locks.history] == ["busy", "busy", "released"]
    assert subject.row("k")["owner"] is None


def test_taken_away(subject: Subject, actor: Actor, other: Actor) -> None:
    """The holder has lost it and the key is free, at once."""
    told: list[Any] = []
    lock = subject.lock("k", on_lost=lambda lost, reason: told.append((lost.key, reason)))
    with testing.record(bind(subject)) as locks:
        assert actor.call(lock, "acquire")
        take_away(other, "k")
        testing.holders.await_callbacks()
        assert (actor.get(lock, "state"), told) == ("lost", [("k", Reason.FREED)])
        assert other.call(subject.lock("k"), "acquire", blocking=False)
        with pytest.raises(LockLost, match="taken over"):
            actor.call(lock, "release")
        assert other.call(subject.lock("k"), "verify")
        other.call(subject.lock("k"), "release")
        with pytest.raises(LockNotHeld, match="no thread or task of this process holds it"):
            take_away(other, "k")
    assert [attempt.outcome for attempt in locks.history] == ["lost", "released"]


@pytest.mark.parametrize("subject", PAIR_OF_FACES, indirect=True, ids=str)
def test_frozen_renewal(subject: Subject, actor: Actor) -> None:
    """A lease that would be renewed for ever is lost when its ttl has passed; afterwards all is as ever."""
    lock = subject.lock("k", ttl=0.6)
    with testing.frozen_renewal():
        assert actor.call(lock, "acquire")
        assert until(lambda: actor.get(lock, "state") == "lost")
    with pytest.raises(LockLost):
        actor.call(lock, "release")
    other = actor.hold(subject.lock("k", ttl=2))
    assert renews(actor.do(lambda: hold_of(other)), soon=False)
    assert actor.call(other, "verify")
    actor.call(other, "release")
    assert "_renew" not in vars(runtime.current.watchdog)


def test_what_was_locked(subject: Subject, actor: Actor, other: Actor) -> None:
    """Key, label, ttl, timeout and what has become of it, of each attempt."""
    with testing.record(bind(subject)) as locks:
        locks.assert_not_locked()
        lock = subject.lock("stock:42", ttl=60, timeout=3, label="sale")
        actor.within(lock)
        assert actor.call(lock, "acquire")
        assert actor.call(lock, "acquire", timeout=1)
        assert other.call(subject.lock("stock:42"), "acquire", blocking=False) is False
        first, second, third, fourth = locks.history
        assert (first.key, first.label, first.ttl, first.timeout) == ("stock:42", "sale", 60, 3)
        assert [each.outcome for each in locks.history] == ["released", "held", "held", "busy"]
        assert [each.timeout for each in locks.history] == [3, 3, 1, 0]
        assert first.fence is not None
        assert second.fence is not None
        assert first.fence < second.fence == third.fence
        assert fourth.fence is None
        assert all(each.waited is not None and 0 <= each.waited < 3 for each in locks.history)
        with pytest.raises(AssertionError, match="not released: 'stock:42'"):
            locks.assert_released()
        actor.call(lock, "release")
        assert [each.outcome for each in locks.history] == ["released", "held", "released", "busy"]
        actor.call(lock, "release")
        locks.assert_released("stock:42")
        locks.assert_locked("stock:42")
        locks.assert_locked("stock:42", times=3)
        locks.assert_not_locked("stock:43")
        there = r"'stock:42' \(released, 3 times\), 'stock:42' \(busy\)"
        wrongs: list[tuple[Callable[[], None], str]] = [
            (lambda: locks.assert_locked("stock:43"), f"'stock:43' was not locked; there was {there}"),
            (lambda: locks.assert_locked("stock:42", times=2), f"locked 3 times, not twice; there was {there}"),
            (lambda: locks.assert_not_locked("stock:42"), "'stock:42' was locked"),
            (locks.assert_not_locked, "something was locked"),
            (lambda: locks.assert_released("stock:43"), "'stock:43' was not locked"),
        ]
        for wrong, message in wrongs:
            with pytest.raises(AssertionError, match=message):
                wrong()
    actor.within(subject.lock("later"))
    assert len(locks.history) == 4
    assert not runtime.current.acquire_hooks


def test_an_attempt_that_fails(subject: Subject, actor: Actor) -> None:
    """What was raised is kept, and raised."""
    with without(subject.database, "locks"), testing.record() as locks, pytest.raises(LockError) as caught:
        actor.call(subject.lock("k", timeout=0), "acquire")
    [attempt] = locks.history
    assert (attempt.outcome, attempt.error) == ("failed", caught.value)


def test_in_one_in_another(sqlite: object, engine: Engine) -> None:
    """Each has recorded what happened while it was on, whichever ended first."""
    lock = sqlalchemy_dblock.db_lock(engine, "k")
    outer, inner = testing.record(), testing.record()
    first = outer.__enter__()
    with lock:
        second = inner.__enter__()
        with lock:
            outer.__exit__(None, None, None)
            cycle(lock)
    inner.__exit__(None, None, None)
    cycle(lock)
    assert (len(first.history), len(second.history)) == (2, 2)


@pytest.mark.parametrize("shared", [True, False])
def test_an_engine_in_memory(shared: bool) -> None:
    """Whether its threads share one database or not."""
    options: dict[str, Any] = {"poolclass": StaticPool, "connect_args": {"check_same_thread": False}} if shared else {}
    engine = own_engine("sqlite://", **options)
    sqlalchemy_dblock.metadata.create_all(engine)
    with testing.record(engine) as locks:
        with locks.busy("k"):
            with pytest.raises(LockTimeout):
                sqlalchemy_dblock.db_lock(engine, "k", timeout=0.05).__enter__()
        lock = sqlalchemy_dblock.db_lock(engine, "k")
        assert lock.acquire()
        locks.take_away("k")
        assert not lock.locked()
        with pytest.raises(LockLost):
            lock.release()


def test_on_an_event_loop_it_says_what_to_write(sqlite: object) -> None:
    """Rather than to block the loop, or to hang."""

    async def wrong() -> None:
        with pytest.raises(RuntimeError, match="write `async with`"), testing.busy("k", "default"):
            pass
        with pytest.raises(RuntimeError, match="write `await atake_away"):
            async with testing.busy("other", "default"):
                from dblock import db_lock

                async with db_lock("k", using="default"):
                    testing.take_away("k")

    asyncio.run(wrong())


def test_a_key_that_is_none() -> None:
    """Refused as db_lock refuses it."""
    for key in ("", "k" * 256, 42, None):
        with testing.memory() as locks, pytest.raises((ValueError, TypeError)):
            locks.busy(key)  # type: ignore[arg-type]
    with testing.memory() as locks, pytest.raises((ValueError, TypeError)):
        locks.busy("k", ttl=-1)


def test_a_callback_that_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Costs the test some seconds, and no more."""
    monkeypatch.setattr(testing.holders, "PATIENCE", 0.1)
    go_on = threading.Event()
    engine = create_engine("sqlite://")
    with testing.memory() as locks:
        lock = sqlalchemy_dblock.db_lock(engine, "k", on_lost=lambda *_: go_on.wait(20))
        with pytest.raises(LockLost), lock:
            locks.take_away("k")
            locks.clock.advance(100)
    go_on.set()
