"""Every order of steps of callers of a small pool, with a fault at every step, and the real code of the pool."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from dblock.core import clock, timing
from dblock.core.connections import pool
from dblock.core.connections.connection import PooledConnection, Waiter
from dblock.core.connections.pool import AutocommitPool
from tests.conftest import clocked, timed
from tests.support.explore import LATEST, Explored, explore
from tests.support.lab import LONG
from tests.support.pool_model import FAULTS, InUse, Line, Loop, PoolWorld, Use

Plans = tuple[tuple[int | None, tuple[Use, ...]], ...]
ONE, TWICE, LONGER, URGENT = (Use(),), (Use(), Use()), (Use(hold=0.2),), (Use(critical=True),)
EACH: Plans = ((None, ONE), (None, ONE))
PAIR: Plans = ((None, ONE), (None, TWICE))
CROWD: Plans = ((None, LONGER), (None, ONE), (None, URGENT))
LOOPS: Plans = ((1, (Use(hold=0.4),)), (2, ONE))
RENEWAL: Plans = ((None, LONGER), (None, URGENT))
WORLDS: dict[str, tuple[float, Plans]] = {
    "each of one": (1, EACH),
    "two of one": (1, PAIR),
    "two of two": (2, PAIR),
    "two of three": (3, PAIR),
    "three of one": (1, CROWD),
    "three of two": (2, CROWD),
    "two event loops": (1, LOOPS),
    "a renewal": (1, RENEWAL),
}
"""How many connections may be in use, and who wants them."""
POLLED = {"interrupt", "lost", "cut", "block", "freeze", "hangs", "close_loop"}
"""The faults after which a caller has to poll."""
LARGE = {"a renewal", "two of one", "two of two", "two of three", "three of one", "three of two"}
"""Those in which a fault is tried in `make faults` only, and the largest one altogether."""
CASES = [
    pytest.param(name, fault, marks=[pytest.mark.slow] * (fault == "interrupt"))
    for name in WORLDS
    for fault in (None, *FAULTS)
    if LONG or not (name == "three of two" or (fault and name in LARGE))
]


@pytest.fixture(autouse=True)
def _in_a_world(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Times are short, by the clock of the latest world; each idle connection is probed."""
    LATEST.clear()
    timed(monkeypatch, statement_timeout=1.2, trusted_idle=0.0)
    clocked(monkeypatch, lambda: LATEST[0].time if LATEST else 0.0)
    yield
    end_the_latest()


def end_the_latest() -> None:
    for world in LATEST:
        world.kill()


def explored(monkeypatch: pytest.MonkeyPatch, name: str, fault: str | None, preemptions: float) -> Explored:
    """All ways of a world; nobody polls, unless the fault needs that."""
    most, plans = WORLDS[name]
    kinds = () if fault is None else (fault,)
    poll = 0.12 if fault in POLLED else 0.9
    monkeypatch.setattr(timing, "DEFAULT", timing.DEFAULT._replace(local_poll=poll, attention=poll))

    def make() -> PoolWorld:
        end_the_latest()
        return PoolWorld(most=most, plans=plans, kinds=kinds, faults=len(kinds), preemptions=preemptions)

    return explore(make, check=PoolWorld.check_end)


@pytest.mark.timeout(7200 if LONG else 300)
@pytest.mark.parametrize(("name", "fault"), CASES)
def test_small_pools(monkeypatch: pytest.MonkeyPatch, name: str, fault: str | None) -> None:
    """What each caller is promised holds at every moment (`PoolWorld.check`) and at the end; with few preemptions."""
    assert explored(monkeypatch, name, fault, 1 if LONG else 0).states > 100


# -- what the worlds notice

Patch = Callable[..., None]


def nobody_is_notified(patch: Patch) -> None:
    patch(AutocommitPool, "_notify", lambda _: None)


def newcomers_overtake(patch: Patch) -> None:
    def all_of_them(self: AutocommitPool) -> list[Waiter]:
        return [each for each in self._line if len(self._in_use[each.critical]) < self._most[each.critical]]

    patch(AutocommitPool, "_next", all_of_them)


def nobody_goes_first(patch: Patch) -> None:
    patch(pool, "insort", lambda line, waiter, **_: line.insert(len(line), waiter))


def nobody_leaves_the_line(patch: Patch) -> None:
    patch(Line, "remove", lambda *_: None)


