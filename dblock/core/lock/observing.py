"""Observing locks: `observe()`, and the events that flows report.

Rule: only a process with observers runs this code. A flow reports its own events, when the lock is as the event says;
an interrupt of a callback leaves no flow with a lock that it does not know of.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from dblock.core import runtime
from dblock.core.acquire.request import Refused
from dblock.core.errors import LockError, LockLost
from dblock.core.events import Event, How, Kind
from dblock.core.holding.flow import Entry, Hold, HoldObserver
from dblock.core.holding.observers import Observer, Observers, about, held, lock_of, masked
from dblock.core.lock import leaving
from dblock.core.lock.base import BaseLock
from dblock.core.protocol import reaping
from dblock.core.protocol.steps import Steps
from dblock.core.protocol.store import Store
from dblock.core.runtime import current_flow
from dblock.core.values import LockInfo
from dblock.core.watchdog.history import Histories

T = TypeVar("T")


def observe(callback: Callable[[Event], object], *kinds: Kind) -> Callable[[], None]:
    """Call `callback` with an `Event` for everything that happens to locks of this process; returns the undo function.

    It receives events of the locks of every face, sync and async, also in processes that are forked later: a server may
    subscribe before it forks its workers. `kinds` selects the kinds of events, all by default.

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
        watchdog.observers = FlowObservers(all_, records=records) if all_ or records else None


class FlowObservers(Observers):
    """Observers that also get the events of flows."""

    def acquire(self, lock: BaseLock, entry: Entry, begin: Callable[..., Steps[T]]) -> Steps[T]:
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
                    yield from leaving._release(lock, hold, entry)
            attempt.fail(type(error).__name__)
            raise
        return found

    def attach(self, lock: BaseLock, steps: Steps[T]) -> Steps[T]:
        """Run the steps that enter a tenure, and report it unless they return False."""
        found = yield from steps
        hold = lock._hold_here()
        if not found or hold is None:
            return found
        try:
            self.tell(Kind.ACQUIRED, hold.store, **about(hold), how="attached")
        except BaseException:  # interrupted
            with contextlib.suppress(LockError):
                yield from leaving._release(lock, hold, hold.entries[-1])
            raise
        return found

    def leave(self, hold: Hold, steps: Steps[T], how: How) -> Steps[T]:
        """Run the steps that leave a hold, and report it, unless its loss has been reported."""
        before, lock = _entered(hold), lock_of(hold)
        try:
            result = yield from steps
        except (GeneratorExit, LockLost):
            raise
        except BaseException as error:
            self._tell_left(hold, lock, before, how, type(error).__name__)
            raise
        self._tell_left(hold, lock, before, how)
        return result

    def note(self, store: Store, event: Event, who: Mapping[str, Any] | None) -> None:
        """Record an event, of the running flow by default."""
        watchdog = runtime.current.watchdog
        if watchdog.histories is None:
            watchdog.histories = Histories()
        watchdog.histories.note(store, event, current_flow().who if who is None else who)
        watchdog.wake_some_time()

    def _tell_left(self, hold: Hold, lock: HoldObserver | None, before: int, how: How, reason: str = "") -> None:
        depth = _entered(hold)
        if depth < before and (depth or runtime.current.watchdog.claim_loss_report(hold)):
            sender, label = (None, "") if lock is None else (type(lock), lock.options.label)
            self.tell_now(
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
                    held=held(hold),
                    reason=reason,
                ),
            )


def _entered(hold: Hold) -> int:
    """Number of entries; an open transaction that keeps the hold counts as one."""
    entries = hold.entries
    if len(entries) == 1 and entries[0].lock is not None:  # mostly
        return 1 + bool(hold.kept_by)
    return len(hold.open_entries()) + bool(hold.kept_by)


class _Attempt:
    """The events of one attempt to acquire a lock."""

    __slots__ = ("began", "contended", "ended", "lock", "observers", "store")

    def __init__(self, observers: Observers, lock: BaseLock) -> None:
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
        )

    def contend(self, holder: LockInfo | None) -> None:
        """Report CONTENDED."""
        self.contended = True
        self.observers.tell_now(self.store, self._event(Kind.CONTENDED)._replace(holder=masked(holder)))

    def succeed(self, hold: Hold) -> None:
        """Report ACQUIRED."""
        self.ended = True
        wait = 0.0 if self.lock._stands_by else self.store.database.now() - self.began
        event = self._event(
            Kind.ACQUIRED, hold.tenure.fence, _how(hold, contended=self.contended), _entered(hold), wait
        )
        self.observers.tell_now(self.store, event)

    def fail(self, reason: str, refused: Refused | None = None) -> None:
        """Report GAVE_UP, once."""
        if self.ended:
            return
        self.ended = True
        if refused is not None and not self.contended and refused.busy is None:
            self.contend(refused.holder)
        event = self._event(Kind.GAVE_UP, wait=self.store.database.now() - self.began)
        holder = masked(refused.holder) if refused else None
        self.observers.tell_now(self.store, event._replace(reason=reason, holder=holder))


def _how(hold: Hold, *, contended: bool) -> How:
    if len(hold.entries) > 1 and len(hold.open_entries()) > 1:
        return "reentered"
    if hold.record.local_handovers and contended:
        return "handed_over"
    return "waited" if contended else "at_once"


def reap(store: Store, retention: float, sender: type) -> Steps[reaping.Reaped]:
    """Reap, and report it."""
    reaped = yield from reaping.reap(store.database, retention)
    observers = runtime.current.watchdog.observers
    if observers is not None:
        observers.tell(Kind.REAPED, store, sender=sender, amount=reaped.locks, places=reaped.lock_waiters)
    return reaped
