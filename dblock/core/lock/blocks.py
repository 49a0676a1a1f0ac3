"""The blocks of `with`: when one has ended, whatever has interrupted it.

A signal handler may raise before the first line of `__exit__`, and after the last one of `__enter__`: then no code of
the lock notices that the block is over. But a `with` statement loads `__enter__` and then `__exit__`, calls the first,
keeps the second for as long as its block is open, and calls that at the end (The Python Language Reference, 8.5). So
here both are loaded as objects of their own for each statement, and a block is open while its end exists.

Only code that loads `__exit__` directly after `__enter__` of the same lock gets such an end. Any other block, of an
ExitStack, of a class that awaits before it enters, of methods that are called by hand, has none: it is open for as long
as the lock object exists, unless its end is called. So is each block on CPython 3.14 and later, whose `with` loads
`__exit__` first.

Rule: nothing but the statement refers to an end, also no frame, which a traceback would keep.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from inspect import iscoroutinefunction
from types import MethodType, TracebackType
from typing import Any, Concatenate, TypeVar, cast

from dblock.core import runtime

S = TypeVar("S")
R = TypeVar("R")
Leave = Callable[[S, type[BaseException] | None, BaseException | None, TracebackType | None], R]
"""As Python calls `__exit__` and `__aexit__`."""


class Loaded:
    """What one statement has loaded. Code that keeps it may begin and end several blocks by it."""

    __slots__ = ("end", "opened", "owner")

    def __init__(self, owner: Any, opened: list[Any] | None = None) -> None:
        self.owner = weakref.ref(owner)
        self.end: Callable[[], Any] | None = None
        """A weak reference to the end, once that is loaded; None without an end of the block's own."""
        self.opened: list[Any] = owner._withs if opened is None else opened
        """Where to put what a block opens, for its end: by default beside the owner's other blocks without ends."""


class _Begin:
    """The descriptor of `__enter__` or `__aenter__`."""

    def __init__(self, enter: Callable[..., Any]) -> None:
        self.enter = enter
        _ = functools.update_wrapper(self, enter)

    def __get__(self, owner: Any, kind: type | None = None) -> Any:
        if owner is None:
            return self
        its = runtime.current.flows.thread.loaded = Loaded(owner, [])
        return functools.partial(self, owner, its)

    def __call__(self, owner: Any, its: Loaded | None = None) -> Any:
        """Enter a block; without `its` no `with` has begun it: contextlib.ExitStack calls the function of the class."""
        runtime.current.flows.thread.loaded = None
        has_end = its is not None and its.end is not None and its.end() is not None
        return self.enter(owner, its if has_end else Loaded(owner))


class _End:
    """The descriptor of `__exit__` or `__aexit__`."""

    def __init__(self, leave: Callable[..., Any]) -> None:
        self.leave = leave
        self._awaits = iscoroutinefunction(leave)
        _ = functools.update_wrapper(self, leave)

    def __get__(self, owner: Any, kind: type | None = None) -> Any:
        if owner is None:
            return self
        thread = runtime.current.flows.thread
        its, thread.loaded = thread.loaded, None
        if its is None or its.owner() is not owner:
            return MethodType(self.leave, owner)
        end = functools.partial(self.leave, owner, opened=its.opened)
        its.end = weakref.ref(end)
        return MethodType(_awaited, end) if self._awaits else end

    def __call__(self, owner: Any, *error: Any) -> Any:
        """Leave a block that no `with` has begun."""
        return self.leave(owner, *error)


async def _awaited(end: Callable[..., Any], *error: Any) -> Any:
    """Leave by the end of an `async with`, which refers to it until it has called it: the block is open until then."""
    try:
        return await end(*error)
    finally:
        del end  # a traceback keeps this frame


def block_begin(enter: Callable[[S, Loaded], R]) -> Callable[[S], R]:
    """Decorates `__enter__` and `__aenter__`, whose last argument is what their statement has loaded."""
    return cast("Callable[[S], R]", _Begin(enter))


def block_end(leave: Callable[Concatenate[S, ...], R]) -> Leave[S, R]:
    """Decorates `__exit__` and `__aexit__`, whose argument `opened` is the list of what was opened for that end."""
    return cast("Leave[S, R]", _End(leave))
