"""How processes of one machine call each other past the database: a datagram to a socket that is named as the channel.

On PostgreSQL a notification wakes every session of the database that listens to anything, one after the other, before
the one that it is for can do much; and the other databases have none. So a releaser rings a neighbour itself. Abstract
sockets (Linux, unix(7)) reach as far as a network namespace: the first part of a channel says which one, and whoever
reads another name there, or cannot have such a socket, is somewhere else.

Rule: anybody can send a datagram, as a notification: unless it proves that the waiter was granted the key, it makes it
look. One that cannot be delivered at once, because ten are waiting there, is not waited for.
"""

from __future__ import annotations

import contextlib
import hashlib
import secrets
import selectors
import socket
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from dblock.core.wakeup.registry import Message, Wakeups

_LONGEST: Final = 2048
"""Bytes; a key has 255 characters at most, ticket and fence 19 digits, a proof 64."""


class LocalSocket:
    """Where this process is called: by neighbours in a socket, by the database under the same name."""

    def __init__(self, wakeups: Wakeups) -> None:
        self._wakeups = wakeups
        self.socket: socket.socket | None = None
        machine = _machine() or secrets.token_hex(4)
        self.neighbourhood = f"dblock_{machine}_"
        self.channel = self.neighbourhood + secrets.token_hex(8)
        with contextlib.suppress(OSError, AttributeError):
            self.socket = _bound(self.channel)
        if self.socket is None:
            self.neighbourhood = self.channel

    def ring_heard(self) -> None:
        """Wake whom neighbours call."""
        while self.socket is not None:
            try:
                self._wakeups.on_message(self.socket.recv(_LONGEST).decode())
            except UnicodeError:  # not one of ours
                continue
            except OSError:  # that was all
                return

    def notify(self, channel: str, message: Message) -> bool:
        """Ring the waiter of a neighbour; False if that did not work."""
        if self.socket is None or not channel.startswith(self.neighbourhood):
            return False
        try:
            _ = self.socket.sendto(message.text().encode(), "\0" + channel)
        except OSError:
            return False
        return True

    def subscribe(self) -> Subscription | None:
        """Listen to neighbours, in a thread; None where there are none."""
        return None if self.socket is None else Subscription(self)

    def close(self) -> None:
        """In a forked child: the name stays the parent's."""
        if self.socket is not None:
            self.socket.close()


class Subscription:
    """Hears neighbours only."""

    def __init__(self, own: LocalSocket) -> None:
        self._own = own
        self._selector = selectors.DefaultSelector()
        _ = self._selector.register(own.socket, selectors.EVENT_READ)  # type: ignore[arg-type]

    def listen(self, seconds: float) -> Sequence[str]:
        """Nothing, after so many seconds or when a neighbour calls."""
        if self._selector.select(seconds):
            self._own.ring_heard()
        return ()

    def close(self) -> None:
        """Listen no more."""
        self._selector.close()


def _machine() -> str:
    """The kernel, since when it runs, and the network namespace; empty where abstract sockets do not exist."""
    if sys.platform != "linux":
        return ""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text()
        space = Path("/proc/self/ns/net").stat().st_ino
    except OSError:
        return ""
    return hashlib.blake2s(f"{boot}{space}".encode(), digest_size=4).hexdigest()


def _bound(name: str) -> socket.socket | None:
    if sys.platform != "linux":
        return None
    box = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    try:
        box.setblocking(False)
        box.bind("\0" + name)
    except BaseException:
        box.close()
        raise
    return box
