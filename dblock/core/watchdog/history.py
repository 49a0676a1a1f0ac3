"""What happened to keys, written down for people in the table `lock_events`. Off unless a store keeps a history.

An event costs its flow an entry in a list. The watchdog has what was noted written about once a second, in one
statement, and the oldest rows deleted: the table has a bounded number of them. What is noted is bounded too, by key, so
that a key that is taken a thousand times a second leaves room for the others; how much was left out is written as well.

Rule: nobody waits for it, and nothing is decided by it. What cannot be written is dropped, and so is what a process
that is killed has noted in its last second.
"""

from __future__ import annotations

import json
import random
import sys
import threading
from collections import Counter
from collections.abc import Iterator, Mapping
from inspect import GEN_CLOSED, getgeneratorstate
from typing import Any, Final
from weakref import WeakKeyDictionary, ref

from dblock.core.events import Event, Kind
from dblock.core.identity import celery_task_id, storable
from dblock.core.log import warn
from dblock.core.protocol.administering import ask
from dblock.core.protocol.steps import Steps
from dblock.core.protocol.store import Store

OF_KEY: Final = 20
"""Events of one key that are written, of those that were noted since the last time."""
OF_ALL: Final = 500
"""Events of all keys."""
RIPE: Final = 0.5
"""Seconds for which what was noted waits for more; so an event loop that ends within them is not in the midst of it."""
TRIM: Final = 100
"""Events that a process writes between two deletions of a thousand, at most, or a tenth of those that are kept."""
OMITTED: Final = "omitted"
"""The kind of a row that tells how many events of its key were left out before it, by a process."""
_SECONDS: Final = {
    Kind.ACQUIRED: "wait",
    Kind.GAVE_UP: "wait",
    Kind.RELEASED: "held",
    Kind.LOST: "held",
    Kind.AT_RISK: "lateness",
    Kind.FORCED: "",
    Kind.REAPED: "",
}
"""The kinds that are written, and what is in the column `seconds`."""


