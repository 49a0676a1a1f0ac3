"""Connections under a driver that does as it is told: how many there are, and what becomes of the late ones."""

from __future__ import annotations

import contextlib
import dis
import gc
import itertools
import math
import os
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from types import FrameType, SimpleNamespace
from typing import Any

import pytest

from dblock.core import clock, timing
from dblock.core.connections.connection import PooledConnection
from dblock.core.connections.deadlines import Deadlines
from dblock.core.connections.pool import HANGING, KEPT, AutocommitPool
from dblock.core.connections.slots import Slots, SlotWaiter
from dblock.core.errors import PoolExhausted, StoreUnreachable
from dblock.core.wakeup.registry import Wakeup
from tests.conftest import timed
from tests.support.lab import threads, until

STRUCK = ("/connections/pool.py", "/connections/slots.py", "/wakeup/registry.py")


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

    def close(self, connection: PooledConnection, *, broken: bool) -> None:
        how = "terminate" if broken else "close"
        self.told.append(f"{how} after a cut" if connection.overdue else how)

    def loop(self) -> Any:
        return self.home


class Due:
    """Anything that is due at a time, and makes a call then."""

    shutdown_fd = 0

    def __init__(self, call: Callable[[], None]) -> None:
        self.cut = call


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


def test_openings_that_never_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """However many flows try for however long: no more of them than flows at once, and a few; then they go on."""
    timed(monkeypatch, statement_timeout=0.3, local_poll=0.05)
    pool, end = Pool(most=8), soon(1.5)

    def flow() -> None:
        while clock.now() < end:
            with pytest.raises(StoreUnreachable, match="no connection could be opened in time"):
                pool.take(soon(), critical=False)

    flows = [threading.Thread(target=flow) for _ in range(8)]
    for each in flows:
        each.start()
    for each in flows:
        each.join()
    assert 5 <= len(threads("dblock connect")) < 8 + HANGING
    pool.may.set()
    assert until(lambda: pool._idle)
    pool.give(pool.take(soon(5), critical=False))


def test_an_opening_that_hangs_holds_up_the_next_caller_for_the_time_of_a_try(monkeypatch: pytest.MonkeyPatch) -> None:
    """Then it has one of its own opened."""
    timed(monkeypatch, single_try=0.05, local_poll=0.02)
    pool = Pool(most=1)
    with pytest.raises(StoreUnreachable, match="in time"):
        pool.take(soon(), critical=False)
    monkeypatch.setattr(pool, "open", lambda connection: setattr(connection, "raw", object()))
    pool.give(pool.take(soon(5), critical=False))
    assert len(threads("dblock connect")) == 1
    pool.may.set()


def test_a_connection_that_is_open_when_its_caller_stops_waiting_goes_to_the_next() -> None:
    """It has come between the end of the wait and the giving up: no slot is lost, and it is not lent to two."""
    pool = Pool(most=1)

    def wait(*_: object) -> None:
        pool.may.set()
        assert until(lambda: not threads("dblock connect"))
        raise KeyboardInterrupt

    pool.wait = wait  # type: ignore[method-assign, assignment]
    with pytest.raises(KeyboardInterrupt):
        pool.take(soon(10), critical=False)
    assert len(pool._idle) == 1
    assert not pool._slots[False].lent


def test_one_that_is_returned_while_another_is_opened() -> None:
    """The caller uses it, and the new one is kept once it is open."""
    pool = Pool(most=2)
    pool.may.set()
    mine = pool.take(soon(5), critical=False)
    pool.may.clear()
    threading.Timer(0.05, pool.give, (mine,)).start()
    assert pool.take(soon(5), critical=False) is mine
    pool.give(mine)
    pool.may.set()
    assert until(lambda: len(pool._idle) == 2)
    assert not pool._slots[False].lent


