"""PostgreSQL through PgBouncer in transaction mode, where each transaction gets whichever session is free."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest

from tests.conftest import POOLER
from tests.support.lab import LONG
from tests.support.servers import HINTS, MissingServer, find_program


def missing() -> bool:
    """Is PgBouncer not installed?"""
    try:
        return not find_program("pgbouncer")
    except MissingServer:
        return True


FEW = "postgresql and not (django and async) and not async-postgresql-psycopg and not session"
"""The drivers' own threads and tasks are no business of a pooler's, nor is who begins a connection's transaction."""


@pytest.mark.skipif(POOLER, reason="this is it")
@pytest.mark.skipif(missing(), reason=HINTS["pgbouncer"])
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("which", "least"),
    [
        (("-k", FEW, "tests/contract/test_queue.py"), 50),
        (("-k", "crowd_uses", "tests/sqlalchemy/test_engines.py"), 2),
        *([(("-k", FEW, "tests/contract/test_guard.py"), 50)] if LONG else []),
    ],
)
def test_the_short_form_of_make_pooler(which: tuple[str, ...], least: int) -> None:
    """What the lock, its queue and its guard promise holds there too, and where sessions change all the time."""
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-n", "0", *which],
        env={name: value for name, value in os.environ.items() if not name.startswith(("DBLOCK_TEST", "PYTEST"))}
        | {"DBLOCK_POOLER": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-5000:]
    passed = re.search(r"(\d+) passed", done.stdout)
    assert passed is not None
    assert int(passed[1]) >= least
