"""One leader object in a small world: several flows run it, resign and stop, in all orders, with a fault at every step.

A flow is a letter: `r` is the flow of `run`, whose second body fails, `w` that of a `with`, `c` campaigns, `x` resigns,
`s` stops. A fault interrupts a flow, as a signal handler does, ends its thread, lets a statement fail or loses its
answer, or makes a child of the process, which leaves the term to its parent.
"""

from __future__ import annotations

import logging
import os
import weakref
from collections.abc import Iterator
from dataclasses import replace
from threading import get_ident
from types import GeneratorType
from typing import Any, cast

import pytest

from dblock.core import runtime
from dblock.core.acquire.services import WaiterServices
from dblock.core.errors import LockError, LockStoreError, LockTimeout, StoreConflict, StoreUnanswered
from dblock.core.holding.flow import Hold, _Life
from dblock.core.lock.blocks import Loaded
from dblock.core.lock.leading import Candidacy, SyncLeader
from dblock.core.protocol.steps import Call, Cancel, Cancelled, Execute, Outcome, Steps, Wait
from dblock.core.runtime import Runtime
from dblock.core.watchdog.keeper import Keeper
from tests.core.test_holds import FakeLock, FakeStore
from tests.support.explore import Choice, Explored, explore
from tests.support.lab import LONG
from tests.support.model import Interrupted, World

TTL = 30.0
FAULTS = ("interrupt", "death", "fails", "busy", "lost", "fork")


class BodyError(Exception):
    """Of the second body."""


class Store(FakeStore):
    """One key."""

    def __init__(self, world: World) -> None:
        super().__init__(lambda: world.time)
        self.database = replace(world.database(), runner=weakref.ref(self), before_waiting=self.refuse_waiting)

    def refuse_waiting(self) -> None:
        """Nothing is wrong with waiting."""


class Actor:
    """A flow, and what it does with the leader object."""

    def __init__(self, house: House, letter: str, number: int) -> None:
        self.house, self.letter, self.life = house, letter, _Life()
        self.flow = house.runtime.flows._new(f"flow {number}", self.life)
        self.cancel: Cancel | None = None
        self.step: Any = None
        self.wakes = 0.0
        self.done = self.alive = False
        self.bodies = self.taken = 0
        self.error: BaseException | None = None
        does = {"r": self.run, "w": self.block, "c": self.campaign, "x": self.resign, "s": self.stop}
        self.steps = does[letter]()

    def driving(self, *what: Any) -> Steps[Any]:
        steps: Steps[Any]
        steps, self.cancel = self.house.leader._driving(*what)
        return steps

    def run(self) -> Steps[None]:
        while not self.house.stopped:
            yield from self.driving(self.house.leader._turn, self.body)

    def block(self) -> Steps[None]:
        leader = self.house.leader
        yield from self.driving(leader._enter, Loaded(leader))
        [hold] = [each.lock._hold_here() for flow, each in leader._withs if flow is self.flow.ref]
        error = (yield Call(self.body, (hold.tenure.fence,))).error
        self.cancel = None
        yield from leader._exit(leader._withs)
        if error is not None:
            raise error

    def campaign(self) -> Steps[None]:
        _ = yield from self.driving(self.house.leader._campaign, None)

    def resign(self) -> Steps[None]:
        yield from self.house.leader._resign()

    def stop(self) -> Steps[None]:
        yield from self.house.leader._resign(for_good=True)

    def body(self, term: int) -> None:
        self.bodies += 1
        if self.bodies > 1:
            raise BodyError

    def go_on(self, reply: Any = None, error: BaseException | None = None) -> None:
        """On to the next step, as the driver goes."""
        self.alive, self.taken = True, self.taken + 1
        self.house.acting = self
        if error is not None and not isinstance(error, LockError):
            self.cancel = None
        try:
            self.step = self.steps.send(reply) if error is None else self.steps.throw(error)
        except StopIteration:
            self.done = True
        except (Interrupted, LockError, BodyError) as raised:
            self.done, self.error = True, raised
        if self.done:
            self.step = None
            return
        if not isinstance(self.step, Call | Execute):
            self.wakes = self.house.time + self.step.seconds
            try:
                if self.cancel is not None:
                    self.cancel.check(self.step)
            except Cancelled as cancelled:
                self.go_on(error=cancelled)

    def ready(self) -> bool:
        if self.done or not isinstance(self.step, Wait) or self.step.wakeup.notified():
            return not self.done
        return self.wakes <= self.house.time

    def happen(self, fault: str = "") -> None:
        """Its next step is taken, or goes wrong."""
        step, house = self.step, self.house
        if fault == "interrupt":
            inside = isinstance(step, Call)
            self.go_on(Outcome(None, Interrupted())) if inside else self.go_on(error=Interrupted())
        elif isinstance(step, Execute):
            rows = [] if fault in {"fails", "busy"} else house.execute(step)
            failures = {"fails": LockStoreError("out of order"), "busy": StoreConflict("try again")}
            failure = {**failures, "lost": StoreUnanswered("no answer")}.get(fault)
            self.go_on(rows, failure)
        elif isinstance(step, Call):
            try:
                outcome = Outcome(step.function(*step.arguments))
            except BodyError as error:
                outcome = Outcome(None, error)
            self.go_on(outcome)
        elif step is not None and self.cancel is not None and self.cancel.is_set and not self.cancel.over:
            self.go_on(error=Cancelled())
        else:
            self.go_on()

    def where(self) -> Any:
        """How far it is."""
        found, steps = list[Any](), cast("Any", self.steps)
        while isinstance(steps, GeneratorType) and steps.gi_frame is not None:
            names = (each for each in steps.gi_frame.f_locals.items() if isinstance(each[1], bool | Exception))
            found.append((steps.gi_code.co_name, steps.gi_frame.f_lasti, *((n, repr(it)) for n, it in names)))
            steps = steps.gi_yieldfrom
        left = self.wakes - self.house.time if isinstance(self.step, Wait) else 0.0
        return (
            self.letter,
            tuple(found),
            self.taken,
            self.done,
            self.bodies,
            round(max(left, 0.0), 4),
            type(self.error).__name__,
        )


