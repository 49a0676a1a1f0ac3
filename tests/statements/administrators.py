"""The cases of an administrator's statements."""

from __future__ import annotations

import json
from functools import partial
from typing import Any, Final

from tests.statements.cases import DONE, NOW, OLD, SERVERS, Ago, At, Case, Do, Left, Record, event, free, held, waiter
from tests.statements.keys import of_tenure

_WORDS: Final = {"words": "root: enough"}
_FREED: Final[Record] = {
    "owner": None,
    "count": 0,
    "expires_at": NOW,
    "freed_fence": 7,
    "revocation": "root: enough",
}


def _row(key: str, waiting: int, owner: str | None = "me", left: float = 20, awaiting: int = 0) -> tuple[Any, ...]:
    """A key's row as `list_keys` answers it."""
    count = 0 if owner is None else 1
    who = OLD.values()
    return (key, owner, 7, count, 30.0, Ago(10), Left(left), *who, 6, 5, "root: please", 0, 0, awaiting, waiting)


_LIST: Final[Record] = {"after": "", "upto": "~", "most": 10, "free": 0}
_QUEUED: Final[Any] = {
    "keys": [held("k", last_ticket=14), held("j", served_ticket=0)],
    "places": [
        waiter("a", 14),
        waiter("served", 10),
        waiter("dead", 11, expires_at=At(-0.5)),
        waiter("elsewhere", 12, lock_key="j"),
        waiter("z", 13),
    ],
}
"""The rows of a key with a queue: two of the living were not served."""

_NEXT_KEYS: Final = (
    Case(
        "next_keys",
        "the last of a page, of any holder",
        keys=[held("c"), free("a"), free("b"), free("d")],
        given={"after": "a", "most": 2},
        reply=[("c",)],
    ),
    Case("next_keys", "none after the last", keys=[held("k")], given={"after": "k", "most": 2}, reply=[(None,)]),
)

_list_keys = partial(Case, "list_keys", given=_LIST)
_LIST_KEYS: Final = (
    _list_keys(
        "all that are held, in order, also those whose lease has ended",
        keys=[held("k", awaiting_fence=7), held("j", expires_at=At(-3)), held("l", owner=""), free("i")],
        reply=[_row("j", 0, left=-3), _row("k", 0, awaiting=1), _row("l", 0, owner="")],
    ),
    _list_keys(
        "and those that are free",
        keys=[held("k"), free("j")],
        given={**_LIST, "free": 1},
        reply=[_row("j", 0, owner=None, left=-5), _row("k", 0)],
    ),
    _list_keys(
        "neither what min_hold has left that is over, nor what is free by a later time",
        keys=[held("k", owner="", expires_at=At(-3)), held("j"), free("l", expires_at=At(100))],
        reply=[_row("j", 0)],
    ),
    _list_keys(
        "a page of them, after a key that may be gone",
        keys=[held(key) for key in ("a", "b", "c", "d", "e")],
        given={**_LIST, "after": "aa", "most": 2},
        reply=[_row("b", 0), _row("c", 0)],
    ),
    _list_keys(
        "up to a key, that one too",
        keys=[held(key) for key in ("a", "b", "c")],
        given={**_LIST, "upto": "b"},
        reply=[_row("a", 0), _row("b", 0)],
    ),
    _list_keys(
        "those that are free and were freed from outside, or that somebody may wait for",
        keys=[free("f", freed_fence=7), free("w", last_ticket=14), free("x")],
        reply=[(*_row("f", 0, owner=None, left=-5)[:14], 7, *_row("f", 0)[15:]), _row("w", 0, owner=None, left=-5)],
    ),
    _list_keys(
        "with how many wait for it: the living who were not served",
        **_QUEUED,
        reply=[_row("j", 1), _row("k", 2)],
    ),
)

_LIST_WAITERS: Final = (
    Case(
        "list_waiters",
        "the living of a key who were not served, in the order of their tickets",
        **_QUEUED,
        reply=[
            (13, Ago(1), Left(4), "z label", "z host", 13, "z thread", "z program", "z task"),
            (14, Ago(1), Left(4), "a label", "a host", 14, "a thread", "a program", "a task"),
        ],
        given={"most": 9},
    ),
    Case(
        "list_waiters",
        "the first of them",
        keys=[held("k", last_ticket=14)],
        places=[waiter("a", 14), waiter("b", 12), waiter("c", 13)],
        reply=[(12, ...), (13, ...)],
        given={"most": 2},
    ),
    Case(
        "count_waiters",
        "the living of a key who were not served",
        **_QUEUED,
        reply=[(2,)],
    ),
)

