"""The test suites of projects that use the kit: TestCase, TransactionTestCase, pytest-django, pytest-asyncio, or none.

No conftest.py: pytest finds the fixtures by the distribution's entry point.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.conftest import ALIASES
from tests.django.test_users_suites import SETTINGS
from tests.support.loaded import python
from tests.support.pages import ROOT, block

SITE = """
import pytest
from django.contrib.auth.models import Group
from django.db import transaction
from django.http import HttpResponse
from django.test import AsyncClient, Client, TestCase, TransactionTestCase, override_settings
from django.urls import path
from dblock import LockLost, LockTimeout, db_lock, testing

@db_lock("stock:{sku}", timeout=10)
def sell(sku):
    with transaction.atomic():
        Group.objects.create(name=sku)
    return Group.objects.count()

def view(request, sku):
    try:
        return HttpResponse(sell(sku))
    except LockTimeout:
        return HttpResponse("busy", status=503)

async def aview(request, sku):
    try:
        async with db_lock(f"stock:{sku}", timeout=10):
            return HttpResponse("sold")
    except LockTimeout:
        return HttpResponse("busy", status=503)

urlpatterns = [path("sell/<sku>", view), path("asell/<sku>", aview)]

class Kit:
    "With the test's own database, and in memory."
    def test_recorded(self):
        with testing.record() as locks:
            assert self.client.post("/sell/42").status_code == 200
            locks.assert_locked("stock:42", times=1)
            locks.assert_released()
            with locks.busy("stock:42"), self.assertRaises(LockTimeout):
                with db_lock("stock:42", timeout=0.1):
                    pass
            with self.assertRaises(LockLost), db_lock("stock:43") as lock:
                locks.take_away("stock:43")
                lock.check()
            assert self.client.post("/sell/43").status_code == 200

    def test_in_memory(self):
        locks = self.enterContext(testing.memory())
        with locks.busy("stock:42"):
            assert self.client.post("/sell/42").status_code == 503
        assert self.client.post("/sell/42").content == b"1"
        assert locks.clock.now() == 10
        locks.assert_locked("stock:42", times=1)
        locks.assert_released()

    async def test_on_an_event_loop(self):
        with testing.memory() as locks:
            with locks.busy("stock:42"):
                assert (await self.async_client.post("/asell/42")).status_code == 503
            assert (await self.async_client.post("/asell/42")).status_code == 200
            locks.assert_locked("stock:42", times=1)
        with testing.record() as locks:
            async with locks.busy("stock:42"):
                assert not await db_lock("stock:42").aacquire(blocking=False)
            assert (await self.async_client.post("/asell/42")).status_code == 200

    def test_queries(self):
        "As many, and the same, with the kit and without it."
        def asked():
            Group.objects.all().delete()
            with self.assertNumQueries(4):
                sell("42")
        asked()
        with testing.record() as locks:
            asked()
            with self.assertNumQueries(0):
                with locks.busy("other"):
                    pass
                with db_lock("k"), self.assertRaises(LockLost), db_lock("third"):
                    locks.take_away("third")
        with testing.memory():
            asked()
        asked()

@override_settings(ROOT_URLCONF=__name__)
class InOneTransaction(Kit, TestCase):
    pass

@override_settings(ROOT_URLCONF=__name__)
class InMany(Kit, TransactionTestCase):
    pass
"""
BY_PYTEST = """
import asyncio
import sys
import pytest
from test_site import Client, Group, LockLost, LockTimeout, db_lock, sell, testing

def test_forgotten():
    "Without a fixture a lock is in the database: pytest-django says what is missing."
    with pytest.raises(RuntimeError, match="Database access not allowed"):
        with db_lock("k"):
            pass

@pytest.mark.django_db
@pytest.mark.urls("test_site")
def test_recorded(dblock_recorder, client):
    with dblock_recorder.busy("stock:43"):
        assert client.post("/sell/42").status_code == 200
    dblock_recorder.assert_locked("stock:42", times=1)
    dblock_recorder.assert_not_locked("stock:43")

@pytest.mark.asyncio
@pytest.mark.urls("test_site")
async def test_of_pytest_asyncio(dblock_memory, async_client):
    with dblock_memory.busy("stock:42"):
        assert (await async_client.post("/asell/42")).status_code == 503
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(async_client.post("/asell/42")) for _ in range(3)]
    assert {task.result().status_code for task in tasks} == {200}
    dblock_memory.assert_locked("stock:42", times=3)
    with pytest.raises(LockLost):
        async with db_lock("k"):
            dblock_memory.take_away("k")

@pytest.mark.asyncio
@pytest.mark.django_db(transaction=True)
async def test_recorded_by_pytest_asyncio(dblock_recorder):
    async with dblock_recorder.busy("k"):
        assert not await db_lock("k").aacquire(blocking=False)
    async with db_lock("k"):
        pass
    dblock_recorder.assert_locked("k", times=1)

