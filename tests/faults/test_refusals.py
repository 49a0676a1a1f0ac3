"""The database refuses a statement for a passing reason, once, a few times, or for good (requirement 16)."""

from __future__ import annotations

import contextlib
import sqlite3
import time
from collections.abc import Callable, Iterator
from typing import Any

import psycopg.errors
import pymysql
import pytest
from asyncpg import InternalClientError

from dblock.core import runtime
from dblock.core.acquire import handover
from dblock.core.errors import LockError, LockLost, LockStoreError, LockTimeout, StoreConflict
from dblock.core.lock.base_store import BaseStore
from dblock.core.protocol import queue, tenures
from dblock.core.protocol.drive import drive
from dblock.core.protocol.steps import Execute, Rows, Steps
from dblock.core.runtime import current_flow
from dblock.core.statements import DIALECTS
from dblock.core.statements.base import Failure
from tests.conftest import timed
from tests.support.lab import FEW, LONG, alive, expire, hold_of, remaining, there, times, until
from tests.support.subjects import Actor, Subject


def sqlite_error(name: str) -> Exception:
    error = sqlite3.OperationalError("database is locked")
    error.sqlite_errorname = name
    return error


ERRORS: dict[str, list[Callable[[], Exception]]] = {
    "postgresql": [psycopg.errors.SerializationFailure, psycopg.errors.DeadlockDetected],
    "mysql": [
        lambda: pymysql.OperationalError(1213, "Deadlock found when trying to get lock"),
        lambda: pymysql.OperationalError(1205, "Lock wait timeout exceeded"),
    ],
    "sqlite": [lambda: sqlite_error("SQLITE_BUSY")],
}


class Driver(Exception):
    """An error as drivers of PostgreSQL make them."""

    def __init__(self, sqlstate: str) -> None:
        super().__init__("refused")
        self.sqlstate = sqlstate


DEADLOCK = "Got error 149 - 'Lock deadlock; Retry transaction' during COMMIT"
MEANINGS: list[tuple[str, Failure, tuple[Exception, ...]]] = [
    ("postgresql", Failure.SPENT, tuple(map(Driver, ("26000", "42P05", "0A000")))),
    ("postgresql", Failure.READ_ONLY, (Driver("25006"),)),
    ("postgresql", Failure.BUSY, (Driver("55P03"),)),
    ("postgresql", Failure.CONFLICT, tuple(map(Driver, ("40001", "40P01", "57014")))),
    ("postgresql", Failure.DISCONNECTED, tuple(map(Driver, ("57P01", "57P03", "08006", "25P03", "25P04")))),
    ("postgresql", Failure.DISCONNECTED, (InternalClientError("cannot switch to state 11"),)),
    ("postgresql", Failure.OTHER, (Driver("42601"), Driver("25P02"))),
    ("mysql", Failure.READ_ONLY, tuple(map(pymysql.OperationalError, (1290, 1792, 1836, 1047, 3796)))),
    ("mysql", Failure.BUSY, tuple(map(pymysql.OperationalError, (1205, 3572)))),
    ("mysql", Failure.CONFLICT, tuple(map(pymysql.OperationalError, (1213, 1020, 1317, 1969, 3024, 3101)))),
    ("mysql", Failure.CONFLICT, (pymysql.OperationalError(1180, DEADLOCK),)),
    ("mysql", Failure.OTHER, (pymysql.OperationalError(1180, "Got error 28 during COMMIT"),)),
    ("mysql", Failure.DISCONNECTED, tuple(map(pymysql.OperationalError, (2006, 2013, 1053, 4031, 3100)))),
    ("mysql", Failure.OTHER, (pymysql.ProgrammingError(1064),)),
    ("sqlite", Failure.LOCKED, (sqlite_error("SQLITE_BUSY"),)),
]


