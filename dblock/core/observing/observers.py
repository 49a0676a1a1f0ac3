"""Observing locks: `observe()`, the observers of this process, and the events that they are told of.

Flows report their own events, and the watchdog those of leases. The history is one more that hears of all events, for
the stores that keep one.

Rule: only a process with observers, or with a history, runs this code. An observer delays only the flow that the event
is about, and cannot break it: an exception of a callback is logged, and an interrupt of one leaves no flow with a lock
that it does not know of. Events of the watchdog are delivered in another thread (`dblock.core.deliveries`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, Protocol, TypeVar

from dblock.core import runtime
from dblock.core.acquire.request import Refused
from dblock.core.deliveries import deliveries
from dblock.core.errors import LockError, LockLost
from dblock.core.holding.flow import Entry, Hold, HoldObserver
from dblock.core.log import warn
from dblock.core.observing.events import PROBES, Event, How, Kind
from dblock.core.protocol import reaping
from dblock.core.protocol.steps import Steps
from dblock.core.protocol.store import Store
from dblock.core.runtime import current_flow
from dblock.core.values import LockInfo

T = TypeVar("T")
Undo = Callable[[Any, Hold, Entry], Steps[None]]
"""Leaves an entry of a lock object's hold again."""


class Histories(Protocol):
    """Writes down the events of this process, for the stores that keep a history."""

    def note(self, store: Store, event: Event, who: Mapping[str, Any], /) -> None:
        """Add an event of the flow `who`; it is written later."""
        ...

    def begin(self, *, ripe: float = 0.0) -> Iterator[tuple[Store, Any, Steps[None]]]:
        """The writes that are due: store, event loop (None: one of its own), and steps.

        `ripe`: minimum age in seconds of the oldest event of a write.
        """
        ...

    @property
    def pending(self) -> bool:
        """Whether something is to be written, or being written."""
        ...


make_histories: Callable[[], Histories] | None = None
"""Makes the `Histories` of this process, for its first event that is to be written, and so anew after a fork.

`dblock.operating.history` sets it, which is imported once a store keeps a history.
"""


def observe(callback: Callable[[Event], object], *kinds: str) -> Callable[[], None]:
    """Call `callback` with an `Event` for everything that happens to locks of this process; returns the undo function.

    It receives events of the locks of every face, sync and async, also in processes that are forked later: a server may
    subscribe before it forks its workers. `kinds` selects the kinds of events, such as `"acquired"`, all by default.

    ACQUIRED, CONTENDED, GAVE_UP, RELEASED and REAPED are delivered in the flow that they are about, which continues
    when the callback returns: no I/O there, and no locks. The others are delivered in another thread, one after the
    other. An exception of the callback is logged. Raises TypeError for an object that is not callable, ValueError for
    an unknown kind.
    """
    if not callable(callback):
        raise TypeError(f"observe() calls a function with an Event: {callback!r} is none")
    observer = Observer(callback, frozenset(Kind(kind) for kind in kinds or Kind))
    _change(lambda all_: (*all_, observer))
    return lambda: _change(lambda all_: tuple(each for each in all_ if each is not observer))


def record() -> None:
    """Report events from now on for stores that keep a history."""
    _change(lambda all_: all_, records=True)


