"""Deleting the rows of keys that nobody uses any more, and of those who died while they waited.

One pass goes through a table in the order of its primary key, a page at a time, and looks at each row once: no
statement is long, however large the table. Of each page the old rows are deleted by one statement, which sees for each
of them that it is old, and locks no others; so a database that flushes each commit does that once for a page. If it
found nothing, maybe since somebody has locked one of them, they are deleted one by one.

It may run any number of times at once and stop anywhere: each statement is a transaction of its own.

Rule: nobody waits for it for longer than one statement takes; it works for a tenth of the time.
"""

from __future__ import annotations

import json
from typing import Final, NamedTuple

from dblock.core.protocol.sending import Database, send
from dblock.core.protocol.steps import Parameters, Rows, Steps, sleep
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
    locks = yield from _tidy(database, dialect.stale, dialect.reap, retention)
    places = yield from _tidy(database, dialect.queue.dead, dialect.queue.forget, retention)
    return Reaped(locks, places)


_BRIEF: Final = 0.04
"""Seconds that a deletion has where one writes at a time, half of which it may wait for its turn: it tries again."""
_REST: Final = 9
"""Each statement is followed by a pause that is so many times as long,"""
_LONGEST_REST: Final = 1.0
"""but no longer than so many seconds: one that takes as long as that has waited, and worked for a part of the time."""


def _tidy(database: Database, find: Statement, delete: Statement, retention: float) -> Steps[int]:
    """Go through the table once by what `find` finds, and delete what is old; how many there were."""
    deleted, after = 0, ""
    while True:
        found = yield from _send(database, find, {"after": after, "retention": retention})
        if not found:
            return deleted
        after = found[-1][0]
        names = [name for name, old in found if old]
        gone = yield from _delete(database, delete, names, retention)
        if not gone and len(names) > 1:  # one of them is locked
            for name in names:
                gone += yield from _delete(database, delete, [name], retention)
        deleted += gone


def _delete(database: Database, delete: Statement, names: list[str], retention: float) -> Steps[int]:
    if not names:
        return 0
    given: Parameters = {"names": json.dumps(names, ensure_ascii=False), "retention": retention}
    brief = _BRIEF if database.dialect.single_writer else database.timing.answer
    return len((yield from _send(database, delete, given, brief)))


def _send(database: Database, statement: Statement, parameters: Parameters, brief: float | None = None) -> Steps[Rows]:
    """Execute, and rest."""
    began = database.now()
    until, answer = began + database.timing.patience, None if brief is None else began + brief
    _, rows = yield from send(database, statement, parameters, until, resend=True, answer=answer)
    yield from sleep(min((database.now() - began) * _REST, _LONGEST_REST))
    return rows
