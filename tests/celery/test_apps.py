"""Several Celery apps in one process: a locked task belongs to its app, or to every app if it is shared."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import celery
import pytest
from celery import _state, shared_task
from sqlalchemy import Engine, create_engine
from sqlalchemy.pool import NullPool

from dblock.celery import current_lock, locked_task
from sqlalchemy_dblock import metadata

KIT = """
import pytest
from celery import Task, shared_task
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


@locked_task("of the module", bind=engine, name="of_the_module")
def of_the_module():
    return current_lock().key


@pytest.mark.parametrize("base", [One, Two])
def test_tasks(celery_app, celery_worker, base):
    @celery_app.task(base=base, bind=True)
    @locked_task("work", bind=engine)
    def work(self):
        return self.mark, base.mark, current_lock().key

    @locked_task("own", bind=engine, base=base, autoretry_for=(KeyError,), max_retries=2, default_retry_delay=0)
    def own():
        tries.append(current_lock().fence)
        if len(tries) == 1:
            raise KeyError
        return own.mark, base.mark, len(set(tries))

    @shared_task(base=base, bind=True)
    @locked_task("shared", bind=engine, scope="queue")
    def shared(self):
        return self.mark, base.mark, current_lock().key

    tries = []
    celery_worker.reload()
    assert work.delay().get(timeout=30) == [base.mark, base.mark, "work"]
    assert of_the_module.delay().get(timeout=30) == "of the module"
    assert own.delay().get(timeout=30) == [base.mark, base.mark, 2]
    assert shared.delay().get(timeout=30) == [base.mark, base.mark, "shared"]


def test_nothing_is_left(celery_app):
    assert {"of_the_module"} == {name for name in celery_app.tasks if not name.startswith("celery.")}


@pytest.mark.parametrize("number", [1, 2])
def test_session(celery_session_app, celery_session_worker, number):
    @celery_session_app.task(name=f"session {number}", bind=True, max_retries=1)
    @locked_task("session", bind=engine)
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
    environment = {name: value for name, value in os.environ.items() if name != "DJANGO_SETTINGS_MODULE"}
    plugins = [f"-pno:{name}" for name in ("randomly", "django", "asyncio", "xdist", "dblock", "ddtrace")]
    command = [sys.executable, "-m", "pytest", "-q", "-Wdefault", *plugins, "--rootdir=.", "test_kit.py"]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "5 passed" in done.stdout


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[Engine]:
    """The locks' database."""
    engine = create_engine(f"sqlite:///{tmp_path}/locks.sqlite3", poolclass=NullPool)
    metadata.create_all(engine)
    yield engine
    engine.dispose()


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
@pytest.mark.parametrize("bind", [True, False])
def test_a_task_of_one_app_reaches_no_other(engine: Engine, finalized: bool, bind: bool) -> None:
    """A decorator of that app is above it, or `shared=False` leaves it to the app that is current."""
    mine, other = make_app("mine"), make_app("other")
    if finalized:
        mine.finalize()
    other.finalize()

    @mine.task(name="above", shared=False, bind=bind)
    @locked_task("k", bind=engine)
    def above(*_: Any) -> Any:
        return current_lock().key

    mine.set_current()

    @locked_task("k", bind=engine, shared=False, name="own")
    def own() -> Any:
        return current_lock().key

    other.set_current()
    for app in (other, make_app("later")):
        assert not names(app) & {"above", "own", f"{__name__}.above", f"{__name__}.own"}
    assert {"above", "own"} <= names(mine)
    assert above.app is own.app is mine
    assert above() == own() == above.apply().get() == own.apply().get() == above.run() == "k"
    assert not names(other) & {"above", "own", f"{__name__}.above", f"{__name__}.own"}


