"""`locked_task`: a Celery task that holds a lock while it runs, or from its sending on.

Rule: the task is registered under its own name unless another decorator above (`@app.task`, `@shared_task`) makes a
task of it: then it is that one's, with that one's options.
"""

from __future__ import annotations

import difflib
import enum
import functools
import inspect
from collections.abc import Callable
from types import EllipsisType
from typing import Any, Final, Literal, TypeVar

from celery import Task, signals
from celery._state import connect_on_app_finalize, get_current_app, get_current_task

from dblock.celery import checks as _checks  # noqa: F401 - speaks when a worker begins
from dblock.celery import sending as _sending  # noqa: F401 - sees to what is sent from now on
from dblock.celery.faces import face_for
from dblock.celery.running import execute, spec_of
from dblock.celery.spec import MakeKey, OnBusy, OnRetry, Scope, Spec
from dblock.core.face.key_template import Template
from dblock.core.options import Options, valid_options
from dblock.core.validation import valid_timeout, valid_ttl
from dblock.core.values import Seconds

_LOCKS: Final = ("ttl", *Options._fields, "using")
_OURS: Final = (*_LOCKS, "timeout", "on_busy", "scope", "bind", "busy_timeout", "busy_retries", "queue_ttl", "on_retry")
_CELERYS: Final = ("queue", "exchange", "routing_key", "delivery_mode", "immediate", "mandatory", "shared", "lazy")
"""Options of tasks that are no attributes of every task, and look like some of ours or are none of its class."""


def locked_task(
    key: str | MakeKey | None = None,
    *,
    on_busy: Literal["retry", "wait", "skip", "raise", "join"] | None = None,
    scope: Literal["run", "queue", "both"] = "run",
    bind: Any = False,
    timeout: Seconds | EllipsisType | None = ...,
    busy_timeout: Seconds | None = None,
    busy_retries: int | None = None,
    queue_ttl: Seconds = 3600.0,
    on_retry: Literal["keep", "release"] = "keep",
    interrupt: bool = False,
    **options: Any,
) -> Callable[[Callable[..., Any]], Any]:
    """A Celery task whose runs on one key take turns, in all workers on one database.

    As a decorator it makes a task, as `shared_task` does; below an existing `@app.task` it leaves that to it.

    Args:
        key: a format string over the call's arguments, defaults included (a bound task's `self` is none); or a function
            `(task, *args, **kwargs) -> str`; or nothing, for the task's name and a digest of its arguments. A key that
            cannot be built fails the call that sends the task (InvalidKey, TypeError).

    Keyword Args:
        on_busy: what becomes of a task whose key somebody else holds:
            "retry" (the default): its message goes back to the broker, for up to a minute; neither `max_retries` nor a
            worker is taken up by that. "wait": it stands in the queue, in its worker, up to `timeout`, then
            LockTimeout. "skip": it ends with a result that `dblock.celery.skipped` knows. "raise": LockTimeout.
            "join", for the scopes that lock at sending, where it is the default: a second call returns the
            AsyncResult of the first.
        scope: "run": locked while it runs. "queue": from its sending until it has ended. "both": one lock while it is
            queued, another one while it runs: at most one of each.
        bind: as Celery's; or an Engine of SQLAlchemy's, or a function that returns one, whose database has the lock.
        timeout: seconds for which to wait for the key, in a worker (and "queue", "wait": where it is sent); 0 but for
            "wait", which has the default of `db_lock`.
        busy_timeout: seconds after the first busy try at which "retry" gives up with LockTimeout; None for never.
        busy_retries: how often "retry" goes back at most; None for ever.
        queue_ttl: seconds for which the lock of a message lasts from the moment at which the task is due: nobody renews
            it until a worker runs the task. Too short, and a second message may be sent before the first one ran (which
            then takes the key anew, or acts as `on_busy` says); too long, and the key stays taken for so long when a
            broker loses the message.
        on_retry: what becomes of the lock of a message when the task calls its own `retry()`: "keep": it goes along
            with it; "release".
        interrupt: raise LockLost in the task when its lock is lost, in the main thread of a prefork child, as a soft
            time limit is; elsewhere, and without it, where it calls `lock.check()` or ends.
        options: those of `db_lock` (ttl, renew, using, label, on_lost, ...), and those of `shared_task`.
    """
    if not (key is None or isinstance(key, str) or callable(key)):
        raise TypeError(f"the key comes first, which is text or a function, and bind=engine after it: not {key!r}")
    lock_options = {name: options.pop(name) for name in _LOCKS if name in options}
    _refuse_typos(options)
    told = {name: value for name, value in lock_options.items() if name in Options._fields and name != "label"}
    label = valid_options(label=lock_options.pop("label", ""), **told).label
    if lock_options.get("ttl") is not None:
        _ = valid_ttl(lock_options["ttl"])
    if not isinstance(timeout, EllipsisType):
        timeout = valid_timeout(timeout)
    where = _one_of(Scope, scope, "scope")
    policy = _one_of(OnBusy, on_busy or ("retry" if where is Scope.RUN else "join"), "on_busy")
    if policy is OnBusy.JOIN and where is Scope.RUN:
        raise ValueError('on_busy="join" is for a task that is locked when it is sent: scope="queue" or "both"')
    if busy_retries is not None and (type(busy_retries) is not int or busy_retries < 0):
        raise ValueError(f"busy_retries is a number of times or None, not {busy_retries!r}")
    if isinstance(bind, bool):
        options["bind"] = bind
    spec: dict[str, Any] = {
        "made_key": key,
        "face": face_for(bind),
        "options": lock_options,
        "timeout": timeout,
        "label": label,
        "on_busy": policy,
        "scope": where,
        "on_retry": _one_of(OnRetry, on_retry, "on_retry"),
        "busy_timeout": None if busy_timeout is None else valid_timeout(busy_timeout, "busy_timeout"),
        "busy_retries": busy_retries,
        "queue_ttl": valid_ttl(queue_ttl, "queue_ttl", "how long the lock of a message lasts,"),
        "interrupt": interrupt,
    }
    return _Decorator(lambda function: LockedTask(Spec(function=function, **spec), options))


