"""Checks of user input.

Rule: every check happens before any I/O, so that bad input changes nothing.
"""

from __future__ import annotations

import math
import re
import threading
from datetime import timedelta
from typing import Any, Final

from dblock.core.errors import InvalidKey
from dblock.core.statements.base import Tables
from dblock.core.values import QUARANTINE, SHARE, TTL_MIN

KEY_LENGTH: Final = 255
TEXT_LENGTH: Final = 255
SCHEMA_LENGTH: Final = 63
"""PostgreSQL cuts longer names, MySQL refuses them from 65 on."""
PREFIX_LENGTH: Final = SCHEMA_LENGTH - len("lock_waiters_queue")

TTL_MAX: Final = 10 * 366 * 86400.0
"""Seconds (ten years), far from where any of the databases' timestamps overflow."""


HISTORY_MAX: Final = 10_000_000
"""Events, 2 GB or so of them."""


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
    if SHARE in key:
        raise InvalidKey(f"a lock key cannot contain U+001F, which separates parts of a key: {_short(key)}", key=key)
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
        raise ValueError(f"{what} is {meaning} {TTL_MIN:g} to {TTL_MAX:.0f} seconds, not {seconds:g}")
    return seconds


def valid_span(seconds: object, what: str, meaning: str) -> float:
    """A length of time like a ttl's, or 0 for none; TypeError or ValueError otherwise."""
    return _seconds(seconds, what) and valid_ttl(seconds, what, f"{meaning}, 0 or")


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


def valid_slow_wait(seconds: object, what: str = "slow_wait") -> float:
    """Seconds from which a wait is logged, infinite for None; TypeError or ValueError otherwise."""
    return math.inf if seconds is None else valid_span(seconds, what, "the wait from which on it is logged")


def valid_retention(retention: object) -> float:
    """Seconds for which rows without a holder are kept; TypeError or ValueError otherwise."""
    return valid_span(retention, "retention", "how long a row without a holder is kept")


def valid_reaping(every: object, retention: object, what: str) -> tuple[float, float] | None:
    """Interval of reaping and retention in seconds, None for never; TypeError or ValueError otherwise."""
    if every is None:
        return None
    return valid_ttl(every, what, "the time between two reapings,"), valid_retention(retention)


def valid_quarantine(seconds: object, what: str) -> float:
    """Seconds for which keys are closed after a failover, 0.0 for None; TypeError or ValueError otherwise."""
    if seconds == "auto":
        return QUARANTINE
    return 0.0 if seconds is None else valid_ttl(seconds, what, '"auto", None or')


def valid_history(most: object, what: str) -> int:
    """Number of events to keep; TypeError or ValueError otherwise."""
    if not isinstance(most, int) or isinstance(most, bool):
        raise TypeError(f"{what} is a number of events, 0 for none, not {type(most).__name__}: {_short(most)}")
    if not 0 <= most <= HISTORY_MAX:
        raise ValueError(f"{what} is 0 to {HISTORY_MAX} events, not {most}")
    return most


def valid_tables(prefix: object, schema: object) -> Tables:
    """Names of the tables, of characters that are safe in any quoting; TypeError or ValueError otherwise."""
    schema = "" if schema is None else schema
    for what, name, longest in (("a prefix of tables", prefix, PREFIX_LENGTH), ("a schema", schema, SCHEMA_LENGTH)):
        if not isinstance(name, str):
            raise TypeError(f"{what} is text, not {type(name).__name__}: {_short(name)}")
        if len(name) > longest or not re.fullmatch(r"[A-Za-z0-9_-]*", name):
            raise ValueError(f"{what} has at most {longest} of the characters A-Z, a-z, 0-9, _ and -: {_short(name)}")
    return Tables(str(prefix), str(schema))


def acquire_timeout(blocking: object, timeout: object, own: float | None) -> float | None:
    """The wait that `acquire(blocking, timeout)` asks for, with threading.RLock's rules and errors.

    `timeout` is a number, a timedelta, -1 or None for ever, or Ellipsis for the lock's own. Unlike those locks this
    refuses other numbers for `blocking`, which may be seconds by mistake.
    """
    if blocking not in (True, False):
        raise TypeError(f"blocking is True or False, and a wait in seconds is timeout=: not {_short(blocking)}")
    if timeout is ...:
        return own if blocking else 0.0
    seconds: Any = -1 if timeout is None else timeout.total_seconds() if isinstance(timeout, timedelta) else timeout
    _ = threading.RLock().acquire(bool(blocking), seconds)  # nobody holds it: it only raises what is wrong with them
    if not blocking:
        return 0.0
    return None if seconds < 0 else float(seconds)


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
