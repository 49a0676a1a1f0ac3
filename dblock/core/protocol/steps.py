"""The steps: the requests that the lock's algorithm yields to its driver.

Rule: generators of this package use `yield from` on the functions below and never a bare `yield`; everything that
neither waits nor does I/O is a plain function. `dblock.core.protocol.drive` runs the steps.

Steps and the values that live for one operation are named tuples: they are made on every take, and a frozen
dataclass costs several times as much to make.
"""

from __future__ import annotations

import math
from collections.abc import Generator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol, TypeVar

from dblock.core.statements.base import Statement
from dblock.core.wakeup.registry import Wakeup

T = TypeVar("T")
Parameters = Mapping[str, "str | int | float"]
Rows = Sequence[Sequence[Any]]


class Runner(Protocol):
    """What runs a step: the store of the database that the step is about."""

    def execute(self, step: Execute, /) -> Rows:
        """Run one statement in this thread; the driver's errors come out as LockStoreErrors."""
        ...

    async def aexecute(self, step: Execute, /) -> Rows:
        """Run one statement on the running event loop."""
        ...

    def pause(self, step: Sleep | Wait, /) -> None:
        """Sleep or wait in this thread."""
        ...

    async def apause(self, step: Sleep | Wait, /) -> None:
        """Sleep or wait in the running task."""
        ...


class Execute(NamedTuple):
    """Run one statement in a transaction of its own and answer with its rows."""

    store: Runner
    statement: Statement
    parameters: Parameters
    until: float = math.inf
    """The local time until which the driver waits for the answer."""
    location: object = None
    """The database that it is for, as `Store.location` named it; it is not run over a connection to another one."""


class Sleep(NamedTuple):
    """Pause; no connection is held meanwhile."""

    store: Runner
    seconds: float


class Wait(NamedTuple):
    """Pause for so long, or until the wakeup is notified."""

    store: Runner
    seconds: float
    wakeup: Wakeup


Step = Execute | Sleep | Wait
Steps = Generator[Step, Any, T]


def execute(
    store: Runner, statement: Statement, parameters: Parameters, until: float = math.inf, location: object = None
) -> Steps[Rows]:
    """The rows that `statement` answers with until that local time; raises what the executor raises."""
    rows: Rows = yield Execute(store, statement, parameters, until, location)
    return rows


def sleep(store: Runner, seconds: float) -> Steps[None]:
    """Return after `seconds`."""
    yield Sleep(store, seconds)


def wait(store: Runner, seconds: float, wakeup: Wakeup) -> Steps[None]:
    """Return after `seconds`, or when `wakeup` is notified."""
    yield Wait(store, seconds, wakeup)
