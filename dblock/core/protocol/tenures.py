"""The protocol of one lock row: how a tenure begins, changes and ends.

Theory
------
A key's row is in one of three states, judged by the clock of the database that holds the row and by nothing else:

    free      owner is null
    held      owner is set and the clock has not reached expires_at, the end of the lease and its `grace`
    expired   owner is set and the clock has reached expires_at: it has no holder, and was not released

and these are the moves without waiters (`dblock.core.protocol.queue` adds `grant`, `accept` and `hand_over_local`). A
*tenure* is one stay in `held`, named by (key, owner, fence); each move is one statement that commits on its own, never
part of a longer transaction (but see `joined` below):

    (no row) --create--> held       free --take--> held       expired --take--> held      a new tenure, a new fence
    held --extend, renew, set_count--> held                   the same tenure
    held by a flow --detach--> detached --attach--> held by a flow                      the same tenure
    held --release--> free                                                                after its `min_hold`
    held, expired --free--> free                                                          from outside: `administration`
    held --time--> expired
    free, expired --reap, after the retention--> (no row)

Why at most one tenure is alive at a time: `take` changes a row only while no lease is alive on it, `create` only while
there is no row, and the database lets one statement at a time change a row. Every other statement names the whole
tenure, so a late statement of an earlier holder finds a fence that is not its own and changes nothing.

A guard stops new tenures while a transaction of the holder lasts, whatever happens to its lease. First the transaction
*pins* the key: a lock of the database itself, which ends with the transaction and which every take needs but no renewal
does. Then the row is read on another connection, as it is committed now, whatever the transaction's snapshot shows: if
the tenure is alive, none can begin before the transaction ends.

Why fences strictly increase: fence = max(previous fence + 1, database clock in microseconds). The first term orders the
tenures of an existing row, the second those of rows that were deleted, restored from a backup or never replicated:
a fence is at most the clock at the start of its tenure (it would take a million tenures a second to run ahead), and the
next row's fence is read from the clock later. A clock that was set back may be behind a row's fence: the reaper leaves
that row. It needs the clock not to be set back between a deletion and the next creation, and no statement to be under
way for longer than the reaper's retention. SQLite's clock ticks in milliseconds, so that a creation first lets one tick
pass and the reaper leaves rows of the present tick alone.

What a holder may believe: the lease in the row ends no earlier than ttl after its statement was *sent*. So trust ends
at (local time of sending the last statement that succeeded) + ttl - margin, on a clock that is only compared with
itself. An answer that comes after that moment is not a grant. `expires_at` is a `grace` later than the lease: in
between the key has no holder, and cannot be taken either.

One bearer: the owner names who holds the tenure, and a tenure changes hands by a change of its owner. The row says
which of two it is:

    count >= 1    a flow holds it, and has entered so often
    count = 0     it is detached: the owner is the secret of a token, and no flow holds it

`detach` makes a secret, and then puts it in the place of the owner; `attach` puts a new owner token of its flow in the
place of the secret. Both name the owner that they replace, the fence and a live lease. So one attach uses the token,
and every other one finds another owner; and the flow that detached renews and releases nothing any more. Both may be
sent twice, since each also accepts the owner that it sets, which is of this attempt alone. (Only a write can find out
what became of a lost answer: see below.) The secret names no flow and no machine: nobody takes it for a holder that
waits for another key, or that notifies its neighbours.

The count is that of the one flow's entries. Each re-entry, and each end of an inner block, sets it: so it is sent twice
without harm, and one that was interrupted needs no undoing. Nothing is decided by a count above 0.

What may be lost: the database may crash right after its reply. Losing a take, an extend or an attach would admit two
holders, so they commit durably before the caller gets the reply; losing a release or a deletion leaves a key taken
until its expiry or a row until the next reaping, so they need not (each says so in `dblock.core.statements.common`).

When the answer is lost: a statement was executed once or never, perhaps later than expected. All but the takes set
values regardless of the old ones, so they may be resent. A take is followed by `accept`, which makes the lease whole if
the row shows the take's token; as each attempt has a token of its own, the grant is then this attempt's. It has to be a
write, as durable as the take. For the row that a read shows may yet be undone: InnoDB shows a commit before it is on
disk, and PostgreSQL shows one that a synchronous standby lacks, if the session that waited for the standby was ended.
If the row does not show it, the take may still be under way, and the next attempt has another token: a take that
arrives late makes a tenure that no flow relies on, gone after one ttl. An extend that may shorten the lease lowers
trust before it is sent. (One case is left: such an extend that was cut off, and arrives after a later one for longer,
cuts that one short.)

After an interrupt of the caller the same read tells whether there is a tenure to release. In any case the lease
expires.

`joined`: SQLite has one writer for the whole database, so inside the caller's write transaction the statements can
only run as part of it. No other connection can write until that transaction ends, which is protection enough meanwhile;
a rollback undoes the tenure, and its release then finds nothing.

Rule: pure generators and functions; no I/O, no sleeping, no clock but the one they are given.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from dblock.core.errors import LockStoreError, LockTimeout, Loss, Reason, StoreUnanswered
from dblock.core.log import warn
from dblock.core.protocol import epoch
from dblock.core.protocol.sending import Database, send
from dblock.core.protocol.steps import Parameters, Rows, Steps, sleep
from dblock.core.statements.base import Masked, Statement, beside_writers
from dblock.core.values import SHARE, Grant, Identity, LockInfo, Tenure, key_of_share

if TYPE_CHECKING:
    from dblock.core.pinned import Pinned

find_pins: Callable[[Database, Collection[str], float], Steps[dict[str, Pinned]]] | None = None
"""Finds the transactions that pin keys without a holder, in a database, by a local time.

