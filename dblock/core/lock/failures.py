"""The lock's errors for failures of drivers.

Rule: the class of an error says what it means for the protocol, its text what the user can do about it.
"""

from __future__ import annotations

from typing import Any, Final

from dblock.core.protocol.steps import Execute
from dblock.core.statements.dialect import Dialect

_INDEXES: Final = ("locks_pin ON locks (lock_key)", "lock_waiters_queue ON lock_waiters (lock_key, ticket)")
"""The indexes that statements name."""

_TABLES: Final = ("locks", "lock_waiters", "lock_events", "lock_states", "lock_epoch")

# What goes wrong beside the errors of statements, each of which has its text in `Failure`.
LATE: Final = "{database} did not answer within {seconds:.2g} s when asked to {what}"
UNREACHABLE: Final = "cannot connect to {database}: {detail}"
CONVERTED: Final = (
    "{database} answered with a {type} when asked to {what}: a converter of sqlite3.register_converter() has read it. "
    "Open the engine without detect_types, or register the converter for a type that no column of the lock's tables has"
)
UNSTORABLE: Final = (  # the driver's text would quote the statement
    "{database} is connected with a character set that lacks characters of the key or label: use UTF-8"
)

WAIT_LONGER: Final = "wait longer with timeout=, or see to the holder"

_VERBS: Final = {
    **{name: name for name in ("take", "release", "renew", "extend", "attach", "detach", "revoke", "reap")},
    **dict.fromkeys(("create", "read", "take_slot", "set_count", "take_proposed"), "take"),
    **dict.fromkeys(("leave_read", "leave_slot", "hand_over_local", "end_expired", "free"), "release"),
    **dict.fromkeys(("join", "announce", "queue_status", "grant", "accept", "adopt_place"), "queue for"),
    **dict.fromkeys(("first_waiter", "heartbeat", "leave_queue"), "queue for"),
    "pin": "guard",
}
"""What statements do that are not only reading, by their names."""


def described(error: BaseException, step: Execute, dialect: Dialect) -> dict[str, str]:
    """What the text of a `Failure` says of the driver's `error` of `step`."""
    message = str(error).strip().partition("\n")[0]  # the statement may be quoted below
    tables = [each for each in _TABLES if each in step.statement.sql]
    if "lock_epoch" in message:  # the others are probably there
        tables = ["lock_epoch"]
    index = next((index for index in _INDEXES if index.partition(" ")[0] in message), "")
    return {
        "detail": f"{type(error).__name__}: {message}",
        "tables": " or ".join(f"`{dialect.tables.name(each, '')}`" for each in tables),
        "create_index": index and f" ({dialect.tables.named(f'CREATE UNIQUE INDEX {index}', dialect.quote)})",
    }


def key_of(step: Execute) -> str | None:
    key: Any = step.parameters.get("key")
    return None if key is None else str(key)


def what(step: Execute) -> str:
    """What a statement does, as users know it."""
    key, verb = key_of(step), _VERBS.get(step.statement.name, "read")
    return f"{verb} {key!r}" if key else f"{verb} keys"