def _change(changed: Callable[[tuple[Observer, ...]], tuple[Observer, ...]], *, records: bool = False) -> None:
    watchdog = runtime.current.watchdog
    with watchdog._lock:
        before = watchdog.observers
        all_ = changed(() if before is None else before.all)
        records = records or (before is not None and before.records)
        watchdog.observers = Observers(all_, records=records) if all_ or records else None


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
        return Observers(self.all, records=self.records)

    def tell(self, store: Store, event: Event) -> None:
        """Deliver an event now, in this flow, which it is about."""
        if event.key.startswith(PROBES):
            return
        if store.history:
            self._note(store, event, current_flow().who)
        self.call(event)

    def tell_later(self, kind: Kind, store: Store, who: Mapping[str, Any], **known: Any) -> None:
        """Deliver an event soon, in another thread. `who`: the flow it is about, as parameters of the statements."""
        noted = kind is not Kind.RENEWED and bool(store.history)
        if not noted and kind not in self._kinds:
            return
        event = Event(kind, store.name, **known)
        if event.key.startswith(PROBES):
            return
        if noted:
            self._note(store, event, who)
        if kind in self._kinds:
            deliveries.put(partial(self.call, event))

    def call(self, event: Event) -> None:
        """Call the observers of this kind of event."""
        for callback, kinds in self.all:
            if event.kind in kinds:
                try:
                    _ = callback(event)
                except Exception as error:  # noqa: BLE001 - a user's
                    warn("an observer of locks failed: %r", error, exc_info=True)

    def _note(self, store: Store, event: Event, who: Mapping[str, Any]) -> None:
        if make_histories is None:
            return
        watchdog = runtime.current.watchdog
        if watchdog.histories is None:
            watchdog.histories = make_histories()
        watchdog.histories.note(store, event, who)
        watchdog.wake_some_time()

    # -- events of flows

    def acquire(self, lock: Any, entry: Entry, begin: Callable[..., Steps[T]], undo: Undo) -> Steps[T]:
        """Acquire by the steps that `begin` makes, given a callback for the beginning of a wait; report it."""
        attempt = _Attempt(self, lock)
        try:
            found = yield from begin(None if lock._stands_by else attempt.contend)
            if isinstance(found, Hold):
                attempt.succeed(found)
            elif isinstance(found, Refused) and not lock._stands_by:
                attempt.fail("timeout", found)
        except GeneratorExit:  # nothing drives further steps
            raise
        except BaseException as error:
            hold = lock._hold_here()
            if hold is not None and entry in hold.entries:  # interrupted when the flow had entered
                with contextlib.suppress(LockError):
                    yield from undo(lock, hold, entry)
            attempt.fail(type(error).__name__)
            raise
        return found

    def attach(self, lock: Any, steps: Steps[T], undo: Undo) -> Steps[T]:
        """Run the steps that enter a tenure, and report it unless they return False."""
        found = yield from steps
        hold = lock._hold_here()
        if not found or hold is None:
            return found
        try:
            self.tell(hold.store, Event(Kind.ACQUIRED, hold.store.name, **_about(hold), how="attached"))
        except BaseException:  # interrupted
            with contextlib.suppress(LockError):
                yield from undo(lock, hold, hold.entries[-1])
            raise
        return found

    def leave(self, hold: Hold, steps: Steps[T], how: How) -> Steps[T]:
        """Run the steps that leave a hold, and report it, unless its loss has been reported."""
        before, lock = _entered(hold), _lock_of(hold)
        try:
            result = yield from steps
        except (GeneratorExit, LockLost):
            raise
        except BaseException as error:
            self._tell_left(hold, lock, before, how, type(error).__name__)
            raise
        self._tell_left(hold, lock, before, how)
        return result

    def _tell_left(self, hold: Hold, lock: HoldObserver | None, before: int, how: How, reason: str = "") -> None:
        depth = _entered(hold)
        if depth < before and (depth or runtime.current.watchdog.claim_loss_report(hold)):
            sender, label, majority = (
                (None, "", "") if lock is None else (type(lock), lock.options.label, lock._majority)
            )
            self.tell(
                hold.store,
                Event(
                    Kind.RELEASED,
                    hold.store.name,
                    sender,
                    hold.key,
                    hold.tenure.fence,
                    label,
                    how,
                    depth,
                    held=_held(hold),
                    reason=reason,
                    majority=majority,
                ),
            )

    # -- events of the watchdog

    def lost(self, hold: Hold) -> None:
        """Report that the lease of a hold is lost."""
        loss = hold.lease.loss
        if loss is not None:
            known = {"held": _held(hold), "holder": _masked(loss.holder), "reason": loss.reason}
            self.tell_later(Kind.LOST, hold.store, hold.who, **_about(hold), **known)

    def at_risk(self, hold: Hold) -> None:
        """Report that a renewal is late."""
        self.tell_later(Kind.AT_RISK, hold.store, hold.who, **_about(hold), lateness=_lateness(hold, hold.lease.now()))

    def renewed(self, store: Store, sent: float, holds: Sequence[Hold]) -> None:
        """Report that a statement sent at that local time has renewed leases; called before they are lengthened."""
        late = max((_lateness(hold, sent) for hold in holds), default=0.0)
        self.tell_later(Kind.RENEWED, store, {}, amount=len(holds), lateness=late)


