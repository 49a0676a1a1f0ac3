"""The options of `locked_task`, and the `Spec` that is made of them: the key of a call, and the lock that it asks for.

Rule: all of them are checked when the task is decorated; only a call's arguments can make a key that cannot be built.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Callable
from contextlib import suppress
from types import EllipsisType
from typing import TYPE_CHECKING, Any, Literal, get_args

from kombu.exceptions import EncodeError
from kombu.serialization import dumps as serialize
from kombu.serialization import loads as deserialize
from kombu.utils.json import dumps

from dblock.core.errors import InvalidKey
from dblock.core.lock.key_template import Template
from dblock.core.lock.locks import SyncLock
from dblock.core.options import OfLease, valid_options
from dblock.core.share_keys import valid_permits
from dblock.core.validation import TEXT_LENGTH, valid_key, valid_timeout, valid_ttl
from dblock.core.values import Seconds
from dblock.faces import made

if TYPE_CHECKING:
    from sqlalchemy import Engine

OnBusy = Literal["retry", "wait", "skip", "raise"]
Scope = Literal["run", "queue", "both"]
MakeKey = Callable[..., str]
"""`(task, *args, **kwargs)`, the arguments of the call."""


class LockOptions(OfLease, total=False):
    """What `locked_task` is told of the lock.

    key: a function `(task, *args, **kwargs) -> str`, in place of a format string.
    on_busy: what becomes of a task whose key somebody else holds:
        "retry" (the default): its message goes back to the broker, with pauses that grow to 60 s, until it expires;
        this does not count for `max_retries`, nor occupy a worker. "wait": its worker waits, up to `timeout`, in the
        queue, then LockTimeout. "skip": its result is one that `dblock.celery.skipped` knows. "raise": LockTimeout.
        Where the lock is taken at sending, "retry" and "skip" return the AsyncResult of the first call.
    scope: "run": locked while it runs. "queue": from its sending until it has ended. "both": one lock while it is
        queued, another one while it runs: at most one of each.
    engine: a SQLAlchemy Engine, or a function that returns one, whose database has the lock; by default Django's.
    timeout: seconds for which to wait for the key, in a worker (and "queue", "wait": where it is sent); 0 but for
        "wait", which has the default of `db_lock`.
    queue_ttl: seconds for which the lock of a message lasts from the moment at which the task is due (3600): nobody
        renews it until a worker runs the task. Too short, and a second message may be sent before the first one ran
        (which then takes the key anew, or acts as `on_busy` says); too long, and the key stays taken for so long when
        a broker loses the message.
    interrupt: raise LockLost in the task when its lock is lost, in the main thread of a prefork child, as a soft time
        limit is; elsewhere, and without it, where it calls `lock.check()` or ends.
    permits: so many runs may hold the key at a time, as of a semaphore (`db_semaphore`); only with scope="run".

    The others are those of `db_lock`.
    """

    key: str | MakeKey
    on_busy: OnBusy
    scope: Scope
    engine: Engine | Callable[[], Engine] | None
    timeout: Seconds | None
    queue_ttl: Seconds
    permits: int | None
    using: str | None


class TaskOptions(LockOptions, total=False):
    """The keyword options of `locked_task`: Celery's are what its documentation of `Task` says."""

    name: str
    base: type[Any]
    acks_late: bool
    acks_on_failure: bool | None
    acks_on_failure_or_timeout: bool
    acks_on_timeout: bool | None
    autoretry_for: tuple[type[BaseException], ...]
    backend: Any
    compression: str | None
    default_retry_delay: float
    delivery_mode: Any
    dont_autoretry_for: tuple[type[BaseException], ...]
    exchange: str
    expires: Any
    ignore_result: bool
    max_retries: int | None
    priority: int
    pydantic: bool
    pydantic_context: dict[str, Any] | None
    pydantic_dump_kwargs: dict[str, Any] | None
    pydantic_strict: bool
    queue: str
    rate_limit: str | int | float | None
    reject_on_worker_lost: bool
    resultrepr_maxsize: int
    retry_backoff: bool | int
    retry_backoff_max: int
    retry_jitter: bool
    retry_kwargs: dict[str, Any]
    routing_key: str
    send_events: bool
    serializer: str
    soft_time_limit: float | None
    store_errors_even_if_ignored: bool
    throws: type[BaseException] | tuple[type[BaseException], ...]
    time_limit: float | None
    track_started: bool
    trail: bool
    typing: bool
    Request: Any
    Strategy: str


def valid_engine(engine: Any) -> Any:
    """An Engine, a function that returns one, or None; TypeError otherwise."""
    class_ = getattr(sys.modules.get("sqlalchemy"), "Engine", ())
    if not (engine is None or isinstance(engine, class_) or (callable(engine) and not hasattr(engine, "engine"))):
        raise TypeError(f"engine is an Engine of SQLAlchemy's, or a function that returns one, not {engine!r}")
    return engine


def engine_of(engine: Any) -> Any:
    """The Engine whose database has the locks; None: Django's has them."""
    return valid_engine(engine() if callable(engine) else engine)


