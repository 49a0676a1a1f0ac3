"""The pool of connections that the lock's statements run on.

They are the lock's own, never the caller's nor from the caller's pool: a caller that has used up its pool must still be
able to release a lock, and settings of the caller's sessions (search_path, role, time zone, an open transaction) must
not send two statements of a lock to different tables. Each is in autocommit mode for its whole life, so that nothing
has to be reset between two uses. Idle connections form a stack, the last used on top.

At most `most` connections are in use at a time for taking and waiting, and as many (at least two) for renewing and
releasing, so that renewals and releases never queue behind takes. When all are in use, callers queue. Statements that
continue an operation, and renewals, on which all leases depend, go before statements that begin one.

A caller waits for a new connection only as long as its statement may take, and uses one that is returned meanwhile if
that comes first: far away, opening takes a dozen round trips. The new connection keeps its slot until it is open, or
for `statement_timeout` after the caller's time; then it goes to the next caller. Meanwhile no other connection is
opened for the same purpose and event loop, and none at all while `HANGING` openings last longer than that: a server
that accepts connections without answering does not get more and more of them. The faces have the driver end each.

A NAT, a load balancer or a firewall drops an idle connection silently. So a connection that has been idle for
`trusted_idle` seconds is probed before it is lent, and replaced if no answer comes within a small part of the caller's
time. Then all connections that have been idle for as long are probed in the background, and kept if they answer.
Frequent use needs no probes.

The watchdog closes connections that have been idle for `idle_session` seconds, except one of each pool.

After a fork the child starts with an empty stack and leaves its parent's connections alone: closing one would end the
parent's session. Connections of an event loop that is gone are dropped likewise.

Rule: the faces define what a connection is, and where its driver waits (in a thread or on an event loop).
"""

from __future__ import annotations

import contextlib
import math
import threading
import weakref
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any, Final

from dblock.core import clock, timing
from dblock.core.connections.connection import CLOSED, IDLE, LATE, LENT, OPENING, PooledConnection
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
"""While so many openings last too long, no further one begins."""
RESTING: Final = 1
"""Idle connections that a pool keeps for ever."""

background: Final = ContextVar("dblock background", default=False)
"""Whether the running thread or task does work that no caller waits for."""


