"""A real worker with beat, on a real broker: a locked task, and the reaper on its schedule."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.servers import Redis, running

pytestmark = pytest.mark.workers

ROOT = Path(__file__).parent.parent.parent
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
            "CELERY_BROKER_URL": f"redis://127.0.0.1:{broker.port}/0",
        }
        shell(environment, "from django.core.management import call_command; call_command('migrate', verbosity=0)")
        yield environment


def shell(environment: dict[str, str], code: str) -> str:
    """Run `code` in the project and return what it printed."""
    done = subprocess.run(
        [sys.executable, "-c", f"import django; django.setup()\n{code}"],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.mark.timeout(240)
def test_a_worker_locks_and_reaps(environment: dict[str, str], tmp_path: Path) -> None:
    """Ten restocks at once lose nothing, a lock is handed over to a task, and beat has the reaper run."""
    shell(
        environment,
        """
from example_project.shop.models import Item
Item.objects.create(sku="a", name="A", stock=0)
from dblock import db_lock
with db_lock("long free"): pass
from dblock.models import Lock
Lock.objects.update(expires_at="2020-01-01 00:00:00+00:00")
from example_project.celery import app
from example_project.shop.tasks import restock
for number in range(10):
    restock.delay("a", 1)
""",
    )
    fence = shell(
        environment,
        """
from dblock import db_lock
from example_project.shop.tasks import take_stock
lock = db_lock("stock-taking", ttl=600)
lock.acquire()
print(lock.fence)
take_stock.delay(lock.detach())
""",
    )
    log = open(tmp_path / "log", "wb")
    worker = subprocess.Popen(
        [
            sys.executable,
            "-m",
            "celery",
            "-A",
            "tests.celery.quick_beat",
            "worker",
            "--beat",
            "--concurrency=4",
            "--loglevel=INFO",
            "--schedule",
            str(tmp_path / "beat"),
        ],
        cwd=ROOT,
        env=environment,
        stdout=log,
        stderr=log,
    )
    try:
        deadline = time.monotonic() + 120
        state = ""
        while state != "10 False True" and time.monotonic() < deadline:
            time.sleep(0.2)
            with contextlib.closing(sqlite3.connect(environment["DATABASE_NAME"])) as database:
                [(stock, left)] = database.execute(
                    "SELECT stock, EXISTS (SELECT 1 FROM locks WHERE lock_key = 'long free') FROM shop_item"
                )
            taken = re.search(r"take_stock\[.*\] succeeded", (tmp_path / "log").read_text())
            state = f"{stock} {bool(left)} {bool(taken)}"
        assert state == "10 False True", (tmp_path / "log").read_text()
    finally:
        worker.send_signal(signal.SIGTERM)
        worker.wait(30)
        log.close()
    text = (tmp_path / "log").read_text()
    assert "Task dblock.reap_expired" in text
    row = shell(
        environment,
        "from dblock.models import Lock; row = Lock.objects.get(lock_key='stock:a'); "
        "print(row.owner, row.label.replace(' ', ''), row.celery_task_id)",
    )
    owner, label, task = row.split(" ")
    assert (owner, label) == ("None", "example_project.shop.tasks.restock:restock")
    assert f"[{task}] succeeded" in text
    row = shell(
        environment,
        "from dblock.models import Lock; row = Lock.objects.get(lock_key='stock-taking'); "
        "print(row.owner, row.fence, row.celery_task_id)",
    )
    owner, same, task = row.split(" ")
    assert (owner, same) == ("None", fence)
    assert f"take_stock[{task}] succeeded" in text


@pytest.mark.timeout(180)
def test_the_demo() -> None:
    """`make demo APP=celery`, with fewer producers outside `make celery`: nothing is lost."""
    few = "from example_project import celery_demo as demo; demo.PRODUCERS = 3; raise SystemExit(demo.main())"
    done = subprocess.run(
        [sys.executable, *(["-m", "example_project.celery_demo"] if LONG else ["-c", few])],
        cwd=ROOT,
        env={name: value for name, value in os.environ.items() if not name.startswith("DATABASE")},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "none lost" in done.stdout
