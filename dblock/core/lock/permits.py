"""A semaphore: at most so many permits of a key are held at a time, in all processes.

A permit is a lock, on one of N numbered slots. The semaphore object owns the permits that it has acquired: any thread
or task may release one, as of `threading.Semaphore`. How many there are says the code of the caller, not the database:
each caller takes one of its own first N slots. So nothing has to be migrated when N changes, and while callers with 3
and with 5 permits run, at most 5 are in.

Rule: a permit is in the list of its object until it is released; what releases it takes it out first.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Generic, Self, TypeVar

from dblock.core import runtime
from dblock.core.acquire import handover
from dblock.core.acquire.request import Refused
from dblock.core.acquire.sharing import Sharing, listed
from dblock.core.acquire.waiting import Attempt
from dblock.core.errors import LockError, LockTimeout, PermitNotHeld
from dblock.core.holding.flow import Block, Flow, Hold
from dblock.core.lock import entering, leaving
from dblock.core.lock.base import BaseLock
from dblock.core.lock.blocks import Loaded, block_begin
from dblock.core.lock.bookkeeping import ending
from dblock.core.lock.key_template import Template
from dblock.core.lock.leaving_several import release_each
from dblock.core.lock.locks import Awaiting, Blocking, Operations, Timeout, refuses
from dblock.core.options import Options
from dblock.core.protocol import tenures
from dblock.core.protocol.sending import Database
from dblock.core.protocol.steps import Steps, undone
from dblock.core.runtime import current_flow
from dblock.core.share_keys import PERMITS_MAX, valid_permits, valid_shared_key
from dblock.core.validation import acquire_timeout
from dblock.core.values import Grant, KeyKind, LockInfo, slot_of

P = TypeVar("P", bound="IsPermit")
"""The permits of a face."""


class IsPermit(BaseLock):
    """The lock on a slot of a semaphore; made by the semaphore, whose docstring says how it is used."""

    _kind = KeyKind.SEMAPHORE
    _semaphore: BaseSemaphore[Any]
    _flow: Any = None
    """Its own, whose driver is the flow that took it last, or takes it now."""
    _wanted = 1
    """How many permits are acquired at a time, of which it is the first."""
    _others: Sequence[Grant] = ()
    """The tenures of the others, until their permits have them."""
    _is_being_taken = False
    _block: Block | None = None
    """The `with` of the semaphore that it was acquired for; None if it was for acquire(), or for its caller."""

    @property
    def slot(self) -> int | Any:
        """The number of the permit, from 0, which no other holder has meanwhile; None if this permit is not held.

        For type checkers as `fence`.
        """
        hold = self._hold()
        return None if hold is None else slot_of(hold.tenure.key)

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

    def _check_kind(self, hold: Hold) -> None:
        super()._check_kind(hold)
        self._refuse_to_share()

    def _refuse_to_share(self) -> None:
        """Raise LockError where another thread or task has it: both would be inside by one permit."""
        if self._flow.driver() not in {None, current_flow()}:
            raise LockError(
                f"this permit of {self._key!r} is another thread's or task's: make a semaphore.permit() for each block",
                key=self._key,
            )

    def _take(self, attempt: Attempt) -> Steps[Grant | Refused]:
        if self._is_being_taken:
            self._refuse_to_share()
        self._flow.driver, self._is_being_taken = current_flow().ref, True
        try:
            found = yield from Sharing(attempt).acquire(self._semaphore, self._wanted)
        finally:
            self._is_being_taken = False
        if isinstance(found, Refused):
            return found
        first, *self._others = sorted(found, key=lambda grant: grant.tenure.key)
        return first

    def _for_call(self, template: Template, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Self:
        """A permit of its own, since the flow of a permit is one call's."""
        permit: Self = self._semaphore._for_call(template, args, kwargs).permit()
        return permit


