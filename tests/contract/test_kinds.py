"""What each kind of lock promises in the same way: plain and read-write locks, semaphores, several locks at once."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from itertools import permutations
from typing import Any

import pytest

from dblock.core.errors import InvalidKey, LockLost, Reason, WrongKind
from tests.contract.test_rwlock import readers, rwlock
from tests.contract.test_semaphore import semaphore
from tests.contract.test_several import several
from tests.support.lab import alive, until
from tests.support.subjects import Actor, Actors, Subject

KINDS: dict[str, Callable[[Subject, str], list[Any]]] = {
    "lock": lambda subject, key: [subject.lock(key)],
    "read-write lock": lambda subject, key: [rwlock(subject, key).read(), rwlock(subject, key).write()],
    "semaphore": lambda subject, key: [semaphore(subject, 2, key)],
}


def test_kinds_are_not_mixed(either: Subject, actor: Actor, other: Actor) -> None:
    """A key of one kind is no other kind's, held or not, until its unused row has been reaped."""
    for one, two in permutations(KINDS, 2):
        key = f"{one} or {two}"
        mines, theirs = KINDS[one](either, key), KINDS[two](either, key)
        for mine in mines:
            actor.call(mine, "acquire")
            for refused in theirs:
                for flow in (actor, other):
                    with pytest.raises(WrongKind, match=f"'{key}' is the key of a {one}, not of a {two}"):
                        flow.call(refused, "acquire")
                    assert flow.do(partial(getattr, refused, "state", None)) is None
            actor.call(mine, "release")
        with pytest.raises(WrongKind):
            other.call(theirs[0], "acquire", blocking=False)
        with pytest.raises(ValueError, match=f"the key of a {one}"):
            other.within(theirs[0])
        assert until(lambda: actor.do(lambda: either.reap(0)) is not None and not either.run("SELECT 1 FROM locks"))
        actor.call(actor.hold(theirs[0], blocking=False), "release")


@pytest.mark.parametrize("kind", ["lock", "reader", "semaphore"])
def test_a_lease_that_ends_is_free_for_the_next(protocol: Subject, actor: Actor, other: Actor, kind: str) -> None:
    """The waiter waits out the lease; the late holder is told, and leaves its successor alone."""
    options: dict[str, Any] = {"ttl": 0.6, "renew": False}
    mine, yours = {
        "lock": lambda: (protocol.lock("k", **options), protocol.lock("k")),
        "reader": lambda: (rwlock(protocol, **options).read(), rwlock(protocol).write()),
        "semaphore": lambda: (semaphore(protocol, 1, **options), semaphore(protocol, 1)),
    }[kind]()
    begun = time.monotonic()
    actor.call(mine, "acquire")
    [first] = getattr(mine, "held", [mine])
    fence = actor.get(first, "fence")
    assert other.call(yours, "acquire", timeout=30) is True
    assert 0.6 <= time.monotonic() - begun < 3
    [second] = getattr(yours, "held", [yours])
    assert kind == "reader" or other.get(second, "fence") > fence
    assert (actor.get(first, "state"), actor.get(first, "remaining")) == ("lost", 0.0)
    with pytest.raises(LockLost):
        actor.do(first.check)
    for name in ("extend", "verify"):
        with pytest.raises(LockLost):
            actor.call(first, name)
    rows = protocol.run("SELECT * FROM locks ORDER BY lock_key")
    with pytest.raises(LockLost) as caught:
        actor.call(mine, "release")
    assert caught.value.reason is (Reason.EXPIRED if kind == "reader" else Reason.TAKEN_OVER)
    assert getattr(mine, "held", []) == []
    assert protocol.run("SELECT * FROM locks ORDER BY lock_key") == rows
    assert readers(protocol) == 0 or kind == "semaphore", "the row of a reader is deleted"
    assert other.call(second, "verify")
    other.call(yours, "release")


MIN_HOLD: dict[str, tuple[Callable[[Subject], tuple[Any, ...]], int]] = {
    "writer": (lambda to: (rwlock(to).read(), rwlock(to, min_hold=0.7).write(), rwlock(to).write()), 2),
    "permits": (lambda to: (semaphore(to, 2), semaphore(to, 2, min_hold=0.7), semaphore(to, 2)), 3),
    "several": (lambda to: (to.lock("c"), several(to, "a", "b", "c", min_hold=0.7), to.lock("a")), 3),
}
"""Who is in the way, who waits for it, and who comes later; how many rows are held while one waits."""


