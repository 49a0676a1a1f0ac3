"""The queue as data: random schedules in which nobody looks unless called, and the order of service.

In `World` a statement may begin, see the waiters of that moment, and get at the key's row only after others have
changed it, as under READ COMMITTED: that is how a releaser misses a waiter.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import pytest

from dblock.core.acquire import acquiring, handover
from dblock.core.acquire.services import PollingOnly
from dblock.core.acquire.waiting import Waiter
from dblock.core.errors import StoreBusy, StoreConflict, StoreUnanswered
from dblock.core.protocol import queue, tenures
from dblock.core.protocol.deadlock import deadlock
from dblock.core.protocol.steps import Execute, Rows, Sleep, Steps, Wait
from dblock.core.statements import DIALECTS
from dblock.core.values import Grant, Tenure
from dblock.core.wakeup.registry import Wakeup, Wakeups
from tests.conftest import timed
from tests.support.model import World, lost_after, play, raising, wish

KINDS = ("postgresql", "mysql")
HOUR = 3600.0


class Kept(PollingOnly):
    """Places last as long as they are needed."""

    def keep(self, owner: str, wakeup: Wakeup) -> bool:
        return True


class Called(Kept):
    """And the database calls whose turn it is."""

    called = True


@dataclass
class Flow:
    """One flow that takes the key some times; it may die anywhere, and wait for an hour unless it is called."""

    world: World
    chance: random.Random
    name: int
    cycles: int
    steps: Steps[Any] | None = None
    reply: Any = None
    wakes: float = 0.0
    wakeup: Wakeup | None = None
    under_way: tuple[Execute, set[str]] | None = None
    holding: bool = False
    done: bool = False

    def life(self, log: list[tuple[int, int]]) -> Steps[None]:
        site = self.world.site()
        for _ in range(self.cycles):
            grant = yield from acquiring.acquire(site, wish(ttl=2 * HOUR), None, Kept)
            assert isinstance(grant, Grant)
            self.holding = True
            log.append((self.name, grant.ticket))
            if self.chance.random() < 0.5:
                yield Sleep(self.chance.choice((0.001, 0.1)))
            self.holding = False
            assert (yield from handover.release(site, grant.tenure, 1, grant.ticket))
            if self.chance.random() < 0.5:
                yield Sleep(self.chance.choice((0.001, 0.1)))

    def ready(self) -> bool:
        return not self.done and (
            self.wakes <= self.world.time or (self.wakeup is not None and self.wakeup._event.is_set())
        )

    def run(self) -> None:
        """One step further: a statement begins or takes effect."""
        assert self.steps is not None
        self.wakes = self.world.time
        if self.under_way is not None:
            (step, seen), self.under_way = self.under_way, None
            self.reply = self.world.execute(step, seen)
        try:
            found = self.steps.send(self.reply)
        except StopIteration:
            self.done = True
            return
        self.reply, self.wakeup = None, None
        if isinstance(found, Execute):
            self.under_way = found, self.world.snapshot()
        else:
            self.wakes = self.world.time + found.seconds
            self.wakeup = found.wakeup if isinstance(found, Wait) else None


def schedule(seed: int, kind: str, flows: int = 4, cycles: int = 5) -> tuple[World, list[tuple[int, int]]]:
    """Run flows to their end in a random order; time passes only when nobody can do anything."""
    chance, world, log = random.Random(seed), World(dialect=DIALECTS[kind]), list[tuple[int, int]]()
    crowd = [Flow(world, chance, name, cycles) for name in range(flows)]
    for flow in crowd:
        flow.steps = flow.life(log)
    begun = world.time
    while not all(flow.done for flow in crowd):
        ready = [flow for flow in crowd if flow.ready()]
        if not ready:
            world.time = min(flow.wakes for flow in crowd if not flow.done)
            assert world.time < begun + HOUR, f"somebody was forgotten: {log}"
            continue
        chance.choice(ready).run()
        assert sum(flow.holding for flow in crowd) <= 1
    return world, log


@pytest.fixture
def deaf(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody looks by himself but after an hour; and places last for longer."""
    timed(monkeypatch, waiter_ttl=10 * HOUR)
    monkeypatch.setattr(Waiter, "_until_next_look", lambda *_, **__: HOUR)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.usefixtures("deaf")
