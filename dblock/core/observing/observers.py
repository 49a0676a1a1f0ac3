"""Observing locks: `observe()`, and what the observers of this process are told.

Flows report their own events, and the watchdog those of leases. All observers hear of all events: a callback of
`observe()` is called for the kinds that it asked for, and the history adds an event to what it will write.

Rule: only a process with observers, or with a history, runs code for them. An observer delays only the flow that the
event is about, and cannot break it: an exception of a callback is logged, and an interrupt of one leaves no flow with a
lock that it does not know of. Events of the watchdog are delivered in another thread (`dblock.core.deliveries`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Final, TypeVar

from dblock.core.acquire.request import Refused
from dblock.core.deliveries import deliveries
from dblock.core.errors import LockError, LockLost
from dblock.core.holding.flow import Entry, Hold, HoldObserver
from dblock.core.log import warn
from dblock.core.observing.events import IN_FLOW, PROBES, Event, How, Kind
from dblock.core.protocol import reaping
from dblock.core.protocol.steps import Steps, undone_after
from dblock.core.protocol.store import Store
from dblock.core.values import LockInfo

T = TypeVar("T")
Hears = Callable[[Event, Store, "Mapping[str, Any] | None"], None]
"""Hears of an event of a store, in the flow or in the watching thread, and so never waits.

The last argument describes the flow that it is about, as parameters of the statements; None: the one that runs.
"""

observers: Final = dict[Hears, None]()
"""Those who hear of events, in the order in which they came.

A fork keeps them: a server may subscribe before it forks its workers. Each change is one operation of the dictionary,
so that neither threads nor signal handlers need a lock.
"""


def observe(callback: Callable[[Event], object], *kinds: str) -> Callable[[], None]:
    """Call `callback` with an `Event` for everything that happens to locks of this process; returns the undo function.

    It receives events of the locks of every face, sync and async, also in processes that are forked later: a server may
    subscribe before it forks its workers. `kinds` selects the kinds of events, such as `"acquired"`, all by default.

    ACQUIRED, CONTENDED, GAVE_UP, RELEASED, REAPED and FORCED are delivered in the flow that they are about, which
    continues when the callback returns: no I/O there, and no locks. The others are delivered in another thread, one
    after the other. An exception of the callback is logged. Raises TypeError for an object that is not callable,
    ValueError for an unknown kind.
    """
    if not callable(callback):
        raise TypeError(f"observe() calls a function with an Event: {callback!r} is none")
    wanted = frozenset(Kind(kind) for kind in kinds or Kind)

    def hear(event: Event, _store: object, _who: object) -> None:
        if event.kind in wanted:
            if event.kind in IN_FLOW:
                _call(callback, event)
            else:
                deliveries.put(partial(_call, callback, event))

    def stop() -> None:
        _ = observers.pop(hear, None)

    observers[hear] = None
    return stop


def _call(callback: Callable[[Event], object], event: Event) -> None:
    try:
        _ = callback(event)
    except Exception as error:  # noqa: BLE001 - a user's
        warn("an observer of locks failed: %r", error, exc_info=True)


def tell(store: Store, event: Event, who: Mapping[str, Any] | None = None) -> None:
    """Tell all of an event; `who`: see `Hears`."""
    if not event.key.startswith(PROBES):
        for hear in list(observers):
            hear(event, store, who)


def tell_of(hold: Hold, kind: Kind, lock: HoldObserver | None = None, **known: Any) -> None:
    """Tell all of an event of a tenure: of the flow that runs, which uses `lock`, or of a snapshot's flow."""
    by = _by(lock or _lock_of(hold))
    event = Event(kind, hold.store.name, **by, key=hold.key, fence=hold.tenure.fence, depth=_entered(hold), **known)
    tell(hold.store, event, hold.who if hold.is_snapshot else None)


def acquire_and_report(
    lock: Any, entry: Entry, begin: Callable[..., Steps[T]], undo: Callable[[Any, Hold, Entry], Steps[None]]
) -> Steps[T]:
    """Acquire by the steps that `begin` makes, given a callback for the beginning of a wait; report it.

    `undo` leaves the entry again, if an interrupt comes when the flow has entered.
    """
    if not observers:
        return begin()
    store = lock._place.store()
    now = store.database.now
    began, contended, told = now(), False, entry.kind == "attach"  # that fails by an error alone

    def report(kind: Kind, holder: LockInfo | None, **known: Any) -> None:
        nonlocal contended
        contended = contended or kind is Kind.CONTENDED
        tell(store, Event(kind, store.name, **_by(lock), key=lock._key, holder=holder and holder.masked(), **known))

    def give_up(reason: str, holder: LockInfo | None = None) -> None:
        report(Kind.GAVE_UP, holder, contended=contended, wait=now() - began, reason=reason)

    def enter() -> Steps[T]:
        nonlocal told
        found = yield from begin(None if lock._stands_by else partial(report, Kind.CONTENDED))
        told = True
        if isinstance(found, Hold):
            wait = 0.0 if lock._stands_by else now() - began
            how = _how(found, entry, contended=contended)
            tell_of(found, Kind.ACQUIRED, lock, how=how, contended=contended, wait=wait)
        elif isinstance(found, Refused) and not lock._stands_by:
            if not contended and found.busy is None:
                report(Kind.CONTENDED, found.holder)
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


def leave_and_report(hold: Hold, steps: Steps[T], how: How) -> Steps[T]:
    """The steps that leave a hold; they report it, unless its loss has been reported."""
    if not observers:
        return steps
    before, lock = _entered(hold), _lock_of(hold)

    def report(error: BaseException | None = None) -> None:
        depth, reason = _entered(hold), "" if error is None else type(error).__name__
        if depth < before and (depth or hold.lease.claim_report()):
            tell_of(hold, Kind.RELEASED, lock, how=how, held=hold.lease.held, reason=reason)

    def leave() -> Steps[T]:
        result = yield from undone_after(lambda: steps, report, LockLost)
        report()
        return result

    return leave()


def reap_and_report(store: Store, retention: float, sender: type) -> Steps[reaping.Reaped]:
    """Reap, and report it."""
    reaped = yield from reaping.reap(store.database, retention)
    if observers:
        tell(store, Event(Kind.REAPED, store.name, sender, amount=reaped.locks, places=reaped.lock_waiters))
    return reaped


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
