"""The cells of each contract test, which its fixture chooses: what the test is about is on one axis of the matrix.

Tests of the protocol run on each database, those of the API on each face, those of what a driver does on each driver.
The essential promises run in each cell. Each axis is the whole product with DBLOCK_PRODUCT=1, in `make product`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import closing, contextmanager
from typing import Any

import pytest
from django.test import override_settings

from tests.conftest import each_of, ready
from tests.support.lab import DRIVERS, EVERYWHERE, FACES, PAIR_OF_FACES, PROTOCOL, ended
from tests.support.subjects import EVERY, PRODUCT, Actor, Subject

AXES: dict[str, list[Subject]] = {}
"""The cells of each axis."""


def axis(name: str, cells: Iterable[Subject], kind: str = "") -> Any:
    """A fixture that is each of these cells in turn, with empty tables; with `kind` those of a face of that kind."""
    AXES[name] = [each for each in (EVERY if PRODUCT else cells) if kind in {"", each.face}]
    return each_of(AXES[name])


protocol = axis("protocol", PROTOCOL)
sync_protocol = axis("sync_protocol", PROTOCOL, "sync")
face = axis("face", FACES)
sync_face = axis("sync_face", FACES, "sync")
async_face = axis("async_face", FACES, "async")
either = axis("either", PAIR_OF_FACES)
driver = axis("driver", DRIVERS)
async_driver = axis("async_driver", DRIVERS, "async")
everywhere = axis("everywhere", EVERYWHERE)


@pytest.fixture
def subject(request: pytest.FixtureRequest) -> Subject:
    """The cell of the axis that the test names; or, with `indirect`, the cells that a test of few names itself."""
    if hasattr(request, "param"):
        subject: Subject = request.param
        ready(request, subject.database)
        return subject
    [axis] = AXES.keys() & {*request.fixturenames}
    found: Subject = request.getfixturevalue(axis)
    return found


@contextmanager
def with_settings(plain: Subject, **given: Any) -> Iterator[Subject]:
    """The subject, for whose locks these settings, or options of its engine, stand while the block lasts."""
    if plain.variant == "django":
        with override_settings(DBLOCK={name.upper(): value for name, value in given.items()}):
            yield plain
        return
    own = plain.over(execution_options={f"dblock_{name}": value for name, value in given.items()})
    yield own
    with closing(Actor(own)) as disposing:
        disposing.do(own.engine.dispose)


@pytest.fixture
def actors(subject: Subject) -> Iterator[Callable[[int], list[Actor]]]:
    """Makes flows of control that end with the test."""
    with ended(Actor) as make:
        yield lambda count: [make(subject) for _ in range(count)]


@pytest.fixture
def actor(actors: Callable[[int], list[Actor]]) -> Actor:
    return actors(1)[0]


@pytest.fixture
def other(actors: Callable[[int], list[Actor]]) -> Actor:
    return actors(1)[0]
