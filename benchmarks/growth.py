"""What more databases give: the keys that move, the rate with one to three servers, and what a moving key costs.

The keys that move are counted in a simulation; the others are measured on PostgreSQL servers of this machine, which
share its processors with the clients: so the work that each server does for a cycle says more than the rate. Run as
part of `make bench`, or `python -m benchmarks.growth`.
"""

from __future__ import annotations

import os
import random
import statistics
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from sqlalchemy import create_engine

from benchmarks.uncontended import Candidate, measure
from sqlalchemy_dblock import create_tables, db_lock, rendezvous
from tests.support.servers import PostgreSQL, running

ROUNDS = int(os.environ.get("ROUNDS", "5"))
KEYS = 100_000
SERVERS = 3
CLIENTS = 4
SECONDS = 3.0
MOVING = 2.7
"""Longest time of a cycle of a moving key, in cycles of one that does not move."""


def main() -> int:
    """Measure and print; 1 if a figure misses its target."""
    Console(width=120).print(simulated())
    with ExitStack() as opened:
        servers = [opened.enter_context(running(PostgreSQL)) for _ in range(SERVERS)]
        urls = [f"postgresql+psycopg://dblock@127.0.0.1:{server.port}/postgres" for server in servers]
        for url in urls:
            engine = create_engine(url)
            create_tables(engine)
            engine.dispose()
        table = Table(
            "PostgreSQL servers", "cycles/s", "of the servers' time, ms a cycle", "busiest server's, ms a cycle"
        )
        for count in range(1, SERVERS + 1):
            rounds = [rate(urls[:count], servers[:count]) for _ in range(ROUNDS)]
            rates, all_, most = (statistics.median(column) for column in zip(*rounds, strict=True))
            table.add_row(str(count), f"{rates:,.0f}", f"{1e3 * all_:.2f}", f"{1e3 * most:.2f}")
        Console(width=120).print(table)
        ratio = moving(urls)
    reached = ratio <= MOVING
    Console().print(
        f"a moving key: {ratio:.2f} cycles of another one, <= {MOVING}" + ("" if reached else " [red]missed[/]")
    )
    return int(not reached)


def simulated() -> Table:
    """How many keys move when a database is added or removed, and how evenly they are spread."""
    keys = [f"stock:{number}" for number in range(KEYS)]
    table = Table("databases", "share of keys that move", "by hash modulo the number", "fewest and most keys of one")
    for count in range(1, 6):
        before, after = (rendezvous([f"db{number}" for number in range(n)]) for n in (count, count + 1))
        where = Counter(map(after, keys))
        moved = sum(before(key) != after(key) for key in keys) / KEYS
        modulo = 1 - sum(_number(key, count) == _number(key, count + 1) for key in keys) / KEYS
        spread = f"{min(where.values()) / KEYS:.1%}, {max(where.values()) / KEYS:.1%}"
        table.add_row(f"{count} to {count + 1}, or back", f"{moved:.1%}", f"{modulo:.1%}", spread)
    return table


def _number(key: str, count: int) -> int:
    return random.Random(key).getrandbits(62) % count


def rate(urls: list[str], servers: list[PostgreSQL]) -> tuple[float, float, float]:
    """Cycles a second of several clients on keys of their own; seconds of the servers for one: all, and the busiest."""
    clients = [
        subprocess.Popen(
            [sys.executable, "-m", "benchmarks.growth", *urls], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        for _ in range(CLIENTS)
    ]
    for client in clients:
        assert client.stdout is not None
        _ = client.stdout.readline()  # it is warm
    before = [_seconds(server) for server in servers]
    cycles = sum(int(client.communicate("go\n")[0]) for client in clients)
    used = [_seconds(server) - then for server, then in zip(servers, before, strict=True)]
    return cycles / SECONDS, sum(used) / cycles, max(used) / cycles


def _seconds(server: PostgreSQL) -> float:
    """Seconds of processors that the server and its sessions have used, ended ones too."""
    assert server.process is not None
    tree, ticks = [server.process.pid], 0.0
    while tree:
        pid = tree.pop()
        stat = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        mine = stat[11:15] if pid == server.process.pid else stat[11:13]  # the server counts those that have ended
        ticks += sum(map(int, mine))
        tree += map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split())
    return ticks / os.sysconf("SC_CLK_TCK")


def client(urls: list[str]) -> None:
    """Take and give back random keys for so long, once told to."""
    place = rendezvous({f"db{number}": create_engine(url) for number, url in enumerate(urls)})
    keys = [f"{os.getpid()}:{number}" for number in range(100)]

    def cycle(key: str) -> None:
        with db_lock(place, key):
            pass

    for key in keys:
        cycle(key)
    print("warm", flush=True)
    _ = sys.stdin.readline()
    over, cycles = time.monotonic() + SECONDS, 0
    while time.monotonic() < over:
        cycle(random.choice(keys))
        cycles += 1
    print(cycles, flush=True)


def moving(urls: list[str]) -> float:
    """Time of a cycle of a key that is held in two databases, in cycles of one that is in one."""
    engines = [create_engine(url) for url in urls[:2]]
    plain = db_lock(rendezvous({"a": engines[0]}), "plain")
    both = db_lock(rendezvous({"b": engines[1]}, before={"a": engines[0]}), "moving")
    rates = measure([Candidate(name, _cycles(lock)) for name, lock in (("plain", plain), ("moving", both))], ROUNDS)
    for engine in engines:
        engine.dispose()
    return statistics.median(plain / both for plain, both in zip(rates["plain"], rates["moving"], strict=True))


def _cycles(lock: Any) -> Callable[[int], None]:
    def run(count: int) -> None:
        for _ in range(count):
            with lock:
                pass

    return run


if __name__ == "__main__":
    if len(sys.argv) > 1:
        client(sys.argv[1:])
    else:
        sys.exit(main())
