"""Deleting the rows of keys that nobody uses any more, and of those who died while they waited.

One pass goes through a table in the order of its primary key, a page at a time, and looks at each row once: no
statement is long, however large the table. It may run any number of times at once and stop anywhere, since each row is
deleted by a statement of its own, which sees for itself that it is old.

Rule: nobody waits for it for longer than one row takes.
"""

from __future__ import annotations

from typing import Final, NamedTuple

from dblock.core.protocol.sending import Database, send
from dblock.core.protocol.steps import Parameters, Steps, sleep
from dblock.core.statements.base import Statement


class Reaped(NamedTuple):
    """How many rows were deleted."""

    locks: int
    lock_waiters: int


def reap(database: Database, retention: float) -> Steps[Reaped]:
    """Delete the rows that have been free or expired for longer than `retention` seconds; how many there were.

    And places in queues that ended as long ago.
    """
    dialect = database.dialect
    locks = yield from _tidy(database, dialect.stale, dialect.reap, "key", retention)
    places = yield from _tidy(database, dialect.queue.dead, dialect.queue.forget, "owner", retention)
    return Reaped(locks, places)


_BRIEF: Final = 0.04
"""Seconds that a deletion has where one writes at a time, half of which it may wait for its turn: it tries again."""
_BURST: Final = 0.005
"""So many seconds of statements are followed by a pause that is a few times as long: whoever works waits for one row at
most, and shares processor, disk and, on SQLite, the only writer with a part of what would be possible."""


def _tidy(database: Database, find: Statement, delete: Statement, name: str, retention: float) -> Steps[int]:
    """Go through the table once by what `find` finds, and delete what is old, row by row; how many there were."""
    deleted, spent, after = 0, 0.0, ""
    rest, brief = (9, _BRIEF) if database.dialect.single_writer else (3, database.timing.answer)
    while True:
        began = database.now()
        parameters: Parameters = {"after": after, "retention": retention}
        _, found = yield from send(database, find, parameters, began + database.timing.patience, resend=True)
        if not found:
            return deleted
        spent += database.now() - began
        for after, old in found:
            if spent > _BURST:
                yield from sleep(spent * rest)
                spent = 0.0
            if old:
                began = database.now()
                until, answer = began + database.timing.patience, began + brief
                _, rows = yield from send(
                    database, delete, {name: after, "retention": retention}, until, resend=True, answer=answer
                )
                deleted += len(rows)
                spent += database.now() - began
