"""Several locks that are taken together, or not at all.

They are taken one after the other, each through its queue, under one deadline, in the order of their databases and
keys. So two flows that take overlapping sets cannot wait for each other in a circle.

Rule: whatever ends the taking early, a timeout, an error or an interrupt, what was taken before is released.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from types import EllipsisType
from typing import Any, Self

from dblock.core import clock
from dblock.core.acquire.request import Refused
from dblock.core.errors import LockNotHeld, LockTimeout
from dblock.core.holding.flow import Block, Entry, Flow, Hold
from dblock.core.lock import entering
from dblock.core.lock.base import BaseLock
from dblock.core.lock.blocks import Loaded
from dblock.core.lock.bookkeeping import innermost
from dblock.core.lock.key_template import NO_SKIP, Template
from dblock.core.lock.leaving import Entered, block_to_release, leave_each
from dblock.core.lock.locks import AwaitingLocks, BlockingLocks, Operations, was_ours
from dblock.core.options import valid_options
from dblock.core.protocol.steps import Steps, undone_after
from dblock.core.runtime import current_flow
from dblock.core.validation import valid_timeout
from dblock.core.values import Seconds, State


def once(keys: Sequence[Any]) -> list[Any]:
    """Each of the keys and locks that db_locks() was given, once."""
    for each in keys:
        if isinstance(each, list | tuple | set | frozenset):
            raise TypeError(f"db_locks() takes keys, not a {type(each).__name__} of them: write db_locks(*keys)")
        if by := getattr(type(each), "_locks_by", None):
            raise TypeError(f"db_locks() takes locks, and a {type(each).__name__} is none: use its {by}")
    return list(dict.fromkeys(keys))


class BaseLocks(Operations):
    """Several locks, apart from how their statements are run; iterates over them in the order of the keys given."""

    def __init__(
        self,
        members: Sequence[Any],
        timeout: Seconds | EllipsisType | None = ...,
        *,
        on_busy: str = "raise",
        otherwise: Any = None,
    ) -> None:
        if not members:
            raise TypeError("db_locks() takes one key or lock at least")
        interrupt = any(lock.options.interrupt for lock in members)
        self.options = valid_options(on_busy=on_busy, otherwise=otherwise, interrupt=interrupt)
        self._drive, self._adrive = members[0]._drive, members[0]._adrive
        self._members = list(members)
        """In the order given; one that comes twice once, as far as that is known before the keys are formatted."""
        self._timeout = members[0]._place.timeout() if isinstance(timeout, EllipsisType) else valid_timeout(timeout)
        self._withs: list[tuple[Callable[[], Flow | None], Entered]] = []
        """Blocks without an end of their own: a reference to the flow that has begun it, and what it has entered."""
        if any(lock.options.on_busy != "raise" for lock in members):
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
        return float(min(lock.remaining for lock in self._members))

    @property
    def state(self) -> State | None:
        """`held`, `at_risk` or `lost` if one of them is, by the local clock; None unless this flow holds them all."""
        states: list[State | None] = [lock.state for lock in self._members]
        worst_first = (None, "lost", "at_risk", "held")
        return min(states, key=worst_first.index)

    def check(self) -> None:
        """Raise LockLost unless this flow surely holds all of them at this moment, as `Lock.check`; no I/O."""
        for lock in self._members:
            lock.check()

    def __getitem__(self, key: str) -> Any:
        return {lock.key: lock for lock in reversed(self._members)}[key]

    def __iter__(self) -> Iterator[Any]:
        return iter(self._members)

    def __len__(self) -> int:
        return len(self._members)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {', '.join(map(repr, self.keys))}: {self.state or 'not held here'}>"

    # -- the operations, as steps

    def _enter(self, its: Loaded) -> Steps[None]:
        """Begin a `with`, which has loaded `its`."""
        if self.options.on_busy != "raise":
            raise TypeError(NO_SKIP)
        return self._acquire(self._timeout, its)

    def _acquire(self, timeout: float | None, its: Loaded | None = None) -> Steps[None]:
        """Take them all, or none; raises LockTimeout if one was not free in time. `its`: by a `with`, see _enter()."""
        deadline = None if timeout is None else clock.now() + timeout
        locks, store = self._in_order(), None
        before = [block.entry for _, block in self._entered()]

        def take_each() -> Steps[None]:
            nonlocal store
            for lock in locks:
                store, left = lock._place.store(), None if deadline is None else max(deadline - clock.now(), 0.0)
                if its is not None:
                    _ = yield from entering.enter(lock, its, left, part=True)
                elif isinstance((yield from entering.acquire(lock, left)), Refused):
                    raise LockTimeout(key=lock.key)
            for lock in locks:  # each counts from now on, unless it was lost meanwhile
                hold = lock._surely_held()
                entering.count_min_hold(hold, lock, begins=len(hold.entries) == 1)
            if its is not None:
                its.opened.append((current_flow().ref, self._entered(before)))

        def leave_all(error: BaseException) -> Steps[None]:
            entered = self._entered(before)
            yield from leave_each(entered, error, store)
            if lost := [lock._lost(block.hold) for lock, block in entered if was_ours(block.hold, error)]:
                raise lost[0] from error  # only the loss of a lock has cancelled this

        return undone_after(take_each, leave_all)

    def _release(self) -> Steps[None]:
        """Release each of them once. Raises LockNotHeld for the first that is not held, else as `leave_each`."""
        held, error = Entered(), None
        for lock in reversed(self._in_order()):
            try:
                held.append((lock, block_to_release(lock)))
            except LockNotHeld as raised:
                error = error or raised
        yield from leave_each(held, error)
        if error is not None:
            raise error

    def _extend(self, ttl: Seconds | None) -> Steps[None]:
        for lock in self._in_order():
            yield from lock._extend(ttl)

    def _verify(self) -> Steps[bool]:
        for lock in self._in_order():
            _ = yield from lock._verify()
        return True

    def _guard(self, *given: object, awaits: bool = False) -> Steps[None]:
        for lock in self._in_order():
            yield from lock._guard(*given, awaits=awaits)

    def _exit(self, opened: list[Any]) -> Steps[None]:
        """End a `with`; `opened`: the blocks of its end."""
        block = innermost(opened, self.keys)
        opened.remove(block)
        return leave_each(block[1])

    # -- helpers

    def _in_order(self) -> list[Any]:
        """Each lock once, in the order in which all flows take them; of a reader's and a writer's the writer's."""
        found = dict[object, BaseLock]()
        for lock in sorted(self._members, key=_place):
            # Each permit is its own, and two kinds of one key are an error, which taking the second one raises.
            _ = found.setdefault(lock if lock._flow else (lock._place.store(), lock.key, lock._kind), lock)
        return list(found.values())

    def _holds(self) -> list[Hold]:
        """What this flow holds through the locks."""
        return [hold for lock in self._members for hold in lock._holds()]

    def _entered(self, before: Collection[Entry] = ()) -> Entered:
        """What this flow has entered through these locks, but for the entries `before`; last first."""
        holds = [(lock, hold) for lock in self._in_order()[::-1] if (hold := lock._hold_here()) is not None]
        entered = [(lock, Block(each, hold)) for lock, hold in holds for each in hold.entries if each.lock is lock]
        return [each for each in entered if each[1].entry not in before]

    def _templates(self, function: Callable[..., Any]) -> list[Template]:
        """The keys of a decorator."""
        return [lock._templates(function) for lock in self._members]

    def _for_call(self, templates: list[Template], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Self:
        """Separate locks for one call of a decorated function."""
        members = [lock._for_call(each, args, kwargs) for lock, each in zip(self._members, templates, strict=True)]
        return type(self)(members, self._timeout)


def _place(lock: BaseLock) -> tuple[str, str, str, int]:
    """Where a lock comes among others: by its database and key, a reader after a writer."""
    store = lock._place.store()
    return str(store.location or store.name), repr(store.database.dialect.tables), lock.key, lock._reading


class SyncLocks(BaseLocks, BlockingLocks):
    """Several locks whose methods block the calling thread."""


class AsyncLocks(BaseLocks, AwaitingLocks):
    """Several locks whose methods are coroutines."""
