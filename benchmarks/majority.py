"""What a lock in a majority of five servers costs: with all well, with one stopped, handed over; beside pottery.

Five PostgreSQL servers against five Redis servers, in memory and with every command on disk (`appendfsync always`), in
interleaved rounds of one run; "dblock, x this" is the median of the rounds' own ratios. pottery is measured if it is
installed. Run as part of `make bench`, or
`python -m benchmarks.majority`.
"""

from __future__ import annotations

import contextlib
import importlib
import itertools
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

from rich.console import Console
from rich.table import Table
from sqlalchemy import create_engine, text

from dblock.core.protocol.drive import drive
from dblock.majority import protocol
from sqlalchemy_dblock import create_tables, db_lock, db_quorum_lock
from tests.support.servers import PostgreSQL, free_port, running

ROUNDS = int(os.environ.get("ROUNDS", "5"))
CYCLES = 60
SECONDS = 2.0
SERVERS = 5
STOPPED = 1.3
"""Longest time of a cycle with a stopped minority, after its first failure, in those with all well."""
Make = Callable[[], AbstractContextManager[Any]]


def main() -> int:
    """Measure and print; 1 if a figure misses its target."""
    with ExitStack() as opened:
        makers = {"dblock, five PostgreSQL": (_ours(opened), _stop_ours)}
        if (made := _pottery(opened)) is not None:
            makers |= made
        table = Table(
            "five servers, one client",
            "cycles/s",
            "dblock, x this",
            "hand-overs/s",
            "dblock, x this",
            "with one stopped, x all well",
        )
        rates: dict[str, list[float]] = {name: [] for name in makers}
        turns: dict[str, list[float]] = {name: [] for name in makers}
        for _ in range(ROUNDS):
            for name, ((make, _), _) in makers.items():
                rates[name].append(CYCLES / timed(make))
                turns[name].append(hand_overs(make))
        slower = {}
        for name, ((make, processes), stop) in makers.items():
            ratios = []
            for _ in range(ROUNDS):
                for _ in range(20):  # it answers again
                    with contextlib.suppress(Exception), make():
                        time.sleep(0.02)
                well = timed(make)
                with stop(processes[-1]):
                    with contextlib.suppress(Exception), make():  # the first failure
                        pass
                    ratios.append(timed(make) / well)
            slower[name] = statistics.median(ratios)
        for name in makers:
            figures = []
            for found in (rates, turns):
                ours = found["dblock, five PostgreSQL"]
                times = statistics.median(our / its for our, its in zip(ours, found[name], strict=True) if its)
                figures += [f"{statistics.median(found[name]):,.0f}", f"{times:.2f}"]
            table.add_row(name, *figures, f"{slower[name]:.2f}")
    Console(width=120).print(table)
    reached = slower["dblock, five PostgreSQL"] <= STOPPED
    Console().print(f"with one stopped: <= {STOPPED}" if reached else f"[red]with one stopped: <= {STOPPED} missed")
    return int(not reached)


def timed(make: Make) -> float:
    """Seconds for so many cycles."""
    began = time.perf_counter()
    for _ in range(CYCLES):
        with make():
            pass
    return time.perf_counter() - began


def hand_overs(make: Make) -> float:
    """How often in a second two threads that want the same lock all the time take turns."""
    holders: list[int] = []
    end = time.perf_counter() + SECONDS

    def work() -> None:
        while time.perf_counter() < end:
            with contextlib.suppress(Exception), make():
                holders.append(threading.get_ident())

    threads = [threading.Thread(target=work) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return sum(one != other for one, other in itertools.pairwise(holders)) / SECONDS


def _ours(opened: ExitStack) -> tuple[Make, list[Any]]:
    servers = [opened.enter_context(running(PostgreSQL)) for _ in range(SERVERS)]
    engines = [create_engine(f"postgresql+psycopg://dblock@127.0.0.1:{each.port}/postgres") for each in servers]
    for engine in engines:
        create_tables(engine)
        store = db_lock(engine, "any")._place.store()
        _ = drive(protocol.standing(store.database, 30, store.database.now() + 5))
        with engine.begin() as connection:  # as if it had been there for long
            connection.execute(text("UPDATE locks SET acquired_at = '2000-01-01'"))
        _ = opened.callback(engine.dispose)
    return lambda: db_quorum_lock(engines, "k", ttl=30, timeout=30), servers


@contextmanager
def _stop_ours(server: PostgreSQL) -> Iterator[None]:
    assert server.process is not None
    pids = [server.process.pid]
    pids += map(int, subprocess.run(["pgrep", "-P", str(pids[0])], capture_output=True, check=False).stdout.split())
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    yield
    for pid in pids:
        os.kill(pid, signal.SIGCONT)


def _pottery(opened: ExitStack) -> dict[str, Any] | None:
    try:
        redlock: Any = importlib.import_module("pottery").Redlock
        from redis import Redis
    except ImportError:
        return None
    found: dict[str, Any] = {}
    for name, appending in (("pottery, five Redis in memory", "no"), ("pottery, five Redis, AOF always", "yes")):
        processes, clients = [], set()
        for _ in range(SERVERS):
            port, directory = free_port(), opened.enter_context(tempfile.TemporaryDirectory())
            program = shutil.which("redis-server")
            if program is None:
                return None
            command = [program, "--port", str(port), "--save", "", "--appendonly", appending]
            process = subprocess.Popen(
                [*command, "--appendfsync", "always", "--dir", directory], stdout=subprocess.DEVNULL
            )
            _ = opened.callback(process.wait)
            _ = opened.callback(process.kill)
            processes.append(process)
            clients.add(Redis(port=port, socket_timeout=1))
        time.sleep(1)

        def make(clients: set[Any] = clients) -> Any:
            return redlock(key="k", masters=clients, auto_release_time=30)

        found[name] = ((make, processes), _stop_redis)
    return found


@contextmanager
def _stop_redis(process: subprocess.Popen[bytes]) -> Iterator[None]:
    process.send_signal(signal.SIGSTOP)
    yield
    process.send_signal(signal.SIGCONT)


if __name__ == "__main__":
    sys.exit(main())
