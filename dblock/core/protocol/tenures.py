"""The protocol of one lock row: what a tenure is, how it begins, changes and ends.

Theory
------
A key's row is in one of three states, judged by the clock of the database that holds the row and by nothing else:

    free      owner is null
    held      owner is set and the clock has not reached expires_at
    expired   owner is set and the clock has reached expires_at: nobody holds it, nobody gave it back

and these are the moves without waiters (`dblock.core.protocol.queue` adds `grant`, `accept` and `hand_over_local`). A
*tenure* is one stay in `held`, named by (key, owner, fence); each move is one statement that commits on its own, never
part of a longer transaction (but see `joined` below):

    (no row) --create--> held       free --take--> held       expired --take--> held      a new tenure, a new fence
    held --extend, reenter, renew, attach, adopt, detach--> held                          the same tenure
    held --release, leave--> held, count - 1     or, from count 1,     free
    held, expired --free--> free                                                          from outside: `administration`
    held --time--> expired
    free, expired --reap, after the retention--> (no row)

Why at most one tenure is alive at a time: `take` changes a row only while no lease is alive on it, `create` only while
there is no row, and the database lets one statement at a time change a row. Every other statement names the whole
tenure, so whatever an earlier holder does late meets a fence that is not its own and changes nothing.

A guard stops new tenures for as long as a transaction of the holder's lasts, whatever becomes of its lease. First the
transaction *pins* the key: a lock of the database's own, which ends with the transaction and which every take needs but
no renewal does. Then the row is read on another connection, as it is committed now, whatever the transaction's snapshot
shows: if the tenure is alive, none can begin before the transaction ends.

Why fences strictly increase: fence = max(previous fence + 1, database clock in microseconds). The first term orders the
tenures of a row that lives, the second those of rows that were deleted, restored from a backup or never replicated:
a fence is at most the clock at the start of its tenure (it would take a million tenures a second to run ahead), and the
next row's fence is read from the clock later. A clock that was set back may be behind a row's fence: the reaper leaves
that row. It needs the clock not to be set back between a deletion and the next creation, and no statement to be under
way for longer than the reaper's retention. SQLite's clock ticks in milliseconds, so that a creation first lets one tick
pass and the reaper leaves rows of the present tick alone.

What a holder may believe: the lease in the row ends no earlier than ttl after its statement was *sent*. So trust ends
at (local time of sending the last statement that succeeded) + ttl - margin, on a clock that is only compared with
itself. An answer that comes after that moment is not a grant. `expires_at` is a `grace` later than the lease: nobody
has the key then, and nobody gets it either.

Who counts: the one flow that holds a tenure knows its count and sets it, so that a statement may be sent twice. Once a
token has been handed out (`detach`) several processes may hold it, and each adds and subtracts. After a lost answer an
addition may then have happened twice and a subtraction is not repeated: the count is at most too high, and the key free
at the end of the lease instead of at the last release. The first `detach` sets the count, too; it takes no effect once
the row shows that somebody else has attached, so that one which arrives late does not take that one's entry away.
(Which is left: one that was cut off and arrives after its own flow has attached again, takes that entry away.)

What may be lost: the database may crash right after its reply. Losing a take, an extend or a re-entry would let two in,
so they commit durably before the caller hears of them; losing a release or a deletion leaves a key taken until its
expiry or a row until the next reaping, so they need not (each says so in `dblock.core.statements.common`).

When the answer is lost: a statement was executed once or never, maybe later than we think. All but the takes set what
they set whatever was there, so they may be sent again. A take is followed by `accept`, which makes the lease whole if
the row shows the take's token, and each attempt has a token of its own: then the grant is ours. It has to be a write,
as durable as the take. For the row that a read shows may yet be taken back: InnoDB shows a commit before it is on disk,
and PostgreSQL shows one that a synchronous standby lacks, if the session that waited for the standby was ended. If the
row does not show it, the take may still be on its way, and the next attempt has another token: one that arrives late is
a stranger's, a lease that nobody relies on, gone after one ttl. An extend that may shorten the lease lowers trust
before it is sent.
(One thing is left: such an extend, cut off, that arrives after a later one for longer, cuts that one short.)

When the caller is interrupted (Ctrl-C, cancellation, any error) the same reading tells whether there is something to
give back. The lease's own expiry is the net under all of it.

`joined`: SQLite has one writer for the whole database, so inside the caller's write transaction the statements can
only run as part of it. Nobody else can write until that transaction ends, which is protection enough meanwhile; a
rollback takes the tenure away, and its release then finds nothing.

Rule of this module: pure generators and functions; no I/O, no sleeping, no clock but the one they are given.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final, NamedTuple

from dblock.core.errors import LockStoreError, Reason, StoreUnanswered
from dblock.core.log import warn
from dblock.core.protocol.sending import Database, send
from dblock.core.protocol.steps import Parameters, Rows, Steps, sleep
from dblock.core.statements.base import Statement, urgently
from dblock.core.values import Grant, Identity, LockInfo, Tenure

NOBODY: Final[Parameters] = {"host": "", "pid": 0, "thread": ""}


class Unresolved(StoreUnanswered):
    """A take was sent and not answered, and the row does not show it: it may yet arrive."""


def begin(database: Database, statement: Statement, request: Parameters, until: float) -> Steps[Grant | None]:
    """Begin a tenure with the statement `take` (a row that nobody holds) or `create` (a key without a row).

    `request` has all that the row is to say: key, owner, ttl, life (ttl + grace), label and who we are; the owner token
    is of this attempt alone. None if the statement found the key held or pinned, or no row to take, or one where it was
    to create it. `until` is the local time after which conflicts are not tried again. Raises Unresolved when the answer
    was lost for good.
    """
    if statement is database.dialect.create and database.dialect.tick:
        yield from sleep(database.dialect.tick)
    key, owner, ttl = str(request["key"]), str(request["owner"]), float(request["ttl"])
    sent = database.now()
    try:
        sent, rows = yield from send(database, statement, request, until)
    except StoreUnanswered as error:
        sent, rows = yield from send(database, database.dialect.queue.accept, request, until, resend=True)
        if not rows:
            raise Unresolved(str(error), key=key) from error.__cause__
    if not rows:
        return None
    return Grant(Tenure(key, owner, int(rows[0][0])), sent, ttl)


def inspect(database: Database, key: str) -> Steps[LockInfo | None]:
    """The key's row, or None where there is none."""
    return _row(database, database.dialect.inspect, key, database.now() + database.timing.patience)


