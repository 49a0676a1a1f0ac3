"""When flows end, and what is kept of them; without a database, and whatever the garbage collector does."""

from __future__ import annotations

import asyncio
import gc
import weakref
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from typing import Any

import anyio.to_thread
import pytest
from asgiref.sync import sync_to_async

from dblock.core import runtime
from dblock.core.holding.flow import Hold
from dblock.core.machine import machine
from dblock.core.runtime import current_flow
from dblock.core.values import MACHINE
from tests.core.test_holds import FakeLock, FakeStore
from tests.support.lab import until


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


POOLS: dict[str, Callable[[Callable[[], Any]], Awaitable[Any]]] = {
    "asyncio": asyncio.to_thread,
    "anyio": anyio.to_thread.run_sync,
    "asgiref": lambda call: sync_to_async(call)(),
}


def acquired(store: FakeStore, key: str = "k") -> Hold:
    """Acquired by hand, and forgotten."""
    assert FakeLock(store, key).acquire()
    hold = current_flow().holds[store, key]
    assert not hold.orphaned
    return hold


@pytest.mark.parametrize("pool", POOLS)
def test_what_a_call_of_a_pool_has_acquired_ends_with_its_context(store: FakeStore, pool: str) -> None:
    """Though its thread goes on. (asgiref carries the context back to the task that awaits the call.)"""

    holds: list[Hold] = []

    def orphaned() -> bool:
        _ = gc.collect()
        return holds[0].orphaned

    async def main() -> None:
        await POOLS[pool](lambda: holds.append(acquired(store)))
        if pool != "asgiref":
            assert until(orphaned), "its thread forgets the call soon"
        else:
            assert not orphaned()

    asyncio.run(main())
    assert until(orphaned)


def test_what_a_thread_has_acquired_outlives_what_it_does_for_a_pool(store: FakeStore) -> None:
    """All that runs in the thread's own context, or in one that its owner keeps, is one flow."""
    mine = copy_context()
    with ThreadPoolExecutor(1) as pool:
        for run in (lambda function: function(), mine.run):
            hold = pool.submit(run, lambda: acquired(store)).result()
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


def test_owner_tokens_begin_with_the_machine() -> None:
    """So that a waiter knows whether a holder is near, whatever its host is called."""
    name = current_flow().name
    assert name.startswith(machine())
    assert len(name) == MACHINE + 16
    assert len(name) + 32 <= 64
