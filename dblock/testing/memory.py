"""Locks in memory: of both faces, of all databases, with a clock that tests move.

The rows are in a SQLite database of the test's own, and the statements on them are SQLite's, which ask the test's clock
for the time. So what a test sees is the protocol itself, as on a server. No thread watches over leases: the flow that
moves the clock, or waits, does what is due.

The clock stands still. A wait that only time can end moves it, and takes none: the key is held by a stranger (`busy`),
by nobody any more (`min_hold`, a thread or task that has ended), or by the waiting thread itself. Any other wait is for
a thread or task of the test, and a real one.

Rule: what is put in the place of something is put back, however the test ends, and what the test leaves held is lost.
"""

from __future__ import annotations

import asyncio
import math
import sqlite3
import threading
import time
import weakref
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from functools import cache
from typing import Any, Final

from dblock.core import runtime
from dblock.core.acquire.services import WaiterServices
from dblock.core.clock import now as real
from dblock.core.errors import LockStoreError
from dblock.core.holding.flow import Flow
from dblock.core.lock.base_store import BaseStore
from dblock.core.protocol.drive import drive
from dblock.core.protocol.sending import Database
from dblock.core.protocol.steps import Execute, Rows, Sleep, Wait
from dblock.core.runtime import Runtime
from dblock.core.share_keys import bounds_of_shares
from dblock.core.statements.base import Statement, perform, without_secrets
from dblock.core.statements.common import FLOW
from dblock.core.statements.sqlite import SQL, SQLiteDialect
from dblock.core.timing import Timing
from dblock.core.values import SHARE, Seconds, key_of_share
from dblock.core.wakeup.registry import Wakeup
from dblock.core.watchdog.keeper import Keeper
from dblock.core.watchdog.watchdog import Watchdog
from dblock.operating.statements.tables import plain_sql
from dblock.testing.holders import STRANGER, await_callbacks
from dblock.testing.recorder import Recorder, following

LONGEST: Final = 86_400.0  # seconds after which a wait that moves the clock is refused: it would never end
SLICE: Final = 0.005  # seconds of a real wait, after which it is seen whether only time can end it by now
TIMING: Final = Timing(waiter_ttl=3600.0, poll_notified=600.0, deadlock_check=1.0)
OWNERS: Final = """
    SELECT owner FROM locks
    WHERE (lock_key = :key OR (lock_key > :low AND lock_key < :high)) AND owner IS NOT NULL
        AND expires_at > dblock_now() || '000'
        AND substr(owner, 1, :flow) IS NOT (SELECT substr(owner, 1, :flow) FROM locks WHERE lock_key = :door)
"""
"""Who holds a key, or the shares that the holder of a door waits for."""


class MemoryDialect(SQLiteDialect):
    """No two fences are the same, and statements wait for no writer."""

    tick = 0.0
    single_writer = False


DIALECT: Final = MemoryDialect()


class Clock:
    """Seconds since the locks of a test have been in memory."""

    def __init__(self, move: Callable[[float], None]) -> None:
        self._move, self._time = move, 0.0

    def now(self) -> float:
        """Seconds since `memory()` began."""
        return self._time

    def advance(self, seconds: Seconds) -> None:
        """Let time pass: leases are renewed on the way, or end, and `on_lost` and `on_at_risk` have been called.

        A flow that waits in another thread or task finds out as soon as it runs. Raises ValueError for a negative
        number.
        """
        span = seconds.total_seconds() if isinstance(seconds, timedelta) else float(seconds)
        if not 0 <= span < math.inf:
            raise ValueError(f"the clock of locks goes forward, by a number of seconds, not by {seconds!r}")
        self._move(span)


@cache
def _timed(statement: Statement) -> Statement:
    sql = statement.sql.replace(SQL.micros, "dblock_micros()").replace("'now'", "dblock_now()")
    return replace(statement, sql=sql)


