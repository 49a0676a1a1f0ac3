"""Several locks that are taken together, or not at all.

They are taken one after the other, each through its queue, under one deadline, in the order of their databases and
keys. So two flows that take overlapping sets cannot wait for each other in a circle.

Rule: whatever ends the taking early, a timeout, an error or an interrupt, what was taken before is released.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, TypeVar

from dblock.core import clock
from dblock.core.acquire.request import Refused
from dblock.core.errors import LockError, LockNotHeld, LockTimeout
from dblock.core.holding.flow import Block, Entry, Flow, Hold, current_task
from dblock.core.lock import entering, operations
from dblock.core.lock.base import BaseLock
from dblock.core.lock.blocks import Loaded, block_begin, block_end
from dblock.core.lock.bookkeeping import innermost
from dblock.core.lock.key_template import Template, adecorated, decorated, refuse_to_skip, skips
from dblock.core.lock.leaving_several import Entered, leave_each, release_each
from dblock.core.lock.locks import Timeout, gives_way, of_the_end, refuse_interrupt, refuses, was_ours
from dblock.core.options import valid_options
from dblock.core.protocol.steps import Steps
from dblock.core.runtime import current_flow
from dblock.core.validation import acquire_timeout, valid_ttl
from dblock.core.values import Seconds, State

F = TypeVar("F", bound=Callable[..., Any])
Opened = tuple[Callable[[], Flow | None], Entered]
"""A reference to the flow that has begun a block, and what that has entered."""


def once(keys: Sequence[Any]) -> list[Any]:
    """Each of the keys and locks that db_locks() was given, once."""
    for each in keys:
        if isinstance(each, list | tuple | set | frozenset):
            raise TypeError(f"db_locks() takes keys, not a {type(each).__name__} of them: write db_locks(*keys)")
        if by := getattr(type(each), "_locks_by", None):
            raise TypeError(f"db_locks() takes locks, and a {type(each).__name__} is none: use its {by}")
    return list(dict.fromkeys(keys))


class BaseLocks:
    """Several locks, apart from how their statements are run; iterates over them in the order of the keys given."""

    _skipped: bool | None = None
    """As of a lock."""
    _template: Template

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
        self.options = valid_options(on_busy=on_busy, otherwise=otherwise)
        self._members = list(members)
        """In the order given; one that comes twice once, as far as that is known before the keys are formatted."""
        self._timeout = timeout
        self._withs: list[Opened] = []
        """The open blocks without an end of their own: their methods were called by hand, or by an ExitStack."""
        for lock in members:
            if lock.options.on_busy != "raise":
                raise TypeError("on_busy is for all of them: give it to db_locks(), not to a lock")

    # -- what is known without I/O

    @property
    def keys(self) -> list[str]:
        """The keys, as they were given."""
        return [lock.key for lock in self._members]

    @property
    def fences(self) -> dict[str, int]:
        """By key, the number of this flow's tenure; of a key in two databases, the greater one.

        Raises LockNotHeld without a tenure of each.
        """
        found: dict[str, int] = {}
        for lock in self._members:
            if lock.fence is None:
                raise LockNotHeld(f"{lock.key!r} is not held by this thread or task", key=lock.key)
            found[lock.key] = max(found.get(lock.key, 0), lock.fence)
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

    # -- the operations, as steps

    def _enter(self, its: Loaded | None) -> Steps[bool]:
        """Begin a `with`, which has loaded `its`."""
        return self._take(self._timeout, block=True, its=its)

    def _take(self, timeout: float | None, *, block: bool, its: Loaded | None = None) -> Steps[bool]:
        """Take them all, or none; False if one of them was not free in time.

        `block`: for a `with`, whose LockTimeout is raised, unless it is a call of a decorated function that is skipped.
        `its`: what that `with` has loaded.
        """
        if block:
            refuse_to_skip(self)
        deadline = None if timeout is None else clock.now() + timeout
        before = {entered.entry for _, entered in self._entered()}
        interruptible, store = list[tuple[BaseLock, Hold]](), None
        try:
            for lock in self._in_order():
                store = lock._store()
                left = None if deadline is None else max(deadline - clock.now(), 0.0)
                if block:
                    yield from entering.enter_block(lock, left, its.end if its else None)
                    if lock.options.interrupt:
                        interruptible.append((lock, lock._surely_held()))
                        interruptible[-1][1].cancelling = current_task().cancelling()
                elif isinstance((yield from entering.acquire(lock, left)), Refused):
                    raise LockTimeout(key=lock.key)  # noqa: TRY301 - what was taken is released below
            self._begin()
            if block:
                blocks = self._withs if its is None else its.opened
                blocks.append((current_flow().ref, self._entered(before)))
        except GeneratorExit:
            raise
        except BaseException as error:
            yield from leave_each(lambda: self._entered(before), error, store)
            for lock, hold in interruptible:
                if was_ours(hold, error):  # only the loss of a lock cancelled this
                    raise lock._lost(hold) from error
            if not isinstance(error, LockTimeout) or (block and not skips(self, error)):
                raise
            return False
        return True

    def _begin(self) -> None:
        """Called once all are taken: each counts from now on. Raises LockLost if one was lost meanwhile."""
        for lock in self._in_order():
            hold = lock._surely_held()
            if len(hold.entries) == 1:
                entering.count_min_hold(hold, lock, begins=True)

    def _release(self) -> Steps[None]:
        return release_each(self._in_order()[::-1])

    def _extend(self, ttl: Seconds | None) -> Steps[None]:
        for lock in self._in_order():
            yield from operations.extend(lock, lock._ttl if ttl is None else valid_ttl(ttl))

    def _verify(self) -> Steps[bool]:
        for lock in self._in_order():
            _ = yield from operations.verify(lock)
        return True

    def _exit(self, error: BaseException | None, opened: list[Opened] | None) -> Steps[None]:
        """End a `with`; `error` is the body's exception, `opened`: the blocks of its end."""
        if self._skipped:
            return
        blocks = opened or self._withs
        block = innermost(blocks, self.keys)
        blocks.remove(block)
        try:
            yield from leave_each(lambda: block[1])
        except LockError as late:
            if [lock for lock, entered in block[1] if was_ours(entered.hold, error)]:
                raise of_the_end(late) from error
            if not gives_way(late, error):
                raise

    # -- helpers

    def _in_order(self) -> list[Any]:
        """Each lock once, in the order in which all flows take them; of a reader's and a writer's the writer's."""
        found = dict[object, BaseLock]()
        for lock in sorted(self._members, key=_place):
            # Each permit is its own, and two kinds of one key are an error, which taking the second one raises.
            _ = found.setdefault(lock if lock._flow else (lock._store(), lock.key, lock._kind), lock)
        return list(found.values())

    def _holds(self) -> list[Hold]:
        """What this flow holds through the locks."""
        return [hold for lock in self._members for hold in lock._holds()]

    def _entered(self, before: Collection[Entry] = ()) -> Entered:
        """What this flow has entered through these locks, but for the entries `before`; last first."""
        holds = [(lock, hold) for lock in self._in_order() if (hold := lock._hold_here()) is not None]
        entered = [(lock, Block(each, hold)) for lock, hold in holds for each in hold.entries if each.lock is lock]
        return [each for each in entered[::-1] if each[1].entry not in before]

    def _templates(self, function: Callable[..., Any]) -> list[Template]:
        """The keys of a decorator."""
        return [Template(lock.key, function) for lock in self._members]

    def _for_call(self, templates: list[Template], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Self:
        """Separate locks for one call of a decorated function."""
        members = [lock._for_call(each, args, kwargs) for lock, each in zip(self._members, templates, strict=True)]
        made = type(self)(members, self._timeout)
        made.options, made._skipped, made._template = self.options, False, templates[0]
        return made


def _place(lock: BaseLock) -> tuple[str, str, str, int]:
    """Where a lock comes among others: by its database and key, a reader after a writer."""
    store = lock._store()
    return str(store.location or store.name), repr(store.database.dialect.tables), lock.key, lock._reading


class SyncLocks(BaseLocks):
    """Several locks whose methods block the calling thread."""

    def acquire(self, blocking: bool = True, timeout: Timeout = ...) -> bool:
        """Take them all, or none; False if one of them was not free in time. As `Lock.acquire`."""
        wait = acquire_timeout(blocking, timeout, self._timeout)
        return self._members[0]._drive(self._take(wait, block=False))  # type: ignore[no-any-return]

    def release(self) -> None:
        """Leave each of them once, also if one of them was lost; raises LockNotHeld, or LockLost for the first."""
        self._members[0]._drive(self._release())

    def extend(self, ttl: Seconds | None = None) -> None:
        """Let each lease end `ttl` seconds from now: sets, never adds."""
        self._members[0]._drive(self._extend(ttl))

    def verify(self) -> bool:
        """True if the rows in the database still show this flow's tenures; raises LockLost otherwise."""
        return self._members[0]._drive(self._verify())  # type: ignore[no-any-return]

    def guard(self, *given: Any) -> None:
        """Keep all of them, come what may, until the open transaction ends; `given` as for `Lock.guard`."""
        for lock in self._in_order():
            lock.guard(*given)

    @block_begin
    def __enter__(self, its: Loaded | None = None) -> Self:
        refuse_interrupt(any(lock.options.interrupt for lock in self._members))
        _ = self._members[0]._drive(self._enter(its))
        return self

    @block_end
    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
        opened: list[Opened] | None = None,
    ) -> None:
        self._members[0]._drive(self._exit(error, opened))

    if not TYPE_CHECKING:  # hidden from type checkers
        __aenter__ = __aexit__ = refuses("these locks block their thread: use `with`, or the locks of an AsyncEngine")

    def __call__(self, function: F) -> F:
        """Decorate `function`: each call holds the locks; the keys are formatted with the call's arguments."""
        return decorated(self, function, self._templates(function))


