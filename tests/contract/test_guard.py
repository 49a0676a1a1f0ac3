"""`lock.guard()`: while the guarded transaction lasts nobody else's tenure begins, whatever becomes of the lease."""

from __future__ import annotations

import contextlib
import itertools
import pickle
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
from asgiref.sync import sync_to_async
from django.db import connections, transaction
from django.db.transaction import TransactionManagementError
from sqlalchemy import Engine, event, text
from sqlalchemy.engine import make_url
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import Session

from dblock import db_lock as django_lock
from dblock.core.errors import LockLost, LockNotHeld, LockStoreError, Reason, StaleSnapshot
from dblock.core.protocol.steps import Execute, Rows
from sqlalchemy_dblock import db_lock as sqlalchemy_lock
from sqlalchemy_dblock import reap
from tests.conftest import ALIASES, DATABASES, INNODB, SERVERS, own_engine, ready, run, url
from tests.contract.test_lease import STEAL
from tests.support.lab import ended, expire, renewed, there, until
from tests.support.subjects import PRODUCT, Actor, Subject

LEVELS = ("READ COMMITTED", "REPEATABLE READ", "SERIALIZABLE")
KINDS = ("django", "django async", "connection", "session", "async connection", "async session")
SOME_KINDS = KINDS if PRODUCT else ("django", "session", "async connection")
BOTH_FACES = KINDS if PRODUCT else ("django", "async connection")
"""For tests of what the database does at each of its isolation levels."""
DRIVERS = {"sqlite": "aiosqlite", "postgresql": "asyncpg", **dict.fromkeys(INNODB, "asyncmy")}


EACH_LEVEL = [(database, level) for database in SERVERS for level in LEVELS]


def in_turn(databases: Sequence[str], each: int = 1) -> Any:
    """For those that wait for seconds: each database with some of the kinds in turn, with all in `make product`."""
    kinds = itertools.cycle(SOME_KINDS)
    most = len(SOME_KINDS) if PRODUCT else each
    pairs = [(database, next(kinds)) for database in databases for _ in range(most)]
    return pytest.mark.parametrize(("database", "kind"), pairs, indirect=["database"])


def on(databases: Sequence[str], kinds: Sequence[str] = BOTH_FACES) -> Any:
    """The caller's connection runs the pin: each database through both faces, and PostgreSQL through every kind."""
    pairs = [(each, kind) for each in databases for kind in (KINDS if each == "postgresql" else kinds)]
    return pytest.mark.parametrize(("database", "kind"), pairs, indirect=["database"])


def at(levels: Sequence[tuple[str, str]]) -> Any:
    """What a level decides: each database at each level by one of the faces in turn, by all kinds in `make product`."""
    faces = itertools.cycle(BOTH_FACES)
    cells = [(*each, kind) for each in levels for kind in (KINDS if PRODUCT else [next(faces)])]
    return pytest.mark.parametrize(("database", "level", "kind"), cells, indirect=["database"])


class Django:
    """A transaction of Django's, for code that knows only `execute`."""

    def __init__(self, alias: str) -> None:
        self.alias = alias

    def execute(self, statement: Any) -> Any:
        with connections[self.alias].cursor() as cursor:
            cursor.execute(str(statement))
            return list(cursor.fetchall()) if cursor.description else []


class User:
    """Who has locks, and transactions of one kind."""

    def __init__(self, kind: str, database: str, level: str | None = None) -> None:
        self.kind, self.database, self.level = kind, database, level
        self.django, self.asynchronous = kind.startswith("django"), "async" in kind
        self.alias, self.subject = ALIASES[database], of_kind(kind, database, level)
        self.engine: Any = None if self.django else self.subject.engine

    def lock(self, key: str = "k", **options: Any) -> Any:
        """A lock of this user's own kind."""
        return self.subject.lock(key, **options)


