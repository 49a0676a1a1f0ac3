"""A run of a locked task in a worker: it holds its lock, or ends as `on_busy` says.

    the lock came with the message ──> body, unless another run of the same message is under way: back
     └── it did not, or is over ──> try the key ── free ──> body
                                        ├── busy ──> back | skip | fail, as on_busy says
                                        │    └── by an earlier run of the same task ──> wait a moment, back
                                        └── no answer ──> back | wait a moment, fail

Rule: what is sent back is sent before this run ends; where the broker does not take it, the run waits itself.
"""

from __future__ import annotations

import functools
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from types import SimpleNamespace, TracebackType
from typing import TYPE_CHECKING, Any, Final

from billiard.pool import SIG_SOFT_TIMEOUT, soft_timeout_sighandler
from celery._state import get_current_task
from celery.app.autoretry import add_autoretry_behaviour
from celery.exceptions import Retry, SoftTimeLimitExceeded

from dblock.celery.header import Header
from dblock.celery.pace import Pace
from dblock.celery.places import OWN, Carried, give_up, let_go
from dblock.celery.results import skip_result, task_skipped
from dblock.celery.spec import OnBusy, Scope, Spec
from dblock.core.errors import LockNotHeld, LockStoreError, LockTimeout
from dblock.core.identity import storable
from dblock.core.log import warn

if TYPE_CHECKING:
    from dblock.core.holding.flow import Hold
    from dblock.core.lock.locks import SyncLock


@dataclass
class Run:
    """The run of a locked task in this thread."""

    spec: Spec
    task: Any
    key: str
    lock: SyncLock | None = None
    carried: Carried | None = None
    entered: list[SyncLock] = field(default_factory=list)
    """All that it has tried to enter."""
    begun: bool = False
    """Whether it has reached the lock that its message carries, or the message carries none."""
    sending_back: str = ""
    """The id of the task whose message is on its way back to the broker, while it is."""


_pace: Final = Pace()
_current: ContextVar[Run | None] = ContextVar("dblock_run", default=None)


def current_run() -> Run | None:
    """The run of the locked task that this thread is in, if there is one."""
    return _current.get()


def current_lock() -> Any:
    """The lock that the running task holds, with `fence`, `check()`, `guard()` and all else of its class.

    Raises LockNotHeld outside of a locked task.
    """
    run = _current.get()
    if run is None or run.lock is None:
        raise LockNotHeld("no locked task is running in this thread")
    return run.lock


def running(spec: Spec) -> Any:
    """The task of that spec which this thread is running, or None."""
    task = get_current_task()
    return task if task is not None and spec_of(task) is spec else None


def spec_of(task: Any) -> Spec | None:
    """What a Celery task was told, if it is a locked one."""
    function = getattr(task, "__wrapped__", None)
    found = getattr(getattr(function, "__func__", function), "dblock_spec", None)
    return found if isinstance(found, Spec) else None


def is_bound(task: Any) -> bool:
    """Whether its function takes the task as the first argument."""
    return hasattr(task.__wrapped__, "__func__")


Busy = LockTimeout | LockStoreError
"""Why a key cannot be had now; the database may be away."""


class Attempt:
    """One attempt to hold a lock; `with Attempt(lock) as busy:` is None if it is held."""

    def __init__(self, lock: SyncLock) -> None:
        self._lock, self._held = lock, False

    def __enter__(self) -> Busy | None:
        try:
            _ = self._lock.__enter__()
        except (LockTimeout, LockStoreError) as busy:
            return busy
        except BaseException:  # interrupted between the lock's last line and our next one
            let_go(self._lock)
            raise
        self._held = True
        return None

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._held:
            self._lock.__exit__(kind, error, trace)


class Interrupt:
    """Ends the body of a task whose lock is lost in the way of Celery's soft time limits, where the pool has that."""

    def __init__(self) -> None:
        self._mutex = threading.RLock()  # a signal handler may find the lock lost
        self._over = False

    @staticmethod
    def possible() -> bool:
        """Whether this is the main thread of a prefork child, which turns that signal into an exception."""
        here = threading.current_thread() is threading.main_thread()
        return here and signal.getsignal(SIG_SOFT_TIMEOUT) is soft_timeout_sighandler

    def __call__(self, _: Hold) -> None:
        """The lock is lost; what the body raises then becomes LockLost where it leaves the lock.

        The watching thread calls this, which waits for nothing.
        """
        with self._mutex:
            if not self._over:
                self._over = True
                os.kill(os.getpid(), SIG_SOFT_TIMEOUT)

    def end(self) -> None:
        """The body is over. A signal that was sent before is delivered before this returns."""
        with self._mutex:
            self._over = True


