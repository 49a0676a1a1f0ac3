"""The methods of a lock, synchronous and asynchronous.

Rule: a method only drives the steps of `entering`, `leaving` and `operations`.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Generator
from types import EllipsisType, TracebackType
from typing import TYPE_CHECKING, Any, Final, Generic, NoReturn, Protocol, Self, TypeVar

from dblock.core.errors import LockError, LockLost, LockTimeout
from dblock.core.holding.flow import Block, Hold, current_task
from dblock.core.lock import entering, leaving, operations
from dblock.core.lock.base import BaseLock
from dblock.core.lock.blocks import Loaded, block_begin, block_end
from dblock.core.lock.key_template import adecorated, decorated
from dblock.core.validation import acquire_timeout, valid_ttl
from dblock.core.values import LockInfo, Seconds

T = TypeVar("T")
F = TypeVar("F", bound=Callable[..., Any])
AF = TypeVar("AF", bound=Callable[..., Coroutine[Any, Any, Any]])
Timeout = Seconds | EllipsisType | None
"""Seconds to wait; -1 or None for ever; Ellipsis for the lock's own timeout."""


SAYS_NOTHING: Final = " (this says nothing of what you have committed)"


def of_the_end(late: LockError) -> LockError:
    """The same error, raised by the end of a `with`: a loss says that it says nothing of the caller's transactions.

    One that guard() has pinned was committed rightly.
    """
    if isinstance(late, LockLost):
        late.args = (f"{late}{SAYS_NOTHING}",)
    return late


def gives_way(late: LockError, error: BaseException | None) -> bool:
    """Whether the error of the release becomes a note on the body's exception instead of being raised.

    A loss is raised, chained to the body's exception. But it never replaces a cancellation, Ctrl-C or exit, and a
    failure of the database at the release does not hide the body's exception.
    """
    if error is None or (isinstance(error, Exception) and isinstance(late, LockLost)):
        _ = of_the_end(late)
        return False
    error.add_note(str(late))
    return True


class Interruptible(Protocol):
    """What is held under a body that `interrupt=True` cancels."""

    interrupted: bool
    """Whether its loss has cancelled the body."""
    cancelling: int
    """How often the task was being cancelled when the body began."""


def was_ours(hold: Interruptible, error: BaseException | None) -> bool:
    """Whether only the loss of the lock cancelled the body; withdraws that request, as asyncio.timeout does."""
    if not hold.interrupted:
        return False
    task, hold.interrupted = current_task(), False
    others = task.uncancel() > hold.cancelling
    return not others and type(error).__name__ == "CancelledError"


L = TypeVar("L", bound=BaseLock)


async def enter(lock: L, its: Loaded | None = None) -> L:
    """Begin an `async with`, which has loaded `its`."""
    await lock._adrive(entering.enter(lock, its))
    if lock.options.interrupt and (hold := lock._hold()) is not None:
        hold.cancelling = current_task().cancelling()
    return lock


def refuse_interrupt(interrupt: bool) -> None:
    """Raise TypeError where a thread would ignore `interrupt=True`."""
    if interrupt:
        raise TypeError("interrupt=True is for `async with`: it cancels a task, and this runs in a thread")


async def leave(lock: BaseLock, error: BaseException | None, opened: list[Block] | None = None) -> None:
    """End an `async with`; `error` is the body's exception."""
    hold = lock._hold()
    try:
        await lock._adrive(leaving.leave_block(lock, leaving.block_of(lock, opened)), undisturbed=True)
    except LockError as late:
        if hold is not None and was_ours(hold, error):
            raise of_the_end(late) from error
        if not gives_way(late, error):
            raise


def refuses(message: str) -> Callable[..., NoReturn]:
    """A method that refuses what it is called for with a TypeError."""

    def refuse(*_: object, **__: object) -> NoReturn:
        raise TypeError(message)

    return refuse


class Attaching(Generic[L]):
    """The result of an asynchronous attach(): `await` it, or enter it with `async with`."""

    def __init__(self, lock: L, attaching: Coroutine[Any, Any, L]) -> None:
        self._lock, self._attaching = lock, attaching

    def __await__(self) -> Generator[Any, Any, L]:
        return self._attaching.__await__()

    async def __aenter__(self) -> L:
        return await enter(await self)

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await leave(self._lock, error)