def look(database: Database, key: str, until: float | None = None) -> Steps[LockInfo | None]:
    """The same in the midst of something, until that local time: before those who only ask."""
    end = database.now() + database.timing.patience if until is None else until
    return _row(database, urgently(database.dialect.inspect), key, end)


def _row(database: Database, statement: Statement, key: str, until: float) -> Steps[LockInfo | None]:
    _, rows = yield from send(database, statement, {"key": key}, until, resend=True)
    return info_of(key, rows[0]) if rows else None


def info_of(key: str, columns: Sequence[Any]) -> LockInfo:
    """The row of a key, by the columns that `inspect` answers."""
    owner, fence, count, ttl, age, remaining, label, host, pid, thread, program, task, *revocation = columns
    identity = Identity(host, pid, thread, program, task)
    return LockInfo(key, owner, fence, count, float(ttl), float(age), float(remaining), label, identity, *revocation)


def verify(database: Database, tenure: Tenure) -> Steps[bool]:
    """Is the tenure alive, by the database's word?"""
    info = yield from inspect(database, tenure.key)
    return _shows(info, tenure)


def pin(database: Database) -> Steps[Statement]:
    """The statement `pin` as sessions of the caller's are to run it, whatever table they mean by `locks`."""
    dialect, tables = database.dialect, database.dialect.tables
    if dialect.locate is not None:
        _, rows = yield from send(database, dialect.locate, {}, database.now() + database.timing.patience, resend=True)
        schema, galera = rows[0]
        if galera:
            warn("this is a Galera cluster, and guard() holds on one node only: let one node take all guarded writes")
        tables = replace(tables, schema=tables.schema or str(schema))
    return dialect.pin.over(tables, dialect.quote)