def attending(polls_by: Callable[[Waiter, float], float]) -> Callable[[Waiter], float]:
    """A waiter that says otherwise by when it polls, given itself and the interval in which it does."""
    attend = Waiter.attend

    def otherwise(self: Waiter) -> float:
        interval = attend(self)
        self.polls_by = polls_by(self, interval)
        return interval

    return otherwise


def waits_for_the_blocked(patch: Patch) -> None:
    """What is free stays reserved for a waiter that does not poll."""
    patch(Waiter, "attend", attending(lambda waiter, _: waiter.until))


def claims_when_its_time_is_over(patch: Patch) -> None:
    patch(Waiter, "attend", attending(lambda _, interval: clock.now() + 2 * interval))


def what_is_given_back_stays_in_use(patch: Patch) -> None:
    patch(InUse, "discard", lambda *_: None)


def what_is_cut_stays_in_use(patch: Patch) -> None:
    patch(PooledConnection, "cut", lambda self: setattr(self, "overdue", True))


def what_a_closed_loop_had_stays_in_use(patch: Patch) -> None:
    patch(Loop, "is_closed", lambda _: False)


def opens_one_more(patch: Patch) -> None:
    """Though one is expected already."""
    claim = AutocommitPool._claim

    def forgetful(self: AutocommitPool, waiter: Waiter) -> PooledConnection | None:
        openings = [(each, each.opening_for) for each in self._connections() if each.opening_for]
        for each, _ in openings:
            each.opening_for = None
        connection = claim(self, waiter)
        for each, asked in openings:
            each.opening_for = asked
        return connection

    patch(AutocommitPool, "_claim", forgetful)


def is_idle_twice(patch: Patch) -> None:
    give = AutocommitPool.give

    def twice(self: AutocommitPool, connection: PooledConnection) -> None:
        give(self, connection)
        self._idle.append(connection)

    patch(AutocommitPool, "give", twice)


def believes_in_silent_ones(patch: Patch) -> None:
    patch(AutocommitPool, "_is_alive", lambda *_: True)


def keeps_what_was_lent_when_it_was_closed(patch: Patch) -> None:
    patch(AutocommitPool, "close_all", lambda self: self._close_idle())


def renewals_stand_behind_takes(patch: Patch) -> None:
    take = AutocommitPool.take

    def one_for_all(self: AutocommitPool, until: float, **_: bool) -> PooledConnection:
        return take(self, until, critical=False)

    patch(AutocommitPool, "take", one_for_all)


def a_child_uses_its_parents(patch: Patch) -> None:
    leave_to_parent = AutocommitPool.leave_to_parent

    def inherit(self: AutocommitPool) -> Any:
        idle, kept = self._idle, leave_to_parent(self)
        self._idle = idle
        for each in idle:
            each.closed = False
        return kept

    patch(AutocommitPool, "leave_to_parent", inherit)


MUTANTS: list[tuple[Callable[[Patch], None], str, str | None]] = [
    (nobody_is_notified, "two of one", None),
    (newcomers_overtake, "two of one", None),
    (nobody_goes_first, "three of one", None),
    (nobody_leaves_the_line, "two of one", None),
    (waits_for_the_blocked, "three of one", "block"),
    (claims_when_its_time_is_over, "two of one", "block"),
    (what_is_cut_stays_in_use, "two event loops", "cut"),
    (what_a_closed_loop_had_stays_in_use, "two event loops", "close_loop"),
    (what_is_given_back_stays_in_use, "two of one", None),
    (opens_one_more, "two of three", None),
    (is_idle_twice, "two of one", None),
    (believes_in_silent_ones, "two of one", "silent"),
    (keeps_what_was_lent_when_it_was_closed, "two of one", "close_all"),
    (renewals_stand_behind_takes, "a renewal", None),
    (a_child_uses_its_parents, "two of one", "fork"),
]


@pytest.mark.timeout(300)
@pytest.mark.parametrize(("mutant", "name", "fault"), MUTANTS, ids=lambda it: getattr(it, "__name__", ""))
def test_what_is_broken_is_noticed(
    mutant: Callable[[Patch], None], name: str, fault: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With one thing less some way ends badly."""
    mutant(monkeypatch.setattr)
    with pytest.raises(AssertionError, match="after"):
        for preemptions in (0, 1, 2):
            _ = explored(monkeypatch, name, fault, preemptions)
