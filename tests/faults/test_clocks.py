"""Wrong clocks of applications (requirement 8)."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from tests.conftest import run
from tests.support.lab import FEW, Remote, remaining, there, until
from tests.support.subjects import Actor, Subject

WRONG = {"django": "3600", "sqlalchemy": "-3600"}


@pytest.mark.parametrize("subject", FEW, indirect=True, ids=str)
def test_a_clock_wrong_by_an_hour_changes_nothing(subject: Subject) -> None:
    """Take, hold, renewal, wait, expiry and fences between two processes an hour apart: as with right clocks."""
    with Remote(subject, DBLOCK_TEST_SHIFT=WRONG[subject.variant], TZ="Pacific/Auckland") as other:
        lock = subject.lock("k", ttl=20)
        assert abs(other.do("time.time()") - time.time()) > 3500
        other.do("(lock := subject.lock('k', ttl=20))")
        assert other.do("lock.acquire()")
        assert 18 < other.do("lock.remaining") <= 20
        assert 18 < remaining(subject) < 20.01
        assert (lock.acquire(blocking=False), lock.acquire(timeout=0.2)) == (False, False)
        info = there(lock.inspect())
        assert 0 <= info.age < 2
        assert 18 < info.remaining <= 20
        fence = other.do("lock.fence")
        # Else the release grants the key to the caller whose time was up: its place is deleted in the background.
        assert until(lambda: not run(subject.database, "SELECT 1 FROM lock_waiters"))
        other.do("lock.release()")
        assert lock.acquire(blocking=False)
        assert fence < lock.fence
        began = time.monotonic()
        assert other.do("lock.acquire(timeout=0.3)") is False
        assert 0.25 < time.monotonic() - began < 1
        other.do("setattr(timing, 'DEFAULT', checked(timing.DEFAULT._replace(**SELDOM)))")
        other.send("lock.acquire(timeout=60)")
        time.sleep(0.1)
        lock.release()
        assert other.answer() is True, "it was notified: it polls once in ten hours"
        other.do("setattr(timing, 'DEFAULT', timing.Timing())")
        assert other.do("lock.fence") > fence
        assert other.do("lock.verify()")
        other.do("lock.extend(1.5)")
        ends = subject.row("k")["expires_at"]
        assert until(lambda: subject.row("k")["expires_at"] > ends), "it is renewed"
        assert other.do("lock.state") == "held"
        assert lock.acquire(blocking=False) is False
        other.kill()
        began = time.monotonic()
        assert lock.acquire(timeout=15)
        assert time.monotonic() - began < 1.5 + 1
        lock.release()


@contextmanager
def stepping(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let the wall clock of this process jump by up to a day, many times a second."""
    right, done, offset = time.time, threading.Event(), [0.0]

    def step() -> None:
        while not done.wait(0.01):
            offset[0] = random.uniform(-86400, 86400)

    thread = threading.Thread(target=step)
    with monkeypatch.context() as patch:
        patch.setattr(time, "time", lambda: right() + offset[0])
        patch.setattr(time, "time_ns", lambda: int((right() + offset[0]) * 1e9))
        thread.start()
        try:
            yield
        finally:
            done.set()
            thread.join()


@pytest.mark.parametrize("subject", FEW, indirect=True, ids=str)
def test_a_clock_that_is_stepped_changes_nothing(
    subject: Subject, actors: Callable[..., Actor], monkeypatch: pytest.MonkeyPatch
) -> None:
    """During take, hold, renewal and wait: held as long as it should be, and waited for as long as was asked."""
    ttl, heard = 0.6, list[Any]()
    lock = subject.lock("k", ttl=ttl, on_lost=lambda *told: heard.append(told))
    rival = subject.lock("k")

    def wait() -> tuple[bool, float]:
        began = time.monotonic()
        return rival.acquire(timeout=0.8), time.monotonic() - began

    with stepping(monkeypatch):
        assert lock.acquire()
        waiting = actors(subject).start(wait)
        end = time.monotonic() + 1.0
        while time.monotonic() < end:
            assert lock.state == "held"
            assert 0 < lock.remaining <= ttl
            time.sleep(0.01)
        assert 0 < remaining(subject) < ttl + 0.01
        got, took = waiting.result(20)
        assert got is False
        assert 0.75 < took < 1.6
        lock.release()
        assert rival.acquire(timeout=0)
        rival.release()
    assert heard == []
