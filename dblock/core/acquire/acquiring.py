"""Acquiring a key: try to take it, else wait.

Rule: a key that was taken is either returned or released, whatever interrupts the attempt.
"""

from __future__ import annotations

import contextlib

from dblock.core.acquire import handover
from dblock.core.acquire.local_queue import Stage
from dblock.core.acquire.request import Refused, wrong_kind
from dblock.core.acquire.waiting import Attempt
from dblock.core.errors import (
    LockStoreError,
    LockTimeout,
    StoreLocked,
    StoreUnanswered,
)
from dblock.core.protocol import epoch
from dblock.core.protocol.sending import pauses, send
from dblock.core.protocol.steps import Steps, sleep
from dblock.core.protocol.tenures import begin, inspect
from dblock.core.statements.base import Statement
from dblock.core.values import Grant, LockInfo


def acquire(attempt: Attempt) -> Steps[Grant | Refused]:
    """A grant, or why the key could not be acquired in time. Outages of the database are part of the wait."""
    site, key, deadline = attempt.site, attempt.request.key, attempt.deadline
    found: Grant | Refused | None = None
    try:
        if deadline < attempt.start + attempt.timing.single_try:
            yield from await_first_answer(attempt)
        busy = attempt.held_in_process or site.expects_contention(key)
        if busy and attempt.request.fair and attempt.start < deadline:
            with contextlib.suppress(LockTimeout):  # waiting is refused here, but the key may be free
                attempt.enter(None)
        while found is None:
            if attempt.stage is Stage.OUTSIDE:
                site.local_queues.enter_taking(attempt)
                found = yield from _take(attempt)
            else:
                found = yield from attempt.wait()
        attempt.leave(found if isinstance(found, Grant) else None)
    except GeneratorExit:  # nothing drives further steps
        attempt.leave()
        raise
    except BaseException as error:
        yield from attempt.clean_up(behind=isinstance(error, LockStoreError))
        if not isinstance(error, LockStoreError):
            raise
        found = attempt.refusal(error)
    return found


def await_first_answer(attempt: Attempt) -> Steps[None]:
    """Send a query to a database that has never answered this process, so that a short attempt finds a connection.

    From far away, or on a busy machine, the first connection takes longer than a try may. Its time begins with the
    first try of the process, so that a server that never answers delays no later try. Afterwards the attempt awaits
    answers for as long as a try may take.
    """
    database, start, single_try = attempt.site.database, attempt.start, attempt.timing.single_try
    if database.dialect.single_writer:  # to a file one connects at once
        return
    first = database.latency.first_asked(start) + database.timing.first_connection
    if first > start + single_try:
        key = {"key": attempt.request.key}
        _ = yield from send(database, database.dialect.inspect, key, start + single_try, answer_by=first)
        attempt.until = max(attempt.until, database.now() + single_try)


def _take(attempt: Attempt) -> Steps[Grant | Refused | None]:
    """Try to take the key; else find out why it could not be taken, and try again.

    None if the flow has to wait, in which case it has entered a local queue.
    """
    site, request, deadline, until = attempt.site, attempt.request, attempt.deadline, attempt.until
    database, key = site.database, request.key
    now, dialect = database.now, database.dialect
    statement = dialect.take
    growing = pauses()
    tries = 0
    holder: LockInfo | None = None
    while True:
        grant, answered = yield from _try(attempt, statement)
        if grant is not None:
            return grant
        before, holder = holder, (yield from inspect(database, key, until))
        if holder is not None and holder.kind != request.kind:
            raise wrong_kind(key, holder.kind, request.kind)
        held = holder is not None and holder.state == "held"
        if held and now() >= deadline:
            yield from epoch.find_server(database, until)
            return Refused(holder)
        if holder is None and statement is dialect.take:
            statement = dialect.create
            continue
        statement = dialect.create if holder is None else dialect.take
        if answered:
            tries += 1
            if tries > 2 and now() >= deadline:
                changed = holder is None or before is None or holder.fence != before.fence
                return Refused(None if changed else holder)  # with one fence at each try nobody was faster
        closed = 0.0 if held else (yield from epoch.closed_for(database, holder, until, anew=tries > 1))
        if closed and now() >= deadline:
            return Refused(holder)
        # A key that is free but cannot be taken has waiters, or a transaction pins it, or the server was promoted.
        waits = held or (holder is not None and (yield from handover.grant_next(site, key, until=until)))
        if (waits or (holder is not None and tries > 2)) and now() < deadline:
            attempt.enter(holder)
            return None
        if tries > 1 or not answered:
            pause = max(next(growing), min(closed, attempt.timing.poll_max))
            yield from sleep(database.store, min(pause, max(until - now(), 0.0)))


def _try(attempt: Attempt, statement: Statement) -> Steps[tuple[Grant | None, bool]]:
    """A grant that can still be trusted, or None if the key was not free; and whether the database answered in time."""
    site, request = attempt.site, attempt.request
    database, until = site.database, attempt.until
    attempt.owner = request.new_owner()
    try:
        grant = yield from begin(database, statement, request.parameters(attempt.owner), until)
    except LockStoreError as error:
        unanswered = isinstance(error, StoreUnanswered)
        if unanswered:  # a take that succeeds later is released in the background
            _ = attempt.find_services().withdraw(request.key, attempt.owner)
            attempt.broken = attempt.broken or not error.late
        attempt.owner = ""
        # The key can be read meanwhile.
        passing = unanswered or isinstance(error, StoreLocked)
        if passing and until - database.now() >= database.timing.min_retry_time:
            return None, False
        raise
    if grant is None:
        attempt.owner = ""
    if grant is None or database.now() < grant.trusted_until:
        return grant, True
    _ = yield from handover.end(site, grant)  # granted too late
    return None, False
