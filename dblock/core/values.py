"""Values that cannot hold nonsense: validated once at the door, frozen afterwards.

Rule: every check here happens before any I/O, so that bad input changes nothing.
"""

from __future__ import annotations

import math
import re
import threading
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import Final, Literal, NamedTuple

from dblock.core.errors import InvalidKey
from dblock.core.statements.base import Tables

KEY_LENGTH: Final = 255
TEXT_LENGTH: Final = 255
SCHEMA_LENGTH: Final = 63
"""PostgreSQL cuts longer names, MySQL refuses them from 65 on."""
PREFIX_LENGTH: Final = SCHEMA_LENGTH - len("lock_waiters_queue")

TTL_MIN: Final = 0.02
"""Seconds: SQLite cuts the present to a millisecond and rounds the ttl to one, so that a lease may end 1.5 ms early,
which the margin of a tenth of the ttl must cover."""
TTL_MAX: Final = 10 * 366 * 86400.0
"""Seconds (ten years), far from where any of the databases' timestamps overflow."""

Seconds = float | int | timedelta
State = Literal["held", "at_risk", "lost"]


def valid_key(key: object) -> str:
    """`key` if it is 1 to 255 characters of text that every database stores exactly; else InvalidKey."""
    if not isinstance(key, str):
        raise InvalidKey(f"a lock key is text, not {type(key).__name__}: {_short(key)}")
    if not 1 <= len(key) <= KEY_LENGTH:
        raise InvalidKey(
            f"a lock key has 1 to {KEY_LENGTH} characters, not {len(key)}: {_short(key)}"
            + ("; hash a longer name" if key else ""),
            key=key,
        )
    if (problem := _unstorable(key)) is not None:
        raise InvalidKey(f"a lock key cannot contain {problem}: {_short(key)}", key=key)
    return key if type(key) is str else str.__str__(key)  # members of a text enum are their value


def valid_text(value: object, what: str) -> str:
    """`value` if it is at most 255 characters that every database stores; TypeError or ValueError otherwise."""
    if value == "":
        return ""
    if not isinstance(value, str):
        raise TypeError(f"{what} is text, not {type(value).__name__}: {_short(value)}")
    if len(value) > TEXT_LENGTH:
        raise ValueError(f"{what} has at most {TEXT_LENGTH} characters, not {len(value)}")
    if (problem := _unstorable(value)) is not None:
        raise ValueError(f"{what} cannot contain {problem}: {_short(value)}")
    return value if type(value) is str else str.__str__(value)


def valid_ttl(ttl: object, what: str = "ttl", meaning: str = "the life of the lease,") -> float:
    """The life of a lease in seconds, from a number or a timedelta; TypeError or ValueError otherwise."""
    seconds = _seconds(ttl, what)
    if not TTL_MIN <= seconds <= TTL_MAX:
        raise ValueError(f"{what} is {meaning} {TTL_MIN:g} to {TTL_MAX:g} seconds, not {seconds:g}")
    return seconds


def valid_span(seconds: object, what: str, meaning: str) -> float:
    """A length of time like a ttl's, or 0 for none; TypeError or ValueError otherwise."""
    return 0.0 if seconds == 0 and not isinstance(seconds, bool) else valid_ttl(seconds, what, f"{meaning}, 0 or")


def valid_timeout(timeout: object, what: str = "timeout") -> float | None:
    """The longest wait in seconds, None for ever, which -1 means too; TypeError or ValueError otherwise."""
    if timeout is None:
        return None
    seconds = _seconds(timeout, what)
    if seconds == -1:
        return None
    if seconds < 0:
        raise ValueError(f"{what} is the longest wait in seconds, 0 or more, or -1 or None for ever, not {seconds:g}")
    return seconds


def valid_retention(retention: object) -> float:
    """How long to keep rows that nobody holds, in seconds; TypeError or ValueError otherwise."""
    seconds = _seconds(retention, "retention")
    if not 0 <= seconds <= TTL_MAX:
        raise ValueError(f"retention is 0 to {TTL_MAX:g} seconds, not {seconds:g}")
    return seconds


