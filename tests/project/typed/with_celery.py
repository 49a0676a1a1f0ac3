"""What an application with locked tasks might write: type checkers accept all of it. Nothing runs it."""
# pyright: strict, reportMissingTypeStubs=false

from __future__ import annotations

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
_ = (report.name, limited.apply((3,)).get())
