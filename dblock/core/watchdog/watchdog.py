"""The watchdog: renews the leases of this process, and reports leases that are at risk or lost.

One thread watches, and never waits for a database while the process lives: it knows when each hold is due for renewal,
at risk and lost, so that a hanging renewal delays no report, nor does a blocked event loop. What is due in a database
is done by its keeper (`dblock.core.watchdog.keeper`), over connections that takes cannot use up. One statement renews
all due leases of a database, and one extends the places in queues that the flows of this process wait in.

    a lease     ->  due a third of its term after the last renewal; then, once sent, due again a sixth later
    a renewal   ->  answered: its leases are due as above, or lost; failed: due again in a twentieth; no answer: neither
    a hold      ->  lost, and told, when its trust has ended; then, or when its flow releases it, it is watched no more
    the places  ->  due a third of a place's life after the last heartbeat was sent, whatever became of it

So a renewal is retried until the lease is lost. Without an answer it is abandoned after a sixth of the term, and the
next one uses another connection; a later answer still counts, from the time of sending.

The watching thread wakes once a second while there is something to watch, and also closes connections that have been
idle for too long. It ends when it has nothing to do, and is started again when needed.

Rule: nothing here decides who holds a key. The watchdog moves the moment until which a hold is trusted (see
`dblock.core.holding.lease`), and reports. What is reported of a hold is reported once, by its flow or by the watching
thread, as either finds it out first. The body under a lost lock is ended here, which waits for nothing; code of the
application is called by another thread (`dblock.core.deliveries`).
"""

from __future__ import annotations

import math
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextvars import Context
from functools import partial
from typing import Any

from dblock.core import clock, timing
from dblock.core.deliveries import deliveries
from dblock.core.errors import Loss, Reason
from dblock.core.holding.flow import Flows, Hold
from dblock.core.log import warn
from dblock.core.observing.events import Kind
from dblock.core.observing.observers import observers, tell_of
from dblock.core.protocol.queue import QueuePlace
from dblock.core.protocol.steps import Steps
from dblock.core.protocol.store import Store
from dblock.core.watchdog.keeper import Keeper, Withdraw, run_apart
from dblock.core.watchdog.renewals import renew
from dblock.core.worker import Worker

Where = tuple[Store, Any]
"""A database, and the event loop that its steps run on: None for threads."""


