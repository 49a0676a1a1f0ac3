"""Locked tasks as type checkers see them: a program without a cast passes, and each planted mistake is found."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

PROGRAM = """
from datetime import timedelta
from typing import Any, assert_type

from sqlalchemy import create_engine

from dblock.celery import TaskLock, current_lock, locked_task, skipped

engine = create_engine("sqlite://")


@locked_task("report:{account}", engine=engine, autoretry_for=(ConnectionError,), max_retries=5, name="report")
def report(account: int, month: str | None = None) -> str:
    lock = current_lock()
    assert_type(lock, TaskLock)
    fence: int = lock.fence
    lock.check()
    with lock.begin(engine) as connection:
        connection.exec_driver_sql("SELECT 1")
    return f"{account}, {month}, {fence + 1}"


@locked_task("fetch:{source}", on_busy="skip", bind=True, ttl=timedelta(minutes=1))
def fetch(self: Any, source: str) -> list[str]:
    with current_lock().atomic():
        return [source, self.request.id]


@locked_task
def bare(n: int) -> int:
    return n


def make_key(task: Any, n: int) -> str:
    return f"{task.name} {n}"


@locked_task(key=make_key, permits=3, engine=lambda: engine)
def limited(n: int) -> int:
    return current_lock().slot + n


assert_type(report(1, month="May"), str)
assert_type(fetch("prices"), list[str])
assert_type(bare(3), int)
result = report.delay(1)
if not skipped(result.get()):
    fetch.apply_async(("prices",), countdown=3)
limited.s(3).apply_async()
print(report.name, limited.apply((3,)).get())
"""
MISTAKES = """
report("1")
report.delay(1, 2)
fetch.delay()
bare.delay("3")
locked_task("k", on_bussy="skip")
locked_task("k", on_busy="skipp")
locked_task("k", timeout="3")
current_lock().fense
wrong: str = report(1).fence
"""


@pytest.mark.parametrize("checker", ["mypy", "pyright"])
def test_a_users_program(tmp_path: Path, checker: str) -> None:
    """Checked strictly, as an application that has dblock installed."""
    path = tmp_path / "program.py"
    path.write_text(PROGRAM + MISTAKES)
    first = PROGRAM.count("\n") + 2
    planted = set(range(first, first + MISTAKES.strip().count("\n") + 1))
    assert _errors(checker, path) == planted


def _errors(checker: str, path: Path) -> set[int]:
    """The lines in which a checker finds errors."""
    if checker == "mypy":
        command = [sys.executable, "-m", "mypy", "--strict", "--no-incremental", "--config-file=", str(path)]
        done = subprocess.run(command, cwd=path.parent, capture_output=True, text=True, check=False)
        found = [line.split(":") for line in done.stdout.splitlines() if ": error:" in line]
        return {int(line[1]) for line in found if line[0] == path.name}
    settings = {"typeCheckingMode": "strict", "pythonVersion": "3.11", "reportMissingTypeStubs": False}
    (path.parent / "pyrightconfig.json").write_text(json.dumps(settings))
    command = [sys.executable, "-m", "pyright", "--outputjson", "--pythonpath", sys.executable, str(path)]
    done = subprocess.run(command, cwd=path.parent, capture_output=True, text=True, check=False)
    told: list[dict[str, Any]] = json.loads(done.stdout)["generalDiagnostics"]
    return {each["range"]["start"]["line"] + 1 for each in told if each["severity"] == "error"}
