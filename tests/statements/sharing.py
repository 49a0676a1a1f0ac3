"""The cases of the statements on shares: the rows of readers and of permits, beside the key's own row, the door."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any, Final

from tests.statements.cases import (
    AHEAD,
    CLOCK,
    DONE,
    HINDERED,
    LEVELS,
    MYSQL,
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
    Record,
    free,
    held,
    names,
    waiter,
)
from tests.statements.keys import BEGUN, CREATED, MIN_HOLD, RELEASE, lasts_longer, of_tenure

NOT_MYSQL: Final = ("sqlite", *POSTGRESQL)
RWLOCK, SEMAPHORE = 1, 2
"""Kinds of keys."""
READER, OTHER_READER = "k\x1fr 01", "k\x1fr 02"
SLOT, OTHER_SLOT = "k\x1fp 00003", "k\x1fp 00004"
STRANGERS: Final = (
    held("j\x1fr 01", owner="stranger", kind=RWLOCK, reading=1),
    held("k x", owner="stranger"),
    held("kk", owner="stranger", kind=RWLOCK),
    held("kk\x1fr 01", owner="stranger", kind=RWLOCK, reading=1),
)
"""Keys that are no shares of `k`, though some come right before and behind them."""

# -- the tenure of a reader

_READING: Final[Record] = {"key": READER, "kind": RWLOCK, "reading": 0}
"""The parameters of a reader; its row says that it reads, whatever `reading` is."""
_READ_ROW: Final[Record] = {**CREATED, "lock_key": READER, "kind": RWLOCK, "reading": 1}
_BESIDE: Final = held(owner="other", kind=RWLOCK, reading=1)
"""A door that a reader has, who came through the queue."""
_WRITTEN: Final = held(owner="other", kind=RWLOCK)
"""A door that a writer has."""


def _reads(behaviour: str, door: Record, *, fence: Any = None, **case: Any) -> Case:
    """A reader is let in, with a fence right behind the door's, which stays as it is."""
    fence = door["fence"] + 1 if fence is None else fence
    given, keys = {**_READING, **case.pop("given", {})}, [door, *case.pop("keys", [])]
    after = {READER: {**_READ_ROW, "fence": fence}}
    return Case("read", behaviour, keys=keys, given=given, reply=[(fence,)], after=after, **case)


def _reads_not(behaviour: str, *keys: Record, **case: Any) -> Case:
    """A reader is refused."""
    return Case("read", behaviour, keys=keys, given={**_READING, **case.pop("given", {})}, **case)


def _after_a_writer(behaviour: str, door: Record, **case: Any) -> Iterator[Case]:
    """A door without a holder, and none that was a reader's: on MySQL readers then come through the queue."""
    yield _reads(behaviour, door, on=NOT_MYSQL, **case)
    yield _reads_not(behaviour, door, on=MYSQL, **case)


_MINE: Final[Record] = {"admitted": 1, "holder": "me", "holders_fence": 7}
"""The parameters of a writer that goes on as a reader."""
_QUEUED: Final[Record] = {**_BESIDE, "last_ticket": 12}


def _reads_while_a_writer_comes(level: str) -> Iterator[Case]:
    """A reader and a writer at once, at any level: the later one waits for the earlier, or is refused."""
    door, other = free(kind=RWLOCK, reading=1), {"owner": "other"}
    both: dict[str, Any] = {"session": LEVELS[level], "theirs": LEVELS[level], "on": SERVERS}
    reading, writing = {**_READING, **other}, {"kind": RWLOCK, "reading": 0}
    read, took = Do("read", reading, [(...,)]), Do("take", {**writing, **other}, [(...,)])
    writes: Any = partial(Case, "take", keys=[door], given=writing, beside=[read], **both)
    yield writes(f"a writer does not begin while a reader does ({level})", reply=HINDERED)
    yield writes(
        f"it begins when the reader has begun, and then finds it ({level})",
        commits=True,
        reply=[(CLOCK,)],
        after={"k": {**BEGUN, "reading": 0}, READER: {**_READ_ROW, **other, "fence": ...}},
    )
    yield _reads_not(f"not while a writer begins ({level})", door, beside=[took], reply=HINDERED, **both)
    yield _reads_not(
        f"nor when it has begun ({level})",
        door,
        beside=[took],
        commits=True,
        after={"k": {**BEGUN, **other, "fence": ..., "reading": 0}},
        **both,
    )
    yield _reads(
        f"two readers at once are none in each other's way ({level})",
        door,
        keys=[held(f"{READER}5", kind=RWLOCK)],  # between the two: InnoDB locks the gap beside a row just deleted
        beside=[Do("read", {**reading, "key": OTHER_READER}, [(...,)])],
        **both,
    )
    yield Case(
        "grant",
        f"a waiting writer is not granted the key while a reader begins ({level})",
        keys=[{**door, "last_ticket": 11}],
        places=[waiter("w", 11, reading=0)],
        given={"heir": "w"},
        beside=[Do("read", {**reading, "admitted": 1}, [(...,)])],
        reply=HINDERED,
        **both,
    )


