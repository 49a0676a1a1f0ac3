"""The keeper of one database: runs what this process does there in the background.

Renewals and heartbeats run in one thread, which is started before the first lease that needs it is returned. While its
statement hangs, each further one has a thread of its own. So has everything else (deleting places, reaping, writing the
history), which may take minutes. With an asynchronous driver there is a keeper for each event loop, whose tasks run all
of it.

Rule: it fails softly. What cannot begin, or fails, is logged, and begins again when it is next due.
"""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any
from weakref import ref

from dblock.core import clock, timing
from dblock.core.connections.pool import background
from dblock.core.errors import LockError
from dblock.core.log import warn
from dblock.core.protocol import queue, reaping
from dblock.core.protocol.drive import adrive, drive, going_on, plain_task
from dblock.core.protocol.queue import QueuePlace
from dblock.core.protocol.steps import Steps
from dblock.core.protocol.store import Store
from dblock.core.worker import Worker, start

Withdraw = Callable[[Store, Sequence[tuple[str, str]]], Steps[None]]


def in_background(store: Store, steps: Steps[object]) -> Steps[None]:
    """The same steps; an error is logged, and no connection is kept of a pool that the application has closed."""
    _ = background.set(True)
    try:
        _ = yield from steps
    except Exception as error:  # noqa: BLE001 - no caller waits for it
        warn("work in the background failed for %s: %r", store.name, error)
    finally:
        _ = background.set(False)


def run_apart(store: Store, steps: Steps[object]) -> None:
    """Run the steps in this thread, where no event loop runs, as background work."""
    work = in_background(store, steps)
    if store.asynchronous:
        asyncio.run(adrive(work))
    else:
        drive(work)


def heartbeat(store: Store, places: Sequence[QueuePlace]) -> Steps[None]:
    """Extend the places, by one statement; a place survives a heartbeat that fails."""
    database = store.database
    try:
        yield from queue.heartbeat(database, places, database.now() + database.timing.heartbeat_interval / 2)
    except LockError as error:
        database.away(error)


class Keeper(Worker):
    """The background work of this process for one database, by threads or in tasks of one event loop.

    Its own thread renews and sends heartbeats; with an event loop it is not started.
    """

    def __init__(self, store: Store, loop: Any, lock: Any, withdraw: Withdraw) -> None:
        """`lock`: the watchdog's; `withdraw`: see `handover.withdraw`, for a store."""
        super().__init__("renewal")
        self.store, self.loop, self._lock, self._withdraw = store, loop, lock, withdraw
        self.given: Steps[object] | None = None
        """The renewals or heartbeats that its thread sends, or is to send."""
        self.over = False
        """Whether it has nothing more to keep, so that its thread ends."""
        self.tasks = set[Any]()
        """The tasks, and the steps for which one is to be begun."""
        self.places: dict[str, QueuePlace] = {}
        """The places in queues that get heartbeats, by their owner tokens."""
        self.due = math.inf
        """The local time of the next heartbeat."""
        self.left: dict[str, str] = {}
        """Places to be deleted (owner token: key)."""
        self._withdrawal: Callable[[], Steps[Any] | None] = lambda: None
        """A reference to the steps that delete them."""
        self.reap_at = self._next_reaping()
        """The local time from which the next pass of reaping is due."""
        self._reaping: Callable[[], Steps[Any] | None] = lambda: None
        """A reference to the steps of the last one."""

    @property
    def withdraws(self) -> bool:
        """Whether places are to be deleted, or are being."""
        return bool(self.left) or going_on(self._withdrawal)

    def round(self) -> float:
        if self.given is not None:
            run_apart(self.store, self.given)
            self.given = None
        return math.inf if self.over else clock.now() + timing.DEFAULT.attention

    def look(self) -> float:
        """Do what is due; returns the seconds until the next heartbeat."""
        if self.loop is None:
            self.begin_to_withdraw()
        if self.reap_at <= clock.now() and self.store.reaping is not None and not going_on(self._reaping):
            self.reap_at, steps = self._next_reaping(), reaping.reap(self.store.database, self.store.reaping[1])
            self._reaping = ref(steps)
            self.begin(steps, long=True)
        if not self.places:
            return math.inf
        now, times = self.store.database.now(), self.store.database.timing
        for owner, place in list(self.places.items()):
            if now > place.seen + times.unresponsive_after:  # its flow was interrupted while it left, say
                _ = self.places.pop(owner, None)
        if self.due <= now:
            self.due = now + times.heartbeat_interval
            self.begin(heartbeat(self.store, list(self.places.values())))
        return self.due - now

    def begin(self, steps: Steps[object], *, long: bool = False) -> None:
        """Begin to renew, or to send heartbeats; or other steps, which may take `long`."""
        try:
            if self.loop is not None:
                self.tasks.add(steps)
                self.loop.call_soon_threadsafe(self._begin_task, steps)
            elif long or self.given is not None:
                _ = start(partial(run_apart, self.store, steps), "housekeeping" if long else "renewal")
            else:
                self.given = steps
                if (refused := self.wake()) is not None:
                    self.given = None
                    raise refused
        except RuntimeError as error:  # the loop is closed; out of threads, or the interpreter is ending
            steps.close()  # they are not going on
            warn("cannot work in the background for %s, trying again: %s", self.store.name, error)

    def _begin_task(self, steps: Steps[object], *, undisturbed: bool = False) -> None:
        task = plain_task(adrive(in_background(self.store, steps), undisturbed=undisturbed), self.loop)
        self.tasks.add(task)
        self.tasks.discard(steps)
        task.add_done_callback(self.tasks.discard)

    def begin_to_withdraw(self) -> None:
        """Begin to delete places, unless a thread or task does. With an event loop it is called there."""
        steps = self.withdrawal()
        if steps is not None and self.loop is None:
            self.begin(steps, long=True)
        elif steps is not None:
            self._begin_task(steps, undisturbed=True)

    def withdrawal(self) -> Steps[None] | None:
        """The steps that delete places, for the caller to run; None if there are none, or others run such steps."""
        with self._lock:
            if not self.left or going_on(self._withdrawal):
                return None
            steps = self._withdraw_all()
            self._withdrawal = ref(steps)
            return steps

    def _withdraw_all(self) -> Steps[None]:
        """Delete places until there are no more."""
        while True:
            with self._lock:
                places, self.left = list(self.left.items()), {}
                if not places:
                    self._withdrawal = lambda: None  # from now on others begin
                    return
            try:
                yield from self._withdraw(self.store, places)
            except asyncio.CancelledError:  # the event loop is ending, and waits for this task
                yield from self._withdraw(self.store, places)

    def _next_reaping(self) -> float:
        """The local time of the next pass; infinity if this process does not reap that database.

        The intervals are exponentially distributed, which needs no memory of earlier keepers: processes that began
        together do not reap together, and processes that live for a shorter time reap too.
        """
        if self.store.reaping is None or not self.store.renewable:
            return math.inf
        return clock.now() + random.expovariate(1 / self.store.reaping[0])
