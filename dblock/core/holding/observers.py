"""The observers of the locks of this process.

Rule: an observer delays only the flow that the event is about, and cannot break it: an exception of a callback is
logged. Events of the watchdog are delivered in another thread (`dblock.core.deliveries`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, TypeVar

from dblock.core.events import PROBES, Event, How, Kind
from dblock.core.holding.flow import Entry, Hold, HoldObserver
from dblock.core.log import deliver, warn
from dblock.core.protocol.steps import Steps
from dblock.core.protocol.store import Store
from dblock.core.values import LockInfo

T = TypeVar("T")


class Observer(NamedTuple):
    """A callback, and the kinds of events that it receives."""

    callback: Callable[[Event], object]
    kinds: frozenset[Kind]


class Observers:
    """An immutable set of observers: adding or removing one makes another object."""

    def __init__(self, all_: Sequence[Observer], *, records: bool = False) -> None:
        self.all = tuple(all_)
        self.records = records
        """Whether events are recorded for stores that keep a history."""
        self._kinds = frozenset[Kind]().union(*(each.kinds for each in self.all))

    def forked(self) -> Observers:
        """The observers of a forked child. Callbacks with a method `forked` are reset by it."""
        for callback, _ in self.all:
            try:
                _ = getattr(callback, "forked", int)()
            except Exception as error:  # noqa: BLE001 - a user's
                warn("an observer of locks failed after a fork: %r", error, exc_info=True)
        return type(self)(self.all, records=self.records)

    def tell(self, kind: Kind, store: Store, **known: Any) -> None:
        """Deliver an event now, in this flow."""
        self.tell_now(store, Event(kind, store.name, **known))

    def tell_later(self, kind: Kind, store: Store, who: Mapping[str, Any], **known: Any) -> None:
        """Deliver an event soon, in another thread. `who`: the flow it is about, as parameters of the statements."""
        noted = kind is not Kind.RENEWED and bool(store.history)
        if not noted and kind not in self._kinds:
            return
        event = Event(kind, store.name, **known)
        if event.key.startswith(PROBES):
            return
        if noted:
            self.note(store, event, who)
        if kind in self._kinds:
            deliver(partial(self.call, event))

    def tell_now(self, store: Store, event: Event) -> None:
        """Deliver an event in this flow, which it is about."""
        if event.key.startswith(PROBES):
            return
        if store.history:
            self.note(store, event, None)
        self.call(event)

    def call(self, event: Event) -> None:
        """Call the observers of this kind of event."""
        for callback, kinds in self.all:
            if event.kind in kinds:
                try:
                    _ = callback(event)
                except Exception as error:  # noqa: BLE001 - a user's
                    warn("an observer of locks failed: %r", error, exc_info=True)

    # -- what a face provides: run steps and report them; record events

    def note(self, store: Store, event: Event, who: Mapping[str, Any] | None) -> None:
        """Record an event of a database that keeps a history; without `who` it is about the running flow."""
        raise NotImplementedError

    def acquire(self, lock: Any, entry: Entry, begin: Callable[..., Steps[T]]) -> Steps[T]:
        """Acquire by the steps that `begin` makes, given a callback for the beginning of a wait; report it."""
        raise NotImplementedError

    def attach(self, lock: Any, steps: Steps[T]) -> Steps[T]:
        """Run the steps that enter a tenure, and report it unless they return False."""
        raise NotImplementedError

    def leave(self, hold: Hold, steps: Steps[T], how: How) -> Steps[T]:
        """Run the steps that leave a hold, and report it, unless its loss has been reported."""
        raise NotImplementedError

    # -- events of the watchdog

    def lost(self, hold: Hold) -> None:
        """Report that the lease of a hold is lost."""
        loss = hold.lease.loss
        if loss is not None:
            known = {"held": held(hold), "holder": masked(loss.holder), "reason": loss.reason}
            self.tell_later(Kind.LOST, hold.store, hold.who, **about(hold), **known)

    def at_risk(self, hold: Hold) -> None:
        """Report that a renewal is late."""
        self.tell_later(Kind.AT_RISK, hold.store, hold.who, **about(hold), lateness=_lateness(hold, hold.lease.now()))

    def renewed(self, store: Store, sent: float, holds: Sequence[Hold]) -> None:
        """Report that a statement sent at that local time has renewed leases; called before they are lengthened."""
        late = max((_lateness(hold, sent) for hold in holds), default=0.0)
        self.tell_later(Kind.RENEWED, store, {}, amount=len(holds), lateness=late)


def about(hold: Hold) -> dict[str, Any]:
    """The fields of an event that identify the tenure."""
    lock = lock_of(hold)
    known = {"sender": type(lock), "label": lock.options.label} if lock is not None else {}
    return {"key": hold.key, "fence": hold.tenure.fence, "depth": len(hold.open_entries()), **known}


def lock_of(hold: Hold) -> HoldObserver | None:
    """A lock object through which the hold was entered, or is being left."""
    for entry in hold.entries:
        lock = entry.lock
        if lock is not None:
            return lock
    return hold.leaving


def held(hold: Hold) -> float:
    """Seconds for which the flow has held it."""
    return hold.lease.now() - hold.lease.acquired


def masked(info: LockInfo | None) -> LockInfo | None:
    """A copy without the owner's token."""
    return None if info is None else info.masked()


def _lateness(hold: Hold, now: float) -> float:
    lease = hold.lease
    return max(now - lease.renewed - lease.term / 3, 0.0)
