"""The facts that the protocol's statements tell, frozen.

Rule: what a user gave has been checked before it comes here, by `dblock.core.validation`.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import Final, Literal, NamedTuple

TTL_MIN: Final = 0.02
"""Seconds: SQLite cuts the present to a millisecond and rounds the ttl to one, so that a lease may end 1.5 ms early,
which the margin of a tenth of the ttl must cover."""

Seconds = float | int | timedelta
State = Literal["held", "at_risk", "lost"]


def margin(ttl: float) -> float:
    """How long before the end of a lease trust in it ends, in seconds: a tenth of it, at most one second.

    It covers what the local clock and the database's may drift apart during one ttl, and the time from a look at the
    state to the act that follows.
    """
    return min(1.0, ttl / 10)


def printable(text: str) -> str:
    """Without what could steer a terminal, forge a line of a log, or hide something there."""
    return "".join(each if each.isprintable() else each.encode("unicode_escape").decode() for each in text)


class Tenure(NamedTuple):
    """One holding of a key by one owner: what every statement after the take names, whole."""

    key: str
    owner: str
    fence: int

    def __repr__(self) -> str:
        return f"Tenure({self.key!r}, fence {self.fence})"  # the owner token is a secret


class Grant(NamedTuple):
    """A tenure, and the lease on it that a statement gave."""

    tenure: Tenure
    sent: float
    """The local moment at which the statement was sent."""
    ttl: float
    """What was asked for, in seconds; and given, if `term` does not say less."""
    ticket: int = 0
    """The ticket that it was granted by in the queue; 0 if it was simply taken."""
    local_handovers: int = 0
    """How often in a row the key was handed over inside this process to come here."""
    term: float = 0.0
    """The seconds that the statement gave, if fewer than `ttl`: a tenure begins with the lease of a place."""

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
    """Who holds a lock, for people who look at it: no decision ever rests on it."""

    host: str
    pid: int
    thread: str
    program: str
    celery_task_id: str

    def __str__(self) -> str:
        parts = [f"{self.host} pid {self.pid}", self.thread, self.program]
        if self.celery_task_id:
            parts.append(f"Celery task {self.celery_task_id}")
        return ", ".join(part for part in parts if part)


@dataclass(frozen=True, slots=True)
class LockInfo:
    """A key's row as the database saw it at the moment of asking; times are spans by the database's clock."""

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
    """The last tenure that was asked back."""
    freed_fence: int = 0
    """The last tenure that was ended from outside."""
    revocation: str = ""
    """By whom and why the later of the two was."""

    @property
    def revoked(self) -> str | None:
        """By whom and why this tenure was asked back; None if it was not."""
        return self.revocation if self.owner and self.revoked_fence == self.fence else None

    def masked(self) -> LockInfo:
        """The same without the owner's token, which is nobody else's business."""
        return replace(self, owner="***") if self.owner else self

    @property
    def state(self) -> Literal["held", "expired", "free"]:
        """`expired`: its holder neither renewed it nor gave it back; whoever asks next gets it.

        `held` also while it is closed: given back (`owner` is empty), and its min_hold is not over.
        """
        if self.owner is not None and self.remaining > 0:
            return "held"
        return "expired" if self.owner else "free"

    @property
    def renewed(self) -> float | None:
        """Seconds since the lease was last renewed, for a lock with `grace` less that; None if it never was."""
        ago = self.ttl - self.remaining
        return ago if self.state == "held" and 0 <= ago < self.age - TTL_MIN / 2 else None

    def __str__(self) -> str:
        who = printable(f'{self.identity} "{self.label}"' if self.label else str(self.identity))
        if self.state == "free":
            return f"{who}, who does not hold it any more"
        if self.state == "expired":
            return f"{who}, whose lease ended {-self.remaining:.1f} s ago"
        if self.owner == "":
            return f"{who}, who has given it back; its min_hold ends {self.remaining:.1f} s from now"
        renewed = "" if self.renewed is None else f", renewed {self.renewed:.1f} s ago"
        end = f"free {self.remaining:.1f} s from now at the earliest if its holder has died"
        return f"{who}, for {self.age:.1f} s{renewed}; {end}"
