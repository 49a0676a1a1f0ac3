"""Many processes that want one free key at the same moment, as cron jobs do, or readers of a cache that has expired.

Run as part of `make bench`. The first second after the common start is compared with the two seconds after it, in the
same run: what begins slowly shows in the ratio, whatever the machine.
"""

from __future__ import annotations

import os
import statistics
import sys
import time
from typing import Any, NamedTuple

from rich.console import Console
from rich.table import Table
from sqlalchemy import create_engine

from benchmarks import FORK
from benchmarks.places import places
from sqlalchemy_dblock import db_lock

SIZE = 32
SECTION = 0.005
SECONDS = 3.0


class Stampede(NamedTuple):
    """What the processes did with the key."""

    first: int
    """Locks in the first second."""
    steady: float
    """Locks a second later."""
    tail: float
    """The longest wait but for one in a hundred of those that began in the first second, in seconds."""
    mean: float
    """The mean wait of those that began later."""


def stampede(url: str) -> Stampede:
    """Let all begin at once."""
    results: Any = FORK.Queue()
    start: Any = FORK.Barrier(SIZE)
    members = [FORK.Process(target=_member, args=(url, number, start, results)) for number in range(SIZE)]
    for member in members:
        member.start()
    waits = [each for _ in members for each in results.get(timeout=120)]
    for member in members:
        member.join()
    early = sorted(wait for begun, wait in waits if begun < 1.0)
    late = [wait for begun, wait in waits if begun >= 1.0]
    taken = [begun + wait for begun, wait in waits]
    return Stampede(
        sum(moment < 1.0 for moment in taken),
        sum(1.0 <= moment < SECONDS for moment in taken) / (SECONDS - 1.0),
        early[int(len(early) * 0.99)],
        statistics.mean(late),
    )


def _member(url: str, number: int, start: Any, results: Any) -> None:
    engine, waits = create_engine(url), list[tuple[float, float]]()
    with db_lock(engine, f"own {number}"):
        pass
    lock = db_lock(engine, "hot", timeout=None)
    start.wait()
    origin = time.monotonic()
    while (begun := time.monotonic() - origin) < SECONDS:
        with lock:
            waits.append((begun, time.monotonic() - origin - begun))
            time.sleep(SECTION)
    results.put(waits)


def main() -> int:
    """Measure and print; 1 if a figure misses its target."""
    rounds = int(os.environ.get("CROWDS", "3"))
    table = Table(
        "database", "locks in the first second", "a second later", "ratio", "p99 wait at first", "mean wait later"
    )
    missed = list[str]()
    with places() as urls:
        for name, url in urls.items():
            seen = [stampede(url) for _ in range(rounds)]
            ratio = statistics.median(each.first / each.steady for each in seen)
            tail = statistics.median(each.tail / each.mean for each in seen)
            if name != "SQLite":
                missed += [f"start on {name}"] * (ratio < 0.8) + [f"tail on {name}"] * (tail > 2.0)
            first, steady, early, late = (statistics.median(column) for column in zip(*seen, strict=True))
            table.add_row(
                name, f"{first:.0f}", f"{steady:.0f}", f"{ratio:.2f}", f"{early:.2f} s ({tail:.1f} x)", f"{late:.2f} s"
            )
    console = Console(width=110)
    console.print(table)
    console.print("all targets reached" if not missed else f"[red]missed: {', '.join(missed)}")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
