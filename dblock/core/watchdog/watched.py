"""The holds that this process watches, and what is told of them: a loss, a renewal that is late, a revocation.

Rule: what is told of a hold is told once, by its flow or by the watching thread, as either finds it out first. The body
under a lost lock is ended here, which waits for nothing; code of the application is called by another thread
(`dblock.core.deliveries`).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from dblock.core.deliveries import deliveries
from dblock.core.holding.flow import Flows, Hold, HoldObserver
from dblock.core.log import warn
from dblock.core.observing.events import Kind
from dblock.core.observing.observers import observers, tell_of
from dblock.core.protocol.store import Store
from dblock.core.worker import Worker


class Watched(Worker):
    """The holds that are watched, by the thread that the subclass runs."""

    def __init__(self, flows: Flows) -> None:
        super().__init__("watchdog", "watch over leases")
        self._flows = flows
        self._holds: dict[Hold, None] = {}
        self._by_key: dict[tuple[Store, str], Hold] = {}
        self._given_up: list[Hold] = []
        """Holds that `release_all` has declared lost, and that are not released in the database yet."""

    # -- which

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

    def give_up(self, store: Store) -> list[Hold]:
        """Declare all holds of this process in a database lost; returns those to be released, last one first."""
        for hold in reversed(list(self._holds)):
            if hold.store is store and self.discard(hold):  # else its flow is releasing it
                if hold.lease.give_up():
                    self._given_up.append(hold)
                self.announce(hold)
        self._given_up = [hold for hold in self._given_up if hold.lease.now() < hold.lease.renewed + hold.lease.life]
        return [hold for hold in self._given_up if hold.store is store]

    def giving_back(self, hold: Hold) -> None:
        """Called before a hold is released."""
        self._given_up = [each for each in self._given_up if each is not hold]

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
            self._tell(lambda lock: lock._who_hears_of_loss(loss.reason), seen)
            if observers:
                holder = loss.holder and loss.holder.masked()
                tell_of(seen, Kind.LOST, held=seen.lease.held, holder=holder, reason=loss.reason)
        finally:  # last: a signal that one sends may raise here, if this is the main thread
            for lock in seen.locks():
                lock._interrupt_body(hold)

    def tell_risk(self, hold: Hold) -> None:
        """Report that a renewal is late; called by the watching thread alone."""
        hold.risk_reported = True
        seen = hold.snapshot()
        self._tell(lambda lock: lock._who_hears_of_risk(), seen)
        if observers:
            tell_of(seen, Kind.AT_RISK, lateness=seen.lease.lateness(seen.lease.now()))

    def revoke(self, hold: Hold, words: str) -> None:
        """Report, once, that a hold was asked back."""
        told, hold.revoked = hold.revoked is not None, words
        if told or not self.is_watching(hold):
            return
        warn("%r (fence %d) was asked back: %s", hold.shown, hold.tenure.fence, words)
        self._tell(lambda lock: lock._who_hears_of_revocation(words), hold.snapshot())

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
