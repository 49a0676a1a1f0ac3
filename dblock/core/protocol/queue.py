"""The queue of a key: how places are given out, how the key is handed over, and why nobody is forgotten.

Theory
------
A waiter stands in `lock_waiters` with a *ticket*, higher than all tickets of the key before it, and a *place*: a lease
of its own, which its process renews. The key's row carries two numbers, `last_ticket` and `served_ticket`. As long as
they differ somebody may be waiting: no newcomer's take succeeds then, and whoever frees the key is told and hands it
over (`grant`): the first live waiter after `served_ticket` becomes the owner, with a new fence, and `served_ticket` its
ticket. So uncontended use sees two equal numbers in a row that it reads anyway, and pays nothing else.

    join, announce        a ticket, and `last_ticket` is at least that
    grant                 a tenure for the first live waiter, and `served_ticket` is its ticket
    accept                the waiter makes its tenure's lease whole: from the sending of this it trusts the lock
    clear                 nobody in the queue is alive: `served_ticket` catches up
    heartbeat             the place lasts longer
    leave_queue           the waiter goes

Why no wake-up is lost: the number is on the row that the releaser changes. A release that saw equal numbers came before
the announcement in the order of that row's versions; the waiter looks after announcing, so it finds the key free, and
grants. A release that saw different numbers is followed by a grant, which begins after the announcement and so sees the
waiter. (One statement that frees *and* grants would not do: under READ COMMITTED a statement that had to wait for the
row reads its newest version, but sees other tables as of its own start, and misses the waiter that it waited for. A
grant that hands over the releaser's own tenure is safe: it changes nothing when it finds nobody, and the release
follows.) `clear` acts only while `last_ticket` is what was read before.

Whoever dies in the middle: a releaser between release and grant leaves a free key with different numbers; each waiter
that looks grants it, to the first of the queue and not to itself. A waiter that was granted the key and died loses it
with its place at the latest, because until it accepts the tenure's lease ends with that. All that died together end
together.

A waiter that was passed over (its process was frozen, its place ended) finds `served_ticket` at or above its ticket, or
its row gone, and joins anew. A message or a wake-up only says "look": whatever it says, the waiter asks the database,
and it also looks on its own: the head of the queue often where not everybody can call it, the others the less often the
further back they stand.

The flows of one process that want a key stand behind one place of this queue, see `dblock.core.acquire.local_queue`,
and the key goes from one to the next without it:

    hand_over_local       ends the tenure of a flow and begins one of the next in its process

It acts only while nobody is in the queue, or a turn is left to the process, so that those who wait there are overtaken
a bounded number of times only.

A waiter that leaves deletes its row, then looks whether it has been granted the key, and gives it back if so. `grant`
holds a lock on the waiter's row until it has committed, so one of the two comes first.

Rule: as in `dblock.core.protocol.tenures`. What is here says who was granted what; who is woken for it, and how one
waits, is the business of `dblock.core.acquire`.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Final, NamedTuple

from dblock.core.errors import LockStoreError
from dblock.core.protocol.sending import Database, send
from dblock.core.protocol.steps import Parameters, Steps
from dblock.core.values import Grant, Tenure

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
    """Whom the key was granted, and how to wake that one."""

    ticket: int
    channel: str | None = None
    """Where its process listens; None if the database did not say."""
    called: bool = False
    """Has the database called it there?"""


def join(database: Database, request: Parameters, until: float) -> Steps[tuple[int, QueueStatus | None] | None]:
    """Stand in the queue of a key with the owner token of this attempt; the ticket, and how it stands if that is known.

    None if that is to be tried anew: the key has no row, or somebody else has just drawn the same ticket.
    """
    queue = database.dialect.queue
    _, rows = yield from send(database, queue.join, {**request, "waiter_ttl": database.timing.waiter_ttl}, until)
    if not rows:
        return None
    if queue.join_answers:
        ticket, remaining, first, ahead = rows[0]
        return ticket, QueueStatus(False, remaining, first, ticket, ahead, True)
    ticket = int(rows[0][0])
    yield from announce(database, str(request["key"]), ticket, until)
    return ticket, None


def announce(database: Database, key: str, ticket: int, until: float) -> Steps[None]:
    """Let the key's row say that the ticket was given out."""
    parameters: Parameters = {"key": key, "ticket": ticket}
    _ = yield from send(database, database.dialect.queue.announce, parameters, until, resend=True)


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
    database: Database, key: str, first: int, tenure: Tenure | None = None, *, here: str = ""
) -> Steps[Granted | None]:
    """Let the first live waiter from a ticket on have the key, if it is free or `tenure`'s; whom, if there was one.

    None also if a transaction pins the key, or somebody is changing its row at this moment. `here`: what the channels
    begin with which this process can call by itself.
    """
    parameters: Parameters = {
        "key": key,
        "first": first,
        "owner": "" if tenure is None else tenure.owner,
        "fence": 0 if tenure is None else tenure.fence,
        "here": here,
    }
    queue, until = database.dialect.queue, database.now() + database.timing.handover_retry
    _, rows = yield from send(database, queue.grant, parameters, until, resend=tenure is None)
    if not rows:
        return None
    if not queue.grant_answers:
        return Granted(int(rows[0][0]))
    ticket, channel, called = rows[0]
    return Granted(ticket, channel or "", called is not None)


