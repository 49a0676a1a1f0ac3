"""Many processes, half of them Django and half plain SQLAlchemy, sell the last items of one stock.

First without the lock, then with it. Run it as `make demo [DB=sqlite|postgresql|mysql] [PROCS=8] [STOCK=200]`; the exit
status is 1 if the locked run sold more than there was.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import IO

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from example_project.seller import SKU
from tests.support.servers import MariaDB, MissingServer, PostgreSQL


@dataclass
class Run:
    """What one run of all sellers did."""

    name: str
    locked: bool
    sold: int = 0
    waits: list[float] = field(default_factory=list)


def main() -> int:
    kind = os.environ.get("DB") or "sqlite"
    sellers, stock = int(os.environ.get("PROCS") or 8), int(os.environ.get("STOCK") or 200)
    console = Console()
    if kind not in {"sqlite", "postgresql", "mysql"} or sellers < 2 or stock < 1:
        console.print("[red]usage: make demo [DB=sqlite|postgresql|mysql] [PROCS=8] [STOCK=200], at least 2 processes")
        return 2
    try:
        with _database(kind):
            console.print(
                f"[bold]{sellers} processes[/] ({sellers - sellers // 2} Django, {sellers // 2} SQLAlchemy) sell "
                f"[bold]{stock} items[/] over one {kind} database."
            )
            _set_up()
            runs = [Run("without the lock", locked=False), Run("with the lock", locked=True)]
            for run in runs:
                _sell(run, sellers, stock, console)
    except MissingServer as error:
        console.print(f"[red]{error}")
        return 2
    console.print(_summary(runs, stock))
    oversold = runs[1].sold - stock
    if oversold:
        console.print(f"[bold red]The locked run sold {runs[1].sold} of {stock} items.")
        return 1
    console.print(f"[bold green]With the lock exactly {stock} of {stock} items were sold, none twice.")
    return 0


@contextmanager
def _database(kind: str) -> Iterator[None]:
    """A private database of its own for the demo, named in the environment of the sellers."""
    os.environ["DATABASE"] = kind
    if kind == "sqlite":
        with tempfile.TemporaryDirectory(prefix="dblock-demo-") as directory:
            os.environ["DATABASE_NAME"] = f"{directory}/shop.sqlite3"
            os.environ["DEMO_URL"] = f"sqlite:///{directory}/shop.sqlite3"
            yield
        return
    server = PostgreSQL() if kind == "postgresql" else MariaDB()
    try:
        server.prepare()
        server.start()
        name, user = ("postgres", "dblock") if kind == "postgresql" else ("shop", "root")
        if isinstance(server, MariaDB):
            server.create_database(name)
        os.environ |= {"DATABASE_NAME": name, "DATABASE_USER": user, "DATABASE_PORT": str(server.port)}
        driver = "postgresql+psycopg" if kind == "postgresql" else "mysql+pymysql"
        os.environ["DEMO_URL"] = f"{driver}://{user}@127.0.0.1:{server.port}/{name}"
        yield
    finally:
        server.close()


def _set_up() -> None:
    import django

    os.environ["DJANGO_SETTINGS_MODULE"] = "example_project.settings"
    django.setup()
    from django.core.management import call_command

    call_command("migrate", verbosity=0)


def _sell(run: Run, sellers: int, stock: int, console: Console) -> None:
    from example_project.shop.models import Item, Sale

    Sale.objects.all().delete()
    Item.objects.update_or_create(sku=SKU, defaults={"name": "Last items", "stock": stock})
    command = [sys.executable, "-m", "example_project.seller"]
    processes = [
        subprocess.Popen(
            [*command, ("django", "sqlalchemy")[number % 2], *(["--lock"] if run.locked else [])],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for number in range(sellers)
    ]
    try:
        _watch(run, processes, stock, console)
        for process in processes:
            output, _ = process.communicate()
            if process.returncode:
                raise RuntimeError(f"a seller failed with status {process.returncode}")
            run.waits += json.loads(output)["waits"]
    finally:
        for process in processes:
            process.kill()


def _watch(run: Run, processes: list[subprocess.Popen[str]], stock: int, console: Console) -> None:
    from example_project.shop.models import Sale

    columns = (TextColumn("{task.description:<18}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console) as progress:
        task = progress.add_task(run.name, total=stock)
        for process in processes:
            if _pipe(process.stdout).readline() != "ready\n":
                raise RuntimeError("a seller did not start")
        for process in processes:
            _pipe(process.stdin).write("go\n")
            _pipe(process.stdin).flush()
        while any(process.poll() is None for process in processes):
            progress.update(task, completed=Sale.objects.count())
            time.sleep(0.1)
        run.sold = Sale.objects.count()
        progress.update(task, completed=run.sold)


def _pipe(pipe: IO[str] | None) -> IO[str]:
    assert pipe is not None
    return pipe


def _summary(runs: list[Run], stock: int) -> Table:
    table = Table("run", title=f"{stock} items")
    for heading in ("sold", "oversold", "wait p50", "wait p99"):
        table.add_column(heading, justify="right")
    for run in runs:
        oversold = run.sold - stock
        waits = statistics.quantiles(run.waits, n=100) if len(run.waits) > 1 else None
        table.add_row(
            run.name,
            str(run.sold),
            f"[bold {'red' if oversold else 'green'}]{oversold}",
            f"{waits[49] * 1000:.1f} ms" if waits else "–",
            f"{waits[98] * 1000:.1f} ms" if waits else "–",
        )
    return table


if __name__ == "__main__":
    sys.exit(main())
