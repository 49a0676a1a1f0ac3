"""The rules that histories are checked by: each notices a history that breaks it, and all accept those of a model."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.support.history import RULES, Final, Kind, Operation, violations

OVERLAP, BESIDE, PERMITS, FENCES, TURN, OVERTAKEN, LOST, EXCEPTION = RULES


def take(kind: Kind, fence: int, end: float, until: float, **more: object) -> Operation:
    """A tenure that is believed in from `end` to `until`."""
    known = {"key": "k", "client": f"{fence}.", "begin": end - 0.5, "end": end, "until": until, **more}
    return Operation("take", kind=kind, fence=fence, **known)  # type: ignore[arg-type]


def alone(fence: int, end: float, until: float, **more: object) -> Operation:
    return take("exclusive", fence, end, until, **more)


def permit(slot: int, fence: int, end: float, until: float) -> Operation:
    return take("permit", fence, end, until, slot=slot, permits=2)


def queued(fence: int, ticket: int, end: float) -> Operation:
    return alone(fence, end, end + 0.1, ticket=ticket, joined=ticket, how="waited", client="1.a")


def newcomer(begin: float, end: float, **more: object) -> Operation:
    return replace(alone(5, end, end + 0.1, how="at_once", client="2.b", **more), begin=begin)


def grant(fence: int, ticket: int) -> Operation:
    return Operation("grant", "k", "3.c", ticket, ticket + 0.5, fence=fence, ticket=ticket)


def write(  # noqa: PLR0917
    name: str, value: int, begin: float, end: float, outcome: str = "ok", fence: int = 0
) -> Operation:
    return Operation("write", "k", "1.a", begin, end, outcome, value=value, fence=fence or int(begin), id=name)


def nemesis(name: str, begin: float, end: float, *, key: str = "k", client: str = "k", value: int = 0) -> Operation:
    return Operation(name, key, client, begin, end, value=value)


FREED = nemesis("force", 1.0, 1.1)
WAITED = queued(7, 2, 9.0)
AGAIN = replace(WAITED, again=((6, 6.0),))

BAD: list[tuple[str, list[Operation], int]] = [
    (OVERLAP, [alone(1, 0, 2), alone(2, 1, 4)], 2),
    (OVERLAP, [alone(1, 0, 9), alone(2, 10, 11), alone(3, 12, 20), alone(4, 13, 14), alone(5, 21, 22)], 2),
    (OVERLAP, [take("leader", 1, 0, 2), take("leader", 2, 1, 4)], 2),
    (OVERLAP, [take("majority", 1, 0, 2), take("majority", 2, 1, 4)], 2),
    (OVERLAP, [take("writer", 1, 0, 2), take("writer", 3, 1, 4)], 2),
    (OVERLAP, [permit(0, 1, 0, 2), permit(1, 1, 0, 2), permit(0, 2, 2.5, 4), permit(0, 3, 3, 5)], 2),
    (OVERLAP, [alone(1, 0, 2), alone(2, 1, 4), nemesis("force", 5, 6)], 2),
    (OVERLAP, [alone(1, 0, 2), alone(2, 1, 4), nemesis("force", 1, 2, key="other")], 2),
    (BESIDE, [take("reader", 2, 0, 9), take("reader", 2, 1, 2), take("writer", 3, 8, 10)], 2),
    (BESIDE, [take("writer", 1, 0, 5), take("reader", 2, 4, 6)], 2),
    (PERMITS, [take("permit", 1, 0, 2, slot=3, permits=2)], 1),
    (PERMITS, [permit(0, 1, 0, 3), permit(1, 1, 1, 4), take("permit", 1, 2, 5, slot=2, permits=2)], 3),
    (FENCES, [alone(3, 0, 1), alone(3, 2, 4)], 2),
    (FENCES, [alone(3, 0, 1), alone(9, 1, 2), alone(4, 2, 3), alone(10, 4, 5)], 2),
    (FENCES, [take("writer", 5, 0, 1), take("reader", 4, 2, 3)], 2),
    (FENCES, [take("reader", 4, 0, 1), take("writer", 3, 2, 3)], 2),
    (TURN, [queued(1, 4, 5), queued(2, 3, 6)], 2),
    (OVERTAKEN, [newcomer(4, 5), WAITED], 2),
    (OVERTAKEN, [newcomer(4, 5), WAITED, nemesis("fault", 4, 5, client="another")], 2),
    (OVERTAKEN, [newcomer(4, 5), WAITED, nemesis("verify", 4.0, 4.1), nemesis("verify", 4, 5, key="other")], 2),
    (OVERTAKEN, [newcomer(4, 5), AGAIN, grant(7, 6)], 2),
    (OVERTAKEN, [newcomer(4, 5), AGAIN, grant(7, 2), grant(7, 6)], 2),
    (OVERTAKEN, [newcomer(7, 8), AGAIN, grant(3, 2), grant(7, 6)], 3),
    (TURN, [queued(1, 8, 8.5), AGAIN, grant(0, 2)], 3),
    (TURN, [AGAIN, grant(0, 2), queued(8, 4, 9.5)], 3),
    (LOST, [write("a", 0, 1, 2), write("b", 0, 3, 4)], 2),
    (LOST, [write("a", 1, 1, 2), write("b", 0, 3, 4, fence=1)], 2),
    (LOST, [write("a", 0, 1, 2, fence=9), write("b", 1, 3, 4)], 2),
    (LOST, [write("a", 0, 1, 2), write("b", 1, 3, 4, "failed")], 1),
    (EXCEPTION, [replace(alone(1, 0, 2), outcome="unexpected ValueError")], 1),
]
GOOD: list[list[Operation]] = [
    [newcomer(4, 5), AGAIN, grant(3, 2), grant(7, 6)],  # it was too late for its first grant
    [alone(1, 0, 2), alone(2, 2, 4)],
    [alone(1, 0, 2), alone(2, 1, 4, key="other")],
    [alone(1, 0, 2), alone(2, 1.5, 4), FREED],
    [alone(2, 1, 4), replace(alone(1, 1.5, 2), begin=0.5), FREED],
    [take("writer", 1, 0, 2), take("reader", 2, 2, 4), take("reader", 2, 3, 4), take("writer", 4, 4, 5)],
    [permit(0, 1, 0, 2), permit(1, 1, 0, 2), permit(0, 2, 2, 3)],
    [queued(1, 4, 5), queued(2, 3, 6), nemesis("fault", 4.5, 5, value=1)],
    [newcomer(4, 5, barging=True), WAITED],
    [replace(newcomer(4, 5), how="handed_over"), WAITED],
    [newcomer(1, 5), WAITED],
    [newcomer(4, 5), WAITED, nemesis("fault", 4, 5, client="1")],
    [newcomer(4, 5), WAITED, nemesis("force", 4.5, 4.6)],
    [newcomer(4, 5), WAITED, nemesis("verify", 4.0, 4.5)],
    [newcomer(4, 5), WAITED, replace(nemesis("take", 4.0, 4.1), outcome="StoreUnanswered")],
    [write("a", 0, 1, 2), write("b", 1, 3, 4)],
    [write("a", 0, 1, 2), write("b", 1, 3, 4, "unknown"), write("c", 2, 5, 6)],
    [replace(alone(1, 0, 2), outcome="LockTimeout", until=0)],
]


def of(history: list[Operation]) -> dict[str, Final]:
    members = {each.id: each.value for each in history if each.name == "write"}
    return {"k": Final(len(members), members)} if members else {}


@pytest.mark.parametrize(("rule", "history", "shown"), BAD)
def test_a_history_that_breaks_a_rule(rule: str, history: list[Operation], shown: int) -> None:
    """That rule and no other one is named, with the operations that break it and none beside."""
    found = violations(history, of(history))
    assert {each.rule for each in found} == {rule}
    assert min(len(each.history) for each in found) == shown
    assert all(set(each.history) <= set(history) for each in found)
    assert all(violations(each.history) for each in found if rule != LOST), "the part shows it by itself"


@pytest.mark.parametrize("history", GOOD)
def test_a_history_that_breaks_none(history: list[Operation]) -> None:
    assert violations(history, of(history)) == []


@pytest.mark.parametrize(
    "final",
    [
        Final(2, {"a": 0}),
        Final(1, {"a": 0, "c": 1}),
        Final(0, {}),
        Final(2, {"a": 0, "of a client that was killed": 0}),
    ],
)
def test_a_counter_and_a_set_that_lack_an_update(final: Final) -> None:
    """The counter is as high as the set is large, the set has each write that was committed, and no value twice."""
    assert {each.rule for each in violations([write("a", 0, 1, 2)], {"k": final})} == {LOST}


def test_each_rule_has_a_history_that_breaks_it() -> None:
    assert {rule for rule, _, _ in BAD} == set(RULES)
