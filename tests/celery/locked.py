"""A Celery app that has no Django: tasks under each policy and scope, that write down when they ran.

`CELERY_TEST` says, as JSON, what the app is told; `CELERY_TEST_DATABASE` where the locks and the records are.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import threading
import time
from typing import Any

import kombu.pools
from celery import Celery
from sqlalchemy import Column, Float, Integer, MetaData, String, Table, create_engine
from sqlalchemy.engine import Engine

from dblock.celery import current_lock, locked_task
from dblock.core.errors import LockLost
from sqlalchemy_dblock import db_lock

RUNS = Table(
    "celery_runs",
    MetaData(),
    Column("id", Integer, primary_key=True),
    Column("task", String(60)),
    Column("resource", String(60)),
    Column("fence", String(30)),
    Column("began", Float),
    Column("ended", Float),
)

app = Celery("locked")


def use(told: dict[str, Any], database: str) -> None:
    """Let the app go by these settings from now on."""
    global where
    where = database
    app.conf.update(told)
    kombu.pools.reset()
    app._after_fork()  # other connections
    _ = app.__dict__.pop("control", None)  # which has one of its own
    app._local.__dict__.clear()  # another backend
    app._backend_cache = None
    app.set_current()


where = os.environ.get("CELERY_TEST_DATABASE", "")


@functools.cache
def _engine(url: str, _: int) -> Engine:
    pooled = os.environ.get("DBLOCK_POOLER") and url.startswith("postgresql")
    return create_engine(url, connect_args={"prepare_threshold": None} if pooled else {})


def engine() -> Engine:
    """That of the tests' database, one in each process."""
    return _engine(where, os.getpid())


def write(statement: Any) -> Any:
    """Execute and commit."""
    with engine().begin() as connection:
        return connection.execute(statement)


@contextlib.contextmanager
def record(resource: str, task: str) -> Any:
    """Write down that a run is under way; what it is not told by its end stays open."""
    lock = current_lock()
    row = RUNS.insert().values(task=task, resource=resource, fence=str(lock.fence), began=time.time())
    number = write(row).inserted_primary_key[0]
    yield lock
    write(RUNS.update().where(RUNS.c.id == number).values(ended=time.time()))


def body(self: Any, resource: str, seconds: float = 0.02) -> str:
    """Work for a while."""
    with record(resource, self.request.id):
        time.sleep(seconds)
    return f"done {resource}"


locked = functools.partial(locked_task, app=app, bind=True, engine=engine)
POLICIES = ("retry", "wait", "skip", "raise")
SCOPES = ("run", "queue", "both")
TASKS: dict[tuple[str, str], Any] = {}
for _policy in POLICIES:
    for _scope in SCOPES:
        _options: dict[str, Any] = {"on_busy": _policy, "scope": _scope, "ttl": 3}
        if _policy == "wait":
            _options["timeout"] = 60
        _name = f"locked.{_policy}_{_scope}"
        TASKS[_policy, _scope] = locked(f"{_policy} {_scope} {{resource}}", name=_name, **_options)(body)


@locked_task("plain {number}", engine=engine, app=app, ttl=3)
def plain(number: int, by: int = 1) -> int:
    """Count."""
    return number + by


@locked("late {resource}", ttl=3, acks_late=True, reject_on_worker_lost=True)
def late(self: Any, resource: str, seconds: float = 0.5) -> str:
    """Is delivered again where its worker dies."""
    with record(resource, self.request.id):
        time.sleep(seconds)
    return "done"


@locked("soft {resource}", ttl=3, soft_time_limit=1)
def soft(self: Any, resource: str) -> str:
    """Takes too long."""
    with record(resource, self.request.id):
        time.sleep(20)
    return "done"


@locked("hard {resource}", scope="queue", ttl=3, time_limit=1)
def hard(self: Any, resource: str) -> str:
    """Takes too long, and hears of nothing."""
    with record(resource, self.request.id):
        time.sleep(20)
    return "done"


@locked("lost {resource}", ttl=3, interrupt=True)
def interrupted(self: Any, resource: str) -> str:
    """Is told that its lock is lost, in mid-sleep, while the callback of another lock hangs."""
    hangs = threading.Event()

    def hang(_: object, __: object) -> None:
        hangs.set()
        time.sleep(60)

    db_lock(engine(), "other", ttl=0.1, renew=False, on_lost=hang).acquire()
    assert hangs.wait(10)
    with record(resource, self.request.id):
        for _ in range(200):
            time.sleep(0.1)
    return "done"


@locked("lost {resource}", ttl=3)
def heedless(self: Any, resource: str) -> str:
    """Catches what it is told of its lock."""
    with record(resource, self.request.id) as lock:
        deadline = time.monotonic() + 20
        try:
            while time.monotonic() < deadline:
                lock.check()
                time.sleep(0.05)
        except LockLost:
            return "a failure, whatever is returned"
    return "done"


@app.task(ignore_result=True)
def count() -> None:
    """Say that it was done, where the broker is."""
    import redis

    redis.Redis.from_url(app.conf.broker_url).incr("done")


if "CELERY_TEST" in os.environ:
    use(json.loads(os.environ["CELERY_TEST"]), where)
