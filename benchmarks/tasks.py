"""What `locked_task` costs: its own time for each task beside the lock, and what a thousand busy tasks cost all others.

The first is measured in one process, where Celery's tracer runs a task as a worker's child does: a bare task, one whose
body takes the lock itself, and a locked one, in turns. The second with two workers of four processes on a broker and a
database of their own: how many unrelated tasks a second are done while a thousand tasks of a key that somebody holds go
back to the broker and come again, against the same without them, in turns. Run it as `make bench`.
"""

from __future__ import annotations

import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from celery import Celery
from celery.app.trace import build_tracer
from rich.console import Console
from rich.table import Table
from sqlalchemy import Engine, create_engine

from dblock.celery import locked_task
from sqlalchemy_dblock import db_lock, metadata
from tests.celery import locked
from tests.support.servers import PostgreSQL, Redis, running

ROUNDS, TASKS = 15, 200
BUSY, OTHERS = 1000, 3000


def main() -> int:
    """Measure, print; 1 if a figure misses its target."""
    rounds = int(os.environ.get("ROUNDS", ROUNDS))
    console = Console(width=110)
    with running(PostgreSQL) as database, running(Redis) as broker, tempfile.TemporaryDirectory() as directory:
        url = f"postgresql+psycopg://dblock@127.0.0.1:{database.port}/postgres"
        engine = create_engine(url)
        metadata.create_all(engine)
        own = own_time(engine, rounds)
        table = Table("what", "ms a task (median)", "target")
        for name, seconds in own.items():
            table.add_row(name, f"{1e3 * seconds:.3f}", "")
        queue = own["locked, scope queue"] - own["bare"]
        mine = own["locked"] - own["a lock in its body"]
        table.add_row("[b]locked beyond the lock itself", f"[b]{1e3 * mine:.3f}", "< 1")
        table.add_row("sent and run with scope queue, beyond a bare task", f"{1e3 * queue:.3f}", "")
        console.print(table)
        assert isinstance(broker, Redis)
        ratios = beside_busy_ones(engine, broker, Path(directory), max(3, rounds // 3), console)
        engine.dispose()
    ratio = statistics.median(ratios)
    console.print(f"unrelated tasks beside {BUSY} busy ones: {ratio:.2f} of their rate alone (>= 0.90)")
    return int(mine >= 0.001 or ratio < 0.9)


def own_time(engine: Engine, rounds: int) -> dict[str, float]:
    """Seconds for one task of each kind."""
    app = Celery("bench", broker="memory://", backend="cache+memory://")
    app.set_current()

    @app.task(shared=False)
    def bare(number: int) -> int:
        return number

    @app.task(shared=False)
    def inside(number: int) -> int:
        with db_lock(engine, f"inside:{number}", timeout=0):
            return number

    @locked_task("locked:{number}", engine=engine, app=app)
    def outside(number: int) -> int:
        return number

    @locked_task("queue:{number}", engine=engine, app=app, scope="queue")
    def queued(number: int) -> int:
        return number

    def runs(task: Any, *, send: bool) -> Callable[[], None]:
        trace = build_tracer(task.name, task, app=app)
        sent = list[dict[str, Any]]()
        # Where the message would go, it is dropped: the broker's part is the same for all.
        app.amqp.send_task_message = lambda _producer, _name, message, headers=None, **_: sent.append(
            {**message.headers, **(headers or {})}
        )

        def once() -> None:
            for number in range(TASKS):
                request: dict[str, Any] = {"id": str(number), "delivery_info": {}, "retries": 0}
                if send:
                    _ = task.delay(number % 10)
                    request |= sent.pop()
                done = trace(request["id"], (number % 10,), {}, request)
                assert done.info is None, done.retval.traceback

        return once

    kinds = {
        "bare": runs(bare, send=False),
        "a lock in its body": runs(inside, send=False),
        "locked": runs(outside, send=False),
        "locked, scope queue": runs(queued, send=True),
    }
    times: dict[str, list[float]] = {name: [] for name in kinds}
    for _ in range(rounds + 1):
        for name, run in kinds.items():
            began = time.perf_counter()
            run()
            times[name].append((time.perf_counter() - began) / TASKS)
    return {name: statistics.median(each[1:]) for name, each in times.items()}


def beside_busy_ones(engine: Engine, broker: Redis, directory: Path, rounds: int, console: Console) -> list[float]:
    """Rates of unrelated tasks with busy ones beside them, as ratios to those before."""
    url = engine.url.render_as_string(hide_password=False)
    told = {"broker_url": broker.url, "result_backend": "disabled://", "worker_prefetch_multiplier": 4}
    locked.use(told, url)
    locked.RUNS.metadata.create_all(engine)
    environment = {**os.environ, "CELERY_TEST": json.dumps(told), "CELERY_TEST_DATABASE": url}
    ratios = []
    for _ in range(rounds):
        _ = _client(broker).flushall()
        with _workers(environment, directory):
            _ = _rate(broker)
            alone = _rate(broker)
            with db_lock(engine, "retry run held", label="for long"):
                for _ in range(BUSY):
                    _ = locked.TASKS["retry", "run"].delay("held")
                time.sleep(10)  # all of them have been tried, and wait for their next
                beside = _rate(broker)
        ratios.append(beside / alone)
        console.print(f"{alone:,.0f} unrelated tasks/s alone, {beside:,.0f} beside {BUSY} busy ones")
    return ratios


@contextlib.contextmanager
def _workers(environment: dict[str, str], directory: Path) -> Iterator[None]:
    command = [sys.executable, "-m", "celery", "-A", "tests.celery.locked", "worker", "-c", "4", "-l", "WARNING"]
    with (directory / "log").open("ab") as log:
        workers = [
            subprocess.Popen([*command, "-n", f"w{number}@%h"], env=environment, stdout=log, stderr=log)
            for number in range(2)
        ]
    try:
        yield
    finally:
        for worker in workers:
            worker.terminate()
        for worker in workers:
            _ = worker.wait(30)


def _rate(broker: Redis) -> float:
    client = _client(broker)
    _ = client.delete("done")
    began = time.perf_counter()
    for _ in range(OTHERS):
        _ = locked.count.delay()
    while int(client.get("done") or 0) < OTHERS:
        time.sleep(0.01)
    return OTHERS / (time.perf_counter() - began)


def _client(broker: Redis) -> Any:
    import redis

    return redis.Redis(port=broker.port)


if __name__ == "__main__":
    sys.exit(main())
