"""The history: events of keys in the table `lock_events`, for people. Off unless a store keeps a history.

An event costs its flow an entry in a list. About once a second the watchdog has the entries written in one statement,
and the oldest rows deleted, so that the table has a bounded number of rows. The list is bounded too, by key, so that a
key that is taken a thousand times a second leaves room for others; the number of omitted events is written as well.

Rule: no flow waits for it, and nothing is decided by it. Events that cannot be written are dropped, and so are those of
the last second of a process that is killed. Events of one database are never written to another one that the store's
name has led to since: a test runner drops its database, and resets the alias.
"""

from __future__ import annotations

import asyncio
import json
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final
from weakref import WeakKeyDictionary, ref

from dblock.core import clock, runtime, timing
from dblock.core.identity import celery_task_id, storable
from dblock.core.log import warn
from dblock.core.observing.events import Event, Kind
from dblock.core.observing.observers import observers
from dblock.core.protocol.drive import going_on
from dblock.core.protocol.steps import Parameters, Steps
from dblock.core.protocol.store import Store
from dblock.operating.statements.administration import ask

OF_KEY: Final = 20
"""Most events of one key in one write."""
OF_ALL: Final = 500
"""Most events of all keys in one write."""
OMITTED: Final = "omitted"
"""The kind of a row that gives the number of events of its key that its process left out before it."""
_WRITTEN: Final = frozenset(Kind) - {Kind.CONTENDED, Kind.RENEWED}
"""The kinds that are written."""


class History:
    """The events of one database that are not written yet."""

    def __init__(self) -> None:
        self._mutex = threading.RLock()  # a signal handler may take a lock
        self._rows: list[tuple[float, dict[str, Any], object, Store]] = []
        """Rows with their local times and databases, and the store, whose engine the application may drop meanwhile."""
        self._noted = Counter[str]()
        """Number of events of each key, including omitted ones."""
        self._loop: Any = None
        """The event loop on which locks were taken last, if any."""
        self._begun: Callable[[], Steps[None] | None] = lambda: None
        self._begun_on: Any = None
        """The last steps, by a reference, and their event loop."""
        self._failing = False

    def note(self, store: Store, event: Event, who: Mapping[str, Any]) -> None:
        """Add an event of the flow `who`, unless it only concerns that flow itself (re-entries)."""
        if event.how == "reentered" or (event.kind is Kind.RELEASED and event.depth):
            return
        if store.asynchronous:
            self._loop = asyncio._get_running_loop() or self._loop
        location = store.location
        with self._mutex:
            if event.key not in self._noted and len(self._noted) >= OF_ALL:
                return
            self._noted[event.key] += 1
            if self._noted[event.key] <= OF_KEY and len(self._rows) < OF_ALL:
                self._rows.append((store.database.now(), _row(event, who), location, store))

    def begin(self, store: Store, *, ripe: float = 0.0) -> tuple[Steps[None], Any] | None:
        """The steps that write the events, and their event loop; None if there is nothing to do.

        `ripe`: minimum age of the oldest event in seconds. Writes never overlap, so that the events of a process are
        numbered in their order. The steps take the events when they run: steps that could not be run, or whose event
        loop has stopped, have taken none.
        """
        rows = self._rows
        if self._under_way or not rows or store.database.now() < rows[0][0] + ripe:
            return None
        steps = self._write(store)
        self._begun, self._begun_on = ref(steps), self._loop if self._loop and self._loop.is_running() else None
        return steps, self._begun_on

    def _write(self, store: Store) -> Steps[None]:
        where = store.location
        try:
            events = self._take(store, where)
            if not (events and (keep := store.history)):
                return
            written = json.dumps(events, ensure_ascii=False)
            trim: Parameters = {"keep": keep}
            if self._failing:  # first: a user without the right to delete must not fill the disk
                _ = yield from ask(store.database, "trim", trim, location=where)
            _ = yield from ask(store.database, "note", {"events": written}, resend=False, location=where)
            _ = yield from ask(store.database, "trim", trim, location=where)
            self._failing = False
        except Exception as error:  # noqa: BLE001 - it has no caller
            if store.location != where:
                return
            if not self._failing:  # logged once, not each second
                warn("could not write the history of locks: %s", error)
            self._failing = True

    def _take(self, store: Store, where: object) -> list[dict[str, Any]]:
        """Take the events of the database `where`; those of others are dropped."""
        with self._mutex:
            rows, omitted, self._rows, self._noted = self._rows, self._noted, [], Counter()
        now = store.database.now()
        events: list[dict[str, Any]] = [{**row, "age": now - at} for at, row, location, _ in rows if location == where]
        omitted.subtract(row["lock_key"] for _, row, *_ in rows)
        for key, event in {event["lock_key"]: event for event in events}.items():
            if omitted[key]:
                events.append({**event, "kind": OMITTED, "seconds": 0.0, "detail": str(omitted[key])})
        return events

    @property
    def _under_way(self) -> bool:
        """Whether a write is under way, or about to begin."""
        return going_on(self._begun) and (self._begun_on is None or self._begun_on.is_running())

    @property
    def pending(self) -> bool:
        """Whether something is to be written, or being written."""
        return bool(self._under_way or self._noted)


def _row(event: Event, who: Mapping[str, Any]) -> dict[str, Any]:
    kind = event.kind
    detail = f"{event.amount}, {event.places}" if kind is Kind.REAPED else event.reason or event.how
    return {
        "lock_key": event.key,
        "kind": kind,
        "fence": event.fence,
        "seconds": event.wait or event.held or event.lateness,  # of which a kind has one, or none
        "detail": storable(detail),
        "label": event.label,
        "celery_task_id": celery_task_id(),
        **who,
    }


class Histories(WeakKeyDictionary[Store, History]):
    """The histories of a process, by their stores."""

    def begin(self, *, ripe: float = 0.0) -> Iterator[tuple[Store, Any, Steps[None]]]:
        """The writes that are due: store, event loop (None: one of its own), and steps."""
        for store in self._stores():
            if (begun := self[store].begin(store, ripe=ripe)) is not None:
                steps, loop = begun
                yield store, loop, steps

    @property
    def pending(self) -> bool:
        """Whether something is to be written, or being written."""
        return any(self[store].pending for store in self._stores())

    def _stores(self) -> list[Store]:
        """The references are listed in one step, since flows may add others meanwhile."""
        return [store for each in self.keyrefs() if (store := each()) is not None]


def _hear(event: Event, store: Store, who: Mapping[str, Any] | None) -> None:
    if not store.history or event.kind not in _WRITTEN:
        return
    watchdog = runtime.current.watchdog
    histories = watchdog.histories
    if not isinstance(histories, Histories):  # in a forked child, too: the events before are its parent's
        histories = watchdog.histories = Histories()
    history = histories.get(store) or histories.setdefault(store, History())
    history.note(store, event, runtime.current_flow().who if who is None else who)
    watchdog.wake_by(clock.now() + timing.DEFAULT.attention)


def record() -> None:
    """Have the events of this process written from now on; each face calls it once a store keeps a history."""
    _ = observers.setdefault(_hear, None)
