"""What can go wrong, as the caller sees it.

    LockError
    |- LockTimeout            (TimeoutError)   the key did not become free within the timeout
    |- LockDeadlock                            flows wait for each other's locks in a circle
    |- LockLost                                the lease ended before the work did; `reason` says how
    |- LockRevoked                             the lock is held, and an administrator asks for it back
    |- LockNotHeld            (RuntimeError)   released, extended or used by a flow that does not hold it
    |- StaleSnapshot          (RuntimeError)   the transaction reads as of a moment before the lock was taken
    |- SynchronousOnlyOperation (RuntimeError) a wait that would block the event loop
    |- InvalidKey             (ValueError)     refused before any I/O
    |- LockUpgradeRefused     (RuntimeError)   write() by a flow that reads; refused before any I/O
    |- WrongKind              (ValueError)     the key is used for a lock of another kind
    |- PermitNotHeld          (LockNotHeld, ValueError) more permits released than this object has acquired
    |- InvalidToken           (ValueError)     not a token of detach() nor a sequencer; refused before any I/O
    |- UnsupportedDatabase                     not PostgreSQL, MySQL, MariaDB or SQLite, or too old a one
    '- LockStoreError                          the database failed; the driver's error is the `__cause__`
       |- StoreConflict                        nothing happened, trying again may help
       |  '- StoreBusy                         the same, because another transaction has locked the row
       |     |- StoreLocked                    or, in SQLite, the whole database
       |     '- PoolExhausted                  or because all connections of the lock are in use
       |- StoreUnreachable                     no connection could be opened: nothing was sent
       |- StoreUnanswered                      the connection broke: the statement may or may not have happened
       '- QuorumUnavailable                    too few databases answer (`dblock.majority`)

Rule: every error keeps its facts as attributes and survives pickling, because Celery and multiprocessing carry
exceptions between processes. Its message is one line that may be shown anywhere, whatever text of others is in it; the
attributes keep such text as it is.
"""

from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING, Final, NamedTuple

from dblock.core.text import printable

if TYPE_CHECKING:
    from dblock.core.pinned import Pinned
    from dblock.core.values import LockInfo


class Reason(StrEnum):
    """Why a lock was lost."""

    EXPIRED = "expired"
    """The lease ended and was not renewed: `renew=False`, `max_hold`, a process that was paused."""
    TAKEN_OVER = "taken over"
    """Another tenure of the key has begun since: the lease had ended, or the key had been freed from outside."""
    FREED = "freed"
    """The key was freed from outside, by an administrator for example."""
    USED = "token used"
    """Its token, which is good once, was used: another flow holds the lock."""
    GONE = "row gone"
    """The row was deleted, a crash of the database took the tenure back, or a replica lacked it."""
    UNREACHABLE = "database unreachable"
    """No renewal was answered in time."""
    RELEASED = "released with all others"
    """This process has released all its locks, with `release_all()`."""
    BLOCKED = "event loop blocked"
    """The event loop on which the renewal was to run did not get to it in time."""


_WHAT_HAPPENED: Final = {
    Reason.EXPIRED: "the lease ended before the work did; use a longer ttl, or let it be renewed (for longer)",
    Reason.TAKEN_OVER: "the lease ended, and it was taken over",
    Reason.FREED: "it was freed by somebody",
    Reason.USED: "its token is good once, and was used",
    Reason.GONE: "its row was deleted, or taken back by a crash of the database or a failover",
    Reason.UNREACHABLE: "the database did not answer in time to renew the lease",
    Reason.RELEASED: "its process has given all its locks back, with release_all()",
    Reason.BLOCKED: "its event loop was blocked for so long that no renewal of the lease could run there",
}
_STOOD_STILL: Final = (
    "no renewal of the lease was sent in time (its process stood still, or was short of processor time)"
)
_WHEN_STALLED: Final = {
    Reason.EXPIRED: f"{_STOOD_STILL}; a longer ttl outlasts that",
    Reason.TAKEN_OVER: f"{_STOOD_STILL}, and it was taken over",
}