def test_a_shared_task_belongs_to_every_app(engine: Engine) -> None:
    """To those that were finalized before it was defined, and to those that are finalized later."""
    early, late = make_app("early"), make_app("late")
    early.finalize()

    @locked_task("k", bind=engine, name="own")
    def own() -> Any:
        return current_lock().key

    @shared_task(name="above")
    @locked_task("k", bind=engine)
    def above() -> Any:
        return current_lock().key

    for app in (early, late):
        assert {"own", "above"} <= names(app)
        assert f"{__name__}.above" not in names(app)
        app.set_current()
        assert own.app is above.app is app
        assert own.apply().get() == above.apply().get() == "k"


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("finalized", [True, False])
def test_the_decorator_above_decides(engine: Engine, shared: bool, finalized: bool) -> None:
    """Its base class and options hold under the name that both would give the task."""
    app, other, name = make_app("app"), make_app("other"), f"{__name__}.work"
    if finalized:
        app.finalize()
    other.finalize()

    class Base(celery.Task):  # type: ignore[misc]
        mark = "base"

    locked = locked_task("k", bind=engine)(work)
    assert name in names(other)
    decorator = shared_task if shared else app.task
    task = decorator(base=Base, bind=True, shared=shared, max_retries=9)(locked)
    app.set_current()
    assert task.apply().get() == ["base", "k"]
    assert (task.max_retries, locked.max_retries) == (9, 9)
    assert (name in names(other)) == shared
    if not shared:
        other.set_current()
        with pytest.raises(TypeError, match="another app"):
            locked.delay()


def work(self: Any) -> Any:
    """The function of several tasks."""
    return [self.mark, current_lock().key]


def test_the_newer_of_two_shared_tasks_of_one_name(engine: Engine) -> None:
    """A later app has that one, in whatever order Celery asks for them; an app that has the older one keeps it."""

    def define(number: int) -> Any:
        @locked_task("k", bind=engine, name="same", rate_limit=f"{number}/s")
        def same() -> int:
            return number

        return same

    tasks = [define(number) for number in range(20)]
    first = make_app("first")
    assert first.tasks["same"].rate_limit == "19/s"
    first.set_current()
    first.close()
    assert tasks[-1].apply().get() == 19
    newer = define(20)
    second = make_app("second")
    second.set_current()
    assert newer.apply().get() == 20
    assert first.tasks["same"].rate_limit == "19/s"


def test_an_app_that_is_closed_gets_no_more_tasks(engine: Engine) -> None:
    """What is defined after `app.close()`."""
    app = make_app("closed")
    app.finalize()
    app.close()
    locked = locked_task("k", bind=engine, name="late")(work)
    assert "late" not in names(app)
    assert locked.name == "late"


def test_an_app_that_is_gone_is_forgotten(engine: Engine) -> None:
    """With the tasks that are its alone."""

    def use() -> list[weakref.ref[Any]]:
        app = make_app("gone")
        app.set_current()

        @app.task(shared=False, name="above")
        @locked_task("k", bind=engine)
        def above() -> Any:
            return current_lock().key

        own = locked_task("k", bind=engine, shared=False, name="own", base=type("Own", (celery.Task,), {}))(work)
        assert above.apply().get() == "k"
        assert own.name == "own"
        make_app("current").set_current()
        return [weakref.ref(each) for each in (app, own)]

    gone = use()
    _ = gc.collect()
    assert [each() for each in gone] == [None, None]


def test_a_name_that_a_task_without_a_lock_has(engine: Engine, caplog: pytest.LogCaptureFixture) -> None:
    """The app keeps that task, and the log says so; other apps have the locked one."""
    app, other = make_app("app"), make_app("other")

    def plain() -> None: ...

    app.task(name="same", shared=False)(plain)
    locked = locked_task("k", bind=engine, name="same")(work)
    assert names(other) >= {"same"}
    assert "'same'" not in caplog.text  # the shared tasks of other tests are in each new app as well
    assert not hasattr(app.tasks["same"].run, "dblock_spec")
    assert "'same'" in caplog.text
    app.set_current()
    with pytest.raises(ValueError, match="registered"):
        locked.delay()


def test_pydantic(engine: Engine) -> None:
    """Celery puts a function of its own between its task and the locked one."""
    pytest.importorskip("pydantic")
    app = make_app("app")

    @app.task(pydantic=True, shared=False, name="typed")
    @locked_task("k{n}", bind=engine)
    def typed(n: int) -> str:
        return f"{n} {current_lock().key}"

    assert typed.apply((3,)).get() == "3 k3"
