"""How a flow waits for a key: it looks, with growing pauses, and writes only when the key looks free.

Rule: a waiter holds no connection while it pauses, and no pause overshoots the timeout or the end of the holder's
lease. The fair queue takes the place of `acquire` without touching the rest.
"""

from __future__ import annotations

import math
from typing import Any, Final

from dblock.core.errors import LockStoreError
from dblock.core.flows import Flow
from dblock.core.protocol import PATIENCE, Database, Unresolved, begin, give_back, inspect, pauses, release
from dblock.core.statements.base import Statement
from dblock.core.steps import Steps, sleep
from dblock.core.values import Grant, LockInfo

GRACE: Final = 1.0
"""Seconds for which even a try without waiting is repeated after deadlocks, serialization failures and the like."""


def acquire(
    database: Database, wish: dict[str, Any], flow: Flow, timeout: float | None
) -> Steps[Grant | LockInfo | None]:
    """A grant, or whoever held the key when `timeout` seconds (None: for ever) were over.

    `wish` is what the row is to say, with the flow's owner token. None means that the key was free at the last look,
    but others were faster each time.
    """
    now, dialect, key = database.now, database.dialect, wish["key"]
    start = now()
    deadline = math.inf if timeout is None else start + timeout
    until = min(start + PATIENCE, max(deadline, start + GRACE))
    statement = dialect.take
    late = 0
    while True:
        try:
            grant = yield from _begin(database, statement, wish, flow, until)
        except Unresolved:
            if now() >= until:
                raise
            wish["owner"] = flow.owner
            continue
        if grant is not None:
            if now() < grant.trusted_until:
                return grant
            _ = yield from release(database, grant.tenure, 1)  # granted too late to be of use
        growing = pauses()
        holder = yield from inspect(database, key, until)
        while holder is not None and holder.state == "held":
            left = deadline - now()
            if left <= 0:
                return holder
            until = deadline  # once we wait, outages of the database are part of the wait
            yield from sleep(min(next(growing), left, holder.remaining))
            holder = yield from inspect(database, key, until)
        statement = dialect.create if holder is None else dialect.take
        late += now() >= deadline
        if late > 2:
            return None


def _begin(
    database: Database, statement: Statement, wish: dict[str, Any], flow: Flow, until: float
) -> Steps[Grant | None]:
    """`begin`; whatever breaks it off, what it may have taken is given back and its token used no more."""
    try:
        return (yield from begin(database, statement, wish, until))
    except GeneratorExit:
        raise  # nobody drives us any more
    except BaseException as error:
        flow.disown()
        if not isinstance(error, LockStoreError):  # interrupted
            yield from give_back(database, wish["key"], wish["owner"])
        raise