class Loss(NamedTuple):
    """Why a lease was lost, and who took the key over, if somebody did."""

    reason: Reason
    holder: LockInfo | None = None
    words: str = ""
    """By whom and why it was freed, where that was said."""
    early: bool = False
    """Whether it was taken over while the lease was good."""
    stalled: bool = False
    """Whether renewals were due and none was sent."""

    def __str__(self) -> str:
        early = "it was freed by somebody (or the database's clock set forward) before its lease ended, and taken over"
        happened = _WHAT_HAPPENED | (_WHEN_STALLED if self.stalled else {})
        used = self.reason is Reason.USED
        what = early if self.early and not (self.words or used) else happened[self.reason]
        what += f" ({self.words})" if self.words else ""
        if self.holder is None:
            return what
        then = "" if used or self.reason is Reason.TAKEN_OVER else "; it was taken over"
        return f"{what}{then} by {self.holder}"


class LockError(Exception):
    """The root of everything that dblock raises on purpose; `key` is the lock's key where there is one."""

    key: str | None

    def __init__(self, message: str = "", *, key: str | None = None, **facts: object) -> None:
        """`facts`: the attributes of its class, by their names."""
        super().__init__(printable(message))
        self.key = key
        vars(self).update(facts)


class LockTimeout(LockError, TimeoutError):
    """The lock was not free within `timeout` seconds; `holder` is the holder as last read.

    `pinned` is the transaction that kept a key without a holder closed, by guard() or a lock on its row.
    """

    holder: LockInfo | None = None
    pinned: Pinned | None = None


class LockDeadlock(LockError):
    """Flows that hold locks wait for each other's in a circle; this flow joined its queue last and gives way.

    A flow that would wait for itself without end, with `reentrant=False`, is a circle of its own.

    `cycle` has, for each flow in turn, the key that it waits for and a description of the flow.
    """

    cycle: tuple[tuple[str, str], ...] = ()


class LockLost(LockError):
    """The lease ended (or may have ended) while the holder still relied on it.

    `reason` is the cause as far as it was known then; `holder` is the next holder of the key, if there is one.
    """

    reason: Reason = Reason.EXPIRED
    holder: LockInfo | None = None


class LockRevoked(LockError):
    """The lock is held, but somebody (an administrator, for example) asks for it back: finish, and release it."""


class LockNotHeld(LockError, RuntimeError):
    """This thread or task does not hold the lock."""


class StaleSnapshot(LockError, RuntimeError):
    """The transaction that guard() was called in reads as of a moment before the lock was taken.

    It does not see what earlier holders wrote, and would overwrite it. The lock itself is held as before.
    """


class SynchronousOnlyOperation(LockError, RuntimeError):
    """A synchronous lock of an Engine had to wait on the thread of a running event loop.

    Waiting would keep every task from running, the holder perhaps among them. Django has an exception of this name for
    the same mistake; the Django app raises, at any use on an event loop, an error that is both.
    """


class PermitNotHeld(LockNotHeld, ValueError):
    """More permits of a semaphore are released than this object has acquired."""


class LockUpgradeRefused(LockError, RuntimeError):
    """This thread or task reads, and so cannot write under the same key: two that did would wait for each other."""


class WrongKind(LockError, ValueError):
    """The key is used for a lock of another kind: a lock, a read-write lock and a semaphore have keys of their own."""


class InvalidKey(LockError, ValueError):
    """A key is 1 to 255 characters of text without NUL."""


class InvalidToken(LockError, ValueError):
    """Not a token made by detach(), or not a sequencer."""


class UnsupportedDatabase(LockError):
    """The database, its version or the driver cannot carry the protocol."""


class LockStoreError(LockError):
    """The database could not do what the lock needed; the driver's error is the `__cause__`."""

    late = 0.0
    """The seconds that an answer was given, if the only known problem is that it did not come in time."""


class StoreConflict(LockStoreError):
    """The database refused for a passing reason (deadlock, serialization, busy) and changed nothing."""


class StoreBusy(StoreConflict):
    """Another transaction has locked the row; nothing was changed."""


class StoreLocked(StoreBusy):
    """Another transaction is writing to the database, which has room for one; nothing was changed."""


class StoreReadOnly(StoreConflict):
    """The server or the session takes no writes, as a standby does until it is promoted; nothing was changed."""


class PoolExhausted(StoreBusy):
    """All connections of the lock are in use; nothing was sent."""


class StoreUnreachable(LockStoreError):
    """No connection to the database could be opened: it is down, cannot be reached, or refuses. Nothing was sent."""


class StoreUnanswered(LockStoreError):
    """The connection broke before the answer: the statement may have been committed, or not."""


PASSING: Final = (StoreConflict, StoreUnreachable, StoreUnanswered)
"""The failures of a database that may pass."""
AWAY: Final = (StoreUnreachable, StoreUnanswered)
"""Those of a database that answers nobody."""
