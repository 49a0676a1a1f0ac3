"""Guarded blocks: a lock, and under it a transaction of the caller's that begins, is guarded and ends with the block.

    take the lock -> begin the transaction -> guard() -> the body -> COMMIT or ROLLBACK -> leave the lock

Rule: LockTimeout and LockLost from a guarded block mean that nothing was committed. Until the body ends they come
through the transaction, which is rolled back. From COMMIT on the pin of the guard has kept every other tenure away,
whatever has become of the lease: what leaving the lock meets is then logged, and raised by nobody. The error of a
COMMIT, an interrupt of it and what hooks of the application raise come as they are: none of them is an error of the
lock.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Generator, Iterable
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager
from copy import copy
from typing import TYPE_CHECKING, Any, Generic, Self, TypeVar

from dblock.core.errors import LockError
from dblock.core.holding.flow import Flow, Hold
from dblock.core.lock.blocks import Loaded, block_begin, block_end
from dblock.core.lock.bookkeeping import innermost
from dblock.core.lock.key_template import AF, F, adecorated, decorated
from dblock.core.lock.locks import SAYS_NOTHING, refuses
from dblock.core.log import inform
from dblock.core.runtime import current_flow

T = TypeVar("T")


Begun = tuple[Callable[[], Flow | None], Any]
"""A reference to the flow that has begun a block, and the context manager that it has entered."""


class BaseGuarded(Generic[T]):
    """What begins guarded blocks on a lock, or on several; any number of flows may be inside at a time."""

    def __init__(self, lock: Any) -> None:
        self._lock, self.options = lock, lock.options
        self._withs: list[Begun] = []
        """The blocks without an end of their own: an ExitStack, or a call by hand, has begun them."""

    def _refuse(self) -> None:
        """Raise what forbids the transaction, before the lock is taken."""

    def _ending(self, opened: list[Begun]) -> Begun:
        """The block that ends, of those `opened` for this end."""
        return innermost(opened, getattr(self._lock, "keys", None) or [self._lock.key])

    def _refuse_anew(self) -> None:
        """Raise LockLost if a body further out has lost the lock, so that this block has taken another tenure.

        What that body has read while it held the lock may be old by now, and this block is about to write by it.
        """
        for hold in self._lock._holds():
            if hold.outers and len(hold.entries) == 1:
                lock: Any = hold.entries[0].lock
                raise lock._lost(hold.outers[0])

    def _committing(self, holds: list[Hold]) -> None:
        """From COMMIT on the loss of the holds, which it puts into that list, interrupts nothing."""
        holds += self._lock._holds()
        for hold in holds:
            hold.committing = True

    def _templates(self, function: Callable[..., Any]) -> Any:
        """The key of a decorator, or several; raises what forbids decoration."""
        return self._lock._templates(function)

    def _for_call(self, template: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Self:
        """A separate block for one call of a decorated function, on the lock of that call."""
        block = copy(self)
        block._lock, block._withs = self._lock._for_call(template, args, kwargs), []
        return block


class Guarded(BaseGuarded[T]):
    """A guarded block that blocks its thread: a `with`, or a decorator. Made by `atomic()` or `begin()`."""

    def _begin(self, holds: list[Hold]) -> Generator[T]:
        """Begin the transaction, guard it, give what the block gives, and end the transaction after `_committing`."""
        raise NotImplementedError

    @contextmanager
    def _block(self) -> Generator[T]:
        self._refuse()
        lock, error, entered, holds = self._lock, None, False, list[Hold]()
        enter, leave = lock.__enter__, lock.__exit__  # both loaded first, as by a `with`
        try:
            enter()
            entered = True
            self._refuse_anew()
            yield from self._begin(holds)  # and no `with`, whose generator an interrupt of it would leave where it is
        except BaseException as raised:
            error = raised
            raise
        finally:
            try:
                if entered:
                    leave(None, None, None)
            except LockError as late:
                _tell(late, error)
            finally:
                del error, leave  # the error refers to this frame, and to an end nothing else may
                _committed(holds)

    @block_begin
    def __enter__(self, its: Loaded) -> T:
        begun = current_flow().ref, self._block()
        try:
            given: T = begun[1].__enter__()
            its.opened.append(begun)
        except BaseException:
            self._abandon(begun, its.opened)
            raise
        return given

    def _abandon(self, begun: Begun, blocks: list[Begun]) -> None:
        """End a block that an interrupt has left where it was: its transaction is rolled back, the lock released."""
        if begun in blocks:
            blocks.remove(begun)
        begun[1].gen.close()

    @block_end
    def __exit__(
        self, kind: object, error: BaseException | None, trace: object, opened: list[Begun] | None = None
    ) -> bool | None:
        blocks, begun = opened or self._withs, None
        try:
            begun = self._ending(blocks)
            blocks.remove(begun)
            swallows: bool | None = begun[1].__exit__(kind, error, trace)
        except BaseException:
            self._abandon(begun or self._ending(blocks), blocks)
            raise
        return swallows

    if not TYPE_CHECKING:  # hidden from type checkers
        __aenter__ = __aexit__ = refuses("this block blocks its thread: use `with`, or the lock of an AsyncEngine")

    def __call__(self, function: F) -> F:
        """Decorate `function`: each call is a guarded block; the key is formatted with the call's arguments."""
        return decorated(self, function)


