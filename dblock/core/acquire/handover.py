"""Leaving a key to the next: to a flow of this process, else to the first of the queue, else free.

A release frees the key, and its answer says whether somebody may be waiting. Then the releaser grants the key to the
first waiter (`dblock.core.protocol.queue` says why none is forgotten) and notifies it: in this process, on this
machine, or through the database. Where it expects waiters it grants its own tenure instead, by one statement, and
releases only if no waiter was granted it. To a flow of this process it hands the key over instead of releasing
(`hand_over_local`).

Rule: failures here are left to the waiters, which poll. A releaser never takes back a key that it has released.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Sequence
from enum import Enum, auto
from typing import Final

from dblock.core.acquire.local_queue import Waiting
from dblock.core.acquire.site import Site
from dblock.core.errors import LockError, LockStoreError, StoreUnanswered
from dblock.core.protocol import queue, tenures
from dblock.core.protocol.sending import UNKNOWN, send
from dblock.core.protocol.steps import Parameters, Rows, Steps, sleep
from dblock.core.values import SHARE, Grant, Tenure, key_of_share, slot_of
from dblock.core.wakeup.registry import Message

MOST_LOCAL: Final = 8
"""Most hand-overs in a row inside a process while other processes wait."""


class Passed(Enum):
    """What became of the hand-over of a held tenure inside this process."""

    DONE = auto()
    """The heir has the key."""
    REFUSED = auto()
    """The flow that handed it over still has it."""
    UNKNOWN = auto()
    """The answer was lost."""


def grant(site: Site, key: str, first: int, held: Grant | None = None, *, until: float = math.inf) -> Steps[bool]:
    """Grant the key to the first live waiter from a ticket on, if it is free or `held`, and notify that waiter.

    False if there is none, if a transaction pins the key, or if another one is changing its row at this moment.
    """
    tenure = None if held is None else held.tenure
    granted = yield from queue.grant(site.database, key, first, tenure, here=site.sockets().neighbourhood, until=until)
    if granted is None:
        return False
    if held is not None:
        held.handed_over = True  # before the waiter is notified
        site.note_contention(key)
    channel, message = granted
    here = channel is not None and (yield from site.tell(channel, message))
    if held is not None:
        site.note_handover(key, here=here)
    return True


def grant_next(site: Site, key: str, first: int = 0, *, until: float = math.inf) -> Steps[bool]:
    """Grant a key without a holder to its first waiter; False if there is no waiter, and the key is free.

    `first` is the first ticket that was not served, 0 if unknown; `until` is the local time until which to try. If no
    waiter could be granted the key, the first one is notified, polls, and goes on trying.
    """
    database, last = site.database, 0
    try:
        for _ in range(2):  # the queue may change between two statements
            if first and (yield from grant(site, key, first, until=until)):
                site.note_contention(key)
                return True
            soon = min(until, database.now() + database.timing.single_try)
            view = yield from queue.status(database, key, soon)
            if view is None or view.first > view.last:
                return False
            if view.remaining > 0:
                return True
            if not view.ahead:
                yield from queue.clear(database, key, view.last)
                return False
            first, last = view.first, view.last
        found = yield from queue.first_waiter(database, key, first, until)
        if found is None:
            yield from queue.clear(database, key, last)
        else:
            ticket, channel, _ = found
            _ = yield from site.tell(channel, Message(key, ticket))
    except LockStoreError:
        return True
    return found is not None


def release(site: Site, held: Grant, *, min_hold: float = 0.0) -> Steps[bool]:
    """The first waiter gets the key, or it is free, after `min_hold` seconds of tenure. False if the tenure was over.

    Where others probably wait, as for a holder that has waited itself, one statement hands the tenure over.
    """
    lost, key = False, held.tenure.key
    if (held.ticket or site.expects_contention(key)) and not (min_hold or held.handed_over or SHARE in key):
        try:
            _ = yield from grant(site, key, held.ticket + 1, held)
        except LockStoreError as error:
            lost = isinstance(error, StoreUnanswered)
    return (yield from end(site, held, min_hold=min_hold)) or lost  # if the answer was lost, it was handed over


def end(site: Site, held: Grant, *, min_hold: float = 0.0, until: float | None = None) -> Steps[bool]:
    """As `release`, but by a statement that only ends the tenure; then the next waiter is granted the key, or notified.

    A reader's row is deleted, unless a transaction of the reader may pin it: then the writer deletes it afterwards.
    `until` is the local time until which to try, by default as long as statements are resent.
    """
    if held.handed_over:
        return True
    key, dialect, statement = held.tenure.key, site.database.dialect, site.database.dialect.release
    share = SHARE in key
    slot = slot_of(key) if share else None
    if share and not min_hold:
        statement = dialect.leave_read if slot is None and not held.guarded else dialect.leave_slot
    _, rows = yield from tenures.end(site.database, statement, held.tenure, min_hold, until)
    if slot is not None and not min_hold:
        site.note_left(key_of_share(key), slot)
    if share:
        known = bool(rows) and rows is not UNKNOWN and dialect.leaving_answers and not min_hold
        yield from notify_door(site, key, rows if known else None)
    elif rows and rows[0][0]:
        _ = yield from grant_next(site, key, int(rows[0][0]))
    return bool(rows)


def door_bell(key: str) -> str:
    """The name by which the holder of a door is notified, with its fence, which may also be a ticket of its key."""
    return key + SHARE


def notify_door(site: Site, share: str, answer: Rows | None = None) -> Steps[None]:
    """Notify the holder of the door, if it waits for the end of a share; `answer`: what leaving has answered of it.

    After an error that holder polls.
    """
    door, database = key_of_share(share), site.database
    with contextlib.suppress(LockStoreError):
        if answer is None:
            until = database.now() + database.timing.single_try
            _, answer = yield from send(database, database.dialect.awaited, {"door": door}, until, resend=True)
        if answer and answer[0][0] is not None:
            channel, fence = answer[0]
            yield from site.tell(channel, Message(door_bell(door), int(fence)))


def pass_on(site: Site, held: Grant, *, min_hold: float = 0.0) -> Steps[bool]:
    """Hand the key to the next waiter of this process, else of the queue; False if the tenure was over before.

    With `min_hold` it is released, as the key is closed until then. An heir of this process that gets no confirmation
    polls once the key has been released. If the answer to the hand-over was lost, the release waits for the row until
    the hand-over has ended, and finds the tenure gone if that was executed. The heir's tenure is then released if the
    heir has left, or has begun again with another token.
    """
    passed, heir, owner, key = Passed.REFUSED, None, "", held.tenure.key
    try:
        local_queue = None if min_hold else site.local_queues.get(key)
        heir = None if local_queue is None else local_queue.offer()
        if heir is not None:
            passed, owner = Passed.UNKNOWN, heir.owner
            passed = yield from _hand_over_local(site, heir, held)
            if passed is Passed.REFUSED:
                heir.local_queue.retract(heir)
        in_time = yield from release(site, held, min_hold=min_hold)
        if heir is not None and passed is Passed.UNKNOWN and not in_time and heir.owner != owner:
            yield from undo_take(site, key, owner, again=False)
        return in_time or passed is Passed.UNKNOWN  # noqa: TRY300 - an else would be no clearer
    except (GeneratorExit, LockStoreError):
        raise
    except BaseException:
        with contextlib.suppress(LockStoreError):  # nothing replaces the interrupt
            _ = yield from end(site, held, min_hold=min_hold)
        raise
    finally:
        if passed is not Passed.DONE:
            site.local_queues.released(key)


def undo_take(site: Site, key: str, owner: str, *, again: bool = True) -> Steps[None]:
    """Free the tenure that an interrupted take may have begun; after an error its lease expires."""
    return undo_takes(site, [(owner, key)], site.database.timing.undo_timeout, again=again)


def undo_takes(site: Site, tokens: Sequence[tuple[str, str]], seconds: float, *, again: bool = True) -> Steps[None]:
    """Free what takes may have begun, given as owner tokens with their keys; what is not freed in time expires.

    `again`: read twice, because the server may still be executing a take at first.
    """
    database, left = site.database, list(tokens)
    until = database.now() + seconds
    for pause in (0.0, 3 * database.timing.settle) if again else (0.0,):
        if pause:
            if not left or database.now() + pause > until:
                return
            yield from sleep(database.store, pause)
        for owner, key in left[:]:
            if database.now() > until:
                return
            with contextlib.suppress(Exception):  # nothing may hide what interrupted the take
                info = yield from tenures.inspect(database, key, until)
                if info is None or info.owner != owner:
                    continue
                if (yield from end(site, Grant(Tenure(key, owner, info.fence)), until=until)):
                    left.remove((owner, key))  # else a statement that is still under way may have raised the fence


def withdraw(site: Site, places: Sequence[tuple[str, str]], seconds: float | None = None) -> Steps[None]:
    """Delete places, given as owner tokens with their keys, and release each key that was granted to one.

    With an empty key nothing is released. A deleted place is granted nothing; and with `grant_leaves` nothing was
    granted to a place that was still there, since a grant deletes it in its own transaction. After an error, and after
    so many seconds, by default as long as statements are resent, the places and the leases expire.
    """
    database = site.database
    seconds = database.timing.retry_budget if seconds is None else seconds
    until = database.now() + seconds
    deleted = yield from queue.leave_queue(database, [owner for owner, _ in places], seconds)
    if deleted < len(places) or not database.dialect.grant_leaves:
        # The server may still be executing a grant at first.
        granted = [(owner, key) for owner, key in places if key]
        yield from undo_takes(site, granted, until - database.now(), again=deleted < len(places))


def _hand_over_local(site: Site, heir: Waiting, held: Grant) -> Steps[Passed]:
    """Hand a held tenure over to the flow of this process that it was offered to."""
    database, request, owner, tenure = site.database, heir.request, heir.owner, held.tenure
    try:
        database.before_waiting()
    except LockError:  # inside a transaction that may roll it back, or on an event loop
        return Passed.REFUSED
    parameters: Parameters = {
        **request.parameters(tenure.owner),
        **tenure._asdict(),
        "heir": owner,
        "handovers_left": max(MOST_LOCAL - held.local_handovers, 0),
        "covers": int(request.starts_on_place_lease),
    }
    statement, sent = database.dialect.hand_over_local, database.now()
    try:
        sent, rows = yield from send(database, statement, parameters, sent + database.timing.single_try)
    except StoreUnanswered:
        return Passed.UNKNOWN
    except LockStoreError:
        return Passed.REFUSED
    if not rows:
        return Passed.REFUSED
    held.handed_over = True
    fence, *lasts = map(int, rows[0])
    begun = Tenure(tenure.key, owner, fence)
    grant = Grant(begun, sent, request.ttl, held.ticket, held.local_handovers + 1, sum(lasts) / 1000)
    if not heir.local_queue.confirm(heir, grant):  # it has left in the meantime
        with contextlib.suppress(LockStoreError):
            _ = yield from release(site, grant)
    return Passed.DONE
