"""The keys of shares, and what is checked of keys that have shares.

The key of a share begins with the key of its door, then `SHARE`, then `r` and a random name for a reader, or `p` and
the number of the slot for a permit.
"""

from __future__ import annotations

import os
import re
import time
from typing import Final

from dblock.core.errors import InvalidKey
from dblock.core.validation import valid_key
from dblock.core.values import SHARE

KEY_LENGTH: Final = 230
"""Most characters of a key with shares, whose rows have longer keys."""
PERMITS_MAX: Final = 10_000
END: Final = f"{SHARE}s"
"""The end of an end key."""
_SHARE_KEY: Final = re.compile(rf"(.+){SHARE}(?:r [0-9a-f]{{16}}|p [0-9]{{5}}|s)", re.DOTALL)


def bounds_of_shares(key: str) -> dict[str, str]:
    """The texts between which the keys of a key's shares are, as parameters of statements."""
    return {"low": key + SHARE, "high": end_key(key)}


def end_key(key: str) -> str:
    """The key of the row behind the shares of a key, where a pin of the next key would keep readers out otherwise."""
    return f"{key}{END}"


def refuse_several(databases: object, what: str) -> None:
    """Raise TypeError for a list of databases: semaphores and read-write locks are in one."""
    if isinstance(databases, list | tuple):
        why = {
            "db_semaphore": "of the clients A and B, B and C, A and C on three databases with room for two each has a "
            "majority, so that all three would be in",
            "db_rwlock": "a reader and a writer that have the doors of different databases would wait for each other",
        }[what]
        raise TypeError(f"{what}() takes one database, and no majority of several: {why}. See db_quorum_lock()")


def new_name() -> str:
    """A name for a reader's row, which sorts behind those of earlier readers."""
    return f"{time.time_ns() // 1000:013x}{os.urandom(2).hex()[1:]}"


def reader_key(key: str, name: str) -> str:
    """The key of a reader's row; `name` is 16 hexadecimal digits."""
    return f"{key}{SHARE}r {name}"


def slot_key(key: str, slot: int) -> str:
    """The key of a slot; their order is that of their numbers."""
    return f"{key}{SHARE}p {slot:05d}"


def valid_row_key(key: object) -> str:
    """`key` if it is the key of a row, a share's included; else InvalidKey."""
    if isinstance(key, str) and (share := _SHARE_KEY.fullmatch(key)):
        _ = valid_shared_key(share[1])
        return key
    return valid_key(key)


def valid_shared_key(key: object) -> str:
    """`key` if it is short enough to have shares; else InvalidKey."""
    key = valid_key(key)
    if len(key) > KEY_LENGTH:
        raise InvalidKey(
            f"the key of a read-write lock or a semaphore has at most {KEY_LENGTH} characters, not {len(key)}: "
            f"{key[:40]!r}...; hash a longer name",
            key=key,
        )
    return key


def valid_permits(permits: object, name: str = "permits") -> int:
    """A number of permits, which an error calls `name`; TypeError or ValueError otherwise."""
    if not isinstance(permits, int) or isinstance(permits, bool):
        raise TypeError(f"{name} is a number, not {type(permits).__name__}")
    if not 1 <= permits <= PERMITS_MAX:
        raise ValueError(f"{name} is 1 to {PERMITS_MAX}, not {permits}")
    return permits
