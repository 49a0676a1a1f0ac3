"""A connection of the lock's own, and the stages of its life.

Rule: `MOVES` lists all transitions. A connection that is being opened or lent occupies a slot; an idle one does not.
"""

from __future__ import annotations

import contextlib
import math
import os
import socket
import threading
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any, Final

from dblock.core.protocol.steps import Execute, Rows

if TYPE_CHECKING:
    from dblock.core.connections.slots import Slots
    from dblock.core.wakeup.registry import Wakeup

FD_LOCK: Final = threading.RLock()
"""Held while a descriptor is used or closed, and during a fork."""


class Stage(Enum):
    """Stage of a connection."""

    OPENING = "is being opened for a caller, which waits for it"
    LATE = "is being opened, and its caller has stopped waiting"
    LENT = "is used by a statement, a probe or its closing"
    IDLE = "waits for its next use"
    CLOSED = "is closed, or is the parent process's"

    __hash__ = object.__hash__  # Enum's own is written in Python


OPENING, LATE, LENT, IDLE, CLOSED = Stage  # by its class, finding one takes 0.1 µs on Python 3.11

MOVES: Final = {
    OPENING: {LENT, LATE, CLOSED},
    LATE: {IDLE, CLOSED},
    LENT: {IDLE, CLOSED},
    IDLE: {LENT, CLOSED},
    CLOSED: set[Stage](),
}


@dataclass(slots=True, eq=False, weakref_slot=True)
class PooledConnection:
    """A DB-API connection that is lent to one statement at a time."""

    raw: Any = None
    prepared: Callable[[Execute], Rows] | None = None
    """Runs statements in a faster way than the driver's cursor; None: by the cursor."""
    loop: object = None
    """Its event loop, for asynchronous drivers."""
    epoch: int = 0
    """Number of times that its pool had been closed when it was opened."""
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
    certified: bool = False
    """Whether the server is a node of a Galera cluster, or of a replication group of MySQL."""
    """Whether its server is a node of a Galera cluster."""
    idle_since: float = 0.0
    opened: float = -math.inf
    """The local time at which its session had been set up: the server answered then."""
    purpose: str = "locks"
    """Purpose of its session, part of the name that the server shows."""
    question: Callable[[], object] | None = None
    """Probes the server with a trivial query; None where there is no server."""
    round_trip: float = 0.0
    """Seconds that the server took to answer when the session was set up."""
    stage: Stage = LENT
    slots: Slots | None = None
    """The slots of which it occupies one."""
    caller: Wakeup | None = None
    """Wakes the caller that it was opened for; None if that one has stopped waiting."""
    error: BaseException | None = None
    """The reason why it could not be opened."""
    expected_until: float = math.inf
    """The local time at which its slot becomes free though its opening has not ended."""

    def move(self, stage: Stage) -> None:
        """Change to another stage; callers hold the pool's lock."""
        if stage not in MOVES[self.stage]:
            raise RuntimeError(f"a connection moves from {self.stage.name} to {stage.name}: a defect of dblock")
        self.stage = stage

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
            _ = self.slots.lent.pop(id(self), None)
        with lock:  # by default values, which are still there when the interpreter ends
            if self.shutdown_fd >= 0:
                try:  # noqa: SIM105 - contextlib may be gone
                    close(self.shutdown_fd)
                except OSError:
                    pass
