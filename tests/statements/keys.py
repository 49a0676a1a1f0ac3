"""The cases of the statements on a key's row."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any, Final

from tests.conftest import DATABASES
from tests.statements.cases import (
    AHEAD,
    CLOCK,
    DONE,
    LEVELS,
    MYSQL,
    NEW,
    NOW,
    OLD,
    POSTGRESQL,
    REFUSED,
    SERVERS,
    WHO,
    Ago,
    At,
    Case,
    Do,
    Left,
    Record,
    Reply,
    free,
    held,
    leases,
    names,
    waiter,
)

BEGUN: Final = {
    **NEW,
    "owner": "me",
    "fence": CLOCK,
    "count": 1,
    "reading": 1,
    "ttl": 60.0,
    "acquired_at": NOW,
    "expires_at": At(61),
}
"""What a new tenure of `me` changes in a row."""
LONG_AGO: Final = At(-7200)
_AS_WISHED: Final[Record] = {}


def of_tenure(
    statement: str,
    *,
    lease: bool = True,
    given: Record = _AS_WISHED,
    count: int = 1,
    on: Any = DATABASES,
) -> Iterator[Case]:
    """The statement acts on exactly the tenure that it names."""

    def case(behaviour: str, row: Record, **differently: Any) -> Case:
        return Case(statement, behaviour, keys=[row], given={**given, **differently}, on=on)

    yield case("not another key's tenure", held(count=count), key="j")
    yield case("not that of a free key", free())
    yield case("not an earlier tenure of the same owner", held(count=count, fence=6))
    yield case("not a later tenure of the same owner", held(count=count, fence=8))
    if lease:
        yield case("not one whose lease has ended", held(count=count, expires_at=At(-0.5)))
    if statement not in {"pin", "free", "revoke"}:  # these do not know the owner
        yield case("not another owner's tenure", held(count=count), owner="other")


def lasts_longer(statement: str, reply: Reply, changes: Record, given: Record = _AS_WISHED) -> Iterator[Case]:
    """The statement lets the lease last at least one life more."""
    yield Case(
        statement,
        "a lease that lasts for longer is not shortened",
        keys=[held(expires_at=At(100))],
        given=given,
        reply=reply,
        after={"k": changes},
    )


_take = partial(Case, "take")
_taken = partial(_take, reply=[(CLOCK,)], after={"k": BEGUN})
_TAKE: Final = (
    _taken("a free key is taken", keys=[free(), free("j")]),
    _taken("a key whose lease has ended is taken", keys=[held(owner="other", count=2, expires_at=At(-0.5))]),
    _taken("a free key is taken although the clock was set back after its release", keys=[free(expires_at=At(100))]),
    _take("a held key is not, by nobody", keys=[held(), held("j", owner="other")], given={"key": "j"}),
    _take("a key without a row is not", keys=[free("j")]),
    _take("a key of another kind is not", keys=[free(kind=2)], given={"kind": 1}),
    _taken(
        "one of the same kind is, by a writer after a reader",
        keys=[free(kind=1, reading=1)],
        given={"kind": 1, "reading": 0},
        after={"k": {**BEGUN, "reading": 0}},
    ),
    _take(
        "the fence exceeds the one before where that is ahead of the clock",
        keys=[free(fence=AHEAD)],
        reply=[(AHEAD + 1,)],
        after={"k": {**BEGUN, "fence": AHEAD + 1}},
    ),
    _take("a free key that somebody may wait for is not taken", keys=[free(last_ticket=11)]),
    _taken("it is, by who does not care", keys=[free(last_ticket=11)], given={"fair": 0}),
    _take("who does not care takes no held key", keys=[held(owner="other")], given={"fair": 0}),
    _take("a pinned key is not taken", keys=[free(), free("j")], beside=[Do("pin")], reply=REFUSED),
    _take(
        "nor one that was pinned in time and whose lease has ended",
        keys=[held(expires_at=At(-0.5))],
        given={"owner": "other"},
        beside=[Do("pin")],
        reply=REFUSED,
    ),
)

CREATED: Final = {
    **BEGUN,
    "lock_key": "k",
    "last_ticket": 0,
    "served_ticket": 0,
    "revoked_fence": 0,
    "freed_fence": 0,
    "revocation": "",
    "kind": 0,
    "awaiting_fence": 0,
    "awaiting_channel": "",
}

_create = partial(Case, "create")
_CREATE: Final = (
    _create("a key without a row is taken", keys=[free("j")], reply=[(CLOCK,)], after={"k": CREATED}),
    _create(
        "the row has the kind that was asked for",
        given={"kind": 2, "reading": 0},
        reply=[(CLOCK,)],
        after={"k": {**CREATED, "kind": 2, "reading": 0}},
    ),
    _create("a key with a row is not, even if it is free", keys=[free()]),
    _create("nor a held one", keys=[held(owner="other")]),
    _create(
        "a pin outlasts the row that it was for",
        beside=[Do("pin")],
        reply=REFUSED,
        on=POSTGRESQL,
    ),
)

_inspect = partial(Case, "inspect")
_INSPECT: Final = (
    _inspect(
        "the row of a key",
        keys=[held(kind=2, reading=1), held("j", owner="other")],
        reply=[("me", 7, 1, 30.0, Ago(10), Left(20), *OLD.values(), 6, 5, "root: please", 2, 1, 0)],
    ),
    _inspect(
        "and whether its tenure has waited for shares",
        keys=[held(awaiting_fence=7)],
        reply=[("me", 7, 1, 30.0, ..., ..., *[...] * 6, 6, 5, "root: please", 0, 0, 1)],
    ),
    _inspect("none where there is none", keys=[held("j")]),
    _inspect(
        "what remains of a lease that has ended says for how long it has",
        keys=[held(expires_at=At(-3))],
        reply=[("me", 7, 1, 30.0, ..., Left(-3), ...)],
    ),
)

_SET_COUNT: Final = (
    Case(
        "set_count",
        "the count is what its flow says, and the lease lasts one life more",
        keys=[held(count=1), held("j")],
        given={"count": 4},
        reply=DONE,
        after={"k": {"count": 4, "expires_at": At(61)}},
    ),
    Case(
        "set_count",
        "without a life the lease stays as it is",
        keys=[held(count=3)],
        given={"count": 2, "life": 0.0},
        reply=DONE,
        after={"k": {"count": 2}},
    ),
    *lasts_longer("set_count", DONE, {"count": 2}, {"count": 2}),
    *of_tenure("set_count"),
)

_extended = partial(Case, "extend", reply=DONE, after={"k": {"ttl": 60.0, "expires_at": At(61)}})
_EXTEND: Final = (
    _extended("the lease lasts one life from now", keys=[held(), held("j")]),
    _extended("a lease that lasts for longer is shortened", keys=[held(expires_at=At(100))]),
    *of_tenure("extend"),
)

_OF_SOME: Final = [
    held(),
    held("j"),
    held("i", owner="other"),
    held("h", fence=8),
    held("g", expires_at=At(-0.5)),
    held("f", expires_at=At(100)),
]
_SOME: Final = [("k", "me", 7), ("i", "me", 7), ("h", "me", 7), ("g", "me", 7), ("e", "me", 7)]

_renew = partial(Case, "renew", given=leases(("k", "me", 7)))
_renewed = partial(_renew, reply=DONE, after={"k": {"expires_at": At(61)}})
_RENEW: Final = (
    _renewed("a lease lasts one life more", keys=[held()]),
    _renewed("of many those are renewed that are alive", keys=_OF_SOME, given=leases(*_SOME)),
    _renew(
        "all of many",
        keys=[held(), held("j", owner="other", fence=9), held("i")],
        given=leases(("k", "me", 7), ("j", "other", 9)),
        reply=DONE * 2,
        after={"k": {"expires_at": At(61)}, "j": {"expires_at": At(61)}},
    ),
    _renew("a lease that lasts for longer is not shortened", keys=[held(expires_at=At(100))], reply=DONE),
    _renew(
        "one that was asked back is not renewed while its holder is unaware of that",
        keys=[held(revoked_fence=7), held("j")],
        given=leases(("k", "me", 7), ("j", "me", 7)),
        reply=DONE,
        after={"j": {"expires_at": At(61)}},
    ),
    _renewed("it is once its holder knows", keys=[held(revoked_fence=7)], given=leases(("k", "me", 7), not_notified=0)),
    _renew("a lease that has ended is not revived", keys=[held(expires_at=At(-0.5))]),
    _renew("an owner's later tenure is not renewed", keys=[held(fence=8)]),
    _renew("another owner's is not", keys=[held(owner="other")]),
    _renew("another key's is not", keys=[held("j")]),
    _renew("keys and owners that differ in case are others", keys=[held("K"), held(owner="ME")]),
)

_alive = partial(Case, "alive", given=leases(("k", "me", 7)))
_ALIVE: Final = (
    _alive("those of many that are", keys=_OF_SOME, given=leases(*_SOME), reply=[("k", "me", 7, None)]),
    _alive(
        "and by whom and why it was asked back",
        keys=[held(revoked_fence=7), held("j")],
        reply=[("k", "me", 7, "root: please")],
    ),
    _alive("if only without words", keys=[held(revoked_fence=7, revocation="")], reply=[("k", "me", 7, "")]),
    _alive("keys and owners that differ in case are others", keys=[held("K"), held(owner="ME")]),
)

_HELD_BY_HEIR: Final[Record] = {**WHO, "owner": "heir", "count": 1, "ttl": 60.0, "expires_at": At(61)}
_TOKENS: Final[Record] = {"owner": "heir", "count": 0, "ttl": 61.0, "expires_at": At(61)}


def _changes_hands(statement: str, after: Record, count: int) -> Iterator[Case]:
    """The owner is another one, once."""
    case = partial(Case, statement)
    given = partial(case, reply=DONE, after={"k": after})
    yield given("the tenure is the heir's, with a lease of its own", keys=[held(count=count), held("j", count=count)])
    yield given("it may be sent twice", keys=[held(owner="heir")])
    yield case("not a later tenure of the heir", keys=[held(owner="heir", fence=8)])
    yield case("not one of the heir whose lease has ended", keys=[held(owner="heir", expires_at=At(-0.5))])
    yield case("not another key's of the heir", keys=[held("j", owner="heir")])
    yield from of_tenure(statement, count=count)


_DETACH: Final = (
    *_changes_hands("detach", _TOKENS, 3),
    *lasts_longer("detach", DONE, {"owner": "heir", "count": 0, "ttl": 61.0}),
)

_ATTACH: Final = (
    *_changes_hands("attach", _HELD_BY_HEIR, 0),
    Case(
        "attach",
        "whose lease may be shorter",
        keys=[held(count=0, ttl=100.0, expires_at=At(100))],
        reply=DONE,
        after={"k": _HELD_BY_HEIR},
    ),
    Case(
        "attach",
        "one that comes late shortens no lease that its heir has extended",
        keys=[held(owner="heir", ttl=100.0, expires_at=At(100))],
        reply=DONE,
        after={"k": WHO},
    ),
)

_FREED: Final = {"owner": None, "count": 0, "expires_at": NOW}

_release = partial(Case, "release")
_freed = partial(_release, after={"k": _FREED})
RELEASE: Final = (
    _freed("the key is free", keys=[held(), held("j")], reply=[(0,)]),
    _freed("those who may wait are told of, from the first one not served", keys=[held(last_ticket=15)], reply=[(11,)]),
    _freed("whatever its count", keys=[held(count=2)], reply=[(0,)]),
    _release(
        "a detached tenure is ended, too",
        keys=[held(count=0)],
        reply=[(0,)],
        after={"k": {"owner": None, "expires_at": NOW}},
    ),
    _freed("a tenure whose lease has ended can still be given back", keys=[held(expires_at=At(-3))], reply=[(0,)]),
    *of_tenure("release", lease=False),
)

MIN_HOLD: Final = (
    _release(
        "the key stays closed for the rest of the shortest hold, is nobody's, and is nobody's turn yet",
        keys=[held(last_ticket=15)],
        given={"min_hold": 25.0},
        reply=[(0,)],
        after={"k": {"owner": "", "count": 0, "expires_at": Left(15)}},
    ),
    _freed(
        "the key is free after the shortest hold", keys=[held(last_ticket=15)], given={"min_hold": 5.0}, reply=[(11,)]
    ),
    _freed(
        "without a shortest hold nothing stays closed, even if the clock was set back",
        keys=[held(last_ticket=15, acquired_at=At(100), expires_at=At(130))],
        reply=[(11,)],
    ),
)

_SEEN: Final = [(1,)]
"""The transaction sees the tenure."""
_UNSEEN: Final = [(0,)]


_pin = partial(Case, "pin")


def _snapshots(level: str, reply: Reply, **where: Any) -> Case:
    """A transaction that read before the tenure began; the tenure goes on, whatever it sees."""
    return _pin(
        f"by a transaction that read before the tenure began ({level})",
        keys=[held(fence=6)],
        session=LEVELS[level],
        since=[Do("UPDATE locks SET fence = 7")],
        reply=reply,
        then=[Do("renew", leases(("k", "me", 7)), DONE), Do("release", {}, [(0,)])],
        after={"k": {"fence": 7}},
        **where,
    )


_pins = partial(_pin, reply=_SEEN, on=SERVERS)
_pins_alone = partial(_pin, reply=_SEEN, on=["sqlite"])
_PIN: Final = (
    _pin(
        "nobody begins a tenure while its transaction lasts",
        keys=[free()],
        reply=None,
        then=[Do("take", {"owner": "other"}, REFUSED)],
        on=SERVERS,
    ),
    _pins(
        "nor by another way",
        keys=[held(), held("j", owner="other")],
        then=[Do("extend", {"key": "j", "owner": "other"}, DONE), Do("hand_over_local", {"heir": "other"}, REFUSED)],
    ),
    _pins(
        "the tenure goes on: it is renewed, entered and given back meanwhile",
        keys=[held()],
        then=[Do("renew", leases(("k", "me", 7)), DONE), Do("set_count", {}, DONE), Do("release", {}, [(0,)])],
    ),
    _pins(
        "other keys are taken, and created",
        keys=[held(), free("j")],
        then=[Do("take", {"key": "j"}, [(...,)]), Do("create", {"key": "z"}, [(...,)])],
    ),
    _pin("another tenure is not ours", keys=[held(fence=8), held("j")], reply=_UNSEEN, on=SERVERS),
    _snapshots("READ COMMITTED", _SEEN, on=SERVERS),
    _snapshots("REPEATABLE READ", _UNSEEN, on=SERVERS),
    _snapshots("SERIALIZABLE", _SEEN, on=MYSQL),
    _snapshots("SERIALIZABLE", _UNSEEN, on=POSTGRESQL),
    _pins_alone(
        "nobody else writes while its transaction lasts",
        keys=[held()],
        then=[Do("take", {"owner": "other"}, REFUSED), Do("extend", {}, REFUSED)],
    ),
    _pins_alone(
        "the lease lasts one life more, since nobody else can renew it",
        keys=[held(), held("j")],
        after={"k": {"expires_at": At(61)}},
    ),
    _pins_alone("a lease that lasts for longer is not shortened", keys=[held(expires_at=At(100))]),
    _pin("not one that has been given back", keys=[held(owner="", count=0)], on=["sqlite"]),
    *of_tenure("pin", on=["sqlite"]),
)

_LOCATE: Final = (Case("locate", "the table's schema, and no cluster", reply=[(..., 0)], on=SERVERS),)

_stale = partial(Case, "stale")
_STALE: Final = (
    _stale(
        "the next keys, in order, and which of them have been free or expired for long",
        keys=[
            free("k", expires_at=LONG_AGO),
            held("j", expires_at=LONG_AGO),
            free("i"),
            held("h", expires_at=At(-9)),
            free("g", expires_at=LONG_AGO),
            free("f", expires_at=LONG_AGO),
        ],
        given={"after": "g"},
        reply=[("h", 0), ("i", 0), ("j", 1), ("k", 1)],
    ),
    _stale(
        "a hundred at a time",
        keys=[free(f"{n:04}", expires_at=LONG_AGO) for n in range(101)],
        given={"after": ""},
        reply=[(f"{n:04}", 1) for n in range(100)],
    ),
    _stale(
        "not one with a share that is alive",
        keys=[
            free("i", kind=1, expires_at=LONG_AGO),
            held("i\x1fr 0", kind=1, expires_at=LONG_AGO),
            held("i\x1fr 1", kind=1, reading=1),
            held("j", kind=2, expires_at=LONG_AGO),
            held("j\x1fp 00003", kind=2),
        ],
        reply=[("i", 0), ("i\x1fr 0", 1), ("i\x1fr 1", 0), ("j", 0), ("j\x1fp 00003", 0)],
    ),
    _stale(
        "but one without shares, or whose shares have ended",
        keys=[
            free("i", kind=1, expires_at=LONG_AGO),
            free("j", kind=2, expires_at=LONG_AGO),
            free("j\x1fp 00003", kind=2),
            held("j\x1fp 00004", kind=2, expires_at=At(-0.5)),
        ],
        reply=[("i", 1), ("j", 1), ("j\x1fp 00003", 0), ("j\x1fp 00004", 0)],
    ),
    _stale(
        "nor do the shares of other keys, and keys that begin as a share's, keep one",
        keys=[
            held("g\x1fr 0", kind=1),
            free("i", kind=1, expires_at=LONG_AGO),
            held("i x", kind=1),
            held("ii\x1fr 0", kind=1),
        ],
        reply=[("g\x1fr 0", 0), ("i", 1), ("i x", 0), ("ii\x1fr 0", 0)],
    ),
    _stale(
        "a lock of the plain kind has no shares, whatever the names of other keys",
        keys=[free("i", expires_at=LONG_AGO), held("i\x1fr 0")],
        reply=[("i", 1), ("i\x1fr 0", 0)],
    ),
)

_reap = partial(Case, "reap")
_reaped = partial(_reap, reply=DONE, after={"k": None})
_REAP: Final = (
    _reap(
        "those rows of many that have been free for long go",
        keys=[free(each, expires_at=LONG_AGO) for each in ("i", "j", "k")] + [free("l")],
        given=names("l", "k", "gone", "j"),
        reply=[*DONE, *DONE],
        after={"j": None, "k": None},
    ),
    _reaped("so does an expired one", keys=[held(expires_at=LONG_AGO)]),
    _reap("one that was taken or given back since stays", keys=[free(expires_at=At(-3000))]),
    _reap("one whose fence is ahead of the clock stays", keys=[free(fence=10**17, expires_at=LONG_AGO)]),
    _reap("one that somebody may just be joining stays", keys=[free(expires_at=LONG_AGO, last_ticket=10**17)]),
    _reaped(
        "one whose last ticket was drawn long ago, and never used, goes",
        keys=[free(expires_at=LONG_AGO, last_ticket=15)],
    ),
    _reaped(
        "one whose queue has been served goes",
        keys=[free(expires_at=LONG_AGO, last_ticket=10**17, served_ticket=10**17)],
    ),
    _reap(
        "a row by which a transaction pins the key stays",
        keys=[free(expires_at=LONG_AGO)],
        beside=[Do("pin")],
        reply=REFUSED,
        on=MYSQL,
    ),
    _reap(
        "one that somebody waits for stays, and keeps no other",
        keys=[free(expires_at=LONG_AGO), free("j", expires_at=LONG_AGO)],
        places=[waiter("w", 11)],
        given=names("j", "k"),
        reply=DONE,
        after={"j": None},
    ),
    _reaped(
        "the dead, those who were served, and those who wait for other keys, are no reason to stay",
        keys=[free(expires_at=LONG_AGO)],
        places=[waiter("w", 11, expires_at=At(-0.5)), waiter("u", 10), waiter("v", 11, lock_key="j")],
    ),
)

CASES: Final = (
    *_TAKE,
    *_CREATE,
    *_INSPECT,
    *_SET_COUNT,
    *_EXTEND,
    *_RENEW,
    *_ALIVE,
    *_DETACH,
    *_ATTACH,
    *RELEASE,
    *MIN_HOLD,
    *_PIN,
    *_LOCATE,
    *_STALE,
    *_REAP,
)