@pytest.mark.parametrize("kind", MIN_HOLD)
def test_min_hold_counts_from_when_all_is_held(protocol: Subject, actors: Actors, kind: str) -> None:
    """However long a writer has waited for readers, or a permit or lock for the others; not of what was held before."""
    one, two, three = actors(3)
    make, held = MIN_HOLD[kind]
    busy, wanted, later = make(protocol)
    number = {"n": 2} if kind == "permits" else {}
    one.call(busy, "acquire")
    two.call(before := protocol.lock("b", min_hold=0.7), "acquire")
    waiting = two.begin(wanted, "acquire", timeout=30, **number)
    assert until(lambda: alive(protocol) == held + (kind != "several"))
    time.sleep(0.7)
    one.call(busy, "release")
    assert waiting.result(30) is True
    begun = time.monotonic()
    two.call(wanted, "release", *number.values())
    two.call(before, "release")
    assert three.call(protocol.lock("b"), "acquire", blocking=False), "that was held for so long"
    assert not three.call(later, "acquire", blocking=False)
    assert three.call(later, "acquire", timeout=30)
    assert time.monotonic() - begun > 0.4


DECORATORS: dict[str, tuple[Callable[..., Any], Callable[[Subject], Any]]] = {
    "writer": (lambda to, **options: rwlock(to, "{name}", **options).write(), lambda to: rwlock(to).read()),
    "semaphore": (lambda to, **options: semaphore(to, 1, "{name}", **options), lambda to: semaphore(to, 1)),
}
"""What decorates, and who is in its way."""


@pytest.mark.parametrize("kind", DECORATORS)
def test_a_decorated_call_has_what_its_arguments_name(face: Subject, actor: Actor, other: Actor, kind: str) -> None:
    """A call that finds it busy may be skipped."""
    make, busy = DECORATORS[kind]
    decorator, holder = make(face, timeout=0, on_busy="skip", otherwise="skipped"), busy(face)
    work = actor.decorate(decorator, lambda name: (name, alive(face, f"{name}%") > 0))
    assert work("k") == ("k", True)
    assert other.call(holder, "acquire")
    assert work("k") == "skipped"
    assert work("other") == ("other", True)
    other.call(holder, "release")
    assert work("k") == ("k", True)
    with pytest.raises(TypeError, match="cannot be skipped"):
        actor.within(decorator)


BAD_KEYS = ("", "x" * 231, "a\x1fb")
"""The rows of shares have longer keys."""
WRONG = (TypeError, ValueError)
REFUSED: list[tuple[str, tuple[Any, ...], dict[str, Any], Any, str]] = [
    *(("db_lock", ("k",), {"ttl": ttl}, ValueError, "") for ttl in (0, -1, float("inf"), float("nan"), 10**400)),
    ("db_lock", ("k",), {"ttl": timedelta(days=-1)}, ValueError, ""),
    *(("db_lock", ("k",), {"ttl": ttl}, TypeError, "") for ttl in ("30", True)),
    *(("db_lock", ("k",), {"timeout": wait}, ValueError, "") for wait in (-2, float("inf"), float("nan"))),
    ("db_lock", ("k",), {"timeout": "10"}, TypeError, ""),
    *(("db_lock", ("k",), {"label": label}, ValueError, "") for label in ("x" * 256, "a\0")),
    *(("db_lock", ("k",), {name: "yes"}, TypeError, "") for name in ("renew", "colour")),
    ("db_lock", ("k",), {"label": None}, TypeError, ""),
    ("db_lock", ("k",), {"on_busy": "wait"}, ValueError, 'on_busy is "raise" or "skip"'),
    ("db_lock", ("k",), {"otherwise": 1}, ValueError, 'say on_busy="skip" as well'),
    *(("db_lock", ("k",), {"slow_wait": wait}, WRONG, "slow_wait") for wait in (-1, "a")),
    ("db_lock", ("a\x1fb",), {}, InvalidKey, r"U\+001F"),
    *(("db_rwlock", (key,), {}, InvalidKey, "") for key in BAD_KEYS),
    ("db_rwlock", ("k",), {"tll": 3}, TypeError, "ttl"),
    *(("db_semaphore", (key, 2), {}, InvalidKey, "") for key in BAD_KEYS),
    *(("db_semaphore", ("k", permits), {}, WRONG, "") for permits in (0, 10_001, 1.5, True, "3")),
    *(("db_semaphore", ("k", 2), {name: True}, TypeError, f"{name} is not for") for name in ("interrupt", "reentrant")),
    *(("db_locks", keys, {}, WRONG, "") for keys in ((), ("",))),
    *(("db_locks", ("a",), options, WRONG, "") for options in ({"otherwise": 1}, {"on_busy": "later"})),
    ("db_locks", ("a",), {"no_such_option": 1}, TypeError, ""),
    *(("db_leader", ("k",), {name: value}, WRONG, "") for name, value in (("renew", False), ("reentrant", True))),
    *(("db_leader", ("k",), {name: value}, WRONG, "") for name, value in (("on_elected", 1), ("ttl", 0))),
]


def test_bad_options_and_keys_are_refused(either: Subject) -> None:
    """When the object is made, before any I/O, with an error that says what is wrong."""
    for name, arguments, options, error, message in REFUSED:
        with pytest.raises(error, match=message or None):
            either.api(name, *arguments, **options)
    assert either.run("SELECT count(*) FROM locks") == [(0,)]
