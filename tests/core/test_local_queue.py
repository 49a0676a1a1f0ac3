"""Lines as data: flows of several processes under random schedules, with interrupts, timeouts and lost answers."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, cast

import pytest

from dblock.core import timing
from dblock.core.acquire import acquiring, handover
from dblock.core.acquire.local_queue import LocalQueue, LocalWaiter, TakeAttempt
from dblock.core.acquire.site import Site
from dblock.core.acquire.waiting import Waiter
from dblock.core.errors import LockStoreError, StoreUnanswered
from dblock.core.protocol.steps import Execute, Rows, Sleep, Steps, Wait
from dblock.core.values import Grant, Tenure
from dblock.core.wakeup.local_socket import LocalSocket
from dblock.core.wakeup.registry import Wakeup, Wakeups
from tests.conftest import timed
from tests.core.test_queue import HOUR, Kept
from tests.support.model import Interrupted, Post, World, lost_after, play, raising, wish


@dataclass
class Process(Kept):
    """Flows that share a local queue, and what they know of each other; the holds that the watchdog would know."""

    world: World
    holding: set[int] = field(default_factory=set)
    site: Site = field(init=False)

    def __post_init__(self) -> None:
        self.channel = f"world_{len(self.world.listening)}"
        wakeups = self.world.listening[self.channel] = Wakeups()
        self.site = Site(self.world.database(), wakeups, lambda: cast("LocalSocket", Post(self.world, self.channel)))

    def enter(self, waiter: LocalWaiter, take_attempt: TakeAttempt | None) -> LocalQueue | None:
        local_queue = None if take_attempt is None else take_attempt.wait(waiter)
        new = local_queue is not None
        if local_queue is None:
            local_queue, new = self.site.local_queues.enter(waiter)
        if new:
            local_queue.held_in_process = bool(self.holding)
        return local_queue

    def nobody(self) -> bool:
        """Is nobody in a local queue, or about to be?"""
        return not (self.site.local_queues._queues or self.site.local_queues._attempts)


@dataclass
class Flow:
    """Takes the key some times, or gives up; whatever interrupts it is thrown in."""

    process: Process
    chance: random.Random
    name: int
    cycles: int
    log: list[tuple[int, Grant]]
    faults: bool
    barging: float
    """How often it asks for the key with `fair=False`."""
    steps: Steps[Any] | None = None
    reply: Any = None
    wakes: float = 0.0
    wakeup: Wakeup | None = None
    under_way: tuple[Execute, set[str]] | None = None
    broken: BaseException | None = None
    interruptible: bool = False
    done: bool = False

    def life(self) -> Steps[None]:
        site, holding, chance = self.process.site, self.process.holding, self.chance
        for _ in range(self.cycles):
            fair = int(chance.random() >= self.barging)
            request = wish(ttl=2 * HOUR, fair=fair, flow=str(self.name))
            timeout = chance.choice((None, 0.0, 0.02, 1.0)) if self.faults else None
            self.interruptible = self.faults
            try:
                found = yield from acquiring.acquire(
                    site, request, timeout, lambda: self.process, held_in_process=bool(self.process.holding)
                )
            except (Interrupted, LockStoreError):
                continue
            finally:
                self.interruptible = False
            if not isinstance(found, Grant):
                continue
            holding.add(self.name)
            self.log.append((self.name, found))
            if chance.random() < 0.7:
                yield Sleep(chance.choice((0.001, 0.05, 0.3)))
            holding.remove(self.name)
            self.interruptible = self.faults
            try:
                assert (yield from handover.pass_on(site, found.tenure, found.ticket, found.local_handovers))
            except (Interrupted, LockStoreError):
                pass
            finally:
                self.interruptible = False
            if chance.random() < 0.5:
                yield Sleep(chance.choice((0.001, 0.1)))

    def ready(self) -> bool:
        notified = self.wakeup is not None and self.wakeup._event.is_set()
        return not self.done and (self.wakes <= self.process.world.time or notified)

    def run(self) -> None:
        """One step further: a statement begins, takes effect, is answered or broken off, or its answer is lost."""
        assert self.steps is not None
        world = self.process.world
        self.wakes = world.time
        if self.under_way is not None:
            (step, seen), self.under_way = self.under_way, None
            fate = self.chance.random() if self.faults else 1.0
            if fate > 0.03:
                self.reply = world.execute(step, seen)
            if fate < 0.06 and self.interruptible:
                self.broken = StoreUnanswered("cut off")
            elif fate <= 0.03:
                self.reply = world.execute(step, seen)
            return
        error, self.broken = self.broken, None
        if self.interruptible and error is None and self.chance.random() < 0.02:
            error, self.interruptible = Interrupted(), False  # whoever interrupts the clean-up has to wait for the ttl
        try:
            found = self.steps.send(self.reply) if error is None else self.steps.throw(error)
        except StopIteration:
            self.done = True
            return
        self.reply, self.wakeup = None, None
        if isinstance(found, Execute):
            self.under_way = found, world.snapshot()
        else:
            self.wakes = world.time + found.seconds
            self.wakeup = found.wakeup if isinstance(found, Wait) else None


def schedule(
    seed: int,
    houses: tuple[int, ...] = (3, 2),
    *,
    faults: bool = False,
    barging: float = 0.0,
) -> tuple[World, list[tuple[int, Grant]]]:
    """Run flows of several processes to their end in a random order."""
    random.seed(seed)  # for the jitter of pauses
    chance, world, log = random.Random(seed), World(), list[tuple[int, Grant]]()
    numbers = itertools.count()
    processes = [Process(world) for _ in houses]
    crowd = [
        Flow(process, chance, next(numbers), 5, log, faults, barging)
        for process, size in zip(processes, houses, strict=True)
        for _ in range(size)
    ]
    for flow in crowd:
        flow.steps = flow.life()
    begun = world.time
    while not all(flow.done for flow in crowd):
        ready = [flow for flow in crowd if flow.ready()]
        if not ready:
            world.time = min(flow.wakes for flow in crowd if not flow.done)
            assert world.time < begun + HOUR / 2, f"somebody was forgotten: {log}"
            continue
        chance.choice(ready).run()
        assert sum(len(process.holding) for process in processes) <= 1
    assert all(process.nobody() for process in processes), f"somebody is still in a local queue: {seed}"
    return world, log


@pytest.fixture
def deaf(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody looks by himself but after an hour; and places last for longer."""
    timed(
        monkeypatch,
        local_handover_wait=HOUR,
        poll_notified=HOUR,
        unresponsive_after=3 * HOUR,
        waiter_ttl=10 * HOUR,
    )
    monkeypatch.setattr(Waiter, "_until_next_look", lambda *_, **__: HOUR)


