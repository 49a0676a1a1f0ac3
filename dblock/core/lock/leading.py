"""Leader election: of many candidates for one name, one leads at a time, for a term.

A term is a tenure of the lock on that name, and its number is the fence of that tenure. Candidates are elected first
come, first served, by the queue of the key. The leader object owns the tenure: any thread may ask it, or resign.

The steps of each method are written once; SyncLeader and AsyncLeader drive them.

Rule: the belief ends before the term. `is_leader` turns False a margin before the lease ends, and before the statement
of a resignation is sent. What runs for the leader (a body) ends before a resignation releases the key.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import inspect
import threading
import weakref
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Self, TypedDict, TypeVar, Unpack

from dblock.core import runtime, timing
from dblock.core.acquire.request import Refused
from dblock.core.errors import (
    LockError,
    LockLost,
    LockRevoked,
    LockStoreError,
    LockTimeout,
    Reason,
    SynchronousOnlyOperation,
)
from dblock.core.holding.flow import Hold
from dblock.core.lock import entering, operations
from dblock.core.lock.base import BaseLock
from dblock.core.lock.blocks import Loaded, block_begin, block_end
from dblock.core.lock.bookkeeping import innermost
from dblock.core.lock.candidacy import Candidacy
from dblock.core.lock.locks import gives_way, of_the_end, refuse_interrupt, refuses, was_ours
from dblock.core.lock.refusals import timed_out
from dblock.core.log import warn
from dblock.core.options import unknown_options
from dblock.core.protocol.steps import Cancel, Cancelled, Steps, call, wait
from dblock.core.runtime import current_flow
from dblock.core.validation import valid_timeout
from dblock.core.values import LockInfo, Seconds
from dblock.core.wakeup.registry import Wakeup

L = TypeVar("L", bound="BaseLeader")
T = TypeVar("T")
Body = Callable[[int], Any]
Told = Callable[[Any], object]
Deposed = Callable[[Any, Reason], object]

TTL: Final = 15.0
"""Seconds after which another candidate is elected, by default, if the leader has died."""


class Options(TypedDict, total=False):
    """The keyword arguments of `db_leader`, whose docstring explains them."""

    ttl: Seconds
    timeout: Seconds | None
    label: str
    on_elected: Told | None
    on_deposed: Deposed | None
    on_at_risk: Told | None
    on_revoke: Callable[[Any, str], object] | None
    interrupt: bool
    grace: Seconds
    min_hold: Seconds
    max_hold: Seconds | None


class Term(NamedTuple):
    """A change of the leader, as `observe()` reports it."""

    number: int | None
    """The number of the term; None while nobody leads."""
    leader: LockInfo | None
    """Who leads; None while nobody does."""


_Block = tuple[Callable[[], Any], Candidacy, Hold]
"""A reference to the flow that has begun a block, its candidacy, and the hold of the term."""


def _tell(this: Callable[[], Any], handler: Callable[..., Any], _lock: BaseLock, *given: object) -> None:
    if (leader := this()) is not None:
        _ = handler(leader, *given)


class BaseLeader:
    """A candidate for the leadership of a name, apart from how its statements are run."""

    def __init__(self, make_lock: Callable[..., BaseLock], name: str, **options: Unpack[Options]) -> None:
        """`make_lock(name, **options)` makes a lock of the face."""
        if unknown := options.keys() - Options.__annotations__.keys():
            raise unknown_options(sorted(unknown), Options.__annotations__, "db_leader")
        for what in ("on_elected", "on_deposed"):
            if not ((handler := options.get(what)) is None or callable(handler)):
                raise TypeError(f"{what} is a function or None, not {handler!r}")
        self._on_elected = options.pop("on_elected", None)
        given: dict[str, Any] = {"ttl": TTL, "timeout": None, **options}
        this = weakref.ref(self)  # a leader object that was dropped hears of nothing
        for of_lock, ours in (("on_lost", "on_deposed"), ("on_at_risk", "on_at_risk"), ("on_revoke", "on_revoke")):
            handler = given.pop(ours, None)
            given[of_lock] = handler and functools.partial(_tell, this, handler)
        self._lock = make_lock(name, release="now", slow_wait=None, **given)
        """Whose copies the candidacies take; it is never held itself."""
        self._lock._stands_by = True
        self._blocks: list[_Block] = []
        """The blocks without an end of their own, as an ExitStack begins them."""
        self._runtime: Any = None
        """That of the process; a forked child has another."""
        _ = self._latest()

    def _latest(self) -> Candidacy | None:
        """The latest candidacy; in a forked child the object begins anew, as that and the term are the parent's."""
        if self._runtime is not runtime.current:
            self._guard = threading.RLock()  # a signal handler may resign
            self._stopped = False
            self._candidacy: Candidacy | None = None
            self._runtime = runtime.current
        return self._candidacy

    # -- what is known without I/O

    @property
    def name(self) -> str:
        """The name of what is led, and the key of the lock on it."""
        return self._lock.key

    @property
    def is_leader(self) -> bool:
        """Whether this object surely leads at this moment, by the local clock alone; no I/O."""
        return self._leading() is not None

    @property
    def term(self) -> int | None:
        """The number of the term, greater than every earlier one of the name (the fence); None unless leading."""
        lock = self._leading()
        return None if lock is None else lock.fence

    @property
    def remaining(self) -> float:
        """Seconds for which this object may still rely on leading, 0.0 if it may not; by the local clock alone."""
        lock = self._leading()
        return 0.0 if lock is None else lock.remaining

    def check(self) -> None:
        """Raise LockLost unless this object surely leads, LockRevoked if it was asked to resign; no I/O."""
        self._elected().check()

    def _elected(self) -> Any:
        """The lock of the term; raises LockLost without one, or if it was resigned."""
        candidacy = self._latest()
        if candidacy is None or candidacy.cancel.is_set or candidacy.lock._hold_here() is None:
            why = "it was not elected, or has resigned"
            raise LockLost(f"this object does not lead {self.name!r}: {why}", key=self.name)
        return candidacy.lock

    def _leading(self) -> BaseLock | None:
        candidacy = self._latest()
        return candidacy.lock if candidacy is not None and candidacy.leads() else None

    def __repr__(self) -> str:
        does = f"leads, term {self.term}" if self.is_leader else "does not lead"
        return f"<{type(self).__name__} {self.name!r}: {does}>"

    # -- a candidacy, from its beginning to its end

    def _driving(self, steps: Callable[..., Steps[T]], *arguments: object) -> tuple[Steps[T | None], Cancel]:
        """The steps that drive a new candidacy, and the flag that withdraws it."""
        candidacy = Candidacy(self._lock)
        return candidacy.drive(steps(candidacy, *arguments)), candidacy.cancel

    def _begin(self, candidacy: Candidacy) -> Steps[None]:
        """Become a candidate; a key whose release has failed is released before."""
        _ = self._latest()
        with self._guard:
            if (former := self._candidacy) is not None:
                self._refuse_beside(former)
            self._candidacy = candidacy
        if self._stopped:  # read last: stop() says so first, and then ends what it finds
            raise LockError(f"stop() was called: this object is no candidate for {self.name!r} any more")
        if former is not None:
            with contextlib.suppress(LockLost):
                yield from former.end(again=True)

    def _refuse_beside(self, former: Candidacy) -> None:
        leads, driven = former.leads(), former.is_driven()
        if driven and former.cancel.over and not leads:
            raise LockError(f"the body of the last term has not yet released {self.name!r}: wait for its end")
        if driven or leads:
            does = "leads" if leads else "is a candidate for"
            raise LockError(f"this object {does} {self.name!r} already: make a db_leader() for each candidate")

    def _elect(
        self, candidacy: Candidacy, timeout: float | None, end: Callable[[], object] | None = None
    ) -> Steps[Hold | Refused]:
        """The hold of the term, once `on_elected` was called; the refusal if the time was up. Raises Cancelled."""
        yield from self._begin(candidacy)
        hold = yield from entering.acquire(candidacy.lock, timeout, "with", end=end)
        if isinstance(hold, Refused):
            return hold
        candidacy.cancel.over = True
        if (task := candidacy.flow.task) is not None:
            hold.cancelling = task.cancelling()
        if self._on_elected is not None and candidacy.leads():
            yield from self._lead(candidacy, hold, self._on_elected, self)
        if not candidacy.leads():
            raise Cancelled
        return hold

    def _lead(self, candidacy: Candidacy, hold: Hold, does: Callable[[Any], object], given: object) -> Steps[None]:
        """Call a function; what it raises ends the term, and is raised unless it says only that the term is to end."""
        error = (yield from call(does, given)).error
        if was_ours(hold, error) or (error is not None and _is_deposition(error, candidacy)):
            candidacy.cancel.set()
        elif error is not None:
            yield from candidacy.finish(error)
            try:
                raise error
            finally:
                del error  # it refers to this frame

    # -- the methods

    def _campaign(self, candidacy: Candidacy, timeout: float | None) -> Steps[bool]:
        try:
            found = yield from self._elect(candidacy, timeout)
        except LockTimeout:  # waiting would have been pointless
            if timeout is None:
                raise
            return False
        candidacy.flow.driver = None
        return isinstance(found, Hold)

    def _resign(self, *, for_good: bool = False) -> Steps[None]:
        """End the term that this object has now, or withdraw its candidacy."""
        _ = self._latest()
        if for_good:
            self._stopped = True
        candidacy = self._candidacy
        if candidacy is None:
            return
        if not candidacy.cancel.over or candidacy.is_driven(elsewhere=True):
            candidacy.cancel.set()  # from here on its driver ends it, also if this is interrupted
            if not candidacy.cancel.over:
                return
            if (hold := candidacy.lock._hold_here()) is not None:
                candidacy.lock._interrupt_body(hold)
        while candidacy.is_driven(elsewhere=True):
            yield from wait(self._lock._place.store(), timing.DEFAULT.local_poll, Wakeup())
        with contextlib.suppress(LockLost):  # of a loss on_deposed and check() have told
            yield from candidacy.end(again=True)

    def _refuse_to_wait(self) -> None:
        """Raise SynchronousOnlyOperation where a resignation would block the event loop of the body."""
        candidacy = self._latest()
        task = None if candidacy is None else candidacy.flow.task
        if task is not None and task.get_loop() is asyncio._get_running_loop():
            raise SynchronousOnlyOperation(
                "this would wait for a task of the running event loop: await aresign(), astop()"
            )

    def _who_leads(self) -> Steps[LockInfo | None]:
        info = yield from operations.inspect(self._lock)
        return info if info is not None and info.state == "held" and info.owner else None  # no owner during `min_hold`

    def _next_term(self, known: Term | None, every: float) -> Steps[Term]:
        """The present term; if one is known, the next one that is another."""
        while True:
            if known is not None:
                yield from wait(self._lock._place.store(), every, Wakeup())
            leader = yield from self._who_leads()
            term = Term(None if leader is None else leader.fence, leader)
            if known is None or term.number != known.number:
                return term

    def _turn(self, candidacy: Candidacy, body: Body) -> Steps[bool]:
        """A turn of `run`: campaign, lead by calling the body, and resign; True if it was stopped.

        A database that fails is asked again in the next turn.
        """
        try:
            hold: Any = yield from self._elect(candidacy, None)
        except LockStoreError as away:
            warn("cannot campaign for %r, and will try again: %s", self.name, away)
            yield from wait(self._lock._place.store(), timing.DEFAULT.attention, Wakeup())
            return False
        except LockError:
            if self._stopped:
                return True
            raise
        yield from self._lead(candidacy, hold, body, hold.tenure.fence)
        yield from candidacy.finish()
        return False

    def _enter(self, candidacy: Candidacy, its: Loaded | None) -> Steps[None]:
        """Begin the block of a `with`, which has loaded `its`."""
        try:
            found = yield from self._elect(candidacy, self._lock._timeout, its.end if its else None)
        except Cancelled:
            raise LockError(f"the candidacy for {self.name!r} was withdrawn by resign()", key=self.name) from None
        if isinstance(found, Refused):
            raise (yield from timed_out(candidacy.lock, found)) from found.busy
        (self._blocks if its is None else its.opened).append((current_flow().ref, candidacy, found))

    def _leave(self, error: BaseException | None, opened: list[_Block] | None) -> Steps[None]:
        """End the block of a `with`; `error` is the body's, `opened`: the blocks of its end."""
        blocks = opened or self._blocks
        block = innermost(blocks, [self.name], "make a db_leader() for each block")
        blocks.remove(block)
        _, candidacy, hold = block
        ours = was_ours(hold, error)  # its cancellation is not that of the release
        try:
            yield from candidacy.drive(candidacy.end())
        except LockError as late:
            if ours:
                raise of_the_end(late) from error
            if not gives_way(late, error):
                raise
        if ours:
            raise LockError(f"the term of {self.name!r} was ended by resign()") from error