def _about(hold: Hold) -> dict[str, Any]:
    """The fields of an event that identify the tenure."""
    lock = _lock_of(hold)
    known = {"sender": type(lock), "label": lock.options.label, "majority": lock._majority} if lock is not None else {}
    return {"key": hold.key, "fence": hold.tenure.fence, "depth": len(hold.open_entries()), **known}


def _lock_of(hold: Hold) -> HoldObserver | None:
    """A lock object through which the hold was entered, or is being left."""
    return next((entry.lock for entry in hold.entries if entry.lock is not None), hold.leaving)


def _held(hold: Hold) -> float:
    """Seconds for which the flow has held it."""
    return hold.lease.now() - hold.lease.acquired


def _masked(info: LockInfo | None) -> LockInfo | None:
    """A copy without the owner's token."""
    return None if info is None else info.masked()


def _lateness(hold: Hold, now: float) -> float:
    lease = hold.lease
    return max(now - lease.renewed - lease.term / 3, 0.0)


def _entered(hold: Hold) -> int:
    """Number of entries; an open transaction that keeps the hold counts as one."""
    entries = hold.entries
    if len(entries) == 1 and entries[0].lock is not None:  # mostly
        return 1 + bool(hold.kept_by)
    return len(hold.open_entries()) + bool(hold.kept_by)


class _Attempt:
    """The events of one attempt to acquire a lock."""

    __slots__ = ("began", "contended", "ended", "lock", "observers", "store")

    def __init__(self, observers: Observers, lock: Any) -> None:
        self.observers, self.lock, self.store = observers, lock, lock._store()
        self.began = self.store.database.now()
        self.contended = self.ended = False

    def _event(self, kind: Kind, fence: int = 0, how: How = "", depth: int = 0, wait: float = 0.0) -> Event:
        lock = self.lock
        return Event(
            kind,
            self.store.name,
            type(lock),
            lock._key,
            fence,
            lock.options.label,
            how,
            depth,
            self.contended and kind is not Kind.CONTENDED,
            wait,
            majority=lock._majority,
        )

    def contend(self, holder: LockInfo | None) -> None:
        """Report CONTENDED."""
        self.contended = True
        self.observers.tell(self.store, self._event(Kind.CONTENDED)._replace(holder=_masked(holder)))

    def succeed(self, hold: Hold) -> None:
        """Report ACQUIRED."""
        self.ended = True
        wait = 0.0 if self.lock._stands_by else self.store.database.now() - self.began
        event = self._event(
            Kind.ACQUIRED, hold.tenure.fence, _how(hold, contended=self.contended), _entered(hold), wait
        )
        self.observers.tell(self.store, event)

    def fail(self, reason: str, refused: Refused | None = None) -> None:
        """Report GAVE_UP, once."""
        if self.ended:
            return
        self.ended = True
        if refused is not None and not self.contended and refused.busy is None:
            self.contend(refused.holder)
        event = self._event(Kind.GAVE_UP, wait=self.store.database.now() - self.began)
        holder = _masked(refused.holder) if refused else None
        self.observers.tell(self.store, event._replace(reason=reason, holder=holder))


def _how(hold: Hold, *, contended: bool) -> How:
    if len(hold.entries) > 1 and len(hold.open_entries()) > 1:
        return "reentered"
    if hold.grant.local_handovers and contended:
        return "handed_over"
    return "waited" if contended else "at_once"


def reap_and_report(store: Store, retention: float, sender: type) -> Steps[reaping.Reaped]:
    """Reap, and report it."""
    reaped = yield from reaping.reap(store.database, retention)
    observers = runtime.current.watchdog.observers
    if observers is not None:
        event = Event(Kind.REAPED, store.name, sender, amount=reaped.locks, places=reaped.lock_waiters)
        observers.tell(store, event)
    return reaped