_READ: Final = (
    _reads("a reader gets a row of its own, beside one that has the door", _BESIDE, keys=STRANGERS),
    _reads("beside one whose lease has ended", {**_BESIDE, "expires_at": At(-0.5)}),
    _reads("through a door that the last reader left", free(kind=RWLOCK, reading=1)),
    _reads("beside others", free(kind=RWLOCK, reading=1), keys=[held(OTHER_READER, owner="other", kind=RWLOCK)]),
    *_after_a_writer("through a door that a writer left", free(kind=RWLOCK)),
    *_after_a_writer("although the clock was set back since", free(kind=RWLOCK, expires_at=At(100))),
    _reads("through one whose writer's lease has ended", {**_WRITTEN, "expires_at": At(-0.5)}, on=("sqlite",)),
    _reads_not("not past a writer whose lease has ended", {**_WRITTEN, "expires_at": At(-0.5)}, on=SERVERS),
    _reads("with a fence beyond the door's", {**_BESIDE, "fence": AHEAD}, fence=AHEAD + 1),
    _reads_not("not by a name that is in use", _BESIDE, held(READER, owner="other", kind=RWLOCK), on=NOT_MYSQL),
    _reads_not("not where there is no door", free("j", kind=RWLOCK, reading=1), {**_BESIDE, "lock_key": "i"}),
    _reads_not("not through a door of another kind", {**_BESIDE, "kind": SEMAPHORE}),
    _reads_not("not while a writer has the door", _WRITTEN, held("j", owner="other", kind=RWLOCK, reading=1)),
    _reads_not("not even who was admitted", _WRITTEN, given={"admitted": 1}),
    _reads_not(
        "not while a transaction pins the door of a writer that is over",
        free(kind=RWLOCK),
        given={"admitted": 1},
        beside=[Do("pin")],
        reply=REFUSED,
    ),
    _reads("a pin is none where a reader had the door", free(kind=RWLOCK, reading=1), beside=[Do("pin")], on=SERVERS),
    _reads_not("not while a writer waits", _QUEUED, places=[waiter("v", 12), waiter("w", 11, reading=0)]),
    _reads_not("nor while one does behind a reader", _QUEUED, places=[waiter("v", 12, reading=0), waiter("w", 11)]),
    _reads(
        "who was admitted does not care for that",
        _QUEUED,
        places=[waiter("w", 11, reading=0)],
        given={"admitted": 1},
    ),
    _reads("a waiting reader is no obstacle", _QUEUED, places=[waiter("w", 11), waiter("v", 12)]),
    _reads("nor a dead writer", _QUEUED, places=[waiter("w", 11, reading=0, expires_at=At(-0.5))]),
    _reads("nor one that was served", _QUEUED, places=[waiter("w", 10, reading=0)]),
    _reads("nor one that waits for another key", _QUEUED, places=[waiter("w", 11, reading=0, lock_key="j")]),
    _reads(
        "nor one whose ticket was not announced",
        _BESIDE,
        places=[waiter("w", 11, reading=0)],
    ),
    _reads("a writer that has the door reads beside itself", held(kind=RWLOCK), given=_MINE),
    _reads_not("not beside another writer", _WRITTEN, given=_MINE),
    _reads_not("not beside a later one of its own", held(kind=RWLOCK, fence=8), given=_MINE),
    _reads_not("nor an earlier one", held(kind=RWLOCK, fence=6), given=_MINE),
    _reads_not("nor if its lease has ended", held(kind=RWLOCK, expires_at=At(-0.5)), given=_MINE),
    _reads_not("nor if the door is free, as another one may have written since", free(kind=RWLOCK), given=_MINE),
    _reads_not("nor beside a reader, which came later", {**_BESIDE, "fence": 9}, given=_MINE),
    _reads_not("nor if the last reader left the door", free(kind=RWLOCK, reading=1), given=_MINE),
    *(each for level in LEVELS for each in _reads_while_a_writer_comes(level)),
)

