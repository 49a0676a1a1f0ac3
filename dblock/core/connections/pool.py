"""The connections that the statements of the lock run on: who opens, keeps and closes them.

They are the lock's own, never the caller's nor from the caller's pool: whoever has used up that pool must still be able
to give a lock back, and what callers do to their sessions (search_path, role, time zone, a transaction begun by hand)
must not send one statement of a lock to another table than the next. Each is in autocommit mode for its whole life, so
that nothing has to be reset between two uses. They wait in a stack, the warmest on top.

No more than `most` are in use at a time for taking and waiting, and as many (two at least) for keeping and giving back,
so that renewals and releases never queue behind takes. Whoever finds them all in use gets one in its turn; before those
who begin something come those who are in the midst of it, and the renewals, on which all leases of the process depend.

Whoever asks for one waits until it is open for as long as the statement may take, and no longer: a connection that
comes later is for whoever asks next.

After a fork the child starts with an empty stack and leaves its parent's connections alone: closing one would end the
parent's session. Connections of an event loop that is gone are dropped likewise.

Rule: what a connection is, and where its driver waits (in a thread or on an event loop), is for the faces to say.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import weakref
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, cast

from dblock.core import clock
from dblock.core.connections.slots import Place, Slots
from dblock.core.errors import PoolExhausted, StoreConflict
from dblock.core.protocol.steps import Execute, Rows

KEPT: Final = 5
"""How many idle connections a pool keeps, as many as SQLAlchemy's pools do by default."""
LOOK: Final = 0.1
"""Seconds after which whoever waits for its turn looks without having been called."""
LEAST: Final = 0.02
"""With fewer seconds left nobody waits any more: a statement that is not answered in time costs its connection."""
IDLE: Final = 60.0
"""Seconds after which an idle connection is closed when another one is given back."""
HOPE: Final = 5.0
"""Seconds for which a connection that somebody has given up waiting for is expected to come."""


WIRES: Final = threading.RLock()
"""No descriptor is closed while somebody uses it, and nobody forks."""


@dataclass(slots=True, eq=False, weakref_slot=True)
class PooledConnection:
    """A DB-API connection that is lent to one statement at a time."""

    raw: Any = None
    prepared: Callable[[Execute], Rows] | None = None
    """Runs statements, where the lock has a better way than the driver's cursor."""
    loop: object = None
    """The event loop that it belongs to, for asynchronous drivers."""
    epoch: int = 0
    """How often its pool had been closed when it was opened."""
    joined: bool = False
    """Is the statement part of a transaction of the caller's?"""
    lent: Any = None
    """What to give back to the engine's own pool."""
    descriptor: int = -1
    """Of its socket, if it has one."""
    wire: int = -1
    """A second one: it stays valid whatever the driver does with its own."""
    overdue: bool = False
    """Was it cut?"""
    busy_timeout: int = 0
    """How many milliseconds it waits for another writer, on SQLite."""
    wal: bool = False
    """Is it to a SQLite file with a write-ahead log?"""
    wired: bool = False
    """Does it lead to one session, with no pooler in between that lends it another for each transaction?"""
    galera: bool = False
    """Is it to a node of a Galera cluster?"""
    idle_since: float = 0.0
    slots: Slots | None = None
    """Of which it has one, while it is lent."""

    def cut(self) -> None:
        """End whatever waits for an answer on it."""
        self.overdue = True
        with WIRES, contextlib.suppress(OSError):  # somebody may have closed every descriptor that there was
            if self.wire >= 0:
                handle = socket.socket(fileno=self.wire)
                try:
                    handle.shutdown(socket.SHUT_RDWR)
                finally:
                    _ = handle.detach()

    def unplug(self) -> None:
        """In a forked child: whoever waits here for an answer, which is the parent's, waits no more.

        So one that was forked in a signal handler, amid a statement, does not hang. The server is not told.
        """
        with contextlib.suppress(OSError):  # closed
            if self.wire >= 0 and os.path.sameopenfile(self.descriptor, self.wire):
                ours, theirs = socket.socketpair()
                theirs.close()
                _ = os.dup2(ours.fileno(), self.descriptor, inheritable=False)
                ours.close()

    def __del__(self, lock: Any = WIRES, close: Callable[[int], None] = os.close) -> None:
        if self.slots is not None:
            self.slots.lent.discard(id(self))
        with lock:  # by default values, which are still there when the interpreter ends
            if self.wire >= 0:
                try:  # noqa: SIM105 - contextlib may be gone
                    close(self.wire)
                except OSError:
                    pass


