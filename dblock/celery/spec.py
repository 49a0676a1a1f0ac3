"""What a locked task was told: its key, what happens when that is busy, and for how long which lock is asked for.

Rule: all of it is checked when the task is decorated; only a call's arguments can make a key that cannot be built.
"""

from __future__ import annotations

import enum
import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from celery import Task
from kombu.exceptions import EncodeError
from kombu.serialization import dumps as serialize
from kombu.serialization import loads as deserialize
from kombu.utils.json import dumps

from dblock.celery.faces import Face
from dblock.core.errors import InvalidKey
from dblock.core.lock.key_template import Template
from dblock.core.validation import TEXT_LENGTH, valid_key

if TYPE_CHECKING:
    from dblock.core.lock.locks import SyncLock

_GRACEFUL = 'on_busy="join", the default with scope="queue"; without it, on_busy="raise"'
_BOTH = 'scope="both", one queued and one running'
_ELSEWHERE: Final = {
    "once": f"keys: names in the key; graceful: {_GRACEFUL}; timeout: queue_ttl; unlock_before_run: {_BOTH}",
    "graceful": _GRACEFUL,
    "unlock_before_run": _BOTH,
    "unique_on": "names of arguments in the key",
    "raise_on_duplicate": 'on_busy="raise"',
    "lock_expiry": "queue_ttl",
}
"""What options of celery-once and celery-singleton are here."""
MakeKey = Callable[..., str]
"""`(task, *args, **kwargs)`, the arguments of the call."""


class OnBusy(enum.StrEnum):
    """What becomes of a task whose key somebody else holds."""

    RETRY = "retry"
    """Its message goes back to the broker, for later."""
    WAIT = "wait"
    """It waits in the key's queue, and its worker with it."""
    SKIP = "skip"
    """Its run is left out; its result says who holds the key."""
    RAISE = "raise"
    """It fails with LockTimeout."""
    JOIN = "join"
    """Where it is sent: the message that was sent before stands for this one. Else as RETRY."""


class Scope(enum.StrEnum):
    """From when to when the lock is held."""

    RUN = "run"
    """While the task runs."""
    QUEUE = "queue"
    """From its sending until it has ended."""
    BOTH = "both"
    """One lock while it waits for a worker, and another while it runs: one runs and one is queued."""


class OnRetry(enum.StrEnum):
    """What becomes of the lock of a message when the task calls its own `retry()`."""

    KEEP = "keep"
    RELEASE = "release"


@dataclass(frozen=True, kw_only=True)
class Spec:
    """What one locked task was told."""

    function: Callable[..., Any]
    made_key: str | MakeKey | None
    face: Face
    options: dict[str, Any]
    """Those of `db_lock`, but `timeout` and `label`."""
    timeout: Any
    """That of `db_lock`; `...` if none was given."""
    permits: int | None
    """How many runs may hold the key at a time; None for a plain lock."""
    label: str
    on_busy: OnBusy
    scope: Scope
    on_retry: OnRetry
    busy_timeout: float | None
    busy_retries: int | None
    queue_ttl: float
    interrupt: bool

    def key(self, task: Any, args: tuple[Any, ...], kwargs: dict[str, Any], *, bound: bool) -> str:
        """That of one call; InvalidKey if there is none.

        Args:
            task: the Celery task.
            args: without the task itself, if that is `bound`.
            kwargs: likewise.
            bound: whether the function takes the task as the first argument.
        """
        args, kwargs = _as_received(task, args, kwargs)
        if isinstance(self.made_key, str):
            return Template(self.made_key, self.function, bound=bound).key(args, kwargs)
        if self.made_key is not None:
            try:
                made = self.made_key(task, *args, **kwargs)
            except TypeError as error:
                why = f"the key of task {task.name} is made by a function of (task, *args, **kwargs): {error}"
                raise InvalidKey(why) from error
            if not isinstance(made, str):
                raise InvalidKey(f"the key of task {task.name} is to be text, not {made!r}")
            return valid_key(made)
        arguments = Template("", self.function, bound=bound).arguments(args, kwargs)
        try:
            text = dumps(arguments, sort_keys=True)
        except TypeError as error:
            raise InvalidKey(f"task {task.name} needs a key: its arguments cannot be compared ({error})") from error
        return valid_key(f"{task.name}:{hashlib.blake2s(text.encode(), digest_size=16).hexdigest()}")

    def lock(self, task: Any, key: str, timeout: Any = ...) -> SyncLock:
        """The lock of one run; `timeout` as that of `db_lock`."""
        return self._lock(task, key, timeout, self.options, self.permits)

    def queue_lock(self, task: Any, key: str, timeout: Any, ttl: float | None = None) -> SyncLock:
        """The lock of one message, which nobody renews for the `ttl` until a worker holds it."""
        kept = {name: value for name, value in self.options.items() if name in {"using", "fair"}}
        life = {"ttl": self.options.get("ttl")} if ttl is None else {"ttl": ttl, "renew": False}
        return self._lock(task, key, timeout, {**kept, **life, "release": "now"})

    def _lock(self, task: Any, key: str, timeout: Any, options: dict[str, Any], permits: int | None = None) -> SyncLock:
        if timeout is not ...:
            options = {**options, "timeout": timeout}
        label = self.label_of(task)
        if permits is not None:
            return self.face.permit(key, permits, label=label, **options)
        return self.face.lock(key, label=label, **options)

    def label_of(self, task: Any) -> str:
        """The task's name is stored with the lock, beside its id."""
        return (f"{task.name}: {self.label}" if self.label else str(task.name))[:TEXT_LENGTH]

    def queue_key(self, key: str) -> str:
        """The key of a queued message; where the running one has a lock of its own, it is another one."""
        return valid_key(f"{key} (queued)") if self.scope is Scope.BOTH else key


def refuse_others(options: Mapping[str, Any], task: Any) -> None:
    """TypeError for an option of another library, which a task or a call of one takes, and nobody would look at.

    Unless `task`, or the class that it is made of, has that: then it is of that library as well.
    """
    for name in options.keys() & _ELSEWHERE.keys():
        if not hasattr(task, name):
            raise TypeError(
                f"a locked task has no option {name!r}, which is another library's: here {_ELSEWHERE[name]}"
            )


def _as_received(task: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments as a worker sees them: lists for tuples, values for enums."""
    if not isinstance(task, Task):
        return args, kwargs
    try:
        content_type, encoding, data = serialize((args, kwargs), task.serializer or task.app.conf.task_serializer)
    except EncodeError:  # a call that is no message
        return args, kwargs
    args, kwargs = deserialize(data, content_type, encoding, accept=[content_type])
    return tuple(args), kwargs
