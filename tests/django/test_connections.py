"""The connections of the lock in Django: its own, few, and the same table whatever becomes of the caller's session."""

from __future__ import annotations

import asyncio
import sqlite3
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any, cast

import anyio
import django
import pytest
from django.core.signals import request_finished
from django.db import DEFAULT_DB_ALIAS, connections, transaction
from django.test import override_settings

from dblock import LockStoreError, db_lock
from dblock.connections import MOST
from dblock.core.errors import StoreUnanswered
from dblock.core.protocol.steps import Execute, Rows
from dblock.core.statements.base import Reply, Statement
from dblock.store import DjangoStore, store_for
from tests.conftest import INNODB, ready, run
from tests.support.lab import apart, cycle, together
from tests.support.steps import NO_STORE

PLACE = pytest.mark.parametrize("database", ["postgresql"], indirect=True)
"""For what the pool does, and no database decides."""


@pytest.fixture
def schemas(request: pytest.FixtureRequest) -> Iterator[None]:
    """The tables of the lock in a second schema of PostgreSQL, and a role that cannot see them."""
    ready(request, "postgresql")
    run("postgresql", "CREATE SCHEMA elsewhere")
    for table in ("locks", "lock_waiters"):
        run("postgresql", f"CREATE TABLE elsewhere.{table} (LIKE public.{table} INCLUDING ALL)")
    run("postgresql", "CREATE ROLE nobody_much")
    yield
    connections["postgresql"].close()
    run("postgresql", "DROP SCHEMA elsewhere CASCADE")
    run("postgresql", "DROP ROLE nobody_much")


STATES = {
    "search_path": "SET search_path TO elsewhere, public",
    "role": "SET ROLE nobody_much",
    "time zone": "SET TIME ZONE 'Asia/Kathmandu'",
    "transaction by hand": "BEGIN",
    "read only": "SET default_transaction_read_only TO on",
    "isolation": "SET default_transaction_isolation TO serializable",
}


@pytest.mark.direct
@pytest.mark.usefixtures("schemas")
@pytest.mark.parametrize("state", STATES.values(), ids=STATES)
def test_one_lock_whatever_the_callers_session(state: str) -> None:
    """A rival in a transaction, the renewal and the release mean the table that the take meant."""
    caller = connections["postgresql"]

    def rival() -> None:
        with transaction.atomic("postgresql"):
            assert not db_lock("k", using="postgresql", timeout=0).acquire()
        connections.close_all()

    with caller.cursor() as cursor:
        cursor.execute(state)
    with db_lock("k", using="postgresql", ttl=30) as lock:
        apart(rival)
        lock.extend(40)
        assert lock.verify()
        with caller.cursor() as cursor:  # and in the middle of a tenure
            cursor.execute("RESET ALL")
        assert lock.verify()
    assert run("postgresql", "SELECT count(*) FROM elsewhere.locks") == [(0,)]
    assert run("postgresql", "SELECT owner FROM public.locks") == [(None,)]


@pytest.mark.direct
@pytest.mark.parametrize("database", INNODB, indirect=True)
@pytest.mark.parametrize(
    "state", ["SET time_zone = '-08:00'", "BEGIN", "SET SESSION TRANSACTION READ ONLY", "USE mysql"]
)
def test_one_lock_whatever_the_callers_session_on_mysql(database: str, alias: str, state: str) -> None:
    """A transaction begun by hand, which no driver need know of, another database, a read-only session."""
    with connections[alias].cursor() as cursor:
        cursor.execute(state)
    with db_lock("k", using=alias) as lock:
        assert run(database, "SELECT owner IS NOT NULL FROM locks") == [(1,)]
        lock.extend(40)
        assert lock.remaining > 30


class Fickle:
    """A router that sends each question to another database."""

    asked = 0

    def db_for_write(self, model: object, **hints: object) -> str:
        Fickle.asked += 1
        return ("postgresql", DEFAULT_DB_ALIAS)[Fickle.asked % 2]


def test_the_routers_are_asked_once(request: pytest.FixtureRequest) -> None:
    """All locks of a process that name no database are in one, whatever the routers say of each."""
    ready(request, "postgresql")
    ready(request, "sqlite")
    with override_settings(DATABASE_ROUTERS=["tests.django.test_connections.Fickle"]):
        locks = [db_lock("k", timeout=0) for _ in range(4)]
        assert len({lock.using for lock in locks}) == 1
    assert db_lock("k").using == DEFAULT_DB_ALIAS


@pytest.mark.direct
def test_a_full_psycopg_pool_keeps_nobody_from_the_lock(postgresql: object) -> None:
    """Two views in transactions have all there is in Django's own pool: they lock, renew and release all the same."""
    settings = {**connections.settings["postgresql"], "CONN_MAX_AGE": 0}
    settings["OPTIONS"] = {"pool": {"min_size": 1, "max_size": 2, "timeout": 5}}
    connections.settings["pooled"] = settings
    inside = threading.Barrier(2)

    def view(number: int) -> None:
        try:
            with transaction.atomic("pooled"):
                inside.wait(10)
                with db_lock(f"k{number}", using="pooled", ttl=30) as lock:
                    inside.wait(10)
                    lock.extend(40)
                    inside.wait(10)
        finally:
            connections["pooled"].close()
            del connections["pooled"]

    assert together(partial(view, 1), partial(view, 2)) == []
    connections["pooled"].close_pool()  # type: ignore[attr-defined]
    store_for("pooled")._source.close_all()
    del connections["pooled"], connections.settings["pooled"]


