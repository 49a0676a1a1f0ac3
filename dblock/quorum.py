"""The Django face of majority locks: `db_quorum_lock` and its `QuorumLock`."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Unpack

from dblock.majority.locks import AsyncQuorumLock, SyncQuorumLock
from dblock.majority.options import Options
from dblock.place import Lock, Twins


class QuorumLock(Twins, SyncQuorumLock):
    """A lock that is held in a majority of several databases; made by `db_quorum_lock`.

    Use it as `with`, as `async with`, as a decorator of `def` and `async def`, or through the methods, each of which
    has an asynchronous twin that begins with an `a`.
    """

    aowned = AsyncQuorumLock.owned
    alocked = AsyncQuorumLock.locked
    ainspect = AsyncQuorumLock.inspect


def db_quorum_lock(key: str, *, using: Sequence[str], **options: Unpack[Options]) -> QuorumLock:
    """A lock on `key` in a majority of several independent databases, not yet taken.

    Args:
        key: 1 to 255 characters. As a decorator's, a format string over the arguments of the call.
        using: the aliases of the databases, in the same order wherever the key is used: those who wait do so in the
            queue of the first.

    Keyword Args:
        ttl, timeout, label, on_lost, on_at_risk, on_revoke, max_hold, interrupt, slow_wait, on_busy, otherwise: as of
            `db_lock`; callbacks are called with this lock.
        min_hold: as of `db_lock`, in each database.
        answer: longest wait for the answer of one database, in seconds; by default a tenth of the ttl, at most 0.5.

    Raises:
        InvalidKey, UnsupportedDatabase, TypeError: as `db_lock`.
        ValueError: as `db_lock`, and for a database that is given twice.
        QuorumUnavailable: by acquire, extend, verify, owned and locked: fewer than a majority could be asked.
    """
    if isinstance(using, str):
        raise TypeError(f"using is a list of aliases, not {using!r}")
    return QuorumLock([functools.partial(Lock, using=alias) for alias in using], key, **options)
