"""The cases of the queue's statements."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Final

from dblock.core.statements.common import FLOW
from tests.conftest import DATABASES
from tests.statements.cases import (
    AHEAD,
    CLOCK,
    DONE,
    HINDERED,
    LEVELS,
    MYSQL,
    NEW,
    NOT_POSTGRESQL,
    NOTHING,
    NOW,
    POSTGRESQL,
    REFUSED,
    SERVERS,
    At,
    Case,
    Do,
    Left,
    free,
    held,
    names,
    owners,
    waiter,
)
from tests.statements.keys import BEGUN, lasts_longer, of_tenure

JOINED: Final = {
    **NEW,
    "owner": "me",
    "lock_key": "k",
    "ticket": CLOCK,
    "ttl": 60.0,
    "channel": "new channel",
    "circle": "",
    "reading": 1,
    "joined_at": NOW,
    "expires_at": At(5),
}


_join = partial(Case, "join")


def _joins(behaviour: str, *, remaining: Any = None, ticket: Any = CLOCK, **case: Any) -> Iterator[Case]:
    """Standing in the queue, by what it answers: on PostgreSQL the key's row says at once that somebody does."""
    place = {**JOINED, "ticket": ticket}
    after = {"me": place, "k": {"last_ticket": ticket}}
    seen = Left(20) if remaining is None else remaining
    yield _join(behaviour, **case, reply=[(ticket, seen, 11)], after=after, on=POSTGRESQL)
    yield _join(behaviour, **case, reply=[(ticket, ...)], after={"me": place}, on=NOT_POSTGRESQL)


_JOIN: Final = (
    *_joins("a ticket, and a place for it", keys=[held(owner="other"), held("j")]),
    *_joins(
        "behind all of its key",
        keys=[held(owner="other", last_ticket=13)],
        places=[waiter("w", 11), waiter("v", 12), waiter("dead", 13, expires_at=At(-0.5)), waiter("served", 10)],
    ),
    *_joins("a free key's holder has been gone since", keys=[free()], remaining=Left(-5)),
    *_joins("if the clock was set back, just gone", keys=[free(expires_at=At(100))], remaining=NOTHING),
    *_joins(
        "tickets go up where they are ahead of the clock",
        keys=[held(owner="other", last_ticket=AHEAD)],
        ticket=AHEAD + 1,
    ),
    _join("there is no place where there is no row", keys=[free("j")]),
    _join("nor before a key of another kind", keys=[held(owner="other", kind=2)], given={"kind": 1}),
    _join(
        "the place says whether its waiter reads",
        keys=[held(owner="other", kind=1)],
        given={"kind": 1, "reading": 0},
        reply=[(CLOCK, ...)],
        after={"me": {**JOINED, "reading": 0}, "k": {"last_ticket": ...}},
    ),
    _join(
        "a ticket that was drawn, but not announced, is not drawn again",
        keys=[held(owner="other")],
        places=[waiter("w", AHEAD)],
        reply=[(AHEAD + 1, ...)],
        after={"me": {**JOINED, "ticket": AHEAD + 1}},
        on=["sqlite"],
    ),
    _join(
        "another key's tickets do not count",
        keys=[held(owner="other")],
        places=[waiter("w", AHEAD, lock_key="j")],
        reply=[(CLOCK, ...)],
        after={"me": JOINED},
        on=["sqlite"],
    ),
    _join(
        "of two that draw one ticket the later does not stand in the queue",
        keys=[held(owner="other", last_ticket=AHEAD)],
        places=[waiter("w", AHEAD + 1)],
        on=MYSQL,
    ),
)

_announce = partial(Case, "announce")
_announced = partial(_announce, after={"k": {"last_ticket": 12}})
_ANNOUNCE: Final = (
    _announced(
        "the row says that the ticket was given out, and for how long the holder has the key",
        keys=[held(), held("j", expires_at=At(90))],
        reply=[(Left(20, 1000),)],
    ),
    _announced("nobody has a key whose lease has ended", keys=[held(expires_at=At(-3))], reply=[(0,)]),
    _announced(
        "nor one that was given back, whatever its row says of the end", keys=[free(expires_at=At(20))], reply=[(0,)]
    ),
    _announce("a later ticket stays the last", keys=[held(last_ticket=15)], reply=[(Left(20, 1000),)]),
    _announce("not one that has been passed over", keys=[held(last_ticket=15, served_ticket=12)]),
    _announce("nothing where there is no row", keys=[held("j")]),
)

