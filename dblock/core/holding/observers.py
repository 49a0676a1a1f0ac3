"""Those who observe the locks of this process, and how they are told.

Rule: whoever is told delays nobody but the flow that it is about, and breaks nothing: what a callback raises is logged.
What the watchdog has to tell is told in a thread of its own, one for all.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, NamedTuple, TypeVar

from dblock.core.events import Event, How, Kind
from dblock.core.holding.flow import Entry, Hold, HoldObserver
from dblock.core.log import warn
from dblock.core.protocol.steps import Steps
from dblock.core.protocol.store import Store
from dblock.core.values import LockInfo

T = TypeVar("T")
PENDING: Final = 100_000
"""Events that wait for a callback to come back, at most; then the oldest are dropped."""


class Observer(NamedTuple):
    """A callback, and what it wants to hear of."""

    callback: Callable[[Event], object]
    kinds: frozenset[Kind]


class Observers:
    """All of them, as long as nobody comes or goes: then there is another object."""

    def __init__(self, all_: Sequence[Observer], *, records: bool = False) -> None:
        self.all = tuple(all_)
        self.records = records
        """Is what happens noted for stores that keep a history?"""
        self._kinds = frozenset[Kind]().union(*(each.kinds for each in self.all))
        self._pending: deque[tuple[Store, Event, Mapping[str, Any]]] = deque(maxlen=PENDING)
        self._mutex = threading.RLock()  # a signal handler may run between any two lines
        self._thread: threading.Thread | None = None

    def forked(self) -> Observers:
        """Those of a forked child. A callback that keeps something of its process has a method `forked`, called now."""
        for callback, _ in self.all:
            try:
                _ = getattr(callback, "forked", int)()
            except Exception as error:  # noqa: BLE001 - a user's
                warn("an observer of locks failed after a fork: %r", error, exc_info=True)
        return type(self)(self.all, records=self.records)

    def tell(self, kind: Kind, store: Store, **known: Any) -> None:
        """Tell them now, in this flow."""
        self.tell_now(store, Event(kind, store.name, **known))

    def tell_later(self, kind: Kind, store: Store, who: Mapping[str, Any], **known: Any) -> None:
        """Tell them soon, in another thread. `who` it has happened to, by the names of the statements' parameters."""
        if kind not in self._kinds and (kind is Kind.RENEWED or not store.history):
            return
        self._pending.append((store, Event(kind, store.name, **known), who))
        with self._mutex:
            if self._thread is None:
                thread = threading.Thread(target=self._tell_all, name="dblock observers", daemon=True)
                try:
                    thread.start()
                except RuntimeError as error:  # out of threads, or the interpreter is ending
                    warn("cannot tell observers about %s: %s", kind, error)
                else:
                    self._thread = thread

    def tell_now(self, store: Store, event: Event, who: Mapping[str, Any] | None = None) -> None:
        """Tell them, in this flow, which it has happened to unless told otherwise."""
        kind = event.kind
        if store.history:
            self.note(store, event, who)
        for callback, kinds in self.all:
            if kind in kinds:
                try:
                    _ = callback(event)
                except Exception as error:  # noqa: BLE001 - a user's
                    warn("an observer of locks failed: %r", error, exc_info=True)

    def _tell_all(self) -> None:
        while True:
            with self._mutex:
                if not self._pending:
                    self._thread = None
                    return
                store, event, who = self._pending.popleft()
            self.tell_now(store, event, who)

    # -- what a face provides: to do what the steps do, and tell of it; and to note it

    def note(self, store: Store, event: Event, who: Mapping[str, Any] | None) -> None:
        """Note an event of a database that keeps a history; by default it has happened to the running flow."""
        raise NotImplementedError

    def acquire(self, lock: Any, entry: Entry, begin: Callable[..., Steps[T]]) -> Steps[T]:
        """Acquire by the steps that `begin` makes; it is given what to call when it begins to wait."""
        raise NotImplementedError

    def attach(self, lock: Any, steps: Steps[T]) -> Steps[T]:
        """Enter a tenure, unless the steps say False."""
        raise NotImplementedError

    def leave(self, hold: Hold, steps: Steps[T], how: How) -> Steps[T]:
        """Leave a hold. Those who hear that it is lost do not hear that it is released."""
        raise NotImplementedError

    # -- what the watchdog has to tell

    def lost(self, hold: Hold) -> None:
        """The lease of a hold is over."""
        loss = hold.lease.loss
        if loss is not None:
            known = {"held": held(hold), "holder": masked(loss.holder), "reason": loss.reason}
            self.tell_later(Kind.LOST, hold.store, hold.who, **about(hold), **known)

    def at_risk(self, hold: Hold) -> None:
        """A renewal is late."""
        self.tell_later(Kind.AT_RISK, hold.store, hold.who, **about(hold), lateness=_lateness(hold, hold.lease.now()))

    def renewed(self, store: Store, sent: float, holds: Sequence[Hold]) -> None:
        """A statement that was sent at that local time has renewed leases, which do not know it yet."""
        late = max((_lateness(hold, sent) for hold in holds), default=0.0)
        self.tell_later(Kind.RENEWED, store, {}, amount=len(holds), lateness=late)


def about(hold: Hold) -> dict[str, Any]:
    """Which tenure it is, as an event says it."""
    lock = lock_of(hold)
    known = {"sender": type(lock), "label": lock.options.label} if lock is not None else {}
    return {"key": hold.tenure.key, "fence": hold.tenure.fence, "depth": len(hold.open_entries()), **known}


def lock_of(hold: Hold) -> HoldObserver | None:
    """A lock object through which it is held, or being left."""
    for entry in hold.entries:
        lock = entry.lock
        if lock is not None:
            return lock
    return hold.leaving


def held(hold: Hold) -> float:
    """Seconds for which the flow has had it."""
    return hold.lease.now() - hold.lease.acquired


def masked(info: LockInfo | None) -> LockInfo | None:
    """Without the owner's token."""
    return None if info is None else info.masked()


def _lateness(hold: Hold, now: float) -> float:
    lease = hold.lease
    return max(now - lease.renewed - lease.term / 3, 0.0)
