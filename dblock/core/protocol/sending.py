"""Sending a statement, again if need be, until it is answered or the time is up.

Rule: what was refused for a passing reason is sent again; what may have happened only where the caller says that it may
happen twice.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from dblock.core import clock, timing
from dblock.core.errors import LockStoreError, PoolExhausted, StoreBusy, StoreConflict, StoreLocked, StoreUnanswered
from dblock.core.log import warn
from dblock.core.protocol.steps import Parameters, Rows, Steps, execute, sleep
from dblock.core.statements.base import Dialect, Statement, WhenLocked
from dblock.core.timing import Timing


@dataclass(frozen=True, slots=True, eq=False)
class Database:
    """What the protocol needs to know of the place where a row lives."""

    dialect: Dialect
    now: Callable[[], float] = clock.now
    own_timing: Timing | None = None
    refuse_waiting: Callable[[], None] | None = None
    """Raises where a wait for somebody else could not end well, because we keep that one from going on."""

    @property
    def timing(self) -> Timing:
        """The times that it goes by."""
        return self.own_timing or timing.DEFAULT

    def before_waiting(self) -> None:
        """Raise a LockError where a wait for somebody else could not end well: LockTimeout in a SQLite transaction."""
        if self.refuse_waiting is not None:
            self.refuse_waiting()


def send(
    database: Database,
    statement: Statement,
    parameters: Parameters,
    until: float,
    *,
    resend: bool = False,
    answer: float | None = None,
) -> Steps[tuple[float, Rows]]:
    """Execute, again after conflicts until the local time `until`; the local time of the last sending, and the rows.

    With `resend` also after broken connections: only for statements that may be executed twice. `answer` is the local
    time until which an answer is waited for, `until` by default.
    """
    growing: Iterator[float] | None = None
    failure: LockStoreError | None = None
    told: LockStoreError | None = None
    """The last failure of which the driver said something."""
    quiet_until = 0.0
    """The local time from which somebody should know that we wait for the database."""
    while True:
        sent = database.now()
        try:
            return sent, (yield from execute(statement, parameters, until if answer is None else answer))
        except StoreConflict as conflict:
            match _policy(statement, conflict):
                case WhenLocked.SKIP:
                    return sent, []
                case WhenLocked.RAISE:
                    raise
                case WhenLocked.RETRY:
                    pass
            latest: LockStoreError = conflict
        except StoreUnanswered as unanswered:
            if not resend:
                raise
            latest = unanswered
        if not isinstance(failure, StoreBusy):  # which explains why the last one may have come too late
            failure = latest
        told = latest if latest.__cause__ else told
        now = database.now()
        left = until - now - database.timing.worthwhile
        if left <= 0:
            raise _explained(failure, told)
        if growing is None:
            growing, quiet_until = pauses(), now + database.timing.patience
        elif now > quiet_until:
            warn("still trying to %s %r: %s", statement.name, parameters.get("key", ""), _explained(failure, told))
            quiet_until = math.inf  # said once
        yield from sleep(min(next(growing), left))


def _policy(statement: Statement, conflict: StoreConflict) -> WhenLocked:
    if isinstance(conflict, PoolExhausted):  # which says nothing of the row
        return WhenLocked.RETRY
    if isinstance(conflict, StoreLocked):
        return statement.database_locked
    return statement.row_locked if isinstance(conflict, StoreBusy) else WhenLocked.RETRY


def _explained(failure: LockStoreError, told: LockStoreError | None) -> LockStoreError:
    """Where the last try was cut short by the time, what the driver said before is the reason."""
    if failure.__cause__ is not None or told is None:
        return failure
    explained = type(failure)(f"{failure}; before that: {told}", key=failure.key)
    explained.__cause__ = told.__cause__
    return explained


def pauses(first: float = 0.005, longest: float = 0.25) -> Iterator[float]:
    """Growing pauses in seconds, each with jitter so that those who failed together do not come back together."""
    pause = first
    while True:
        yield random.uniform(pause / 2, pause)  # noqa: S311 - jitter, not a secret
        pause = min(pause * 1.6, longest)
