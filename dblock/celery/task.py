"""`LockTask`: a Celery task that holds a lock while it runs, or from its sending on.

A run of a message:

    the lock came with the message ──> body, unless another run of the same message is under way: back
     └── it did not, or is over ──> try the key ── free ──> body
                                        ├── busy ──> back | skip | fail, as on_busy says
                                        ├── busy by an earlier run of the same task ──> back
                                        └── no answer of the database ──> back

A call of `apply_async`, which `delay`, canvas, beat and `retry()` lead to:

    a new call              takes the lock of the message; where somebody has it: the first result, refused, or waits
    its id is given before  (canvas, replace): takes it if it can, and is sent in any case
    its own retry()         carries the lock of the run on, if that is for the same key

Rule: a lock without a message is given back, and a message is left out only if another one stands for it. What is sent
back is sent before its run ends; where the broker does not take it, the run waits itself.
"""

from __future__ import annotations

import functools
import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final, Generic, ParamSpec, Protocol, TypeVar

from billiard.pool import SIG_SOFT_TIMEOUT, soft_timeout_sighandler
from celery import Task, signals
from celery.exceptions import Reject, Retry, SoftTimeLimitExceeded
from celery.utils import uuid

from dblock.celery.header import Header
from dblock.celery.options import Spec
from dblock.celery.pace import Pace
from dblock.celery.places import accept, due_in, elsewhere, first_result, give_up, let_go, take
from dblock.celery.results import skip_result, task_skipped
from dblock.core.errors import LockError, LockLost, LockNotHeld, LockStoreError, LockTimeout
from dblock.core.holding.flow import Hold
from dblock.core.identity import storable
from dblock.core.lock.leaving import detach
from dblock.core.lock.locks import SyncLock
from dblock.core.log import warn
from dblock.core.tokens import Token, new_secret, token_text
from dblock.core.values import LockInfo, Seconds, Tenure

P = ParamSpec("P")
R = TypeVar("R")
_HANGING: Final = ("chain", "chord", "group_id", "link", "link_error")
"""What may hang on a message; no other message can stand for one that has any of it."""
_pace: Final = Pace()


class TaskLock(Protocol):
    """The lock that a running task holds, for type checkers: a Lock or Permit of its face."""

    @property
    def key(self) -> str: ...
    @property
    def fence(self) -> int: ...
    @property
    def slot(self) -> int: ...  # with permits=
    @property
    def ttl(self) -> float: ...
    @property
    def remaining(self) -> float: ...
    @property
    def revoked(self) -> str | None: ...
    def check(self) -> None: ...
    def verify(self) -> bool: ...
    def extend(self, ttl: Seconds | None = None) -> None: ...
    def inspect(self) -> LockInfo | None: ...
    def guard(self, given: Any = None, /) -> None: ...
    def atomic(self, using: str | None = None) -> AbstractContextManager[Any]: ...  # Django's
    def begin(self, given: Any, /) -> AbstractContextManager[Any]: ...  # SQLAlchemy's


@dataclass
class Run:
    """A run of a locked task: of a message, or where the task is called."""

    task: Any
    key: str
    header: Header
    here: bool
    """Whether there is no message that could go back to the broker."""
    carried: SyncLock | None = None
    """The lock that came with the message, while this run holds it."""
    passed: tuple[str, float] | None = None
    """The secret and the ttl with which a message that was sent in this run's place carries that lock on."""

    def carry_on(self, delay: float) -> str:
        """The token for a message due in `delay` seconds, to which the lock passes once this run has ended; or ""."""
        lock = self.carried
        if lock is None or (hold := lock._hold_here()) is None:
            return ""
        secret = new_secret()
        self.passed = secret, self.task.spec.queue_ttl + delay
        return token_text(Token(Tenure(lock.key, secret, hold.tenure.fence), lock.ttl, 0.0, 0.0))

    def pass_on(self) -> None:
        """Leave the lock to the message that carries it on, if there is one."""
        if self.carried is not None and self.passed is not None:
            with suppress(LockError):
                _ = self.carried._drive(detach(self.carried, *self.passed))


_current: Final = ContextVar[Any]("dblock_current_lock", default=None)


def current_lock() -> TaskLock:
    """The lock that the running task holds, with `fence`, `check()`, `guard()` and all else of its class.

    Raises LockNotHeld outside of a locked task.
    """
    lock: TaskLock | None = _current.get()
    if lock is None:
        raise LockNotHeld("no locked task is running in this thread")
    return lock