_queue_status = partial(Case, "queue_status")
_LOOK: Final = (
    _queue_status(
        "a waiter that is not ahead, and not served",
        keys=[held(owner="other", last_ticket=12), held("j", served_ticket=0)],
        places=[waiter("w", 11), waiter("me", 12)],
        reply=[(0, Left(20), 11, 12, 1, 1)],
    ),
    _queue_status(
        "one that was served",
        keys=[held(last_ticket=12, served_ticket=12, expires_at=At(4))],
        places=[waiter("me", 12)],
        reply=[(1, Left(4), 13, 12, 0, 1)],
    ),
    _queue_status(
        "one whose place has ended has none",
        keys=[held(owner="other", last_ticket=12)],
        places=[waiter("me", 12, expires_at=At(-0.5))],
        reply=[(0, Left(20), 11, 12, 0, 0)],
    ),
    _queue_status(
        "one whose place is gone, before a free key",
        keys=[free(last_ticket=12)],
        places=[waiter("w", 12)],
        reply=[(0, Left(-5), 11, 12, 0, 0)],
    ),
    _queue_status(
        "nothing remains of a free key although the clock was set back after its release",
        keys=[free(expires_at=At(100))],
        reply=[(0, NOTHING, 11, 10, 0, 0)],
    ),
    _queue_status(
        "nothing remains of a lease that has ended",
        keys=[held(owner="other", expires_at=At(-3))],
        reply=[(0, Left(-3), 11, 10, 0, 0)],
    ),
    _queue_status(
        "before it are the living of its key only, who were not served and came earlier",
        keys=[held("j", served_ticket=0, last_ticket=12), held(owner="other", last_ticket=16)],
        places=[
            waiter("served", 10),
            waiter("dead", 11, expires_at=At(-0.5)),
            waiter("elsewhere", 12, lock_key="j"),
            waiter("w", 13),
            waiter("v", 14),
            waiter("me", 15),
            waiter("later", 16),
        ],
        given={"ticket": 15},
        reply=[(0, Left(20), 11, 16, 2, 1)],
    ),
    *(
        _queue_status(
            behaviour,
            keys=[held(owner="other", last_ticket=40)],
            places=[waiter(f"w{n}", n, expires_at=At(-0.5 if n in dead else 4)) for n in (*living, *dead)],
            given={"ticket": 40},
            reply=[(0, Left(20), 11, 40, before, 0)],
        )
        for behaviour, living, dead, before in (
            ("sixteen at most are counted", range(11, 30), range(0), 16),
            ("of the sixteen nearest before it the living are counted", range(11, 21), range(21, 35), 2),
            ("somebody may be before sixteen who are dead", range(0), range(11, 27), 1),
            ("nobody is before fifteen who are dead", range(0), range(11, 26), 0),
        )
    ),
    _queue_status("nothing where there is no row", keys=[held("j")], places=[waiter("me", 12)]),
)

_TWO: Final = (waiter("v", 12), waiter("w", 11))
"""Who came later stands first in the table."""
_WAITED: Final = free(last_ticket=12)


def _granted(name: str = "w", ticket: int = 11, **more: Any) -> Mapping[str, Any]:
    """What changes in a row when a waiter is served."""
    place = waiter(name, ticket)
    return {
        **{column: place[column] for column in ("owner", "ttl", *NEW)},
        "fence": CLOCK,
        "count": 1,
        "reading": place["reading"],
        "acquired_at": NOW,
        "expires_at": Left(4),
        "served_ticket": ticket,
        **more,
    }


def _grants(
    behaviour: str,
    *,
    keys: Any = (_WAITED,),
    places: Any = _TWO,
    ticket: int = 11,
    fence: Any = CLOCK,
    changes: Any = None,
    given: Any = None,
    on: Sequence[str] = DATABASES,
    lasts: Any = 0,
    **case: Any,
) -> Iterator[Case]:
    """A waiter is served: its place is deleted, or has ended, or counts no more, by the database."""
    name = {11: "w", 12: "v"}[ticket]
    channel = next(place["channel"] for place in places if place["owner"] == name)
    row = {"k": _granted(name, ticket, fence=fence, **(changes or {}))}
    seen = (ticket, channel, name, fence)
    for databases, reply, place in (
        (POSTGRESQL, [(*seen, lasts, ...)], {name: None}),
        (("sqlite",), [(*seen, 0, None)], {}),
        (MYSQL, [(fence,)], {name: {"expires_at": Left(-1)}}),
    ):
        chosen = [database for database in databases if database in on]
        more = {**(given or {}), "heir": name}
        if chosen:
            yield Case(
                *("grant", behaviour),
                keys=keys,
                places=places,
                given=more,
                reply=reply,
                after={**row, **place},
                on=chosen,
                **case,
            )