class AutocommitPool:
    """The lock's connections to one database, a server or a file."""

    def __init__(self, most: float, keep: int = KEPT, *, local: bool = False) -> None:
        self._slots = Slots(most), Slots(max(2, most))
        """For taking and waiting, and for renewing and releasing: indexed by `critical`."""
        self._keep = keep
        self._local = local
        """Whether the database is a file, for which nothing has to be done in the background."""
        self._idle: list[PooledConnection] = []
        self._awaited = set[PooledConnection]()
        """Connections that are being opened, and whose callers wait."""
        self._all = weakref.WeakSet[PooledConnection]()
        """All connections, which a forked child leaves to its parent."""
        self._epoch = 0
        """How often the pool was closed; a connection that is older than that is not kept."""
        self._closed = False
        """Whether the application has closed the pool, and has not used it since."""
        self.prune_by: Callable[[float], None] = lambda _: None
        """Schedules a pruning of this pool at that local time at the latest."""
        self._mutex = threading.RLock()  # a signal handler may send a statement

    # -- what a face provides

    def open(self, connection: PooledConnection) -> None:
        """Open it: set `raw`, in autocommit mode, and `prepared` and `shutdown_fd` where possible."""
        raise NotImplementedError

    def close(self, connection: PooledConnection) -> None:
        """Close a connection in an orderly way."""
        raise NotImplementedError

    def terminate(self, connection: PooledConnection) -> None:
        """Close a connection in an unknown state, without waiting for the server."""
        raise NotImplementedError

    def abandon(self, connection: PooledConnection) -> None:
        """Close a connection of an event loop that does not run here."""
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

    def in_background(self, work: Callable[[PooledConnection], None], connections: list[PooledConnection]) -> None:
        """Do the work, which raises nothing, with each of these connections, which are in no other hands."""

        def run() -> None:
            for each in connections:
                work(each)

        if self._local:
            return run()
        try:
            _ = start(run, "connect")
        except RuntimeError:  # out of threads, or the interpreter is ending
            for each in connections:
                if each.raw is not None:
                    each.cut()
            run()

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
        loop, slots = self.loop(), self._slots[critical]
        with self._mutex:
            idle = self._idle
            if idle and idle[-1].loop is loop and not slots.line and len(slots.lent) < slots.most:  # mostly
                connection: PooledConnection | None = slots.lend(idle.pop())
            else:
                connection = self._claim(loop, slots)
        if connection is None:
            connection = self._claim_in_turn(loop, slots, SlotWaiter(until, priority=priority))
        while True:
            if connection.stage is not LENT:
                new, connection = connection, self._open_in_time(connection, until)
                if connection is new:
                    return connection
            if self._is_alive(connection, until):
                return connection
            connection = self._claim_in_turn(loop, slots, SlotWaiter(until, priority=True), silent=connection)

    def open_apart(self, until: float) -> PooledConnection:
        """A connection to listen on, without a slot, which is never returned; StoreUnreachable if not open by then."""
        listener = PooledConnection(loop=self.loop(), epoch=-1, purpose="listener", stage=OPENING)
        return self._open_in_time(listener, until)

    def give(self, connection: PooledConnection) -> None:
        """Keep it for the next statement."""
        connection.idle_since = now = clock.now()
        surplus: list[PooledConnection] = []
        with self._mutex:
            if connection.stage is CLOSED:  # lent before a fork: the parent's
                return
            idle, loop = self._idle, connection.loop
            wanted = len(idle) >= self._keep and any(each.line for each in self._slots)
            lost = connection.overdue or (loop is not None and self.is_over(loop))
            if lost or self._closed or connection.epoch != self._epoch:
                surplus.append(connection)
            else:
                connection.move(IDLE)
                idle.append(connection)
            while len(idle) > self._keep and not wanted and idle[-1].loop is loop:
                surplus.append(self._pop())
            if connection.slots is not None:
                connection.slots.free(connection)
            for each in list(self._awaited) if self._awaited else ():
                if each.caller is not None:
                    each.caller.notify()
        for each in surplus:
            self._close(each)
        if len(idle) > RESTING:
            self.prune_by(now + timing.DEFAULT.idle_session)

    give_after_error = give
    """A statement that was refused in autocommit mode leaves nothing behind."""

    def drop(self, connection: PooledConnection, *, others: bool) -> None:
        """Close a connection in an unknown state, and with `others` the idle ones: they broke with it."""
        if connection.stage is LENT:
            for each in (connection, *(self._pop_all() if others else ())):
                self._close(each, broken=True)

    def prune(self) -> float:
        """Close what has been idle for too long, except the last; returns the local time at which to prune again."""
        lasts, over = timing.DEFAULT.idle_session, list[PooledConnection]()
        with self._mutex:
            idle = self._idle
            while len(idle) > RESTING and idle[0].idle_since + lasts <= clock.now():
                over.append(self._pop(0))
            again = idle[0].idle_since + lasts if len(idle) > RESTING else math.inf
        if over:
            self.in_background(self._close, over)
        return again

    def close_all(self) -> None:
        """Close all idle connections, and the others when they are returned.

        Background work keeps none either, until the application uses the pool again.
        """
        self._closed = True
        with self._mutex:
            self._epoch += 1
        for connection in self._pop_all():
            self._close(connection)

    def leave_to_parent(self) -> Any:
        """Start empty in a forked child; returns the parent's connections, to be kept so that none is finalized."""
        parents = list(self._all)
        for connection in parents:
            connection.disconnect_in_child()
            connection.stage, connection.slots = CLOSED, None
            if connection.caller is not None:
                connection.caller.notify()
        for slots in self._slots:
            slots.lent.clear()
            slots.line.clear()  # of the parent's threads
        self._idle, self._awaited, self._all, self._mutex = [], set(), weakref.WeakSet(), threading.RLock()
        return parents

    # -- helpers

    def _claim(self, loop: object, slots: Slots, waiter: SlotWaiter | None = None) -> PooledConnection | None:
        """A connection with a slot, idle until now or still to be opened; None if the caller has to wait.

        Callers hold the mutex.
        """
        late = self._free_lost(slots, loop)
        while self._idle and self.is_over(self._idle[-1].loop):
            self._close(self._pop())
        if not slots.has_room(waiter):
            return None
        found = self._lend_idle(loop, slots)
        if found is not None or late or self._hangs():
            return found
        connection = PooledConnection(loop=loop, epoch=self._epoch, stage=OPENING)
        self._all.add(connection)
        return slots.lend(connection)

    def _lend_idle(self, loop: object, slots: Slots) -> PooledConnection | None:
        """The last idle connection of the event loop, with a slot that is free; callers hold the mutex."""
        for index in reversed(range(len(self._idle))):
            if self._idle[index].loop is loop:
                return slots.lend(self._idle.pop(index))
        return None

    def _claim_in_turn(
        self, loop: object, slots: Slots, waiter: SlotWaiter, *, silent: PooledConnection | None = None
    ) -> PooledConnection:
        """Wait for a connection with a slot; LockStoreError if there is none in time for a statement.

        `silent`: a connection to be closed, whose caller is the next one.
        """
        times = timing.DEFAULT
        try:
            with self._mutex:
                slots.join(waiter, first=silent is not None)
            if silent is not None:
                self._close(silent, broken=True)
            while True:
                with self._mutex:
                    waiter.attend(interval := slots.poll_interval())
                    connection = self._claim(loop, slots, waiter)
                if connection is not None:
                    return connection
                left = waiter.until - times.min_retry_time - clock.now()
                if left <= 0:
                    break
                self.wait(waiter, min(left, interval))
        finally:
            with self._mutex:
                slots.leave(waiter)
        with self._mutex:
            if self._free_lost(slots, loop) or self._hangs():
                raise _not_opened()
        raise PoolExhausted(f"all {slots.most:g} connections of the lock are in use")

    def _free_lost(self, slots: Slots, loop: object) -> bool:
        """Free the slots of connections that were cut, whose event loop is over, or whose opening takes too long.

        A blocked event loop may not have noticed that. Returns whether another connection of this event loop is being
        opened though its caller has stopped waiting. Callers hold the mutex.
        """
        late, now = False, clock.now()
        for each in slots.occupants():
            if each.stage is OPENING and each.expected_until < now:  # its caller was interrupted twice, or is frozen
                each.move(LATE)
                each.caller = None
            if each.overdue or each.expected_until < now or self.is_over(each.loop):
                slots.free(each)
            elif each.stage is LATE and each.loop is loop:
                late = True
        return late

    def _hangs(self) -> bool:
        """Whether too many openings have lost their slots and go on; callers hold the mutex."""
        return (
            sum(each.stage is LATE and each.slots is None and not self.is_over(each.loop) for each in self._all)
            >= HANGING
        )

    def _open_in_time(self, connection: PooledConnection, until: float) -> PooledConnection:
        connection.caller = caller = Wakeup()
        connection.expected_until = until + timing.DEFAULT.statement_timeout
        try:
            self._awaited.add(connection)
            self.in_background(self._run_opening, [connection])
            while connection.stage is OPENING and (left := until - clock.now()) > 0:
                self.wait(caller, left)
                _ = caller.consume()
                returned = self._claim_returned(connection, caller) if self._idle else None
                if returned is not None and returned.stage is LENT:  # no fork came between
                    return returned
        except BaseException:
            self._stop_waiting(connection, caller)
            raise
        finally:
            self._awaited.discard(connection)
        if connection.stage is LENT and connection.caller is caller:
            return connection
        self._stop_waiting(connection, caller)
        error, connection.error = connection.error, None
        if type(error).__name__ == "CancelledError":  # the opening was cancelled, as it took too long, not its caller
            error = None
        raise error or _not_opened()

    def _claim_returned(self, connection: PooledConnection, caller: Wakeup) -> PooledConnection | None:
        """A connection that was returned while this one was being opened; its caller stops waiting for this one."""
        slots = connection.slots
        if slots is None or connection.stage is not OPENING:
            return None
        with self._mutex:
            if connection.stage is not OPENING or not slots.has_room(None):
                return None
            returned = self._lend_idle(connection.loop, slots)
            if returned is not None:
                self._stop_waiting(connection, caller)
                # A caller that finds all others dead waits so long for this one, and has the time to open another.
                hangs_at = clock.now() + timing.DEFAULT.single_try
                connection.expected_until = min(connection.expected_until, hangs_at)
            return returned

    def _stop_waiting(self, connection: PooledConnection, caller: Wakeup) -> None:
        """Let the connection be lent to another caller, once it is open."""
        with self._mutex:
            if connection.caller is not caller:
                return
            connection.caller = None
            opened = connection.stage is LENT
            if connection.stage is OPENING:
                connection.move(LATE)
        if opened:
            self.give(connection)

    def _run_opening(self, connection: PooledConnection) -> None:
        """Open it, for its caller or the next one."""
        if connection.stage is CLOSED:  # a fork came between
            return
        try:
            self.open(connection)
        except BaseException as error:  # noqa: BLE001 - raised for the caller
            connection.raw = None
            if connection.stage is OPENING:
                connection.error = error
            else:  # nobody else does so
                leave_out_driver(error)
            self._close(connection)
            return
        with self._mutex:
            connection.expected_until = math.inf
            late = connection.stage is LATE
            if not late:
                connection.move(LENT)
        if late:
            self.give(connection)
        elif connection.caller is not None:
            connection.caller.notify()

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
        except Exception:  # noqa: BLE001, S110 - any error of a driver
            pass
        except BaseException:  # interrupted: an answer may yet come
            self._close(connection, broken=True)
            raise
        else:
            return True
        with self._mutex:
            idle, loop = self._idle, connection.loop
            doubted = [each for each in idle if each.idle_since < now and each.loop is loop]
            for each in doubted:
                _ = self._pop(idle.index(each))
        if doubted:
            self.in_background(self._check, doubted)
        return False

    def _check(self, connection: PooledConnection) -> None:
        """Keep it if it answers a probe."""
        connection.idle_since = -math.inf
        if self._is_alive(connection, clock.now() + timing.DEFAULT.critical_timeout):
            self.give(connection)
        else:
            self._close(connection, broken=True)

    def _pop(self, index: int = -1) -> PooledConnection:
        connection = self._idle.pop(index)
        connection.move(LENT)
        return connection

    def _pop_all(self) -> list[PooledConnection]:
        with self._mutex:
            return [self._pop() for _ in list(self._idle)]

    def _close(self, connection: PooledConnection, *, broken: bool = False) -> None:
        """Close it, in an orderly way unless it is broken or of another event loop."""
        with self._mutex:
            if connection.stage is CLOSED:
                return
            connection.move(CLOSED)
            if connection.slots is not None:
                connection.slots.free(connection)
        if connection.caller is not None:
            connection.caller.notify()
        if connection.raw is None:
            return
        if broken:
            connection.cut()  # so that the driver's closing never waits for the server
        with contextlib.suppress(Exception):  # it was broken
            if connection.loop is not self.loop():
                self.abandon(connection)
            elif broken:
                self.terminate(connection)
            else:
                self.close(connection)


def _not_opened() -> StoreUnreachable:
    return StoreUnreachable("no connection could be opened in time").because_late()