@pytest.mark.parametrize(("dialect", "failure", "errors"), MEANINGS, ids=str)
def test_what_an_error_means(dialect: str, failure: Failure, errors: tuple[Exception, ...]) -> None:
    """Writes are refused for a moment, a row is locked, a statement was cancelled, a session is lost.

    Nor does it matter that an adapter raises an error of its own, with the driver's as the cause.
    """
    classify = DIALECTS[dialect].classify
    assert [classify(error) for error in errors] == [failure] * len(errors)
    assert [classify(wrapped(wrapped(error))) for error in errors] == [failure] * len(errors)


def wrapped(error: Exception) -> Exception:
    adapted = RuntimeError("refused")
    adapted.__cause__ = error
    return adapted


LISTENING = {"unlogged", "listen", "call", "sleep_until_killed"}
"""Statements beside the protocol, of the session by which a process is notified."""


class Refusals:
    """Lets the database refuse one statement some times; counts how often each was sent."""

    def __init__(self) -> None:
        self.names, self.left = {""}, 0
        self.make: Callable[[], Exception] = Exception
        self.sent: list[str] = []

    def perform(self, real: Callable[..., Rows]) -> Callable[..., Rows]:
        def performing(*args: Any) -> Rows:
            step: Execute = args[-1]
            if step.statement.name in LISTENING:
                return real(*args)
            self.sent.append(step.statement.name)
            if step.statement.name in self.names and self.left:
                self.left -= 1
                raise self.make()
            return real(*args)

        return performing

    @contextlib.contextmanager
    def of(self, name: str, count: int, make: Callable[[], Exception]) -> Iterator[None]:
        # A key that is free, but cannot be taken, is asked for through the queue.
        self.names = {"take", "grant"} if name == "take" else {name}
        self.left, self.make = count, make
        self.sent.clear()
        with pytest.MonkeyPatch.context() as patch:
            patience = 0.15 if count > 100 else 3.0  # for refusals that last; a machine may stall for that long
            timed(patch, retry_budget=patience, single_try=patience)
            yield
        self.left = 0


@pytest.fixture
def refusals(monkeypatch: pytest.MonkeyPatch) -> Iterator[Refusals]:
    refusals = Refusals()
    monkeypatch.setattr(BaseStore, "_perform", refusals.perform(BaseStore._perform))
    yield refusals


def agrees(subject: Subject, lock: Any) -> None:
    """What we believe is what the row says, or less."""
    row = subject.row("k")
    assert (lock.owner, lock.fence, lock.count) == (row["owner"], row["fence"], row["count"])
    assert lock.remaining <= remaining(subject) + 0.002
    assert lock.verify()


HELD = ["set_count", "extend", "renew", "inspect", "alive", "detach", "attach", "release"]


def held(make: Callable[[], Exception]) -> list[str]:
    """The statements of a holder that are sent again after an error.

    A renewal that finds a row locked is not sent again whole, see test_watchdog. The count, which is only shown, stays
    as it is beside a writer of SQLite.
    """
    error = make()
    once = {"renew"} if 1205 in error.args else {"set_count"} if isinstance(error, sqlite3.Error) else set[str]()
    return [name for name in HELD if name not in once]


def say(subject: Subject, lock: Any, name: str) -> Any:
    """Let the holder of a lock send the statement `name`."""
    store = lock._place.store()
    patience = store.database.timing.retry_budget
    tenure = hold_of(lock).tenure
    wish: dict[str, Any] = {"host": "h", "pid": 1, "thread": "t", "program": "p", "task": "", "ttl": 20.0, "life": 20.0}
    leases = [(tenure, 20.0), (tenure._replace(key="nobody's"), 20.0)]  # by `alive` a renewal finds that one is over
    steps: dict[str, Callable[[], Any]] = {
        "alive": lambda: tenures.renew(store.database, leases, store.database.now() + patience),
        "renew": lambda: tenures.renew(store.database, leases[:1], store.database.now() + patience),
        "attach": lambda: tenures.attach(store.database, tenure, "heir", wish),
        "detach": lambda: tenures.detach(store.database, tenure, "token", 20.0),
    }
    if name in steps:
        return drive(steps[name]())
    return {"set_count": lock.acquire, "extend": lock.extend, "release": lock.release, "inspect": lock.verify}[name]()