HERE, THERE = "dblock_00000001_", "dblock_00000000_0123456789abcdef.5"
"""What the channels of this machine begin with, and a channel of another one."""


_grant = partial(Case, "grant")
_granting = partial(_grant, keys=[_WAITED], places=_TWO, given={"heir": "w"})


def _covered(
    behaviour: str,
    covered: bool,
    *,
    lasts: float = 4.0,
    fence: int = 7,
    ttl: float = 90.0,
    channel: str = "",
    left: float = 20.0,
    reading: tuple[int, int] = (0, 1),
) -> Iterator[Case]:
    """A grant by a holder waits for the disk, unless the holder's own lease covers it until then."""
    said: Any = ... if ttl == lasts else round((lasts + 1) * 1000) if covered else 0  # it joined a second ago
    yield _grant(
        f"a holder hands over what it holds, {behaviour}",
        keys=[held(last_ticket=12, fence=fence, expires_at=At(left), reading=reading[0])],
        places=[waiter("w", 11, ttl=ttl, channel=channel, reading=reading[1])],
        given={"fence": fence, "here": HERE},
        reply=[(11, channel, "w", CLOCK if fence == 7 else fence + 1, said, ...)],
        after={
            "k": _granted(
                ttl=ttl,
                reading=reading[1],
                fence=CLOCK if fence == 7 else fence + 1,
                expires_at=At(lasts) if ttl == lasts else Left(lasts),
            ),
            "w": None,
        },
        durable=not covered,
        on=POSTGRESQL,
    )


def _refuses(behaviour: str, *, heir: str = "w", given: Any = None, **case: Any) -> Case:
    """Nobody is served."""
    case = {"keys": [_WAITED], "places": _TWO, **case}
    return _grant(behaviour, given={**(given or {}), "heir": heir}, **case)


def _grants_past_leavers(isolation: str) -> Iterator[Case]:
    """A waiter's row is locked before it is served, at any level: one that is leaving is not."""
    session = LEVELS[isolation]
    leaving = partial(_granting, session=session, beside=[Do("leave_queue", owners("w"), DONE)])
    yield leaving(f"a waiter that is leaving is not served ({isolation})", reply=REFUSED, on=SERVERS)
    yield leaving(f"nor when it has left ({isolation})", commits=True, after={"w": None}, on=MYSQL)
    yield leaving(
        f"when it has left, the next one is ({isolation})",
        commits=True,
        reply=[(12, ...)],
        after={"w": None, "v": None, "k": _granted("v", 12)},
        on=POSTGRESQL,
    )
    yield from _grants(
        f"a later one that is leaving is no obstacle ({isolation})",
        session=session,
        beside=[Do("leave_queue", owners("v"), DONE)],
        on=SERVERS,
    )


_NOBODYS: Final = {"owner": "", "fence": 0}
"""The parameters of a grant of a key that nobody holds."""
_HERE: Final[Any] = {"keys": [_WAITED], "given": {"here": HERE}, "on": POSTGRESQL}

