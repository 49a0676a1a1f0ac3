"""How a flow waits for a key: it looks, with growing pauses, and writes only when the key looks free.

Rule: a waiter holds no connection while it pauses, and no pause overshoots the timeout or the end of the holder's
lease. The fair queue takes the place of `acquire` without touching the rest.
"""

from __future__ import annotations

import math
from typing import Any, Final

from dblock.core.errors import LockStoreError, StoreLocked
from dblock.core.flows import new_owner
from dblock.core.protocol import Database, Unresolved, begin, give_back, inspect, pauses, release
from dblock.core.statements.base import Statement
from dblock.core.steps import Steps, sleep, wait
from dblock.core.values import Grant, LockInfo

GRACE: Final = 1.0
"""Seconds for which even a try without waiting is repeated after deadlocks, serialization failures and the like."""


def acquire(database: Database, wish: dict[str, Any], timeout: float | None) -> Steps[Grant | LockInfo | None]:
    """A grant, or whoever held the key when `timeout` seconds (None: for ever) were over.

    `wish` is what the row is to say, but for the owner's token. None means that the key was free at the last look, but
    others were faster each time. Outages of the database are part of the wait.
    """
    now, dialect, key = database.now, database.dialect, wish["key"]
    start = now()
    deadline = math.inf if timeout is None else start + timeout
    until = max(deadline, start + GRACE)
    statement = dialect.take
    growing = pauses()
    late, tried = 0, False
    while True:
        wish["owner"] = new_owner()
        locked: StoreLocked | None = None
        try:
            grant = yield from _begin(database, statement, wish, until)
        except StoreLocked as error:
            grant, locked = None, error
        except Unresolved:
            if now() >= until:
                raise
            yield from sleep(next(growing))
            continue
        if grant is not None:
            if now() < grant.trusted_until:
                return grant
            _ = yield from release(database, grant.tenure, 1)  # granted too late to be of use
            yield from sleep(next(growing))
        elif locked is None and tried and (left := deadline - now()) > 0:
            yield from wait(min(next(growing), left))  # it looked free, but is being taken, or pinned
        tried = True
        holder = yield from inspect(database, key, until)
        while holder is not None and holder.state == "held":
            left = deadline - now()
            if left <= 0:
                return holder
            yield from wait(min(next(growing), left, holder.remaining))
            holder = yield from inspect(database, key, until)
        statement = dialect.create if holder is None else dialect.take
        if locked is not None:
            if now() >= until:
                raise locked
            yield from sleep(min(next(growing), until - now()))
            continue
        late += now() >= deadline
        if late > 2:
            return None


def _begin(database: Database, statement: Statement, wish: dict[str, Any], until: float) -> Steps[Grant | None]:
    """`begin`; when it is interrupted, what it may have taken is given back."""
    try:
        return (yield from begin(database, statement, wish, until))
    except (GeneratorExit, LockStoreError):
        raise  # nobody drives us any more; or the database has said, as far as it can, what became of it
    except BaseException:
        yield from give_back(database, wish["key"], wish["owner"])
        raise