def test_a_passing_refusal_is_not_noticed(subject: Subject, refusals: Refusals) -> None:
    """Each error three times for each statement: it is sent again, and nobody hears of it."""
    for make in ERRORS[subject.protocol.dialect.name]:
        for name in ["create", "take"]:
            lock = subject.lock("k", ttl=20, timeout=1)
            with refusals.of(name, 3, make):
                assert lock.acquire()
            assert sum(map(refusals.sent.count, refusals.names)) >= 4
            agrees(subject, lock)
            lock.release()
        for name in held(make):
            assert lock.acquire()
            with refusals.of(name, 3, make):
                say(subject, lock, name)
            assert refusals.sent.count(name) == 4
            if name in {"attach", "detach"}:  # it is another owner's now
                expire(subject)
            elif lock.state is not None:
                agrees(subject, lock)
            while lock.state is not None:
                with contextlib.suppress(LockLost):
                    lock.release()
            assert alive(subject) == 0
        for name in ["stale", "reap"]:
            lock.acquire()
            lock.release()
            time.sleep(0.002)
            with refusals.of(name, 1 if name == "reap" else 3, make):
                assert subject.reap(0) + subject.reap(0) == 1  # a row that is busy waits for the next reaping
        assert subject.run("SELECT count(*) FROM locks") == [(0,)]


@pytest.mark.parametrize("subject", FEW, indirect=True, ids=str)
def test_a_lasting_refusal_ends_in_an_error_of_ours(subject: Subject, refusals: Refusals) -> None:
    """Each error for good, for each statement, in turn outside `make faults`: few sendings, a typed error, local state
    as the row's."""
    errors = ERRORS[subject.protocol.dialect.name]
    for turn, make in enumerate(errors):
        every = 1 if LONG else len(errors)
        for name in ["create", "take"][turn % every :: every]:
            if name == "create":
                subject.run("DELETE FROM locks")
            lock = subject.lock("k", ttl=20, timeout=0.1)
            began = time.monotonic()
            with refusals.of(name, 1000, make), pytest.raises((StoreConflict, LockTimeout)) as caught:
                lock.__enter__()
            assert time.monotonic() - began < 2
            assert len(refusals.sent) < 60
            assert isinstance(caught.value, LockTimeout) or isinstance(caught.value.__cause__, type(make()))
            assert lock.state is None
            assert not runtime.current.watchdog._holds
            assert alive(subject) == 0
            assert lock.acquire(), "the failure left something behind"
            lock.release()
        for name in held(make)[turn % every :: every]:
            assert lock.acquire()
            began = time.monotonic()
            with refusals.of(name, 1000, make), pytest.raises(LockStoreError) as error:
                say(subject, lock, name)
            assert time.monotonic() - began < 1
            assert 2 <= refusals.sent.count(name) < 40
            assert isinstance(error.value, StoreConflict)
            assert isinstance(error.value.__cause__, type(make()))
            if name == "release":  # given up here; the row keeps the key until the lease ends, and nobody renews it
                assert lock.state is None
                assert not runtime.current.watchdog._holds
                expire(subject)
            else:
                agrees(subject, lock)
                lock.release()
            assert alive(subject) == 0
        for name in ["stale", "reap"]:
            with refusals.of(name, 1000, make):
                with contextlib.suppress(StoreConflict):
                    assert subject.reap(0) == 0
            assert len(refusals.sent) < 60


WAITING = ["join", "announce", "queue_status", "grant", "accept", "leave_queue", "heartbeat", "clear"]