class SyncLeader(BaseLeader):
    """A candidate whose methods block the calling thread."""

    def campaign(self, timeout: Seconds | None = None) -> bool:
        """Wait until this object leads: its place in the queue of candidates is kept meanwhile.

        `timeout` is in seconds; None, the default, waits for ever. Returns False if the time was up, or if `resign()`
        withdrew the candidacy. `on_elected` is called before this returns; if it fails, the term ends.

        Raises LockStoreError if the database fails, LockError if this object leads or is a candidate already.
        """
        return bool(self._lock._drive(*self._driving(self._campaign, valid_timeout(timeout))))

    def resign(self) -> None:
        """End the term, or withdraw the candidacy; without either, nothing happens.

        `is_leader` is False at once. If a body runs in another thread or task, this waits for its end, and the key is
        released then. Raises LockStoreError if the database fails: call it again, or the lease ends by itself.
        """
        self._refuse_to_wait()
        self._lock._drive(self._resign())

    def stop(self) -> None:
        """Resign for good: a function of `run` returns, and this object campaigns no more."""
        self._refuse_to_wait()
        self._lock._drive(self._resign(for_good=True))

    def leader(self) -> LockInfo | None:
        """Who leads, by the database; None if nobody does."""
        return self._lock._drive(self._who_leads())

    def observe(self, every: float = 1.0) -> Iterator[Term]:
        """Yield the present `Term`, then each change of it, also that nobody leads; without end.

        It reads the row every so many seconds; a term that is shorter may be missed. Raises LockStoreError.
        """
        known: Term | None = None
        while True:
            known = term = self._lock._drive(self._next_term(known, every))
            yield term

    def run(self, body: Callable[[int], None]) -> Callable[[], None]:
        """Decorate `body(term)`: the result campaigns, leads by calling `body`, resigns, and begins anew.

        It returns after `stop()`, and raises what `body` raises, after the term has ended. A body whose `check()` says
        that it was deposed is left for the next campaign, and a database that fails is asked again.
        """
        _check_body(body, "is a coroutine function: let the leader of an async engine run it", awaits=False)

        @functools.wraps(body)
        def lead() -> None:
            if self._lock.options.interrupt:
                refuse_interrupt()
            while not self._lock._drive(*self._driving(self._turn, body)):
                pass

        return lead

    @block_begin
    def __enter__(self, its: Loaded | None = None) -> Self:
        if self._lock.options.interrupt:
            refuse_interrupt()
        self._lock._drive(*self._driving(self._enter, its))
        return self

    @block_end
    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
        opened: list[_Block] | None = None,
    ) -> None:
        self._lock._drive(self._leave(error, opened))

    if not TYPE_CHECKING:  # hidden from type checkers
        __aenter__ = __aexit__ = refuses("this leader blocks its thread: use `with`, or the leader of an AsyncEngine")


