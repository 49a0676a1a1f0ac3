from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from tests.conftest import ready
from tests.support.subjects import MATRIX, Actor, Subject


@pytest.fixture(params=MATRIX, ids=str)
def subject(request: pytest.FixtureRequest) -> Subject:
    """Each cell of the matrix in turn, with an empty table."""
    subject: Subject = request.param
    ready(request, subject.database)
    return subject


@pytest.fixture
def actors(subject: Subject) -> Iterator[Callable[[int], list[Actor]]]:
    """Makes flows of control that end with the test."""
    made: list[Actor] = []

    def make(count: int) -> list[Actor]:
        made.extend(Actor(subject) for _ in range(count))
        return made[-count:]

    yield make
    for actor in made:
        actor.close()


@pytest.fixture
def actor(actors: Callable[[int], list[Actor]]) -> Actor:
    return actors(1)[0]


@pytest.fixture
def other(actors: Callable[[int], list[Actor]]) -> Actor:
    return actors(1)[0]
