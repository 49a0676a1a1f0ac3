"""Several locks at once, on every database and both faces."""

from __future__ import annotations

import asyncio
import random
import threading
import time
from functools import partial
from typing import Any

import pytest
from django.db import transaction

from dblock.core.errors import LockLost, LockNotHeld, LockTimeout
from tests.contract.test_queue import waiters
from tests.support.lab import together, until
from tests.support.subjects import Actor, Actors, Subject, twin


def several(subject: Subject, *keys: Any, **options: Any) -> Any:
    return subject.api("db_locks", *keys, **options)


def owners(subject: Subject) -> dict[str, bool]:
    """By key, whether it is held."""
    return {key: owner is not None for key, owner in subject.run("SELECT lock_key, owner FROM locks")}


def test_all_of_them_are_taken_or_none(either: Subject, actor: Actor, other: Actor) -> None:
    """And none is left behind by one that was busy."""
    locks, busy = actor.hold(several(either, "b", "a", "c")), either.lock("b")
    assert owners(either) == dict.fromkeys("abc", True)
    assert actor.get(locks, "state") == "held"
    assert actor.get(locks, "keys") == ["b", "a", "c"]
    fences = actor.get(locks, "fences")
    assert fences == dict(either.run("SELECT lock_key, fence FROM locks"))
    assert actor.get(locks, "fence") == max(fences.values())
    assert actor.do(lambda: locks["a"].fence) == fences["a"]
    assert 0 < actor.get(locks, "remaining") <= 30
    assert [lock.key for lock in locks] == ["b", "a", "c"]
    assert len(locks) == 3
    with pytest.raises(KeyError):
        _ = locks["d"]
    assert actor.do(lambda: repr(locks)).endswith("Locks 'b', 'a', 'c': held>")
    actor.do(locks.check)
    with pytest.raises(LockLost, match="'b' is not held by this thread or task"):
        other.do(locks.check)
    assert actor.call(locks, "verify") is True
    assert other.call(locks, "acquire", blocking=False) is False
    actor.call(locks, "extend", 60)
    assert actor.get(locks, "remaining") > 31
    actor.call(locks, "release")
    assert owners(either) == dict.fromkeys("abc", False)
    assert actor.get(locks, "state") is None
    with pytest.raises(LockNotHeld):
        actor.get(locks, "fence")
    assert actor.call(locks, "acquire") is True
    actor.call(locks["a"], "release")
    with pytest.raises(LockNotHeld, match="'a'"):
        actor.call(locks, "release")
    assert owners(either) == dict.fromkeys("abc", False), "the others were left all the same"
    assert other.call(busy, "acquire")
    begun = time.monotonic()
    assert actor.call(locks, "acquire", timeout=0.4) is False
    assert 0.3 < time.monotonic() - begun < 3
    assert owners(either) == {"a": False, "b": True, "c": False}
    with pytest.raises(LockTimeout, match="'b'"):
        actor.within(several(either, "b", "a", timeout=0.1))
    assert owners(either) == {"a": False, "b": True, "c": False}
    assert until(lambda: waiters(either) == 0)
    other.call(busy, "release")


def test_a_block_holds_them_all(everywhere: Subject, actor: Actor) -> None:
    """Whatever the body raises, they are released; a lost one is told at the end."""
    locks = several(everywhere, "a", "b", ttl=5)
    actor.within(locks, lambda: owners(everywhere).values())
    assert owners(everywhere) == {"a": False, "b": False}

    def fails() -> None:
        assert owners(everywhere) == {"a": True, "b": True}
        raise KeyError("body")

    with pytest.raises(KeyError):
        actor.within(locks, fails)
    assert owners(everywhere) == {"a": False, "b": False}

    def loses() -> None:  # the first that is left
        everywhere.run("UPDATE locks SET owner = 'thief', fence = fence + 1 WHERE lock_key = 'b'")

    with pytest.raises(LockLost) as caught:
        actor.within(locks, loses)
    assert caught.value.key == "b"
    assert owners(everywhere) == {"a": False, "b": True}


def test_sets_that_overlap_never_wait_in_a_circle(protocol: Subject, actors: Actors) -> None:
    """However their keys are ordered."""
    inside, total, guard = dict.fromkeys("abcd", 0), [0], threading.Lock()

    def body(keys: list[str]) -> None:
        with guard:
            for key in keys:
                inside[key] += 1
                assert inside[key] == 1, "two holders"
        time.sleep(0.002)
        with guard:
            total[0] += 1
            for key in keys:
                inside[key] -= 1

    def work(actor: Actor, chance: random.Random) -> None:
        for _ in range(6):
            keys = chance.sample("abcd", chance.randint(1, 4))
            actor.within(several(protocol, *keys, timeout=30), partial(body, keys))

    flows = [partial(work, actor, random.Random(number)) for number, actor in enumerate(actors(4))]
    assert together(*flows) == []
    assert total == [24]


def test_a_decorated_call_formats_each_key(face: Subject, actor: Actor, other: Actor) -> None:
    """A key that comes twice is taken once; a busy call can be skipped."""
    locks = several(face, "account:{source}", "account:{target}")

    def transfer(source: int, target: int) -> dict[str, bool]:
        return owners(face)

    decorated = actor.decorate(locks, transfer)
    assert decorated(2, target=1) == {"account:1": True, "account:2": True}
    assert decorated(1, 1)["account:1"] is True
    assert not any(owners(face).values())
    busy = other.hold(face.lock("account:7"))
    skipping = several(face, "account:{source}", "account:{target}", timeout=0, on_busy="skip", otherwise="busy")
    assert actor.decorate(skipping, transfer)(6, 7) == "busy"
    assert owners(face)["account:6"] is False
    hasty = several(face, "account:{source}", "account:{target}", timeout=0)
    with pytest.raises(LockTimeout):
        actor.decorate(hasty, transfer)(6, 7)
    other.call(busy, "release")