`dblock.operating.pins` sets it when it is imported. Until then no error names such a transaction.
"""


def begin(database: Database, statement: Statement, request: Parameters, until: float) -> Steps[Grant | None]:
    """Begin a tenure with the statement `take` (a row without a holder) or `create` (a key without a row).

    `request` has the columns of the row: key, owner, ttl, life, label and the flow's description; the owner token is of
    this attempt alone. `life` is ttl + grace, or less than ttl for a tenure that does not count yet: its row shows the
    ttl that it will have, for which it is closed after a failover. None if the key is held or pinned, or if there is no
    row to take, or already one to create. `until` is the local time after which conflicts are not retried. Raises
    StoreUnanswered if the answer was lost, and the row does not show the tenure: the statement may yet be executed.
    """
    if statement is database.dialect.create and database.dialect.tick:
        yield from sleep(database.store, database.dialect.tick)
    sent = database.now()
    try:
        sent, rows = yield from send(database, statement, request, until)
    except StoreUnanswered:
        try:
            sent, rows = yield from send(database, database.dialect.accept, request, until, resend=True)
        except LockStoreError:
            rows = []
        if not rows:
            raise
    if not rows:
        return None
    ttl, life = float(request["ttl"]), float(request["life"])
    return Grant(tenure_of(request, rows), sent, ttl, term=life if life < ttl else 0.0)


def tenure_of(request: Parameters, rows: Rows) -> Tenure:
    """The tenure that a request has begun, with the fence that its statement answers."""
    return Tenure(str(request["key"]), Masked(request["owner"]), int(rows[0][0]))


def inspect(database: Database, key: str, until: float | None = None) -> Steps[LockInfo | None]:
    """The key's row, or None where there is none; `until`: the local time after which it is not asked for again."""
    _, rows = yield from send(database, database.dialect.inspect, {"key": key}, until, resend=True)
    return info_of(key, rows[0]) if rows else None


def info_of(key: str, columns: Sequence[Any]) -> LockInfo:
    """The row of a key, from the columns that `inspect` answers."""
    owner, fence, count, ttl, age, remaining, label, host, pid, thread, program, task, *revocation = columns
    identity = Identity(host, pid, thread, program, task)
    return LockInfo(key, owner, fence, count, float(ttl), float(age), float(remaining), label, identity, *revocation)


def verify(database: Database, tenure: Tenure) -> Steps[bool]:
    """Whether the tenure is alive, according to the database."""
    info = yield from inspect(database, tenure.key)
    return _shows(info, tenure)


def pin(database: Database) -> Steps[Statement]:
    """The statement `pin` for sessions of the caller, which may resolve the name `locks` to another table."""
    dialect, tables = database.dialect, database.dialect.tables
    if dialect.locate is not None:
        _, rows = yield from send(database, dialect.locate, {}, resend=True)
        schema, galera = rows[0]
        if galera:
            warn("guard() holds on one node of a Galera cluster only: send all guarded writes to one node")
        tables = replace(tables, schema=tables.schema or str(schema))
    return dialect.pin.over(tables, dialect.quote)


def extend(database: Database, tenure: Tenure, ttl: float, grace: float = 0.0) -> Steps[Grant | None]:
    """Let the lease end `ttl` seconds from now; None if the tenure is over."""
    parameters: Parameters = {**tenure._asdict(), "ttl": ttl, "life": ttl + grace}
    until = database.now() + min(database.timing.retry_budget, ttl)
    sent, rows = yield from send(database, database.dialect.extend, parameters, until, resend=True)
    return Grant(tenure, sent, ttl) if rows else None


def set_count(
    database: Database, tenure: Tenure, count: int, ttl: float = 0.0, life: float = 0.0
) -> Steps[Grant | None]:
    """Set the number of entries; None if the tenure is over.

    With a `ttl` the lease lasts at least that long from now on, and the row at least one `life`, which costs a flush of
    the disk. Without one the number is only shown, and stays as it is while another transaction writes to a file of
    SQLite, which may be this flow's own.
    """
    parameters: Parameters = {**tenure._asdict(), "count": count, "life": life}
    statement = database.dialect.set_count if ttl else beside_writers(database.dialect.set_count)
    until = database.now() + min(database.timing.retry_budget, ttl or math.inf)
    sent, rows = yield from send(database, statement, parameters, until, resend=True)
    # A client of MySQL may count rows that were changed: not one that had this count already, and a lease long enough.
    alive = bool(rows) or (yield from verify(database, tenure))
    return Grant(tenure, sent, ttl) if alive else None


