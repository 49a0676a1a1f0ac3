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

from benchmarks.places import places
from benchmarks.race.clients import Make, Told, together
from benchmarks.race.figures import crowd_figures
from benchmarks.race.peers import Lock, advisory, get_lock, sqlalchemy_face
from sqlalchemy_dblock import db_lock
from tests.support.proxy import Proxy

SIZE = 6
DISTANCES = (0.001, 0.005, 0.02, 0.08)
SECTION, LONG_SECTION = 0.05, 0.3


def impatient(url: str, key: str) -> Lock:
    """The lock of this project, for callers that give up after a second."""
    engine = create_engine(url)
    with db_lock(engine, key, timeout=None):  # the first connection alone takes a dozen round trips
        pass
    lock = db_lock(engine, key, timeout=1)

    def take() -> None:
        while not lock.acquire():
            pass

    return Lock(take, lock.release)


def rate(make: Make, url: str, section: float, seconds: float = 3.0) -> float:
    """Sections a second of a group that wants one key."""
    clients, _ = together(make, url, [Told("hot")] * SIZE, section, seconds)
    return crowd_figures(clients, seconds, 0.0)["rate"]


def main() -> int:
    """Measure and print; 1 if a figure misses its target."""
    rounds = int(os.environ.get("CROWDS", "3"))
    table = Table("database", "round trip", "sections/s", "ratio to session lock", "impatient: sections/s")
    missed = list[str]()
    with places() as urls:
        for name, session in (("PostgreSQL", advisory), ("MariaDB", get_lock)):
            address = make_url(urls[name])
            for distance in DISTANCES:
                with Proxy(0, address.port or 0) as proxy:
                    proxy.delay = distance
                    url = address.set(port=proxy.port).render_as_string(hide_password=False)
                    pairs = [(rate(sqlalchemy_face, url, SECTION), rate(session, url, SECTION)) for _ in range(rounds)]
                    long = [rate(impatient, url, LONG_SECTION, 5.0) for _ in range(rounds)]
                ratio = statistics.median(mine / other for mine, other in pairs)
                middle = statistics.median(mine for mine, _ in pairs)
                given = statistics.median(long)
                missed += [f"{name} at {distance * 1e3:g} ms"] * (ratio < 0.5 or given < 0.5 / LONG_SECTION)
                table.add_row(name, f"{distance * 1e3:g} ms", f"{middle:.1f}", f"{ratio:.2f}", f"{given:.1f}")
            table.add_section()
    console = Console(width=110)
    console.print(table)
    console.print("all targets reached" if not missed else f"[red]missed: {', '.join(missed)}")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
