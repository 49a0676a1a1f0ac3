"""Observing locks: `observe()`, and who hears of the events of this process (`dblock.core.observing.telling`).

Flows report their own events, and the watchdog those of leases. All observers hear of all events: a callback of
`observe()` is called for the kinds that it asked for, and the history adds an event to what it will write.

Rule: only a process with observers, or with a history, runs code for them.
"""

from __future__ import annotations

from collections.abc import Callable

from dblock.core import runtime
from dblock.core.observing.events import Event, Kind
from dblock.core.observing.telling import Hears, Observer, Observers
from dblock.core.protocol import reaping
from dblock.core.protocol.steps import Steps
from dblock.core.protocol.store import Store


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
    observer = Observer(callback, frozenset(Kind(kind) for kind in kinds or Kind))
    add(observer)
    return lambda: _change(lambda all_: tuple(each for each in all_ if each is not observer))


def add(hears: Hears) -> None:
    """Let it hear of all events from now on, if it does not yet."""
    _change(lambda all_: all_ if hears in all_ else (*all_, hears))


def _change(changed: Callable[[tuple[Hears, ...]], tuple[Hears, ...]]) -> None:
    watchdog = runtime.current.watchdog
    with watchdog._lock:
        all_ = changed(() if watchdog.observers is None else watchdog.observers.all)
        watchdog.observers = Observers(all_) if all_ else None


def reap_and_report(store: Store, retention: float, sender: type) -> Steps[reaping.Reaped]:
    """Reap, and report it."""
    reaped = yield from reaping.reap(store.database, retention)
    if (observers := runtime.current.watchdog.observers) is not None:
        event = Event(Kind.REAPED, store.name, sender, amount=reaped.locks, places=reaped.lock_waiters)
        observers.tell(store, event)
    return reaped
