"""Which of several databases has a key: rendezvous hashing.

Thaler and Ravishankar, *Using Name-Based Mappings to Increase Hit Rates* (1998): a key belongs to the database whose
name, hashed together with the key, gives the highest number. So the list needs no table and no order. A database that
is added takes its share of the keys from all others, and no other key moves.

Rule: the hash is SHA-256 of name, NUL and key in UTF-8, in every process and every version: two processes that place a
key differently hold two locks.

**A key that moves** is in two places while `before` is given. Let a deployment have three stages: `rendezvous(old)`,
`rendezvous(new, before=old)`, `rendezvous(new)`. Processes of one stage and of the next one run side by side, and those
of the first and of the third never do. Two holders of a key then have a database in common: the old one if one of them
is of the first stage, the new one if one is of the third, else both. There the row of the earlier one refuses the
later one; and it shows the higher of the earlier one's two fences before that one's `acquire` has returned, so that the
later one is given a higher one. All take the two in the order of their names, as db_locks() takes keys: no circle.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Mapping
from typing import Any, Generic, TypeAlias, TypeVar, overload

D = TypeVar("D")
Place: TypeAlias = Callable[[str], D | tuple[D, ...]]
"""From a key to its database (an alias, or an engine), or to several: then it is held in each of them."""


Names: TypeAlias = list[str] | tuple[str, ...] | set[str] | frozenset[str]


class Rendezvous(Generic[D]):
    """From a key to its database; made by `rendezvous`."""

    def __init__(self, databases: Mapping[str, D], before: Mapping[str, D]) -> None:
        self._now, self._before = _hashes(databases), _hashes(before)
        self.databases: dict[str, D] = {**before, **databases}
        """All databases that may have keys, by name."""

    def names(self, key: str) -> tuple[str, ...]:
        """The names of the databases that have the key, in alphabetical order: one, or two while it moves."""
        found = {_highest(self._now, key)}
        if self._before:
            found.add(_highest(self._before, key))
        return tuple(sorted(found))

    @property
    def moves(self) -> bool:
        """Whether keys may be in two databases."""
        return bool(self._before)

    def __call__(self, key: str) -> D | tuple[D, ...]:
        """The database of the key, or both while it moves."""
        first, *others = (self.databases[name] for name in self.names(key))
        return (first, *others) if others else first

    def __repr__(self) -> str:
        before = f", before={[*self._before]}" if self._before else ""
        return f"rendezvous({[*self._now]}{before})"

    def __reduce__(self) -> tuple[Any, ...]:  # hashes cannot be pickled
        return Rendezvous, tuple({name: self.databases[name] for name in names} for names in (self._now, self._before))


@overload
def rendezvous(databases: Mapping[str, D], *, before: Mapping[str, D] | None = None) -> Rendezvous[D]: ...
@overload
def rendezvous(databases: Names, *, before: Names | None = None) -> Rendezvous[str]: ...
def rendezvous(databases: Any, *, before: Any = None) -> Rendezvous[Any]:
    """From a key to one of several databases, the same in every process: for `using=` (Django), or as the engine.

    Args:
        databases: aliases of Django's; or a dict from names to engines. The names decide: give a database the same name
            wherever the key is used.

    Keyword Args:
        before: what `databases` was before a change of the list. A key whose database differs is then held in both.
            Give it to all processes before one of them uses the new list alone, and as long as one of them may use the
            old list alone.

    Raises:
        TypeError, ValueError: the names are no list of different texts.
    """
    new, old = _named(databases), {} if before is None else _named(before)
    return Rendezvous(new, {} if set(old) == set(new) else old)


def _named(databases: Any) -> dict[str, Any]:
    if not isinstance(databases, Mapping | list | tuple | set | frozenset):
        raise TypeError(f"rendezvous() takes a list of aliases, or a dict of engines by name, not {databases!r}")
    for name in databases:
        if not isinstance(name, str):
            raise TypeError(f"rendezvous() places keys by the names of databases: a dict from names, not {name!r}")
        if not name or "\0" in name:
            raise ValueError(f"a name of a database is a text without NUL, not {name!r}")
    named = dict(databases) if isinstance(databases, Mapping) else {name: name for name in databases}
    if not named or len(named) != len(databases):
        raise ValueError(f"rendezvous() takes one database or more, each once, not {list(databases)!r}")
    return named


def _hashes(names: Collection[str]) -> dict[str, Any]:
    return {name: hashlib.sha256(name.encode("utf-8", "surrogatepass") + b"\0") for name in names}


def _highest(hashes: Mapping[str, Any], key: str) -> str:
    data = key.encode("utf-8", "surrogatepass")

    def weight(name: str) -> tuple[bytes, str]:
        hashed = hashes[name].copy()
        hashed.update(data)
        return hashed.digest(), name

    return max(hashes, key=weight)


def places(place: Place[D], key: str) -> list[tuple[str, D]]:
    """The databases of a key, each with the name by which all flows order them; "" if it has none."""
    if isinstance(place, Rendezvous):
        return [(name, place.databases[name]) for name in place.names(key)]
    if not is_place(place):
        raise TypeError(f"a function from a key to its database is needed, not {place!r}")
    found = place(key)
    several = dict.fromkeys(found if isinstance(found, tuple) else (found,))
    if not several:
        raise ValueError(f"{place!r} gives no database for the key {key!r}")
    return [(each if isinstance(each, str) else "", each) for each in several]


def is_place(given: object) -> bool:
    """Whether it is a function from keys to databases; and no factory of sessions, nor a class, nor a lock."""
    other = isinstance(given, type) or hasattr(given, "begin") or hasattr(given, "acquire")
    return callable(given) and not other
