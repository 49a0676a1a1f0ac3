"""The events that observers of locks receive.

    attempt     ->  CONTENDED at most once, when it begins to wait or is refused; then ACQUIRED or GAVE_UP
    tenure      ->  ACQUIRED with `depth` 1; then RELEASED with `depth` 0, or LOST; AT_RISK in between
    statements  ->  RENEWED, REAPED, FORCED

Rule: an event holds what was known when it happened. Making one never queries the database, and it refers neither to a
lock object nor to an owner's token.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Final, Literal, NamedTuple

from dblock.core.values import LockInfo

HEALTH: Final = "dblock health:"
"""Prefix of the keys of health probes."""
DOCTOR: Final = "dblock doctor"
"""The key that the doctor acquires and releases."""
PROBES: Final = (HEALTH, DOCTOR)
"""Prefixes of keys that neither observers nor the history see, as they are not the application's."""


class Kind(StrEnum):
    """What has happened."""

    ACQUIRED = "acquired"
    """A flow has entered a lock: for the first time, again (`how="reentered"`) or by a token (`how="attached"`)."""
    CONTENDED = "contended"
    """Another flow holds the key: the caller begins to wait for it, or with `timeout=0` is refused."""
    GAVE_UP = "gave_up"
    """An attempt has ended without the key; `reason` says why."""
    RELEASED = "released"
    """A flow has left a lock; with `depth` 0 it no longer holds it."""
    RENEWED = "renewed"
    """A statement has renewed leases of this process, `amount` of them."""
    AT_RISK = "at_risk"
    """A renewal is late; the lease is still good."""
    LOST = "lost"
    """A lease ended before the work did; `reason` is a `Reason`."""
    REAPED = "reaped"
    """Unused rows were deleted: `amount` rows of keys, `places` rows of waiters."""
    FORCED = "forced"
    """This process has freed a key of another holder for an administrator; `reason` says by whom and why."""


IN_FLOW: Final = frozenset(Kind) - {Kind.RENEWED, Kind.AT_RISK, Kind.LOST}
"""The kinds that are delivered in the flow that they are about; the others, of the watchdog, in another thread."""

How = Literal["", "at_once", "waited", "handed_over", "reentered", "attached", "released", "detached"]


class Event(NamedTuple):
    """Something that has happened to a lock. Fields that a kind does not use keep their defaults; times are seconds."""

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
    """Number of entries that the flow has now."""
    contended: bool = False
    """ACQUIRED, GAVE_UP: whether CONTENDED came before."""
    wait: float = 0.0
    """ACQUIRED, GAVE_UP: time since the attempt began, by the local clock."""
    held: float = 0.0
    """RELEASED, LOST: time since this flow acquired the lock, by the local clock."""
    holder: LockInfo | None = None
    """CONTENDED, GAVE_UP: the holder as last read, if it was read. LOST: the holder now."""
    reason: str = ""
    """LOST: a `Reason`. GAVE_UP: `timeout`, or the class of the exception that ended it; RELEASED: likewise."""
    lateness: float = 0.0
    """RENEWED, AT_RISK: time since the renewal was due, the greatest of several. A renewal is due a third of the ttl
    after the last one, and late after half of it."""
    amount: int = 0
    places: int = 0
    majority: str = ""
    """The names of all databases of a majority lock, if this is about its lease in one of them: the majority lock has
    events of its own."""
