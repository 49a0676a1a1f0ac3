"""Reaping: deleting the rows of unused keys, and the places of waiters that died.

One pass goes through a table in the order of its primary key, a page at a time, and reads each row once: no statement
is long, however large the table. One statement deletes the old rows of a page; it checks for each that it is old, and
locks no others. So a database that flushes each commit does that once for a page. If it deleted nothing, perhaps
because a transaction has locked one of the rows, they are deleted one by one.

Any number of passes may run at once and stop anywhere: each statement is a transaction of its own.

Rule: it blocks others for at most the time of one statement, and works for a tenth of the time.
"""

from __future__ import annotations

import json
from typing import Final, NamedTuple

from dblock.core.protocol.sending import Database, send
from dblock.core.protocol.steps import Parameters, Rows, Steps, sleep
from dblock.core.statements.base import Masked, Statement


class Reaped(NamedTuple):
    """Numbers of deleted rows."""

    locks: int
    lock_waiters: int


def reap(database: Database, retention: float) -> Steps[Reaped]:
    """Delete the rows that have been free or expired for longer than `retention` seconds, and places as old."""
    dialect = database.dialect
    locks = yield from _tidy(database, dialect.stale, dialect.reap, retention)
    places = yield from _tidy(database, dialect.dead, dialect.forget, retention)
    return Reaped(locks, places)


_REST: Final = 9
"""Each statement is followed by a pause of so many times its duration."""


def _tidy(database: Database, find: Statement, delete: Statement, retention: float) -> Steps[int]:
    """Go through a table once with `find`, and delete the old rows with `delete`; returns their number."""
    deleted, after = 0, ""
    while True:
        began = database.now()
        found = yield from _send(database, find, {"after": after, "retention": retention})
        names = [name for name, old in found if old]
        gone = yield from _delete(database, delete, names, retention)  # at once, as a reader may come
        yield from _rest(database, began)
        if not found:
            return deleted
        after = found[-1][0]
        if not gone and len(names) > 1:  # one of them is locked
            for name in names:
                began = database.now()
                gone += yield from _delete(database, delete, [name], retention)
                yield from _rest(database, began)
        deleted += gone


def _delete(database: Database, delete: Statement, names: list[str], retention: float) -> Steps[int]:
    if not names:
        return 0
    given: Parameters = {"names": Masked(json.dumps(names, ensure_ascii=False)), "retention": retention}
    brief = database.timing.statement_timeout
    if database.dialect.single_writer:  # it may wait for another writer for half of that; then it tries again
        brief = 2 * database.timing.settle
    return len((yield from _send(database, delete, given, brief)))


def _send(database: Database, statement: Statement, parameters: Parameters, brief: float | None = None) -> Steps[Rows]:
    began = database.now()
    until, answer_by = began + database.timing.retry_budget, None if brief is None else began + brief
    _, rows = yield from send(database, statement, parameters, until, resend=True, answer_by=answer_by)
    return rows


def _rest(database: Database, began: float) -> Steps[None]:
    """Pause after statements that began at that local time; one that took long has mostly waited."""
    yield from sleep(database.store, min((database.now() - began) * _REST, database.timing.attention))
