"""A key that many processes want at once: rate, waits and fairness, beside the database's own session lock.

Run as part of `make bench`. Each process takes the key, stays for the length of a section, gives it back, and begins
anew. Rounds with the session lock (`pg_advisory_lock`, `GET_LOCK`) and with ours are interleaved; only ratios travel.
A hand-over is what is left of a cycle of the whole group when the section is taken away.
"""

from __future__ import annotations

import multiprocessing
import os
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.table import Table
from sqlalchemy import create_engine
from sqlalchemy.engine import make_url

from benchmarks.places import places
from sqlalchemy_dblock import db_lock

SECONDS = 3.0
Lock = tuple[Callable[[], object], Callable[[], object]]
Maker = Callable[[str], Lock]


@dataclass
class Crowd:
    """What a group of processes did with one key."""

    rate: float
    """Sections a second."""
    waits: list[float]
    counts: list[int]

    @property
    def tail(self) -> float:
        """The longest wait but for one in a hundred, as a multiple of the mean."""
        return sorted(self.waits)[int(len(self.waits) * 0.99)] / statistics.mean(self.waits)

    @property
    def fairness(self) -> float:
        """Jain, Chiu, Hawe: A Quantitative Measure of Fairness (DEC-TR-301, 1984); 1.0 when all have the same share."""
        return sum(self.counts) ** 2 / (len(self.counts) * sum(count**2 for count in self.counts))


def ours(url: str) -> Lock:
    """The lock of this project."""
    lock = db_lock(create_engine(url), "hot", timeout=None)
    with lock:
        pass
    return lock.acquire, lock.release


def theirs(url: str) -> Lock:
    """The session lock of the database, which needs a connection for as long as it is waited for and held."""
    take, give = {
        "postgresql": ("SELECT pg_advisory_lock(1)", "SELECT pg_advisory_unlock(1)"),
        "mysql": ("SELECT GET_LOCK('hot', 60)", "SELECT RELEASE_LOCK('hot')"),
    }[make_url(url).get_backend_name()]
    raw: Any = create_engine(url, isolation_level="AUTOCOMMIT").raw_connection().driver_connection
    cursor = raw.cursor()
    return lambda: cursor.execute(take), lambda: cursor.execute(give)


def crowd(make: Maker, url: str, size: int, section: float, seconds: float = SECONDS) -> Crowd:
    """Let `size` processes want one key for some seconds."""
    results: Any = multiprocessing.Queue()
    start: Any = multiprocessing.Barrier(size)
    once = (make, url, (section, seconds), start, results)
    members = [multiprocessing.Process(target=_member, args=once) for _ in range(size)]
    for member in members:
        member.start()
    waits = [results.get(timeout=120) for _ in members]
    for member in members:
        member.join()
    counts = [len(each) for each in waits]
    return Crowd(sum(counts) / seconds, [wait for each in waits for wait in each[1:]], counts)


def _member(make: Maker, url: str, times: tuple[float, float], start: Any, results: Any) -> None:
    section, seconds = times
    take, give = make(url)
    waits = list[float]()
    start.wait()
    end = time.monotonic() + seconds
    while (begun := time.monotonic()) < end:
        take()
        waits.append(time.monotonic() - begun)
        if section:
            time.sleep(section)
        give()
    results.put(waits)


def main() -> int:
    """Measure and print; 1 if a figure misses its target."""
    rounds = int(os.environ.get("CROWDS", "3"))
    table = Table("database", "processes", "section", "sections/s", "ratio to session lock", "p99 / mean", "Jain")
    missed = list[str]()
    with places() as urls:
        for name, url in urls.items():
            rates = dict[int, float]()
            for size, section in ((8, 0.005), (32, 0.005), (100, 0.005), (32, 0.0)):
                if size == 100 and name != "PostgreSQL":  # two connections each are more than the others let in
                    continue
                pairs = [
                    (crowd(ours, url, size, section), None if name == "SQLite" else crowd(theirs, url, size, section))
                    for _ in range(rounds)
                ]
                ratio = statistics.median(mine.rate / other.rate if other else 0.0 for mine, other in pairs)
                tail = statistics.median(mine.tail for mine, _ in pairs)
                fairness = statistics.median(mine.fairness for mine, _ in pairs)
                rate = statistics.median(mine.rate for mine, _ in pairs)
                rates.setdefault(size, rate)
                if size == 100:
                    missed += ["as fast with 100 as with 8"] * (rate < 0.9 * rates[8])
                elif name == "PostgreSQL":
                    share = 0.85 if section else 1000 / 11000
                    missed += [f"rate of {size}"] * (ratio < share) + [f"fairness of {size}"] * (fairness < 0.99)
                    missed += [f"tail of {size}"] * (bool(section) and tail > 1.3)
                table.add_row(
                    name,
                    str(size),
                    f"{section * 1000:.0f} ms",
                    f"{rate:,.0f}",
                    "" if name == "SQLite" else f"{ratio:.2f}",
                    f"{tail:.2f}",
                    f"{fairness:.3f}",
                )
            table.add_section()
    console = Console(width=110)
    console.print(table)
    console.print("all targets reached" if not missed else f"[red]missed: {', '.join(missed)}")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