def test_locks_of_several_databases(either: Subject, actor: Actor) -> None:
    """Ready-made locks are taken with the others; one that is held already is entered again."""
    ready_made = actor.hold(twin(either).lock("x"))
    mixed = actor.hold(several(either, "y", ready_made))
    assert actor.get(ready_made, "count") == 2
    actor.call(mixed, "release")
    assert owners(either) == {"x": True, "y": False}
    actor.call(ready_made, "release")


def test_what_was_held_before_stays(either: Subject, actor: Actor, other: Actor) -> None:
    """A flow that cannot have them all keeps the lock that it had entered before."""
    mine, busy = actor.hold(either.lock("a")), other.hold(either.lock("b"))
    assert actor.call(several(either, mine, "b"), "acquire", timeout=0.1) is False
    assert actor.get(mine, "count") == 1
    assert owners(either)["a"] is True
    actor.call(mine, "release")
    other.call(busy, "release")


def test_the_timeout_is_for_all_of_them(either: Subject, actor: Actor, actors: Actors) -> None:
    """What the wait for the first has used, the second has not."""
    one, two = actors(2)
    first, second = one.hold(either.lock("a")), two.hold(either.lock("b"))
    begun = time.monotonic()
    waiting = actor.start(partial(getattr(several(either, "a", "b"), either.method("acquire")), timeout=1.0))
    time.sleep(0.7)
    one.call(first, "release")
    assert waiting.result(20) is False
    assert 0.95 < time.monotonic() - begun < 2.2
    assert owners(either) == {"a": False, "b": True}
    two.call(second, "release")


@pytest.mark.parametrize("subject", [Subject("django", "sync", "postgresql")], indirect=True, ids=str)
def test_a_guard_of_them_all(subject: Subject, actor: Actor, other: Actor) -> None:
    """No tenure of any of them begins before the transaction ends."""
    alias, locks = subject.alias, several(subject, "a", "b", ttl=1, renew=False)

    def block() -> None:
        locks.acquire()
        with transaction.atomic(using=alias):
            locks.guard()
            time.sleep(1.2)
            for key in "ab":
                assert other.call(subject.lock(key), "acquire", timeout=0.2) is False

    actor.do(block)
    for key in "ab":
        assert other.call(subject.lock(key), "acquire", timeout=5) is True
        other.call(subject.lock(key), "release")


def test_threads_may_share_them(either: Subject, actor: Actor, other: Actor) -> None:
    """One that times out leaves what the other one holds."""
    locks, inside, go_on = several(either, "a", "b", timeout=0.2), threading.Event(), threading.Event()

    def body() -> None:
        inside.set()
        assert go_on.wait(20)
        assert owners(either) == {"a": True, "b": True}

    running = actor.enter(locks, either.aside(body))
    assert inside.wait(20)
    with pytest.raises(LockTimeout, match=r"within 0\.2 s|at one try"):
        other.within(locks)
    assert other.call(locks, "acquire", blocking=False) is False
    go_on.set()
    running.result(20)
    # The place of the one that timed out is withdrawn in the background, with what is granted to it meanwhile.
    assert until(lambda: owners(either) == {"a": False, "b": False})


def test_a_loss_interrupts_the_taking_of_the_others(async_face: Subject, actor: Actor, other: Actor) -> None:
    """With interrupt=True: LockLost comes out, and the task is as if nobody had cancelled it."""
    busy = other.hold(async_face.lock("b"))
    locks = several(async_face, "a", "b", ttl=0.5, renew=False, timeout=20, interrupt=True)
    with pytest.raises(LockLost) as caught:
        actor.within(locks)
    assert caught.value.key == "a"
    assert isinstance(caught.value.__cause__, asyncio.CancelledError)
    assert actor.do(lambda: asyncio.current_task().cancelling()) == 0  # type: ignore[union-attr]
    other.call(busy, "release")
    assert until(lambda: not waiters(async_face))


def test_a_lock_that_is_lost_meanwhile(either: Subject, actor: Actor, other: Actor) -> None:
    """None is held then, and the error is that of the lost one; an old loss of the same flow changes nothing."""
    busy = other.hold(either.lock("b"))
    locks = several(either, "a", "b", ttl=0.6, renew=False, timeout=20)
    waiting = actor.start(getattr(locks, either.method("acquire")))
    assert until(lambda: waiters(either) == 1)
    time.sleep(0.8)
    other.call(busy, "release")
    with pytest.raises(LockLost) as caught:
        waiting.result(20)
    assert caught.value.key == "a"
    assert owners(either)["b"] is False
    actor.hold(either.lock("a", ttl=0.3, renew=False))
    time.sleep(0.4)
    assert other.call(busy, "acquire")
    assert actor.call(several(either, "a", "b"), "acquire", timeout=0.2) is False
    assert owners(either)["a"] is False
    other.call(busy, "release")


@pytest.mark.parametrize("subject", [Subject("sqlalchemy", "sync", "sqlite")], indirect=True, ids=str)
def test_what_is_refused_before_anything_is_taken(subject: Subject) -> None:
    """A member that may be skipped, and the skipped body of a `with`."""
    with pytest.raises(TypeError, match="give it to db_locks"):
        several(subject, subject.lock("a", on_busy="skip"))
    with pytest.raises(TypeError, match="for decorators"), several(subject, "a", on_busy="skip"):
        pytest.fail("unreachable")
    assert owners(subject) == {}
