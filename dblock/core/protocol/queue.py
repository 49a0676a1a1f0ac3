"""The queue of a key: how places are assigned, how the key is handed over, and why no waiter is forgotten.

Rule: as in `dblock.core.protocol.tenures`. This module says which waiter was granted what; `dblock.core.acquire`
notifies waiters, and waits.
"""

# Theory, in a comment: as a docstring it would cost every import
# ------
# A waiter has a row in `lock_waiters` with a *ticket*, higher than all tickets of the key before it, and a *place*: a
# lease of its own, which its process renews. The key's row carries two numbers, `last_ticket` and `served_ticket`.
# While they differ a flow may be waiting: no newcomer's take succeeds then, and the answer to a release says so. The
# releaser then hands the key over (`grant`): the first live waiter after `served_ticket` becomes the owner, with a new
# fence, and `served_ticket` becomes its ticket. So uncontended use reads two equal numbers in a row that it reads
# anyway, and pays nothing else.
#
#     join, announce        a ticket, and `last_ticket` is at least that
#     grant                 a tenure for the first live waiter, whose place ends, and `served_ticket` is its ticket
#     accept                the waiter makes its tenure's lease whole
#     clear                 no waiter in the queue is alive: `served_ticket` catches up
#     heartbeat             the place lasts longer
#     adopt_place           the place goes to another flow of the same process
#     leave_queue           the waiter leaves
#
# Why no wake-up is lost: the numbers are on the row that the releaser changes. A release that saw equal numbers came
# before the announcement in the order of that row's versions, so the announcement answers that the key is free; the
# waiter polls, and grants. A release that saw different numbers is followed by a grant, which begins after the
# announcement and so sees the waiter. (One statement that frees *and* grants would not do: under READ COMMITTED a
# statement that had to wait for the row reads its newest version, but sees other tables as of its own start, and misses
# the waiter that it waited for. A grant that hands over the releaser's own tenure is safe: it changes nothing when it
# finds no waiter, and the release follows.) `clear` acts only while `last_ticket` is what was read before.
#
# Why the heir may begin at once when it is notified of the grant: its place is a lease already. The place ends no
# earlier than `waiter_ttl` after the sending of the last statement, the join or a heartbeat, whose answer names it.
# Such a statement found the place, and a grant ends the place in the transaction that makes the tenure, so the grant
# came after it: the tenure, which ends with the place or one ttl after the grant, whichever is first, ends no earlier
# than
#
#     (local time of sending that statement) + min(waiter_ttl, ttl)
#
# and is trusted until a margin before that. A heartbeat that arrives after the grant finds no place: its answer does
# not name it, and extends nothing. The first renewal makes the lease whole. A heir that needs more from the beginning,
# because the rest is short or will not be renewed, accepts first. Heartbeats and accepts are durable, so that no crash
# undoes what a flow relies on (see `dblock.core.statements.postgresql`). So is a grant, unless it is *covered*.
#
# Why a holder may hand over its tenure without waiting for the disk: a crash undoes the latest commits, all of them
# from some moment on (a write-ahead log loses only its end, and a standby has a beginning of it). A covered grant
# replaces one tenure by another that ends no later. If a crash undoes it, with or without later grants, the row shows
# an earlier tenure of the same chain, which keeps the key closed for as long as the last heir trusts its own: its lease
# was cut to that of the tenure before it, and so on back to a statement that was durable. The key is not opened before
# that, for only the holder of that tenure could. That holder recorded that its tenure is over before it notified the
# heir (`Grant.handed_over`), and is the only source of the proof: a poll is followed by an accept,
# which is durable, and so makes everything before it durable. The heir finds its tenure gone, by its next statement,
# and whatever it wrote under a guard was undone with it or made it durable. The next fence is higher: the fence of a
# covered grant comes from the clock, and so does the next, later. (As everywhere, if the clock was not set back
# meanwhile.) So a crash may leave a key closed for the rest of one ttl, which is late, not wrong; and a queue that
# moves on costs a flush of the disk only now and then, when the lease that covers it has become short.
#
# The heir of a covered grant is also told when its tenure ends: how long after it joined the queue, by the database's
# clock. It trusts until then, counted from the sending of its join, and not from a heartbeat: a crash restores its
# place, and the next heartbeat finds the place, though the key was handed over before. (After a long wait, in which the
# two clocks may have drifted apart, it accepts first.) Nobody can attach to the tenure that a crash restores: it was
# held by the flow that handed it over, and its owner is no token's secret. No tenure covers another one where commits
# wait for standbys: a session may have stopped waiting for the standby, so that a row that is read is missing there.
#
# The notification carries the ticket, the fence, when the tenure ends and a *proof*, a digest of all these with the
# owner token: only the waiter and readers of the table know that token, and each token is of one attempt. So nobody
# else can forge a proof, and a message that comes twice or late states what was true; whether that is still of use the
# local clock decides. Any other message, or none, costs a poll: the waiter reads the row, and accepts the tenure that
# it was granted.
#
# Crashes: when a holder has died its lease ends, and then the first live waiter that polls grants the key to the first
# of the queue. A releaser that dies between release and grant leaves a free key with different numbers; each waiter
# that polls grants it to the first of the queue. A waiter that was granted the key and died loses it with its place
# at the latest. Waiters that died together expire together.
#
# A waiter that was passed over (its process was frozen, its place ended) finds `served_ticket` at or above its ticket,
# or no place of its own, and joins anew. Waiters poll in any case: the head of the queue often where not every releaser
# can notify it, others the less often the further back they are.
#
# The flows of one process that wait for a key share one place of this queue, see `dblock.core.acquire.local_queue`, and
# the key goes from one to the next without the queue:
#
#     hand_over_local       ends the tenure of a flow and begins one of the next in its process
#
# It is covered as a grant may be: the heir learns the length of its lease, and trusts it from the sending of the
# statement. It acts only while the queue is empty, or the process has turns left, so that waiters in the queue are
# overtaken a bounded number of times only. A flow that gives up transfers its place to the next of them
# (`adopt_place`).
#
# A waiter that leaves deletes its row, then reads whether it has been granted the key, and releases it if so. `grant`
# holds a lock on the waiter's row until it has committed, so one of the two comes first.

