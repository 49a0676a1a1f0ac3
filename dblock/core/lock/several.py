"""Several locks that are taken together, or not at all.

They are taken one after the other, each through its queue, under one deadline, in the order of their databases and
keys. So two flows that take overlapping sets cannot wait for each other in a circle.

Rule: whatever ends the taking early, a timeout, an error or an interrupt, what was taken before is released.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, TypeVar

from dblock.core import clock
from dblock.core.errors import LockError, LockNotHeld, LockTimeout
from dblock.core.holding.flow import Block, Flow, Hold, current_task
from dblock.core.lock import entering, leaving
from dblock.core.lock.bookkeeping import innermost
from dblock.core.lock.key_template import Template, adecorated, decorated, refuse_to_skip, skips
from dblock.core.lock.locks import AsyncLock, Timeout, gives_way, refuse_interrupt, refuses, was_ours
from dblock.core.options import valid_options
from dblock.core.protocol.steps import Steps
from dblock.core.runtime import current_flow
from dblock.core.validation import acquire_timeout
from dblock.core.values import Seconds, State

F = TypeVar("F", bound=Callable[..., Any])
Entered = list[tuple[Any, Block]]
"""Locks, and how each was entered; the last one first where they are to be left."""


def once(keys: Sequence[Any]) -> list[Any]:
    """Each of the keys and locks that db_locks() was given, once."""
    for each in keys:
        if isinstance(each, list | tuple | set | frozenset):
            raise TypeError(f"db_locks() takes keys, not a {type(each).__name__} of them: write db_locks(*keys)")
        if by := getattr(type(each), "_locks_by", None):
            raise TypeError(f"db_locks() takes locks, and a {type(each).__name__} is none: use its {by}")
    return list(dict.fromkeys(keys))


class _Busy(Exception):
    """One of the locks was not free in time."""


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
        self._withs: list[tuple[Callable[[], Flow | None], Entered]] = []
        """The open `with`s: a reference to the flow of each, and what it has entered."""
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

    # -- helpers

    def _in_order(self) -> list[Any]:
        """Each lock once, in the order in which all flows take them; of a reader's and a writer's the writer's."""
        found = dict[object, tuple[tuple[str, str, str], int, Any]]()
        for number, lock in enumerate(self._members):
            store = lock._store()
            place = str(store.location or store.name), repr(store.database.dialect.tables), lock.key
            # Each permit is its own, and two kinds of one key are an error, which taking the second one raises.
            what = lock if lock._flow else (store, lock.key, lock._kind)
            known = found.setdefault(what, (place, number, lock))
            if lock._reading < known[2]._reading:
                found[what] = (place, number, lock)
        return [lock for _, _, lock in sorted(found.values(), key=lambda each: each[:2])]

    def _in_turn(self, timeout: float | None) -> Iterator[tuple[Any, float | None]]:
        """Each lock, and the time that is left for it."""
        deadline = None if timeout is None else clock.now() + timeout
        for lock in self._in_order():
            yield lock, None if deadline is None else max(deadline - clock.now(), 0.0)

    def _open(self) -> None:
        """Called once all are taken: each counts from now on. Raises LockLost if one was lost meanwhile."""
        for lock in self._in_order():
            hold = lock._surely_held()
            if len(hold.entries) == 1:
                entering.count_min_hold(hold, lock, begins=True)

    def _holds(self) -> list[Hold]:
        """What this flow holds through the locks."""
        return [hold for lock in self._members for hold in lock._holds()]

    def _entered(self) -> Entered:
        """What this flow has entered through these locks."""
        found = Entered()
        for lock in self._in_order():
            hold = lock._hold_here()
            found += [(lock, Block(each, hold)) for each in (hold.entries if hold else ()) if each.lock is lock]
        return found

    def _since(self, before: Entered) -> Entered:
        """What this flow has entered since, last first."""
        known = {block.entry for _, block in before}
        return [each for each in self._entered()[::-1] if each[1].entry not in known]

    def _begun(self, before: Entered) -> None:
        """Remember the blocks of a `with`."""
        self._withs.append((current_flow().ref, self._since(before)))

    def _ended(self) -> Entered:
        """The blocks of the `with` that ends."""
        block = innermost(self._withs, self.keys)
        self._withs.remove(block)
        return block[1]

    def _templates(self, function: Callable[..., Any]) -> list[Template]:
        """The keys of a decorator."""
        return [Template(lock.key, function) for lock in self._members]

    def _for_call(self, templates: list[Template], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Self:
        """Separate locks for one call of a decorated function."""
        members = [lock._for_call(each, args, kwargs) for lock, each in zip(self._members, templates, strict=True)]
        once: dict[object, Any] = {  # two may have the same key in this call
            lock if lock._flow else (lock._store(), lock.key, lock._kind, lock._reading): lock for lock in members[::-1]
        }
        made = type(self)(list(once.values())[::-1], self._timeout)
        made.options, made._skipped, made._template = self.options, False, templates[0]
        return made


class SyncLocks(BaseLocks):
    """Several locks whose methods block the calling thread."""

    def acquire(self, blocking: bool = True, timeout: Timeout = ...) -> bool:
        """Take them all, or none; False if one of them was not free in time. As `Lock.acquire`."""
        wait, before = acquire_timeout(blocking, timeout, self._timeout), self._entered()
        try:
            for lock, left in self._in_turn(wait):
                if not isinstance(lock._drive(entering.acquire(lock, left)), Hold):
                    raise _Busy  # noqa: TRY301 - what was taken is released below
            self._open()
        except BaseException as error:
            self._leave(self._since(before), leaving.leave_entry, error)
            if not isinstance(error, (_Busy, LockTimeout)):
                raise
        else:
            return True
        return False

    def release(self) -> None:
        """Leave each of them once, also if one of them was lost; raises LockNotHeld, or LockLost for the first."""
        self._leave([(lock, None) for lock in self._in_order()[::-1]], lambda lock, _: leaving.release(lock))

    def _leave(
        self, entered: Sequence[tuple[Any, Any]], leave: Callable[..., Steps[None]], error: BaseException | None = None
    ) -> None:
        """Leave all of that. An error of a release is raised, or becomes a note on `error`, which ended the taking."""
        late: BaseException | None = None
        for lock, block in entered:
            try:
                lock._drive(leave(lock, block))
            except BaseException as raised:  # noqa: BLE001 - the others must be left
                late = _worse(late, raised)
        if late is not None and not _is_noted(late, error):
            raise late

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

    def _enter(self) -> None:
        before = self._entered()
        try:
            for lock, left in self._in_turn(self._timeout):
                lock._drive(entering.enter_block(lock, left))
            self._open()
            self._begun(before)
        except BaseException as error:
            self._leave(self._since(before), leaving.leave_block, error)
            raise

    def __enter__(self) -> Self:
        refuse_to_skip(self)
        refuse_interrupt(any(lock.options.interrupt for lock in self._in_order()))
        try:
            self._enter()
        except LockTimeout as busy:
            if not skips(self, busy):
                raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        entered, late = Entered() if self._skipped else self._ended(), None
        try:
            self._leave(entered, leaving.leave_block)
        except LockError as raised:
            late = raised
        if late is not None and not gives_way(late, error):
            raise late

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
        wait, before = acquire_timeout(blocking, timeout, self._timeout), self._entered()
        try:
            for lock, left in self._in_turn(wait):
                if not isinstance(await lock._adrive(entering.acquire(lock, left)), Hold):
                    raise _Busy  # noqa: TRY301 - what was taken is released below
            self._open()
        except BaseException as error:
            await _aleave(self, self._since(before), leaving.leave_entry, error)
            if not isinstance(error, (_Busy, LockTimeout)):
                raise
        else:
            return True
        return False

    async def release(self: BaseLocks) -> None:
        """Leave each of them once."""
        await _aleave(self, [(lock, None) for lock in self._in_order()[::-1]], lambda lock, _: leaving.release(lock))

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
        await enter(self)
        return self

    async def __aexit__(
        self: BaseLocks, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        entered, late = Entered() if self._skipped else self._ended(), None
        try:
            await _aleave(self, entered, leaving.leave_block)
        except LockError as raised:
            late = raised
        ours = [block.hold for _, block in entered if was_ours(block.hold, error)]
        if late is not None and (ours or not gives_way(late, error)):
            raise late from error

    if not TYPE_CHECKING:  # hidden from type checkers
        __enter__ = __exit__ = refuses("these are the locks of an event loop: use `async with`")

    def __call__(self: BaseLocks, function: F) -> F:
        """Decorate a coroutine function: each call holds the locks; the keys are formatted with its arguments."""
        return adecorated(self, function, self._templates(function))


async def enter(several: BaseLocks) -> None:
    """Begin an `async with`."""
    refuse_to_skip(several)
    before = several._entered()
    try:
        for lock, left in several._in_turn(several._timeout):
            await lock._adrive(entering.enter_block(lock, left))
            if lock.options.interrupt:
                lock._surely_held().cancelling = current_task().cancelling()
        several._open()
        several._begun(before)
    except BaseException as error:
        entered = several._since(before)
        await _aleave(several, entered, leaving.leave_block, error)
        for lock, block in entered:
            if was_ours(block.hold, error):  # only the loss of a lock cancelled this
                raise lock._lost(block.hold) from error
        if not (isinstance(error, LockTimeout) and skips(several, error)):
            raise


async def _aleave(
    several: BaseLocks,
    entered: Sequence[tuple[Any, Any]],
    leave: Callable[..., Steps[None]],
    error: BaseException | None = None,
) -> None:
    """The asynchronous twin of `SyncLocks._leave`."""
    late: BaseException | None = None
    for lock, block in entered:
        try:
            await lock._adrive(leave(lock, block), undisturbed=True)
        except BaseException as raised:  # noqa: BLE001 - the others must be left
            late = _worse(late, raised)
    if late is not None and not _is_noted(late, error):
        raise late


def _worse(first: BaseException | None, second: BaseException) -> BaseException:
    """Of two errors of releases the one to raise: an interrupt, else the first; the other becomes a note on it."""
    if first is None:
        return second
    if isinstance(first, LockError) and not isinstance(second, LockError):
        first, second = second, first
    first.add_note(str(second))
    return first


def _is_noted(late: BaseException, error: BaseException | None) -> bool:
    """Whether the error of a release becomes a note on `error`, which ended the taking, instead of being raised."""
    if error is None or not isinstance(late, LockError):
        return False
    error.add_note(str(late))
    return True