class BaseSemaphore(Operations, Generic[P]):
    """A semaphore, apart from how its statements are run."""

    _locks_by = "permit()"
    """What makes a lock of it."""
    if not TYPE_CHECKING:  # hidden from type checkers
        atomic = begin = refuses("a semaphore guards no transaction, and each of its permits does: use .permit()")

    def __init__(self, make_permit: Callable[..., P], key: str, permits: int = 1, **options: Any) -> None:
        """`make_permit(key, **options)` makes a permit of the face."""
        for name in ("interrupt", "reentrant"):
            if name in options:
                raise TypeError(
                    f"{name} is not for semaphores: a permit belongs to the semaphore object, not to a flow"
                )
        self._permits = valid_permits(permits)
        self._plain: Any = make_permit(valid_shared_key(key), **options)
        """A permit that is never acquired, of which all others are copies."""
        self.options: Options = self._plain.options
        self._drive, self._adrive = self._plain._drive, self._plain._adrive
        self._withs: list[Block] = []
        """Those of the permits of blocks without an end of their own."""
        self._held: list[Any] = []
        """The permits of this object, the oldest first. The flow that has removed one from it releases it."""

    # -- what is known without I/O

    @property
    def key(self) -> str:
        """The key of the semaphore."""
        return self._plain.key  # type: ignore[no-any-return]

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
        return [permit for permit in self._held[:] if permit._hold_here() is not None]

    def permit(self) -> P:
        """One permit, not yet acquired, as a lock of its own: for `db_locks`, and for what is given a lock."""
        permit: P = copy.copy(self._plain)
        flow = current_flow()
        permit._semaphore = self
        permit._flow = runtime.current.flows.of_object(flow.who["thread"], permit, flow.ref)
        return permit

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.key!r}: {len(self.held)} of {self._permits} permits held here>"

    # -- the permits of this object

    def _add(self, permits: list[Any]) -> None:
        """Own permits from now on; those that are gone are forgotten."""
        for gone in [each for each in self._held[:] if not each._open_blocks() and each._hold_here() is None]:
            _ = self._drop(gone)
        self._held += permits

    def _drop(self, permit: Any) -> bool:
        """Own it no more; False if it is not, or no longer, of this object."""
        try:
            self._held.remove(permit)
        except ValueError:
            return False
        return True

    def _chosen(self, n: int) -> list[Any]:
        """The permits that are to be released, last first; those of this flow before others."""
        flow, chosen = current_flow().ref, list[Any]()
        mine = [each for each in self.held if each._block is None]
        mine.sort(key=lambda permit: permit._flow.driver is flow)  # stable: those of this flow last
        for permit in mine[::-1] if n <= len(mine) else ():
            if len(chosen) < n and self._drop(permit):  # else another thread releases it at this moment
                chosen.append(permit)
        if len(chosen) < n:
            self._held += chosen
            raise PermitNotHeld(
                f"Semaphore released too many times: {n} of {self.key!r}, of which this object holds {len(mine)}",
                key=self.key,
            )
        return chosen

    def _blocks(self) -> list[tuple[Callable[[], Flow | None], Block, Any]]:
        """The open `with`s and their permits, each behind a reference to the flow that began it."""
        permits = [each for each in self._held[:] if each._block in each._open_blocks()]
        return [(each._flow.driver, each._block, each) for each in permits]

    # -- the operations, as steps

    def _acquire(self, n: int, timeout: float | None) -> Steps[bool]:
        """Acquire `n` permits, or none; False if they were not free in time."""
        if valid_permits(n, "the number of permits") > self._permits:
            raise ValueError(f"{self.key!r} has {self._permits} permits, and so never {n} at a time")
        permits = [self.permit() for _ in range(n)]
        permits[0]._wanted = n
        try:
            return (yield from undone(partial(self._acquire_each, permits, timeout), partial(self._undo, permits)))
        except LockTimeout:  # waiting would have been pointless
            return False

    def _acquire_each(self, permits: list[Any], timeout: float | None) -> Steps[bool]:
        first = permits[0]
        if isinstance((yield from entering.acquire(first, timeout, "with", first._flow)), Refused):
            return False
        for permit, grant in zip(permits[1:], first._others, strict=True):
            _ = yield from entering.acquire(permit, timeout, "with", permit._flow, granted=grant)
            first._others = first._others[1:]
        self._add(permits)
        return True

    def _undo(self, permits: list[Any]) -> Steps[None]:
        """Leave what was acquired in vain."""
        with contextlib.suppress(LockError):
            yield from release_each([each for each in permits if self._drop(each) or each._hold_here() is not None])
        for grant in permits[0]._others:
            with contextlib.suppress(LockError):
                _ = yield from handover.end(runtime.current.site(self._plain._place.store()), grant)

    def _release(self, n: int) -> Steps[None]:
        yield from release_each(self._chosen(valid_permits(n, "the number of permits")))

    def _enter(self, its: Loaded) -> Steps[P]:
        """Begin a `with`: its permit, which a call of a decorated function that is skipped does not hold."""
        if any(flow is current_flow().ref for flow, _, _ in self._blocks()):
            raise LockError(
                f"a block of this semaphore, {self.key!r}, is open in this thread or task already, and its end could "
                "not be told from that of another one: enter a semaphore.permit() of its own for each block",
                key=self.key,
            )
        permit = self.permit()
        yield from undone(partial(self._begin, permit, its), partial(self._undo, [permit]))
        return permit

    def _begin(self, permit: Any, its: Loaded) -> Steps[None]:
        yield from entering.enter(permit, its)
        self._skipped = permit._skipped
        if not self._skipped:
            permit._block = permit._blocks[-1]
            self._add([permit])

    def _exit(self, opened: list[Block]) -> Steps[None]:
        """End a `with`, without a word if its permit was detached; `opened`: the blocks of its end."""
        blocks = [each for each in self._blocks() if not opened or each[1] in opened]
        _, block, permit = ending(blocks, self.key, "enter a semaphore.permit() of its own for each block")
        if block in opened:
            opened.remove(block)
        _ = self._drop(permit)
        return leaving.leave_block(permit, block)

    def _in_use(self, until: float | None = None) -> Steps[list[str]]:
        """The keys of the slots that somebody holds; `until`: the local time by which to answer."""
        database: Database = self._plain._place.store().database
        rows = yield from listed(
            database, self.key, PERMITS_MAX, until or database.now() + database.timing.retry_budget
        )
        return [str(key) for key, _, _, remaining in rows if remaining > 0]

    def _holders(self) -> Steps[list[LockInfo]]:
        found = list[LockInfo]()
        for key in (yield from self._in_use()):
            info = yield from tenures.inspect(self._plain._place.store().database, key)
            if info is not None and info.state == "held":
                found.append(info.masked())
        return found

    def _available(self) -> Steps[int]:
        slots = [slot_of(key) for key in (yield from self._in_use())]
        return self._permits - sum(slot is not None and slot < self._permits for slot in slots)

    def _templates(self, function: Callable[..., Any]) -> Template:
        """The key of a decorator, formatted for each call."""
        return Template(self.key, function)

    def _for_call(self, template: Template, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Self:
        """A separate semaphore for one call of a decorated function."""
        made, plain = copy.copy(self), copy.copy(self._plain)
        plain._key, plain._skipped, plain._template = valid_shared_key(template.key(args, kwargs)), False, template
        made._plain, made._held, made._withs = plain, [], []
        return made


class SyncSemaphore(BaseSemaphore[P], Blocking):
    """A semaphore whose methods block the calling thread."""

    def acquire(self, blocking: bool = True, timeout: Timeout = ..., n: int = 1) -> bool:
        """Acquire `n` permits, or none; False if they were not free in time. As threading.Semaphore.acquire.

        `timeout` is in seconds, -1 or None for ever, the semaphore's own by default. Who asks for several is waited
        for by those who come later. Raises ValueError for more than there are, LockStoreError if the database fails.
        """
        wait = acquire_timeout(blocking, timeout, self._plain._timeout)
        return bool(self._drive(self._acquire(n, wait)))

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
        wait = acquire_timeout(blocking, timeout, self._plain._timeout)
        return bool(await self._adrive(self._acquire(n, wait)))

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
