"""A real worker with beat, on a real broker: a locked task, and the reaper on its schedule."""

from __future__ import annotations

import contextlib
import os
import re
import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.celery.conftest import Worker, django, python
from tests.support.lab import until
from tests.support.servers import Redis, running

pytestmark = pytest.mark.workers

LONG = os.environ.get("DBLOCK_CELERY") == "long"


@pytest.fixture
def environment(tmp_path: Path) -> Iterator[dict[str, str]]:
    """The example project on a database and a broker of its own."""
    with running(Redis) as broker:
        environment = {
            **os.environ,
            "DJANGO_SETTINGS_MODULE": "example_project.settings",
            "DATABASE": "sqlite",
            "DATABASE_NAME": str(tmp_path / "shop.sqlite3"),
            "CELERY_BROKER_URL": broker.url,
        }
        django("from django.core.management import call_command; call_command('migrate', verbosity=0)", environment)
        yield environment


@pytest.mark.timeout(240)
def test_a_worker_locks_and_reaps(environment: dict[str, str], tmp_path: Path) -> None:
    """Ten restocks at once lose nothing, a lock is handed over to a task, and beat has the reaper run."""
    prepared = """
from example_project.shop.models import Item
Item.objects.create(sku="a", name="A", stock=0)
from dblock import db_lock
with db_lock("long free"): pass
from dblock.models import Lock
Lock.objects.update(expires_at="2020-01-01 00:00:00+00:00")
from example_project.celery import app
from example_project.shop.tasks import restock, take_stock
for number in range(10):
    restock.delay("a", 1)
lock = db_lock("stock-taking", ttl=600)
lock.acquire()
print(lock.fence)
take_stock.delay(lock.detach())
"""
    fence = int(django(prepared, environment))

    def ask(sql: str) -> list[Any]:
        with contextlib.closing(sqlite3.connect(environment["DATABASE_NAME"])) as database:
            return database.execute(sql).fetchall()

    def is_done() -> bool:
        left = "EXISTS (SELECT 1 FROM locks WHERE lock_key = 'long free')"
        taken = re.search(r"take_stock\[.*\] succeeded", worker.text())
        return ask(f"SELECT stock, {left} FROM shop_item") == [(10, 0)] and taken is not None

    beat = ("--beat", "--schedule", str(tmp_path / "beat"))
    worker = Worker(environment, tmp_path / "log", *beat, app="tests.celery.quick_beat")
    try:
        assert until(is_done, 120), worker.text()
    finally:
        worker.stop()
    text = worker.text()
    assert "Task dblock.reap_expired" in text
    [(owner, label, task)] = ask("SELECT owner, label, celery_task_id FROM locks WHERE lock_key = 'stock:a'")
    assert (owner, label) == (None, "example_project.shop.tasks.restock: restock")
    assert f"[{task}] succeeded" in text
    [(owner, same, task)] = ask("SELECT owner, fence, celery_task_id FROM locks WHERE lock_key = 'stock-taking'")
    assert (owner, same) == (None, fence)
    assert f"take_stock[{task}] succeeded" in text


@pytest.mark.timeout(180)
def test_the_demo() -> None:
    """`make demo APP=celery`, with fewer producers outside `make celery`: nothing is lost."""
    few = "" if LONG else "demo.PRODUCERS = 3; "
    environment = {name: value for name, value in os.environ.items() if not name.startswith("DATABASE")}
    code = f"from example_project import celery_demo as demo; {few}raise SystemExit(demo.main())"
    assert "none lost" in python(code, environment=environment)
