"""Threads that work in rounds."""

from __future__ import annotations

import math
import threading
import time

import pytest

from dblock.core import clock
from dblock.core.connections.deadlines import Deadlines
from dblock.core.worker import Worker
from tests.conftest import timed
from tests.support.lab import threads, until


class Rounds(Worker):
    """Notes how many rounds there were, and how many at a time."""

    def __init__(self) -> None:
        super().__init__("rounds")
        self.begun, self.now, self.most = 0, 0, 0

    def round(self) -> float:
        self.begun, self.now = self.begun + 1, self.now + 1
        self.most = max(self.most, self.now)
        time.sleep(0.1)
        self.now -= 1
        return math.inf


def test_a_start_that_was_interrupted_leaves_no_two_rounds_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """A signal handler raises when the thread has begun; the next need starts another one."""
    worker, plain = Rounds(), threading.Thread.start

    def interrupted(thread: threading.Thread) -> None:
        plain(thread)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", interrupted)
        with pytest.raises(KeyboardInterrupt):
            _ = worker.wake()
    assert worker.wake() is None
    assert until(lambda: worker.begun >= 2 and not threads("dblock rounds"), 5)
    assert worker.most == 1


class Given(Worker):
    """Is given something in one of its rounds, after it has looked for what there is."""

    def __init__(self, when: int) -> None:
        super().__init__("given")
        self.given, self.done, self.left = list[str](), list[str](), when

    def round(self) -> float:
        self.done += self.given
        self.given.clear()
        self.left -= 1
        if not self.left:
            self.given.append("late")
            self.wake_by(clock.now() + 60)
        return math.inf

    def is_over(self) -> bool:
        return bool(self.done) or not threads("dblock given")


def test_what_comes_in_any_round_is_done(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also in the one after which the thread would have ended."""
    timed(monkeypatch, attention=0.05)
    for number in range(1, 5):
        worker = Given(number)
        assert worker.wake() is None
        assert until(worker.is_over, 5)
        assert worker.done or number == 4, "it had ended before"


def test_the_thread_of_deadlines_goes_on_while_it_is_used() -> None:
    """Also by statements that have ended before it looks: else it would end and begin each second."""
    deadlines, cut = Deadlines(), list[str]().clear
    assert deadlines.round() == math.inf
    deadlines.wakes_at = 0.0  # no thread is needed
    deadlines.arm(cut, clock.now() + 100)
    assert deadlines.disarm(cut)
    assert deadlines.round() < math.inf
    assert deadlines.round() == math.inf
