"""psycopg2, by a part of the tests: its statements are psycopg's, its calls and errors are its own."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator

import pytest

from tests.conftest import SELDOM, ready, timed
from tests.servers.test_listener import ELSEWHERE, hand_overs
from tests.support.lab import ROOT
from tests.support.subjects import PSYCOPG2, Subject


@pytest.fixture
def subject(request: pytest.FixtureRequest) -> Iterator[Subject]:
    ready(request, "postgresql")
    yield PSYCOPG2
    PSYCOPG2.engine.dispose()


@pytest.mark.direct
def test_the_database_calls(subject: Subject, monkeypatch: pytest.MonkeyPatch) -> None:
    """A waiter hears of a release on another machine."""
    timed(monkeypatch, **SELDOM)
    hand_overs(subject, ELSEWHERE)


SITE = """
import sys
sys.modules["psycopg"] = None  # Django prefers it
import django
django.setup()
from django.db import connections, transaction
from dblock import db_lock
assert connections["postgresql"].Database.__name__ == "psycopg2"
with db_lock("k\\u00e9y", using="postgresql", timeout=10) as lock:
    assert lock.verify()
    with transaction.atomic("postgresql"):
        lock.guard()
assert not lock.locked()
"""


def test_through_django(subject: Subject) -> None:
    """Where psycopg is not installed."""
    done = subprocess.run([sys.executable, "-c", SITE], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
