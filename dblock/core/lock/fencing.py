"""The fence of a fenced write."""

from __future__ import annotations

from dblock.core.lock.base import BaseLock


def fence_of(lock: BaseLock | int) -> int:
    """The fence of a lock that this flow holds or held last, or the number itself; LockNotHeld without a hold."""
    if isinstance(lock, int) and not isinstance(lock, bool):
        return lock
    if not isinstance(lock, BaseLock):
        raise TypeError(f"a fence is a lock or a number, not {type(lock).__name__}")
    if (fence := lock.fence) is None:
        raise lock._not_held("write under")
    return fence
