"""Semaphores, on every database and both faces."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import threading
import time
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from dblock.core import runtime
from dblock.core.errors import (
    LockLost,
    LockNotHeld,
    LockTimeout,
    PermitNotHeld,
    Reason,
)
from dblock.core.lock import entering
from dblock.core.protocol import tenures
from dblock.core.values import SHARE
from tests.conftest import SELDOM, timed
from tests.contract.test_administration import Desk
from tests.contract.test_queue import waiters
from tests.support.lab import PROTOCOL, interrupt, renewed, until
from tests.support.model import Interrupted
from tests.support.subjects import Actor, Actors, Subject


def semaphore(subject: Subject, permits: int, key: str = "k", **options: Any) -> Any:
    return subject.api("db_semaphore", key, permits, **options)


def in_use(subject: Subject) -> list[int]:
    """The slots that are held."""
    rows = subject.run("SELECT lock_key, owner FROM locks WHERE lock_key > 'k' ORDER BY lock_key")
    return [int(key[-5:]) for key, owner in rows if owner is not None]


def test_so_many_and_no_more(everywhere: Subject, actors: Actors) -> None:
    """Each permit is a lock on a slot of its own; the object owns it, so that any flow may release it."""
    one, two = actors(2)
    sem, other = semaphore(everywhere, 2), semaphore(everywhere, 2)
    assert (sem.key, sem.permits, sem.held) == ("k", 2, [])
    assert one.call(sem, "acquire", blocking=False) is True
    assert one.call(sem, "acquire", blocking=False) is True, "each acquire is a further permit"
    assert sorted(permit.slot for permit in sem.held) == in_use(everywhere) == [0, 1]
    for permit in sem.held:
        assert permit.key == "k"
        assert permit.fence > 0
        assert two.call(permit, "verify") is True
        two.call(permit, "extend", 60)
        assert permit.remaining > 31
        permit.check()
    assert one.call(sem, "available") == 0
    assert [info.fence for info in two.call(other, "holders")] == [
        each.fence for each in sorted(sem.held, key=lambda permit: permit.slot)
    ]
    assert [info.owner for info in one.call(sem, "holders")] == ["***", "***"]
    assert two.call(other, "acquire", timeout=0.05) is False
    two.call(sem, "release")
    assert one.call(other, "acquire", blocking=False) is True
    assert one.call(sem, "available") == 0
    with pytest.raises(PermitNotHeld, match="released too many times") as caught:
        one.call(sem, "release", 2)
    assert isinstance(caught.value, (ValueError, LockNotHeld))
    one.call(sem, "release")
    two.call(other, "release")
    assert in_use(everywhere) == []
    with pytest.raises(ValueError, match="released too many times"):
        one.call(sem, "release")


def test_permits_that_are_taken_together_show_the_ttl_of_their_holder(protocol: Subject, actor: Actor) -> None:
    """Also those that were collected with the short lease of a waiter: a promoted server keeps a key closed for it."""
    sem = actor.hold(semaphore(protocol, 3, ttl=600), n=3)
    assert [info.ttl for info in actor.call(sem, "holders")] == [600.0] * 3
    actor.call(sem, "release", 3)


def test_a_block_has_a_permit(face: Subject, actor: Actor, other: Actor) -> None:
    """Which is what `with` gives: its slot is a number that nobody else has at the time."""
    sem = semaphore(face, 3, timeout=0.1, ttl=5)
    found: list[Any] = []

    def look() -> None:
        found.append([(permit.slot, permit.fence, permit.state) for permit in sem.held])

    actor.within(sem, look)
    [[(slot, fence, state)]] = found
    assert slot in {0, 1, 2}
    assert state == "held"
    assert fence > 0
    assert in_use(face) == []
    assert other.call(sem, "acquire", n=3)
    full = "could not acquire 'k' within 0.1 s: 3 permits are held, one of them by .*; wait longer"
    with pytest.raises(LockTimeout, match=full) as caught:
        actor.within(sem)
    assert caught.value.holder is not None
    other.call(sem, "release", 3)
    with pytest.raises(ZeroDivisionError):
        actor.within(sem, lambda: 1 / 0)
    assert in_use(face) == []
    assert sem.held == []


def crowd(subject: Subject, flows: list[Actor], make: Callable[[], Any], seconds: float) -> int:
    """Let all flows enter, and stay for some time; how many were in at most."""
    inside, most, mutex = set[int](), [0], threading.Lock()

    def count(slot: int, *, enter: bool) -> None:
        with mutex:
            if enter:
                assert slot not in inside, "nobody else has the slot"
                inside.add(slot)
                most[0] = max(most[0], len(inside))
            else:
                inside.remove(slot)

    async def work(sem: Any) -> None:
        for _ in range(3):
            async with subject.within(sem) as permit:
                count(permit.slot, enter=True)
                await subject.pause(seconds)
                count(permit.slot, enter=False)

    for each in [flow.start(partial(work, make())) for flow in flows]:
        each.result(60)
    return most[0]


def test_at_most_so_many_are_in(protocol: Subject, actors: Actors) -> None:
    """Be it one object for all, or one for each."""
    flows = actors(7)
    shared = semaphore(protocol, 3, timeout=30)
    assert crowd(protocol, flows, lambda: shared, 0.02) == 3
    assert crowd(protocol, flows, partial(semaphore, protocol, 3, timeout=30), 0.02) == 3
    assert in_use(protocol) == []
    assert waiters(protocol) == 0


def test_first_come_first_served(protocol: Subject, actors: Actors) -> None:
    """Who asks for several is not passed by those that ask for one, and gets all or none."""
    one, two, three, four = actors(4)
    first, several, later = (semaphore(protocol, 3, timeout=30) for _ in range(3))
    assert one.call(first, "acquire", n=2)
    waiting = two.start(lambda: getattr(several, protocol.method("acquire"))(n=3))
    time.sleep(0.2)
    behind = three.start(getattr(later, protocol.method("acquire")))
    time.sleep(0.2)
    assert not waiting.done()
    assert not behind.done(), "one is free, and kept for the one that came first"
    assert four.call(semaphore(protocol, 3), "acquire", blocking=False) is False
    one.call(first, "release")
    time.sleep(0.2)
    assert not waiting.done()
    one.call(first, "release")
    assert waiting.result(30) is True
    assert sorted(permit.slot for permit in several.held) == [0, 1, 2]
    assert not behind.done()
    two.call(several, "release", 3)
    assert behind.result(30) is True
    # And none is left behind by one that gives up.
    assert one.call(first, "acquire", n=2)
    assert two.call(several, "acquire", n=2, timeout=0.3) is False
    assert several.held == []
    assert len(in_use(protocol)) == 3
    assert one.call(first, "available") == 0


def test_other_numbers(protocol: Subject, actors: Actors) -> None:
    """The number is the caller's own: while 2 and 4 run, at most 4 are in; it may be changed at any time."""
    one, two = actors(2)
    small, large = semaphore(protocol, 2), two.hold(semaphore(protocol, 4), n=4)
    assert one.call(small, "acquire", blocking=False) is False
    assert one.call(small, "acquire", timeout=0.05) is False
    two.call(large, "release", 4)
    assert one.call(small, "acquire", n=2)
    assert {permit.slot for permit in small.held} == {0, 1}
    assert two.call(large, "acquire", n=2)
    assert two.call(large, "acquire", blocking=False) is False
    small.permits = 5
    assert one.call(small, "acquire", blocking=False) is True
    assert one.call(small, "available") == 0
    for wrong in (0, 10_001, 1.5, True, "3"):
        with pytest.raises((TypeError, ValueError)):
            small.permits = wrong
    for n, why in ((0, "number of permits"), (-1, "number of permits"), (6, "has 5 permits, and so never 6 at a time")):
        with pytest.raises(ValueError, match=why):
            one.call(small, "acquire", n=n)


