"""The watchdog: renews the leases of this process, and reports leases that are at risk or lost.

One thread watches, and never waits for a database while the process lives: it knows when each hold is due for renewal,
at risk and lost, so that a hanging renewal delays no report. The renewals run elsewhere: in one thread for each
database, over connections that takes cannot use up (a blocked event loop loses no leases there), or, with an
asynchronous driver, in a task on the event loop that took the lock. One statement renews all due leases of a database,
and one extends the places in queues that the flows of this process wait in.

    a lease     ->  due a third of its term after the last renewal; then, once sent, due again a sixth later
    a renewal   ->  answered: its leases are due as above, or lost; failed: due again in a twentieth; no answer: neither
    a hold      ->  lost, and told, when its trust has ended; then, or when its flow releases it, it is watched no more

So a renewal is retried until the lease is lost. Without an answer it is abandoned after a sixth of the term, and the
next one uses another connection; a later answer still counts, from the time of sending.

The watching thread wakes once a second while there is something to watch. It also closes connections that have been
idle for too long: while that is its only work, it sleeps until the first of them is due. It ends when it has nothing to
do, and is started again when needed.

Rule: nothing here decides who holds a key. The watchdog moves the moment until which a hold is trusted (see
`dblock.core.holding.lease`), and reports. Neither it nor the threads that it waits for run code of the application (see
`dblock.core.deliveries`).
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import sys
import threading
import time
from collections.abc import Callable, Iterable, MutableMapping, Sequence
from functools import partial
from queue import SimpleQueue
from typing import Any, Protocol
from weakref import WeakKeyDictionary

from dblock.core import clock, timing
from dblock.core.connections.pool import background
from dblock.core.deliveries import deliveries
from dblock.core.errors import Reason, StoreBusy
from dblock.core.holding.flow import Flows, Hold
from dblock.core.log import warn
from dblock.core.protocol.drive import adrive, drive, plain_task
from dblock.core.protocol.steps import Steps
from dblock.core.protocol.store import Store
from dblock.core.watchdog import reaping
from dblock.core.watchdog.heartbeats import KeptPlace, heartbeat
from dblock.core.watchdog.renewals import renew
from dblock.core.watchdog.watched import Watched
from dblock.core.worker import start

Where = tuple[Store, Any]
"""A database, and the event loop that its steps run on: None for a thread."""


class Writes(Protocol):
    """Rows that are to be written in the background."""

    def begin(self, *, ripe: float = 0.0) -> Iterable[tuple[Store, Any, Steps[None]]]:
        """The writes that are due: store, event loop (None: one of its own), and steps.

        `ripe`: minimum age in seconds of the oldest row of a write.
        """
        ...

    @property
    def pending(self) -> bool:
        """Whether something is to be written, or being written."""
        ...


def in_background(steps: Steps[None]) -> Steps[None]:
    """The same steps; an error is logged, and no connection is kept of a pool that the application has closed."""
    _ = background.set(True)
    try:
        yield from steps
    except Exception as error:  # noqa: BLE001 - no caller waits for it
        warn("work in the background failed: %r", error)


def run_apart(steps: Steps[None], store: Store) -> None:
    """Run the steps in this thread, where no event loop runs."""
    if store.asynchronous:
        asyncio.run(adrive(steps))
    else:
        drive(steps)


class Renewer:
    """A thread that runs renewals and heartbeats of one database, one after the other, until it is given None."""

    def __init__(self) -> None:
        self._given = SimpleQueue[Steps[None] | None]()
        self._idle = True
        self._is_alive = start(self._run, "renewal")

    @property
    def ready(self) -> bool:
        """Whether the thread runs and has nothing under way."""
        return self._idle and self._is_alive()

    def give(self, steps: Steps[None] | None) -> None:
        """Run the steps, if it is ready."""
        self._idle = False
        self._given.put(steps)

    def _run(self) -> None:
        while (steps := self._given.get()) is not None:
            drive(steps)
            del steps
            self._idle = True


class Watchdog(Watched):
    """Watches all holds of this process."""

    def __init__(
        self,
        flows: Flows,
        give_back: Callable[[Hold], None],
        withdraw: Callable[[Store, Sequence[tuple[str, str]]], Steps[None]],
        prune: Callable[[], float] = lambda: math.inf,
    ) -> None:
        """`give_back` releases a hold at the end of the process; `withdraw` is `handover.withdraw`, for a store.

        `prune` closes idle connections whose time is up, without waiting for a server, and returns the local time of
        the next call; `inf` if it is not needed.
        """
        super().__init__(flows)
        self._give_back, self._withdraw, self._prune = give_back, withdraw, prune
        self._places: dict[str, KeptPlace] = {}
        self._renewers: dict[Store, Renewer] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._finalized = False
        """Whether `close` is registered for the end of a child of multiprocessing."""
        self._withdrawn: dict[Where, dict[str, str]] = {}
        """Places to be deleted in the background (owner token: key)."""
        self._withdrawals: dict[Where, Callable[[], bool]] = {}
        """For each thread or task that was begun to delete them: whether it still runs."""
        self._reap_at: MutableMapping[Store, float] = WeakKeyDictionary()
        self.histories: Writes | None = None
        """The events to write; None if no store keeps a history."""
        self._ending: list[Hold] | None = None
        self._ended = threading.Event()

    # -- for the flows

    def keep(self, kept: KeptPlace) -> None:
        """Send heartbeats for a place in a queue from now on."""
        self._places[kept.place.owner] = kept
        self._added = True
        self.wake_by(kept.due)

    def leave(self, owner: str) -> None:
        """Send no more heartbeats for that place."""
        _ = self._places.pop(owner, None)

    def withdraw(self, store: Store, loop: Any, key: str, owner: str) -> None:
        """Delete a place in the background, and release what was granted to it; several go into one statement.

        Called on the event loop, if there is one: a task there is awaited when the loop ends, as by `asyncio.run`.
        Without a key, as the place was served, it takes up to a second.
        """
        where = store, loop
        with self._lock:
            self._withdrawn.setdefault(where, {})[owner] = key
        if key or loop is not None:
            self._begin_to_withdraw(where)
        else:
            self.wake_some_time()

    def wake_some_time(self) -> None:
        """Start the watching thread for work that is not urgent, if it does not wake anyway."""
        if self.wakes_at == math.inf:
            self.wake()

    # -- the watching thread

    def wake(self) -> None:
        util = sys.modules.get("multiprocessing.util")
        if util is not None and not self._finalized:  # a child of multiprocessing ends without atexit
            self._finalized = True
            util.Finalize(None, self.close, exitpriority=0)
        super().wake()

    def round(self) -> float:
        if self._ending is not None:
            self._give_all_back(self._ending)
            self._tidy_up()
            self._ending = None
            self._ended.set()
        wait = timing.DEFAULT.attention
        # The next round begins by then: what is added during this one, and is due later, needs no round of its own.
        # Else a process that takes thousands of locks looks at all of them again and again.
        self.wakes_at = latest = clock.now() + wait
        try:
            _ = self._prune()
            wait = self._look_at_all()
            deliveries.start()
            self._keep_house()
        except Exception as error:  # noqa: BLE001 - must continue: leases depend on it
            warn("the watchdog failed in one round, and continues: %r", error)
        return min(clock.now() + wait, latest)

    def busy(self) -> bool:
        added, self._added = self._added, False
        work = self._holds or self._places or self._renewers or self._withdraws or self._to_write
        return added or bool(work) or deliveries.stranded

    def rests_until(self) -> float:
        return self._prune()  # again: a connection may have been given back since the round began

    def _look_at_all(self) -> float:
        """Do what is due; returns the seconds until the next."""
        soonest, due, stores = timing.DEFAULT.attention, dict[Where, None](), set[Store]()
        for hold in list(self._holds):
            stores.add(hold.store)
            lease = hold.lease
            left, now = lease.remaining(), lease.now()
            if left <= 0:
                _ = self.discard(hold)
                self.announce(hold)
                continue
            soonest = min(soonest, left)
            if lease.renewing and hold.orphaned:
                warn("%r was never released by a thread or task that has ended", hold.shown)
                lease.renewing = False
            if now >= lease.acquired + hold.max_hold or (hold.loop is not None and hold.loop.is_closed()):
                lease.renewing = False
            if lease.renewing and not hold.can_be_released:
                if not hold.risk_reported:
                    warn("a `with` on %r was interrupted before it was left: its lease expires", hold.shown)
                hold.risk_reported, lease.due = True, math.inf  # unless its flow enters it again
            elif lease.renewing:
                if lease.due <= now:
                    due[hold.store, hold.loop] = None
                soonest = min(soonest, lease.due - now if lease.due > now else lease.term / 6)
                late = lease.late_from - now
                if late > 0:
                    hold.risk_reported = False
                    soonest = min(soonest, late)
                elif not hold.risk_reported:
                    self.tell_risk(hold)
        for store, loop in due:
            self._renew(store, loop, self._due_soon(store, loop))
        soonest = min(soonest, self._keep_places())
        for store in self._renewers.keys() - stores - {kept.store for kept in list(self._places.values())}:
            self._renewers.pop(store).give(None)
        return max(soonest, 0.001)

    def _due_soon(self, store: Store, loop: Any) -> list[Hold]:
        """What is due there, or will be soon, so that leases that began one by one are renewed together."""
        found = list[Hold]()
        for hold in list(self._holds):
            lease, now = hold.lease, hold.lease.now()
            here = hold.store is store and hold.loop is loop and lease.renewing and lease.loss is None
            if here and lease.due <= now + lease.ttl / 12:
                found.append(hold)
                lease.due = now + lease.term / 6
        return found

    def _renew(self, store: Store, loop: Any, holds: list[Hold]) -> None:
        for hold in holds if loop is not None else ():
            hold.lease.reason_if_lost = Reason.BLOCKED  # until it has begun
        _ = self._send(renew(store, holds, self), store, loop)

    def _keep_places(self) -> float:
        """Send heartbeats for all places of databases with due ones; returns the seconds until the next."""
        for owner, kept in list(self._places.items()):
            if kept.abandoned():
                self.leave(owner)
        places, now = list(self._places.values()), clock.now()
        for store, loop in {(kept.store, kept.loop) for kept in places if kept.due <= now}:
            mine = [kept for kept in places if (kept.store, kept.loop) == (store, loop) and kept.due < math.inf]
            for kept in mine:
                kept.due = math.inf
            if not self._send(heartbeat(store, mine), store, loop):
                for kept in mine:
                    kept.due = now + store.database.timing.heartbeat_interval
        return min(
            (min(kept.due - now, kept.store.database.timing.heartbeat_interval) for kept in places), default=math.inf
        )

    def _send(self, steps: Steps[None], store: Store, loop: Any) -> bool:
        """Renew, or send heartbeats, in the thread for that or in a task; False if neither can begin now."""
        steps = in_background(steps)
        try:
            if loop is not None:
                loop.call_soon_threadsafe(self._begin_task, steps, loop)
                return True
            renewer = self._renewers.get(store)
            if renewer is None or not renewer.ready:
                if renewer is not None:  # it hangs: it ends after its answer, and another one takes its place
                    self._renewers.pop(store).give(None)
                renewer = self._renewers[store] = Renewer()
        except RuntimeError as error:  # the loop is closed; out of threads, or the interpreter is ending
            warn("cannot renew the leases in %s, trying again: %s", store.name, error)
            return False
        renewer.give(steps)
        return True

    # -- work in the background

    def _keep_house(self) -> None:
        """Begin what is due: deleting places, reaping where locks were taken lately, writing the history."""
        for where in [*self._withdrawn, *self._withdrawals]:
            if where[1] is not None and where[1].is_closed():
                _ = self._withdrawn.pop(where, None), self._withdrawals.pop(where, None)
            elif where[1] is None and where in self._withdrawn:
                self._begin_to_withdraw(where)
        of_late, self._locked_of_late = self._locked_of_late, set()
        for store, loop in of_late:
            if (steps := reaping.begin(store, self._reap_at)) is not None:
                self._run(steps, store, loop)
        for store, loop, steps in self.histories.begin(ripe=timing.DEFAULT.attention / 2) if self.histories else ():
            self._run(steps, store, loop)

    def _run(self, steps: Steps[None], store: Store, loop: Any) -> None:
        """Run steps that delete or write rows, in a thread of their own or in a task.

        Nothing is done without threads, after the end of the loop, or when the interpreter is ending.
        """
        steps = in_background(steps)
        with contextlib.suppress(RuntimeError):
            if loop is None:
                _ = start(partial(run_apart, steps, store), "housekeeping")
            else:
                loop.call_soon_threadsafe(self._begin_task, steps, loop)

    def _begin_task(self, steps: Steps[None], loop: Any, *, undisturbed: bool = False) -> asyncio.Task[None]:
        for each in list(self._tasks):
            if each.get_loop().is_closed():
                self._tasks.discard(each)
        task = plain_task(adrive(steps, undisturbed=undisturbed), loop)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def _begin_to_withdraw(self, where: Where) -> None:
        """Begin to delete places, unless a thread or task does."""
        runs = self._withdrawals.get(where)
        if runs is not None and runs():
            return
        (store, loop), steps = where, in_background(self._withdraw_all(where))
        if loop is not None:
            task = self._begin_task(steps, loop, undisturbed=True)
            self._withdrawals[where] = lambda: not task.done()
            return
        with self._lock, contextlib.suppress(RuntimeError):  # out of threads, or the interpreter is ending
            self._withdrawals[where] = start(partial(run_apart, steps, store), "housekeeping")

    def _withdraw_all(self, where: Where) -> Steps[None]:
        while True:
            with self._lock:
                places = list(self._withdrawn.pop(where, {}).items())
                if not places:
                    _ = self._withdrawals.pop(where, None)
                    return
            try:
                yield from self._withdraw(where[0], places)
            except asyncio.CancelledError:  # the event loop is ending, and waits for this task
                yield from self._withdraw(where[0], places)

    @property
    def _withdraws(self) -> bool:
        """Whether places are to be deleted by a thread, or are being."""
        alive = [where for where, runs in list(self._withdrawals.items()) if runs()]
        return any(loop is None for _, loop in [*self._withdrawn, *alive])

    @property
    def _to_write(self) -> bool:
        return self.histories is not None and self.histories.pending

    # -- the end

    def close(self) -> None:
        """At a normal exit: release the holds of flows that have ended or are ending.

        A thread that may still be at work keeps its holds: they are renewed until the process ends, and then expire.
        """
        mine, ending = self._flows.current(), self._given_up
        self._given_up = []
        for hold in reversed(list(self._holds)):
            flow = hold.flow()
            if hold.lease.loss is None and (
                flow is None or flow is mine or flow.ended() or (flow.idle is not None and flow.idle())
            ):
                _ = self.discard(hold)
                ending.append(hold)
        if not (ending or self._withdraws or self._to_write):
            return
        # In the watching thread, since Python 3.12 starts no new ones now, and a database that does not answer must not
        # keep the process from ending.
        self._ended.clear()
        self._ending = ending
        self.wake()
        _ = self._ended.wait(timing.DEFAULT.patience)

    def _give_all_back(self, holds: list[Hold]) -> None:
        """Release the holds one by one; after a failure the rest of that database are skipped."""
        silent = set[Store]()
        for hold in holds:
            if hold.store in silent:
                continue
            try:
                self._give_back(hold)
            except Exception as error:  # noqa: BLE001 - the others must be released
                warn("could not release %r at exit: %s", hold.shown, error)
                if not isinstance(error, StoreBusy):
                    silent.add(hold.store)

    def _tidy_up(self) -> None:
        """Write the history, and delete the places that were served or given up."""
        while self._to_write or self._withdraws:  # by another thread; `close` does not wait for long
            for store, _, steps in self.histories.begin() if self.histories else ():
                run_apart(steps, store)
            for where in [each for each in list(self._withdrawn) if each[1] is None]:
                drive(in_background(self._withdraw_all(where)))
            time.sleep(0.005)
