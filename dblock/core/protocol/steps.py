"""The steps: the requests that the lock's algorithm yields to its driver.

Rule: generators of this package use `yield from` on the functions below and never a bare `yield`; everything that
neither waits nor does I/O is a plain function. `dblock.core.protocol.drive` runs the steps.

Steps and the values that live for one operation are named tuples: they are made on every take, and a frozen
dataclass costs several times as much to make.
"""

from __future__ import annotations

import math
from collections.abc import Generator, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

from dblock.core.statements.base import Statement
from dblock.core.wakeup.registry import Wakeup

T = TypeVar("T")
Parameters = Mapping[str, "str | int | float"]
Rows = Sequence[Sequence[Any]]


class Execute(NamedTuple):
    """Run one statement in a transaction of its own and answer with its rows."""

    statement: Statement
    parameters: Parameters
    until: float = math.inf
    """The local time until which the driver waits for the answer."""
    location: object = None
    """The database that it is for, as `Store.location` named it; it is not run over a connection to another one."""


class Sleep(NamedTuple):
    """Pause; no connection is held meanwhile."""

    seconds: float


class Wait(NamedTuple):
    """Pause for so long, or until the wakeup is notified."""

    seconds: float
    wakeup: Wakeup


Step = Execute | Sleep | Wait
Steps = Generator[Step, Any, T]


def execute(
    statement: Statement, parameters: Parameters, until: float = math.inf, location: object = None
) -> Steps[Rows]:
    """The rows that `statement` answers with until that local time; raises what the executor raises."""
    rows: Rows = yield Execute(statement, parameters, until, location)
    return rows


def sleep(seconds: float) -> Steps[None]:
    """Return after `seconds`."""
    yield Sleep(seconds)


def wait(seconds: float, wakeup: Wakeup) -> Steps[None]:
    """Return after `seconds`, or when `wakeup` is notified."""
    yield Wait(seconds, wakeup)
