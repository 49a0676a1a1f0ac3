"""Where the lock's statements run, and what the caller's transaction has to do with it."""

from __future__ import annotations

import asyncio
import os
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Literal

import pytest
from django.core.exceptions import SynchronousOnlyOperation
from django.core.management import call_command
from django.db import DatabaseError, connections, transaction
from django.utils.connection import ConnectionDoesNotExist

import dblock
import sqlalchemy_dblock
from dblock import LockLost, LockStoreError, LockTimeout, UnsupportedDatabase, db_lock
from dblock.core import clock
from dblock.store import DjangoStore, store_for
from tests.conftest import INNODB, SERVERS, own_engine, run
from tests.support.lab import cycle, there, without


def owner(database: str) -> object:
    [(value,)] = run(database, "SELECT owner FROM locks WHERE lock_key = 'k'")
    return value


@pytest.mark.parametrize("database", SERVERS, indirect=True)
def test_a_rollback_does_not_release(database: str, alias: str) -> None:
    """An independent lock is seen by others at once, and held until its block ends."""
    lock = db_lock("k", using=alias)
    with pytest.raises(ZeroDivisionError), transaction.atomic(alias):
        lock.acquire()
        assert owner(database) == lock.owner
        raise ZeroDivisionError
    assert owner(database) == lock.owner
    assert lock.verify()
    lock.release()
    assert owner(database) is None


@pytest.mark.parametrize("database", SERVERS, indirect=True)
def test_a_lease_counts_from_now_not_from_the_transaction(database: str, alias: str) -> None:
    """However long ago the caller's transaction began."""
    with transaction.atomic(alias), connections[alias].cursor() as cursor:
        cursor.execute("SELECT 1")
        time.sleep(0.8)
        lock = db_lock("k", using=alias, ttl=30)
        with lock:
            assert there(lock.inspect()).remaining > 29.5


@pytest.mark.parametrize("database", ["sqlite"], indirect=True)
def test_sqlite_does_not_wait_inside_a_transaction(database: str, alias: str) -> None:
    """It would keep the holder from releasing; the holder's block ends without trouble."""
    engine = own_engine(database)
    with sqlalchemy_dblock.db_lock(engine, "k"), transaction.atomic(alias):
        start = time.monotonic()
        assert db_lock("k", using=alias).acquire(timeout=20) is False
        with (
            pytest.raises(LockTimeout, match="before the transaction") as refused,
            db_lock("k", using=alias, timeout=20),
        ):
            pytest.fail("unreachable")
        assert time.monotonic() - start < 10
    assert there(refused.value.holder).identity.pid == os.getpid()


@pytest.mark.parametrize("database", ["sqlite"], indirect=True)
def test_an_event_loop_is_not_blocked(database: str, alias: str) -> None:
    """The synchronous methods refuse to run on one, and say what to use; a release so refused forgets nothing."""

    async def main() -> None:
        lock = db_lock("k", using=alias)
        with pytest.raises(SynchronousOnlyOperation, match="async with") as caught, lock:
            pytest.fail("unreachable")
        assert isinstance(caught.value, dblock.SynchronousOnlyOperation)
        await lock.aacquire()
        with pytest.raises(SynchronousOnlyOperation):
            lock.release()
        await lock.arelease()

    asyncio.run(main())
    assert owner(database) is None


@pytest.mark.parametrize("database", SERVERS, indirect=True)
def test_a_broken_transaction_does_not_keep_the_lock(database: str, alias: str) -> None:
    """The block is left although Django refuses all queries until the rollback."""
    with pytest.raises(DatabaseError), transaction.atomic(alias):
        with db_lock("k", using=alias), connections[alias].cursor() as cursor:
            cursor.execute("SELECT * FROM no_such_table")
    assert owner(database) is None


