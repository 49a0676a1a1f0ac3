"""The pool of connections that the lock's statements run on.

They are the lock's own, never the caller's nor from the caller's pool: a caller that has used up its pool must still be
able to release a lock, and settings of the caller's sessions (search_path, role, time zone, an open transaction) must
not send two statements of a lock to different tables. Each is in autocommit mode for its whole life, so that nothing
has to be reset between two uses. Idle connections form a stack, the last used on top.

At most `most` connections are in use at a time for taking and waiting, and as many (at least two) for renewing and
releasing, so that renewals and releases never queue behind takes. When all are in use, callers queue. Statements that
continue an operation, and renewals, on which all leases depend, go before statements that begin one.

A caller waits for a new connection only as long as its statement may take; one that is opened later goes to the next
caller.

A NAT, a load balancer or a firewall drops an idle connection silently. So a connection that has been idle for
`trusted_idle` seconds is probed before it is lent, and replaced by a new one if no answer comes within a small part of
the caller's time. Then all connections that have been idle for as long are probed in the background, and kept if they
answer. Frequent use needs no probes.

The watchdog closes connections that have been idle for `idle_session` seconds, except one of each pool.

After a fork the child starts with an empty stack and leaves its parent's connections alone: closing one would end the
parent's session. Connections of an event loop that is gone are dropped likewise.

Rule: the faces define what a connection is, and where its driver waits (in a thread or on an event loop).
"""

from __future__ import annotations

import contextlib
import math
import os
import socket
import threading
import weakref
from collections import deque
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Final, cast

from dblock.core import clock, timing
from dblock.core.connections.slots import Slots, SlotWaiter
from dblock.core.errors import PoolExhausted, StoreConflict
from dblock.core.protocol.steps import Execute, Rows

KEPT: Final = 5
"""Most idle connections of a pool, as by default in SQLAlchemy's pools."""
POLL: Final = 0.1
"""Poll interval of a waiter for a slot that is not notified."""
LEAST: Final = 0.02
"""With fewer seconds left a caller stops waiting: a statement that is not answered in time costs its connection."""
RESTING: Final = 1
"""Idle connections that a pool keeps for ever."""
HOPE: Final = 5.0
"""Seconds for which a connection is still expected after its caller has stopped waiting for it."""
_NOT_KEPT: Final = -1
"""The epoch of a connection that is closed when it is returned."""

background: Final = ContextVar("dblock background", default=False)
"""Whether the running thread or task does work that no caller waits for."""

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
    slots: Slots | None = None
    """The slots of which it occupies one while it is lent."""

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


