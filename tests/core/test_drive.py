"""The drivers of the steps: what a function of the application raises, and how another flow ends a pause."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from dblock.core.errors import StoreUnanswered
from dblock.core.protocol.drive import adrive, drive
from dblock.core.protocol.steps import Cancel, Cancelled, Execute, Outcome, Rows, Steps, call, sleep, wait
from dblock.core.wakeup.registry import Wakeup
from tests.core.test_holds import FakeStore
from tests.support.lab import until


class Silent(FakeStore):
    """A database that answers no statement."""

    def execute(self, step: Execute) -> Rows:
        raise StoreUnanswered("down")

    async def aexecute(self, step: Execute) -> Rows:
        raise StoreUnanswered("down")


STORE: Any = Silent()


def here() -> tuple[int, Any]:
    """The thread, and the task."""
    try:
        return threading.get_ident(), asyncio.current_task()
    except RuntimeError:
        return threading.get_ident(), None


async def awaited() -> tuple[int, Any]:
    await asyncio.sleep(0)
    return here()


def fails(error: BaseException) -> Callable[[], Any]:
    def function() -> None:
        raise error

    return function


@pytest.mark.parametrize("error", [ValueError(), KeyboardInterrupt(), SystemExit()], ids=repr)
def test_what_a_function_does_is_an_answer(error: BaseException) -> None:
    """Its result, or what it raises, whatever that is; it runs in the flow that drives the steps."""

    def steps(function: Callable[[], Any]) -> Steps[list[Outcome]]:
        return [(yield from call(function)), (yield from call(fails(error)))]

    async def main() -> None:
        for function in (here, awaited):
            assert await adrive(steps(function), undisturbed=True) == [(here(), None), (None, error)]

    assert drive(steps(here)) == [(here(), None), (None, error)]
    asyncio.run(main())


def test_a_function_that_was_cancelled_has_its_steps_finished() -> None:
    """However often its task is cancelled meanwhile."""
    said = list[Any]()

    async def body() -> None:
        said.append("begun")
        await asyncio.sleep(60)

    def steps() -> Steps[None]:
        said.append(type((yield from call(body)).error))
        yield from sleep(STORE, 0.05)
        said.append("finished")

    async def main() -> None:
        task = asyncio.create_task(adrive(steps()))
        while not task.done():
            await asyncio.sleep(0.01)
            task.cancel()
        assert task.cancelled()

    asyncio.run(main())
    assert said == ["begun", asyncio.CancelledError, "finished"]


def pausing(said: list[str], wakeup: Wakeup | None = None) -> Steps[str]:
    """Steps that pause for long after a statement that fails, and clean up."""
    try:
        with contextlib.suppress(StoreUnanswered):
            _ = yield Execute(STORE, STORE.database.dialect.take, {})
        yield from sleep(STORE, 0.001)
        said.append("begun")
        while True:
            yield from wait(STORE, 60, wakeup or Wakeup())
            said.append("notified")
    except Cancelled:
        yield from wait(STORE, 0.001, Wakeup())
        said.append("cleaned up")
        return "cancelled"


@pytest.mark.parametrize("awaits", [False, True], ids=["thread", "task"])
def test_steps_are_cancelled_as_they_pause(awaits: bool) -> None:
    """At once, and once; a flag that was set before ends the first pause."""
    said, cancel, found = list[str](), Cancel(), list[str]()

    def run() -> None:
        steps = pausing(said)
        found.append(asyncio.run(adrive(steps, cancel=cancel)) if awaits else drive(steps, cancel=cancel))

    thread = threading.Thread(target=run)
    thread.start()
    assert until(lambda: cancel._wakeup is not None and said == ["begun"])
    began = time.monotonic()
    cancel.set()
    thread.join()
    assert time.monotonic() - began < 5
    run()
    assert (said, found) == (["begun", "cleaned up", "cleaned up"], ["cancelled"] * 2)


def test_what_cannot_be_cancelled_any_more() -> None:
    """Goes on, whatever the flag."""
    cancel = Cancel()

    def steps() -> Steps[str]:
        cancel.over = True
        cancel.set()
        yield from sleep(STORE, 0.001)
        return "done"

    assert drive(steps(), cancel=cancel) == "done"
