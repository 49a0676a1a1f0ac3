"""Run the steps of the protocol: once for synchronous code, once for asyncio.

Rule: whatever interrupts a step (an error, Ctrl-C, a cancellation) is thrown *into* the generator, which cleans up with
further steps and is always driven to its end. But a process that was forked in the middle of a step does not go on with
it: what the steps are about, the owner token above all, is its parent's.
"""

from __future__ import annotations

import os
from collections.abc import Coroutine
from functools import partial
from inspect import GEN_CLOSED, getgeneratorstate
from typing import Any, NoReturn, TypeVar

from dblock.core.errors import LockNotHeld
from dblock.core.protocol.steps import Execute, Rows, Steps
from dblock.core.protocol.store import Store

T = TypeVar("T")


def drive(steps: Steps[T], store: Store, error: BaseException | None = None, process: int = 0) -> T:
    """Drive `steps` to their end in this thread and return their result; they begin with `error` if there is one."""
    reply: Rows | None = None
    process = process or os.getpid()
    try:
        while True:
            try:
                if os.getpid() != process:
                    _leave_to_parent(steps, process, error)
                step = steps.send(reply) if error is None else steps.throw(error)
                reply = error = None
                if isinstance(step, Execute):
                    reply = store.execute(step)
                else:
                    store.pause(step)
            except StopIteration as done:
                result: T = done.value
                return result
            except BaseException as raised:
                if getgeneratorstate(steps) == GEN_CLOSED:  # they have ended
                    raise
                error = raised  # the generator decides, Ctrl-C included
    except BaseException as raised:
        if getgeneratorstate(steps) == GEN_CLOSED:
            raise
        return drive(steps, store, raised, process)  # a signal handler may raise between any two lines, ours included
    finally:
        del error  # it refers to this frame


async def adrive(
    steps: Steps[T], store: Store, error: BaseException | None = None, process: int = 0, *, undisturbed: bool = False
) -> T:
    """Drive `steps` to their end in this task and return their result.

    A cancellation is thrown into them once. What they do about it, or all that they do if `undisturbed`, goes on to its
    end whatever cancellations come after it (anyio, and with it Starlette and FastAPI, cancels a task again and again
    until it has ended); the last of these is raised then.
    """
    import asyncio  # noqa: PLC0415 - a third of this package's import time, for those who do not use it

    reply: Rows | None = None
    put_off: list[BaseException] = []
    process = process or os.getpid()
    try:
        while True:
            try:
                if os.getpid() != process:
                    _leave_to_parent(steps, process, error)
                step = steps.send(reply) if error is None else steps.throw(error)
                error = None
                work: Coroutine[Any, Any, Rows | None] = (
                    store.aexecute(step) if isinstance(step, Execute) else store.apause(step)
                )
                reply = await (to_its_end(work, put_off) if undisturbed else work)
            except StopIteration as done:
                if put_off:
                    raise put_off[-1] from None
                result: T = done.value
                return result
            except BaseException as raised:
                if getgeneratorstate(steps) == GEN_CLOSED:
                    raise
                error = raised  # the generator decides, cancellation included
                undisturbed = undisturbed or isinstance(raised, asyncio.CancelledError)
    except BaseException as raised:
        if getgeneratorstate(steps) == GEN_CLOSED:
            raise
        return await adrive(steps, store, raised, process, undisturbed=undisturbed)
    finally:
        del error


def _leave_to_parent(steps: Steps[Any], process: int, error: BaseException | None) -> NoReturn:
    steps.close()  # nobody drives them any more
    raise error or LockNotHeld(f"process {process} was at it when it forked this one: the lock is its own")


async def to_its_end(work: Coroutine[Any, Any, T], put_off: list[BaseException]) -> T:
    """Await it in a task of its own, and put the cancellations of ours off, into the list."""
    import asyncio  # noqa: PLC0415 - as above

    task = asyncio.ensure_future(work)
    while not task.done():
        ended = task.get_loop().create_future()  # as asyncio.wait() does, which costs twice as much
        task.add_done_callback(partial(_wake, ended))
        try:
            await ended
        except asyncio.CancelledError as cancelled:
            put_off.append(cancelled)
    return task.result()


def _wake(ended: Any, _: object) -> None:
    if not ended.done():
        ended.set_result(None)
