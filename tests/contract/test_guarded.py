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
from dblock.core.observing.observers import observe
from dblock.core.protocol.drive import drive
from dblock.operating import administration
from sqlalchemy_dblock import db_lock as sqlalchemy_lock
from tests.conftest import ALIASES, DATABASES, INNODB, SERVERS, run, timed
from tests.contract.test_guard import STRICT, Rival, clients, end_lease, notes, of_kind, rival
from tests.support.lab import hold_of, until
from tests.support.model import Interrupted
from tests.support.strikes import CancelledAt
from tests.support.subjects import FAMILY, PRODUCT, Actor, Subject, _loop

__all__ = ["rival"]

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


def in_turn(cells: Iterable[tuple[Any, ...]]) -> list[tuple[Any, ...]]:
    """Each cell with some kind in turn, with all of them in `make product`."""
    kinds = itertools.cycle(SOME_KINDS)
    return [(*cell, kind or next(kinds)) for cell in cells for kind in (KINDS if PRODUCT else ("",))]


class Django:
    """A transaction of Django's, for a body that knows only `execute`."""

    def __init__(self, alias: str) -> None:
        self.alias = alias

    def execute(self, statement: Any) -> Any:
        with connections[self.alias].cursor() as cursor:
            cursor.execute(str(statement))
            return list(cursor.fetchall()) if cursor.description else []


def on_loop(coroutine: Coroutine[Any, Any, Any]) -> Any:
    """The result, or the error, of a coroutine that runs as a task of the tests' event loop."""
    return asyncio.run_coroutine_threadsafe(coroutine, _loop()).result(60)


class Client:
    """Runs guarded blocks of one kind in this thread, at its isolation level; their bodies are plain functions.

    In a block of an event loop the body runs by `run_sync`, so that it is written once for all kinds.
    """

    def __init__(self, kind: str, database: str, level: str | None = None) -> None:
        self.kind, self.database, self.level = kind, database, level
        self.django, self.asynchronous = kind == "django", "async" in kind
        self.alias = ALIASES[database]
        self.subject = of_kind(kind, database, level)
        self.engine: Any = None if self.django else self.subject.engine
        self._given: Any = None
        if self.django and level:
            self._set_level()

    def _set_level(self) -> None:
        wrapper: Any = connections[self.alias]
        wrapper.ensure_connection()
        if self.database == "sqlite":
            wrapper.transaction_mode = self.level
            return
        words = "CHARACTERISTICS AS TRANSACTION" if self.database == "postgresql" else "TRANSACTION"
        with wrapper.cursor() as cursor:
            cursor.execute(f"SET SESSION {words} ISOLATION LEVEL {self.level}")

    @property
    def given(self) -> Any:
        """What begin() is given, made when it is used: an asynchronous scoped_session asks for its task."""
        if self._given is None:
            self._given = GIVEN[self.kind](self.engine)
        return self._given

    def lock(self, key: str = "k", **options: Any) -> Any:
        return self.subject.lock(key, **options)

    def guarded(self, lock: Any) -> Any:
        """The block."""
        return lock.atomic() if self.django else lock.begin(self.given)

    def block(self, lock: Any, body: Callable[[Any], Any]) -> Any:
        """Run the body in a guarded block on the lock: it gets what executes statements."""
        if self.django:
            with self.guarded(lock) as given:
                assert given is lock
                return body(Django(self.alias))
        if not self.asynchronous:
            with self.guarded(lock) as given:
                return body(given)

        async def block() -> Any:
            try:
                async with self.guarded(lock) as given:
                    return await given.run_sync(body)
            finally:
                if self.kind == "async scoped_session":  # whose session is this task's
                    await self.given.remove()

        return on_loop(block())

    def done(self, made: Callable[[], Any]) -> Any:
        """What a call gives, awaited if it can be."""
        if not self.asynchronous:
            return made()

        async def awaited() -> Any:
            found = made()
            return await found if inspect.isawaitable(found) else found

        return on_loop(awaited())

    def close(self) -> None:
        if self.django:
            connections[self.alias].close()
            return
        if self.kind in {"session", "async session"} and self._given is not None:
            self.done(self._given.close)
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


def before(lock: Any, method: str, happens: Callable[[], object]) -> None:
    """Let something happen before this very lock object is guarded, or left."""
    plain, twice = getattr(lock, method), list[int]()

    def later(*args: Any) -> Any:
        if not twice:
            twice.append(1)
            happens()
        return plain(*args)

    setattr(lock, method, later)


def pause(lock: Any) -> None:
    """As if the flow had slept for longer than it may trust its lease, and nobody had noticed it yet."""
    hold_of(lock).lease.trusted_until = 0.0


