"""The queue as data: random schedules in which nobody polls unless notified, and the order of service.

In `World` a statement may begin, see the waiters of that moment, and get at the key's row only after others have
changed it, as under READ COMMITTED: that is how a releaser misses a waiter.
"""

from __future__ import annotations

import contextlib
import random
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from types import FrameType
from typing import Any, cast

import pytest

from dblock.core.acquire import acquiring, handover
from dblock.core.acquire.listener import Listener
from dblock.core.acquire.services import WaiterServices
from dblock.core.acquire.waiting import Attempt
from dblock.core.errors import StoreBusy, StoreConflict, StoreUnanswered
from dblock.core.protocol import queue, tenures
from dblock.core.protocol.deadlock import deadlock
from dblock.core.protocol.queue import Place
from dblock.core.protocol.steps import Execute, Rows, Sleep, Steps
from dblock.core.statements import DIALECTS
from dblock.core.statements.common import FLOW
from dblock.core.tokens import new_secret
from dblock.core.values import Grant, Identity, LockInfo, Tenure
from dblock.core.wakeup.registry import Message, Wakeup, Wakeups
from tests.conftest import timed
from tests.core.test_small_worlds import joins_silently
from tests.support.lab import until
from tests.support.model import Scheduled, World, lost_after, play, raising, to_the_end, wish
from tests.support.steps import NO_STORE

KINDS = ("postgresql", "mysql")
HOUR = 3600.0


class Kept(WaiterServices):
    """Places last as long as they are needed."""

    def keep(self, place: Place) -> bool:
        return True


class Called(Kept):
    """And the database calls whose turn it is."""

    notifications_ready = True


@dataclass
class Flow(Scheduled):
    """One flow that takes the key some times; it may die anywhere, and wait for an hour unless it is called."""

    name: int = 0
    holding: bool = False

    def life(self, log: list[tuple[int, int]], cycles: int) -> Steps[None]:
        site = self.world.site()
        for _ in range(cycles):
            grant = yield from acquiring.acquire(Attempt(site, wish(ttl=2 * HOUR), None, Kept))
            assert isinstance(grant, Grant)
            self.holding = True
            log.append((self.name, grant.ticket))
            if self.chance.random() < 0.5:
                yield Sleep(NO_STORE, self.chance.choice((0.001, 0.1)))
            self.holding = False
            assert (yield from handover.release(site, grant))
            if self.chance.random() < 0.5:
                yield Sleep(NO_STORE, self.chance.choice((0.001, 0.1)))


def schedule(seed: int, kind: str, flows: int = 4, cycles: int = 5) -> tuple[World, list[tuple[int, int]]]:
    """Run flows to their end in a random order."""
    chance, world, log = random.Random(seed), World(dialect=DIALECTS[kind]), list[tuple[int, int]]()
    crowd = [Flow(world, chance, name=name) for name in range(flows)]
    for flow in crowd:
        flow.steps = flow.life(log, cycles)

    def check() -> None:
        assert sum(flow.holding for flow in crowd) <= 1

    to_the_end(crowd, HOUR, check)
    return world, log