class AsyncLeader(BaseLeader):
    """A candidate whose methods are coroutines; see SyncLeader for what each does.

    `self` may be any leader, so that a synchronous one can use these methods as its asynchronous twins.
    """

    async def campaign(self: BaseLeader, timeout: Seconds | None = None) -> bool:
        """Wait until this object leads; False if the time was up, or if the candidacy was withdrawn."""
        return bool(await self._lock._adrive(*self._driving(self._campaign, valid_timeout(timeout))))

    async def resign(self: BaseLeader) -> None:
        """End the term, or withdraw the candidacy; without either, nothing happens."""
        await self._lock._adrive(self._resign())

    async def stop(self: BaseLeader) -> None:
        """Resign for good: a function of `run` returns, and this object campaigns no more."""
        await self._lock._adrive(self._resign(for_good=True))

    async def leader(self: BaseLeader) -> LockInfo | None:
        """Who leads, by the database; None if nobody does."""
        return await self._lock._adrive(self._who_leads())

    async def observe(self: BaseLeader, every: float = 1.0) -> AsyncIterator[Term]:
        """Yield the present `Term`, then each change of it, also that nobody leads; without end."""
        known: Term | None = None
        while True:
            known = term = await self._lock._adrive(self._next_term(known, every))
            yield term

    def run(
        self: BaseLeader, body: Callable[[int], Coroutine[Any, Any, None]]
    ) -> Callable[[], Coroutine[Any, Any, None]]:
        """Decorate `async def body(term)`: see SyncLeader.run. The result is a coroutine function."""
        _check_body(body, "is not a coroutine function: let the leader of a sync engine run it", awaits=True)

        @functools.wraps(body)
        async def lead() -> None:
            while not await self._lock._adrive(*self._driving(self._turn, body)):
                pass

        return lead

    @block_begin
    async def __aenter__(self: L, its: Loaded | None = None) -> L:  # noqa: PYI019 - any leader may use it
        await self._lock._adrive(*self._driving(self._enter, its))
        return self

    @block_end
    async def __aexit__(
        self: BaseLeader,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
        opened: list[_Block] | None = None,
    ) -> None:
        await self._lock._adrive(self._leave(error, opened), undisturbed=True)

    if not TYPE_CHECKING:  # hidden from type checkers
        __enter__ = __exit__ = refuses("this is the leader of an event loop: use `async with`")


def _check_body(body: Body, otherwise: str, *, awaits: bool) -> None:
    if inspect.iscoroutinefunction(body) is not awaits:
        raise TypeError(f"{body!r} {otherwise}")
    try:
        _ = inspect.signature(body).bind(1)
    except TypeError as error:
        raise TypeError(f"leader.run decorates a function of the term, `def body(term)`: {body!r}: {error}") from None


def _is_deposition(error: BaseException, candidacy: Candidacy) -> bool:
    """Whether it says that the term is over, or is to end, so that the next campaign is the answer to it."""
    if isinstance(error, BaseExceptionGroup):
        return all(_is_deposition(each, candidacy) for each in error.exceptions)
    told = isinstance(error, (LockLost, LockRevoked)) and error.key == candidacy.lock.key
    return told and (not candidacy.leads() or candidacy.lock.revoked is not None)