def execute(spec: Spec, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The result of the function, called with these arguments under its lock, or what `on_busy` says."""
    task = running(spec)
    if task is None:  # `task.run(...)`
        name = f"{spec.function.__module__}.{spec.function.__qualname__}"
        request: Any = SimpleNamespace(called_directly=True, is_eager=False, id=None, args=args, kwargs=kwargs)
        task = SimpleNamespace(name=name, request=request)
        run = Run(spec, task, spec.key(task, args, kwargs, bound=False))
        return _take_turn(run, functools.partial(spec.function, *args, **kwargs), Header(), in_place=True)
    throws = task.throws if isinstance(task.throws, tuple) else (task.throws,)
    if LockTimeout not in throws:  # a busy key is no error in the log
        task.throws = (*throws, LockTimeout)
    request, bound = task.request, bool(args) and args[0] is task
    body = functools.partial(_retrying(task, spec.function), *args, **kwargs)
    if hasattr(request, "dblock_run"):  # the task calls its own function, which is no run of a message
        run = Run(spec, task, spec.key(task, args[bound:], kwargs, bound=bound))
        return _take_turn(run, body, Header(), in_place=True)
    key = spec.key(task, tuple(request.args or ()), dict(request.kwargs or {}), bound=bound)
    run = request.dblock_run = Run(spec, task, key)
    if request.called_directly or request.is_eager:
        return _take_turn(run, body, Header(), in_place=True)
    header = Header.of(request.headers, request.id)
    if header.tries:
        request.eta = header.eta
    if header.token and not header.is_for(spec.queue_key(key)):
        give_up(spec, task, request.id, header.token)
        header = header.carrying("")
    if not header.token:
        run.begun = True
        return _take_turn(run, body, header)
    with Carried(spec, task, header.token, run.entered) as carried:
        run.carried, run.begun = carried, True
        if carried.lock is not None and spec.scope is not Scope.BOTH:
            with _holding(run, carried.lock):
                return body()
        return _take_turn(run, body, header, first=carried.busy)


def _retrying(task: Any, function: Callable[..., Any]) -> Callable[..., Any]:
    """The function with Celery's autoretry inside of the lock, and not only around it."""
    if not hasattr(task, "_orig_run"):
        return function
    inside = _Inside(task, function)
    add_autoretry_behaviour(inside)
    return inside.run


class _Inside:
    """A task, with another function to run."""

    def __init__(self, task: Any, function: Callable[..., Any]) -> None:
        self._task, self.run = task, function

    def __getattr__(self, name: str) -> Any:
        if name == "_orig_run":
            raise AttributeError(name)
        return getattr(self._task, name)

    def __delattr__(self, name: str) -> None:
        delattr(self._task, name)


@contextmanager
def _holding(run: Run, lock: SyncLock) -> Iterator[None]:
    before, interrupt = _current.get(), Interrupt()
    try:
        _ = _current.set(run)
        run.lock = lock
        if run.spec.interrupt and interrupt.possible():
            told: Any = lock
            told._interrupt_body = interrupt
        yield
    finally:
        try:
            interrupt.end()
        finally:
            _ = _current.set(before)


def _take_turn(
    run: Run,
    body: Callable[..., Any],
    header: Header,
    *,
    first: Busy | None = None,
    in_place: bool = False,
) -> Any:
    """Run under a lock that is taken now. `first`: why the message is to be sent back once before the lock is tried."""
    spec, task, me = run.spec, run.task, storable(str(run.task.request.id or ""))
    waits = spec.on_busy is OnBusy.WAIT or (in_place and spec.on_busy in {OnBusy.RETRY, OnBusy.JOIN})
    timeout = spec.timeout if waits or spec.timeout is not ... else 0
    while True:
        busy = first
        if busy is None:
            lock = spec.lock(task, run.key, timeout)
            run.entered = [lock] if run.carried is None else [*run.entered[:1], lock]
            with Attempt(lock) as busy:
                if busy is None:
                    if run.carried is not None:
                        run.carried.give_up()
                    with _holding(run, lock):
                        return body()
        mine = bool(me) and isinstance(busy, LockTimeout) and _task_id(busy) == me
        unknown = isinstance(busy, LockStoreError) and timeout == 0 and spec.on_busy in {OnBusy.SKIP, OnBusy.RAISE}
        if (mine or unknown) and first is None and timeout != OWN:
            timeout = OWN
            continue
        back = spec.on_busy in {OnBusy.RETRY, OnBusy.JOIN} or mine or first is not None
        if back and not in_place:
            header, timeout = _send_back(run, busy, header)
            first = None
        elif spec.on_busy is OnBusy.SKIP and isinstance(busy, LockTimeout):
            result = skip_result(task, busy)
            _ = task_skipped.send(task, task_id=task.request.id, key=run.key, result=result)
            return result
        else:
            raise busy


def _task_id(busy: LockTimeout) -> str:
    return "" if busy.holder is None else busy.holder.identity.celery_task_id


def _send_back(run: Run, busy: Busy, header: Header) -> tuple[Header, float]:
    """Have the broker bring the message again later, and end this run: raises Retry, or LockTimeout at the limit.

    If the broker does not take it: what the message says from now on, and for how many seconds to wait here.
    """
    spec, task, request = run.spec, run.task, run.task.request
    holder, now = getattr(busy, "holder", None), time.time()
    later = header.busy_again(now, request.eta)
    waited = now - later.since
    left = float("inf") if spec.busy_timeout is None else spec.busy_timeout - waited
    if left <= 0 or (spec.busy_retries is not None and header.tries >= spec.busy_retries):
        raise LockTimeout(
            f"task {task.name}[{request.id}] found its key busy {later.tries} times in {waited:.0f} s: {busy}",
            key=run.key,
            holder=holder,
        ) from busy
    seconds = min(_pace.countdown(run.key, header.tries, 0.0 if holder is None else holder.age), left)
    later = later.carrying("" if run.carried is None else run.carried.carry_on(seconds))
    message = task.signature_from_request(
        request,
        countdown=seconds,
        retries=request.retries,
        headers=later.into(request.headers),
        add_to_parent=False,
        argsrepr=getattr(request, "argsrepr", None),
        kwargsrepr=getattr(request, "kwargsrepr", None),
    )
    before, run.sending_back = _current.set(run), request.id
    try:
        message.apply_async()
    except BaseException as error:
        if run.carried is not None:
            run.carried.keep()
        # A broker's error can be anything; a message is not lost for it.
        if isinstance(error, SoftTimeLimitExceeded) or not isinstance(error, Exception):
            raise
        warn("the broker does not take task %s[%s] back, waiting here: %r", task.name, request.id, error)
        return later, seconds
    finally:
        _current.reset(before)
        run.sending_back = ""
    raise Retry(exc=busy, when=seconds, is_eager=False, sig=message)