def test_no_wake_up_is_lost(kind: str) -> None:
    """Whatever the order of statements, whoever waits is called, or sees the key free when it looks after joining."""
    waited = 0
    for seed in range(400):
        world, log = schedule(seed, kind)
        assert len(log) == 20
        waited += sum(ticket > 0 for _, ticket in log)
        assert not world.waiters
        assert world.rows["k"]["owner"] is None
        assert world.rows["k"]["last"] == world.rows["k"]["served"]
    assert waited > 3000


@pytest.mark.parametrize("kind", KINDS)
def test_the_order_is_that_of_the_tickets(kind: str) -> None:
    """Nobody is served before somebody who has announced a lower ticket; and newcomers do not overtake waiters."""
    for seed in range(200):
        world, log = schedule(seed, kind)
        in_order(world, log)


@pytest.mark.parametrize("broken", ["announce", "queue_status", "release", "barge", "ring", "order"])
@pytest.mark.usefixtures("deaf")
def test_the_schedules_catch_a_broken_queue(broken: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With one guard removed somebody is forgotten, or overtaken: the tests above can fail."""
    take, join, seen = World._take, World._join, World._queue
    if broken == "announce":  # the key's row does not say that there is a queue

        def join_silently(self: World, p: dict[str, Any]) -> Any:
            last = self.rows[p["key"]]["last"] if p["key"] in self.rows else 0
            rows = join(self, p)
            if rows:
                self.rows[p["key"]]["last"] = last
            return rows

        monkeypatch.setattr(World, "_join", join_silently)
        monkeypatch.setattr(World, "_announce", lambda *_: [()])
    elif broken == "queue_status":  # a waiter does not look after joining

        def look(database: Any, key: str, until: float, owner: str = "", ticket: int = 0) -> Any:
            yield from ()
            return queue.QueueStatus(False, HOUR, 1, ticket, 1, True)

        monkeypatch.setattr(queue, "status", look)
    elif broken == "release":  # what a releaser sees of the queue is taken for the whole of it

        def release(site: Any, tenure: Any, count: int, ticket: int = 0) -> Any:
            if ticket and (yield from handover.grant(site, tenure.key, ticket + 1, tenure)):
                return True
            left = yield from tenures.release(site.database, tenure, count)
            if left.waiting and not ticket:
                _ = yield from handover.grant_next(site, tenure.key, left.waiting)
            return True

        monkeypatch.setattr(handover, "release", release)
    elif broken == "barge":
        monkeypatch.setattr(World, "_take", lambda self, p: take(self, {**p, "fair": 0}))
    elif broken == "order":
        monkeypatch.setattr(World, "_queue", lambda *args: list(reversed(seen(*args))))
    else:
        monkeypatch.setattr(Wakeups, "notify", lambda *_: None)
    with pytest.raises(AssertionError):
        for kind in KINDS:
            for seed in range(300):
                in_order(*schedule(seed, kind))


def in_order(world: World, log: list[tuple[int, int]]) -> None:
    """Those who waited were served in the order of their tickets, and nobody else while somebody waited."""
    served = [ticket for _, ticket in log if ticket]
    assert served == sorted(served) == world.served.get("k", [])
    assert not world.barged


def told(owner: str, rows: list[tuple[Any, ...]], *, lost: bool = False) -> tuple[tuple[str, str], ...]:
    """The circle that a waiter is told of when the database shows those waits."""
    steps = deadlock(World().database(), owner, () if lost else (owner[:-1] + "2",), 2000.0)
    assert isinstance(next(steps), Execute)
    with pytest.raises(StopIteration) as done:
        steps.send(rows)
    return done.value.value.cycle if done.value.value else ()


def wait_of(flow: str, key: str, ticket: int, holder: str) -> tuple[Any, ...]:
    """A row of `waits`: flows are named by one letter, which their tokens begin with sixteen times."""
    return (flow * 16 + "1", key, ticket, "host", 1, flow, holder * 16 + "2", "host", 1, holder)


def test_only_the_youngest_of_a_circle_gives_way() -> None:
    """Also when all of them look at once; who waits for one in the circle, but holds nothing of it, never does."""
    circle = [wait_of("a", "k2", 5, "b"), wait_of("b", "k3", 9, "c"), wait_of("c", "k1", 7, "a")]
    rows = [*circle, wait_of("d", "k2", 1, "b"), wait_of("e", "k4", 12, "f")]
    for seed in range(20):
        random.Random(seed).shuffle(rows)
        cycles = {flow: told(flow * 16 + "1", rows) for flow in "abcdef"}
        assert {flow for flow, cycle in cycles.items() if cycle} == {"b"}
        assert [key for key, _ in cycles["b"]] == ["k3", "k1", "k2"]
    tied = [wait_of("a", "k2", 9, "b"), wait_of("b", "k3", 5, "c"), wait_of("c", "k1", 9, "a")]
    assert [flow for flow in "abc" if told(flow * 16 + "1", tied)] == ["c"], "two keys gave out one ticket"
    other_thread = [wait_of("a", "k2", 5, "b"), (*wait_of("b", "k1", 9, "a")[:9], "who attached to the token")]
    assert not any(told(flow * 16 + "1", other_thread) for flow in "ab")
    alone = [wait_of("a", "k", 5, "a")]
    assert [key for key, _ in told("a" * 16 + "1", alone)] == ["k"]
    assert not told("a" * 16 + "1", alone, lost=True), "what was lost ends by itself"


# -- single faults, one at a time


def held_by(world: World, owner: str = "rival", ttl: float = 5.0) -> Tenure:
    """Somebody holds the key."""
    fence = world._begin(world.rows.get("k"), {"key": "k", "owner": owner, "ttl": ttl, "life": ttl})[0][0]
    return Tenure("k", owner, fence)


def waiter(world: World, timeout: float | None = None, ttl: float = 30.0) -> Steps[Any]:
    """A flow that wants the key."""
    return acquiring.acquire(world.site(), wish(ttl=ttl), timeout, Kept)


def joining(world: World, owner: str) -> int:
    """Somebody else stands in the queue."""
    return int(world._join({"key": "k", "owner": owner, "ttl": 9.0, "waiter_ttl": HOUR, "channel": "elsewhere"})[0][0])


@pytest.mark.parametrize("kind", KINDS)
def test_who_waits_for_ever_is_not_sent_away_when_the_row_goes(kind: str) -> None:
    """Deleted, and created again by somebody else before the waiter has looked twice: it waits for that one."""
    world = World(dialect=DIALECTS[kind])
    _ = held_by(world)

    def gone(step: Execute) -> Any:
        del world.rows["k"]
        rows = world.execute(step)
        _ = held_by(world, "next", 3.0)
        return rows

    grant = play(world, waiter(world), {("queue_status", 1): gone})
    assert isinstance(grant, Grant)
    assert not world.waiters


def test_a_grant_that_is_answered_too_late_is_none() -> None:
    """The lease has ended before the answer: the waiter stands in the queue anew."""
    world = World()
    _ = held_by(world, ttl=0.5)

    def slowly(step: Execute) -> Any:
        rows = world.execute(step)
        world.time += 40
        return rows

    grant = play(world, waiter(world), {("accept", 0): slowly})
    assert isinstance(grant, Grant)
    assert world.time < grant.trusted_until
    assert world.rows["k"]["owner"] == grant.tenure.owner


def test_a_short_turn_is_not_slept_through() -> None:
    """The call got lost: a waiter looks often enough to find what it was granted, which lasts for its ttl only."""
    world = World()
    tenure, joined = held_by(world, ttl=60.0), list[Rows]()

    def served(step: Execute) -> Rows:
        joined.append(world.execute(step))
        _ = world.execute(Execute(world.dialect.queue.grant, {**tenure._asdict(), "first": 1}))
        return joined[-1]

    waits = acquiring.acquire(world.site(), wish(ttl=1.0), None, Called)
    grant = play(world, waits, {("join", number): served for number in range(9)})
    assert isinstance(grant, Grant)
    assert len(joined) == 1


def test_a_last_look_that_is_not_answered() -> None:
    """The time is up all the same: the waiter is told who had the key, and has left the queue."""
    for error in (StoreUnanswered, StoreConflict):
        world = World()
        tenure = held_by(world, ttl=60.0)
        silent = {(name, n): raising(error("late")) for name in ("queue_status", "inspect") for n in range(1, 200)}
        found = play(world, waiter(world, timeout=0.5), silent)
        assert found.holder.owner == tenure.owner
        assert not world.waiters


def test_what_was_accepted_in_an_outage_is_given_back() -> None:
    """No answer came for as long as the wait lasted: the key is not left to a tenure that nobody knows of."""
    world = World()
    _ = held_by(world, ttl=0.5)
    lost = {("accept", n): lost_after(world) for n in range(200)}
    with pytest.raises(StoreUnanswered):
        play(world, waiter(world, timeout=2.0), lost)
    assert world.rows["k"]["owner"] is None
    assert not world.waiters


def test_a_release_whose_pass_on_was_not_answered() -> None:
    """The next one has the key: nothing was lost, and all of this process look."""
    world = World()
    tenure = held_by(world)
    ticket = joining(world, "heir")
    wakeup = Wakeup()
    world.wakeups.register("k", ticket, wakeup)
    try:
        released = handover.release(world.site(), tenure, 1, ticket - 1)
        assert play(world, released, {("grant", 0): lost_after(world)}) is True
        assert wakeup.consume()
    finally:
        world.wakeups.unregister("k", ticket, wakeup)
    assert world.rows["k"]["owner"] == "heir"


@pytest.mark.parametrize("kind", KINDS)
def test_a_release_that_is_broken_off_when_it_has_handed_over(kind: str) -> None:
    """Whoever has the key is told all the same: one of this process, or of another one."""
    world = World(dialect=DIALECTS[kind])
    tenure = held_by(world)
    world.listening["elsewhere"] = Wakeups()
    ticket, wakeup = joining(world, "heir"), Wakeup()

    def interrupted(step: Execute) -> Rows:
        _ = world.execute(step)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        play(world, handover.pass_on(world.site(), tenure, ticket - 1, 0), {("grant", 0): interrupted})
    assert world.rows["k"]["owner"] == "heir"
    assert world.calls == ["elsewhere"]
    tenure = Tenure("k", "heir", world.rows["k"]["fence"])
    ticket = joining(world, "next")
    world.wakeups.register("k", ticket, wakeup)
    with pytest.raises(KeyboardInterrupt):
        play(world, handover.pass_on(world.site(), tenure, ticket - 1, 0), {("grant", 0): interrupted})
    world.wakeups.unregister("k", ticket, wakeup)
    assert world.rows["k"]["owner"] == "next"
    assert wakeup.consume()
    assert world.calls == ["elsewhere"]


@pytest.mark.parametrize("kind", KINDS)
def test_a_hand_over_that_finds_a_row_locked_calls_the_first(kind: str) -> None:
    """It goes on trying, and need not find out by itself that the key was given back."""
    world = World(dialect=DIALECTS[kind])
    tenure, wakeup = held_by(world), Wakeup()
    tickets = list[int]()
    for owner in ("dead", "first", "second"):
        tickets.append(joining(world, owner))
        _ = world._announce({"key": "k", "ticket": tickets[-1]})
    world.waiters["dead"]["expires_at"] = world.time
    world.wakeups.register("k", tickets[1], wakeup)
    busy = {("grant", number): raising(StoreBusy("a stranger's")) for number in range(9)}
    assert play(world, handover.release(world.site(), tenure, 1), busy) is True
    assert world.rows["k"]["owner"] is None
    assert wakeup.consume()
    world.wakeups.unregister("k", tickets[1], wakeup)


def test_two_wakeups_with_one_ticket() -> None:
    """Of two databases, or of two engines: both are woken, and one that is unregistered leaves the other."""
    registry, one, other = Wakeups(), Wakeup(), Wakeup()
    registry.register("k", 5, one)
    registry.register("k", 5, other)
    assert registry.notify("k", 5)
    assert [one.consume(), other.consume()] == [True, True]
    registry.unregister("k", 5, one)
    assert registry.notify("k", 5)
    assert [one.consume(), other.consume()] == [False, True]
    registry.unregister("k", 5, other)
    assert not registry.anybody_waits()


def test_a_wakeup_that_is_notified_before_it_is_registered() -> None:
    """The key may be handed over before the waiter has its ticket."""
    registry, wakeup = Wakeups(), Wakeup()
    assert not registry.notify("k", 12345)
    registry.register("k", 12345, wakeup)
    assert wakeup.consume()
    registry.unregister("k", 12345, wakeup)
