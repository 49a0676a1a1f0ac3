"""Calls that a pool of threads runs, each in a copy of its caller's context: asgiref's, AnyIO's and asyncio's.

The thread lives on when such a call has returned, so its flow does not end with the thread; and its context is
collected at some later time. But the pool keeps a future, which tells when the call has returned. A lock that the call
took with `acquire()` can be released later in one case: asgiref carries the context back to the task that awaits the
call, and later calls of that task see it. There the call is over only when the task is done, too.

Rule: the end of a call that is not recognised is unknown: its flow ends with its thread.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextvars import Context
from functools import partial
from types import FrameType
from typing import Any, Final
from weakref import ref

from dblock.core import timing

_ITEMS: Final = {"concurrent.futures.thread", "asgiref.current_thread_executor"}
"""Modules whose work items refer to the future of their call."""


def running_call() -> Callable[[], bool] | None:
    """A function that tells whether the pool's call in this thread is over; None if there is no such call."""
    frame: FrameType | None = sys._getframe(1)
    handler: FrameType | None = None
    while frame is not None:
        name, module = frame.f_code.co_name, frame.f_globals.get("__name__")
        if name == "thread_handler" and module == "asgiref.sync":
            handler = frame
        elif name == "run" and module == "anyio._backends._asyncio":
            # A cancelled call may still run, without a waiting task.
            return _when(frame.f_locals.get("future"), lambda future: future.done() and not future.cancelled())
        elif name == "run" and module in _ITEMS and hasattr(frame.f_locals.get("self"), "future"):
            # (From Python 3.14 on, a `run` of the worker's context is between the item and the function.)
            item: Any = frame.f_locals["self"]
            returned = _when(item.future, lambda future: future.done())
            if handler is None:
                return returned if _in_a_copy(item) else None
            done = _when(_awaiting(handler), lambda task: task.done() or task.get_loop().is_closed())
            return None if returned is None or done is None else partial(_both, returned, done)
        frame = frame.f_back
    return None


def _both(one: Callable[[], bool], other: Callable[[], bool]) -> bool:
    return one() and other()


def _when(what: Any, is_over: Callable[[Any], bool]) -> Callable[[], bool] | None:
    """A function that tells whether `what` is over or collected; None if `what` is None."""
    if what is None:
        return None
    found = ref(what)
    return lambda: (known := found()) is None or is_over(known)


def _in_a_copy(item: Any) -> bool:
    """Whether a work item runs its function in a context of its own, as asyncio.to_thread does."""
    function = getattr(item, "fn", None) or getattr(item, "task", (None,))[0]
    run = getattr(function, "func", None)
    return isinstance(getattr(run, "__self__", None), Context)


def _awaiting(handler: FrameType) -> Any:
    """The task that awaits a call of sync_to_async: its coroutine has the same list as the call's own frame."""
    known, loop = handler.f_locals.get("task_context"), handler.f_locals.get("loop")
    if known is None:
        return None
    near = timing.DEFAULT.near
    for pause in (0.0, near / 10, near / 2, 2 * near):  # the task may not await the call yet when that begins
        if pause:
            time.sleep(pause)
        for task in sys.modules["asyncio"].all_tasks(loop):
            if any(frame.f_locals.get("task_context") is known for frame in _frames(task.get_coro())):
                return task
    return None


def _frames(coroutine: Any) -> Iterator[FrameType]:
    """The frames of asgiref in a coroutine and what it awaits; of a running coroutine only the outermost is known."""
    while coroutine is not None:
        frame = getattr(coroutine, "cr_frame", None)
        if frame is not None and frame.f_globals.get("__name__") == "asgiref.sync":
            yield frame
        coroutine = getattr(coroutine, "cr_await", None)
