"""Eight producers send tasks to a worker and a beat: no broker to install, no server at all.

Messages are files, results are files, locks are rows of one SQLite database. Run it as `make demo APP=celery`; the exit
status is 1 if anything that the tasks have counted was lost.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.table import Table

SKUS = ("apples", "pears", "plums", "quinces")
PRODUCERS, EACH = 8, 10
SHOWN = {"PENDING": "waiting", "STARTED": "running", "RETRY": "back", "SUCCESS": "done", "FAILURE": "failed"}


def main() -> int:
    console = Console()
    with tempfile.TemporaryDirectory(prefix="dblock-demo-") as directory, ExitStack() as stack:
        _set_up(Path(directory))
        from example_project.shop.models import Item

        for sku in SKUS:
            Item.objects.create(sku=sku, name=sku.title(), stock=0)
        console.print(
            f"[bold]{PRODUCERS} producers[/] send {PRODUCERS * EACH} tasks on {len(SKUS)} shelves to a worker of four "
            "processes; beat has the tables tidied up. All on files: no broker, no server."
        )
        app = [sys.executable, "-m", "celery", "-A", "example_project.celery"]
        log = stack.enter_context((Path(directory) / "log").open("wb"))
        worker = stack.enter_context(_running([*app, "worker", "-c", "4", "--loglevel=INFO"], log))
        stack.enter_context(_running([*app, "beat", "--schedule", f"{directory}/beat"], log))
        producers = [
            subprocess.Popen(
                [sys.executable, "-m", "example_project.celery_demo", "produce"], stdout=subprocess.PIPE, text=True
            )
            for _ in range(PRODUCERS)
        ]
        sent = [tuple(entry) for each in producers for entry in json.loads(each.communicate()[0])]
        deadline = time.monotonic() + 120
        gone_back = Counter[str]()
        with Live(console=console, refresh_per_second=5) as live:
            while True:
                table, open_ = _table(sent, gone_back)
                live.update(table)
                if not open_ or worker.poll() is not None or time.monotonic() > deadline:
                    break
                time.sleep(0.2)
        counted = sum(Item.objects.values_list("stock", flat=True))
    expected = sum(kind != "audit" for kind, _, _ in sent)
    if open_ or counted != expected:
        console.print(f"[bold red]{open_} tasks did not end; {counted} of {expected} items were counted.")
        return 1
    console.print(f"[bold green]All tasks ended; {counted} of {expected} items were counted, none lost.")
    return 0


def produce() -> None:
    """Send some tasks; what was sent, as JSON."""
    import django

    django.setup()
    from example_project.celery import app
    from example_project.shop import tasks

    app.set_current()
    sent = []
    for _ in range(EACH):
        sku = random.choice(SKUS)
        calls: list[tuple[Any, Any]] = [
            (tasks.restock, (sku, 1)),
            (tasks.return_item, (sku,)),
            (tasks.audit, (sku,)),
        ]
        task, arguments = random.choice(calls)
        result = task.apply_async(arguments, {"pause": random.uniform(0.05, 0.3)})
        sent.append((task.name.rpartition(".")[2], sku, result.id))
        time.sleep(random.uniform(0.0, 0.2))
    print(json.dumps(sent))


def _set_up(directory: Path) -> None:
    for name in ("messages", "control", "results"):
        (directory / name).mkdir()
    os.environ |= {
        "DJANGO_SETTINGS_MODULE": "example_project.settings",
        "DATABASE": "sqlite",
        "DATABASE_NAME": str(directory / "shop.sqlite3"),
        "CELERY_BROKER_URL": "filesystem://",
        "CELERY_DIRECTORY": str(directory),
    }
    import django

    django.setup()
    from django.core.management import call_command

    call_command("migrate", verbosity=0)


@contextmanager
def _running(command: list[str], log: object) -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen(command, stdout=log, stderr=log)  # type: ignore[call-overload]
    try:
        yield process
    finally:
        process.terminate()
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()


def _table(sent: list[tuple[str, str, str]], gone_back: Counter[str]) -> tuple[Table, int]:
    """What has become of the tasks of each key so far, and how many have not ended."""
    from dblock.celery import skipped
    from example_project.celery import app

    states: dict[str, Counter[str]] = {}
    for kind, sku, number in sent:
        key = f"{'audit' if kind == 'audit' else 'stock'}:{sku}"
        found = app.backend.get_task_meta(number)
        state = "skipped" if skipped(found.get("result")) else SHOWN[found["status"]]
        if found["status"] == "RETRY":
            gone_back[number] = 1
        states.setdefault(key, Counter())[state] += 1
        states[key]["retried"] += gone_back[number]
    table = Table()
    table.add_column("key", no_wrap=True, min_width=13)
    columns = ("waiting", "running", "back", "done", "skipped", "failed", "retried")
    for column in columns:
        table.add_column(column, justify="right")
    for key in sorted(states):
        table.add_row(key, *(str(states[key][column] or "") for column in columns))
    open_ = sum(each[column] for each in states.values() for column in ("waiting", "running", "back"))
    return table, open_


if __name__ == "__main__":
    if sys.argv[1:]:
        produce()
    else:
        sys.exit(main())
