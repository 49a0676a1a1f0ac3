"""Listening for notifications of the database: releasers of other machines grant keys to waiters of this process.

One connection for each database and process, or event loop, however many flows wait; opened for the first waiter,
closed some time after the last. A message names the waiter that should poll. A message that is lost, because the
connection broke or the server dropped it, costs at most one poll interval. In silence the server is probed now and
then: a connection that the network has dropped looks the same.

Rule: a waiter never relies on a notification; without a listener waiters only poll more often.
"""

from __future__ import annotations

import contextlib
import math
import threading
from collections.abc import Callable

from dblock.core import clock, timing
from dblock.core.log import warn
from dblock.core.protocol.store import Store
from dblock.core.wakeup.registry import Wakeups


class Listener:
    """Listens for the waiters of one database."""

    def __init__(self, store: Store, wakeups: Wakeups, channel: str) -> None:
        self._store = store
        self._wakeups = wakeups
        self._channel = channel
        self._wanted_at = 0.0
        self._lock = threading.RLock()  # a signal handler may wait for a lock
        self._runs: Callable[[], bool] = lambda: False
        self._rests_until = 0.0
        """The local time until which it does not listen, after a failure; infinite if the database cannot notify it."""
        self._warns_at: float | None = None
        """The local time from which a failure is logged, once, as an outage is for all flows; None before the first."""
        self.ready = False
        """Whether it is listening."""

    def want(self) -> None:
        """Listen, as a flow waits; it says so at each poll."""
        self._wanted_at = clock.now()
        if self._wanted_at < self._rests_until or self._runs():
            return
        with self._lock, contextlib.suppress(RuntimeError):  # out of threads, or the interpreter is ending
            if not self._runs():
                self._runs = self._store.in_background(self._run)

    def _run(self) -> None:
        try:
            self._listen()
        except Exception as error:  # noqa: BLE001 - waiters work without it
            now = clock.now()
            self._rests_until = now + timing.DEFAULT.attention
            if self.ready or self._warns_at is None:
                self._warns_at = now + timing.DEFAULT.surely_answered
            elif now > self._warns_at and not self._store.database.outage:
                warn("cannot listen at the database, trying again: %s", " ".join(str(error).split()))
                self._warns_at = math.inf
        finally:
            self._tell_all(ready=False)

    def _listen(self) -> None:
        subscription = self._store.subscribe(self._channel, self._wakeups)
        if subscription is None:
            self._rests_until = math.inf
            why = "a pooler is in between, the driver cannot listen, or listening is switched off"
            warn("the database cannot notify this process (%s): waiters poll more often", why)
            return
        try:
            self._tell_all(ready=True)  # for notifications that were sent before
            heard_at, linger, database = clock.now(), timing.DEFAULT.linger, self._store.database
            while clock.now() < self._wanted_at + linger or self._wakeups.anybody_waits(database):
                messages = subscription.listen(timing.DEFAULT.attention)
                for message in messages:
                    self._wakeups.on_message(message)
                if messages:
                    heard_at = clock.now()
                elif clock.now() > heard_at + timing.DEFAULT.trusted_idle:
                    subscription.ask(clock.now() + timing.DEFAULT.critical_timeout)
                    heard_at = clock.now()
        finally:
            with contextlib.suppress(Exception):
                subscription.close()

    def _tell_all(self, *, ready: bool) -> None:
        was_ready, self.ready = self.ready, ready
        if ready or was_ready:
            self._wakeups.notify_all(self._store.database)