# -- the tenure of a permit

_PERMIT: Final[Record] = {"key": SLOT, "kind": SEMAPHORE}
_DOOR: Final = free(kind=SEMAPHORE)
_FREE_SLOT: Final = free(SLOT, kind=SEMAPHORE)


_take_slot = partial(Case, "take_slot")


def _takes(behaviour: str, *keys: Record, fence: Any = CLOCK, **case: Any) -> Case:
    """A permit is taken."""
    given, after = {**_PERMIT, **case.pop("given", {})}, {SLOT: {**BEGUN, "fence": fence}}
    return _take_slot(behaviour, keys=keys, given=given, reply=[(fence,)], after=after, **case)


def _takes_not(behaviour: str, *keys: Record, **case: Any) -> Case:
    """None is."""
    return _take_slot(behaviour, keys=keys, given={**_PERMIT, **case.pop("given", {})}, **case)


_TAKE_SLOT: Final = (
    _takes("a free slot is taken", _FREE_SLOT, _DOOR, free(OTHER_SLOT, kind=SEMAPHORE), *STRANGERS),
    _takes(
        "one whose lease has ended is taken",
        held(SLOT, owner="other", kind=SEMAPHORE, count=2, expires_at=At(-0.5)),
        _DOOR,
    ),
    _takes(
        "a free slot is taken although the clock was set back after its release",
        {**_FREE_SLOT, "expires_at": At(100)},
        _DOOR,
    ),
    _takes("beside others that are held", _FREE_SLOT, _DOOR, held(OTHER_SLOT, owner="other", kind=SEMAPHORE)),
    _takes_not("not one that is held", held(SLOT, owner="other", kind=SEMAPHORE), _DOOR, held(OTHER_SLOT)),
    _takes_not("not one without a row", free(OTHER_SLOT, kind=SEMAPHORE), _DOOR),
    _takes_not("not one of another kind", {**_FREE_SLOT, "kind": RWLOCK}, _DOOR),
    _takes_not("not where there is no door", _FREE_SLOT, {**_DOOR, "lock_key": "j"}),
    _takes_not("not by a door of another kind", _FREE_SLOT, {**_DOOR, "kind": RWLOCK}),
    _takes_not("not while somebody has the door", _FREE_SLOT, held(owner="other", kind=SEMAPHORE)),
    _takes_not(
        "not even by who cares for no queue",
        _FREE_SLOT,
        held(owner="other", kind=SEMAPHORE),
        given={"fair": 0},
    ),
    _takes(
        "when the lease of the door has ended", _FREE_SLOT, held(owner="other", kind=SEMAPHORE, expires_at=At(-0.5))
    ),
    _takes("by a free door although the clock was set back", _FREE_SLOT, {**_DOOR, "expires_at": At(100)}),
    _takes_not("not while somebody may wait at the door", _FREE_SLOT, {**_DOOR, "last_ticket": 11}),
    _takes("but by who cares for no queue", _FREE_SLOT, {**_DOOR, "last_ticket": 11}, given={"fair": 0}),
    _takes("a ticket of the slot itself is none of the door", {**_FREE_SLOT, "last_ticket": 11}, _DOOR),
    _takes(
        "the fence exceeds the one before where that is ahead of the clock",
        {**_FREE_SLOT, "fence": AHEAD},
        _DOOR,
        fence=AHEAD + 1,
    ),
    _takes_not("not a pinned one", _FREE_SLOT, _DOOR, beside=[Do("pin", {"key": SLOT})], reply=REFUSED),
    _takes("a pin of the door is no obstacle", _FREE_SLOT, _DOOR, beside=[Do("pin")], on=SERVERS),
)

# -- who has the door

_LONGER: Final = {"k": {"expires_at": At(61)}}
_NOW_ALONE: Final = {"acquired_at": NOW, "awaiting_fence": -7}


_alone = partial(Case, "alone")


def _not_alone(behaviour: str, share: Record) -> Case:
    return _alone(behaviour, keys=[held(kind=RWLOCK), share])


