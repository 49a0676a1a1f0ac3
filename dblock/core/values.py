"""Values that the protocol's statements work with; but for a grant they are frozen.

Rule: user input has been checked before it comes here, by `dblock.core.validation`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from datetime import timedelta
from enum import IntEnum
from typing import Final, Literal, NamedTuple

from dblock.core.text import printable

TTL_MIN: Final = 0.02
"""Seconds: SQLite cuts the present to a millisecond and rounds the ttl to one, so that a lease may end 1.5 ms early,
which the margin of a tenth of the ttl must cover."""

TTL: Final = 30.0
"""Life of a lease in seconds, unless a setting or a lock says otherwise."""

QUARANTINE: Final = 60.0
"""Seconds for which keys are closed after a failover, unless a setting says otherwise."""

MARGIN: Final = 2.5
"""Seconds by which the clocks of a primary and of its standby may differ."""

MACHINE: Final = 8
"""Number of leading hexadecimal digits of an owner token that name a machine (`dblock.core.machine`)."""

SHARE: Final = "\x1f"
"""Between a key and the name of one of its shares, in the key of the share's row. No key of a caller contains it."""


class KeyKind(IntEnum):
    """What a key is used for, as its row says."""

    LOCK = 0
    READ_WRITE = 1
    SEMAPHORE = 2

    def __str__(self) -> str:
        return {0: "a lock", 1: "a read-write lock", 2: "a semaphore"}[self]


def key_of_share(key: str) -> str:
    """The key that a row belongs to: of a reader's row or a slot that of its door, else its own."""
    return key.partition(SHARE)[0]


def slot_of(key: str) -> int | None:
    """The number of a slot by the key of its row; None for any other row."""
    kind, _, number = key.partition(SHARE)[2].partition(" ")
    return int(number) if kind == "p" else None


Seconds = float | int | timedelta
State = Literal["held", "at_risk", "lost"]


def margin(ttl: float) -> float:
    """Seconds by which trust ends before the lease: a tenth of the lease, at most one second.

    It covers the drift between the local clock and the database's during one ttl, and the time between reading the
    state and acting on it.
    """
    return min(1.0, ttl / 10)


class Tenure(NamedTuple):
    """One holding of a key by one owner. Every statement after the take names all three values."""

    key: str
    owner: str
    fence: int

    def __repr__(self) -> str:
        return f"Tenure({self.key!r}, fence {self.fence})"  # the owner token is a secret


@dataclass(slots=True, eq=False)
class Grant:
    """A tenure and its lease, as the last statement gave it; who has it releases it or hands it over.

    Rule: before the heir is notified, `handed_over` is set; from then on no statement is sent that would end the
    tenure. A crash of the database may undo the hand-over (see `dblock.core.protocol.queue`): then the old tenure keeps
    the key closed, and must not be released.
    """

    tenure: Tenure
    sent: float = -math.inf
    """The local moment at which the statement was sent; by default the lease is not trusted."""
    ttl: float = 0.0
    """Seconds that were asked for; also the length of the lease unless `term` is set."""
    ticket: int = 0
    """The ticket of the place in the queue that it was granted to; 0 if it was taken."""
    local_handovers: int = 0
    """Number of consecutive hand-overs inside this process up to this tenure."""
    term: float = 0.0
    """Seconds of the lease if fewer than `ttl`: a granted tenure begins with the lease of its place."""
    guarded: bool = False
    """Whether a transaction may pin the row: then a reader's is not deleted when it leaves."""
    handed_over: bool = False
    """Whether the database has confirmed that another owner has the key."""

    @property
    def lasts(self) -> float:
        """Seconds from the sending until the lease may end."""
        return self.term or self.ttl

    @property
    def trusted_until(self) -> float:
        """The local moment at which trust in the lease ends."""
        lasts = self.term or self.ttl
        return self.sent + lasts - margin(lasts)

    @property
    def late_from(self) -> float:
        """The local moment from which a renewal that has not happened is late."""
        return self.sent + self.lasts / 2


