"""A real worker with beat, on a real broker: a lock that comes as a token, and the reaper on its schedule."""

from __future__ import annotations

import contextlib
import os
import re
import sqlite3
from pathlib import Path
from typing import Any

import pytest

from tests.celery.conftest import Worker, django
from tests.support.lab import until
from tests.support.loaded import python, without
from tests.support.servers import Redis

pytestmark = pytest.mark.workers

LONG = os.environ.get("DBLOCK_CELERY") == "long"


@pytest.mark.timeout(240)
def test_a_worker_of_a_django_site(redis: Redis, tmp_path: Path) -> None:
    """A lock is handed over to a task, and beat has the reaper run."""
    environment = {
        **os.environ,
        "DJANGO_SETTINGS_MODULE": "example_project.settings",
        "DATABASE": "sqlite",
        "DATABASE_NAME": str(tmp_path / "shop.sqlite3"),
        "CELERY_BROKER_URL": redis.url,
    }
    prepared = """
from django.core.management import call_command
call_command("migrate", verbosity=0)
from dblock import db_lock
with db_lock("long free"): pass
from dblock.models import Lock
Lock.objects.update(expires_at="2020-01-01 00:00:00+00:00")
from example_project.shop.tasks import take_stock
lock = db_lock("stock-taking", ttl=600)
lock.acquire()
print(lock.fence)
take_stock.delay(lock.detach())
"""
    fence = int(django(prepared, environment))

    def row(key: str) -> list[Any]:
        with contextlib.closing(sqlite3.connect(environment["DATABASE_NAME"])) as database:
            sql = "SELECT owner, fence, celery_task_id FROM locks WHERE lock_key = ?"
            return database.execute(sql, (key,)).fetchall()

    def is_done() -> bool:
        return not row("long free") and re.search(r"take_stock\[.*\] succeeded", worker.text()) is not None

    beat = ("--beat", "--schedule", str(tmp_path / "beat"))
    worker = Worker(environment, tmp_path / "log", *beat, app="tests.celery.quick_beat")
    try:
        assert until(is_done, 120), worker.text()
    finally:
        worker.stop()
    assert "Task dblock.reap_expired" in worker.text()
    [(owner, same, task)] = row("stock-taking")
    assert (owner, same) == (None, fence)
    assert f"take_stock[{task}] succeeded" in worker.text()


@pytest.mark.timeout(180)
def test_the_demo() -> None:
    """`make demo APP=celery`, with fewer producers outside `make celery`: nothing is lost."""
    few = "" if LONG else "demo.PRODUCERS = 3; "
    code = f"from example_project import celery_demo as demo; {few}raise SystemExit(demo.main())"
    assert "none lost" in python("-c", code, environment=without("DATABASE")).stdout
