"""Connections under a driver that does as it is told: how many there are, and what becomes of the late ones."""

from __future__ import annotations

import asyncio
import contextlib
import dis
import gc
import itertools
import os
import sys
import threading
import time
from functools import partial
from types import FrameType, SimpleNamespace
from typing import Any

import pytest

from dblock.core import clock
from dblock.core.connections.deadlines import Deadlines
from dblock.core.connections.pool import KEPT, AutocommitPool, PooledConnection
from dblock.core.connections.slots import MOMENT, Place, Slots
from dblock.core.errors import PoolExhausted, StoreConflict
from tests.support.lab import threads, until

STRUCK = ("/connections/pool.py", "/connections/slots.py", "/wakeup/registry.py", "/concurrent/futures/_base.py")


class Pool(AutocommitPool):
    """Opens when it may."""

    def __init__(self, most: float) -> None:
        super().__init__(most)
        self.may = threading.Event()
        self.home: Any = None
        self.opened = self.open_now = self.most_open = 0
        self.told = list[str]()

    def open(self, connection: PooledConnection) -> None:
        self.may.wait(10)
        connection.raw = object()
        self.opened += 1

    def close(self, connection: PooledConnection) -> None:
        self.told.append("close")

    def terminate(self, connection: PooledConnection) -> None:
        self.told.append("terminate after a cut" if connection.overdue else "terminate")

    def abandon(self, connection: PooledConnection) -> None:
        self.told.append("abandon")

    def loop(self) -> Any:
        return self.home


class Loop:
    closed = False

    def is_closed(self) -> bool:
        return self.closed


def soon(seconds: float = 0.05) -> float:
    return clock.now() + seconds


def test_whoever_is_interrupted_with_a_late_connection_uses_up_no_slot() -> None:
    """It came late, the next one took it and was interrupted before its statement: the slot is free again."""
    pool = Pool(most=1)
    with pytest.raises(StoreConflict, match="in time"):
        pool.take(soon(), keeps=False)
    pool.may.set()
    assert until(lambda: pool._idle)
    pool.take(soon(), keeps=False)  # and nobody refers to it
    pool.give(pool.take(soon(), keeps=False))


def test_a_late_connection_that_somebody_borrows_at_once_counts_as_lent() -> None:
    """It has come between the end of a wait for it and the wait's giving up: it is not that one's any more."""
    borrowed = list[PooledConnection]()

    class Eager(Pool):
        def await_background(self, future: Any, seconds: float) -> bool:
            assert super().await_background(future, 10)
            return False

        def _arrived(self, future: Any) -> None:
            super()._arrived(future)
            borrowed.append(self.take(soon(), keeps=False))

    pool = Eager(most=2)
    pool.may.set()
    with pytest.raises(StoreConflict, match="in time"):
        pool.take(soon(), keeps=False)
    assert len(pool._slots[False].lent) == 1
    pool.give(borrowed[0])
    assert pool._idle == borrowed
    assert not pool._slots[False].lent


def test_a_crowd_behind_a_late_connection_opens_no_more_than_it_may() -> None:
    """All of them wait for it; when it has come, as many go on as there may be connections."""
    pool, out, most = Pool(most=3), list[PooledConnection](), list[int]()
    with pytest.raises(StoreConflict):
        pool.take(soon(), keeps=False)

    def work() -> None:
        connection = pool.take(soon(10), keeps=False)
        out.append(connection)
        most.append(len(out))
        time.sleep(0.01)
        out.remove(connection)
        pool.give(connection)

    crowd = [threading.Thread(target=work) for _ in range(30)]
    for thread in crowd:
        thread.start()
    time.sleep(0.1)
    pool.may.set()
    for thread in crowd:
        thread.join(20)
    assert len(most) == 30
    assert max(most) <= 3
    assert pool.opened <= 4


def test_a_crowd_uses_its_connections_again() -> None:
    """More are kept than as a rule while somebody waits for them; afterwards the rest is closed."""
    pool = Pool(most=4 * KEPT)
    pool.may.set()
    mine = [pool.take(soon(), keeps=False) for _ in range(4 * KEPT)]

    def work() -> None:
        connection = pool.take(soon(10), keeps=False)
        time.sleep(0.05)
        pool.give(connection)

    crowd = [threading.Thread(target=work) for _ in range(5 * KEPT)]
    for count, thread in enumerate(crowd, 1):
        thread.start()
        assert until(partial(_stand_in_line, pool, count))
    with pool._mutex:  # all at once
        for connection in mine:
            pool.give(connection)
    for thread in crowd:
        thread.join(10)
    assert pool.opened == 4 * KEPT
    assert len(pool._idle) == KEPT


