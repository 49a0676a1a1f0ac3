"""Several Celery apps in one process: a locked task belongs to its app, or to every app if it is shared."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import celery
import pytest
from celery import _state
from sqlalchemy import Engine

from dblock.celery import current_lock, locked_task
from tests.celery.conftest import python

KIT = """
import pytest
from celery import Task
from sqlalchemy import create_engine
from dblock.celery import current_lock, locked_task
from sqlalchemy_dblock import metadata

pytest_plugins = ("celery.contrib.pytest",)
engine = create_engine("sqlite:///locks.sqlite3")
metadata.create_all(engine)


@pytest.fixture(scope="session")
def celery_config():
    return {"broker_transport_options": {"polling_interval": 0.02}}


class One(Task):
    mark = "one"


class Two(Task):
    mark = "two"


@locked_task("of the module", engine=engine, name="of_the_module")
def of_the_module():
    return current_lock().key


@pytest.mark.parametrize("base", [One, Two])
def test_tasks(celery_app, celery_worker, base):
    @locked_task("work", engine=engine, app=celery_app, base=base, bind=True)
    def work(self):
        return self.mark, base.mark, current_lock().key

    @locked_task("own", engine=engine, base=base, autoretry_for=(KeyError,), max_retries=2, default_retry_delay=0)
    def own():
        tries.append(current_lock().fence)
        if len(tries) == 1:
            raise KeyError
        return own.mark, base.mark, len(set(tries))

    tries = []
    celery_worker.reload()
    assert work.delay().get(timeout=30) == [base.mark, base.mark, "work"]
    assert of_the_module.delay().get(timeout=30) == "of the module"
    assert own.delay().get(timeout=30) == [base.mark, base.mark, 2]


def test_nothing_is_left(celery_app):
    assert {"of_the_module"} == {name for name in celery_app.tasks if not name.startswith("celery.")}


@pytest.mark.parametrize("number", [1, 2])
def test_session(celery_session_app, celery_session_worker, number):
    @locked_task("session", engine=engine, app=celery_session_app, name=f"session {number}", bind=True, max_retries=1)
    def work(self):
        if not self.request.retries:
            raise self.retry(countdown=0)
        return number, current_lock().key

    celery_session_worker.reload()
    assert work.delay().get(timeout=30) == [number, "session"]
    assert of_the_module.delay().get(timeout=30) == "of the module"
"""


@pytest.mark.workers
@pytest.mark.timeout(180)
def test_the_test_kit_of_celery(tmp_path: Path) -> None:
    """Each test has its own app with its own tasks, also of the names and keys that an earlier test used."""
    (tmp_path / "test_kit.py").write_text(KIT)
    plugins = [f"-pno:{name}" for name in ("randomly", "django", "asyncio", "xdist", "dblock", "ddtrace")]
    done = python("-m", "pytest", "-q", "-Wdefault", *plugins, "--rootdir=.", "test_kit.py", cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "5 passed" in done.stdout


@pytest.fixture(autouse=True)
def _registries_of_celery() -> Iterator[None]:
    """There is no app but those of the test, and its shared tasks end with it, as in Celery's own test kit."""
    apps, shared = _state._apps, set(_state._on_app_finalizers)
    _state._apps = weakref.WeakSet()
    yield
    _state._apps, _state._on_app_finalizers = apps, shared


def make_app(name: str, **options: Any) -> celery.Celery:
    """An app that is not the current one."""
    return celery.Celery(name, broker="memory://", set_as_current=False, **options)


def names(app: celery.Celery) -> set[str]:
    """Those of its tasks that Celery did not bring."""
    return {name for name in app.tasks if not name.startswith(("celery.", "dblock."))}


@pytest.mark.parametrize("finalized", [True, False])
def test_a_task_of_one_app_reaches_no_other(engine: Engine, finalized: bool) -> None:
    """Neither those that are there nor those that come later."""
    mine, other = make_app("mine"), make_app("other")
    if finalized:
        mine.finalize()
    other.finalize()

    @locked_task("k", engine=engine, app=mine, name="own")
    def own() -> Any:
        return current_lock().key

    other.set_current()
    for app in (other, make_app("later")):
        assert "own" not in names(app)
    assert "own" in names(mine)
    assert own.app is mine
    assert own() == own.apply().get() == "k"
    assert "own" not in names(other)


def test_a_shared_task_belongs_to_every_app(engine: Engine) -> None:
    """To those that were finalized before it was defined, and to those that are finalized later; with their classes."""
    early = make_app("early", task_cls=Marked)
    early.finalize()

    @locked_task("k", engine=engine, name="own")
    def own() -> Any:
        return current_lock().key

    for app in (early, make_app("late", task_cls=Marked)):
        assert "own" in names(app)
        app.set_current()
        assert own.app is app
        assert own.apply().get() == "k"
        assert own.mark == "marked"


class Marked(celery.Task):  # type: ignore[misc]
    """An app's own class of tasks."""

    mark = "marked"


def test_an_app_that_is_gone_is_forgotten(engine: Engine) -> None:
    """With the tasks that are its alone."""

    def use() -> weakref.ref[Any]:
        app = make_app("gone")
        app.set_current()
        own = locked_task("k", engine=engine, app=app, name="own")(work)
        assert own.apply().get() == "k"
        make_app("current").set_current()
        return weakref.ref(app)

    gone = use()
    _ = gc.collect()
    assert gone() is None


def work() -> Any:
    """The function of a task."""
    return current_lock().key


def test_pydantic(engine: Engine) -> None:
    """Celery puts a function of its own between its task and the locked one."""
    pytest.importorskip("pydantic")
    app = make_app("app")

    @locked_task("k{n}", engine=engine, app=app, pydantic=True, name="typed")
    def typed(n: int) -> str:
        return f"{n} {current_lock().key}"

    assert typed.apply((3,)).get() == "3 k3"