@pytest.mark.usefixtures("deaf")
def test_nobody_in_a_local_queue_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two processes with several flows each: all are served, most by a hand-over inside the process."""
    turns, overtaken = 0, list[int]()
    timed(monkeypatch, max_local_handovers=3)
    for seed in range(300):
        world, log = schedule(seed)
        assert len(log) == 25
        turns += sum(grant.local_handovers > 0 for _, grant in log)
        overtaken.append(world.overtaken)
        assert not world.waiters
        assert world.rows["k"]["owner"] is None
        assert world.rows["k"]["last"] == world.rows["k"]["served"]
    assert turns > 1000
    assert max(overtaken) == 3, "no more often in a row, while others wait"


@pytest.mark.usefixtures("deaf")
def test_unfair_flows_between_those_of_a_local_queue() -> None:
    """They take the key between those of a local queue, each of whom still gets it, one at a time."""
    for seed in range(300):
        world, log = schedule(seed, barging=0.4)
        assert len(log) == 25
        assert not world.waiters
        assert world.rows["k"]["owner"] is None


def test_whatever_goes_wrong_nothing_is_left() -> None:
    """Interrupts, timeouts and lost answers anywhere: no tenure is left behind, and nobody is in a local queue.

    A grant whose answer was lost may last for as long as the place in the queue did.
    """
    free = 0
    for seed in range(600):
        world, _ = schedule(seed, faults=True, barging=0.0 if seed % 2 else 0.3)
        row = world.rows["k"]
        assert row["owner"] is None or row["expires_at"] <= world.time + timing.DEFAULT.waiter_ttl, seed
        free += row["owner"] is None
    assert free > 540


def test_whoever_comes_during_a_take_attempt_waits_behind_it() -> None:
    """Neither overtakes the other: the one that tried first is first in the local queue when the try fails."""
    world = World()
    process = Process(world)
    _ = world._begin(None, wish().parameters("rival"))
    first = acquiring.acquire(process.site, wish(), 9.0, lambda: process)
    take = begun(world, first, "take")
    second = acquiring.acquire(process.site, wish(), 9.0, lambda: process)
    begun(world, second, "wait")
    found = first.send(world.execute(take))
    assert isinstance(found, Execute)
    found = first.send(world.execute(found))
    assert isinstance(found, Wait)
    joining = begun(world, first, "join")
    assert joining.statement.name == "join"
    [local_queue] = process.site.local_queues._queues.values()
    assert len(local_queue._waiters) == 2
    assert local_queue._waiters[0].wakeup is found.wakeup
    for steps in (first, second):
        steps.close()
    assert process.nobody()


def begun(world: World, steps: Steps[Any], name: str) -> Execute:
    """Drive a flow until it sends the statement of that name, which is not executed yet; pauses take no time."""
    reply: Any = None
    while not isinstance(step := steps.send(reply), Execute) or step.statement.name != name:
        if isinstance(step, Wait) and step.seconds and name == "wait":
            return Execute(None, {})  # type: ignore[arg-type]
        reply = world.execute(step) if isinstance(step, Execute) else None
    return step


def holder_and_heir(timeout: float = 0.05) -> tuple[World, Process, Tenure, Steps[Any]]:
    """A flow that holds the key, and another one of its process that waits for it for a while."""
    world = World()
    process = Process(world)
    fence = world._begin(None, wish().parameters("o"))[0][0]
    process.holding.add(0)
    heir = acquiring.acquire(process.site, wish(), timeout, lambda: process, held_in_process=True)
    begun(world, heir, "wait")
    return world, process, Tenure("k", "o", fence), heir


def test_an_heir_that_has_given_up_meanwhile_leaves_nothing() -> None:
    """Its time was up while the key was being handed to it: whoever handed it over gives it back."""
    world, process, tenure, heir = holder_and_heir()
    holder = handover.pass_on(process.site, tenure, 0, 0)
    relay = begun(world, holder, "hand_over_local")
    world.time += 0.5
    look = begun(world, heir, "inspect")
    with pytest.raises(StopIteration) as given_up:
        heir.send(world.execute(look))
    assert not isinstance(given_up.value.value, Grant)
    release = holder.send(world.execute(relay))
    assert isinstance(release, Execute)
    assert world.rows["k"]["owner"] not in {"o", None}
    with pytest.raises(StopIteration) as done:
        holder.send(world.execute(release))
    assert done.value.value is True
    assert world.rows["k"]["owner"] is None
    assert process.nobody()


def test_an_heir_that_is_told_at_the_last_moment_has_it() -> None:
    """It was looking whom to blame: acquire() is a success."""
    world, process, tenure, heir = holder_and_heir()
    world.time += 1
    look = begun(world, heir, "inspect")
    assert play(world, handover.pass_on(process.site, tenure, 0, 0), {}) is True
    with pytest.raises(StopIteration) as done:
        heir.send(world.execute(look))
    grant = done.value.value
    assert isinstance(grant, Grant)
    assert (world.rows["k"]["owner"], world.rows["k"]["fence"]) == grant.tenure[1:]
    assert process.nobody()


def test_a_hand_over_whose_answer_is_lost_is_found_out() -> None:
    """It had taken effect: the heir has the tenure, trusted from the first sending."""
    world, process, tenure, heir = holder_and_heir()
    sent = world.time
    assert (
        play(world, handover.pass_on(process.site, tenure, 0, 0), {("hand_over_local", 0): lost_after(world)}) is True
    )
    with pytest.raises(StopIteration) as done:
        heir.send(None)
    grant = done.value.value
    assert grant.tenure.fence == world.rows["k"]["fence"] > tenure.fence
    assert grant.sent == sent


class Away(dict[tuple[str, int], Callable[[Execute], Rows]]):
    """The server cannot be reached for so many seconds, from now on."""

    def __init__(self, world: World, seconds: float, *first: Callable[[Execute], Rows]) -> None:
        super().__init__((("hand_over_local", 0), each) for each in first)
        self.world, self.until = world, world.time + seconds

    def get(self, place: Any, default: Any = None) -> Any:
        found = super().get(place)
        return found or (default if self.world.time > self.until else raising(StoreUnanswered("away")))


def test_a_hand_over_of_which_nothing_is_known_was_none_of_a_loss() -> None:
    """The answer is lost and the server is away for a moment: the holder is told of no loss, and the heir finds out."""
    world, process, tenure, heir = holder_and_heir(30)
    faults = Away(world, 0.5, lost_after(world))
    assert play(world, handover.pass_on(process.site, tenure, 0, 0), faults) is True
    grant = play(world, heir, {})
    assert isinstance(grant, Grant)
    assert (world.rows["k"]["owner"], world.rows["k"]["fence"]) == grant.tenure[1:]
    assert process.nobody()


def test_nor_is_it_anybodys_whose_heir_has_gone() -> None:
    """Its time was up before anybody knew: whoever offered the tenure looks, and gives it back."""
    world, process, tenure, heir = holder_and_heir()
    holder = handover.pass_on(process.site, tenure, 0, 0)
    _ = world.execute(begun(world, holder, "hand_over_local"))
    world.time += 0.5
    assert not isinstance(play(world, heir, {}), Grant)
    assert play(world, holder, Away(world, 0.5), error=StoreUnanswered("cut")) is True
    assert world.rows["k"]["owner"] is None
    assert process.nobody()


def test_a_holder_that_hangs_keeps_its_local_queue_no_longer_than_its_lease() -> None:
    """Whoever was chosen and is told nothing looks, and asks for itself once the tenure it was offered is over."""
    world, process, tenure, heir = holder_and_heir(300)
    holder = handover.pass_on(process.site, tenure, 0, 0)
    relay = begun(world, holder, "hand_over_local")
    grant = play(world, heir, {})
    assert isinstance(grant, Grant)
    assert 30 < world.time - 1000 < 30 + 2 * timing.DEFAULT.offer_timeout
    process.holding.clear()
    assert play(world, holder, {}, world.execute(relay)) is False
    assert (world.rows["k"]["owner"], world.rows["k"]["fence"]) == grant.tenure[1:]
    assert process.nobody()


def test_a_holder_that_hangs_after_all_went_well() -> None:
    """The heir has looked, and has the key; it is not given back when the holder learns the same."""
    world, process, tenure, heir = holder_and_heir(300)
    holder = handover.pass_on(process.site, tenure, 0, 0)
    answer = world.execute(begun(world, holder, "hand_over_local"))
    grant = play(world, heir, {})
    assert isinstance(grant, Grant)
    assert world.time < 1000 + 2 * timing.DEFAULT.offer_timeout
    assert play(world, holder, {}, answer) is True
    assert (world.rows["k"]["owner"], world.rows["k"]["fence"]) == grant.tenure[1:]
    assert process.nobody()


def test_an_heir_that_is_interrupted_while_it_finds_out() -> None:
    """It has seen that the tenure is its own: it gives it back."""
    world, process, tenure, heir = holder_and_heir(300)
    holder = handover.pass_on(process.site, tenure, 0, 0)
    answer = world.execute(begun(world, holder, "hand_over_local"))
    with pytest.raises(KeyboardInterrupt):
        play(world, heir, {("extend", 0): raising(KeyboardInterrupt())})
    assert world.rows["k"]["owner"] is None
    assert play(world, holder, {}, answer) is True
    assert process.nobody()


def test_what_comes_too_late_is_given_back() -> None:
    """Looking whom to blame took longer than the lease that it was handed meanwhile."""
    world, process, tenure, heir = holder_and_heir()
    world.time += 0.5
    look = begun(world, heir, "inspect")
    assert play(world, handover.pass_on(process.site, tenure, 0, 0), {}) is True
    assert world.rows["k"]["owner"] not in {"o", None}
    world.time += 29.5
    assert not isinstance(play(world, heir, {}, world.execute(look)), Grant)
    assert world.rows["k"]["owner"] is None
    assert process.nobody()


def test_the_last_one_leaves_while_the_key_is_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """Between the holder's look at the local queue and its choice."""
    world, process, tenure, heir = holder_and_heir()
    local_queue = process.site.local_queues.find("k")
    assert local_queue is not None
    heir.close()
    monkeypatch.setattr(process.site.local_queues, "find", lambda *_: local_queue)
    assert local_queue.choose(tenure) is None
    monkeypatch.undo()
    assert play(world, handover.pass_on(process.site, tenure, 0, 0), {}) is True