class Client(User):
    """A flow of control with a lock and a transaction of one kind, which it opens, guards and ends when it is told."""

    def __init__(self, kind: str, database: str, level: str | None = None) -> None:
        super().__init__(kind, database, level)
        self.actor = Actor(self.subject)
        self.opened: Any = None

    def attach(self, token: str) -> Any:
        return self.actor.do(lambda: self.subject.api("attach", token))

    def call(self, lock: Any, name: str, *args: Any, **kwargs: Any) -> Any:
        return self.actor.call(lock, name, *args, **kwargs)

    def held(self, key: str = "k") -> Any:
        """A lock that this client has acquired."""
        lock = self.lock(key)
        assert self.call(lock, "acquire") is True
        return lock

    def begin(self, *, read: bool = True) -> None:
        """Open the transaction, at its isolation level, and read something, so that it has its snapshot."""
        if self.opened is not None:
            self.actor.do(self.opened.close)
        if self.django:
            self._django(self._enter)
        elif "connection" in self.kind:
            self.opened = self.actor.do(self.engine.connect)
        else:
            self.opened = (AsyncSession if self.asynchronous else Session)(self.engine)
        if read:
            self.execute("SELECT count(*) FROM guarded")
        if read and self.level:
            self._see_level()

    def _see_level(self) -> None:
        if self.database == "postgresql":
            assert self.execute("SELECT current_setting('transaction_isolation')") == [(str(self.level).lower(),)]
        elif self.database in INNODB:
            name = "transaction_isolation" if self.database == "mysql" else "tx_isolation"
            assert self.execute(f"SELECT @@{name}") == [(str(self.level).replace(" ", "-"),)]

    def _enter(self) -> None:
        if self.level:
            set_level(self.database, self.level)
        self.opened = transaction.atomic(self.alias)
        self.opened.__enter__()

    def _django(self, function: Callable[[], Any]) -> Any:
        return self.actor.do(sync_to_async(function) if self.asynchronous else function)

    def execute(self, sql: str) -> list[tuple[Any, ...]]:
        """Run a statement of the user's in the transaction."""
        if self.django:
            return [tuple(row) for row in self._django(lambda: Django(self.alias).execute(sql))]
        result = self.actor.do(lambda: self.opened.execute(text(sql)))
        return [tuple(row) for row in result.all()] if result.returns_rows else []

    def write(self) -> None:
        self.execute("INSERT INTO guarded VALUES (1)")

    def guard(self, lock: Any) -> None:
        if self.django:
            self.call(lock, "guard")
        else:
            self.actor.do(lambda: lock.guard(self.opened))

    def end(self, how: str) -> None:
        """Commit or roll back."""
        if self.django:

            def leave() -> None:
                if how == "rollback":
                    transaction.set_rollback(True, using=self.alias)
                self.opened.__exit__(None, None, None)

            self._django(leave)
            self.opened = None
        else:
            self.actor.do(getattr(self.opened, how))

    def close(self) -> None:
        if self.django:
            if self.opened is not None:
                self.end("rollback")
            self._django(connections.close_all)
        else:
            if self.opened is not None:
                self.actor.do(self.opened.close)
            self.actor.do(self.engine.dispose)
        self.actor.close()


def set_level(database: str, level: str) -> None:
    """Let transactions of this thread's connection of Django have that isolation level, or that mode on SQLite."""
    wrapper: Any = connections[ALIASES[database]]
    wrapper.ensure_connection()
    if database == "sqlite":
        wrapper.transaction_mode = level
        return
    words = "CHARACTERISTICS AS TRANSACTION" if database == "postgresql" else "TRANSACTION"
    with wrapper.cursor() as cursor:
        cursor.execute(f"SET SESSION {words} ISOLATION LEVEL {level}")


def of_kind(kind: str, database: str, level: str | None) -> Subject:
    """What makes locks of that kind; transactions of its engine have that isolation level, or that mode on SQLite."""
    face = "async" if "async" in kind else "sync"
    if kind.startswith("django"):
        return Subject("django", face, database)
    plain = Subject("sqlalchemy", face, database, DRIVERS[database] if face == "async" else "")
    subject = plain.over(**({"isolation_level": level} if level and database != "sqlite" else {}))
    if level and database == "sqlite":
        _begin_with(getattr(subject.engine, "sync_engine", subject.engine), level)
    return subject


