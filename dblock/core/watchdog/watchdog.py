"""The watchdog: keeps the leases of this process alive, and says so when one may not or does not live on.

One thread watches and never waits for a database as long as the process lives: it knows when each hold is due for
renewal, at risk and lost, so that a hanging renewal delays no signal. The renewals run elsewhere: for each database in
a thread of its own, over connections that takes cannot use up (a blocked event loop loses no leases there), or, where
the driver is asynchronous, in a task on the event loop that took the lock. All leases of a database that are due go
into one statement, and so do the places in queues that the flows of this process wait in.

A renewal is due a third of the ttl after the last one; it fails softly and is tried again until the lease is lost. One
that does not answer at all is given up after a sixth of the ttl, and the next goes over another connection; if its
answer comes later it still counts, from the time of sending.

Taking a lock costs the watchdog an entry in two dictionaries and a set: the watching thread looks once a second anyway
while it lives, ends when it finds nothing to do, and is started again when needed.

Rule: nothing here decides who holds a key. The watchdog moves the moment until which a hold is trusted (see
`dblock.core.holding.lease`) and tells.
"""

from __future__ import annotations

import contextlib
import math
import sys
import threading
import time
from collections.abc import Callable, MutableMapping
from typing import TYPE_CHECKING, Any, Final
from weakref import WeakKeyDictionary

from dblock.core import clock
from dblock.core.errors import Reason, StoreBusy
from dblock.core.holding.flow import Flows, Hold
from dblock.core.log import warn
from dblock.core.protocol.drive import adrive, drive
from dblock.core.protocol.steps import Steps
from dblock.core.protocol.store import Store
from dblock.core.semaphore import BinarySemaphore
from dblock.core.watchdog.heartbeats import Heartbeat, KeptPlace
from dblock.core.watchdog.renewals import Renewal, Renewer, quietly

if TYPE_CHECKING:
    from dblock.core.holding.observers import Observers
    from dblock.core.watchdog.history import Histories

LOOK: Final = 1.0
"""Seconds between two looks of the watching thread, at most."""
PATIENCE: Final = 2.0
"""Seconds for which the end of a process waits for its locks to be given back."""


def run_apart(steps: Steps[None], store: Store) -> None:
    """Run the steps in this thread, where no event loop runs."""
    if store.asynchronous:
        import asyncio  # noqa: PLC0415 - only where it is in use

        asyncio.run(adrive(steps, store))
    else:
        drive(steps, store)