def test_it_is_renewed(protocol: Subject, actor: Actor, other: Actor) -> None:
    """Also while several are gathered; and no longer once the object is gone."""
    sem = actor.hold(semaphore(protocol, 3, ttl=1.5), n=2)
    assert renewed(protocol)
    assert [permit.state for permit in sem.held] == ["held", "held"]
    assert len(in_use(protocol)) == 2
    slow = semaphore(protocol, 3, ttl=0.9)
    waiting = other.start(lambda: getattr(slow, protocol.method("acquire"))(n=2, timeout=9))
    assert until(lambda: len(in_use(protocol)) == 3), "the one that it has by now"
    first = _newest(protocol)
    assert until(lambda: _newest(protocol) > first), "and which it renews"
    assert len(in_use(protocol)) == 3
    actor.call(sem, "release")
    assert waiting.result(30) is True
    assert [permit.state for permit in slow.held] == ["held", "held"]
    held = sem.held
    del sem, held[:]
    _ = gc.collect()
    assert other.call(slow, "acquire", timeout=9), "of an object that is gone"


def _newest(subject: Subject) -> list[tuple[Any, ...]]:
    """The latest tenure of a slot, and when it ends."""
    where = "lock_key > 'k' AND owner IS NOT NULL"
    return subject.run(f"SELECT fence, expires_at FROM locks WHERE {where} ORDER BY fence DESC LIMIT 1")


