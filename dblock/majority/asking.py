"""Asking several databases side by side, each in a thread or a task of its own.

A caller starts asks, waits until it knows enough, and leaves the others. An ask that was left goes on: what it gets
later is given back by its own thread or task (`undo`). So a database that is slow or dead delays no caller beyond the
limit that the caller sets. One that has not answered within a limit is *silent* until it answers again: callers do not
wait for it, and while an ask of it is under way no other one is begun, so threads do not pile up.

Rule: the result of an ask that was left is undone, once, whichever came first.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Collection, Mapping, MutableMapping
from typing import Any, Generic, TypeVar, cast
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


class Health:
    """What is known of a database."""

    error: LockError | None = None
    """Why it is *silent*: it failed the last time, or did not answer within the limit; None if it answered."""
    pinned = False
    """Whether the last take was refused although nobody held the key: a transaction prevents it, for example."""
    asked_until = 0.0
    """The local time until which no other ask is begun, as one is under way that is beyond its limit."""


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
        self.prompt = True
        """Whether its caller waits for it: its database was not silent when it was begun, nor, for a take, pinned."""
        self.among: Collection[Ask[Any]] = ()
        """Those for whose answers its caller waits together: the last prompt one wakes it."""
        self.cancel = Cancel()
        """Set when its caller leaves it: a result is undone."""
        self.health = Health()
        """That of its database."""
        self.undo, self._steps, self._caller = undo, steps, wakeup
        self._mutex = threading.RLock()  # a signal handler may leave

    def pending(self) -> bool:
        """Whether it has not been answered, nor left."""
        return not (self.answered or self.cancel.is_set)

    def leave(self, asks: Asks) -> None:
        """Let it go: what it got, or gets later, is undone in the background."""
        with self._mutex:
            undone = self.answered and not self.cancel.is_set
            self.cancel.set()
        if undone:
            asks.begin(self.store, self._undone())

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
        finally:
            self.health.asked_until = 0.0
        busy = isinstance(error, StoreBusy)
        self.health.error = error if isinstance(error, LockStoreError) and not busy else None
        if self.undo is not None:
            self.health.pinned = busy
        with self._mutex:
            self.result, self.error, self.answered = result, error, True
            left = self.cancel.is_set
        if left:
            self.cancel.over = True
            yield from self._undone()
        elif not any(each.prompt and each.pending() for each in self.among):
            self._caller.notify()

    def _undone(self) -> Steps[None]:
        try:
            if self.undo is not None and self.error is None:
                yield from self.undo(self.result)  # type: ignore[arg-type]
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

    def ask(self, ask: Ask[T], *, anyway: bool = False) -> Ask[T]:
        """Begin an ask, unless its database is silent and is being asked already; `anyway`: also then."""
        health = self._of(ask.store)
        known = health.error  # read once: the ask under way may be answered meanwhile
        if anyway or clock.now() >= health.asked_until:
            ask.health, ask.prompt = health, known is None and not (health.pinned and ask.undo)
            self.begin(ask.store, ask.work(), ask.cancel)
            return ask
        ask.error = LockStoreError(f"is being asked again, after: {known or 'no answer for a while'}")
        ask.answered = True
        return ask

    def is_silent(self, store: Store) -> bool:
        """Whether takes do not wait for a database; to them one that is pinned is as good as silent."""
        health = self._of(store)
        return health.pinned or health.error is not None

    def gather(
        self,
        asks: Collection[Ask[Any]],
        limit: float,
        wakeup: Wakeup,
        enough: Callable[[Collection[Ask[Any]]], bool] = lambda _: False,
        *,
        waits: bool = False,
    ) -> Steps[None]:
        """Wait for the answers, at most `limit` seconds; for those of silent databases only until there is `enough`.

        A database that has not answered then is silent from now on; not if the steps themselves wait for something.
        """
        until = clock.now() + limit
        for ask in asks:
            ask.among = asks
        while True:
            _ = wakeup.consume()
            pending = [ask for ask in asks if ask.pending()]
            left = until - clock.now()
            if not pending or left <= 0 or (not any(ask.prompt for ask in pending) and enough(asks)):
                break
            yield from wait(pending[0].store, left, wakeup)
        for ask in pending if not waits else ():
            self.not_answered(ask)

    def hear(
        self, steps: Mapping[Any, Steps[T]], limit: float, *, anyway: bool = False
    ) -> Steps[dict[Any, T | LockError]]:
        """What each database has answered, or how it failed; `anyway`: also a silent one is asked."""
        wakeup = Wakeup()
        asks = {each: self.ask(Ask(each.store, its, wakeup), anyway=anyway) for each, its in steps.items()}
        yield from self.gather(asks.values(), limit, wakeup, lambda _: True)
        return {each: ask.error or cast("T", ask.result) for each, ask in asks.items() if ask.answered}

    def not_answered(self, ask: Ask[Any]) -> None:
        """Note that an ask is beyond its limit."""
        with ask._mutex:
            if ask.pending():
                ask.health.asked_until = clock.now() + timing.DEFAULT.surely_answered
                if ask.prompt:
                    ask.health.error = ask.health.error or LockStoreError("no answer for a while")

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
            task = plain_task(adrive(steps, cancel=cancel))
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
        found = {store.name: asks.is_silent(store) for store in asks._health}
    for held in list(asks.held):
        found |= dict.fromkeys((each.name for each in held.missing() if held.entries and not held.lease.loss), True)
    return found