def renew(
    database: Database, leases: Sequence[tuple[Tenure, float]], until: float, not_notified: Collection[Tenure] = ()
) -> Steps[tuple[float, Mapping[Tenure, str | None] | None]]:
    """Renew many leases, each for its number of seconds; the time of sending, and the tenures alive (None: all).

    One round trip; a second one only if some tenure is over, or was asked back while its holder is `not_notified` of
    that: such a tenure is alive, but was not renewed. With each tenure alive comes by whom and why it was asked back,
    or None. `until` is the local time after which conflicts are not retried; an answer is awaited for as long as the
    longest of the leases. Raises StoreBusy at once if a transaction has locked one of the rows.
    """
    due = [{**tenure._asdict(), "life": life, "not_notified": int(tenure in not_notified)} for tenure, life in leases]
    parameters: Parameters = {"leases": Masked(json.dumps(due, ensure_ascii=False))}
    answer_by = database.now() + max(life for _, life in leases)
    sent, rows = yield from send(database, database.dialect.renew, parameters, until, resend=True, answer_by=answer_by)
    if len(rows) == len(leases):
        return sent, None
    _, rows = yield from send(database, database.dialect.alive, parameters, until, resend=True, answer_by=answer_by)
    return sent, {Tenure(key, owner, int(fence)): revoked for key, owner, fence, revoked in rows}


def why_lost(database: Database, tenure: Tenure) -> Steps[Loss]:
    """Read why a tenure is over."""
    return loss_of(tenure, (yield from inspect(database, tenure.key)))


def loss_of(tenure: Tenure, info: LockInfo | None) -> Loss:
    """Why a tenure is over, by the key's row."""
    if info is None and SHARE in tenure.key:  # a writer deletes the rows of readers whose lease is over
        return Loss(Reason.EXPIRED)
    if info is None or info.fence < tenure.fence:  # a crash, or a failover, has undone it
        return Loss(Reason.GONE)
    heir = None if info.fence == tenure.fence else info.masked()
    if info.freed_fence == tenure.fence:
        return Loss(Reason.FREED, heir, info.revocation if info.revoked_fence <= info.freed_fence else "")
    if heir is not None:
        return Loss(Reason.TAKEN_OVER, heir)
    if info.owner and info.owner != tenure.owner and info.remaining > 0:  # only a token changes the owner of a tenure
        return Loss(Reason.USED, info.masked())
    return Loss(Reason.EXPIRED if info.owner else Reason.FREED)


def attach(database: Database, tenure: Tenure, owner: str, request: Parameters) -> Steps[Grant | Loss]:
    """Hold the tenure that a token names under `owner`, a token of this attempt alone; or why it cannot be held.

    `request`: as for `begin`. Raises LockTimeout while keys are closed.
    """
    parameters: Parameters = {**request, **tenure._asdict(), "heir": owner}
    ttl = float(request["ttl"])
    until = database.now() + min(database.timing.retry_budget, ttl)
    while True:
        sent, rows = yield from send(database, database.dialect.attach, parameters, until, resend=True)
        if rows:
            return Grant(tenure._replace(owner=owner), sent, ttl)
        found = yield from epoch.read(database, until)
        info = yield from inspect(database, tenure.key)
        if info is None or not _shows(info, tenure):
            return loss_of(tenure, info)
        # Keys are closed; or they were until the server was found just now, or the hold was detached just now.
        if (yield from epoch.closed_for(database, info, until)) or database.now() >= until:
            message = f"could not enter {tenure.key!r} by its token: keys were {found}; try again then"
            raise LockTimeout(message, key=tenure.key)


def detach(database: Database, tenure: Tenure, secret: str, life: float) -> Steps[bool]:
    """Leave a tenure to the bearer of the token with that secret, for one `life`; False if it is over.

    It is also False if the token was used before the answer to a second sending (see `why_lost`).
    """
    parameters: Parameters = {**tenure._asdict(), "heir": secret, "life": life}
    _, rows = yield from send(database, database.dialect.detach, parameters, resend=True)
    return bool(rows)


def end(
    database: Database, statement: Statement, tenure: Tenure, min_hold: float = 0.0, until: float | None = None
) -> Steps[tuple[float, Rows]]:
    """End a tenure with the statement `release`, or that of a share with `leave_read` or `leave_slot`.

    A key that is released is free after `min_hold` seconds of the tenure. The rows: none if the tenure was over, or one
    that says who may be waiting (`UNKNOWN`: nobody, as far as is known). A release answers with the first ticket that
    has to be granted the key next, 0 for none. Not after the local time `until`, if given.
    """
    parameters: Parameters = {**tenure._asdict(), "min_hold": min_hold, "door": key_of_share(tenure.key)}
    return send(database, statement, parameters, until, resend=True, changes=True)


def _shows(info: LockInfo | None, tenure: Tenure) -> bool:
    return info is not None and (info.owner, info.fence) == (tenure.owner, tenure.fence) and info.remaining > 0
