"""A key moves from one database to another while processes of both faces use it, one after the other restarted."""

from __future__ import annotations

import contextlib
import random
from pathlib import Path

import pytest

from tests.conftest import ready, run
from tests.support.growing import NEW, OLD
from tests.support.history import Record, violations
from tests.support.lab import LONG, Remote
from tests.support.subjects import Subject

PROCESSES = ("django", "sqlalchemy", "async")
ROLLING = [(0, 0, 0), (1, 0, 0), (1, 1, 0), (1, 1, 1), (2, 1, 1), (1, 2, 2), (2, 2, 2)]
"""The stages of the processes: forwards; one of them goes back once."""
SECONDS = 8.0 if LONG else 0.7
AHEAD = 10**12
CUTS = {
    "postgresql": "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = current_database()"
    " AND application_name LIKE 'dblock%' ORDER BY random() LIMIT 1",
    "mysql": "SELECT id FROM information_schema.processlist WHERE db = database() AND id <> connection_id()"
    " ORDER BY rand() LIMIT 1",
}
CUTS["mariadb"] = CUTS["mysql"]


def cut(database: str) -> None:
    """Close one of the connections of the locks, on the server."""
    if database in CUTS:
        found = run(database, CUTS[database])
        if database != "postgresql" and found:
            with contextlib.suppress(Exception):  # it has ended meanwhile
                run(database, f"KILL {found[0][0]}")


@pytest.mark.timeout(1800 if LONG else 180)
def test_a_key_moves_under_load(
    request: pytest.FixtureRequest, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """No two holders at a time, and fences that grow, though those of one database are far ahead; there and back."""
    for database in (*OLD, *NEW):
        ready(request, database)
    chance, path = random.Random(), tmp_path / "record"
    remotes = [Remote(Subject("django" if each == "django" else "sqlalchemy", "sync", OLD[0])) for each in PROCESSES]
    attempts = failed = 0
    try:
        for remote in remotes:
            remote.do("(growing := __import__('tests.support.growing', fromlist=['live']))")
        way = [*ROLLING, *ROLLING[-2::-1]] if LONG else ROLLING
        for number, step in enumerate(way):
            if number == 3:  # all take both: the next to be alone with one must not fall behind
                run(chance.choice((*OLD, *NEW)), f"UPDATE locks SET fence = fence + {AHEAD}")
            for remote, variant, stage in zip(remotes, PROCESSES, step, strict=True):
                remote.send(f"growing.live({variant!r}, {stage}, {chance.getrandbits(30)}, {str(path)!r}, {SECONDS})")
            if LONG:
                cut(chance.choice((*OLD, *NEW)))
            for remote in remotes:
                tried, without = remote.answer(SECONDS + 60)
                attempts, failed = attempts + tried, failed + without
    finally:
        for remote in remotes:
            remote.__exit__()
    history = Record([path]).read().made()
    assert not violations(history)
    assert len(history) > attempts / 4 > 20, (len(history), attempts, failed)
    with capsys.disabled():
        print(f"\nmoved: {len(history):,} tenures, {failed:,} of {attempts:,} attempts failed", end="")  # noqa: T201
