"""Run the steps of the protocol: once for synchronous code, once for asyncio.

Rule: whatever interrupts a step (an error, Ctrl-C, a cancellation) is thrown *into* the generator, which cleans up with
further steps and is always driven to its end.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from typing import Protocol, TypeVar

from dblock.core.steps import Execute, Rows, Steps

T = TypeVar("T")


class Executor(Protocol):
    """Runs one `Execute`; turns the driver's errors into LockStoreErrors."""

    def execute(self, step: Execute, /) -> Rows: ...


class AsyncExecutor(Protocol):
    """The same for asyncio."""

    async def aexecute(self, step: Execute, /) -> Rows: ...


def drive(steps: Steps[T], execute: Callable[[Execute], Rows]) -> T:
    """Drive `steps` to their end in this thread and return their result."""
    reply: Rows | None = None
    error: BaseException | None = None
    try:
        while True:
            try:
                step = steps.send(reply) if error is None else steps.throw(error)
            except StopIteration as done:
                result: T = done.value
                return result
            reply = error = None
            try:
                if isinstance(step, Execute):
                    reply = execute(step)
                else:
                    time.sleep(step.seconds)
            except BaseException as raised:  # noqa: BLE001 - the generator decides, Ctrl-C included
                error = raised
    finally:
        del error  # it refers to this frame


async def adrive(steps: Steps[T], execute: Callable[[Execute], Awaitable[Rows]]) -> T:
    """Drive `steps` to their end in this task and return their result."""
    import asyncio  # noqa: PLC0415 - a third of this package's import time, for those who do not use it

    reply: Rows | None = None
    error: BaseException | None = None
    try:
        while True:
            try:
                step = steps.send(reply) if error is None else steps.throw(error)
            except StopIteration as done:
                result: T = done.value
                return result
            reply = error = None
            try:
                if isinstance(step, Execute):
                    reply = await execute(step)
                else:
                    await asyncio.sleep(step.seconds)
            except BaseException as raised:  # noqa: BLE001 - the generator decides, cancellation included
                error = raised
    finally:
        del error