class LockTask(Task, Generic[P, R]):  # type: ignore[misc]
    """The base class of the tasks that `locked_task` makes, before the `base` or the app's own class of tasks."""

    spec: Spec
    if TYPE_CHECKING:  # Celery's have no types
        name: str

        def delay(self, *args: P.args, **kwargs: P.kwargs) -> Any: ...
        def s(self, *args: Any, **kwargs: Any) -> Any: ...
        def si(self, *args: Any, **kwargs: Any) -> Any: ...
        def apply(self, args: Any = None, kwargs: Any = None, **options: Any) -> Any: ...

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """Run under the lock: in a worker, by `apply()`, or where it is called like a function."""
        request, body = self.request, super().__call__
        called = request.called_directly or hasattr(request, "locked_run")  # the latter by itself
        if not called and body.__func__ is Task.__call__:
            body = self.run  # as a worker does; the other begins a request of its own
        header = Header.of(request.headers, request.id)
        run = Run(self, self.spec.key(self, args, kwargs), header, called or request.is_eager)
        call = functools.partial(body, *args, **kwargs)
        if not run.here:
            request.locked_run = run  # once it has come to its lock
        result: R = _take_turn(run, call) if run.here else _run_message(run, call)
        return result

    def apply_async(self, args: Any = None, kwargs: Any = None, task_id: Any = None, **options: Any) -> Any:
        """Send it, as Celery's `apply_async`; with scope="queue" or "both", a message that has the lock."""
        spec, token, taken = self.spec, "", ""
        if self.app.conf.task_always_eager:
            return super().apply_async(args, kwargs, task_id=task_id, **options)
        key, delay = spec.key(self, args, kwargs), due_in(options)
        again = task_id is not None and task_id == self.request.id  # by `retry()`
        run: Run | None = getattr(self.request, "locked_run", None) if again else None
        hanging = task_id is not None or any(options.get(name) for name in _HANGING)
        task_id = task_id or uuid()
        came = Header.of(self.request.headers, task_id)
        try:
            if run is not None:
                token = run.carry_on(delay) if run.key == key else ""
            elif came.is_for(spec.queue_key(key)):  # its run has not come to its lock yet (`before_start`)
                token = came.token
            if spec.scope != "run" and not token:
                try:
                    token = taken = take(self, key, str(task_id), delay)
                except LockTimeout as busy:
                    if not hanging and spec.on_busy in {"raise", "wait"}:
                        raise
                    result = None if hanging else first_result(self, busy)
                    if result is not None:
                        return result
            options["headers"] = Header(str(task_id), token).into(options.get("headers"))
            return super().apply_async(args, kwargs, task_id=task_id, **options)
        except BaseException:  # not sent
            if taken:
                give_up(self, task_id, taken)
            elif run is not None:
                run.passed = None
            raise


Body = Callable[[], Any]
Busy = LockTimeout | LockStoreError
"""Why a key cannot be had now; the database may be away."""


def _run_message(run: Run, body: Body) -> Any:
    task, spec, header = run.task, run.task.spec, run.header
    key = spec.queue_key(run.key)
    if not header.is_for(key):
        _drop(task, task.request)
        run.header = replace(header, token="")
        return _take_turn(run, body)
    lock = spec.lock(task, key, 0) if spec.scope == "queue" else spec.queue_lock(task, key, 0)
    try:
        refused = accept(task, lock, header.token)
        if isinstance(refused, LockLost):
            run.header = replace(header, token="")
        elif refused is None and spec.scope == "queue":
            return _under(run, lock, body)[1]
        elif refused is None:
            run.carried = lock
        return _take_turn(run, body, refused if isinstance(refused, Busy) else None)
    finally:
        run.pass_on()
        let_go(lock)


def _under(run: Run, lock: SyncLock, body: Body) -> tuple[Busy | None, Any]:
    """The result of the body under that lock, or why it could not be taken.

    A run that ends by Retry or Reject does so whatever has become of its lock: a message has been sent or comes again.
    """
    entered, before, ended = False, _current.get(), None
    try:
        with lock:
            entered = True
            if run.carried is not None and run.carried is not lock:  # of scope="both": it is queued no more
                let_go(run.carried)
            run.carried = lock if run.task.spec.scope == "queue" else None
            try:
                _ = _current.set(lock)
                with _interrupting(lock, run.task.spec.interrupt):
                    return None, body()
            except (Retry, Reject) as error:
                ended = error
                raise
            finally:
                _ = _current.set(before)
                run.pass_on()
    except (LockTimeout, LockStoreError) as busy:
        if entered:
            raise
        return busy, None
    except LockLost:
        if ended is None:
            raise
        raise ended from None
    finally:
        let_go(lock)


