"""Locked tasks in real workers, whose processes can be killed."""

from __future__ import annotations

import signal
from collections.abc import Callable

import pytest
from celery.exceptions import SoftTimeLimitExceeded, TaskRevokedError, TimeLimitExceeded, WorkerLostError

from dblock.core.errors import LockLost
from tests.celery import locked
from tests.celery.conftest import Celery, held, overlaps, runs, wait_until
from tests.conftest import run

pytestmark = [pytest.mark.workers, pytest.mark.timeout(240)]

LEASE = 3.0
"""Seconds: that of the tasks."""


def test_a_long_task_keeps_its_lock(celery: Celery) -> None:
    """For longer than the ttl; a task that comes later waits."""
    first = locked.TASKS["wait", "run"].delay("r", LEASE * 1.5)
    second = locked.TASKS["wait", "run"].delay("r")
    assert first.get(timeout=30) == second.get(timeout=30) == "done r"
    assert not overlaps()
    assert len(runs()) == 2


@pytest.mark.parametrize(("name", "error"), [("soft", SoftTimeLimitExceeded), ("hard", TimeLimitExceeded)])
def test_time_limits_free_the_key(celery: Celery, name: str, error: type[Exception]) -> None:
    """At once where the task hears of it, and within its ttl where it is killed."""
    result = getattr(locked, name).delay("r")
    with pytest.raises(error):
        result.get(timeout=30)
    alive = "SELECT 1 FROM locks WHERE owner IS NOT NULL AND expires_at > now()"
    if name == "soft":
        assert not run("postgresql", alive)
    wait_until(lambda: not run("postgresql", alive), LEASE + 10)


@pytest.mark.parametrize("name", ["interrupted", "heedless"])
def test_a_lock_that_is_lost_fails_the_task(celery: Celery, name: str) -> None:
    """In mid-sleep; or at its end, whatever it returns, and whether it catches what `check()` raises."""
    result = getattr(locked, name).delay("r")
    wait_until(lambda: len(runs()) == 1)
    assert run("postgresql", "UPDATE locks SET owner = NULL, count = 0 WHERE lock_key = 'lost r' RETURNING 1")
    with pytest.raises(LockLost):
        result.get(timeout=10)
    assert locked.plain.delay(1).get(timeout=20) == 2  # the process goes on


@pytest.mark.parametrize("when", ["queued", "waiting", "running"])
def test_revoking_frees_the_key(celery: Celery, make: Callable[..., Celery], when: str) -> None:
    """Before it runs, while it waits for its time, and (killed) while it runs: then within its ttl."""
    if when == "running":  # after a kill by revoke() Celery's pool may lose what it gives that process next
        make().worker("--concurrency=1")
    task = locked.TASKS["retry", "queue"]
    busy = range(4 if when == "queued" else 0)  # so many processes has the worker
    blockers = [locked.TASKS["wait", "run"].delay(f"b{number}", 3.0) for number in busy]
    wait_until(lambda: len(runs()) == len(blockers))
    result = task.apply_async(("r", 20.0), countdown=1 if when == "waiting" else None)
    if when == "running":
        wait_until(runs)
    locked.app.control.revoke(result.id, terminate=when == "running", signal="SIGKILL")
    with pytest.raises((TaskRevokedError, WorkerLostError)):
        result.get(timeout=30)
    alive = "SELECT 1 FROM locks WHERE lock_key LIKE 'retry queue%' AND expires_at > now()"
    wait_until(lambda: not run("postgresql", alive), LEASE + 20)
    assert [each.get(timeout=20) for each in blockers] == [f"done b{number}" for number in busy]
    if when != "running":
        assert task.delay("r").get(timeout=20) == "done r"


def test_shutting_down(make: Callable[..., Celery]) -> None:
    """A warm shutdown waits for the task; a cold one ends it: then its key is free within its ttl."""
    celery = make()
    worker = celery.worker()
    for how in (signal.SIGTERM, signal.SIGQUIT):
        before = len(runs())
        result = locked.late.delay("r", 2.0)
        wait_until(lambda: len(runs()) > before)  # noqa: B023
        worker.stop(how)
        if how is signal.SIGTERM:
            assert not held()
        worker = celery.worker()
        assert result.get(timeout=40) == "done"
    assert not [each for each in overlaps() if each[0].ended is not None]


@pytest.mark.parametrize("pool", ["threads", "solo", "gevent", "eventlet"])
def test_other_pools(make: Callable[..., Celery], pool: str) -> None:
    """Threads are flows of their own, and a process that does one thing after the other sends back."""
    celery = make()
    celery.worker(f"--pool={pool}")
    task = locked.TASKS["retry", "run"]
    results = [task.delay(f"r{number % 2}") for number in range(8)]
    assert {result.get(timeout=40) for result in results} == {"done r0", "done r1"}
    assert not overlaps()
    lost = locked.heedless.delay("r")
    wait_until(lambda: len(runs()) == 9)
    _ = run("postgresql", "UPDATE locks SET owner = NULL, count = 0 WHERE lock_key = 'lost r'")
    with pytest.raises(LockLost):
        lost.get(timeout=20)