class AutocommitPool:
    """The connections of the lock to one database, a server or a file."""

    def __init__(self, most: float, keep: int = KEPT) -> None:
        self._slots = Slots(most), Slots(max(2, most))
        """For taking and waiting, and for keeping and giving back: indexed by `keeps`."""
        self._keep = keep
        self._idle: list[PooledConnection] = []
        self._all = weakref.WeakSet[PooledConnection]()
        """For the case of a fork."""
        self._late: dict[object, tuple[Any, float]] = {}
        """For each event loop, a connection that somebody has given up waiting for, and until when it may come."""
        self._epoch = 0
        self._mutex = threading.RLock()  # a signal handler may send a statement

    # -- what a face provides

    def open(self, connection: PooledConnection) -> None:
        """Open it: `raw`, in autocommit mode, and `prepared` and `wire` where they can be."""
        raise NotImplementedError

    def close(self, connection: PooledConnection) -> None:
        """Close one that is idle, in order."""
        raise NotImplementedError

    def terminate(self, connection: PooledConnection) -> None:
        """Close one in an unknown state, without asking the server."""
        raise NotImplementedError

    def abandon(self, connection: PooledConnection) -> None:
        """Close one of an event loop that does not run here."""
        raise NotImplementedError

    def is_over(self, loop: Any) -> bool:
        """Will that event loop never run again?"""
        return loop is not None and bool(loop.is_closed())

    def loop(self) -> object:
        """The running event loop, for asynchronous drivers."""
        return None

    def in_background(self, work: Callable[[], PooledConnection]) -> Any:
        """Begin it; an `Opening`, or a Future of whatever kind."""
        opening = Opening(work)
        try:
            threading.Thread(target=opening.run, name="dblock connect", daemon=True).start()
        except RuntimeError:  # out of threads, or the interpreter is ending
            opening.run()
        return opening

    def await_background(self, future: Any, seconds: float) -> bool:
        """Wait for it, no longer than so many seconds; is it done?"""
        return bool(future.wait(seconds))

    def break_off(self, future: Any, seconds: float) -> None:
        """Give it up if it is not done in so many seconds, where that is possible."""

    def wait(self, place: Place, seconds: float) -> None:
        """Wait there until it is called, no longer than so many seconds."""
        place.wait(seconds)

    # -- for the executors

    def take(self, until: float, *, keeps: bool, urgent: bool = False) -> PooledConnection:
        """An idle connection of this event loop, or a new one; StoreConflict if there is none until that local time.

        `keeps`: to keep or to give back what is held; `urgent`: before others who wait for the same and begin.
        """
        loop, slots = self.loop(), self._slots[keeps]
        connection = self._enter(loop, slots, urgent=urgent)
        if connection is None:
            connection = self._enter_in_turn(loop, slots, Place(until, urgent=urgent))
        if connection.raw is not None:
            return connection
        try:
            while self._expect_late(loop, until):
                if (idle := self._idle_for(loop)) is not None:
                    self._lend(idle, slots)
                    slots.lent.discard(id(connection))
                    return idle
        except BaseException:
            _ = self._free(connection)
            raise
        return self._open_in_time(connection, until)

    def open_apart(self, until: float) -> PooledConnection:
        """A connection that is never given back, and counts for nothing; StoreConflict if it is not open by then."""
        return self._open_in_time(PooledConnection(loop=self.loop(), epoch=self._epoch), until)

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
            while len(idle) > 1 and idle[0].idle_since < now - IDLE:
                surplus.append(idle.pop(0))
        for each in surplus:
            self._dismiss(each)

    give_after_error = give
    """A statement that was refused in autocommit mode leaves nothing behind."""

    def drop(self, connection: PooledConnection, *, others: bool) -> None:
        """Close one in an unknown state, and with `others` those that wait: they broke with it."""
        if not (self._free(connection) or connection.overdue):
            return
        loop = self.loop()
        for each in (connection, *(self._all_idle() if others else ())):
            each.cut()  # so that whatever a driver does to close it waits for nobody
            with contextlib.suppress(Exception):
                (self.terminate if each.loop is loop else self.abandon)(each)

    def close_all(self) -> None:
        """Close those that are idle, and those that are not when they are given back."""
        for connection in self._all_idle(close=True):
            self._dismiss(connection)

    def leave_to_parent(self) -> Any:
        """In a forked child: what is the parent's, to be kept so that nothing finalizes it."""
        parents = list(self._all), self._late
        for connection in parents[0]:
            connection.unplug()
        for slots in self._slots:  # none of them is given back here
            slots.lent.clear()
        self._slots = Slots(self._slots[0].most), Slots(self._slots[1].most)
        self._idle, self._late, self._all = [], {}, weakref.WeakSet()
        self._mutex = threading.RLock()
        return parents

    # -- helpers

    def _enter(
        self, loop: object, slots: Slots, *, urgent: bool = False, place: Place | None = None
    ) -> PooledConnection | None:
        """One that is idle, or a new one that is yet to be opened; None if none may be lent, or others wait for it.

        `place`: of whoever waits, and looks. Those that were cut are counted no more, though their event loop may not
        have seen it: it may stand still.
        """
        with self._mutex:
            if not slots.has_room():
                slots.lent -= {id(each) for each in self._all if each.overdue or self.is_over(each.loop)}
            if not (slots.may_enter(urgent=urgent) if place is None else slots.looks(place)):
                return None
            idle = self._idle
            connection = idle.pop() if idle and idle[-1].loop is loop else self._idle_for(loop) or self._new(loop)
            self._lend(connection, slots)
            return connection

    def _enter_in_turn(self, loop: object, slots: Slots, place: Place) -> PooledConnection:
        """Wait for it; PoolExhausted if it does not come in time for a statement to be of use."""
        connection: PooledConnection | None = None
        called = again = False
        try:
            while (left := place.until - LEAST - clock.now()) > 0:
                if called or not again:
                    with self._mutex:
                        slots.join(place, again=again)
                self.wait(place, min(left, LOOK))
                called, again = place.consume(), True
                connection = self._enter(loop, slots, place=place)
                if connection is not None:
                    return connection
            raise PoolExhausted(f"all {slots.most:g} connections of the lock are in use")
        finally:
            with self._mutex:
                slots.leave(place, served=connection is not None)

    def _new(self, loop: object) -> PooledConnection:
        connection = PooledConnection(loop=loop, epoch=self._epoch)
        self._all.add(connection)
        return connection

    def _lend(self, connection: PooledConnection, slots: Slots) -> None:
        connection.slots = slots
        slots.lent.add(id(connection))

    def _free(self, connection: PooledConnection) -> bool:
        """It is not lent any more; False if it was lent before a fork: it is the parent's."""
        with self._mutex:
            return connection.slots is not None and connection.slots.free(id(connection))

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
        """Wait for a connection that somebody has given up waiting for; False if there is none to be expected.

        So a server that accepts connections and answers none is not asked for more and more of them.
        """
        future, hope = self._late.get(loop, (None, 0.0))
        if future is None or clock.now() >= hope:
            return False
        if not self.await_background(future, max(until - clock.now(), 0.0)):
            raise StoreConflict("no connection could be opened in time")
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
        except BaseException:  # interrupted, if it is not over
            self._give_up(new, future, late=not over)
            raise
        self._give_up(new, future, late=True)
        raise StoreConflict("no connection could be opened in time")

    def _give_up(self, new: PooledConnection, future: Any, *, late: bool) -> None:
        """Wait for it no more: it is not lent, before it can be lent to somebody else."""
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
        """A connection that nobody waits for any more is open, or has failed."""
        self._no_longer_late(future)
        if future.cancelled() or future.exception() is not None:
            return
        connection = future.result()
        with self._mutex:
            kept = len(self._idle) < self._keep and connection.epoch == self._epoch
            if kept:
                connection.idle_since = clock.now()
                self._idle.append(connection)
        if not kept:
            self.terminate(connection)


