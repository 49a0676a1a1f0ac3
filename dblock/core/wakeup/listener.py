"""Listens for what the database has to say to the waiters of this process, of those who give back elsewhere.

One connection for each database and process, or event loop, however many wait; opened when somebody does, closed some
time after nobody does any more. A message says which waiter is to look. Whatever is lost, because the connection broke
or the server swallowed it, costs no more than the interval at which waiters look anyway.

Rule: nobody relies on being called; without a listener waiters look more often, which is all the difference.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Sequence
from typing import Final, Protocol

from dblock.core import clock
from dblock.core.log import warn
from dblock.core.wakeup.registry import Wakeups

LINGER: Final = 2.0
"""Seconds for which it goes on when nobody waits any more."""
ATTENTION: Final = 1.0
"""Seconds of silence after which it sees whether it is still wanted."""


class Subscription(Protocol):
    """A connection that listens."""

    def listen(self, seconds: float, /) -> Sequence[str]:
        """What was said, as soon as something is, or nothing after so many seconds; raises when it has broken."""
        ...

    def close(self) -> None: ...


class NotificationSource(Protocol):
    """The part of a store that can listen."""

    @property
    def database(self) -> object:
        """Where its waiters wait."""
        ...

    def subscribe(self, channel: str, wakeups: Wakeups, /) -> Subscription | None:
        """Begin to listen to the database, for those who wait there; None where that does not work."""
        ...

    def in_background(self, function: Callable[[], None], /) -> Callable[[], bool]:
        """Run a function beside everything else, in a thread or in a task of the running event loop; does it run?"""
        ...

    def rest(self, seconds: float, /) -> None:
        """Sleep in such a function."""
        ...


class Listener:
    """Listens for the waiters of one database."""

    def __init__(self, store: NotificationSource, wakeups: Wakeups, channel: str) -> None:
        self._store = store
        self._wakeups = wakeups
        self._channel = channel
        self._wanted_at = 0.0
        self._lock = threading.Lock()
        self._runs: Callable[[], bool] = lambda: False
        self._unavailable = False
        self.ready = False
        """Does it listen?"""

    def want(self) -> None:
        """Somebody waits."""
        self._wanted_at = clock.now()
        if self._unavailable or self._runs() or not self._lock.acquire(blocking=False):
            return
        try:
            if not self._runs():
                self._runs = self._store.in_background(self._run)
        except RuntimeError:  # out of threads, or the interpreter is ending
            return
        finally:
            self._lock.release()

    def _wanted(self) -> bool:
        return clock.now() < self._wanted_at + LINGER or self._wakeups.anybody_waits(self._store.database)

    def _run(self) -> None:
        try:
            while self._wanted() and not self._unavailable:
                try:
                    self._listen()
                except Exception as error:  # noqa: BLE001 - whatever happens to it, waiters get on without it
                    warn("cannot listen at the database, trying again: %s", error)
                    self._tell_all(ready=False)
                    self._store.rest(ATTENTION)
        finally:
            self._tell_all(ready=False)

    def _listen(self) -> None:
        subscription = self._store.subscribe(self._channel, self._wakeups)
        if subscription is None:
            self._unavailable = True
            why = "a pooler is in between, the driver has no way to, or listening is switched off"
            warn("the database cannot call this process (%s): waiters look more often", why)
            return
        try:
            self._tell_all(ready=True)  # whatever was said before
            while self._wanted():
                for message in subscription.listen(ATTENTION):
                    self._wakeups.on_message(message)
        finally:
            with contextlib.suppress(Exception):
                subscription.close()

    def _tell_all(self, *, ready: bool) -> None:
        was_ready, self.ready = self.ready, ready
        if ready or was_ready:
            self._wakeups.notify_all(self._store.database)