_GRANT: Final = (
    *_grants("the first waiter has the key, for as long as its place", given=_NOBODYS),
    *_grants("so it has if the index is not what finds it", session="enable_indexscan = off", on=POSTGRESQL),
    *_grants("one key's only", keys=[_WAITED, free("j")], given=_NOBODYS),
    *_grants(
        "one key's waiter",
        places=[*_TWO, waiter("x", 11, lock_key="j"), waiter("y", 11, lock_key="a")],
        given=_NOBODYS,
    ),
    *_grants(
        "for no longer than it asked for",
        places=[waiter("w", 11, ttl=2.0)],
        changes={"ttl": 2.0, "expires_at": At(2)},
    ),
    _refuses(
        "not another key's waiter", heir="x", keys=[_WAITED], places=[waiter("x", 11, lock_key="j")], given=_NOBODYS
    ),
    _refuses("not another key", heir="x", keys=[_WAITED], places=[waiter("x", 11, lock_key="j")], given={"key": "j"}),
    *_grants("the dead are passed over", places=[waiter("w", 11, expires_at=At(-0.5)), _TWO[0]], ticket=12),
    _refuses("nobody is served if all are dead", keys=[_WAITED], places=[waiter("w", 11, expires_at=At(-0.5))]),
    *_grants(
        "those with earlier tickets than the first are passed over",
        given={"first": 12},
        ticket=12,
        on=("sqlite", *POSTGRESQL),
    ),
    *_grants(
        "the last ticket catches up with one that was not announced",
        keys=[free()],
        changes={"last_ticket": 11},
    ),
    *_grants(
        "a key whose lease has ended is granted",
        keys=[held(owner="other", count=3, last_ticket=12, expires_at=At(-0.5))],
    ),
    *_grants(
        "a free key is granted although the clock was set back after its release",
        keys=[free(last_ticket=12, expires_at=At(100))],
    ),
    *_grants(
        "and that is on disk before it answers",
        keys=[free(last_ticket=12, expires_at=At(100))],
        on=POSTGRESQL,
        durable=True,
    ),
    *_grants("a holder hands over what it holds", keys=[held(last_ticket=12)], lasts=5000),
    *_grants(
        "a reader's key, to a writer",
        keys=[free(last_ticket=12, kind=1, reading=1)],
        places=[waiter("w", 11, reading=0)],
        changes={"reading": 0},
    ),
    *_covered("without waiting for the disk", True),
    *_covered("for the lease of the place", True, left=4.5),
    *_covered("for what is left of its own lease, if that is enough", True, lasts=3.5, left=3.5),
    *_covered("waiting for the disk, if that is too little", False, left=2.5),
    *_covered("without, if it is enough for what was asked for", True, lasts=1.0, ttl=1.0, left=2.5),
    *_covered("waiting, if the clock is behind the fence", False, fence=AHEAD),
    *_covered("without, to a neighbour", True, channel=f"{HERE}0123456789abcdef.5"),
    *_covered("waiting, to who is notified", False, channel=THERE),
    *_covered("waiting, by a reader to a writer", False, reading=(1, 0)),
    *_covered("without, by a writer to a writer", True, reading=(0, 0)),
    *_covered("without, by a reader to a reader", True, reading=(1, 1)),
    _refuses("not another owner's tenure", keys=[held(owner="other", last_ticket=12)], places=_TWO),
    _refuses("not the owner's later tenure", keys=[held(fence=8, last_ticket=12)], places=_TWO),
    _refuses("a waiter is served once", keys=[free(last_ticket=12, served_ticket=11)], places=[_TWO[1]]),
    _refuses("nor passed over twice", keys=[free(last_ticket=12, served_ticket=12)], places=_TWO),
    *_grants(
        "the fence exceeds the one before where that is ahead of the clock",
        keys=[free(fence=AHEAD, last_ticket=12)],
        fence=AHEAD + 1,
    ),
    _refuses("a pinned key is not granted", beside=[Do("pin")], reply=REFUSED),
    _refuses("not even by its holder", keys=[held(last_ticket=12)], beside=[Do("pin")], reply=REFUSED),
    *(each for isolation in ("REPEATABLE READ", "READ COMMITTED") for each in _grants_past_leavers(isolation)),
    _granting(
        "a waiter that is being served cannot leave before it is",
        reply=None,
        then=[Do("leave_queue", owners("v"), DONE), Do("leave_queue", owners("w"), HINDERED)],
        on=SERVERS,
    ),
    _granting(
        "nor can its place be kept: what a heartbeat says of it is no more true",
        reply=None,
        then=[Do("heartbeat", owners("v")), Do("heartbeat", owners("w"), HINDERED)],
        on=SERVERS,
    ),
    _grant(
        "a place that another flow inherits meanwhile is that flow's, and is gone",
        keys=[_WAITED],
        places=_TWO,
        beside=[Do("adopt_place", {"owner": "w"}, DONE)],
        commits=True,
        reply=[(11, ...)],
        after={"w": None, "k": _granted(**NEW, owner="heir", ttl=60.0)},
        on=POSTGRESQL,
    ),
    *(
        _grant(
            behaviour,
            **_HERE,
            places=[waiter("v", 12), waiter("w", 11, channel=channel)],
            reply=[(11, channel, "w", CLOCK, 0, called)],
            after={"k": _granted(), "w": None},
        )
        for behaviour, channel, called in (
            ("no call for who does not listen", "", None),
            ("nor for who listens in the neighbourhood", f"{HERE}0123456789abcdef.5", None),
            ("nor by a name that no process of the lock listens by", "pg_wal", None),
            ("who listens elsewhere is called", THERE, ""),
        )
    ),
    *_grants(
        "the channel of who was served is known",
        places=[waiter("v", 12, channel="wrong"), waiter("w", 11, channel="right")],
        on=("sqlite", *POSTGRESQL),
    ),
)