class Watchdog:
    """Knows all holds of this process."""

    def __init__(self, flows: Flows, give_back: Callable[[Hold], None]) -> None:
        """`give_back` is what gives a hold back at the end of the process."""
        self._flows, self._give_back = flows, give_back
        self._holds: dict[Hold, None] = {}
        self._by_key: dict[tuple[Store, str], Hold] = {}
        self._places: dict[str, KeptPlace] = {}
        self._heartbeats: dict[tuple[Store, Any], Heartbeat] = {}
        self._wake_at = math.inf
        # Both may be entered again by a signal handler that takes a lock.
        self._lock = threading.RLock()
        self._look_again = BinarySemaphore()
        self._thread: threading.Thread | None = None
        self._starting = False
        self._renewers: dict[Store, Renewer] = {}
        self._tasks: set[Any] = set()
        self._added = self._finalized = False
        self._locked_of_late = set[tuple[Store, Any]]()
        """Databases that this process reaps, and event loops, where something was locked since the last look."""
        self.histories: Histories | None = None
        """What has happened, and is to be written down; None if nothing ever is."""
        self._reap_at: MutableMapping[Store, float] = WeakKeyDictionary()
        self.observers: Observers | None = None
        """Those who want to hear what becomes of locks; None if nobody does."""
        self._given_up: list[Hold] = []
        """Declared lost by `release_all`, and not given back in the database yet."""
        self._ending: list[Hold] | None = None
        self._ended = threading.Event()

    # -- for the flows

    def add(self, hold: Hold) -> None:
        """Keep it from now on."""
        self._holds[hold] = None
        self._by_key[hold.store, hold.tenure.key] = hold
        self._added = True
        if hold.store.reaping is not None:
            self._locked_of_late.add((hold.store, hold.loop))
        if hold.lease.due < self._wake_at:
            self.look()

    def discard(self, hold: Hold) -> bool:
        """Keep it no more: it is being given back, by whom it was kept for until now; False if it was not kept.

        A renewal that is under way finds no such tenure.
        """
        kept = self._holds.pop(hold, True) is None
        place = (hold.store, hold.tenure.key)
        if self._by_key.get(place) is hold:
            _ = self._by_key.pop(place, None)
        return kept

    def keeps(self, hold: Hold) -> bool:
        """Has it not been given back?"""
        return hold in self._holds

    def holds(self, store: Store, key: str) -> bool:
        """Has a flow of this process that key, and not given it back? A hint: the row decides."""
        hold = self._by_key.get((store, key))
        return hold is not None and hold.lease.remaining() > 0

    def keep(self, kept: KeptPlace) -> None:
        """Keep a place in a queue from now on."""
        self._places[kept.place.owner] = kept
        self._added = True
        if kept.due < self._wake_at:
            self.look()

    def leave(self, owner: str, *, served: bool = False) -> None:
        """Keep that place no more; `served`: its row is there, and to be deleted some time."""
        kept = self._places.get(owner)
        if kept is not None and served:
            kept.served = True
        else:
            _ = self._places.pop(owner, None)

    def look(self) -> None:
        """Look again now: something is due earlier than we thought."""
        self._look_again.set()
        with self._lock:  # a watch that is about to end decides so under it
            if not self._starting and (self._thread is None or not self._thread.is_alive()):
                self._start()

    def look_some_time(self) -> None:
        """See that somebody looks, soon enough for what is not urgent."""
        if self._thread is None:
            self.look()

    def announce(self, hold: Hold) -> None:
        """Tell those who want to know, once, that a hold is lost; in a thread of its own."""
        loss = hold.lease.loss
        if loss is None or hold.is_snapshot:
            return
        seen = hold.snapshot()
        if not self.ends(hold):
            return
        warn("lost the lease on %r (fence %d): %s", hold.tenure.key, hold.tenure.fence, loss)
        for lock in seen.locks():
            lock._interrupt_body(hold)
        self._tell([call for lock in seen.locks() for call in lock._who_hears_of_loss(loss.reason)], seen)
        if self.observers is not None:
            self.observers.lost(seen)

    def _tell_risk(self, hold: Hold) -> None:
        hold.risk_reported = True
        seen = hold.snapshot()
        self._tell([call for lock in seen.locks() for call in lock._who_hears_of_risk()], seen)
        if self.observers is not None:
            self.observers.at_risk(seen)

    def ends(self, hold: Hold) -> bool:
        """It has ended, and nobody has been told so yet: whoever asks first is to do it."""
        with self._lock:
            told, hold.loss_reported = hold.loss_reported, True
        return not told

    def revoke(self, hold: Hold, words: str) -> None:
        """Somebody has asked for it back: tell those who want to know, once."""
        told, hold.revoked = hold.revoked is not None, words
        if told or not self.keeps(hold):
            return
        warn("%r (fence %d) was asked back: %s", hold.tenure.key, hold.tenure.fence, words)
        seen = hold.snapshot()
        self._tell([call for lock in seen.locks() for call in lock._who_hears_of_revocation(words)], seen)

    def give_up(self, store: Store) -> list[Hold]:
        """All that this process holds in a database is lost, from now on; those to be given back, last taken first."""
        for hold in reversed(list(self._holds)):
            if hold.store is store and self.discard(hold):  # else its flow is giving it back
                if hold.lease.give_up():
                    self._given_up.append(hold)
                self.announce(hold)
        good = [hold for hold in self._given_up if hold.lease.now() < hold.lease.renewed + hold.lease.life]
        self._given_up = good
        return [hold for hold in self._given_up if hold.store is store]

    def giving_back(self, hold: Hold) -> None:
        """It is about to be given back, once: a count that others lower too must not be lowered twice."""
        self._given_up = [each for each in self._given_up if each is not hold]

    # -- the watching thread

    def _start(self) -> None:
        util = sys.modules.get("multiprocessing.util")
        if util is not None and not self._finalized:  # a child of multiprocessing ends without atexit
            self._finalized = True
            util.Finalize(None, self.close, exitpriority=0)
        self._starting = True
        try:
            self._thread = threading.Thread(target=self._watch, name="dblock watchdog", daemon=True)
            self._thread.start()
        except BaseException as error:
            self._thread = None  # the next lock tries again
            if not isinstance(error, RuntimeError):  # out of threads, or the interpreter is ending
                raise
            warn("cannot watch over leases: %s", error)
        finally:
            self._starting = False

    def _watch(self) -> None:
        idle = False
        while True:
            if self._ending is not None:
                self._give_all_back(self._ending)
                self._tidy_up()
                self._ending = None
                self._ended.set()
            self._wake_at, wait = math.inf, LOOK  # whoever adds a hold during the look makes us look again
            try:
                wait = self._look_at_all()
                self._reap()
                self._write_down()
            except Exception as error:  # noqa: BLE001 - must go on: leases depend on it
                warn("the watchdog failed in one round, and goes on: %r", error)
            with self._lock:
                if self._thread is not threading.current_thread():
                    return  # our start was interrupted: the next lock begins another watch
                busy = self._holds or self._places or self._renewers or self._added or self._to_write
                if idle and not busy:
                    self._thread = None
                    return
            self._added = False
            self._wake_at = clock.now() + wait
            idle = not self._look_again.wait(wait)

    def _look_at_all(self) -> float:
        """Do what is due; seconds until something else is."""
        due: dict[tuple[Store, Any], list[Hold]] = {}
        soonest = LOOK
        stores = set()
        for hold in list(self._holds):
            stores.add(hold.store)
            left = hold.lease.remaining()
            if left <= 0:
                _ = self.discard(hold)
                self.announce(hold)
                continue
            if hold.lease.renewing and hold.adrift:
                warn("%r was never given back by a thread or task that has ended", hold.tenure.key)
                hold.lease.renewing = False
            now = hold.lease.now()
            if hold.lease.renewing and now >= hold.lease.acquired + hold.max_hold:
                hold.lease.renewing = False
            if hold.lease.renewing and not hold.wanted:
                if not hold.risk_reported:
                    warn("a `with` on %r was interrupted before it was left: it ends with its lease", hold.tenure.key)
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
            self._send(Renewal(store, holds, self), loop)
        soonest = min(soonest, self._keep_places(stores))
        for store in self._renewers.keys() - stores:
            self._renewers.pop(store).batches.put(None)
        return max(soonest, 0.001)

    def _keep_places(self, stores: set[Store]) -> float:
        """Keep the places that are due, and with them all others of the same database; seconds until the next are."""
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
            if last is None or last.answered:  # a database that hangs is not asked again and again
                heartbeat = self._heartbeats[store, loop] = Heartbeat(store, mine, self.leave)
                self._send(heartbeat, loop)
        if not places:
            self._heartbeats.clear()
        return min((kept.due - now for kept in places), default=LOOK)

    def _gather(self, store: Store, loop: Any, holds: list[Hold]) -> None:
        """Those that will be due soon come along, so that leases that began one by one are renewed together."""
        for hold in list(self._holds):
            if hold.store is store and hold.loop is loop and hold.lease.renewing and hold.lease.loss is None:
                now = hold.lease.now()
                if now < hold.lease.due <= now + hold.lease.ttl / 12:
                    holds.append(hold)
                    hold.lease.due = now + hold.lease.term / 6

    def _send(self, batch: Renewal | Heartbeat, loop: Any) -> None:
        store = batch.store
        if loop is not None:
            self._send_to_loop(batch, loop)
            return
        renewer = self._renewers.get(store)
        if renewer is None or not renewer.ready:
            if renewer is not None:  # it hangs: it ends when its answer comes, and another one takes its place
                renewer.batches.put(None)
            renewer = Renewer(store)
            renewer.start()
            self._renewers[store] = renewer
        renewer.given += 1
        renewer.batches.put(batch)

    def _send_to_loop(self, batch: Renewal | Heartbeat, loop: Any) -> None:
        steps = batch.steps()
        batch.set_reason_if_lost(Reason.BLOCKED)  # until it has begun
        try:
            self._run_on_loop(steps, batch.store, loop)
        except RuntimeError:  # the loop is closed, and with it the flows
            batch.give_up()

    def _run_on_loop(self, steps: Steps[None], store: Store, loop: Any) -> None:
        def begin() -> None:
            task = loop.create_task(quietly(adrive(steps, store)))
            for each in list(self._tasks):
                if each.get_loop().is_closed():
                    self._tasks.discard(each)
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

        loop.call_soon_threadsafe(begin)

    def _reap(self) -> None:
        """Begin to reap where locks were taken of late, if it is due: in a thread, or a task, of its own."""
        of_late, self._locked_of_late = self._locked_of_late, set()
        for store, loop in list(of_late):
            from dblock.core.watchdog import reaping  # noqa: PLC0415 - off by default

            steps = reaping.begin(store, self._reap_at)
            if steps is not None:
                self._run(steps, store, loop, "dblock reaper")

    def _write_down(self) -> None:
        """Begin to write down what has happened."""
        if self.histories is None:
            return
        from dblock.core.watchdog.history import RIPE  # noqa: PLC0415 - off by default

        for store, loop, steps in self.histories.begin(ripe=RIPE):
            self._run(steps, store, loop, "dblock history")

    @property
    def _to_write(self) -> bool:
        return self.histories is not None and self.histories.pending

    def _run(self, steps: Steps[None], store: Store, loop: Any, name: str) -> None:
        """Run what nobody waits for in a thread of that name, or in a task."""
        with contextlib.suppress(RuntimeError):  # out of threads, a closed loop, or the interpreter is ending
            if loop is None:
                threading.Thread(target=run_apart, args=(steps, store), name=name, daemon=True).start()
            else:
                self._run_on_loop(steps, store, loop)

    # -- the end

    def close(self) -> None:
        """At a normal exit: give back what is still held by flows that have ended or are ending.

        A thread that may still be at work keeps what it has: its lease is renewed until it ends, or ends by itself.
        """
        mine, ending = self._flows.current(), self._given_up
        self._given_up = []
        for hold in reversed(list(self._holds)):
            flow = hold.flow()
            if hold.lease.loss is None and (flow is None or flow is mine or flow.ended()):
                _ = self.discard(hold)
                ending.append(hold)
        if not (ending or self._places or self._to_write):
            return
        # By the watching thread, since Python 3.12 starts no new ones then, and a database that does not answer must
        # not keep us from ending.
        self._ended.clear()
        self._ending = ending
        self.look()
        _ = self._ended.wait(PATIENCE)

    def _give_all_back(self, holds: list[Hold]) -> None:
        """One after the other; a database that fails once is not asked again."""
        silent = set[Store]()
        for hold in holds:
            if hold.store in silent:
                continue
            try:
                self._give_back(hold)
            except Exception as error:  # noqa: BLE001 - nothing may keep the others from being given back
                warn("could not give %r back at exit: %s", hold.tenure.key, error)
                if not isinstance(error, StoreBusy):
                    silent.add(hold.store)

    def _tidy_up(self) -> None:
        """Write down what has happened, and delete the rows of places that were served."""
        while self._to_write:  # perhaps by another thread; whoever waits for us does not do so for long
            for store, _, steps in self.histories.begin() if self.histories else ():
                run_apart(steps, store)
            time.sleep(0.005)
        for kept in list(self._places.values()):
            if kept.served:
                drive(Heartbeat(kept.store, [kept], self.leave).steps(), kept.store)

    # -- for those who want to know

    def _tell(self, calls: list[Callable[[], object]], hold: Hold) -> None:
        if not calls:
            return
        try:
            threading.Thread(target=self._call, args=(calls, hold), name="dblock callback", daemon=True).start()
        except RuntimeError as error:
            warn("cannot tell about %r: %s", hold.tenure.key, error)

    def _call(self, calls: list[Callable[[], object]], hold: Hold) -> None:
        with self._flows.again(hold):
            for call in calls:
                try:
                    _ = call()
                except Exception as error:  # noqa: BLE001 - a user's
                    warn("a callback of the lock on %r failed: %r", hold.tenure.key, error, exc_info=True)
