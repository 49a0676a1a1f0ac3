"""The watchdog: renews the leases of this process, and reports leases that are at risk or lost.

One thread watches, and never waits for a database while the process lives: it knows when each hold is due for renewal,
at risk and lost, so that a hanging renewal delays no report. The renewals run elsewhere: in one thread for each
database, over connections that takes cannot use up (a blocked event loop loses no leases there), or, with an
asynchronous driver, in a task on the event loop that took the lock. One statement renews all due leases of a database,
and one extends the places in queues that the flows of this process wait in.

A renewal is due a third of the ttl after the last one, and retried until the lease is lost. A renewal without an answer
is abandoned after a sixth of the ttl, and the next one uses another connection; a later answer still counts, from the
time of sending.

The watching thread wakes once a second while there is something to watch. It also closes connections that have been
idle for too long: while that is its only work, it sleeps until the first of them is due. It ends when it has nothing to
do, and is started again when needed.

Rule: nothing here decides who holds a key. The watchdog moves the moment until which a hold is trusted (see
`dblock.core.holding.lease`), and reports. It ends the bodies of lost locks itself, which waits for
nothing. Neither it nor the threads that it waits for run code of the application (see `dblock.core.deliveries`).
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import sys
import threading
import time
from collections.abc import Callable, Coroutine, Iterable, MutableMapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol
from weakref import WeakKeyDictionary

from dblock.core import clock, timing
from dblock.core.connections.pool import background
from dblock.core.deliveries import deliveries
from dblock.core.errors import Reason, StoreBusy
from dblock.core.holding.flow import Flows, Hold, HoldObserver
from dblock.core.log import warn
from dblock.core.protocol.drive import adrive, drive, plain_task
from dblock.core.protocol.steps import Steps
from dblock.core.protocol.store import Store
from dblock.core.watchdog import reaping
from dblock.core.watchdog.heartbeats import Heartbeat, KeptPlace
from dblock.core.watchdog.renewals import Renewal, Renewer, quietly
from dblock.core.worker import Worker, start

if TYPE_CHECKING:
    from dblock.core.observing.observers import Observers


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


def _in_background(steps: Steps[None]) -> Steps[None]:
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


class Watchdog(Worker):
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
        super().__init__("watchdog", "watch over leases")
        self._flows, self._give_back, self._withdraw, self._prune = flows, give_back, withdraw, prune
        self._holds: dict[Hold, None] = {}
        self._by_key: dict[tuple[Store, str], Hold] = {}
        self._places: dict[str, KeptPlace] = {}
        self._heartbeats: dict[tuple[Store, Any], Heartbeat] = {}
        self._pruned_by = math.inf
        """Local time of the next pruning."""
        self._renewers: dict[Store, Renewer] = {}
        self._tasks: set[Any] = set()
        self._added = self._finalized = False
        self._locked_of_late = set[tuple[Store, Any]]()
        """Databases that this process reaps, with event loops, in which a lock was taken since the last round."""
        self.histories: Writes | None = None
        """The events to write; None if no store keeps a history."""
        self._reap_at: MutableMapping[Store, float] = WeakKeyDictionary()
        self.observers: Observers | None = None
        """The observers of locks; None if there are none."""
        self._given_up: list[Hold] = []
        """Holds that `release_all` has declared lost, and that are not released in the database yet."""
        self._withdrawn: dict[tuple[Store, Any], dict[str, str]] = {}
        """Places to be deleted in the background (owner token: key), by database and event loop."""
        self._withdrawals: dict[tuple[Store, Any], Callable[[], bool]] = {}
        """For each of these with a thread or task that deletes places: whether that is alive."""
        self._ending: list[Hold] | None = None
        self._ended = threading.Event()

    # -- for the flows

    def add(self, hold: Hold) -> None:
        """Watch a hold from now on."""
        self._holds[hold] = None
        self._by_key[hold.store, hold.tenure.key] = hold
        self._added = True
        if hold.store.reaping is not None:
            self._locked_of_late.add((hold.store, hold.loop))
        if hold.lease.due < self.wakes_at:
            self.wake()

    def discard(self, hold: Hold) -> bool:
        """Stop watching a hold, which the caller releases; False if it was not watched.

        A renewal that is under way finds no such tenure.
        """
        kept = self._holds.pop(hold, True) is None
        place = (hold.store, hold.tenure.key)
        if self._by_key.get(place) is hold:
            _ = self._by_key.pop(place, None)
        return kept

    def is_watching(self, hold: Hold) -> bool:
        """Whether the hold has not been released."""
        return hold in self._holds

    def holds(self, store: Store, key: str) -> bool:
        """Whether a flow of this process holds that key. A hint: the row decides."""
        return self.hold_of(store, key) is not None

    def hold_of(self, store: Store, key: str) -> Hold | None:
        """The hold of a flow of this process on that key; None if there is none, or its lease is over."""
        hold = self._by_key.get((store, key))
        return hold if hold is not None and hold.lease.remaining() > 0 else None

    def keep(self, kept: KeptPlace) -> None:
        """Send heartbeats for a place in a queue from now on."""
        self._places[kept.place.owner] = kept
        self._added = True
        if kept.due < self.wakes_at:
            self.wake()

    def leave(self, owner: str, *, served: bool = False) -> None:
        """Send no more heartbeats for that place; `served`: its row exists, and is deleted later."""
        kept = self._places.get(owner)
        if kept is not None and served:
            kept.served = True
        else:
            _ = self._places.pop(owner, None)

    def withdraw(self, store: Store, loop: Any, key: str, owner: str) -> None:
        """Delete a place in the background, and release what was granted to it; several go into one statement.

        Called on the event loop, if there is one: a task there is awaited when the loop ends, as by `asyncio.run`.
        """
        place = store, loop
        with self._lock:
            self._withdrawn.setdefault(place, {})[owner] = key
            alive = self._withdrawals.get(place)
        if alive is not None and alive():  # else its start was interrupted, or its event loop closed
            return
        self._forget_closed_loops()
        steps = _in_background(self._withdraw_all(place))
        if loop is not None:
            task = self._begin_task(loop, adrive(steps, undisturbed=True))
            self._withdrawals[place] = lambda: not task.done()
            return
        try:
            with self._lock:  # under which the thread, when it ends, removes this entry
                self._withdrawals[place] = start(partial(run_apart, steps, store), "housekeeping")
        except RuntimeError:  # out of threads, or the interpreter is ending: the places expire
            _ = self._withdrawn.pop(place, None)

    def _forget_closed_loops(self) -> None:
        with self._lock:
            for place in [*self._withdrawn, *self._withdrawals]:
                if place[1] is not None and place[1].is_closed():
                    _ = self._withdrawn.pop(place, None), self._withdrawals.pop(place, None)

    def _withdraw_all(self, place: tuple[Store, Any]) -> Steps[None]:
        while True:
            with self._lock:
                places = list(self._withdrawn.pop(place, {}).items())
                if not places:
                    _ = self._withdrawals.pop(place, None)
                    return
            try:
                yield from self._withdraw(place[0], places)
            except Exception:
                raise
            except BaseException as error:  # cancelled: the event loop is ending, and waits for this task
                if isinstance(error, GeneratorExit):
                    raise
                yield from self._withdraw(place[0], places)

    def wake_some_time(self) -> None:
        """Start the watching thread for work that is not urgent, if it does not wake anyway."""
        if self.wakes_at == math.inf:
            self.wake()

    def announce(self, hold: Hold) -> None:
        """Report, once, that a hold is lost."""
        loss = hold.lease.loss
        if loss is None or hold.is_snapshot:
            return
        seen = hold.snapshot()
        if not self.claim_loss_report(hold):
            return
        of_majority = any(lock._majority for lock in seen.locks())
        where = f" in {hold.store.name}, one database of a majority lock" if of_majority else ""
        try:
            warn("lost the lease on %r (fence %d)%s: %s", hold.shown, hold.tenure.fence, where, loss)
            self._tell(lambda lock: lock._who_hears_of_loss(loss.reason), seen)
            if self.observers is not None:
                self.observers.lost(seen, loss)
        finally:  # last: a signal that one sends may raise here, if this is the main thread
            for lock in seen.locks():
                lock._interrupt_body(hold)

    def _tell_risk(self, hold: Hold) -> None:
        hold.risk_reported = True
        seen = hold.snapshot()
        self._tell(lambda lock: lock._who_hears_of_risk(), seen)
        if self.observers is not None:
            self.observers.at_risk(seen)

    def claim_loss_report(self, hold: Hold) -> bool:
        """Claim the report of the end of a hold: True for the first caller only."""
        with self._lock:
            told, hold.loss_reported = hold.loss_reported, True
        return not told

    def revoke(self, hold: Hold, words: str) -> None:
        """Report, once, that a hold was asked back."""
        told, hold.revoked = hold.revoked is not None, words
        if told or not self.is_watching(hold):
            return
        warn("%r (fence %d) was asked back: %s", hold.shown, hold.tenure.fence, words)
        self._tell(lambda lock: lock._who_hears_of_revocation(words), hold.snapshot())

    def give_up(self, store: Store) -> list[Hold]:
        """Declare all holds of this process in a database lost; returns those to be released, last one first."""
        for hold in reversed(list(self._holds)):
            if hold.store is store and self.discard(hold):  # else its flow is releasing it
                if hold.lease.give_up():
                    self._given_up.append(hold)
                self.announce(hold)
        good = [hold for hold in self._given_up if hold.lease.now() < hold.lease.renewed + hold.lease.life]
        self._given_up = good
        return [hold for hold in self._given_up if hold.store is store]

    def giving_back(self, hold: Hold) -> None:
        """Called before a hold is released."""
        self._given_up = [each for each in self._given_up if each is not hold]

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
        wait, self._pruned_by = timing.DEFAULT.attention, math.inf
        # The next round begins by then: what is added during this one, and is due later, needs no round of its own.
        # Else a process that takes thousands of locks looks at all of them again and again.
        self.wakes_at = latest = clock.now() + wait
        try:
            self._pruned_by = self._prune()
            wait = self._look_at_all()
            deliveries.start()
            self._reap()
            self._write_down()
        except Exception as error:  # noqa: BLE001 - must continue: leases depend on it
            warn("the watchdog failed in one round, and continues: %r", error)
        return min(clock.now() + wait, latest)

    def busy(self) -> bool:
        added, self._added = self._added, False
        work = self._holds or self._places or self._renewers or self._to_write
        return added or bool(work) or deliveries.stranded

    def rests_until(self) -> float:
        self._pruned_by = self._prune()  # again: a connection may have been given back since the round began
        return self._pruned_by

    def _look_at_all(self) -> float:
        """Do what is due; returns the seconds until the next."""
        due: dict[tuple[Store, Any], list[Hold]] = {}
        soonest = timing.DEFAULT.attention
        stores = set()
        for hold in list(self._holds):
            stores.add(hold.store)
            left = hold.lease.remaining()
            if left <= 0:
                _ = self.discard(hold)
                self.announce(hold)
                continue
            if hold.lease.renewing and hold.orphaned:
                warn("%r was never released by a thread or task that has ended", hold.shown)
                hold.lease.renewing = False
            now = hold.lease.now()
            if hold.lease.renewing and now >= hold.lease.acquired + hold.max_hold:
                hold.lease.renewing = False
            if hold.lease.renewing and not hold.can_be_released:
                if not hold.risk_reported:
                    warn(
                        "a `with` on %r was interrupted before it was left: its lease expires",
                        hold.shown,
                    )
                hold.risk_reported, hold.lease.due = True, math.inf  # unless its flow enters it again
            elif hold.lease.renewing:
                if hold.lease.due <= now:
                    due.setdefault((hold.store, hold.loop), []).append(hold)
                    hold.lease.due = now + hold.lease.term / 6
                soonest = min(soonest, hold.lease.due - now)
                late = hold.lease.late_from - now
                if late > 0:
                    hold.risk_reported = False
                    soonest = min(soonest, late)
                elif not hold.risk_reported:
                    self._tell_risk(hold)
            soonest = min(soonest, left)
        for (store, loop), holds in due.items():
            self._gather(store, loop, holds)
            _ = self._send(Renewal(store, holds, self), loop)
        soonest = min(soonest, self._keep_places(stores))
        for store in self._renewers.keys() - stores:
            self._renewers.pop(store).batches.put(None)
        return max(soonest, 0.001)

    def _keep_places(self, stores: set[Store]) -> float:
        """Send heartbeats for all places of databases with due ones; returns the seconds until the next."""
        for owner, kept in list(self._places.items()):
            if kept.abandoned():
                self.leave(owner)
        places, now = list(self._places.values()), clock.now()
        stores.update(kept.store for kept in places)
        for store, loop in {(kept.store, kept.loop) for kept in places if kept.due <= now}:
            mine = [kept for kept in places if (kept.store, kept.loop) == (store, loop)]
            for kept in mine:
                kept.due = now + store.database.timing.heartbeat_interval
            last = self._heartbeats.get((store, loop))
            if last is None or last.answered:  # no second heartbeat for a database that hangs
                heartbeat = Heartbeat(store, mine, self.leave)
                if self._send(heartbeat, loop):
                    self._heartbeats[store, loop] = heartbeat
        for place in self._heartbeats.keys() - {(kept.store, kept.loop) for kept in places}:
            del self._heartbeats[place]
        return min((kept.due - now for kept in places), default=timing.DEFAULT.attention)

    def _gather(self, store: Store, loop: Any, holds: list[Hold]) -> None:
        """Add the leases that will be due soon, so that leases that began one by one are renewed together."""
        given = set(holds)  # a short lease is due again as soon
        for hold in list(self._holds):
            if hold in given:
                continue
            if hold.store is store and hold.loop is loop and hold.lease.renewing and hold.lease.loss is None:
                now = hold.lease.now()
                if now < hold.lease.due <= now + hold.lease.ttl / 12:
                    holds.append(hold)
                    hold.lease.due = now + hold.lease.term / 6

    def _send(self, batch: Renewal | Heartbeat, loop: Any) -> bool:
        """Have it sent in a thread or task; False if none can be begun now: the next interval tries again."""
        store = batch.store
        if loop is not None:
            self._send_to_loop(batch, loop)
            return True
        renewer = self._renewers.get(store)
        if renewer is None or not renewer.ready:
            if renewer is not None:  # it hangs: it ends after its answer, and another one takes its place
                self._renewers.pop(store).batches.put(None)
            try:
                renewer = self._renewers[store] = Renewer(store)
            except RuntimeError as error:  # out of threads, or the interpreter is ending
                warn("cannot start a thread to renew the leases in %s, trying again: %s", store.name, error)
                return False
        renewer.given += 1
        renewer.batches.put(batch)
        return True

    def _send_to_loop(self, batch: Renewal | Heartbeat, loop: Any) -> None:
        steps = _in_background(batch.steps())
        batch.set_reason_if_lost(Reason.BLOCKED)  # until it has begun
        try:
            self._run_on_loop(steps, batch.store, loop)
        except RuntimeError:  # the loop is closed, and with it the flows
            batch.give_up()

    def _run_on_loop(self, steps: Steps[None], store: Store, loop: Any) -> None:
        loop.call_soon_threadsafe(lambda: self._begin_task(loop, adrive(steps)))

    def _begin_task(self, loop: Any, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = plain_task(quietly(work), loop)
        for each in list(self._tasks):
            if each.get_loop().is_closed():
                self._tasks.discard(each)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def _reap(self) -> None:
        """Begin due reaping where locks were taken lately, in a thread or task of its own."""
        of_late, self._locked_of_late = self._locked_of_late, set()
        for store, loop in list(of_late):
            steps = reaping.begin(store, self._reap_at)
            if steps is not None:
                self._run(steps, store, loop)

    def _write_down(self) -> None:
        """Begin to write the history."""
        if self.histories is None:
            return
        for store, loop, steps in self.histories.begin(ripe=timing.DEFAULT.attention / 2):
            self._run(steps, store, loop)

    @property
    def _withdraws(self) -> bool:
        return any(place[1] is None and alive() for place, alive in list(self._withdrawals.items()))

    @property
    def _to_write(self) -> bool:
        return self.histories is not None and self.histories.pending

    def _run(self, steps: Steps[None], store: Store, loop: Any) -> None:
        """Run steps that delete or write rows in the background, in a thread of their own or in a task.

        Nothing is done without threads, after the end of the loop, or when the interpreter is ending.
        """
        steps = _in_background(steps)
        with contextlib.suppress(RuntimeError):
            if loop is None:
                _ = start(partial(run_apart, steps, store), "housekeeping")
            else:
                self._run_on_loop(steps, store, loop)

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
        if not (ending or self._places or self._to_write or self._withdraws):
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
        """Write the history, and delete the rows of places that were served or given up."""
        while self._to_write or self._withdraws:  # by another thread; `close` does not wait for long
            for store, _, steps in self.histories.begin() if self.histories else ():
                run_apart(steps, store)
            time.sleep(0.005)
        for kept in list(self._places.values()):
            if kept.served:
                drive(Heartbeat(kept.store, [kept], self.leave).steps())

    # -- reports

    def _tell(self, who_hears: Callable[[Any], list[Callable[[], object]]], hold: Hold) -> None:
        if locks := hold.locks():
            deliveries.put(partial(self._call, who_hears, locks, hold))

    def _call(self, who_hears: Callable[[Any], list[Any]], locks: list[HoldObserver], hold: Hold) -> None:
        with self._flows.again(hold):
            for call in (call for lock in locks for call in who_hears(lock)):
                try:
                    _ = call()
                except Exception as error:  # noqa: BLE001 - a user's
                    warn("a callback of the lock on %r failed: %r", hold.shown, error, exc_info=True)
