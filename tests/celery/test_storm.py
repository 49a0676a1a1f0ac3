"""Many tasks on few keys in two workers, whose processes are killed, while the broker is restarted."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable

import pytest
from celery.exceptions import TimeoutError as NotYet

from dblock.core.errors import LockTimeout
from tests.celery import locked
from tests.celery.conftest import Celery, ended_as_told, overlaps, redelivering, runs

pytestmark = pytest.mark.workers

LONG = os.environ.get("DBLOCK_CELERY") == "long"
TASKS, KEYS = (200, 20) if LONG else (40, 8)
CASES = [(policy, scope) for policy in locked.POLICIES for scope in locked.SCOPES]
SHORT = [("retry", "run", "rabbitmq"), ("retry", "both", "redis")]
ALL = [(*case, broker) for case in CASES for broker in ("redis", "rabbitmq")]


def supervise(celery: Celery, over: threading.Event) -> None:
    """Start a worker again that has ended, as systemd would: kombu's Redis transport may fail where it reconnects."""
    while not over.wait(0.5):
        for worker in list(celery.workers):
            if worker.over():
                celery.workers.remove(worker)
                _ = celery.worker()


def kill(celery: Celery, over: threading.Event) -> int:
    """Kill a process of a worker now and then; how many there were."""
    killed = 0
    while not over.wait(random.uniform(0.3, 0.8)):
        children = [child for worker in celery.workers if worker.ready() for child in worker.children()]
        with contextlib.suppress(ProcessLookupError, IndexError):
            os.kill(random.choice(children), signal.SIGKILL)
            killed += 1
    return killed


def is_received(name: str, log: str) -> bool:
    """Whether a worker has heard of the latest message of that task: the first one, or one that a run has sent back."""
    told = sorted(line for line in log.splitlines() if f"[{name}] received" in line or f"[{name}] retry:" in line)
    return bool(told) and "] received" in told[-1]  # each line begins with its time


@pytest.mark.timeout(600)
@pytest.mark.parametrize(("policy", "scope", "kind"), ALL if LONG else SHORT)
def test_nothing_overlaps_and_nothing_is_lost(
    make: Callable[..., Celery], request: pytest.FixtureRequest, policy: str, scope: str, kind: str
) -> None:
    """Each task ends as its policy says; what a killed process was running is delivered again, and nothing else."""
    celery = make(
        kind,
        task_acks_late=True,
        task_reject_on_worker_lost=True,
        broker_transport_options=redelivering(12) if kind == "redis" else {},
        task_publish_retry_policy={"max_retries": 100, "interval_start": 0, "interval_step": 0.2, "interval_max": 0.2},
    )
    for _ in range(2):
        celery.worker()
    broker, task, results, refused = request.getfixturevalue(kind), locked.TASKS[policy, scope], {}, 0
    over, ended, told = threading.Event(), threading.Event(), list[int]()
    thread = threading.Thread(target=lambda: told.append(kill(celery, over)))
    supervisor = threading.Thread(target=supervise, args=(celery, ended))
    thread.start()
    supervisor.start()
    try:
        for number in range(TASKS):
            try:
                result = task.delay(f"r{number % KEYS}", random.uniform(0.01, 0.1))
                results[result.id] = result
            except LockTimeout:
                refused += 1
            if number == TASKS // 2 and (LONG or kind == "rabbitmq"):
                time.sleep(1.0)
                broker.stop()
                time.sleep(0.5)  # what is to go back now, waits
                broker.start()
        thread.join(3.0)
        over.set()
        thread.join()
        outcomes, deadline = {}, time.monotonic() + (300 if LONG else 60)
        for name, result in results.items():
            with contextlib.suppress(NotYet):
                outcomes[name] = result.get(timeout=max(0.1, deadline - time.monotonic()), propagate=False)
    finally:
        over.set()
        ended.set()
        thread.join()
        supervisor.join()
    log = celery.log()
    # Redis's transport loses what it has just taken from the server when that goes away: no worker has heard of it.
    lost = {name for name in results.keys() - outcomes.keys() if kind != "redis" or is_received(name, log)}
    assert not lost, log[-3000:]
    ended_as_told(policy, scope, [*outcomes.values()], refused)
    # A killed run has no end, and the run after it waited for its lease to end.
    assert not [each for each in overlaps() if each[0].ended is not None]
    finished = Counter(each.task for each in runs() if each.ended is not None)
    done = {name for name, each in outcomes.items() if str(each).startswith("done")}
    assert done <= finished.keys()
    again = {name for name, count in Counter(each.task for each in runs()).items() if count > 1}
    assert len(again) <= told[0] * 8 + 16
