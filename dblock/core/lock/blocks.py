"""The blocks of `with`: when one has ended, whatever has interrupted it.

A signal handler may raise before the first line of `__exit__`, and after the last one of `__enter__`: then no code of
the lock notices that the block is over. But a `with` statement loads `__exit__` before it calls `__enter__`, keeps what
it has loaded for as long as its block is open, and calls that at the end (The Python Language Reference, 8.5). So here
each statement loads an object of its own, and a block is open while its end exists.

Rule: nothing but the statement refers to an end, also no frame, which a traceback would keep.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from inspect import iscoroutinefunction
from types import MethodType
from typing import Any, NamedTuple, TypeVar, cast

from dblock.core import runtime

F = TypeVar("F", bound=Callable[..., Any])


class Loaded(NamedTuple):
    """The end of a block that is about to begin."""

    end: Callable[[], Any]
    """A weak reference to it."""
    opened: list[Any]
    """Where to put what the block opens, for its end."""


class _End:
    """The descriptor of `__exit__` or `__aexit__`."""

    def __init__(self, leave: Callable[..., Any]) -> None:
        self.leave = leave
        self._awaits = iscoroutinefunction(leave)
        _ = functools.update_wrapper(self, leave)

    def __get__(self, owner: Any, kind: type | None = None) -> Any:
        if owner is None:
            return self
        opened: list[Any] = []
        end = functools.partial(self.leave, owner, opened=opened)
        runtime.current.flows.thread.loaded = Loaded(weakref.ref(end), opened)
        return MethodType(_awaited, end) if self._awaits else end

    def __call__(self, owner: Any, *error: Any) -> Any:
        """Leave a block whose end was not loaded by a `with`: contextlib.ExitStack calls the function of the class."""
        return self.leave(owner, *error)


async def _awaited(end: Callable[..., Any], *error: Any) -> Any:
    """Leave by the end of an `async with`, which refers to it until it has called it: the block is open until then."""
    try:
        return await end(*error)
    finally:
        del end  # a traceback keeps this frame


def block_end(leave: F) -> F:
    """Decorates `__exit__` and `__aexit__`, whose last argument is the list of what their block has opened."""
    return cast("F", _End(leave))


def loaded(owner: object) -> Loaded | None:
    """The end that a `with` of `owner` has loaded just now, in this thread; None where its methods are called by hand.

    A block without one is open for as long as the lock object exists.
    """
    thread = runtime.current.flows.thread
    found, thread.loaded = thread.loaded, None
    return found if found is not None and getattr(found.end(), "args", (None,))[0] is owner else None
