"""The steps: the requests that the lock's algorithm yields to its driver.

Rule: generators of this package use `yield from` on the functions below, and on `sending.send` for statements; no
other one has a bare `yield`. Everything that neither waits nor does I/O is a plain function.
`dblock.core.protocol.drive` runs the steps.

Steps and the values that live for one operation are named tuples: they are made on every take, and a frozen
dataclass costs several times as much to make.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol, TypeVar

from dblock.core.statements.base import Statement
from dblock.core.wakeup.registry import Wakeup

T = TypeVar("T")
Parameters = Mapping[str, "str | int | float"]
Rows = Sequence[Sequence[Any]]


class Runner(Protocol):
    """What runs a step: the store of the database that the step is about."""

    name: str
    """Name of the database, without secrets, for events and logs."""

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


class Call(NamedTuple):
    """Call a function of the application or of the face, and answer with its `Outcome`; it throws nothing in.

    It runs in the thread or task that drives the steps. An asynchronous driver awaits what it returns, if it can.
    """

    function: Callable[..., Any]
    arguments: tuple[Any, ...]


class Outcome(NamedTuple):
    """What a function has returned, or raised."""

    result: Any
    error: BaseException | None = None


Step = Execute | Sleep | Wait | Call
Steps = Generator[Step, Any, T]


class Cancelled(BaseException):
    """Thrown into steps whose `Cancel` was set; they clean up as after any interrupt."""


class Cancel:
    """A flag with which another flow ends steps at their next pause; the driver looks at it before and after each.

    Once an interrupt was thrown into the steps, the driver looks at it no more: what they clean up is not cancelled. (A
    statement that fails is no interrupt.)
    """

    __slots__ = ("_wakeup", "is_set", "over")

    def __init__(self) -> None:
        self.is_set = False
        self.over = False
        """Whether what may be cancelled has ended, though the steps go on."""
        self._wakeup: Wakeup | None = None

    def set(self) -> None:
        """Cancel the steps, once they pause."""
        self.is_set = True
        if (wakeup := self._wakeup) is not None:
            wakeup.notify()

    def check(self, step: Sleep | Wait) -> None:
        """Raise Cancelled if it is set; called by the driver about a pause."""
        self._wakeup = step.wakeup if isinstance(step, Wait) else None  # before the flag is read
        if self.is_set and not self.over:
            raise Cancelled


def undone(
    begin: Callable[[], Steps[T]], undo: Callable[[], Steps[object] | None], but: type[BaseException] = GeneratorExit
) -> Steps[T]:
    """The result of the steps that `begin` makes; whatever ends them early, `but` for these errors, `undo` follows.

    `undo` makes steps, unless it needs none. A second interrupt, which falls into it, leaves to the leases what is not
    undone yet.
    """
    return undone_after(begin, lambda _: undo(), but)


def undone_after(
    begin: Callable[[], Steps[T]],
    undo: Callable[[BaseException], Steps[object] | None],
    but: type[BaseException] = GeneratorExit,
) -> Steps[T]:
    """The same; `undo` is given what has ended the steps, which is raised afterwards unless `undo` raises another."""
    try:
        return (yield from begin())
    except (GeneratorExit, but):  # nothing drives further steps after a GeneratorExit
        raise
    except BaseException as error:
        _ = yield from undo(error) or ()
        raise


def at_once(answer: T) -> Steps[T]:
    """The answer, without a step."""
    yield from ()
    return answer


def sleep(store: Runner, seconds: float) -> Steps[None]:
    """Return after `seconds`."""
    yield Sleep(store, seconds)


def wait(store: Runner, seconds: float, wakeup: Wakeup) -> Steps[None]:
    """Return after `seconds`, or when `wakeup` is notified."""
    yield Wait(store, seconds, wakeup)


def call(function: Callable[..., Any], *arguments: Any) -> Steps[Outcome]:
    """What a function of the application or the face has returned or raised."""
    outcome: Outcome = yield Call(function, arguments)
    return outcome
