"""What a contended lock costs beside its peers: the session lock, a trial in bare SQL, redis-py, a bare cursor.

Run as part of `make bench`. All candidates of a line are measured in turn, in the same run, and medians taken; only the
ratios travel. With Redis every command is on disk before it answers (`appendfsync always`), as a take is here.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import Any

import psycopg
from rich.console import Console
from rich.table import Table
from sqlalchemy import create_engine
from sqlalchemy.engine import make_url

from benchmarks.contended import Maker, crowd, ours, theirs
from benchmarks.handoff import between_processes, tails
from benchmarks.places import places
from benchmarks.trial import trial
from dblock.core.acquire.request import Request
from dblock.core.statements import DIALECTS
from dblock.core.statements.base import rendered
from sqlalchemy_dblock import db_lock
from tests.support.servers import free_port

ROUNDS = int(os.environ.get("ROUNDS", "5"))
SECONDS = 1.5
CYCLES = 300


def main() -> int:
    """Measure and print; 1 if a figure misses its target."""
    table = Table("", "session lock", "trial, bare SQL", "redis, AOF always", "dblock", "ratio", "target")
    missed = list[str]()

    def line(name: str, figures: dict[str, str], ratio: float, target: float, *, least: bool = True) -> None:
        reached = ratio >= target if least else ratio <= target
        missed.extend([] if reached else [name])
        sign = ">=" if least else "<="
        row = [figures.get(column, "") for column in ("session", "trial", "redis", "dblock")]
        table.add_row(name, *row, f"{ratio:.2f}", f"{sign} {target:g}" if reached else f"[red]{sign} {target:g} missed")

    with places() as urls, _redis() as port:
        url, mysql = urls["PostgreSQL"], urls["MariaDB"]
        makers: dict[str, Maker] = {"session": theirs, "trial": trial, "dblock": ours}
        _hand_offs(line, url, makers)
        _crowds(line, url, makers)
        if port is not None:
            _own_keys(line, url, port)
        _alone(line, url)
        _mariadb(line, mysql)
    console = Console(width=140)
    console.print(table)
    console.print("all targets reached" if not missed else f"[red]missed: {'; '.join(missed)}")
    return 1 if missed else 0


Line = Callable[..., None]


def _hand_offs(line: Line, url: str, makers: dict[str, Maker]) -> None:
    times: dict[str, list[float]] = {name: [] for name in makers}
    for _ in range(ROUNDS):
        for name, make in makers.items():
            times[name] += between_processes(make, url)
    figures = {name: f"{tails(each)[0] * 1e3:.2f} ms" for name, each in times.items()}
    p50 = {name: tails(each)[0] for name, each in times.items()}
    line("hand-off p50, x session lock", figures, p50["dblock"] / p50["session"], 2.3, least=False)
    line("the same, x trial", figures, p50["dblock"] / p50["trial"], 1.15, least=False)


def _crowds(line: Line, url: str, makers: dict[str, Maker]) -> None:
    for size, section in ((32, 0.005), (8, 0.0), (32, 0.0)):
        rounds = [
            {name: crowd(make, url, size, section, SECONDS) for name, make in makers.items()} for _ in range(ROUNDS)
        ]
        rates = {name: statistics.median(each[name].rate for each in rounds) for name in makers}
        tails_ = {name: statistics.median(each[name].tail for each in rounds) for name in makers}
        figures = {name: f"{rates[name]:,.0f}/s, {tails_[name]:.2f}" for name in makers}
        what = f"{size} x {section * 1e3:.0f} ms"
        if section:
            line(f"{what}: rate, x session lock", figures, rates["dblock"] / rates["session"], 0.85)
        line(f"{what}: rate, x trial", figures, rates["dblock"] / rates["trial"], 0.9)
        line(f"{what}: p99 / mean", figures, tails_["dblock"], 1.25 if section else 2.5, least=False)


def _own_keys(line: Line, url: str, port: int) -> None:
    rounds = [(_together(_redis_key, port), _together(_own_key, url)) for _ in range(ROUNDS)]
    redis, mine = (statistics.median(each) for each in zip(*rounds, strict=True))
    figures = {"redis": f"{redis:,.0f}/s", "dblock": f"{mine:,.0f}/s"}
    line("8 clients, own keys, x redis", figures, mine / redis, 1.0)


def _alone(line: Line, url: str) -> None:
    """One client, against the same two statements by a bare cursor."""
    bare, faces = _statements(url), {"": (_own_key(url, 0), 0.92), " by Django": (_django_key(url), 0.85)}
    rounds = [[_timed(bare), *(_timed(cycle) for cycle, _ in faces.values())] for _ in range(3 * ROUNDS)]
    for n, (face, (_, target)) in enumerate(faces.items(), 1):
        seconds = statistics.median(each[n] for each in rounds)
        ratio = statistics.median(each[0] / each[n] for each in rounds)
        figures = {"trial": "(the same statements)", "dblock": f"{CYCLES / seconds:,.0f}/s"}
        line(f"uncontended{face}, x bare cursor", figures, ratio, target)


def _mariadb(line: Line, url: str) -> None:
    rounds = [(crowd(theirs, url, 32, 0.005, SECONDS), crowd(ours, url, 32, 0.005, SECONDS)) for _ in range(ROUNDS)]
    theirs_, mine = (statistics.median(each[n].rate for each in rounds) for n in (0, 1))
    line("MariaDB 32 x 5 ms: rate", {"session": f"{theirs_:,.0f}/s", "dblock": f"{mine:,.0f}/s"}, mine, 140)
    times = [(tails(between_processes(theirs, url))[0], tails(between_processes(ours, url))[0]) for _ in range(ROUNDS)]
    theirs_, mine = (statistics.median(each[n] for each in times) * 1e3 for n in (0, 1))
    figures = {"session": f"{theirs_:.2f} ms", "dblock": f"{mine:.2f} ms"}
    line("MariaDB hand-off p50, ms", figures, mine, 2.0, least=False)


def _timed(cycle: Callable[[], None]) -> float:
    begun = time.perf_counter()
    for _ in range(CYCLES):
        cycle()
    return time.perf_counter() - begun


def _own_key(url: Any, number: int) -> Callable[[], None]:
    return _cycle(db_lock(create_engine(url), f"own {number}"))


def _cycle(lock: Any) -> Callable[[], None]:
    """Take and give back, which has been done often enough to be prepared."""

    def cycle() -> None:
        with lock:
            pass

    for _ in range(20):
        cycle()
    return cycle


def _django_key(url: str) -> Callable[[], None]:
    import django
    from django.conf import settings

    place = make_url(url)
    database = {"HOST": place.host, "PORT": place.port, "USER": place.username, "NAME": place.database}
    engine = {"ENGINE": "django.db.backends.postgresql"}
    settings.configure(DATABASES={"default": database | engine}, INSTALLED_APPS=["dblock"])
    django.setup()
    from dblock import db_lock as django_lock

    return _cycle(django_lock("own by Django"))


def _redis_key(port: Any, number: int) -> Callable[[], None]:
    import redis

    client = redis.Redis(port=port)

    def cycle() -> None:
        with client.lock(f"own {number}", timeout=30):
            pass

    cycle()
    return cycle


def _statements(url: str) -> Callable[[], None]:
    """The take and the release, prepared, over a bare psycopg cursor."""
    connection = psycopg.connect(url.replace("+psycopg", ""), autocommit=True, prepare_threshold=0)
    cursor, dialect = connection.cursor(), DIALECTS["postgresql"]
    request = Request("bare", 30.0, 30.0, "", 1, "", "host", 1, "thread", "program", "")
    texts = [rendered(each.sql, "pyformat")[0] for each in (dialect.create, dialect.take, dialect.release)]
    create, take, release = texts

    def cycle(text: str = take) -> None:
        known = request.parameters(request.new_owner())
        [(fence,)] = cursor.execute(text, known).fetchall()
        cursor.execute(release, {**known, "fence": fence, "count": 1}).fetchall()

    cycle(create)
    return cycle


def _together(make: Callable[[Any, int], Callable[[], None]], where: Any) -> float:
    """Cycles a second of eight processes with a key each."""
    counts: Any = multiprocessing.Queue()
    start: Any = multiprocessing.Barrier(8)
    members = [multiprocessing.Process(target=_member, args=(make, where, n, start, counts)) for n in range(8)]
    for member in members:
        member.start()
    total = sum(counts.get(timeout=60) for _ in members)
    for member in members:
        member.join()
    return float(total / SECONDS)


def _member(make: Callable[[Any, int], Callable[[], None]], where: Any, number: int, start: Any, counts: Any) -> None:
    cycle, count = make(where, number), 0
    start.wait()
    end = time.monotonic() + SECONDS
    while time.monotonic() < end:
        cycle()
        count += 1
    counts.put(count)


@contextlib.contextmanager
def _redis() -> Iterator[int | None]:
    """The port of a private Redis that is on disk before it answers; None where none is installed."""
    program = shutil.which("redis-server")
    if program is None:
        yield None
        return
    port = free_port()
    with tempfile.TemporaryDirectory() as directory:
        options = f"--port {port} --bind 127.0.0.1 --dir {directory} --save --appendonly yes --appendfsync always"
        server = subprocess.Popen([program, *options.split()], stdout=subprocess.DEVNULL)
        try:
            time.sleep(1.0)
            yield port
        finally:
            server.terminate()
            server.wait()


if __name__ == "__main__":
    sys.exit(main())
