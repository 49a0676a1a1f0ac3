"""An asynchronous replica is promoted that lacks what the primary has answered last: nobody is let in too early."""

from __future__ import annotations

import itertools
import os
import random
import signal
import threading
import time
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import pytest
from sqlalchemy import Engine, create_engine

from dblock.core import clock, runtime
from dblock.core.errors import LockError, Loss, Reason
from dblock.core.protocol import epoch, tenures
from dblock.core.protocol.drive import drive
from dblock.core.runtime import current_flow
from sqlalchemy_dblock import LockTimeout, attach, create_tables, db_lock, metadata
from tests.conftest import INNODB, ready, run, url
from tests.support.failover import KINDS, URLS, pair_of
from tests.support.lab import LONG, hold_of, until
from tests.support.proxy import Proxy
from tests.support.servers import PostgreSQL, running

pytestmark = pytest.mark.direct
QUARANTINE = 3.0


@pytest.mark.timeout(180)
@pytest.mark.parametrize("kind", KINDS if LONG else KINDS[:2])
def test_what_a_replica_lacks_is_waited_for(kind: str) -> None:
    """A key that it has never seen, one that it takes for free, and one whose holder it takes for the present one."""
    with pair_of(kind) as pair, ThreadPoolExecutor(4) as others:
        old, new = (pair.engine(server, failover_quarantine=QUARANTINE) for server in pair.both)
        known = db_lock(old, "known", ttl=60, renew=False)
        with db_lock(old, "again", ttl=5):
            pass
        known.acquire()
        assert until(lambda: pair.has("known"), 30)
        pair.cut()
        lost = {key: db_lock(old, key, ttl=ttl, renew=False) for key, ttl in (("unseen", 3.3), ("again", 5.0))}
        for lock in lost.values():
            lock.acquire()
        holds = {key: hold_of(lock) for key, lock in {**lost, "known": known}.items()}
        pair.promote()
        store = db_lock(new, "k")._store()
        database = store.database

        def wait(key: str) -> tuple[float, int]:
            with db_lock(new, key, timeout=60) as lock:
                return clock.now(), lock.fence or 0

        begun = clock.now()
        waiting = {key: others.submit(wait, key) for key in (*lost, "new")}
        with pytest.raises(LockTimeout, match=r"promoted \d+ s ago: keys open in \d s"), db_lock(new, "k", timeout=0.5):
            pass
        # What is in the table is renewed and given back; what is not is lost.
        assert drive(tenures.renew(database, [(holds["known"].tenure, 60)], clock.now() + 5), store)[1] is None
        assert drive(tenures.release(database, holds["known"].tenure, 1), store).in_time
        for key in lost:
            assert drive(tenures.renew(database, [(holds[key].tenure, 9.0)], clock.now() + 5), store)[1] == {}
            assert drive(tenures.why_lost(database, holds[key].tenure), store) == Loss(Reason.GONE)
        for key, waiter in waiting.items():
            began, fence = waiter.result(60)
            assert began >= begun + (5.0 if key == "again" else QUARANTINE) - 0.1
            if key in lost:
                assert began >= holds[key].lease.trusted_until, key
                assert fence > holds[key].tenure.fence + 2_000_000, "above all, were the old clock two seconds ahead"
        assert db_lock(new, "known").acquire(blocking=False) is False, "somebody may have it for a minute"
        assert drive(epoch.end(database, clock.now() + 5), store)
        with db_lock(new, "known", timeout=0):
            pass
        for hold in holds.values():
            runtime.current.watchdog.discard(hold)
        current_flow().holds.clear()
        for engine in (old, new):
            engine.dispose()


@dataclass(frozen=True, slots=True)
class Belief:
    """The time in which a flow has seen that it was trusted with a key."""

    key: str
    fence: int
    since: float
    until: float


