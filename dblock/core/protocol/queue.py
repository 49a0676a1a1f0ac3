"""The queue of a key: how places are given out, how the key is handed over, and why nobody is forgotten.

Theory
------
A waiter stands in `lock_waiters` with a *ticket*, higher than all tickets of the key before it, and a *place*: a lease
of its own, which its process renews. The key's row carries two numbers, `last_ticket` and `served_ticket`. As long as
they differ somebody may be waiting: no newcomer's take succeeds then, and whoever frees the key is told and hands it
over (`grant`): the first live waiter after `served_ticket` becomes the owner, with a new fence, and `served_ticket` its
ticket. So uncontended use sees two equal numbers in a row that it reads anyway, and pays nothing else.

    join, announce        a ticket, and `last_ticket` is at least that
    grant                 a tenure for the first live waiter, whose place ends, and `served_ticket` is its ticket
    accept                the waiter makes its tenure's lease whole
    clear                 nobody in the queue is alive: `served_ticket` catches up
    heartbeat             the place lasts longer
    inherit               the place is another flow's of the same process
    leave_queue           the waiter goes

Why no wake-up is lost: the number is on the row that the releaser changes. A release that saw equal numbers came before
the announcement in the order of that row's versions, which so answers that the key is free; the waiter looks, and
grants. A release that saw different numbers is followed by a grant, which begins after the announcement and so sees the
waiter. (One statement that frees *and* grants would not do: under READ COMMITTED a statement that had to wait for the
row reads its newest version, but sees other tables as of its own start, and misses the waiter that it waited for. A
grant that hands over the releaser's own tenure is safe: it changes nothing when it finds nobody, and the release
follows.) `clear` acts only while `last_ticket` is what was read before.

Why the heir may begin at once, when it hears of the grant: its place is a lease already. The place ends no earlier than
`waiter_ttl` after the sending of the last statement, the join or a heartbeat, whose answer names it. Such a statement
found the place, and a grant takes it away in the transaction that makes the tenure, so the grant came after it: the
tenure, which ends with the place or one ttl after the grant, whichever is first, ends no earlier than

    (local time of sending that statement) + min(waiter_ttl, ttl)

and is trusted until a margin before that. A heartbeat that arrives after the grant finds no place: its answer does not
name it, and moves nothing. The first renewal makes the lease whole; whoever wants more from the beginning, because the
rest is short or nobody will renew it, accepts first. Heartbeats and accepts are durable, so that no crash takes back
what somebody relies on (`dblock.core.statements.postgresql` says it of each). So is a grant, unless it is *covered*.

Why a holder may hand over what it holds without waiting for the disk: what a crash takes back is the latest commits,
all from some moment on (a write-ahead log loses its end and no more, and what a standby has is a beginning of it). A
covered grant replaces one tenure by another that ends no later. Take it back, with all grants after it or without, and
the row shows an earlier tenure of the same chain, which keeps the key closed for as long as the last heir believes: its
lease was cut to that of the tenure before it, and so on back to a statement that was durable. Nobody opens the key
before that, for only its own holder could. That one has written down that its tenure is over before it told the heir
(`dblock.core.holding.held`), and is the only one who tells: a look is followed by an accept, which is durable, and so
makes everything durable that came before it. The heir finds its tenure gone, by its next statement, and whatever it
wrote under a guard went with it or made it durable. The next fence is higher: that of a covered grant is the clock's,
and so is the next, later. (As everywhere, if the clock was not set back meanwhile.) So a crash may leave a key closed
for the rest of one ttl, which is late, not wrong, and a queue that moves on costs no flush of the disk but every now
and then, when what covers it has become short.

What the heir is told then includes when its tenure ends: how long after it joined the queue, by the database's clock.
It trusts until then, counted from the sending of its join, and not from a heartbeat: a crash brings its place back,
and the next heartbeat finds that, though the key was handed over before. (After a long wait, in which the two clocks
may have gone apart, it accepts first.) A tenure of which somebody has a token is not covered by another one: who bears
the token could enter what a crash brings back. Nor is any where standbys are waited for: what is seen of a row may
have been given up waiting for, and not be there.

What the heir hears is its ticket, the fence, when it ends and a *proof*, a digest of all with its owner token:
nobody knows that but the waiter and who reads the table, and each token is of one attempt. So a stranger cannot make
one up, and one that comes twice or late says what was true; whether that is still of use is a matter of the local
clock. Any other message, or none, costs a look: the waiter asks the database, and accepts what it was granted.

Whoever dies in the middle: a releaser between release and grant leaves a free key with different numbers; each waiter
that looks grants it, to the first of the queue and not to itself. A waiter that was granted the key and died loses it
with its place at the latest. All that died together end together.

A waiter that was passed over (its process was frozen, its place ended) finds `served_ticket` at or above its ticket, or
no place of its own, and joins anew. It looks on its own, too, whatever anybody says: the head of the queue often where
not everybody can call it, others the less often the further back they stand.

The flows of one process that want a key stand behind one place of this queue, see `dblock.core.acquire.local_queue`,
and the key goes from one to the next without it:

    hand_over_local       ends the tenure of a flow and begins one of the next in its process

It acts only while nobody is in the queue, or a turn is left to the process, so that those who wait there are overtaken
a bounded number of times only. A flow that gives up leaves its place to the next of them (`inherit`).

A waiter that leaves deletes its row, then looks whether it has been granted the key, and gives it back if so. `grant`
holds a lock on the waiter's row until it has committed, so one of the two comes first.

Rule: as in `dblock.core.protocol.tenures`. What is here says who was granted what; who is woken for it, and how one
waits, is the business of `dblock.core.acquire`.
"""

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
from dblock.core.values import Grant, Tenure
from dblock.core.wakeup.registry import Message

