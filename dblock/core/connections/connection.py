"""A connection of the lock's own.

It is being opened, then idle or lent by turns, then closed.
"""

from __future__ import annotations

import contextlib
import math
import os
import socket
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from dblock.core.connections.slots import Slots, SlotWaiter
from dblock.core.protocol.steps import Execute, Rows

FD_LOCK: Final = threading.RLock()
"""Held while a descriptor is used or closed, and during a fork."""


@dataclass(slots=True, eq=False, weakref_slot=True)
class PooledConnection:
    """A DB-API connection that is lent to one statement at a time."""

    raw: Any = None
    prepared: Callable[[Execute], Rows] | None = None
    """Runs statements in a faster way than the driver's cursor; None: by the cursor."""
    loop: object = None
    """Its event loop, for asynchronous drivers."""
    location: object = None
    """The database that it was opened to, if its pool may change that (see `Store.location`)."""
    joined: bool = False
    """Whether the statement is part of a transaction of the caller."""
    lent: Any = None
    """What to return to the engine's own pool."""
    descriptor: int = -1
    """Descriptor of its socket, if it has one."""
    shutdown_fd: int = -1
    """A duplicate of that descriptor, which stays valid whatever the driver does with its own."""
    overdue: bool = False
    """Whether it was cut."""
    busy_timeout: int = 0
    """Milliseconds that it waits for another writer, on SQLite."""
    wal: bool = False
    """Whether its SQLite file has a write-ahead log."""
    direct: bool = False
    """Whether it leads to one session; False behind a pooler that may use another session for each transaction."""
    mariadb: bool | None = None
    """True on MariaDB, False on MySQL, as the server's own parser tells; None on other databases."""
    galera: bool = False
    """Whether its server is a node of a Galera cluster."""
    certified: bool = False
    """Whether the server is a node of a Galera cluster, or of a replication group of MySQL."""
    idle_since: float = 0.0
    opened: float = -math.inf
    """The local time at which its session had been set up: the server answered then."""
    purpose: str = "locks"
    """Purpose of its session, part of the name that the server shows."""
    question: Callable[[], object] | None = None
    """Probes the server with a trivial query; None where there is no server."""
    round_trip: float = 0.0
    """Seconds that the server took to answer when the session was set up."""
    slots: Slots | None = None
    """The slots of which it occupies one, or for which it is being opened."""
    opening_for: SlotWaiter | None = None
    """The waiter that has asked for it, while it is being opened."""
    kept: bool = True
    """Whether its pool, which has perhaps been closed since, keeps it after its use."""
    closed: bool = False
    """Whether it is closed, or the parent process's."""

    def occupy(self, slots: Slots) -> PooledConnection:
        """Be lent, in one of the slots; returns itself. Callers hold the pool's lock, as for `vacate`."""
        self.slots = slots
        slots.lent.add(id(self))
        return self

    def vacate(self) -> None:
        """Free its slot, if it has one."""
        if self.slots is not None:
            self.slots.lent.discard(id(self))
            self.slots = None

    def cut(self) -> None:
        """End the call that waits for an answer on it."""
        self.overdue = True
        with FD_LOCK, contextlib.suppress(OSError):  # the application may have closed all descriptors
            if self.shutdown_fd >= 0:
                handle = socket.socket(fileno=self.shutdown_fd)
                try:
                    handle.shutdown(socket.SHUT_RDWR)
                finally:
                    _ = handle.detach()

    def disconnect_in_child(self) -> None:
        """In a forked child: end a call that waits for an answer, which the parent will get; the server sees nothing.

        So a child that was forked in a signal handler during a statement does not hang.
        """
        with contextlib.suppress(OSError):  # closed
            if self.shutdown_fd >= 0 and os.path.sameopenfile(self.descriptor, self.shutdown_fd):
                ours, theirs = socket.socketpair()
                theirs.close()
                _ = os.dup2(ours.fileno(), self.descriptor, inheritable=False)
                ours.close()

    def __del__(self, lock: Any = FD_LOCK, close: Callable[[int], None] = os.close) -> None:
        if self.slots is not None:
            self.slots.lent.discard(id(self))
        with lock:  # by default values, which are still there when the interpreter ends
            if self.shutdown_fd >= 0:
                try:  # noqa: SIM105 - contextlib may be gone
                    close(self.shutdown_fd)
                except OSError:
                    pass