from __future__ import annotations

import hashlib
import hmac
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

from dblock.core.errors import LockStoreError
from dblock.core.protocol.sending import Database, send
from dblock.core.protocol.steps import Parameters, Steps
from dblock.core.protocol.tenures import tenure_of
from dblock.core.statements.base import Masked
from dblock.core.values import Grant, Tenure
from dblock.core.wakeup.local_socket import CHANNEL
from dblock.core.wakeup.registry import Message

DRIFT: Final = 100
"""In so many times the rest of a lease, the database's clock and the local one drift apart by less than its margin
covers: a tenth of the rest, where clocks are slewed by 500 parts in a million at most (as ntpd does it)."""
EVERYBODY: Final = 2**63 - 1
"""A ticket above all others: a status for it counts all waiters."""


class QueueStatus(NamedTuple):
    """The queue of a key, as seen from a waiter."""

    mine: bool
    """Whether the key was granted to it."""
    remaining: float
    """Seconds until the holder's lease ends; 0 or less without a holder: minus the seconds since there was one."""
    first: int
    """The first ticket that was not served."""
    last: int
    """The last ticket that was announced."""
    ahead: int
    """Number of live waiters before it, of the 16 nearest; 0 only if there are none at all."""
    present: bool
    """Whether its place exists."""


