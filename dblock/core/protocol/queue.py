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

Rule: as in `dblock.core.protocol.tenures`; who waits, and how, is the business of `dblock.core.acquire.waiting`.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Sequence
from typing import Any, Final, NamedTuple

from dblock.core.acquire import local_queue
from dblock.core.acquire.local_queue import HandoverOffer, LocalQueue, LocalWaiter
from dblock.core.errors import LockDeadlock, LockStoreError, LockTimeout, StoreUnanswered
from dblock.core.holding.flows import FLOW, current_flow
from dblock.core.protocol import tenures
from dblock.core.protocol.steps import Parameters, Steps, sleep, wait
from dblock.core.protocol.tenures import PATIENCE, Database
from dblock.core.values import Grant, Identity, LockInfo, Tenure
from dblock.core.wakeup import registry
from dblock.core.wakeup.local_socket import mailbox
from dblock.core.wakeup.registry import Wakeup

WAITER_TTL: Final = 5.0
"""Seconds for which a place in the queue lasts without a heartbeat."""
HEARTBEAT_INTERVAL: Final = WAITER_TTL / 3
"""Seconds between two beats."""
HANDOVER_RETRY: Final = 0.25
"""Seconds for which a hand-over is tried again after conflicts; then it is left to whoever looks next."""
_EVERYBODY: Final = 2**63 - 1


class View(NamedTuple):
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


def join(database: Database, request: Parameters, until: float) -> Steps[tuple[int, View | None] | None]:
    """Stand in the queue of a key with the owner token of this attempt; the ticket, and how it stands if that is known.

    None if that is to be tried anew: the key has no row, or somebody else has just drawn the same ticket.
    """
    queue = database.dialect.queue
    _, rows = yield from tenures.send(database, queue.join, {**request, "place": WAITER_TTL}, until)
    if not rows:
        return None
    ticket, *seen = rows[0]
    if seen:
        remaining, first, ahead = seen
        return ticket, View(False, remaining, first, ticket, ahead, True)
    yield from announce(database, str(request["key"]), ticket, until)
    return ticket, None


def announce(database: Database, key: str, ticket: int, until: float) -> Steps[None]:
    """Let the key's row say that the ticket was given out."""
    parameters: Parameters = {"key": key, "ticket": ticket}
    _ = yield from tenures.send(database, database.dialect.queue.announce, parameters, until, resend=True)


def status(database: Database, key: str, until: float, owner: str = "", ticket: int = _EVERYBODY) -> Steps[View | None]:
    """How the queue of a key stands for a waiter; None if the key has no row."""
    parameters: Parameters = {"key": key, "owner": owner, "ticket": ticket}
    _, rows = yield from tenures.send(database, database.dialect.queue.queue_status, parameters, until, resend=True)
    if not rows:
        return None
    mine, remaining, first, last, ahead, present = rows[0]
    return View(bool(mine), float(remaining), int(first), int(last), int(ahead), bool(present))


def grant(database: Database, key: str, first: int, tenure: Tenure | None = None) -> Steps[bool]:
    """Let the first live waiter from a ticket on have the key, if it is free or `tenure`'s; was there one?

    False also if a transaction pins the key, or somebody is changing its row at this moment.
    """
    parameters: Parameters = {
        "key": key,
        "first": first,
        "owner": "" if tenure is None else tenure.owner,
        "fence": 0 if tenure is None else tenure.fence,
        "here": mailbox().neighbourhood,
    }
    until = database.now() + HANDOVER_RETRY
    _, rows = yield from tenures.send(database, database.dialect.queue.grant, parameters, until, resend=tenure is None)
    if rows:
        registry.note_contention(database, key)
        yield from _call(database, key, *rows[0])
    return bool(rows)


def _call(database: Database, key: str, ticket: int, channel: str | None = None, called: object = None) -> Steps[None]:
    """Tell the waiter with that ticket, or else the next one, to look, if the database has not called its process."""
    queue = database.dialect.queue
    if called is not None or registry.notify(key, ticket):
        return
    with contextlib.suppress(LockStoreError):  # it looks for itself
        if channel is None:
            asked: Parameters = {"key": key, "ticket": ticket}
            _, rows = yield from tenures.send(
                database, queue.channel, asked, database.now() + HANDOVER_RETRY, resend=True
            )
            ticket, channel = rows[0] if rows else (ticket, "")
        if registry.notify(key, ticket) or not channel or mailbox().notify(channel, key, ticket):
            return
        if queue.call is not None:
            parameters: Parameters = {"key": key, "ticket": ticket, "channel": channel}
            _ = yield from tenures.send(database, queue.call, parameters, database.now() + HANDOVER_RETRY, resend=True)


def _remind(database: Database, key: str) -> Steps[None]:
    """Call whoever was granted the key last: those who granted it may not have come so far."""
    with contextlib.suppress(LockStoreError):
        view = yield from status(database, key, database.now() + HANDOVER_RETRY)
        if view is not None and view.remaining > 0:
            yield from _call(database, key, view.first - 1)


