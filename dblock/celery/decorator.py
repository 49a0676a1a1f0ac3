"""`locked_task`: a decorator that makes a `LockTask`, as `shared_task` and `app.task` make a `Task`."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any, Concatenate, Literal, ParamSpec, TypeVar, Unpack, overload

from celery import Celery, current_app
from celery._state import _get_active_apps, connect_on_app_finalize
from celery.local import Proxy

from dblock.celery.options import LockOptions, Spec, TaskOptions
from dblock.celery.task import LockTask
from dblock.core.errors import LockTimeout
from dblock.core.options import unknown_options

P = ParamSpec("P")
R = TypeVar("R")


@overload
def locked_task(function: Callable[P, R], /) -> LockTask[P, R]: ...
@overload
def locked_task(
    key: str = ..., /, *, bind: Literal[True], app: Celery | None = ..., **options: Unpack[TaskOptions]
) -> Callable[[Callable[Concatenate[Any, P], R]], LockTask[P, R]]: ...
@overload
def locked_task(
    key: str = ..., /, *, bind: Literal[False] = ..., app: Celery | None = ..., **options: Unpack[TaskOptions]
) -> Callable[[Callable[P, R]], LockTask[P, R]]: ...
def locked_task(given: Any = None, /, *, bind: bool = False, app: Any = None, **options: Any) -> Any:
    """A Celery task whose runs on one key take turns, in all workers on one database.

    Args:
        given: the key: a format string over the call's arguments, defaults included (a bound task's `self` is none). By
            default the task's name and a digest of its arguments. A key that cannot be built fails the call that sends
            the task (InvalidKey, TypeError).

    Keyword Args:
        bind: as Celery's: the function takes the task as its first argument.
        app: the Celery app that has the task; by default every app of the process has it, as of `shared_task`.
        options: those of `LockOptions`, and Celery's of a task.

    Raises TypeError for options that it does not have, ValueError for those that do nothing or make no sense together.
    """
    known = [*TaskOptions.__annotations__, "bind", "app"]
    if unknown := options.keys() - set(known):  # Celery would make attributes of them
        raise unknown_options(sorted(unknown), known, "locked_task")
    if callable(given):
        if bind or app is not None or options:
            raise TypeError("the key comes first, which is text; a function that makes it is key=function")
        return _made(given, bind, app, options)
    if given is not None:
        if not isinstance(given, str) or "key" in options:
            raise TypeError(f"the key comes first, which is text, and engine=engine after it: not {given!r}")
        options["key"] = given
    return lambda function: _made(function, bind, app, options)


def _made(function: Any, bind: bool, app: Any, given: dict[str, Any]) -> Any:
    """The task of that function: in one app, or in every app, those that come later too."""
    if inspect.iscoroutinefunction(function):
        raise TypeError(f"{function!r} is a coroutine function, which Celery's workers do not run")
    if hasattr(function, "apply_async"):
        raise TypeError(f"locked_task makes the task, without @app.task or @shared_task below it: {function!r} is one")
    ours = given.keys() & LockOptions.__annotations__.keys()
    spec = Spec(function, bind, **{name: given[name] for name in ours})
    options = {name: value for name, value in given.items() if name not in ours}

    def make(app: Any, **how: Any) -> Any:
        """Before the task's base comes LockTask, and a busy key is no error in the log."""
        base = options.get("base") or app.Task
        throws = options.get("throws", base.throws)
        throws = (*(throws if isinstance(throws, tuple) else (throws,)), LockTimeout)
        made = {**options, "base": type("LockTask", (LockTask, base), {}), "spec": spec, "throws": throws}
        return app.task(shared=False, bind=bind, **how, **made)(function)

    def current() -> Any:
        name = options.get("name") or current_app.gen_task_name(function.__name__, function.__module__)
        return current_app.tasks[name]

    if app is not None:
        return make(app)
    connect_on_app_finalize(partial(make, lazy=False))
    for each in list(_get_active_apps()):
        if each.finalized:
            with each._finalize_mutex:
                make(each, lazy=False)
    return Proxy(current)