@pytest.mark.direct
@PLACE
def test_a_crowd_has_few_connections(database: str, alias: str) -> None:
    """Forty threads: at most MOST for taking and MOST for giving back."""
    others = "FROM pg_stat_activity WHERE pid <> pg_backend_pid() AND backend_type = 'client backend'"

    def sessions() -> int:
        return int(str(run(database, f"SELECT count(*) {others}")[0][0]))

    def work(number: int) -> None:
        for _ in range(5):
            cycle(db_lock(f"k{number}", using=alias))

    def look() -> None:
        while not done.wait(0.005):
            counted.append(sessions())

    connections[alias].close()
    before, counted, done = sessions(), list[int](), threading.Event()
    with ThreadPoolExecutor(1) as looking:
        looking.submit(look)
        assert together(*(partial(work, number) for number in range(40))) == []
        done.set()
    assert 0 < max(counted) - before <= 2 * MOST


@pytest.mark.direct
@PLACE
def test_connections_outlive_requests(database: str, alias: str) -> None:
    """The end of a request with CONN_MAX_AGE 0 leaves the lock's connection."""
    connections[alias].ensure_connection()
    connections[alias].close_at = 0.0  # as CONN_MAX_AGE = 0 has it
    cycle(db_lock("k", using=alias))
    connections[alias].close_if_unusable_or_obsolete()  # what Django does when request_finished is sent
    assert request_finished.receivers
    assert connections[alias].connection is None
    assert store_for(alias)._source._idle


@pytest.mark.direct
def test_a_test_database_can_be_dropped(postgresql: object) -> None:
    """A test runner that has turned an alias to another database finds the lock there; no connection to it is kept."""
    connection, pool = connections["postgresql"], cast("Any", store_for("postgresql")._source)
    cycle(db_lock("k", using="postgresql"))
    old: dict[str, Any] = {"serialize": False} if django.VERSION < (6,) else {}  # later ones never do
    name = connection.creation.create_test_db(verbosity=0, autoclobber=True, **old)
    try:
        for _ in range(2):
            with db_lock("only here", using="postgresql"):
                assert run("postgresql", "SELECT lock_key FROM locks") == [("k",)]
                assert pool._idle == []
        assert pool._idle == []
    finally:
        connection.creation.destroy_test_db("postgres", verbosity=0)
    assert name not in [row[0] for row in run("postgresql", "SELECT datname FROM pg_database")]
    with db_lock("k", using="postgresql"):
        assert len(pool._idle) == 1


@pytest.mark.direct
@PLACE
def test_a_scope_that_is_cancelled(database: str, alias: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """AnyIO knows its cancellation again, also while the protocol deals with a lost answer."""
    execute, lost = DjangoStore.execute, list[str]()

    def lose(store: DjangoStore, step: Execute) -> Rows:
        rows = execute(store, step)
        if step.statement.name == "take" and not lost:
            lost.append("take")
            raise StoreUnanswered("lost")
        if step.statement.name == "accept":
            time.sleep(0.3)
        return rows

    async def main() -> bool:
        with anyio.move_on_after(0.1) as scope:
            async with db_lock("k", using=alias):
                pass
        return scope.cancelled_caught

    cycle(db_lock("k", using=alias))
    monkeypatch.setattr(DjangoStore, "execute", lose)
    assert asyncio.run(main())
    assert lost


@pytest.mark.parametrize("wal", [True, False])
def test_a_statement_for_the_database_that_the_alias_had(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wal: bool
) -> None:
    """Is not run in another one, to which a test runner turns the alias while the statement waits for a connection."""
    named = {name: str(tmp_path / name) for name in ("test", "real")}
    for path in named.values():
        with closing(sqlite3.connect(path)) as database:
            _ = database.execute(f"PRAGMA journal_mode={'WAL' if wal else 'DELETE'}")
            _ = database.execute("CREATE TABLE seen (name text)")
    monkeypatch.setitem(connections.settings["default"], "NAME", named["test"])
    monkeypatch.setitem(connections.settings["default"], "OPTIONS", {})
    store = DjangoStore("default")
    insert = Statement("insert", "INSERT INTO seen VALUES ('x')", Reply.COUNT)
    step, take = Execute(NO_STORE, insert, {}, location=store.location), store._source.take

    def run_step() -> None:
        try:
            _ = store.execute(step)
        finally:
            connections.close_all()

    def take_late(*given: Any, **named_ones: Any) -> Any:
        monkeypatch.setitem(connections.settings["default"], "NAME", named["real"])
        return take(*given, **named_ones)

    apart(run_step)
    monkeypatch.setattr(store._source, "take", take_late)
    with pytest.raises(LockStoreError, match="another one"):
        apart(run_step)
    for name, count in (("test", 1), ("real", 0)):
        with closing(sqlite3.connect(named[name])) as database:
            assert database.execute("SELECT count(*) FROM seen").fetchall() == [(count,)]
    store._source.close_all()


@PLACE
def test_the_locks_own_connections_are_closed_where_an_event_loop_runs(database: str) -> None:
    """There Django refuses to close its own, and a session would stay until the garbage collector comes."""
    cycle(db_lock("k", using=database))
    [*kept] = store_for(database)._source._idle
    raws = [each.raw for each in kept]

    async def close() -> None:
        store_for(database)._source.close_all()

    asyncio.run(close())
    assert raws
    assert all(raw.closed for raw in raws)
