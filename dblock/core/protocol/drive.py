"""The drivers of the protocol's steps, one for synchronous code and one for asyncio.

Rule: whatever interrupts a step (an error, Ctrl-C, a cancellation) is thrown *into* the generator, which cleans up with
further steps and is always driven to its end. But a process that was forked during a step does not continue the steps:
their state, the owner token above all, is its parent's. A function of the application that steps call may fork: then
it returns into the child too, where the steps themselves have to know their parent's state.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Coroutine
from inspect import GEN_CLOSED, getgeneratorstate, isawaitable
from typing import Any, NoReturn, TypeVar

from dblock.core.errors import LockError, LockNotHeld
from dblock.core.protocol.steps import Call, Cancel, Execute, Outcome, Rows, Sleep, Steps, Wait

T = TypeVar("T")


def drive(steps: Steps[T], error: BaseException | None = None, process: int = 0, *, cancel: Cancel | None = None) -> T:
    """Drive `steps` to their end in this thread and return their result; begin by throwing `error` if there is one."""
    reply: Rows | Outcome | None = None
    process = process or os.getpid()
    try:
        while True:
            try:
                while True:  # inside, as a signal handler may raise between any two lines, ours included
                    if os.getpid() != process:
                        _leave_to_parent(steps, process, error)
                    step = steps.send(reply) if error is None else steps.throw(error)
                    reply = error = None
                    if isinstance(step, Execute):
                        reply = step.store.execute(step)
                    elif isinstance(step, Call):
                        reply, process = _outcome(step), os.getpid()
                    else:
                        _pause(step, cancel)
            except StopIteration as done:
                result: T = done.value
                return result
            except BaseException as raised:
                if getgeneratorstate(steps) == GEN_CLOSED:  # they have ended
                    raise
                error = raised  # the generator decides, Ctrl-C included
                cancel = cancel if isinstance(raised, LockError) else None
    except BaseException as raised:
        if getgeneratorstate(steps) == GEN_CLOSED:
            raise
        return drive(steps, raised, process)  # a signal handler has raised while another error was handled
    finally:
        del error  # it refers to this frame


def _pause(step: Sleep | Wait, cancel: Cancel | None) -> None:
    if cancel is not None:
        cancel.check(step)
    step.store.pause(step)
    if cancel is not None:
        cancel.check(step)


def _outcome(call: Call) -> Outcome:
    try:
        return Outcome(call.function(*call.arguments))
    except BaseException as error:  # noqa: BLE001 - it is the answer
        return Outcome(None, error)


async def adrive(
    steps: Steps[T],
    error: BaseException | None = None,
    process: int = 0,
    *,
    undisturbed: bool = False,
    cancel: Cancel | None = None,
) -> T:
    """Drive `steps` to their end in this task and return their result.

    A cancellation is thrown into them once, or is what a function has raised that they call. The steps after it, or all
    steps if `undisturbed`, run to their end whatever cancellations follow (anyio, and with it Starlette and FastAPI,
    cancels a task again and again until it has ended); the last of these is raised then.
    """
    reply: Rows | Outcome | None = None
    put_off: list[BaseException] = []
    process = process or os.getpid()
    try:
        while True:
            try:
                while True:
                    if os.getpid() != process:
                        _leave_to_parent(steps, process, error)
                    step = steps.send(reply) if error is None else steps.throw(error)
                    error = None
                    if isinstance(step, Call):
                        reply, process = await _aoutcome(step), os.getpid()
                        undisturbed = undisturbed or isinstance(reply.error, asyncio.CancelledError)
                        continue
                    work: Coroutine[Any, Any, Rows | None] = (
                        step.store.aexecute(step) if isinstance(step, Execute) else _apause(step, cancel)
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
                cancel = cancel if isinstance(raised, LockError) else None
                undisturbed = undisturbed or isinstance(raised, asyncio.CancelledError)
    except BaseException as raised:
        if getgeneratorstate(steps) == GEN_CLOSED:
            raise
        return await adrive(steps, raised, process, undisturbed=undisturbed)
    finally:
        del error


async def _apause(step: Sleep | Wait, cancel: Cancel | None) -> None:
    if cancel is not None:
        cancel.check(step)
    await step.store.apause(step)
    if cancel is not None:
        cancel.check(step)


async def _aoutcome(call: Call) -> Outcome:
    try:
        result = call.function(*call.arguments)
        return Outcome(await result if isawaitable(result) else result)
    except GeneratorExit:  # the task is gone
        raise
    except BaseException as error:  # noqa: BLE001 - it is the answer
        return Outcome(None, error)


def going_on(begun: Callable[[], Steps[Any] | None]) -> bool:
    """Whether the steps that a weak reference names are being driven, or will be: their driver refers to them."""
    steps = begun()
    return steps is not None and getgeneratorstate(steps) != GEN_CLOSED


def _leave_to_parent(steps: Steps[Any], process: int, error: BaseException | None) -> NoReturn:
    steps.close()  # nothing drives them in this process
    raise error or LockNotHeld(f"process {process} forked this one during the operation: the lock is its own")


def plain_task(work: Coroutine[Any, Any, T], loop: asyncio.AbstractEventLoop | None = None) -> asyncio.Task[T]:
    """A task of the lock's own on `loop`, by default the running one, made without the application's task factory.

    An eager task (`asyncio.eager_task_factory`) runs its first step before the call that creates it returns. That step
    would run inside the greenlet of SQLAlchemy that creates the task, and switch to the wrong greenlet from there.
    """
    return asyncio.Task(work, loop=loop or asyncio.get_running_loop())


async def to_its_end(work: Coroutine[Any, Any, T], put_off: list[BaseException]) -> T:
    """Await the work in a task of its own, and collect cancellations of this task in the list `put_off`."""
    task, ended = plain_task(work), asyncio.Event()  # asyncio.wait() costs more
    task.add_done_callback(lambda _: ended.set())
    while not task.done():
        try:
            _ = await ended.wait()
        except asyncio.CancelledError as cancelled:
            put_off.append(cancelled)
    return task.result()
