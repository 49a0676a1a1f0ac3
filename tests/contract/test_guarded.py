"""`lock.atomic()` and `lock.begin()`: an error of the lock from such a block means that nothing was committed."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import itertools
import logging
import signal
import sys
import unittest
from collections.abc import Callable, Coroutine, Iterable, Iterator
from concurrent import futures
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from types import FrameType
from typing import Any

import pytest
from billiard.pool import SIG_SOFT_TIMEOUT, soft_timeout_sighandler
from celery import Celery, shared_task
from celery.exceptions import SoftTimeLimitExceeded
from django.core.exceptions import SynchronousOnlyOperation
from django.db import connections, transaction
from django.db.transaction import TransactionManagementError
from django.test import TestCase
from sqlalchemy import create_engine, event, text
from sqlalchemy.exc import InvalidRequestError
from sqlalchemy.ext.asyncio import AsyncSession, async_scoped_session, async_sessionmaker, create_async_engine
from sqlalchemy.orm import Session, scoped_session, sessionmaker
from sqlalchemy.util import await_only

import dblock
import sqlalchemy_dblock
from dblock.celery.task import _interrupting
from dblock.core import runtime
from dblock.core.errors import LockLost, LockTimeout, StaleSnapshot, StoreLocked
from dblock.core.holding.flow import Hold
from dblock.core.lock import bookkeeping, guarded
from dblock.core.lock.locks import SAYS_NOTHING
from dblock.core.observing.events import Event, Kind
from dblock.core.protocol.drive import drive
from dblock.operating import administration
from sqlalchemy_dblock import db_lock as sqlalchemy_lock
from tests.conftest import ALIASES, DATABASES, SERVERS, run, timed
from tests.contract.test_events import told
from tests.contract.test_guard import (
    MODES,
    STRICT,
    Django,
    Rival,
    User,
    clients,
    holder,
    level,
    notes,
    rival,
    set_level,
)
from tests.support.lab import before, expire, hold_of, there, until
from tests.support.model import Interrupted
from tests.support.strikes import CancelledAt
from tests.support.subjects import FAMILY, PRODUCT, _loop, at_once

__all__ = ["holder", "level", "rival", "told"]

GIVEN: dict[str, Callable[[Any], Any]] = {
    "engine": lambda engine: engine,
    "session": Session,
    "sessionmaker": sessionmaker,
    "scoped_session": lambda engine: scoped_session(sessionmaker(engine)),
    "async engine": lambda engine: engine,
    "async session": AsyncSession,
    "async sessionmaker": async_sessionmaker,
    "async scoped_session": lambda engine: async_scoped_session(async_sessionmaker(engine), asyncio.current_task),
}
"""What begin() takes, by how a test calls it."""
KINDS = ("django", *GIVEN)
SOME_KINDS = KINDS if PRODUCT else ("django", "sessionmaker", "async engine")
"""For tests of what the database does."""
ANY = DATABASES if PRODUCT else ("postgresql",)
"""For tests of what the face does."""
WRITERS = DATABASES if PRODUCT else ("postgresql", "sqlite")
"""For those where it matters that others can write: a server, and a file that has one writer."""


def on(kinds: Iterable[str], databases: Iterable[str] = ("postgresql",)) -> Any:
    """Each of these databases with each of these kinds."""
    cells = list(itertools.product(databases, kinds))
    return pytest.mark.parametrize(("database", "kind"), cells, indirect=["database"])


def in_turn(cells: Iterable[tuple[Any, ...]]) -> list[tuple[Any, ...]]:
    """Each cell with some kind in turn, with all of them in `make product`."""
    kinds = itertools.cycle(SOME_KINDS)
    return [(*cell, kind or next(kinds)) for cell in cells for kind in (KINDS if PRODUCT else ("",))]


def on_loop(coroutine: Coroutine[Any, Any, Any]) -> Any:
    """The result, or the error, of a coroutine that runs as a task of the tests' event loop."""
    return asyncio.run_coroutine_threadsafe(coroutine, _loop()).result(60)


