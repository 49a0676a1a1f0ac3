"""Random tenures of all kinds of locks in processes that are stopped and killed, and lose their connections."""

from __future__ import annotations

import contextlib
import random
import time
from pathlib import Path

import pytest

from tests.conftest import run
from tests.support.lab import LONG, Remote, times
from tests.support.subjects import Subject
from tests.support.tenures import TTL, Mode, Tenure, recorded, violations

PROCESSES = 4
SECONDS = times(4, 20)
"""For which each process runs; in the long form again and again."""
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


def begin(subject: Subject, seed: int, path: Path, seconds: float) -> Remote:
    """Another process, which begins and ends tenures for so long."""
    remote = Remote(subject)
    remote.do("(tenures := __import__('tests.support.tenures', fromlist=['live']))")
    remote.send(f"tenures.live(subject, {seed}, {str(path)!r}, {seconds})")
    return remote


@pytest.mark.timeout(7200 if LONG else 180)
@pytest.mark.parametrize("faults", ["none", "all"] if LONG else ["all"])
def test_random_tenures(subject: Subject, tmp_path: Path, faults: str, capsys: pytest.CaptureFixture[str]) -> None:
    """No two at a time, no permit too many, no reader beside a writer, no fence out of order."""
    chance, struck, history = random.Random(), 0, list[Tenure]()
    while len(history) < times(100, 20_000):
        paths = [tmp_path / f"{number}" for number in range(PROCESSES)]
        running = [begin(subject, chance.getrandbits(30), path, SECONDS) for path in paths]
        over = time.monotonic() + SECONDS
        while faults == "all" and time.monotonic() < over:
            time.sleep(chance.uniform(0.1, 0.6))
            whom, what = chance.randrange(PROCESSES), chance.choice(("freeze", "freeze", "cut", "cut", "kill"))
            if what == "cut":
                cut(subject.database)
            elif what == "freeze":
                running[whom].freeze()
                time.sleep(chance.uniform(0.1, 2 * TTL))
                running[whom].thaw()
            else:
                running[whom].kill()
                running[whom].__exit__()
                left = over - time.monotonic()
                running[whom] = begin(subject, chance.getrandbits(30), paths[whom], left)
            struck += 1
        for remote in running:
            _ = remote.answer(SECONDS + 30)
            remote.leave()
            remote.__exit__()
        history += [tenure for path in paths for tenure in recorded(path)]
        for path in paths:
            path.unlink()
        if found := violations(history):
            pytest.fail("\n".join(found[:10]))
    with capsys.disabled():
        print(f"\n{subject}, faults: {struck}, tenures: {len(history):,}", end="")  # noqa: T201 - to be read


def rw(mode: Mode, fence: int, start: float, end: float) -> Tenure:
    return Tenure("k", mode, fence, start, end)


def permit(slot: int, fence: int, start: float, end: float) -> Tenure:
    return Tenure("s", "slot", fence, start, end, slot)


@pytest.mark.parametrize(
    ("history", "what"),
    [
        ([rw("write", 1, 0, 2), rw("write", 3, 1, 4)], "two at a time"),
        ([rw("write", 3, 0, 1), rw("write", 3, 2, 4)], "fences out of order"),
        ([rw("read", 2, 0, 9), rw("read", 2, 1, 2), rw("write", 3, 8, 10)], "a reader beside a writer"),
        ([rw("write", 1, 0, 5), rw("read", 2, 4, 6)], "a reader beside a writer"),
        ([rw("write", 5, 0, 1), rw("read", 4, 2, 3)], "fences out of order"),
        ([rw("read", 4, 0, 1), rw("write", 3, 2, 3)], "fences out of order"),
        ([permit(0, 1, 0, 2), permit(1, 1, 0, 2), permit(0, 2, 1, 3)], "two at a time"),
        ([permit(3, 1, 0, 2)], "there is no such slot"),
        ([rw("write", 1, 0, 2), rw("read", 2, 2, 4), rw("read", 2, 3, 4), rw("write", 4, 4, 5)], None),
        ([permit(0, 1, 0, 2), permit(1, 1, 0, 2), permit(2, 1, 0, 2), permit(0, 2, 2, 3)], None),
    ],
)
def test_what_a_history_contradicts(history: list[Tenure], what: str | None) -> None:
    found = violations(history)
    assert [text.split(":")[0] for text in found] == ([what] if what else [])
