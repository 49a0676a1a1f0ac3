"""`locked_task`: a Celery task that holds a lock while it runs, or from its sending on.

Rule: alone, it is a shared task: every app registers it under its own name, as it does with those of `shared_task`, and
it is Celery that keeps the list of them. A decorator above (`@app.task`, `@shared_task`) makes a task of it with its
own options and in its own apps; then this module registers nothing.
"""

from __future__ import annotations

import difflib
import enum
import functools
import inspect
import itertools
import weakref
from collections.abc import Callable
from types import EllipsisType
from typing import Any, Final, Literal, TypeVar

from celery import Celery, Task, _state
from celery._state import connect_on_app_finalize, get_current_app

from dblock.celery import checks as _checks  # noqa: F401 - speaks when a worker begins
from dblock.celery import sending as _sending  # noqa: F401 - sees to what is sent from now on
from dblock.celery.faces import face_for
from dblock.celery.running import execute, spec_of
from dblock.celery.spec import MakeKey, OnBusy, OnRetry, Scope, Spec, refuse_others
from dblock.core.lock.key_template import Template
from dblock.core.log import warn
from dblock.core.options import Options, valid_options
from dblock.core.share_keys import valid_permits
from dblock.core.validation import valid_timeout, valid_ttl
from dblock.core.values import Seconds

_LOCKS: Final = ("ttl", *(name for name in Options._fields if name not in {"on_busy", "otherwise"}), "using")
_OURS: Final = (
    *_LOCKS,
    "timeout",
    "on_busy",
    "scope",
    "bind",
    "busy_timeout",
    "busy_retries",
    "queue_ttl",
    "on_retry",
    "permits",
)
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
    permits: int | None = None,
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
            "retry" (the default): its message goes back to the broker, with pauses that grow to 60 s; this does not
            count for `max_retries`, nor occupy a worker. "wait": its worker waits in the queue, up to `timeout`, then
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
        permits: so many runs may hold the key at a time, as of a semaphore (`db_semaphore`); only with scope="run".
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
    if permits is not None:
        permits = valid_permits(permits)
        if where is not Scope.RUN:
            raise ValueError('permits is for tasks that are locked while they run: scope="run"')
        if "reentrant" in lock_options:
            raise ValueError("reentrant is not for permits: each run has one of its own")
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
        "permits": permits,
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
    """A task takes any attribute, and a mistyped option of ours would be one, or one of another library's."""
    refuse_others(options, options.get("base"))
    if "otherwise" in options:
        raise TypeError("locked_task has no option 'otherwise': dblock.celery.skipped() knows a skipped task's result")
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
    """What `locked_task(...)` returns. If the brackets were forgotten, any use of the task says so."""

    def __init__(self, make: Callable[[Callable[..., Any]], LockedTask]) -> None:
        self._make = make

    def __call__(self, function: Callable[..., Any]) -> LockedTask:
        if not callable(function):
            raise TypeError(_BRACKETS)
        return self._make(function)

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"{name}: {_BRACKETS}")


