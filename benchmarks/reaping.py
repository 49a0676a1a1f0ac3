"""What reaping costs others: the rate of a working lock while old rows are deleted, against that when they are not.

The two alternate, since the machine is shared: the reaper stays in one of its pauses for every other window, and a
ratio is that of one window to its neighbours. Beside it, how long the longest cycle of that lock took, and the longest
statement of the reaper's. Run it as `make bench`; ROWS=100000 for the numbers of the contract (ten minutes).
"""

from __future__ import annotations

import multiprocessing
import os
import statistics
import sys
import time
from dataclasses import dataclass
from typing import Any, Final

from rich.console import Console
from rich.table import Table
from sqlalchemy import Engine, create_engine, text

from benchmarks.places import places
from sqlalchemy_dblock import db_lock, reap
from sqlalchemy_dblock.store import store_for

ROWS: Final = 20_000
ALONE, BESIDE = 0.5, 1.0
"""Seconds that a window lasts."""
OLD: Final = {
    "PostgreSQL": "now() - interval '2 days'",
    "MariaDB": "UTC_TIMESTAMP(6) - INTERVAL 2 DAY",
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
    longest: dict[str, float]
    """The longest of each of its statements, in seconds."""


def main() -> int:
    """Measure, print; 1 if a figure misses its target."""
    table = Table("database", "rows", "reaped in", "alone", "beside", "ratio", "longest cycle", "longest statement")
    rows, missed = int(os.environ.get("ROWS", ROWS)), False
    chosen = os.environ.get("ONLY", " ".join(OLD)).split()
    with places() as urls:
        for name in chosen:
            engine = create_engine(urls[name])
            _fill(engine, rows, OLD[name])
            reaped, alone, beside, cycle = _measure(engine)
            engine.dispose()
            pairs = zip(beside, alone, alone[1:], strict=False)
            ratio = statistics.median(during / statistics.mean(around) for during, *around in pairs)
            slowest = max(reaped.longest, key=lambda statement: reaped.longest[statement])
            missed |= reaped.rows != rows or ratio < 0.9 or reaped.longest[slowest] > 0.05
            rates = (f"{statistics.median(rate):,.0f}/s" for rate in (alone, beside))
            table.add_row(
                name,
                f"{reaped.rows:,}",
                f"{len(beside) * BESIDE:.0f} s",
                *rates,
                f"{ratio:.2f} (>= 0.90)",
                f"{1e3 * cycle:.0f} ms",
                f"{1e3 * reaped.longest[slowest]:.0f} ms, {slowest} (<= 50)",
            )
    Console(width=130).print(table)
    return int(missed)


def _fill(engine: Engine, rows: int, old: str) -> None:
    with engine.begin() as connection:
        keys = [{"key": f"key:{number:08d}"} for number in range(rows)]
        connection.execute(text(INSERT.format(old=old)), keys)


def _measure(engine: Engine) -> tuple[Reaped, list[float], list[float], float]:
    """The rates of a lock in windows that alternate, the first and the last without the reaper; its longest cycle."""
    context = multiprocessing.get_context("spawn")
    go, answers = context.Event(), context.Queue()
    url = engine.url.render_as_string(hide_password=False)
    reaper = context.Process(target=_reap, args=(url, go, answers))
    reaper.start()
    _ = answers.get()  # it has imported what it needs
    alone, beside, longest = [_rate(engine, ALONE)[0]], list[float](), 0.0
    while answers.empty():
        go.set()
        rate, cycle = _rate(engine, BESIDE)
        go.clear()
        beside.append(rate)
        longest = max(longest, cycle)
        alone.append(_rate(engine, ALONE)[0])
    reaped: Reaped = answers.get()
    reaper.join()
    return reaped, alone, beside, longest


def _rate(engine: Engine, seconds: float) -> tuple[float, float]:
    """Cycles a second of one lock, and the longest of them."""
    count, longest, began = 0, 0.0, time.perf_counter()
    now = began
    while now < began + seconds:
        with db_lock(engine, "working"):
            pass
        asked, now = now, time.perf_counter()
        longest = max(longest, now - asked)
        count += 1
    return count / (now - began), longest


def _reap(url: str, go: Any, answers: Any) -> None:
    engine = create_engine(url)
    store, longest = store_for(engine), dict[str, float]()
    execute = store.execute

    def timed(step: Any) -> Any:
        asked = time.perf_counter()
        try:
            return execute(step)
        finally:
            name = step.statement.name
            longest[name] = max(longest.get(name, 0.0), time.perf_counter() - asked)

    def rest(seconds: Any) -> None:
        sleep(seconds)
        go.wait()  # here, since what its statements take is followed by a pause that is a multiple of it

    with db_lock(engine, "connected"):
        pass
    sleep, time.sleep = time.sleep, rest
    store.execute = timed  # type: ignore[method-assign]
    answers.put("ready")
    go.wait()
    answers.put(Reaped(reap(engine, retention=3600), longest))


if __name__ == "__main__":
    sys.exit(main())
