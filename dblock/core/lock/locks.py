"""The methods of a lock, synchronous and asynchronous, most of which several locks and a semaphore have too.

Rule: a method only drives steps: of a lock those of `entering`, `leaving` and `operations`.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Generator, Iterable
from types import EllipsisType, TracebackType
from typing import TYPE_CHECKING, Any, Final, Generic, NoReturn, Self, TypeVar

from dblock.core.acquire.request import Refused
from dblock.core.errors import LockError, LockLost, LockTimeout
from dblock.core.holding.flow import Hold, current_task
from dblock.core.lock import entering, leaving, operations
from dblock.core.lock.base import BaseLock
from dblock.core.lock.blocks import Loaded, block_begin, block_end
from dblock.core.lock.key_template import AF, F, adecorated, decorated
from dblock.core.options import Options
from dblock.core.protocol.steps import Steps
from dblock.core.validation import acquire_timeout
from dblock.core.values import LockInfo, Seconds

L = TypeVar("L", bound="_OneLock")
Timeout = Seconds | EllipsisType | None
"""Seconds to wait; -1 or None for ever; Ellipsis for the lock's own timeout."""


SAYS_NOTHING: Final = " (this says nothing of what you have committed)"


def gives_way(late: LockError, error: BaseException | None, holds: Iterable[Hold] = ()) -> bool:
    """Whether the error of the release becomes a note on the body's exception instead of being raised.

    A loss is raised, chained to the body's exception. But it never replaces a cancellation, Ctrl-C or exit, unless only
    the loss of one of the `holds` has cancelled the body; and a failure of the database at the release does not hide
    the body's exception. A loss that is raised says that it says nothing of the caller's transactions: one that guard()
    has pinned was committed rightly.
    """
    ours = [hold for hold in holds if was_ours(hold, error)]
    if ours:
        late.__cause__ = error
    if ours or error is None or (isinstance(error, Exception) and isinstance(late, LockLost)):
        if isinstance(late, LockLost):
            late.args = (f"{late}{SAYS_NOTHING}",)
        return False
    error.add_note(str(late))
    return True


def was_ours(hold: Hold, error: BaseException | None) -> bool:
    """Whether only the loss of the lock cancelled the body; withdraws that request, as asyncio.timeout does."""
    if not hold.interrupted:
        return False
    task, hold.interrupted = current_task(), False
    others = task.uncancel() > hold.cancelling
    return not others and type(error).__name__ == "CancelledError"


def refuse_interrupt() -> NoReturn:
    """Raise TypeError where a thread would ignore `interrupt=True`."""
    raise TypeError("interrupt=True is for `async with`: it cancels a task, and this runs in a thread")


def refuses(message: str) -> Callable[..., NoReturn]:
    """A method that refuses what it is called for with a TypeError."""

    def refuse(*_: object, **__: object) -> NoReturn:
        raise TypeError(message)

    return refuse


class Operations:
    """What has operations: a lock, several, a semaphore. They are steps, and it knows what drives them."""

    options: Options
    _timeout: Any
    _withs: list[Any]
    _drive: Any
    _adrive: Any
    _acquire: Callable[..., Steps[Any]]
    _release: Callable[..., Steps[None]]
    _extend: Callable[..., Steps[None]]
    _verify: Callable[..., Steps[bool]]
    _guard: Callable[..., Steps[None]]
    _enter: Callable[..., Steps[Any]]
    _exit: Callable[..., Steps[None]]
    _holds: Callable[[], list[Hold]]


class Blocking(Operations):
    """A `with`, and decorated functions, that block the calling thread."""

    @block_end
    def __exit__(
        self, kind: object, error: BaseException | None, trace: object, opened: list[Any] | None = None
    ) -> None:
        try:
            self._drive(self._exit(opened or self._withs))
        except LockError as late:
            if not gives_way(late, error):
                raise

    if not TYPE_CHECKING:  # hidden from type checkers
        __aenter__ = __aexit__ = refuses("this blocks its thread: use `with`, or the lock of an AsyncEngine")

    def __call__(self, function: F) -> F:
        """Decorate `function`: each call holds the lock; the key is formatted with the call's arguments."""
        return decorated(self, function)


class Awaiting(Operations):
    """An `async with`, and decorated coroutine functions.

    `self` may be anything with operations, so that what blocks can have these methods too, as asynchronous twins.
    """

    @block_end
    async def __aexit__(
        self: Operations, kind: object, error: BaseException | None, trace: object, opened: list[Any] | None = None
    ) -> None:
        holds = self._holds() if self.options.interrupt else []
        try:
            await self._adrive(self._exit(opened or self._withs), undisturbed=True)
        except LockError as late:
            if not gives_way(late, error, holds):
                raise

    if not TYPE_CHECKING:  # hidden from type checkers
        __enter__ = __exit__ = refuses("this is of an event loop: use `async with`")

    def __call__(self, function: AF) -> AF:
        """Decorate a coroutine function: each call holds the lock; the key is formatted with the call's arguments."""
        return adecorated(self, function)


