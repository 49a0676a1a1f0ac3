"""A tenure that several flows hold, as data: random hand-overs over a model of the table, with lost answers."""

from __future__ import annotations

import random
from typing import Any

import pytest

from dblock.core.errors import StoreConflict, StoreUnanswered
from dblock.core.protocol import tenures
from dblock.core.protocol.steps import Execute, Rows, Steps
from dblock.core.values import Tenure
from tests.support.model import World, lost_after, raising
from tests.support.model import play as perform


class SharedWorld(World):
    """The table, with the statements of a hand-over."""

    def _begin(self, row: dict[str, Any] | None, p: dict[str, Any]) -> Rows:
        rows = super()._begin(row, p)
        self.rows[p["key"]] |= {"tokens": 0, "bearers": 0}
        return rows

    def _attach(self, p: dict[str, Any]) -> Rows:
        row = self._tenure(p)
        if row is None or row["expires_at"] <= self.time:
            return []
        row["count"] += 1
        row["tokens"] = max(row["tokens"] - p["counted"], 0)
        row["bearers"] += 1
        row["expires_at"] = max(row["expires_at"], self.time + p["life"])
        return [(row["count"],)]

    def _detach(self, p: dict[str, Any]) -> Rows:
        row = self._tenure(p)
        if row is None or row["expires_at"] <= self.time:
            return []
        if p["count"] and (row["bearers"] != p["bearers"] or row["count"] > p["count"]):
            return []
        row["count"] = (p["count"] or row["count"]) - 1
        row["tokens"] = 1 if p["count"] else row["tokens"] + 1
        row["expires_at"] = max(row["expires_at"], self.time + p["life"])
        return [()]

    def _leave(self, p: dict[str, Any]) -> Rows:
        row = self._tenure(p)
        if row is None or (p["count"] and (row["count"], row["bearers"]) != (p["count"], p["bearers"])):
            return []
        if row["count"] <= 1 and row["tokens"] and row["expires_at"] > self.time:
            row["expires_at"] = max(row["expires_at"], self.time + p["life"])
        elif row["count"] <= 1:
            row["owner"], row["expires_at"] = None, self.time
        row["count"] = max(row["count"] - 1, 0)
        return [(0,)]


WHO: dict[str, Any] = {"host": "h", "pid": 1, "thread": "t"}
"""All flows have the same name for people."""


def play(
    world: SharedWorld, steps: Steps[Any], chance: random.Random, share: float, late: list[Execute] | None = None
) -> Any:
    """Drive `steps`; a share of the statements is refused, or executed without an answer, now, never, or `late`."""
    reply: Any = None
    error: BaseException | None = None
    while True:
        try:
            step = steps.send(reply) if error is None else steps.throw(error)
        except StopIteration as done:
            return done.value
        reply = error = None
        if not isinstance(step, Execute):
            world.time += step.seconds
        elif chance.random() >= share:
            reply = world.execute(step)
        else:
            fate = chance.choice(("refused", "unanswered", "never"))
            if fate == "unanswered":
                _ = world.execute(step)
            elif fate == "never" and late is not None:
                late.append(step)
            error = StoreConflict("busy") if fate == "refused" else StoreUnanswered("cut")


