"""A semaphore: at most so many permits of a key are held at a time, in all processes.

A permit is a lock, on one of N numbered slots. The semaphore object owns the permits that it has acquired: any thread
or task may release one, as of `threading.Semaphore`. How many there are says the code of the caller, not the database:
each caller takes one of its own first N slots. So nothing has to be migrated when N changes, and while callers with 3
and with 5 permits run, at most 5 are in.

Rule: a permit is among those of its object until it is released; what releases it takes it out first.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Generic, Self, TypeVar

from dblock.core import runtime
from dblock.core.acquire.request import Refused
from dblock.core.acquire.sharing import Sharing, free_slots, held_shares, leave_shares, share
from dblock.core.acquire.waiting import Attempt
from dblock.core.errors import LockError, LockTimeout, PermitNotHeld
from dblock.core.holding.flow import Block, Hold
from dblock.core.lock import entering, leaving
from dblock.core.lock.base import BaseLock
from dblock.core.lock.blocks import Loaded, block_begin
from dblock.core.lock.bookkeeping import innermost
from dblock.core.lock.key_template import Template
from dblock.core.lock.leaving import Entered, leave_each
from dblock.core.lock.locks import Awaiting, Blocking, Operations, Timeout, refuses
from dblock.core.protocol import tenures
from dblock.core.protocol.steps import Steps, undone_after
from dblock.core.runtime import current_flow
from dblock.core.share_keys import valid_permits, valid_shared_key
from dblock.core.validation import acquire_timeout
from dblock.core.values import Grant, KeyKind, LockInfo, slot_of

P = TypeVar("P", bound="IsPermit")
"""The permits of a face."""


class IsPermit(BaseLock):
    """The lock on a slot of a semaphore; made by the semaphore, whose docstring says how it is used."""

    _kind, _valid_key = KeyKind.SEMAPHORE, staticmethod(valid_shared_key)
    _semaphore: BaseSemaphore[Any]
    _flow: Any = None
    """Its own, whose driver is the flow that took it last, or takes it now."""
    _wanted: int
    """How many permits are acquired together, of which it is the first."""
    _granted: list[Grant]
    """The tenures that were acquired together, until each has its permit; the permits share the list."""
    _is_being_taken: bool

    @property
    def slot(self) -> int | Any:
        """The number of the permit, from 0, which no other holder has meanwhile; None if this permit is not held.

        For type checkers as `fence`.
        """
        hold = self._hold()
        return None if hold is None else slot_of(hold.tenure.key)

    def __copy__(self) -> Self:
        permit, flow = super().__copy__(), current_flow()
        permit._flow = runtime.current.flows.of_object(flow.who["thread"], permit, flow.ref)
        permit._wanted, permit._granted, permit._is_being_taken = 1, [], False
        return permit

    def __repr__(self) -> str:
        slot = self.slot
        return super().__repr__() if slot is None else f"{super().__repr__()[:-1]}, slot {slot}>"

    def _own_hold(self, verb: str) -> Hold:
        hold = super()._own_hold(verb)
        if verb == "release" and len(hold.entries) == 1 and self in self._semaphore._held:
            raise PermitNotHeld(
                f"a permit of {self._key!r} is released by the end of its `with`, or by the semaphore's release(); the "
                "permit's own release() is for one that semaphore.permit() made",
                key=self._key,
            )
        return hold

    def _check_kind(self, hold: Hold | None = None) -> None:
        """Raise WrongKind; or LockError where another thread or task has it: both would be inside by one permit."""
        if hold is not None:
            super()._check_kind(hold)
        if self._flow.driver() not in {None, current_flow()}:
            raise LockError(
                f"this permit of {self._key!r} is another thread's or task's: make a semaphore.permit() for each block",
                key=self._key,
            )

    def _take(self, attempt: Attempt) -> Steps[Grant | Refused]:
        if self._is_being_taken:
            self._check_kind()
        self._flow.driver, self._is_being_taken = current_flow().ref, True
        try:
            if not self._granted:
                wanted, self._wanted = self._wanted, 1
                found = yield from share(Sharing(attempt), lambda s: s.acquire(lambda: self._semaphore.permits, wanted))
                if isinstance(found, Refused):
                    return found
                self._granted += sorted(found, key=lambda grant: grant.tenure.key)
            return self._granted.pop(0)
        finally:
            self._is_being_taken = False


class BaseSemaphore(Operations, Generic[P]):
    """A semaphore, apart from how its statements are run."""

    _locks_by = "permit()"
    """What makes a lock of it."""
    if not TYPE_CHECKING:  # hidden from type checkers
        atomic = begin = refuses("a semaphore guards no transaction, and each of its permits does: use .permit()")

    def __init__(self, make_permit: Callable[..., P], key: str, permits: int = 1, **options: Any) -> None:
        """`make_permit(key, **options)` makes a permit of the face."""
        if refused := options.keys() & {"interrupt", "reentrant"}:
            why = "a permit belongs to the semaphore object, not to a flow"
            raise TypeError(f"{min(refused)} is not for semaphores: {why}")
        self._permits = valid_permits(permits)
        self._plain = plain = make_permit(key, **options)
        """A permit that is never acquired, of which all others are copies."""
        self.options, self._templates = plain.options, plain._templates
        self._drive, self._adrive = plain._drive, plain._adrive
        self._withs: list[Block] = []
        """Those of the permits of blocks without an end of their own."""
        self._held: dict[Any, Block] = {}
        """The permits of this object, the oldest first, and how it has entered each.

        The flow that has removed one leaves it.
        """

    # -- what is known without I/O

    @property
    def key(self) -> str:
        """The key of the semaphore."""
        return self._plain.key

    @property
    def permits(self) -> int:
        """The number of permits; a new number holds from the next acquire on, and for calls that wait."""
        return self._permits

    @permits.setter
    def permits(self, permits: int) -> None:
        self._permits = valid_permits(permits)
        runtime.current.wakeups.notify_all(self._plain._place.store().database)

    @property
    def held(self) -> list[P]:
        """The permits that this object holds, each a lock, the oldest first."""
        return [permit for permit in list(self._held) if permit._hold_here() is not None]

    def permit(self) -> P:
        """One permit, not yet acquired, as a lock of its own: for `db_locks`, and for what is given a lock."""
        permit = copy.copy(self._plain)
        permit._semaphore = self
        return permit

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.key!r}: {len(self.held)} of {self._permits} permits held here>"

    # -- the operations, as steps

    def _own(self, n: int, begin: Callable[[P], Steps[object]]) -> Steps[list[P]]:
        """Begin `n` new permits, and own them; none if they were not free in time, or if anything interrupts that."""
        permits = [self.permit() for _ in range(n)]
        permits[0]._wanted = n
        for each in permits:
            each._granted = permits[0]._granted

        def own() -> Steps[list[P]]:
            for each in permits:
                if isinstance((yield from begin(each)), Refused):
                    return []
            for gone in list(self._held):
                if not gone._open_blocks() and gone._hold_here() is None:
                    _ = self._held.pop(gone, None)
            self._held.update(_entered(permits))
            return permits

        def leave(error: BaseException) -> Steps[None]:
            yield from leave_each(_entered(permits), error)
            yield from leave_shares(runtime.current.site(self._plain._place.store()), permits[0]._granted)

        return undone_after(own, leave)

    def _acquire(self, n: int, blocking: bool, given: Timeout) -> Steps[bool]:
        """Acquire `n` permits, or none; False if they were not free in time."""
        timeout = acquire_timeout(blocking, given, self._plain._timeout)
        if valid_permits(n, "the number of permits") > self._permits:
            raise ValueError(f"{self.key!r} has {self._permits} permits, and so never {n} at a time")
        try:
            return bool((yield from self._own(n, lambda permit: entering.acquire(permit, timeout, "with"))))
        except LockTimeout:  # waiting would have been pointless
            return False

    def _release(self, n: int) -> Steps[None]:
        """Release `n` permits that acquire() has got, last first; those of this flow before others."""
        _ = valid_permits(n, "the number of permits")
        flow, chosen = current_flow().ref, Entered()
        mine = [each for each in self.held if self._held.get(each) not in each._blocks]  # no `with` has entered it
        mine.sort(key=lambda permit: permit._flow.driver is flow)  # stable: those of this flow last
        for permit in mine[::-1] if n <= len(mine) else ():
            # If it has no block any more, another thread releases it at this moment.
            if len(chosen) < n and (block := self._held.pop(permit, None)):
                chosen.append((permit, block))
        if len(chosen) < n:
            self._held.update(chosen)
            raise PermitNotHeld(
                f"Semaphore released too many times: {n} of {self.key!r}, of which this object holds {len(mine)}",
                key=self.key,
            )
        yield from leave_each(chosen)

    def _enter(self, its: Loaded) -> Steps[P]:
        """Begin a `with`: its permit."""
        opened = [each for each, block in self._held.copy().items() if block in each._open_blocks()]
        if any(each._flow.driver is current_flow().ref for each in opened):
            raise LockError(
                f"a block of this semaphore, {self.key!r}, is open in this thread or task already, and its end could "
                "not be told from that of another one: enter a semaphore.permit() of its own for each block",
                key=self.key,
            )
        [permit] = yield from self._own(1, lambda permit: entering.enter(permit, its))
        return permit

    def _exit(self, opened: list[Block]) -> Steps[None]:
        """End a `with`, without a word if its permit was detached; `opened`: the blocks of its end."""
        blocks = [(each._flow.driver, block, each) for each, block in self._held.copy().items() if block in opened]
        _, block, permit = innermost(blocks, [self.key], "enter a semaphore.permit() of its own for each block")
        _ = self._held.pop(permit, None)  # first: after an interrupt from here on nothing refers to the permit
        opened.remove(block)
        return leaving.leave_block(permit, block)

    def _holders(self) -> Steps[list[LockInfo]]:
        database, found = self._plain._place.store().database, list[LockInfo]()
        for key in (yield from held_shares(database, self.key)):
            info = yield from tenures.inspect(database, key)
            if info is not None and info.state == "held":
                found.append(info.masked())
        return found

    def _available(self) -> Steps[int]:
        return free_slots(self._plain._place.store().database, self.key, self._permits)

    def _for_call(self, template: Template, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Self:
        """A separate semaphore for one call of a decorated function."""
        made = copy.copy(self)
        made._plain, made._held, made._withs = self._plain._for_call(template, args, kwargs), {}, []
        return made


def _entered(permits: list[Any]) -> Entered:
    """The permits that are held, and how their semaphore has entered each: by its first entry."""
    return [(each, Block(hold.entries[0], hold)) for each in permits if (hold := each._hold_here()) is not None]


class SyncSemaphore(BaseSemaphore[P], Blocking):
    """A semaphore whose methods block the calling thread."""

    def acquire(self, blocking: bool = True, timeout: Timeout = ..., n: int = 1) -> bool:
        """Acquire `n` permits, or none; False if they were not free in time. As threading.Semaphore.acquire.

        `timeout` is in seconds, -1 or None for ever, the semaphore's own by default. Who asks for several is waited
        for by those who come later. Raises ValueError for more than there are, LockStoreError if the database fails.
        """
        return bool(self._drive(self._acquire(n, blocking, timeout)))

    def release(self, n: int = 1) -> None:
        """Release `n` permits that this object acquired, in whatever thread; those of this thread first.

        Raises PermitNotHeld, a ValueError, if it holds fewer; LockLost if the lease of one has ended.
        """
        self._drive(self._release(n))

    def available(self) -> int:
        """The number of permits that nobody holds, according to the database."""
        return int(self._drive(self._available()))

    def holders(self) -> list[LockInfo]:
        """Who holds permits, in the order of the slots."""
        return list(self._drive(self._holders()))

    @block_begin
    def __enter__(self, its: Loaded) -> P:
        permit: P = self._drive(self._enter(its))
        return permit


class AsyncSemaphore(BaseSemaphore[P], Awaiting):
    """A semaphore whose methods are coroutines; see SyncSemaphore for what each does.

    `self` may be any semaphore, so that a synchronous one can use these methods as its asynchronous twins.
    """

    async def acquire(self: BaseSemaphore[P], blocking: bool = True, timeout: Timeout = ..., n: int = 1) -> bool:
        """Acquire `n` permits, or none; False if they were not free in time."""
        return bool(await self._adrive(self._acquire(n, blocking, timeout)))

    async def release(self: BaseSemaphore[P], n: int = 1) -> None:
        """Release `n` permits that this object acquired, in whatever task; those of this task first."""
        await self._adrive(self._release(n), undisturbed=True)

    async def available(self: BaseSemaphore[P]) -> int:
        """The number of permits that nobody holds, according to the database."""
        return int(await self._adrive(self._available()))

    async def holders(self: BaseSemaphore[P]) -> list[LockInfo]:
        """Who holds permits, in the order of the slots."""
        return list(await self._adrive(self._holders()))

    @block_begin
    async def __aenter__(self: BaseSemaphore[P], its: Loaded) -> P:
        permit: P = await self._adrive(self._enter(its))
        return permit
