"""The watchdog's cost: what it adds to a short hold, and what it takes to renew 10,000 leases.

Run as part of `make bench`. The first is a ratio of interleaved rounds with and without the watchdog; the second is one
statement, timed and counted on the server, against a tenth of the ttl of 30 s.
"""

from __future__ import annotations

import statistics
import sys
import time
from unittest import mock

from rich.console import Console
from rich.table import Table
from sqlalchemy import create_engine

from benchmarks.places import places
from benchmarks.uncontended import ROUNDS, Candidate, measure
from dblock.core import runtime
from dblock.core.protocol import tenures
from dblock.core.protocol.drive import drive
from dblock.core.runtime import current_flow
from sqlalchemy_dblock import db_lock
from sqlalchemy_dblock.store import store_for

LEASES = 10_000
TTL = 30.0


def main() -> int:
    """Measure and print; 1 if a figure misses its target."""
    table = Table("the watchdog", "value", "target")
    missed = False
    with places() as urls:
        for name, url in urls.items():
            rows = [
                (f"share of an uncontended cycle ({name})", cost := share(url), f"{cost:.1%}", "<= 10 %", cost <= 0.10)
            ]
            seconds = renewal(url)
            rows.append(
                (
                    f"one renewal of {LEASES:,} leases ({name})",
                    seconds,
                    f"{seconds:.2f} s",
                    "<= 3 s",
                    seconds <= TTL / 10,
                )
            )
            for what, _, value, target, reached in rows:
                table.add_row(what, value, target if reached else f"[red]{target} missed")
                missed |= not reached
    Console(width=110).print(table)
    return int(missed)


def share(url: str) -> float:
    """What the watchdog adds to a cycle of take and release."""
    engine = create_engine(url)
    lock = db_lock(engine, "bench")

    def kept(count: int) -> None:
        for _ in range(count):
            with lock:
                pass

    def unkept(count: int) -> None:
        with mock.patch.multiple(runtime.current.watchdog, add=_unwatched, discard=_given_back):
            kept(count)

    rates = measure([Candidate("unkept", unkept), Candidate("kept", kept)], ROUNDS)
    engine.dispose()
    return max(0.0, statistics.median(a / b for a, b in zip(rates["unkept"], rates["kept"], strict=True)) - 1)


def _unwatched(_: object) -> None:
    """In place of the watchdog's `add`."""


def _given_back(_: object) -> bool:
    """In place of its `discard`: nobody else has given the hold back."""
    return True


def renewal(url: str) -> float:
    """Seconds for one statement that renews many leases, which this flow holds."""
    engine = create_engine(url)
    store = store_for(engine)
    locks = [db_lock(engine, f"lease:{number}", ttl=TTL * 20) for number in range(LEASES)]
    for lock in locks:
        lock.acquire()
    leases = [(hold.tenure, TTL) for hold in current_flow().holds.values()]
    durations = []
    for _ in range(3):
        start = time.perf_counter()
        _, lapsed = drive(tenures.renew(store.database, leases, store.database.now() + 1))
        durations.append(time.perf_counter() - start)
        if lapsed is not None:
            raise SystemExit("some lease was not renewed")
    for lock in locks:
        lock.release()
    engine.dispose()
    return statistics.median(durations)


if __name__ == "__main__":
    sys.exit(main())