class History:
    """What was noted of one database, and is not written yet."""

    def __init__(self) -> None:
        self._mutex = threading.RLock()  # a signal handler may take a lock
        self._rows: list[tuple[float, dict[str, Any]]] = []
        """By the local time."""
        self._for: Store | None = None
        """The database, while there are some: an engine may be thrown away before they are written."""
        self._noted: dict[str, int] = {}
        """How many events of each key there were, those that are left out included."""
        self._untrimmed = random.random()  # noqa: S311 - no secret: processes that write little have their share
        """How much was written since the last deletion; it is time for the next at 1."""
        self._loop: Any = None
        """The event loop on which locks were taken last, where that is how."""
        self._begun: tuple[ref[Steps[None]], Any] | None = None
        """The steps that were begun last, and the event loop that they are for."""
        self._failing = False

    def note(self, store: Store, event: Event, who: Mapping[str, Any]) -> None:
        """Note what happened, and to whom; what only the flow itself can see is left out."""
        kind = event.kind
        if kind not in _SECONDS or event.how == "reentered" or (kind is Kind.RELEASED and event.depth):
            return
        if store.asynchronous:
            self._loop = sys.modules["asyncio"]._get_running_loop() or self._loop
        with self._mutex:
            if event.key not in self._noted and len(self._noted) >= OF_ALL:
                return
            self._for = store
            number = self._noted[event.key] = self._noted.get(event.key, 0) + 1
            if number <= OF_KEY and len(self._rows) < OF_ALL:
                self._rows.append((store.database.now(), _row(event, who)))

    def begin(self, store: Store, *, ripe: float = 0.0) -> tuple[Steps[None], Any] | None:
        """The steps that write what was noted, and the event loop that they are for; None if there is nothing to do.

        `ripe`: seconds for which something is to have been noted.

        One after the other: so those of a process are numbered as they happened. They take what was noted once they
        run: steps that nobody could run, or whose event loop has stopped, have taken nothing with them.
        """
        rows = self._rows
        if self._under_way or not rows or store.database.now() < rows[0][0] + ripe:
            return None
        steps, loop = self._write(store), self._loop
        if loop is not None and not loop.is_running():
            loop = None
        self._begun = ref(steps), loop
        return steps, loop

    def _write(self, store: Store) -> Steps[None]:
        try:
            events = self._take(store)
            written = json.dumps(events, ensure_ascii=False)
            yield from self._trim(store)  # who may write and not delete does not fill a disk
            _ = yield from ask(store.database, "note", {"events": written}, resend=False)
            if keep := store.history:
                self._untrimmed += len(events) / min(keep / 10, TRIM)
            yield from self._trim(store)
            self._failing = False
        except Exception as error:  # noqa: BLE001 - there is nobody to be told
            if not self._failing:  # said once, not each second
                warn("could not write down what happened to locks: %s", error)
            self._failing = True

    def _trim(self, store: Store) -> Steps[None]:
        keep = store.history
        if keep and self._untrimmed >= 1:  # not each time: it reads both ends of the table
            _ = yield from ask(store.database, "trim", {"keep": keep})
            self._untrimmed = 0.0

    def _take(self, store: Store) -> list[dict[str, Any]]:
        with self._mutex:
            rows, noted, self._rows, self._noted, self._for = self._rows, self._noted, [], {}, None
        now = store.database.now()
        events: list[dict[str, Any]] = [{**row, "age": now - at} for at, row in rows]
        latest = {event["lock_key"]: event for event in events}
        kept = Counter(event["lock_key"] for event in events)
        for key, event in latest.items():
            if noted[key] > kept[key]:
                events.append({**event, "kind": OMITTED, "seconds": 0.0, "detail": str(noted[key] - kept[key])})
        return events

    @property
    def _under_way(self) -> bool:
        """Is something being written, or about to be?"""
        if self._begun is None:
            return False
        steps, loop = self._begun[0](), self._begun[1]
        going_on = steps is not None and getgeneratorstate(steps) != GEN_CLOSED
        return going_on and (loop is None or loop.is_running())

    @property
    def pending(self) -> bool:
        """Is there something to be written, or being written?"""
        return bool(self._under_way or self._noted)


def _row(event: Event, who: Mapping[str, Any]) -> dict[str, Any]:
    kind = event.kind
    seconds = getattr(event, _SECONDS[kind]) if _SECONDS[kind] else 0.0
    detail = f"{event.amount}, {event.places}" if kind is Kind.REAPED else event.reason or event.how
    return {
        "lock_key": event.key,
        "kind": kind,
        "fence": event.fence,
        "seconds": seconds,
        "detail": storable(detail),
        "label": event.label,
        "celery_task_id": celery_task_id(),
        **who,
    }


class Histories:
    """Those of a process."""

    def __init__(self) -> None:
        self._of: WeakKeyDictionary[Store, History] = WeakKeyDictionary()

    def note(self, store: Store, event: Event, who: Mapping[str, Any]) -> None:
        """Note what happened in a database that keeps a history."""
        history = self._of.get(store)
        if history is None:
            history = self._of.setdefault(store, History())
        history.note(store, event, who)

    def begin(self, *, ripe: float = 0.0) -> Iterator[tuple[Store, Any, Steps[None]]]:
        """What there is to write: where, on which event loop if so (None: on one of its own), and the steps."""
        for store, history in self._each():
            begun = history.begin(store, ripe=ripe)
            if begun is not None:
                steps, loop = begun
                yield store, loop, steps

    @property
    def pending(self) -> bool:
        """Is there something to be written, or being written?"""
        return any(history.pending for _, history in self._each())

    def _each(self) -> list[tuple[Store, History]]:
        """Those of now; the references are listed at once, since flows may add others meanwhile."""
        stores = [store for each in self._of.keyrefs() if (store := each()) is not None]
        return [(store, self._of[store]) for store in stores]