@dataclass(frozen=True, slots=True)
class Identity:
    """Description of a holder or waiter for people; the protocol never decides by it."""

    host: str
    pid: int
    thread: str
    program: str
    celery_task_id: str

    def __str__(self) -> str:
        parts = [f"{self.host} pid {self.pid}", self.thread, self.program]
        if self.celery_task_id:
            parts.append(f"Celery task {self.celery_task_id}")
        return printable(", ".join(part for part in parts if part))


@dataclass(frozen=True, slots=True)
class LockInfo:
    """A key's row when it was read; times are lengths by the database's clock."""

    key: str
    owner: str | None = field(repr=False)
    fence: int
    count: int
    ttl: float
    age: float
    """Seconds since the tenure began."""
    remaining: float
    """Seconds until the lease ends; zero or less when it has ended."""
    label: str
    identity: Identity
    revoked_fence: int = 0
    """Fence of the last tenure that was asked back."""
    freed_fence: int = 0
    """Fence of the last tenure that was ended from outside."""
    revocation: str = ""
    """By whom and why the later of the two was done."""
    kind: int = 0
    """What the key is used for, a `KeyKind`."""
    reading: int = 0
    """1 for the row of a reader, or for that of a read-write lock which a reader was the last to take."""
    awaiting: int = 0
    """1 if a writer with this tenure waits until the readers have left, or has waited in vain."""

    @property
    def revoked(self) -> str | None:
        """By whom and why this tenure was asked back; None if it was not."""
        return self.revocation if self.owner and self.revoked_fence == self.fence else None

    def masked(self) -> LockInfo:
        """A copy without the owner's token, which is a secret."""
        return replace(self, owner="***") if self.owner else self

    @property
    def state(self) -> Literal["held", "expired", "free"]:
        """`expired`: its holder neither renewed nor released it; the next take gets it.

        `held` includes a key that was released (`owner` is empty) but whose min_hold is not over.
        """
        if self.owner is not None and self.remaining > 0:
            return "held"
        return "expired" if self.owner else "free"

    @property
    def waits(self) -> bool:
        """Whether the owner only is the next: a writer that waits for readers, or a caller that waits for permits."""
        shared = self.awaiting or self.kind == KeyKind.SEMAPHORE
        return bool(shared) and self.state == "held" and SHARE not in self.key

    @property
    def detached(self) -> float | None:
        """Seconds since the tenure was left to the bearer of a token that was not used yet; None if it has a holder."""
        waits_for_bearer = self.state == "held" and bool(self.owner) and not self.count
        return max(self.ttl - self.remaining, 0.0) if waits_for_bearer else None

    @property
    def renewed(self) -> float | None:
        """Seconds since the last renewal, less the `grace` of the lock; None if there was none."""
        ago, held = self.ttl - self.remaining, self.state == "held" and not self.waits
        return ago if held and self.count and 0 <= ago < self.age - TTL_MIN / 2 else None

    def __str__(self) -> str:
        who = printable(f'{self.identity} "{self.label}"' if self.label else str(self.identity))
        if self.state == "free":
            return f"{who}, who does not hold it any more"
        if self.state == "expired":
            return f"{who}, whose lease ended {-self.remaining:.1f} s ago"
        if self.owner == "":
            return f"{who}, who has released it; its min_hold ends {self.remaining:.1f} s from now"
        if self.waits:
            others = "permits are free" if self.kind == KeyKind.SEMAPHORE else "the readers have left"
            return f"{who}, who is the next, and has been waiting for {self.age:.1f} s until {others}"
        if self.detached is not None:
            return f"{who}, who detached it {self.detached:.1f} s ago; its token is good for {self.remaining:.1f} s"
        renewed = "" if self.renewed is None else f", renewed {self.renewed:.1f} s ago"
        end = f"free {self.remaining:.1f} s from now at the earliest if its holder has died"
        return f"{who}, for {self.age:.1f} s{renewed}; {end}"

    @property
    def slot(self) -> int | None:
        """The number of the permit whose row it is; None for any other row."""
        return slot_of(self.key)