DRIFT: Final = 100
"""In so many times what is left of a lease, the database's clock and ours may go apart by less than its margin covers:
a tenth of what is left, where clocks are slewed by 500 parts in a million at most (as ntpd does it)."""
EVERYBODY: Final = 2**63 - 1
"""A ticket that nobody has: whoever looks with it counts all."""


class QueueStatus(NamedTuple):
    """How a waiter stands."""

    mine: bool
    """Has the key been granted to it?"""
    remaining: float
    """Seconds until the holder's lease ends; 0 or less if nobody holds the key: for how long nobody has."""
    first: int
    """The first ticket that was not served."""
    last: int
    """The last ticket that was announced."""
    ahead: int
    """Live waiters before it, 16 at most."""
    present: bool
    """Is it in the queue?"""


class Granted(NamedTuple):
    """Whom the key was granted, and how to tell that one."""

    channel: str
    """Where its process listens; empty if nowhere."""
    message: Message
    """What it is to be told."""
    called: bool = False
    """Has the database told it?"""


@dataclass(slots=True, eq=False)
class Place:
    """A place in the queue of a key: a lease, which the heartbeats of its process renew."""

    owner: str
    """The owner token of this attempt."""
    ticket: int
    sent: float
    """The local time of sending the last statement that gave it its length, and whose answer named it."""
    seen: float
    """The local time at which its flow last did something about it."""
    joined: float
    """The local time of sending what made it: no heartbeat moves that."""

    def granted(self, message: Message, ttl: float, waiter_ttl: float) -> Grant | None:
        """The tenure that begins here, for a flow that asked for `ttl`; None if the message does not prove that."""
        mine = proof(self.ticket, message.fence, message.lasts, self.owner)
        if not hmac.compare_digest(message.proof.encode(), mine.encode()):
            return None
        term, waited = min(waiter_ttl, ttl), self.sent - self.joined
        if message.lasts:
            term = min(term, message.lasts / 1000 - waited)
            if waited > term * DRIFT:
                return None
        return Grant(Tenure(message.key, self.owner, message.fence), self.sent, ttl, self.ticket, term=term)


def proof(ticket: int, fence: int, lasts: int, owner: str) -> str:
    """A digest of a grant with the waiter's owner token, as PostgreSQL makes it for its notifications too.

    Plain SHA-256 serves as a message authentication code here: all texts have one form, in which nothing can be added,
    and the token, which has 128 random bits, authenticates one grant only.
    """
    return hashlib.sha256(f"{ticket} {fence} {lasts} {owner}".encode()).hexdigest()


def join(database: Database, request: Parameters, until: float) -> Steps[tuple[Place, QueueStatus | None] | None]:
    """Stand in the queue of a key with the owner token of this attempt; the place, and how it stands if that is known.

    None if that is to be tried anew: the key has no row, or somebody else has just drawn the same ticket.
    """
    queue = database.dialect.queue
    sent, rows = yield from send(database, queue.join, {**request, "waiter_ttl": database.timing.waiter_ttl}, until)
    if not rows:
        return None
    owner = str(request["owner"])
    ticket, *answer = rows[0]
    if queue.join_answers:
        remaining, first = answer
    else:
        remaining, first = (yield from announce(database, str(request["key"]), ticket, until)), 0
    # While somebody has the key it is enough to know that; the others count when it is time to look.
    known = queue.join_answers or remaining > 0
    view = QueueStatus(False, remaining, first, ticket, 0, True) if known else None
    return Place(owner, ticket, sent, sent, sent), view


def announce(database: Database, key: str, ticket: int, until: float) -> Steps[float]:
    """Let the key's row say that the ticket was given out; seconds until the lease ends, if somebody holds the key.

    0.0 if nobody does, or that ticket has been passed over, or that is not known.
    """
    parameters: Parameters = {"key": key, "ticket": ticket}
    _, rows = yield from send(database, database.dialect.queue.announce, parameters, until, resend=True)
    return float(rows[0][0]) / 1000 if rows else 0.0


