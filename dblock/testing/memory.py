"""Locks in memory: of both faces, of all databases, with a clock that tests move.

The rows are in a SQLite database of the test's own, and the statements on them are SQLite's, which ask the test's clock
for the time. So what a test sees is the protocol itself, as on a server: what the caller's transactions do is of no
account, leases are renewed, first come is first served.

Theory of waiting
-----------------
The clock stands still, so a wait must not last for real where nothing but time could end it. A flow waits *in vain* for
a key that is held by a stranger (`busy`), by a thread or task that has ended, by a flow whose own thread is the one
that waits, or by a flow that waits in vain itself. A permit counts as held by the thread or task that acquired it. For
shares a flow waits in vain if each that is in its way is held so. If all who wait do so in vain, and each has come to
its pause, the clock is moved to the end of the shortest pause: a timeout of ten seconds is over at once, and a deadlock
is found.

Else somebody waits for a flow that may be at work, in another thread or task. That wait is real, and ends when the key
is given back; meanwhile the clock goes along with the real one, so that a timeout ends it too.

No thread watches over leases: the flow that moves the clock, or waits for real, does what is due.

Rule: what is put in the place of something is put back, however the test ends, and what the test leaves held is lost.
"""

from __future__ import annotations

import asyncio
import math
import sqlite3
import threading
import time
import weakref
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import cache
from typing import Any, Final
from weakref import WeakKeyDictionary

from dblock.core import runtime
from dblock.core.acquire.request import Refused
from dblock.core.acquire.services import WaiterServices
from dblock.core.acquire.site import Site
from dblock.core.connections.connection import PooledConnection
from dblock.core.errors import LockStoreError
from dblock.core.holding.flow import Flow, Hold
from dblock.core.lock.base import BaseLock
from dblock.core.protocol import tenures
from dblock.core.protocol.drive import drive
from dblock.core.protocol.sending import Database
from dblock.core.protocol.steps import Execute, Rows, Sleep, Steps, Wait
from dblock.core.protocol.store import Store
from dblock.core.runtime import Runtime
from dblock.core.share_keys import bounds_of_shares
from dblock.core.statements import DIALECTS
from dblock.core.statements.base import Statement
from dblock.core.statements.common import FLOW
from dblock.core.statements.sqlite import SQL
from dblock.core.timing import Timing
from dblock.core.values import SHARE, key_of_share
from dblock.core.wakeup.registry import Wakeup, Wakeups
from dblock.core.watchdog.heartbeats import Heartbeat
from dblock.core.watchdog.renewals import Renewal
from dblock.core.watchdog.watchdog import Watchdog
from dblock.testing.clock import Clock
from dblock.testing.holders import InMemory, await_callbacks
from dblock.testing.recorder import Recorder, following

LONGEST: Final = 86_400.0
"""Seconds for which one wait moves the clock on, at most: then it is one that never ends."""
SLICE: Final = 0.005
"""Seconds of a real wait, after which it is seen whether it has become one in vain."""
TIMING: Final = Timing(waiter_ttl=3600.0, poll_notified=600.0, deadlock_check=5.0).checked()
"""No place in the queue ends, and waiters are always notified."""


DIALECT: Final = replace(DIALECTS["sqlite"], tick=0.0, single_writer=False)
"""SQLite's statements, which the test's clock is put into when they are run.

It does not tick, and yet no two of its readings as a number are the same.
"""


@cache
def _timed(statement: Statement) -> Statement:
    sql = statement.sql.replace(SQL.micros, "dblock_micros()").replace("'now'", "dblock_now()")
    return replace(statement, sql=sql)