def _begin_with(engine: Engine, mode: str) -> None:
    """Let each of the engine's transactions on SQLite be a real one, as SQLAlchemy's documentation shows it."""

    @event.listens_for(engine, "connect")
    def _(connection: Any, _record: object) -> None:
        connection.isolation_level = None

    @event.listens_for(engine, "begin")
    def _(connection: Any) -> None:
        connection.exec_driver_sql(f"BEGIN {mode}")


class Rival:
    """A stranger in a thread of its own (the test's), with another engine."""

    def __init__(self, database: str) -> None:
        self.database = database
        # So that a test that hangs fails.
        args = {"init_command": "SET SESSION innodb_lock_wait_timeout = 1"} if database in INNODB else {}
        self.engine = own_engine(database, connect_args=args)

    def gets_in(self, key: str = "k") -> bool:
        """Whether a try without waiting succeeds; it is given back at once. On SQLite a writer may find no room."""
        lock = sqlalchemy_lock(self.engine, key)
        for _ in range(5):  # a machine that is busy may make one of them slow
            start = time.monotonic()
            try:
                acquired = lock.acquire(blocking=False)
            except LockStoreError:
                if self.database == "sqlite":
                    return False
                raise
            quick = time.monotonic() - start < 0.7
            if acquired:
                lock.release()
            if quick or self.database == "sqlite":
                return acquired
        pytest.fail("a try is kept waiting")


@pytest.fixture
def rival(database: str) -> Rival:
    """Who would like to have the key."""
    return Rival(database)


def empty(database: str) -> None:
    """The table of the user's, without a row."""
    run(database, "CREATE TABLE IF NOT EXISTS guarded (n integer)")
    run(database, "DELETE FROM guarded")


def clients(database: str, client: Callable[..., Any]) -> Iterator[Callable[..., Any]]:
    """Makes clients, over that table."""
    empty(database)
    with ended(client) as make:
        yield lambda kind, level=None: make(kind, database, level)


@pytest.fixture
def client(database: str) -> Iterator[Callable[..., Client]]:
    yield from clients(database, Client)


@pytest.fixture
def level() -> None:
    """That of the database, where a test names none."""


@pytest.fixture
def holder(client: Callable[..., Client], kind: str, level: str | None) -> Client:
    """The client of the kind and the level that a test is about."""
    return client(kind, level)


def notes(database: str) -> int:
    """How much was committed, as a stranger sees it."""
    return int(str(run(database, "SELECT count(*) FROM guarded")[0][0]))


@at(EACH_LEVEL)
def test_a_guarded_transaction_keeps_others_out(holder: Client, rival: Rival) -> None:
    """Although the lease has ended: until the transaction does, no longer; nobody is kept waiting meanwhile."""
    how = "rollback" if holder.asynchronous else "commit"
    lock = holder.held()
    fence = holder.actor.get(lock, "fence")
    holder.begin()
    holder.guard(lock)
    holder.write()
    expire(holder.subject)
    assert not rival.gets_in()
    assert sqlalchemy_lock(rival.engine, "k").acquire(timeout=0.1) is False
    spans = list[float]()
    for _ in range(4):
        start = time.monotonic()
        reap(rival.engine, retention=0)
        spans.append(time.monotonic() - start)
    assert min(spans) < 0.7
    assert not rival.gets_in()
    holder.end(how)
    assert notes(holder.database) == (1 if how == "commit" else 0)
    with sqlalchemy_lock(rival.engine, "k", timeout=0) as theirs:
        assert theirs.fence > fence
    with pytest.raises(LockLost):
        holder.call(lock, "release")


def locks_gaps(database: str, level: str) -> bool:
    """Above READ COMMITTED, InnoDB may lock the gap beside a row whose neighbour was deleted a moment ago.

    A key that has no row may then have to wait for one.
    """
    return database in INNODB and level != "READ COMMITTED"