class MemoryStore(BaseStore):
    """The locks of a test. One statement at a time runs on its tables."""

    name = "the locks in memory"
    pins = False
    renewable = True
    reaping: tuple[float, float] | None = None
    history = 0
    process: MemoryRuntime
    ended = False
    subscribe: Any
    in_background: Any

    def __init__(self) -> None:
        self.clock = Clock(self.move)
        self.database = Database(weakref.ref(self), DIALECT, self.clock.now, TIMING)
        self._mutex = threading.RLock()  # of the tables and the clock: it stands still while a statement runs
        self._start, self._last = math.floor(time.time()), 0
        """When it began, in seconds since 1970; the last fence, in microseconds."""
        self._tables = sqlite3.connect(":memory:", check_same_thread=False, isolation_level=None)
        self._tables.create_function("dblock_now", 0, self._text)
        self._tables.create_function("dblock_micros", 0, self._number)
        _ = self._tables.executescript(plain_sql("sqlite"))
        self._moved = weakref.WeakKeyDictionary[Wakeup, float]()
        """When a waiter has first moved the clock."""

    # -- statements

    def execute(self, step: Execute) -> Rows:
        if self.ended:
            raise LockStoreError("memory() has ended, and with it the locks that were taken in it")
        with self._mutex:
            self.database.latency.observe(0.0, self.clock.now())
            cursor: Any = self._tables.cursor()
            try:
                rows = perform(cursor, _timed(step.statement), step.parameters, "named")
            except sqlite3.IntegrityError:  # the row is there
                return []
            except UnicodeError:
                raise LockStoreError("the key or label has characters that no database can store") from None
            return without_secrets(step.statement, rows)

    async def aexecute(self, step: Execute) -> Rows:
        return self.execute(step)

    def _text(self) -> str:
        moment = datetime.fromtimestamp(self._start, UTC) + timedelta(microseconds=round(1e6 * self.clock.now()))
        return moment.strftime("%Y-%m-%d %H:%M:%S.%f")[:-3]

    def _number(self) -> int:
        self._last = max(self._last + 1, 1_000_000 * self._start + round(1e6 * self.clock.now()))
        return self._last

    # -- letting time pass

    def move(self, seconds: float) -> None:
        """Move the clock, and see to all that is due on the way, by no more at a time than to the next such moment."""
        with self._mutex:
            while seconds > 0:
                step = min(seconds, self.process.watchdog._look_at_all())
                self.clock._time += step
                seconds -= step
            _ = self.process.watchdog._look_at_all()
        await_callbacks()

    def pause(self, step: Sleep | Wait) -> None:
        """Wait for real only as long as that is of use; else move the clock."""
        for wakeup in self._waiting(step):
            wakeup.wait(SLICE)

    async def apause(self, step: Sleep | Wait) -> None:
        """The same on an event loop, where others get their turns."""
        await asyncio.sleep(0)
        for wakeup in self._waiting(step):
            await wakeup.wait_async(SLICE)

    def _waiting(self, step: Sleep | Wait) -> Iterator[Wakeup]:
        """Yields its wakeup as often as a slice is to be waited for real; then moves the clock to its end."""
        begun, patience = self.clock.now(), real() + step.seconds
        until = begun + step.seconds
        if isinstance(step, Wait):
            wakeup = step.wakeup
            while not (self.ended or wakeup.notified() or self._only_time_ends(wakeup)):
                if self.clock.now() >= until or real() >= patience:
                    break
                yield wakeup
            if wakeup.notified():
                return
            if begun - self._moved.setdefault(wakeup, begun) > LONGEST:
                raise RuntimeError("nobody will ever give back this lock: give it a timeout, or busy() a ttl")
        self.move(until - self.clock.now())

    def _only_time_ends(self, wakeup: Wakeup) -> bool:
        """Whether no flow of this process can end the wait of this flow, as far as is known."""
        # Without a key it waits for another flow.
        key = next((key for (key, _), each in self.process.wakeups._all() if each is wakeup), "")
        door = key_of_share(key) if key.endswith(SHARE) else ""
        bounds = bounds_of_shares(door) if door else {"low": "", "high": ""}
        with self._mutex:
            parameters = {"key": key, "door": door, "flow": FLOW, **bounds}
            owners = [owner for (owner,) in self._tables.execute(OWNERS, parameters)]
        holds = {hold.tenure.owner: hold.flow() for hold in list(self.process.watchdog._holds)}
        ours = [owner for owner in owners if owner and not owner.startswith(STRANGER)]
        idle = (owner in holds and self._is_idle(holds[owner]) for owner in ours)  # without a hold one is at work on it
        return bool(owners) and all(idle)

    def _is_idle(self, flow: Flow | None) -> bool:
        """Whether a flow releases nothing while this one waits."""
        flows, driver = self.process.flows, None if flow is None else flow.driver()
        if driver is None:  # any thread may end the term of an object
            return flow is None
        return driver.ended() or driver is flows.current() or driver.life() is flows.thread.life