class Tables:
    """The tables in memory; one statement at a time runs on them."""

    def __init__(self, now: Callable[[], float]) -> None:
        self._now, self._start = now, math.floor(time.time())
        self._mutex = threading.RLock()
        self._moment = self._last = 0
        """Microseconds since 1970: when the statement under way began; the last number that was given out."""
        self.connection = sqlite3.connect(":memory:", check_same_thread=False, isolation_level=None)
        self.connection.create_function("dblock_now", 0, self._text)
        self.connection.create_function("dblock_micros", 0, self._number)
        _ = self.connection.executescript(DIALECT.ddl)
        self._lent = PooledConnection(self.connection, joined=True)

    def take(self, until: float, *, critical: bool, priority: bool = False) -> PooledConnection:
        """The one connection."""
        _ = self._mutex.acquire()
        self._moment = round((self._start + self._now()) * 1_000_000)
        return self._lent

    def give(self, connection: PooledConnection) -> None:
        """The next one may have it."""
        self._mutex.release()

    give_after_error = give

    def drop(self, connection: PooledConnection, *, others: bool) -> None:
        """Nothing is unknown here."""
        self.give(connection)

    def owner(self, key: str) -> str | None:
        """Whose the key is by its row, if it is anybody's; empty for nobody's, during `min_hold`."""
        lent = self.take(math.inf, critical=True)
        try:
            held = "SELECT owner FROM locks WHERE lock_key = ? AND expires_at > ?"
            row = lent.raw.execute(held, (key, self._row())).fetchone()
        finally:
            self.give(lent)
        return None if row is None else row[0]

    def owners_of_shares(self, door: str) -> list[str]:
        """Whose the shares of a key are, but for those of the one that waits at its door."""
        mine, bounds = (self.owner(door) or "")[:FLOW], bounds_of_shares(door)
        lent = self.take(math.inf, critical=True)
        try:
            held = (
                "SELECT owner FROM locks WHERE lock_key > ? AND lock_key < ? AND owner IS NOT NULL AND expires_at > ?"
            )
            rows = lent.raw.execute(held, (bounds["low"], bounds["high"], self._row())).fetchall()
        finally:
            self.give(lent)
        return [owner for (owner,) in rows if owner is not None and (not mine or owner[:FLOW] != mine)]

    def _text(self) -> str:
        return self._row()[:-3]

    def _row(self) -> str:
        return datetime.fromtimestamp(self._moment // 1000 / 1000, UTC).strftime("%Y-%m-%d %H:%M:%S.%f")

    def _number(self) -> int:
        self._last = max(self._last + 1, self._moment)
        return self._last


@dataclass(slots=True, eq=False)
class Pause:
    """A flow that waits for a key."""

    until: float
    flow: Flow
    thread: Any
    """An object that dies with the flow's thread."""


class MemoryStore(InMemory):
    """The locks of a test, and what its waiters do."""

    _described = name = "the locks in memory"
    _create_table = "it is made by dblock.testing.memory()"
    _rename_tables = "nobody else has tables there"
    _paramstyle = "named"
    _errors = (sqlite3.Error,)
    _connect_errors = (sqlite3.Error,)
    pins = False
    renewable = True
    reaping: tuple[float, float] | None = None
    history = 0

    def __init__(self) -> None:
        self.clock = Clock(self.move)
        self.database = Database(weakref.ref(self), DIALECT, self.clock.now, TIMING)
        self.tables = self._source = Tables(self.clock.now)
        self.strangers = {}
        self.trying: set[object] = set()
        """The attempts to take a lock that are under way."""
        self.process: MemoryRuntime
        self.ended = False
        self.moving = threading.RLock()
        """Held by the flow that moves the clock."""
        self._pauses: dict[Wakeup, Pause] = {}
        self._jumped: WeakKeyDictionary[Wakeup, float] = WeakKeyDictionary()
        """For how many seconds a waiter has moved the clock."""

    def execute(self, step: Execute) -> Rows:
        """In this thread."""
        if self.ended:
            raise LockStoreError("memory() has ended, and with it the locks that were taken in it")
        return super().execute(step._replace(statement=_timed(step.statement)))

    async def aexecute(self, step: Execute) -> Rows:
        """Likewise: nobody waits for it."""
        return self.execute(step)

    def subscribe(self, channel: str, wakeups: Wakeups) -> None:
        """None: waiters are in this process, and are notified there."""

    def in_background(self, function: Callable[[], None]) -> Callable[[], bool]:
        """Nobody asks for it."""
        raise NotImplementedError

    def rest(self, seconds: float) -> None:
        """Likewise."""
        raise NotImplementedError

    # -- letting time pass

    def move(self, seconds: float) -> None:
        """Move the clock, and see to all that is due on the way."""
        self._forward(seconds)
        await_callbacks()

    def _forward(self, seconds: float) -> None:
        """By no more at a time than to the next moment at which something is due."""
        with self.moving:
            while seconds > 0:
                due = self.process.watchdog.see_to_it() if self.process.watchdog.keeps_any else math.inf
                step = min(seconds, due)
                self._renew_strangers(step)
                self.clock.set_forward(step)
                seconds -= step
            _ = self.process.watchdog.see_to_it()

    def _renew_strangers(self, step: float) -> None:
        due = [(tenure, ttl + step) for tenure, ttl in list(self.strangers.items()) if ttl]
        if due and not self.ended:
            _ = drive(tenures.renew(self.database, due, math.inf))

    def pause(self, step: Sleep | Wait) -> None:
        """Wait for real only as long as that is of use; else move the clock."""
        if isinstance(step, Sleep):
            self.move(step.seconds)
            return
        with self._waiting(step) as pause:
            while not self._over(step.wakeup, pause):
                with self.clock.running():
                    step.wakeup.wait(SLICE)
        await_callbacks()

    async def apause(self, step: Sleep | Wait) -> None:
        """The same on an event loop, where others get their turns."""
        if isinstance(step, Sleep):
            self.move(step.seconds)
            await asyncio.sleep(0)
            return
        with self._waiting(step) as pause:
            await asyncio.sleep(0)
            while not self._over(step.wakeup, pause):
                with self.clock.running():
                    await step.wakeup.wait_async(SLICE)

    @contextmanager
    def _waiting(self, step: Wait) -> Generator[Pause]:
        flows = self.process.flows
        pause = Pause(self.clock.now() + step.seconds, flows.current(), flows.thread.life)
        self._pauses[step.wakeup] = pause
        try:
            yield pause
        finally:
            _ = self._pauses.pop(step.wakeup, None)

    def _over(self, wakeup: Wakeup, pause: Pause) -> bool:
        """Whether the pause is over. If all who wait do so in vain, the clock is moved until one of their pauses is."""
        if self.ended:
            raise LockStoreError("memory() has ended while somebody was waiting for a lock")
        with self.moving:
            _ = self.process.watchdog.see_to_it()
            while not wakeup.notified() and self.clock.now() < pause.until:
                pauses = self._all_in_vain()
                if not pauses:
                    return False
                self._jump(wakeup, min(each.until for each in pauses) - self.clock.now())
        return True

    def _jump(self, wakeup: Wakeup, seconds: float) -> None:
        self._jumped[wakeup] = self._jumped.get(wakeup, 0.0) + seconds
        if self._jumped[wakeup] > LONGEST:
            raise RuntimeError(
                "a lock was waited for that nobody will ever give back: a day has passed on the clock of the locks in "
                "memory; give it a timeout, or make the key busy with ttl="
            )
        self._forward(seconds)

    # -- who waits in vain

    def _all_in_vain(self) -> list[Pause]:
        """The pauses of all who wait, if each has come to one and they do so in vain; else none."""
        keys = {wakeup: key for (key, _), wakeup in self.process.wakeups._all()}
        # One without a database waits for another flow, which is asked itself.
        pauses = {wakeup: pause for wakeup, pause in dict(self._pauses).items() if wakeup.database is not None}
        now = self.clock.now()
        if len(pauses) < len(self.trying) or not pauses.keys() <= keys.keys():
            return []
        if any(wakeup.notified() or pause.until <= now for wakeup, pause in pauses.items()):
            return []
        waiting = {pause.flow: (keys[wakeup], pause) for wakeup, pause in pauses.items()}
        in_vain = all(self._in_vain(keys[wakeup], pause, waiting, set()) for wakeup, pause in pauses.items())
        return list(pauses.values()) if in_vain else []

    def _in_vain(self, key: str, pause: Pause, waiting: dict[Flow, tuple[str, Pause]], seen: set[str]) -> bool:
        if key.endswith(SHARE):  # at the door, for the end of shares
            owners = self.tables.owners_of_shares(key_of_share(key))
            return bool(owners) and all(self._is_vain(owner, key, pause, waiting, seen) for owner in owners)
        owner = self.tables.owner(key)
        return owner is not None and self._is_vain(owner, key, pause, waiting, seen)

    def _is_vain(
        self, owner: str, key: str, pause: Pause, waiting: dict[Flow, tuple[str, Pause]], seen: set[str]
    ) -> bool:
        """Whether nobody will end the tenure of that owner, as far as is known."""
        if not owner or any(tenure.owner == owner for tenure in list(self.strangers)):
            return True
        hold = next((each for each in list(self.process.watchdog._holds) if each.tenure.owner == owner), None)
        if hold is None:
            return False
        flow = hold.flow()
        if flow is not None and flow.idle is not None:  # a permit, which any thread may release: its own is asked
            who, main = flow.who["thread"], threading.main_thread().name
            ended = who != main and not who.startswith("task ") and flow.idle()
            return ended or who == pause.flow.who["thread"]
        if flow is None or flow.ended() or (flow is not pause.flow and flow.life() is pause.thread):
            return True
        if flow not in waiting:
            return False
        return key in seen or self._in_vain(*waiting[flow], waiting, {*seen, key})


class Attendant(WaiterServices):
    """Does nothing for waiters: releasers notify them."""

    notifications_ready = True


class MemoryWatchdog(Watchdog):
    """Watches when it is told to, over locks in memory; over others as ever."""

    def __init__(self, process: MemoryRuntime, outer: Watchdog) -> None:
        super().__init__(process.flows, process._give_back, process._withdraw)
        self._process, self._outer = process, outer

    def add(self, hold: Hold) -> None:
        """Keep it from now on."""
        if hold.store is self._process.store:
            super().add(hold)
        else:
            self._outer.add(hold)

    def discard(self, hold: Hold) -> bool:
        """Keep it no more; False if it was not kept."""
        return super().discard(hold) if hold.store is self._process.store else self._outer.discard(hold)

    def wake(self) -> None:
        """Does nothing: moving the clock does what is due."""

    def wake_by(self, moment: float) -> None:
        """Left to the outer watchdog: connections are to databases."""
        self._outer.wake_by(moment)

    @property
    def keeps_any(self) -> bool:
        """Whether something may be due."""
        return bool(self._holds)

    def see_to_it(self) -> float:
        """Do what is due now; seconds until something else is."""
        return self._look_at_all()

    def _send(self, batch: Renewal | Heartbeat, loop: Any) -> bool:
        if not self._process.store.ended:
            drive(batch.steps())
        return True

    def close(self) -> None:
        """The process ends."""
        self._outer.close()


class MemoryRuntime(Runtime):
    """The process, as long as its locks are in memory."""

    watchdog: MemoryWatchdog

    def __init__(self, store: MemoryStore, outer: Runtime) -> None:
        super().__init__()
        self.store, self.outer = store, outer
        self.flows, self.deadlines, self.acquire_hooks, self._pools = (
            outer.flows,
            outer.deadlines,
            outer.acquire_hooks,
            outer._pools,
        )
        self.watchdog = MemoryWatchdog(self, outer.watchdog)
        self.store_override = self._override
        store.process = self

    def _override(self, lock: BaseLock | None) -> Store:
        """The store in memory; but what was locked before is where it was."""
        if lock is not None:
            for hold in self.flows.current().holds.values():
                if hold.store is not self.store and hold.entries and hold.entered_by(lock):
                    return hold.store
        return self.store

    def site(self, store: Store) -> Site:
        """As ever; what is not in memory is as it was."""
        return super().site(store) if store is self.store else self.outer.site(store)

    def waiter_services(self, store: Store) -> WaiterServices:
        """Likewise."""
        return Attendant() if store is self.store else self.outer.waiter_services(store)

    def forked(self) -> Runtime:
        """A child has a copy of the locks in memory, in which it owns nothing."""
        return MemoryRuntime(self.store, self.outer.forked())


class Memory(Recorder):
    """The locks in memory, what was locked there, and their clock."""

    def __init__(self) -> None:
        super().__init__()
        self._store = MemoryStore()
        self.clock = self._store.clock

    def _follow(self, lock: BaseLock, timeout: float | None, steps: Steps[Hold | Refused]) -> Steps[Hold | Refused]:
        attempt = object()
        with self._store.moving:  # else the clock might be on its way to the end of somebody's wait
            self._store.trying.add(attempt)
        try:
            return (yield from super()._follow(lock, timeout, steps))
        finally:
            self._store.trying.discard(attempt)

    def _begin(self) -> None:
        runtime.current = MemoryRuntime(self._store, runtime.current)

    def _end(self) -> None:
        """What is still held is lost; waiters are told."""
        process, store = self._store.process, self._store
        for hold in process.watchdog.give_up(store):
            flow = hold.flow()
            if flow is not None:
                _ = flow.holds.pop((store, hold.key), None)
        store.ended = True
        await_callbacks()
        if runtime.current is process:
            runtime.current = process.outer
            return
        inner = runtime.current  # another memory() that began in this one, and has not ended
        while isinstance(inner, MemoryRuntime):
            if inner.outer is process:
                inner.outer = process.outer
                return
            inner = inner.outer


@contextmanager
def memory() -> Generator[Memory]:
    """In this block all locks of this process live in memory, those of Django and of every engine in one table.

    No database is asked, whatever threads and tasks the locks are taken in. Locks that are held when it begins stay
    where they are; those that are held when it ends are lost (`Reason.RELEASED`). One in another begins empty.
    """
    made = Memory()
    made._begin()
    try:
        with following(made):
            yield made
    finally:
        made._end()
