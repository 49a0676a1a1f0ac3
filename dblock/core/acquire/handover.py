"""Giving a key to whoever is next: a flow of this process, else the first of the queue.

A release frees the key and is told whether somebody may be waiting; then the key is granted to the first who does
(`dblock.core.protocol.queue` says why nobody is forgotten), and that one is woken: in this process, on this machine, or
by the database. A flow of this process is handed the key instead of a release (`hand_over_local`).

Rule: what goes wrong here is left to the waiters. They look by themselves; a key that was given back is never asked for
again by whoever gave it back.
"""

from __future__ import annotations

import contextlib
from enum import Enum

from dblock.core.acquire.local_queue import HandoverOffer, LocalQueue, Request
from dblock.core.acquire.site import Site
from dblock.core.errors import LockStoreError, LockTimeout, StoreUnanswered
from dblock.core.protocol import queue, tenures
from dblock.core.protocol.queue import Granted
from dblock.core.protocol.sending import send
from dblock.core.protocol.steps import Parameters, Steps, sleep, wait
from dblock.core.values import Grant, Identity, LockInfo, Tenure
from dblock.core.wakeup.registry import Wakeup


class Passed(Enum):
    """What became of handing over a tenure that we hold."""

    DONE = "somebody else has the key"
    REFUSED = "nobody could be given it; the release has the last word"
    UNKNOWN = "the answer was lost"


def grant(site: Site, key: str, first: int, tenure: Tenure | None = None) -> Steps[bool]:
    """Let the first live waiter from a ticket on have the key, if it is free or `tenure`'s, and wake it; was there one?

    False also if a transaction pins the key, or somebody is changing its row at this moment.
    """
    granted = yield from queue.grant(site.database, key, first, tenure, here=site.socket.neighbourhood)
    if granted is None:
        return False
    site.local_queues.note_contention(key)
    yield from _wake(site, key, granted)
    return True


def _wake(site: Site, key: str, granted: Granted) -> Steps[None]:
    """Tell the waiter with that ticket, or else the next one, to look, if the database has not called its process."""
    (ticket, channel, called), wakeups, socket = granted, site.wakeups, site.socket
    if called or wakeups.notify(key, ticket):
        return
    with contextlib.suppress(LockStoreError):  # it looks for itself
        if channel is None:
            found = yield from queue.first_waiter(site.database, key, ticket)
            if found is not None:
                ticket, channel, _ = found
        if wakeups.notify(key, ticket) or not channel or socket.notify(channel, key, ticket):
            return
        yield from queue.call(site.database, key, ticket, channel)


def _remind(site: Site, key: str) -> Steps[None]:
    """Wake whoever was granted the key last: those who granted it may not have come so far."""
    with contextlib.suppress(LockStoreError):
        view = yield from queue.status(site.database, key, site.database.now() + site.database.timing.handover_retry)
        if view is not None and view.remaining > 0:
            yield from _wake(site, key, Granted(view.first - 1))


def grant_next(site: Site, key: str, first: int = 0) -> Steps[bool]:
    """Give a key that nobody holds to the first of those who wait for it; False if it is free for anybody.

    `first` is the first ticket that was not served, 0 if not known. What goes wrong here is left to the waiters: the
    first of them is woken, and goes on trying.
    """
    database = site.database
    try:
        for _ in range(2):  # somebody may leave, and somebody come, between two statements
            if first and (yield from grant(site, key, first)):
                return True
            view = yield from queue.status(database, key, database.now() + site.database.timing.handover_retry)
            if view is None or view.first > view.last:
                return False
            if view.remaining > 0:
                return True
            if not view.ahead:
                yield from queue.clear(database, key, view.last)
                return False
            first = view.first
        yield from _wake(site, key, Granted(first))
    except LockStoreError:
        return True
    return True


def release(site: Site, tenure: Tenure, count: int, ticket: int = 0) -> Steps[bool]:
    """Lower the count from `count`; from 1 the key is the first waiter's, or free. False if the tenure was over before.

    A tenure that waited itself (`ticket`) knows that others may: it hands over in one statement what it holds.
    """
    passed = Passed.REFUSED
    if ticket and count == 1:
        passed = yield from _grant_held(site, tenure, ticket + 1)
        if passed is Passed.DONE:
            return True
    left = yield from tenures.release(site.database, tenure, count)
    if left.waiting:
        _ = yield from grant_next(site, tenure.key, left.waiting)
    if not left.in_time and passed is Passed.UNKNOWN:  # it was handed over, but the answer was lost
        yield from _remind(site, tenure.key)
        return True
    return left.in_time


