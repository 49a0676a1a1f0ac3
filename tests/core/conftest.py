from __future__ import annotations

import random

import pytest

from dblock.core.acquire.request import Request
from dblock.core.acquire.waiting import Attempt
from tests.conftest import timed
from tests.support.explore import LATEST

HOUR = 3600.0


@pytest.fixture
def nobody_polls(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before an hour has passed; and there is no jitter."""
    monkeypatch.setattr(random, "uniform", lambda low, high: (low + high) / 2)
    monkeypatch.setattr(Attempt, "_until_next_poll", lambda *_, **__: HOUR)


@pytest.fixture
def exact_worlds(nobody_polls: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """In small worlds tokens are in order, and nobody polls."""
    timed(monkeypatch, poll_notified=HOUR, answer_grace=0.03, listen_after=HOUR)
    monkeypatch.setattr(Request, "new_owner", lambda self: LATEST[0].new_owner(self.flow))
