"""Sets of keys that overlap are taken and given back at once, in opposite orders: nobody waits in a circle."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, Final

import pytest

from dblock.core.statements.base import Failure
from tests.conftest import url
from tests.statements.cases import LEVELS, SERVERS, Case, free
from tests.statements.laboratory import Laboratory, Session, named
from tests.statements.several import several

pytestmark = pytest.mark.direct

ROUNDS: Final = 60
KEYS: Final = [f"k{number}" for number in range(8)]
DEADLOCKS: Final = {"40P01", 1213}


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("database", SERVERS)
def test_no_deadlock(laboratory: Callable[[str], Laboratory], database: str, level: str) -> None:
    """Each of two has all keys of its set, with one fence, or gives back what it has; the fences of a key ascend."""
    bench = laboratory(database)
    _ = bench.fill(Case("", "eight keys", keys=[free(key) for key in KEYS]))
    take, release = named(bench.dialect, "take_several"), named(bench.dialect, "release_several")
    holders: dict[str, str] = {}
    fences: dict[str, list[int]] = {key: [] for key in KEYS}
    wrong, took = list[Any](), list[str]()

    def work(owner: str, keys: list[str]) -> None:
        session = Session(database, url(database))
        session.set(LEVELS[level])
        for _ in range(ROUNDS):
            rows = session.send(take, {**several(*keys), "owner": owner})
            if isinstance(rows, Failure):
                note(session.error)
                continue
            if len(rows) == len(keys):
                took.append(owner)
                [fence] = {int(row[0]) for row in rows}
                for key in keys:
                    wrong.extend([(key, holders[key])] if key in holders else [])
                    holders[key] = owner
                    fences[key].append(fence)
                for key in keys:
                    del holders[key]
            while rows:
                given = {**several(*keys), "owner": owner, "fence": int(rows[0][0])}
                released = session.send(release, given)
                if not isinstance(released, Failure):
                    wrong.extend([released] if len(released) != len(rows) else [])
                    break
                note(session.error)
        session.close()

    def note(error: Any) -> None:
        code = getattr(error, "sqlstate", None) or error.args[0]
        wrong.extend([error] if code in DEADLOCKS else [])

    sets = (("me", KEYS[:6]), ("other", KEYS[:1:-1]))
    threads = [threading.Thread(target=work, args=each) for each in sets]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not any(thread.is_alive() for thread in threads)
    assert wrong == []
    assert took
    assert all(each == sorted(set(each)) for each in fences.values())