@pytest.fixture
def deaf(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody polls before an hour has passed; and places last longer."""
    timed(monkeypatch, waiter_ttl=10 * HOUR, listen_after=10 * HOUR)
    monkeypatch.setattr(Attempt, "_until_next_poll", lambda *_, **__: HOUR)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.usefixtures("deaf")
def test_no_wake_up_is_lost(kind: str) -> None:
    """Whatever the order of statements, a waiter is notified, or sees the key free when it polls after joining."""
    waited = 0
    for seed in range(400):
        world, log = schedule(seed, kind)
        assert len(log) == 20
        waited += sum(ticket > 0 for _, ticket in log)
        assert not world.standing()
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
    take, seen = World._take, World._queue
    if broken == "announce":  # the key's row does not say that there is a queue
        joins_silently(monkeypatch.setattr)
        monkeypatch.setattr(World, "_announce", lambda *_: [()])
    elif broken == "queue_status":  # a waiter does not poll after joining

        def look(database: Any, key: str, until: float, owner: str = "", ticket: int = 0) -> Any:
            yield from ()
            return queue.QueueStatus(False, HOUR, 1, ticket, 1, True)

        monkeypatch.setattr(queue, "status", look)
    elif broken == "release":  # what a releaser sees of the queue is taken for the whole of it

        def release(site: Any, held: Grant) -> Any:
            if held.ticket and (yield from handover.grant(site, held.tenure.key, held.ticket + 1, held)):
                return True
            left = yield from tenures.release(site.database, held.tenure)
            if left.waiting and not held.ticket:
                _ = yield from handover.grant_next(site, held.tenure.key, left.waiting)
            return True

        monkeypatch.setattr(handover, "release", release)
    elif broken == "barge":
        monkeypatch.setattr(World, "_take", lambda self, p: take(self, {**p, "fair": 0}))
    elif broken == "order":
        monkeypatch.setattr(World, "_queue", lambda *args: list(reversed(seen(*args))))
    else:
        monkeypatch.setattr(Wakeups, "notify", lambda *_: True)
    with pytest.raises(AssertionError):
        for kind in KINDS:
            for seed in range(300):
                in_order(*schedule(seed, kind))


def in_order(world: World, log: list[tuple[int, int]]) -> None:
    """Those who waited were served in the order of their tickets, and nobody else while somebody waited."""
    served = [ticket for _, ticket in log if ticket]
    assert served == sorted(served) == world.served.get("k", [])
    assert not world.barged


class Circles:
    """The waits that the database shows, by the waiter's flow, which one letter names."""

    def __init__(self, *waits: tuple[str, str, int, str], idle: str = "", lost: str = "") -> None:
        """Of each its flow, key and ticket, and the key's holder; `idle`: flows that do not wait any more.

        `lost`: those that do not have what the rows say that they hold.
        """
        self.waits, self.idle, self.lost = list(waits), idle, lost
        self.confirmed: dict[str, str] = {}

    def rows(self) -> list[tuple[Any, ...]]:
        """As `chain` answers them."""
        return [
            (place, key, ticket, "host", 1, flow, holder * FLOW, self.confirmed.get(place, ""))
            for flow, key, ticket, holder in self.waits
            for place in [f"{flow * FLOW}{ticket}"]
        ]

    def look(self, flow: str) -> list[str]:
        """The keys of the circle that a flow is told of; what it confirms is written down."""
        newest = max(ticket for waiter, _, ticket, _ in self.waits if waiter == flow)
        owner, held = f"{flow * FLOW}{newest}", [] if flow in self.lost else [flow * FLOW]
        steps = deadlock(World().database(), owner, held, 2000.0)
        reply: Any = None
        while True:
            try:
                step = steps.send(reply)
            except StopIteration as done:
                return [key for key, _ in done.value.cycle] if done.value else []
            assert isinstance(step, Execute)
            reply = self.rows()
            if step.statement.name == "confirm":
                self.confirmed[owner] = str(step.parameters["circle"])

    def told(self, flows: str, seed: int = 0) -> dict[str, list[str]]:
        """Which flows are told of a circle, and its keys, when all poll several times."""
        chance, found = random.Random(seed), dict[str, list[str]]()
        for _ in range(3):
            for flow in chance.sample(flows, len(flows)):
                if flow not in self.idle and (keys := self.look(flow)):
                    found[flow] = keys
        return found


CIRCLE = ("a", "k2", 5, "b"), ("b", "k3", 9, "c"), ("c", "k1", 7, "a")


@pytest.mark.parametrize("seed", range(10))
def test_only_the_youngest_of_a_circle_gives_way(seed: int) -> None:
    """Once the others have confirmed it; who waits for one in the circle, but holds nothing of it, never does."""
    waits = [*CIRCLE, ("d", "k2", 1, "b"), ("e", "k4", 12, "f")]
    random.Random(seed).shuffle(waits)
    circles = Circles(*waits)
    assert not circles.look("b"), "nobody else has said so"
    assert circles.told("abcde", seed) == {"b": ["k3", "k1", "k2"]}
    tied = Circles(("a", "k2", 9, "b"), ("b", "k3", 5, "c"), ("c", "k1", 9, "a"))
    assert list(tied.told("abc", seed)) == ["c"], "two keys gave out one ticket"
    assert Circles(("a", "k", 5, "a")).told("a", seed) == {"a": ["k"]}
    assert not Circles(("a", "k", 5, "a"), lost="a").told("a", seed), "what was lost ends by itself"


@pytest.mark.parametrize("flow", "abc")
@pytest.mark.parametrize("past", ["idle", "lost"])
def test_what_a_flow_does_no_more_closes_no_circle(flow: str, past: str) -> None:
    """The place of a wait that is over, or a tenure that it does not have: it does not confirm the circle."""
    for seed in range(5):
        assert not Circles(*CIRCLE, **{past: flow}).told("abc", seed)


def test_a_circle_is_confirmed_as_a_whole() -> None:
    """What was said of one circle is not said of the next, of which one place or one tenure is another."""
    circles = Circles(*CIRCLE)
    _ = circles.look("a"), circles.look("c")
    circles.waits[2] = ("c", "k1", 8, "d")
    circles.waits.append(("d", "k5", 3, "a"))
    assert not circles.look("b")
    _ = circles.look("d"), circles.look("c")
    assert not circles.look("b"), "a has not looked since"
    _ = circles.look("a")
    assert circles.look("b") == ["k3", "k1", "k5", "k2"]


def test_of_several_places_of_a_flow_the_newest_counts() -> None:
    """The others could not be deleted."""
    left_over = Circles(("a", "k9", 2, "z"), *CIRCLE)
    assert list(left_over.told("abc")) == ["b"]
    assert not Circles(*CIRCLE, ("a", "k9", 11, "z")).told("bc")


# -- single faults, one at a time


def held_by(world: World, owner: str = "rival", ttl: float = 5.0) -> Tenure:
    """Somebody holds the key."""
    fence = world._begin(world.rows.get("k"), {"key": "k", "owner": owner, "ttl": ttl, "life": ttl})[0][0]
    return Tenure("k", owner, fence)


def waiter(world: World, timeout: float | None = None, ttl: float = 30.0) -> Steps[Any]:
    """A flow that wants the key."""
    return acquiring.acquire(Attempt(world.site(), wish(ttl=ttl, starts_on_place_lease=False), timeout, Kept))


def joining(world: World, owner: str, channel: str = "elsewhere") -> int:
    """Somebody else stands in the queue."""
    return int(world._join({"key": "k", "owner": owner, "ttl": 9.0, "waiter_ttl": HOUR, "channel": channel})[0][0])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("held", [True, False])
def test_who_joins_the_queue_hears_whether_somebody_has_the_key(kind: str, held: bool) -> None:
    """So it polls only if nobody has it by then."""
    world, names = World(dialect=DIALECTS[kind]), list[str]()
    _ = held_by(world)
    steps, rows = waiter(world), None
    while isinstance(step := steps.send(rows), Execute):
        names.append(step.statement.name)
        if names[-1] == "join" and not held:
            world.rows["k"].update(owner=None, expires_at=world.time)
        rows = world.execute(step)
        if step.statement.name == "grant":
            break
    announcing = [] if world.announces else ["announce"]
    looking = [] if held else ["grant"] if world.announces else ["queue_status", "grant"]
    once = {"first_waiter", "epoch_status"}
    assert [name for name in names if name not in once] == ["take", "inspect", "join", *announcing, *looking]
    steps.close()


@pytest.mark.parametrize("kind", KINDS)
def test_a_waiter_that_is_notified_before_it_waits_polls(kind: str) -> None:
    """Though it has heard that somebody has the key."""
    world = World(dialect=DIALECTS[kind])
    _ = held_by(world)
    steps, rows = waiter(world), None
    joined = "join" if world.announces else "announce"
    while isinstance(step := steps.send(rows), Execute):
        rows = world.execute(step)
        if step.statement.name == joined:
            [place] = world.waiters.values()
            assert not world.wakeups.notify(Message("k", place["ticket"])), "it has not said yet that it waits"
            break
    look = steps.send(rows)
    assert isinstance(look, Execute)
    assert look.statement.name == "queue_status"
    steps.close()


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
    assert not world.standing()


def test_a_grant_that_is_answered_too_late_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """The lease has ended before the answer: the waiter stands in the queue anew."""
    world = World()
    _ = held_by(world, ttl=0.5)
    timed(monkeypatch, waiter_ttl=50.0)

    def slowly(step: Execute) -> Any:
        rows = world.execute(step)
        world.time += 40
        return rows

    grant = play(world, waiter(world), {("accept", 0): slowly})
    assert isinstance(grant, Grant)
    assert world.time < grant.trusted_until
    assert world.rows["k"]["owner"] == grant.tenure.owner


def test_a_short_turn_is_not_slept_through() -> None:
    """The notification got lost: a waiter polls often enough to find its grant, which lasts for its ttl only."""
    world = World()
    tenure, joined = held_by(world, ttl=60.0), list[Rows]()

    def served(step: Execute) -> Rows:
        joined.append(world.execute(step))
        _ = world.execute(Execute(NO_STORE, world.dialect.queue.grant, {**tenure._asdict(), "first": 1}))
        return joined[-1]

    waits = acquiring.acquire(Attempt(world.site(), wish(ttl=1.0, starts_on_place_lease=False), None, Called))
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
        assert not world.standing()


def test_what_was_accepted_in_an_outage_is_given_back() -> None:
    """No answer came for as long as the wait lasted: the key is not left to a tenure that nobody knows of."""
    world = World()
    _ = held_by(world, ttl=0.5)
    lost = {("accept", n): lost_after(world) for n in range(200)}
    with pytest.raises(StoreUnanswered):
        play(world, waiter(world, timeout=2.0), lost)
    assert world.rows["k"]["owner"] is None
    assert not world.standing()


@pytest.mark.parametrize("broken_off", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_a_hand_over_whose_answer_is_lost(kind: str, broken_off: bool) -> None:
    """The next one has the key, and finds that when it looks: nothing was lost, and nothing is given back twice."""
    world = World(dialect=DIALECTS[kind])
    tenure = held_by(world)
    ticket = joining(world, "heir")
    _ = world._announce({"key": "k", "ticket": ticket})

    def interrupted(step: Execute) -> Rows:
        _ = world.execute(step)
        raise KeyboardInterrupt

    released = handover.pass_on(world.site(), Grant(tenure, ticket - 1))
    if broken_off:
        with pytest.raises(KeyboardInterrupt):
            play(world, released, {("grant", 0): interrupted})
    else:
        assert play(world, released, {("grant", 0): lost_after(world)}) is True
    assert world.rows["k"]["owner"] == "heir"


@pytest.mark.parametrize("kind", KINDS)
def test_a_hand_over_that_finds_a_row_locked_calls_the_first(kind: str) -> None:
    """The first waiter goes on trying, and need not find out by itself that the key was given back."""
    world = World(dialect=DIALECTS[kind])
    tenure, wakeup = held_by(world), Wakeup()
    tickets = list[int]()
    for owner in ("dead", "first", "second"):
        tickets.append(joining(world, owner, "nowhere"))
        _ = world._announce({"key": "k", "ticket": tickets[-1]})
    world.waiters["dead"]["expires_at"] = world.time
    world.wakeups.register("k", tickets[1], wakeup)
    busy = {("grant", number): raising(StoreBusy("a stranger's")) for number in range(9)}
    assert play(world, handover.free(world.site(), Grant(tenure)), busy) is True
    assert world.rows["k"]["owner"] is None
    assert wakeup.consume()
    world.wakeups.unregister("k", tickets[1], wakeup)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dead", [15, 16, 40])
def test_a_queue_of_the_dead_is_forgotten(kind: str, dead: int) -> None:
    """By the release, also where they are more than one statement counts: the next take needs no queue."""
    world = World(dialect=DIALECTS[kind])
    tenure = held_by(world)
    ticket = 0
    for number in range(dead):
        ticket = joining(world, f"dead{number}")
        _ = world._announce({"key": "k", "ticket": ticket})
        world.waiters[f"dead{number}"]["expires_at"] = world.time
    assert play(world, handover.free(world.site(), Grant(tenure)), {}) is True
    assert world.rows["k"]["served"] == world.rows["k"]["last"] == ticket


def test_a_wakeup_that_is_notified_before_it_is_registered() -> None:
    """The key may be handed over before the waiter has its ticket; and a flow that ended leaves nothing behind."""
    registry, wakeup, message = Wakeups(), Wakeup(), Message("k", 12345, 7, 0, "proof")
    assert not registry.notify(message)
    registry.register("k", 12345, wakeup)
    assert wakeup.consume()
    assert wakeup.message == message
    assert registry.anybody_waits()
    del wakeup
    assert not registry.anybody_waits()


def test_waiters_come_and_go_while_others_are_woken() -> None:
    """Waking all of them, in another thread, is not disturbed by that."""
    registry, ended = Wakeups(), threading.Event()

    def come_and_go() -> None:
        while not ended.is_set():
            waiting = [Wakeup() for _ in range(100)]
            for ticket, wakeup in enumerate(waiting):
                registry.register("k", ticket, wakeup)

    flow = threading.Thread(target=come_and_go)
    flow.start()
    try:
        end = time.monotonic() + 0.5
        while time.monotonic() < end:
            registry.notify_all()
            _ = registry.waiting(None)
    finally:
        ended.set()
        flow.join()


class _Away:
    """A database that is away, and lets a listener's thread run."""

    database = "away"
    tries = 0

    def subscribe(self, *_: object) -> None:
        self.tries += 1
        raise OSError("away")

    def in_background(self, function: Callable[[], None]) -> Callable[[], bool]:
        thread = threading.Thread(target=function, daemon=True)
        thread.start()
        return thread.is_alive

    def rest(self, _: float) -> None:
        time.sleep(0.01)


def test_a_listener_is_of_one_database(monkeypatch: pytest.MonkeyPatch) -> None:
    """It goes on for those who wait there, and wakes nobody else."""
    timed(monkeypatch, attention=0.1, linger=0.1)
    wakeups, elsewhere, there, away = Wakeups(), Wakeup("elsewhere"), Wakeup("away"), _Away()
    listener = Listener(cast("Any", away), wakeups, "channel")
    wakeups.register("k", 1, elsewhere)
    wakeups.register("k", 2, there)
    listener.want()
    assert until(lambda: away.tries > 1)
    assert listener._runs()
    assert not there.notified()  # it was not notified before either
    wakeups.unregister("k", 2, there)
    assert until(lambda: not listener._runs(), 5)
    listener.ready = True
    listener._tell_all(ready=False)
    assert not elsewhere.notified()
    wakeups.register("k", 2, there)
    listener.ready = True
    listener._tell_all(ready=False)
    assert there.notified()
    assert not elsewhere.notified()


def test_an_interrupt_ends_no_later_listening(monkeypatch: pytest.MonkeyPatch) -> None:
    """A signal handler that raises at any line of `want`: the next flow that waits begins to listen."""
    timed(monkeypatch, attention=0.05, linger=0.05)
    code, struck = Listener.want.__code__, set[int]()

    def at_another_line(frame: FrameType, event: str, _: object) -> Any:
        if frame.f_code is code and event == "line" and frame.f_lineno not in struck:
            struck.add(frame.f_lineno)
            raise KeyboardInterrupt
        return at_another_line if frame.f_code is code else None

    lines = -1
    while len(struck) > lines:
        lines, away, before = len(struck), _Away(), sys.gettrace()
        listener = Listener(cast("Any", away), Wakeups(), "channel")
        sys.settrace(at_another_line)
        try:
            with contextlib.suppress(KeyboardInterrupt):
                listener.want()
        finally:
            sys.settrace(before)
        other = threading.Thread(target=listener.want)  # who would wait for a lock that nobody releases
        other.start()
        other.join(5)
        assert not other.is_alive()
        assert until(lambda: away.tries > 0, 5)  # noqa: B023
    assert len(struck) > 4


@pytest.mark.parametrize(
    "text",
    [
        "",
        "5",
        "5 6 7 p",
        "5 6 7 p ",
        "x 6 7 p k",
        "5 x 7 p k",
        "5 6 x p k",
        "\u0665 6 7 p k",
        "-5 6 7 p k",
        f"{10**19} 6 7 p k",
    ],
)
def test_messages_that_are_none(text: str) -> None:
    assert Message.read(text) is None


@pytest.mark.parametrize("key", ["k", "a b", " ", "  5 6 - k ", "\u0665", "k\nk"])
def test_a_message_is_read_as_it_was_written(key: str) -> None:
    for message in (Message(key, 5, 6, 4999, "p" * 64), Message(key, 2**63 - 1)):
        assert Message.read(message.text()) == message


def test_a_waiter_believes_only_what_proves_to_know_its_token() -> None:
    """A stranger's word, one about another waiter, an earlier fence, or what is no text at all."""
    place, owner = Place("owner", 5, 100.0, 100.0, 99.0), "owner"
    short = Message("k", 5, 7, 5500, queue.proof(5, 7, 5500, owner))
    for sent, term in ((100.0, 4.5), (102.0, 2.5), (99.0, 5.0)):
        place.sent = sent
        grant = place.granted(short, 30.0, 5.0)
        assert grant is not None
        assert (grant.sent, grant.lasts) == (sent, term), "no longer than what it was given by, whatever kept the place"
    for sent in (104.5, 105.0, 104.46):  # it is over, or so short that two clocks may not agree on it
        place.sent = sent
        assert place.granted(short, 30.0, 5.0) is None
    assert place.granted(short._replace(lasts=5000), 30.0, 5.0) is None
    place.sent = 100.0
    good = Message("k", 5, 7, 0, queue.proof(5, 7, 0, owner))
    grant = place.granted(good, 30.0, 5.0)
    assert grant is not None
    assert grant.tenure == Tenure("k", owner, 7)
    assert (grant.sent, grant.ttl, grant.lasts, grant.trusted_until, grant.ticket) == (100.0, 30.0, 5.0, 104.5, 5)
    for bad in (
        good._replace(fence=8),
        good._replace(proof=""),
        good._replace(proof="\u00e9" * 64),
        good._replace(proof=queue.proof(5, 7, 0, "other")),
        good._replace(proof=queue.proof(6, 7, 0, owner)),
        Message("k", 5),
    ):
        assert place.granted(bad, 30.0, 5.0) is None


def test_what_a_waiter_was_told_is_weighed_once() -> None:
    """A crash has taken the grant back, as an accept shows: no later heartbeat makes it credible again."""
    world = World()
    _ = held_by(world)
    waiter = Attempt(world.site(), wish(), 9e9)
    waiter.enter(None)
    place = Place(waiter.owner, 5, world.time - 3, world.time, world.time - 3)
    waiter.wakeup.message = Message("k", 5, 7, 5000, queue.proof(5, 7, 5000, place.owner))
    assert play(world, waiter._grant_by_message(place), {}) is None, "too late to be believed without an accept"
    place.sent = world.time
    assert play(world, waiter._grant_by_message(place), {}) is None


class _Lent:
    """A socket."""


@pytest.mark.parametrize(
    ("owner", "near"),
    [("a" * 24, True), ("a" * 8 + "b" * 16, True), ("b" * 24, False), (new_secret(), False), (None, False)],
    ids=["same flow", "another process", "another machine", "in hand-over", "free"],
)
def test_a_holder_is_near_by_its_token(owner: str | None, near: bool) -> None:
    """It calls the waiter's socket: one whose token begins with the same machine. Hosts may all have one name."""
    waiter = Attempt(World().site(), wish(flow="a" * 24), 9e9)
    waiter.enter(None)
    waiter.listen_after = 60.0
    who = Identity(waiter.request.host, 1, "t", "p", "")
    waiter.holder = LockInfo("k", owner, 7, 1, 30.0, 1.0, 29.0, "", who)
    assert waiter._is_notified() is False, "without a socket"
    waiter.wakeup.socket = _Lent()  # type: ignore[assignment]
    assert waiter._is_notified() is near


def test_a_holder_that_was_not_read_is_near_if_the_key_goes_round_on_this_machine() -> None:
    """After eight hand-overs in a row here, until one that only a poll found, or a second without contention."""
    world = World()
    site = world.site()

    def expects(key: str = "k") -> bool:
        waiter = Attempt(site, wish(key), 9e9)
        waiter.enter(None)
        waiter.listen_after = 60.0
        waiter.wakeup.socket = _Lent()  # type: ignore[assignment]
        waiter.leave()
        return waiter._is_notified()

    def hand_over(*, here: bool = True) -> None:
        site.note_contention("k")
        site.note_handover("k", here=here)

    site.note_handover("k", here=True)
    assert site._contended == {}, "only keys that are marked are remembered"
    for _ in range(7):
        hand_over()
    assert not expects()
    hand_over()
    assert expects()
    assert not expects("another")
    hand_over(here=False)
    assert not expects()
    for _ in range(8):
        hand_over()
    waiter = Attempt(site, wish(), 9e9)
    waiter.enter(None)
    _ = play(world, waiter._accept_polled(1), {})
    assert not expects()
    for _ in range(7):
        hand_over()
    _ = play(world, waiter._accept_polled(1), {})
    hand_over()
    assert not expects(), "whose predecessor is elsewhere, and whose successor is here"
    for _ in range(8):
        hand_over()
    world.time += 1.1
    assert not expects()


@pytest.mark.parametrize("kind", KINDS)
def test_a_heartbeat_moves_trust_for_those_alone_whom_it_kept(kind: str) -> None:
    """One that was granted the key in the meantime has no place any more, and its lease in the row does not grow."""
    world = World(dialect=DIALECTS[kind])
    tenure = held_by(world)
    places = []
    for owner in ("first", "second"):
        ticket = joining(world, owner)
        _ = world._announce({"key": "k", "ticket": ticket})
        places.append(Place(owner, ticket, world.time, world.time, world.time))
    joined = world.time
    world.time += 1.0
    play(world, queue.heartbeat(world.database(), places, world.time + 1), {})
    assert [place.sent > joined for place in places] == [True, True]
    kept = places[0].sent
    assert play(world, handover.grant(world.site(), "k", 1, Grant(tenure)), {})
    end = world.rows["k"]["expires_at"]
    world.time += 1.0
    play(world, queue.heartbeat(world.database(), places, world.time + 1), {})
    assert places[0].sent == kept
    assert world.rows["k"]["expires_at"] == end
    play(world, queue.heartbeat(world.database(), places[1:], world.time + 1), {})
    assert places[1].sent > kept