def _take_turn(run: Run, body: Body, busy: Busy | None = None) -> Any:
    """Run under a lock that is taken now. `busy`: why the message goes back once before the lock is tried.

    It goes back, whatever `on_busy` says, if an earlier run of the same task has the key, or if the database is away.
    """
    task, spec = run.task, run.task.spec
    me = storable(str(task.request.id or ""))
    timeout = ... if run.here and spec.on_busy == "retry" and spec.timeout == 0 else spec.timeout
    while True:
        back = spec.on_busy == "retry" or busy is not None
        if busy is None:
            busy, result = _under(run, spec.lock(task, run.key, timeout), body)
            if busy is None:
                return result
            holder = getattr(busy, "holder", None)
            own = holder is not None and holder.identity.celery_task_id == me != ""
            back = back or own or isinstance(busy, LockStoreError)
        if back and not run.here:
            timeout = _send_back(run, busy)
            busy = None
        elif spec.on_busy == "skip" and isinstance(busy, LockTimeout):
            skipped = skip_result(task, busy)
            _ = task_skipped.send(task, task_id=task.request.id, key=run.key, result=skipped)
            return skipped
        else:
            raise busy


def _send_back(run: Run, busy: Busy) -> float:
    """Have the broker bring the message again later, and end this run by Retry.

    If the broker does not take it: for how many seconds to wait here.
    """
    task, request, holder = run.task, run.task.request, getattr(busy, "holder", None)
    seconds = _pace.countdown(run.key, run.header.tries, 0.0 if holder is None else holder.age)
    run.header = header = replace(run.header, tries=run.header.tries + 1)
    message = task.signature_from_request(
        request,
        countdown=seconds,
        retries=request.retries,
        headers=replace(header, token=run.carry_on(seconds) or header.token).into(request.headers),
        add_to_parent=False,
        argsrepr=getattr(request, "argsrepr", None),
        kwargsrepr=getattr(request, "kwargsrepr", None),
    )
    try:
        super(LockTask, task).apply_async(message.args, message.kwargs, **message.options)
    except Exception as error:  # a broker's can be anything, and no message is lost for it
        run.passed = None
        if isinstance(error, SoftTimeLimitExceeded):
            raise
        warn("the broker does not take task %s[%s] back, waiting here: %r", task.name, request.id, error)
        return seconds
    raise Retry(exc=busy, when=seconds, is_eager=False, sig=message)


@contextmanager
def _interrupting(lock: Any, wanted: bool) -> Iterator[None]:
    """End the body when its lock is lost, in the way of a soft time limit: in the main thread of a prefork child.

    What the body raises then becomes LockLost where it leaves the lock. The COMMIT of a guarded block on that lock is
    not interrupted; the end of that block is.
    """
    here = threading.current_thread() is threading.main_thread()
    if not (wanted and here and signal.getsignal(SIG_SOFT_TIMEOUT) is soft_timeout_sighandler):
        yield
        return
    mutex, wanting = threading.RLock(), [True]  # a signal handler may find the lock lost

    def interrupt(hold: Hold) -> None:  # called by the watching thread: it waits for nothing
        with mutex:
            if wanting and not hold.committing:
                wanting.clear()
                os.kill(os.getpid(), SIG_SOFT_TIMEOUT)

    lock._interrupt_body = interrupt
    try:
        yield
    finally:
        with mutex:  # a signal that was sent before is delivered before this ends
            wanting.clear()


def _drop(task: Any, request: Any) -> None:
    """Release the lock that the message of that request carries, if any."""
    if token := Header.of(getattr(request, "headers", None), request.id).token:
        give_up(task, request.id, token)


def _revoked(sender: Any = None, request: Any = None, **_said: Any) -> None:
    """Nobody runs a message that was revoked or has expired; what a killed run held ends with its lease."""
    if isinstance(sender, LockTask):
        _ = elsewhere.submit(_drop, sender, request)


def _over(sender: Any = None, state: str = "", **_: Any) -> None:
    """A run has ended before it came to the lock that its message carries."""
    if isinstance(sender, LockTask) and not (state == "RETRY" or hasattr(sender.request, "locked_run")):
        _drop(sender, sender.request)


_ = signals.task_revoked.connect(_revoked, dispatch_uid="dblock.celery.revoked", weak=False)
_ = signals.task_postrun.connect(_over, dispatch_uid="dblock.celery.over", weak=False)
