"""Giving a key to whoever is next: a flow of this process, else the first of the queue.

A release frees the key and is told whether somebody may be waiting; then the key is granted to the first who does
(`dblock.core.protocol.queue` says why nobody is forgotten), and that one is woken: in this process, on this machine, or
by the database. A flow of this process is handed the key instead of a release (`hand_over_local`).

Rule: what goes wrong here is left to the waiters. They look by themselves; a key that was given back is never asked for
again by whoever gave it back.
"""

from __future__ import annotations

import contextlib
import math
from enum import Enum

from dblock.core.acquire.local_queue import LocalQueue, LocalWaiter, Stage
from dblock.core.acquire.site import Site
from dblock.core.errors import LockError, LockStoreError, StoreUnanswered
from dblock.core.holding.held import Held
from dblock.core.protocol import queue, tenures
from dblock.core.protocol.sending import send
from dblock.core.protocol.steps import Parameters, Steps, sleep
from dblock.core.values import Grant, Tenure
from dblock.core.wakeup.registry import Message


class Passed(Enum):
    """What became of handing over a tenure that we hold."""

    DONE = "somebody else has the key"
    REFUSED = "nobody could be given it; the release has the last word"
    UNKNOWN = "the answer was lost"


def grant(site: Site, key: str, first: int, held: Held | None = None, *, until: float = math.inf) -> Steps[bool]:
    """Let the first live waiter from a ticket on have the key, if it is free or `held`, and tell it; was there one?

    False also if a transaction pins the key, or somebody is changing its row at this moment.
    """
    tenure = None if held is None else held.tenure
    granted = yield from queue.grant(site.database, key, first, tenure, here=site.sockets.neighbourhood, until=until)
    if granted is None:
        return False
    if held is not None:
        held.handed_over = True  # before anybody is told
        site.local_queues.note_contention(key)
    if not granted.called:
        yield from _tell(site, granted.channel, granted.message)
    return True


def _tell(site: Site, channel: str, message: Message) -> Steps[None]:
    """Tell a waiter of this process, of this machine, or of anywhere; what does not arrive, it finds for itself."""
    sockets = site.sockets
    ours = not channel or channel.startswith(sockets.channel)
    if (ours and site.wakeups.notify(message)) or not channel:
        return
    if not sockets.notify(channel, message.text()):
        with contextlib.suppress(LockStoreError):
            yield from queue.call(site.database, channel.partition(".")[0], message)


def grant_next(site: Site, key: str, first: int = 0, *, until: float = math.inf) -> Steps[bool]:
    """Give a key that nobody holds to the first of those who wait for it; False if it is free for anybody.

    `first` is the first ticket that was not served, 0 if not known; `until` is the local time until which to try. What
    goes wrong here is left to the waiters: the first of them is told to look, and goes on trying.
    """
    database = site.database
    try:
        for _ in range(2):  # somebody may leave, and somebody come, between two statements
            if first and (yield from grant(site, key, first, until=until)):
                site.local_queues.note_contention(key)
                return True
            soon = min(until, database.now() + database.timing.handover_retry)
            view = yield from queue.status(database, key, soon)
            if view is None or view.first > view.last:
                return False
            if view.remaining > 0:
                return True
            if not view.ahead:
                yield from queue.clear(database, key, view.last)
                return False
            first = view.first
        found = yield from queue.first_waiter(database, key, first, until)
        if found is not None:
            ticket, channel, _ = found
            yield from _tell(site, channel, Message(key, ticket))
    except LockStoreError:
        return True
    return True


def release(site: Site, held: Held, count: int) -> Steps[bool]:
    """Lower the count from `count`; from 1 the key is the first waiter's, or free. False if the tenure was over before.

    Where others are likely to wait, as whoever has waited itself knows, what is held is handed over in one statement;
    if nobody else could enter it again.
    """
    likely = count == 1 and (held.ticket or site.local_queues.is_crowded(held.tenure.key))
    direct = likely and not (held.token or held.handed_over)
    return _grant_or_free(site, held) if direct else free(site, held, count)


def _grant_or_free(site: Site, held: Held) -> Steps[bool]:
    passed = yield from _grant_held(site, held)
    # If the answer was lost, it was handed over.
    return (yield from free(site, held, 1)) or passed is Passed.UNKNOWN