class Spec:
    """What one locked task was told; TypeError or ValueError for options that make no sense together."""

    def __init__(
        self,
        function: Callable[..., Any],
        bind: bool,
        *,
        key: str | MakeKey | None = None,
        scope: Scope = "run",
        on_busy: OnBusy = "retry",
        engine: Any = None,
        using: str | None = None,
        timeout: Any = ...,
        queue_ttl: Any = None,
        permits: Any = None,
        label: str = "",
        ttl: Any = None,
        interrupt: bool = False,
        **lease: Any,
    ) -> None:
        _ = valid_options(label=label, interrupt=interrupt, **lease)
        if ttl is not None:
            lease["ttl"] = valid_ttl(ttl)
        for name, chosen, values in (("scope", scope, get_args(Scope)), ("on_busy", on_busy, get_args(OnBusy))):
            if chosen not in values:
                raise ValueError(f"{name} is one of {', '.join(map(repr, values))}, not {chosen!r}")
        if queue_ttl is None:
            queue_ttl = 3600.0
        elif scope == "run":
            raise ValueError("queue_ttl does nothing but with scope='queue' or 'both'")
        if permits is not None and (scope != "run" or "reentrant" in lease):
            raise ValueError("permits is for scope='run', and not for reentrant: each run has a permit of its own")
        if using is not None:
            if engine is not None:
                raise ValueError("using is an alias of Django's, and does nothing with engine=")
            from dblock.connections import valid_alias  # noqa: PLC0415 - needs Django

            lease["using"] = valid_alias(using)
        if not isinstance(timeout, EllipsisType):
            timeout = valid_timeout(timeout)
        elif on_busy != "wait":
            timeout = 0.0
        self.make_key = _key_maker(key, function, bind)
        self.options = lease
        """Those of `db_lock`, but `timeout` and `label`."""
        self.label, self.interrupt = label, interrupt
        self.engine = valid_engine(engine)
        self.scope, self.on_busy = scope, on_busy
        self.timeout = timeout
        """That of `db_lock`; `...` is its default."""
        self.queue_ttl = valid_ttl(queue_ttl, "queue_ttl", "how long the lock of a message lasts,")
        self.permits = None if permits is None else valid_permits(permits)
        """How many runs may hold the key at a time; None for a plain lock."""

    def key(self, task: Any, args: Any, kwargs: Any) -> str:
        """The key of a call of that task with these arguments, `self` excepted; InvalidKey, TypeError if it has none.

        The arguments count as a worker sees them: JSON makes lists of tuples, and values of enums.
        """
        args, kwargs = tuple(args or ()), dict(kwargs or {})
        with suppress(EncodeError):  # a call that is no message
            kind, encoding, data = serialize((args, kwargs), task.serializer or task.app.conf.task_serializer)
            args, kwargs = deserialize(data, kind, encoding, accept=[kind])
        return valid_key(self.make_key(task, *args, **kwargs))

    def lock(self, task: Any, key: str, timeout: Any) -> SyncLock:
        """The lock of one run; `timeout` as that of `db_lock`."""
        told = {"label": self.label_of(task), "timeout": timeout, **self.options}
        if self.permits is None:
            lock: SyncLock = made(engine_of(self.engine), "db_lock", key, **told)
        else:
            lock = made(engine_of(self.engine), "db_semaphore", key, permits=self.permits, **told).permit()
        return lock

    def queue_lock(self, task: Any, key: str, timeout: Any, ttl: float | None = None) -> SyncLock:
        """The lock of one message, which nobody renews for the `ttl` until a worker holds it."""
        kept = {name: value for name, value in self.options.items() if name in {"using", "fair"}}
        kept |= {"ttl": self.options.get("ttl")} if ttl is None else {"ttl": ttl, "renew": False}
        kept |= {"label": self.label_of(task), "timeout": timeout, "release": "now"}
        lock: SyncLock = made(engine_of(self.engine), "db_lock", key, **kept)
        return lock

    def label_of(self, task: Any) -> str:
        """The task's name is stored with the lock, beside its id."""
        return (f"{task.name}: {self.label}" if self.label else str(task.name))[:TEXT_LENGTH]

    def queue_key(self, key: str) -> str:
        """The key of a queued message; where the running one has a lock of its own, it is another one."""
        return valid_key(f"{key} (queued)") if self.scope == "both" else key


def _key_maker(key: str | MakeKey | None, function: Callable[..., Any], bind: bool) -> MakeKey:
    """The function that is given; or one that formats the text; or one that makes a digest of the arguments."""
    if callable(key):
        return key
    if not (key is None or isinstance(key, str)):
        raise TypeError(f"the key is text, or a function (task, *args, **kwargs) that returns it, not {key!r}")
    template = Template(key or "", function, bound=bind)

    def digest(task: Any, /, *args: Any, **kwargs: Any) -> str:
        arguments = template.arguments(args, kwargs)
        try:
            text = dumps(arguments, sort_keys=True)
        except TypeError as error:
            raise InvalidKey(f"task {task.name} needs a key: its arguments cannot be compared ({error})") from error
        return f"{task.name}:{hashlib.blake2s(text.encode(), digest_size=16).hexdigest()}"

    return digest if key is None else lambda _, /, *args, **kwargs: template.key(args, kwargs)