@pytest.mark.parametrize("how", ["unseen", "closed", "still"])
def test_an_unresponsive_waiter_is_passed_over(how: str) -> None:
    """A first one that is stuck, or whose event loop is closed or stands still: it is not handed the key, and keeps
    nobody waiting; when it comes again it stands last."""
    world = World()
    stuck, alive = (LocalWaiter(wish(), accepts_handover=True) for _ in range(2))
    place = world.site().local_queues
    [local_queue, _], *_ = [place.enter(waiter) for waiter in (stuck, alive)]
    local_queue.held_in_process = True
    assert not local_queue.is_first(alive)
    if how == "unseen":
        stuck.seen = world.time - timing.DEFAULT.unresponsive_after - 1
    else:
        stuck.wakeup._loop = SimpleNamespace(is_closed=lambda: how == "closed", is_running=lambda: False)
    assert local_queue.is_first(alive)
    assert not local_queue.held_in_process, "what the others knew is not known any more"
    offer = local_queue.choose(Tenure("k", "o", 1))
    assert offer is not None
    assert offer.heir is alive
    stuck.wakeup._loop = None
    assert place.standing(stuck) is local_queue
    assert not local_queue.is_first(stuck)
    local_queue.leave(alive, got=False)
    assert local_queue.is_first(stuck)
    assert stuck.wakeup.consume()
    local_queue.leave(stuck, got=False)
    assert not place._queues


