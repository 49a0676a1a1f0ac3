"""What observing costs a cycle of take and release that nobody contends: its processor time, as a share of the cycle.

An observer only computes, so that its cost is the processor time of the process, all of its threads, which a shared
machine disturbs less than time itself. (What a server spends on the rows of a history comes on top, once a second.)
Each short round is compared with those that nobody observed just before and after it, and the median of the
differences put into relation to the median time of a cycle, in the same run. SQLite, which waits for no server and here
for no disk, has no target: its cycle is five times as short. `LOCAL=1`: SQLite alone. Part of `make bench`.
"""

from __future__ import annotations

import contextlib
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import NamedTuple

from prometheus_client import CollectorRegistry
from rich.console import Console
from rich.table import Table
from sqlalchemy import Engine, create_engine

from benchmarks.places import places
from dblock.contrib import opentelemetry, prometheus
from dblock.core.observing.observers import observers
from dblock.operating import history
from sqlalchemy_dblock import db_lock, metadata, observe
from sqlalchemy_dblock.store import store_for

ROUNDS, CYCLES = 20, prometheus.PENDING // 2
"""So many cycles that their events are counted within the round: what is put aside would not be paid for."""
MOST = 0.05
Begin = Callable[[Engine], Callable[[], None]]


class Cost(NamedTuple):
    """Seconds a cycle."""

    passed: float
    computed: float
    more: float
    """Of `computed`, than with nobody observing."""


def main() -> int:
    """Measure and print; 1 if a figure misses its target."""
    table = Table("observing", "µs a cycle", "of the processor", "cost", "target")
    missed = False
    with _places() as urls:
        for name, url in urls.items():
            costs = measured(url)
            nobody = costs["nobody"]
            for what, cost in costs.items():
                share = cost.more / nobody.passed
                target = f"< {MOST:.0%}" if what in {"Prometheus", "a history"} and name != "SQLite" else ""
                if target and share >= MOST:
                    missed, target = True, f"[red]{target} missed"
                table.add_row(
                    f"{what} ({name})",
                    f"{1e6 * cost.passed:,.0f}",
                    f"{1e6 * cost.computed:,.0f}",
                    f"{share:+.1%}",
                    target,
                )
            table.add_section()
    Console(width=110).print(table)
    return int(missed)


@contextlib.contextmanager
def _places() -> Iterator[dict[str, str]]:
    if not os.environ.get("LOCAL"):
        with places() as urls:
            yield urls
        return
    with tempfile.TemporaryDirectory() as directory:
        yield {"SQLite": f"sqlite:///{directory}/locks.sqlite3"}


def _nothing(event: object) -> None:
    """Hear of it."""


def _keep_history(engine: Engine) -> Callable[[], None]:
    store = store_for(engine)
    store.history = 10_000
    history.record()

    def stop() -> None:
        store.history = 0
        observers.clear()

    return stop


CANDIDATES: dict[str, Begin] = {
    "nobody": lambda _: lambda: None,
    "nobody, once more": lambda _: lambda: None,
    "a callback": lambda _: observe(_nothing),
    "Prometheus": lambda _: prometheus.instrument(registry=CollectorRegistry()),
    "OpenTelemetry, no SDK": lambda _: opentelemetry.instrument(),
    "a history": _keep_history,
}


def measured(url: str) -> dict[str, Cost]:
    """The medians, by candidate."""
    engine = create_engine(url)
    metadata.create_all(engine)

    def timed(begin: Begin) -> tuple[float, float]:
        end = begin(engine)
        with db_lock(engine, "stock:1"):  # what is made at first use
            pass
        start, process = time.perf_counter(), time.process_time()
        for _ in range(CYCLES):
            with db_lock(engine, "stock:1"):
                pass
        took = (time.perf_counter() - start) / CYCLES, (time.process_time() - process) / CYCLES
        end()
        return took

    rounds: dict[str, list[Cost]] = {name: [] for name in CANDIDATES}
    for _ in range(ROUNDS):
        for name, begin in CANDIDATES.items():
            before, (passed, computed), after = timed(CANDIDATES["nobody"]), timed(begin), timed(CANDIDATES["nobody"])
            rounds[name].append(Cost(passed, computed, computed - (before[1] + after[1]) / 2))
    engine.dispose()
    return {name: Cost(*map(statistics.median, zip(*costs, strict=True))) for name, costs in rounds.items()}


if __name__ == "__main__":
    sys.exit(main())
