"""The cost of one take and release that nobody contends, as a ratio to bare SQL in the same run.

The floor is what the simplest possible lock would cost: two durable UPDATEs by primary key over the same bare driver
(on SQLite two commits with `synchronous=FULL`). Rounds of each candidate are interleaved and medians taken, because
machines are shared and their speed drifts; only the ratios travel. Round trips, transactions and WAL are counted on the
server, not timed. Run it as `make bench`.
"""

from __future__ import annotations

import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.table import Table

from tests.support.servers import MariaDB, PostgreSQL

ROUNDS, CYCLES = 15, 100
Cycle = Callable[[int], None]


@dataclass
class Candidate:
    name: str
    run: Cycle
    target: float | None = None


def main() -> int:
    """Start private servers, measure, print; 1 if a figure misses its target."""
    rounds = int(os.environ.get("ROUNDS", ROUNDS))
    console = Console(width=110)
    with tempfile.TemporaryDirectory() as directory, _servers() as ports:
        _set_up_django(directory, ports)
        table = Table("database", "candidate", "cycles/s", "µs", "ratio to floor", "target")
        missed = []
        for database, candidates in _candidates(directory, ports).items():
            rates = measure(candidates, rounds)
            floor = rates[candidates[0].name]
            for candidate in candidates:
                rate = rates[candidate.name]
                ratio = statistics.median(a / b for a, b in zip(rate, floor, strict=True))
                target = "" if candidate.target is None else f">= {candidate.target:.2f}"
                if candidate.target is not None and ratio < candidate.target:
                    missed.append(candidate.name)
                    target = f"[red]{target} missed"
                middle = statistics.median(rate)
                table.add_row(
                    database, candidate.name, f"{middle:,.0f}", f"{1e6 / middle:,.0f}", f"{ratio:.2f}", target
                )
            table.add_section()
        console.print(table)
        missed += _count(console, ports)
    console.print("all targets reached" if not missed else f"[red]missed: {', '.join(missed)}")
    return 1 if missed else 0


def measure(candidates: list[Candidate], rounds: int) -> dict[str, list[float]]:
    """Cycles a second of each candidate in each of `rounds` interleaved rounds, after one that does not count."""
    rates: dict[str, list[float]] = {candidate.name: [] for candidate in candidates}
    for round_ in range(rounds + 1):
        order = candidates if round_ % 2 else candidates[::-1]
        for candidate in order:
            start = time.perf_counter()
            candidate.run(CYCLES)
            if round_:
                rates[candidate.name].append(CYCLES / (time.perf_counter() - start))
    return rates


@contextmanager
def _servers() -> Iterator[dict[str, int]]:
    postgresql, mariadb = PostgreSQL(), MariaDB()
    try:
        for server in (postgresql, mariadb):
            server.prepare()
            server.start()
        mariadb.create_database("dblock_tests")
        yield {"postgresql": postgresql.port, "mariadb": mariadb.port}
    finally:
        postgresql.close()
        mariadb.close()


def _set_up_django(directory: str, ports: dict[str, int]) -> None:
    os.environ["DBLOCK_TEST_SQLITE"] = f"{directory}/django.sqlite3"
    os.environ["DBLOCK_TEST_POSTGRESQL_PORT"] = str(ports["postgresql"])
    os.environ["DBLOCK_TEST_MARIADB_PORT"] = str(ports["mariadb"])
    os.environ["DBLOCK_TEST_POSTGRESQL_WIRE"] = os.environ["DBLOCK_TEST_MARIADB_WIRE"] = ""
    os.environ["DJANGO_SETTINGS_MODULE"] = "tests.settings"
    import django
    from django.core.management import call_command

    django.setup()
    for alias in ("default", "postgresql", "mariadb"):
        call_command("migrate", database=alias, verbosity=0)


def _candidates(directory: str, ports: dict[str, int]) -> dict[str, list[Candidate]]:
    import sqlite3

    import psycopg
    import pymysql

    pg = psycopg.connect(f"host=127.0.0.1 port={ports['postgresql']} user=dblock dbname=postgres", autocommit=True)
    pg.prepare_threshold = 0
    my = pymysql.connect(host="127.0.0.1", port=ports["mariadb"], user="root", database="dblock_tests", autocommit=True)
    lite = sqlite3.connect(f"{directory}/bare.sqlite3", isolation_level=None)
    lite.execute("PRAGMA journal_mode = WAL")
    lite.execute("PRAGMA synchronous = FULL")
    urls = {
        "PostgreSQL": f"postgresql+psycopg://dblock@127.0.0.1:{ports['postgresql']}/postgres",
        "MariaDB": f"mysql+pymysql://root@127.0.0.1:{ports['mariadb']}/dblock_tests",
        "SQLite": f"sqlite:///{directory}/django.sqlite3",
    }
    aliases = {"PostgreSQL": "postgresql", "MariaDB": "mariadb", "SQLite": "default"}
    targets = {"PostgreSQL": (1.10, 0.85, 1.00), "MariaDB": (0.80, 0.70, 0.70), "SQLite": (1.5, 1.5, None)}
    bare: dict[str, Any] = {"PostgreSQL": pg, "MariaDB": my, "SQLite": lite}
    return {
        name: [
            Candidate(f"two bare updates ({name})", _floor(bare[name], "?" if name == "SQLite" else "%s")),
            Candidate(f"sqlalchemy_dblock ({name})", _sqlalchemy(urls[name]), targets[name][0]),
            Candidate(f"dblock, caller's connection ({name})", _django(aliases[name]), targets[name][1]),
            Candidate(f"dblock, inside atomic() ({name})", _django_inside(aliases[name]), targets[name][2]),
        ]
        for name in urls
    }


