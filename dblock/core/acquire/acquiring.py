"""How a flow gets a key: it tries, and if somebody else has it, it waits.

Rule: a key that was taken is either returned or given back, whatever breaks the attempt off.
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
from dblock.core.errors import LockStoreError, LockTimeout, StoreBusy, StoreLocked, StoreUnanswered
from dblock.core.holding.held import Held
from dblock.core.protocol.sending import pauses
from dblock.core.protocol.steps import Steps, sleep
from dblock.core.protocol.tenures import Unresolved, begin, look
from dblock.core.statements.base import Statement
from dblock.core.values import Grant, LockInfo


class Refused(NamedTuple):
    """The key could not be had in time."""

    holder: LockInfo | None = None
    """Whom we saw last; None if others were faster each time that it was free, or the row could not be looked at."""
    busy: StoreBusy | None = None
    """What kept us from looking."""


class _Answer(Enum):
    UNKNOWN = "the database could not say"


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
    """A grant; or that the key could not be had in `timeout` seconds (None: for ever), and why.

    Outages of the database are part of the wait. `held_in_process`: another flow of this process is thought to have the
    key, so that there is no use in trying to take it. `held`: the owner tokens of what this flow holds already; if
    there are some, the wait may close a circle, which raises LockDeadlock.
    `contended` is called once, if it waits for somebody, with the holder if that is known.
    `slow_wait` says how many seconds are a wait for the log.
    """
    start, timing = site.database.now(), site.database.timing
    deadline = math.inf if timeout is None else start + timeout
    until = deadline + timing.leave_timeout if timeout != 0 else start + timing.single_try
    attempt = Attempt(site, request, deadline, until, services, held, contended, slow_wait)
    queues, key = site.local_queues, request.key
    found: Grant | LockInfo | Literal[Outcome.TAKE_AGAIN] | None = Outcome.TAKE_AGAIN
    try:
        if (held_in_process or queues.is_crowded(key)) and request.fair and start < deadline:
            with contextlib.suppress(LockTimeout):  # refused: it may be free, though
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
    except BaseException as error:
        # Interrupted: what we may have taken is given back. Else nobody drives us any more, or the database has said,
        # as far as it can, what became of it.
        if attempt.owner and not isinstance(error, (GeneratorExit, LockStoreError)):
            yield from undo_take(site, key, attempt.owner)
        raise
    return found if isinstance(found, Grant) else Refused(found)


def _waiter(attempt: Attempt) -> Waiter:
    return Waiter(attempt, attempt.services(), bool(attempt.held()))


def _take(attempt: Attempt) -> Steps[Grant | LockInfo | None]:
    """Take the key, or wait for it: a grant; else the row as it was last seen, or None."""
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
        # A key that is free, but cannot be had, has waiters, or a transaction pins it.
        waits = holder is not None and (held or (yield from handover.grant_next(site, key, until=until)) or tries > 2)
        if waits and now() < deadline:
            found = yield from _waiter(attempt).wait(holder, first=attempt.trying)
            if found is not Outcome.TAKE_AGAIN:
                return found
        if tries > 1 or grant is _UNKNOWN:
            yield from sleep(min(next(growing), max(until - now(), 0.0)))


def _try(attempt: Attempt, statement: Statement) -> Steps[Grant | Literal[_Answer.UNKNOWN] | None]:
    """A grant that is of use; None if the key was not free; UNKNOWN if the database could not say."""
    database, until = attempt.site.database, attempt.until
    attempt.owner = attempt.request.new_owner()
    try:
        grant = yield from begin(database, statement, attempt.request.parameters(attempt.owner), until)
    except (StoreLocked, Unresolved) as error:  # the key can be looked at meanwhile
        if until - database.now() >= database.timing.worthwhile:
            return _UNKNOWN
        if isinstance(error, Unresolved):
            raise StoreUnanswered(str(error), key=error.key) from error.__cause__
        raise
    if grant is None:
        attempt.owner = ""
    if grant is None or database.now() < grant.trusted_until:
        return grant
    _ = yield from handover.free(attempt.site, Held.of(grant), 1)  # granted too late
    return _UNKNOWN
