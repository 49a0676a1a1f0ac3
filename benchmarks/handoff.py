"""How long a hand-over takes: from the beginning of a release to the end of the next holder's acquire().

Run as part of `make bench`. Across processes one holds and the other waits; what the database's own session lock takes
for the same is measured in turn, and only ratios travel (SQLite has none: there the figure is in milliseconds). A
session lock ends with its server; a lease has to survive a crash. What that costs is measured as well: by bare psycopg,
without a lock and without a thread, an UPDATE that notifies and a durable UPDATE by the notified process. Within a
process it is one thread to another, against uncontended cycles of take and release in between, after the same pause.
CLOCK_MONOTONIC is one clock for all processes of a machine.
"""

from __future__ import annotations

import multiprocessing
import os
import select
import statistics
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import psycopg
from rich.console import Console
from rich.table import Table
from sqlalchemy import create_engine

from benchmarks import FORK
from benchmarks.places import places
from benchmarks.race.clients import Make
from benchmarks.race.peers import Lock, advisory, get_lock, sqlalchemy_face
from sqlalchemy_dblock import db_lock

COUNT = int(os.environ.get("HANDOFFS", "100"))
"""Hand-overs in a round."""
PAUSE = 0.01
"""Seconds before each measurement, in which the other flow begins to wait, and the processors to idle."""
ROUNDS = int(os.environ.get("ROUNDS", "5"))
TARGETS: dict[str, tuple[float, float | None]] = {"PostgreSQL": (2.5, 4.0), "MariaDB": (3.0, None)}
"""Multiples of the session lock's p50 and p99."""
MILLISECONDS = 10.0
"""The target where no notification works across processes."""
CYCLES = 1.5
"""The target within a process, in uncontended cycles."""


def main() -> int:
    """Measure and print; 1 if a figure misses its target."""
    table = Table("hand-over", "p50 ms", "p99 ms", "session lock p50", "p99", "ratio p50", "p99", "target")
    missed = list[str]()
    with places() as urls:
        for name, url in urls.items():
            mine, other, floor = list[float](), list[float](), list[float]()
            for _ in range(ROUNDS):
                mine += between_processes(sqlalchemy_face, url)
                if name != "SQLite":
                    other += between_processes(get_lock if name == "MariaDB" else advisory, url)
                if name == "PostgreSQL":
                    floor += between_processes(bare, url)
            p50, p99 = tails(mine)
            row = [f"{name}, across processes", f"{p50 * 1e3:.2f}", f"{p99 * 1e3:.2f}"]
            if other:
                session50, session99 = tails(other)
                most50, most99 = TARGETS[name]
                ratios = p50 / session50, p99 / session99
                reached = ratios[0] <= most50 and (most99 is None or ratios[1] <= most99)
                reached |= name == "MariaDB" and p50 * 1e3 <= MILLISECONDS
                row += [f"{session50 * 1e3:.2f}", f"{session99 * 1e3:.2f}", *(f"{ratio:.1f}" for ratio in ratios)]
                row += [f"<= {most50:g}" + (f", {most99:g}" if most99 else f", or {MILLISECONDS:g} ms")]
            else:
                reached = p50 * 1e3 <= MILLISECONDS
                row += ["", "", "", "", f"<= {MILLISECONDS:g} ms"]
            table.add_row(*row)
            missed += [] if reached else [row[0]]
            if floor:
                least50, least99 = tails(floor)
                row = [f"{name}, bare durable UPDATEs", f"{least50 * 1e3:.2f}", f"{least99 * 1e3:.2f}", "", ""]
                table.add_row(*row, f"{least50 / session50:.1f}", f"{least99 / session99:.1f}", "")
            handed, cycle = within_a_process(url)
            ratio = statistics.median(handed) / cycle
            row = [f"{name}, within a process", *(f"{seconds * 1e3:.2f}" for seconds in tails(handed))]
            row += [f"cycle {cycle * 1e3:.2f}", "", f"{ratio:.1f}", "", f"<= {CYCLES:g} cycles"]
            table.add_row(*row)
            missed += [] if ratio <= CYCLES else [row[0]]
    console = Console(width=130)
    console.print(table)
    console.print("all targets reached" if not missed else f"[red]missed: {'; '.join(missed)}")
    return 1 if missed else 0


def bare(url: str, key: str) -> Lock:
    """The writes and the notification of a hand-over to another process, and nothing else; the parent hands over."""
    given, parent = "gives", multiprocessing.parent_process() is None
    connection, subscription = (
        psycopg.connect(url.replace("+psycopg", ""), autocommit=True, prepare_threshold=0) for _ in "ab"
    )
    if parent:
        connection.execute("CREATE TABLE IF NOT EXISTS bare (n int) WITH (fillfactor = 50)")
        connection.execute("TRUNCATE bare")
        connection.execute("INSERT INTO bare VALUES (0)")
        connection.execute("SET synchronous_commit = off")
    else:
        subscription.execute(f"LISTEN {given}")

    def take() -> None:
        if not parent:
            _ = select.select([subscription], [], [])
            subscription.pgconn.consume_input()
            _ = subscription.pgconn.notifies()
            connection.execute("UPDATE bare SET n = n + 1")

    def give() -> None:
        if parent:
            notify = f"SELECT CAST(pg_notify('{given}', '') AS text) FROM changed"
            connection.execute(f"WITH changed AS (UPDATE bare SET n = n + 1 RETURNING n) {notify}")

    return Lock(take, give)


def tails(durations: list[float]) -> tuple[float, float]:
    """The median, and what one in a hundred exceeds."""
    ordered = sorted(durations)
    return statistics.median(ordered), ordered[int(len(ordered) * 0.99)]


def between_processes(
    make: Make, url: str, key: str = "hot", *, count: int = COUNT, pause: Callable[[], float] = lambda: PAUSE
) -> list[float]:
    """Hand-overs from this process to another one, which waits for each."""
    here, there = FORK.Pipe()
    other = FORK.Process(target=_other, args=(make, url, key, there))
    other.start()
    take, give, _ = make(url, key)
    durations = list[float]()
    for _ in range(count):
        take()
        here.send(True)
        time.sleep(pause())
        begun = time.monotonic()
        give()
        durations.append(here.recv() - begun)
        here.recv()
    here.send(False)
    other.join()
    return durations[5:]


def _other(make: Make, url: str, key: str, pipe: Any) -> None:
    take, give, _ = make(url, key)
    while pipe.recv():
        take()
        pipe.send(time.monotonic())
        give()
        pipe.send(None)


def within_a_process(url: str) -> tuple[list[float], float]:
    """Hand-overs from one thread to another; and the median of an uncontended cycle."""
    engine = create_engine(url)
    lock = db_lock(engine, "hot", timeout=None)
    ends, begins, cycles = list[float](), list[float](), list[float]()
    start, stop = threading.Semaphore(0), threading.Semaphore(0)

    def other() -> None:
        for _ in range(COUNT * ROUNDS):
            start.acquire()
            lock.acquire()
            ends.append(time.monotonic())
            lock.release()
            stop.release()

    thread = threading.Thread(target=other)
    thread.start()
    for _ in range(COUNT * ROUNDS):
        time.sleep(PAUSE)
        begun = time.monotonic()
        with lock:
            pass
        cycles.append(time.monotonic() - begun)
        lock.acquire()
        start.release()
        time.sleep(PAUSE)
        begins.append(time.monotonic())
        lock.release()
        stop.acquire()
    thread.join()
    engine.dispose()
    return [end - begin for begin, end in zip(begins, ends, strict=True)], statistics.median(cycles)


if __name__ == "__main__":
    sys.exit(main())
