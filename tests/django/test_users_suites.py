"""What the tests of a project that uses the lock meet: under TestCase, TransactionTestCase and pytest-django."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from tests.conftest import ALIASES, DATABASES, run
from tests.support.loaded import python
from tests.support.pages import ROOT
from tests.support.subjects import LONG

SETTINGS = """
from tests.settings import *
alias = {alias!r}
DBLOCK = {{"SCHEMA": "ops"}} if alias == "postgresql" else {{}}
DATABASES = {{"default": {{**DATABASES[alias], "TEST": {{"NAME": {name!r}}}}}}}
"""

TESTS = """
import asyncio
import threading
import unittest
import pytest
from django.contrib.auth.models import Group
from django.db import connection, transaction
from django.test import TestCase, TransactionTestCase
from dblock import LockTimeout, db_lock

def rename(group, to):
    "What an application does: lock, begin, guard, write."
    with db_lock("group:1", timeout=1) as lock, transaction.atomic():
        lock.guard()
        group.refresh_from_db()
        group.name += to
        group.save()
        return lock.fence

def in_a_thread(function):
    found = []
    def run():
        try:
            found.append(function())
        except Exception as error:
            found.append(error)
        connection.close()
    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    return found[0]

class Both:
    def test_guarded_again_and_again(self):
        group = Group.objects.create(name="a")
        fences = [rename(group, "b") for _ in range(3)]
        assert fences == sorted(set(fences)) and Group.objects.get().name == "abbb"

    def test_a_guard_needs_a_transaction_of_the_applications_own(self):
        with db_lock("k") as lock:
            with self.assertRaisesMessage(transaction.TransactionManagementError, "call it inside atomic()"):
                lock.guard()

    async def test_on_an_event_loop(self):
        async with db_lock("k") as lock:
            assert await lock.averify()
        async with db_lock("k"):
            pass

class InOneTransaction(Both, TestCase):
    @unittest.skipUnless(connection.vendor == "sqlite", "servers have room for two")
    def test_a_second_thread(self):
        with db_lock("k"):
            error = in_a_thread(db_lock("other", timeout=0.3).__enter__)
        assert isinstance(error, LockTimeout) and "use TransactionTestCase" in str(error), error

class InMany(Both, TransactionTestCase):
    def test_a_second_thread(self):
        with db_lock("k"):
            assert isinstance(in_a_thread(db_lock("k", timeout=1).__enter__), LockTimeout)
            lock = db_lock("other", timeout=5)
            assert in_a_thread(lambda: lock.acquire() and lock.release()) is None

@pytest.mark.django_db
def test_with_the_fixture():
    group = Group.objects.create(name="a")
    assert rename(group, "b") < rename(group, "c")

@pytest.mark.django_db(transaction=True)
def test_with_transactions():
    group = Group.objects.create(name="a")
    assert rename(group, "b") < rename(group, "c")
"""


LAST = """
def tearDownModule():
    "It ends before this is written into the history, and the test database with it."
    with db_lock("last"):
        pass
"""


@pytest.mark.direct
@pytest.mark.parametrize(
    ("database", "runner"),
    [
        *((name, "pytest") for name in (DATABASES if LONG else ["postgresql"])),
        *((name, "django") for name in ("sqlite", "postgresql")[: 1 + LONG]),
    ],
    indirect=["database"],
)
def test_a_projects_suite(database: str, runner: str, tmp_path: Path) -> None:
    """Guards work again and again inside the test's own transaction; a second thread is told what to use.

    Of what happened in the test database nothing is written into the history of the real one.
    """
    name = ":memory:" if database == "sqlite" else f"test_users_{os.environ['DBLOCK_TEST_WORKER']}"
    history = 'DBLOCK["HISTORY"] = 1000\n'
    if runner == "django":  # the real tables are those without a schema
        history += 'DBLOCK.pop("SCHEMA", None)\n'
    (tmp_path / "site_settings.py").write_text(SETTINGS.format(alias=ALIASES[database], name=name) + history)
    run(database, "DELETE FROM lock_events")
    (tmp_path / "test_site.py").write_text(TESTS + (LAST if runner == "django" else ""))
    pytest_ = ["pytest", "-q", "-p", "no:randomly", "-p", "no:ddtrace"]
    arguments = ["django", "test", "--noinput"] if runner == "django" else pytest_
    path = os.pathsep.join([str(tmp_path), str(ROOT)])
    env = {**os.environ, "DJANGO_SETTINGS_MODULE": "site_settings", "PYTHONPATH": path}
    done = python("-m", *arguments, environment=env, directory=tmp_path)
    told = done.stderr if runner == "django" else done.stdout
    passed = "Ran [78] tests" if runner == "django" else "10 passed" if database == "sqlite" else "9 passed"
    assert re.search(passed, told), told  # Python 3.12.1 does not count the one that is skipped
    assert run(database, "SELECT lock_key, kind FROM lock_events") == []