@pytest.mark.skipif(not LONG, reason="part of `make faults`")
@pytest.mark.timeout(7200)
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # sockets that a cut has ended
@pytest.mark.parametrize("kind", KINDS)
def test_a_hundred_promotions(kind: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Flows of several pools hold, renew, wait, hand over and detach while replicas are cut off and promoted.

    No two believe at once that they have a key, and fences go up. PROMOTIONS: how many there are.
    """
    promotions = int(os.environ.get("PROMOTIONS", "100"))
    seen, entered = 0, 0
    for number in range(promotions):
        beliefs = _promotion(kind, random.Random(number))
        by_key = defaultdict[str, list[Belief]](list)
        for belief in sorted(beliefs, key=lambda each: each.since):
            by_key[belief.key].append(belief)
        for found in by_key.values():
            for one, other in itertools.pairwise(found):
                assert one.until <= other.since, f"promotion {number}: {one} and {other}"
                assert one.fence <= other.fence, f"promotion {number}: {one} and {other}"
        seen, entered = seen + 1, entered + len(beliefs)
    with capsys.disabled():
        print(f"\n{kind}: {seen} promotions, {entered} tenures, no two at once")  # noqa: T201 - to be read


def _promotion(kind: str, chance: random.Random) -> list[Belief]:
    with pair_of(kind) as pair, Proxy(0, pair.primary.port) as proxy, ThreadPoolExecutor(8) as pool:
        stop, beliefs = threading.Event(), list[Belief]()
        url = URLS[kind].format(proxy.port)
        engines = [create_engine(url, execution_options={"dblock_failover_quarantine": 4}) for _ in range(4)]
        work = [pool.submit(_flow, engines[n % 4], random.Random(chance.random()), stop, beliefs) for n in range(8)]
        time.sleep(chance.uniform(0.3, 1.5))
        pair.cut()
        time.sleep(chance.uniform(0.0, 1.5))
        pair.promote()
        proxy._target = ("127.0.0.1", pair.replica.port)
        proxy.cut()
        time.sleep(6.5)
        stop.set()
        for each in work:
            each.result(60)
        for engine in engines:
            engine.dispose()
    return beliefs


def _flow(engine: Engine, chance: random.Random, stop: threading.Event, beliefs: list[Belief]) -> None:
    while not stop.is_set():
        lock = db_lock(
            engine, chance.choice("abc"), ttl=2, timeout=chance.choice((0, 1, 9)), renew=chance.random() < 0.7
        )
        try:
            if not lock.acquire():
                continue
        except LockError:
            continue
        since = seen = clock.now()
        fence, ends = lock.fence or 0, since + chance.choice((0.0, 0.1, 0.5, 3.0))
        while lock.state == "held":
            seen = clock.now()
            if seen >= ends:
                break
            time.sleep(0.01)
        beliefs.append(Belief(lock.key, fence, since, seen))
        try:
            if chance.random() < 0.2:
                with attach(engine, lock.detach()) as again:
                    since = clock.now()
                    if again.state == "held":
                        beliefs.append(Belief(again.key, fence, since, since))
            else:
                lock.release()
        except LockError:
            continue


def test_a_restart_closes_nothing() -> None:
    """Nor does a crash of the very server."""
    with running(PostgreSQL) as server:
        engine = create_engine(URLS["postgresql"].format(server.port))
        create_tables(engine)
        for how in (signal.SIGTERM, signal.SIGKILL):
            with db_lock(engine, f"before {how}"):
                pass
            engine.dispose()
            server.stop(how)
            server.start()
            with db_lock(engine, "row", timeout=20), db_lock(engine, f"no row {how}", timeout=20):
                pass
        engine.dispose()


@pytest.mark.parametrize("database", ["postgresql", *INNODB])
def test_where_the_tables_were_emptied_keys_are_open(request: pytest.FixtureRequest, database: str) -> None:
    """As a TransactionTestCase of Django empties them: nobody has a tenure there."""
    ready(request, database)
    engine = create_engine(url(database))
    lock = db_lock(engine, "k")
    for key_is_new in (True, False):
        run(database, "DELETE FROM lock_epoch")
        if key_is_new:
            run(database, "DELETE FROM locks")
        assert lock.acquire(blocking=False)
        lock.release()
    assert len(run(database, "SELECT 1 FROM lock_epoch")) == 1
    engine.dispose()


def test_a_dump_that_was_restored_closes_the_keys() -> None:
    """In the very server whose name is in it: the tenures that were granted since are not in the dump."""
    with running(PostgreSQL) as server:
        engine = create_engine(URLS["postgresql"].format(server.port))
        create_tables(engine)
        with engine.begin() as connection:
            connection.exec_driver_sql("CREATE TABLE dump AS SELECT * FROM lock_epoch")
            connection.exec_driver_sql("DROP TABLE lock_epoch")
        metadata.tables["lock_epoch"].create(engine)
        with engine.begin() as connection:
            connection.exec_driver_sql("DELETE FROM lock_epoch")
            connection.exec_driver_sql("INSERT INTO lock_epoch SELECT * FROM dump")
        with pytest.raises(LockTimeout, match="promoted 0 s ago"), db_lock(engine, "k", timeout=0):
            pass
        engine.dispose()
