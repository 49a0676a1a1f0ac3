"""Who waits in this process, and how one flow wakes another.

A wake-up only says "look": a flow that was woken for nothing asks the database and waits on. So nothing depends on it
but how soon a waiter looks.
"""

from __future__ import annotations

import os
import threading
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dblock.core.protocol.tenures import Database


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


_wakeups: dict[tuple[str, int], list[Wakeup]] = {}
"""By key and ticket: of one flow, as a rule, since two databases seldom give out the same at the same time."""
_unclaimed: dict[tuple[str, int], bool] = {}
"""Key and ticket of waiters that were called before they had registered."""
_contended: dict[tuple[int, str], float] = {}
"""When somebody last waited for a key, by database and key."""
_MOST = 1000


def register(key: str, ticket: int, wakeup: Wakeup) -> None:
    """Notify the flow that waits for a key with that ticket from now on; at once, if it has been called already."""
    _wakeups.setdefault((key, ticket), []).append(wakeup)
    if _unclaimed.pop((key, ticket), False):
        wakeup.notify()


def unregister(key: str, ticket: int, wakeup: Wakeup) -> None:
    """Its flow waits with that ticket no more."""
    registered = _wakeups.get((key, ticket), [])
    if wakeup in registered:
        registered.remove(wakeup)
    if not registered:
        _ = _wakeups.pop((key, ticket), None)


def notify(key: str, ticket: int) -> bool:
    """Wake the waiter with that ticket; False if nobody of this process has registered with it yet."""
    registered = _wakeups.get((key, ticket))
    if registered:
        for wakeup in list(registered):
            wakeup.notify()
        return True
    if len(_unclaimed) >= _MOST:
        _unclaimed.clear()
    _unclaimed[key, ticket] = True
    return False


def notify_all() -> None:
    """Wake every waiter of this process."""
    for registered in list(_wakeups.values()):
        for wakeup in list(registered):
            wakeup.notify()


def on_message(message: str) -> None:
    """Wake whom a call from another process names; anybody may have sent it."""
    ticket, _, key = message.partition(" ")
    if ticket.isdecimal():
        _ = notify(key, int(ticket))


def anybody_waits() -> bool:
    """Does anybody wait in this process?"""
    return any(not wakeup.closed() for registered in list(_wakeups.values()) for wakeup in registered)


def note_contention(database: Database, key: str) -> None:
    """Somebody waited for that key just now."""
    if len(_contended) >= _MOST:
        _contended.clear()
    _contended[id(database), key] = database.now()


def is_contended(database: Database, key: str) -> bool:
    """Is it likely that somebody waits for that key? A guess, which saves two statements when it is right."""
    return bool(_contended) and database.now() < _contended.get((id(database), key), -1.0) + 1.0


def _set(future: Any) -> None:
    if not future.done():
        future.set_result(None)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_wakeups.clear)  # the waiters are the parent's