class Threadless(Keeper):
    """Renews nothing: the world does."""

    def wake(self) -> None:
        """Start no thread."""


class House(World):
    """The world."""

    faults = 0
    kinds: tuple[str, ...] = ()
    begun = 1000.0

    def set_up(self, does: str, *kinds: str) -> House:
        self.kinds, self.faults = kinds, len(kinds) and 1
        self.acting: Actor | None = None
        self.runtime = runtime.current = Runtime()
        patched: Any = self.runtime
        patched.watchdog.wake = lambda: None
        patched.watchdog.keeps = Threadless
        patched.flows.current = lambda: cast("Actor", self.acting).flow
        patched.waiter_services = lambda _: WaiterServices()
        self.store = Store(self)
        self.leader = self.candidate()
        self.candidacies: list[Candidacy] = [self.leader._candidacy]
        self.terms: list[Hold] = []
        self.actors = [Actor(self, letter, number) for number, letter in enumerate(does)]
        return self

    def candidate(self) -> Any:
        return SyncLeader(lambda name, **options: FakeLock(self.store, name, **options), "k", ttl=TTL)

    @property
    def stopped(self) -> bool:
        return self.leader._stopped_in is self.runtime

    def choices(self) -> list[Choice]:
        flows = list(enumerate(self.actors))
        found = [Choice("step", n) for n, each in flows if each.ready()]
        if not found and any(not each.done for each in self.actors):
            found = [Choice("time")]
        if self.faults and found:
            for kind in self.kinds:
                for n, each in flows:
                    begun = each.alive and not each.done
                    if begun and (kind in {"interrupt", "death", "fork"} or isinstance(each.step, Execute)):
                        found.append(Choice(kind, n))
        return found

    def happen(self, choice: Choice) -> None:
        actor = self.actors[choice.whom]
        self.faults -= choice.what not in {"step", "time"}
        if choice.what == "time":
            self.time = min(each.wakes for each in self.actors if not each.done)
        elif choice.what == "death":
            actor.life, actor.done = _Life(), True
        elif choice.what == "fork":
            self.fork(actor)
        else:
            actor.happen("" if choice.what == "step" else choice.what)
        known = self.leader._candidacy
        if known not in self.candidacies:
            self.candidacies.append(known)
        self.terms += [each for each in self.runtime.watchdog._holds if each not in self.terms]

    def fork(self, actor: Actor) -> None:
        """A child of that flow neither leads nor resigns for its parent, and may campaign; the parent goes on."""
        rows, known, flow = repr(self.rows), vars(self.leader).copy(), self.leader._candidacy.flow
        self.acting, runtime.current, driver = actor, Runtime(), flow.driver
        patched: Any = runtime.current
        patched.flows.current = lambda: actor.flow
        here, pid = get_ident(), os.getpid()
        try:
            with pytest.MonkeyPatch.context() as patch:  # threads of earlier tests go on in the parent
                patch.setattr("os.getpid", lambda: -1 if get_ident() == here else pid)
                assert not self.leader.is_leader
                assert list(self.leader._resign()) == []
                steps, _ = self.leader._driving(self.leader._campaign, 0.0)
                assert isinstance(next(steps), Execute), "it may campaign: what leads or has stopped is the parent's"
                steps.close()
        finally:
            runtime.current = self.runtime
            vars(self.leader).update(known)
            flow.driver = driver
        assert repr(self.rows) == rows

    def owner(self) -> Any:
        row = self.rows.get("k")
        return None if row is None or row["expires_at"] <= self.time else row["owner"]

    def check(self) -> None:
        """What holds at every moment."""
        leading = [each for each in self.candidacies if each.leads()]
        assert len(leading) <= 1, "two terms at once"
        for each in leading:
            assert each.lock.owner == self.owner(), "it does not have the key"
        for actor in self.actors:
            step = actor.step
            if not actor.done and isinstance(step, Call):
                [hold] = [hold for hold in self.terms if hold.tenure.fence in step.arguments]
                assert hold.tenure.owner == self.owner() or hold.lease.remaining() <= 0, "released under its body"

    def state(self) -> Any:
        """What makes this state different from others."""
        flags = tuple(
            (each.leads(), each.is_driven(), each.cancel.is_set, each.cancel.over, *_held(each))
            for each in self.candidacies
        )
        number = self.candidacies.index(self.leader._candidacy)
        owners = [each.tenure.owner for each in self.terms]
        whose = owners.index(self.owner()) if self.owner() in owners else self.owner()
        left = round(max((row["expires_at"] - self.time for row in self.rows.values()), default=0.0), 1)
        actors = tuple(each.where() for each in self.actors)
        return actors, flags, number, whose, left, len(self.waiters), self.stopped, self.faults