class AutocommitPool:
    """The lock's connections to one database, a server or a file."""

    def __init__(self, most: float, keep: int = KEPT) -> None:
        self._slots = Slots(most), Slots(max(2, most))
        """For taking and waiting, and for renewing and releasing: indexed by `critical`."""
        self._keep = keep
        self._idle: list[PooledConnection] = []
        self._all = weakref.WeakSet[PooledConnection]()
        """All open connections, which a forked child leaves to its parent."""
        self._late: dict[object, tuple[Any, float]] = {}
        """For each event loop, an opening whose caller has stopped waiting, and until when it is expected to end."""
        self._epoch = 0
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
        """Close an idle connection in an orderly way."""
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

    def in_background(self, work: Callable[[], PooledConnection]) -> Any:
        """Start the work; returns an `Opening` or a Future."""
        opening = Opening(work)
        try:
            threading.Thread(target=opening.run, name="dblock connect", daemon=True).start()
        except RuntimeError:  # out of threads, or the interpreter is ending
            opening.run()
        return opening

    def await_background(self, future: Any, seconds: float) -> bool:
        """Wait at most so many seconds for the work; returns whether it is done."""
        return bool(future.wait(seconds))

    def break_off(self, future: Any, seconds: float) -> None:
        """Cancel the work if it is not done in so many seconds, where that is possible."""

    def wait(self, waiter: SlotWaiter, seconds: float) -> None:
        """Wait at most so many seconds for a notification."""
        waiter.wait(seconds)

    def apart(self, work: Callable[[PooledConnection], None], connections: list[PooledConnection]) -> None:
        """Do the work in the background with each of these connections, which are no longer idle."""

        def run() -> None:
            for each in connections:
                work(each)

        try:
            threading.Thread(target=run, name="dblock idle", daemon=True).start()
        except RuntimeError:  # out of threads, or the interpreter is ending
            for each in connections:
                each.cut()

    # -- for the executors

    def take(self, until: float, *, critical: bool, priority: bool = False) -> PooledConnection:
        """An idle connection of this event loop, or a new one; StoreConflict if there is none until that local time.

        `critical`: for renewing or releasing; `priority`: before waiting callers that are not.
        """
        if not background.get():
            self._closed = False
        loop, slots = self.loop(), self._slots[critical]
        connection = self._enter(loop, slots, priority=priority)
        if connection is None:
            connection = self._enter_in_turn(loop, slots, SlotWaiter(until, priority=priority))
        if connection.raw is not None:
            if self._is_alive(connection, until):
                return connection
            connection = self._replace(connection, self._new(loop), slots)
        try:
            while self._expect_late(loop, until):
                if (idle := self._idle_for(loop)) is not None:
                    connection = self._replace(connection, idle, slots)
                    if self._is_alive(connection, until):
                        return connection
                    connection = self._replace(connection, self._new(loop), slots)
        except BaseException:
            _ = self._free(connection)
            raise
        return self._open_in_time(connection, until)

    def open_apart(self, until: float) -> PooledConnection:
        """A connection to listen on, without a slot, which is never returned; StoreConflict if not open by then."""
        return self._open_in_time(PooledConnection(loop=self.loop(), epoch=self._epoch, purpose="listener"), until)

    def give(self, connection: PooledConnection) -> None:
        """Keep it for the next statement."""
        connection.idle_since = now = clock.now()
        surplus: list[PooledConnection] = []
        with self._mutex:
            idle, slots = self._idle, connection.slots
            wanted = len(idle) >= self._keep and any(each.has_line() for each in self._slots)
            if slots is None or not slots.free(id(connection)):
                return
            (idle if connection.epoch == self._epoch else surplus).append(connection)
            while len(idle) > self._keep and not wanted and idle[-1].loop is connection.loop:
                surplus.append(idle.pop())
        for each in surplus:
            self._dismiss(each)
        if len(idle) > RESTING:
            self.prune_by(now + timing.DEFAULT.idle_session)

    give_after_error = give
    """A statement that was refused in autocommit mode leaves nothing behind."""

    def drop(self, connection: PooledConnection, *, others: bool) -> None:
        """Close a connection in an unknown state, and with `others` the idle ones: they broke with it."""
        if not (self._free(connection) or connection.overdue):
            return
        loop = self.loop()
        for each in (connection, *(self._all_idle() if others else ())):
            self._end(each, loop)

    def prune(self) -> float:
        """Close what has been idle for too long, except the last; returns the local time at which to prune again."""
        lasts, over = timing.DEFAULT.idle_session, list[PooledConnection]()
        with self._mutex:
            idle = self._idle
            while len(idle) > RESTING and idle[0].idle_since + lasts <= clock.now():
                over.append(idle.pop(0))
            again = idle[0].idle_since + lasts if len(idle) > RESTING else math.inf
        if over:
            self.apart(self._dismiss, over)
        return again

    def close_all(self) -> None:
        """Close all idle connections, and the others when they are returned.

        Background work keeps none either, until the application uses the pool again.
        """
        self._closed = True
        for connection in self._all_idle(close=True):
            self._dismiss(connection)

    def leave_to_parent(self) -> Any:
        """Start empty in a forked child; returns the parent's connections, to be kept so that none is finalized."""
        parents = list(self._all), self._late
        for connection in parents[0]:
            connection.disconnect_in_child()
        for slots in self._slots:  # none of them is returned in this process
            slots.lent.clear()
        self._slots = Slots(self._slots[0].most), Slots(self._slots[1].most)
        self._idle, self._late, self._all = [], {}, weakref.WeakSet()
        self._mutex = threading.RLock()
        return parents

    # -- helpers

    def _enter(
        self, loop: object, slots: Slots, *, priority: bool = False, waiter: SlotWaiter | None = None
    ) -> PooledConnection | None:
        """An idle connection, or a new one that is not open yet; None if there is no slot, or others wait for it.

        `waiter`: one that polls. Connections that were cut no longer count, though their event loop may not
        have noticed: it may be blocked.
        """
        with self._mutex:
            if not slots.has_room():
                slots.lent -= {id(each) for each in self._all if each.overdue or self.is_over(each.loop)}
            if not (slots.may_enter(priority=priority) if waiter is None else slots.try_claim(waiter)):
                return None
            idle = self._idle
            connection = idle.pop() if idle and idle[-1].loop is loop else self._idle_for(loop) or self._new(loop)
            self._lend(connection, slots)
            return connection

    def _enter_in_turn(self, loop: object, slots: Slots, waiter: SlotWaiter) -> PooledConnection:
        """Wait for a slot; PoolExhausted if there is none in time for a statement."""
        connection: PooledConnection | None = None
        notified = again = False
        try:
            while (left := waiter.until - LEAST - clock.now()) > 0:
                if notified or not again:
                    with self._mutex:
                        slots.join(waiter, again=again)
                self.wait(waiter, min(left, POLL))
                notified, again = waiter.consume(), True
                connection = self._enter(loop, slots, waiter=waiter)
                if connection is not None:
                    return connection
            raise PoolExhausted(f"all {slots.most:g} connections of the lock are in use")
        finally:
            with self._mutex:
                slots.leave(waiter, served=connection is not None)

    def _new(self, loop: object) -> PooledConnection:
        connection = PooledConnection(loop=loop, epoch=_NOT_KEPT if self._closed else self._epoch)
        self._all.add(connection)
        return connection

    def _lend(self, connection: PooledConnection, slots: Slots) -> None:
        connection.slots = slots
        slots.lent.add(id(connection))

    def _free(self, connection: PooledConnection) -> bool:
        """Free its slot; False if it was lent before a fork, and so is the parent's."""
        with self._mutex:
            return connection.slots is not None and connection.slots.free(id(connection))

    def _replace(self, connection: PooledConnection, other: PooledConnection, slots: Slots) -> PooledConnection:
        """Lend the other connection in its place, without freeing the slot in between."""
        with self._mutex:
            self._lend(other, slots)
            slots.lent.discard(id(connection))
        if connection.raw is not None:
            self._end(connection, connection.loop)
        return other

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
        answer = max(times.question, 2 * connection.round_trip, left * times.question_share)
        try:
            self.ask(connection, now + min(answer, left / 2))
        except Exception:  # noqa: BLE001, S110 - any error of a driver
            pass
        except BaseException:  # interrupted: an answer may yet come
            _ = self._free(connection)
            self._end(connection, connection.loop)
            raise
        else:
            return True
        with self._mutex:
            doubted = [each for each in self._idle if each.idle_since < now and each.loop is connection.loop]
            self._idle = [each for each in self._idle if each not in doubted]
        if doubted:
            self.apart(self._check, doubted)
        return False

    def _check(self, connection: PooledConnection) -> None:
        """Keep it if it answers a probe."""
        connection.idle_since = -math.inf
        if not self._is_alive(connection, clock.now() + timing.DEFAULT.critical_timeout):
            self._end(connection, connection.loop)
        elif not self._keep_idle(connection):
            self._dismiss(connection)

    def _keep_idle(self, connection: PooledConnection) -> bool:
        """Make it idle; False if the pool has enough idle connections, or was closed meanwhile."""
        with self._mutex:
            kept = len(self._idle) < self._keep and connection.epoch == self._epoch
            if kept:
                connection.idle_since = clock.now()
                self._idle.append(connection)
        return kept

    def _end(self, connection: PooledConnection, loop: object) -> None:
        connection.cut()  # so that the driver's closing never waits for the server
        with contextlib.suppress(Exception):
            (self.terminate if connection.loop is loop else self.abandon)(connection)

    def _idle_for(self, loop: object) -> PooledConnection | None:
        over: list[PooledConnection] = []
        with self._mutex:
            while self._idle and self.is_over(self._idle[-1].loop):
                over.append(self._idle.pop())
            here = [connection for connection in self._idle if connection.loop is loop]
            if here:
                self._idle.remove(here[-1])
        for each in over:
            self.abandon(each)
        return here[-1] if here else None

    def _all_idle(self, *, close: bool = False) -> list[PooledConnection]:
        with self._mutex:
            self._epoch += close
            idle, self._idle = self._idle, []
        return idle

    def _dismiss(self, connection: PooledConnection) -> None:
        with contextlib.suppress(Exception):  # it was broken
            (self.close if connection.loop is self.loop() else self.abandon)(connection)

    def _expect_late(self, loop: object, until: float) -> bool:
        """Wait for an opening whose caller has stopped waiting; False if there is none.

        So a server that accepts connections without answering does not get more and more of them.
        """
        future, hope = self._late.get(loop, (None, 0.0))
        if future is None or clock.now() >= hope:
            return False
        if not self.await_background(future, max(until - clock.now(), 0.0)):
            raise StoreConflict("no connection could be opened in time").because_late()
        self._no_longer_late(future)
        return True

    def _no_longer_late(self, future: Any) -> None:
        with self._mutex:
            self._late = {loop: late for loop, late in self._late.items() if late[0] is not future}

    def _open_in_time(self, new: PooledConnection, until: float) -> PooledConnection:
        def work() -> PooledConnection:
            self.open(new)
            return new

        future: Any = None
        over = False
        try:
            future = self.in_background(work)
            over = self.await_background(future, max(until - clock.now(), 0.0))
            if over:
                opened: PooledConnection = future.result()
                return opened
        except BaseException:  # an interrupt, or the opening has failed
            self._give_up(new, future, late=not over)
            raise
        self._give_up(new, future, late=True)
        raise StoreConflict("no connection could be opened in time").because_late()

    def _give_up(self, new: PooledConnection, future: Any, *, late: bool) -> None:
        """Stop waiting for an opening: free the slot first, then let the connection be lent to another caller."""
        _ = self._free(new)
        if future is None:
            return
        if late:
            with self._mutex:
                now = clock.now()
                self._late = {home: other for home, other in self._late.items() if other[1] > now}
                self._late[new.loop] = (future, now + HOPE)
            self.break_off(future, HOPE)
        future.add_done_callback(self._arrived)

    def _arrived(self, future: Any) -> None:
        """Handle the end of an opening whose caller has stopped waiting."""
        self._no_longer_late(future)
        if future.cancelled() or future.exception() is not None:
            return
        connection = future.result()
        if not self._keep_idle(connection):
            self.terminate(connection)