def test_who_is_interrupted_leaves_nothing(async_face: Subject, actor: Actor, other: Actor) -> None:
    """A waiter that is cancelled has no permit, nor any of those that it has gathered."""
    sem, _holder = semaphore(async_face, 3, timeout=30), other.hold(semaphore(async_face, 3))

    async def work() -> str:
        task = asyncio.create_task(getattr(sem, async_face.method("acquire"))(n=3))
        await asyncio.sleep(0.3)
        task.cancel()
        try:
            await task
        except asyncio.CancelledError:
            return "cancelled"
        return "acquired"

    assert actor.do(work) == "cancelled"
    assert sem.held == []
    assert until(lambda: len(in_use(async_face)) == 1)
    assert actor.call(semaphore(async_face, 3), "acquire", n=2) is True


def test_an_interrupt_once_they_are_held_leaves_nothing(
    either: Subject, actor: Actor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At the last moment of acquire(), and of the beginning of a block."""

    class Interrupting(dict[Any, Any]):
        def update(self, *given: Any, **more: Any) -> None:
            super().update(*given, **more)
            raise Interrupted

    sem = semaphore(either, 3)
    monkeypatch.setattr(sem, "_held", Interrupting())
    begin: Callable[[], Any]
    for begin in (lambda: actor.call(sem, "acquire", n=2), lambda: actor.within(sem)):
        with pytest.raises(Interrupted):
            begin()
        assert sem.held == in_use(either) == []


def test_an_interrupt_among_several_leaves_none(either: Subject, actor: Actor, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither the permit that has begun, nor the tenures of those that have not."""
    sem = semaphore(either, 3)
    interrupt(monkeypatch, entering, "acquire", Interrupted, at=2)
    with pytest.raises(Interrupted):
        actor.call(sem, "acquire", n=3)
    assert sem.held == in_use(either) == []


def test_an_interrupted_release_leaves_all(either: Subject, actor: Actor, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also those whose turn had not come; the interrupt is raised afterwards."""
    sem = actor.hold(semaphore(either, 3), n=3)
    interrupt(monkeypatch, tenures, "end", Interrupted)
    with pytest.raises(Interrupted):
        actor.call(sem, "release", 3)
    assert sem.held == in_use(either) == []


def test_a_permit_by_its_own_methods(either: Subject, actor: Actor, other: Actor) -> None:
    """A permit of `permit()` is a lock, which is acquired, detached and released; a block that lost its own ends."""
    sem = semaphore(either, 2)
    permit = actor.hold(sem.permit())
    assert actor.get(permit, "slot") in {0, 1}
    assert sem.held == []
    with pytest.raises(PermitNotHeld):
        actor.call(sem, "release")
    actor.call(permit, "release")
    assert in_use(either) == []
    assert actor.call(sem, "acquire", n=2)
    first, second = sem.held
    token = actor.call(first, "detach")
    assert len(in_use(either)) == 2
    with pytest.raises(PermitNotHeld):
        actor.call(sem, "release", 2)
    actor.call(sem, "release")
    assert second.slot is None
    gone = weakref.ref(first)
    del first
    assert actor.call(sem, "acquire", n=1)
    assert until(lambda: gc.collect() >= 0 and gone() is None), "the semaphore keeps no permit that was detached"
    actor.call(sem, "release")
    attached = other.do(partial(either.api, "attach", token))
    assert [attached.slot] == in_use(either)
    with pytest.raises(LockLost) as used:
        actor.do(partial(either.api, "attach", token))
    assert used.value.reason is Reason.USED
    other.call(attached, "release")
    assert in_use(either) == []


def test_one_that_waits_for_a_permit_is_not_shown_as_the_holder(protocol: Subject, actors: Actors) -> None:
    """It is the next, as the row of the semaphore's key says; the permits are rows of their own."""
    one, two, three = actors(3)
    holder, sem = one.hold(semaphore(protocol, 2), n=2), semaphore(protocol, 2)
    entered = two.start(lambda: getattr(sem, protocol.method("acquire"))(timeout=9))
    desk = Desk(protocol)
    assert until(lambda: [row.state for row in desk.survey()] == ["waiting", "held", "held"])
    full = "2 permits are held, and before this one comes .* until permits are free"
    with pytest.raises(LockTimeout, match=full):
        three.within(semaphore(protocol, 2, timeout=0.1))
    one.call(holder, "release", 2)
    assert entered.result(30)
    assert until(lambda: [row.state for row in desk.survey()] == ["held"])  # its place is deleted behind the caller
    two.call(sem, "release")


def test_more_permits_wake_those_that_wait(protocol: Subject, actors: Actors, monkeypatch: pytest.MonkeyPatch) -> None:
    """At once, and not when they would ask again."""
    timed(monkeypatch, waiter_ttl=60.0, **SELDOM)
    one, two, three = actors(3)
    sem = one.hold(semaphore(protocol, 1, ttl=600, slow_wait=None))
    waiting = [each.start(lambda: getattr(sem, protocol.method("acquire"))(timeout=30)) for each in (two, three)]
    assert until(lambda: any(SHARE in key for key, _ in list(runtime.current.wakeups._registered))), "one is the next"
    sem.permits = 3
    assert [each.result(8) for each in waiting] == [True, True]
    one.call(sem, "release", 3)


def test_the_semaphore_releases_its_permits(either: Subject, actor: Actor) -> None:
    """A permit's own release() is refused, in a block and after acquire(), unless the permit was entered once more."""
    sem = semaphore(either, 4)

    def release() -> Any:
        return getattr(sem.held[0], either.method("release"))()

    wrong: Callable[[], Any]
    for wrong in (lambda: actor.within(sem, release), lambda: actor.call(sem.held[0], "release")):
        with pytest.raises(PermitNotHeld, match="released by the end of its `with`, or by the semaphore's release"):
            wrong()
        assert len(in_use(either)) == len(sem.held)
        assert actor.call(sem, "acquire", n=2)
    assert [permit.slot for permit in sem.held[:2]] == in_use(either)[:2], "one acquire's in the order of the slots"
    again = actor.hold(sem.held[0])
    actor.call(again, "release")
    assert actor.get(again, "count") == 1
    actor.call(sem, "release", len(sem.held))
    assert in_use(either) == []


def test_a_flow_releases_its_own_permits_first(either: Subject, actor: Actor, other: Actor) -> None:
    """Though another one has acquired a later one; and then whatever the object holds."""
    sem = actor.hold(semaphore(either, 3))
    [mine] = sem.held
    assert other.call(sem, "acquire")
    [theirs] = [permit for permit in sem.held if permit is not mine]
    actor.call(sem, "release")
    assert sem.held == [theirs]
    actor.call(sem, "release")
    assert sem.held == in_use(either) == []


def test_the_semaphore_leaves_what_it_has_entered_itself(either: Subject, actor: Actor) -> None:
    """A permit that its caller has acquired once more stays held, for its caller to release; and it is one permit."""
    sem = actor.hold(semaphore(either, 4), n=2)
    permit = actor.hold(sem.held[0])
    actor.call(sem, "release", 2)
    assert (sem.held, len(in_use(either)), actor.get(permit, "count")) == ([], 1, 1)
    actor.call(permit, "release")
    assert in_use(either) == []
    assert actor.call(permit, "acquire")
    assert len(in_use(either)) == 1
    actor.call(permit, "release")
    assert in_use(either) == []


@pytest.mark.parametrize("subject", PROTOCOL[:2], indirect=True, ids=str)
def test_a_permit_that_its_caller_enters_is_not_of_the_with_of_the_semaphore(subject: Subject, actor: Actor) -> None:
    """An ExitStack that has entered the semaphore ends its own permit, and the one that is entered stays."""
    api = semaphore(subject, 3)

    def body() -> None:
        with contextlib.ExitStack() as stack:
            mine = stack.enter_context(api)
            assert api.acquire()
            [taken] = [each for each in api.held if each is not mine]
            with taken:
                stack.close()
                assert api.held == [taken]
                assert taken.count == 2
            api.release()

    actor.do(body)
    assert not actor.do(lambda: api.held)
