"""How flows of one machine call each other past the database: a datagram to a socket of the flow that waits.

On PostgreSQL a notification wakes every session of the database that listens to anything, one after the other, before
the one that it is for can do much; MySQL and MariaDB need two round trips more, and SQLite calls nobody. So a releaser
calls a neighbour itself: the flow that waits, on the socket that it waits at, and no thread in between. Abstract
sockets (Linux, unix(7)) reach as far as a network namespace: the first part of a channel says which one, and whoever
reads another name there, or cannot have such a socket, is somewhere else.

    dblock_<machine>_<process>            where the database calls a process (NOTIFY)
    dblock_<machine>_<process>.<number>   the socket of one flow there

Rule: anybody can send a datagram, as a notification: unless it proves that the waiter was granted the key, it makes it
look. One that cannot be delivered at once, because ten are waiting there, is not waited for.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import secrets
import socket
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Final
from weakref import WeakSet

_LONGEST: Final = 2048
"""Bytes; a key has 255 characters at most, ticket and fence 19 digits, a proof 64."""
_WAITING: Final = 100
"""How many datagrams for whoever had a socket before are taken out of it at most; Linux keeps ten."""
KEPT: Final = 5
"""How many sockets that nobody waits at are kept for whoever does next."""


class LocalSocket:
    """Where one flow is called by its neighbours."""

    def __init__(self, channel: str, bound: socket.socket, sender: socket.socket, hear: Callable[[str], None]) -> None:
        self.channel, self.hear = channel, hear
        """Its name, and who is to be told what was said there."""
        self._socket, self._sender = bound, sender

    def fileno(self) -> int:
        """Its descriptor, for an event loop; -1 when it is closed."""
        return self._socket.fileno()

    def receive(self, seconds: float) -> str | None:
        """One datagram, as soon as there is one; None after so many seconds."""
        try:
            self._socket.settimeout(seconds)
            return self._socket.recv(_LONGEST).decode(errors="replace")
        except (TimeoutError, BlockingIOError):
            return None
        except OSError:  # somebody has closed every descriptor that there was, and this one may be another's by now
            _ = self._socket.detach()
            return None

    def poke(self) -> None:
        """End a wait there; from any thread."""
        with contextlib.suppress(OSError):
            _ = self._sender.sendto(b"", "\0" + self.channel)

    def close(self) -> None:
        """Nobody is called here any more."""
        try:  # noqa: SIM105 - contextlib may be gone at the end of the interpreter
            self._socket.close()
        except OSError:  # somebody has closed every descriptor that there was
            pass

    __del__ = close


class LocalSockets:
    """Those of one process, and what the database calls it by."""

    def __init__(self, hear: Callable[[str], None]) -> None:
        self._hear = hear
        machine = _machine()
        self.neighbourhood = f"dblock_{machine or secrets.token_hex(4)}_"
        """What the channels of all processes begin with that can be called from here."""
        self.channel = self.neighbourhood + secrets.token_hex(8)
        self._open = bool(machine)
        self._sender: socket.socket | None = None
        self._making = threading.Lock()
        if not machine:
            self.neighbourhood = self.channel
        self._numbers = itertools.count()
        self._idle: list[LocalSocket] = []
        self._all: WeakSet[LocalSocket] = WeakSet()

    def lend(self) -> LocalSocket | None:
        """One for a flow that is going to wait; None where there are none."""
        if not self._open:
            return None
        with contextlib.suppress(IndexError):  # none is left
            while True:
                lent = self._idle.pop()
                for _ in range(_WAITING):
                    if lent.receive(0.0) is None:
                        break
                if lent.fileno() >= 0:
                    return lent
        channel = f"{self.channel}.{next(self._numbers)}"
        try:
            lent = LocalSocket(channel, _bound(channel), self._sends(), self._hear)
        except OSError:  # out of descriptors
            return None
        self._all.add(lent)
        return lent

    def take_back(self, lent: LocalSocket | None) -> None:
        """Its flow waits no more."""
        if lent is not None:
            if len(self._idle) < KEPT:
                self._idle.append(lent)
            else:
                lent.close()

    def notify(self, channel: str, text: str) -> bool:
        """Call a flow of this machine; False if that did not work."""
        if not (self._open and channel.startswith(self.neighbourhood)):
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
        """In a forked child: the names stay the parent's."""
        self._open = False
        for each in self._all:
            each.close()
        if self._sender is not None:
            self._sender.close()


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


def _bound(name: str) -> socket.socket:
    box = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    try:
        box.bind("\0" + name)
    except BaseException:
        box.close()
        raise
    return box
