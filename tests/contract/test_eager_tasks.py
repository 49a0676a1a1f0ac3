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
LOOPS: dict[str, Callable[[], asyncio.AbstractEventLoop]] = {
    "asyncio": asyncio.new_event_loop,
    "uvloop": uvloop.new_event_loop,
}

Main = Callable[["Face"], Coroutine[Any, Any, None]]


class Face:
    """A subject on an event loop of its own."""

    def __init__(self, subject: Subject) -> None:
        self.subject = Subject(subject.variant, subject.face, subject.database, subject.driver)
        self.lock = self.subject.lock

    def call(self, lock: Any, name: str, **options: Any) -> Any:
        return getattr(lock, self.subject.method(name))(**options)


def run(subject: Subject, main: Main, loop: str = "asyncio") -> None:
    """Run `main` on a loop whose tasks are eager."""
    face = Face(subject)

    async def whole() -> None:
        asyncio.get_running_loop().set_task_factory(eager_task_factory)
        try:
            await main(face)
        finally:
            if subject.variant == "sqlalchemy":
                await face.subject.engine.dispose()

    with asyncio.Runner(loop_factory=LOOPS[loop]) as runner:
        runner.run(whole())


class Crowd:
    """Tasks that take turns at one key."""

    def __init__(self, face: Face) -> None:
        self.face = face
        self.inside, self.most = 0, 0
        self.fences: list[int] = []

    async def enter(self, rounds: int) -> None:
        for _ in range(rounds):
            async with self.face.lock("k", timeout=20) as lock:
                self.inside += 1
                self.most = max(self.most, self.inside)
                await asyncio.sleep(0)
                self.fences.append(lock.fence)
                self.inside -= 1

    def check(self, turns: int) -> None:
        assert self.most == 1
        assert len(set(self.fences)) == turns
        assert self.fences == sorted(self.fences)


@pytest.mark.parametrize("loop", ["asyncio", pytest.param("uvloop", marks=old_factory)])
@pytest.mark.skipif(sys.version_info < (3, 12), reason="AnyIO and uvloop know the factory of Python 3.12 alone")
def test_task_groups_of_anyio(async_face: Subject, loop: str) -> None:
    """On asyncio's own loop and on uvloop."""

    async def main(face: Face) -> None:
        crowd = Crowd(face)
        lock = face.lock("k")
        await face.call(lock, "acquire")
        async with anyio.create_task_group() as group:
            for _ in range(3):
                group.start_soon(crowd.enter, 2)
            await asyncio.sleep(0.1)
            await face.call(lock, "release")
        crowd.check(6)

    run(async_face, main, loop)


def test_a_child_is_another_flow_from_its_first_step_on(async_face: Subject) -> None:
    """It does not hold what its parent holds, and its parent does not hold what it takes."""

    async def main(face: Face) -> None:
        outer = face.lock("outer")
        seen: list[bool] = []

        async def child() -> None:
            seen.append(await face.call(face.lock("outer"), "owned"))
            seen.append(await face.call(face.lock("outer"), "acquire", timeout=0))
            async with face.lock("inner") as inner:
                seen.append(await face.call(inner, "owned"))
                taken.set()
                await left.wait()

        async with outer:
            taken, left = asyncio.Event(), asyncio.Event()
            task = asyncio.create_task(child())
            assert await face.call(outer, "owned")
            await taken.wait()
            assert await face.call(outer, "owned")
            assert not await face.call(face.lock("inner"), "owned")
            with pytest.raises(LockTimeout):
                async with face.lock("inner", timeout=0):
                    pass
            left.set()
            await task
            assert await face.call(outer, "owned")
        assert seen == [False, False, True]

    run(async_face, main)
