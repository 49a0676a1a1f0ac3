"""Asking several databases side by side, each in a thread or a task of its own.

A caller starts asks, waits until it knows enough, and leaves the others. An ask that was left goes on: what it gets
later is given back by its own thread or task (`undo`). So a database that is slow or dead delays no caller beyond the
limit that the caller sets. One that has not answered within a limit is *silent* until it answers again: callers do not
wait for it, and while an ask of it is under way no other one is begun, so threads do not pile up.

Rule: the result of an ask that was left is undone, once, whichever came first.
"""

from __future__ import annotations

import contextlib
import math
import threading
from collections import deque
from collections.abc import Callable, Collection, Mapping, MutableMapping
from typing import Any, Generic, Protocol, TypeVar, cast
from weakref import WeakKeyDictionary, WeakSet

from dblock.core import clock, runtime, timing
from dblock.core.errors import LockError, LockStoreError, StoreBusy
from dblock.core.log import warn
from dblock.core.protocol.drive import adrive, drive, plain_task
from dblock.core.protocol.steps import Cancel, Cancelled, Steps, wait
from dblock.core.protocol.store import Store
from dblock.core.wakeup.registry import Wakeup
from dblock.core.worker import start

T = TypeVar("T")


class HasStore(Protocol):
    """What is asked by its database."""

    store: Store


K = TypeVar("K", bound=HasStore)


class Health:
    """What is known of a database."""

    silent = False
    """Whether it did not answer the last time within the limit, or failed."""
    pinned = False
    """Whether the last take was refused although nobody held the key: a transaction prevents it, for example."""
    asked_until = 0.0
    """The local time until which no other ask is begun, as one is under way that is beyond its limit."""
    error: LockError | None = None
    """Why it failed the last time; None if it answered."""


class Ask(Generic[T]):
    """Steps on one database, as their caller sees them."""

    def __init__(
        self, store: Store, steps: Steps[T], wakeup: Wakeup, undo: Callable[[T], Steps[None]] | None = None
    ) -> None:
        """`wakeup`: the caller's; `undo`: what gives the result of a take back."""
        self.store = store
        self.answered = False
        """Whether its steps have ended with a result, or with an error of the lock."""
        self.result: T | None = None
        self.error: LockError | None = None
        self.left = False
        """Whether its caller has gone: a result is undone."""
        self.prompt = True
        """Whether its caller waits for it: its database was not silent when it was begun, nor, for a take, pinned."""
        self.late = False
        """Whether it is under way beyond its limit."""
        self.among: Collection[Ask[Any]] = ()
        """Those for whose answers its caller waits together: the last prompt one wakes it."""
        self.cancel = Cancel()
        """Set when it is left."""
        self.health = Health()
        """That of its database."""
        self.takes = undo is not None
        self._steps, self._undo, self._caller = steps, undo, wakeup
        self._mutex = threading.RLock()  # a signal handler may leave

    def pending(self) -> bool:
        """Whether it has not been answered, nor left."""
        return not (self.answered or self.left)

    def leave(self, asks: Asks) -> None:
        """Let it go: what it got, or gets later, is undone in the background."""
        with self._mutex:
            answered = self.answered and not self.left
            self.left = True
        if answered:
            asks.begin(self.store, self._undone())
        self.cancel.set()

    def work(self) -> Steps[None]:
        """Run the steps to their end."""
        error: LockError | None = None
        result: Any = None
        try:
            result = yield from self._steps
        except Cancelled:
            return
        except LockError as raised:
            error = raised
        except Exception as raised:  # noqa: BLE001 - no caller waits for it here
            error = LockStoreError(f"{self.store.name} could not be asked: {raised!r}")
            error.__cause__ = raised
        finally:
            if self.late:
                self.health.asked_until = 0.0
        busy = isinstance(error, StoreBusy)
        self.health.silent = isinstance(error, LockStoreError) and not busy
        self.health.error = error if self.health.silent else None
        if self.takes:
            self.health.pinned = busy
        with self._mutex:
            self.result, self.error, self.answered = result, error, True
            left = self.left
        if left:
            self.cancel.over = True
            yield from self._undone()
        elif not any(each.prompt and each.pending() for each in self.among):
            self._caller.notify()

    def _undone(self) -> Steps[None]:
        try:
            if self._undo is not None and self.error is None:
                yield from self._undo(self.result)  # type: ignore[arg-type]
        except LockError as error:
            warn("could not give back what %s has granted, which expires: %s", self.store.name, error)