def test_a_holder_takes_back_its_own_choice_only() -> None:
    """An older holder of the process, which has just released, knows nothing of what a newer one has begun."""
    place, waiter = World().site().local_queues, LocalWaiter(wish(), accepts_handover=True)
    local_queue, _ = place.enter(waiter)
    offer = local_queue.choose(Tenure("k", "o", 2))
    assert offer is not None
    assert not place.freed("k")
    assert (waiter.offer, waiter.chosen) == (offer, True)
    assert not place.freed("k", offer._replace(token="older"))
    assert (waiter.offer, waiter.chosen) == (offer, True)
    assert not place.freed("k", offer, known=False)
    assert (waiter.offer, waiter.chosen) == (offer, False)
    local_queue.leave(waiter, got=False)


@pytest.mark.parametrize("time", [0.0, 1e9])
def test_a_local_queue_goes_by_the_clock_of_its_database(time: float) -> None:
    """However far that is from any other clock of the process: how long the machine has run must not matter."""
    world, waiter = World(time=time), LocalWaiter(wish())
    place = world.site().local_queues
    local_queue, _ = place.enter(waiter)
    assert local_queue.is_first(waiter)
    world.time += timing.DEFAULT.unresponsive_after
    assert not local_queue.is_first(waiter)
    assert not place._queues


