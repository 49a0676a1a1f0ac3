"""An asynchronous replica is promoted that lacks what the primary has answered last: nobody is let in too early."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest
from sqlalchemy import Engine, text

from dblock.cli import main
from dblock.core import clock, runtime
from dblock.core.errors import Loss, Reason, StoreBusy
from dblock.core.protocol import tenures
from dblock.core.protocol.drive import drive
from dblock.core.runtime import current_flow
from dblock.operating import administration
from sqlalchemy_dblock import LockTimeout, attach, create_tables, db_lock, db_rwlock, db_semaphore, metadata
from tests.conftest import INNODB, own_engine, run
from tests.faults.conftest import long_run
from tests.support.beliefs import crowd
from tests.support.failover import KINDS, URLS, elsewhere, locking, pair_of
from tests.support.lab import LONG, cycle, hold_of, until
from tests.support.proxy import Proxy
from tests.support.servers import Galera, MariaDB, MissingServer, MySQL, PostgreSQL, find_program

pytestmark = pytest.mark.direct
QUARANTINE = 2.0


def open_keys(engine: Engine) -> None:
    """End the quarantine, as an administrator does."""
    assert main(["--url", str(engine.url), "quarantine", "--end", "--yes"]) in {0, 1}, "or they open in a moment"


@pytest.mark.timeout(180)
@pytest.mark.parametrize("kind", KINDS if LONG else KINDS[:2])
def test_what_a_replica_lacks_is_waited_for(kind: str) -> None:
    """A key that it has never seen, one that it takes for free, and one whose holder it takes for the present one."""
    with pair_of(kind) as pair, ThreadPoolExecutor(4) as others:
        old, new = pair.engines(QUARANTINE)
        known = db_lock(old, "known", ttl=60, renew=False)
        cycle(db_lock(old, "again", ttl=5))
        known.acquire()
        assert until(lambda: pair.has("known"), 30)
        pair.cut()
        lost = {key: db_lock(old, key, ttl=ttl, renew=False) for key, ttl in (("unseen", 2.2), ("again", 3.5))}
        for lock in lost.values():
            lock.acquire()
        holds = {key: hold_of(lock) for key, lock in {**lost, "known": known}.items()}
        pair.promote()
        store = db_lock(new, "k")._place.store()
        database = store.database

        def wait(key: str) -> tuple[float, int]:
            with db_lock(new, key, timeout=60) as lock:
                return clock.now(), lock.fence

        begun = clock.now()
        waiting = {key: others.submit(wait, key) for key in (*lost, "new")}
        with (
            pytest.raises(LockTimeout, match=r"closed \d+ s ago, .*failover.*: keys open in \d s"),
            db_lock(new, "k", timeout=0.5),
        ):
            pass
        # What is in the table is renewed and given back; what is not is lost.
        assert drive(tenures.renew(database, [(holds["known"].tenure, 60)], clock.now() + 5))[1] is None
        assert drive(tenures.end(database, database.dialect.release, holds["known"].tenure, 1))[1]

        def is_gone(key: str) -> bool:
            with contextlib.suppress(StoreBusy):  # a waiter has its row locked for a moment
                return drive(tenures.renew(database, [(holds[key].tenure, 9.0)], clock.now() + 5))[1] == {}
            return False

        for key in lost:
            assert until(partial(is_gone, key), 5)
            assert drive(tenures.why_lost(database, holds[key].tenure)) == Loss(Reason.GONE)
        for key, waiter in waiting.items():
            began, fence = waiter.result(60)
            assert began >= begun + (3.5 if key == "again" else QUARANTINE) - 0.1
            if key in lost:
                assert began >= holds[key].lease.trusted_until, key
                assert fence > holds[key].tenure.fence + 2_000_000, "above all, were the old clock two seconds ahead"
        assert db_lock(new, "known").acquire(blocking=False) is False, "somebody may have it for a minute"
        assert drive(administration.set_quarantine(database, clock.now() + 5, closed=False))
        cycle(db_lock(new, "known", timeout=0))
        for hold in holds.values():
            runtime.current.watchdog.discard(hold)
        current_flow().holds.clear()


@pytest.mark.parametrize(
    ("kind", "ended"),
    [(kind, ended) for kind in KINDS for ended in (False, True) if LONG or ended is (kind != "postgresql")],
)
def test_a_lease_by_another_clock_is_waited_out(kind: str, ended: bool) -> None:
    """The new primary has everything, so keys open at once; but by its clock the lease ends two seconds too early."""
    with pair_of(kind, synchronous=kind == "postgresql", ahead=2.4) as pair:
        old, new = pair.engines(60 if ended else None)
        held = db_lock(old, "k", ttl=8, renew=False)  # by the clock of the new one it ends when keys are open
        assert held.acquire()
        trusted = elsewhere(held)
        assert until(lambda: pair.has("k"), 5)
        pair.promote()
        if ended:
            assert not db_lock(new, "another").acquire(blocking=False)
            open_keys(new)
        with db_lock(new, "k", timeout=60):
            assert clock.now() >= trusted


@long_run(7200)
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # sockets that a cut has ended
@pytest.mark.parametrize("kind", KINDS)
def test_a_hundred_promotions(kind: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Flows of several pools hold, renew, wait, hand over and detach while replicas are cut off and promoted.

    No two believe at once that they have a key, and fences go up. PROMOTIONS: how many there are.
    """
    tenures = 0
    promotions = int(os.environ.get("PROMOTIONS", "100"))
    for number in range(promotions):
        chance = random.Random(number)
        with pair_of(kind) as pair, Proxy(0, pair.primary.port) as proxy:
            with crowd([URLS[kind].format(proxy.port)] * 4, (), chance, quarantine=4) as load:
                time.sleep(chance.uniform(0.3, 1.5))
                pair.cut()
                time.sleep(chance.uniform(0.0, 1.5))
                pair.promote()
                proxy.lead_to(pair.replica.port)
                promoted = clock.now()
                time.sleep(6.5)
            assert load.since(promoted + 4.0), "keys are open again"
            tenures += len(load.beliefs)
    with capsys.disabled():
        print(f"\n{kind}: {promotions} promotions, {tenures} tenures, no two at once")  # noqa: T201 - to be read