def test_a_crowd_behind_a_late_connection_opens_no_more_than_it_may() -> None:
    """All of them wait for it; when it has come, as many go on as there may be connections."""
    pool, out, most = Pool(most=3), list[PooledConnection](), list[int]()
    with pytest.raises(StoreUnreachable):
        pool.take(soon(), critical=False)

    def work() -> None:
        connection = pool.take(soon(10), critical=False)
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
    mine = [pool.take(soon(5), critical=False) for _ in range(4 * KEPT)]

    def work() -> None:
        connection = pool.take(soon(10), critical=False)
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
    first, second = (pool.take(soon(5), critical=False) for _ in range(2))
    pool.give(first)
    pool.drop(second, others=True)
    assert pool.told == ["terminate after a cut"] * 2
    assert not pool._idle
    first, second = (pool.take(soon(5), critical=False) for _ in range(2))
    pool.give(first)
    pool.drop(second, others=False)
    assert pool._idle == [first]


def test_one_that_somebody_was_interrupted_waiting_for_is_expected_too() -> None:
    """So interrupted flows do not ask a silent server for one connection each."""

    class Interrupted(Pool):
        def wait(self, waiter: Wakeup, seconds: float) -> None:
            if not self.told:
                self.told.append("interrupted")
                raise KeyboardInterrupt
            super().wait(waiter, seconds)

    pool = Interrupted(most=3)
    with pytest.raises(KeyboardInterrupt):
        pool.take(soon(5), critical=False)
    with pytest.raises(StoreUnreachable, match="in time"):
        pool.take(soon(), critical=False)
    pool.may.set()
    pool.give(pool.take(soon(5), critical=False))
    assert pool.opened == 1


def test_what_was_lent_in_an_event_loop_that_is_closed_is_lent_no_more() -> None:
    """Whatever was abandoned there never gives it back."""
    pool = Pool(most=1)
    pool.may.set()
    pool.home = over = Loop()
    abandoned = pool.take(soon(5), critical=False)
    pool.home = Loop()
    with pytest.raises(PoolExhausted, match="in use"):
        pool.take(soon(), critical=False)
    over.closed = True
    pool.give(pool.take(soon(5), critical=False))
    pool.give(abandoned)
    assert len(pool._idle) == 1


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