def accept(database: Database, request: Parameters, ticket: int, until: float) -> Steps[Grant | None]:
    """The tenure that a waiter was granted, now with a whole lease, and the waiter out of the queue; None without."""
    queue, key, owner, ttl = database.dialect.queue, str(request["key"]), str(request["owner"]), float(request["ttl"])
    sent, rows = yield from tenures.send(database, queue.accept, request, until, resend=True)
    if not rows:
        return None
    if not queue.accept_leaves:  # the ticket is served: its row does no harm until the place ends
        yield from quit_queue(database, owner, HANDOVER_RETRY / 10)
    return Grant(Tenure(key, owner, int(rows[0][0])), sent, ttl, ticket)


def deadlock(database: Database, owner: str, until: float) -> Steps[LockDeadlock | None]:
    """The circle of flows that the waiter `owner` is the youngest of, if there is one.

    A flow waits for one key at a time, so there is one way to follow: from a waiter to the holder of its key, and to
    what that one waits for. What is held by the bearer of a token counts for nobody: the row says who that is; nor does
    what this flow has lost, which ends by itself. Engines and aliases of a database do not matter: a flow that took the
    key through another one waits for itself. Two keys may have given out one ticket in the same tick of the clock: then
    the tokens decide.
    """
    _, rows = yield from tenures.send(database, database.dialect.queue.waits, {}, until, resend=True)
    waits = {(row[0][:FLOW], *row[3:6]): row for row in rows}
    row = next((row for row in rows if row[0] == owner), None)
    chain = list[Any]()
    while row is not None and row not in chain:
        chain.append(row)
        row = waits.get((row[6][:FLOW], *row[7:10]))
    if row is None or row[0] != owner or any((other[2], other[0]) > (row[2], row[0]) for other in chain):
        return None
    if not any(hold.tenure.owner == chain[-1][6] and hold.loss is None for hold in current_flow().holds.values()):
        return None
    cycle = tuple((str(each[1]), f"{each[3]} pid {each[4]}, {each[5]}") for each in chain)
    holders = [who for _, who in (*cycle[1:], cycle[0])]
    story = ", who ".join(f"waits for {key!r}, which {who} holds" for (key, _), who in zip(cycle, holders, strict=True))
    advice = "who came last gives way: leave all of its locks, and begin again"
    if len(chain) == 1:
        advice = "it took that lock through another engine or alias of the database: enter it again through the same"
    return LockDeadlock(f"deadlock: {holders[-1]} {story}; {advice}", key=cycle[0][0], cycle=cycle)


def quit_queue(database: Database, owner: str, patience: float = PATIENCE) -> Steps[None]:
    """Leave the queue; what cannot be deleted now is nobody's when the place ends."""
    try:
        until = database.now() + patience
        _ = yield from tenures.send(database, database.dialect.queue.leave_queue, {"owner": owner}, until, resend=True)
    except LockStoreError:
        return


def heartbeat(database: Database, owners: Sequence[str], until: float) -> Steps[None]:
    """Let many waiters keep their places."""
    parameters: Parameters = {"owners": json.dumps(owners), "place": WAITER_TTL}
    _ = yield from tenures.send(database, database.dialect.queue.heartbeat, parameters, until, resend=True)


def hand_over(database: Database, key: str, first: int = 0) -> Steps[bool]:
    """Give a key that nobody holds to the first of those who wait for it; False if it is free for anybody.

    `first` is the first ticket that was not served, 0 if not known. What goes wrong here is left to the waiters: the
    first of them is called, and goes on trying.
    """
    try:
        for _ in range(2):  # somebody may leave, and somebody come, between two statements
            if first and (yield from grant(database, key, first)):
                return True
            view = yield from status(database, key, database.now() + HANDOVER_RETRY)
            if view is None or view.first > view.last:
                return False
            if view.remaining > 0:
                return True
            if not view.ahead:
                until = database.now() + HANDOVER_RETRY
                parameters: Parameters = {"key": key, "last": view.last}
                _ = yield from tenures.send(database, database.dialect.queue.clear, parameters, until, resend=True)
                return False
            first = view.first
        yield from _call(database, key, first)
    except LockStoreError:
        return True
    return True


def release(database: Database, tenure: Tenure, count: int, ticket: int = 0) -> Steps[bool]:
    """Lower the count from `count`, from 1 to whoever waits next; False if the tenure was over before.

    A tenure that waited itself (`ticket`) knows that others may: it hands over in one statement what it holds.
    """
    passed: bool | None = False
    if ticket and count == 1:
        passed = yield from _grant_ours(database, tenure, ticket + 1)
        if passed:
            return True
    first = yield from tenures.release(database, tenure, count)
    if first:
        _ = yield from hand_over(database, tenure.key, first)
    if first is None and passed is None:  # it was handed over, but the answer was lost
        yield from _remind(database, tenure.key)
        return True
    return first is not None


