"""What goes over the wire: round trips, and answers that never come."""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from django.db import connections, transaction
from sqlalchemy import Engine, create_engine, make_url

import dblock
import sqlalchemy_dblock
from dblock.store import store_for
from tests.conftest import INNODB, SELDOM, SERVERS, each_of, observer, run, timed, url
from tests.support.lab import cycle, until
from tests.support.proxy import Proxy

server = each_of(SERVERS)


@pytest.fixture
def proxy(server: str) -> Iterator[Proxy]:
    """A proxy in front of the server; Django's alias for it ends in `_wire`."""
    port = int(os.environ[f"DBLOCK_TEST_{server.upper()}_WIRE"])
    with Proxy(port, int(os.environ[f"DBLOCK_TEST_{server.upper()}_PORT"])) as running:
        yield running
        connections[f"{server}_wire"].close()
        store_for(f"{server}_wire")._source.close_all()


@pytest.fixture
def engine(server: str, proxy: Proxy) -> Iterator[Engine]:
    """An engine whose statements go through the proxy."""
    engine = create_engine(make_url(url(server)).set(port=proxy.port))
    yield engine
    engine.dispose()


@pytest.fixture(params=["django", "django-inside", "sqlalchemy"])
def lock(request: pytest.FixtureRequest, server: str, engine: Engine) -> Iterator[Any]:
    """A lock whose statements go through the proxy, for each way that they can."""
    if request.param == "sqlalchemy":
        yield sqlalchemy_dblock.db_lock(engine, "k")
    elif request.param == "django":
        yield dblock.db_lock("k", using=f"{server}_wire")
    else:
        with transaction.atomic(f"{server}_wire"):
            yield dblock.db_lock("k", using=f"{server}_wire", release="now")


def test_two_round_trips(server: str, proxy: Proxy, lock: Any) -> None:
    """One to take and one to give back, once statements are prepared; and before that too."""
    cycle(lock)
    proxy.settle()
    before = proxy.round_trips
    cycle(lock)
    assert proxy.round_trips - before == 2, proxy.heard[before:]

    def cycles() -> None:
        for _ in range(20):
            cycle(lock)

    assert proxy.counted(cycles) == 40, proxy.heard


@pytest.mark.parametrize(("what", "most"), [("read", 2), ("write", 3), ("permit", 2), ("downgrade", 5)])
def test_round_trips_of_the_family(server: str, proxy: Proxy, engine: Engine, what: str, most: int) -> None:
    """So many where nobody else has the key; MariaDB and MySQL need one more to leave a share."""
    rw = sqlalchemy_dblock.db_rwlock(engine, "k")
    held: Any = {
        "read": rw.read(),
        "write": rw.write(),
        "downgrade": rw.write(),
        "permit": sqlalchemy_dblock.db_semaphore(engine, "s", 3),
    }[what]

    def cycles() -> None:
        for _ in range(20):
            with held:
                if what == "downgrade":
                    held.downgrade()

    cycles()  # each slot has a row, and each statement is prepared
    extra = {"read": 1, "permit": 1, "write": 0, "downgrade": 1}[what] if server in INNODB else 0
    assert proxy.counted(cycles) == 20 * (most + extra), proxy.heard


@pytest.mark.parametrize("face", ["django", "sqlalchemy"])
@pytest.mark.parametrize("server", ["postgresql", "mariadb"], indirect=True)
def test_round_trips_of_a_guarded_block(server: str, proxy: Proxy, engine: Engine, face: str) -> None:
    """Two for the lock, two for guard(), and those of a transaction that sends nothing else."""
    alias, lock = f"{server}_wire", sqlalchemy_dblock.db_lock(engine, "k")
    block = dblock.db_lock("k", using=alias).atomic() if face == "django" else lock.begin(engine)

    def blocks() -> None:
        for _ in range(10):
            with block:
                pass

    def transactions() -> None:
        for _ in range(10):
            if face == "django":
                with transaction.atomic(alias), connections[alias].cursor() as cursor:
                    cursor.execute("SELECT 1")
            else:
                with engine.begin() as connection:
                    connection.exec_driver_sql("SELECT 1")

    blocks()  # each statement is prepared
    transactions()
    assert proxy.counted(blocks) == proxy.counted(transactions) + 10 * (2 + 2 - 1), proxy.heard


