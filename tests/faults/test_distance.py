"""A database 20 and 80 ms away: time-outs are kept, nothing is left behind, and a contended key is served.

Rule: each test waits for a warm connection first. Opening the first one takes a dozen round trips.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Iterator

import pytest

from dblock.core.errors import LockStoreError
from dblock.core.latency import Latency
from tests.contract.test_queue import waiters
from tests.faults.conftest import EACH_WIRE, SEVERAL_WIRES, Wire, name_of
from tests.support.lab import LONG, times, until
from tests.support.subjects import Actor, Subject

DISTANCES = (0.02, 0.08) if LONG else (0.08,)
several = pytest.mark.parametrize("wire", EACH_WIRE, indirect=True, ids=name_of)
some = pytest.mark.parametrize("wire", EACH_WIRE if LONG else EACH_WIRE[1:], indirect=True, ids=name_of)
asynchronous = pytest.mark.parametrize(
    "wire", [each for each in SEVERAL_WIRES if each[1] == "async"], indirect=True, ids=name_of
)


@pytest.fixture(params=DISTANCES, ids=lambda distance: f"{distance * 1e3:g}ms")
def far(request: pytest.FixtureRequest, wire: Wire) -> Iterator[float]:
    """The round trip, in seconds, over connections that are open."""
    distance: float = request.param
    lock = wire.subject.lock("warm", timeout=20)
    for delay in (0.0, distance):
        wire.proxy.delay = delay
        object.__setattr__(lock._place.store().database, "latency", Latency())  # which is the shortest of seconds
        assert wire.actor.call(lock, "acquire")
        wire.actor.call(lock, "release")
    yield distance
    wire.proxy.delay = 0.0


@pytest.fixture
def holder(wire: Wire, actors: Callable[[Subject], Actor]) -> Actor:
    """Somebody near the database."""
    return actors(wire.direct)


@pytest.mark.exact
@several
def test_a_time_out_is_kept_and_leaves_nothing(wire: Wire, far: float, holder: Actor) -> None:
    """`acquire()` returns False in time, keeps its connections, and its place is deleted a moment later."""
    held, wanted = holder.hold(wire.direct.lock("k", ttl=60)), wire.subject.lock("k", timeout=0.6)
    took = list[float]()
    assert wire.actor.call(wanted, "acquire") is False  # warms what a waiter needs
    assert until(lambda: waiters(wire.direct) == 0)
    known = set(wire.proxy._sockets)
    for _ in range(times(3, 4)):
        begun = time.monotonic()
        assert wire.actor.call(wanted, "acquire") is False
        took.append(time.monotonic() - begun)
        assert until(lambda: waiters(wire.direct) == 0, 1.0)
    assert min(took) >= 0.6
    assert sorted(took)[1] < 0.65
    assert all(each.fileno() >= 0 for each in known), "no connection was ended"
    holder.call(held, "release")
    assert wire.actor.call(wanted, "acquire") is True
    wire.actor.call(wanted, "release")


@some
def test_a_contended_key_is_served(wire: Wire, far: float, holder: Actor) -> None:
    """Each of two that wait for a second at most gets the key when the other one gives it back."""
    near, distant = holder.hold(wire.direct.lock("k", timeout=1)), wire.subject.lock("k", timeout=1)
    for _ in range(times(2, 3)):
        waiting = wire.actor.begin(distant, "acquire")
        assert until(lambda: waiters(wire.direct) == 1)
        time.sleep(0.2)
        holder.call(near, "release")
        assert waiting.result(20) is True
        waiting = holder.start(near.acquire)
        assert until(lambda: waiters(wire.direct) == 1)
        time.sleep(0.2)
        wire.actor.call(distant, "release")
        assert waiting.result(20) is True
    holder.call(near, "release")


@asynchronous
def test_a_cancellation_leaves_nothing(wire: Wire, far: float, holder: Actor) -> None:
    """At any moment of taking, waiting and giving back: a second later the key is free, and nobody is in its queue."""
    held, wanted = wire.direct.lock("k", ttl=60), wire.subject.lock("k", timeout=20)

    async def cycle() -> None:
        if await wanted.acquire():
            await wanted.release()

    async def broken_off(seconds: float) -> None:
        task = asyncio.create_task(cycle())
        await asyncio.sleep(seconds)
        _ = task.cancel()
        _ = await asyncio.gather(task, return_exceptions=True)

    chance = random.Random(7)
    for contended in [True, False] * (10 if LONG else 2):
        if contended:
            holder.call(held, "acquire")
        wire.actor.do(lambda: broken_off(chance.uniform(0.0, 6 * far)))
        if contended:
            holder.call(held, "release")
        assert until(lambda: waiters(wire.direct) == 0, 2.0)
        assert holder.call(held, "acquire", timeout=5)
        holder.call(held, "release")


@some
@pytest.mark.exact
def test_a_try_on_a_free_and_on_a_held_key(wire: Wire, far: float, holder: Actor) -> None:
    """It has its answer, over a connection that is open: the time for it follows the measured distance."""
    held, wanted = wire.direct.lock("k", ttl=60), wire.subject.lock("k")

    def tried(key: str) -> bool | None:
        """What a try says; None where a busy machine was too slow for an answer."""
        lock = wire.subject.lock(key)
        try:
            got: bool = wire.actor.call(lock, "acquire", blocking=False)
        except LockStoreError:
            return None
        if got:
            wire.actor.call(lock, "release")
        return got

    assert any(tried(f"without a row {n}") for n in range(5))
    assert wire.actor.call(wanted, "acquire", timeout=20) is True
    wire.actor.call(wanted, "release")
    assert any(tried("k") for _ in range(5))
    holder.call(held, "acquire")
    assert any(tried("k") is False for _ in range(5))
    holder.call(held, "release")
