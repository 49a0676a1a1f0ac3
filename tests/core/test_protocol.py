"""The protocol as data: random schedules of several workers over a model of the table, without threads or servers.

Workers are generators; a seeded scheduler decides who runs next, lets time pass, loses answers, breaks statements off
before or after they took effect, and deletes rows. What must hold is checked after every step.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest

from dblock.core import values
from dblock.core.acquire import acquiring, handover
from dblock.core.acquire.request import Refused, Request
from dblock.core.acquire.waiting import Attempt
from dblock.core.errors import (
    LockError,
    PoolExhausted,
    StoreConflict,
    StoreUnanswered,
)
from dblock.core.protocol import tenures
from dblock.core.protocol.sending import send
from dblock.core.protocol.steps import Execute, Rows, Sleep, Steps
from dblock.core.statements import DIALECTS
from dblock.core.values import Grant, margin
from tests.support.model import Interrupted, Scheduled, World, play, wish
from tests.support.steps import NO_STORE


@dataclass
class Worker(Scheduled):
    """One flow that takes, holds, perhaps extends, and releases, over and over."""

    believes: Grant | None = None
    late: list[Execute] = field(default_factory=list)
    """Statements that were sent on a broken connection and may yet arrive."""

    def life(self) -> Steps[None]:
        site = self.world.site()
        database = site.database
        while True:
            key, ttl = self.chance.choice("ab"), self.chance.choice((0.5, 2.0, 10.0))
            request = wish(key, ttl, fair=int(self.chance.random() < 0.9))
            found = yield from acquiring.acquire(Attempt(site, request, self.chance.choice((0.0, 1.0, 5.0))))
            if not isinstance(found, Grant):
                continue
            self.believes = found
            yield Sleep(NO_STORE, self.chance.choice((0.0, 0.3, 3.0)))
            if self.chance.random() < 0.3 and self.trusts():
                extended = yield from tenures.extend(database, found.tenure, ttl)
                self.believes = extended
            if self.chance.random() < 0.3 and self.believes and self.trusts():
                lease = (found.tenure, ttl)
                sent, alive = yield from tenures.renew(database, [lease], database.now() + 0.1)
                if (alive is None or alive) and self.trusts():
                    until = max(self.believes.trusted_until, Grant(found.tenure, sent, ttl).trusted_until)
                    self.believes = Grant(found.tenure, until - ttl + margin(ttl), ttl)
            if self.chance.random() < 0.3 and self.trusts():
                again = yield from tenures.set_count(database, found.tenure, 2, ttl, ttl)
                if again:
                    _ = yield from tenures.set_count(database, found.tenure, 1)
            self.believes = None
            _ = yield from handover.release(site, found)

    def trusts(self) -> bool:
        return self.believes is not None and self.world.time < self.believes.trusted_until

    def run(self) -> None:
        """Do one step, or have it fail."""
        self.arrive()
        if self.steps is None:
            self.believes, self.steps, self.reply, self.error = None, self.life(), None, None
        try:
            step = self.go_on()
        except (LockError, Interrupted):
            self.steps = self.believes = None  # as if the caller had handled it
            return
        fate = self.chance.random()
        if not isinstance(step, Execute):
            if fate < 0.05:
                self.error = Interrupted()
        elif fate < 0.04:
            self.error = StoreConflict()
        elif fate < 0.10:  # lost on the way: before, after, or long before it takes effect
            moment = self.chance.choice(("never", "now", "later"))
            if moment == "now":
                _ = self.world.execute(step)
            elif moment == "later":
                self.late.append(step)
            self.error = self.chance.choice((StoreUnanswered, Interrupted))()
        elif fate < 0.30:
            self.under_way = step, self.world.snapshot()
        else:
            self.reply = self.world.execute(step)


@pytest.mark.parametrize("seed", range(300))
def test_random_schedules(seed: int) -> None:
    """No two workers trust a grant of one key at a time, fences increase, and nothing stays held for ever."""
    chance = random.Random(seed)
    world = World(dialect=DIALECTS[("postgresql", "mysql")[seed % 2]])
    workers = [Worker(world, chance) for _ in range(4)]
    for _ in range(400):
        ready = [worker for worker in workers if worker.ready()]
        if ready:
            chance.choice(ready).run()
        event = chance.random()
        if event < 0.5 or not ready:
            world.time += chance.choice((1e-6, 0.001, 0.02, 0.5))
        elif event < 0.52:
            late = chance.choice(workers).late
            if late:
                _ = world.execute(late.pop(0))
        elif event < 0.53:
            stale = [key for key, row in world.rows.items() if row["expires_at"] < world.time]
            if stale:
                del world.rows[chance.choice(stale)]
        for key in "ab":
            trusting = [worker for worker in workers if worker.trusts() and _key(worker) == key]
            assert len(trusting) <= 1, f"{len(trusting)} workers trust {key!r}"
            for worker in trusting:
                assert _shown(world, worker), "a worker trusts a lease that its row does not show"
    assert len(world.granted["a"] + world.granted["b"]) > 5
    world.time += 20  # longer than any ttl
    for row in world.rows.values():
        assert row["owner"] is None or row["expires_at"] <= world.time
    for worker in workers:
        if worker.steps is not None:
            worker.steps.close()


@pytest.mark.parametrize("broken", ["take", "release", "trust", "adopt"])
def test_the_schedules_catch_a_broken_protocol(broken: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A protocol with one guard removed fails the schedules above: they can fail."""
    if broken == "take":
        original_take = World._take

        def take(self: World, p: dict[str, Any]) -> Rows:
            row = self.rows.get(p["key"])
            if row is not None:
                row["expires_at"] = min(row["expires_at"], self.time + 0.4)
            return original_take(self, p)

        monkeypatch.setattr(World, "_take", take)
    elif broken == "release":
        monkeypatch.setattr(World, "_tenure", lambda self, p: self.rows.get(p["key"]))
    elif broken == "trust":
        monkeypatch.setattr(values, "margin", lambda _: -1.0)
    else:
        monkeypatch.setattr(Request, "new_owner", lambda _: "everybody")
    with pytest.raises(AssertionError):
        for seed in range(300):
            test_random_schedules(seed)