def test_what_breaks_is_cut_before_it_is_closed() -> None:
    """So that nothing that a driver does to end a connection waits for a server that is silent."""
    pool = Pool(most=3)
    pool.may.set()
    first, second = (pool.take(soon(), keeps=False) for _ in range(2))
    pool.give(first)
    pool.drop(second, others=True)
    assert pool.told == ["terminate after a cut"] * 2
    assert not pool._idle
    first, second = (pool.take(soon(), keeps=False) for _ in range(2))
    pool.give(first)
    pool.drop(second, others=False)
    assert pool._idle == [first]


def test_one_that_somebody_was_interrupted_waiting_for_is_expected_too() -> None:
    """So a silent server is not asked for another connection by each who is."""

    class Interrupted(Pool):
        def await_background(self, future: Any, seconds: float) -> bool:
            if not self.told:
                self.told.append("interrupted")
                raise KeyboardInterrupt
            return super().await_background(future, seconds)

    pool = Interrupted(most=3)
    with pytest.raises(KeyboardInterrupt):
        pool.take(soon(), keeps=False)
    with pytest.raises(StoreConflict, match="in time"):
        pool.take(soon(), keeps=False)
    pool.may.set()
    pool.give(pool.take(soon(5), keeps=False))
    assert pool.opened == 1


def test_what_was_lent_in_an_event_loop_that_is_closed_is_lent_no_more() -> None:
    """Whatever was abandoned there never gives it back."""
    pool = Pool(most=1)
    pool.may.set()
    pool.home = over = Loop()
    abandoned = pool.take(soon(), keeps=False)
    pool.home = Loop()
    with pytest.raises(StoreConflict, match="in use"):
        pool.take(soon(), keeps=False)
    over.closed = True
    pool.give(pool.take(soon(), keeps=False))
    pool.give(abandoned)
    assert len(pool._idle) == 1


def test_each_event_loop_has_its_own() -> None:
    """Those of another one stay where they are while it lives, and are abandoned once it is over."""
    pool = Pool(most=3)
    pool.may.set()
    one, other = Loop(), Loop()
    pool.home = one
    pool.give(ours := pool.take(soon(), keeps=False))
    pool.home = other
    pool.give(pool.take(soon(), keeps=False))
    pool.home = one
    assert pool.take(soon(), keeps=False) is ours
    assert pool.told == []
    other.closed = True
    pool.give(pool.take(soon(), keeps=False))
    assert pool.told == ["abandon"]


def test_whoever_came_first_is_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody who comes later is faster, not even whoever gives a connection back and wants one again at once."""
    monkeypatch.setattr("dblock.core.connections.pool.LOOK", 10.0)
    pool, order = Pool(most=1), list[int]()
    pool.may.set()
    mine = pool.take(soon(), keeps=False)

    def work(number: int) -> None:
        connection = pool.take(soon(10), keeps=False)
        order.append(number)
        pool.give(connection)

    crowd = list[threading.Thread]()
    for number in range(20):
        crowd.append(threading.Thread(target=work, args=(number,)))
        crowd[-1].start()
        assert until(partial(_stand_in_line, pool, len(crowd)))
    pool.give(mine)
    mine = pool.take(soon(10), keeps=False)
    assert order == list(range(20))
    pool.give(mine)
    for thread in crowd:
        thread.join(10)
    assert not pool._slots[False].has_line()


def test_who_is_in_the_midst_of_something_goes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before all who begin, however long they have waited; among themselves as they came."""
    monkeypatch.setattr("dblock.core.connections.pool.LOOK", 10.0)
    pool, order = Pool(most=1), list[tuple[bool, int]]()
    pool.may.set()
    mine = pool.take(soon(), keeps=False)

    def work(urgent: bool, number: int) -> None:
        connection = pool.take(soon(10), keeps=False, urgent=urgent)
        order.append((urgent, number))
        pool.give(connection)

    crowd = [threading.Thread(target=work, args=(n % 2 == 1, n)) for n in range(6)]
    for count, thread in enumerate(crowd, 1):
        thread.start()
        assert until(partial(_stand_in_line, pool, count))
    pool.give(mine)
    for thread in crowd:
        thread.join(10)
    assert order == [(True, 1), (True, 3), (True, 5), (False, 0), (False, 2), (False, 4)]


