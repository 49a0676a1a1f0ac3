"""Connections under a driver that does as it is told: how many there are, and what becomes of the late ones."""

from __future__ import annotations

import contextlib
import gc
import itertools
import os
import sys
import threading
import time
from functools import partial
from types import FrameType
from typing import Any

import pytest

from dblock.core import clock
from dblock.core.connections.deadlines import Deadlines
from dblock.core.connections.pool import AutocommitPool, PooledConnection
from dblock.core.errors import StoreConflict
from tests.support.lab import threads, until


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

    def rest(self, seconds: float) -> None:
        time.sleep(seconds)


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
    assert len(pool._out[False]) == 1
    pool.give(borrowed[0])
    assert pool._idle == borrowed
    assert not pool._out[False]


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
    """Traces a thread in its pool, and interrupts it before the given instruction there."""

    def __init__(self, at: int) -> None:
        self._left = at
        self.struck = False

    def __call__(self, frame: FrameType, event: str, _: Any) -> Strike | None:
        code = frame.f_code
        if not code.co_filename.endswith(("/pool.py", "/concurrent/futures/_base.py")) or code.co_name == "__del__":
            return None
        frame.f_trace_opcodes = True
        self._left -= event == "opcode"
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
        sys.settrace(strike)
        with contextlib.suppress(KeyboardInterrupt):
            pool.take(soon(5), keeps=False)
        sys.settrace(None)
        opens.join()
        assert until(lambda: not threads("dblock connect"), 2), place
        if pool._out[0]:
            gc.collect()  # frames that were traced
        pool.give(pool.take(soon(5), keeps=False))
        if not strike.struck and place != untraced:
            break
    assert place > 100
