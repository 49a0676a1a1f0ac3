"""What observers are told, and how: the events of a flow's own operations, and those that the watchdog reports.

Rule: an observer delays only the flow that the event is about, and cannot break it: an exception of a callback is
logged, and an interrupt of one leaves no flow with a lock that it does not know of. Events of the watchdog are
delivered in another thread (`dblock.core.deliveries`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, TypeVar

from dblock.core.acquire.request import Refused
from dblock.core.deliveries import deliveries
from dblock.core.errors import LockError, LockLost
from dblock.core.holding.flow import Entry, Hold, HoldObserver
from dblock.core.log import warn
from dblock.core.observing.events import IN_FLOW, PROBES, Event, How, Kind
from dblock.core.protocol.steps import Steps, undone_after
from dblock.core.protocol.store import Store
from dblock.core.values import LockInfo

T = TypeVar("T")
Hears = Callable[[Event, Store, "Mapping[str, Any] | None"], None]
"""Hears of an event of a store, in the flow or in the watching thread, and so never waits.

The last argument describes the flow that it is about, as parameters of the statements; None: the one that runs.
"""


class Observer:
    """A callback, and the kinds of events that it receives."""

    def __init__(self, callback: Callable[[Event], object], kinds: frozenset[Kind]) -> None:
        self._callback, self._kinds = callback, kinds

    def __call__(self, event: Event, _store: object, _who: object) -> None:
        if event.kind in self._kinds:
            call = partial(_call, self._callback, event)
            if event.kind in IN_FLOW:
                call()
            else:
                deliveries.put(call)

    def forked(self) -> None:
        """In a forked child: reset the callback, if it has a method `forked`."""
        _call(getattr(self._callback, "forked", int))


def _call(callback: Callable[..., object], *given: object) -> None:
    try:
        _ = callback(*given)
    except Exception as error:  # noqa: BLE001 - a user's
        warn("an observer of locks failed: %r", error, exc_info=True)


class Observers:
    """Those that hear of events. Adding or removing one makes another object."""

    def __init__(self, all_: tuple[Hears, ...]) -> None:
        self.all = all_

    def forked(self) -> Observers:
        """The observers of a forked child."""
        for hears in self.all:
            if isinstance(hears, Observer):
                hears.forked()
        return self

    def tell(self, store: Store, event: Event, who: Mapping[str, Any] | None = None) -> None:
        """Tell all of an event; `who`: see `Hears`."""
        if not event.key.startswith(PROBES):
            for hears in self.all:
                hears(event, store, who)

    def tell_of(self, hold: Hold, kind: Kind, lock: HoldObserver | None = None, **known: Any) -> None:
        """Tell all of an event of a tenure: of the flow that runs, which uses `lock`, or of a snapshot's flow."""
        lock = lock or _lock_of(hold)
        event = Event(
            kind,
            hold.store.name,
            **_by(lock),
            key=hold.key,
            fence=hold.tenure.fence,
            depth=_entered(hold),
            **known,
        )
        self.tell(hold.store, event, hold.who if hold.is_snapshot else None)

    def acquire(
        self,
        lock: Any,
        entry: Entry,
        begin: Callable[..., Steps[T]],
        undo: Callable[[Any, Hold, Entry], Steps[None]],
    ) -> Steps[T]:
        """Acquire by the steps that `begin` makes, given a callback for the beginning of a wait; report it.

        `undo` leaves the entry again, if an interrupt comes when the flow has entered.
        """
        store = lock._place.store()
        now = store.database.now
        began, contended, told = now(), False, entry.kind == "attach"  # that fails by an error alone

        def tell(kind: Kind, holder: LockInfo | None, **known: Any) -> None:
            holder = holder and holder.masked()
            self.tell(store, Event(kind, store.name, **_by(lock), key=lock._key, holder=holder, **known))

        def contend(holder: LockInfo | None) -> None:
            nonlocal contended
            contended = True
            tell(Kind.CONTENDED, holder)

        def give_up(reason: str, holder: LockInfo | None = None) -> None:
            tell(Kind.GAVE_UP, holder, contended=contended, wait=now() - began, reason=reason)

        def enter() -> Steps[T]:
            nonlocal told
            found = yield from begin(None if lock._stands_by else contend)
            told = True
            if isinstance(found, Hold):
                wait = 0.0 if lock._stands_by else now() - began
                how = _how(found, entry, contended=contended)
                self.tell_of(found, Kind.ACQUIRED, lock, how=how, contended=contended, wait=wait)
            elif isinstance(found, Refused) and not lock._stands_by:
                if not contended and found.busy is None:
                    contend(found.holder)
                give_up("timeout", found.holder)
            return found

        def fail(error: BaseException) -> Steps[None]:
            hold = lock._hold_here()
            if hold is not None and entry in hold.entries:
                with contextlib.suppress(LockError):
                    yield from undo(lock, hold, entry)
            if not told:
                give_up(type(error).__name__)

        return undone_after(enter, fail)

    def leave(self, hold: Hold, steps: Steps[T], how: How) -> Steps[T]:
        """Run the steps that leave a hold, and report it, unless its loss has been reported."""
        before, lock = _entered(hold), _lock_of(hold)

        def tell(error: BaseException | None = None) -> None:
            depth, reason = _entered(hold), "" if error is None else type(error).__name__
            if depth < before and (depth or hold.lease.claim_report()):
                self.tell_of(hold, Kind.RELEASED, lock, how=how, held=hold.lease.held, reason=reason)

        result = yield from undone_after(lambda: steps, tell, LockLost)
        tell()
        return result


def _by(lock: HoldObserver | None) -> dict[str, Any]:
    """The fields of an event that describe the lock object."""
    return {"sender": type(lock), "label": lock.options.label, "majority": lock._majority} if lock is not None else {}


def _lock_of(hold: Hold) -> HoldObserver | None:
    """A lock object through which the hold was entered, or is being left."""
    return next((entry.lock for entry in hold.entries if entry.lock is not None), hold.leaving)


def _entered(hold: Hold) -> int:
    """Number of entries; an open transaction that keeps the hold counts as one, and is an entry of a snapshot."""
    return len(hold.open_entries()) + (bool(hold.kept_by) and not hold.is_snapshot)


def _how(hold: Hold, entry: Entry, *, contended: bool) -> How:
    if entry.kind == "attach":
        return "attached"
    if len(hold.open_entries()) > 1:
        return "reentered"
    if hold.grant.local_handovers and contended:
        return "handed_over"
    return "waited" if contended else "at_once"