def pass_on(site: Site, tenure: Tenure, ticket: int, local_handovers: int) -> Steps[bool]:
    """Give the key to whoever is next: a flow of this process, else of the queue; False if the tenure was over before.

    `local_handovers` says how often in a row it has gone to a flow of this process before.
    """
    passed, queues = Passed.REFUSED, site.local_queues
    offer, orphan = None, ""
    try:
        try:
            local_queue = queues.find(tenure.key)
            offer = None if local_queue is None else local_queue.choose(tenure)
            if local_queue is not None and offer is not None:
                passed = Passed.UNKNOWN
                passed = yield from _hand_over_local(site, local_queue, offer, ticket, local_handovers)
            # What was handed over, though the answer was lost, is no more to be released.
            ended = passed is Passed.DONE or (yield from release(site, tenure, 1, ticket)) or passed is Passed.UNKNOWN
        finally:  # only now: whoever was chosen may look whether it has the key, or never will
            if passed is not Passed.DONE:
                orphan = queues.freed(tenure.key, offer, known=passed is Passed.REFUSED)
    except GeneratorExit:
        raise
    except BaseException as error:
        # Interrupted: sending it twice is harmless. Nothing replaces the interrupt.
        with contextlib.suppress(LockStoreError):
            done = passed is Passed.DONE or isinstance(error, LockStoreError)
            if not (done or (yield from release(site, tenure, 1))):
                yield from _remind(site, tenure.key)
        if orphan:
            yield from undo_take(site, tenure.key, orphan, site.database.timing.handover_retry)
        raise
    if orphan:
        yield from undo_take(site, tenure.key, orphan)
    return ended


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
    patience = site.database.timing.patience if patience is None else patience
    try:
        for pause in (0.0, 0.05):
            if pause > patience:
                return
            if pause:
                yield from sleep(pause)
            info = yield from tenures.inspect(site.database, key, site.database.now() + patience)
            if info is not None and info.owner == owner:
                _ = yield from release(site, Tenure(key, owner, info.fence), 1)
                return
    except Exception:  # noqa: BLE001 - must not hide what broke the take off
        return


def _grant_held(site: Site, tenure: Tenure, first: int) -> Steps[Passed]:
    """Hand over what we hold."""
    try:
        return Passed.DONE if (yield from grant(site, tenure.key, first, tenure)) else Passed.REFUSED
    except StoreUnanswered:
        return Passed.UNKNOWN
    except LockStoreError:
        return Passed.REFUSED


def _hand_over_local(
    site: Site, local_queue: LocalQueue, offer: HandoverOffer, ticket: int, local_handovers: int
) -> Steps[Passed]:
    """Hand the key to the flow of this process that it was offered to."""
    (heir, token, tenure, _), database = offer, site.database
    try:
        yield from wait(0.0, Wakeup())
    except LockTimeout:  # inside a transaction that may take it all back
        return Passed.REFUSED
    parameters: Parameters = {
        **heir.request.parameters(tenure.owner),
        **tenure._asdict(),
        "heir": token,
        "handovers_left": max(database.timing.max_local_handovers - local_handovers, 0),
    }
    statement, sent = database.dialect.queue.hand_over_local, database.now()
    try:
        sent, rows = yield from send(database, statement, parameters, sent + site.database.timing.handover_retry)
    except StoreUnanswered:
        try:
            info = yield from tenures.inspect(
                database, tenure.key, database.now() + site.database.timing.handover_retry
            )
        except LockStoreError:
            return Passed.UNKNOWN
        if info is None or info.owner not in {token, tenure.owner}:
            return Passed.UNKNOWN
        rows = [(info.fence,)] if info.owner == token else []
    except LockStoreError:
        return Passed.REFUSED
    if not rows:
        return Passed.REFUSED
    grant = Grant(Tenure(tenure.key, token, int(rows[0][0])), sent, heir.request.ttl, ticket, local_handovers + 1)
    local_queue.holder = _about(heir.request, grant)
    if not local_queue.tell(offer, grant):  # it has gone in the meantime
        with contextlib.suppress(LockStoreError):
            _ = yield from release(site, grant.tenure, 1, ticket)
    return Passed.DONE


def _about(request: Request, grant: Grant) -> LockInfo:
    """The row of a tenure that has just begun."""
    who = Identity(request.host, request.pid, request.thread, request.program, request.task)
    (key, owner, fence), ttl = grant.tenure, grant.ttl
    return LockInfo(key, owner, fence, 1, ttl, 0.0, request.life, request.label, who)
