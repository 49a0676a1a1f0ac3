"""Acquiring a key: try to take it, else wait.

Rule: a key that was taken is either returned or released, whatever interrupts the attempt.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Collection

from dblock.core.acquire import handover
from dblock.core.acquire.local_queue import Stage
from dblock.core.acquire.request import Refused, Request
from dblock.core.acquire.services import WaiterServices
from dblock.core.acquire.shares import wrong_kind
from dblock.core.acquire.site import Site
from dblock.core.acquire.slow import SlowWait
from dblock.core.acquire.waiting import Waiter
from dblock.core.errors import (
    LockStoreError,
    LockTimeout,
    StoreBusy,
    StoreLocked,
    StoreUnanswered,
)
from dblock.core.protocol import epoch
from dblock.core.protocol.sending import Database, pauses, send
from dblock.core.protocol.steps import Steps, sleep
from dblock.core.protocol.tenures import Unresolved, begin, look
from dblock.core.statements.base import Statement
from dblock.core.values import Grant, LockInfo


def acquire(
    site: Site,
    request: Request,
    timeout: float | None,
    services: Callable[[], WaiterServices] = WaiterServices,
    *,
    held_in_process: bool = False,
    held: Callable[[], Collection[str]] = tuple,
    contended: Callable[[LockInfo | None], None] | None = None,
    slow_wait: SlowWait | None = None,
) -> Steps[Grant | Refused]:
    """A grant, or why the key could not be acquired in `timeout` seconds (None: for ever).

    Outages of the database are part of the wait. `held_in_process`: another flow of this process probably holds the
    key, so that a take would fail. `held`: the owner tokens of this flow's tenures; with any, the wait may close a
    circle, which raises LockDeadlock. `contended` is called once if the flow waits, with the holder if that is known.
    `slow_wait` says when the wait is logged.
    """
    database, start = site.database, site.database.now()
    deadline = math.inf if timeout is None else start + timeout
    until = answers_until(database, start, deadline)
    waiter = Waiter(site, request, deadline, until, services, held, contended, slow_wait or SlowWait())
    found: Grant | Refused | None = None
    try:
        try:
            waiter.until = yield from await_first_answer(database, request.key, start, deadline)
            if (held_in_process or site.expects_contention(request.key)) and request.fair and start < deadline:
                with contextlib.suppress(LockTimeout):  # waiting is refused here, but the key may be free
                    waiter.enter(None)
            while found is None:
                if waiter.stage is Stage.OUTSIDE:
                    site.enter_taking(waiter)
                    found = yield from _take(waiter)
                else:
                    found = yield from waiter.wait()
            waiter.leave(found if isinstance(found, Grant) else None)
        except LockStoreError as error:
            yield from waiter.clean_up(behind=True)
            # A database that answers is slow, or far away, and not broken.
            slow = error.late and not waiter.broken and timeout and database.now() >= deadline and database.answers()
            if not (slow or isinstance(error, StoreBusy)):
                raise
            found = Refused(busy=error)
    except GeneratorExit:  # nothing drives further steps
        waiter.leave()
        raise
    except LockStoreError:
        raise
    except BaseException:
        yield from waiter.clean_up(behind=False)
        raise
    return found


def answers_until(database: Database, start: float, deadline: float) -> float:
    """The local time until which an attempt that began at `start` awaits answers: one answer at least."""
    timing = database.timing
    least = timing.single_try if deadline <= start else min(2 * database.latency.distance, timing.farthest)
    return max(deadline + timing.answer_grace, start + least)


def await_first_answer(database: Database, key: str, start: float, deadline: float) -> Steps[float]:
    """Send a query to a database that has never answered this process, so that a short attempt finds a connection.

    From far away, or on a busy machine, the first connection takes longer than a try may. Its time begins with the
    first try of the process, so that a server that never answers delays no later try. Returns until when the attempt
    awaits answers.
    """
    until, single_try = answers_until(database, start, deadline), database.timing.single_try
    if deadline >= start + single_try or database.dialect.single_writer:  # to a file one connects at once
        return until
    first = database.latency.first_asked(start) + database.timing.first_connection
    if first > start + single_try:
        _ = yield from send(database, database.dialect.inspect, {"key": key}, start + single_try, answer_by=first)
    elif deadline > start:
        return until
    return max(until, database.now() + single_try)


def _take(waiter: Waiter) -> Steps[Grant | Refused | None]:
    """Take the key; None if the flow has to wait, in which case it has entered a local queue."""
    site, request, deadline, until = waiter.site, waiter.request, waiter.deadline, waiter.until
    database, key = site.database, request.key
    now, dialect, timing = database.now, database.dialect, database.timing
    statement = dialect.take
    growing = pauses()
    tries = 0
    while True:
        grant, answered = yield from _try(waiter, statement)
        if grant is not None:
            return grant
        holder = yield from look(database, key, until)
        if holder is not None and holder.kind != request.kind:
            raise wrong_kind(key, holder.kind, request.kind)
        held = holder is not None and holder.state == "held"
        if held and now() >= deadline:
            return Refused(holder)
        if holder is None and statement is dialect.take:
            statement = dialect.create
            continue
        statement = dialect.create if holder is None else dialect.take
        if answered:
            tries += 1
            if tries > 2 and now() >= deadline:
                return Refused()
        closed = 0.0 if held else (yield from epoch.closed_for(database, holder, until, anew=tries > 1))
        if closed and now() >= deadline:
            return Refused(holder)
        # A key that is free but cannot be taken has waiters, or a transaction pins it, or the server was promoted.
        waits = holder is not None and (held or (yield from handover.grant_next(site, key, until=until)) or tries > 2)
        if waits and now() < deadline:
            waiter.enter(holder)
            return None
        if tries > 1 or not answered:
            pause = max(next(growing), min(closed, timing.poll_max))
            yield from sleep(database.store, min(pause, max(until - now(), 0.0)))


def _try(waiter: Waiter, statement: Statement) -> Steps[tuple[Grant | None, bool]]:
    """A grant that can still be trusted, or None if the key was not free; and whether the database answered in time."""
    site, request = waiter.site, waiter.request
    database, until = site.database, waiter.until
    waiter.owner = request.new_owner()
    try:
        grant = yield from begin(database, statement, request.parameters(waiter.owner), until)
    except LockStoreError as error:
        if isinstance(error, Unresolved):  # a take that succeeds later is released in the background
            _ = waiter.find_services().withdraw(request.key, waiter.owner)
            waiter.broken = waiter.broken or not error.late
        waiter.owner = ""
        # The key can be read meanwhile.
        passing = isinstance(error, (StoreLocked, Unresolved))
        if passing and until - database.now() >= database.timing.min_retry_time:
            return None, False
        if isinstance(error, Unresolved):
            unanswered = StoreUnanswered(str(error), key=error.key)
            unanswered.late = error.late
            raise unanswered from error.__cause__
        raise
    if grant is None:
        waiter.owner = ""
    if grant is None or database.now() < grant.trusted_until:
        return grant, True
    _ = yield from handover.free(site, grant)  # granted too late
    return None, False
