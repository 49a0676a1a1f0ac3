"""What reaping costs others: the rate of a working lock while old rows are deleted, against that when they are not.

The two alternate, since the machine is shared: the reaper stays in one of its pauses for every other window, and a
ratio is that of one window to its neighbours; the table has medians. Work that it leaves to the server goes on in both
windows, and would show against the rate *before* it began. *Seconds* are those in which it was not kept waiting.

The longest cycle of the lock *alone* says what machine and disk do by themselves, which the longest statement has too:
beside it stands the longest but one in a hundred. TMPDIR=/dev/shm leaves the disk out.

Run it as `make bench`; ROWS=100000 for the numbers of the contract (ten minutes), ONLY=MariaDB for one database.
"""

from __future__ import annotations

import multiprocessing
import os
import statistics
import sys
import time
from dataclasses import dataclass, field
from typing import Any, Final

from rich.console import Console
from rich.table import Table
from sqlalchemy import Engine, create_engine, text

from benchmarks.places import places
from sqlalchemy_dblock import db_lock, reap
from sqlalchemy_dblock.store import store_for

ROWS: Final = 20_000
WINDOW: Final = 0.25
"""Seconds."""
BEFORE: Final = 12
"""Windows."""
OLD: Final = {
    "PostgreSQL": "now() - interval '2 days'",
    "MariaDB": "UTC_TIMESTAMP(6) - INTERVAL 2 DAY",
    "MySQL": "UTC_TIMESTAMP(6) - INTERVAL 2 DAY",
    "SQLite": "strftime('%Y-%m-%d %H:%M:%f000', 'now', '-2 days')",
}
INSERT: Final = (
    "INSERT INTO locks (lock_key, fence, count, ttl, acquired_at, expires_at, label, host, pid, thread, program,"
    " celery_task_id) VALUES (:key, 1, 0, 30, {old}, {old}, '', 'h', 1, '', '', '')"
)


@dataclass(frozen=True)
class Reaped:
    """What the reaper says of itself."""

    rows: int
    took: dict[str, list[float]]
    """How long each of its statements took, in seconds."""


@dataclass
class Lock:
    """Cycles a second of one lock in each window, and the longest cycle."""

    engine: Engine
    rates: list[float] = field(default_factory=list)
    longest: float = 0.0

    def work(self) -> None:
        """Take it and give it back for a window's time."""
        count, began = 0, time.perf_counter()
        now = began
        while now < began + WINDOW:
            with db_lock(self.engine, "working"):
                pass
            asked, now = now, time.perf_counter()
            self.longest = max(self.longest, now - asked)
            count += 1
        self.rates.append(count / (now - began))


def main() -> int:
    """Measure, print; 1 if a figure misses its target."""
    columns = ("seconds", "rows/s", "before", "alone", "beside", "ratio", "longest cycle", "longest statement")
    table = Table("database", *columns, title="reaping")
    rows, missed = int(os.environ.get("ROWS", ROWS)), False
    with places(mysql=True) as urls:
        for name in os.environ.get("ONLY", " ".join(OLD)).split():
            if name not in urls:
                print(f"{name}: not installed")
                continue
            engine = create_engine(urls[name])
            _fill(engine, rows, OLD[name])
            seconds, reaped, before, alone, beside = _measure(engine)
            engine.dispose()
            pairs = zip(beside.rates, alone.rates, alone.rates[1:], strict=False)
            ratio = statistics.median(during / statistics.mean(around) for during, *around in pairs)
            slowest = max(reaped.took, key=lambda statement: max(reaped.took[statement]))
            took = sorted(reaped.took[slowest])
            missed |= reaped.rows != rows or ratio < 0.9 or took[-1] > 0.05
            table.add_row(
                name,
                f"{seconds:.0f}",
                f"{reaped.rows / seconds:,.0f}",
                *(f"{statistics.median(lock.rates):,.0f}/s" for lock in (before, alone, beside)),
                f"{ratio:.2f} (>= 0.90)",
                f"{1e3 * beside.longest:.0f} ms (alone {1e3 * alone.longest:.0f})",
                f"{1e3 * took[-1]:.0f} ms (<= 50), {1e3 * took[-1 - len(took) // 100]:.0f}: {slowest}",
            )
    Console(width=150).print(table)
    return int(missed)


def _fill(engine: Engine, rows: int, old: str) -> None:
    with engine.begin() as connection:
        keys = [{"key": f"key:{number:08d}"} for number in range(rows)]
        connection.execute(text(INSERT.format(old=old)), keys)


def _measure(engine: Engine) -> tuple[float, Reaped, Lock, Lock, Lock]:
    """How long the reaping takes; the lock before it, and in windows that alternate, the last without the reaper."""
    context = multiprocessing.get_context("spawn")
    go, answers = context.Event(), context.Queue()
    url = engine.url.render_as_string(hide_password=False)
    reaper = context.Process(target=_reap, args=(url, go, answers))
    reaper.start()
    _ = answers.get()  # it has imported what it needs
    before, alone, beside = (Lock(engine) for _ in range(3))
    for _ in range(BEFORE):
        before.work()
    alone.work()
    seconds = 0.0
    while answers.empty():
        began = time.perf_counter()
        go.set()
        beside.work()
        go.clear()
        seconds += time.perf_counter() - began
        alone.work()
    reaped: Reaped = answers.get()
    reaper.join()
    if len(beside.rates) > 1:
        beside.rates.pop()  # it ended there
    return seconds, reaped, before, alone, beside


def _reap(url: str, go: Any, answers: Any) -> None:
    engine = create_engine(url)
    store, took = store_for(engine), dict[str, list[float]]()
    execute = store.execute

    def timed(step: Any) -> Any:
        asked = time.perf_counter()
        try:
            return execute(step)
        finally:
            took.setdefault(step.statement.name, []).append(time.perf_counter() - asked)

    def rest(seconds: Any) -> None:
        sleep(seconds)
        go.wait()  # here, since what its statements take is followed by a pause that is a multiple of it

    with db_lock(engine, "connected"):
        pass
    sleep, time.sleep = time.sleep, rest
    store.execute = timed  # type: ignore[method-assign]
    answers.put("ready")
    go.wait()
    answers.put(Reaped(reap(engine, retention=3600), took))


if __name__ == "__main__":
    sys.exit(main())