_LISTENING: Final = [
    waiter("v", 13, channel="later"),
    waiter("w", 12, channel="right"),
    waiter("u", 11, channel="dead", expires_at=At(-0.5)),
    waiter("t", 10, channel="earlier"),
    waiter("x", 11, lock_key="j", channel="elsewhere"),
]

_first_waiter = partial(Case, "first_waiter")
_FIRST: Final = (
    _first_waiter(
        "the first live waiter from a ticket on, and where it listens", places=_LISTENING, reply=[(12, "right", "w")]
    ),
    _first_waiter(
        "so it is if the index is not what finds it",
        places=_LISTENING,
        reply=[(12, "right", "w")],
        session="enable_indexscan = off",
        on=POSTGRESQL,
    ),
    _first_waiter("nobody", places=_LISTENING, given={"first": 14}),
)

_TIME_IS_UP: Final = [(0, "")]
_sleep_until_killed = partial(Case, "sleep_until_killed")
_CALL: Final = (
    Case("call", "is sent", given={"channel": "there:5", "message": "hello"}, reply=[(...,)], on=POSTGRESQL),
    Case("unlogged", "is not refused", on=MYSQL),
    Case("listen", "the session has the name", given={"channel": "a name"}, reply=[(1,)], on=MYSQL),
    _sleep_until_killed(
        "who has been granted what they wait for",
        keys=[held(owner="w"), held("j", owner="x"), held("i", owner="me")],
        places=[*_LISTENING, waiter("me", 13, lock_key="i")],
        given={"places": '[["k", 12], ["j", 11], ["i", 12]]'},
        reply=[(12, "k"), (11, "j")],
        on=MYSQL,
    ),
    *(
        _sleep_until_killed(
            behaviour, keys=keys, places=_LISTENING, given={"places": asked}, reply=_TIME_IS_UP, on=MYSQL
        )
        for behaviour, keys, asked in (
            ("nobody yet", [held()], '[["k", 12]]'),
            ("of another key", [held(owner="w")], '[["j", 12]]'),
            ("of another ticket", [held(owner="w")], '[["k", 13]]'),
            ("who has another key", [held(), held("j", owner="w")], '[["k", 12]]'),
            ("who waits for another key", [held("j", owner="w")], '[["j", 12]]'),
            ("of nobody", [held(owner="w")], "[]"),
        )
    ),
)

_accept = partial(Case, "accept")
_ACCEPT: Final = (
    _accept(
        "the tenure counts from now, and the lease lasts a whole life",
        keys=[held(expires_at=At(3)), held("j", expires_at=At(3))],
        reply=[(7,)],
        after={"k": {"acquired_at": NOW, "expires_at": At(61)}},
    ),
    *lasts_longer("accept", [(7,)], {"acquired_at": NOW}),
    _accept("one that has ended is not revived", keys=[held(expires_at=At(-0.5))], places=[waiter("me", 12)]),
    _accept("not another owner's", keys=[held(owner="other")], places=[waiter("me", 12)]),
    _accept("not another key's", keys=[held("j")], places=[waiter("me", 12)]),
    _accept("not that of a free key", keys=[free()], places=[waiter("me", 12)]),
)

_INHERITED: Final = {**NEW, "owner": "heir", "ttl": 60.0, "reading": 0}

