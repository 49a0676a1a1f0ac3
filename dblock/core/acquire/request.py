"""What a flow asks for when it acquires a key, and the refusals.

Rule: a request is frozen, as a holder of the same process reads it in another thread.
"""

from __future__ import annotations

import os
from typing import Any, NamedTuple

from dblock.core.errors import LockStoreError, LockTimeout, WrongKind
from dblock.core.statements.base import Masked
from dblock.core.values import Grant, Identity, KeyKind, LockInfo


class Request(NamedTuple):
    """Parameters of a flow's acquire, as the row will show them."""

    key: str
    ttl: float
    life: float
    """Seconds for which the row is closed: ttl + grace."""
    label: str
    fair: int
    """1: a take does not overtake waiters."""
    flow: str
    """Prefix of the owner tokens of the flow."""
    host: str
    pid: int
    thread: str
    program: str
    task: str
    """The id of the Celery task, else empty."""
    starts_on_place_lease: bool = False
    """Whether the tenure may begin with the lease of its place in the queue, since the watchdog will renew it."""
    kind: int = 0
    """What the key is used for, a `KeyKind`: a row of another kind is neither taken nor waited for."""
    reading: int = 0
    """1: a reader takes the key, which lets other readers in beside it."""

    def new_owner(self) -> str:
        """An unguessable token for one attempt to begin a tenure.

        A row with this token shows the tenure of this attempt, not an earlier one of the same flow whose release was
        lost, nor one that the flow took through another engine.
        """
        return Masked(self.flow + os.urandom(16).hex())

    def parameters(self, owner: str, channel: str = "") -> dict[str, Any]:
        """The statements' parameters, with the token of an attempt and the channel of its process."""
        return dict(zip(self._fields, self, strict=True), owner=owner, channel=channel)


class Refused(NamedTuple):
    """The key could not be acquired in time."""

    holder: LockInfo | None = None
    """The row as last read; None if others were faster each time the key was free, or the row could not be read."""
    busy: LockStoreError | None = None
    """The error that kept the row from being read."""
    error: LockTimeout | None = None
    """What to raise, of a majority lock, whose error says what each database has said."""


def wrong_kind(key: str, there: int, given: int) -> WrongKind:
    """The error for a key that is used for something else."""
    return WrongKind(
        f"{key!r} is the key of {KeyKind(there)}, not of {KeyKind(given)}: give each its own key (the row of a key that"
        " is no longer used is deleted by reap)",
        key=key,
    )


def about(request: Request, grant: Grant) -> LockInfo:
    """The row of a tenure that has just begun."""
    who = Identity(request.host, request.pid, request.thread, request.program, request.task)
    (key, owner, fence), ttl = grant.tenure, grant.ttl
    return LockInfo(key, owner, fence, 1, ttl, 0.0, request.life, request.label, who)