def extend(database: Database, tenure: Tenure, ttl: float, grace: float = 0.0) -> Steps[Grant | None]:
    """Let the lease end `ttl` seconds from now; None if the tenure is over."""
    parameters: Parameters = {**tenure._asdict(), "ttl": ttl, "life": ttl + grace}
    until = database.now() + min(database.timing.patience, ttl)
    sent, rows = yield from send(database, database.dialect.extend, parameters, until, resend=True)
    return Grant(tenure, sent, ttl) if rows else None


def reenter(database: Database, tenure: Tenure, count: int, ttl: float, grace: float = 0.0) -> Steps[Grant | None]:
    """Raise the count from `count` and let the lease last at least `ttl` seconds more; None if the tenure is over."""
    parameters: Parameters = {**tenure._asdict(), "count": count, "life": ttl + grace}
    until = database.now() + min(database.timing.patience, ttl)
    sent, rows = yield from send(database, database.dialect.reenter, parameters, until, resend=True)
    return Grant(tenure, sent, ttl) if rows else None


def renew(
    database: Database, leases: Sequence[tuple[Tenure, float]], until: float, unaware: Collection[Tenure] = ()
) -> Steps[tuple[float, Mapping[Tenure, str | None] | None]]:
    """Let each of many leases last its number of seconds more; when that was sent, and which are alive (None: all).

    One round trip, a second one only if some tenure is over, or was asked back while its holder is `unaware` of that:
    then it is alive, and was not renewed. With each that is alive comes by whom and why it was asked back, or None.
    `until` is the local time after which conflicts are not tried again; an answer is of use for as long as the longest
    of the leases. Raises StoreBusy at once if a stranger has locked one of the rows.
    """
    due = [{**tenure._asdict(), "life": life, "unaware": int(tenure in unaware)} for tenure, life in leases]
    parameters: Parameters = {"leases": json.dumps(due, ensure_ascii=False)}
    answer = database.now() + max(life for _, life in leases)
    sent, rows = yield from send(database, database.dialect.renew, parameters, until, resend=True, answer=answer)
    if len(rows) == len(leases):
        return sent, None
    _, rows = yield from send(database, database.dialect.alive, parameters, until, resend=True, answer=answer)
    return sent, {Tenure(key, owner, int(fence)): revoked for key, owner, fence, revoked in rows}


class WhyLost(NamedTuple):
    """What became of a tenure that is over."""

    reason: Reason
    holder: LockInfo | None = None
    """Who took the key over, if somebody did."""
    words: str = ""
    """By whom and why it was ended, where that was said."""


def why_lost(database: Database, tenure: Tenure) -> Steps[WhyLost]:
    """What became of a tenure that is over."""
    info = yield from look(database, tenure.key)
    if info is None or info.fence < tenure.fence:  # a crash, or a failover, has taken it back
        return WhyLost(Reason.GONE)
    heir = None if info.fence == tenure.fence else info.masked()
    if info.freed_fence == tenure.fence:
        return WhyLost(Reason.FREED, heir, info.revocation if info.revoked_fence <= info.freed_fence else "")
    if heir is not None:
        return WhyLost(Reason.TAKEN_OVER, heir)
    return WhyLost(Reason.EXPIRED if info.owner == tenure.owner else Reason.FREED)


def attach(
    database: Database, tenure: Tenure, request: Parameters, ttl: float, grace: float
) -> Steps[tuple[Grant, int] | None]:
    """Enter a tenure by its token, with the lease and the count that gives; None if the tenure is over.

    `request` says who we are.
    """
    parameters: Parameters = {**request, **tenure._asdict(), "life": ttl + grace}
    until = database.now() + min(database.timing.patience, ttl)
    sent, rows = yield from send(database, database.dialect.attach, parameters, until, resend=True)
    return (Grant(tenure, sent, ttl), int(rows[0][0])) if rows else None


