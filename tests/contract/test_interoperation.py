"""A Django site and a SQLAlchemy service on one database exclude each other."""

from __future__ import annotations

import itertools

import pytest

from tests.conftest import ready
from tests.support.lab import FACES, FEW, PROTOCOL
from tests.support.subjects import EVERY, PRODUCT, Actor, Subject

PAIRS = [
    (one, two)
    for one, two in itertools.combinations(EVERY if PRODUCT else dict.fromkeys((*FACES, *PROTOCOL, *FEW)), 2)
    if one.database == two.database and (one.variant != two.variant or one.face != two.face)
]


@pytest.mark.parametrize(("one", "two"), PAIRS, ids=str)
def test_two_variants_exclude_each_other(one: Subject, two: Subject, request: pytest.FixtureRequest) -> None:
    """Whichever is first; and fences go on increasing from one to the other."""
    ready(request, one.database)
    first, second, fences = Actor(one), Actor(two), list[int]()
    for holder, rival in ((first, second), (second, first), (first, second)):
        held, wanted = holder.subject.lock("k"), rival.subject.lock("k")
        holder.call(held, "acquire")
        fences.append(holder.get(held, "fence"))
        assert rival.call(wanted, "acquire", blocking=False) is False
        assert rival.call(wanted, "locked") is True
        holder.call(held, "release")
    assert fences == sorted(set(fences))
    first.close()
    second.close()
