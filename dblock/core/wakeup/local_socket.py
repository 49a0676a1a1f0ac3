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

import contextlib
import itertools
import re
import secrets
import socket
import threading
from collections.abc import Callable
from typing import Final
from weakref import WeakSet

from dblock.core.machine import machine

CHANNEL: Final = re.compile(r"dblock_[0-9a-f]{8}_[0-9a-f]{16}(\.\d{1,18})?", re.ASCII)
"""The form of all channels. No other channel is ever notified: else a row in `lock_waiters` could choose any session,
and on MySQL a notification ends its query."""
_LONGEST: Final = 2048
"""Bytes; a key has 255 characters at most, ticket and fence 19 digits, a proof 64."""


class LocalSocket:
    """The socket at which a waiting flow is notified by processes of its machine."""

    def __init__(
        self, channel: str, bound: socket.socket, sender: socket.socket, on_message: Callable[[str], None]
    ) -> None:
        self.channel, self.on_message = channel, on_message
        """Its name, and the receiver of its messages."""
        self._socket, self._sender = bound, sender

    def fileno(self) -> int:
        """Its descriptor, for an event loop; -1 when it is closed."""
        return self._socket.fileno()

    def receive(self, seconds: float) -> str | None:
        """The next datagram; None after so many seconds."""
        try:
            self._socket.settimeout(seconds)
            return self._socket.recv(_LONGEST).decode(errors="replace")
        except (TimeoutError, BlockingIOError):
            return None
        except OSError:  # the application has closed all descriptors, and this number may be in use again
            _ = self._socket.detach()
            return None

    def poke(self) -> None:
        """End a wait at the socket; from any thread."""
        with contextlib.suppress(OSError):
            _ = self._sender.sendto(b"", "\0" + self.channel)

    def close(self) -> None:
        """Close the socket."""
        try:  # noqa: SIM105 - contextlib may be gone at the end of the interpreter
            self._socket.close()
        except OSError:  # the application has closed all descriptors
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
        self._sender: socket.socket | None = None
        self._making = threading.Lock()
        if not here:
            self.neighbourhood = self.channel
        self._numbers = itertools.count()
        self._all: WeakSet[LocalSocket] = WeakSet()

    def open(self) -> LocalSocket | None:
        """A socket for a flow that is going to wait, which closes it; None if sockets do not work here."""
        if not self._works:
            return None
        channel = f"{self.channel}.{next(self._numbers)}"
        try:
            opened = LocalSocket(channel, _bound(channel), self._sends(), self._on_message)
        except OSError:  # out of descriptors
            return None
        self._all.add(opened)
        return opened

    def notify(self, channel: str, text: str) -> bool:
        """Notify a flow of this machine; False if that did not work."""
        if not (self._works and channel.startswith(self.neighbourhood) and CHANNEL.fullmatch(channel)):
            return False
        try:
            _ = self._sends().sendto(text.encode(), "\0" + channel)
        except OSError:
            return False
        return True

    def _sends(self) -> socket.socket:
        if self._sender is None:
            with self._making:
                if self._sender is None:
                    self._sender = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK)
        return self._sender

    def close(self) -> None:
        """Close all sockets in a forked child; the names stay the parent's."""
        self._works = False
        for each in self._all:
            each.close()
        if self._sender is not None:
            self._sender.close()


def _bound(name: str) -> socket.socket:
    box = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    try:
        box.bind("\0" + name)
    except BaseException:
        box.close()
        raise
    return box
