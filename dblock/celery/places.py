"""The lock that a message carries: taken by the sender, held by the worker that runs it, left when the task has ended.

    take        where the message is sent
    Carried     a worker holds it for as long as the run lasts; what the run sends in its own place carries it on
    give_up     a message that nobody will run

Rule: the lock is where the message is. Between a sender and a worker nobody keeps it: it is a lease of `queue_ttl`
seconds from the moment at which the task is due. Its token is good for one run, however often the message comes.
"""

from __future__ import annotations

import time
from contextlib import suppress
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, Self

from celery.exceptions import Reject

from dblock.celery.results import place_lost
from dblock.celery.spec import OnBusy, Scope, Spec
from dblock.core import clock, runtime
from dblock.core.acquire import handover
from dblock.core.errors import LockError, LockLost, LockStoreError, LockTimeout, Reason
from dblock.core.holding.handover_record import HandoverRecord
from dblock.core.identity import acting_for, storable
from dblock.core.lock.entering import attach
from dblock.core.lock.leaving import detach
from dblock.core.log import warn
from dblock.core.tokens import new_secret, token_text, valid_token

if TYPE_CHECKING:
    from dblock.core.lock.locks import SyncLock

OWN: Final = 2.0
"""Seconds for which a run waits for an earlier run of the same task, which sent the message by `retry()` and is about
to end. Also for a database that did not answer at once, if nobody would bring the message back."""


def take(spec: Spec, task: Any, key: str, task_id: Any, delay: float) -> str:
    """The token of a new place for the message of task `task_id`, due in `delay` seconds; raises LockTimeout."""
    timeout = spec.timeout if spec.on_busy is OnBusy.WAIT or spec.timeout is not ... else 0
    lock = spec.queue_lock(task, spec.queue_key(key), timeout, spec.queue_ttl + delay)
    if lock._hold_here() is not None:  # it would be entered once more
        raise LockTimeout(f"{lock.key!r} is held by the flow that sends {task.name}", key=lock.key)
    with acting_for(str(task_id)), lock:
        return lock.detach()


def give_up(spec: Spec, task: Any, task_id: Any, text: str) -> None:
    """Release the lock of a message that nobody will run, if it was taken for that task, and its token was not used.

    What fails here ends with its lease.
    """
    token = valid_token(text)
    lock = spec.queue_lock(task, token.tenure.key, 0)
    try:
        info = lock.inspect()
        if info is None or info.identity.celery_task_id != storable(str(task_id)):
            return
        _ = lock._drive(handover.free(runtime.current.site(lock._store()), HandoverRecord(token.tenure)))
    except LockError as error:
        warn("the lock of a message of %s that nobody will run ends with its lease: %s", task.name, error)


def let_go(lock: SyncLock) -> None:
    """Leave a lock that a run should have left: it was interrupted on its way in or out."""
    with suppress(LockError):
        hold = lock._hold_here()
        if lock._blocks:
            lock.__exit__(None, None, None)
        elif hold is not None and hold.entered_by(lock):
            lock.release()


def _why(error: LockLost) -> str:
    """Why the lock of a message was over when the message came."""
    if error.reason is not Reason.EXPIRED:
        return str(error)
    return (
        f"the lease on {error.key!r} has ended: "
        "the process that ran the task before was killed, or the message waited longer than queue_ttl"
    )


class Carried:
    """The lock of a message, held by its worker for one run."""

    def __init__(self, spec: Spec, task: Any, text: str, entered: list[SyncLock]) -> None:
        self._spec, self._task, self._text, self._token = spec, task, text, valid_token(text)
        self._entered = entered
        """Where to note what is entered."""
        self.lock: SyncLock | None = None
        """None if this run does not hold it."""
        self.busy: LockTimeout | LockStoreError | None = None
        """Another run of the same message is under way, or was killed within the last ttl; or the database is away."""
        self._goes_on: float | None = None
        """Seconds until the run is due to which the message takes the lock on."""
        self._secret = ""
        """That of the token in the message."""

    def __enter__(self) -> Self:
        key, deadline = self._token.tenure.key, clock.now() + OWN
        both = self._spec.scope is Scope.BOTH
        lock = self._spec.queue_lock(self._task, key, 0) if both else self._spec.lock(self._task, key, 0)
        self._entered.append(lock)
        try:
            while not self._attach(lock):
                if clock.now() > deadline:
                    return self
                time.sleep(OWN / 40)
            _ = lock.__enter__()  # what was attached becomes the block
            self.lock, self.busy = lock, None
        except LockLost as error:
            self.busy = None
            warn(
                "the lock of task %s[%s] was over before it ran: %s",
                self._task.name,
                self._task.request.id,
                _why(error),
            )
            _ = place_lost.send(self._task, task_id=self._task.request.id, key=key, error=error)
        except (LockStoreError, LockTimeout) as error:  # the keys may be closed after a failover
            self.busy = error
        except BaseException:  # interrupted
            let_go(lock)
            raise
        return self

    def _attach(self, lock: SyncLock) -> bool:
        """Use the token; False, and `busy`, if an earlier run of the message has used it, or has yet to detach it."""
        try:
            _ = lock._drive(attach(lock, self._token))
        except LockLost as error:
            if error.reason is not Reason.USED:
                raise
            who = f"{self._task.name}[{self._task.request.id}]"
            self.busy = LockTimeout(f"another run of task {who} is under way, or has died", key=error.key)
            return False
        return True

    def carry_on(self, delay: float) -> str:
        """The token for a message that is due in `delay` seconds; the lock passes to it once this run has ended."""
        if self.lock is None:
            return self._text if self.busy else ""
        self._goes_on, self._secret = delay, new_secret()
        return token_text(self._token._replace(tenure=self._token.tenure._replace(owner=self._secret)))

    def keep(self) -> None:
        """Keep the lock in this run: the message of `carry_on` was not sent."""
        self._goes_on = None

    def give_up(self) -> None:
        """Release the lock before the run has ended: it is needed no more."""
        if self.lock is not None:
            with suppress(LockError):
                self.lock.release()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        lock, self.lock = self.lock, None
        if lock is None:
            return
        try:
            if self._goes_on is not None:
                with suppress(LockError):
                    _ = lock._drive(detach(lock, self._secret, self._spec.queue_ttl + self._goes_on))
        finally:
            try:
                lock.__exit__(kind, error, trace)
            except LockError:
                # Given up, gone on, or put back; or a lock that the run did not rely on.
                put_back = isinstance(error, Reject) and error.requeue
                if self._spec.scope is not Scope.BOTH and self._goes_on is None and not put_back:
                    raise
