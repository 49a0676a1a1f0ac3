"""Reaping: deleting the rows of unused keys, and the places of waiters that died.

One pass goes through a table in the order of its primary key, a page at a time, and reads each row once: no statement
is long, however large the table. One statement deletes the old rows of a page; it checks for each that it is old, and
locks no others. So a database that flushes each commit does that once for a page. While a transaction has locked one of
these rows they stay: a later pass deletes them.

Any number of passes may run at once and stop anywhere: each statement is a transaction of its own.

Rule: it blocks others for at most the time of one statement, and works for a tenth of the time.
"""

from __future__ import annotations

import json
from typing import Final, NamedTuple

from dblock.core.protocol.sending import Database, send
from dblock.core.protocol.steps import Steps, sleep
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
"""What is done with a page is followed by a pause of so many times its duration."""


def _tidy(database: Database, find: Statement, delete: Statement, retention: float) -> Steps[int]:
    """Go through a table once with `find`, and delete the old rows with `delete`; returns their number."""
    deleted, after = 0, ""
    while True:
        began = database.now()
        _, found = yield from send(database, find, {"after": after, "retention": retention}, resend=True)
        if names := [name for name, old in found if old]:  # deleted at once, as a reader may come
            listed = Masked(json.dumps(names, ensure_ascii=False))
            _, rows = yield from send(database, delete, {"names": listed, "retention": retention}, resend=True)
            deleted += len(rows)
        # What took long has mostly waited.
        yield from sleep(database.store, min((database.now() - began) * _REST, database.timing.attention))
        if not found:
            return deleted
        after = found[-1][0]
