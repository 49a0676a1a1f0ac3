"""A key that some processes want at once, at a database that is 1 to 80 ms away, beside its own session lock.

Run as part of `make bench`. A proxy holds each answer back for the round trip. `impatient` callers give up after a
second, and begin anew: of sections of 0.3 s three in a second are possible, and each hand-over takes some round trips.
"""

from __future__ import annotations

import os
import statistics
import sys

from rich.console import Console
from rich.table import Table
from sqlalchemy import create_engine
from sqlalchemy.engine import make_url

from benchmarks.contended import Lock, crowd, ours, theirs
from benchmarks.places import places
from sqlalchemy_dblock import db_lock
from tests.support.proxy import Proxy

SIZE = 6
DISTANCES = (0.001, 0.005, 0.02, 0.08)
SECTION, LONG_SECTION = 0.05, 0.3


def impatient(url: str) -> Lock:
    """The lock of this project, for callers that give up after a second."""
    engine = create_engine(url)
    with db_lock(engine, "hot", timeout=None):  # the first connection alone takes a dozen round trips
        pass
    lock = db_lock(engine, "hot", timeout=1)

    def take() -> None:
        while not lock.acquire():
            pass

    return take, lock.release


def main() -> int:
    """Measure and print; 1 if a figure misses its target."""
    rounds = int(os.environ.get("CROWDS", "3"))
    table = Table("database", "round trip", "sections/s", "ratio to session lock", "impatient: sections/s")
    missed = list[str]()
    with places() as urls:
        for name in ("PostgreSQL", "MariaDB"):
            address = make_url(urls[name])
            for distance in DISTANCES:
                with Proxy(0, address.port or 0) as proxy:
                    proxy.delay = distance
                    url = address.set(port=proxy.port).render_as_string(hide_password=False)
                    pairs = [
                        (crowd(ours, url, SIZE, SECTION), crowd(theirs, url, SIZE, SECTION)) for _ in range(rounds)
                    ]
                    long = [crowd(impatient, url, SIZE, LONG_SECTION, 5.0).rate for _ in range(rounds)]
                ratio = statistics.median(mine.rate / other.rate for mine, other in pairs)
                rate = statistics.median(mine.rate for mine, _ in pairs)
                given = statistics.median(long)
                missed += [f"{name} at {distance * 1e3:g} ms"] * (ratio < 0.5 or given < 0.5 / LONG_SECTION)
                table.add_row(name, f"{distance * 1e3:g} ms", f"{rate:.1f}", f"{ratio:.2f}", f"{given:.1f}")
            table.add_section()
    console = Console(width=110)
    console.print(table)
    console.print("all targets reached" if not missed else f"[red]missed: {', '.join(missed)}")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
