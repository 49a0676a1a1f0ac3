"""Connections under a driver that does as it is told: event loops, deadlines and questions.

How many there are, and who gets the next, is in `tests.core.test_pool_worlds`.
"""

from __future__ import annotations

import math
import os
import socket
import threading
from functools import partial
from typing import Any

import pytest

from dblock.core import clock, timing
from dblock.core.connections.connection import PooledConnection, Wire
from dblock.core.connections.deadlines import Deadlines
from dblock.core.connections.pool import HANGING, AutocommitPool
from dblock.core.errors import StoreUnreachable
from tests.conftest import timed
from tests.support.lab import there, until


class Pool(AutocommitPool):
    """Opens when it may."""

    def __init__(self, most: float) -> None:
        super().__init__(most, loop=lambda: self.home)
        self.may = threading.Event()
        self.home: Any = None
        self.told = list[str]()

    def open(self, connection: PooledConnection) -> None:
        self.may.wait(10)
        connection.raw = object()

    def close(self, connection: PooledConnection, *, broken: bool) -> None:
        how = "terminate" if broken else "close"
        self.told.append(f"{how} after a cut" if connection.overdue else how)


class Loop:
    closed = False

    def is_closed(self) -> bool:
        return self.closed


def soon(seconds: float = 0.05) -> float:
    return clock.now() + seconds


def test_a_flow_interrupted_with_a_late_connection_uses_up_no_slot() -> None:
    """It came late, the next one took it and was interrupted before its statement: the slot is free again."""
    pool = Pool(most=1)
    with pytest.raises(StoreUnreachable, match="in time"):
        pool.take(soon(), critical=False)
    pool.may.set()
    assert until(lambda: pool._idle)
    pool.take(soon(5), critical=False)  # and nobody refers to it
    pool.give(pool.take(soon(5), critical=False))


def test_openings_that_hang_are_not_joined_by_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """However many callers come, and whatever they give up: a few for takes, and as many more for renewals."""
    pool, opened = Pool(most=100), list[PooledConnection]()
    monkeypatch.setattr(pool, "in_background", lambda _, connection: opened.append(connection))  # it never ends
    for critical, most in ((False, HANGING), (True, 2 * HANGING), (False, 2 * HANGING)):
        for _ in range(HANGING + 2):
            with pytest.raises(StoreUnreachable, match="in time"):
                pool.take(soon(), critical=critical)
            for each in opened:
                each.idle_since = -math.inf  # for long
        assert len(opened) == most


def test_each_event_loop_has_its_own() -> None:
    """Those of another one stay where they are while it lives, and are closed once it is over."""
    pool = Pool(most=3)
    pool.may.set()
    one, other = Loop(), Loop()
    pool.home = one
    pool.give(ours := pool.take(soon(5), critical=False))
    pool.home = other
    pool.give(pool.take(soon(5), critical=False))
    pool.home = one
    assert pool.take(soon(5), critical=False) is ours
    assert pool.told == []
    other.closed = True
    pool.give(pool.take(soon(5), critical=False))
    assert pool.told == ["close"]


def test_a_descriptor_that_somebody_has_closed() -> None:
    """What cannot be cut does not end the watch over all others."""
    deadlines = Deadlines()
    broken, sound = (PooledConnection(wire=Wire(fileno=each.detach())) for each in socket.socketpair())
    wire = there(broken.wire)
    os.close(wire.fileno())
    for connection in (broken, sound):
        deadlines.arm(connection.cut, soon(0.01))
        assert until(partial(getattr, connection, "overdue"))
        assert not deadlines.disarm(connection.cut)
    _ = wire.detach()


def test_a_deadline_cuts_no_later_statement() -> None:
    """A connection that sends again while the round, which has seen its old deadline, cuts another one."""
    deadlines, later = Deadlines(), soon(60)
    reused = PooledConnection(wire=Wire())

    def answered() -> None:
        assert deadlines.disarm(reused.cut)
        deadlines.arm(reused.cut, later)

    deadlines.arm(answered, moment := clock.now() - 0.1)  # the first that is due
    deadlines._due[reused.cut] = moment
    _ = deadlines.round()
    assert deadlines._due == {reused.cut: later}
    assert deadlines.disarm(reused.cut)
    assert not reused.overdue
    _ = deadlines.wake()  # its thread does not wait a minute before it ends


def test_other_calls_are_made_at_their_time() -> None:
    """Not early, each once."""
    deadlines, made = Deadlines(), list[tuple[int, bool]]()
    begun = clock.now()

    def make(number: int, moment: float) -> None:
        made.append((number, clock.now() >= moment))

    for number, seconds in ((2, 0.06), (1, 0.02), (3, 0.1)):
        deadlines.arm(partial(make, number, begun + seconds), begun + seconds)
    assert until(lambda: len(made) == 3)
    assert sorted(made) == [(1, True), (2, True), (3, True)]


class AskedPool(Pool):
    """Its connections have a server that can be asked, and `dead` ones do not answer."""

    def __init__(self, most: float) -> None:
        super().__init__(most)
        self.may.set()
        self.asked = list[tuple[PooledConnection, float]]()
        """Which connections were asked, and how many seconds they had."""
        self.dead = list[PooledConnection]()
        self.interrupts = False

    def open(self, connection: PooledConnection) -> None:
        super().open(connection)
        connection.wire, connection.question = Wire(), lambda: None

    def ask(self, connection: PooledConnection, until: float) -> None:
        self.asked.append((connection, until - clock.now()))
        if self.interrupts:
            raise KeyboardInterrupt
        if connection in self.dead:
            raise TimeoutError

    def filled(self, count: int) -> list[PooledConnection]:
        """So many idle connections, the last one on top."""
        made = [self.take(soon(5), critical=False) for _ in range(count)]
        for each in made:
            self.give(each)
        self.asked.clear()
        return made


def test_hot_use_asks_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """A connection is asked when it has been idle for long, and trusted again after its next statement."""
    pool = AskedPool(most=1)
    [connection] = pool.filled(1)
    for _ in range(10):
        pool.give(pool.take(soon(5), critical=False))
    assert pool.asked == []
    connection.idle_since -= timing.DEFAULT.trusted_idle
    for _ in range(10):
        pool.give(pool.take(soon(5), critical=False))
    assert [each for each, _ in pool.asked] == [connection]
    timed(monkeypatch, trusted_idle=0.0)
    assert pool.take(soon(5), critical=False) is connection
    assert len(pool.asked) == 2


def test_a_caller_interrupted_during_the_question_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """The connection ends, since an answer may yet come, and its slot is free."""
    timed(monkeypatch, trusted_idle=0.0)
    pool = AskedPool(most=1)
    pool.filled(1)
    pool.interrupts = True
    with pytest.raises(KeyboardInterrupt):
        pool.take(soon(5), critical=False)
    assert pool.told == ["terminate after a cut"]
    assert not pool._idle
    pool.interrupts = False
    pool.give(pool.take(soon(5), critical=False))


def test_where_no_thread_can_be_started(monkeypatch: pytest.MonkeyPatch) -> None:
    """A caller opens its connection itself, and closing one does not wait for the server."""

    def refuse(*_: object) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr("dblock.core.connections.pool.start", refuse)
    pool = AskedPool(most=9)
    first, second = pool.filled(2)
    first.idle_since -= timing.DEFAULT.idle_session
    _ = pool.prune()
    assert pool.told == ["close after a cut"]
    assert pool._idle == [second]