class SyncLock(BaseLock):
    """A lock whose methods block the calling thread."""

    def acquire(self, blocking: bool = True, timeout: Timeout = ...) -> bool:
        """Take the lock, or re-enter it; False if it was not free in time. As threading.RLock.acquire.

        `timeout` is in seconds, -1 or None for ever, the lock's own by default. Raises LockStoreError if the database
        fails.
        """
        wait = acquire_timeout(blocking, timeout, self._timeout)
        try:
            return isinstance(self._drive(entering.acquire(self, wait)), Hold)
        except LockTimeout:  # waiting would have been pointless
            return False

    def release(self) -> None:
        """Leave the lock once; the last time frees it. Raises LockNotHeld, or LockLost if the lease has ended."""
        self._drive(leaving.release(self))

    def detach(self) -> str:
        """Leave the lock to the one flow that attaches to the returned token, for which the lease lasts one more ttl.

        The token is a secret, and good once. A `with` that is left afterwards releases nothing. Raises LockNotHeld
        without a hold, LockLost if the lease has ended, and LockError inside another block of this lock, or while a
        transaction keeps it.
        """
        return self._drive(leaving.detach(self))

    def extend(self, ttl: Seconds | None = None) -> None:
        """Let the lease end `ttl` seconds from now (the lock's own ttl by default): sets, never adds.

        Raises LockNotHeld without a hold, LockLost if the lease has ended.
        """
        self._drive(operations.extend(self, self._ttl if ttl is None else valid_ttl(ttl)))

    def verify(self) -> bool:
        """True if the row in the database still shows this flow's tenure; raises LockLost otherwise."""
        return self._drive(operations.verify(self))

    def owned(self) -> bool:
        """Whether this flow holds the lock, according to the database."""
        return self._drive(operations.owned(self))

    def locked(self) -> bool:
        """Whether any flow of any process holds the lock."""
        return self._drive(operations.locked(self))

    def inspect(self) -> LockInfo | None:
        """The key's row: its holder or last holder, and the times; None if there is no row."""
        return self._drive(operations.inspect(self))

    @block_begin
    def __enter__(self, its: Loaded | None = None) -> Self:
        refuse_interrupt(self.options.interrupt)
        self._drive(entering.enter(self, its))
        return self

    @block_end
    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
        opened: list[Block] | None = None,
    ) -> None:
        try:
            self._drive(leaving.leave_block(self, leaving.block_of(self, opened)))
        except LockError as late:
            if not gives_way(late, error):
                raise

    if not TYPE_CHECKING:  # hidden from type checkers
        __aenter__ = __aexit__ = refuses("this lock blocks its thread: use `with`, or the lock of an AsyncEngine")

    def __call__(self, function: F) -> F:
        """Decorate `function`: each call holds the lock; the key is formatted with the call's arguments."""
        return decorated(self, function)


class AsyncLock(BaseLock):
    """A lock whose methods are coroutines; see SyncLock for what each does.

    `self` may be any lock, so that a synchronous lock can use these methods as its asynchronous twins.
    """

    async def acquire(self: BaseLock, blocking: bool = True, timeout: Timeout = ...) -> bool:
        """Take the lock, or re-enter it; False if it was not free in time."""
        wait = acquire_timeout(blocking, timeout, self._timeout)
        return isinstance(await self._adrive(entering.acquire(self, wait)), Hold)

    async def release(self: BaseLock) -> None:
        """Leave the lock once; the last time frees it."""
        await self._adrive(leaving.release(self), undisturbed=True)

    async def detach(self: BaseLock) -> str:
        """Leave the lock to the flow that attaches to the returned token."""
        return await self._adrive(leaving.detach(self))

    async def extend(self: BaseLock, ttl: Seconds | None = None) -> None:
        """Let the lease end `ttl` seconds from now."""
        await self._adrive(operations.extend(self, self._ttl if ttl is None else valid_ttl(ttl)))

    async def verify(self: BaseLock) -> bool:
        """True if the row in the database still shows this flow's tenure; raises LockLost otherwise."""
        return await self._adrive(operations.verify(self))

    async def owned(self: BaseLock) -> bool:
        """Whether this flow holds the lock, according to the database."""
        return await self._adrive(operations.owned(self))

    async def locked(self: BaseLock) -> bool:
        """Whether any flow of any process holds the lock."""
        return await self._adrive(operations.locked(self))

    async def inspect(self: BaseLock) -> LockInfo | None:
        """The key's row: its holder or last holder, and the times; None if there is no row."""
        return await self._adrive(operations.inspect(self))

    @block_begin
    async def __aenter__(self, its: Loaded | None = None) -> Self:
        return await enter(self, its)

    @block_end
    async def __aexit__(
        self: BaseLock,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
        opened: list[Block] | None = None,
    ) -> None:
        await leave(self, error, opened)

    if not TYPE_CHECKING:  # hidden from type checkers
        __enter__ = __exit__ = refuses("this is the lock of an event loop: use `async with`")

    def __call__(self: BaseLock, function: AF) -> AF:
        """Decorate a coroutine function: each call holds the lock; the key is formatted with the call's arguments."""
        return adecorated(self, function)
