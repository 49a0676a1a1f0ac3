"""The pool of connections that the lock's statements run on.

They are the lock's own, never the caller's nor from the caller's pool: a caller that has used up its pool must still be
able to release a lock, and settings of the caller's sessions (search_path, role, time zone, an open transaction) must
not send two statements of a lock to different tables. Each is in autocommit mode for its whole life, so that nothing
has to be reset between two uses. Idle connections form a stack, the last used on top.

At most `most` connections are in use at a time for taking and waiting, and as many (at least two) for renewing and
releasing, so that renewals and releases never queue behind takes. When all are in use, callers queue. Statements that
continue an operation, and renewals, on which all leases depend, go before statements that begin one.

A caller that finds no idle connection waits in the line for one, until its time is up. A connection that is returned
serves it, and so does a new one: it is opened in the background, and idle when it is open, whether or not the waiter
that has asked for it still waits. For each purpose and event loop no more are expected than waiters can have, and one
for each waiter. What is not open after the time of a try is not expected any more; while there are `HANGING` of these,
no further opening begins: a server that accepts connections without answering does not get more and more of them. The
faces have the driver end each after `Timing.surely_answered`.

A NAT, a load balancer or a firewall drops an idle connection silently. So a connection that has been idle for
`trusted_idle` seconds is probed before it is lent. If no answer comes within a small part of the caller's time, it is
closed with all that have been idle for longer, as the network has probably dropped them too. Frequent use needs no
probes.

The watchdog closes connections that have been idle for `idle_session` seconds, except one of each pool.

After a fork the child starts with an empty stack and leaves its parent's connections alone: closing one would end the
parent's session. Connections of an event loop that is gone are dropped by the next waiter.

Rule: the faces define what a connection is, and where its driver waits (in a thread or on an event loop).
"""

from __future__ import annotations

import contextlib
import math
import threading
import weakref
from collections.abc import Callable
from contextvars import ContextVar
from functools import partial
from typing import Any, Final

from dblock.core import clock, timing
from dblock.core.connections.connection import PooledConnection
from dblock.core.connections.slots import Slots, SlotWaiter
from dblock.core.connections.tracebacks import leave_out_driver
from dblock.core.errors import PoolExhausted, StoreUnreachable
from dblock.core.wakeup.registry import Wakeup
from dblock.core.worker import start

PROBE_SHARE: Final = 0.1
"""The probe's share of the time of the caller's statement, if that is more than `Timing.question`."""
KEPT: Final = 5
"""Most idle connections of a pool, as by default in SQLAlchemy's pools."""
HANGING: Final = 5
"""While so many openings go on that are not expected any more, no further one begins."""
RESTING: Final = 1
"""Idle connections that a pool keeps for ever."""

background: Final = ContextVar("dblock background", default=False)
"""Whether the running thread or task does work that no caller waits for."""