def _held(candidacy: Candidacy) -> list[tuple[int, bool, bool]]:
    holds = candidacy.flow.holds.values()
    return [(len(hold.entries), hold.lease.renewing, hold.lease.loss is None) for hold in holds]


def end(world: House) -> None:
    """Every flow has ended; the object leads only if it has campaigned without a body, and can be a candidate again."""
    leader, kept = world.leader, "c" in [each.letter for each in world.actors]
    assert all(each.done for each in world.actors)
    for hold in list(world.runtime.watchdog._holds):
        if hold.lease.renewing:
            assert kept or "death" in world.kinds, "renewed for ever"
    last = Actor(world, "x", 99)  # whatever has happened, who resigns does not wait for ever
    while not last.done:
        last.happen()
        assert not isinstance(last.step, Wait), "it waits for a body that never ends"
    assert last.error is None, last.error
    assert not leader.is_leader
    again = Actor(world, "c", 100)
    while not again.done:
        world.time += max(again.wakes - world.time, 0.0) if not again.ready() else 0.0
        again.happen()
    assert leader.is_leader is not world.stopped, again.error


@pytest.fixture(autouse=True)
def _in_a_world(nobody_polls: None, caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """Thousands of losses are not logged."""
    before = runtime.current
    with caplog.at_level(logging.CRITICAL, "dblock"):
        yield
    runtime.current = before


def explored(does: str, *kinds: str) -> Explored:
    return explore(lambda: House().set_up(does, *kinds), check=end)


WORLDS = ("rx", "rxx", "rs", "rsx", "wxx", "wx", "cxx", "cs", "cc", "wc", "wrx")


@pytest.mark.parametrize("does", WORLDS)
def test_all_orders(does: str) -> None:
    """One term at a time; none is released under its body; nobody waits for ever, and nothing is left."""
    assert explored(does).states > 5


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("does", [*WORLDS, "rxxs"] if LONG else ["rx", "rs", "wx", "cx", "wc"])
def test_a_fault(does: str, fault: str) -> None:
    """At each step of each order."""
    assert explored(does, fault).states > 5


def test_a_wait_that_could_not_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is refused, which is False for who gave it a timeout: as for a lock."""

    def refuse_waiting(_: Store) -> None:
        raise LockTimeout("inside a transaction that the holder waits for")

    monkeypatch.setattr(Store, "refuse_waiting", refuse_waiting)
    world = House().set_up("c")
    [first] = world.actors
    while not first.done:
        first.happen()
    for timeout, error in ((None, LockTimeout), (5.0, type(None))):
        candidate, other = world.candidate(), Actor(world, "c", 1)
        other.steps, other.cancel = candidate._driving(candidate._campaign, timeout)
        while not other.done:
            other.happen()
        assert isinstance(other.error, error)


def test_a_term_that_was_lost_is_not_released_later() -> None:
    """Its key is closed until the grace is over, however often one resigns."""
    world = House().set_up("cxx")
    world.leader._lock.options = world.leader._lock.options._replace(grace=20.0)
    sent = list[str]()
    for actor in world.actors:
        while not actor.done:
            sent += [actor.step.statement.name] if isinstance(actor.step, Execute) else []
            actor.happen()
        world.time += TTL + 1 if actor.letter == "c" else 0.0
    assert "release" not in sent
    assert world.owner() is not None
