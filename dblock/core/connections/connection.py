"""A connection of the lock's own, and a caller that waits for one.

A connection is being opened, then idle or lent by turns, then closed.
"""

from __future__ import annotations

import contextlib
import math
import os
import socket
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from dblock.core import clock, timing
from dblock.core.protocol.steps import Parameters, Rows
from dblock.core.statements.base import Statement
from dblock.core.wakeup.registry import Wakeup


class Waiter(Wakeup):
    """A caller that waits for a connection, in its thread or on its event loop.

    A lost notification costs it a poll interval; one that an interrupt has left in the line keeps nobody waiting.
    """

    __slots__ = ("critical", "error", "home", "polls_by", "since", "until")

    def __init__(self, until: float, home: object, *, critical: bool) -> None:
        """`home`: its event loop; `critical`: it renews or releases."""
        super().__init__()
        self.since, self.until, self.home, self.critical = clock.now(), until, home, critical
        self.error: BaseException | None = None
        """Why the connection could not be opened that it has asked for."""
        _ = self.attend()

    def attend(self) -> float:
        """Clear its notification; returns the seconds until it polls again, unless it cannot or its time is up.

        The longer it has waited, the more: the polls of a crowd would take the time of its work.
        """
        _ = self.consume()
        now, times = clock.now(), timing.DEFAULT
        interval = min(max(times.local_poll, now - self.since), times.attention)
        self.polls_by = min(now + 2 * interval, self.until)
        return interval


class Wire(socket.socket):
    """A duplicate of a connection's socket, which stays valid whatever the driver does with its own."""

    def __del__(self) -> None:
        try:  # noqa: SIM105 - contextlib may be gone when the interpreter ends
            self.close()
        except OSError:
            pass


@dataclass(slots=True, eq=False, weakref_slot=True)
class PooledConnection:
    """A DB-API connection that is lent to one statement at a time."""

    raw: Any = None
    prepared: Callable[[Statement, Parameters], Rows] | None = None
    """Runs statements in a faster way than the driver's cursor; None: by the cursor."""
    loop: Any = None
    """Its event loop, for asynchronous drivers."""
    location: object = None
    """The database that it was opened to, if its pool may change that (see `Store.location`)."""
    joined: bool = False
    """Whether the statement is part of a transaction of the caller."""
    commits: bool = False
    """Whether its statement has yet to be committed."""
    lent: Any = None
    """What to return to the engine's own pool."""
    descriptor: int = -1
    """Descriptor of its socket, if it has one."""
    wire: Wire | None = None
    """By which it is cut; None: it cannot be."""
    overdue: bool = False
    """Whether it was cut."""
    busy_timeout: int = 0
    """Milliseconds that it waits for another writer, on SQLite."""
    wal: bool = False
    """Whether its SQLite file has a write-ahead log."""
    direct: bool = False
    """Whether it leads to one session, which others can notify; False behind a pooler that may use another session for
    each transaction, and on a node of a Galera cluster, whose sessions are not known to the other nodes."""
    mariadb: bool | None = None
    """True on MariaDB, False on MySQL, as the server's own parser tells; None on other databases."""
    certified: bool = False
    """Whether the server is a node of a Galera cluster, or of a replication group of MySQL."""
    idle_since: float = -math.inf
    """The local time at which it was returned or set up, and the server had answered; or at which its opening began."""
    purpose: str = "locks"
    """Purpose of its session, part of the name that the server shows."""
    question: Callable[[], object] = bool
    """Probes the server with a trivial query, if there is a server."""
    round_trip: float = 0.0
    """Seconds that the server took to answer when the session was set up."""
    opening_for: Waiter | None = None
    """The waiter that has asked for it, while it is being opened."""
    generation: object = None
    """Its pool keeps it for as long as it has this generation."""
    in_use: set[int] = field(default_factory=set)
    """The connections in use for the purpose that it was lent for last, by id."""
    closed: bool = False
    """Whether it is closed, or the parent process's."""

    def cut(self) -> None:
        """End the call that waits for an answer on it. Its flow may notice late, so it counts as in use no more."""
        self.overdue = True
        self.in_use.discard(id(self))
        if self.wire is not None:
            with contextlib.suppress(OSError):  # it has ended, or the application has closed all descriptors
                self.wire.shutdown(socket.SHUT_RDWR)

    def disconnect_in_child(self) -> None:
        """In a forked child: end a call that waits for an answer, which the parent will get; the server sees nothing.

        So a child that was forked in a signal handler during a statement does not hang.
        """
        with contextlib.suppress(OSError):  # closed
            if self.wire is not None and os.path.sameopenfile(self.descriptor, self.wire.fileno()):
                ours, theirs = socket.socketpair()
                with ours, theirs:  # of a pair that is closed in the end
                    _ = os.dup2(ours.fileno(), self.descriptor, inheritable=False)

    def __del__(self) -> None:
        self.in_use.discard(id(self))
