"""Majority locks over databases of several kinds, on both faces."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest

from dblock.core import runtime
from dblock.core.errors import LockLost, LockNotHeld, LockTimeout
from tests.conftest import ready
from tests.support.lab import close_django, until
from tests.support.majorities import THREE, close, count, fences, holders, majority
from tests.support.subjects import Actor, Subject

FACES = [("django", "sync"), ("django", "async"), ("sqlalchemy", "sync"), ("sqlalchemy", "async")]


class Place(NamedTuple):
    """A face, and flows."""

    variant: str
    face: str
    actors: list[Actor]

    def lock(self, key: str = "k", **options: Any) -> Any:
        return majority(self.variant, self.face, key, **{"ttl": 10, "answer": 2, **options})


@pytest.fixture(params=FACES, ids="-".join)
def place(request: pytest.FixtureRequest) -> Iterator[Place]:
    for database in THREE:
        ready(request, database)
    count(*THREE)
    variant, face = request.param
    actors = [
        Actor(Subject(variant, face, "postgresql", "asyncpg" if (variant, face) == FACES[3] else "")) for _ in "ab"
    ]
    yield Place(variant, face, actors)
    assert until(lambda: not runtime.current.asks._jobs.qsize())
    close(actors[0])
    for actor in actors:
        actor.close()
    if variant == "django":
        for database in THREE:
            close_django(database)


def test_a_majority_is_taken_and_given_back(place: Place) -> None:
    """In all databases, with one fence, which the rows show."""
    lock, [actor, other] = place.lock(), place.actors
    assert actor.call(lock, "acquire") is True
    assert holders() == list(THREE)
    assert fences() == {actor.get(lock, "fence")}
    assert set(actor.get(lock, "answers").values()) == {"granted"}
    assert actor.get(lock, "state") == "held"
    assert 8 < actor.get(lock, "valid_for") <= 10
    actor.do(lock.check)
    assert actor.call(lock, "verify") is True
    actor.call(lock, "extend", 60)
    assert actor.get(lock, "valid_for") > 50
    rival = place.lock()
    assert other.call(rival, "acquire", blocking=False) is False
    assert other.get(lock, "fence") is None
    with pytest.raises(LockTimeout, match="held by"):
        other.within(place.lock(timeout=0.2))
    before = actor.get(lock, "fence")
    actor.call(lock, "release")
    assert holders() == []
    assert actor.get(lock, "state") is None
    with pytest.raises(LockLost, match="not held"):
        actor.do(lock.check)
    with pytest.raises(LockNotHeld):
        actor.call(lock, "release")
    assert other.within(rival, lambda: rival.fence) > before