class Asks:
    """The asks of this process."""

    def __init__(self) -> None:
        self._mutex = threading.RLock()  # a signal handler may begin an ask
        self._changed = threading.Condition(self._mutex)  # no `with`, in which an interrupt would leave it locked
        self._jobs: deque[tuple[Store, Steps[Any], Cancel | None]] = deque()
        self._idle = 0
        """Number of threads that wait for a job; they alone change it, as no signal handler interrupts them."""
        self._working = 0
        """Number of threads that have one."""
        self._tasks = set[Any]()
        """The tasks on event loops, which themselves refer to none."""
        self.held: WeakSet[Any] = WeakSet()
        """The majorities that are held."""
        self._health: MutableMapping[Store, Health] = WeakKeyDictionary()

    # -- asking

    def ask(self, ask: Ask[Any], *, anyway: bool = False) -> Ask[Any]:
        """Begin an ask, unless its database is silent and is being asked already; `anyway`: also then."""
        health = self._of(ask.store)
        if anyway or clock.now() >= health.asked_until:
            ask.health, ask.prompt = health, not (health.silent or (health.pinned and ask.takes))
            self.begin(ask.store, ask.work(), ask.cancel)
            return ask
        error = LockStoreError(f"{ask.store.name} has not answered for a while, and is being asked")
        if (known := health.error) is not None:  # read once: the ask under way may be answered meanwhile
            error = LockStoreError(f"is being asked again, after: {known}")
            error.__cause__ = known.__cause__
        ask.error, ask.answered = error, True
        return ask

    def is_silent(self, store: Store) -> bool:
        """Whether takes do not wait for a database; to them one that is pinned is as good as silent."""
        return self._of(store).silent or self._of(store).pinned

    def gather(
        self,
        asks: Collection[Ask[Any]],
        limit: float,
        wakeup: Wakeup,
        enough: Callable[[], bool] = lambda: False,
        *,
        silent_until: float = math.inf,
        waits: bool = False,
    ) -> Steps[None]:
        """Wait for the answers, at most `limit` seconds; for those of silent databases only until there is `enough`.

        Nor for these beyond the local time `silent_until`. A database that has not answered then is silent from now on;
        not if the steps themselves wait for something.
        """
        until = clock.now() + limit
        for ask in asks:
            ask.among = asks
        while True:
            _ = wakeup.consume()
            pending = [ask for ask in asks if ask.pending()]
            prompt = any(ask.prompt for ask in pending)
            left = (until if prompt else min(until, silent_until)) - clock.now()
            if not pending or left <= 0 or (not prompt and enough()):
                break
            yield from wait(pending[0].store, left, wakeup)
        for ask in pending if not waits else ():
            self.not_answered(ask)

    def hear(self, steps: Mapping[K, Steps[T]], limit: float, *, anyway: bool = False) -> Steps[dict[K, T | LockError]]:
        """What each database has answered, or how it failed; `anyway`: also a silent one is asked."""
        wakeup = Wakeup()
        asks = {each: self.ask(Ask(each.store, its, wakeup), anyway=anyway) for each, its in steps.items()}
        yield from self.gather(asks.values(), limit, wakeup, lambda: True)
        return {each: ask.error or cast("T", ask.result) for each, ask in asks.items() if ask.answered}

    def not_answered(self, ask: Ask[Any]) -> None:
        """Note that an ask is beyond its limit."""
        with ask._mutex:
            if ask.pending() and not ask.late:
                ask.late, ask.health.silent = True, ask.prompt or ask.health.silent
                ask.health.asked_until = clock.now() + timing.DEFAULT.surely_answered

    def _of(self, store: Store) -> Health:
        with self._mutex:
            return self._health.setdefault(store, Health())

    # -- threads and tasks

    @property
    def busy(self) -> bool:
        """Whether anything is under way."""
        return bool(self._tasks or self._jobs or self._working)

    def begin(self, store: Store, steps: Steps[Any], cancel: Cancel | None = None) -> None:
        """Run the steps in a thread, or in a task of the running event loop."""
        if store.asynchronous:
            task = plain_task(_logged(adrive(steps, cancel=cancel)))
            for over in [each for each in list(self._tasks) if each.get_loop().is_closed()]:
                self._tasks.discard(over)
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
            return
        with self._mutex:
            if len(self._jobs) >= self._idle:
                try:
                    _ = start(self._serve, "quorum")
                except RuntimeError as error:  # out of threads: another one may do it yet
                    warn("cannot start a thread to ask %s: %s", store.name, error)
            self._jobs.append((store, steps, cancel))
            self._changed.notify()

    def _serve(self) -> None:
        """Do jobs until there is none for a while."""
        while True:
            with self._mutex:
                self._idle += 1
                found = self._changed.wait_for(lambda: self._jobs, timing.DEFAULT.linger)
                self._idle -= 1
                if not found:
                    return
                self._working += 1
                store, steps, cancel = self._jobs.popleft()
            try:
                drive(steps, cancel=cancel)
            except BaseException as error:  # noqa: BLE001 - other asks depend on this thread
                warn("asking %s failed: %r", store.name, error)
            del store, steps, cancel
            with self._mutex:
                self._working -= 1


def the_asks() -> Asks:
    """The asks of this process."""
    kept = runtime.current.kept
    found: Asks = kept.get(__name__) or kept.setdefault(__name__, Asks())
    return found


def missing() -> dict[str, bool]:
    """The databases of this process's majority locks, and whether majorities go without them, as last heard."""
    asks = the_asks()
    with asks._mutex:
        found = {store.name: health.silent or health.pinned for store, health in asks._health.items()}
    for held in list(asks.held):
        found |= dict.fromkeys(held.missing(), True)
    return found


async def _logged(work: Any) -> None:
    with contextlib.suppress(Exception):
        await work