def status(
    database: Database, key: str, until: float, owner: str = "", ticket: int = EVERYBODY
) -> Steps[QueueStatus | None]:
    """How the queue of a key stands for a waiter; None if the key has no row."""
    parameters: Parameters = {"key": key, "owner": owner, "ticket": ticket}
    _, rows = yield from send(database, database.dialect.queue.queue_status, parameters, until, resend=True)
    if not rows:
        return None
    mine, remaining, first, last, ahead, present = rows[0]
    return QueueStatus(bool(mine), float(remaining), int(first), int(last), int(ahead), bool(present))


def grant(
    database: Database, key: str, first: int, tenure: Tenure | None = None, *, here: str = "", until: float = math.inf
) -> Steps[Granted | None]:
    """Let the first live waiter from a ticket on have the key, if it is free or `tenure`'s; whom, if there was one.

    None also if a transaction pins the key, or somebody is changing its row at this moment. `here`: what the channels
    begin with which this process can call by itself. `until`: the local time after which it is not tried again.
    """
    queue, until = database.dialect.queue, min(until, database.now() + database.timing.handover_retry)
    parameters: dict[str, str | int] = {
        "key": key,
        "first": first,
        "owner": "" if tenure is None else tenure.owner,
        "fence": 0 if tenure is None else tenure.fence,
        "here": here,
    }
    if queue.grant_answers:
        _, rows = yield from send(database, queue.grant, parameters, until, resend=tenure is None)
    else:
        found = yield from first_waiter(database, key, first, until)
        if found is None:
            return None
        ticket, channel, heir = found
        parameters["heir"] = heir
        _, rows = yield from send(database, queue.grant, parameters, until, resend=tenure is None)
        rows = [(ticket, channel, heir, row[0], 0, None) for row in rows]
    if not rows:
        return None
    ticket, channel, owner, fence, lasts, called = rows[0]
    message = Message(key, ticket, fence, lasts, proof(ticket, fence, lasts, owner))
    return Granted(channel or "", message, called is not None)


def first_waiter(
    database: Database, key: str, first: int, until: float = math.inf
) -> Steps[tuple[int, str, str] | None]:
    """The first live waiter from a ticket on: its ticket, where its process listens, its owner token."""
    asked: Parameters = {"key": key, "first": first}
    until = min(until, database.now() + database.timing.handover_retry)
    _, rows = yield from send(database, database.dialect.queue.first_waiter, asked, until, resend=True)
    return (int(rows[0][0]), str(rows[0][1]), str(rows[0][2])) if rows else None


def call(database: Database, channel: str, message: Message) -> Steps[None]:
    """Let the database tell whoever listens on a channel, where it can."""
    statement = database.dialect.queue.call
    if statement is not None:
        until = database.now() + database.timing.handover_retry
        _ = yield from send(database, statement, {"channel": channel, "message": message.text()}, until, resend=True)


def accept(database: Database, request: Parameters, ticket: int, until: float) -> Steps[Grant | None]:
    """The tenure of a waiter's owner token, now with a whole lease; None if it was not granted the key."""
    key, owner, ttl = str(request["key"]), str(request["owner"]), float(request["ttl"])
    sent, rows = yield from send(database, database.dialect.queue.accept, request, until, resend=True)
    return Grant(Tenure(key, owner, int(rows[0][0])), sent, ttl, ticket) if rows else None


def inherit(database: Database, request: Parameters, owner: str, until: float) -> Steps[bool]:
    """Let the flow of `request` have the place of another one of its process, `owner`; False if that has none.

    Then it may have been granted the key. Sent once: whoever does not hear the answer joins the queue.
    """
    parameters: Parameters = {**request, "heir": request["owner"], "owner": owner}
    _, rows = yield from send(database, database.dialect.queue.inherit, parameters, until)
    return bool(rows)


def clear(database: Database, key: str, last: int) -> Steps[None]:
    """Forget a queue in which nobody is alive, unless somebody came after ticket `last`."""
    parameters: Parameters = {"key": key, "last": last}
    until = database.now() + database.timing.handover_retry
    _ = yield from send(database, database.dialect.queue.clear, parameters, until, resend=True)


def leave_queue(database: Database, owners: Sequence[str], patience: float | None = None) -> Steps[None]:
    """Let these waiters leave; what cannot be deleted now is nobody's when the place ends."""
    try:
        until = database.now() + (database.timing.undo_timeout if patience is None else patience)
        parameters: Parameters = {"owners": json.dumps(list(owners))}
        _ = yield from send(database, database.dialect.queue.leave_queue, parameters, until, resend=True)
    except LockStoreError:
        return


def heartbeat(database: Database, places: Sequence[Place], until: float) -> Steps[None]:
    """Let many places last for longer, and be trusted to, as far as the answer names them."""
    owners = json.dumps([place.owner for place in places])
    parameters: Parameters = {"owners": owners, "waiter_ttl": database.timing.waiter_ttl}
    sent, rows = yield from send(database, database.dialect.queue.heartbeat, parameters, until, resend=True)
    named = {row[0] for row in rows if row}  # from a database that counts only: all, or nobody knows whom
    for place in places:
        if place.owner in named or (not named and len(rows) == len(places)):
            place.sent = max(place.sent, sent)