_ALONE: Final = (
    _alone(
        "there is no share: the tenure counts from now, and the lease lasts one life more",
        keys=[held(kind=RWLOCK, awaiting_fence=7), *STRANGERS],
        reply=DONE,
        after={"k": {**_LONGER["k"], **_NOW_ALONE}},
    ),
    *lasts_longer("alone", DONE, _NOW_ALONE),
    _not_alone("not beside a reader", held(READER, owner="other", kind=RWLOCK, reading=1)),
    _not_alone("nor one whose lease has ended", held(READER, owner="other", kind=RWLOCK, expires_at=At(-9))),
    _not_alone("nor a share that is free", free(SLOT, kind=RWLOCK)),
    _alone("nor many", keys=[held(kind=RWLOCK), held(READER), held(OTHER_READER), *STRANGERS]),
    *of_tenure("alone"),
)

_await_leaving = partial(Case, "await_leaving")
_SAYS: Final = {"awaiting_fence": 7, "awaiting_channel": "new channel", "expires_at": At(61)}
_awaits = partial(_await_leaving, reply=DONE, after={"k": _SAYS})
_AWAIT_LEAVING: Final = (
    _awaits(
        "the row says where its holder waits, and the lease ends one life from now",
        keys=[held(kind=RWLOCK), held("j"), held(READER)],
    ),
    _awaits("also one that lasts for longer", keys=[held(kind=RWLOCK, expires_at=At(100))]),
    _await_leaving("not once it was alone", keys=[held(kind=RWLOCK, awaiting_fence=-7, expires_at=At(100))]),
    _await_leaving(
        "it does not say so while a share is being left",
        keys=[held(kind=RWLOCK), held(READER, owner="other", kind=RWLOCK)],
        beside=[Do("leave_read", {"key": READER, "owner": "other"}, [(None, 7)])],
        reply=HINDERED,
        on=POSTGRESQL,
    ),
    _await_leaving(
        "nor while a permit is",
        keys=[held(kind=SEMAPHORE), held(SLOT, owner="other", kind=SEMAPHORE)],
        beside=[Do("leave_slot", {"key": SLOT, "owner": "other"}, [(None, 7)])],
        reply=HINDERED,
        on=POSTGRESQL,
    ),
    *of_tenure("await_leaving"),
)

# -- the shares of a key

_listed = partial(Case, "listed")
_LISTED: Final = (
    _listed(
        "the shares of a key, in order, and for how long they last",
        keys=[
            held(kind=RWLOCK),
            free("k\x1fp 00004"),
            held(OTHER_READER, owner="other", fence=8),
            held("k\x1fr 03", expires_at=At(-3)),
            held(READER),
            free("k\x1fp 00003", expires_at=At(100)),
            *STRANGERS,
        ],
        given={"most": 9},
        reply=[
            (SLOT, None, 7, NOTHING),
            (OTHER_SLOT, None, 7, Left(-5)),
            (READER, "me", 7, Left(20)),
            (OTHER_READER, "other", 8, Left(20)),
            ("k\x1fr 03", "me", 7, Left(-3)),
        ],
    ),
    _listed(
        "the first of them",
        keys=[held("k\x1fr 03"), held(OTHER_READER), held(READER)],
        given={"most": 2},
        reply=[(READER, ...), (OTHER_READER, ...)],
    ),
    _listed("none where there is none", keys=[held(), *STRANGERS], given={"most": 9}),
)

_end_expired = partial(Case, "end_expired", given=names(READER))
_ended = partial(_end_expired, reply=DONE, after={READER: None})
_END_EXPIRED: Final = (
    _end_expired(
        "those of many that have ended, or are free, go",
        keys=[
            held(READER, expires_at=At(-3)),
            held(OTHER_READER),
            free("k\x1fr 03"),
            held("k\x1fr 04", expires_at=At(-3)),
            held(kind=RWLOCK, expires_at=At(-3)),
        ],
        given=names(OTHER_READER, "k\x1fr 03", "gone", READER),
        reply=DONE * 2,
        after={READER: None, "k\x1fr 03": None},
    ),
    _end_expired("one that is alive stays", keys=[held(READER)]),
    _end_expired(
        "other keys can be taken while it runs",
        keys=[held(READER, expires_at=At(-0.5)), free("l"), free("a")],
        reply=DONE,
        then=[Do("take", {"key": each, "owner": "other"}, [(...,)]) for each in ("l", "a")],
        on=SERVERS,
    ),
    _ended("a free one goes although the clock was set back", keys=[free(READER, expires_at=At(100))]),
    _end_expired(
        "one that a transaction pins stays",
        keys=[held(READER, expires_at=At(-0.5))],
        beside=[Do("pin", {"key": READER})],
        reply=REFUSED,
    ),
    _end_expired(
        "one that is just being renewed stays",
        keys=[held(READER, expires_at=At(-0.5))],
        beside=[Do("UPDATE locks SET fence = 8, expires_at = '2999-01-01' WHERE lock_key > 'k'")],
        commits=True,
        after={READER: {"fence": 8, "expires_at": ...}},
        on=SERVERS,
    ),
)