def test_a_restart_closes_nothing() -> None:
    """Nor does a crash of the very server; whoever comes first afterwards, with a token or as a waiter, finds that."""
    with locking(PostgreSQL) as (server, engine), ThreadPoolExecutor(1) as pool:

        def door_is_taken() -> bool:
            found = "SELECT 1 FROM locks WHERE lock_key = 'permits' AND owner IS NOT NULL"
            with engine.connect() as connection:
                return connection.scalar(text(found)) is not None

        def wait_for_a_permit() -> float:
            with db_semaphore(engine, "permits", permits=1, timeout=30):
                return clock.now()

        for how in (signal.SIGTERM, signal.SIGKILL):
            cycle(db_lock(engine, f"before {how}"))
            held, permit = db_lock(engine, f"held {how}", ttl=60), db_semaphore(engine, "permits", permits=1, ttl=60)
            assert held.acquire()
            token = held.detach()
            assert permit.acquire()
            waiting = pool.submit(wait_for_a_permit)
            assert until(door_is_taken)
            engine.dispose()
            server.stop(how)
            server.start()
            if how == signal.SIGTERM:
                attach(engine, token).release()
            released = clock.now()
            permit.release()
            assert waiting.result() - released < 5
            if how == signal.SIGKILL:
                attach(engine, token).release()
            with db_lock(engine, "row", timeout=20), db_lock(engine, f"no row {how}", timeout=20):
                pass


def test_a_standby_that_is_started_without_its_signal() -> None:
    """It keeps the timeline, and so looks like a server that was restarted: an administrator closes the keys."""
    with pair_of("postgresql") as pair:
        old, new = pair.engines(None)
        cycle(db_lock(old, "known"))
        assert until(lambda: pair.has("known"), 30)
        pair.cut()
        lost = db_lock(old, "lost", ttl=60, renew=False)
        assert lost.acquire()
        _ = elsewhere(lost)
        pair.primary.stop(signal.SIGKILL)
        pair.replica.stop()
        (pair.replica.directory / "data" / "standby.signal").unlink()
        pair.replica.start()
        cycle(db_lock(new, "lost", timeout=5))  # as the page on clusters says
        assert main(["--url", str(new.url), "quarantine", "--begin", "--yes"]) == 0
        with pytest.raises(LockTimeout, match=r"keys open in [56]\d s"), db_lock(new, "lost", timeout=0):
            pass


