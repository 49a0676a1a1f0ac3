"""Real beats that stand by for each other: stopped, killed and frozen."""

from __future__ import annotations

import itertools
import os
import re
import signal
import sqlite3
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import closing
from functools import partial
from pathlib import Path

import pytest
from kombu import Connection

from tests.celery.conftest import PLAIN, Process, beats_site, django, wait_until
from tests.conftest import run, url
from tests.support.lab import ended
from tests.support.servers import Redis

pytestmark = [pytest.mark.workers, pytest.mark.timeout(240)]

LONG = os.environ.get("DBLOCK_CELERY", "short") == "long"


class Beats:
    """Beats of one app, and what they have sent."""

    def __init__(self, broker: str, directory: Path, **environment: str) -> None:
        self._directory, self._broker, self._queue = directory, broker, directory.name
        self.environment = {**PLAIN, "BEATS_BROKER": broker, "BEATS_QUEUE": self._queue, **environment}
        self.processes = dict[str, Process]()

    def start(self) -> str:
        """One more; its name."""
        name = f"beat{len(self.processes)}"
        command = ("-A", "tests.celery.beats", "beat", "--loglevel=INFO", "--pidfile=")
        self.processes[name] = beat = Process(self.environment, self._directory / name, *command)
        beat.wait_until(lambda: re.search(r"beat: (active|standing by)", beat.text()))
        return name

    def text(self, name: str) -> str:
        return self.processes[name].text()

    def active(self) -> str:
        """The last one that became active."""
        fences = {name: re.findall(r"beat: active \(fence (\d+)\)", self.text(name)) for name in self.processes}
        return max((int(fence), name) for name, found in fences.items() for fence in found)[1]

    def end(self, how: signal.Signals, *, of: str) -> None:
        """Send it a signal, and wait for another one to be active that sends."""
        self.processes[of].process.send_signal(how)
        wait_until(lambda: self.active() != of)
        heir = self.active()
        wait_until(lambda: "Sending due task" in self.text(heir).rpartition("beat: active")[2])

    def sent(self) -> dict[str, list[float]]:
        """When each entry was sent."""
        found = defaultdict[str, list[float]](list)
        with Connection(self._broker) as connection, connection.SimpleQueue(self._queue) as queue:
            while True:
                try:
                    message = queue.get(block=False)
                except queue.Empty:
                    break
                (name, *moment), *_ = message.payload
                found[name].append(float(moment[0]) if moment else 0.0)
                message.ack()
        return found

    def close(self) -> None:
        for beat in self.processes.values():
            beat.process.send_signal(signal.SIGCONT)
            beat.process.terminate()
        for beat in self.processes.values():
            beat.stop()


@pytest.fixture
def make(redis: Redis, tmp_path: Path) -> Iterator[Callable[..., Beats]]:
    with ended(partial(Beats, redis.url, tmp_path)) as make:
        yield make


def gaps(sent: dict[str, list[float]]) -> list[float]:
    """Seconds between two messages of one entry."""
    return [b - a for times in sent.values() for a, b in itertools.pairwise(times)]


def test_after_a_stop_the_next_one_sends_at_once(postgresql: object, make: Callable[..., Beats]) -> None:
    """Nothing twice, nothing left out; its ttl does not matter."""
    beats = make(BEATS_DATABASE=url("postgresql"), BEATS_TTL="30")
    for _ in range(2):
        beats.start()
    for _ in range(12 if LONG else 2):
        _ = beats.start()
        time.sleep(1.3)
        beats.end(signal.SIGTERM, of=beats.active())
    found = gaps(beats.sent())
    assert min(found) > 0.4
    assert max(found) < 10
    assert "Traceback" not in "".join(map(beats.text, beats.processes))
    run("postgresql", "DROP TABLE lock_states")


def test_after_a_kill_or_a_freeze_another_one_sends(
    postgresql: object, make: Callable[..., Beats], redis: Redis
) -> None:
    """Within a ttl; who was frozen knows when it wakes up, and stands by."""
    beats = make(BEATS_DATABASE=url("postgresql"))
    for _ in range(2):
        beats.start()
    for _ in range(6 if LONG else 1):
        for how in (signal.SIGKILL, signal.SIGSTOP):
            beats.start()
            time.sleep(1.3)
            victim = beats.active()
            before = beats.text(victim).count("Sending")
            wait_until(lambda: beats.text(victim).count("Sending") > before)  # noqa: B023
            time.sleep(0.1)  # it is not sending now: what is under way when it is frozen goes out when it wakes up
            beats.end(how, of=victim)
            if how is signal.SIGSTOP:
                said = len(beats.text(victim))
                beats.processes[victim].process.send_signal(signal.SIGCONT)
                wait_until(lambda: "not active any more" in beats.text(victim)[said:])  # noqa: B023
                assert "Sending" not in beats.text(victim)[said:]
    found = gaps(beats.sent())
    assert min(found) > 0.4, sorted(found)[:4]
    assert max(found) < 20
    run("postgresql", "DROP TABLE lock_states")