@pytest.mark.parametrize("kind", ["session"])
@pytest.mark.parametrize(
    ("database", "level", "known"),
    [
        (database, level, known)
        for database in SERVERS
        for level in LEVELS
        for known in (["all"] if locks_gaps(database, level) else ["", "known"])
    ],
    indirect=["database"],
)
def test_guarding_one_key_leaves_others_alone(holder: Client, rival: Rival, known: str) -> None:
    """New keys, known keys and released ones, before and after it in any order, are taken without a wait."""
    keys = ("a", "l", "known", "m ", "n", "M")
    for key in keys if known == "all" else ("known",) if known else ():
        assert rival.gets_in(key)
    lock = holder.held("m")
    holder.begin()
    holder.guard(lock)
    for key in keys:
        start = time.monotonic()
        assert rival.gets_in(key)
        assert time.monotonic() - start < 0.7
    holder.end("commit")
    holder.call(lock, "release")


@at(EACH_LEVEL)
def test_renewals_go_on_under_guard(holder: Client, rival: Rival, level: str) -> None:
    """The row has been renewed since the transaction's snapshot, and is while it lasts."""
    lock = holder.held()
    holder.begin()
    holder.execute("SELECT count(*) FROM locks" if level != "SERIALIZABLE" else "SELECT 1")
    assert renewed(holder.subject)
    holder.guard(lock)
    for _ in range(3):
        assert not rival.gets_in()
        assert renewed(holder.subject)
        assert holder.actor.get(lock, "state") != "lost"
    assert until(lambda: holder.actor.get(lock, "state") == "held")
    holder.guard(lock)  # once more, after another renewal
    holder.end("commit")
    assert holder.call(lock, "verify") is True
    assert not rival.gets_in()
    holder.call(lock, "release")
    assert rival.gets_in()


@in_turn(DATABASES)
def test_a_lost_lock_is_refused(holder: Client) -> None:
    """Taken over before guard(): LockLost says by whom, and the user's writes can be rolled back."""
    lock = holder.held()
    holder.subject.run(STEAL, key="k")
    holder.begin()
    holder.write()
    with pytest.raises(LockLost) as caught:
        holder.guard(lock)
    assert caught.value.reason is Reason.TAKEN_OVER
    assert there(caught.value.holder).identity.host == "elsewhere"
    holder.end("rollback")
    assert notes(holder.database) == 0
    assert holder.actor.get(lock, "state") == "lost"
    holder.begin()
    with pytest.raises(LockLost):
        holder.guard(lock)  # by what is known here alone
    holder.end("rollback")


@at(EACH_LEVEL)
def test_a_lock_lost_after_the_snapshot_is_refused(holder: Client, rival: Rival) -> None:
    """Even where the transaction itself still sees the row as it was."""
    lock = holder.held()
    holder.begin()
    holder.write()
    expire(holder.subject)
    theirs = sqlalchemy_lock(rival.engine, "k")
    assert theirs.acquire(blocking=False)
    with pytest.raises(LockLost) as caught:
        holder.guard(lock)
    assert caught.value.reason is Reason.TAKEN_OVER
    assert theirs.verify()
    holder.end("rollback")
    assert notes(holder.database) == 0
    theirs.release()


@on(DATABASES, SOME_KINDS)
def test_a_release_inside_the_guarded_transaction(holder: Client, rival: Rival) -> None:
    """Lets nobody in before its end, and everybody then."""
    if holder.database == "sqlite" and holder.kind in {"connection", "async connection", "django async"}:
        pytest.skip("nobody tells us when their transaction ends, and before that nobody else can write")
    for number, how in enumerate(("rollback", "commit")):
        lock = holder.held()
        holder.begin()
        holder.guard(lock)
        holder.write()
        holder.call(lock, "release")
        assert not rival.gets_in()
        holder.end(how)
        assert notes(holder.database) == number
        assert rival.gets_in()


# -- transactions that are older than the tenure

MODES = ("DEFERRED", "IMMEDIATE")
"""Of SQLite's transactions, which all have one isolation level."""
STRICT = [
    (database, level)
    for database in SERVERS
    for level in (*LEVELS, *(["READ UNCOMMITTED"] if database == "mariadb" else []))
] + [("sqlite", mode) for mode in MODES]


