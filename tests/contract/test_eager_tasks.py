"""Applications whose tasks are eager: a task runs up to its first suspension inside the call that creates it."""

from __future__ import annotations

import asyncio
import inspect
import sys
from collections.abc import Callable, Coroutine
from typing import Any

import anyio
import pytest
import uvloop

from dblock.core.errors import LockTimeout
from tests.support.eager import eager_task_factory
from tests.support.subjects import Subject

old_factory = pytest.mark.skipif(
    sys.version_info >= (3, 13) and "eager_start" not in inspect.signature(eager_task_factory).parameters,
    reason="from Python 3.13 on uvloop passes an argument to it that CPython 3.13.0 does not know",
)
Loop = Callable[[], asyncio.AbstractEventLoop]
Main = Callable[[Subject], Coroutine[Any, Any, None]]


def run(subject: Subject, main: Main, loop: Loop = asyncio.new_event_loop) -> None:
    """Run `main` on a loop whose tasks are eager, with locks over an engine of that loop's own."""

    async def whole() -> None:
        asyncio.get_running_loop().set_task_factory(eager_task_factory)
        own = subject.over() if subject.variant == "sqlalchemy" else subject
        try:
            await main(own)
        finally:
            if subject.variant == "sqlalchemy":
                await own.engine.dispose()

    with asyncio.Runner(loop_factory=loop) as runner:
        runner.run(whole())


@pytest.mark.parametrize("loop", [asyncio.new_event_loop, pytest.param(uvloop.new_event_loop, marks=old_factory)])
@pytest.mark.skipif(sys.version_info < (3, 12), reason="AnyIO and uvloop know the factory of Python 3.12 alone")
def test_task_groups_of_anyio(async_face: Subject, loop: Loop) -> None:
    """On asyncio's own loop and on uvloop: they take turns."""
    inside, most, fences = list[int](), list[int](), list[int]()

    async def twice(own: Subject) -> None:
        for _ in range(2):
            async with own.lock("k", timeout=20) as lock:
                inside.append(lock.fence)
                most.append(len(inside))
                await asyncio.sleep(0)
                fences.append(inside.pop())

    async def main(own: Subject) -> None:
        lock = own.lock("k")
        await own.ask(lock, "acquire")
        async with anyio.create_task_group() as group:
            for _ in range(3):
                group.start_soon(twice, own)
            await asyncio.sleep(0.1)
            await own.ask(lock, "release")

    run(async_face, main, loop)
    assert most == [1] * 6
    assert fences == sorted({*fences})


def test_a_child_is_another_flow_from_its_first_step_on(async_face: Subject) -> None:
    """It does not hold what its parent holds, and its parent does not hold what it takes."""

    async def main(own: Subject) -> None:
        outer = own.lock("outer")
        seen: list[bool] = []

        async def child() -> None:
            seen.append(await own.ask(own.lock("outer"), "owned"))
            seen.append(await own.ask(own.lock("outer"), "acquire", False))
            async with own.lock("inner") as inner:
                seen.append(await own.ask(inner, "owned"))
                taken.set()
                await left.wait()

        async with outer:
            taken, left = asyncio.Event(), asyncio.Event()
            task = asyncio.create_task(child())
            assert await own.ask(outer, "owned")
            await taken.wait()
            assert await own.ask(outer, "owned")
            assert not await own.ask(own.lock("inner"), "owned")
            with pytest.raises(LockTimeout):
                async with own.lock("inner", timeout=0):
                    pass
            left.set()
            await task
            assert await own.ask(outer, "owned")
        assert seen == [False, False, True]

    run(async_face, main)
