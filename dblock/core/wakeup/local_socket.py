"""Notification between flows of one machine, without the database: a datagram to the socket of the waiting flow.

On PostgreSQL a notification wakes every listening session of the database, one after the other, before the receiver can
do much; MySQL and MariaDB need two more round trips, and SQLite has no notifications. So a releaser notifies a waiter
of its machine itself, at the socket at which that flow waits, without a thread in between. Abstract sockets (Linux,
unix(7)) reach as far as a network namespace. The first part of a channel names that: a process with another name, or
without such sockets, is on another machine.

    dblock_<machine>_<process>            where the database notifies a process (NOTIFY)
    dblock_<machine>_<process>.<number>   the socket of one flow there

Rule: any process can send a datagram, as it can a notification: unless that proves that the waiter was granted the key,
it only causes a poll. A waiter that gets too many closes its socket, and polls (`Wakeup`). A sender never waits for a
socket that has ten datagrams in its buffer.
"""

from __future__ import annotations

import itertools
import re
import secrets
import socket
from collections.abc import Callable
from typing import Final
from weakref import WeakSet

from dblock.core.machine import machine

CHANNEL: Final = re.compile(r"dblock_[0-9a-f]{8}_[0-9a-f]{16}(\.\d{1,18})?", re.ASCII)
"""The form of all channels. No other channel is ever notified: else a row in `lock_waiters` could choose any session,
and on MySQL a notification ends its query."""
_LONGEST: Final = 2048
"""Bytes; a key has 255 characters at most, ticket and fence 19 digits, a proof 64."""


class LocalSocket(socket.socket):
    """The socket at which a waiting flow is notified by processes of its machine."""

    def __init__(self, channel: str, on_message: Callable[[str], None]) -> None:
        super().__init__(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.channel, self.on_message = channel, on_message
        """Its name, and the receiver of its messages."""
        self.bind("\0" + channel)

    def receive(self, seconds: float) -> str | None:
        """The next datagram; None after so many seconds."""
        try:
            self.settimeout(seconds)
            return self.recv(_LONGEST).decode(errors="replace")
        except (TimeoutError, BlockingIOError):
            return None
        except OSError:  # the application has closed all descriptors, and this number may be in use again
            _ = self.detach()
            return None

    def poke(self) -> None:
        """End a wait at the socket; from any thread."""
        _ = _sent(self.channel, "")

    def close(self) -> None:
        """Close the socket."""
        try:  # noqa: SIM105 - contextlib may be gone at the end of the interpreter
            super().close()
        except (OSError, AttributeError):  # the application has closed all descriptors; or none was left to open it
            pass

    __del__ = close


class LocalSockets:
    """The sockets of one process, and the channel at which the database notifies it."""

    def __init__(self, on_message: Callable[[str], None]) -> None:
        self._on_message = on_message
        here = machine()
        self.neighbourhood = f"dblock_{here or secrets.token_hex(4)}_"
        """Prefix of the channels of all processes that can be notified from here."""
        self.channel = self.neighbourhood + secrets.token_hex(8)
        self._works = bool(here)
        if not here:
            self.neighbourhood = self.channel
        self._numbers = itertools.count()
        self._all: WeakSet[LocalSocket] = WeakSet()

    def open(self) -> LocalSocket | None:
        """A socket for a flow that is going to wait, which closes it; None if sockets do not work here."""
        if not self._works:
            return None
        try:
            opened = LocalSocket(f"{self.channel}.{next(self._numbers)}", self._on_message)
        except OSError:  # out of descriptors
            return None
        self._all.add(opened)
        return opened

    def notify(self, channel: str, text: str) -> bool:
        """Notify a flow of this machine; False if that did not work."""
        ours = self._works and channel.startswith(self.neighbourhood) and CHANNEL.fullmatch(channel)
        return bool(ours) and _sent(channel, text)

    def close(self) -> None:
        """Close all sockets in a forked child; the names stay the parent's."""
        self._works = False
        for each in self._all:
            each.close()


def _sent(channel: str, text: str) -> bool:
    """Send a datagram, without waiting for room; False if that did not work."""
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK) as sender:
            _ = sender.sendto(text.encode(), "\0" + channel)
    except OSError:
        return False
    return True
