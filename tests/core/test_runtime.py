"""One object has all that the lock keeps for a process: two of them are two processes, in one."""

from __future__ import annotations

import contextlib
import contextvars
import gc
import signal
import threading
import time
import weakref
from collections.abc import Callable
from functools import partial
from types import FrameType

import pytest

from dblock.core import clock
from dblock.core.acquire import acquiring, handover
from dblock.core.acquire.waiting import Attempt
from dblock.core.holding.flow import Flow
from dblock.core.lock.executor import BaseStore
from dblock.core.protocol.drive import drive
from dblock.core.protocol.sending import Database
from dblock.core.protocol.steps import Execute, Rows, Steps
from dblock.core.runtime import Runtime, current_flow
from dblock.core.statements import DIALECTS
from dblock.core.statements.base import Statement
from dblock.core.timing import Timing
from dblock.core.values import Grant
from tests.conftest import SELDOM, watched_places
from tests.support.lab import together
from tests.support.model import World, wish


class ModelStore:
    """The model of the table, as threads see it."""

    name = "model"
    pin: Statement | None = None
    asynchronous = False
    location: object = None
    renewable = True
    reaping: tuple[float, float] | None = None
    history = 0
    pause, apause = BaseStore.pause, BaseStore.apause

    def __init__(self, world: World, mutex: threading.Lock) -> None:
        self._world, self._mutex = world, mutex
        self.database = Database(weakref.ref(self), world.dialect, own_timing=Timing(**SELDOM).checked())

    def execute(self, step: Execute) -> Rows:
        with self._mutex:
            self._world.time = clock.now()
            return self._world.execute(step)

    async def aexecute(self, step: Execute) -> Rows:
        raise NotImplementedError

    def subscribe(self, *_: object) -> None:
        pass

    def in_background(self, function: Callable[[], None]) -> Callable[[], bool]:
        thread = threading.Thread(target=function, daemon=True)
        thread.start()
        return thread.is_alive

    def rest(self, seconds: float) -> None:
        time.sleep(seconds)


def test_two_processes_in_one() -> None:
    """Each with a local queue, a socket and a watchdog of its own: they exclude and wake each other, and nobody
    polls."""
    world, mutex = World(dialect=DIALECTS["sqlite"]), threading.Lock()
    processes = [Runtime(), Runtime()]
    stores = [ModelStore(world, mutex) for _ in processes]
    inside, log = set[int](), list[tuple[int, Grant]]()

    def life(number: int, process: Runtime, store: ModelStore) -> Steps[None]:
        site = process.site(store)
        for _ in range(10):
            request = wish(ttl=600.0, flow=f"{number}")
            found = yield from acquiring.acquire(Attempt(site, request, 20.0, partial(process.waiter_services, store)))
            assert isinstance(found, Grant)
            assert not inside
            inside.add(number)
            log.append((number, found))
            time.sleep(0.002)
            inside.remove(number)
            assert (yield from handover.pass_on(site, found))

    lives = [life(n, *each) for n, each in enumerate(list(zip(processes, stores, strict=True)) * 3)]
    assert together(*(partial(drive, each) for each in lives)) == []
    assert len(log) == 60
    assert [grant.tenure.fence for _, grant in log] == sorted({grant.tenure.fence for _, grant in log})
    assert {number % 2 for number, _ in log[:20]} == {0, 1}, "neither process was kept waiting by the other"
    assert any(grant.local_handovers for _, grant in log)
    assert processes[0].sockets().channel != processes[1].sockets().channel
    for process, store in zip(processes, stores, strict=True):
        waiting = watched_places(process.watchdog)
        assert (process.site(store).local_queues, dict(process.wakeups._registered), waiting) == ({}, {}, [])
        process.sockets().close()


def test_a_store_is_not_kept_alive() -> None:
    """An engine that its application has thrown away takes all with it that the process kept for it."""
    process, store = Runtime(), ModelStore(World(), threading.Lock())
    process.site(store)
    process.waiter_services(store)
    gone = weakref.ref(store)
    del store
    gc.collect()
    assert gone() is None
    process.sockets().close()


@pytest.mark.parametrize("raises", [False, True])
def test_whose_flow_it_is_whatever_a_signal_handler_does(raises: bool) -> None:
    """It asks in between, or breaks the asking off: in its own context a flow stays what it is, a copy has another."""

    class Struck(Exception):
        pass

    asking = threading.Lock()

    def strike(_signal: int, struck: FrameType | None) -> None:
        if not asking.acquire(blocking=False):  # it struck itself
            return
        try:
            _ = current_flow()
        finally:
            asking.release()
        if raises and struck is not None and struck.f_code.co_filename.endswith("/flow.py"):  # and no `with` of ours
            raise Struck

    def ask(rounds: int) -> set[Flow]:
        found = set[Flow]()
        while rounds:
            with contextlib.suppress(Struck):
                found.add(current_flow())
                rounds -= 1
        return found

    before = signal.signal(signal.SIGALRM, strike)
    try:
        signal.setitimer(signal.ITIMER_REAL, 1e-4, 1e-4)
        for _ in range(20):
            mine = ask(500)
            theirs = contextvars.copy_context().run(ask, 500)
            assert len(mine) == len(theirs) == 1
            assert mine == ask(500) != theirs
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
