"""Whether locks can be acquired. For the endpoints by which a site says whether it is ready, of either face.

Rule: what is looked at is what locks need, by the way that all of them go: a key is taken, which reaches the database,
finds the table and writes, and is given back. Each machine has a key of its own, so that probes of many wait for nobody
and leave one row each behind. Observers, metrics and the history are not told of it.
"""

from __future__ import annotations

import time
from typing import Any, Final, overload

from dblock.core.identity import process_identity
from dblock.core.observing.events import HEALTH
from dblock.faces import made

TTL: Final = 5.0
"""Seconds for which a probe that was killed keeps those of its machine from taking their key, at most."""


@overload
def check(bind: str | None = None, *, timeout: float = 2.0) -> float: ...
@overload
def check(bind: Any, *, timeout: float = 2.0) -> Any: ...
def check(bind: Any = None, *, timeout: float = 2.0) -> Any:
    """The seconds that it took to take a key and give it back. To be awaited for an AsyncEngine.

    Args:
        bind: the Engine, AsyncEngine or Django's database alias; by default where Django's `db_lock` has its keys.
        timeout: seconds for the take. The return takes five more at most, if the database goes away in between.

    Raises:
        LockError: locks are not to be had, and why: LockTimeout or LockStoreError.
    """
    lock = _lock(bind, timeout)
    return _atake(lock) if hasattr(bind, "sync_engine") else _take(lock)


async def acheck(alias: str | None = None, *, timeout: float = 2.0) -> float:
    """`check` for Django's async views."""
    return await _atake(_lock(alias, timeout))


def _lock(bind: Any, timeout: float) -> Any:
    key = f"{HEALTH}{process_identity()['host']}"[:255]
    return made(bind, "db_lock", key, ttl=TTL, timeout=timeout, renew=False, slow_wait=None, release="now")


def _take(lock: Any) -> float:
    began = time.monotonic()
    with lock:
        pass
    return time.monotonic() - began


async def _atake(lock: Any) -> float:
    began = time.monotonic()
    async with lock:
        pass
    return time.monotonic() - began
