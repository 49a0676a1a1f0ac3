"""A task that is cancelled at every step of its loop until it has ended, as anyio (Starlette, FastAPI) does it."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from functools import partial
from typing import Any

import pytest

from dblock.core.errors import StoreUnanswered
from dblock.core.protocol.steps import Execute, Rows
from tests.conftest import SELDOM, timed
from tests.contract.test_queue import waiters
from tests.support.lab import until
from tests.support.subjects import Actor, Subject, twin


async def comes_true(condition: Callable[[], object]) -> None:
    """Wait until the database shows that."""
    while not condition():  # noqa: ASYNC110 - it looks at the database
        await asyncio.sleep(0.002)


async def storm(work: Coroutine[Any, Any, Any], until: Callable[[], bool], after: float = 0.0) -> None:
    """Start it, and once that is so cancel it again and again."""
    task = asyncio.ensure_future(work)
    await comes_true(until)
    await asyncio.sleep(after)
    while not task.done():
        task.cancel()
        await asyncio.sleep(0)
    assert task.cancelled(), task.exception()


def is_held(subject: Subject) -> bool:
    return bool(subject.run("SELECT 1 FROM locks WHERE owner IS NOT NULL"))


async def block(lock: Any) -> None:
    async with lock:
        await asyncio.sleep(60)


async def twice(lock: Any) -> None:
    async with lock:
        await block(lock)


async def by_hand(subject: Subject, body: Callable[[], Awaitable[object]], lock: Any) -> None:
    await subject.ask(lock, "acquire")
    try:
        await body()
    finally:
        await subject.ask(lock, "release")


async def of_a_generator(lock: Any) -> None:
    """As a response that is streamed."""

    async def stream() -> AsyncIterator[int]:
        async with lock:
            while True:
                yield 1
                await asyncio.sleep(0.01)

    async for _ in stream():
        pass


def test_a_cancelled_holder_releases(async_driver: Subject, actor: Actor) -> None:
    """At once, and not with the lease."""
    ways: Sequence[Callable[[Any], Coroutine[Any, Any, None]]] = (
        block,
        twice,
        of_a_generator,
        partial(by_hand, async_driver, partial(asyncio.sleep, 60)),
    )
    for number, (work, min_hold) in enumerate(itertools.product(ways, (0, 0, 0, 0.02, 0.02, 0.02))):
        lock = async_driver.lock(f"k{number}", ttl=60, min_hold=min_hold)
        actor.do(partial(storm, work(lock), partial(is_held, async_driver), 0.02))
        assert until(lambda: not is_held(async_driver)), number
        assert actor.get(lock, "state") is None


def test_a_cancelled_bearer_leaves(async_driver: Subject, actor: Actor, other: Actor) -> None:
    """In its block it releases the hold; cancelled as it attaches it does so too, or the token is as good as before."""
    lock = async_driver.lock("k", ttl=60)

    async def bear(token: str, after: float) -> None:
        task = asyncio.ensure_future(block(async_driver.api("attach", token)))
        await asyncio.sleep(after)
        task.cancel()
        _ = await asyncio.wait([task])

    async def passing(token: str) -> None:
        async with async_driver.api("attach", token):
            pass

    actor.call(lock, "acquire")
    token = actor.call(lock, "detach")
    other.do(lambda: storm(block(async_driver.api("attach", token)), lambda: async_driver.row("k")["count"] == 1, 0.02))
    assert not is_held(async_driver)
    for after in (0.0, 0.0005, 0.001, 0.002, 0.004):
        actor.call(lock, "acquire")
        token = actor.call(lock, "detach")
        other.do(partial(bear, token, after))
        if is_held(async_driver):
            assert async_driver.row("k")["count"] == 0
            other.do(partial(passing, token))
        assert not is_held(async_driver)


def test_a_cancelled_waiter_leaves_the_queue(async_driver: Subject, actor: Actor, other: Actor) -> None:
    """So that a key that is given back is free for the next one at once."""
    lock = actor.hold(async_driver.lock("k", ttl=60, timeout=60))
    other.do(lambda: storm(block(async_driver.lock("k", timeout=60)), lambda: waiters(async_driver) == 1, 0.05))
    assert waiters(async_driver) == 0
    actor.call(lock, "release")
    assert other.call(lock, "acquire", timeout=1)
    other.call(lock, "release")


def silence(store: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let it answer nothing any more."""

    async def wait(step: Execute) -> Rows:
        now = store.database.now()
        by = store.database.timing.answer_by(now, step.until, critical=step.statement.critical)
        await asyncio.sleep(by - now)
        raise StoreUnanswered("silent")

    monkeypatch.setattr(store, "aexecute", wait)


async def took(work: Coroutine[Any, Any, Any], seconds: float) -> float:
    """Cancel it after so many; how many it has taken then."""
    begun = time.monotonic()
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await work
    return time.monotonic() - begun


def test_a_silent_server_keeps_nobody_who_waits(
    async_face: Subject, actor: Actor, other: Actor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who is cancelled has a second for all that is to be left in order."""
    holder, lock = other.hold(async_face.lock("k", ttl=60)), async_face.lock("k", timeout=60)

    async def main() -> float:
        work = asyncio.ensure_future(took(async_face.ask(lock, "acquire"), 1.0))
        await comes_true(lambda: waiters(async_face))
        with monkeypatch.context() as patch:
            silence(lock._place.store(), patch)
            return await work

    assert actor.do(main) < 2.6
    other.call(holder, "release")


def test_a_cancelled_take_leaves_nothing(async_driver: Subject, actor: Actor, monkeypatch: pytest.MonkeyPatch) -> None:
    """At whatever step of the loop the cancellations begin, if there is time to clean up."""
    timed(monkeypatch, undo_timeout=10.0)
    lock = async_driver.lock("k", ttl=60, timeout=60)
    actor.within(lock)

    async def attempt(delay: int) -> None:
        task = asyncio.ensure_future(block(lock))
        for _ in range(delay):
            await asyncio.sleep(0)
        while not task.done():
            task.cancel()
            await asyncio.sleep(0)

    for delay in range(40):
        actor.do(partial(attempt, delay))
        assert async_driver.row("k")["owner"] is None, delay


def test_a_cancelled_releaser_notifies_the_next(
    async_driver: Subject, actor: Actor, other: Actor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At whatever step of the loop the cancellation comes; nobody polls."""
    timed(monkeypatch, **SELDOM)
    lock, heir = async_driver.lock("k", ttl=60), twin(async_driver).lock("k", ttl=60, timeout=60)

    async def attempt(steps: int) -> None:
        waited = asyncio.Event()
        task = asyncio.ensure_future(by_hand(async_driver, waited.wait, lock))
        await comes_true(lambda: is_held(async_driver))
        waiting = other.begin(heir, "acquire")
        await comes_true(lambda: waiters(async_driver))
        await asyncio.sleep(0.02)
        waited.set()
        for _ in range(steps):
            await asyncio.sleep(0)
        task.cancel()
        _ = await asyncio.wait([task])
        assert await asyncio.wait_for(asyncio.wrap_future(waiting), 5), steps
        await asyncio.wrap_future(other.begin(heir, "release"))

    for steps in range(1, 24):
        actor.do(partial(attempt, steps))