@pytest.mark.parametrize("how", ["tries", "waits", "writes"])
@pytest.mark.parametrize("database", ["postgresql", INNODB[-1]], indirect=True)
def test_a_quarantine_begins_while_keys_are_held(database: str, how: str) -> None:
    """By a flow that finds one held, or has waited for it since before; not when the lease of a dead holder ends."""
    engines = [own_engine(database) for _ in "ab"]
    held, other = (db_lock(engine, "k", ttl=60) for engine in engines)
    if how == "writes":
        held, other = db_rwlock(engines[0], "k", ttl=60).read(), db_rwlock(engines[1], "k", ttl=60).write()
    held.acquire()
    read = other._place.store().database.epoch
    with ThreadPoolExecutor(1) as pool:
        if how != "tries":
            waiting = pool.submit(other.acquire, timeout=30)
            waits = "locks WHERE awaiting_fence = fence" if how == "writes" else "lock_waiters"
            assert until(lambda: run(database, f"SELECT 1 FROM {waits}") and read.asked > 0)
        run(
            database,
            "UPDATE lock_epoch SET server = 'another one', history = history + 1"
            if database in INNODB
            else "UPDATE lock_epoch SET server = 'another one', history = 'another one'",
        )
        try:
            if how == "tries":
                assert not pool.submit(other.acquire, blocking=False).result()
            else:
                read.asked = float("-inf")  # some seconds later
                assert until(lambda: not run(database, "SELECT 1 FROM lock_epoch WHERE server = 'another one'"), 10)
            assert run(database, "SELECT 1 FROM lock_epoch WHERE opens_at > since AND server <> 'another one'")
        finally:
            run(database, "UPDATE lock_epoch SET opens_at = since, floor = 0")
        held.release()
        if how != "tries":
            assert waiting.result()
            pool.submit(other.release).result()


@pytest.mark.parametrize("database", ["postgresql", *INNODB], indirect=True)
def test_where_the_tables_were_emptied_keys_are_open(database: str) -> None:
    """As a TransactionTestCase of Django empties them: nobody has a tenure there."""
    engine = own_engine(database)
    lock = db_lock(engine, "k")
    for key_is_new in (True, False):
        run(database, "DELETE FROM lock_epoch")
        if key_is_new:
            run(database, "DELETE FROM locks")
        assert lock.acquire(blocking=False)
        lock.release()
    assert len(run(database, "SELECT 1 FROM lock_epoch")) == 1


@pytest.mark.parametrize("kind", [*KINDS, "galera"])
def test_a_dump_that_was_restored_closes_the_keys(kind: str) -> None:
    """In the very server whose name is in it: the tenures that were granted since are not in the dump."""
    if kind == "galera":
        try:
            _ = Galera.provider()
        except MissingServer as missing:
            pytest.skip(str(missing))
    kinds = {"postgresql": PostgreSQL, "mariadb": MariaDB, "mysql": MySQL, "galera": Galera}
    with locking(kinds[kind], URLS.get(kind, URLS["mariadb"])) as (server, engine):
        cycle(db_lock(engine, "k"))
        dump, restore = _dump_and_restore(kind, server.port)
        dump += ["--clean"] if kind == "postgresql" else []
        written = subprocess.run(dump, capture_output=True, check=True).stdout
        lost = db_lock(engine, "k", ttl=60, renew=False)
        assert lost.acquire()
        _ = elsewhere(lost)
        _ = subprocess.run(restore, input=written, capture_output=True, check=True)
        for _ in range(2):
            with pytest.raises(LockTimeout, match=r"keys open in [56]\d s"), db_lock(engine, "k", timeout=0):
                pass
        open_keys(engine)
        cycle(db_lock(engine, "k", timeout=5))


def test_a_dump_of_the_rows_alone() -> None:
    """New tables have a row of their own in `lock_epoch`, which gives way to that of the dump; that closes the keys."""
    with locking(PostgreSQL) as (server, engine):
        cycle(db_lock(engine, "k"))
        dump, restore = _dump_and_restore("postgresql", server.port)
        written = subprocess.run([*dump, "--data-only"], capture_output=True, check=True).stdout
        metadata.drop_all(engine)
        create_tables(engine)
        refused = subprocess.run(restore, input=written, capture_output=True, check=False)
        assert b"lock_epoch" in refused.stderr
        emptied = b"DELETE FROM lock_epoch;\n" + written
        _ = subprocess.run(restore, input=emptied, capture_output=True, check=True)
        with (
            pytest.raises(LockTimeout, match=r"restored backup\): keys open in [56]\d s"),
            db_lock(engine, "k", timeout=0),
        ):
            pass


def _dump_and_restore(kind: str, port: int) -> tuple[list[str], list[str]]:
    """The commands that write the tables as text, and that put them in the place of what is there."""
    tables = sorted(metadata.tables)
    if kind == "postgresql":
        database = f"postgresql://dblock@127.0.0.1:{port}/postgres"
        dump = [find_program("pg_dump"), *(f"--table={name}" for name in tables), database]
        return dump, [find_program("psql"), "-v", "ON_ERROR_STOP=1", database]
    where = ["--no-defaults", "--host=127.0.0.1", f"--port={port}", "--user=root", "--skip-ssl", "mysql"]
    return [find_program("mariadb-dump"), *where, *tables], [find_program("mariadb"), *where]
