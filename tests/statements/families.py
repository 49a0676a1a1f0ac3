"""All cases: those of each statement, and what is the same for many of them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any, Final

from tests.conftest import DATABASES
from tests.statements import administrators, keys, sharing, waiters
from tests.statements.cases import AHEAD, BUSY, MYSQL, REFUSED, SERVERS, At, Case, Do, Record, held, waiter

_OF_EACH: Final = (*keys.CASES, *waiters.CASES, *sharing.CASES, *administrators.CASES)

DURABLE: Final = (
    "take",
    "create",
    "set_count",
    "extend",
    "renew",
    "attach",
    "detach",
    "accept",
    "hand_over_local",
    "grant",
    "heartbeat",
    "free",
    "revoke",
    "read",
    "take_slot",
    "await_leaving",
)
"""What is relied on: it may not be lost in a crash, even if the session has synchronous_commit = off."""
FAST: Final = (
    *("release", "reap", "join", "announce", "adopt_place", "leave_queue", "confirm", "clear", "forget"),
    *("note", "trim", "alone", "end_expired", "leave_read", "leave_slot"),
)
"""What may be lost, and so does not wait for the disk."""

_ROW: Final = Do("SELECT 1 FROM locks WHERE lock_key = 'k' FOR UPDATE")
_SHARES: Final = Do("SELECT 1 FROM locks WHERE lock_key > 'k' AND lock_key < 'k ' FOR UPDATE")
_PLACE: Final = Do("SELECT 1 FROM lock_waiters WHERE owner IN ('me', 'w') FOR UPDATE")
_EVENTS: Final = Do("SELECT 1 FROM lock_events FOR UPDATE")
_TABLES: Final = Do("LOCK TABLES locks WRITE, lock_waiters WRITE")
_CREATION: Final = Do(
    "INSERT INTO locks (lock_key, fence, count, ttl, acquired_at, expires_at, label, host, pid, thread, program,"
    " celery_task_id) VALUES ('k', 1, 0, 1, '2026-01-01', '2026-01-01', '', '', 1, '', '', '')"
)
_LATER: Final = ("renew", "join", "announce", "grant", "accept", "hand_over_local", "clear")
"""What is tried again."""
_OUTSIDE: Final = ("free", "revoke")
BOUNDED: Final = {
    "postgresql": {
        _ROW: (
            "take",
            "set_count",
            "extend",
            *_LATER,
            "attach",
            "detach",
            "release",
            "reap",
            *_OUTSIDE,
            *("read", "alone", "await_leaving", "leave_read", "leave_slot"),
        ),
        _SHARES: ("take_slot", "end_expired", "leave_read", "leave_slot"),
        _PLACE: ("grant", "adopt_place", "leave_queue", "heartbeat", "confirm", "forget"),
        _CREATION: ("create",),
        _EVENTS: ("trim",),
    },
    "mariadb": {
        _ROW: ("take", *_LATER, "reap", "read", "take_slot"),
        _SHARES: ("take_slot", "end_expired"),
        _PLACE: ("grant", "adopt_place", "leave_queue", "heartbeat", "confirm", "forget"),
        _CREATION: ("create",),
        _TABLES: (
            *("take", "create", *_LATER, "reap", "adopt_place", "leave_queue", "heartbeat", "confirm", "forget"),
            *("read", "take_slot", "end_expired"),
        ),
    },
    "mysql": {
        _ROW: ("take", *_LATER, "reap", "read", "take_slot"),
        _SHARES: ("take_slot", "end_expired"),
        _PLACE: ("grant", "forget"),
    },
}
"""Who does not wait for what a stranger has locked, and has not been granted: the protocol tries again."""


WRITING: Final = frozenset({*DURABLE, *FAST})
PINNED: Final = frozenset({"take", "create", "hand_over_local", "grant", "take_slot", "end_expired", "reap"})
"""What a transaction prevents that pins the key; all else goes on."""
_NEIGHBOUR: Final[dict[str, Any]] = {
    "keys": [held("a", owner="stranger")],
    "places": [waiter("stranger", 11, lock_key="a")],
    "beside": [
        Do("SELECT 1 FROM locks WHERE lock_key = 'a' FOR UPDATE"),
        Do("SELECT 1 FROM lock_waiters WHERE owner = 'stranger' FOR UPDATE"),
        Do("pin", {"key": "a"}),
    ],
}
"""A key before ours: InnoDB may lock the first row behind those that it looks for."""
_SCANNING: Final = {database: frozenset({"clear"}) for database in MYSQL}
"""It may read all waiters where there are few, and InnoDB locks what it reads: it is tried again."""


def _plain(statement: str, database: str) -> Case:
    """The first case of a statement: it does what it is for."""
    return next(case for case in _OF_EACH if case.statement == statement and database in case.on)


def _families() -> Iterator[Case]:
    for statement in DURABLE:
        case = replace(_plain(statement, "postgresql"), on=("postgresql",))
        behaviour = "it is on disk before it answers, though the session would not wait"
        yield replace(case, behaviour=behaviour, session="synchronous_commit = off", durable=True)
        behaviour = "a stronger setting of the session's is left alone"
        stronger = {"synchronous_commit": "remote_apply"}
        session = "synchronous_commit = remote_apply"
        yield replace(case, behaviour=behaviour, session=session, shows=stronger, after={})
    as_long = next(case for case in _OF_EACH if case.statement == "set_count" and case.given.get("life") == 0.0)
    behaviour = "it does not wait for the disk if the lease gets no longer"
    yield replace(as_long, on=("postgresql",), behaviour=behaviour, durable=False)
    kept_closed = next(case for case in _OF_EACH if case.statement == "release" and case.given.get("min_hold"))
    behaviour = "min_hold outlasts a crash"
    yield replace(
        kept_closed, on=("postgresql",), behaviour=behaviour, session="synchronous_commit = off", durable=True
    )
    for statement in FAST:
        behaviour = "it does not wait for the disk"
        yield replace(_plain(statement, "postgresql"), on=("postgresql",), behaviour=behaviour, durable=False)
    for database in SERVERS:
        for statement in ("take", "create", "take_slot"):
            case = _plain(statement, database)
            [(key, begun)] = case.after.items()
            others = Do(statement, {**case.given, "owner": "other"}, [(...,)])
            theirs = {key: {**(begun or {}), "owner": "other", "fence": ...}}
            case = replace(case, on=(database,), beside=[others], commits=True, reply=(), after=theirs)
            yield replace(case, behaviour="what somebody else begins is not begun once that has happened")
        for statement in sorted(WRITING - PINNED):
            case = replace(_plain(statement, database), on=(database,), beside=[Do("pin")])
            yield replace(case, behaviour="a pin is no obstacle")
        for statement in sorted(WRITING - _SCANNING.get(database, frozenset())):
            case = _plain(statement, database)
            rows: dict[str, Any] = {
                "keys": [*case.keys, *_NEIGHBOUR["keys"]],
                "places": [*case.places, *_NEIGHBOUR["places"]],
            }
            behaviour = "what a stranger has locked and pinned of other keys is no obstacle"
            yield replace(case, on=(database,), behaviour=behaviour, beside=_NEIGHBOUR["beside"], **rows)
    for database, locks in BOUNDED.items():
        for lock, names in locks.items() if database in DATABASES else ():
            for statement in names:
                behaviour = f"it does not wait for a stranger: {lock.statement}"
                case = replace(_plain(statement, database), on=(database,), behaviour=behaviour)
                yield replace(case, beside=[lock], reply=BUSY, after={})


ASKING: Final = (
    *("take", "create", "grant", "accept", "hand_over_local", "attach"),
    *("read", "take_slot", "end_expired", "reap"),
)
"""The statements that begin a tenure, let somebody enter one, or delete a row that keeps others out."""


def _of_epochs() -> Iterator[Case]:
    of_old = {"floor": AHEAD, "since": At(-1)}
    for database in SERVERS:
        for statement in ASKING:
            case = replace(_plain(statement, database), on=(database,))
            refused = replace(case, reply=REFUSED if case.reply else (), after={})
            yield replace(refused, behaviour="not while keys are closed", epoch={"opens_at": At(5)})
            yield replace(refused, behaviour="not on a server that did not write the row", epoch={"server": "other"})
            if database in MYSQL:
                dumped = {"history": 1234570}
                yield replace(refused, behaviour="not where a dump was restored", epoch=dumped)
            if statement != "create":
                yield replace(refused, behaviour="not a key whose old tenure may have been followed", epoch=of_old)
                behaviour = "an old tenure's key, once its ttl has passed since"
                later = {**of_old, "since": At(-100)}
                ended = {**of_old, "floor": -AHEAD}
                if statement != "read":
                    yield replace(case, behaviour=behaviour, epoch=later)
                    yield replace(case, behaviour="an old tenure's key, where nobody can trust one", epoch=ended)
                    continue
                yield replace(refused, behaviour="not behind an old fence, which a lost one may exceed", epoch=later)
                yield replace(refused, behaviour="not if the quarantine was ended, either", epoch=ended)
                mine = next(each for each in _OF_EACH if each.statement == "read" and each.given.get("holder"))
                mine = replace(mine, on=(database,))
                behaviour = "a writer of the old primary's time goes on as a reader, once its ttl has passed since"
                yield replace(mine, behaviour=behaviour, epoch=later)
                yield replace(mine, behaviour="not before that", epoch=of_old, reply=(), after={})


BEGINNING: Final = ("take", "grant", "take_slot", "end_expired", "reap")
"""Those that begin a tenure on the row of another one, or delete that."""


def _of_other_clocks() -> Iterator[Case]:
    """The end of a lease that an old primary wrote may be by its clock, whether or not a tenure can be missing."""
    ended, later = {"floor": -AHEAD}, {"floor": AHEAD, "since": At(-100)}
    cases = [each for each in _OF_EACH if each.after and each.keys and each.keys[0]["lock_key"] in each.after]
    cases = [each for each in cases if isinstance(each.reply, list) and len(each.reply) == 1 and not each.beside]
    for database in SERVERS:
        for statement in BEGINNING:
            plain = next(each for each in cases if each.statement == statement and database in each.on)

            def case(behaviour: str, epoch: Record, *, plain: Case = plain, on: str = database, **row: Any) -> Case:
                keys = [{**plain.keys[0], "fence": 7, **row}, *plain.keys[1:]]
                given = {**plain.given, "retention": 0.0, "owner": "me"}
                return replace(plain, behaviour=behaviour, on=(on,), keys=keys, given=given, epoch=epoch)

            for when, epoch in (("ended", ended), ("over", later)):
                behaviour = f"not as soon as an old lease seems to be over, though the quarantine is {when}"
                recent = case(behaviour, epoch, owner="x", expires_at=At(-0.5))
                yield replace(recent, reply=REFUSED, after={})
            yield case("when it is over by any clock", ended, owner="x", expires_at=At(-3))
            yield case("at once if it was given back", ended, owner=None, expires_at=At(-0.5))
            yield case("at once if it is of this epoch", {}, owner="x", expires_at=At(-0.5))


CASES: Final = (*_OF_EACH, *_families(), *_of_epochs(), *_of_other_clocks())


def cases_of(statement: str, database: str) -> list[Case]:
    """The cases of one statement on one database."""
    return [case for case in CASES if case.statement == statement and database in case.on]
