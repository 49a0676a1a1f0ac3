"""The queue as data: circles of waiters, single faults, and what a waiter believes.

All orders of steps are in `tests.core.test_small_worlds`.
"""

from __future__ import annotations

import random
import threading
import time
from typing import Any

import pytest

from dblock.core.acquire import acquiring, handover
from dblock.core.acquire.services import WaiterServices
from dblock.core.acquire.waiting import Attempt
from dblock.core.errors import StoreUnanswered
from dblock.core.protocol import queue
from dblock.core.protocol.deadlock import deadlock
from dblock.core.protocol.queue import QueuePlace
from dblock.core.protocol.steps import Execute, Rows, Steps
from dblock.core.statements import DIALECTS
from dblock.core.statements.common import FLOW
from dblock.core.values import Grant, Tenure
from dblock.core.wakeup.registry import Message, Wakeup, Wakeups
from tests.support.model import World, lost_after, play, wish
from tests.support.steps import NO_STORE

KINDS = ("postgresql", "mysql")
HOUR = 3600.0


class Kept(WaiterServices):
    """Places last as long as they are needed."""

    def keep(self, place: QueuePlace) -> bool:
        return True


class Called(Kept):
    """And the database calls whose turn it is."""

    notifications_ready = True


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


# -- single faults, one at a time


def held_by(world: World, owner: str = "rival", ttl: float = 5.0) -> Tenure:
    """Somebody holds the key."""
    fence = world._begin(world.rows.get("k"), {"key": "k", "owner": owner, "ttl": ttl, "life": ttl})[0][0]
    return Tenure("k", owner, fence)


def waiter(world: World, timeout: float | None = None, ttl: float = 30.0) -> Steps[Any]:
    """A flow that wants the key."""
    return acquiring.acquire(Attempt(wish(ttl=ttl, starts_on_place_lease=False), world.site(), timeout, Kept))


def joining(world: World, owner: str, channel: str = "elsewhere") -> int:
    """Somebody else stands in the queue."""
    return int(world._join({"key": "k", "owner": owner, "ttl": 9.0, "waiter_ttl": HOUR, "channel": channel})[0][0])


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


def test_a_short_turn_is_not_slept_through() -> None:
    """The notification got lost: a waiter polls often enough to find its grant, which lasts for its ttl only."""
    world = World()
    tenure, joined = held_by(world, ttl=60.0), list[Rows]()

    def served(step: Execute) -> Rows:
        joined.append(world.execute(step))
        _ = world.execute(Execute(NO_STORE, world.dialect.grant, {**tenure._asdict(), "first": 1}))
        return joined[-1]

    waits = acquiring.acquire(Attempt(wish(ttl=1.0, starts_on_place_lease=False), world.site(), None, Called))
    grant = play(world, waits, {("join", number): served for number in range(9)})
    assert isinstance(grant, Grant)
    assert len(joined) == 1


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
    assert play(world, handover.end(world.site(), Grant(tenure)), {}) is True
    assert world.rows["k"]["served"] == world.rows["k"]["last"] == ticket


def test_what_was_accepted_in_an_outage_is_given_back() -> None:
    """No answer came for as long as the wait lasted: the key is not left to a tenure that nobody knows of."""
    world = World()
    _ = held_by(world, ttl=0.5)
    lost = {("accept", n): lost_after(world) for n in range(200)}
    with pytest.raises(StoreUnanswered):
        play(world, waiter(world, timeout=2.0), lost)
    assert world.rows["k"]["owner"] is None
    assert not world.standing()


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
    place, owner = QueuePlace("owner", 5, 100.0, 100.0, 99.0), "owner"
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
    waiter = Attempt(wish(), world.site(), 9e9)
    waiter.enter(None)
    place = QueuePlace(waiter.owner, 5, world.time - 3, world.time, world.time - 3)
    waiter.wakeup.message = Message("k", 5, 7, 5000, queue.proof(5, 7, 5000, place.owner))
    assert play(world, waiter._grant_by_message(place), {}) is None, "too late to be believed without an accept"
    place.sent = world.time
    assert play(world, waiter._grant_by_message(place), {}) is None


@pytest.mark.parametrize("kind", KINDS)
def test_a_heartbeat_moves_trust_for_those_alone_whom_it_kept(kind: str) -> None:
    """One that was granted the key in the meantime has no place any more, and its lease in the row does not grow."""
    world = World(dialect=DIALECTS[kind])
    tenure = held_by(world)
    places = []
    for owner in ("first", "second"):
        ticket = joining(world, owner)
        _ = world._announce({"key": "k", "ticket": ticket})
        places.append(QueuePlace(owner, ticket, world.time, world.time, world.time))
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