_adopt_place = partial(Case, "adopt_place")
_INHERIT: Final = (
    _adopt_place(
        "the place is another flow's, as it was",
        keys=[held(owner="other", last_ticket=12)],
        places=[waiter("me", 11), waiter("w", 12)],
        given={"reading": 0},
        reply=DONE,
        after={
            "me": None,
            "heir": {
                **waiter("me", 11, joined_at=Left(-1), expires_at=Left(4)),
                **_INHERITED,
                "channel": "new channel",
            },
        },
    ),
    _adopt_place("not one that has ended", keys=[free()], places=[waiter("me", 11, expires_at=At(-0.5))]),
    _adopt_place("not another one's", keys=[free()], places=[waiter("ME", 11), waiter("w", 12)]),
    _adopt_place(
        "not one that was served",
        keys=[free("j", served_ticket=3), free(last_ticket=12, served_ticket=11)],
        places=[waiter("me", 11), waiter("w", 12)],
        on=["sqlite"],
    ),
)

_RELAYED: Final = {**BEGUN, "owner": "heir"}

_hand_over_local = partial(Case, "hand_over_local")
_handed_over = partial(_hand_over_local, reply=[(CLOCK, ...)], after={"k": _RELAYED})


def _covered_here(
    behaviour: str,
    left: float,
    *,
    lasts: float = 0.0,
    covers: int = 1,
    covered: bool = True,
    fence: int = 7,
    reading: tuple[int, int] = (0, 1),
) -> Iterator[Case]:
    """A hand-over inside a process waits for the disk, unless the holder's own lease covers it until then."""
    number: Any = CLOCK if fence == 7 else fence + 1
    end = lasts or left
    before, now = reading
    expires_at = (At if lasts else Left)(end) if covered else At(61)
    yield _hand_over_local(
        f"a holder hands over what it holds, {behaviour}",
        keys=[held(fence=fence, expires_at=At(left), reading=before)],
        given={"fence": fence, "covers": covers, "reading": now},
        reply=[(number, (... if lasts else Left(end, 1000)) if covered else 0)],
        after={"k": {**_RELAYED, "fence": number, "expires_at": expires_at, "reading": now}},
        durable=not covered,
        on=POSTGRESQL,
    )


_RELAY: Final = (
    _handed_over("the next tenure begins", keys=[held(count=2), held("j")]),
    *_covered_here("without waiting for the disk, for what is left of its lease", 50),
    *_covered_here("for as long as was asked for, where more is left", 90, lasts=61),
    *_covered_here("waiting for the disk, if too little is left", 45, covered=False),
    *_covered_here("waiting, if somebody has a token, or nobody renews what begins", 90, covers=0, covered=False),
    *_covered_here("waiting, if the clock is behind the fence", 90, fence=AHEAD, covered=False),
    *_covered_here("waiting, by a reader to a writer", 50, reading=(1, 0), covered=False),
    *_covered_here("without, by a writer to a writer", 50, reading=(0, 0)),
    *_covered_here("without, by a reader to a reader", 50, reading=(1, 1)),
    _hand_over_local(
        "the fence exceeds the one before where that is ahead of the clock",
        keys=[held(fence=AHEAD)],
        given={"fence": AHEAD},
        reply=[(AHEAD + 1, ...)],
        after={"k": {**_RELAYED, "fence": AHEAD + 1}},
    ),
    *of_tenure("hand_over_local"),
    _hand_over_local("not that of a key of another kind", keys=[held(kind=2)], given={"kind": 1}),
    _handed_over(
        "a reader's tenure, to a writer",
        keys=[held(kind=1, reading=1)],
        given={"kind": 1, "reading": 0},
        after={"k": {**_RELAYED, "reading": 0}},
    ),
    _hand_over_local("not if somebody may wait in the queue", keys=[held(last_ticket=11)]),
    _handed_over("if a turn is left, then too", keys=[held(last_ticket=11)], given={"handovers_left": 1}),
    _hand_over_local("a turn that is left makes no tenure", keys=[held(owner="other")], given={"handovers_left": 1}),
    _hand_over_local("not while the key is pinned", keys=[held()], beside=[Do("pin")], reply=REFUSED),
)

_QUIT: Final = (
    Case(
        "leave_queue",
        "places of one process",
        places=[waiter("me", 11), waiter("w", 12), waiter("v", 13)],
        given=owners("me", "v"),
        reply=DONE * 2,
        after={"me": None, "v": None},
    ),
    Case("leave_queue", "none where there is none", places=[waiter("ME", 12)], given=owners("me")),
)

_KEYS: Final[Any] = [held(owner="other", last_ticket=13)]


