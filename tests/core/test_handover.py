"""A tenure that several flows hold, as data: random hand-overs over a model of the table, with lost answers."""

from __future__ import annotations

import random
from typing import Any

import pytest

from dblock.core import protocol
from dblock.core.errors import StoreConflict, StoreUnanswered
from dblock.core.steps import Execute, Rows, Steps
from dblock.core.values import Tenure
from tests.core.test_protocol import World


class SharedWorld(World):
    """The table, with the statements of a hand-over."""

    def _attach(self, p: dict[str, Any]) -> Rows:
        row = self._tenure(p)
        if row is None or row["expires_at"] <= self.time:
            return []
        row["count"] += 1
        row["expires_at"] = max(row["expires_at"], self.time + p["life"])
        return [(row["count"],)]

    def _detach(self, p: dict[str, Any]) -> Rows:
        row = self._tenure(p)
        if row is None or row["expires_at"] <= self.time:
            return []
        row["count"] -= 1
        row["expires_at"] = max(row["expires_at"], self.time + p["life"])
        return [()]

    def _leave(self, p: dict[str, Any]) -> Rows:
        row = self._tenure(p)
        if row is None:
            return []
        if row["count"] <= 1:
            row["owner"], row["expires_at"] = None, self.time
        row["count"] = max(row["count"] - 1, 0)
        return [(0,)]


def play(world: SharedWorld, steps: Steps[Any], chance: random.Random, share: float) -> Any:
    """Drive `steps`; a share of the statements is refused, or executed without an answer, or never."""
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
            error = StoreConflict("busy") if fate == "refused" else StoreUnanswered("cut")


@pytest.mark.parametrize("share", [0.0, 0.25])
@pytest.mark.parametrize("seed", range(100))
def test_random_hand_overs(seed: int, share: float) -> None:
    """The key is never free while somebody still holds it; without faults it is free once nobody does."""
    chance, world = random.Random(seed), SharedWorld()
    world.granted["k"] = [0]
    fence = world._begin(None, {"key": "k", "owner": "o", "ttl": 600.0, "life": 600.0})[0][0]
    tenure, database, row = Tenure("k", "o", fence), world.database(), world.rows["k"]
    holders, tokens = 1, 0
    for _ in range(60):
        moves = ["attach"] * (tokens > 0) + ["detach", "leave"] * (holders > 0)
        if not moves or (tokens == 0 and holders == 0):
            break
        move = chance.choice(moves)
        try:
            if move == "attach":
                found = play(world, protocol.attach(database, tenure, {}, 600.0, 0.0), chance, share)
                assert found is not None
                holders += 1
            elif move == "detach":
                assert play(world, protocol.detach(database, tenure, 600.0, 0.0), chance, share)
                holders, tokens = holders - 1, tokens + 1
            elif holders > 1 or not tokens or chance.random() < 0.2:
                _ = play(world, protocol.leave(database, tenure, 0.0, alone=False), chance, share)
                holders -= 1
                if holders == 0 and row["owner"] is None:
                    break  # given back: the tokens are of an ended tenure
        except (StoreConflict, StoreUnanswered):
            continue  # it did not happen, as far as that flow is concerned
        if holders:
            assert row["owner"] == "o", "freed under a holder"
            assert row["count"] >= holders
        if not share and row["owner"]:
            assert row["count"] == holders
    if not share and not holders and not tokens:
        assert row["owner"] is None