class AsyncGuarded(BaseGuarded[T]):
    """A guarded block of an event loop: an `async with`, or a decorator. Made by `begin()`."""

    def _begin(self, holds: list[Hold]) -> AbstractAsyncContextManager[T]:
        """The same, as an asynchronous context manager."""
        raise NotImplementedError

    @asynccontextmanager
    async def _block(self) -> AsyncGenerator[T]:
        self._refuse()
        lock, error, entered, holds = self._lock, None, False, list[Hold]()
        enter, leave = lock.__aenter__, lock.__aexit__  # both loaded first, as by an `async with`
        try:
            await enter()
            entered = True
            self._refuse_anew()
            async with self._begin(holds) as given:
                yield given
        except BaseException as raised:
            error = raised
            raise
        finally:
            interrupt = None if isinstance(error, Exception) else error
            try:
                if entered:
                    await leave(type(interrupt) if interrupt else None, interrupt, None)
            except LockError as late:
                if interrupt is not None:  # only the loss of the lock has cancelled the body: it was rolled back
                    late.args = (_said(late),)
                    raise
                _tell(late, error)
            finally:
                del error, interrupt, leave  # the errors refer to this frame, and to an end nothing else may
                _committed(holds)

    @block_begin
    async def __aenter__(self, its: Loaded) -> T:
        begun = current_flow().ref, self._block()
        given: T = await begun[1].__aenter__()
        its.opened.append(begun)
        return given

    @block_end
    async def __aexit__(
        self, kind: object, error: BaseException | None, trace: object, opened: list[Begun] | None = None
    ) -> bool | None:
        blocks = opened or self._withs
        begun = self._ending(blocks)
        blocks.remove(begun)
        swallows: bool | None = await begun[1].__aexit__(kind, error, trace)
        return swallows

    if not TYPE_CHECKING:  # hidden from type checkers
        __enter__ = __exit__ = refuses("this is the block of an event loop: use `async with`")

    def __call__(self, function: AF) -> AF:
        """Decorate a coroutine function: each call is a guarded block; the key is formatted with its arguments."""
        return adecorated(self, function)


def _committed(holds: Iterable[Hold]) -> None:
    """The block has ended: a loss that came from COMMIT on interrupts what is around it."""
    for hold in holds:
        hold.committing = False
        for outer in hold.locks() if hold.lease.loss is not None else ():
            outer._interrupt_body(hold)


def _said(late: LockError) -> str:
    """What the end of the lock's own block has raised, without that it says nothing of commits."""
    return str(late).removesuffix(SAYS_NOTHING)


def _tell(late: LockError, error: BaseException | None) -> None:
    """Say what leaving the lock has met: in a note on the error of the block, else in a line of the log.

    The events LOST and RELEASED say it too, as for every lock.
    """
    told = _said(late)
    if error is not None:
        error.add_note(told)
    else:
        inform("what a guarded block has written stands or falls with its transaction; its lock, at its end: %s", told)