def _refuse_typos(options: dict[str, Any]) -> None:
    """A task takes any attribute, and a mistyped option of ours would be one."""
    for name in options.keys() - {*_CELERYS}:
        near = ["bind"] if name == "engine" else difflib.get_close_matches(name, _OURS, 1, 0.75)
        if near and not hasattr(Task, name) and "autoretry" not in name:
            raise TypeError(f"locked_task has no option {name!r}: did you mean {near[0]}?")


E = TypeVar("E", bound=enum.StrEnum)


def _one_of(kind: type[E], value: str, name: str) -> E:
    try:
        return kind(value)
    except ValueError:
        raise ValueError(f"{name} is one of {', '.join(map(repr, map(str, kind)))}, not {value!r}") from None


_BRACKETS: Final = "this is a decorator and no task yet: write @locked_task(), with brackets"


class _Decorator:
    """What `locked_task(...)` makes; for whoever forgets the brackets, it says so."""

    def __init__(self, make: Callable[[Callable[..., Any]], LockedTask]) -> None:
        self._make = make

    def __call__(self, function: Callable[..., Any]) -> LockedTask:
        if not callable(function):
            raise TypeError(_BRACKETS)
        return self._make(function)

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"{name}: {_BRACKETS}")


class LockedTask:
    """A task that locks: all that is asked of it is asked of the Celery task of the current app."""

    def __init__(self, spec: Spec, options: dict[str, Any]) -> None:
        function = spec.function
        if inspect.iscoroutinefunction(function):
            raise TypeError(f"{function!r} is a coroutine function, which Celery's workers do not run")
        if hasattr(function, "apply_async"):
            raise TypeError(
                f"put @locked_task below @app.task or @shared_task, or without them: {function!r} is a task"
            )
        if not str(getattr(function, "__name__", "")).isidentifier():
            raise TypeError(f"{function!r} has no name, which Celery calls a task by: write a def")
        if isinstance(spec.made_key, str):
            _ = Template(spec.made_key, function, bound=options.get("bind", False))
        self.dblock_spec, self._options, self._given_name = spec, options, options.get("name")
        self._only_in = None if options.pop("shared", True) else get_current_app()
        functools.update_wrapper(self, function)
        self._guarded = _guarded(spec)
        _ = connect_on_app_finalize(self._when_finalized)
        _all.append(self)

    # -- as a function, for a decorator above

    @property
    def __call__(self) -> Callable[..., Any]:
        """With the signature of the function, which Celery looks for here."""

        @functools.wraps(self._guarded)
        def call(*args: Any, **kwargs: Any) -> Any:
            task = get_current_task()
            above = task is not None and _is_above(task, self)
            return (self._below() if above else self._task)(*args, **kwargs)

        return call

    def __get__(self, instance: Any, owner: Any) -> Any:
        """The `run` of a bound task above is a method."""
        return self._below().__get__(instance, owner) if issubclass(owner, Task) else self

    def _below(self) -> Callable[..., Any]:
        """The function, for the task that another decorator has made of it."""
        if self._options.keys() - {"bind"} or self._options.get("bind"):
            raise TypeError(f"options of the task {self!r} are those of the decorator above it")
        return self._guarded

    # -- as a task

    @property
    def _task(self) -> Any:
        return self.register(get_current_app())

    def register(self, app: Any) -> Any:
        """The task in that app, made at first use if no decorator above has made it."""
        name = self._given_name or app.gen_task_name(self.__name__, self.__module__)
        above = next((task for task in app.tasks.values() if _is_above(task, self)), None)
        if above is not None:
            return above
        found = app.tasks.get(name)
        if found is not None and spec_of(found) is None:
            raise ValueError(f"another task, which does not lock, is registered as {name!r}")
        return app._task_from_fun(self._guarded, **self._options) if found is None else found

    def _when_finalized(self, app: Any) -> None:
        if self._only_in is None or self._only_in is app:
            # Afterwards: the decorators above come first.
            _ = app.on_after_finalize.connect(lambda **_: self.register(app), weak=False)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "_task":
            raise AttributeError(name)
        return getattr(self._task, name)

    def __reduce__(self) -> Any:
        return self._task.__reduce__()

    def __repr__(self) -> str:
        return f"<@locked_task {self.__module__}.{self.__qualname__}>"


_all: Final[list[LockedTask]] = []


def _is_above(task: Any, locked: LockedTask) -> bool:
    """Was that task made of this one by another decorator?"""
    function = vars(type(task)).get("__wrapped__")
    return getattr(function, "__func__", function) is locked


def _guarded(spec: Spec) -> Callable[..., Any]:
    function = spec.function

    @functools.wraps(function)
    def guarded(*args: Any, **kwargs: Any) -> Any:
        return execute(spec, args, kwargs)

    guarded.__signature__ = inspect.signature(function)  # type: ignore[attr-defined]
    guarded.dblock_spec = spec  # type: ignore[attr-defined]
    return guarded


def _worker_begins(sender: Any, **_: Any) -> None:
    """What was defined after its app was finalized, and is nobody's so far."""
    for task in _all:
        _ = task.register(sender.app)


_ = signals.worker_init.connect(_worker_begins, dispatch_uid="dblock.celery.decorator", weak=False)
