"""Acquiring a key: try to take it, else wait.

Rule: a key that was taken is either returned or released, whatever interrupts the attempt.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Collection
from enum import Enum
from typing import Final, Literal, NamedTuple

from dblock.core.acquire import handover
from dblock.core.acquire.handover import undo_take
from dblock.core.acquire.local_queue import Request
from dblock.core.acquire.services import PollingOnly, WaiterServices
from dblock.core.acquire.site import Site
from dblock.core.acquire.waiting import Attempt, Outcome, Waiter
from dblock.core.errors import (
    LockStoreError,
    LockTimeout,
    StoreBusy,
    StoreLocked,
    StoreUnanswered,
)
from dblock.core.holding.handover_record import HandoverRecord
from dblock.core.protocol.sending import Database, pauses, send
from dblock.core.protocol.steps import Steps, sleep
from dblock.core.protocol.tenures import Unresolved, begin, look
from dblock.core.statements.base import Statement
from dblock.core.values import Grant, LockInfo


class Refused(NamedTuple):
    """The key could not be acquired in time."""

    holder: LockInfo | None = None
    """The row as last read; None if others were faster each time the key was free, or the row could not be read."""
    busy: LockStoreError | None = None
    """The error that kept the row from being read."""


class _Answer(Enum):
    UNKNOWN = "the database did not answer"


_UNKNOWN: Final = _Answer.UNKNOWN


def acquire(
    site: Site,
    request: Request,
    timeout: float | None,
    services: Callable[[], WaiterServices] = PollingOnly,
    *,
    held_in_process: bool = False,
    held: Callable[[], Collection[str]] = tuple,
    contended: Callable[[LockInfo | None], None] | None = None,
    slow_wait: Callable[[], float] = lambda: math.inf,
) -> Steps[Grant | Refused]:
    """A grant, or why the key could not be acquired in `timeout` seconds (None: for ever).

    Outages of the database are part of the wait. `held_in_process`: another flow of this process probably holds the
    key, so that a take would fail. `held`: the owner tokens of this flow's tenures; with any, the wait may close a
    circle, which raises LockDeadlock. `contended` is called once if the flow waits, with the holder if that is known.
    `slow_wait` gives the seconds after which the wait is logged.
    """
    start, timing = site.database.now(), site.database.timing
    deadline = math.inf if timeout is None else start + timeout
    # A timeout that is shorter than a round trip has one answer too.
    until = max(deadline + timing.answer_grace, start + min(2 * site.database.latency.distance, timing.farthest))
    if timeout == 0:
        until = start + timing.single_try
    attempt = Attempt(site, request, deadline, until, services, held, contended, slow_wait)
    queues, key = site.local_queues, request.key
    found: Grant | LockInfo | Literal[Outcome.TAKE_AGAIN] | None = Outcome.TAKE_AGAIN
    try:
        if timeout == 0 and not site.database.dialect.single_writer:  # to a file one connects at once
            yield from await_first_answer(site.database, key, start)
            attempt.until = site.database.now() + site.database.timing.single_try
        if (held_in_process or queues.expects_contention(key)) and request.fair and start < deadline:
            with contextlib.suppress(LockTimeout):  # waiting is refused here, but the key may be free
                found = yield from _waiter(attempt).wait(None)
        if found is Outcome.TAKE_AGAIN:
            found, attempt.trying = None, queues.begin_try(key)
            try:
                found = yield from _take(attempt)
            finally:
                if attempt.trying:
                    queues.end_try(key, got=isinstance(found, Grant))
    except StoreBusy as busy:
        return Refused(busy=busy)
    except LockStoreError as late:
        # A database that answers is slow, or far away, and not broken.
        if late.late and not attempt.broken and timeout and site.database.now() >= deadline and site.database.answers():
            return Refused(busy=late)
        raise
    except BaseException as error:
        # Interrupted: release what may have been taken. Not on GeneratorExit, as then nothing drives further steps, nor
        # on a store error, after which the take has been resolved as far as the database allows.
        if attempt.owner and not isinstance(error, (GeneratorExit, LockStoreError)):
            yield from undo_take(site, key, attempt.owner)
        raise
    return found if isinstance(found, Grant) else Refused(found)


def await_first_answer(database: Database, key: str, start: float) -> Steps[None]:
    """Send a query to a database that has never answered this process, so that the try finds a connection.

    From far away, or on a busy machine, the first connection takes longer than a try may. Its time begins with the
    first try of the process, so that a server that never answers delays no later try.
    """
    first = database.latency.first_asked(start) + database.timing.first_connection
    if first > start + database.timing.single_try:
        until = start + database.timing.single_try
        _ = yield from send(database, database.dialect.inspect, {"key": key}, until, answer_by=first)


def _waiter(attempt: Attempt) -> Waiter:
    return Waiter(attempt, attempt.services(), bool(attempt.held()))


def _take(attempt: Attempt) -> Steps[Grant | LockInfo | None]:
    """Take the key, or wait for it: a grant; else the row as last read, or None."""
    site, deadline, until = attempt.site, attempt.deadline, attempt.until
    database, key = site.database, attempt.request.key
    now, dialect = database.now, database.dialect
    statement = dialect.take
    growing = pauses()
    tries = 0
    while True:
        grant = yield from _try(attempt, statement)
        if isinstance(grant, Grant):
            return grant
        holder = yield from look(database, key, until)
        if holder is not None and holder.kind != attempt.request.kind:
            from dblock.core.acquire.shares import wrong_kind  # noqa: PLC0415 - only for the error

            raise wrong_kind(key, holder.kind, attempt.request.kind)
        held = holder is not None and holder.state == "held"
        if held and now() >= deadline:
            return holder
        if holder is None and statement is dialect.take:
            statement = dialect.create
            continue
        statement = dialect.create if holder is None else dialect.take
        if grant is not _UNKNOWN:
            tries += 1
            if tries > 2 and now() >= deadline:
                return None
        # A key that is free but cannot be taken has waiters, or a transaction pins it.
        waits = holder is not None and (held or (yield from handover.grant_next(site, key, until=until)) or tries > 2)
        if waits and now() < deadline:
            found = yield from _waiter(attempt).wait(holder, first=attempt.trying)
            if found is not Outcome.TAKE_AGAIN:
                return found
        if tries > 1 or grant is _UNKNOWN:
            yield from sleep(min(next(growing), max(until - now(), 0.0)))


def _try(attempt: Attempt, statement: Statement) -> Steps[Grant | Literal[_Answer.UNKNOWN] | None]:
    """A grant that can still be trusted; None if the key was not free; UNKNOWN if the database did not answer."""
    database, until = attempt.site.database, attempt.until
    attempt.owner = attempt.request.new_owner()
    try:
        grant = yield from begin(database, statement, attempt.request.parameters(attempt.owner), until)
    except (StoreLocked, Unresolved) as error:  # the key can be read meanwhile
        if isinstance(error, Unresolved):  # a take that succeeds later is released in the background
            _ = attempt.services().withdraw(attempt.request.key, attempt.owner)
            attempt.broken = attempt.broken or not error.late
        if until - database.now() >= database.timing.min_retry_time:
            return _UNKNOWN
        if isinstance(error, Unresolved):
            unanswered = StoreUnanswered(str(error), key=error.key)
            unanswered.late = error.late
            raise unanswered from error.__cause__
        raise
    if grant is None:
        attempt.owner = ""
    if grant is None or database.now() < grant.trusted_until:
        return grant
    _ = yield from handover.free(attempt.site, HandoverRecord.of(grant), 1)  # granted too late
    return _UNKNOWN
