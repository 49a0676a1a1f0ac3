"""Steps of tests that run each step themselves, and so need no store."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from dblock.core.protocol.steps import Sleep, Step, Steps, Wait


class NoStore:
    """What the steps of a test are about."""

    name = "nothing but a test"


NO_STORE: Final[Any] = NoStore()


def no_store() -> Any:
    """In the place of the reference of a database to its store."""
    return NO_STORE


def pause_of(step: Step) -> float:
    """The seconds that a step lasts that runs no statement; the protocol calls no function of an application."""
    assert isinstance(step, Sleep | Wait)
    return step.seconds


def skipped(answer: Any = None) -> Callable[..., Steps[Any]]:
    """For the place of steps that a broken protocol leaves out: nothing is done, and that is what they come to."""

    def steps(*_: Any, **__: Any) -> Steps[Any]:
        yield from ()
        return answer

    return steps