def wait_for(subject: Subject, lock: Any, name: str) -> Any:
    """Let a flow wait for the key that `lock` holds, and get it; `name` is the statement that this is about."""
    database, store = lock._place.store().database, lock._place.store()
    site, owner, later = (
        runtime.current.site(store),
        current_flow().name + "0",
        database.now() + 2 * database.timing.retry_budget,
    )
    wish: dict[str, Any] = {**current_flow().who, "key": "k", "owner": owner, "ttl": 20.0, "life": 20.0}
    wish |= {"label": "", "task": "", "channel": "", "kind": 0, "reading": 0}

    def steps() -> Steps[Any]:
        joined = yield from queue.join(database, wish, later)
        place, _ = there(joined)
        ticket = place.ticket
        view = yield from queue.status(database, "k", later, owner, ticket)
        assert view is not None
        assert (view.mine, view.last, view.ahead, view.present) == (False, ticket, 0, True)
        yield from queue.heartbeat(database, [place], later)
        if name == "clear":
            yield from queue.leave_queue(database, [owner], 1.0)
            assert (yield from handover.end(site, hold_of(lock).grant))
            return None
        if not (yield from handover.grant(site, "k", ticket, hold_of(lock).grant)):
            assert name == "grant"  # a row that is busy: the release frees the key, and the waiter asks for it
            assert (yield from handover.end(site, hold_of(lock).grant))
            return None
        grant = yield from queue.accept(database, wish, ticket, later)
        yield from queue.leave_queue(database, [owner], 1.0)
        return (yield from handover.end(site, there(grant)))

    return drive(steps())


@pytest.mark.parametrize("subject", FEW, indirect=True, ids=str)
@pytest.mark.parametrize("name", WAITING)
def test_refusals_while_waiting(subject: Subject, refusals: Refusals, name: str) -> None:
    """Each error, in turn outside `make faults`, for each statement of the queue: sent again if it passes; if it lasts,
    our error, or no harm."""
    lock, errors = subject.lock("k", ttl=20), ERRORS[subject.protocol.dialect.name]
    for make in errors if LONG else [errors[WAITING.index(name) % len(errors)]]:
        for count in (3, 1000):
            assert lock.acquire()
            with refusals.of(name, count, make), contextlib.suppress(*[StoreConflict] * (count == 1000)):
                wait_for(subject, lock, name)
            skipped = name == "announce" and subject.database == "postgresql"
            at_once = name == "grant" and 1205 in make().args
            assert refusals.sent.count(name) == 3 if at_once else refusals.sent.count(name) >= 4 or skipped
            assert len(refusals.sent) < 60
            subject.run("DELETE FROM lock_waiters")
            if lock.state is not None:
                with contextlib.suppress(LockLost):
                    lock.release()
            expire(subject)


def test_an_inner_release_that_fails_leaves_the_outer_one_able(subject: Subject, refusals: Refusals) -> None:
    """Refused for good at the inner release: a typed error, and the outer release still frees the key.

    On SQLite it is no error: the count in the row is only shown.
    """
    for make in ERRORS[subject.protocol.dialect.name]:
        lock = subject.lock("k", ttl=20)
        assert lock.acquire()
        assert lock.acquire()
        shown = isinstance(make(), sqlite3.Error)
        with refusals.of("set_count", 1000, make), contextlib.nullcontext() if shown else pytest.raises(StoreConflict):
            lock.release()
        while lock.state is not None:
            lock.release()
        assert subject.row("k")["owner"] is None


def test_renewals_refused_for_good_end_the_hold_once(
    subject: Subject, actors: Callable[..., Actor], refusals: Refusals
) -> None:
    """Every renewal fails for several ttl, on SQLite too: stepped down once, in time, and the next one holds alone."""
    heard: list[Any] = []
    lock = subject.lock("k", ttl=0.4, on_lost=lambda _, reason: heard.append(reason))
    assert lock.acquire()
    deadline, began, hold = lock.remaining, time.monotonic(), hold_of(lock)

    def follow() -> list[Any]:
        rival = subject.lock("k", ttl=30)
        seen = [rival.acquire(timeout=3), hold.lease.remaining()]
        time.sleep(times(1, 10) * 0.4)
        seen += [rival.verify(), rival.state]
        rival.release()
        return seen

    with refusals.of("renew", 10_000, ERRORS[subject.protocol.dialect.name][0]):
        following = actors(subject).start(follow)
        assert until(lambda: heard, 2)
        assert deadline - 0.05 < time.monotonic() - began < deadline + 0.2
        assert following.result(20) == [True, 0.0, True, "held"]
    assert len(heard) == 1
    assert lock.state == "lost"
    with pytest.raises(LockError):
        lock.release()