@pytest.mark.parametrize("database", ["sqlite"], indirect=True)
def test_sqlite_joins_the_callers_transaction(database: str, alias: str) -> None:
    """Its one writer is the caller; a rollback takes the tenure along, and its release says so."""
    lock = db_lock("k", using=alias)
    with transaction.atomic(alias), lock:
        assert lock.verify()
        assert run(database, "SELECT count(*) FROM locks") == [(0,)]
    assert owner(database) is None
    with pytest.raises(ZeroDivisionError), transaction.atomic(alias):
        lock.acquire()
        raise ZeroDivisionError
    assert lock.state == "lost"
    with pytest.raises(LockLost):
        lock.release()
    with transaction.atomic(alias):
        point = transaction.savepoint(alias)
        lock.acquire()
        transaction.savepoint_rollback(point, alias)  # by hand
        assert lock.state == "lost"
        with pytest.raises(LockLost):
            lock.release()
    with transaction.atomic(alias):
        with db_lock("outer", using=alias) as outer:
            with pytest.raises(ZeroDivisionError), transaction.atomic(alias):
                lock.acquire()
                raise ZeroDivisionError
            assert (outer.state, lock.state) == ("held", "lost")
            with pytest.raises(LockLost):
                lock.release()


@pytest.mark.parametrize("database", ["sqlite"], indirect=True)
@pytest.mark.parametrize("release", ["auto", "now"])
@pytest.mark.parametrize("end", ["commit", "rollback"])
def test_what_was_given_back_is_no_loss(
    release: Literal["auto", "now"], end: str, alias: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Neither on_lost nor the log hears of a lock that was left before its SQLite transaction ended."""
    lost = list[object]()
    with transaction.atomic(alias):
        with db_lock("k", using=alias, release=release, on_lost=lambda *said: lost.append(said)) as lock:
            with transaction.atomic(alias):
                assert lock.verify()
        transaction.set_rollback(end == "rollback", using=alias)
    cycle(db_lock("k", using=alias, timeout=0))
    assert not lost
    assert not caplog.records


def test_a_broken_connection_is_replaced(database: str, alias: str) -> None:
    """A session that the server ended between two uses is not noticed by the caller."""
    lock = db_lock("k", using=alias)
    cycle(lock)
    source = store_for(alias)._source
    own = source.take(clock.now() + 10, critical=False)
    if database == "postgresql":
        run(database, f"SELECT pg_terminate_backend({own.raw.info.backend_pid})")
    elif database in INNODB:
        run(database, f"KILL {own.raw.thread_id()}")
    source.give(own)
    with lock:
        assert lock.verify()


def test_a_missing_table_names_its_cure(database: str, alias: str) -> None:
    """The migration, by name and database."""
    cure = f"migrate dblock --database {alias}"
    with without(database, "locks"), pytest.raises(LockStoreError, match=cure) as caught:
        db_lock("k", using=alias).acquire()
    assert isinstance(caught.value.__cause__, connections[alias].Database.Error)  # type: ignore[attr-defined]


def test_an_unknown_alias_is_refused() -> None:
    """By db_lock itself and with Django's own error, which names the aliases that there are."""
    for unknown in ("nowhere", 3):
        with pytest.raises(ConnectionDoesNotExist, match=f"{unknown}.*postgresql"):
            db_lock("k", using=unknown)  # type: ignore[arg-type]


def test_another_vendor_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Oracle has no place in the protocol."""
    monkeypatch.setattr(connections["default"], "vendor", "oracle")
    with pytest.raises(UnsupportedDatabase, match="oracle"):
        DjangoStore("default")


def test_nobody_waits_inside_a_sqlite_transaction_that_has_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whose own reads would keep the writer, who has the key, from its commit: it ends at once, the writer commits."""
    settings = {**connections.settings["default"], "NAME": str(tmp_path / "plain.sqlite3"), "OPTIONS": {}}
    monkeypatch.setitem(connections.settings, "plain", settings)
    call_command("migrate", database="plain", verbosity=0)
    block, lock = transaction.atomic(using="plain"), db_lock("k", using="plain")
    with ThreadPoolExecutor(1) as writer:
        for step in (block.__enter__, lock.acquire):
            writer.submit(step).result()
        begun = time.monotonic()
        with transaction.atomic(using="plain"), pytest.raises(LockTimeout, match="another writer"):
            cycle(db_lock("k", using="plain", timeout=8))
        assert time.monotonic() - begun < 2
        for step in (lock.release, lambda: block.__exit__(None, None, None), connections.close_all):
            writer.submit(step).result()
    connections["plain"].close()
