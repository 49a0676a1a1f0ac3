"""How a flow gets a key: it tries, and if somebody else has it, it waits.

Rule: a key that was taken is either returned or given back, whatever breaks the attempt off.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable
from enum import Enum
from typing import Any, Final, Literal

from dblock.core.acquire import local_queue
from dblock.core.acquire.local_queue import TakeAttempt
from dblock.core.acquire.waiting import LEAVE_TIMEOUT, Outcome, PollingOnly, Waiter, WaiterServices
from dblock.core.errors import LockStoreError, LockTimeout, StoreBusy, StoreLocked, StoreUnanswered
from dblock.core.holding.flows import new_owner
from dblock.core.protocol import queue
from dblock.core.protocol.queue import give_back
from dblock.core.protocol.steps import Steps, sleep
from dblock.core.protocol.tenures import WORTH, Database, Unresolved, begin, inspect, pauses
from dblock.core.statements.base import Statement
from dblock.core.values import Grant, LockInfo
from dblock.core.wakeup import registry

TRY: Final = 0.25
"""Seconds within which even a try without waiting has its answer, whatever the database says or does not say."""


class _Attempt(Enum):
    REFUSED = "the database could not say"


_REFUSED: Final = _Attempt.REFUSED


def acquire(
    database: Database,
    request: dict[str, Any],
    timeout: float | None,
    services: Callable[[], WaiterServices] = PollingOnly,
    *,
    held_in_process: bool = False,
    holds_other_keys: bool = False,
) -> Steps[Grant | LockInfo | StoreBusy | None]:
    """A grant, or whoever held the key when `timeout` seconds (None: for ever) were over.

    `request` is what the row is to say, but for the owner's token: it comes to have the last one under which the key
    may be ours. StoreBusy is returned if a stranger's transaction had locked what we need until then; None means that
    the key was free at the last look, but others were faster each time. Outages of the database are part of the wait.
    `held_in_process`: another flow of this process is thought to have the key, so that there is no use in trying to
    take it. `holds_other_keys`: so that the wait may close a circle, which raises LockDeadlock.
    """
    start = database.now()
    deadline = math.inf if timeout is None else start + timeout
    until = deadline + LEAVE_TIMEOUT if timeout != 0 else start + TRY
    try:
        return (
            yield from _acquire(
                database,
                request,
                (deadline, until),
                services,
                held_in_process=held_in_process,
                holds_other_keys=holds_other_keys,
            )
        )
    except StoreBusy as busy:
        return busy


def _acquire(
    database: Database,
    request: dict[str, Any],
    limits: tuple[float, float],
    services: Callable[[], WaiterServices],
    *,
    held_in_process: bool,
    holds_other_keys: bool,
) -> Steps[Grant | LockInfo | None]:
    """As `acquire`. `limits`: the local times of our deadline, and after which no statement is of use."""
    deadline, until = limits
    now = database.now

    def waiter() -> Waiter:
        return Waiter(database, request, deadline, until, services(), holds_other_keys)

    key, request["owner"] = request["key"], ""
    trial = TakeAttempt(database, key)
    try:
        crowded = held_in_process or local_queue.busy(database, key) or registry.is_contended(database, key)
        if crowded and request["fair"] and now() < deadline:
            with contextlib.suppress(LockTimeout):  # refused: it may be free, though
                waited = yield from waiter().wait(None, None)
                if waited is not Outcome.GONE:
                    return waited
        trial.begin()
        found = yield from _take(database, request, (deadline, until), waiter, trial)
        trial.end(got=isinstance(found, Grant))
    except BaseException as error:
        trial.end(got=False)
        # Interrupted: what we may have taken is given back. Else nobody drives us any more, or the database has said,
        # as far as it can, what became of it.
        if request["owner"] and not isinstance(error, (GeneratorExit, LockStoreError)):
            yield from give_back(database, key, request["owner"])
        raise
    return found


def _take(
    database: Database,
    request: dict[str, Any],
    limits: tuple[float, float],
    waiter: Callable[[], Waiter],
    trial: TakeAttempt,
) -> Steps[Grant | LockInfo | None]:
    """Take the key, or wait for it; as `_acquire`."""
    deadline, until = limits
    now, dialect, key = database.now, database.dialect, request["key"]
    statement = dialect.take
    growing = pauses()
    tries = 0
    while True:
        grant = yield from _attempt(database, statement, request, until)
        if isinstance(grant, Grant):
            return grant
        holder = yield from inspect(database, key, until)
        held = holder is not None and holder.state == "held"
        if held and now() >= deadline:
            return holder
        if holder is None and statement is dialect.take:
            statement = dialect.create
            continue
        statement = dialect.create if holder is None else dialect.take
        if grant is not _REFUSED:
            tries += 1
            if tries > 2 and now() >= deadline:
                return None
        # A key that is free, but cannot be had, has waiters, or a transaction pins it.
        waits = holder is not None and (held or (yield from queue.hand_over(database, key)) or tries > 2)
        if waits and now() < deadline:
            found = yield from waiter().wait(holder, trial)
            if found is not Outcome.GONE:
                return found
        if tries > 1 or grant is _REFUSED:
            yield from sleep(min(next(growing), max(until - now(), 0.0)))


def _attempt(
    database: Database, statement: Statement, request: dict[str, Any], until: float
) -> Steps[Grant | Literal[_Attempt.REFUSED] | None]:
    """A grant that is of use; None if the key was not free; REFUSED if that is not known."""
    request["owner"] = new_owner()
    try:
        grant = yield from begin(database, statement, request, until)
    except (StoreLocked, Unresolved) as error:  # the key can be looked at meanwhile
        if until - database.now() >= WORTH:
            return _REFUSED
        if isinstance(error, Unresolved):
            raise StoreUnanswered(str(error), key=error.key) from error.__cause__
        raise
    if grant is None:
        request["owner"] = ""
    if grant is None or database.now() < grant.trusted_until:
        return grant
    _ = yield from queue.release(database, grant.tenure, 1)  # granted too late
    return _REFUSED