_heartbeat = partial(Case, "heartbeat")


def _beats(behaviour: str, *named: str, **case: Any) -> Iterator[Case]:
    """A heartbeat answers whom it kept; on MySQL how many."""
    yield _heartbeat(behaviour, **case, keys=_KEYS, reply=[(name,) for name in named], on=("postgresql", "sqlite"))
    yield _heartbeat(behaviour, **case, keys=_KEYS, reply=DONE * len(named), on=MYSQL)


_BEAT: Final = (
    *_beats(
        "places last for longer",
        *("me", "v"),
        places=[waiter("me", 11), waiter("w", 12), waiter("v", 13)],
        given={**owners("me", "v"), "waiter_ttl": 9.0},
        after={"me": {"expires_at": At(9)}, "v": {"expires_at": At(9)}},
    ),
    *_beats("not for shorter", "me", places=[waiter("me", 11, expires_at=At(100))], given=owners("me")),
    *_beats("others' do not", places=[waiter("ME", 11), waiter("w", 12)], given={**owners("me"), "waiter_ttl": 9.0}),
    *_beats("one that has ended is not revived", places=[waiter("me", 11, expires_at=At(-0.5))], given=owners("me")),
    _heartbeat(
        "nor does one that was served last for longer, whatever was served of other keys",
        keys=[held(last_ticket=13, served_ticket=12), held("j", served_ticket=3)],
        places=[waiter("me", 12), waiter("v", 13), waiter("w", 9, lock_key="j")],
        given={**owners("me", "v", "w"), "waiter_ttl": 9.0},
        reply=[("v",), ("w",)],
        after={"v": {"expires_at": At(9)}, "w": {"expires_at": At(9)}},
        on=("sqlite",),
    ),
)


_FLOW: Final = "8" * FLOW
"""What the tokens of one flow begin with."""
_NAME: Final = _FLOW + "1"
_LINK: Final = ("me", "j", 11, "me host", 11, "me thread", _FLOW + "2", "circle of me")
"""`me` waits for `j`, which that flow holds."""


_chains = partial(Case, "chain")


def _nobody_waits(behaviour: str, holder: Any = None, **place: Any) -> Iterator[Case]:
    """Nobody waits for anybody: at the beginning of a chain, and at its second link."""
    key, waiting = holder or held(owner="other"), waiter(_NAME, 11, **place)
    yield _chains(f"it begins {behaviour}", keys=[key], places=[waiting], given={"owner": _NAME})
    yield _chains(
        f"it goes on {behaviour}",
        keys=[held("j", owner=_FLOW + "2"), key],
        places=[waiter("me", 11, lock_key="j"), waiting],
        reply=[_LINK],
    )


def _chain(behaviour: str, keys: Any, places: Any, *others: tuple[Any, ...]) -> Case:
    """A chain that begins with `me`."""
    return _chains(
        behaviour,
        keys=[held("j", owner=_FLOW + "2"), *keys],
        places=[waiter("me", 11, lock_key="j"), *places],
        reply=[_LINK, *others],
    )


_WAITS: Final = (
    *_nobody_waits("not with the dead", expires_at=At(-0.5)),
    *_nobody_waits("not for a lease that has ended", held(owner="other", expires_at=At(-0.5))),
    *_nobody_waits("not for a free key", free(expires_at=At(100), count=1)),
    *_nobody_waits("not with one who was served", held(owner=_NAME)),
    *_nobody_waits("nor when somebody else has the key since", held(owner="other", served_ticket=11)),
    *_nobody_waits("not for one that waits for the bearer of its token", held(owner="other", count=0)),
    *_nobody_waits("not for another key", lock_key="i"),
)

_OTHER: Final = waiter(_NAME, 11)
_LOWER: Final = "7" * FLOW
_THIRD: Final = _LOWER + "1"
_SECOND: Final = (_NAME, "k", 11, _OTHER["host"], 11, _OTHER["thread"], "other", _OTHER["circle"])

