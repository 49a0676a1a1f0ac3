"""Leaving a share of a key: the tenure of a reader, or of a permit.

Rule: who leaves a share notifies the holder of the door, if that waits for it. After an error that holder polls.
"""

from __future__ import annotations

import contextlib
from typing import Final

from dblock.core.acquire.site import Site
from dblock.core.errors import LockStoreError, WrongKind
from dblock.core.protocol.sending import send, send_twice
from dblock.core.protocol.steps import Parameters, Rows, Steps
from dblock.core.values import SHARE, Grant, KeyKind, key_of_share, slot_of
from dblock.core.wakeup.registry import Message

REMEMBERED: Final = 100
"""Most keys of semaphores, and slots of each, that a process remembers to have left."""


def door_bell(key: str) -> str:
    """The name by which the holder of a door is notified, with its fence, which may also be a ticket of its key."""
    return key + SHARE


def notify_door(site: Site, share: str, answer: Rows | None = None) -> Steps[None]:
    """Notify the holder of the door, if it waits for the end of a share; `answer`: what leaving has answered of it.

    After an error that holder polls.
    """
    door = key_of_share(share)
    with contextlib.suppress(LockStoreError):
        if answer is None:
            until = site.database.now() + site.database.timing.handover_retry
            _, answer = yield from send(
                site.database, site.database.dialect.awaited, {"door": door}, until, resend=True
            )
        if answer and answer[0][0] is not None:
            channel, fence = answer[0]
            yield from site.tell(channel, Message(door_bell(door), int(fence)))


def leave_share(site: Site, held: Grant, until: float | None = None) -> Steps[bool]:
    """End the tenure of a reader or of a permit; False if it was over.

    A reader's row is deleted, unless a transaction of the reader may pin it: then the writer deletes it afterwards.
    """
    database, dialect = site.database, site.database.dialect
    door, slot = key_of_share(held.tenure.key), slot_of(held.tenure.key)
    parameters: Parameters = {**held.tenure._asdict(), "min_hold": 0.0, "door": door}
    until = database.now() + database.timing.retry_budget if until is None else until
    statement = dialect.leave_read if slot is None and not held.guarded else dialect.leave_slot
    rows, again = yield from send_twice(database, statement, parameters, until)
    if slot is not None:
        left = site.slots.setdefault(door, [])
        left[:] = [*left[-REMEMBERED:], slot]
        if len(site.slots) > REMEMBERED:
            _ = site.slots.pop(next(iter(site.slots)), None)
    yield from notify_door(site, held.tenure.key, rows if rows and dialect.leaving_answers else None)
    return bool(rows) or again


def wrong_kind(key: str, there: int, given: int) -> WrongKind:
    """The error for a key that is used for something else."""
    return WrongKind(
        f"{key!r} is the key of {KeyKind(there)}, not of {KeyKind(given)}: give each its own key (the row of a key that"
        " is no longer used is deleted by reap)",
        key=key,
    )
