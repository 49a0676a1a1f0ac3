"""Locked tasks in real workers, whose processes can be killed."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from typing import Any

import pytest
from celery.exceptions import SoftTimeLimitExceeded, TaskRevokedError, TimeLimitExceeded, WorkerLostError

from dblock.celery import skipped
from dblock.core.errors import LockLost, LockTimeout
from tests.celery import locked
from tests.celery.conftest import Celery, held, overlaps, redelivering, runs, wait_until
from tests.conftest import run

pytestmark = [pytest.mark.workers, pytest.mark.timeout(240)]

LEASE = 3.0
"""Seconds: that of the tasks."""


@pytest.mark.parametrize("scope", locked.SCOPES)
@pytest.mark.parametrize("policy", locked.POLICIES)
def test_tasks_take_turns(celery: Celery, policy: str, scope: str) -> None:
    """On each key one at a time, and each task ends as its policy says."""
    task, results, refused = locked.TASKS[policy, scope], [], 0
    for number in range(16):
        try:
            results.append(task.delay(f"r{number % 4}"))
        except LockTimeout:
            refused += 1
    outcomes = [result.get(timeout=50, propagate=False) for result in results]
    assert not overlaps()
    assert not held()
    done, left_out, failed = _kinds(outcomes)
    assert done + left_out + failed == len(outcomes)
    assert not left_out or policy == "skip"
    assert not failed or policy == "raise"
    assert not refused or (policy == "raise" and scope != "run")
    ran = len(runs())
    if scope == "run" and policy in {"retry", "wait"}:
        assert ran == 16
    assert ran == len({result.id for result in results if str(result.get(propagate=False)).startswith("done")})


def _kinds(outcomes: list[Any]) -> tuple[int, int, int]:
    done = sum(isinstance(each, str) and each.startswith("done") for each in outcomes)
    return done, sum(skipped(each) for each in outcomes), sum(isinstance(each, LockTimeout) for each in outcomes)


def test_no_django(celery: Celery) -> None:
    """An app without Django has none of it afterwards."""
    assert locked.plain.delay(3, by=4).get(timeout=20) == 7
    assert locked.has_django.delay().get(timeout=20) is False


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
def test_revoking_frees_the_key(make: Callable[..., Celery], when: str) -> None:
    """Before it runs, while it waits for its time, and (killed) while it runs: then within its ttl."""
    celery = make()  # of its own: after a kill by revoke() Celery's pool may lose what it gives that process next
    celery.worker("--concurrency=1")
    task = locked.TASKS["retry", "queue"]
    if when == "queued":
        blocker = locked.TASKS["wait", "run"].delay("b", 3.0)
        wait_until(runs)
    result = task.apply_async(("r", 20.0), countdown=1 if when == "waiting" else None)
    if when == "running":
        wait_until(runs)
    locked.app.control.revoke(result.id, terminate=when == "running", signal="SIGKILL")
    with pytest.raises((TaskRevokedError, WorkerLostError)):
        result.get(timeout=30)
    alive = "SELECT 1 FROM locks WHERE lock_key LIKE 'retry queue%' AND expires_at > now()"
    wait_until(lambda: not run("postgresql", alive), LEASE + 20)
    if when == "queued":
        assert blocker.get(timeout=20) == "done b"
    if when != "running":
        assert task.delay("r").get(timeout=20) == "done r"


@pytest.mark.parametrize("scope", ["run", "queue"])
def test_a_killed_process_keeps_nobody_waiting_for_long(make: Callable[..., Celery], scope: str) -> None:
    """Its message is delivered again, and runs when the lease has ended.

    It dies before its first renewal: with "queue", when it has used its token.
    """
    celery = make(task_acks_late=True, task_reject_on_worker_lost=True)
    celery.worker()
    result = locked.TASKS["retry", scope].delay("r", 0.6)
    wait_until(runs)
    [(pid, fence)] = run("postgresql", "SELECT pid, fence FROM locks WHERE owner IS NOT NULL")
    os.kill(int(str(pid)), signal.SIGKILL)
    killed = time.monotonic()
    assert result.get(timeout=40) == "done r"
    assert time.monotonic() - killed > LEASE - 1
    first, second = runs()
    assert (first.ended, first.fence) == (None, str(fence))
    assert int(first.fence) < int(second.fence)


def test_a_message_that_is_delivered_again_runs_by_itself(make: Callable[..., Celery]) -> None:
    """Redis gives a message to another worker when the visibility timeout is over: the first run still goes on."""
    celery = make(broker_transport_options=redelivering(2))
    celery.worker("--concurrency=2")
    celery.worker("--concurrency=2")
    result = locked.late.delay("r", 6.0)
    wait_until(lambda: len([each for each in runs() if each.ended]) == 1)
    assert result.get(timeout=20) == "done"
    time.sleep(3)
    assert celery.log().count(f"late[{result.id}] received") > 1
    assert not [each for each in overlaps() if each[0].ended is None or each[0].ended > each[1].began]


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGQUIT])
def test_shutting_down(make: Callable[..., Celery], how: signal.Signals) -> None:
    """A warm shutdown waits for the task; a cold one ends it: then its key is free within its ttl."""
    celery = make()
    worker = celery.worker()
    result = locked.late.delay("r", 2.0)
    wait_until(runs)
    worker.stop(how)
    if how is signal.SIGTERM:
        assert not held()
    celery.worker()
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
