"""Decorated functions, and the key of each call.

Rule: a function that cannot be guarded is refused at decoration, not in production; a key that cannot be formed from a
call is refused before any I/O.
"""

from __future__ import annotations

import functools
import inspect as python
import re
import string
from collections.abc import Callable, Coroutine
from types import MethodType
from typing import TYPE_CHECKING, Any, Final, TypeVar, cast

from dblock.core.errors import InvalidKey, LockTimeout
from dblock.core.lock.failures import WAIT_LONGER
from dblock.core.log import inform
from dblock.core.validation import valid_key

NO_SKIP: Final = 'the body of a `with` cannot be skipped: on_busy="skip" is for decorators; here use acquire()'
_NO_KEY = "without a key db_lock makes a decorator and no lock: give it one"
F = TypeVar("F", bound=Callable[..., Any])
AF = TypeVar("AF", bound=Callable[..., Coroutine[Any, Any, Any]])


_ADDRESS: Final = re.compile(r" at 0x[0-9a-fA-F]{6,}>")
"""As Python shows an object that does not say how."""


class Template:
    """The key of a decorator: a format string over the arguments of each call.

    `valid` checks each key. `bound`: the first parameter (`self`) is bound, and so is not among the arguments.
    """

    def __init__(
        self,
        key: str,
        function: Callable[..., Any],
        valid: Callable[[object], str] = valid_key,
        *,
        bound: bool = False,
    ) -> None:
        _refuse_unguardable(function)
        self._format, self.function, self._valid = key, function, valid
        try:
            fields = [name for _, name, _, _ in string.Formatter().parse(key) if name is not None]
        except ValueError as error:
            raise InvalidKey(f"the key {key!r} is not a format string: {error}", key=key) from error
        self._plain = not fields
        # A wrapper is called with the parameters of the wrapped function, or with its own.
        called = MethodType(function, self) if bound else function
        self._signatures = [python.signature(called, follow_wrapped=follow) for follow in (True, False)]
        parameters = [each for signature in self._signatures for each in signature.parameters.values()]
        names = {parameter.name for parameter in parameters}
        takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)
        for field in fields:
            name = field.partition(".")[0].partition("[")[0]
            if not name:
                raise InvalidKey(f"name the argument in the key {key!r}, such as {{sku}}", key=key)
            if not (name.isdigit() or name in names or takes_any):
                raise InvalidKey(f"the key {key!r} names {name!r}, which {_name(function)} does not take", key=key)

    def key(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
        """The key of one call."""
        if self._plain:
            return self._valid(self._format.format())
        bound = self._bind(args, kwargs)
        try:
            key = self._valid(self._format.format(*bound.args, **{**bound.kwargs, **bound.arguments}))
        except (LookupError, AttributeError, ValueError) as error:
            message = f"the key {self._format!r} of {_name(self.function)} cannot be formed from this call: {error}"
            raise InvalidKey(message, key=self._format) from error
        if _ADDRESS.search(key):
            what = f"the key {key!r} of {_name(self.function)} has the address of an object in it"
            raise InvalidKey(f"{what}, so that it excludes nobody: name an attribute, such as {{order.id}}", key=key)
        return key

    def arguments(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        """The arguments of one call by name, defaults included."""
        return dict(self._bind(args, kwargs).arguments)

    def _bind(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> python.BoundArguments:
        why = ""
        for signature in self._signatures:
            try:
                bound = signature.bind(*args, **kwargs)
            except TypeError as error:
                why = why or str(error)
            else:
                bound.apply_defaults()
                return bound
        key = f"no key {self._format!r}" if self._format else "no key"
        raise TypeError(f"{_name(self.function)} does not take these arguments ({why}), so there is {key} for them")


def _name(function: Callable[..., Any]) -> str:
    """Name for messages, without the address in memory."""
    return f"{function.__module__}.{getattr(function, '__qualname__', type(function).__qualname__)}"


def decorated(lock: Any, function: F) -> F:
    """`function`, each call of which holds a lock of its own, whose key is formatted with the arguments.

    `lock`: one, several, a semaphore, a majority, or what begins guarded blocks on one of them.
    """
    if python.iscoroutinefunction(function):
        raise TypeError(f"{function!r} is a coroutine function: decorate it with the lock of an async engine")
    template = lock._templates(function)

    @functools.wraps(function)
    def locked(*args: Any, **kwargs: Any) -> Any:
        call, entered = lock._for_call(template, args, kwargs), False
        try:
            with call:
                entered = True
                result = function(*args, **kwargs)
                if python.iscoroutine(result):
                    result.close()
                    raise TypeError(f"{function!r} returned a coroutine, which would run after the lock is released")
                return result
        except LockTimeout as busy:
            if entered or lock.options.on_busy == "raise":
                raise
            return _left_out(lock, function, busy)

    return cast("F", locked)


def adecorated(lock: Any, function: AF) -> AF:
    """The same of a coroutine function."""
    if not python.iscoroutinefunction(function):
        raise TypeError(f"{function!r} is not a coroutine function: decorate it with the lock of a sync engine")
    template = lock._templates(function)

    @functools.wraps(function)
    async def locked(*args: Any, **kwargs: Any) -> Any:
        call, entered = lock._for_call(template, args, kwargs), False
        try:
            async with call:
                entered = True
                return await function(*args, **kwargs)
        except LockTimeout as busy:
            if entered or lock.options.on_busy == "raise":
                raise
            return _left_out(lock, function, busy)

    return cast("AF", locked)


def _left_out(lock: Any, function: Callable[..., Any], busy: LockTimeout) -> Any:
    """What a call returns that is left out, as the key is busy."""
    inform("skipped a call of %s: %s", _name(function), str(busy).removesuffix(f"; {WAIT_LONGER}"))
    return lock.options.otherwise


class NoKey:
    """The decorator that `db_lock` makes without a key.

    The key is the function's module and qualified name, so that each function has one lock, wherever it is imported
    under the same module name.
    """

    def __init__(self, make: Callable[[str], Callable[[Any], Any]]) -> None:
        self._make = make
        _ = make("any")  # bad options are refused here

    def __call__(self, function: F) -> F:
        """Decorate `function`, sync or async as the lock is."""
        _refuse_unguardable(function)
        name = getattr(function, "__qualname__", ">")
        if name.endswith(">"):  # <lambda>, the name of every lambda of the module
            raise InvalidKey(
                f"{function!r} has no name to call the lock by: give it a key, such as 'order:{{order.pk}}'"
            )
        decorated: F = self._make(f"{function.__module__}.{name}")(function)
        return decorated

    if not TYPE_CHECKING:  # hidden from type checkers: it is no lock

        def __getattr__(self, name: str) -> Any:
            raise AttributeError(f"{name}: {_NO_KEY}")

        def __enter__(self) -> None:
            raise TypeError(_NO_KEY)

        __aenter__ = __exit__ = __aexit__ = __enter__


def _refuse_unguardable(function: Callable[..., Any]) -> None:
    if isinstance(function, staticmethod | classmethod | property):
        kind = type(function).__name__
        raise TypeError(f"put @{kind} above @db_lock: the lock decorates the plain function")
    if isinstance(function, type) or not callable(function):
        raise TypeError(f"db_lock decorates functions, not {function!r}")
    if hasattr(function, "apply_async"):
        raise TypeError(f"put @shared_task above @db_lock: {function!r} would go on running without the lock")
    if python.isgeneratorfunction(function) or python.isasyncgenfunction(function):
        raise TypeError(f"{function!r} is a generator: its body runs after the call, when the lock is free again")
