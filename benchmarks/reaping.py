"""What reaping costs others: the rate of a working lock while old rows are deleted, against that before and after.

Beside it, how long the longest cycle of that lock took, and how long the reaping. Run it as `make bench`; ROWS=100000
for the numbers of the contract (ten minutes).
"""

from __future__ import annotations

import multiprocessing
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final

from rich.console import Console
from rich.table import Table
from sqlalchemy import Engine, create_engine, text

from sqlalchemy_dblock import db_lock, metadata, reap
from sqlalchemy_dblock.store import store_for
from tests.support.servers import MariaDB, PostgreSQL, running

ROWS = 5000
OLD: Final = {
    "postgresql": "now() - interval '2 days'",
    "mariadb": "UTC_TIMESTAMP(6) - INTERVAL 2 DAY",
    "sqlite": "strftime('%Y-%m-%d %H:%M:%f', 'now', '-2 days')",
}
INSERT: Final = (
    "INSERT INTO locks (lock_key, fence, count, ttl, acquired_at, expires_at, label, host, pid, thread, program,"
    " celery_task_id) VALUES (:key, 1, 0, 30, {old}, {old}, '', 'h', 1, '', '', '')"
)


def main() -> int:
    """Measure, print; 1 if a figure misses its target."""
    rows = int(os.environ.get("ROWS", ROWS))
    table = Table("database", "rows", "reaped in", "alone", "beside", "ratio", "longest cycle", "longest statement")
    missed = False
    for name in OLD:
        with _database(name) as url:
            engine = create_engine(url)
            metadata.create_all(engine)
            if name == "sqlite":
                with engine.connect() as connection:
                    connection.exec_driver_sql("PRAGMA journal_mode=WAL")
            with engine.begin() as connection:
                keys = [{"key": f"key:{number:08d}"} for number in range(rows)]
                connection.execute(text(INSERT.format(old=OLD[name])), keys)
            before, _ = _rate(engine, _for(3.0))
            answers = multiprocessing.get_context("spawn").Queue()
            process = multiprocessing.get_context("spawn").Process(target=_reap, args=(url, answers))
            process.start()
            time.sleep(1.5)  # until it has imported what it needs
            beside, longest = _rate(engine, process.is_alive)
            after, _ = _rate(engine, _for(3.0))
            deleted, seconds, slowest = answers.get()
            alone = (before + after) / 2
            missed |= deleted != rows or beside / alone < 0.9 or slowest > 0.05
            figures = (f"{alone:,.0f}/s", f"{beside:,.0f}/s", f"{beside / alone:.2f} (>= 0.90)")
            took = (f"{1e3 * longest:.0f} ms", f"{1e3 * slowest:.0f} ms (<= 50)")
            table.add_row(name, f"{deleted:,}", f"{seconds:.0f} s", *figures, *took)
            engine.dispose()
    Console(width=120).print(table)
    return int(missed)


def _for(seconds: float) -> Callable[[], bool]:
    end = time.perf_counter() + seconds
    return lambda: time.perf_counter() < end


def _rate(engine: Engine, goes_on: Callable[[], bool]) -> tuple[float, float]:
    """Cycles a second of one lock, and the longest of them."""
    count, longest, began = 0, 0.0, time.perf_counter()
    while goes_on():
        asked = time.perf_counter()
        with db_lock(engine, "working"):
            pass
        longest = max(longest, time.perf_counter() - asked)
        count += 1
    return count / (time.perf_counter() - began), longest


def _reap(url: str, answers: Any) -> None:
    engine = create_engine(url)
    store, slowest = store_for(engine), 0.0
    execute = store.execute

    def timed(step: Any) -> Any:
        nonlocal slowest
        asked = time.perf_counter()
        try:
            return execute(step)
        finally:
            slowest = max(slowest, time.perf_counter() - asked)

    store.execute = timed  # type: ignore[method-assign]
    began = time.perf_counter()
    answers.put((reap(engine, retention=3600), time.perf_counter() - began, slowest))


@contextmanager
def _database(name: str) -> Iterator[str]:
    if name == "postgresql":
        with running(PostgreSQL) as server:
            yield f"postgresql+psycopg://dblock@127.0.0.1:{server.port}/postgres"
    elif name == "mariadb":
        with running(MariaDB) as server:
            assert isinstance(server, MariaDB)
            server.create_database("bench")
            yield f"mysql+pymysql://root@127.0.0.1:{server.port}/bench?ssl_disabled=true"
    else:
        with tempfile.TemporaryDirectory() as directory:
            yield f"sqlite:///{directory}/locks.sqlite3"


if __name__ == "__main__":
    sys.exit(main())