class LockedTask:
    """A task that locks. Its other attributes are those of the Celery task of the current app."""

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
        self._home = None if options.pop("shared", True) else get_current_app()
        """The only app that has it, unless it is shared."""
        self._is_below = False
        """Whether a decorator above has made a task of it."""
        self._apps = weakref.WeakSet[Any]()
        """The apps in which it is registered under its own name."""
        self._number = next(_numbers)
        functools.update_wrapper(self, function)
        self._guarded = _guarded(spec)
        if self._home is None:
            _ = connect_on_app_finalize(self._when_finalized)
        elif not self._home.finalized:
            _ = self._home.on_after_finalize.connect(self._offer, weak=False)
        for app in list(_state._get_active_apps()):
            if app.finalized and (self._home is None or self._home is app):
                with app._finalize_mutex:
                    self._offer(app)

    # -- as a function, for a decorator above

    @property
    def __call__(self) -> Callable[..., Any]:
        """With the signature of the function, which Celery looks for here."""

        @functools.wraps(self._guarded)
        def call(*args: Any, **kwargs: Any) -> Any:
            return (self._below() if self._is_below else self._task)(*args, **kwargs)

        return call

    def __get__(self, instance: Any, owner: Any) -> Any:
        """The `run` of a bound task above is a method."""
        return self._below().__get__(instance, owner) if issubclass(owner, Task) else self

    def _below(self) -> Callable[..., Any]:
        """The function, for the task that another decorator has made of it."""
        theirs = sorted(name for name, value in self._options.items() if name != "bind" or value)
        if theirs:
            raise TypeError(f"{self!r}: give {', '.join(theirs)} to the decorator above it, which makes the task")
        return self._guarded

    def give_way(self) -> None:
        """Unregister it everywhere: a decorator above makes a task of it."""
        self._is_below, self._home = True, None
        _state._on_app_finalizers.discard(self._when_finalized)
        for app in list(self._apps):
            with app._finalize_mutex:
                _ = app._tasks.pop(self._name_in(app), None)
        self._apps.clear()

    # -- as a task

    @property
    def _task(self) -> Any:
        return self.register(self._home or get_current_app())

    def register(self, app: Any) -> Any:
        """The task in that app: the one that was made of it, else a new one."""
        found = next((task for task in app.tasks.values() if spec_of(task) is self.dblock_spec), None)
        if found is not None:
            return found
        if self._is_below:
            raise TypeError(f"{self!r} is no task of {app!r}: the decorator above it made a task of another app")
        name = self._name_in(app)
        if name in app.tasks and spec_of(app.tasks[name]) is None:
            raise ValueError(f"another task, which does not lock, is registered as {name!r}")
        task = app._task_from_fun(self._guarded, **self._options)
        if spec_of(task) is self.dblock_spec:  # and not an older one of the same name
            self._apps.add(app)
        return task

    def _name_in(self, app: Any) -> str:
        return self._given_name or str(app.gen_task_name(self.__name__, self.__module__))

    def _offer(self, sender: Any, **_: Any) -> None:
        """Register it in a finalized app, unless a decorator above did or another task has its name."""
        if not self._is_below and self._name_in(sender) not in sender._tasks:
            _ = self.register(sender)

    def _when_finalized(self, app: Any) -> None:
        # Afterwards: the decorators above come first.
        _ = app.on_after_finalize.connect(_offer_all, dispatch_uid="dblock.celery.decorator", weak=False)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "_task":
            raise AttributeError(name)
        return getattr(self._task, name)

    def __reduce__(self) -> Any:
        return self._task.__reduce__()

    def __repr__(self) -> str:
        return f"<@locked_task {self.__module__}.{self.__qualname__}>"


_numbers: Final = itertools.count()


def _offer_all(sender: Any, **_: Any) -> None:
    """Register the shared tasks in an app that has just been finalized; of two of one name the newer one."""
    callbacks = [getattr(callback, "__self__", None) for callback in set(_state._on_app_finalizers)]
    shared = [task for task in callbacks if isinstance(task, LockedTask)]
    for task in sorted(shared, key=lambda task: task._number, reverse=True):
        task._offer(sender)
        name = task._name_in(sender)
        if not task._is_below and spec_of(sender._tasks[name]) is None:
            warn("app %r has a task named %r that does not lock: %r is not registered", sender.main, name, task)


def _see_to_decorators_above() -> None:
    """Tell a locked task of a decorator above it: where `app.task` is applied, and where Celery makes the task."""
    make_task, from_function = Celery.task, Celery._task_from_fun

    @functools.wraps(make_task)
    def task(app: Any, *args: Any, **options: Any) -> Any:
        if args:
            return make_task(app, *(_below(each, options) for each in args), **options)
        decorate = make_task(app, **options)
        return lambda function: decorate(_below(function, options))

    @functools.wraps(from_function)
    def task_from_fun(app: Any, fun: Any, *args: Any, **options: Any) -> Any:
        return from_function(app, _below(fun, options), *args, **options)

    Celery.task, Celery._task_from_fun = task, task_from_fun


def _below(function: Any, options: dict[str, Any]) -> Any:
    """What a decorator with those options makes a task of."""
    if isinstance(function, LockedTask):
        refuse_others(options, options.get("base"))
        if not function._is_below:
            function.give_way()
    return function


_see_to_decorators_above()


def _guarded(spec: Spec) -> Callable[..., Any]:
    function = spec.function

    @functools.wraps(function)
    def guarded(*args: Any, **kwargs: Any) -> Any:
        return execute(spec, args, kwargs)

    guarded.__signature__ = inspect.signature(function)  # type: ignore[attr-defined]
    guarded.dblock_spec = spec  # type: ignore[attr-defined]
    return guarded
