"""When flows end, and what is kept of them; without a database, and whatever the garbage collector does."""

from __future__ import annotations

import asyncio
import gc
import threading
import time
import weakref
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from typing import Any

import anyio.to_thread
import pytest
from asgiref.sync import sync_to_async

from dblock.core import clock, runtime
from dblock.core.holding.flow import Hold
from dblock.core.machine import machine
from dblock.core.protocol.queue import Place
from dblock.core.runtime import current_flow
from dblock.core.values import MACHINE
from dblock.core.watchdog.heartbeats import KeptPlace
from dblock.core.watchdog.watchdog import Watchdog
from tests.core.test_holds import FakeLock, FakeStore


@pytest.fixture(autouse=True)
def _nothing_is_collected() -> Iterator[None]:
    """But what no cycle keeps; a test keeps contexts, as the tracebacks of errors do."""
    gc.disable()
    yield
    gc.enable()


@pytest.fixture
def store() -> Iterator[FakeStore]:
    store = FakeStore()
    yield store
    for hold in list(runtime.current.watchdog._holds):
        runtime.current.watchdog.discard(hold)


Run = Callable[[Callable[[], Any]], Awaitable[Any]]
POOLS: dict[str, Run] = {"asyncio": asyncio.to_thread, "anyio": anyio.to_thread.run_sync}


def acquired(store: FakeStore, kept: list[Any], key: str = "k") -> Hold:
    """Acquired by hand in the call of a pool whose context somebody keeps."""
    time.sleep(0.02)  # the caller awaits the call by now
    lock = FakeLock(store, key)
    assert lock.acquire()
    kept.append(copy_context())
    hold = current_flow().holds[store, key]
    assert not hold.orphaned
    return hold


@pytest.mark.parametrize("pool", POOLS)
def test_what_a_call_of_a_pool_has_acquired_ends_with_it(store: FakeStore, pool: str) -> None:
    """Nobody else could give it back; the thread and the task that has awaited it go on."""
    kept: list[Any] = []

    async def main() -> None:
        hold = await POOLS[pool](lambda: acquired(store, kept))
        assert hold.flow() is not None
        assert hold.orphaned

    asyncio.run(main())


def test_what_a_call_of_sync_to_async_has_acquired_ends_with_its_task(store: FakeStore) -> None:
    """Whose later calls can give it back, and do not when it dies; the thread goes on, and so does the event loop."""
    kept: list[Any] = []

    async def consumer() -> None:
        hold = await sync_to_async(acquired)(store, kept)
        await asyncio.sleep(0)
        assert not hold.orphaned, "its task goes on"
        assert not await sync_to_async(lambda: hold.orphaned)()
        kept.append(hold)
        raise RuntimeError("it dies")

    async def main() -> None:
        task = asyncio.create_task(consumer())
        with pytest.raises(RuntimeError, match="it dies"):
            await task
        hold = kept[-1]
        assert hold.flow() is not None
        assert hold.orphaned

    asyncio.run(main())


def test_a_call_that_was_abandoned_goes_on(store: FakeStore) -> None:
    """Nobody waits for it any more, but it still works under its lock."""

    async def main() -> None:
        begun, end = asyncio.Event(), threading.Event()
        loop, holds, kept = asyncio.get_running_loop(), list[Hold](), list[Any]()

        def work() -> None:
            holds.append(acquired(store, kept))
            loop.call_soon_threadsafe(begun.set)
            assert end.wait(10)

        task = asyncio.create_task(anyio.to_thread.run_sync(work, abandon_on_cancel=True))
        await begun.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert not holds[0].orphaned
        end.set()

    asyncio.run(main())


def test_what_a_thread_has_acquired_outlives_what_it_does_for_a_pool(store: FakeStore) -> None:
    """All that runs in the thread's own context, or in one that its owner keeps, is one flow."""
    mine = copy_context()
    with ThreadPoolExecutor(1) as pool:
        for run in (lambda function: function(), mine.run):
            hold = pool.submit(run, lambda: acquired(store, [])).result()
            assert pool.submit(lambda: 1).result() == 1
            assert not hold.orphaned
            pool.submit(run, FakeLock(store).release).result()


def test_a_task_of_a_closed_event_loop_has_ended(store: FakeStore) -> None:
    """Though it is not done, and somebody refers to it."""
    loop, holds = asyncio.new_event_loop(), list[Hold]()

    async def hold_for_ever() -> None:
        assert FakeLock(store).acquire()
        holds.extend(current_flow().holds.values())
        await asyncio.Event().wait()

    task: Any = loop.create_task(hold_for_ever())
    loop.call_later(0.01, loop.stop)
    loop.run_forever()
    assert [hold.orphaned for hold in holds] == [False]
    loop.close()
    assert [hold.orphaned for hold in holds] == [True]
    task._log_destroy_pending = False


def test_hand_overs_from_call_to_call_keep_no_flow_that_holds_nothing(store: FakeStore) -> None:
    """Each call of a task acquires the next key, and releases the one before."""
    flows: list[weakref.ref[Any]] = []

    def step(locks: list[FakeLock], n: int) -> None:
        locks.append(FakeLock(store, f"k{n}"))
        assert locks[-1].acquire()
        flows.append(current_flow().ref)
        if n:
            locks[-2].release()

    async def main() -> None:
        locks: list[FakeLock] = []
        for n in range(30):
            await sync_to_async(step)(locks, n)
        gc.collect()  # a flow and its context refer to each other
        assert sum(flow() is not None for flow in flows) <= 3
        await sync_to_async(locks[-1].release)()

    asyncio.run(main())


def test_heartbeats_of_closed_event_loops_are_forgotten(store: FakeStore) -> None:
    """So are their places, at once, while somebody else waits."""
    watch, now = Watchdog(runtime.current.flows, runtime.current._give_back, runtime.current._withdraw), clock.now()
    watch.wakes_at = 0.0  # no thread of its own
    loop = asyncio.new_event_loop()
    for owner, of in (("here", None), ("there", loop)):
        watch.keep(KeptPlace(Place(owner, 1, now, now, now), store, of, now + 60))
        watch._heartbeats[store, of] = None  # type: ignore[assignment]
    _ = watch._keep_places(set())
    assert (len(watch._places), len(watch._heartbeats)) == (2, 2)
    loop.close()
    _ = watch._keep_places(set())
    assert (list(watch._places), list(watch._heartbeats)) == (["here"], [(store, None)])


def test_owner_tokens_begin_with_the_machine() -> None:
    """So that a waiter knows whether a holder is near, whatever its host is called."""
    name = current_flow().name
    assert name.startswith(machine())
    assert len(name) == MACHINE + 16
    assert len(name) + 32 <= 64
