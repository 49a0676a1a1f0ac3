"""The pool of connections that the lock's statements run on.

They are the lock's own, never the caller's nor from the caller's pool: a caller that has used up its pool must still be
able to release a lock, and settings of the caller's sessions (search_path, role, time zone, an open transaction) must
not send two statements of a lock to different tables. Each is in autocommit mode for its whole life, so that nothing
has to be reset between two uses. Idle connections form a stack, the last used on top.

At most `most` connections are in use at a time for taking and waiting, and as many (at least two) for renewing and
releasing. A caller that finds none waits in a line until its time is up. Those that renew or release come first and so
never wait behind takes; else they are served as they came. What is free is reserved for the first waiters: otherwise a
thread that returns a connection and wants one again would be faster than a notified waiter. A waiter that has missed a
poll (its event loop is blocked, its call was interrupted) is passed over.

A connection that is returned serves the line. So does a new one: it is opened in the background, and idle when it is
open, whether or not the waiter that has asked for it still waits. No more are expected than waiters can have, and one
for each waiter. What is not open after the time of a try is not expected any more; while there are `HANGING` of these,
no further opening begins: a server that accepts connections without answering does not get more and more of them. The
faces have the driver end each after `Timing.surely_answered`.

Rule: the faces define what a connection is, and where its driver waits (in a thread or on an event loop).
"""

from __future__ import annotations

import contextlib
import math
import threading
import weakref
from bisect import insort
from collections.abc import Callable
from contextvars import ContextVar
from functools import partial
from types import NoneType
from typing import Any, Final

from dblock.core import clock, timing
from dblock.core.connections.connection import PooledConnection, Waiter
from dblock.core.connections.deadlines import Deadlines
from dblock.core.connections.tracebacks import leave_out_driver
from dblock.core.errors import PoolExhausted, StoreUnreachable
from dblock.core.wakeup.registry import Wakeup
from dblock.core.worker import start

PROBE_SHARE: Final = 0.1
"""The probe's share of the time of the caller's statement, if that is more than `Timing.question`."""
KEPT: Final = 5
"""Most idle connections of a pool, as by default in SQLAlchemy's pools."""
HANGING: Final = 5
"""While so many openings are not expected any more, no take begins another one; while twice as many, nobody does."""

background: Final = ContextVar("dblock background", default=False)
"""Whether the running thread or task does work that no caller waits for."""