def free(site: Site, held: Held, count: int, until: float | None = None) -> Steps[bool]:
    """The same by a release alone, which may be sent twice; the next one is granted the key then.

    `until` is the local time until which to try, the database's patience by default.
    """
    if held.handed_over:
        return True
    left = yield from tenures.release(site.database, held.tenure, count, until)
    if left.waiting:
        _ = yield from grant_next(site, held.tenure.key, left.waiting)
    return left.in_time


def pass_on(site: Site, held: Held) -> Steps[bool]:
    """Give the key to whoever is next: a flow of this process, else of the queue; False if the tenure was over before.

    An heir of this process that is not told looks for itself when the key has been given back for all we know.
    """
    passed, heir = Passed.REFUSED, None
    queues = site.local_queues
    try:
        local_queue = queues.find(held.tenure.key)
        heir = None if local_queue is None else local_queue.choose()
        if local_queue is not None and heir is not None:
            passed = Passed.UNKNOWN
            passed = yield from _hand_over_local(site, local_queue, heir, held)
            if passed is Passed.REFUSED:
                local_queue.withdraw(heir)
        return (yield from release(site, held, 1)) or passed is Passed.UNKNOWN
    except (GeneratorExit, LockStoreError):
        raise
    except BaseException:
        with contextlib.suppress(LockStoreError):  # nothing replaces the interrupt
            _ = yield from free(site, held, 1)
        raise
    finally:
        if passed is not Passed.DONE:
            queues.freed(held.tenure.key)


def leave(site: Site, tenure: Tenure, min_hold: float, *, alone: bool) -> Steps[bool]:
    """Lower the count by one; from 1 the key is the first waiter's, or free. False if the tenure was over before."""
    left = yield from tenures.leave(site.database, tenure, min_hold, alone=alone)
    if left.waiting:
        _ = yield from grant_next(site, tenure.key, left.waiting)
    return left.in_time


def undo_take(site: Site, key: str, owner: str, patience: float | None = None) -> Steps[None]:
    """Free whatever a take that was broken off may have left behind; errors are left to the lease's expiry.

    The server may still be executing the take when we look first, so we look twice.
    """
    now = site.database.now
    until = now() + (site.database.timing.undo_timeout if patience is None else patience)
    try:
        for pause in (0.0, 0.05):
            if pause and now() + pause > until:
                return
            if pause:
                yield from sleep(pause)
            info = yield from tenures.look(site.database, key, until)
            if info is not None and info.owner == owner:
                _ = yield from free(site, Held(Tenure(key, owner, info.fence)), 1, until)
                return
    except Exception:  # noqa: BLE001 - must not hide what broke the take off
        return


def _grant_held(site: Site, held: Held) -> Steps[Passed]:
    """Hand over what we hold."""
    try:
        return Passed.DONE if (yield from grant(site, held.tenure.key, held.ticket + 1, held)) else Passed.REFUSED
    except StoreUnanswered:
        return Passed.UNKNOWN
    except LockStoreError:
        return Passed.REFUSED


def _hand_over_local(site: Site, local_queue: LocalQueue, heir: LocalWaiter, held: Held) -> Steps[Passed]:
    """Hand what we hold to the flow of this process that it was offered to."""
    database, request, owner, tenure = site.database, heir.request, heir.owner, held.tenure
    try:
        database.before_waiting()
    except LockError:  # inside a transaction that may take it all back, or on an event loop
        return Passed.REFUSED
    parameters: Parameters = {
        **request.parameters(tenure.owner),
        **tenure._asdict(),
        "heir": owner,
        "handovers_left": max(database.timing.max_local_handovers - held.local_handovers, 0),
    }
    statement, sent = database.dialect.queue.hand_over_local, database.now()
    try:
        sent, rows = yield from send(database, statement, parameters, sent + database.timing.handover_retry)
    except StoreUnanswered:
        if heir.stage is Stage.LEFT and heir.grant is None:  # it will not find out
            yield from undo_take(site, tenure.key, owner, database.timing.handover_retry)
        return Passed.UNKNOWN
    except LockStoreError:
        return Passed.REFUSED
    if not rows:
        return Passed.REFUSED
    held.handed_over = True
    now_held = Tenure(tenure.key, owner, int(rows[0][0]))
    grant = Grant(now_held, sent, request.ttl, held.ticket, held.local_handovers + 1)
    if not local_queue.tell(heir, grant):  # it has gone in the meantime
        with contextlib.suppress(LockStoreError):
            _ = yield from release(site, Held.of(grant), 1)
    return Passed.DONE