class Opening:
    """A connection that is being opened, in a thread or at once, with the methods of a Future that the pool needs.

    Not a Future itself: after an exception of a signal handler between the lock of the Future's Condition and the next
    line (python/cpython#74174), the waiting thread would wait for that lock for ever.
    """

    def __init__(self, work: Callable[[], PooledConnection]) -> None:
        self._work = work
        self._opened: PooledConnection | None = None
        self._error: BaseException | None = None
        self._running = threading.Lock()
        _ = self._running.acquire()
        self._over = False
        self._then = deque[Callable[[Opening], None]]()

    def run(self) -> None:
        """Open it in this thread."""
        try:
            self._opened = self._work()
        except BaseException as error:  # noqa: BLE001 - raised in the waiting thread
            self._error = error
        self._over = True
        self._running.release()
        self._call_back()

    def wait(self, seconds: float) -> bool:
        """Wait at most so many seconds; returns whether the opening has ended."""
        if not self._over and self._running.acquire(timeout=seconds):
            self._running.release()
        return self._over

    def result(self) -> PooledConnection:
        """The connection, once the opening has ended."""
        if self._error is not None:
            raise self._error
        return cast("PooledConnection", self._opened)

    def exception(self) -> BaseException | None:
        """The error, once the opening has ended."""
        return self._error

    def cancelled(self) -> bool:
        """Always False: a thread cannot be cancelled."""
        return False

    def add_done_callback(self, call: Callable[[Opening], None]) -> None:
        """Call back when the opening has ended, in this thread or in its own."""
        self._then.append(call)
        if self._over:
            self._call_back()

    def _call_back(self) -> None:
        with contextlib.suppress(IndexError):  # two threads may pop; each callback is called once
            while True:
                self._then.pop()(self)
