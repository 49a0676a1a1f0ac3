"""What metrics of every kind need: keys put into few groups, and what an event adds to which metric.

Rule: memory is bounded by the number of groups and of locks that are held, never by that of keys.
"""

from __future__ import annotations

import os
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from weakref import WeakMethod

from dblock.core.observing.events import Event, Kind

OTHER = "other"
"""The group of keys that have none, or come when there are as many groups as may be."""


def prefix(key: str) -> str:
    """What stands before the first colon."""
    return key.partition(":")[0]


class Groups:
    """The groups of keys, of which there are few."""

    def __init__(self, group: Callable[[str], str], most: int) -> None:
        if not callable(group):
            raise TypeError(f"group is a function from a key to the name of its group, not {group!r}")
        if int(most) < 1:
            raise ValueError(f"max_groups is a number from 1 on, not {most!r}")
        self._group, self._most = group, most
        self._known: set[str] = set()

    def of(self, key: str) -> str:
        """The group of a key; `other` if the function fails, or names one too many."""
        try:
            name = str(self._group(key))
        except Exception:  # noqa: BLE001 - a user's
            return OTHER
        if name not in self._known:
            if len(self._known) >= self._most:
                return OTHER
            self._known.add(name)
        return name


def in_children(reset: Callable[[], None]) -> None:
    """Have a method called in each process that is forked from now on, for as long as its object lives."""
    method = WeakMethod(reset)

    def call() -> None:
        if (found := method()) is not None:
            found()

    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=call)


class Tenures:
    """Those that were counted as held, so that each is counted as given back or lost once."""

    def __init__(self) -> None:
        self.leave_to_parent()

    def leave_to_parent(self) -> None:
        """A forked child holds nothing of its parent's."""
        self._mutex = threading.RLock()  # a signal handler may take a lock
        self._open = Counter[tuple[str, str]]()
        """How many by database and key. Not by fence, which is another one after a `downgrade()`."""

    def begun(self, event: Event) -> None:
        """A flow has it."""
        with self._mutex:
            self._open[event.database, event.key] += 1

    def ended(self, event: Event) -> bool:
        """A flow has it no more; False if it was not counted."""
        with self._mutex:
            count = self._open.pop((event.database, event.key), 0)
            if count > 1:
                self._open[event.database, event.key] = count - 1
        return count > 0


def counted(event: Event, tenures: Tenures) -> Iterator[tuple[str, float, str | None]]:
    """The metrics that an event concerns: name, what is added or observed, and the outcome, reason or table, if any."""
    if event.contended:
        yield "waiting", -1, None
    match event.kind:
        case Kind.ACQUIRED if event.how != "reentered":
            tenures.begun(event)
            yield "held", 1, None
            if event.how != "attached":
                yield "wait", event.wait, event.how
        case Kind.CONTENDED:
            yield "contended", 1, None
            yield "waiting", 1, None
        case Kind.GAVE_UP:
            yield "wait", event.wait, "gave_up"
            yield "gave_up", 1, event.reason
        case Kind.RELEASED | Kind.LOST if event.kind is Kind.LOST or not event.depth:
            if event.kind is Kind.LOST and not event.majority:  # else its majority lock may go on
                yield "lost", 1, event.reason
            yield "hold", event.held, None
            if tenures.ended(event):
                yield "held", -1, None
        case Kind.AT_RISK | Kind.FORCED:
            yield event.kind.value, 1, None
        case Kind.RENEWED:
            yield "renewed", event.amount, None
            yield "lateness", event.lateness, None
        case Kind.REAPED:
            yield "reaped", event.amount, "locks"
            yield "reaped", event.places, "lock_waiters"
        case _:
            pass
