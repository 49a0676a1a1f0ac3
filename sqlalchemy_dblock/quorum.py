"""The SQLAlchemy face of majority locks: `db_quorum_lock` and its two kinds of lock."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Unpack, overload

from sqlalchemy import Engine

from dblock.majority import locks as core
from dblock.majority.locks import SyncQuorumLock
from dblock.majority.options import Options
from sqlalchemy_dblock.place import AsyncLock, Lock, sync_engine

if TYPE_CHECKING:
    from sqlalchemy.ext.asyncio import AsyncEngine


class QuorumLock(SyncQuorumLock):
    """A lock that is held in a majority of the databases of several Engines; made by `db_quorum_lock`."""


class AsyncQuorumLock(core.AsyncQuorumLock):
    """A lock that is held in a majority of the databases of several AsyncEngines; made by `db_quorum_lock`."""


@overload
def db_quorum_lock(engines: Sequence[Engine], key: str, **options: Unpack[Options]) -> QuorumLock: ...
@overload
def db_quorum_lock(engines: Sequence[AsyncEngine], key: str, **options: Unpack[Options]) -> AsyncQuorumLock: ...
def db_quorum_lock(engines: Any, key: str, **options: Any) -> Any:  # noqa: D417 - they are there
    """A lock on `key` in a majority of several independent databases, not yet taken.

    Args:
        engines: Engines, or AsyncEngines, in the same order wherever the key is used: those who wait do so in the queue
            of the first. The methods are coroutines for AsyncEngines.
        key: 1 to 255 characters. As a decorator's, a format string over the arguments of the call.

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
    if isinstance(engines, str) or not isinstance(engines, Sequence):
        raise TypeError(f"db_quorum_lock() takes a list of engines, not {engines!r}")
    inner = [sync_engine(engine) for engine in engines]
    sync = {isinstance(engine, Engine) for engine in engines}
    if len(sync) > 1:
        raise TypeError("Engines and AsyncEngines cannot be mixed in one lock: one of them blocks")
    if sync == {False}:
        return AsyncQuorumLock([functools.partial(AsyncLock, engine) for engine in inner], key, **options)
    return QuorumLock([functools.partial(Lock, engine) for engine in inner], key, **options)