# -- leaving

_AWAITED: Final[Record] = {"awaiting_fence": 7, "awaiting_channel": "there"}
_LEFT: Final = {"owner": None, "count": 0, "expires_at": NOW}


_DOORS: Final[Any] = (
    ("nobody waits for that", (None, 9), [held(owner="other", fence=9), held("j", **_AWAITED)]),
    ("the holder of the door does", ("there", 7), [held(owner="other", **_AWAITED), held("j", fence=8)]),
    ("it did, and gave the door back", (None, 7), [free(**_AWAITED), held("j", **_AWAITED)]),
    ("it did, in an earlier tenure", (None, 8), [held(owner="other", fence=8, **_AWAITED)]),
    ("there is no door", (None, None), [held("j", **_AWAITED)]),
)
"""Whether the holder of a door waits for the end of shares: where, and the fence, by the rows of keys."""


def _leaves(statement: str, share: str, gone: Record | None, otherwise: Any) -> Iterator[Case]:
    """A share is left: on PostgreSQL the answer says where the holder of the door waits."""
    leaves = partial(Case, statement, given={"key": share}, after={share: gone})
    for behaviour, awaited, keys in _DOORS:
        rows = [held(share, owner="me"), *keys, held("k\x1fq"), *STRANGERS]
        yield leaves(behaviour, keys=rows, reply=[awaited], on=POSTGRESQL)
        yield leaves(behaviour, keys=rows, reply=otherwise, on=NOT_POSTGRESQL)
    meanwhile = partial(
        leaves,
        keys=[held(kind=RWLOCK, **{**_AWAITED, "awaiting_fence": 6}), held(share, owner="other")],
        given={"key": share, "owner": "other"},
        beside=[Do("await_leaving", {}, DONE)],
        on=POSTGRESQL,
    )
    for level, session in LEVELS.items():
        yield meanwhile(
            f"it is not left while the holder of the door says that it waits ({level})",
            session=session,
            reply=HINDERED,
            after={},
        )
        yield meanwhile(
            f"when that was said, it answers where ({level})",
            session=session,
            commits=True,
            reply=[("new channel", 7)],
            after={"k": {**_SAYS, "expires_at": ...}, share: gone},
        )
    ended = [held(share, expires_at=At(-3)), held(owner="other")]
    yield leaves("one whose lease has ended can be left", keys=ended, reply=None)
    for behaviour, row in (
        ("not another key's", held(OTHER_READER)),
        ("not a free one", free(share)),
        ("not another owner's", held(share, owner="other")),
        ("not an earlier one of the same owner", held(share, fence=6)),
        ("nor a later one", held(share, fence=8)),
    ):
        yield leaves(behaviour, keys=[row, held(owner="other", **_AWAITED)], after={})


_LEAVE_SLOT: Final = (
    *_leaves("leave_slot", SLOT, _LEFT, [(0,)]),
    *(
        Case(
            "leave_slot",
            "its own pin is no obstacle",
            keys=[held(SLOT), held("j")],
            given={"key": SLOT},
            beside=[Do("pin", {"key": SLOT})],
            reply=reply,
            after={SLOT: _LEFT},
            on=databases,
        )
        for databases, reply in ((POSTGRESQL, [(None, None)]), (MYSQL, [(0,)]))
    ),
    *(replace(case, statement="leave_slot", on=NOT_POSTGRESQL) for case in (*RELEASE, *MIN_HOLD)),
)

_AWAITED_CASES: Final = tuple(
    Case("awaited", behaviour, keys=keys, reply=[awaited] if awaited[1] else []) for behaviour, awaited, keys in _DOORS
)

CASES: Final = (
    *_READ,
    *_TAKE_SLOT,
    *_ALONE,
    *_AWAIT_LEAVING,
    *_LISTED,
    *_END_EXPIRED,
    *_leaves("leave_read", READER, None, DONE),
    *_LEAVE_SLOT,
    *_AWAITED_CASES,
)