@pytest.mark.parametrize("urgent", [False, True])
def test_whoever_gives_one_back_is_not_faster_than_who_was_called(urgent: bool) -> None:
    """Threads that want one again at once, and hold the interpreter, keep nobody in the line from it."""
    pool, stop, waited = Pool(most=1), threading.Event(), list[float]()
    pool.may.set()

    def greedy() -> None:
        while not stop.is_set():
            connection = pool.take(soon(10), keeps=False, urgent=urgent)
            _ = sum(range(1000))
            pool.give(connection)

    crowd = [threading.Thread(target=greedy) for _ in range(2)]
    for thread in crowd:
        thread.start()
    for _ in range(20):
        start = clock.now()
        pool.give(pool.take(soon(10), keeps=False, urgent=urgent))
        waited.append(clock.now() - start)
    stop.set()
    for thread in crowd:
        thread.join(10)
    assert max(waited) < 1, waited


def test_room_is_kept_for_whoever_was_called_for_a_moment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who comes meanwhile stands behind; when it is over, the next one gets it, and who was called is first again."""
    now = [100.0]
    monkeypatch.setattr("dblock.core.connections.slots.clock", SimpleNamespace(now=lambda: now[0]))
    slots = Slots(1)
    slots.lent.add(1)
    first, second = Place(200.0), Place(200.0)
    slots.join(first)
    slots.join(second)
    assert slots.free(1)
    assert first.notified()
    assert not slots.may_enter(urgent=True)
    assert not slots.looks(second)
    now[0] += MOMENT
    assert slots.looks(second)
    slots.lent.add(2)
    slots.leave(second, served=True)
    assert not slots.looks(first)
    third = Place(200.0)
    slots.join(third)
    slots.join(first, again=True)
    assert first.consume()
    assert slots.free(2)
    assert first.notified()
    assert not third.notified()
    assert slots.looks(first)


def test_one_that_was_cut_is_lent_no_more() -> None:
    """Though its event loop stands still, and does not see it; when it does, it is closed."""
    pool = Pool(most=1)
    pool.may.set()
    stuck = pool.take(soon(), keeps=False)
    with pytest.raises(PoolExhausted):
        pool.take(soon(), keeps=False)
    stuck.cut()
    other = pool.take(soon(), keeps=False)
    assert other is not stuck
    pool.drop(stuck, others=False)
    assert pool.told == ["terminate after a cut"]
    pool.give(other)
    assert pool.take(soon(), keeps=False) is other


def test_no_room_is_kept_for_whoever_does_not_look() -> None:
    """A place whose time is up, whose event loop does not run, or is blocked, or whose flow was interrupted."""
    pool = Pool(most=1)
    pool.may.set()
    slots = pool._slots[False]
    mine = pool.take(soon(), keeps=False)
    late, asleep, gone, blocked = Place(soon(-1)), Place(soon(10)), Place(soon(10)), Place(soon(10))
    asleep._loop = asyncio.new_event_loop()
    for place in (late, asleep, gone, blocked):
        slots.join(place)
    del gone, place
    threading.Timer(0.05, pool.give, (mine,)).start()
    assert pool.take(soon(5), keeps=False) is mine
    assert blocked.notified()
    assert not late.notified()
    assert not asleep.notified()
    asleep._loop.close()


def test_whoever_was_called_and_gives_up_passes_it_on() -> None:
    """And whoever joins when one has just been given back is called at once."""
    slots = Slots(1)
    slots.lent.add(1)
    first, second, third = (Place(soon(10)) for _ in range(3))
    slots.join(first)
    slots.join(second)
    assert slots.free(1)
    assert first.notified()
    assert not second.notified()
    slots.leave(first, served=False)
    assert second.notified()
    slots.leave(second, served=True)
    slots.join(third)
    assert third.notified()


def test_nobody_waits_for_what_would_come_too_late() -> None:
    """A statement that is cut short costs its connection, and the next one that."""
    pool = Pool(most=1)
    pool.may.set()
    mine = pool.take(soon(), keeps=False)
    threading.Timer(0.05, pool.give, (mine,)).start()
    with pytest.raises(PoolExhausted, match="in use"):
        pool.take(soon(0.06), keeps=False)


def test_a_call_that_is_lost_costs_a_pause() -> None:
    """The first one in the line hears of nothing, and looks all the same."""
    pool = Pool(most=1)
    pool.may.set()
    pool._slots[False]._call = lambda: None  # type: ignore[method-assign]
    mine = pool.take(soon(), keeps=False)
    threading.Timer(0.05, pool.give, (mine,)).start()
    start = clock.now()
    assert pool.take(soon(10), keeps=False) is mine
    assert clock.now() - start < 5


def test_a_descriptor_that_somebody_has_closed() -> None:
    """What cannot be cut does not end the watch over all others."""
    deadlines = Deadlines()
    reader, writer = os.pipe()
    os.close(writer)
    broken, sound = PooledConnection(wire=writer), PooledConnection(wire=reader)
    for connection in (broken, sound):
        deadlines.watch(connection, soon(0.01))
        assert until(partial(getattr, connection, "overdue"))
        assert not deadlines.answered(connection)
    broken.wire = -1


class Strike:
    """Traces a thread in its pool, and interrupts it before the given instruction there.

    `as_signals`: of those before which Python runs the handlers of signals. They are after a call, at a function's
    beginning, and where it loops: never between a lock and its `with`, which another thread would wait for.
    """

    def __init__(self, at: int, *, as_signals: bool = False) -> None:
        self._left = at
        self._as_signals = as_signals
        self._last: dict[FrameType, str] = {}
        self.struck = False

    def __call__(self, frame: FrameType, event: str, _: Any) -> Strike | None:
        code = frame.f_code
        if not code.co_filename.endswith(STRUCK) or code.co_name == "__del__":
            return None
        frame.f_trace_opcodes = True
        if event != "opcode":
            return self
        before, self._last[frame] = self._last.get(frame, "RESUME"), dis.opname[code.co_code[frame.f_lasti]]
        if not self._as_signals or before.startswith(("CALL", "RESUME", "JUMP_BACKWARD")):
            self._left -= 1
        if self._left < 0 and not self.struck:
            self.struck = True
            raise KeyboardInterrupt
        return self


def test_whoever_is_interrupted_while_a_connection_is_opened_holds_up_no_thread() -> None:
    """An exception of a signal handler, at each place of the wait in turn: the thread ends, and its slot is free."""
    untraced = sys.maxsize  # Python 3.12 does not count the instructions of what it has not traced before
    for place in itertools.chain([untraced], itertools.count()):
        pool, strike = Pool(most=1), Strike(place)
        opens = threading.Timer(0.01, pool.may.set)
        opens.start()
        _take(pool, strike)
        opens.join()
        assert until(lambda: not threads("dblock connect"), 2), place
        _has_room(pool)
        if not strike.struck and place != untraced:
            break
    assert place > 100


def test_whoever_is_interrupted_in_the_line_holds_up_nobody() -> None:
    """At each place of the wait in turn, while a connection is given back: the next one gets it."""
    untraced = sys.maxsize
    for place in itertools.chain([untraced], itertools.count()):
        pool, strike = Pool(most=1), Strike(place, as_signals=True)
        pool.may.set()
        mine = [pool.take(soon(), keeps=False)]
        over = threading.Event()
        gives = threading.Thread(target=_give_back, args=(pool, mine, over))
        gives.start()
        _take(pool, strike)
        over.set()
        gives.join()
        _has_room(pool)
        assert sum(map(len, pool._slots[False]._lines)) <= 1
        if not strike.struck and place != untraced:
            break
    assert place > 50


def _give_back(pool: Pool, mine: list[PooledConnection], over: threading.Event) -> None:
    """A moment after somebody stands in line, or was interrupted before."""
    while not (over.is_set() or pool._slots[False].has_line()):
        time.sleep(0.0005)
    time.sleep(0.002)
    pool.give(mine.pop())


def _stand_in_line(pool: Pool, count: int) -> bool:
    return sum(map(len, pool._slots[False]._lines)) == count


def _take(pool: Pool, strike: Strike) -> None:
    sys.settrace(strike)
    with contextlib.suppress(KeyboardInterrupt):
        _ = pool.take(soon(5), keeps=False)
    sys.settrace(None)
    strike._last.clear()


def _has_room(pool: Pool) -> None:
    if pool._slots[False].lent:
        gc.collect()  # frames that were traced
    pool.give(pool.take(soon(5), keeps=False))
