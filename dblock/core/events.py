"""What those who observe locks are told.

    attempt     ->  CONTENDED at most once, when it begins to wait or is refused; then ACQUIRED or GAVE_UP
    tenure      ->  ACQUIRED with `depth` 1; then RELEASED with `depth` 0, or LOST; AT_RISK in between
    statements  ->  RENEWED, REAPED, FORCED

Rule: an event is what was known when it happened. Nothing is asked of the database for it, and it holds on to nothing:
neither a lock object nor an owner's token.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Literal, NamedTuple

from dblock.core.values import LockInfo


class Kind(StrEnum):
    """What has happened."""

    ACQUIRED = "acquired"
    """A flow holds a key: anew, once more (`how="reentered"`) or by a token (`how="attached"`)."""
    CONTENDED = "contended"
    """Somebody else has the key: a flow begins to wait for it, or with `timeout=0` is refused."""
    GAVE_UP = "gave_up"
    """An attempt has ended without the key; `reason` says why."""
    RELEASED = "released"
    """A flow has left a lock, for good if `depth` is 0."""
    RENEWED = "renewed"
    """A statement has renewed leases of this process, `amount` of them."""
    AT_RISK = "at_risk"
    """A renewal is late; the lease is still good."""
    LOST = "lost"
    """A lease ended before the work did; `reason` is a `Reason`."""
    REAPED = "reaped"
    """Rows that nobody uses any more were deleted: `amount` of keys, `places` of waiters."""
    FORCED = "forced"
    """This process has freed a key that another one held, for an administrator; `reason` is by whom and why."""


How = Literal["", "at_once", "waited", "handed_over", "reentered", "attached", "released", "detached"]


class Event(NamedTuple):
    """Something that has happened to a lock; what a kind has no use for is as here. Times are seconds, local clock."""

    kind: Kind
    database: str
    """The alias, or the engine's URL without user, password and options."""
    sender: type | None = None
    """The class of the lock object, if there is one."""
    key: str = ""
    fence: int = 0
    label: str = ""
    how: How = ""
    """ACQUIRED: `at_once`; `waited`, granted by the queue or taken after a wait; `handed_over` by another flow of this
    process; `reentered`; `attached`. RELEASED: `released`, or `detached`, left to the bearer of a token."""
    depth: int = 0
    """How many entries the flow has now."""
    contended: bool = False
    """ACQUIRED, GAVE_UP: was CONTENDED told before?"""
    wait: float = 0.0
    """ACQUIRED, GAVE_UP: since the attempt began."""
    held: float = 0.0
    """RELEASED, LOST: since this flow had it."""
    holder: LockInfo | None = None
    """CONTENDED, GAVE_UP: whom we saw last, if anybody has looked. LOST: who has the key now."""
    reason: str = ""
    """LOST: a `Reason`. GAVE_UP: `timeout`, or the class of what broke it off; RELEASED: likewise."""
    lateness: float = 0.0
    """RENEWED, AT_RISK: since the renewal was due; of several the greatest. It is due a third of the ttl after the last
    one, and late from a half on."""
    amount: int = 0
    places: int = 0