class Opening:
    """A connection that is being opened, in a thread or at once; it offers what the pool needs of a Future.

    A Future itself would not do: where an exception of a signal handler strikes whoever waits for it between the lock
    of its Condition and the next line (python/cpython#74174), the thread would wait for that lock for good.
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
        """Open it here."""
        try:
            self._opened = self._work()
        except BaseException as error:  # noqa: BLE001 - whoever waits for it decides
            self._error = error
        self._over = True
        self._running.release()
        self._call_back()

    def wait(self, seconds: float) -> bool:
        """Is it over, in so many seconds?"""
        if not self._over and self._running.acquire(timeout=seconds):
            self._running.release()
        return self._over

    def result(self) -> PooledConnection:
        """Once it is over."""
        if self._error is not None:
            raise self._error
        return cast("PooledConnection", self._opened)

    def exception(self) -> BaseException | None:
        """Once it is over."""
        return self._error

    def cancelled(self) -> bool:
        """A thread cannot be."""
        return False

    def add_done_callback(self, call: Callable[[Opening], None]) -> None:
        """Call it once it is over, here or in its thread."""
        self._then.append(call)
        if self._over:
            self._call_back()

    def _call_back(self) -> None:
        with contextlib.suppress(IndexError):  # each is called once, whoever pops it
            while True:
                self._then.pop()(self)
