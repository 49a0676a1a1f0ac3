"""Every order of steps of callers of a small pool, with a fault at every step, and the real code of the pool."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from dblock.core import clock, timing
from dblock.core.connections import pool as pool_module
from dblock.core.connections.connection import PooledConnection, Stage
from dblock.core.connections.pool import AutocommitPool
from dblock.core.connections.slots import Slots, SlotWaiter
from tests.conftest import timed
from tests.support.explore import Explored, explore
from tests.support.lab import LONG
from tests.support.pool_model import FAULTS, PoolWorld, Use

Plans = tuple[tuple[int | None, tuple[Use, ...]], ...]
ONE, TWICE, LONGER, URGENT = (Use(),), (Use(), Use()), (Use(hold=0.15),), (Use(priority=True),)
PAIR: Plans = ((None, ONE), (None, TWICE))
CROWD: Plans = ((None, LONGER), (None, ONE), (None, URGENT))
LOOPS: Plans = ((1, LONGER), (2, ONE))
RENEWAL: Plans = ((None, LONGER), (None, (Use(critical=True, priority=True),)))
WORLDS: dict[str, tuple[float, Plans]] = {
    "two of one": (1, PAIR),
    "two of two": (2, PAIR),
    "three of one": (1, CROWD),
    "three of two": (2, CROWD),
    "two event loops": (1, LOOPS),
    "a renewal": (1, RENEWAL),
}
"""How many connections may be in use, and who wants them."""


class Worlds:
    """Makes worlds, one at a time; its clock is theirs."""

    def __init__(self) -> None:
        self.world: PoolWorld | None = None

    def now(self) -> float:
        return 0.0 if self.world is None else self.world.time

    def end(self) -> None:
        if self.world is not None:
            self.world.kill()

    def make(self, **bounds: Any) -> PoolWorld:
        self.end()
        self.world = PoolWorld(**bounds)
        return self.world


@pytest.fixture
def worlds(monkeypatch: pytest.MonkeyPatch) -> Iterator[Worlds]:
    """Their times are short, and each idle connection is probed."""
    timed(monkeypatch, statement_timeout=1.0, critical_timeout=0.5, trusted_idle=0.0)
    made = Worlds()
    monkeypatch.setattr(clock, "now", made.now)
    yield made
    made.end()


def explored(worlds: Worlds, name: str, fault: str | None, *, preemptions: float, late: bool) -> Explored:
    """All ways of a world."""
    most, plans = WORLDS[name]
    kinds = () if fault is None else (fault,)

    def make() -> PoolWorld:
        return worlds.make(
            most=most, plans=plans, kinds=kinds, faults=len(kinds), preemptions=preemptions, late=late
        )

    return explore(make, check=PoolWorld.check_end)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("fault", [None, *FAULTS])
@pytest.mark.parametrize("name", WORLDS)
def test_small_pools(worlds: Worlds, name: str, fault: str | None, capsys: pytest.CaptureFixture[str]) -> None:
    seen = explored(worlds, name, fault, preemptions=2, late=True)
    with capsys.disabled():
        print(f"\n{name}, {fault}: {seen.states:,} states, {seen.ends:,} ends", end="")
    assert seen.ends