class Client(User):
    """Runs guarded blocks of one kind in this thread, at its isolation level; their bodies are plain functions.

    In a block of an event loop the body runs by `run_sync`, so that it is written once for all kinds.
    """

    def __init__(self, kind: str, database: str, level: str | None = None) -> None:
        super().__init__(kind, database, level)
        self.given: Any = None if self.django else GIVEN[kind](self.engine)
        """What begin() is given."""
        if self.django and level:
            set_level(database, level)

    def guarded(self, lock: Any) -> Any:
        """The block."""
        return lock.atomic() if self.django else lock.begin(self.given)

    def run(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        """The result of a coroutine that serves either face."""
        return on_loop(coroutine) if self.asynchronous else at_once(coroutine)

    async def ablock(self, lock: Any, body: Callable[[Any], Any]) -> Any:
        """Run the body in a guarded block on the lock: it gets what executes statements."""
        try:
            async with self.subject.within(self.guarded(lock)) as given:
                if self.asynchronous:
                    return await given.run_sync(body)
                return body(Django(self.alias) if self.django else given)
        finally:
            if self.kind == "async scoped_session":  # whose session is this task's
                await self.given.remove()

    def block(self, lock: Any, body: Callable[[Any], Any]) -> Any:
        """The same, to its end."""
        return self.run(self.ablock(lock, body))

    def done(self, made: Callable[[], Any]) -> Any:
        """What a call gives, awaited if it can be."""

        async def awaited() -> Any:
            found = made()
            return await found if inspect.isawaitable(found) else found

        return self.run(awaited())

    def close(self) -> None:
        if self.django:
            connections[self.alias].close()
            return
        if self.kind in {"session", "async session"}:
            self.done(self.given.close)
        if self.kind == "scoped_session":
            self.given.remove()
        self.done(self.engine.dispose)


@pytest.fixture
def client(database: str) -> Iterator[Callable[..., Client]]:
    yield from clients(database, Client)


def write(given: Any) -> None:
    given.execute(text("INSERT INTO guarded VALUES (1)"))


def increment(given: Any) -> None:
    """Number what is inserted, by what was read: without a lock two get the same number."""
    [(last,)] = given.execute(text("SELECT coalesce(max(n), 0) FROM guarded"))
    given.execute(text(f"INSERT INTO guarded VALUES ({last + 1})"))


def pause(lock: Any) -> None:
    """As if the flow had slept for longer than it may trust its lease, and nobody had noticed it yet."""
    hold_of(lock).lease.trusted_until = 0.0


def lose(hold: Hold) -> None:
    """The same, and the watchdog has noticed it."""
    hold.lease.trusted_until = 0.0
    assert hold.lease.lose()
    runtime.current.watchdog.announce(hold)


def ended(holder: Client, lock: Any, rival: Rival, committed: int, *, lost: bool = False) -> None:
    """So much was committed, and the lock was left. Others get it; a lost one, once its lease has ended."""
    assert notes(holder.database) == committed
    assert lock.count == 0
    if lost:
        expire(holder.subject)
    assert rival.gets_in()


def while_it_commits(given: Any, happens: Callable[[], object]) -> None:
    """Let something happen during the COMMIT of an asynchronous block, which then takes a moment longer."""
    target = getattr(given, "sync_session", getattr(given, "sync_connection", given))

    def slow(*_: object) -> None:
        happens()
        await_only(asyncio.sleep(0.1))

    event.listen(target, "before_commit" if isinstance(target, Session) else "commit", slow)


MOMENTS = ("before the guard", "in the body", "after the commit")
LOSSES = ("pause", "expiry", "release by force")
USUAL = STRICT if PRODUCT else [*((each, None) for each in SERVERS), *(("sqlite", mode) for mode in MODES)]
"""Servers by their own level. What a level decides is said of guard() itself."""


@pytest.fixture
def elsewhere() -> Iterator[ThreadPoolExecutor]:
    """Another flow, which can be asked in the middle of a block of any kind."""
    with ThreadPoolExecutor(1) as thread:
        yield thread


LOST = [
    (*each, moment, how)
    for n, each in enumerate(USUAL)
    for m, moment in enumerate(MOMENTS)
    for how in (LOSSES if PRODUCT or each[0] == "postgresql" else [LOSSES[(n + m) % 3]])
]
"""A server at each moment in each way; the other databases at each moment in some way in turn."""


@pytest.mark.parametrize(("database", "level", "moment", "how", "kind"), in_turn(LOST), indirect=["database"])
def test_an_error_of_the_lock_means_that_nothing_was_committed(  # noqa: PLR0917
    holder: Client,
    rival: Rival,
    moment: str,
    how: str,
    elsewhere: ThreadPoolExecutor,
    told: list[Event],
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Whatever ends the tenure, and when: before the guard it is LockLost, and later nobody gets in before the end."""
    caplog.set_level(logging.INFO, "dblock")
    lock, theirs, got_in = holder.lock(timeout=1), sqlalchemy_lock(rival.engine, "k"), list[bool]()
    begun = moment != "after the commit" and (holder.level == "IMMEDIATE" or holder.django)
    shut = holder.database == "sqlite" and (begun or moment == "in the body")  # nobody else can write beside a writer

    def happens(fence: int) -> bool:
        """End the tenure where its holder does not see it; whether somebody else gets the key then."""
        if shut:
            return rival.gets_in()
        if how == "release by force":
            assert drive(administration.force_release(theirs._place.store(), "k", fence, "root: enough"))
        else:
            expire(holder.subject)
        return theirs.acquire(blocking=False)

    def loss() -> None:
        if how == "pause" or shut:
            pause(lock)
        got_in.append(elsewhere.submit(happens, lock.fence).result())

    if moment == "before the guard":
        before(lock, "guard", loss)
    elif moment == "after the commit":
        before(lock, "__aexit__" if holder.asynchronous else "__exit__", loss)

    def body(given: Any) -> str:
        write(given)
        if moment == "in the body":
            loss()
            assert got_in == [False]
            write(given)
        return "done"

    if moment == "before the guard":
        with pytest.raises(LockLost):
            holder.block(lock, body)
        assert notes(holder.database) == 0
    else:
        assert holder.block(lock, body) == "done"
        assert notes(holder.database) == (2 if moment == "in the body" else 1)
        logged = [each for each in caplog.records if "stands or falls with its transaction" in each.getMessage()]
        unnoticed = moment == "in the body" and how == "expiry" and not shut  # nobody has come in: it is released
        assert len(logged) == (0 if unnoticed else 1)
        kinds = [(each.kind, each.depth) for each in told]
        assert (Kind.RELEASED, 0) in kinds if unnoticed else Kind.LOST in {kind for kind, _ in kinds}
    assert lock.count == 0
    assert got_in == [True] or elsewhere.submit(theirs.acquire, timeout=5).result()
    elsewhere.submit(theirs.release).result()


# -- what the body does


@on(KINDS, ANY)
def test_each_kind_of_session(holder: Client, rival: Rival) -> None:
    """Its block commits, or rolls back with the error as it is, once and again; the lock is released each time.

    A busy key is LockTimeout, before any transaction has begun.
    """
    lock, error = holder.lock(), ZeroDivisionError("of the body")

    def body(given: Any) -> int:
        write(given)
        assert lock.count == 1
        return 5

    def failing(given: Any) -> None:
        write(given)
        raise error

    with sqlalchemy_lock(rival.engine, "k"), pytest.raises(LockTimeout):
        holder.block(holder.lock(timeout=0), lambda _: pytest.fail("unreachable"))
    assert not holder.django or not connections[holder.alias].in_atomic_block
    for number in (1, 2):
        assert holder.block(lock, body) == 5
        ended(holder, lock, rival, number)
        with pytest.raises(ZeroDivisionError) as caught:
            holder.block(lock, failing)
        assert caught.value is error
        ended(holder, lock, rival, number)


@on(KINDS)
def test_a_body_that_rolls_back(holder: Client, rival: Rival, caplog: pytest.LogCaptureFixture) -> None:
    """Ends as its framework says: without an error here; nothing was committed, and the lock is released."""
    caplog.set_level(logging.INFO, "dblock")
    lock = holder.lock()

    def body(given: Any) -> None:
        write(given)
        if holder.django:
            transaction.set_rollback(True, using=holder.alias)
        else:
            given.rollback()

    holder.block(lock, body)
    ended(holder, lock, rival, 0)
    assert not caplog.records


WARNED = pytest.mark.filterwarnings("ignore:transaction already deassociated")  # SQLAlchemy's, beside our error
WAYS = ((False, False), (True, True), (True, False), (False, True))
"""Whether the body goes on after its commit, and whether the lock is lost: each with some kind in turn, or with all."""
COMMITS: list[Any] = [
    (kind, *way, "itself") for n, kind in enumerate(GIVEN) for way in (WAYS if PRODUCT else [WAYS[n % 4]])
]
COMMITS += [
    pytest.param(kind, True, True, "its connection", marks=WARNED)
    for kind in (GIVEN if PRODUCT else ("session", "async sessionmaker"))
    if "session" in kind
]


@pytest.mark.parametrize(("kind", "goes_on", "lost", "what"), COMMITS)
@pytest.mark.parametrize("database", ["postgresql"], indirect=True)
def test_a_body_that_commits_is_refused(holder: Client, rival: Rival, goes_on: bool, lost: bool, what: str) -> None:
    """At its next statement, or by the end of the block, and never by an error of the lock: that commit stands.

    Also one beneath its session, by the connection of that.
    """
    lock = holder.lock()

    def body(given: Any) -> None:
        write(given)
        (given if what == "itself" else given.connection()).commit()
        if lost:
            pause(lock)
            if goes_on:
                lock.check()
        elif goes_on:
            write(given)

    words = "context manager" if goes_on and not lost else "that commit stands: leave the commit to the end"
    with pytest.raises(InvalidRequestError, match=words) as caught:
        holder.block(lock, body)
    assert isinstance(caught.value.__cause__, LockLost) is (lost and goes_on)
    ended(holder, lock, rival, 1, lost=lost)


@pytest.mark.parametrize("how", ["savepoint", "refused"])
@on(SOME_KINDS, ["postgresql", "sqlite"])
def test_a_savepoint_is_no_commit(holder: Client, how: str) -> None:
    """A block in the body may end; an error of the lock after it still rolls everything back."""

    def body(given: Any) -> None:
        with transaction.atomic(holder.alias) if holder.django else given.begin_nested():
            write(given)
        if how == "refused":
            raise LockLost("of another lock", key="other")

    with pytest.raises(LockLost, match="another lock") if how == "refused" else contextlib.nullcontext():
        holder.block(holder.lock(), body)
    assert notes(holder.database) == (how == "savepoint")


# -- hooks of the application


@pytest.mark.parametrize("lost", [False, True])
@on(["django", "session", "sessionmaker", "async session"])
def test_what_a_hook_raises_comes_as_it_is(holder: Client, rival: Rival, lost: bool) -> None:
    """After the commit, which stands; the lock is held while it runs, and released whatever it raises."""
    lock, error, held = holder.lock(), OSError("of a hook"), list[bool]()

    def hook(*_: object) -> None:
        held.append(lock.count == 1)
        if lost:
            pause(lock)
        raise error

    def body(given: Any) -> None:
        write(given)
        if holder.django:
            transaction.on_commit(hook, using=holder.alias)
        else:
            event.listen(given, "after_commit", hook, once=True)

    with pytest.raises(OSError) as caught:
        holder.block(lock, body)
    assert caught.value is error
    assert held == [True]
    assert any("lost" in note for note in getattr(error, "__notes__", ())) is lost
    ended(holder, lock, rival, 1, lost=lost)


# -- a read-modify-write by these blocks alone


@pytest.mark.parametrize(
    ("database", "level", "kind"),
    [(*each, kind) for each, kind in zip(STRICT, itertools.cycle(["django", "sessionmaker"]), strict=False)],
    indirect=["database"],
)
def test_no_update_is_lost(holder: Client) -> None:
    """Four threads number what they insert, at each isolation level: without gaps, and without an error.

    They use one object: each has its own block, and they take turns.
    """
    block = holder.guarded(holder.lock(timeout=60))

    def increments(_: int) -> None:
        mine = Client(holder.kind, holder.database, holder.level)  # Django's connections are each thread's own
        for _ in range(5):
            with block as given:
                increment(Django(mine.alias) if mine.django else given)
        mine.close()

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(increments, range(4)))
    assert sorted(run(holder.database, "SELECT n FROM guarded")) == [(n,) for n in range(1, 21)]
    assert block._withs == []


# -- one inside another


@pytest.mark.parametrize("nested", ["block", "lock", "the same object"])
@on(["django"], WRITERS)
def test_the_lock_is_entered_again(holder: Client, rival: Rival, nested: str) -> None:
    """A block inside is a savepoint: what it raises takes back its own; the lock is held until the outermost end."""
    lock = holder.lock()
    outer = lock.atomic()
    inner = {"block": holder.lock().atomic(), "lock": holder.lock(), "the same object": outer}[nested]
    with outer:
        write(Django(holder.alias))
        with inner:
            write(Django(holder.alias))
        assert lock.count == 1
        with pytest.raises(ZeroDivisionError), inner:
            assert lock.count == 2
            write(Django(holder.alias))
            raise ZeroDivisionError
        assert lock.count == 1
        assert not rival.gets_in()
    assert notes(holder.database) == (3 if nested == "lock" else 2)
    assert rival.gets_in()


@on(["sessionmaker"], ["sqlite"])
def test_the_lock_is_entered_again_beside_its_own_writer(
    holder: Client, rival: Rival, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The lock's connection cannot write the count then, which nothing depends on.

    What has to write is refused, a second block too, and the one that is open goes on.
    """
    timed(monkeypatch, retry_budget=0.3, answer_grace=0.3)
    event.listen(holder.engine, "connect", lambda raw, _: raw.execute("PRAGMA busy_timeout = 50"))
    with holder.guarded(holder.lock()) as given:
        write(given)
        with holder.lock() as inner:
            assert inner.count == 2
        for refused in (holder.lock(ttl=60), holder.guarded(holder.lock())):
            with pytest.raises(StoreLocked, match="your own perhaps"), refused:
                pytest.fail("unreachable")
        assert inner.count == 1
        assert not rival.gets_in()
    assert notes(holder.database) == 1
    assert rival.gets_in()


@pytest.mark.parametrize("how", ["commit", "rollback"])
@pytest.mark.parametrize(
    ("database", "kind", "level"),
    [("sqlite", "django", None), *((each, "django", "READ COMMITTED") for each in SERVERS)],
    indirect=["database"],
)
def test_inside_an_open_transaction(holder: Client, rival: Rival, how: str) -> None:
    """It is a savepoint, and the lock is kept until the outermost end, whatever becomes of that."""
    lock = holder.lock()
    with transaction.atomic(holder.alias):
        with pytest.raises(ZeroDivisionError), lock.atomic():
            raise ZeroDivisionError
        assert lock.locked()
        with lock.atomic():
            write(Django(holder.alias))
        assert lock.locked()
        assert not rival.gets_in()
        assert notes(holder.database) == 0
        with pytest.raises(RuntimeError, match="durable"), holder.lock("other").atomic(durable=True):
            pytest.fail("unreachable")
        transaction.set_rollback(how == "rollback", using=holder.alias)
    assert notes(holder.database) == (how == "commit")
    assert rival.gets_in()
    assert rival.gets_in("other")
    with lock.atomic(durable=True):
        write(Django(holder.alias))


@pytest.mark.parametrize("level", ["REPEATABLE READ"])
@on(["django"], SERVERS)
def test_inside_a_transaction_that_sees_the_past(holder: Client, rival: Rival) -> None:
    """StaleSnapshot; nothing that the block wrote is committed, and outside of it one goes on."""
    with transaction.atomic(holder.alias):
        _ = Django(holder.alias).execute("SELECT count(*) FROM guarded")
        assert rival.gets_in()
        with pytest.raises(StaleSnapshot), holder.lock().atomic():
            pytest.fail("unreachable")
        write(Django(holder.alias))
    assert notes(holder.database) == 1
    assert rival.gets_in()


@on(["django"], WRITERS)
def test_the_blocks_of_a_testcase_do_not_count(holder: Client, rival: Rival) -> None:
    """A test in one transaction may use durable blocks, one after the other, and nothing of them is committed."""

    class Case(TestCase):
        databases = {holder.alias}  # noqa: RUF012

        def test(self) -> None:
            for number in (1, 2):
                with holder.lock().atomic(durable=True) as lock:
                    write(Django(holder.alias))
                    assert lock.verify()
                assert not lock.locked()
                [(found,)] = Django(holder.alias).execute("SELECT count(*) FROM guarded")
                assert found == number
            with pytest.raises(ZeroDivisionError), holder.lock().atomic():
                raise ZeroDivisionError

    result = unittest.TestResult()
    unittest.TestSuite([Case("test")]).run(result)
    assert result.wasSuccessful(), result.errors + result.failures
    assert notes(holder.database) == 0
    assert rival.gets_in()


# -- several locks, read-write locks, permits


@on(SOME_KINDS, WRITERS)
def test_the_whole_family(holder: Client) -> None:
    """All of them begin such blocks: each commits, and each lets the lock go."""

    def failing(given: Any) -> None:
        write(given)
        raise ZeroDivisionError

    for number, what in enumerate(("several", "reader", "writer", "permit"), 1):
        lock = FAMILY[what](holder.subject.api)
        for _ in range(2):
            holder.block(lock, write)
        assert notes(holder.database) == 2 * number
        with pytest.raises(ZeroDivisionError):
            holder.block(lock, failing)
        assert notes(holder.database) == 2 * number
    assert holder.subject.run("SELECT owner FROM locks WHERE owner IS NOT NULL") == []


# -- decorators


DECORATED = [("django", False), ("django", True), ("scoped_session", False), ("async scoped_session", False)]


@pytest.mark.parametrize(("kind", "task"), DECORATED)
@pytest.mark.parametrize("database", ["postgresql"], indirect=True)
def test_a_decorated_function(holder: Client, rival: Rival, task: bool) -> None:
    """Each call is a block of its own, under the key of its arguments; what is busy may be skipped.

    Celery's decorator stands above: each run of the task is a block.
    """
    given: Any = Django(holder.alias) if holder.django else holder.given

    def sell(x: int) -> int:
        write(given)
        return 1 // x

    async def asell(x: int) -> int:
        _ = await given.execute(text("INSERT INTO guarded VALUES (1)"))
        return 1 // x

    block = holder.guarded(holder.lock("k:{x}", on_busy="skip", otherwise="skipped", timeout=0))
    sold = block(asell if holder.asynchronous else sell)
    app = Celery("guarded", set_as_current=False)
    if task:
        shared_task(name="sell")(sold)

    async def acall(x: int) -> Any:
        try:
            return await sold(x)
        finally:
            await given.remove()

    def call(x: int) -> Any:
        if task:
            return app.tasks["sell"].apply((x,)).get()
        return on_loop(acall(x)) if holder.asynchronous else sold(x)

    assert call(1) == 1
    assert notes(holder.database) == 1
    with pytest.raises(ZeroDivisionError):
        call(0)
    assert notes(holder.database) == 1
    with sqlalchemy_lock(rival.engine, "k:2"):
        assert call(2) == "skipped"
    assert notes(holder.database) == 1
    assert call(2) == 0
    assert notes(holder.database) == 2


# -- refusals: each names the way out


async def inside(block: Any) -> None:
    with block:
        pytest.fail("unreachable")


async def ainside(block: Any) -> None:
    async with block:
        pytest.fail("unreachable")


@on(["django"], ANY)
def test_what_is_refused_on_djangos_face(holder: Client, rival: Rival) -> None:
    lock = holder.lock()
    with pytest.raises(TypeError, match="sync_to_async"):

        @lock.atomic()
        async def coroutine() -> None: ...

    with pytest.raises(SynchronousOnlyOperation, match="no asynchronous transactions"):
        asyncio.run(inside(lock.atomic()))
    with pytest.raises(TypeError, match="sync_to_async"):
        asyncio.run(ainside(lock.atomic()))
    majority: Any = dblock.db_quorum_lock("k", using=["default", "postgresql", "mariadb"])
    with pytest.raises(TypeError, match="use `with`, and fenced_update"):
        majority.atomic()
    other = next(alias for alias in ALIASES.values() if alias != holder.alias)
    with pytest.raises(ValueError, match="another database.*take one of this database"), lock.atomic(using=other):
        pytest.fail("unreachable")
    connection: Any = connections[holder.alias]
    connection.set_autocommit(False)
    try:
        for around in (contextlib.nullcontext(), transaction.atomic(holder.alias)):  # neither commits
            with around, pytest.raises(TransactionManagementError, match="of your own"), lock.atomic():
                pytest.fail("unreachable")
    finally:
        connection.rollback()
        connection.set_autocommit(True)
    assert rival.gets_in()
    assert notes(holder.database) == 0


@pytest.mark.parametrize("database", ANY, indirect=True)
def test_the_block_of_the_other_face(client: Callable[..., Client]) -> None:
    """One sentence says what it is called here; what makes locks says which of them has blocks."""
    django, plain, asynchronous = client("django"), client("engine"), client("async engine")
    for what in ("lock", "several", "reader"):
        with pytest.raises(TypeError, match=r"`with lock\.atomic\(\):`"):
            FAMILY[what](django.subject.api).begin(plain.engine)
    for user, words in ((plain, "`with lock"), (asynchronous, "`async with lock")):
        for what in ("lock", "several", "permit"):
            with pytest.raises(TypeError, match=rf"{words}\.begin\(given\):`"):
                FAMILY[what](user.subject.api).atomic(durable=True)
    makers = {"db_rwlock": r"\.read\(\) or \.write\(\)", "db_semaphore": r"\.permit\(\)"}
    for maker, words in makers.items():
        for user, name in itertools.product((django, plain), ("atomic", "begin")):
            with pytest.raises(TypeError, match=words):
                getattr(user.subject.api(maker, "k"), name)(using="default")
    majority: Any = sqlalchemy_dblock.db_quorum_lock([create_engine(f"sqlite:///{each}.db") for each in "abc"], "k")
    with pytest.raises(TypeError, match="use `with`, and fenced_update"):
        majority.begin(plain.engine)


@on(GIVEN)
def test_what_is_refused_on_sqlalchemys_face(holder: Client, rival: Rival, kind: str) -> None:
    lock = holder.lock()
    other = create_engine("sqlite://") if holder.asynchronous else create_async_engine("sqlite+aiosqlite://")
    theirs = [GIVEN[name](other) for name in GIVEN if ("async" in name) is not holder.asynchronous]
    for wrong in (None, 5, Session, "k", create_engine, *theirs):
        with pytest.raises(TypeError, match="sessionmaker or (Async)?Session"):
            lock.begin(wrong)
    enter = inside if holder.asynchronous else ainside
    with pytest.raises(TypeError, match="`async with`" if holder.asynchronous else "use `with`"):
        asyncio.run(enter(lock.begin(holder.engine)))
    if "scoped" not in kind and "maker" in kind:
        with pytest.raises(TypeError, match="scoped_session"):
            holder.guarded(lock)(ainside if holder.asynchronous else print)
    if kind in {"session", "scoped_session", "async session"}:
        _ = holder.done(lambda: holder.given.execute(text("SELECT 1")))
        with pytest.raises(InvalidRequestError, match="give begin\\(\\) the sessionmaker"):
            holder.block(lock, write)
        assert lock.count == 0
        holder.done(holder.given.rollback)
    if kind in {"session", "async session"}:
        target = getattr(holder.given, "sync_session", holder.given)
        target.twophase = True
        with pytest.raises(ValueError, match="two-phase.*use `with`"):
            holder.block(lock, write)
    assert rival.gets_in()
    assert notes(holder.database) == 0


@on(["session", "sessionmaker", "async session", "async sessionmaker"], ["sqlite"])
def test_a_session_of_a_connection(holder: Client, kind: str) -> None:
    """It would join the open transaction of that, and commit nothing; where none is open, the block begins one."""
    connection = holder.done(holder.engine.connect)
    holder.given = GIVEN[kind](connection)
    lock, outer = holder.lock(), holder.done(connection.begin)
    with pytest.raises(InvalidRequestError, match="the Connection of this Session"):
        holder.block(lock, write)
    holder.done(outer.rollback)
    holder.block(lock, write)
    assert notes(holder.database) == 1
    holder.done(connection.close)


# -- beside these blocks: the end of a plain `with`


@pytest.mark.parametrize("what", FAMILY)
@on(["django", "async engine"])
def test_a_loss_at_the_end_of_a_plain_with(holder: Client, what: str) -> None:
    """Its message says that it says nothing of what was committed, also where it has cancelled the body."""
    interrupt = holder.asynchronous and what not in {"permit", "semaphore"}
    options: dict[str, Any] = {"interrupt": True} if interrupt else {}
    lock = FAMILY[what](partial(holder.subject.api, ttl=30.0, **options))

    async def within() -> None:
        async with holder.subject.within(lock):
            lose(next(iter(runtime.current.watchdog._holds)))
            await holder.subject.pause(20 if interrupt else 0)

    with pytest.raises(LockLost) as caught:
        holder.run(within())
    assert str(caught.value).count(SAYS_NOTHING) == 1
    assert str(caught.value).endswith(SAYS_NOTHING)


# -- one object, many flows


@on(["django", "sessionmaker"])
def test_one_object_is_open_in_two_threads(holder: Client) -> None:
    """As one of readers may be: each stack ends the block of its own thread, whichever ends first."""
    lock = FAMILY["reader"](holder.subject.api)
    block = holder.guarded(lock)

    def enter(stack: contextlib.ExitStack) -> str:
        given = stack.enter_context(block)
        write(Django(holder.alias) if holder.django else given)
        return str(lock.owner)

    def leave(stack: contextlib.ExitStack) -> str:
        owner = str(lock.owner)
        stack.close()
        if holder.django:
            connections.close_all()
        return owner

    with ThreadPoolExecutor(1) as first, ThreadPoolExecutor(1) as second:
        threads = [(each, contextlib.ExitStack()) for each in (first, second)]
        owners = [thread.submit(enter, stack).result() for thread, stack in threads]
        for number, (thread, stack) in enumerate(threads):
            assert thread.submit(leave, stack).result() == owners[number]
            assert notes(holder.database) == number + 1
    assert block._withs == []


@on(["async sessionmaker"])
def test_one_object_in_several_tasks(holder: Client) -> None:
    """Each has its own block, and they take turns; a task that is cancelled in its body leaves the others theirs."""
    block = holder.guarded(holder.lock(timeout=60))

    async def enter(cancelled: bool) -> None:
        for _ in range(5):
            async with block as given:
                await given.run_sync(increment)
                if cancelled:
                    raise asyncio.CancelledError

    async def main() -> None:
        found = await asyncio.gather(*(enter(number == 2) for number in range(5)), return_exceptions=True)
        assert [type(each) for each in found if each is not None] == [asyncio.CancelledError]

    on_loop(main())
    assert sorted(run(holder.database, "SELECT n FROM guarded")) == [(n,) for n in range(1, 21)]
    assert block._withs == []


# -- interrupts


@contextlib.contextmanager
def struck(when: Callable[[FrameType, str], bool | None]) -> Iterator[list[str]]:
    """Interrupt the first moment of which `when` is true, or None for a function that is not looked at; gives which."""
    found = list[str]()

    def step(frame: FrameType, event: str, _: object) -> Any:
        if (now := when(frame, event)) is None:
            return None
        if now and not found:
            found.append(f"{event} {frame.f_code.co_qualname}")
            raise Interrupted
        return step

    sys.settrace(step)
    try:
        yield found
    finally:
        sys.settrace(None)


def beginning_or_end(number: int) -> Callable[[FrameType, str], bool | None]:
    """Of the so-many-th function that begins and ends a block."""
    methods: Any = guarded.Guarded
    theirs = {methods.__exit__.leave.__code__, methods.__enter__.enter.__code__}  # Python calls these
    counted = itertools.count(1)

    def when(frame: FrameType, event: str) -> bool | None:
        code, caller = frame.f_code, frame.f_back
        if caller is None or not caller.f_code.co_filename.endswith("/guarded.py"):
            return None
        ours = code.co_filename in {contextlib.__file__, guarded.__file__} or code is bookkeeping.innermost.__code__
        if not ours or code in theirs or code.co_flags & inspect.CO_GENERATOR:
            return None
        return event in {"call", "return"} and next(counted) == number

    return when


@pytest.mark.parametrize(("kind", "enter"), [("django", "with"), ("session", "with"), ("session", "an ExitStack")])
@pytest.mark.parametrize("database", ["postgresql"], indirect=True)
def test_an_interrupt_leaves_no_transaction_open(holder: Client, rival: Rival, enter: str) -> None:
    """Wherever it falls between the parts of a block, while its traceback is kept too: one may go on with the database.

    The block is kept as well, as that of a module is.
    """

    @contextlib.contextmanager
    def by_hand(block: Any) -> Iterator[Any]:
        with contextlib.ExitStack() as stack:
            yield stack.enter_context(block)

    for number in itertools.count(1):
        lock, before = holder.lock(f"k{number}"), notes(holder.database)
        block = holder.guarded(lock)
        where, error = list[str](), None
        try:
            with struck(beginning_or_end(number)) as where, block if enter == "with" else by_hand(block) as given:
                write(Django(holder.alias) if holder.django else given)
        except Interrupted as interrupted:
            error = interrupted
        is_open = connections[holder.alias].in_atomic_block if holder.django else holder.given.in_transaction()
        assert not is_open, where
        assert lock.count == 0, where
        assert block._withs == [], where
        assert rival.gets_in(f"k{number}"), where
        assert bool(where) is (error is not None)
        if error is None:
            assert notes(holder.database) == before + 1
            assert number > 10
            return


@pytest.mark.parametrize(
    "where", ["call Blocking.__exit__", "return Blocking.__exit__", "return BlockingLocks.__enter__"]
)
@on(["django", "engine"])
def test_an_interrupt_of_the_locks_own_block(holder: Client, rival: Rival, where: str) -> None:
    """The lease ends, as that of a plain `with`, also while the traceback is kept: nothing renews it for ever."""
    lock = holder.lock(ttl=0.5)

    def when(frame: FrameType, event: str) -> bool:
        return f"{event} {frame.f_code.co_qualname}" == where

    with pytest.raises(Interrupted) as kept, struck(when):
        with holder.guarded(lock) as given:
            write(Django(holder.alias) if holder.django else given)
    assert notes(holder.database) == ("__enter__" not in where)
    assert until(rival.gets_in, 2)
    assert kept.tb is not None


# -- interrupt=True


@pytest.mark.parametrize("moment", ["in the body", "in the commit"])
@on(["async engine", "async sessionmaker"])
def test_a_loss_interrupts_the_body_alone(holder: Client, moment: str) -> None:
    """It ends the body, and LockLost says that nothing was committed; from COMMIT on it ends nothing."""
    lock = holder.lock(interrupt=True)

    async def main() -> str:
        async with holder.guarded(lock) as given:
            await given.run_sync(write)
            if moment == "in the body":
                lose(hold_of(lock))
                await asyncio.sleep(20)
                pytest.fail("unreachable")
            while_it_commits(given, partial(lose, hold_of(lock)))
        await asyncio.sleep(0)
        assert not there(asyncio.current_task()).cancelling()
        return "done"

    if moment == "in the body":
        with pytest.raises(LockLost) as caught:
            on_loop(main())
        assert SAYS_NOTHING not in str(caught.value)
        assert notes(holder.database) == 0
    else:
        assert on_loop(main()) == "done"
        assert notes(holder.database) == 1


@on(["async engine"])
def test_a_loss_in_the_commit_interrupts_the_body_around_it(holder: Client) -> None:
    """Once the block has ended, which is told no error of the lock."""
    lock, told = holder.lock(interrupt=True), list[str]()

    async def main() -> None:
        async with lock:
            async with holder.guarded(lock) as given:
                await given.run_sync(write)
                while_it_commits(given, partial(lose, hold_of(lock)))
            told.append("committed")
            await asyncio.sleep(20)
            pytest.fail("unreachable")

    with pytest.raises(LockLost):
        on_loop(main())
    assert told == ["committed"]
    assert notes(holder.database) == 1


@on(["django", "engine"], ["sqlite"])
def test_a_loss_in_the_commit_of_a_task(holder: Client) -> None:
    """The end of the block interrupts the body of a Celery task, its COMMIT does not."""
    lock, told = holder.lock(), list[str]()

    def committing(*_: object) -> None:
        lose(hold_of(lock))
        told.append("lost")

    former = signal.signal(SIG_SOFT_TIMEOUT, soft_timeout_sighandler)
    try:
        with pytest.raises(LockLost) as caught, lock, _interrupting(lock, True):
            with holder.guarded(lock) as given:
                write(Django(holder.alias) if holder.django else given)
                if holder.django:
                    before(connections[holder.alias], "commit", committing)
                else:
                    event.listen(given, "commit", committing)
            pytest.fail("unreachable")
    finally:
        signal.signal(SIG_SOFT_TIMEOUT, former)
        vars(connections[holder.alias]).pop("commit", None)
    assert isinstance(caught.value.__context__, SoftTimeLimitExceeded)
    assert told == ["lost"]
    assert notes(holder.database) == 1


@pytest.mark.parametrize("lost", [False, True])
@on(["async engine"])
def test_a_cancellation_of_the_commit_comes_as_it_is(holder: Client, rival: Rival, lost: bool) -> None:
    """From outside: what became of the commit is not known, and an error of the lock would say that it is."""
    lock = holder.lock(interrupt=True)

    async def main() -> None:
        async with holder.guarded(lock) as given:
            await given.run_sync(write)
            hold, task = hold_of(lock), asyncio.current_task()
            assert task is not None

            def struck() -> None:
                if lost:
                    lose(hold)
                asyncio.get_running_loop().call_soon(task.cancel)

            while_it_commits(given, struck)

    with pytest.raises(futures.CancelledError):
        on_loop(main())
    if lost:
        expire(holder.subject)
    assert rival.gets_in()


@on(["async engine", "async session"])
def test_a_cancellation_at_each_pause(holder: Client, rival: Rival) -> None:
    """It comes as it is, the key is free, and no connection is lost. In the COMMIT either may be the outcome."""

    async def block(lock: Any) -> None:
        async with holder.guarded(lock) as given:
            await given.run_sync(write)

    async def struck(lock: Any, strike: CancelledAt) -> str:
        try:
            await strike.run(block(lock))
        except asyncio.CancelledError:
            assert lock.count == 0
            return "cancelled"
        finally:
            assert holder.engine.pool.checkedout() == 0
        return "done"

    stood = list[int]()
    for number in itertools.count(1):
        run(holder.database, "DELETE FROM guarded")
        lock, strike = holder.lock(f"k{number}"), CancelledAt(number)
        found = on_loop(struck(lock, strike))
        assert found == ("cancelled" if strike.fired else "done"), strike.place
        stood += [number] * (notes(holder.database) if strike.fired else 0)
        assert until(partial(rival.gets_in, f"k{number}"), 5), strike.place
        if not strike.fired:
            break
    assert min(stood) > 5, "it is begun, guarded and written before"
    assert max(stood) == number - 1, "the release comes after the COMMIT"


@on(KINDS, ANY)
def test_a_block_inside_a_with_that_has_lost_the_lock(holder: Client) -> None:
    """LockLost, although the key can be had again: it would write by what was read under the tenure that is over."""
    lock, inner = holder.lock(), holder.lock()

    async def within() -> None:
        with contextlib.suppress(LockLost):
            async with holder.subject.within(lock):
                pause(lock)
                expire(holder.subject)
                with pytest.raises(LockLost):
                    await holder.ablock(inner, write)

    holder.run(within())
    assert notes(holder.database) == 0
    assert holder.done(inner.locked) is False
    holder.block(inner, write)