_CHAIN: Final = (
    _chain(
        "who waits for what, what its holder waits for, and so on",
        [held(owner=_LOWER + "2"), held("l", owner="other")],
        [_OTHER, waiter(_THIRD, 12, lock_key="l"), waiter("stranger", 12)],
        (*_SECOND[:6], _LOWER + "2", *_SECOND[7:]),
        (_THIRD, "l", 12, f"{_THIRD} host", 12, f"{_THIRD} thread", *_SECOND[6:-1], f"circle of {_THIRD}"),
    ),
    _chain("a circle ends", [held(owner="me")], [_OTHER], (*_SECOND[:6], "me", *_SECOND[7:])),
    _chain("it ends with a flow that waits for nothing", [held(owner="other")], [waiter("w", 11)]),
    _chain("not with a flow whose name is lower", [held(owner="other")], [waiter("7" * (FLOW + 1), 11)]),
    _chain("not with a flow whose name is higher", [held(owner="other")], [waiter("9" * (FLOW + 1), 11)]),
    _chains("nothing for who is in no queue", keys=[held(owner="other")], places=[waiter("w", 11)]),
)

_confirm = partial(Case, "confirm")
_CONFIRM: Final = (
    _confirm(
        "a waiter says which circle it sees itself in",
        keys=[held(owner="other"), held("j")],
        places=[waiter("me", 11), waiter("w", 12), waiter("ME", 11, lock_key="j")],
        reply=DONE,
        after={"me": {"circle": "new circle"}},
    ),
    _confirm("not one that is dead", places=[waiter("me", 11, expires_at=At(-0.5))]),
    _confirm("nor one that has gone", places=[waiter("w", 11)]),
)

_clear = partial(Case, "clear")
_cleared = partial(_clear, reply=DONE, after={"k": {"served_ticket": 12}})
_CLEAR: Final = (
    _cleared("a queue of nobody", keys=[free(last_ticket=12), free("j", last_ticket=12)]),
    _cleared(
        "a queue of the dead, of those who were served, and of another key's",
        keys=[free(last_ticket=12)],
        places=[waiter("w", 12, expires_at=At(-0.5)), waiter("v", 10), waiter("x", 12, lock_key="j")],
    ),
    _clear("not if somebody is alive", keys=[free(last_ticket=12)], places=[waiter("w", 12)]),
    _clear("not if somebody came since", keys=[free(last_ticket=13)]),
    _clear("nothing to be done where all are served", keys=[free(last_ticket=12, served_ticket=12)]),
    _clear(
        "not if somebody comes meanwhile",
        keys=[free(last_ticket=12)],
        beside=[Do("join", {}, [(...,)]), Do("announce", {"ticket": 13}, [(0,)])],
        commits=True,
        after={"k": {"last_ticket": ...}, "me": {**JOINED, "ticket": ...}},
        on=SERVERS,
    ),
)

_LONG_AGO: Final = At(-7200)

_DEAD: Final = (
    Case(
        "dead",
        "the next waiters, in order, and who of them has been dead for long",
        places=[
            waiter("w", 11, expires_at=_LONG_AGO),
            waiter("v", 12, expires_at=_LONG_AGO),
            waiter("u", 13, expires_at=At(-9)),
            waiter("t", 14),
            waiter("s", 15, expires_at=_LONG_AGO),
            waiter("r", 16, expires_at=_LONG_AGO),
        ],
        given={"after": "s"},
        reply=[("t", 0), ("u", 0), ("v", 1), ("w", 1)],
    ),
    Case(
        "dead",
        "a hundred at a time",
        places=[waiter(f"{n:04}", n, expires_at=_LONG_AGO) for n in range(101)],
        given={"after": ""},
        reply=[(f"{n:04}", 1) for n in range(100)],
    ),
)

_FORGET: Final = (
    Case(
        "forget",
        "those of many that ended long ago",
        places=[
            *(waiter(each, 11 + n, expires_at=_LONG_AGO) for n, each in enumerate(("me", "w", "v"))),
            waiter("u", 14),
        ],
        given=names("u", "w", "gone", "me"),
        reply=[*DONE, *DONE],
        after={"me": None, "w": None},
    ),
    Case("forget", "not one that ended just now", places=[waiter("me", 11, expires_at=At(-3000))], given=names("me")),
)

CASES: Final = (
    *_JOIN,
    *_ANNOUNCE,
    *_LOOK,
    *_GRANT,
    *_FIRST,
    *_CALL,
    *_ACCEPT,
    *_INHERIT,
    *_RELAY,
    *_QUIT,
    *_BEAT,
    *(*_WAITS, *_CHAIN),
    *_CONFIRM,
    *_CLEAR,
    *_DEAD,
    *_FORGET,
)