def test_a_failed_try_reads_once_and_changes_nothing(server: str, proxy: Proxy, lock: Any) -> None:
    """A conditional UPDATE that matches nothing, and a look at the holder."""

    def tries() -> None:
        for _ in range(10):
            assert lock.acquire(blocking=False) is False

    with sqlalchemy_dblock.db_lock(observer(server), "k", ttl=600):
        tries()  # prepared
        assert proxy.counted(tries) == 20, proxy.heard


def test_losers_write_no_wal_and_lock_no_row(postgresql: object) -> None:
    """1,000 failed tries leave PostgreSQL's log where it was, and take no transaction id."""
    where = "SELECT pg_current_wal_insert_lsn()::text, pg_snapshot_xmax(pg_current_snapshot())::text FROM locks"
    rival = dblock.db_lock("k", using="postgresql")
    with sqlalchemy_dblock.db_lock(observer("postgresql"), "k", ttl=600):
        assert rival.acquire(blocking=False) is False
        run("postgresql", "CHECKPOINT")
        for attempt in range(2):
            before = run("postgresql", where)
            for _ in range(1000):
                assert rival.acquire(blocking=False) is False
            # 15 s after the last change the background writer notes, once, which transactions are running.
            if run("postgresql", where) == before:
                break
            assert attempt == 0
        assert run("postgresql", "SELECT count(*) FROM locks WHERE xmax::text <> '0'") == [(0,)]
    connections["postgresql"].close()


_ABOUT_ROWS = re.compile(rb"\b(SELECT|INSERT|UPDATE|DELETE)\b")
"""What is not said to make a new session, on MySQL and MariaDB."""


@pytest.mark.parametrize("size", [4, 24])
def test_statements_for_a_hand_over(
    server: str, proxy: Proxy, engine: Engine, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three at most on PostgreSQL, however many wait. Each has an engine of its own, as processes have.

    On MySQL and MariaDB joining and granting take two each, a waiter polls once, and the rows of served places are
    deleted later, many at a time. How often waiters poll on their own is a matter of time, not of hand-overs:
    here they poll when they are notified. So are new connections, which a busy machine makes necessary; heartbeats,
    probes of idle connections and questions about the epoch, of which there are none here.
    """
    timed(monkeypatch, **SELDOM, waiter_ttl=600.0, trusted_idle=600.0, idle_session=600.0, single_try=60.0)
    unheard = {"dblock_listen": False}  # neighbours notify each other, and what listens would go on after the test
    engines = [create_engine(engine.url, execution_options=unheard) for _ in range(size)]
    locks = [sqlalchemy_dblock.db_lock(engine, "k", timeout=60) for engine in engines]

    def round_of(lock: sqlalchemy_dblock.Lock) -> None:
        for _ in range(10):
            cycle(lock)

    with ThreadPoolExecutor(size) as pool:
        _ = list(pool.map(round_of, locks))  # connected and prepared
        for _ in range(3):  # a busy machine sends some twice
            before, cycles = len(proxy.heard), size * 10
            _ = list(pool.map(round_of, locks))
            said = [each for each in proxy.heard[before:] if server == "postgresql" or _ABOUT_ROWS.search(each)]
            if len(said) <= cycles * (3 if server == "postgresql" else 6):
                break
        else:
            pytest.fail(f"{len(said)} statements for {cycles} hand-overs: {Counter(each[:120] for each in said)}")
    for each in engines:
        each.dispose()


@pytest.mark.direct
def test_one_flush_for_a_cycle(postgresql: object) -> None:
    """The take commits durably, the release asynchronously, as PostgreSQL itself counts."""

    [(newest,)] = run("postgresql", "SELECT current_setting('server_version_num')::int >= 180000")
    counted = "CAST(sum(fsyncs) AS int) FROM pg_stat_io WHERE object = 'wal'" if newest else "wal_sync FROM pg_stat_wal"

    def flushes(cycles: int) -> int:
        engine = create_engine(url("postgresql"))
        cycle(sqlalchemy_dblock.db_lock(engine, "k"))
        [(before,)] = run("postgresql", f"SELECT {counted}")
        for _ in range(cycles):
            cycle(sqlalchemy_dblock.db_lock(engine, "k"))
        engine.dispose()  # a session that ends reports its numbers
        ended = "SELECT count(*) FROM pg_stat_activity WHERE query LIKE 'UPDATE locks SET%'"
        _ = until(lambda: run("postgresql", ended) == [(0,)], 1.0)
        [(after,)] = run("postgresql", f"SELECT {counted}")
        return int(str(after)) - int(str(before))

    assert 0.8 * 500 < flushes(500) < 1.3 * 500
