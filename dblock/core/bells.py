"""Bells: how one flow of this process wakes another that waits for a key.

A bell only says "look"; a flow that was rung for nothing asks the database and waits on. So nothing depends on a bell
but how soon a waiter looks.
"""

from __future__ import annotations

import os
import threading
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dblock.core.protocol import Database


class Bell:
    """Wakes one waiting flow, whichever kind it is; rung before the wait begins, it ends the wait at once."""

    __slots__ = ("_event", "_loop", "_wake")

    def __init__(self) -> None:
        self._event = threading.Event()
        self._loop: Any = None
        self._wake: Any = None

    def ring(self) -> None:
        """Wake the flow; from any thread."""
        self._event.set()
        loop, wake = self._loop, self._wake
        if loop is not None:
            try:
                loop.call_soon_threadsafe(_set, wake)
            except RuntimeError:  # the loop is closed, and the flow with it
                return

    def rest(self, seconds: float) -> None:
        """Wait in this thread until it is rung."""
        _ = self._event.wait(seconds)

    async def arest(self, seconds: float) -> None:
        """Wait in this task until it is rung."""
        import asyncio  # noqa: PLC0415 - only where it is in use

        loop = asyncio.get_running_loop()
        self._wake = loop.create_future()
        self._loop = loop
        if not self._event.is_set():
            try:
                async with asyncio.timeout(seconds):
                    await self._wake
            except TimeoutError:
                pass
        self._loop = None

    def deaf(self) -> bool:
        """Is the event loop of its flow closed, and nobody will ever answer?"""
        loop = self._loop
        return loop is not None and bool(loop.is_closed())

    def audible(self) -> bool:
        """Would its flow answer soon? Not while its event loop stands still."""
        loop = self._loop
        return loop is None or bool(loop.is_running())

    def answered(self) -> bool:
        """Was it rung since the last time this was asked?"""
        rung = self._event.is_set()
        self._event.clear()
        return rung


_bells: dict[tuple[str, int], list[Bell]] = {}
"""By key and ticket: of one flow, as a rule, since two databases seldom give out the same at the same time."""


def hang(key: str, ticket: int, bell: Bell) -> None:
    """Ring this bell for a waiter of a key from now on; at once, if that was asked for before it hung."""
    _bells.setdefault((key, ticket), []).append(bell)
    if _unheard.pop((key, ticket), False):
        bell.ring()


def take_down(key: str, ticket: int, bell: Bell) -> None:
    """Its flow waits with that ticket no more."""
    hung = _bells.get((key, ticket), [])
    if bell in hung:
        hung.remove(bell)
    if not hung:
        _ = _bells.pop((key, ticket), None)


def ring(key: str, ticket: int) -> bool:
    """Wake the waiter with that ticket; False if nobody of this process has hung such a bell yet."""
    hung = _bells.get((key, ticket))
    if hung:
        for bell in list(hung):
            bell.ring()
        return True
    if len(_unheard) >= 1000:
        _unheard.clear()
    _unheard[key, ticket] = True
    return False


def hear(message: str) -> None:
    """Ring whom a call from another process names; anybody may have sent it."""
    ticket, _, key = message.partition(" ")
    if ticket.isdecimal():
        _ = ring(key, int(ticket))


def crowded(database: Database, key: str) -> None:
    """Somebody waited for that key just now."""
    if len(_crowds) >= 1000:
        _crowds.clear()
    _crowds[id(database), key] = database.now()


def is_crowded(database: Database, key: str) -> bool:
    """Is it likely that somebody waits for that key? A guess, which saves two statements when it is right."""
    return bool(_crowds) and database.now() < _crowds.get((id(database), key), -1.0) + 1.0


_crowds: dict[tuple[int, str], float] = {}
_unheard: dict[tuple[str, int], bool] = {}
"""Waiters that were called before their bell hung."""


def ring_all() -> None:
    """Wake every waiter of this process."""
    for hung in list(_bells.values()):
        for bell in list(hung):
            bell.ring()


def anybody() -> bool:
    """Does anybody wait in this process?"""
    return any(not bell.deaf() for hung in list(_bells.values()) for bell in hung)


def _set(wake: Any) -> None:
    if not wake.done():
        wake.set_result(None)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_bells.clear)  # the waiters are the parent's
