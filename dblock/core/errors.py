"""What can go wrong, as the caller sees it.

    LockError
    |- LockTimeout            (TimeoutError)   somebody else held the key for as long as we were told to wait
    |- LockDeadlock                            flows wait for each other's locks in a circle
    |- LockLost                                the lease ended before the work did; `reason` says how
    |- LockRevoked                             it is held, and somebody asks for it back
    |- LockNotHeld            (RuntimeError)   released, extended or used by a flow that does not hold it
    |- StaleSnapshot          (RuntimeError)   the transaction reads as of a moment before the lock was taken
    |- SynchronousOnlyOperation (RuntimeError) a wait that would block the event loop
    |- InvalidKey             (ValueError)     refused before any I/O
    |- InvalidToken           (ValueError)     not a token of detach() nor a sequencer; refused before any I/O
    |- UnsupportedDatabase                     not PostgreSQL, MySQL, MariaDB or SQLite, or too old a one
    '- LockStoreError                          the database failed; the driver's error is the `__cause__`
       |- StoreConflict                        nothing happened, trying again may help
       |  '- StoreBusy                         the same, because another transaction has locked the row
       |     |- StoreLocked                    or, in SQLite, the whole database
       |     '- PoolExhausted                  or because all connections of the lock are in use
       '- StoreUnanswered                      the connection broke: the statement may or may not have happened

Rule: every error keeps its facts as attributes and survives pickling, because Celery and multiprocessing carry
exceptions between processes.
"""

from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dblock.core.values import LockInfo


class Reason(StrEnum):
    """Why a lock was lost."""

    EXPIRED = "expired"
    """The lease ended and was not renewed: `renew=False`, `max_hold`, a process that was paused."""
    TAKEN_OVER = "taken over"
    """Somebody else has or had the key since: the lease had ended, or somebody had freed the key."""
    FREED = "freed"
    """Somebody freed the key, an administrator for example."""
    GONE = "row gone"
    """The row was deleted, a crash of the database took the tenure back, or a replica lacked it."""
    UNREACHABLE = "database unreachable"
    """No renewal was answered in time."""
    RELEASED = "released with all others"
    """This process has given back all its locks, with `release_all()`."""
    BLOCKED = "event loop blocked"
    """The event loop on which the renewal was to run did not get to it in time."""


class LockError(Exception):
    """The root of everything that dblock raises on purpose; `key` is the lock's key where there is one."""

    key: str | None

    def __init__(self, message: str = "", *, key: str | None = None) -> None:
        super().__init__(message)
        self.key = key


class LockTimeout(LockError, TimeoutError):
    """The lock was not free within `timeout` seconds; `holder` says who had it when we last looked."""

    holder: LockInfo | None

    def __init__(self, message: str = "", *, key: str | None = None, holder: LockInfo | None = None) -> None:
        super().__init__(message, key=key)
        self.holder = holder


class LockDeadlock(LockError):
    """Flows that hold locks wait for each other's in a circle; this one joined its queue last and gives way.

    `cycle` has, for each of them in turn, the key that it waits for and who it is.
    """

    cycle: tuple[tuple[str, str], ...]

    def __init__(self, message: str = "", *, key: str | None = None, cycle: tuple[tuple[str, str], ...] = ()) -> None:
        super().__init__(message, key=key)
        self.cycle = cycle


class LockLost(LockError):
    """The lease ended (or may have ended) while the holder still relied on it.

    `reason` is why, as far as it was known then; `holder` is who took the key over, if somebody did.
    """

    reason: Reason
    holder: LockInfo | None

    def __init__(
        self,
        message: str = "",
        *,
        key: str | None = None,
        reason: Reason = Reason.EXPIRED,
        holder: LockInfo | None = None,
    ) -> None:
        super().__init__(message, key=key)
        self.reason = reason
        self.holder = holder


class LockRevoked(LockError):
    """Somebody, an administrator for example, asks for the lock back, which is held: finish, and release it."""


class LockNotHeld(LockError, RuntimeError):
    """This thread or task does not hold the lock."""


class StaleSnapshot(LockError, RuntimeError):
    """The transaction that guard() was called in reads as of a moment before the lock was taken.

    It does not see what earlier holders wrote, and would overwrite it. The lock itself is held as before.
    """


class SynchronousOnlyOperation(LockError, RuntimeError):
    """The lock of an Engine, held by somebody, was to be waited for on the thread of a running event loop.

    That would keep every task from running, the holder perhaps among them. Named as Django names the same mistake; what
    the Django app raises, at any use there, is both.
    """


class InvalidKey(LockError, ValueError):
    """A key is 1 to 255 characters of text without NUL."""


class InvalidToken(LockError, ValueError):
    """Not a token made by detach(), or not a sequencer."""


class UnsupportedDatabase(LockError):
    """The database, its version or the driver cannot carry the protocol."""


class LockStoreError(LockError):
    """The database could not do what the lock needed; the driver's error is the `__cause__`."""


class StoreConflict(LockStoreError):
    """The database refused for a passing reason (deadlock, serialization, busy) and changed nothing."""


class StoreBusy(StoreConflict):
    """Another transaction has locked the row; nothing was changed."""


class StoreLocked(StoreBusy):
    """Another transaction is writing to the database, which has room for one; nothing was changed."""


class PoolExhausted(StoreBusy):
    """All connections of the lock are in use; nothing was sent."""


class StoreUnanswered(LockStoreError):
    """The connection broke before the answer: the statement may have been committed, or not."""
