"""What the executors of both faces share: a driver's error becomes one of ours, in one place.

Rule: an error that leaves here says what it means for the protocol by its class, and has the driver's error as its
cause.
"""

from __future__ import annotations

from dblock.core.errors import LockStoreError, StoreBusy, StoreConflict, StoreLocked, StoreUnanswered
from dblock.core.statements.base import Failure
from dblock.core.steps import Execute


def store_error(
    failure: Failure, error: BaseException, step: Execute, *, create_table: str, place: str
) -> LockStoreError:
    """The error to raise from the driver's `error` of `step`, which means `failure`.

    `create_table` says what makes the missing table, `place` which database it is.
    """
    key = step.parameters.get("key")
    key = None if key is None else str(key)
    if failure is Failure.NO_TABLE:
        tables = "`locks` or no table `lock_waiters`" if "lock_waiters" in step.statement.sql else "`locks`"
        return LockStoreError(f"{place} has no table {tables}: {create_table}", key=key)
    what = f"{step.statement.name} {key!r}" if key else step.statement.name
    detail = f"{type(error).__name__}: {str(error).strip()}"
    if failure is Failure.CONFLICT:
        return StoreConflict(f"{place} kept refusing to {what}: {detail}", key=key)
    if failure is Failure.LOCKED:
        hint = "somebody's transaction, your own perhaps, has been writing all the time"
        return StoreLocked(f"{place} kept refusing to {what}: {detail}; {hint}", key=key)
    if failure is Failure.BUSY:
        return StoreBusy(f"another transaction keeps {place} from {what}: {detail}", key=key)
    if failure is Failure.LOST:
        return StoreUnanswered(f"{place} did not answer when asked to {what}: {detail}", key=key)
    return LockStoreError(f"{place} refused to {what}: {detail}", key=key)


def unstorable(*, place: str) -> LockStoreError:
    """The error for text that the connection's character set lacks; the driver's would quote the whole statement."""
    return LockStoreError(
        f"{place} is connected with a character set that lacks characters of the key or label: use UTF-8"
    )


def unreachable(error: BaseException, *, place: str) -> StoreConflict:
    """The error for a connection that could not be opened: nothing was sent."""
    return StoreConflict(f"cannot connect to {place}: {type(error).__name__}: {str(error).strip()}")