class AutocommitPool:
    """The lock's connections to one database, a server or a file."""

    def __init__(self, most: float, keep: int = KEPT, *, local: bool = False) -> None:
        self._slots = Slots(most), Slots(max(2, most))
        """For taking and waiting, and for renewing and releasing: indexed by `critical`."""
        self._most = self._slots[0].most + self._slots[1].most
        self._keep = keep
        self._local = local
        """Whether the database is a file, for which nothing has to be done in the background."""
        self._idle: list[PooledConnection] = []
        self._all = weakref.WeakValueDictionary[int, PooledConnection]()
        """All connections by id, also those that interrupted callers have lost."""
        self._closed = False
        """Whether the application has closed the pool, and has not used it since."""
        self.prune_by: Callable[[float], None] = lambda _: None
        """Schedules a pruning of this pool at that local time at the latest."""
        self._mutex = threading.RLock()  # a signal handler may send a statement

    # -- what a face provides

    def open(self, connection: PooledConnection) -> None:
        """Open it: set `raw`, in autocommit mode, and `prepared` and `shutdown_fd` where possible."""
        raise NotImplementedError

    def close(self, connection: PooledConnection, *, broken: bool) -> None:
        """Close it; without waiting for the server if it is broken, or of an event loop that does not run here."""
        raise NotImplementedError

    def ask(self, connection: PooledConnection, until: float) -> None:
        """Probe it; raises unless the server answers by that local time."""
        raise NotImplementedError

    def is_over(self, loop: Any) -> bool:
        """Whether that event loop will never run again."""
        return loop is not None and bool(loop.is_closed())

    def loop(self) -> object:
        """The running event loop, for asynchronous drivers."""
        return None

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

    def take(self, until: float, *, critical: bool, priority: bool = False) -> PooledConnection:
        """An idle connection of this event loop, or a new one; LockStoreError if there is none until that local time.

        `critical`: for renewing or releasing; `priority`: before waiting callers that are not.
        """
        if self._closed and not background.get():
            self._closed = False
        loop, slots, found = self.loop(), self._slots[critical], None
        with self._mutex:
            idle = self._idle
            if idle and idle[-1].loop is loop and not slots.line and len(slots.lent) < slots.most:
                found = idle.pop().occupy(slots)
        if found is None:
            found = self._take_in_turn(slots, SlotWaiter(until, loop, rank=priority))
        while found.closed or not self._is_alive(found, until):  # the parent's, if a fork came between
            found = self._take_in_turn(slots, SlotWaiter(until, loop, rank=True))
        return found

    def open_apart(self) -> PooledConnection:
        """A connection to listen on, without a slot, which is never returned; for a thread or task of its own."""
        listener = PooledConnection(loop=self.loop(), purpose="listener")
        self.open(listener)
        return listener

    def give(self, connection: PooledConnection) -> None:
        """Keep it for the next statement."""
        connection.idle_since = now = clock.now()
        takes, keeps = self._slots
        with self._mutex:
            if connection.closed:  # lent before a fork: the parent's
                return
            connection.vacate()
            idle, loop, waiting = self._idle, connection.loop, takes.line or keeps.line
            lost = connection.overdue or not connection.kept or (loop is not None and self.is_over(loop))
            room = len(idle) < self._keep and not self._closed
            keep = not lost and (room or (bool(waiting) and self._wants(loop)))
            if keep:
                idle.append(connection)
            if waiting:
                self._notify()
        if not keep:
            self._close(connection)
        elif len(idle) > RESTING:
            self.prune_by(now + timing.DEFAULT.idle_session)

    give_after_error = give
    """A statement that was refused in autocommit mode leaves nothing behind."""

    def drop(self, connection: PooledConnection, *, others: bool) -> None:
        """Close a connection in an unknown state, and with `others` the idle ones: they broke with it."""
        self._close(connection, broken=True)
        if others:
            self._close_idle(math.inf, broken=True)

    def prune(self) -> float:
        """Close what has been idle for too long, except the last; returns the local time at which to prune again."""
        lasts = timing.DEFAULT.idle_session
        for each in self._pop_idle(clock.now() - lasts, leave=RESTING):
            self.in_background(self._close, each)
        with self._mutex:
            return self._idle[0].idle_since + lasts if len(self._idle) > RESTING else math.inf

    def close_all(self) -> None:
        """Close all idle connections, and the others when they are returned.

        Background work keeps none either, until the application uses the pool again.
        """
        self._closed = True
        with self._mutex:
            for each in self._connections():
                each.kept = False
        self._close_idle(math.inf)

    def leave_to_parent(self) -> Any:
        """Start empty in a forked child; returns the parent's connections, to be kept so that none is finalized."""
        parents = self._connections()
        for connection in parents:
            connection.disconnect_in_child()
            connection.closed, connection.slots = True, None
        for slots in self._slots:
            for waiter in slots.line:  # of the parent's threads; the one that survives gives up
                waiter.until = -math.inf
            slots.lent.clear()
            slots.line.clear()
        self._idle, self._all, self._mutex = [], weakref.WeakValueDictionary(), threading.RLock()
        return parents

    # -- helpers

    def _take_in_turn(self, slots: Slots, waiter: SlotWaiter) -> PooledConnection:
        """Wait for a connection with a slot; LockStoreError if there is none in time for a statement."""
        try:
            with self._mutex:
                slots.join(waiter)
            while True:
                with self._mutex:
                    interval = waiter.attend()
                    connection = self._claim(slots, waiter)
                    full = len(slots.lent) >= slots.most
                left = waiter.until - timing.DEFAULT.min_retry_time - clock.now()
                if connection is None:
                    if left <= 0 or waiter.error is not None:
                        break
                    self.wait(waiter, min(left, interval))
                elif connection.opening_for:
                    self.in_background(self._open_for_line, connection)
                else:
                    return connection
        finally:
            with self._mutex:
                slots.leave(waiter)
                self._notify()
        error, waiter.error = waiter.error, None
        if isinstance(error, Exception):  # else the opening was cancelled, not its caller
            raise error
        if error is not None or not full:
            raise StoreUnreachable("no connection could be opened in time").because_late()
        raise PoolExhausted(f"all {slots.most:g} connections of the lock are in use")

    def _claim(self, slots: Slots, waiter: SlotWaiter) -> PooledConnection | None:
        """An idle connection with a slot, or one to be opened; None if the caller has to wait. Callers hold the mutex.

        What was cut frees its slot, as a blocked event loop may not notice that.
        """
        for each in (known := self._connections()):
            if self.is_over(each.loop):
                self._close(each)
            elif each.overdue:
                each.vacate()
        first, loop = slots.first(), waiter.home
        if waiter not in first:
            return None
        for each in reversed(self._idle):
            if each.loop is loop:
                self._idle.remove(each)
                return each.occupy(slots)
        ours = [each for each in known if each.loop is loop]
        late = clock.now() - timing.DEFAULT.single_try
        hanging = [each for each in ours if each.opening_for and each.opening_for.since <= late]
        expected = sum(bool(each.opening_for) and each.slots is slots and each not in hanging for each in ours)
        enough = expected >= sum(each.home is loop for each in first) or len(ours) - len(hanging) >= self._most
        if waiter.error is not None or enough or any(each.opening_for is waiter for each in ours):
            return None
        if sum(each.slots is slots for each in hanging) >= HANGING:
            return None
        connection = PooledConnection(loop=loop, slots=slots, opening_for=waiter)
        self._all[id(connection)] = connection
        return connection

    def _open_for_line(self, connection: PooledConnection) -> None:
        """Open it, for the waiter that has asked for it or the next one."""
        waiter = connection.opening_for
        try:
            self.open(connection)
        except BaseException as error:  # noqa: BLE001 - raised for the waiter
            connection.raw = None
            with self._mutex:
                if waiter is not None and any(waiter in slots.line for slots in self._slots):
                    waiter.error = error
                    waiter.notify()
                else:  # nobody else does so
                    leave_out_driver(error)
            self._close(connection)
        else:
            connection.opening_for = None
            self.give(connection)

    def _is_alive(self, connection: PooledConnection, until: float) -> bool:
        """Whether its last answer is recent enough, or else a probe is answered in a small part of the caller's time.

        The part is long enough for the round trip that was measured when the session was set up.
        """
        now, times = clock.now(), timing.DEFAULT
        if (
            now - connection.idle_since < times.trusted_idle
            or connection.question is None
            or connection.shutdown_fd < 0
        ):
            return True
        left = until - now
        answer = max(times.question, 2 * connection.round_trip, left * PROBE_SHARE)
        try:
            self.ask(connection, now + min(answer, left / 2))
        except BaseException as error:
            self._close(connection, broken=True)  # an answer may yet come
            if not isinstance(error, Exception):  # interrupted
                raise
            self._close_idle(now, broken=True)
            return False
        return True

    def _connections(self) -> list[PooledConnection]:
        """All that are not closed; the references in one step, as a signal handler may add one."""
        return [each for reference in self._all.valuerefs() if (each := reference()) is not None and not each.closed]

    def _wants(self, loop: object) -> bool:
        """Whether more callers of that event loop wait than idle connections are there for; callers hold the mutex."""
        waiting = sum(each.home is loop for slots in self._slots for each in slots.line)
        return waiting > sum(each.loop is loop for each in self._idle)

    def _notify(self) -> None:
        """Wake the waiters that may have a connection; callers hold the mutex."""
        for slots in self._slots:
            for waiter in slots.first() if slots.line else ():
                if not waiter.notified():
                    waiter.notify()

    def _pop_idle(self, before: float, *, leave: int = 0) -> list[PooledConnection]:
        """Those that have been idle since before that local time, the oldest first, but for the last few."""
        popped = list[PooledConnection]()
        with self._mutex:
            while self._idle[leave:] and self._idle[0].idle_since < before:  # a signal handler may take one
                popped.append(self._idle.pop(0))
        return popped

    def _close_idle(self, before: float, *, broken: bool = False) -> None:
        for each in self._pop_idle(before):
            self._close(each, broken=broken)

    def _close(self, connection: PooledConnection, *, broken: bool = False) -> None:
        """Close it, once."""
        with self._mutex:
            if connection.closed:
                return
            connection.closed = True
            connection.vacate()
            if connection in self._idle:  # of an event loop that is gone
                self._idle.remove(connection)
            self._notify()
        if connection.raw is None:
            return
        if broken:
            connection.cut()  # so that the driver's closing never waits for the server
        with contextlib.suppress(Exception):  # it was broken
            self.close(connection, broken=broken)