@dataclass(slots=True, eq=False)
class QueuePlace:
    """A place in the queue of a key: a lease, which the heartbeats of its process renew."""

    owner: str
    """The owner token of this attempt."""
    ticket: int
    sent: float
    """Local time of sending the last statement, join or heartbeat, whose answer named it."""
    seen: float
    """Local time of its flow's last activity."""
    joined: float
    """Local time of sending the join; a heartbeat does not change it."""

    def granted(self, message: Message, ttl: float, waiter_ttl: float) -> Grant | None:
        """The tenure of a flow that asked for `ttl`, by a notification; None if that does not prove it."""
        mine = proof(self.ticket, message.fence, message.lasts, self.owner)
        if not hmac.compare_digest(message.proof.encode(), mine.encode()):
            return None
        sent = self.sent  # once: a heartbeat moves it meanwhile
        term, waited = min(waiter_ttl, ttl), sent - self.joined
        if message.lasts:
            term = min(term, message.lasts / 1000 - waited)
            if waited > term * DRIFT:
                return None
        return Grant(Tenure(message.key, self.owner, message.fence), sent, ttl, self.ticket, term=term)


def proof(ticket: int, fence: int, lasts: int, owner: str) -> str:
    """A digest of a grant with the waiter's owner token; PostgreSQL computes the same for its notifications.

    Plain SHA-256 serves as a message authentication code here: all texts have one form, to which nothing can be
    appended, and the token, which has 128 random bits, authenticates one grant only.
    """
    return hashlib.sha256(f"{ticket} {fence} {lasts} {owner}".encode()).hexdigest()


def join(database: Database, request: Parameters, until: float) -> Steps[tuple[QueuePlace, QueueStatus | None] | None]:
    """Join the queue of a key with the owner token of this attempt; the place, and the status of the queue if known.

    None if the attempt has to start again: the key has no row, or another waiter has just got the same ticket.
    """
    dialect = database.dialect
    sent, rows = yield from send(database, dialect.join, {**request, "waiter_ttl": database.timing.waiter_ttl}, until)
    if not rows:
        return None
    owner = Masked(request["owner"])
    ticket, *answer = rows[0]
    if dialect.join_answers:
        remaining, first = answer
    else:
        remaining, first = (yield from announce(database, str(request["key"]), ticket, until)), 0
    # While the key is held that is enough to know; the other waiters matter at the next poll. The place may have ended.
    known = (dialect.join_answers or remaining > 0) and database.now() < sent + database.timing.waiter_ttl
    view = QueueStatus(False, remaining, first, ticket, 0, True) if known else None
    return QueuePlace(owner, ticket, sent, sent, sent), view


def announce(database: Database, key: str, ticket: int, until: float) -> Steps[float]:
    """Record in the key's row that the ticket was given out; returns the seconds until the holder's lease ends.

    0.0 if the key is not held, the ticket has been passed over, or the answer is not known.
    """
    parameters: Parameters = {"key": key, "ticket": ticket}
    _, rows = yield from send(database, database.dialect.announce, parameters, until, resend=True)
    return float(rows[0][0]) / 1000 if rows else 0.0


def status(
    database: Database, key: str, until: float, owner: str = "", ticket: int = EVERYBODY
) -> Steps[QueueStatus | None]:
    """The queue of a key as seen from a waiter; None if the key has no row."""
    parameters: Parameters = {"key": key, "owner": owner, "ticket": ticket}
    _, rows = yield from send(database, database.dialect.queue_status, parameters, until, resend=True)
    if not rows:
        return None
    mine, remaining, first, last, ahead, present = rows[0]
    return QueueStatus(bool(mine), float(remaining), int(first), int(last), int(ahead), bool(present))


