"""Which database has a key, and how many keys move."""

from __future__ import annotations

import hashlib
import pickle
from collections import Counter
from typing import Any

import pytest

from dblock.core.rendezvous import Rendezvous, is_place, places, rendezvous

KEYS = [f"stock:{number}" for number in range(6000)]


def test_a_key_belongs_to_the_name_with_the_highest_hash() -> None:
    """The hash is a fixed one, so that processes of any version agree; the order of the names does not matter."""
    names = ["a", "b", "ü"]
    for key in ("stock:42", "schlüssel", "k" * 255, "\U0001f512"):
        expected = max(names, key=lambda name: hashlib.sha256(f"{name}\0{key}".encode()).hexdigest())
        assert rendezvous(names)(key) == rendezvous(set(names))(key) == expected
    found = rendezvous(["a", "b", "c"])
    assert "".join(str(found(f"k{number}")) for number in range(16)) == "aaabaaabccccacbb"


@pytest.mark.parametrize("count", [1, 2, 3, 8])
def test_a_new_database_takes_its_share_and_no_other_key_moves(count: int) -> None:
    names = [f"db{number}" for number in range(count)]
    before, after = rendezvous(names), rendezvous([*names, "new"])
    moved = [key for key in KEYS if before(key) != after(key)]
    assert {after(key) for key in moved} == {"new"}
    assert abs(len(moved) / len(KEYS) - 1 / (count + 1)) < 0.03
    shares = Counter(map(after, KEYS))
    assert max(shares.values()) - min(shares.values()) < 0.2 * len(KEYS) / (count + 1)


def test_while_the_list_changes_a_moved_key_is_in_both() -> None:
    """In alphabetical order, whichever of them is the new one; the other keys are in one."""
    old, new = ["a", "b"], ["b", "c"]
    moving = rendezvous(new, before=old)
    assert moving.moves
    assert not rendezvous(new).moves
    assert not rendezvous(new, before=new[::-1]).moves
    for key in KEYS[:300]:
        where = {str(rendezvous(old)(key)), str(rendezvous(new)(key))}
        assert moving.names(key) == tuple(sorted(where))
        assert moving(key) == (tuple(sorted(where)) if len(where) == 2 else where.pop())
        assert places(moving, key) == [(name, name) for name in moving.names(key)]
    assert moving.databases.keys() == {"a", "b", "c"}
    twin = pickle.loads(pickle.dumps(moving))
    assert all(twin(key) == moving(key) for key in KEYS[:50])


def test_databases_may_have_names() -> None:
    """So may engines, which have none of their own."""
    one, two = object(), object()
    found = rendezvous({"a": one, "b": two})
    assert {found(key) for key in KEYS[:50]} == {one, two}
    assert places(found, "k0") in ([("a", one)], [("b", two)])
    assert places(lambda _: "x", "k") == [("x", "x")]
    given: Any = lambda _: (two, one, two)  # noqa: E731 - of any type
    assert places(given, "k") == [("", two), ("", one)]
    assert repr(rendezvous({"a": one}, before={"b": two})) == "rendezvous(['a'], before=['b'])"


@pytest.mark.parametrize("given", ["abc", [], ["a", "a"], [""], ["a\0"], [object()], None, [object], {1: "a"}])
def test_what_is_no_list_of_names_is_refused(given: Any) -> None:
    make: Any = rendezvous
    with pytest.raises((TypeError, ValueError)):
        make(given)
    with pytest.raises((TypeError, ValueError)):
        make(["a"], before=1 if given is None else given)
    with pytest.raises(ValueError, match="no database"):
        places(lambda _: (), "k")
    with pytest.raises(TypeError, match="function"):
        places(given, "k")
    assert is_place(Rendezvous({"a": 1}, {}))