class AutocommitPool:
    """The lock's connections to one database, a server or a file."""

    def __init__(
        self, most: float, keep: int = KEPT, *, local: bool = False, loop: Callable[[], object] = NoneType
    ) -> None:
        """`local`: the database is a file, for which nothing has to be done in the background.

        `loop` returns the running event loop, for asynchronous drivers; by default None, as the class of None does.
        """
        self._most = most, max(2, most)
        """For taking and waiting, and for renewing and releasing: indexed by `critical`."""
        self._in_use = set[int](), set[int]()
        """The connections in use, by id; one that an interrupted caller has lost, until it is collected."""
        self._keep, self._local, self.loop = keep, local, loop
        self._idle: list[PooledConnection] = []
        self._line: list[Waiter] = []
        self._all = weakref.WeakValueDictionary[int, PooledConnection]()
        """All connections by id, also those that interrupted callers have lost."""
        self._generation: object = object()
        """What is opened is kept while this stays the same; None from a closing by the application to its next use."""
        self.deadlines = Deadlines()  # the process's, once it knows this pool
        self._mutex = threading.RLock()  # a signal handler may send a statement

    # -- what a face provides

    def open(self, connection: PooledConnection) -> None:
        """Open it: set `raw`, in autocommit mode, and `prepared` and `wire` where possible."""
        raise NotImplementedError

    def close(self, connection: PooledConnection, *, broken: bool) -> None:
        """Close it; without waiting for the server if it is broken, or of an event loop that does not run here.

        It may not have been opened, or not in full. Errors are ignored.
        """
        raise NotImplementedError

    def in_background(self, work: Callable[[PooledConnection], None], connection: PooledConnection) -> None:
        """Do the work, which raises nothing, with that connection, which is in no other hands."""
        if self._local:
            return work(connection)
        try:
            _ = start(partial(work, connection), "connect")
        except RuntimeError:  # out of threads, or the interpreter is ending
            if connection.raw is not None:
                connection.cut()
            work(connection)

    def wait(self, waiter: Wakeup, seconds: float) -> None:
        """Wait at most so many seconds for a notification."""
        waiter.wait(seconds)

    # -- for the executors

    def take(self, until: float, *, critical: bool) -> PooledConnection:
        """An idle connection of this event loop, or a new one; LockStoreError if there is none until that local time.

        `critical`: for renewing or releasing.
        """
        if self._generation is None and not background.get():
            self._generation = object()
        loop, found = self.loop(), None
        with self._mutex:
            overtakes = not self._line or self._line[0].critical < critical
            if overtakes and len(self._in_use[critical]) < self._most[critical]:
                found = self._lend(loop, self._in_use[critical])
        while (
            found is None
            or found.closed  # the parent's, if a fork came between
            or (clock.now() - found.idle_since >= timing.DEFAULT.trusted_idle and not self._is_alive(found, until))
        ):
            found = self._take_in_turn(Waiter(until, loop, critical=critical))
        return found

    def ask(self, connection: PooledConnection, until: float) -> None:
        """Probe the server, if there is one; raises unless it answers by that local time."""
        _ = self.deadlines.bound(connection, connection.question, until)

    def give(self, connection: PooledConnection) -> None:
        """Keep it for the next statement."""
        connection.idle_since = clock.now()
        with self._mutex:
            if connection.closed:  # lent before a fork: the parent's
                return
            connection.in_use.discard(id(connection))
            sound = connection.generation is self._generation and not connection.overdue
            room = len(self._idle) < self._keep and self._generation is not None
            if keep := sound and (room or self._wants(connection.loop)):
                self._idle.append(connection)
            if self._line:
                self._notify()
        if not keep:
            self._close(connection, broken=connection.overdue)

    def drop(self, connection: PooledConnection, *, others: bool) -> None:
        """Close a connection in an unknown state, and with `others` the idle ones: they broke with it."""
        self._close(connection, broken=True)
        if others:
            self._close_idle(broken=True)

    def prune(self) -> bool:
        """Close what has been idle for too long, except the last; whether others are left that will have been."""
        with self._mutex:
            while self._idle[1:] and self._idle[0].idle_since < clock.now() - timing.DEFAULT.idle_session:
                self.in_background(self._close, self._idle.pop(0))
            return len(self._idle) > 1

    def close_all(self) -> None:
        """Close all idle connections, and the others when they are returned.

        Background work keeps none either, until the application uses the pool again.
        """
        self._generation = None
        self._close_idle()

    def leave_to_parent(self) -> Any:
        """Start empty in a forked child; returns the parent's connections, to be kept so that none is finalized."""
        parents = self._connections()
        for connection in parents:
            connection.disconnect_in_child()
            connection.closed = True
        for each in (*self._in_use, self._line):
            each.clear()
        self._idle, self._all, self._mutex = [], weakref.WeakValueDictionary(), threading.RLock()
        return parents

    # -- helpers

    def _take_in_turn(self, waiter: Waiter) -> PooledConnection:
        """Wait for a connection; LockStoreError if there is none in time for a statement."""
        try:
            with self._mutex:
                while self._line and self._line[0].until <= clock.now():  # an interrupt has left it there
                    del self._line[0]
                insort(self._line, waiter, key=lambda each: not each.critical)
            while True:
                with self._mutex:
                    interval = waiter.attend()
                    connection = self._claim(waiter)
                left = waiter.until - timing.DEFAULT.min_retry_time - clock.now()
                if connection is None:
                    if left <= 0 or waiter.error is not None:
                        break
                    self.wait(waiter, min(left, interval))
                elif connection.opening_for is not None:
                    self.in_background(self._open_for_line, connection)
                else:
                    return connection
        finally:
            with self._mutex:
                if waiter in self._line:
                    self._line.remove(waiter)
                self._notify()
        error, waiter.error = waiter.error, None
        if isinstance(error, Exception):  # else the opening was cancelled, not its caller
            raise error
        most = self._most[waiter.critical]
        if error is not None or len(self._in_use[waiter.critical]) < most:
            raise StoreUnreachable("no connection could be opened in time", late=math.inf)
        raise PoolExhausted(f"all {most:g} connections of the lock are in use")

    def _next(self) -> list[Waiter]:
        """The waiters that what is free is reserved for; callers hold the mutex."""
        now, first = clock.now(), list[Waiter]()
        free = [most - len(in_use) for most, in_use in zip(self._most, self._in_use, strict=True)]
        for waiter in self._line:
            if free[waiter.critical] > 0:
                if now < waiter.polls_by:
                    first.append(waiter)
                    free[waiter.critical] -= 1
            elif not waiter.critical:  # nor are those behind it
                break
        return first

    def _claim(self, waiter: Waiter) -> PooledConnection | None:
        """An idle connection, or one to be opened; None if the caller has to wait. Callers hold the mutex."""
        for each in (known := self._connections()):
            if each.loop is not None and each.loop.is_closed():
                self._close(each)
        first, loop = self._next(), waiter.home
        if waiter not in first:
            return None
        if (idle := self._lend(loop, self._in_use[waiter.critical])) is not None:
            return idle
        now, openings = clock.now(), [each for each in known if each.loop is loop and each.opening_for is not None]
        hanging = sum(each.idle_since <= now - timing.DEFAULT.single_try for each in openings)
        if (
            waiter.error is not None
            or any(each.opening_for is waiter for each in openings)
            or len(openings) - hanging >= sum(each.home is loop for each in first)
            or hanging >= HANGING * (1 + waiter.critical)
        ):
            return None
        connection = PooledConnection(loop=loop, opening_for=waiter, generation=self._generation, idle_since=now)
        self._all[id(connection)] = connection
        return connection

    def _lend(self, loop: object, in_use: set[int]) -> PooledConnection | None:
        """The connection of that event loop that was used last, now in use; None if none is idle."""
        for each in reversed(self._idle):
            if each.loop is loop:
                self._idle.remove(each)
                each.in_use = in_use
                in_use.add(id(each))
                return each
        return None

    def _open_for_line(self, connection: PooledConnection) -> None:
        """Open it, for the waiter that has asked for it or the next one."""
        waiter = connection.opening_for
        try:
            self.open(connection)
        except BaseException as error:  # noqa: BLE001 - raised for the waiter
            with self._mutex:
                if waiter in self._line:
                    waiter.error = error
                    waiter.notify()
                else:  # nobody else does so
                    leave_out_driver(error)
            self._close(connection, broken=True)
        else:
            connection.opening_for = None
            self.give(connection)

    def _is_alive(self, connection: PooledConnection, until: float) -> bool:
        """Whether a probe is answered in a small part of the caller's time, if there is a server.

        A NAT, a load balancer or a firewall drops an idle connection silently. Without an answer all idle ones are
        closed with it, as the network has probably dropped them too. The part is long enough for the round trip that
        was measured when the session was set up.
        """
        now = clock.now()
        answer = max(timing.DEFAULT.question, 2 * connection.round_trip, (until - now) * PROBE_SHARE)
        try:
            self.ask(connection, min(now + answer, until))
        except BaseException as error:
            self.drop(connection, others=isinstance(error, Exception))  # an answer may yet come
            if not isinstance(error, Exception):  # interrupted
                raise
            return False
        return True

    def _connections(self) -> list[PooledConnection]:
        """All that are not closed; the references in one step, as a signal handler may add one."""
        return [each for reference in self._all.valuerefs() if (each := reference()) is not None and not each.closed]

    def _wants(self, loop: object) -> bool:
        """Whether more callers of that event loop wait than connections are idle for; callers hold the mutex."""
        return sum(each.home is loop for each in self._line) > sum(each.loop is loop for each in self._idle)

    def _notify(self) -> None:
        """Wake the waiters that may have a connection; callers hold the mutex."""
        for waiter in self._next():
            if not waiter.notified():
                waiter.notify()

    def _close_idle(self, *, broken: bool = False) -> None:
        with self._mutex:
            idle, self._idle = self._idle, []
        for each in idle:
            self._close(each, broken=broken)

    def _close(self, connection: PooledConnection, *, broken: bool = False) -> None:
        """Close it, once."""
        with self._mutex:
            if connection.closed:
                return
            connection.closed = True
            connection.in_use.discard(id(connection))
            if connection in self._idle:  # of an event loop that is gone
                self._idle.remove(connection)
            self._notify()
        if broken:
            connection.cut()  # so that the driver's closing never waits for the server
        with contextlib.suppress(Exception):
            self.close(connection, broken=broken)