def test_a_local_queue_whose_waiters_were_all_passed_over() -> None:
    """Nobody is left there; whoever comes again founds another one, which all find."""
    world = World()
    one, other = (LocalWaiter(wish()) for _ in range(2))
    place = world.site().local_queues
    local_queue, _ = place.enter(one)
    _ = place.enter(other)
    world.time += timing.DEFAULT.unresponsive_after + 1
    assert local_queue.choose(Tenure("k", "o", 1)) is None
    assert not place._queues
    again = place.standing(other)
    assert place.standing(one) is again
    assert place.find("k") is again
    assert [again.is_first(other), again.is_first(one)] == [True, False]
    local_queue.leave(one, got=False)
    again.leave(other, got=False)
    again.leave(one, got=False)
    assert not place._queues


def test_an_interrupt_on_the_way_in_leaves_nobody_behind() -> None:
    """A signal handler raises just after the flow has come to stand in the local queue."""
    world, process, _, heir = holder_and_heir()

    class Breaking(Process):
        def enter(self, waiter: LocalWaiter, take_attempt: TakeAttempt | None) -> LocalQueue | None:
            _ = super().enter(waiter, take_attempt)
            raise KeyboardInterrupt

    broken = acquiring.acquire(process.site, wish(), 9.0, lambda: Breaking(world), held_in_process=True)
    with pytest.raises(KeyboardInterrupt):
        play(world, broken, {})
    heir.close()
    assert process.nobody()