def _key(worker: Worker) -> str:
    assert worker.believes is not None
    return worker.believes.tenure.key


def _shown(world: World, worker: Worker) -> bool:
    assert worker.believes is not None
    tenure = worker.believes.tenure
    row = world.rows.get(tenure.key)
    return row is not None and (row["owner"], row["fence"]) == (tenure.owner, tenure.fence)


# -- single faults, one at a time


def acquire(world: World, timeout: float | None = 0.0, ttl: float = 30.0) -> Steps[Any]:
    return acquiring.acquire(Attempt(world.site(), wish(ttl=ttl), timeout))


@pytest.mark.parametrize("statement", ["take", "renew", "release"])
def test_a_pool_that_is_used_up_says_nothing_of_the_row(statement: str) -> None:
    """It is waited for, whatever is done where somebody has locked the row: a batch of renewals is not taken apart."""
    database = World().site().database
    sending = send(database, getattr(DIALECTS["postgresql"], statement), {"key": "k"}, database.now() + 5)
    assert isinstance(next(sending), Execute)
    assert isinstance(sending.throw(PoolExhausted("all are in use")), Sleep)
    assert isinstance(sending.send(None), Execute)


def test_a_grant_that_comes_too_late_is_no_grant() -> None:
    """Its statement took longer than the lease: it is given back."""
    world = World()

    def slow(step: Execute) -> Rows:
        rows = world.execute(step)
        world.time += 0.95
        return rows

    found = play(world, acquire(world, ttl=1.0), {("create", 0): slow})
    assert isinstance(found, Grant)
    assert world.time < found.trusted_until
    assert len(world.granted["k"]) == 3


@pytest.mark.parametrize(("seconds", "refused"), [(0.005, True), (0.1, False)])
def test_a_database_that_had_no_time_to_answer_is_not_away(seconds: float, refused: bool) -> None:
    """The caller's time was up before a statement that was sent in its last milliseconds could be answered."""
    world = World()

    def unanswered(step: Execute) -> Rows:
        world.time += 2.0
        raise StoreUnanswered("no answer").because_late(seconds)

    steps = acquiring.acquire(Attempt(world.site(), wish("k", 2.0), 2.0))
    faults: dict[tuple[str, int], Callable[[Execute], Rows]] = {("take", 0): unanswered, ("accept", 0): unanswered}
    if refused:
        assert isinstance(play(world, steps, faults), Refused)
    else:
        with pytest.raises(StoreUnanswered, match="no answer"):
            play(world, steps, faults)