def lose(hold: Hold) -> None:
    """The same, and the watchdog has noticed it."""
    hold.lease.trusted_until = 0.0
    assert hold.lease.lose()
    runtime.current.watchdog.announce(hold)


MOMENTS = ("before the guard", "in the body", "after the commit")
LOSSES = ("pause", "expiry", "release by force")
STANDS = "stands or falls with its transaction"
DEFAULT = {"postgresql": "READ COMMITTED", **dict.fromkeys(INNODB, "REPEATABLE READ")}
USUAL = [(database, level) for database, level in STRICT if PRODUCT or level == DEFAULT.get(database, level)]
"""What a level decides is said of guard() itself."""


class Loss:
    """What ends the tenure of a lock, where its holder does not see it; and another who tries to take the key then.

    That is a flow of its own, so that it can be called in the middle of a block of any kind.
    """

    def __init__(self, how: str, lock: Any, rival: Rival, *, shut: bool) -> None:
        self.how, self.lock, self.database = how, lock, rival.database
        self.shut = shut
        """Whether nobody else can write now, as on SQLite beside a writer."""
        self.got_in: bool | None = None
        self.theirs = sqlalchemy_lock(rival.engine, "k", ttl=30)
        self.other = Actor(Subject("sqlalchemy", "sync", rival.database))
        self._rival = rival

    def __call__(self) -> None:
        if self.how == "pause" or self.shut:
            pause(self.lock)
        fence = self.lock.fence
        self.other.do(lambda: self._happens(fence))

    def _happens(self, fence: int) -> None:
        if self.shut:
            self.got_in = self._rival.gets_in()
            return
        if self.how == "release by force":
            store = self.theirs._place.store()
            assert drive(administration.force_release(store, "k", fence, "root: enough"))
        else:
            end_lease(self.database)
        self.got_in = self.theirs.acquire(blocking=False)

    def end(self) -> None:
        """The key is to be had, if they do not have it already."""
        if not self.got_in:
            assert self.other.call(self.theirs, "acquire", timeout=5)
        self.other.call(self.theirs, "release")
        self.other.close()


@pytest.fixture
def events() -> Iterator[list[Event]]:
    """What observers are told; some of it later, by another thread."""
    seen: list[Event] = []
    end = observe(seen.append)
    yield seen
    end()


