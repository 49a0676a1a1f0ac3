"""Sending a statement, with retries, until it is answered or the time is up.

Rule: a statement that was refused for a passing reason is resent; one that may have been executed is resent only if the
caller says that it may be executed twice.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Final

from dblock.core import clock, timing
from dblock.core.errors import (
    LockError,
    LockStoreError,
    PoolExhausted,
    StoreBusy,
    StoreConflict,
    StoreLocked,
    StoreReadOnly,
    StoreUnanswered,
    StoreUnreachable,
)
from dblock.core.latency import Latency
from dblock.core.log import warn
from dblock.core.protocol.steps import Execute, Parameters, Rows, Runner, Steps, sleep
from dblock.core.statements.base import Statement, WhenLocked
from dblock.core.statements.dialect import Dialect
from dblock.core.timing import Timing
from dblock.core.values import QUARANTINE

UNKNOWN: Final[Rows] = [(0,)]
"""Stands for the rows of a statement that was sent again after a broken connection, and found nothing to change: the
first sending may have changed it."""


class Epoch:
    """What this process last read of the database's epoch (`dblock.core.protocol.epoch`), as local times."""

    __slots__ = ("asked", "floor", "opens", "since")

    def __init__(self) -> None:
        self.asked = self.since = self.opens = -math.inf
        self.floor = 0


@dataclass(frozen=True, slots=True, eq=False)
class Database:
    """The database of a row, as the protocol sees it."""

    runner: Callable[[], Runner | None]
    """A weak reference to its store."""
    dialect: Dialect
    now: Callable[[], float] = clock.now
    own_timing: Timing | None = None
    before_waiting: Callable[[], None] = lambda: None
    """Raises a LockError if a wait could not end, because this flow would keep the holder from continuing: LockTimeout
    in a SQLite transaction, for example."""
    latency: Latency = field(default_factory=Latency)
    epoch: Epoch = field(default_factory=Epoch)
    quarantine: Callable[[], float] = lambda: QUARANTINE
    """Seconds for which keys are closed after a failover."""
    outage: dict[str, float] = field(default_factory=dict)
    """The local time `since` which it cannot be used, if that was logged; `send` logs the end."""

    @property
    def store(self) -> Runner:
        """What runs the steps that are about it; alive for as long as a step is run."""
        store = self.runner()
        assert store is not None  # noqa: S101 - the caller that drives the steps refers to it
        return store

    @property
    def timing(self) -> Timing:
        """The times of the protocol for the distance of the database."""
        near, distance = self.own_timing or timing.DEFAULT, self.latency.distance
        return near if distance <= near.near else near.at(distance)

    def answers(self) -> bool:
        """Whether it has answered a moment ago, so that a missing answer is probably late, not lost."""
        return self.now() - self.latency.answered < self.timing.single_try

    def only_late(self, error: LockStoreError) -> bool:
        """Whether an error says that the time was short, not that the database is away.

        It has answered a moment ago, or its answer had less time than a statement that is resent gets.
        """
        return 0 < error.late < self.timing.min_retry_time or (error.late > 0 and self.answers())

    def away(self, error: LockError) -> None:
        """Log that it cannot be used: once for all flows, until a statement is answered."""
        now = self.now()
        if isinstance(error, StoreBusy) and not isinstance(error, StoreLocked):  # a row is, or no connection is free
            warn("trying again: %s", error)
        elif self.outage.setdefault("since", now) is now:
            warn("%s cannot be used, trying again: %s", self.store.name, " ".join(str(error).split()))

    def back(self) -> None:
        """Log the end of the outage that was logged."""
        if (since := self.outage.pop("since", None)) is not None:
            warn("%s can be used again, after %.1f s", self.store.name, self.now() - since)


def send(
    database: Database,
    statement: Statement,
    parameters: Parameters,
    until: float | None = None,
    *,
    resend: bool = False,
    changes: bool = False,
    answer_by: float | None = None,
    location: object = None,
) -> Steps[tuple[float, Rows]]:
    """Execute, and resend after conflicts until the local time `until`; the local time of the last sending, and rows.

    By default that is when the retry budget is used up. With `resend` also after broken connections: only for
    statements that may be executed twice. With `changes` the answer is `UNKNOWN` if it then finds nothing to change.
    `answer_by` is the deadline of the answer, `until` by default. `location`: see `Execute`.
    """
    until = database.now() + database.timing.retry_budget if until is None else until
    growing: Iterator[float] | None = None
    failure: LockStoreError | None = None
    told: LockStoreError | None = None
    """The last failure with an error of the driver."""
    resent = False
    """Whether it was sent again after a broken connection."""
    quiet_until = 0.0
    """The local time from which the retries are logged."""
    while True:
        sent = database.now()
        try:
            answered = until if answer_by is None else answer_by
            rows: Rows = yield Execute(database.store, statement, parameters, answered, location)
            if database.outage:
                database.back()
            return sent, UNKNOWN if resent and changes and not rows else rows  # noqa: TRY300 - it is nearest here
        except (StoreConflict, StoreUnreachable) as refused:  # nothing has happened
            policy = _policy(statement, refused)
            if policy is WhenLocked.SKIP:
                return sent, []
            if policy is WhenLocked.RAISE:
                raise
            latest: LockStoreError = refused
        except StoreUnanswered as unanswered:
            if not resend:
                raise _explained(unanswered, told)  # noqa: B904 - it has its cause
            latest, resent = unanswered, True
        if not isinstance(failure, StoreBusy):  # StoreBusy explains why the last one may have been late
            failure = latest
        told = latest if latest.__cause__ else told
        now = database.now()
        left = until - now - database.timing.min_retry_time
        if left <= 0:
            raise _explained(failure, told)
        if growing is None:
            growing, quiet_until = pauses(), now + database.timing.retry_budget
        elif now > quiet_until:
            quiet_until = math.inf  # logged once
            database.away(_explained(failure, told))
        yield from sleep(database.store, min(next(growing), left))


def ask(
    database: Database,
    statement: Statement,
    parameters: Parameters,
    until: float | None = None,
    *,
    resend: bool = True,
    location: object = None,
) -> Steps[Rows]:
    """The rows of a statement that no lock sends, over the names of this database's tables; see `send`."""
    statement = statement.over(database.dialect.tables, database.dialect.quote)
    _, rows = yield from send(database, statement, parameters, until, resend=resend, location=location)
    return rows


def _policy(statement: Statement, refused: LockStoreError) -> WhenLocked:
    if isinstance(refused, PoolExhausted):  # it says nothing about the row
        return WhenLocked.RETRY
    if isinstance(refused, StoreLocked):
        return statement.database_locked
    return statement.row_locked if isinstance(refused, StoreBusy) else WhenLocked.RETRY


def _explained(failure: LockStoreError, told: LockStoreError | None) -> LockStoreError:
    """The failure, with an earlier error of the driver as its cause if it was only out of time."""
    if told is None or (failure.__cause__ is not None and not failure.late):
        return failure
    late = 0.0 if isinstance(told, StoreReadOnly | StoreUnreachable) else failure.late
    explained = type(failure)(f"{failure}; before that: {told}", key=failure.key, late=late)
    explained.__cause__ = told.__cause__
    return explained


def pauses(longest: float | None = None) -> Iterator[float]:
    """Growing pauses in seconds, with jitter so that flows that failed together do not retry together."""
    pause, longest = timing.DEFAULT.near, timing.DEFAULT.retry_max if longest is None else longest
    while True:
        yield random.uniform(pause / 2, pause)  # noqa: S311 - jitter, not a secret
        pause = min(pause * 1.6, longest)