def pass_on(database: Database, tenure: Tenure, ticket: int, turn: int) -> Steps[bool]:
    """Give the key to whoever is next: a flow of this process, else of the queue; False if the tenure was over before.

    `turn` says how often in a row it has gone to a flow of this process before.
    """
    passed: bool | None = False
    offer, orphan = None, ""
    try:
        try:
            line = local_queue.line_for(database, tenure.key)
            offer = None if line is None else line.choose(tenure)
            if line is not None and offer is not None:
                passed = None
                passed = yield from _hand_over_local(database, line, offer, ticket, turn)
            # What was handed over, though the answer was lost, is no more to be released.
            ended = passed or (yield from release(database, tenure, 1, ticket)) or passed is None
        finally:  # only now: whoever was chosen may look whether it has the key, or never will
            if not passed:
                orphan = local_queue.freed(database, tenure.key, offer, known=passed is not None)
    except GeneratorExit:
        raise
    except BaseException as error:
        # Interrupted: sending it twice is harmless. Nothing replaces the interrupt.
        with contextlib.suppress(LockStoreError):
            if not (passed or isinstance(error, LockStoreError) or (yield from release(database, tenure, 1))):
                yield from _remind(database, tenure.key)
        if orphan:
            yield from give_back(database, tenure.key, orphan, HANDOVER_RETRY)
        raise
    if orphan:
        yield from give_back(database, tenure.key, orphan)
    return ended


def leave(database: Database, tenure: Tenure, min_hold: float, *, alone: bool) -> Steps[bool]:
    """Lower the count by one, from 1 to whoever waits next; False if the tenure was over before."""
    first = yield from tenures.leave(database, tenure, min_hold, alone=alone)
    if first:
        _ = yield from hand_over(database, tenure.key, first)
    return first is not None


def give_back(database: Database, key: str, owner: str, patience: float = PATIENCE) -> Steps[None]:
    """Free whatever a take that was broken off may have left behind; errors are left to the lease's expiry.

    The server may still be executing the take when we look first, so we look twice.
    """
    try:
        for pause in (0.0, 0.05):
            if pause > patience:
                return
            if pause:
                yield from sleep(pause)
            info = yield from tenures.inspect(database, key, database.now() + patience)
            if info is not None and info.owner == owner:
                _ = yield from release(database, Tenure(key, owner, info.fence), 1)
                return
    except Exception:  # noqa: BLE001 - must not hide what broke the take off
        return


def _grant_ours(database: Database, tenure: Tenure, first: int) -> Steps[bool | None]:
    """Hand over what we hold; None if the answer was lost."""
    try:
        return (yield from grant(database, tenure.key, first, tenure))
    except StoreUnanswered:
        return None
    except LockStoreError:
        return False  # the release has the last word


def _hand_over_local(
    database: Database, line: LocalQueue, offer: HandoverOffer, ticket: int, turn: int
) -> Steps[bool | None]:
    """Hand the key to the flow of this process that it was offered to; None if it is not known what became of that."""
    (heir, token, tenure, _), statement = offer, database.dialect.queue.hand_over_local
    try:
        yield from wait(0.0, Wakeup())
    except LockTimeout:  # inside a transaction that may take it all back
        return False
    parameters: Parameters = {
        **heir.request,
        **tenure._asdict(),
        "heir": token,
        "turns": max(local_queue.MAX_LOCAL_HANDOVERS - turn, 0),
    }
    sent = database.now()
    try:
        sent, rows = yield from tenures.send(database, statement, parameters, sent + HANDOVER_RETRY)
    except StoreUnanswered:
        try:
            info = yield from tenures.inspect(database, tenure.key, database.now() + HANDOVER_RETRY)
        except LockStoreError:
            return None
        if info is None or info.owner not in {token, tenure.owner}:
            return None
        rows = [(info.fence,)] if info.owner == token else []
    except LockStoreError:  # the release has the last word
        return False
    if not rows:
        return False
    grant = Grant(Tenure(tenure.key, token, int(rows[0][0])), sent, float(heir.request["ttl"]), ticket, turn + 1)
    line.holder = _about(heir, grant)
    if not line.tell(offer, grant):  # it has gone in the meantime
        with contextlib.suppress(LockStoreError):
            _ = yield from release(database, grant.tenure, 1, ticket)
    return True


def _about(heir: LocalWaiter, grant: Grant) -> LockInfo:
    """The row of a tenure that has just begun."""
    request: Any = heir.request
    who = Identity(request["host"], request["pid"], request["thread"], request["program"], request["task"])
    (key, owner, fence), ttl = grant.tenure, grant.ttl
    return LockInfo(key, owner, fence, 1, ttl, 0.0, request["life"], request["label"], who)