def sees_the_past(database: str, level: str) -> bool:
    """Whether a transaction that has read goes on to read as of then, without an error."""
    if database in INNODB:  # where SERIALIZABLE locks what it reads
        return level == "REPEATABLE READ"
    return level in {"REPEATABLE READ", "SERIALIZABLE", "DEFERRED"}


@at([each for each in STRICT if each != ("sqlite", "IMMEDIATE")])  # nobody else can hold the key beside that one
def test_a_transaction_that_is_older_than_the_tenure_is_refused(
    holder: Client, rival: Rival, level: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """StaleSnapshot where it would not see what was written until then; the lock stays ours, and a new one will do."""
    monkeypatch.setitem(connections.settings[holder.alias], "ATOMIC_REQUESTS", True)
    holder.begin()
    assert rival.gets_in()
    if holder.database == "sqlite" and holder.django:  # where the take is part of the transaction
        with pytest.raises(StaleSnapshot, match="take the lock, and then begin"):
            holder.held()
        holder.end("rollback")
        return
    lock = holder.held()
    if sees_the_past(holder.database, level):
        with pytest.raises(StaleSnapshot, match="take the lock,? and then begin") as caught:
            holder.guard(lock)
        assert caught.value.key == "k"
        assert ("@transaction.non_atomic_requests" in str(caught.value)) == holder.django
        again = pickle.loads(pickle.dumps(caught.value))
        assert (type(again), str(again), again.key) == (StaleSnapshot, str(caught.value), "k")
        holder.end("rollback")
        assert holder.actor.get(lock, "state") == "held"
        holder.begin()
    holder.guard(lock)
    holder.write()
    holder.end("commit")
    holder.call(lock, "release")
    assert notes(holder.database) == 1


@pytest.mark.parametrize("kind", ["django", "session"])
@pytest.mark.parametrize(("database", "level"), EACH_LEVEL, indirect=["database"])
def test_a_tenure_is_as_old_as_its_first_entry(holder: Client, client: Callable[..., Client]) -> None:
    """Entered again, or handed over, after the transaction began: it has seen all that came before the tenure."""
    heir, lock = client(holder.kind, holder.level), holder.held()
    holder.begin()
    heir.begin()
    again = holder.held()
    holder.guard(again)
    holder.end("commit")
    holder.call(again, "release")
    token = holder.call(lock, "detach")
    attached = heir.attach(token)
    heir.guard(attached)
    heir.end("commit")
    heir.call(attached, "release")


@in_turn(SERVERS, 2)
def test_a_session_that_means_another_table(database: str, holder: Client, rival: Rival) -> None:
    """By the same name, in another schema: guard() keeps the lock's own row."""
    run(database, "CREATE SCHEMA IF NOT EXISTS tenant")
    run(database, "DROP TABLE IF EXISTS tenant.locks")
    like = "(LIKE public.locks INCLUDING ALL)" if database == "postgresql" else "LIKE locks"
    run(database, f"CREATE TABLE tenant.locks {like}")
    lock = holder.held()
    holder.begin()
    try:
        holder.execute("SET LOCAL search_path TO tenant, public" if database == "postgresql" else "USE tenant")
        holder.guard(lock)
        expire(holder.subject)
        assert not rival.gets_in()
    finally:
        if database in INNODB:
            holder.execute(f"USE {make_url(url(database)).database}")
        holder.end("rollback")
    assert rival.gets_in()


@pytest.mark.parametrize("galera", [False, True])
@on(["mariadb"])
def test_a_galera_cluster_is_told_of_once(
    holder: Client, galera: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """At the first guard(), which asks; a server that is no node of one says so itself, and nothing is logged."""
    lock = holder.lock()
    store: Any = lock._place.store()
    execute, asked = store.execute, []

    def answer(step: Execute) -> Rows:
        rows: Rows = execute(step)
        if step.statement.name != "locate":
            return rows
        asked.append(rows)
        return [(rows[0][0], int(galera))] if galera else rows

    monkeypatch.setattr(store, "execute", answer)
    monkeypatch.setattr(store, "pin", None)
    holder.call(lock, "acquire")
    assert asked == []
    for _ in range(2):
        holder.begin(read=False)
        holder.guard(lock)
        holder.end("commit")
    holder.call(lock, "release")
    assert len(asked) == 1
    schema = make_url(url("mariadb")).database
    assert [tuple(row) for row in asked[0]] == [(schema, 0)]
    assert [record.getMessage() for record in caplog.records if "one node" in record.getMessage()] == [
        "guard() holds on one node of a Galera cluster only: send all guarded writes to one node"
    ] * galera


# -- where there is nothing to keep it


@on(["postgresql"])
def test_a_hold_and_a_transaction_are_needed(holder: Client) -> None:
    """A lock that is not held is refused; without a transaction a lock is held as before.

    Django says TransactionManagementError, as for its own select_for_update; SQLAlchemy's face says TypeError.
    """
    holder.begin()
    with pytest.raises((LockLost, LockNotHeld)):
        holder.guard(holder.lock())
    holder.end("rollback")
    lock = holder.held()
    if holder.django:
        with pytest.raises(TransactionManagementError, match="atomic"):
            holder.guard(lock)
    else:
        for bad in (holder.engine, None, "k", 5):
            with pytest.raises(TypeError):
                holder.call(lock, "guard", bad)
    assert holder.call(lock, "verify")
    holder.call(lock, "release")


def test_autocommit_is_refused(database: str) -> None:
    """ValueError: each statement would be a transaction of its own, wherever that was asked for."""
    autocommit: Any = {"isolation_level": "AUTOCOMMIT"}
    for where in ("engine", "execution options", "connection"):
        engine = own_engine(database, **(autocommit if where == "engine" else {}))
        used = engine.execution_options(**autocommit) if where == "execution options" else engine
        with used.connect() as connection:
            if where == "connection":
                connection.execution_options(**autocommit)
            with sqlalchemy_lock(engine, "k") as lock:
                with pytest.raises(ValueError, match="autocommit"):
                    lock.guard(connection)
                with Session(connection) as session, pytest.raises(ValueError, match="autocommit"):
                    lock.guard(session)
                assert lock.verify()


def test_another_database_is_refused(request: pytest.FixtureRequest) -> None:
    """ValueError, whichever the two are; a second engine of the same database will do."""
    for name in DATABASES:
        ready(request, name)
    engines = {name: own_engine(name) for name in DATABASES}
    for ours, theirs in itertools.permutations(engines.values(), 2):
        with sqlalchemy_lock(ours, "k") as lock, theirs.begin() as connection, Session(theirs) as session:
            for given in (connection, session):
                with pytest.raises(ValueError, match="another database"):
                    lock.guard(given)
    for name, engine in engines.items():
        twin = own_engine(name)
        with sqlalchemy_lock(engine, "k") as lock, twin.begin() as connection:
            lock.guard(connection)


def test_another_alias_is_refused(request: pytest.FixtureRequest) -> None:
    """ValueError, and nothing has happened; an alias of the same database will do."""
    for name in SERVERS:
        ready(request, name)
    for ours, theirs in (*itertools.permutations(SERVERS, 2), ("postgresql", "default")):
        with django_lock("k", using=ours) as lock, transaction.atomic(theirs):
            with pytest.raises(ValueError, match="another database"):
                lock.guard(using=theirs)
            with pytest.raises(TransactionManagementError):
                lock.guard()
    for alias in ALIASES.values():
        connections[alias].close()


def test_session_is_the_default(database: str, rival: Rival) -> None:
    """guard() without an argument keeps what `session=` said."""
    engine = own_engine(database)
    with Session(engine) as session:
        lock = sqlalchemy_lock(engine, "k", session=session)
        lock.acquire()
        lock.guard()
        if database != "sqlite":  # where nobody else can write any more
            expire(Subject("sqlalchemy", "sync", database))
        assert not rival.gets_in()
        session.rollback()
        assert rival.gets_in() is (database != "sqlite")
        with contextlib.suppress(LockLost):
            lock.release()