@pytest.mark.parametrize(
    ("database", "level", "moment", "how", "kind"),
    in_turn((*each, moment, how) for how in LOSSES for moment in MOMENTS for each in USUAL),
    indirect=["database"],
)
def test_an_error_of_the_lock_means_that_nothing_was_committed(  # noqa: PLR0917
    database: str,
    rival: Rival,
    client: Callable[..., Client],
    level: str,
    moment: str,
    how: str,
    kind: str,
    *,
    events: list[Event],
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Whatever ends the tenure, and when: before the guard it is LockLost, and later nobody gets in before the end."""
    caplog.set_level(logging.INFO, "dblock")
    holder = client(kind, level)
    lock = holder.lock(ttl=30, timeout=1)
    begun = moment != "after the commit" and (level == "IMMEDIATE" or holder.django)
    loss = Loss(how, lock, rival, shut=database == "sqlite" and (begun or moment == "in the body"))
    if moment == "before the guard":
        before(lock, "guard", loss)
    elif moment == "after the commit":
        before(lock, "__aexit__" if holder.asynchronous else "__exit__", loss)

    def body(given: Any) -> str:
        write(given)
        if moment == "in the body":
            loss()
            assert loss.got_in is False
            write(given)
        return "done"

    if moment == "before the guard":
        with pytest.raises(LockLost):
            holder.block(lock, body)
        assert notes(database) == 0
    else:
        assert holder.block(lock, body) == "done"
        assert notes(database) == (2 if moment == "in the body" else 1)
        told = [each.getMessage() for each in caplog.records if STANDS in each.getMessage()]
        unnoticed = moment == "in the body" and how == "expiry" and not loss.shut  # nobody has come in: it is released
        assert len(told) == (0 if unnoticed else 1)
        kinds = [(each.kind, each.depth) for each in events]
        assert (Kind.RELEASED, 0) in kinds if unnoticed else Kind.LOST in {kind for kind, _ in kinds}
    assert lock.count == 0
    loss.end()


# -- what the body does


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("database", DATABASES if PRODUCT else ["postgresql"], indirect=True)
def test_each_kind_of_session(database: str, client: Callable[..., Client], kind: str, rival: Rival) -> None:
    """Its block commits, or rolls back with the error as it is, once and again; the lock is released each time."""
    holder = client(kind)
    lock = holder.lock(ttl=30)
    error = ZeroDivisionError("of the body")

    def body(given: Any) -> int:
        write(given)
        assert lock.count == 1
        return 5

    def failing(given: Any) -> None:
        write(given)
        raise error

    for number in (1, 2):
        assert holder.block(lock, body) == 5
        assert notes(database) == number
        assert lock.count == 0
        with pytest.raises(ZeroDivisionError) as caught:
            holder.block(lock, failing)
        assert caught.value is error
        assert notes(database) == number
        assert lock.count == 0
        assert rival.gets_in()


@pytest.mark.parametrize("database", DATABASES, indirect=True)
@pytest.mark.parametrize("kind", SOME_KINDS)
def test_a_busy_key(database: str, client: Callable[..., Client], rival: Rival, kind: str) -> None:
    """LockTimeout, and no transaction has begun."""
    holder = client(kind)
    theirs = sqlalchemy_lock(rival.engine, "k", ttl=30)
    assert theirs.acquire()
    with pytest.raises(LockTimeout):
        holder.block(holder.lock(timeout=0), lambda _: pytest.fail("unreachable"))
    theirs.release()
    if holder.django:
        assert not connections[holder.alias].in_atomic_block
    assert holder.block(holder.lock(), lambda _: 1) == 1


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("database", ["postgresql"], indirect=True)
def test_a_body_that_rolls_back(
    database: str, client: Callable[..., Client], rival: Rival, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Ends as its framework says: without an error here; nothing was committed, and the lock is released."""
    caplog.set_level(logging.INFO, "dblock")
    holder = client(kind)
    lock = holder.lock(ttl=30)

    def body(given: Any) -> None:
        write(given)
        if holder.django:
            transaction.set_rollback(True, using=holder.alias)
        else:
            given.rollback()

    holder.block(lock, body)
    assert notes(database) == 0
    assert lock.count == 0
    assert rival.gets_in()
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
def test_a_body_that_commits_is_refused(  # noqa: PLR0917
    database: str, client: Callable[..., Client], rival: Rival, kind: str, goes_on: bool, lost: bool, what: str
) -> None:
    """At its next statement, or by the end of the block, and never by an error of the lock: that commit stands.

    Also one beneath its session, by the connection of that.
    """
    holder = client(kind)
    lock = holder.lock(ttl=30)

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
    assert notes(database) == 1
    assert lock.count == 0
    if lost:
        end_lease(database)
    assert rival.gets_in()


@pytest.mark.parametrize("how", ["savepoint", "refused"])
@pytest.mark.parametrize("kind", SOME_KINDS)
@pytest.mark.parametrize("database", ["postgresql", "sqlite"], indirect=True)
def test_a_savepoint_is_no_commit(database: str, client: Callable[..., Client], kind: str, how: str) -> None:
    """A block in the body may end; an error of the lock after it still rolls everything back."""
    holder = client(kind)
    lock = holder.lock(ttl=30)

    def body(given: Any) -> None:
        with transaction.atomic(holder.alias) if holder.django else given.begin_nested():
            write(given)
        if how == "refused":
            raise LockLost("of another lock", key="other")

    if how == "refused":
        with pytest.raises(LockLost, match="another lock"):
            holder.block(lock, body)
    else:
        holder.block(lock, body)
    assert notes(database) == (how == "savepoint")


# -- hooks of the application


@pytest.mark.parametrize("lost", [False, True])
@pytest.mark.parametrize("kind", ["django", "session", "sessionmaker", "async session"])
@pytest.mark.parametrize("database", ["postgresql"], indirect=True)
def test_what_a_hook_raises_comes_as_it_is(
    database: str, client: Callable[..., Client], rival: Rival, kind: str, lost: bool
) -> None:
    """After the commit, which stands; the lock is held while it runs, and released whatever it raises."""
    holder = client(kind)
    lock = holder.lock(ttl=30)
    error, held = OSError("of a hook"), list[bool]()

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
    assert notes(database) == 1
    assert lock.count == 0
    if lost:
        end_lease(database)
    assert rival.gets_in()


# -- a read-modify-write by these blocks alone


@pytest.mark.parametrize(
    ("database", "level", "kind"),
    [(*each, kind) for each, kind in zip(STRICT, itertools.cycle(["django", "sessionmaker"]), strict=False)],
    indirect=["database"],
)
def test_no_update_is_lost(database: str, client: Callable[..., Client], level: str, kind: str) -> None:
    """Four threads number what they insert, at each isolation level: without gaps, and without an error.

    They use one object: each has its own block, and they take turns.
    """
    holder = client(kind, level)
    block = holder.guarded(holder.lock(ttl=30, timeout=60))

    def increments(_: int) -> None:
        mine = Client(kind, database, level)  # Django's connections are each thread's own
        for _ in range(5):
            with block as given:
                increment(Django(mine.alias) if mine.django else given)
        mine.close()

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(increments, range(4)))
    assert sorted(run(database, "SELECT n FROM guarded")) == [(n,) for n in range(1, 21)]
    assert block._withs == []