def _floor(connection: Any, mark: str) -> Cycle:
    cursor = connection.cursor()
    cursor.execute("CREATE TABLE bare (id integer PRIMARY KEY, n integer NOT NULL)")
    cursor.execute("INSERT INTO bare VALUES (1, 0)")
    sql = f"UPDATE bare SET n = n + 1 WHERE id = {mark}"

    def run(count: int) -> None:
        for _ in range(2 * count):
            cursor.execute(sql, (1,))

    return run


def _sqlalchemy(url: str) -> Cycle:
    from sqlalchemy import create_engine

    from sqlalchemy_dblock import db_lock

    engine = create_engine(url)

    def run(count: int) -> None:
        for _ in range(count):
            with db_lock(engine, "bench"):
                pass

    return run


def _django(alias: str, **options: Any) -> Cycle:
    from dblock import db_lock

    def run(count: int) -> None:
        for _ in range(count):
            with db_lock("bench", using=alias, **options):
                pass

    return run


def _django_inside(alias: str) -> Cycle:
    from django.db import transaction

    inner = _django(alias, release="now")

    def run(count: int) -> None:
        with transaction.atomic(alias):
            inner(count)

    return run


def _count(console: Console, ports: dict[str, int]) -> list[str]:
    """What the server counts itself (transactions, WAL flushes, heap-only updates, table size), and failed tries."""
    import psycopg

    from dblock import db_lock

    watch = psycopg.connect(f"host=127.0.0.1 port={ports['postgresql']} user=dblock dbname=postgres", autocommit=True)

    def one(sql: str) -> Any:
        row = watch.execute(sql).fetchone()
        assert row is not None
        return row[0]

    def settled(sql: str) -> Any:
        watch.execute("SELECT pg_stat_force_next_flush()")
        time.sleep(1.2)  # statistics of other sessions arrive with a delay of up to a second
        return one(sql)

    lock, cycles = db_lock("bench", using="postgresql"), 10_000
    size = one("SELECT pg_total_relation_size('locks')")
    updates = "SELECT n_tup_upd FROM pg_stat_user_tables WHERE relname = 'locks'"
    hot = "SELECT n_tup_hot_upd FROM pg_stat_user_tables WHERE relname = 'locks'"
    before = settled(updates), one(hot)
    syncs = one("SELECT wal_sync FROM pg_stat_wal")
    for _ in range(cycles):
        with lock:
            pass
    after = settled(updates), one(hot)
    syncs = one("SELECT wal_sync FROM pg_stat_wal") - syncs
    share = (after[1] - before[1]) / (after[0] - before[0])
    grown = one("SELECT pg_total_relation_size('locks')") - size

    lock.acquire()
    wal = one("SELECT pg_current_wal_insert_lsn()")
    other = db_lock("bench", using="postgresql")
    import threading

    failed: list[bool] = []
    thread = threading.Thread(target=lambda: failed.extend(other.acquire(blocking=False) for _ in range(1000)))
    thread.start()
    thread.join()
    written = one(f"SELECT pg_current_wal_insert_lsn() - '{wal}'")
    lock.release()

    table = Table("PostgreSQL counted", "value", "target")
    rows = [
        (f"heap-only updates of {cycles:,} cycles on one key", f"{share:.1%}", ">= 95 %", share >= 0.95),
        ("growth of the table", f"{grown:,} bytes", "flat (<= 64 kB)", grown <= 65536),
        ("WAL flushes a cycle", f"{syncs / cycles:.2f}", "1 (<= 1.05)", syncs / cycles <= 1.05),
        ("WAL of 1,000 failed tries", f"{written} bytes", "0", written == 0 and not any(failed)),
    ]
    for what, value, target, reached in rows:
        table.add_row(what, value, target if reached else f"[red]{target} missed")
    console.print(table)
    return [what for what, _, _, reached in rows if not reached]


if __name__ == "__main__":
    sys.exit(main())