@pytest.mark.xfail(strict=True, raises=ZeroDivisionError)
def test_that_fails_inside(dblock_memory):
    with db_lock("k"), dblock_memory.busy("b"), dblock_memory.frozen_renewal():
        1 / 0

def test_after_it(dblock_memory):
    "Without a database, which pytest-django would refuse to this test."
    assert not db_lock("k").locked() and not db_lock("b").locked()
    with db_lock("k") as lock:
        dblock_memory.clock.advance(100)
        lock.check()

def test_nothing_is_imported_that_is_not_used():
    assert "sqlalchemy" not in sys.modules
"""

SERVICE = """
import sys
sys.modules["django"] = sys.modules["asgiref"] = None
import pytest
from sqlalchemy import StaticPool, create_engine
from sqlalchemy.ext.asyncio import create_async_engine
from sqlalchemy_dblock import LockTimeout, db_lock, metadata

engine = create_engine("sqlite://", poolclass=StaticPool, connect_args={"check_same_thread": False})
async_engine = create_async_engine("sqlite+aiosqlite://")

@db_lock(engine, "stock:{sku}")
def sell(sku):
    return sku

@db_lock(async_engine, "stock:{sku}")
async def asell(sku):
    return sku

def test_in_memory(dblock_memory):
    with dblock_memory.busy("stock:42"), pytest.raises(LockTimeout):
        sell(42)
    assert sell(42) == 42

@pytest.mark.asyncio
async def test_on_an_event_loop(dblock_memory):
    with dblock_memory.busy("stock:42"), pytest.raises(LockTimeout):
        await asell(42)
    assert await asell(42) == 42
    dblock_memory.assert_locked("stock:42", times=1)

def test_recorded(dblock_recorder):
    metadata.create_all(engine)
    with pytest.raises(TypeError, match=r"without Django say where: busy\\(key, engine\\)"):
        dblock_recorder.busy("stock:42")
    with dblock_recorder.busy("stock:42", engine):
        assert not db_lock(engine, "stock:42").acquire(blocking=False)
    assert sell(42) == 42
    dblock_recorder.assert_locked("stock:42")
"""


def suite(directory: Path, *arguments: str, **environment: str) -> str:
    """What a project's tests say, which pass in a process of their own; the plugin is there as the wheel has it."""
    installed = directory / "dblock_here-0.dist-info"
    installed.mkdir()
    (installed / "METADATA").write_text("Metadata-Version: 2.1\nName: dblock-here\nVersion: 0\n")
    (installed / "entry_points.txt").write_text("[pytest11]\ndblock = dblock.pytest_plugin\n")
    paths = [str(directory), str(ROOT), os.environ.get("PYTHONPATH", "")]
    env = {**os.environ, **environment, "PYTHONPATH": os.pathsep.join(paths)}
    done = python("-m", *arguments, environment=env, directory=directory)
    return done.stdout + done.stderr


PYTEST = (
    *("pytest", "-q", "-p", "no:randomly", "-p", "no:ddtrace", "-W", "error"),
    *("-o", "asyncio_default_fixture_loop_scope=function"),
)


@pytest.mark.direct
@pytest.mark.parametrize(
    ("database", "runner"), [("sqlite", "django"), ("postgresql", "pytest")], indirect=["database"]
)
def test_a_site(database: str, runner: str, tmp_path: Path) -> None:
    """Django's: on SQLite in memory, and on a server."""
    name = ":memory:" if database == "sqlite" else f"test_kit_{os.environ['DBLOCK_TEST_WORKER']}"
    (tmp_path / "site_settings.py").write_text(SETTINGS.format(alias=ALIASES[database], name=name))
    (tmp_path / "test_site.py").write_text(SITE)
    if runner == "pytest":
        (tmp_path / "test_by_pytest.py").write_text(BY_PYTEST)
    arguments = ("django", "test", "--noinput") if runner == "django" else PYTEST
    told = suite(tmp_path, *arguments, DJANGO_SETTINGS_MODULE="site_settings")
    assert ("Ran 8 tests" if runner == "django" else "14 passed, 1 xfailed") in told, told


def test_a_service(tmp_path: Path) -> None:
    """SQLAlchemy's, without Django."""
    (tmp_path / "test_service.py").write_text(SERVICE)
    told = suite(tmp_path, *PYTEST, "-p", "no:django")
    assert "3 passed" in told, told


def test_the_pages_examples(tmp_path: Path) -> None:
    """Those of docs/testing.md."""
    (tmp_path / "site_settings.py").write_text(SETTINGS.format(alias="default", name=":memory:"))
    (tmp_path / "test_by_pytest.py").write_text(block("docs/testing.md", "testing-pytest"))
    (tmp_path / "test_by_unittest.py").write_text(block("docs/testing.md", "testing-unittest"))
    told = suite(tmp_path, *PYTEST, DJANGO_SETTINGS_MODULE="site_settings")
    assert "6 passed" in told, told
