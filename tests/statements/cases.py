"""The words in which the cases of a statement are written.

A case is what is in the tables before, what is asked, what another session does meanwhile, and what is answered and in
the tables afterwards. Whatever it does not name is as it was: every other column and every other row.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Final, NamedTuple

from dblock.core.statements.base import Failure
from tests.conftest import DATABASES

SERVERS: Final = tuple(database for database in DATABASES if database != "sqlite")
MYSQL: Final = tuple(database for database in SERVERS if database != "postgresql")
POSTGRESQL: Final = ("postgresql",)
NOT_POSTGRESQL: Final = ("sqlite", *MYSQL)


class At(NamedTuple):
    """A time so many seconds from now: before, the moment of set-up; afterwards, the one of the statement."""

    seconds: float


class Left(NamedTuple):
    """So many seconds at the moment of set-up, and less by what has passed since; or the time that this was until."""

    seconds: float
    per_second: int = 1
    """1000: it is said in milliseconds."""


class Ago(NamedTuple):
    """So many seconds at the moment of set-up, and more by what has passed since."""

    seconds: float


class Answer(Enum):
    """What else a statement may come to."""

    NOTHING = "zero, or a little less"
    CLOCK = "the database's clock in microseconds, at the moment of the statement"
    REFUSED = "no row, or none because of somebody else's lock, which means the same to a caller"
    HINDERED = "nothing, as long as the other session's transaction lasts, be it said at once or not"
    WAITS = "nothing, as long as the other session's transaction lasts"


NOW: Final = At(0)
NOTHING: Final = Answer.NOTHING
CLOCK: Final = Answer.CLOCK
REFUSED: Final = Answer.REFUSED
HINDERED: Final = Answer.HINDERED
BUSY: Final = Failure.BUSY
LEVELS: Final = {
    "READ COMMITTED": "TRANSACTION ISOLATION LEVEL READ COMMITTED",
    "REPEATABLE READ": "TRANSACTION ISOLATION LEVEL REPEATABLE READ",
    "SERIALIZABLE": "TRANSACTION ISOLATION LEVEL SERIALIZABLE",
}
AHEAD: Final = 2**61
"""A number beyond every clock."""

Record = Mapping[str, Any]
Reply = Sequence[tuple[Any, ...]] | Failure | Answer
DONE: Final = [()]
"""One row was changed."""


@dataclass(frozen=True, slots=True, eq=False)
class Do:
    """Another session's statement: one of the lock's, or plain SQL."""

    statement: str
    given: Record = field(default_factory=dict)
    reply: Reply | None = None
    """What it must be answered; None: anything."""


@dataclass(frozen=True, slots=True)
class Case:
    """One thing that a statement does, or must not do."""

    statement: str
    behaviour: str
    keys: Sequence[Record] = ()
    """The rows of `locks` before."""
    places: Sequence[Record] = ()
    """The rows of `lock_waiters` before."""
    events: Sequence[Record] = ()
    """The rows of `lock_events` before."""
    epoch: Record = field(default_factory=dict)
    """What is otherwise in the row of `lock_epoch`, which this server wrote, and by which keys are open."""
    given: Record = field(default_factory=dict)
    """Parameters, where they are not the `REQUEST`."""
    reply: Reply | None = ()
    """Rows; `...` stands for any value and, at the end of a row, for any number of them. None: any reply."""
    after: Mapping[str, Record | None] = field(default_factory=dict)
    """What has changed, by `lock_key`, the place's `owner` or the event's `detail`: columns, or None for a row that is
    gone."""
    beside: Sequence[Do] = ()
    """What another session has done in a transaction that is open while the statement runs."""
    commits: bool = False
    """Whether that transaction commits as soon as the statement waits for it, or has been refused because of it (it is
    then sent again). Else it is rolled back once the statement has been answered."""
    since: Sequence[Do] = ()
    """What another session has done since the statement's own transaction read for the first time."""
    then: Sequence[Do] = ()
    """What another session does while the statement's own transaction is left open; both are rolled back."""
    session: str = ""
    """What the statement's session has set before, as `SET SESSION` takes it."""
    theirs: str = ""
    """What the session of `beside` has set before."""
    durable: bool | None = None
    """Whether the statement's commit is on disk before it answers. (PostgreSQL, where a session may choose.)"""
    shows: Mapping[str, str] = field(default_factory=dict)
    """PostgreSQL's settings as they are for the rest of the statement's transaction."""
    on: Sequence[str] = DATABASES

    def __str__(self) -> str:
        return f"{self.statement}: {self.behaviour}"