class Notified(WaiterServices):  # by those that release
    notifications_ready = True


class MemoryKeeper(Keeper):
    """Renews in the flow that moves the clock."""

    store: MemoryStore

    def wake(self) -> None:
        """Do nothing: no thread is needed."""

    def begin(self, steps: Any, **_: Any) -> None:
        if not self.store.ended:
            drive(steps)


class MemoryWatchdog(Watchdog):
    """Watches when it is told to."""

    keeps = MemoryKeeper

    def wake(self) -> None:
        """Do nothing: the caller that moves the clock does what is due."""


class MemoryRuntime(Runtime):
    """The process, as long as its locks are in memory."""

    def __init__(self, store: MemoryStore, outer: Runtime) -> None:
        super().__init__()
        self.store, self.outer, self.acquire_hooks = store, outer, outer.acquire_hooks
        self.watchdog: MemoryWatchdog = MemoryWatchdog(self.flows, self.give_back, self._withdraw)
        self.store_override = store
        store.process = self

    def add_pool(self, pool: Any) -> None:
        """Left to the outer one: connections are to databases."""
        self.outer.add_pool(pool)

    def waiter_services(self, store: Any) -> WaiterServices:
        return Notified()

    def forked(self) -> Runtime:
        """A child has a copy of the locks in memory, in which it owns nothing."""
        return MemoryRuntime(self.store, self.outer.forked())


class Memory(Recorder):
    """The locks in memory, what was locked there, and their clock."""

    def __init__(self) -> None:
        super().__init__()
        self._store = MemoryStore()
        self.clock = self._store.clock


@contextmanager
def memory() -> Generator[Memory]:
    """In this block all locks of this process live in memory, those of Django and of every engine in one table.

    No database is asked, whatever threads and tasks the locks are taken in. Locks that are held when it ends are lost
    (`Reason.RELEASED`). Raises RuntimeError inside another one, and while this process holds a lock. A majority lock
    goes by the real clock: `db_quorum_lock` raises RuntimeError in it.
    """
    made, outer = Memory(), runtime.current
    if isinstance(outer, MemoryRuntime):
        raise RuntimeError("memory() was called inside memory(): use the locks of that one, or end it first")  # noqa: TRY004
    if held := ", ".join(sorted({repr(hold.key) for hold in list(outer.watchdog._holds)})):
        raise RuntimeError(f"memory() was called while this process holds {held}: release that first")
    runtime.current = process = MemoryRuntime(made._store, outer)
    try:
        with following(made):
            yield made
    finally:
        for hold in process.watchdog.give_up(made._store):
            if (flow := hold.flow()) is not None:
                _ = flow.holds.pop((made._store, hold.key), None)
        made._store.ended = True
        await_callbacks()
        runtime.current = outer