def first_waiter(database: Database, key: str, ticket: int) -> Steps[Granted | None]:
    """The first live waiter from a ticket on."""
    asked: Parameters = {"key": key, "ticket": ticket}
    until = database.now() + database.timing.handover_retry
    _, rows = yield from send(database, database.dialect.queue.channel, asked, until, resend=True)
    return Granted(int(rows[0][0]), rows[0][1]) if rows else None


def call(database: Database, key: str, ticket: int, channel: str) -> Steps[None]:
    """Let the database call whoever listens on a channel, where it can."""
    statement = database.dialect.queue.call
    if statement is not None:
        parameters: Parameters = {"key": key, "ticket": ticket, "channel": channel}
        _ = yield from send(
            database, statement, parameters, database.now() + database.timing.handover_retry, resend=True
        )


def accept(database: Database, request: Parameters, ticket: int, until: float) -> Steps[Grant | None]:
    """The tenure that a waiter was granted, now with a whole lease, and the waiter out of the queue; None without."""
    queue, key, owner, ttl = database.dialect.queue, str(request["key"]), str(request["owner"]), float(request["ttl"])
    sent, rows = yield from send(database, queue.accept, request, until, resend=True)
    if not rows:
        return None
    if not queue.accept_leaves:  # the ticket is served: its row does no harm until the place ends
        yield from leave_queue(database, owner, database.timing.handover_retry / 10)
    return Grant(Tenure(key, owner, int(rows[0][0])), sent, ttl, ticket)


def clear(database: Database, key: str, last: int) -> Steps[None]:
    """Forget a queue in which nobody is alive, unless somebody came after ticket `last`."""
    parameters: Parameters = {"key": key, "last": last}
    until = database.now() + database.timing.handover_retry
    _ = yield from send(database, database.dialect.queue.clear, parameters, until, resend=True)


def leave_queue(database: Database, owner: str, patience: float | None = None) -> Steps[None]:
    """Leave the queue; what cannot be deleted now is nobody's when the place ends."""
    try:
        until = database.now() + (database.timing.patience if patience is None else patience)
        _ = yield from send(database, database.dialect.queue.leave_queue, {"owner": owner}, until, resend=True)
    except LockStoreError:
        return


def heartbeat(database: Database, owners: Sequence[str], until: float) -> Steps[None]:
    """Let many waiters keep their places."""
    parameters: Parameters = {"owners": json.dumps(owners), "waiter_ttl": database.timing.waiter_ttl}
    _ = yield from send(database, database.dialect.queue.heartbeat, parameters, until, resend=True)