def described(word: str, pid: int) -> Record:
    """What a row says of its flow, in texts that begin with that word."""
    return {
        "label": f"{word} label",
        "host": f"{word} host",
        "pid": pid,
        "thread": f"{word} thread",
        "program": f"{word} program",
        "celery_task_id": f"{word} task",
    }


OLD: Final = described("old", 1)
NEW: Final = described("new", 2)
WHO: Final[Record] = {name: value for name, value in NEW.items() if name != "label"}
"""The columns that say who holds the key."""

REQUEST: Final[Record] = {
    **NEW,
    "task": NEW["celery_task_id"],
    "key": "k",
    "keys": '["j", "k"]',
    "number": 2,
    "owner": "me",
    "fence": 7,
    "heir": "heir",
    "ttl": 60.0,
    "life": 61.0,
    "count": 1,
    "fair": 1,
    "handovers_left": 0,
    "covers": 0,
    "min_hold": 0.0,
    "after": "",
    "names": '["k"]',
    "retention": 3600.0,
    "waiter_ttl": 5.0,
    "ticket": 12,
    "first": 11,
    "last": 12,
    "channel": "new channel",
    "circle": "new circle",
    "places": "[]",
    "seconds": 0,
    "here": "",
    "message": "hello",
    "kind": 0,
    "reading": 1,
    "door": "k",
    "admitted": 0,
    "holder": "",
    "holders_fence": 0,
    "low": "k\x1f",
    "high": "k ",
}
"""The parameters of a statement, where a case does not say otherwise."""


def held(key: str = "k", **differently: Any) -> Record:
    """The row of a key that `me` holds, for twenty seconds more."""
    return {
        **OLD,
        "lock_key": key,
        "owner": "me",
        "fence": 7,
        "count": 1,
        "ttl": 30.0,
        "acquired_at": At(-10),
        "expires_at": At(20),
        "last_ticket": 10,
        "served_ticket": 10,
        "revoked_fence": 6,
        "freed_fence": 5,
        "revocation": "root: please",
        "kind": 0,
        "reading": 0,
        "awaiting_fence": 6,
        "awaiting_channel": "old channel",
        **differently,
    }


def free(key: str = "k", **differently: Any) -> Record:
    """The row of a key that was given back five seconds ago."""
    return held(key, **{"owner": None, "count": 0, "expires_at": At(-5), **differently})


def waiter(owner: str, ticket: int, **differently: Any) -> Record:
    """A place in the queue of `k`, for four seconds more."""
    return {
        **described(owner, ticket % 1000),
        "owner": owner,
        "lock_key": "k",
        "ticket": ticket,
        "ttl": 90.0,
        "channel": "",
        "circle": f"circle of {owner}",
        "reading": 1,
        "joined_at": At(-1),
        "expires_at": At(4),
        **differently,
    }


def event(id_: int, detail: str, **differently: Any) -> Record:
    """Something that happened to `k`, three seconds ago."""
    return {
        **OLD,
        "id": id_,
        "lock_key": "k",
        "kind": "acquired",
        "fence": 7,
        "seconds": 0.5,
        "detail": detail,
        "happened_at": At(-3),
        **differently,
    }


def leases(*due: tuple[str, str, int], life: float = 61.0, not_notified: int = 1) -> Record:
    """The parameters that name many tenures, and whether their holders know that they were asked back."""
    named = [
        {"key": key, "owner": owner, "fence": fence, "life": life, "not_notified": not_notified}
        for key, owner, fence in due
    ]
    return {"leases": json.dumps(named)}


def names(*primary_keys: str) -> Record:
    """The parameters that name many rows to be deleted."""
    return {"names": json.dumps(primary_keys)}


def owners(*names: str) -> Record:
    """The parameters that name many places."""
    return {"owners": json.dumps(names)}
