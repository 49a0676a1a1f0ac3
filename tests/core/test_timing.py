"""The named times: all in one place, few, and in relation to each other."""

from __future__ import annotations

from typing import Any

import pytest

from dblock.core.timing import DEFAULT, Timing
from dblock.testing.memory import TIMING
from tests.support.timings import checked


@pytest.mark.parametrize(
    ("times", "what"),
    [
        ({"poll_min": 1.1}, "polling grows"),
        ({"near": 0.1}, "far is farther than near"),
        ({"local_poll": 1.0}, "a caller polls twice for a connection to release on"),
        ({"trusted_idle": 61.0}, "a connection is trusted for less time than it is kept"),
        ({"local_handover_wait": 5.0}, "a waiter joins the database's queue before its place could expire"),
        ({"farthest": 2.0}, "a waiter joins the database's queue before its place could expire"),
        ({"attention": 2.1}, "a thread without work looks for some before it ends"),
        ({"retry_max": 0.004}, "the pauses before resending grow"),
    ],
)
def test_times_that_do_not_fit_together_are_refused(times: dict[str, Any], what: str) -> None:
    """The error says which relation does not hold."""
    with pytest.raises(ValueError, match=what):
        _ = checked(Timing(**times))


@pytest.mark.parametrize("times", [DEFAULT, TIMING], ids=["of the core", "of locks in memory"])
def test_the_times_fit_together(times: Timing) -> None:
    """Those that are in use."""
    assert checked(times) == times


def test_times_that_follow_from_others() -> None:
    """A place survives a failed heartbeat, a renewal has time for a second connection, and so on, whatever is set."""
    for times in (Timing(), Timing(waiter_ttl=0.6, statement_timeout=1.0, poll_notified=7.0)):
        assert 2 * times.heartbeat_interval <= times.waiter_ttl
        assert 2 * times.critical_timeout <= times.statement_timeout < times.surely_answered
        assert 2 * times.poll_notified < times.unresponsive_after
        assert times.poll_max <= times.poll_notified
        assert times.near < times.min_retry_time


@pytest.mark.parametrize("distance", [0.02, 0.08, 0.1])
def test_far_away_there_is_time_for_each_step(distance: float) -> None:
    """A round trip is shorter than what a statement needs, a try has six, a hand-over five; undoing opens one."""
    far = Timing().at(distance)
    assert far.min_retry_time > distance
    assert far.single_try >= 6 * distance
    assert far.single_try >= 5 * distance
    assert far.undo_timeout >= 24 * distance
    assert far.pinned_answer >= 4 * distance
    assert far.local_handover_wait >= 3 * distance
    assert checked(far) == far
    assert Timing().at(9.0) == Timing().at(0.1)
    assert Timing().at(0.005) == Timing()