class BlockingLocks(Blocking):
    """The methods of a lock, and of several that are taken together, which block the calling thread."""

    @block_begin
    def __enter__(self, its: Loaded) -> Self:
        if self.options.interrupt:
            refuse_interrupt()
        self._drive(self._enter(its))
        return self

    def acquire(self, blocking: bool = True, timeout: Timeout = ...) -> bool:
        """Take the lock, or re-enter it; False if it was not free in time. As threading.RLock.acquire.

        `timeout` is in seconds, -1 or None for ever, the lock's own by default. Several locks are all taken, or none.
        Raises LockStoreError if the database fails.
        """
        wait = acquire_timeout(blocking, timeout, self._timeout)
        try:
            return not isinstance(self._drive(self._acquire(wait)), Refused)
        except LockTimeout:  # waiting would have been pointless
            return False

    def release(self) -> None:
        """Leave the lock once; the last time frees it. Raises LockNotHeld, or LockLost if the lease has ended.

        Several locks are all left, also if one of them was lost; the error is that of the first.
        """
        self._drive(self._release())

    def extend(self, ttl: Seconds | None = None) -> None:
        """Let the lease end `ttl` seconds from now (the lock's own ttl by default): sets, never adds.

        Raises LockNotHeld without a hold, LockLost if the lease has ended.
        """
        self._drive(self._extend(ttl))

    def verify(self) -> bool:
        """True if the row in the database still shows this flow's tenure; raises LockLost otherwise."""
        return bool(self._drive(self._verify()))


class AwaitingLocks(Awaiting):
    """The same methods as coroutines; see BlockingLocks for what each does."""

    @block_begin
    async def __aenter__(self, its: Loaded) -> Self:
        await self._adrive(self._enter(its))
        return self

    async def acquire(self: Operations, blocking: bool = True, timeout: Timeout = ...) -> bool:
        """Take the lock, or re-enter it; False if it was not free in time."""
        wait = acquire_timeout(blocking, timeout, self._timeout)
        try:
            return not isinstance(await self._adrive(self._acquire(wait)), Refused)
        except LockTimeout:
            return False

    async def release(self: Operations) -> None:
        """Leave the lock once; the last time frees it."""
        await self._adrive(self._release(), undisturbed=True)

    async def extend(self: Operations, ttl: Seconds | None = None) -> None:
        """Let the lease end `ttl` seconds from now."""
        await self._adrive(self._extend(ttl))

    async def verify(self: Operations) -> bool:
        """True if the row in the database still shows this flow's tenure; raises LockLost otherwise."""
        return bool(await self._adrive(self._verify()))


class _OneLock(BaseLock, Operations):
    """The operations of a lock."""

    _acquires: Callable[..., Steps[Hold | Refused]] = entering.take_or_reenter
    _leaves = leaving.leave_once
    _acquire, _release, _extend, _verify = entering.acquire, leaving.release, operations.extend, operations.verify
    _owned, _locked, _guard = operations.owned, operations.locked, operations.guard
    _enter, _exit = entering.enter, leaving.end_block


class Attaching(Generic[L]):
    """The result of an asynchronous attach(): `await` it, or enter it with `async with`."""

    def __init__(self, lock: L, attaching: Coroutine[Any, Any, L]) -> None:
        self._lock, self._attaching = lock, attaching

    def __await__(self) -> Generator[Any, Any, L]:
        return self._attaching.__await__()

    async def __aenter__(self) -> L:
        lock = await self
        await lock._adrive(lock._enter(Loaded(lock)))
        return lock

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await Awaiting.__aexit__(self._lock, kind, error, trace)


class SyncLock(_OneLock, BlockingLocks):
    """A lock whose methods block the calling thread."""

    def detach(self) -> str:
        """Leave the lock to the one flow that attaches to the returned token, for which the lease lasts one more ttl.

        The token is a secret, and good once. A `with` that is left afterwards releases nothing. Raises LockNotHeld
        without a hold, LockLost if the lease has ended, and LockError inside another block of this lock, or while a
        transaction keeps it.
        """
        return self._drive(leaving.detach(self))

    def owned(self) -> bool:
        """Whether this flow holds the lock, according to the database."""
        return bool(self._drive(self._owned()))

    def locked(self) -> bool:
        """Whether any flow of any process holds the lock."""
        return bool(self._drive(self._locked()))

    def inspect(self) -> LockInfo | None:
        """The key's row: its holder or last holder, and the times; None if there is no row."""
        return self._drive(operations.inspect(self))


class AsyncLock(_OneLock, AwaitingLocks):
    """A lock whose methods are coroutines; see SyncLock for what each does.

    `self` may be any lock, so that a synchronous lock can use these methods as its asynchronous twins.
    """

    async def detach(self: BaseLock) -> str:
        """Leave the lock to the flow that attaches to the returned token."""
        return await self._adrive(leaving.detach(self))

    async def owned(self: _OneLock) -> bool:
        """Whether this flow holds the lock, according to the database."""
        return bool(await self._adrive(self._owned()))

    async def locked(self: _OneLock) -> bool:
        """Whether any flow of any process holds the lock."""
        return bool(await self._adrive(self._locked()))

    async def inspect(self: BaseLock) -> LockInfo | None:
        """The key's row: its holder or last holder, and the times; None if there is no row."""
        return await self._adrive(operations.inspect(self))