@pytest.mark.parametrize("share", [0.0, 0.25])
@pytest.mark.parametrize("seed", range(100))
def test_random_hand_overs(seed: int, share: float) -> None:
    """The key is never free while somebody still holds it; without faults it is free once nobody does.

    The flow that took it may have entered several times when it hands one entry over, and that counts once however
    often it was sent.
    """
    chance, world, late = random.Random(seed), SharedWorld(), list[Execute]()
    fence = world._begin(None, {**WHO, "key": "k", "owner": "o", "ttl": 600.0, "life": 600.0})[0][0]
    tenure, database, row = Tenure("k", "o", fence), world.database(), world.rows["k"]
    row["count"] = count = chance.choice((1, 2, 3))
    detached = tenures.detach(database, tenure, 600.0, 0.0, count=count)
    assert play(world, detached, chance, share, late)
    assert row["count"] == count - 1
    assert row["expires_at"] >= world.time + 599
    holders, tokens = count - 1, 1
    for _ in range(60):
        if late and chance.random() < 0.5:
            _ = world.execute(late.pop(0))
        moves = ["attach"] * (tokens > 0 or chance.random() < 0.2) + ["detach", "leave"] * (holders > 0)
        if not moves or (tokens == 0 and holders == 0):
            break
        move = chance.choice(moves)
        try:
            if move == "attach":
                attached = tenures.attach(database, tenure, WHO, 600.0, 0.0, counted=True)
                found = play(world, attached, chance, share)
                assert found is not None
                holders, tokens = holders + 1, max(tokens - 1, 0)
            elif move == "detach":
                assert play(world, tenures.detach(database, tenure, 600.0, 0.0), chance, share)
                holders, tokens = holders - 1, tokens + 1
            else:
                _ = play(world, tenures.leave(database, tenure, 600.0, 0.0), chance, share)
                holders -= 1
                if holders == 0 and row["owner"] is None:
                    assert share or not tokens, "freed under a token"
                    break
        except (StoreConflict, StoreUnanswered):
            continue  # it did not happen, as far as that flow is concerned
        if holders:
            assert row["owner"] == "o", "freed under a holder"
            assert row["count"] >= holders
        if not share and row["owner"]:
            assert (row["count"], row["tokens"]) == (holders, tokens)
    if not share and not holders and not tokens:
        assert row["owner"] is None


def shared(count: int) -> tuple[SharedWorld, Tenure]:
    """A tenure of that count, taken by a flow whose lease has nine seconds left."""
    world = SharedWorld()
    fence = world._begin(None, {**WHO, "key": "k", "owner": "o", "ttl": 600.0, "life": 9.0})[0][0]
    world.rows["k"]["count"] = count
    return world, Tenure("k", "o", fence)


def test_a_bearer_that_attaches_between_two_sendings_is_counted() -> None:
    """The first was executed and not answered: the second finds that somebody is there, and takes nothing away."""
    world, tenure = shared(2)

    def unanswered(step: Execute) -> Rows:
        _ = world.execute(step)
        _ = world._attach({**tenure._asdict(), "life": 600.0, "counted": 1})
        raise StoreUnanswered("cut")

    steps = tenures.detach(world.database(), tenure, 600.0, 0.0, count=2)
    assert perform(world, steps, {("detach", 0): unanswered}) is True
    assert world.rows["k"]["count"] == 2


def test_a_bearer_that_has_attached_unnoticed_is_counted() -> None:
    """The flow thinks that it counts alone; the row shows that it does not."""
    world, tenure = shared(1)
    _ = world._attach({**tenure._asdict(), "life": 9.0, "counted": 1})
    steps = tenures.detach(world.database(), tenure, 600.0, 0.0, count=1)
    assert perform(world, steps, {}) is True
    assert world.rows["k"]["count"] == 1


def test_what_others_count_is_lowered_once() -> None:
    """A lost answer: the count may be one too high, never too low; the bearer has a whole lease all the same."""
    for fault, count in ((lost_after, 2), (lambda _: raising(StoreUnanswered("cut")), 3)):
        world, tenure = shared(3)
        steps = tenures.detach(world.database(), tenure, 600.0, 0.0)
        assert perform(world, steps, {("detach", 0): fault(world)}) is True
        assert world.rows["k"]["count"] == count
        assert world.rows["k"]["expires_at"] > world.time + 599


@pytest.mark.parametrize("count", [0, 2])
def test_a_tenure_that_ended_is_not_handed_over(count: int) -> None:
    """Not even if the answer that would have said so was lost."""
    for faults in ({}, {("detach", 0): raising(StoreUnanswered("cut"))}):
        world, tenure = shared(2)
        world.time += 10
        steps = tenures.detach(world.database(), tenure, 600.0, 0.0, count=count)
        assert perform(world, steps, faults) is False
