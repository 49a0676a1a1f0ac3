"""Flows of control, and what each of them holds.

A flow is an asyncio task where one is running, else a thread in the context (`contextvars`) that it runs in. Two flows
that can run at the same time are never one owner: a task is looked up by its own identity, because a child task
inherits its parent's context variables and all tasks of a loop share one thread. Nor is a thread of a pool one owner
for all who run something in it: asyncio.to_thread, AnyIO and asgiref run each call in a copy of its caller's context,
so that two requests that happen to meet the same thread are two flows. (Under gevent and eventlet `threading.local` is
per greenlet, as it should be.)

Rule: the state of a hold lives here, with the flow that has it, never on a lock object, which flows may share. Only its
own flow changes it. After a fork the child is a new flow with nothing: the parent's holds stay the parent's.
"""

from __future__ import annotations

import functools
import itertools
import os
import secrets
import sys
import threading
import weakref
from collections.abc import Generator, MutableMapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, Final

from dblock.core.identity import process_identity, storable

if TYPE_CHECKING:
    from dblock.core.holding.holds import Hold


FLOW: Final = 16
"""How many digits of an owner token name the flow, which is no secret; the others are."""


def new_owner() -> str:
    """A token that nobody can guess, for one attempt of the present flow to begin a tenure.

    So a row that shows it shows this attempt's tenure and no other: not an earlier one of the same flow whose release
    was lost, nor one that the flow took through another engine.
    """
    return current_flow().name + secrets.token_hex(16)


_numbers = itertools.count()


@functools.cache
def _process() -> str:
    return secrets.token_hex(4)


class Flow:
    """What one flow holds, found by the store of its row and its key; and who it is."""

    __slots__ = ("__weakref__", "_is_task", "holds", "life", "name", "ref", "who")

    def __init__(self, name: str, life: Any, *, is_task: bool = False) -> None:
        """`life` is the asyncio task, or lives as long as the thread."""
        self.name = f"{_process()}{next(_numbers) & 0xFFFFFFFF:08x}"
        self.holds: dict[tuple[object, str], Hold] = {}
        self.who = process_identity() | {"thread": storable(name)}
        self.ref = weakref.ref(self)
        self.life = weakref.ref(life)
        """The asyncio task, or what dies with the thread."""
        self._is_task = is_task

    @property
    def task(self) -> Any:
        """The asyncio task that it is, if it is one and lives."""
        return self.life() if self._is_task else None

    def ended(self) -> bool:
        """Is there nobody left to give back what it holds? A flow of a context also ends by being collected with it."""
        life = self.life()
        return life is None or (self._is_task and bool(life.done()))


class _Life:
    """Dies with its thread."""

    __slots__ = ("__weakref__",)


class _Thread(threading.local):
    def __init__(self) -> None:
        self.life = _Life()


_thread = _Thread()
_of_context: ContextVar[Flow | None] = ContextVar("dblock flow", default=None)
_tasks: MutableMapping[Any, Flow] = weakref.WeakKeyDictionary()


def current_flow() -> Flow:
    """The flow of control that is running now."""
    task = current_task()
    if task is None:
        flow, life = _of_context.get(), _thread.life
        if flow is None or flow.life() is not life:  # of another thread, whose context ours was copied from
            flow = Flow(threading.current_thread().name, life)
            _ = _of_context.set(flow)
        return flow
    flow = _tasks.get(task)
    if flow is None:
        flow = _tasks[task] = Flow(f"task {task.get_name()}", task, is_task=True)
    return flow


@contextmanager
def flow_again(snapshot: Hold) -> Generator[None, None, None]:
    """Let this thread see the hold as its flow saw it, without being able to change anything there."""
    flow = Flow(threading.current_thread().name, _thread.life)
    flow.holds = {(snapshot.store, snapshot.tenure.key): snapshot}
    mine = _of_context.set(flow)
    try:
        yield
    finally:
        _of_context.reset(mine)


def current_task() -> Any:
    """The running asyncio task, or None."""
    asyncio = sys.modules.get("asyncio.events")
    if asyncio is None or asyncio._get_running_loop() is None:
        return None
    return sys.modules["asyncio"].current_task()


def _after_fork_in_child() -> None:
    global _thread, _tasks
    parent = os.getppid()
    for flow in (_of_context.get(), *_tasks.values()):
        if flow is None:
            continue
        for hold in flow.holds.values():
            for lock in hold.locks():
                lock.forked_from = parent
    process_identity.cache_clear()
    _process.cache_clear()
    _thread, _tasks = _Thread(), weakref.WeakKeyDictionary()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork_in_child)