def grant(
    database: Database, key: str, first: int, tenure: Tenure | None = None, *, here: str = "", until: float = math.inf
) -> Steps[tuple[str | None, Message] | None]:
    """Grant the key to the first live waiter from a ticket on, if it is free or `tenure`'s; returns how to notify it.

    That is the channel, empty if its process has none and None if the database has notified it, and the message. None
    if there is no waiter, a transaction pins the key, or another one is changing its row at this moment. `here`: prefix
    of the channels that this process can notify by itself. `until`: the local time after which it is not retried.
    """
    dialect, until = database.dialect, min(until, database.now() + database.timing.single_try)
    parameters: dict[str, str | int] = {
        "key": key,
        "first": first,
        "owner": "" if tenure is None else tenure.owner,
        "fence": 0 if tenure is None else tenure.fence,
        "here": here,
    }
    if dialect.grant_answers:
        _, rows = yield from send(database, dialect.grant, parameters, until, resend=tenure is None)
    else:
        found = yield from first_waiter(database, key, first, until)
        if found is None:
            return None
        ticket, channel, heir = found
        parameters["heir"] = heir
        _, rows = yield from send(database, dialect.grant, parameters, until, resend=tenure is None)
        rows = [(ticket, channel, heir, row[0], 0, None) for row in rows]
    if not rows:
        return None
    ticket, channel, owner, fence, lasts, notified = rows[0]
    message = Message(key, ticket, fence, lasts, proof(ticket, fence, lasts, owner))
    return (None if notified is not None else channel or ""), message


def first_waiter(
    database: Database, key: str, first: int, until: float = math.inf
) -> Steps[tuple[int, str, str] | None]:
    """The first live waiter from a ticket on: its ticket, where its process listens, its owner token."""
    asked: Parameters = {"key": key, "first": first}
    until = min(until, database.now() + database.timing.single_try)
    _, rows = yield from send(database, database.dialect.first_waiter, asked, until, resend=True)
    return (int(rows[0][0]), str(rows[0][1]), Masked(rows[0][2])) if rows else None


def call(database: Database, channel: str, message: Message) -> Steps[None]:
    """Let the database notify the process that listens on a channel, if it can."""
    statement = database.dialect.call
    if statement is not None and CHANNEL.fullmatch(channel):
        until = database.now() + database.timing.single_try
        _ = yield from send(database, statement, {"channel": channel, "message": message.text()}, until, resend=True)


def accept(database: Database, request: Parameters, ticket: int, until: float) -> Steps[Grant | None]:
    """The tenure of a waiter's owner token, now with a whole lease; None if it was not granted the key."""
    sent, rows = yield from send(database, database.dialect.accept, request, until, resend=True)
    return Grant(tenure_of(request, rows), sent, float(request["ttl"]), ticket) if rows else None


def adopt_place(database: Database, request: Parameters, owner: str, until: float) -> Steps[bool]:
    """Give the flow of `request` the place of another flow of its process, `owner`; False if that place is gone.

    Then `owner` may have been granted the key. Sent once: after a lost answer the flow joins the queue.
    """
    parameters: Parameters = {**request, "heir": request["owner"], "owner": owner}
    _, rows = yield from send(database, database.dialect.adopt_place, parameters, until)
    return bool(rows)


def clear(database: Database, key: str, last: int) -> Steps[None]:
    """Clear a queue without live waiters, unless a waiter has joined after ticket `last`."""
    parameters: Parameters = {"key": key, "last": last}
    until = database.now() + database.timing.single_try
    _ = yield from send(database, database.dialect.clear, parameters, until, resend=True)


def leave_queue(database: Database, owners: Sequence[str], seconds: float) -> Steps[int]:
    """Delete the places of these waiters, in so many seconds; returns how many there were, 0 if not known.

    A place that cannot be deleted now expires.
    """
    try:
        parameters: Parameters = {"owners": Masked(json.dumps(list(owners)))}
        until = database.now() + seconds
        _, rows = yield from send(database, database.dialect.leave_queue, parameters, until, resend=True)
    except LockStoreError:
        return 0
    return len(rows)


def heartbeat(database: Database, places: Sequence[QueuePlace], until: float) -> Steps[None]:
    """Extend many places; those that the answer names are trusted from this sending."""
    owners = Masked(json.dumps([place.owner for place in places]))
    parameters: Parameters = {"owners": owners, "waiter_ttl": database.timing.waiter_ttl}
    sent, rows = yield from send(database, database.dialect.heartbeat, parameters, until, resend=True)
    named = {row[0] for row in rows if row}  # MySQL only counts: all of them, or it is not known which
    for place in places:
        if place.owner in named or (not named and len(rows) == len(places)):
            place.sent = max(place.sent, sent)
