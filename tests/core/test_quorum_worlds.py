"""Every order of steps of two clients of a majority lock, with a fault at every step; and what finds which mistake."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from dblock.majority import protocol
from dblock.majority.protocol import Answer
from tests.support.lab import LONG
from tests.support.quorum_worlds import FAULTS, Rules, explore, held_unevenly

pytestmark = pytest.mark.timeout(300)


@pytest.mark.parametrize("fault", [None, *FAULTS])
def test_two_clients(fault: str | None) -> None:
    """Never two at a time unless a clock has jumped; fences always grow; nothing is left."""
    seen = explore(() if fault is None else (fault,), 0 if fault is None else 1)
    assert seen.states > 1500
    assert seen.both > 25, "both get it in turn in some of them"


@pytest.mark.parametrize("fault", FAULTS if LONG else ["lost", "wipe", "clock"])
def test_two_clients_that_propose_a_fence(fault: str) -> None:
    """A take that answers it is its own confirmation."""
    assert explore((fault,), 1, Rules(proposes=True)).both > 50


@pytest.mark.parametrize("fault", FAULTS if LONG else ["lost", "wipe", "pause"])
def test_two_clients_that_ask_all_at_once(fault: str) -> None:
    """As they do if nobody is known to want the key."""
    assert explore((fault,), 1, Rules(proposes=True, at_once=True)).both > 50


@pytest.mark.skipif(not LONG, reason="minutes of work: part of `make faults`")
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("first", FAULTS)
def test_two_faults(first: str) -> None:
    """A fault, and one of those that databases have."""
    assert explore((first, "wipe", "lost"), 2).states > 100_000


def _found(message: str, kinds: tuple[str, ...], rules: Rules | None = None) -> None:
    with pytest.raises(AssertionError, match=message):
        _ = explore(kinds, len(kinds), rules)


def test_without_writing_back_a_fence_is_lower_than_an_earlier_one() -> None:
    _found("did not grow|one fence", ("lost",), Rules(confirms=False))


def test_writing_back_to_a_minority_is_not_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    def one_is_enough(confirmed: Mapping[int, Answer], _quorum: int, now: float, ttl: float) -> bool:
        return any(answer.until - now >= ttl / 2 for answer in confirmed.values())

    monkeypatch.setattr(protocol, "is_good", one_is_enough)
    _found("did not grow|one fence", ("lost", "slow"))


def test_without_a_quarantine_two_have_a_majority() -> None:
    _found("two have", ("wipe",), Rules(quarantine=0))
    _found("two have", ("promote",), Rules(quarantine=0))


def test_trust_by_the_latest_answer_is_too_long(monkeypatch: pytest.MonkeyPatch) -> None:
    kinds = ("pause", "wait") if LONG else ("pause",)
    assert explore(kinds, len(kinds), start=held_unevenly()).both > 5
    monkeypatch.setattr(protocol, "trusted_until", lambda moments, _quorum: max(moments, default=float("-inf")))
    with pytest.raises(AssertionError, match="two have a majority"):
        _ = explore(("pause",), 1, start=held_unevenly())


def test_giving_back_only_what_was_granted_leaves_something_behind() -> None:
    _found("left behind", ("lost",), Rules(undoes=False))


def test_half_of_the_databases_are_no_majority(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(protocol, "majority", lambda databases: databases // 2)
    _found("two have a majority|did not grow|one fence", ("slow",))


def test_the_majority_of_so_many() -> None:
    """More than half, also of an even number."""
    assert [protocol.majority(number) for number in range(1, 7)] == [1, 2, 2, 3, 3, 4]
    assert protocol.trusted_until([3.0, 9.0, 5.0], 2) == 5.0
    assert protocol.trusted_until([3.0], 2) == float("-inf")