def test_first_come_first_served(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody who comes later is faster, not even a flow that gives a connection back and wants one again at once."""
    timed(monkeypatch, local_poll=10.0, statement_timeout=60.0)
    pool, order = Pool(most=1), list[int]()
    pool.may.set()
    mine = pool.take(soon(5), critical=False)

    def work(number: int) -> None:
        connection = pool.take(soon(10), critical=False)
        order.append(number)
        pool.give(connection)

    crowd = list[threading.Thread]()
    for number in range(20):
        crowd.append(threading.Thread(target=work, args=(number,)))
        crowd[-1].start()
        assert until(partial(_stand_in_line, pool, len(crowd)))
    pool.give(mine)
    mine = pool.take(soon(10), critical=False)
    assert order == list(range(20))
    pool.give(mine)
    for thread in crowd:
        thread.join(10)
    assert not pool._slots[False].line


def test_who_has_waited_for_long_polls_less_often(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a thousand tasks that wait for a connection leave no time for those that have one."""
    now, slept = [100.0], list[float]()
    monkeypatch.setattr(clock, "now", lambda: now[0])

    class Watched(Pool):
        def wait(self, waiter: Wakeup, seconds: float) -> None:
            slept.append(seconds)
            assert isinstance(waiter, SlotWaiter)
            assert waiter.polls_by == min(now[0] + 2 * seconds, 105.0)
            now[0] += seconds

    with pytest.raises(PoolExhausted):
        Watched(most=0).take(105.0, critical=False)
    assert slept == pytest.approx([0.1, 0.1, 0.2, 0.4, 0.8, 1.0, 1.0, 1.0, 0.37])


def test_who_is_in_the_midst_of_something_goes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before all who begin, however long they have waited; among themselves as they came."""
    timed(monkeypatch, local_poll=10.0, statement_timeout=60.0)
    pool, order = Pool(most=1), list[tuple[bool, int]]()
    pool.may.set()
    mine = pool.take(soon(5), critical=False)

    def work(priority: bool, number: int) -> None:
        connection = pool.take(soon(10), critical=False, priority=priority)
        order.append((priority, number))
        pool.give(connection)

    crowd = [threading.Thread(target=work, args=(n % 2 == 1, n)) for n in range(6)]
    for count, thread in enumerate(crowd, 1):
        thread.start()
        assert until(partial(_stand_in_line, pool, count))
    pool.give(mine)
    for thread in crowd:
        thread.join(10)
    assert order == [(True, 1), (True, 3), (True, 5), (False, 0), (False, 2), (False, 4)]


@pytest.mark.parametrize("priority", [False, True])
def test_a_flow_that_gives_one_back_is_not_faster_than_one_that_was_notified(priority: bool) -> None:
    """Threads that want one again at once, and hold the interpreter, keep nobody in the line from it."""
    pool, stop, waited = Pool(most=1), threading.Event(), list[float]()
    pool.may.set()

    def greedy() -> None:
        while not stop.is_set():
            connection = pool.take(soon(10), critical=False, priority=priority)
            _ = sum(range(1000))
            pool.give(connection)

    crowd = [threading.Thread(target=greedy) for _ in range(2)]
    for thread in crowd:
        thread.start()
    for _ in range(20):
        start = clock.now()
        pool.give(pool.take(soon(10), critical=False, priority=priority))
        waited.append(clock.now() - start)
    stop.set()
    for thread in crowd:
        thread.join(10)
    assert max(waited) < 1, waited


def test_a_slot_is_reserved_for_a_moment_for_the_flow_that_was_notified(monkeypatch: pytest.MonkeyPatch) -> None:
    """Flows that come meanwhile stand behind. Afterwards the next one gets it, and the notified one is first again."""
    now = [100.0]
    monkeypatch.setattr("dblock.core.connections.slots.clock", SimpleNamespace(now=lambda: now[0]))
    slots, mine, other = Slots(1), PooledConnection(), PooledConnection()
    _ = mine.occupy(slots)
    first, second = SlotWaiter(200.0), SlotWaiter(200.0)
    slots.join(first)
    slots.join(second)
    assert slots.first() == []
    mine.vacate()
    assert slots.first() == [first]
    now[0] += 1.1 * timing.DEFAULT.local_poll
    _ = second.attend()
    assert slots.first() == [first]
    now[0] += 1.1 * timing.DEFAULT.local_poll
    assert slots.first() == [second]
    _ = other.occupy(slots)
    slots.leave(second)
    _ = first.attend()
    assert slots.first() == []
    third = SlotWaiter(200.0)
    slots.join(third)
    other.vacate()
    assert slots.first() == [first]


def test_one_that_was_cut_is_lent_no_more() -> None:
    """Though its event loop stands still, and does not see it; when it does, it is closed."""
    pool = Pool(most=1)
    pool.may.set()
    stuck = pool.take(soon(5), critical=False)
    with pytest.raises(PoolExhausted):
        pool.take(soon(), critical=False)
    stuck.cut()
    other = pool.take(soon(5), critical=False)
    assert other is not stuck
    pool.drop(stuck, others=False)
    assert pool.told == ["terminate after a cut"]
    pool.give(other)
    assert pool.take(soon(5), critical=False) is other


def test_no_slot_is_reserved_for_a_flow_that_does_not_claim_it() -> None:
    """A place whose time is up, whose event loop does not run or is blocked, or whose flow was interrupted."""
    pool = Pool(most=1)
    pool.may.set()
    slots = pool._slots[False]
    mine = pool.take(soon(5), critical=False)
    late, blocked = SlotWaiter(soon(-1)), SlotWaiter(soon(10))
    for place in (late, blocked):
        slots.join(place)
    threading.Timer(0.05, pool.give, (mine,)).start()
    assert pool.take(soon(5), critical=False) is mine
    assert blocked.notified()
    assert not late.notified()
    assert slots.line == [blocked], "a place whose time is up is removed by one who comes"


def test_a_flow_that_was_notified_and_gives_up_passes_it_on() -> None:
    """Interrupted as it wakes, for instance."""
    pool, second = Pool(most=1), SlotWaiter(soon(10))
    pool.may.set()
    mine = pool.take(soon(5), critical=False)

    def wait(first: Wakeup, _: float) -> None:
        pool._slots[False].join(second)
        pool.give(mine)
        assert first.notified()
        assert not second.notified()
        raise KeyboardInterrupt

    pool.wait = wait  # type: ignore[method-assign, assignment]
    with pytest.raises(KeyboardInterrupt):
        pool.take(soon(10), critical=False)
    assert second.notified()


def test_nobody_waits_for_what_would_come_too_late() -> None:
    """A statement that is cut short costs its connection, and the next one that."""
    pool = Pool(most=1)
    pool.may.set()
    mine = pool.take(soon(5), critical=False)
    threading.Timer(0.05, pool.give, (mine,)).start()
    with pytest.raises(PoolExhausted, match="in use"):
        pool.take(soon(0.06), critical=False)


def test_a_call_that_is_lost_costs_a_pause() -> None:
    """The first one in the line is not notified, and looks for a connection all the same."""
    pool = Pool(most=1)
    pool.may.set()
    pool._notify = lambda: None  # type: ignore[method-assign]
    mine = pool.take(soon(5), critical=False)
    threading.Timer(0.05, pool.give, (mine,)).start()
    start = clock.now()
    assert pool.take(soon(10), critical=False) is mine
    assert clock.now() - start < 5


def test_a_descriptor_that_somebody_has_closed() -> None:
    """What cannot be cut does not end the watch over all others."""
    deadlines = Deadlines()
    reader, writer = os.pipe()
    os.close(writer)
    broken, sound = PooledConnection(shutdown_fd=writer), PooledConnection(shutdown_fd=reader)
    for connection in (broken, sound):
        deadlines.arm(connection, soon(0.01))
        assert until(partial(getattr, connection, "overdue"))
        assert not deadlines.disarm(connection)
    broken.shutdown_fd = -1


def test_a_deadline_cuts_no_later_statement() -> None:
    """A connection that sends again while the round, which has seen its old deadline, cuts another one."""
    deadlines, later = Deadlines(), soon(60)
    reused = PooledConnection(shutdown_fd=os.open(os.devnull, os.O_RDONLY))

    def answered() -> None:
        assert deadlines.disarm(reused)
        deadlines.arm(reused, later)

    deadlines.arm(Due(answered), moment := clock.now() - 0.1)  # the first that is due
    deadlines._due[reused] = moment
    _ = deadlines.round()
    assert deadlines._due == {reused: later}
    assert deadlines.disarm(reused)
    assert not reused.overdue
    os.close(reused.shutdown_fd)
    reused.shutdown_fd = -1


def test_a_child_waits_for_no_thread_of_its_parent() -> None:
    """Those that wait for a connection at the fork are not there to give up their turns."""
    pool = Pool(most=1)
    pool.may.set()
    _ = pool.take(soon(5), critical=False)
    waiter = SlotWaiter(soon(60))
    pool._slots[False].line.append(waiter)
    kept = pool.leave_to_parent()
    assert not any(slots.line or slots.lent for slots in pool._slots)
    assert pool.take(soon(1), critical=False)
    del kept


def test_other_calls_are_made_at_their_time() -> None:
    """Not early, each once."""
    deadlines, made = Deadlines(), list[tuple[int, bool]]()
    begun = clock.now()

    def make(number: int, moment: float) -> None:
        made.append((number, clock.now() >= moment))

    for number, seconds in ((2, 0.06), (1, 0.02), (3, 0.1)):
        deadlines.arm(Due(partial(make, number, begun + seconds)), begun + seconds)
    assert until(lambda: len(made) == 3)
    assert sorted(made) == [(1, True), (2, True), (3, True)]


class Strike:
    """Traces a thread in its pool, and interrupts it before the given instruction of those that a signal may interrupt.

    Python runs the handlers of signals after a call that has returned, at a function's beginning, and where it loops:
    never between a lock and its `with`, which another thread would wait for.
    """

    def __init__(self, at: int) -> None:
        self._left = at
        self._last: dict[FrameType, str] = {}
        self.struck = False

    def __call__(self, frame: FrameType, event: str, _: Any) -> Strike | None:
        code = frame.f_code
        if not code.co_filename.endswith(STRUCK) or code.co_name == "__del__":
            return None
        frame.f_trace_opcodes = True
        if event != "opcode":
            return self
        name = dis.opname[code.co_code[frame.f_lasti]]
        before, self._last[frame] = self._last.get(frame, "RESUME"), name
        raised = name == "PUSH_EXC_INFO"
        if before.startswith(("CALL", "RESUME", "JUMP_BACKWARD")) and not raised:
            self._left -= 1
        if self._left < 0 and not self.struck:
            self.struck = True
            raise KeyboardInterrupt
        return self


def test_a_flow_interrupted_while_a_connection_is_opened_holds_up_no_thread() -> None:
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
    assert place > 30


def test_a_flow_interrupted_in_the_line_holds_up_nobody() -> None:
    """At each place of the wait in turn, while a connection is given back: the next one gets it."""
    untraced = sys.maxsize
    for place in itertools.chain([untraced], itertools.count()):
        pool, strike = Pool(most=1), Strike(place)
        pool.may.set()
        mine = [pool.take(soon(5), critical=False)]
        over = threading.Event()
        gives = threading.Thread(target=_give_back, args=(pool, mine, over))
        gives.start()
        _take(pool, strike)
        over.set()
        gives.join()
        _has_room(pool)
        assert len(pool._slots[False].line) <= 1
        if not strike.struck and place != untraced:
            break
    assert place > 50


def _give_back(pool: Pool, mine: list[PooledConnection], over: threading.Event) -> None:
    """A moment after somebody stands in line, or was interrupted before."""
    while not (over.is_set() or pool._slots[False].line):
        time.sleep(0.0005)
    time.sleep(0.002)
    pool.give(mine.pop())


def _stand_in_line(pool: Pool, count: int) -> bool:
    return len(pool._slots[False].line) == count


def _take(pool: Pool, strike: Strike) -> None:
    sys.settrace(strike)
    with contextlib.suppress(KeyboardInterrupt):
        _ = pool.take(soon(5), critical=False)
    sys.settrace(None)
    strike._last.clear()


def _has_room(pool: Pool) -> None:
    if pool._slots[False].lent:
        gc.collect()  # frames that were traced
    pool.give(pool.take(soon(5), critical=False))


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
        connection.shutdown_fd, connection.question = os.open(os.devnull, os.O_RDONLY), lambda: None

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


@pytest.mark.parametrize(
    ("left", "round_trip", "answer"),
    [
        (0.25, 0.0, 0.05),  # a try: 50 ms
        (5.0, 0.0, 0.5),  # a tenth
        (0.25, 0.04, 0.08),  # two round trips
        (0.25, 0.3, 0.125),  # and half of the time at most
        (0.005, 0.0, 0.0025),
    ],
)
def test_the_question_takes_a_part_of_the_callers_time(
    monkeypatch: pytest.MonkeyPatch, left: float, round_trip: float, answer: float
) -> None:
    """A small one, as long as the server is not far away."""
    timed(monkeypatch, trusted_idle=0.0)
    pool = AskedPool(most=1)
    [connection] = pool.filled(1)
    connection.round_trip = round_trip
    moment = clock.now()
    monkeypatch.setattr("dblock.core.connections.pool.clock", SimpleNamespace(now=lambda: moment))
    monkeypatch.setattr("tests.core.test_pool.clock", SimpleNamespace(now=lambda: moment))
    assert pool.take(moment + left, critical=False) is connection
    [(asked, seconds)] = pool.asked
    assert asked is connection
    assert seconds == pytest.approx(answer)


def test_one_that_does_not_answer_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    """By a new one, in the same slot; it is closed without asking the server."""
    timed(monkeypatch, trusted_idle=0.0)
    pool = AskedPool(most=1)
    pool.dead = pool.filled(1)
    new = pool.take(soon(5), critical=False)
    assert new not in pool.dead
    assert pool.told == ["terminate after a cut"]
    with pytest.raises(PoolExhausted):
        pool.take(soon(), critical=False)
    pool.give(new)
    pool.give(pool.dead[0])
    assert pool._idle == [new]


def test_the_others_are_closed_with_one_that_does_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """The caller waits for one question, however many are idle: the network has dropped all of them as a rule."""
    timed(monkeypatch, trusted_idle=0.0)
    pool = AskedPool(most=9)
    made = pool.filled(KEPT)
    pool.dead = made[-1:]
    new = pool.take(soon(5), critical=False)
    assert new not in made
    assert [each for each, _ in pool.asked if each in made] == pool.dead
    assert pool.told == ["terminate after a cut"] * KEPT
    assert not pool._idle


def test_one_that_was_used_meanwhile_needs_no_question(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was given back after the question was sent has had an answer since."""
    timed(monkeypatch, trusted_idle=0.0)
    pool = AskedPool(most=9)
    [first, second] = pool.filled(2)
    assert pool.take(soon(5), critical=False) is second
    pool.dead = [first]
    ask = pool.ask

    def meanwhile(connection: PooledConnection, until: float) -> None:
        if connection is first:
            pool.give(second)
        ask(connection, until)

    monkeypatch.setattr(pool, "ask", meanwhile)
    assert pool.take(soon(5), critical=False) is second
    assert not pool._idle


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


def test_a_caller_interrupted_around_the_question_holds_up_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    """At each place of taking a connection that does not answer, in turn: its slot is free."""
    timed(monkeypatch, trusted_idle=0.0)
    untraced = sys.maxsize
    for place in itertools.chain([untraced], itertools.count()):
        pool, strike = AskedPool(most=1), Strike(place)
        pool.dead = pool.filled(1)
        _take(pool, strike)
        pool.asked.clear()  # nobody refers to what a flow was interrupted with
        pool.dead.clear()
        assert until(lambda: not threads("dblock connect"), 2), place
        _has_room(pool)
        if not strike.struck and place != untraced:
            break
    assert place > 20


def test_idle_connections_are_closed_but_for_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """By time, the oldest first; what the pool asks for is to be pruned when the first of them is due."""
    pool, asked_for = AskedPool(most=9), list[float]()
    pool.prune_by = asked_for.append
    [connection] = pool.filled(1)
    assert asked_for == []
    assert pool.prune() == math.inf
    made = pool.filled(3)
    lasts = timing.DEFAULT.idle_session
    assert asked_for[0] == made[1].idle_since + lasts
    assert pool.prune() == pool._idle[0].idle_since + lasts
    assert pool.told == []
    for each in made[:2]:
        each.idle_since -= lasts
    assert pool.prune() == math.inf
    assert until(lambda: pool.told == ["close"] * 2)
    assert pool._idle == made[2:]
    made[2].idle_since -= 10 * lasts
    assert pool.prune() == math.inf
    assert pool._idle == made[2:]
    assert connection in made


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
