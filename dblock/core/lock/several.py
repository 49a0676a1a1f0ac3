"""Several locks that are taken together, or not at all.

They are taken one after the other, each through its queue, under one deadline, in the order of their databases and
keys. So two flows that take overlapping sets cannot wait for each other in a circle.

Rule: whatever ends the taking early, a timeout, an error or an interrupt, what was taken before is released.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import AsyncGenerator, Awaitable, Callable, Generator, Iterator, Sequence
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager, contextmanager, suppress
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, TypeVar, cast

from dblock.core import clock
from dblock.core.errors import LockNotHeld, LockTimeout
from dblock.core.lock import entering
from dblock.core.lock.base import BaseLock
from dblock.core.lock.locks import AsyncLock, Timeout
from dblock.core.lock.locks import enter as enter_one
from dblock.core.log import inform
from dblock.core.validation import acquire_timeout
from dblock.core.values import Seconds, State

if TYPE_CHECKING:
    from dblock.core.lock.key_template import Template

F = TypeVar("F", bound=Callable[..., Any])


def once(keys: Sequence[Any]) -> list[Any]:
    """Each of the keys and locks that db_locks() was given, once."""
    for each in keys:
        if isinstance(each, list | tuple | set | frozenset):
            raise TypeError(f"db_locks() takes keys, not a {type(each).__name__} of them: write db_locks(*keys)")
    return list(dict.fromkeys(keys))


class _Busy(Exception):
    """One of the locks was not free in time."""


class BaseLocks:
    """Several locks, apart from how their statements are run; iterates over them in the order of the keys given."""

    def __init__(
        self,
        members: Sequence[Any],
        timeout: float | None,
        *,
        on_busy: str = "raise",
        otherwise: Any = None,
    ) -> None:
        if not members:
            raise TypeError("db_locks() takes one key or lock at least")
        if on_busy not in {"raise", "skip"}:
            raise ValueError(f'on_busy is "raise" or "skip", not {on_busy!r}')
        if otherwise is not None and on_busy != "skip":
            raise ValueError('otherwise is what a skipped call returns: say on_busy="skip" as well')
        self._members = list(members)
        """In the order given; one that comes twice once, as far as that is known before the keys are formatted."""
        self._timeout = timeout
        self._on_busy, self._otherwise = on_busy, otherwise

    # -- what is known without I/O

    @property
    def keys(self) -> list[str]:
        """The keys, as they were given."""
        return [lock.key for lock in self._members]

    @property
    def fences(self) -> dict[str, int]:
        """By key, the number of this flow's tenure. Raises LockNotHeld without one."""
        found = {lock.key: lock.fence for lock in self._members}
        if missing := [key for key, fence in found.items() if fence is None]:
            raise LockNotHeld(f"{missing[0]!r} is not held by this thread or task", key=missing[0])
        return found

    @property
    def fence(self) -> int:
        """The greatest of the fences, and so greater than every earlier fence of each key."""
        return max(self.fences.values())

    @property
    def remaining(self) -> float:
        """Seconds for which this flow may still rely on all of them, 0.0 if it may not; by the local clock alone."""
        least: float = min(lock.remaining for lock in self._members)
        return least

    @property
    def state(self) -> State | None:
        """`held`, `at_risk` or `lost` if one of them is, by the local clock; None unless this flow holds them all."""
        states: set[State | None] = {lock.state for lock in self._members}
        if None in states:
            return None
        return "lost" if "lost" in states else "at_risk" if "at_risk" in states else "held"

    def check(self) -> None:
        """Raise LockLost unless this flow surely holds all of them at this moment, as `Lock.check`; no I/O."""
        for lock in self._members:
            lock.check()

    def __getitem__(self, key: str) -> Any:
        for lock in self._members:
            if lock.key == key:
                return lock
        raise KeyError(key)

    def __iter__(self) -> Iterator[Any]:
        return iter(self._members)

    def __len__(self) -> int:
        return len(self._members)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {', '.join(map(repr, self.keys))}: {self.state or 'not held here'}>"

    # -- helpers

    def _in_order(self) -> list[Any]:
        """Each lock once, in the order in which all flows take them."""
        found = {(str(lock._store().location or lock._store().name), lock.key): lock for lock in self._members[::-1]}
        return [found[place] for place in sorted(found)]

    def _in_turn(self, timeout: float | None) -> Iterator[tuple[Any, float | None]]:
        """Each lock, and the time that is left for it."""
        deadline = None if timeout is None else clock.now() + timeout
        for lock in self._in_order():
            yield lock, None if deadline is None else max(deadline - clock.now(), 0.0)

    def _counts(self) -> list[tuple[Any, int]]:
        """Each lock, and how often this flow has entered it."""
        return [(lock, lock.count) for lock in self._in_order()]

    @contextmanager
    def _all_or_none(self, leave: Callable[[Any], object]) -> Generator[None, None, None]:
        """Leave what was entered, by `leave`, if it does not come to the end, wherever it was interrupted."""
        before = self._counts()
        try:
            yield
        except BaseException:
            with ExitStack() as leaving:
                for lock, count in before:
                    if lock.count > count:
                        _ = leaving.callback(leave, lock)
            raise

    def _templates(self, function: Callable[..., Any]) -> list[Template]:
        """The keys of a decorator."""
        from dblock.core.lock.key_template import Template  # noqa: PLC0415 - only for decorators

        return [Template(lock.key, function) for lock in self._members]

    def _for_call(self, templates: list[Template], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Self:
        """Separate locks for one call of a decorated function."""
        members = [lock._for_call(each, args, kwargs) for lock, each in zip(self._members, templates, strict=True)]
        once = {(lock._store(), lock.key): lock for lock in members[::-1]}  # two may have the same key in this call
        return type(self)(list(once.values())[::-1], self._timeout, on_busy=self._on_busy, otherwise=self._otherwise)

    def _may_skip(self, busy: LockTimeout) -> bool:
        if self._on_busy == "skip":
            inform("skipped a call: %s", str(busy))
        return self._on_busy == "skip"


class SyncLocks(BaseLocks):
    """Several locks whose methods block the calling thread."""

    def acquire(self, blocking: bool = True, timeout: Timeout = ...) -> bool:
        """Take them all, or none; False if one of them was not free in time. As `Lock.acquire`."""
        wait = acquire_timeout(blocking, timeout, self._timeout)
        with suppress(_Busy), self._all_or_none(lambda lock: lock.release()):
            for lock, left in self._in_turn(wait):
                if not lock.acquire(timeout=left):
                    raise _Busy
            return True
        return False

    def release(self) -> None:
        """Leave each of them once. Raises what the first failure raises, after all of them were left."""
        with ExitStack() as leaving:
            for lock in self._in_order():
                _ = leaving.callback(lock.release)

    def extend(self, ttl: Seconds | None = None) -> None:
        """Let each lease end `ttl` seconds from now: sets, never adds."""
        for lock in self._in_order():
            lock.extend(ttl)

    def verify(self) -> bool:
        """True if the rows in the database still show this flow's tenures; raises LockLost otherwise."""
        return all(lock.verify() for lock in self._in_order())

    def guard(self, *given: Any) -> None:
        """Keep all of them, come what may, until the open transaction ends; `given` as for `Lock.guard`."""
        for lock in self._in_order():
            lock.guard(*given)

    def __enter__(self) -> Self:
        with self._all_or_none(lambda lock: lock.__exit__(None, None, None)):
            for lock, left in self._in_turn(self._timeout):
                lock._drive(entering.enter(lock, left))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        leaving = ExitStack()
        for lock in self._in_order():
            _ = leaving.push(lock.__exit__)
        _ = leaving.__exit__(kind, error, trace)

    if not TYPE_CHECKING:  # hidden from type checkers

        def __aenter__(self) -> None:
            raise TypeError("these locks block their thread: use `with`, or the locks of an AsyncEngine")

        __aexit__ = __aenter__

    def __call__(self, function: F) -> F:
        """Decorate `function`: each call holds the locks; the keys are formatted with the call's arguments."""
        if inspect.iscoroutinefunction(function):
            raise TypeError(f"{function!r} is a coroutine function: decorate it with the locks of an async engine")
        templates = self._templates(function)

        @functools.wraps(function)
        def locked(*args: Any, **kwargs: Any) -> Any:
            held = self._for_call(templates, args, kwargs)
            try:
                _ = held.__enter__()
            except LockTimeout as busy:
                if self._may_skip(busy):
                    return self._otherwise
                raise
            with ExitStack() as leaving:
                _ = leaving.push(held.__exit__)
                return function(*args, **kwargs)

        return cast("F", locked)


class AsyncLocks(BaseLocks):
    """Several locks whose methods are coroutines; see SyncLocks for what each does.

    `self` may be any locks, so that synchronous ones can use these methods as their asynchronous twins.
    """

    async def acquire(self: BaseLocks, blocking: bool = True, timeout: Timeout = ...) -> bool:
        """Take them all, or none; False if one of them was not free in time."""
        wait = acquire_timeout(blocking, timeout, self._timeout)
        with suppress(_Busy):
            async with _aall_or_none(self, AsyncLock.release):
                for lock, left in self._in_turn(wait):
                    if not await AsyncLock.acquire(lock, timeout=left):
                        raise _Busy
                return True
        return False

    async def release(self: BaseLocks) -> None:
        """Leave each of them once."""
        async with AsyncExitStack() as leaving:
            for lock in self._in_order():
                _ = leaving.push_async_callback(AsyncLock.release, lock)

    async def extend(self: BaseLocks, ttl: Seconds | None = None) -> None:
        """Let each lease end `ttl` seconds from now."""
        for lock in self._in_order():
            await AsyncLock.extend(lock, ttl)

    async def verify(self: BaseLocks) -> bool:
        """True if the rows in the database still show this flow's tenures; raises LockLost otherwise."""
        return all([await AsyncLock.verify(lock) for lock in self._in_order()])

    async def guard(self: BaseLocks, *given: Any) -> None:
        """Keep all of them, come what may, until the open transaction ends."""
        for lock in self._in_order():
            await getattr(lock, "aguard", lock.guard)(*given)

    async def __aenter__(self) -> Self:
        return await enter(self)

    async def __aexit__(
        self: BaseLocks, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        leaving = AsyncExitStack()
        for lock in self._in_order():
            _ = leaving.push_async_exit(functools.partial(AsyncLock.__aexit__, lock))
        _ = await leaving.__aexit__(kind, error, trace)

    if not TYPE_CHECKING:  # hidden from type checkers

        def __enter__(self) -> None:
            raise TypeError("these are the locks of an event loop: use `async with`")

        __exit__ = __enter__

    def __call__(self: BaseLocks, function: F) -> F:
        """Decorate a coroutine function: each call holds the locks; the keys are formatted with its arguments."""
        if not inspect.iscoroutinefunction(function):
            raise TypeError(f"{function!r} is not a coroutine function: decorate it with the locks of a sync engine")
        templates = self._templates(function)

        @functools.wraps(function)
        async def locked(*args: Any, **kwargs: Any) -> Any:
            held = self._for_call(templates, args, kwargs)
            try:
                _ = await enter(held)
            except LockTimeout as busy:
                if self._may_skip(busy):
                    return self._otherwise
                raise
            async with AsyncExitStack() as leaving:
                _ = leaving.push_async_exit(functools.partial(AsyncLocks.__aexit__, held))
                return await function(*args, **kwargs)

        return cast("F", locked)


B = TypeVar("B", bound=BaseLocks)


async def enter(several: B) -> B:
    """Begin an `async with`."""
    async with _aall_or_none(several, _aleave):
        for lock, left in several._in_turn(several._timeout):
            _ = await enter_one(lock, left)
    return several


async def _aleave(lock: BaseLock) -> None:
    await AsyncLock.__aexit__(lock, None, None, None)


@asynccontextmanager
async def _aall_or_none(several: BaseLocks, leave: Callable[[Any], Awaitable[object]]) -> AsyncGenerator[None]:
    """The asynchronous twin of `BaseLocks._all_or_none`."""
    before = several._counts()
    try:
        yield
    except BaseException:
        async with AsyncExitStack() as leaving:
            for lock, count in before:
                if lock.count > count:
                    _ = leaving.push_async_callback(leave, lock)
        raise
