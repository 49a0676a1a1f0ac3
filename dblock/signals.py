"""Django signals about locks.

`lock_lost` and `lock_at_risk` are sent in another thread with `lock` (and `reason`) for each lock object. The
others are sent with an `event`, where and when `dblock.observe` tells it: in the flow that it is about, where a
receiver does no I/O and takes no lock. The sender is the lock's class.

Rule: a failing receiver is logged and keeps nobody else from hearing; what nobody receives is not sent.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from django.dispatch import Signal

from dblock.core.observing.events import Event, Kind
from dblock.core.observing.observers import observe

lock_lost = Signal()
"""The lease ended before the work did. Arguments: `lock`, and `reason`, a `Reason`."""

lock_at_risk = Signal()
"""A renewal is late; the lease may still be good. Argument: `lock`."""


class EventSignal(Signal):
    """Sent for one kind of event, from the first receiver on until the last one has gone."""

    def __init__(self, kind: Kind) -> None:
        super().__init__()
        self.kind: Final = kind

        self._stop: Callable[[], None] | None = None

    def connect(self, *args: Any, **options: Any) -> None:
        super().connect(*args, **options)
        self._stop = self._stop or observe(self._send, self.kind)

    def disconnect(self, *args: Any, **options: Any) -> bool:
        found = super().disconnect(*args, **options)
        if not self.receivers and self._stop is not None:
            self._stop()
            self._stop = None
        return found

    def _send(self, event: Event) -> None:
        if self.has_listeners(event.sender):
            _ = self.send_robust(event.sender, event=event)


lock_acquired = EventSignal(Kind.ACQUIRED)
"""A tenure has begun, or was entered again."""
lock_contended = EventSignal(Kind.CONTENDED)
"""Somebody else has the key: a flow begins to wait, or is refused at once."""
lock_gave_up = EventSignal(Kind.GAVE_UP)
"""That flow has not got the key."""
lock_released = EventSignal(Kind.RELEASED)
"""A flow has left the lock."""
lock_reaped = EventSignal(Kind.REAPED)
"""Old rows were deleted."""
lock_forced = EventSignal(Kind.FORCED)
"""Somebody has freed a key that another one held."""
