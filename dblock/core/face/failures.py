"""What a driver's error means, in words.

Rule: an error of ours says by its class what it means for the protocol, and in its text what somebody can do about it.
"""

from __future__ import annotations

from typing import Any, Final, Protocol

from dblock.core.errors import (
    LockError,
    LockStoreError,
    StaleSnapshot,
    StoreBusy,
    StoreConflict,
    StoreLocked,
    StoreUnanswered,
)
from dblock.core.protocol.sending import Database
from dblock.core.protocol.steps import Execute
from dblock.core.statements.base import Failure


class Described(Protocol):
    """A store, for people."""

    database: Database
    _described: str
    """Which database it is."""
    _create_table: str
    """What makes the table."""
    _rename_tables: str
    """What gives the tables other names."""

    def _why_locked(self, error: BaseException, /) -> str:
        """What may have locked the whole database."""
        ...


_INDEXES: Final = ("locks_pin ON locks (lock_key)", "lock_waiters_queue ON lock_waiters (lock_key, ticket)")
"""Those that statements name."""

_TABLES: Final = ("locks", "lock_waiters", "lock_events", "lock_states")

SCHEMA: Final = frozenset({Failure.NO_TABLE, Failure.OTHER_TABLE})
"""These tell of the tables, not of the statement."""


def schema_error(failure: Failure, error: BaseException, step: Execute, store: Described) -> LockStoreError:
    """The error to raise from the driver's `error` of `step`: the tables are not as they should be."""
    dialect, database = store.database.dialect, store._described
    names = [f"`{dialect.tables.name(each, '')}`" for each in _TABLES if each in step.statement.sql]
    if failure is Failure.NO_TABLE:
        text = f"{database} has no table {' or no table '.join(names)}: {store._create_table}"
        return LockStoreError(text, key=key_of(step))
    detail = _first_line(error)
    missing = next((index for index in _INDEXES if index.partition(" ")[0] in detail), "")
    make = f" ({dialect.tables.named(f'CREATE UNIQUE INDEX {missing}', dialect.quote)})" if missing else ""
    return LockStoreError(
        f"{' or '.join(names)} in {database} is not as dblock made it: {type(error).__name__}: {detail}. If it is "
        f"dblock's, run its migrations to their end{make}; if it is another application's, {store._rename_tables}",
        key=key_of(step),
    )


def store_error(failure: Failure, error: BaseException, step: Execute, store: Described) -> LockError:
    """The error to raise from the driver's `error` of `step`, which means `failure`."""
    key, what, database = key_of(step), _what(step), store._described
    detail = f"{type(error).__name__}: {_first_line(error)}"
    kind: type[LockError]
    match failure:
        case Failure.CONFLICT | Failure.SPENT:
            kind, text = StoreConflict, f"{database} kept refusing to {what}: {detail}"
        case Failure.LOCKED:
            kind, text = StoreLocked, f"{database} kept refusing to {what}: {detail}; {store._why_locked(error)}"
        case Failure.BUSY:
            kind, text = StoreBusy, f"{database} could not {what}, because another transaction has locked it: {detail}"
        case Failure.STALE:
            hint = "the transaction has read what others have changed since: take the lock, and then begin it"
            kind, text = StaleSnapshot, f"{database} refused to {what}: {detail}; {hint}"
        case Failure.NO_RIGHT:
            hint = "whoever locks needs SELECT, INSERT, UPDATE and DELETE on the lock's tables (GRANT)"
            kind, text = LockStoreError, f"{database} refused to {what}: {detail}; {hint}"
        case Failure.DISCONNECTED:
            kind, text = StoreUnanswered, f"{database} did not answer when asked to {what}: {detail}"
        case _:
            kind, text = LockStoreError, f"{database} refused to {what}: {detail}"
    return kind(text, key=key)


def late(step: Execute, seconds: float, *, database: str) -> StoreUnanswered:
    """The error for a statement that was not answered in time."""
    return StoreUnanswered(
        f"{database} did not answer within {seconds:.2g} s when asked to {_what(step)}", key=key_of(step)
    )


def unstorable(*, database: str) -> LockStoreError:
    """The error for text that the connection's character set lacks; the driver's would quote the whole statement."""
    return LockStoreError(
        f"{database} is connected with a character set that lacks characters of the key or label: use UTF-8"
    )


def unreachable(error: BaseException, *, database: str) -> StoreConflict:
    """The error for a connection that could not be opened: nothing was sent."""
    return StoreConflict(f"cannot connect to {database}: {type(error).__name__}: {str(error).strip()}")


def _first_line(error: BaseException) -> str:
    """What a driver says, without the statement that it may quote below."""
    return str(error).strip().partition("\n")[0]


def key_of(step: Execute) -> str | None:
    key: Any = step.parameters.get("key")
    return None if key is None else str(key)


def _what(step: Execute) -> str:
    key = key_of(step)
    return f"{step.statement.name} {key!r}" if key else step.statement.name