class Watchdog(Worker):
    """Watches all holds of this process."""

    keeps: type[Keeper] = Keeper

    def __init__(
        self,
        flows: Flows,
        give_back: Callable[[Store, Sequence[Hold]], Steps[object]],
        withdraw: Withdraw,
        prune: Callable[[], bool] = bool,
    ) -> None:
        """`give_back` releases holds of a store at the end of the process; `withdraw` is `handover.withdraw`, for one.

        `prune` closes idle connections whose time is up, without waiting for a server; true: it has to be called again.
        """
        super().__init__("watchdog", partial(warn, "cannot watch over leases: %s"), exit_priority=0)
        self._flows, self._give_back, self._withdraw, self._prune = flows, give_back, withdraw, prune
        self._holds: dict[Hold, None] = {}
        self._by_key: dict[tuple[Store, str], Hold] = {}
        self._keepers: dict[Where, Keeper] = {}
        self.histories: Any = None
        """The events to write, `dblock.operating.history.Histories`; None if no store keeps a history."""
        self._ending: tuple[dict[Store, list[Hold]], threading.Event] | None = None
        """The holds to release at the end of the process, and what is set when that is done."""

    # -- for the flows

    def add(self, hold: Hold) -> RuntimeError | None:
        """Watch a hold from now on; returns why no thread can be started that its renewal needs, if so."""
        refused, where = None, (hold.store, hold.loop)
        with self._lock:
            self._holds[hold] = None
            self._by_key[hold.store, hold.tenure.key] = hold
            keeper = self._keepers.get(where) or self._keeper(*where)
            if keeper.wakes_at == math.inf and hold.loop is None and hold.lease.renewing:
                refused = keeper.wake()
        return (self.wake() if hold.lease.due < self.wakes_at else None) or refused

    def discard(self, hold: Hold) -> bool:
        """Stop watching a hold, which the caller releases; False if it was not watched.

        A renewal that is under way finds no such tenure.
        """
        kept = self._holds.pop(hold, True) is None
        place = (hold.store, hold.tenure.key)
        if self._by_key.get(place) is hold:
            _ = self._by_key.pop(place, None)
        return kept

    def hold_of(self, store: Store, key: str) -> Hold | None:
        """The hold of a flow of this process on that key, as a hint, since the row decides; None if it is over."""
        hold = self._by_key.get((store, key))
        return hold if hold is not None and hold.lease.remaining() > 0 else None

    def give_up(self, store: Store) -> list[Hold]:
        """Declare all holds of this process in a database lost; returns those to be released, last one first."""
        given_up = list[Hold]()
        for hold in reversed(list(self._holds)):
            if hold.store is store and self.discard(hold):  # else its flow is releasing it
                if hold.lease.lose(Loss(Reason.RELEASED)):
                    given_up.append(hold)
                self.announce(hold)
        return given_up

    def keep(self, store: Store, loop: Any, place: QueuePlace) -> None:
        """Send heartbeats for a place in a queue from now on."""
        with self._lock:
            keeper = self._keeper(store, loop)
            if not keeper.places:
                keeper.due = store.database.now() + store.database.timing.heartbeat_interval
            keeper.places[place.owner] = place
        self.wake_by(keeper.due)

    def leave(self, store: Store, loop: Any, owner: str) -> None:
        """Send no more heartbeats for that place."""
        if (keeper := self._keepers.get((store, loop))) is not None:
            _ = keeper.places.pop(owner, None)

    def withdraw(self, store: Store, loop: Any, key: str, owner: str) -> None:
        """Delete a place in the background, and release what was granted to it; several go into one statement.

        Called on the event loop, if there is one: a task there is awaited when the loop ends, as by `asyncio.run`.
        Without a key, as the place was served, it takes up to a second.
        """
        with self._lock:
            keeper = self._keeper(store, loop)
            keeper.left[owner] = key
            if key or loop is not None:
                keeper.begin_to_withdraw()
        self.wake_by(clock.now() + timing.DEFAULT.attention)

    def _keeper(self, store: Store, loop: Any) -> Keeper:
        """The keeper of a database. Under the lock it is not dropped before it has been given something to do."""
        with self._lock:
            keeper = self._keepers.get((store, loop))
            if keeper is None:
                keeper = self._keepers[store, loop] = self.keeps(store, loop, self._lock, self._withdraw)
            return keeper

    # -- what is told

    def announce(self, hold: Hold) -> None:
        """Report, once, that a hold is lost."""
        loss = hold.lease.loss
        if loss is None or hold.is_snapshot:
            return
        seen = hold.snapshot()
        if not hold.lease.claim_report():
            return
        of_majority = any(lock._majority for lock in seen.locks())
        where = f" in {hold.store.name}, one database of a majority lock" if of_majority else ""
        try:
            warn("lost the lease on %r (fence %d)%s: %s", hold.shown, hold.tenure.fence, where, loss)
            self._tell(seen, "on_lost", reason=loss.reason)
            if observers:
                holder = loss.holder and loss.holder.masked()
                tell_of(seen, Kind.LOST, held=seen.lease.held, holder=holder, reason=loss.reason)
        finally:  # last: a signal that one sends may raise here, if this is the main thread
            for lock in seen.locks():
                lock._interrupt_body(hold)

    def revoke(self, hold: Hold, words: str) -> None:
        """Report, once, that a hold was asked back."""
        told, hold.revoked = hold.revoked is not None, words
        if told or hold not in self._holds:
            return
        warn("%r (fence %d) was asked back: %s", hold.shown, hold.tenure.fence, words)
        self._tell(hold.snapshot(), "on_revoke", words=words)

    def _tell(self, hold: Hold, of: str, **known: object) -> None:
        """Call those who hear of it, as the option `of`, in another thread, which sees the hold as its own."""
        locks = hold.locks()

        def call_all() -> None:
            self._flows.see(hold)
            for call in (call for lock in locks for call in lock._who_hears(of, **known)):
                try:
                    _ = call()
                except Exception as error:  # noqa: BLE001 - a user's
                    warn("a callback of the lock on %r failed: %r", hold.shown, error, exc_info=True)

        if locks:
            deliveries.put(partial(Context().run, call_all))

    # -- the watching thread

    def round(self) -> float:
        try:
            if self._ending is not None:
                (holds, ended), self._ending = self._ending, None
                self._release_and_write(holds)
                ended.set()
            soonest, idle = clock.now() + self._look_at_all(), self._prune()
            if deliveries.pending:  # perhaps no thread could be started
                _ = deliveries.wake()
            for store, loop, steps in self.histories.begin(ripe=timing.DEFAULT.attention / 2) if self.histories else ():
                self._keeper(store, loop).begin(steps, long=True)
        except Exception as error:  # noqa: BLE001 - must continue: leases depend on it
            warn("the watchdog failed in one round, and continues: %r", error)
            return clock.now() + timing.DEFAULT.attention
        busy = idle or self._holds or self._keepers or self._unfinished or deliveries.pending
        return min(soonest, clock.now() + timing.DEFAULT.attention) if busy else math.inf

    def _look_at_all(self) -> float:
        """Do what is due; returns the seconds until the next."""
        soonest, soon = math.inf, defaultdict[Where, list[Hold]](list)
        for hold in list(self._holds):
            lease, now = hold.lease, hold.lease.now()
            soonest = min(soonest, self._look(hold, now))
            if lease.renewing and lease.loss is None and lease.due <= now + lease.ttl / 12:
                soon[hold.store, hold.loop].append(hold)  # so that those that began one by one are renewed together
        for (store, loop), holds in soon.items():
            if any(hold.lease.due <= hold.lease.now() for hold in holds):
                for hold in holds:
                    hold.lease.due = hold.lease.now() + hold.lease.term / 6
                self._renew(self._keeper(store, loop), holds)
        for where, keeper in list(self._keepers.items()):
            over = keeper.loop is not None and keeper.loop.is_closed()
            soonest = soonest if over else min(soonest, keeper.look())
            with self._lock:
                busy = keeper.places or keeper.tasks or keeper.withdraws
                if over or not (busy or any((hold.store, hold.loop) == where for hold in list(self._holds))):
                    del self._keepers[where]
                    keeper.over = True
        return max(soonest, 0.001)

    def _look(self, hold: Hold, now: float) -> float:
        """Report a hold that is lost or at risk, or end its renewals; returns the seconds until the next such time."""
        lease, left = hold.lease, hold.lease.remaining()
        if left <= 0:
            _ = self.discard(hold)
            self.announce(hold)
            return math.inf
        if lease.renewing and hold.orphaned:
            warn("%r was never released by a thread or task that has ended", hold.shown)
            lease.renewing = False
        elif lease.renewing and not hold.can_be_released:
            warn("a `with` on %r was interrupted before it was left, or its session was lost: it expires", hold.shown)
            lease.renewing = False  # unless its flow enters it again
        if now >= lease.acquired + hold.max_hold or (hold.loop is not None and hold.loop.is_closed()):
            lease.renewing = False
        if not lease.renewing:
            return left
        late = lease.late_from - now
        if late > 0:
            hold.risk_reported = False
        elif not hold.risk_reported:
            hold.risk_reported, seen = True, hold.snapshot()
            self._tell(seen, "on_at_risk")
            if observers:
                tell_of(seen, Kind.AT_RISK, lateness=seen.lease.lateness(now))
        return min(left, lease.due - now if lease.due > now else lease.term / 6, late if late > 0 else math.inf)

    def _renew(self, keeper: Keeper, holds: list[Hold]) -> None:
        """Begin to renew them. The test kit replaces this method (`dblock.testing.frozen_renewal`)."""
        for hold in holds if keeper.loop is not None else ():
            hold.lease.reason_if_lost = Reason.BLOCKED  # until it has begun
        keeper.begin(self._renewing(keeper.store, holds))

    def _renewing(self, store: Store, holds: list[Hold]) -> Steps[None]:
        yield from renew(store, holds, self._holds, self.revoke)
        _ = self.wake()

    # -- the end

    @property
    def _unfinished(self) -> bool:
        """Whether places are to be deleted by threads, or events to be written, or are being."""
        to_write = self.histories is not None and self.histories.pending
        return to_write or any(keeper.loop is None and keeper.withdraws for keeper in list(self._keepers.values()))

    def close(self) -> None:
        """At a normal exit: release the holds of flows that have ended or are ending.

        A thread that may still be at work keeps its holds: they are renewed until the process ends, and then expire.
        """
        mine, holds, ended = self._flows.current(), defaultdict[Store, list[Hold]](list), threading.Event()
        for hold in reversed(list(self._holds)):
            flow = hold.flow()
            driver = None if flow is None else flow.driver()
            if hold.lease.loss is None and (driver is None or driver is mine or driver.ended()):
                _ = self.discard(hold)
                holds[hold.store].append(hold)
        if not (holds or self._unfinished):
            return
        # In the watching thread, since Python 3.12 starts no new ones now, and a database that does not answer must not
        # keep the process from ending.
        self._ending = holds, ended
        _ = self.wake()
        _ = ended.wait(timing.DEFAULT.patience)

    def _release_and_write(self, holds: dict[Store, list[Hold]]) -> None:
        """Release the holds, delete places, and write the history."""
        for store, of_store in holds.items():
            run_apart(store, self._give_back(store, of_store))
        while self._unfinished:  # by another thread; `close` does not wait for long
            for store, _, steps in self.histories.begin() if self.histories else ():
                run_apart(store, steps)
            for (store, loop), keeper in list(self._keepers.items()):
                if loop is None and (steps := keeper.withdrawal()) is not None:
                    run_apart(store, steps)
            time.sleep(0.005)
