"""A key moves from one database to another while processes of both faces use it, one after the other restarted."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from tests.conftest import ready, run
from tests.faults.test_family import cut
from tests.support.growing import NEW, OLD
from tests.support.lab import LONG, Remote
from tests.support.subjects import Subject
from tests.support.tenures import recorded, violations

PROCESSES = ("django", "sqlalchemy", "async")
ROLLING = [(0, 0, 0), (1, 0, 0), (1, 1, 0), (1, 1, 1), (2, 1, 1), (1, 2, 2), (2, 2, 2)]
"""The stages of the processes: forwards; one of them goes back once."""
SECONDS = 8.0 if LONG else 0.7
AHEAD = 10**12


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
    history = recorded(path)
    assert not violations(history)
    assert len(history) > attempts / 4 > 20, (len(history), attempts, failed)
    with capsys.disabled():
        print(f"\nmoved: {len(history):,} tenures, {failed:,} of {attempts:,} attempts failed", end="")  # noqa: T201
