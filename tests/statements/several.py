"""The cases of the statements on several keys.

MySQL and MariaDB take those of the keys that are free, PostgreSQL and SQLite all or none.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, Final

from tests.conftest import DATABASES
from tests.statements.cases import (
    AHEAD,
    CLOCK,
    DONE,
    HINDERED,
    LEVELS,
    MYSQL,
    NOW,
    REFUSED,
    SERVERS,
    At,
    Case,
    Do,
    Record,
    free,
    held,
)
from tests.statements.keys import BEGUN

NOT_MYSQL: Final = tuple(database for database in DATABASES if database not in MYSQL)
_POSTGRESQL: Final = tuple(database for database in SERVERS if database not in MYSQL)


def several(*keys: str) -> Record:
    """The parameters that name several keys."""
    return {"keys": json.dumps(keys), "number": len(keys)}


def _takes(behaviour: str, *rows: Record, fence: Any = CLOCK, on: Any = DATABASES, **case: Any) -> Case:
    """Both keys are taken."""
    after = {key: {**BEGUN, "fence": fence} for key in ("j", "k")}
    return Case("take_several", behaviour, keys=rows, reply=[(fence,)] * 2, after=after, on=on, **case)


def _not_both(behaviour: str, *rows: Record, **case: Any) -> Iterator[Case]:
    """`k` cannot be taken, and `j` could."""
    yield Case("take_several", f"{behaviour}: none is", keys=[free("j"), *rows], on=NOT_MYSQL, **case)
    yield Case(
        "take_several",
        f"{behaviour}: the other one is",
        keys=[free("j"), *rows],
        reply=[(CLOCK,)],
        after={"j": BEGUN},
        on=MYSQL,
        **case,
    )


def _at_once(level: str) -> Iterator[Case]:
    """Two take sets at once that overlap and are in opposite order: none waits for the other in a circle."""
    rows = [free("j"), free(), free("l")]
    theirs = {**several("l", "k"), "owner": "other"}
    taken = {**BEGUN, "owner": "other", "fence": ...}
    both: dict[str, Any] = {"session": LEVELS[level], "theirs": LEVELS[level]}
    beside = [Do("take_several", theirs, [(...,)] * 2)]
    yield Case(
        "take_several",
        f"not while somebody takes one of the keys ({level})",
        keys=rows,
        beside=beside,
        reply=REFUSED,
        on=SERVERS,
        **both,
    )
    for database, reply, ours in ((_POSTGRESQL, [], {}), (MYSQL, [(CLOCK,)], {"j": BEGUN})):
        yield Case(
            "take_several",
            f"nor the one that was taken then ({level})",
            keys=rows,
            beside=beside,
            commits=True,
            reply=reply,
            after={"k": taken, "l": taken, **ours},
            on=database,
            **both,
        )
    yield Case(
        "take_several",
        f"sets that have no key in common are taken at once ({level})",
        keys=[free("i"), *rows],
        beside=[Do("take_several", {**theirs, **several("l", "i")}, [(...,)] * 2)],
        reply=[(CLOCK,)] * 2,
        after={"j": BEGUN, "k": BEGUN},
        on=SERVERS,
        **both,
    )
    yield Case(
        "take",
        f"one of several that are just taken is not taken alone ({level})",
        keys=rows,
        beside=beside,
        reply=REFUSED,
        on=SERVERS,
        **both,
    )


_TAKE_SEVERAL: Final = (
    _takes("several free keys are taken", free("j"), free(), free("i", fence=AHEAD), free("l")),
    *(
        Case(
            "take_several",
            "nobody is kept from other keys meanwhile, even if it scans the table",
            keys=[free("j"), free(), free("l"), held("m")],
            session=session,  # early among the cases: a prepared statement keeps its plan
            reply=[(CLOCK,)] * 2,
            then=[Do("take", {"key": "l", "owner": "other"}, [(...,)]), Do("pin", {"key": "m"}, [(1,)])],
            on=on,
        )
        for on, session in ((_POSTGRESQL, "random_page_cost = 1000000"), (MYSQL, ""))
    ),
    _takes("keys whose lease has ended are", free("j"), held(owner="other", count=2, expires_at=At(-0.5))),
    _takes("free keys are, although the clock was set back after their release", free("j", expires_at=At(9)), free()),
    _takes(
        "the order of the list does not matter",
        *(free("j"), free()),
        given=several("k", "j"),
    ),
    _takes(
        "the fence exceeds that of each where one is ahead of the clock",
        *(free("j", fence=AHEAD - 5), free(fence=AHEAD), free("l", fence=AHEAD + 7)),
        fence=AHEAD + 1,
        on=NOT_MYSQL,
    ),
    Case(
        "take_several",
        "one whose fence is ahead of the clock is not taken, as all have one fence",
        keys=[free("j"), free(fence=AHEAD)],
        reply=[(CLOCK,)],
        after={"j": BEGUN},
        on=MYSQL,
    ),
    *_not_both("one is held", held(owner="other")),
    *_not_both("one is held by who asks", held()),
    *_not_both("one has no row", free("l")),
    *_not_both("one is of another kind", free(kind=2)),
    *_not_both("somebody may wait for one", free(last_ticket=11)),
    *_not_both("one is held, and who asks does not care who waits", held(owner="other"), given={"fair": 0}),
    *_not_both("one differs in case", free("K")),
    _takes("who does not care who waits takes both", free("j"), free(last_ticket=11), given={"fair": 0}),
    Case("take_several", "none where none is free", keys=[held("j"), held(owner="other"), free("l")]),
    Case("take_several", "none where one is pinned", keys=[free("j"), free()], beside=[Do("pin")], reply=REFUSED),
    Case(
        "take_several",
        "nor where one was pinned in time and its lease has ended",
        keys=[free("j"), held(expires_at=At(-0.5))],
        given={"owner": "other"},
        beside=[Do("pin")],
        reply=REFUSED,
    ),
    _takes(
        "another key's pin is no obstacle",
        *(free("j"), free(), held("l")),
        beside=[Do("pin", {"key": "l"})],
        on=SERVERS,
    ),
    *(each for level in LEVELS for each in _at_once(level)),
    *(
        Case(
            "take_several",
            "one that is just changed is not taken once that has happened",
            keys=[free("j"), free()],
            beside=[Do("UPDATE locks SET owner = 'other', expires_at = '2999-01-01' WHERE lock_key = 'k'")],
            commits=True,
            reply=reply,
            after={"k": {"owner": "other", "expires_at": ...}, **ours},
            on=database,
        )
        for database, reply, ours in ((_POSTGRESQL, [], {}), (MYSQL, [(CLOCK,)], {"j": BEGUN}))
    ),
    Case(
        "take_several",
        "they are locked in the order of their keys, wherever the rows are",
        keys=[free(), free("j")],
        given=several("k", "j"),
        beside=[Do("SELECT 1 FROM locks WHERE lock_key = 'j' FOR UPDATE")],
        can="SELECT 1 FROM locks WHERE lock_key = 'k' FOR UPDATE NOWAIT",
        reply=HINDERED,
        on=_POSTGRESQL,
    ),
)

_FREED: Final = {"owner": None, "count": 0, "expires_at": NOW}


def _frees(behaviour: str, rows: list[Record], answer: list[tuple[str, int]], **case: Any) -> Iterator[Case]:
    """Some of the keys are given back; who may wait for them is answered where a statement can."""
    after = {key: _FREED for key, _ in answer}
    for reply, on in ((answer, NOT_MYSQL), (DONE * len(answer), MYSQL)):
        yield Case("release_several", behaviour, keys=rows, reply=reply, after=after, on=on, **case)


_RELEASE_SEVERAL: Final = (
    *_frees("the keys are free", [held("i"), held("j"), held(), held("l")], [("j", 0), ("k", 0)]),
    *_frees(
        "those who may wait are told of, from the first one not served",
        [held("j", last_ticket=10), held(last_ticket=15)],
        [("j", 0), ("k", 11)],
    ),
    *_frees("tenures whose lease has ended can still be given back", [held("j", expires_at=At(-3))], [("j", 0)]),
    *_frees("not another owner's tenure", [held("j"), held(owner="other")], [("j", 0)]),
    *_frees("not an earlier one of the same owner", [held("j"), held(fence=6)], [("j", 0)]),
    *_frees("nor a later one", [held("j"), held(fence=8)], [("j", 0)]),
    *_frees("nor one that was given back before", [held("j"), free()], [("j", 0)]),
    *_frees("nor that of a key, or an owner, that differs in case", [held("J"), held(owner="ME")], []),
)

_QUEUED: Final = [held("i", last_ticket=15), held("j"), held(last_ticket=15), held("l", last_ticket=12)]

_UNSERVED: Final = tuple(
    Case("unserved", behaviour, given=several("j", "k", "l", "z"), on=MYSQL, **case)
    for behaviour, case in (
        ("those of the keys that somebody may wait for", {"keys": _QUEUED, "reply": [("k", 11), ("l", 11)]}),
        ("free or not", {"keys": [free(last_ticket=15)], "reply": [("k", 11)]}),
        ("none where all were served", {"keys": [held("i", last_ticket=15), free("j"), held()]}),
        ("keys that differ in case are others", {"keys": [free("K", last_ticket=15)]}),
        (
            "what others have locked is no obstacle",
            {
                "keys": _QUEUED,
                "reply": [("k", 11), ("l", 11)],
                "beside": [Do("SELECT 1 FROM locks FOR UPDATE")],
            },
        ),
    )
)

CASES: Final = (*_TAKE_SEVERAL, *_RELEASE_SEVERAL, *_UNSERVED)
