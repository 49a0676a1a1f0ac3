"""Several Celery apps in one process: a locked task belongs to its app, or to every app if it is shared."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import Any

import celery
import pytest
from celery import _state
from sqlalchemy import Engine

from dblock.celery import current_lock, locked_task


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


def test_pydantic(engine: Engine) -> None:
    """Celery puts a function of its own between its task and the locked one."""
    pytest.importorskip("pydantic")
    app = make_app("app")

    @locked_task("k{n}", engine=engine, app=app, pydantic=True, name="typed")
    def typed(n: int) -> str:
        return f"{n} {current_lock().key}"

    assert typed.apply((3,)).get() == "3 k3"