def valid_tables(prefix: object, schema: object) -> Tables:
    """What the tables are called: plain names, which need no care wherever they are quoted; TypeError or ValueError."""
    schema = "" if schema is None else schema
    for what, name, longest in (("a prefix of tables", prefix, PREFIX_LENGTH), ("a schema", schema, SCHEMA_LENGTH)):
        if not isinstance(name, str):
            raise TypeError(f"{what} is text, not {type(name).__name__}: {_short(name)}")
        if len(name) > longest or not re.fullmatch(r"[A-Za-z0-9_-]*", name):
            raise ValueError(f"{what} has at most {longest} of the characters A-Z, a-z, 0-9, _ and -: {_short(name)}")
    return Tables(str(prefix), str(schema))


def acquire_timeout(blocking: object, timeout: object, own: float | None) -> float | None:
    """The wait that `acquire(blocking, timeout)` asks for, with threading.RLock's rules and errors.

    `timeout` is a number, a timedelta, -1 or None for ever, or Ellipsis for the lock's own.
    """
    if timeout is ...:
        return own if blocking else 0.0
    if timeout is None:
        seconds = -1.0
    elif isinstance(timeout, timedelta):
        seconds = timeout.total_seconds()
    elif isinstance(timeout, int | float):
        seconds = float(timeout)
    else:
        raise TypeError(f"timeout is a number of seconds, not {type(timeout).__name__}")
    if math.isnan(seconds):
        raise ValueError("timeout is not a number (NaN)")
    if not blocking:
        if seconds != -1:
            raise ValueError("can't specify a timeout for a non-blocking call")
        return 0.0
    if seconds == -1:
        return None
    if seconds < 0:
        raise ValueError("timeout value must be a non-negative number")
    if seconds > threading.TIMEOUT_MAX:
        raise OverflowError("timeout value is too large")
    return seconds


def margin(ttl: float) -> float:
    """How long before the end of a lease trust in it ends, in seconds: a tenth of it, at most one second.

    It covers what the local clock and the database's may drift apart during one ttl, and the time from a look at the
    state to the act that follows.
    """
    return min(1.0, ttl / 10)


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
    ticket: int = 0
    """The place in the queue that brought the key into this process."""
    turn: int = 0
    """How often in a row the key was handed over in this process before."""

    @property
    def trusted_until(self) -> float:
        """The local moment at which trust in the lease ends."""
        return self.sent + self.ttl - margin(self.ttl)


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

    def masked(self) -> LockInfo:
        """The same without the owner's token, which is nobody else's business."""
        return replace(self, owner="***") if self.owner else self

    @property
    def state(self) -> Literal["held", "expired", "free"]:
        """`expired`: its holder neither renewed it nor gave it back; whoever asks next gets it."""
        if self.owner is None:
            return "free"
        return "held" if self.remaining > 0 else "expired"

    @property
    def renewed(self) -> float | None:
        """Seconds since the lease was last renewed, for a lock with `grace` less that; None if it never was."""
        ago = self.ttl - self.remaining
        return ago if self.state == "held" and 0 <= ago < self.age - TTL_MIN / 2 else None

    def __str__(self) -> str:
        who = f'{self.identity} "{self.label}"' if self.label else str(self.identity)
        if self.state == "free":
            return f"{who}, who does not hold it any more"
        if self.state == "expired":
            return f"{who}, whose lease ended {-self.remaining:.1f} s ago"
        if self.owner == "":
            return f"{who}, who has given it back; its min_hold ends {self.remaining:.1f} s from now"
        renewed = "" if self.renewed is None else f", renewed {self.renewed:.1f} s ago"
        end = f"free {self.remaining:.1f} s from now at the earliest if its holder has died"
        return f"{who}, for {self.age:.1f} s{renewed}; {end}"


def _seconds(value: object, what: str) -> float:
    if isinstance(value, timedelta):
        return value.total_seconds()
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"{what} is a number of seconds or a timedelta, not {type(value).__name__}: {_short(value)}")
    try:
        seconds = float(value)
    except OverflowError:
        raise ValueError(f"{what} is too large") from None
    if not math.isfinite(seconds):
        raise ValueError(f"{what} is a finite number of seconds, not {seconds}")
    return seconds


def _unstorable(text: str) -> str | None:
    if "\0" in text:
        return "NUL"
    try:
        _ = text.encode()
    except UnicodeEncodeError:
        return "half of a surrogate pair"
    return None


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