_LIST_ALL_WAITERS: Final = (
    Case(
        "list_all_waiters",
        "the living of all keys who were not served, those first who came first",
        keys=[held("k", last_ticket=14), held("j", served_ticket=0)],
        places=[
            waiter("late", 13, joined_at=At(-1)),
            waiter("served", 10, joined_at=At(-9)),
            waiter("dead", 11, joined_at=At(-8), expires_at=At(-0.5)),
            waiter("other", 12, lock_key="j", joined_at=At(-2)),
            waiter("early", 14, joined_at=At(-3)),
            waiter("latest", 15),
        ],
        given={"most": 3},
        reply=[("k", 14, Ago(3), ...), ("j", 12, Ago(2), ...), ("k", 13, Ago(1), ...)],
    ),
    Case(
        "list_all_waiters",
        "of two who came at once, the one with the lower ticket first",
        keys=[held("k", last_ticket=14)],
        places=[waiter("b", 12, joined_at=At(-3)), waiter("a", 11, joined_at=At(-3))],
        given={"most": 3},
        reply=[("k", 11, ...), ("k", 12, ...)],
    ),
)

_freed = partial(Case, "free", given=_WORDS, reply=DONE, after={"k": _FREED})
_FREE: Final = (
    _freed("the tenure ends", keys=[held(count=3), held("j")]),
    _freed("also one whose lease has ended", keys=[held(expires_at=At(-3))]),
    _freed("also the rest of min_hold", keys=[held(owner="", count=0)]),
    *of_tenure("free", lease=False, given=_WORDS),
)

_REVOKED: Final[Record] = {"revoked_fence": 7, "revocation": "root: enough"}

_revoke = partial(Case, "revoke", given=_WORDS)
_REVOKE: Final = (
    _revoke("the row says so", keys=[held(), held("j")], reply=DONE, after={"k": _REVOKED}),
    _revoke("not of one that was given back", keys=[held(owner="")]),
    *of_tenure("revoke", given=_WORDS),
)

_STRANGE: Final = 'it\'s "näher" 100 % \\ {} :key 漢字 🙂'
_WHAT: Final[Record] = {name: value for name, value in event(1, "").items() if name not in {"id", "happened_at"}}


def _told(*events: Record) -> Record:
    return {"events": json.dumps([{**_WHAT, **each} for each in events], ensure_ascii=False)}


_note = partial(Case, "note")
_NOTE: Final = (
    _note(
        "what happened, as it was, and when",
        events=[event(10**12, "earlier")],
        given=_told(
            {"detail": "now", "age": 0.0, "lock_key": "j", "fence": 2**53 - 1, "seconds": 1e-7, "pid": 2**31 - 1},
            {"detail": _STRANGE, "age": 2.5, "lock_key": _STRANGE, "label": _STRANGE, "kind": "lost"},
        ),
        reply=[(), ()],
        after={
            "now": event(0, "now", id=..., lock_key="j", fence=2**53 - 1, seconds=1e-7, pid=2**31 - 1, happened_at=NOW),
            _STRANGE: event(0, _STRANGE, id=..., lock_key=_STRANGE, label=_STRANGE, kind="lost", happened_at=At(-2.5)),
        },
    ),
    _note("not what has yet to happen", given=_told({"detail": "now", "age": -0.5})),
    _note("nothing", given=_told()),
)

_trim = partial(Case, "trim")
_TRIM: Final = (
    _trim(
        "all but the last ones",
        events=[event(number, str(number)) for number in (3, 4, 5, 7)],
        given={"keep": 3},
        reply=[(), ()],
        after={"3": None, "4": None},
    ),
    _trim(
        "it does not wait for later ones, which another transaction has locked",
        events=[event(number, str(number)) for number in (3, 4, 5, 6, 7)],
        given={"keep": 4},
        beside=[Do("SELECT 1 FROM lock_events WHERE id = 6 FOR UPDATE")],
        reply=DONE,
        after={"3": None},
        on=SERVERS,
    ),
    _trim("none, if there are few", events=[event(3, "3"), event(4, "4")], given={"keep": 3}),
    _trim("none, if there are none", given={"keep": 3}),
    _trim(
        "a thousand at most",
        events=[event(number, str(number)) for number in (1, 1000, 1001, 9000)],
        given={"keep": 3},
        reply=[(), ()],
        after={"1": None, "1000": None},
    ),
)


def _seen(detail: str, key: str = "k", ago: float = 3) -> tuple[Any, ...]:
    return (key, "acquired", 7, Ago(ago), 0.5, detail, *OLD.values())


_LIST_EVENTS: Final = (
    Case(
        "list_events",
        "the last ones of a key, the latest first",
        events=[event(1, "a"), event(2, "b", happened_at=At(-9)), event(3, "c"), event(4, "d", lock_key="j")],
        given={"most": 2},
        reply=[_seen("c"), _seen("b", ago=9)],
    ),
    Case(
        "list_events",
        "of no other key",
        events=[event(1, "a", lock_key="j"), event(2, "b"), event(3, "c", lock_key="l")],
        reply=[_seen("b")],
        given={"most": 9},
    ),
    Case(
        "list_all_events",
        "the last ones of all keys, the latest first",
        events=[event(1, "a"), event(2, "b"), event(3, "c", lock_key="j")],
        given={"most": 2},
        reply=[_seen("c", "j"), _seen("b")],
    ),
)

CASES: Final = (
    *(*_NEXT_KEYS, *_LIST_KEYS, *_LIST_WAITERS, *_LIST_ALL_WAITERS, *_FREE, *_REVOKE),
    *(*_NOTE, *_TRIM, *_LIST_EVENTS),
)
