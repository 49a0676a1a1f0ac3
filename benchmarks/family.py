"""What the members of the family cost, as ratios to a plain lock in the same run.

Uncontended cycles in interleaved rounds; the wait of a writer under a flood of readers; a reader beside a thousand.
Run as part of `make bench`, or `python -m benchmarks.family`.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from contextvars import Context

from rich.console import Console
from rich.table import Table
from sqlalchemy import Engine, create_engine

from benchmarks.places import places
from benchmarks.uncontended import ROUNDS, Candidate, measure
from sqlalchemy_dblock import db_leader, db_lock, db_rwlock, db_semaphore

TARGETS = {"read": 1.3, "permit": 1.3, "leader": 1.3, "write": 1.6, "read after write": None}
"""Longest time of a cycle, in those of a plain lock."""
SECTION = 0.005
"""Seconds that a reader of the flood stays."""
READERS = 1000
PROCESSES = 20


def main() -> int:
    """Measure and print; 1 if a figure misses its target."""
    table = Table("the family", "value", "target")
    missed = False
    with places() as urls:
        for name, url in urls.items():
            engine = create_engine(url)
            for what, ratio in uncontended(engine).items():
                target = TARGETS[what]
                reached = target is None or ratio <= target
                missed |= not reached
                shown = "" if target is None else f"<= {target}" if reached else f"[red]<= {target} missed"
                table.add_row(f"{what} ({name}), in cycles of a lock", f"{ratio:.2f}", shown)
            waits = flood(engine)
            reached = max(waits) <= SECTION + 0.05
            table.add_row(
                f"a writer's wait under a flood of readers ({name}), the median and the longest of {len(waits)}",
                f"{1e3 * statistics.median(waits):.0f} and {1e3 * max(waits):.0f} ms",
                f"<= {1e3 * (SECTION + 0.05):.0f} ms" + ("" if reached else " missed"),
            )
            slower = crowd(engine)
            table.add_row(
                f"a reader beside {READERS} of {PROCESSES} processes ({name}), in cycles of one alone",
                f"{slower:.2f}",
                "< 2",
            )
            missed |= not reached or slower >= 2
            engine.dispose()
    Console(width=130).print(table)
    return int(missed)


def uncontended(engine: Engine) -> dict[str, float]:
    """Time of a cycle of each, in those of a lock."""
    rw, semaphore = db_rwlock(engine, "rw"), db_semaphore(engine, "semaphore", 5)
    leader, mixed = db_leader(engine, "leader"), db_rwlock(engine, "mixed")
    lock = db_lock(engine, "lock")
    read, write, other_read, other_write = rw.read(), db_rwlock(engine, "w").write(), mixed.read(), mixed.write()
    candidates = [
        Candidate("lock", cycles(lambda: _block(lock))),
        Candidate("read", cycles(lambda: _block(read))),
        Candidate("write", cycles(lambda: _block(write))),
        Candidate("permit", cycles(lambda: _block(semaphore))),
        Candidate("leader", cycles(lambda: _block(leader))),
        Candidate("read after write", cycles(lambda: _blocks(other_write, other_read))),
    ]
    rates = measure(candidates, int(os.environ.get("ROUNDS", ROUNDS)))
    found = {
        name: statistics.median(a / b for a, b in zip(rates["lock"], rate, strict=True))
        for name, rate in rates.items()
        if name != "lock"
    }
    found["read after write"] -= found["write"]
    return found


def _block(lock: object) -> None:
    with lock:  # type: ignore[attr-defined]
        pass


def _blocks(*locks: object) -> None:
    for lock in locks:
        _block(lock)


def cycles(cycle: Callable[[], object]) -> Callable[[int], None]:
    def run(count: int) -> None:
        for _ in range(count):
            cycle()

    return run


def flood(engine: Engine, flows: int = 8, writes: int = 20) -> list[float]:
    """How long a writer waits while threads read without a pause, each for a section."""
    rw, over = db_rwlock(engine, "flood", timeout=None), threading.Event()

    def reads() -> None:
        while not over.is_set():
            with rw.read():
                time.sleep(SECTION)

    threads = [threading.Thread(target=reads) for _ in range(flows)]
    for thread in threads:
        thread.start()
    waits = []
    for _ in range(writes):
        time.sleep(0.05)
        begun = time.perf_counter()
        with rw.write():
            waits.append(time.perf_counter() - begun)
    over.set()
    for thread in threads:
        thread.join()
    return waits


def crowd(engine: Engine) -> float:
    """Time of a reader's cycle beside those of many processes, in cycles of one alone."""
    read = db_rwlock(engine, "crowd").read()
    alone = cycles(lambda: _block(read))
    alone(20)
    singles = [_took(alone)]
    url = engine.url.render_as_string(hide_password=False)
    staying = [
        subprocess.Popen(
            [sys.executable, "-m", "benchmarks.family", url], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        for _ in range(PROCESSES)
    ]
    for process in staying:
        assert process.stdout is not None
        _ = process.stdout.readline()
    many = _took(alone)
    for process in staying:
        _ = process.communicate()
    singles.append(_took(alone))
    return many / statistics.mean(singles)


def _took(cycle: Callable[[int], None]) -> float:
    begun = time.perf_counter()
    cycle(100)
    return time.perf_counter() - begun


def stay(url: str) -> None:
    """Be some of the many readers until the input ends."""
    engine = create_engine(url)
    contexts = [Context() for _ in range(READERS // PROCESSES)]  # each is a flow of its own
    with ExitStack() as stack:
        for context in contexts:
            lock = db_rwlock(engine, "crowd").read()
            _ = context.run(lock.acquire)
            _ = stack.callback(context.run, lock.release)
        print(flush=True)
        _ = sys.stdin.read()
    engine.dispose()


if __name__ == "__main__":
    if sys.argv[1:]:
        stay(sys.argv[1])
    else:
        sys.exit(main())
