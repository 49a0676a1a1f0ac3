"""The protocol as data: single faults of taking a key. All orders of steps: `tests.core.test_small_worlds`."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from dblock.core.acquire import acquiring
from dblock.core.acquire.request import Refused
from dblock.core.acquire.waiting import Attempt
from dblock.core.errors import PoolExhausted, StoreUnanswered
from dblock.core.protocol.sending import send
from dblock.core.protocol.steps import Execute, Rows, Sleep
from dblock.core.statements import DIALECTS
from tests.support.model import World, play, wish


@pytest.mark.parametrize("statement", ["take", "renew", "release"])
def test_a_pool_that_is_used_up_says_nothing_of_the_row(statement: str) -> None:
    """It is waited for, whatever is done where somebody has locked the row: a batch of renewals is not taken apart."""
    database = World().site().database
    sending = send(database, getattr(DIALECTS["postgresql"], statement), {"key": "k"}, database.now() + 5)
    assert isinstance(next(sending), Execute)
    assert isinstance(sending.throw(PoolExhausted("all are in use")), Sleep)
    assert isinstance(sending.send(None), Execute)


@pytest.mark.parametrize(("seconds", "refused"), [(0.005, True), (0.1, False)])
def test_a_database_that_had_no_time_to_answer_is_not_away(seconds: float, refused: bool) -> None:
    """The caller's time was up before a statement that was sent in its last milliseconds could be answered."""
    world = World()

    def unanswered(step: Execute) -> Rows:
        world.time += 2.0
        raise StoreUnanswered("no answer", late=seconds)

    steps = acquiring.acquire(Attempt(wish("k", 2.0), world.site(), 2.0))
    faults: dict[tuple[str, int], Callable[[Execute], Rows]] = {("take", 0): unanswered, ("accept", 0): unanswered}
    if refused:
        assert isinstance(play(world, steps, faults), Refused)
    else:
        with pytest.raises(StoreUnanswered, match="no answer"):
            play(world, steps, faults)
