"""Hints for wrong arguments of `db_lock`; loaded when one is given.

Rule: the error for a mistyped option, or for another library's name of it, names the option to use.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable
from typing import Final

from dblock.core.options import Given

_MEANINGS: Final = {
    "key": "the name of the lock, which comes first",
    "engine": "which comes first, before the key",
    "using": "the database alias",
    "session": "the Session whose transaction the lock is kept for",
    "release": "whether an open transaction keeps the lock",
}
"""Of what only one face has, or tells in its own words; `Given` tells the others."""
_WAIT = ("timeout",)
_LIFE = ("ttl",)
_WHERE = ("using", "engine")
_ELSEWHERE: Final[dict[str, tuple[str, ...]]] = {
    **dict.fromkeys(("name", "lock_name", "lock_id", "resource"), ("key",)),
    **dict.fromkeys(("wait", "wait_time", "wait_timeout", "max_wait", "blocking", "blocking_timeout"), _WAIT),
    **dict.fromkeys(("acquire_timeout", "nowait"), _WAIT),
    **dict.fromkeys(("expire", "expires", "expiry", "expiration", "lease", "lease_time", "life", "lifetime"), _LIFE),
    **dict.fromkeys(("duration", "lock_at_most_for"), _LIFE),
    "lock_timeout": ("timeout", "ttl"),  # a database's wait, and a Redis lock's life
    **dict.fromkeys(("auto_renewal", "auto_renew", "autorenew", "watchdog"), ("renew",)),
    **dict.fromkeys(("description", "metadata"), ("label",)),
    "lock_at_least_for": ("min_hold",),
    "max_lifetime": ("max_hold",),
    **dict.fromkeys(("using", "database", "alias", "engine", "bind", "connection"), _WHERE),
    **dict.fromkeys(("session", "xact"), ("session", "release")),
}
"""Names of options in other libraries, and in the other face."""


def unknown_options(unknown: Iterable[str], known: Iterable[str], of: str = "db_lock") -> TypeError:
    """The error for unknown options of a function, with the nearest known and all. `known`: those of this face."""
    ours = list(known)
    told = [f"no option {name!r}{_nearest(name, {*ours, 'key'})}" for name in unknown]
    return TypeError(f"{of} has {', and '.join(told)}; its options are {', '.join(ours)}")


def unnamed_options(given: tuple[object, ...]) -> TypeError:
    """The error for positional arguments behind the key, such as the ttl or the timeout in other libraries."""
    return TypeError(f"db_lock takes the key alone without a name: say ttl= or timeout= for {given[0]!r}")


def no_engine(given: object) -> TypeError:
    """The error for something else in the place of an Engine, such as a Session or a URL."""
    its = "engine" if hasattr(given, "engine") else "bind" if hasattr(given, "sync_session") else "get_bind()"
    hint = f": its `.{its}`, since the lock has connections of its own" if hasattr(given, "in_transaction") else ""
    kind = type(given).__name__  # and no more: a URL may have a password
    return TypeError(f"an Engine or an AsyncEngine comes first, as in db_lock(engine, key), not {kind}{hint}")


def _nearest(name: str, known: set[str]) -> str:
    if "using" not in known:
        known = {*known, "engine"}
    near = [each for each in _ELSEWHERE.get(name.lower(), ()) if each in known]
    near = near or difflib.get_close_matches(name.lower(), known, 1)
    said = [f"{each} ({means})" if (means := _meaning(each)) else each for each in near]
    return f" (did you mean {' or '.join(said)}?)" if said else ""


def _meaning(option: str) -> str:
    told = re.search(rf"^ *{option}: (.+?)[;.]", Given.__doc__ or "", re.MULTILINE | re.DOTALL)
    return _MEANINGS.get(option, "") if told is None else " ".join(told[1].split())