class AsyncLocks(BaseLocks):
    """Several locks whose methods are coroutines; see SyncLocks for what each does.

    `self` may be any locks, so that synchronous ones can use these methods as their asynchronous twins.
    """

    async def acquire(self: BaseLocks, blocking: bool = True, timeout: Timeout = ...) -> bool:
        """Take them all, or none; False if one of them was not free in time."""
        wait = acquire_timeout(blocking, timeout, self._timeout)
        return await self._members[0]._adrive(self._take(wait, block=False))  # type: ignore[no-any-return]

    async def release(self: BaseLocks) -> None:
        """Leave each of them once."""
        await self._members[0]._adrive(self._release(), undisturbed=True)

    async def extend(self: BaseLocks, ttl: Seconds | None = None) -> None:
        """Let each lease end `ttl` seconds from now."""
        await self._members[0]._adrive(self._extend(ttl))

    async def verify(self: BaseLocks) -> bool:
        """True if the rows in the database still show this flow's tenures; raises LockLost otherwise."""
        return await self._members[0]._adrive(self._verify())  # type: ignore[no-any-return]

    async def guard(self: BaseLocks, *given: Any) -> None:
        """Keep all of them, come what may, until the open transaction ends."""
        for lock in self._in_order():
            await getattr(lock, "aguard", lock.guard)(*given)

    @block_begin
    async def __aenter__(self, its: Loaded | None = None) -> Self:
        _ = await self._members[0]._adrive(self._enter(its))
        return self

    @block_end
    async def __aexit__(
        self: BaseLocks,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
        opened: list[Opened] | None = None,
    ) -> None:
        await self._members[0]._adrive(self._exit(error, opened), undisturbed=True)

    if not TYPE_CHECKING:  # hidden from type checkers
        __enter__ = __exit__ = refuses("these are the locks of an event loop: use `async with`")

    def __call__(self: BaseLocks, function: F) -> F:
        """Decorate a coroutine function: each call holds the locks; the keys are formatted with its arguments."""
        return adecorated(self, function, self._templates(function))
