"""The task that tidies up."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import celery
import pytest
from django.core.management import CommandError, call_command

from dblock import db_lock
from dblock.tasks import reap_expired
from tests.celery.conftest import PLAIN, beats_site, django
from tests.conftest import ALIASES
from tests.contract.test_queue import stranger
from tests.support.loaded import python
from tests.support.subjects import Subject


@pytest.fixture
def app() -> Iterator[celery.Celery]:
    """One of the test's own."""
    app = celery.Celery("reaping", broker="memory://", backend="cache+memory://")
    app.set_current()
    yield app
    app.close()


@pytest.mark.parametrize("database", ["postgresql"], indirect=True)
def test_it_counts_by_database_and_table(app: celery.Celery, sqlite: object, database: str) -> None:
    """Rows of locks, and of those who waited and died."""
    alias = ALIASES[database]
    for key in ("a", "b"):
        with db_lock(key, using=alias):
            pass
    stranger(Subject("sqlalchemy", "sync", database), 1, -1, key="c")
    task = reap_expired._get_current_object()
    assert task.apply(kwargs={"using": alias}).get() == {alias: {"locks": 0, "lock_waiters": 0}}
    found = task.apply(kwargs={"using": [alias], "retention": 0}).get()
    assert found == {alias: {"locks": 2, "lock_waiters": 1}}
    assert task.apply().get() == {"default": {"locks": 0, "lock_waiters": 0}}


def test_it_is_made_for_an_app_without_django(tmp_path: Path) -> None:
    """Under the name that the schedule calls; and so are locked tasks."""
    code = """
import sys
sys.modules["django"] = None
from celery import Celery
from sqlalchemy import create_engine
from dblock.celery import beat_schedule, locked_task, reaper
from sqlalchemy_dblock import db_lock, metadata

app = Celery("plain", broker="memory://", backend="cache+memory://", set_as_current=True)
engine = create_engine(f"sqlite:///{sys.argv[1]}/locks.sqlite3")
metadata.create_all(engine)
with db_lock(engine, "k"):
    pass
task = reaper(lambda: engine, retention=0)
[entry] = beat_schedule(every=60, retention=0).values()
assert (entry["schedule"], entry["options"]) == (60.0, {"expires": 60.0})
found = app.tasks[entry["task"]].apply(kwargs=entry["kwargs"]).get()
assert found == {str(engine.url.database): {"locks": 1, "lock_waiters": 0}}, found

@locked_task("k", engine=engine, app=app)
def work():
    return "done"
assert work.apply().get() == "done"
"""
    _ = python("-c", code, str(tmp_path), environment=PLAIN)


SCHEDULED = """
from django.core.management import call_command
call_command("migrate", verbosity=0)
from django_celery_beat.models import IntervalSchedule, PeriodicTask
call_command("dblock", "schedule-reaper", "--every", "60")
call_command("dblock", "schedule-reaper", "--every", "30", "--using", "default")
[task] = PeriodicTask.objects.all()
assert (task.name, task.task) == ("dblock.reap_expired", "dblock.reap_expired")
assert task.schedule.run_every.total_seconds() == task.expire_seconds == 30
assert (task.kwargs, task.enabled) == ('{"using": ["default"]}', True)
from django.core.checks import run_checks
assert "dblock.W005" not in [found.id for found in run_checks(include_deployment_checks=True)]
"""


def test_django_celery_beat_is_told_of_it(tmp_path: Path) -> None:
    """Again and again: there is one entry."""
    told = django(SCHEDULED, beats_site(tmp_path))
    assert told.splitlines()[-1] == "django-celery-beat runs dblock.reap_expired every 30 s"


def test_without_django_celery_beat_it_is_said_what_to_do() -> None:
    """And what is no number of seconds."""
    with pytest.raises(CommandError, match="CELERY_BEAT_SCHEDULE"):
        call_command("dblock", "schedule-reaper")
    with pytest.raises(CommandError, match="1 at least"):
        call_command("dblock", "schedule-reaper", "--every", "0")
