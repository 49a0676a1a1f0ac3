"""Guarded blocks in a small world: take, begin, pin, commit and release, with one fault and two at each step."""

from __future__ import annotations

import contextlib
import logging
import weakref
from collections.abc import Callable, Generator, Iterator
from dataclasses import replace
from typing import Any

import pytest

from dblock.core.errors import LockError, LockLost, LockTimeout, StoreUnanswered
from dblock.core.holding.flow import Hold
from dblock.core.lock import guarded as guarded_module
from dblock.core.lock import operations
from dblock.core.lock.guarded import Guarded
from dblock.core.protocol.steps import Execute, Rows, Sleep, Wait
from dblock.core.statements import DIALECTS
from tests.conftest import timed
from tests.core.test_holds import FakeLock, FakePlace, FakeStore
from tests.support.lab import LONG
from tests.support.model import Interrupted, World
from tests.support.steps import skipped

TTL = 30.0
FAULTS = ("over", "freed", "error", "lost", "interrupt", "late interrupt")
"""Before a step: the lease ends, or the key is freed by force, and others take it; the step fails, or is broken off.
After it: its answer is lost, or it is broken off."""
Plan = dict[int, str]


class DatabaseError(Exception):
    """Of the caller's transaction."""


class BodyError(Exception):
    """Of the caller's body."""


class Place(FakeStore):
    """One key, the transaction of one block, and others who take the key whenever they can."""

    pin = DIALECTS["postgresql"].pin
    renewable = False
    """Nothing is left to a thread, whose steps would come at any time."""

    def __init__(self, plan: Plan) -> None:
        self.world = World()
        super().__init__(lambda: self.world.time)
        self.database = replace(self.world.database(), runner=weakref.ref(self))
        self.plan, self.steps = plan, list[str]()
        self.pinned = self.committed = self.taken = False

    def step(self, name: str, effect: Callable[[], Any], failure: type[Exception] = StoreUnanswered) -> Any:
        """Let something take effect, or go wrong as it is planned."""
        fault = self.plan.get(len(self.steps), "")
        self.steps.append(name)
        row = self.world.rows.get("k")
        if fault == "over":
            self.world.time += TTL + 1
        if fault == "freed" and row is not None and row["owner"] != "rival":
            row |= {"owner": None, "count": 0, "expires_at": self.world.time}
        if fault in {"over", "freed"}:
            self._others_try()
        if fault == "error":
            raise failure("not executed")
        if fault == "interrupt":
            raise Interrupted
        found = effect()
        if fault == "lost":
            raise failure("executed, and not answered")
        if fault == "late interrupt":
            raise Interrupted
        return found

    def _others_try(self) -> None:
        row = self.world.rows.get("k")
        if not self.pinned and (row is None or row["owner"] is None or row["expires_at"] <= self.world.time):
            _ = self.world._begin(row, {"key": "k", "owner": "rival", "ttl": 1e6, "life": 1e6})
            self.taken = True

    def execute(self, step: Execute) -> Rows:
        rows: Rows = self.step(step.statement.name, lambda: self.world.execute(step))
        return rows

    def pause(self, step: Sleep | Wait) -> None:
        self.world.time += step.seconds

    def keep_others_out(self) -> Rows:
        self.pinned = True
        return [(True,)]

    def commit(self) -> None:
        assert not self.taken, "another tenure began before the end of the guarded transaction"
        self.committed, self.pinned = True, False


class Face(FakePlace):
    """That of the lock, which pins it in the transaction of the world."""

    _store: Place

    def pin(self, *_: object) -> Rows:
        pinned: Rows = self._store.step("pin", self._store.keep_others_out)
        return pinned


class Lock(FakeLock):
    """A lock whose guard() is as those of the faces."""

    store: Place

    def guard(self, place: Place) -> None:
        self._place = Face(place)
        self._drive(self._guard())


class Block(Guarded[Place]):
    """Over the one transaction of the world."""

    def _begin(self, holds: list[Hold]) -> Generator[Place]:
        place: Place = self._lock.store
        place.step("begin", lambda: None, DatabaseError)
        try:
            try:
                self._lock.guard(place)
                yield place
                self._committing(holds)
            except BaseException:
                place.step("rollback", lambda: None, DatabaseError)
                raise
            place.step("commit", place.commit, DatabaseError)
        finally:
            place.pinned = False  # whatever has gone wrong, the database has ended it


def outcome(place: Place, *, raises: bool) -> BaseException | None:
    """What comes out of a block."""
    lock = Lock(place, ttl=TTL, timeout=1.0, renew=False)
    try:
        with Block(lock):
            place.step("body", lambda: None, DatabaseError)
            if raises:
                raise BodyError
    except AssertionError:
        raise
    except BaseException as error:
        return error
    finally:
        assert lock._hold_here() is None
    return None


def check(plan: Plan, *, raises: bool) -> list[str]:
    """Run a block in which this goes wrong; the steps of it."""
    place = Place(plan)
    error = outcome(place, raises=raises)
    told = f"{plan} of {place.steps}: {error!r}"
    if isinstance(error, LockLost | LockTimeout):
        assert not place.committed, told
    if place.committed:
        assert not isinstance(error, LockError), told
    if not plan:
        assert place.committed is not raises, told
        assert isinstance(error, BodyError) is raises, told
    if error is None:
        assert place.committed, told
    if not {*plan.values()} & {"interrupt", "late interrupt"}:
        assert not isinstance(error, Interrupted), told
    row = place.world.rows.get("k")
    if row is not None and row["owner"] not in {None, "rival"}:
        assert row["expires_at"] <= place.world.time + TTL, told
    return place.steps


def explored(most: int, *, raises: bool) -> int:
    """All plans with so many faults at most; their number."""
    plans: list[Plan] = [{}]
    count = 0
    while plans:
        plan = plans.pop()
        count += 1
        steps = check(plan, raises=raises)
        if len(plan) < most:
            first = max(plan, default=-1) + 1
            plans += [{**plan, at: fault} for at in range(first, len(steps)) for fault in FAULTS]
    return count


@pytest.fixture(autouse=True)
def _quiet(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Thousands of losses are not logged, and who waits asks a dozen times, not a hundred."""
    timed(monkeypatch, poll_min=0.1)
    with caplog.at_level(logging.CRITICAL, "dblock"):
        yield


@pytest.mark.parametrize("raises", [False, True])
def test_every_fault_at_every_step(raises: bool) -> None:
    """LockLost and LockTimeout: not committed. Committed: no error of the lock. No tenure begins before the end."""
    assert explored(3 if LONG else 2 - raises, raises=raises) > (50 if raises else 1000)


# -- what the world notices


def tell(late: LockError, _: object) -> None:
    raise late


MISTAKES: dict[str, tuple[Any, str, Any]] = {
    "the transaction is not guarded": (Lock, "guard", lambda *_: None),
    "what leaving the lock meets is raised": (guarded_module, "_tell", tell),
    "the pin is believed without a look at the row": (operations, "verify", skipped()),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_the_world_notices(mistake: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(*MISTAKES[mistake])
    with contextlib.suppress(Interrupted), pytest.raises(AssertionError):
        _ = explored(1, raises=False)