def adopt(database: Database, tenure: Tenure, request: Parameters, ttl: float, grace: float) -> Steps[Grant | None]:
    """Enter a tenure by its token as the only one, with a lease of `ttl`; None if somebody is in it, or it is over."""
    parameters: Parameters = {**request, **tenure._asdict(), "ttl": ttl, "life": ttl + grace}
    until = database.now() + min(database.timing.patience, ttl)
    sent, rows = yield from send(database, database.dialect.adopt, parameters, until, resend=True)
    return Grant(tenure, sent, ttl) if rows else None


def detach(
    database: Database, tenure: Tenure, ttl: float, grace: float, *, count: int = 0, who: Parameters = NOBODY
) -> Steps[bool]:
    """Leave a tenure to the bearer of its token; False if it is over.

    `count` is that of the flow `who` if nobody else counts, and 0 if others do: then it is not sent again after a lost
    answer, and the count may stay one too high.
    """
    parameters: Parameters = {**who, **tenure._asdict(), "life": ttl + grace}
    statement, until = database.dialect.detach, database.now() + database.timing.patience
    try:
        if count:
            _, rows = yield from send(database, statement, {**parameters, "count": count}, until)
            if rows:
                return True
            count = 0  # somebody has attached, or it is over
        _, rows = yield from send(database, statement, {**parameters, "count": 0}, until)
        return bool(rows)
    except StoreUnanswered:
        if count:
            _, rows = yield from send(database, statement, {**parameters, "count": count}, until, resend=True)
            if rows:
                return True
    try:
        _, alive = yield from renew(database, [(tenure, ttl + grace)], until)
    except LockStoreError:
        return True
    return alive is None


class Left(NamedTuple):
    """What a statement that lowers the count has found."""

    in_time: bool
    """Was the tenure there?"""
    waiting: int = 0
    """The first ticket of those who may be waiting for the key, which is now to be handed over; 0 for none."""

    @classmethod
    def of(cls, rows: Rows, *, again: bool = False) -> Left:
        """By the statement's answer; sent again after a lost answer, one that finds nothing has found its own first."""
        return cls(True, int(rows[0][0])) if rows else cls(again)


def leave(database: Database, tenure: Tenure, min_hold: float, *, alone: bool) -> Steps[Left]:
    """Lower the count by one, to nobody's from 1, not before `min_hold` seconds of tenure.

    `alone` says that nobody else counts, so that it may be sent again.
    """
    parameters: Parameters = {**tenure._asdict(), "min_hold": min_hold}
    until = database.now() + database.timing.patience
    try:
        _, rows = yield from send(database, database.dialect.leave, parameters, until)
    except StoreUnanswered:
        if not alone:
            return Left(in_time=True)
        if until - database.now() < database.timing.worthwhile:
            raise
        _, rows = yield from send(database, database.dialect.leave, parameters, until, resend=True)
        return Left.of(rows, again=True)
    return Left.of(rows)


def release(database: Database, tenure: Tenure, count: int, until: float | None = None) -> Steps[Left]:
    """Lower the count from `count`, to nobody's from 1; not after that local time, if one is given."""
    parameters: Parameters = {**tenure._asdict(), "count": count}
    until = database.now() + database.timing.patience if until is None else until
    try:
        _, rows = yield from send(database, database.dialect.release, parameters, until)
    except StoreUnanswered:
        if until - database.now() < database.timing.worthwhile:
            raise
        _, rows = yield from send(database, database.dialect.release, parameters, until, resend=True)
        return Left.of(rows, again=True)
    return Left.of(rows)


def _shows(info: LockInfo | None, tenure: Tenure) -> bool:
    return info is not None and (info.owner, info.fence) == (tenure.owner, tenure.fence) and info.remaining > 0
