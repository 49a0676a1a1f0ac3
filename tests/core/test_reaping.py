"""One pass of the reaper, on pages that are made up."""

from __future__ import annotations

import json

import pytest

from dblock.core.errors import StoreBusy
from dblock.core.protocol.reaping import Reaped, reap
from dblock.core.protocol.sending import Database
from dblock.core.protocol.steps import Execute, Rows, Sleep, Step
from dblock.core.statements import DIALECTS
from tests.support.steps import NO_STORE, no_store

PAGES = {"": [("a", 1), ("b", 0), ("é", 1), ("d", 1)], "d": [("e", 0)], "e": [("f", 1)], "f": []}


def play(locked: str, took: float = 0.0625) -> tuple[Reaped, list[list[str]]]:
    """What a pass answers, and the names in each of its deletions."""
    time, sent = [0.0], list[list[str]]()

    def answer(step: Step) -> Rows | StoreBusy | None:
        if isinstance(step, Sleep):
            return None
        assert isinstance(step, Execute)
        time[0] += took
        if step.statement.name in {"stale", "dead"}:
            return PAGES[str(step.parameters["after"])] if step.statement.name == "stale" else []
        sent.append(json.loads(str(step.parameters["names"])))
        return StoreBusy("locked") if locked in sent[-1] else [()] * len(sent[-1])

    steps = reap(Database(no_store, DIALECTS["mariadb"], now=lambda: time[0]), 3600)
    worked, reply = 0.0, None
    while True:
        try:
            step = steps.throw(reply) if isinstance(reply, StoreBusy) else steps.send(reply)
        except StopIteration as done:
            result: Reaped = done.value
            return result, sent
        if isinstance(step, Sleep):
            assert step == Sleep(NO_STORE, min(9 * worked, 1.0))
            worked = 0.0
        else:
            assert isinstance(step, Execute)
            assert not worked or step.statement.name == "reap", "only a deletion follows at once"
            worked += took
        reply = answer(step)


@pytest.mark.parametrize(
    ("locked", "deleted", "sent"),
    [
        ("", 4, [["a", "é", "d"], ["f"]]),
        ("é", 1, [["a", "é", "d"], ["f"]]),
        ("f", 3, [["a", "é", "d"], ["f"]]),
    ],
)
def test_a_page_is_deleted_at_once_or_later(locked: str, deleted: int, sent: list[list[str]]) -> None:
    """A locked row keeps its page, and no other; a pause is nine times as long as the statements, or a second."""
    assert play(locked) == play(locked, 3.0) == (Reaped(deleted, 0), sent)