DJANGO = """
from django.core.management import call_command
call_command("migrate", verbosity=0)
from datetime import datetime, timedelta, timezone
from django_celery_beat.models import IntervalSchedule, PeriodicTask
import json
often, _ = IntervalSchedule.objects.get_or_create(every=1, period="seconds")
for name in ("a", "b"):
    PeriodicTask.objects.create(name=name, task="t", interval=often, args=json.dumps([name]))
PeriodicTask.objects.create(name="once", task="t", interval=often, args=json.dumps(["once"]), one_off=True)
rarely, _ = IntervalSchedule.objects.get_or_create(every=1, period="days")
long_ago = datetime.now(timezone.utc) - timedelta(days=2)
PeriodicTask.objects.create(name="rare", task="t", interval=rarely, args=json.dumps(["rare"]), last_run_at=long_ago)
"""
LATE = """
from datetime import datetime, timedelta, timezone
from django_celery_beat.models import PeriodicTask, PeriodicTasks
long_ago = datetime.now(timezone.utc) - timedelta(days=2)
PeriodicTask.objects.filter(name="rare").update(last_run_at=long_ago, total_run_count=0)
PeriodicTasks.update_changed()
"""
"""As a beat that has been deposed and does not know it yet: it writes down what it last knew."""


AGAIN = """
from datetime import datetime, timezone
from django_celery_beat.models import PeriodicTask
import time
while (once := PeriodicTask.objects.get(name="once")).enabled:
    time.sleep(0.1)  # it is disabled when it would be due again
once.enabled, once.start_time = True, datetime.now(timezone.utc)
once.save()
"""


def test_schedules_in_djangos_database(make: Callable[..., Beats], tmp_path: Path) -> None:
    """The beat that takes over knows what was sent, whatever its tables say; and does what their users say."""
    beats = make(**beats_site(tmp_path))
    _ = django(DJANGO, beats.environment)
    first, second = beats.start(), beats.start()
    assert beats.active() == first
    wait_until(lambda: beats.text(first).count("Sending due task a") >= 3)
    sent = defaultdict[str, list[float]](list)

    def all_have_come() -> bool:
        for name, moments in beats.sent().items():
            sent[name] += moments
        return len(sent["a"]) == beats.text(first).count("Sending due task a")

    wait_until(all_have_come)  # killed between a claim and its message, it would not have sent that one
    beats.end(signal.SIGKILL, of=first)
    _ = django(LATE, beats.environment)
    wait_until(lambda: "Schedule changed" in beats.text(second))
    wait_until(lambda: beats.text(second).count("Sending due task a") >= 2)
    again = 2 if LONG else 1
    for times in range(1, again + 1):
        _ = django(AGAIN, beats.environment)
        wait_until(lambda: beats.text(second).count("Sending due task once") == times)  # noqa: B023
    beats.close()
    for name, moments in beats.sent().items():
        sent[name] += moments
    assert (len(sent["once"]), len(sent["rare"])) == (1 + again, 1)
    with closing(sqlite3.connect(beats.environment["BEATS_FILE"])) as database:
        counts = dict(database.execute("SELECT name, total_run_count FROM django_celery_beat_periodictask"))
    assert (counts["a"], counts["rare"]) == (len(sent["a"]), 1)
    logs = beats.text(first) + beats.text(second)
    assert len(sent["a"]) == logs.count("Sending due task a")
    assert "Traceback" not in logs


WRITTEN = """
from celery import Celery
from django.core.management import call_command
from django_celery_beat.models import IntervalSchedule, PeriodicTask
from kombu.exceptions import OperationalError
from dblock.celery import DatabaseScheduler
from dblock.celery import beat
call_command("migrate", verbosity=0)
beat.PAUSE = 0.05
often, _ = IntervalSchedule.objects.get_or_create(every=1, period="seconds")
PeriodicTask.objects.create(name="once", task="t", interval=often, one_off=True)
app = Celery("beats", broker="memory://")
app.conf.beat_sync_every = 1
app.conf.beat_schedule = {"daily": {"task": "t", "schedule": 86400.0}}
scheduler = DatabaseScheduler(app)
sent = []

def send(task, *_, **__):
    sent.append(task)
    if len(sent) < 3:
        raise OperationalError("away")

scheduler.send_task = send
import time
while len(sent) < 3:
    row = PeriodicTask.objects.get(name="once")
    assert (row.enabled, row.total_run_count) == (True, 0), len(sent)
    time.sleep(max(0.0, min(scheduler.tick(), 0.1)))
assert PeriodicTask.objects.get(name="once").total_run_count == 1
begun = scheduler.schedule["daily"].last_run_at
scheduler.close()
time.sleep(0.1)
scheduler = DatabaseScheduler(app)
scheduler.tick()
assert scheduler.schedule["daily"].last_run_at == begun
scheduler.close()
"""


def test_what_a_beat_writes_down_in_djangos_database(tmp_path: Path) -> None:
    """Nothing that the broker did not take, though Celery has the schedule saved with each message, sent or not.

    An entry of the settings that is new counts from the first beat, though each that becomes active saves its row anew.
    """
    _ = django(WRITTEN, beats_site(tmp_path))