# -- one inside another


@pytest.mark.parametrize("nested", ["block", "lock", "the same object"])
def test_the_lock_is_entered_again(database: str, client: Callable[..., Client], rival: Rival, nested: str) -> None:
    """A block inside is a savepoint: what it raises takes back its own; the lock is held until the outermost end."""
    holder = client("django")
    lock = holder.lock(ttl=30)
    outer = lock.atomic()
    inner = {"block": holder.lock(ttl=30).atomic(), "lock": holder.lock(ttl=30), "the same object": outer}[nested]
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
    assert notes(database) == (3 if nested == "lock" else 2)
    assert rival.gets_in()


@pytest.mark.parametrize("kind", ["sessionmaker"])
@pytest.mark.parametrize("database", ["sqlite"], indirect=True)
def test_the_lock_is_entered_again_beside_its_own_writer(
    database: str, client: Callable[..., Client], rival: Rival, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The lock's connection cannot write the count then, which nothing depends on.

    What has to write is refused, a second block too, and the one that is open goes on.
    """
    timed(monkeypatch, retry_budget=0.3, answer_grace=0.3)
    holder = client(kind)
    event.listen(holder.engine, "connect", lambda raw, _: raw.execute("PRAGMA busy_timeout = 50"))
    with holder.guarded(holder.lock(ttl=30)) as given:
        write(given)
        with holder.lock(ttl=30) as inner:
            assert inner.count == 2
        for refused in (holder.lock(ttl=60), holder.guarded(holder.lock(ttl=30))):
            with pytest.raises(StoreLocked, match="your own perhaps"), refused:
                pytest.fail("unreachable")
        assert inner.count == 1
        assert not rival.gets_in()
    assert notes(database) == 1
    assert rival.gets_in()


@pytest.mark.parametrize("how", ["commit", "rollback"])
def test_inside_an_open_transaction(database: str, client: Callable[..., Client], rival: Rival, how: str) -> None:
    """It is a savepoint, and the lock is kept until the outermost end, whatever becomes of that."""
    holder = client("django", "READ COMMITTED" if database in SERVERS else None)
    lock = holder.lock(ttl=30)
    with transaction.atomic(holder.alias):
        with pytest.raises(ZeroDivisionError), lock.atomic():
            raise ZeroDivisionError
        assert lock.locked()
        with lock.atomic():
            write(Django(holder.alias))
        assert lock.locked()
        assert not rival.gets_in()
        assert notes(database) == 0
        with pytest.raises(RuntimeError, match="durable"), holder.lock("other").atomic(durable=True):
            pytest.fail("unreachable")
        transaction.set_rollback(how == "rollback", using=holder.alias)
    assert notes(database) == (how == "commit")
    assert rival.gets_in()
    assert rival.gets_in("other")
    with lock.atomic(durable=True):
        write(Django(holder.alias))


@pytest.mark.parametrize("database", SERVERS, indirect=True)
def test_inside_a_transaction_that_sees_the_past(database: str, client: Callable[..., Client], rival: Rival) -> None:
    """StaleSnapshot; nothing that the block wrote is committed, and outside of it one goes on."""
    holder = client("django", "REPEATABLE READ")
    with transaction.atomic(holder.alias):
        _ = Django(holder.alias).execute("SELECT count(*) FROM guarded")
        assert rival.gets_in()
        with pytest.raises(StaleSnapshot), holder.lock().atomic():
            pytest.fail("unreachable")
        write(Django(holder.alias))
    assert notes(database) == 1
    assert rival.gets_in()


def test_the_blocks_of_a_testcase_do_not_count(database: str, client: Callable[..., Client], rival: Rival) -> None:
    """A test in one transaction may use durable blocks, one after the other, and nothing of them is committed."""
    holder = client("django")

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
    assert notes(database) == 0
    assert rival.gets_in()


# -- several locks, read-write locks, permits


@pytest.mark.parametrize("kind", SOME_KINDS)
@pytest.mark.parametrize("database", DATABASES if PRODUCT else ["postgresql", "sqlite"], indirect=True)
def test_the_whole_family(database: str, client: Callable[..., Client], kind: str) -> None:
    """All of them begin such blocks: each commits, and each lets the lock go."""

    def failing(given: Any) -> None:
        write(given)
        raise ZeroDivisionError

    holder = client(kind)
    for number, what in enumerate(("several", "reader", "writer", "permit"), 1):
        lock = FAMILY[what](holder.subject.api)
        for _ in range(2):
            holder.block(lock, write)
        assert notes(database) == 2 * number
        with pytest.raises(ZeroDivisionError):
            holder.block(lock, failing)
        assert notes(database) == 2 * number
    owners = run(database, "SELECT owner FROM locks WHERE owner IS NOT NULL")
    assert owners == []


# -- decorators


@pytest.mark.parametrize("kind", ["django", "scoped_session", "async scoped_session"])
@pytest.mark.parametrize("database", ["postgresql"], indirect=True)
def test_a_decorated_function(database: str, client: Callable[..., Client], rival: Rival, kind: str) -> None:
    """Each call is a block of its own, under the key of its arguments; what is busy may be skipped."""
    holder = client(kind)
    if holder.asynchronous:
        given: Any = holder.given

        @holder.guarded(holder.lock("k:{x}", on_busy="skip", otherwise="skipped", timeout=0))
        async def sell(x: int) -> int:
            await given.execute(text("INSERT INTO guarded VALUES (1)"))
            return 1 // x
    else:

        @holder.guarded(holder.lock("k:{x}", on_busy="skip", otherwise="skipped", timeout=0))
        def sell(x: int) -> int:
            write(Django(holder.alias) if holder.django else holder.given)
            return 1 // x

    def call(x: int) -> Any:
        async def acall() -> Any:
            try:
                return await sell(x)
            finally:
                await holder.given.remove()

        return on_loop(acall()) if holder.asynchronous else sell(x)

    assert call(1) == 1
    assert notes(database) == 1
    with pytest.raises(ZeroDivisionError):
        call(0)
    assert notes(database) == 1
    with sqlalchemy_lock(rival.engine, "k:2"):
        assert call(2) == "skipped"
    assert notes(database) == 1
    assert call(2) == 0
    assert notes(database) == 2


# -- refusals: each names the way out


async def inside(block: Any) -> None:
    with block:
        pytest.fail("unreachable")


async def ainside(block: Any) -> None:
    async with block:
        pytest.fail("unreachable")


def test_what_is_refused_on_djangos_face(database: str, client: Callable[..., Client], rival: Rival) -> None:
    holder = client("django")
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
    assert notes(database) == 0


def test_the_block_of_the_other_face(database: str, client: Callable[..., Client]) -> None:
    """One sentence says what it is called here; what makes locks says which of them has blocks."""
    django, plain, asynchronous = client("django"), client("engine"), client("async engine")
    for what in ("lock", "several", "reader"):
        with pytest.raises(TypeError, match=r"`with lock\.atomic\(\):`"):
            FAMILY[what](django.subject.api).begin(plain.engine)
    for holder, words in ((plain, "`with lock"), (asynchronous, "`async with lock")):
        for what in ("lock", "several", "permit"):
            with pytest.raises(TypeError, match=rf"{words}\.begin\(given\):`"):
                FAMILY[what](holder.subject.api).atomic(durable=True)
    makers = {"db_rwlock": r"\.read\(\) or \.write\(\)", "db_semaphore": r"\.permit\(\)"}
    for maker, words in makers.items():
        for holder, name in itertools.product((django, plain), ("atomic", "begin")):
            with pytest.raises(TypeError, match=words):
                getattr(holder.subject.api(maker, "k"), name)(using="default")
    majority: Any = sqlalchemy_dblock.db_quorum_lock([create_engine(f"sqlite:///{each}.db") for each in "abc"], "k")
    with pytest.raises(TypeError, match="use `with`, and fenced_update"):
        majority.begin(plain.engine)


@pytest.mark.parametrize("kind", GIVEN)
@pytest.mark.parametrize("database", ["postgresql"], indirect=True)
def test_what_is_refused_on_sqlalchemys_face(
    database: str, client: Callable[..., Client], rival: Rival, kind: str
) -> None:
    holder = client(kind)
    lock = holder.lock(ttl=30)
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
    assert notes(database) == 0


@pytest.mark.parametrize("kind", ["session", "sessionmaker", "async session", "async sessionmaker"])
@pytest.mark.parametrize("database", ["sqlite"], indirect=True)
def test_a_session_of_a_connection(database: str, client: Callable[..., Client], kind: str) -> None:
    """It would join the open transaction of that, and commit nothing; where none is open, the block begins one."""
    holder = client(kind)
    connection = holder.done(holder.engine.connect)
    holder._given = GIVEN[kind](connection)
    lock, outer = holder.lock(ttl=30), holder.done(connection.begin)
    with pytest.raises(InvalidRequestError, match="the Connection of this Session"):
        holder.block(lock, write)
    holder.done(outer.rollback)
    holder.block(lock, write)
    assert notes(database) == 1
    holder.done(connection.close)


@pytest.mark.parametrize("kind", ["engine", "sessionmaker", "async engine"])
@pytest.mark.parametrize("why", ["AUTOCOMMIT", "another database"])
@pytest.mark.parametrize("database", DATABASES if PRODUCT else ["postgresql"], indirect=True)
def test_a_transaction_that_guards_nothing(
    database: str, client: Callable[..., Client], kind: str, why: str, rival: Rival
) -> None:
    """In autocommit mode, or elsewhere: ValueError before the body, and the lock is released."""
    holder = client(kind)
    make = create_async_engine if holder.asynchronous else create_engine
    if why == "AUTOCOMMIT":
        wrong = make(holder.engine.url, isolation_level="AUTOCOMMIT")
    else:
        wrong = make("sqlite+aiosqlite://" if holder.asynchronous else "sqlite://")
    lock = holder.lock(ttl=30)
    holder._given = GIVEN[kind](wrong)
    with pytest.raises(ValueError, match="autocommit mode" if why == "AUTOCOMMIT" else "another database"):
        holder.block(lock, lambda _: pytest.fail("unreachable"))
    holder.done(wrong.dispose)
    assert lock.count == 0
    assert rival.gets_in()


# -- beside these blocks: the end of a plain `with`

PLAIN = [
    (kind, what, False)
    for n, what in enumerate(FAMILY)
    for kind in (SOME_KINDS if PRODUCT else [SOME_KINDS[n % len(SOME_KINDS)]])
]
PLAIN += [("async engine", what, True) for what in FAMILY if what not in {"permit", "semaphore"}]


@pytest.mark.parametrize(("kind", "what", "interrupt"), PLAIN)
@pytest.mark.parametrize("database", ["postgresql"], indirect=True)
def test_a_loss_at_the_end_of_a_plain_with(
    database: str, client: Callable[..., Client], kind: str, what: str, interrupt: bool
) -> None:
    """Its message says that it says nothing of what was committed, also where it has cancelled the body."""
    holder = client(kind)
    options: dict[str, Any] = {"interrupt": True} if interrupt else {}
    lock = FAMILY[what](partial(holder.subject.api, ttl=30.0, **options))

    async def within() -> None:
        async with lock:
            lose(next(iter(runtime.current.watchdog._holds)))
            await asyncio.sleep(20 if interrupt else 0)

    with pytest.raises(LockLost) as caught:
        if holder.asynchronous:
            on_loop(within())
        else:
            with lock:
                lose(next(iter(runtime.current.watchdog._holds)))
    assert str(caught.value).count(SAYS_NOTHING) == 1
    assert str(caught.value).endswith(SAYS_NOTHING)


# -- one object, many flows


@pytest.mark.parametrize("kind", ["django", "sessionmaker"])
@pytest.mark.parametrize("database", ["postgresql"], indirect=True)
def test_one_object_is_open_in_two_threads(database: str, client: Callable[..., Client], kind: str) -> None:
    """As one of readers may be: each stack ends the block of its own thread, whichever ends first."""
    holder = client(kind)
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
            assert notes(database) == number + 1
    assert block._withs == []


@pytest.mark.parametrize("database", ["postgresql"], indirect=True)
def test_one_object_in_several_tasks(database: str, client: Callable[..., Client]) -> None:
    """Each has its own block, and they take turns; a task that is cancelled in its body leaves the others theirs."""
    holder = client("async sessionmaker")
    block = holder.guarded(holder.lock(ttl=30, timeout=60))

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
    assert sorted(run(database, "SELECT n FROM guarded")) == [(n,) for n in range(1, 21)]
    assert block._withs == []


# -- interrupts


@contextlib.contextmanager
def struck(number: int) -> Iterator[list[str]]:
    """Interrupt the beginning or the end of the so-many-th function that begins and ends a block; gives which."""
    methods: Any = guarded.Guarded
    theirs = {methods.__exit__.leave.__code__, methods.__enter__.enter.__code__}  # Python calls these
    counted, found = itertools.count(1), list[str]()

    def step(frame: FrameType, event: str, _: object) -> Any:
        code, caller = frame.f_code, frame.f_back
        if caller is None or not caller.f_code.co_filename.endswith("/guarded.py"):
            return None
        ours = code.co_filename in {contextlib.__file__, guarded.__file__} or code is bookkeeping.innermost.__code__
        if not ours or code in theirs or code.co_flags & inspect.CO_GENERATOR:
            return None
        if event in {"call", "return"} and not found and next(counted) == number:
            found.append(f"{event} {code.co_qualname}")
            raise Interrupted
        return step

    sys.settrace(step)
    try:
        yield found
    finally:
        sys.settrace(None)


@pytest.mark.parametrize(("kind", "enter"), [("django", "with"), ("session", "with"), ("session", "an ExitStack")])
@pytest.mark.parametrize("database", ["postgresql"], indirect=True)
def test_an_interrupt_leaves_no_transaction_open(
    database: str, client: Callable[..., Client], rival: Rival, kind: str, enter: str
) -> None:
    """Wherever it falls between the parts of a block, while its traceback is kept too: one may go on with the database.

    The block is kept as well, as that of a module is.
    """

    @contextlib.contextmanager
    def by_hand(block: Any) -> Iterator[Any]:
        with contextlib.ExitStack() as stack:
            yield stack.enter_context(block)

    holder = client(kind)
    for number in itertools.count(1):
        lock, before = holder.lock(f"k{number}", ttl=30), notes(database)
        block = holder.guarded(lock)
        where, error = list[str](), None
        try:
            with struck(number) as where, block if enter == "with" else by_hand(block) as given:
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
            assert notes(database) == before + 1
            assert number > 10
            return


WRITTEN = {"__enter__": "BlockingLocks.__enter__", "__exit__": "Blocking.__exit__"}


@pytest.mark.parametrize("where", ["call __exit__", "return __exit__", "return __enter__"])
@pytest.mark.parametrize("kind", ["django", "engine"])
@pytest.mark.parametrize("database", ["postgresql"], indirect=True)
def test_an_interrupt_of_the_locks_own_block(
    database: str, client: Callable[..., Client], rival: Rival, kind: str, where: str
) -> None:
    """The lease ends, as that of a plain `with`, also while the traceback is kept: nothing renews it for ever."""
    holder = client(kind)
    event_of, name = where.split()
    lock, moment = holder.lock(ttl=0.5), [event_of, WRITTEN[name]]
    struck = list[FrameType]()

    def step(frame: FrameType, event: str, _: object) -> Any:
        if not struck and [event, frame.f_code.co_qualname] == moment:
            struck.append(frame)
            raise Interrupted
        return step

    try:
        with pytest.raises(Interrupted) as kept:
            sys.settrace(step)
            with holder.guarded(lock) as given:
                write(Django(holder.alias) if holder.django else given)
    finally:
        sys.settrace(None)
    assert notes(database) == ("enter" not in where)
    assert until(rival.gets_in, 2)
    assert kept.tb is not None


# -- interrupt=True


@pytest.mark.parametrize("moment", ["in the body", "in the commit"])
@pytest.mark.parametrize("kind", ["async engine", "async sessionmaker"])
@pytest.mark.parametrize("database", ["postgresql"], indirect=True)
def test_a_loss_interrupts_the_body_alone(database: str, client: Callable[..., Client], kind: str, moment: str) -> None:
    """It ends the body, and LockLost says that nothing was committed; from COMMIT on it ends nothing."""
    holder = client(kind)
    lock = holder.lock(ttl=30, interrupt=True)

    async def main() -> str:
        async with holder.guarded(lock) as given:
            await given.execute(text("INSERT INTO guarded VALUES (1)"))
            hold = hold_of(lock)
            if moment == "in the body":
                lose(hold)
                await asyncio.sleep(20)
                pytest.fail("unreachable")
            target = getattr(given, "sync_session", getattr(given, "sync_connection", given))

            def slow(*_: object) -> None:
                lose(hold)
                await_only(asyncio.sleep(0.1))

            event.listen(target, "before_commit" if "session" in kind else "commit", slow)
        await asyncio.sleep(0)
        task = asyncio.current_task()
        assert task is not None
        assert not task.cancelling()
        return "done"

    if moment == "in the body":
        with pytest.raises(LockLost) as caught:
            on_loop(main())
        assert SAYS_NOTHING not in str(caught.value)
        assert notes(database) == 0
    else:
        assert on_loop(main()) == "done"
        assert notes(database) == 1


@pytest.mark.parametrize("database", ["postgresql"], indirect=True)
def test_a_loss_in_the_commit_interrupts_the_body_around_it(database: str, client: Callable[..., Client]) -> None:
    """Once the block has ended, which is told no error of the lock."""
    holder = client("async engine")
    lock, told = holder.lock(ttl=30, interrupt=True), list[str]()

    async def main() -> None:
        async with lock:
            async with holder.guarded(lock) as given:
                await given.execute(text("INSERT INTO guarded VALUES (1)"))
                hold = hold_of(lock)

                def slow(*_: object) -> None:
                    lose(hold)
                    await_only(asyncio.sleep(0.1))

                event.listen(given.sync_connection, "commit", slow)
            told.append("committed")
            await asyncio.sleep(20)
            pytest.fail("unreachable")

    with pytest.raises(LockLost):
        on_loop(main())
    assert told == ["committed"]
    assert notes(database) == 1


@pytest.mark.parametrize("kind", ["django", "engine"])
@pytest.mark.parametrize("database", ["sqlite"], indirect=True)
def test_a_loss_in_the_commit_of_a_task(database: str, client: Callable[..., Client], kind: str) -> None:
    """The end of the block interrupts the body of a Celery task, its COMMIT does not."""
    holder = client(kind)
    lock, told = holder.lock(ttl=30), list[str]()

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
    assert notes(database) == 1


@pytest.mark.parametrize("lost", [False, True])
@pytest.mark.parametrize("database", ["postgresql"], indirect=True)
def test_a_cancellation_of_the_commit_comes_as_it_is(
    database: str, client: Callable[..., Client], lost: bool, rival: Rival
) -> None:
    """From outside: what became of the commit is not known, and an error of the lock would say that it is."""
    holder = client("async engine")
    lock = holder.lock(ttl=30, interrupt=True)

    async def main() -> None:
        async with holder.guarded(lock) as given:
            await given.execute(text("INSERT INTO guarded VALUES (1)"))
            hold = hold_of(lock)
            task = asyncio.current_task()
            assert task is not None

            def slow(*_: object) -> None:
                if lost:
                    lose(hold)
                asyncio.get_running_loop().call_soon(task.cancel)
                await_only(asyncio.sleep(0.1))

            event.listen(given.sync_connection, "commit", slow)

    with pytest.raises(futures.CancelledError):
        on_loop(main())
    if lost:
        end_lease(database)
    assert rival.gets_in()


@pytest.mark.parametrize("kind", ["async engine", "async session"])
@pytest.mark.parametrize("database", ["postgresql"], indirect=True)
def test_a_cancellation_at_each_pause(database: str, client: Callable[..., Client], rival: Rival, kind: str) -> None:
    """It comes as it is, the key is free, and no connection is lost. In the COMMIT either may be the outcome."""
    holder = client(kind)

    async def block(lock: Any) -> None:
        async with holder.guarded(lock) as given:
            await given.execute(text("INSERT INTO guarded VALUES (1)"))

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
        run(database, "DELETE FROM guarded")
        lock, strike = holder.lock(f"k{number}", ttl=30), CancelledAt(number)
        found = on_loop(struck(lock, strike))
        assert found == ("cancelled" if strike.fired else "done"), strike.place
        stood += [number] * (notes(database) if strike.fired else 0)
        assert until(partial(rival.gets_in, f"k{number}"), 5), strike.place
        if not strike.fired:
            break
    assert min(stood) > 5, "it is begun, guarded and written before"
    assert max(stood) == number - 1, "the release comes after the COMMIT"


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("database", DATABASES if PRODUCT else ["postgresql"], indirect=True)
def test_a_block_inside_a_with_that_has_lost_the_lock(database: str, client: Callable[..., Client], kind: str) -> None:
    """LockLost, although the key can be had again: it would write by what was read under the tenure that is over."""
    user = client(kind)
    lock, inner = user.lock(), user.lock()

    def unnoticed() -> None:
        pause(lock)
        end_lease(database)

    async def within() -> None:
        with contextlib.suppress(LockLost):
            async with lock:
                unnoticed()
                with pytest.raises(LockLost):
                    async with user.guarded(inner) as given:
                        await given.run_sync(write)

    if user.asynchronous:
        on_loop(within())
    else:
        with contextlib.suppress(LockLost), lock:
            unnoticed()
            with pytest.raises(LockLost):
                user.block(inner, write)
    assert notes(database) == 0
    assert user.done(inner.locked) is False
    user.block(inner, write)


@pytest.mark.parametrize("database", ["postgresql"], indirect=True)
def test_a_shared_task(database: str, client: Callable[..., Client], rival: Rival) -> None:
    """Celery's decorator stands above: each run is a block, and what a busy key refuses was not committed."""
    from celery import Celery, shared_task

    holder = client("django")
    app = Celery("guarded", set_as_current=False)

    @shared_task(name="sell")
    @holder.lock("k:{x}", timeout=0).atomic()
    def sell(x: int) -> int:
        write(Django(holder.alias))
        return 1 // x

    task = app.tasks["sell"]
    assert task.apply((1,)).get() == 1
    with pytest.raises(ZeroDivisionError):
        task.apply((0,)).get()
    with sqlalchemy_lock(rival.engine, "k:1"):
        with pytest.raises(LockTimeout):
            task.apply((1,)).get()
    assert notes(database) == 1
