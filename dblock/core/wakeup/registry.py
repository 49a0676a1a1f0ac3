"""Who waits in this process, and how one flow wakes another.

Rule: a wake-up only says "look". A flow that was woken for nothing asks the database and waits on, so that nothing
depends on it but how soon a waiter looks.
"""

from __future__ import annotations

import threading
from typing import Any, Final


class Wakeup:
    """Wakes one waiting flow, a thread or a task; a notification before the wait begins ends the wait at once."""

    __slots__ = ("_event", "_future", "_loop")

    def __init__(self) -> None:
        self._event = threading.Event()
        self._loop: Any = None
        self._future: Any = None

    def notify(self) -> None:
        """Wake the flow; from any thread."""
        self._event.set()
        loop, future = self._loop, self._future
        if loop is not None:
            try:
                loop.call_soon_threadsafe(_set, future)
            except RuntimeError:  # the loop is closed, and the flow with it
                return

    def wait(self, seconds: float) -> None:
        """Wait in this thread until it is notified."""
        _ = self._event.wait(seconds)

    async def wait_async(self, seconds: float) -> None:
        """Wait in this task until it is notified."""
        import asyncio  # noqa: PLC0415 - only where it is in use

        loop = asyncio.get_running_loop()
        self._future = loop.create_future()
        self._loop = loop
        if not self._event.is_set():
            try:
                async with asyncio.timeout(seconds):
                    await self._future
            except TimeoutError:
                pass
        self._loop = None

    def closed(self) -> bool:
        """Is the event loop of its flow closed, so that nobody will ever wake?"""
        loop = self._loop
        return loop is not None and bool(loop.is_closed())

    def responsive(self) -> bool:
        """Would its flow wake soon? Not while its event loop stands still."""
        loop = self._loop
        return loop is None or bool(loop.is_running())

    def consume(self) -> bool:
        """Was it notified since the last time this was asked?"""
        notified = self._event.is_set()
        self._event.clear()
        return notified


def _set(future: Any) -> None:
    if not future.done():
        future.set_result(None)


UNCLAIMED: Final = 1000
"""How many calls for waiters who have not registered yet are remembered."""


class Wakeups:
    """Those who wait in this process, by key and ticket: one flow as a rule.

    Two databases seldom give out the same ticket at the same time; then both look.
    """

    def __init__(self) -> None:
        self._registered: dict[tuple[str, int], list[Wakeup]] = {}
        self._unclaimed: dict[tuple[str, int], bool] = {}

    def register(self, key: str, ticket: int, wakeup: Wakeup) -> None:
        """Notify the flow that waits for a key with that ticket from now on; at once, if it has been called already."""
        self._registered.setdefault((key, ticket), []).append(wakeup)
        if self._unclaimed.pop((key, ticket), False):
            wakeup.notify()

    def unregister(self, key: str, ticket: int, wakeup: Wakeup) -> None:
        """Its flow waits with that ticket no more."""
        registered = self._registered.get((key, ticket), [])
        if wakeup in registered:
            registered.remove(wakeup)
        if not registered:
            _ = self._registered.pop((key, ticket), None)

    def notify(self, key: str, ticket: int) -> bool:
        """Wake the waiter with that ticket; False if nobody of this process has registered with it yet."""
        registered = self._registered.get((key, ticket))
        if registered:
            for wakeup in list(registered):
                wakeup.notify()
            return True
        if len(self._unclaimed) >= UNCLAIMED:
            self._unclaimed.clear()
        self._unclaimed[key, ticket] = True
        return False

    def notify_all(self) -> None:
        """Wake every waiter."""
        for registered in list(self._registered.values()):
            for wakeup in list(registered):
                wakeup.notify()

    def on_message(self, message: str) -> None:
        """Wake whom a call from another process names; anybody may have sent it."""
        ticket, _, key = message.partition(" ")
        if ticket.isdecimal():
            _ = self.notify(key, int(ticket))

    def anybody_waits(self) -> bool:
        """Does anybody wait?"""
        return any(not wakeup.closed() for each in list(self._registered.values()) for wakeup in each)
