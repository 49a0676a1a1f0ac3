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
import copy
import functools
import inspect
import weakref
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Self, TypeVar, Unpack

from dblock.core import runtime, timing
from dblock.core.errors import LockError, LockLost, LockRevoked, LockStoreError, LockTimeout
from dblock.core.holding.flow import Block, Hold, is_over, nobody
from dblock.core.lock import entering, leaving, operations
from dblock.core.lock.base import BaseLock
from dblock.core.lock.blocks import Loaded, block_begin
from dblock.core.lock.bookkeeping import innermost
from dblock.core.lock.locks import Awaiting, Blocking, Operations, refuse_interrupt, refuses, was_ours
from dblock.core.log import warn
from dblock.core.options import Callback, OfTenure, unknown_options
from dblock.core.protocol.steps import Cancel, Cancelled, Steps, call, undone, wait
from dblock.core.runtime import current_flow
from dblock.core.validation import valid_timeout
from dblock.core.values import LockInfo, Seconds
from dblock.core.wakeup.registry import Wakeup

L = TypeVar("L", bound="BaseLeader")

TTL: Final = 15.0
"""Seconds after which another candidate is elected, by default, if the leader has died."""


class Options(OfTenure, total=False):
    """The keyword arguments of `db_leader`, whose docstring explains them."""

    ttl: Seconds
    timeout: Seconds | None
    on_elected: Callable[[Any], object] | None
    on_deposed: Callback | None
    grace: Seconds


class Term(NamedTuple):
    """A change of the leader, as `observe()` reports it."""

    number: int | None
    """The number of the term; None while nobody leads."""
    leader: LockInfo | None
    """Who leads; None while nobody does."""


def _tell(this: Callable[[], Any], handler: Callable[..., Any], _lock: BaseLock, *given: object) -> None:
    if (leader := this()) is not None:
        _ = handler(leader, *given)


class Candidacy:
    """The claim of a leader object on the key, from its campaign to the end of the term.

    Each has a lock and a flow of an object, which nothing else uses. So what ends a candidacy, or the term that it has
    won, ends no other one, however late. Its flow holds the key from the election until the release is sent. Its driver
    is the flow that campaigns for it, and runs the body of a block or of `run`; after `campaign()` the object alone
    owns the term.

    Rule: as long as its driver lives, the driver alone ends it. Whatever interrupts the driver's steps, nothing of the
    candidacy is left.
    """

    def __init__(self, lock: BaseLock) -> None:
        """It takes a copy of `lock`."""
        self.lock = copy.copy(lock)
        self.flow = self.lock._flow = runtime.current.flows.of_object(f"leader {lock.key}", self)
        self.cancel = Cancel()
        """Withdraws it before it is elected, which is then `over`; set once nobody may believe in its term."""

    def leads(self) -> bool:
        """Whether its term may be believed in, and no interrupt has ended the `with` that holds the key."""
        hold = self.lock._hold_here()
        return hold is not None and hold.can_be_released and not self.cancel.is_set and hold.lease.remaining() > 0

    def is_driven(self) -> bool:
        """Whether its driver has yet to end it, and can: its thread lives, or its task on an open event loop."""
        hold = self.lock._hold_here()
        return not is_over(self.flow.driver) and (hold is None or hold.can_be_released)

    def is_to_end(self, error: BaseException | None) -> bool:
        """Whether an error says that the term is over, or is to end, so that the next campaign is the answer to it."""
        if isinstance(error, BaseExceptionGroup):
            return all(map(self.is_to_end, error.exceptions))
        told = isinstance(error, (LockLost, LockRevoked)) and error.key == self.lock.key
        return told and (not self.leads() or self.lock.revoked is not None)

    def drive(self, steps: Steps[object]) -> Steps[bool]:
        """The steps of its driver, which is the flow that runs; True if their result is, so that the term goes on.

        Unless it goes on nothing of it is left; it does not if it was withdrawn.
        """
        driver, goes_on = current_flow(), False
        self.flow.driver = lambda: driver  # it is kept: its context may be gone before its body has ended
        try:
            with contextlib.suppress(Cancelled):
                goes_on = bool((yield from undone(lambda: steps, functools.partial(self.end, warns=True))))
        finally:  # also of steps that are closed, as nothing drives them
            if not goes_on:
                self._disbelieve()
                self.flow.driver = nobody
        return goes_on

    def end(self, *, warns: bool = False) -> Steps[None]:
        """End the term: release the key, unless another flow does. Raises LockLost if the term was over.

        After another LockError the key is free once the lease has ended. With `warns` the log says that instead.
        """
        try:
            self._disbelieve()
            hold = self.lock._hold_here()
            if hold is not None and self.flow.holds.pop((hold.store, hold.key), None) is hold:  # one flow gets it
                yield from leaving.leave_block(self.lock, Block(hold.entries[0], hold))
        except LockError as late:
            if not warns:
                raise
            if not isinstance(late, LockLost):  # which has been logged
                warn("could not end a term, which ends with its lease: %s", late)
        finally:
            self.flow.driver = nobody

    def _disbelieve(self) -> None:
        """Nobody believes in the term, nor relies on its lease."""
        if (hold := self.lock._hold_here()) is not None:
            hold.lease.renewing = False  # first: whatever interrupts this, it is renewed no more
            self.cancel.set()


class BaseLeader(Operations):
    """A candidate for the leadership of a name, apart from how its statements are run."""

    if not TYPE_CHECKING:  # hidden from type checkers
        __call__ = refuses("a leader decorates by its method: @leader.run")

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
        self.options, self._drive, self._adrive = self._lock.options, self._lock._drive, self._lock._adrive
        self._withs: list[tuple[Callable[[], Any], Candidacy]] = []
        """Blocks without an end of their own: a reference to the flow that has begun it, and its candidacy."""
        self._candidacy = Candidacy(self._lock)
        """The latest one."""
        self._stopped_in: Any = None
        """The runtime of the process that has called stop(), which ends no candidacy of a forked child."""

    # -- what is known without I/O

    @property
    def name(self) -> str:
        """The name of what is led, and the key of the lock on it."""
        return self._lock.key

    @property
    def is_leader(self) -> bool:
        """Whether this object surely leads at this moment, by the local clock alone; no I/O."""
        return self._candidacy.leads()

    @property
    def term(self) -> int | None:
        """The number of the term, greater than every earlier one of the name (the fence); None unless leading."""
        return self._candidacy.lock.fence if self.is_leader else None

    @property
    def remaining(self) -> float:
        """Seconds for which this object may still rely on leading, 0.0 if it may not; by the local clock alone."""
        return self._candidacy.lock.remaining if self.is_leader else 0.0

    def check(self) -> None:
        """Raise LockLost unless this object surely leads, LockRevoked if it was asked to resign; no I/O."""
        self._elected().check()

    def _elected(self) -> Any:
        """The lock of the term; raises LockLost without one, or if it was resigned."""
        candidacy = self._candidacy
        if candidacy.cancel.is_set or candidacy.lock._hold_here() is None:
            raise LockLost(f"this object does not lead {self.name!r}: it was not elected, or resigned", key=self.name)
        return candidacy.lock

    def _guard(self, *given: Any, **how: Any) -> Steps[None]:
        return operations.guard(self._elected(), *given, **how)

    def _holds(self) -> list[Hold]:
        """The hold of the term, if there is one."""
        return self._candidacy.lock._holds()

    def __repr__(self) -> str:
        does = f"leads, term {self.term}" if self.is_leader else "does not lead"
        return f"<{type(self).__name__} {self.name!r}: {does}>"

    # -- a candidacy, from its beginning to its end

    def _driving(self, steps: Callable[..., Steps[object]], *arguments: object) -> tuple[Steps[bool], Cancel]:
        """The steps that drive a new candidacy, and the flag that withdraws it."""
        candidacy = Candidacy(self._lock)
        return candidacy.drive(steps(candidacy, *arguments)), candidacy.cancel

    def _elect(self, candidacy: Candidacy, timeout: float | None, its: Loaded | None = None) -> Steps[Hold]:
        """The hold of the term, once `on_elected` was called; `its`: what a `with` has loaded.

        Raises LockError if this object is a candidate already, leads, or was stopped; LockTimeout; or Cancelled.
        """
        with runtime.current.lock:
            former = self._candidacy
            if former.is_driven() or former.leads():
                does = "has not yet released" if former.cancel.over else "is already a candidate for"
                does = "already leads" if former.leads() else does
                raise LockError(f"this object {does} {self.name!r}: make a db_leader() for each candidate")
            self._candidacy = candidacy
        if self._stopped_in is runtime.current:  # read last: stop() says so first, and then ends what it finds
            raise LockError(f"stop() was called: this object is no candidate for {self.name!r} any more")
        hold = yield from entering.enter(candidacy.lock, its, timeout, part=True)
        candidacy.cancel.over = True
        if self._on_elected is not None and candidacy.leads():
            yield from self._lead(candidacy, hold, self._on_elected, self)
        if not candidacy.leads():
            raise Cancelled
        return hold

    def _lead(self, candidacy: Candidacy, hold: Hold, does: Callable[[Any], object], given: object) -> Steps[None]:
        """Call a function; what it raises ends the term, and is raised unless it says only that the term is to end."""
        error = (yield from call(does, given)).error
        try:
            if was_ours(hold, error) or candidacy.is_to_end(error):
                candidacy.cancel.set()
            elif error is not None:
                yield from candidacy.end(warns=True)  # first: what a database raises here is no failed campaign
                raise error
        finally:
            del error  # it refers to this frame

    # -- the methods

    def _campaign(self, candidacy: Candidacy, timeout: float | None) -> Steps[bool]:
        try:
            _ = yield from self._elect(candidacy, timeout)
        except LockTimeout:  # or waiting would have been pointless
            if timeout is None:
                raise
            return False
        candidacy.flow.driver = nobody
        return True

    def _resign(self, *, in_thread: bool = False, for_good: bool = False) -> Steps[None]:
        """End the term that this object has now, or withdraw its candidacy. `in_thread`: the thread waits for that."""
        if for_good:
            self._stopped_in = runtime.current
        candidacy = self._candidacy
        task = candidacy.flow.task
        is_of_body = in_thread and task is not None and task.get_loop() is asyncio._get_running_loop()
        if candidacy.is_driven():
            candidacy.cancel.set()  # from here on its driver ends it, also if this is interrupted
            if not candidacy.cancel.over:
                return
            for hold in candidacy.lock._holds():
                candidacy.lock._interrupt_body(hold)
        while candidacy.is_driven():
            if is_of_body or candidacy.flow.driver() is current_flow():  # its body goes on
                return
            yield from wait(self._lock._place.store(), timing.DEFAULT.local_poll, Wakeup())
        with contextlib.suppress(LockLost):  # of a loss on_deposed and check() have told
            yield from candidacy.end()

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

    def _turn(self, candidacy: Candidacy, body: Callable[[int], Any]) -> Steps[None]:
        """A turn of `run`: campaign, lead by calling the body, and resign."""
        try:
            hold = yield from self._elect(candidacy, None)
        except LockStoreError as away:
            warn("cannot campaign for %r, and will try again: %s", self.name, away)
            yield from wait(self._lock._place.store(), timing.DEFAULT.attention, Wakeup())
        except LockError:
            if self._stopped_in is not runtime.current:
                raise
        else:
            yield from self._lead(candidacy, hold, body, hold.tenure.fence)
            yield from candidacy.end(warns=True)

    def _enter(self, candidacy: Candidacy, its: Loaded) -> Steps[bool]:
        """Begin the block of a `with`, which has loaded `its`."""
        try:
            _ = yield from self._elect(candidacy, self._lock._timeout, its)
        except Cancelled:
            raise LockError(f"the candidacy for {self.name!r} was withdrawn by resign()", key=self.name) from None
        its.opened.append((current_flow().ref, candidacy))
        return True

    def _exit(self, opened: list[tuple[Callable[[], Any], Candidacy]]) -> Steps[None]:
        """End the block of a `with`; `opened`: the blocks of its end."""
        flow, candidacy = innermost(opened, [self.name], "make a db_leader() for each block")
        opened.remove((flow, candidacy))
        hold = candidacy.lock._hold_here()
        yield from candidacy.end()
        if hold is not None and hold.interrupted:
            raise LockError(f"the term of {self.name!r} was ended by resign()")


class SyncLeader(BaseLeader, Blocking):
    """A candidate whose methods block the calling thread."""

    def campaign(self, timeout: Seconds | None = None) -> bool:
        """Wait until this object leads: its place in the queue of candidates is kept meanwhile.

        `timeout` is in seconds; None, the default, waits for ever. Returns False if the time was up, or if `resign()`
        withdrew the candidacy. `on_elected` is called before this returns; if it fails, the term ends.

        Raises LockStoreError if the database fails, LockError if this object leads or is a candidate already.
        """
        return bool(self._drive(*self._driving(self._campaign, valid_timeout(timeout))))

    def resign(self) -> None:
        """End the term, or withdraw the candidacy; without either, nothing happens.

        `is_leader` is False at once. While a body runs, the key is released at its end: this waits for that, unless the
        body's own thread calls it, a signal handler there included. Raises LockStoreError if the database fails: the
        key is free once the lease has ended.
        """
        self._drive(self._resign(in_thread=True))

    def stop(self) -> None:
        """Resign for good: a function of `run` returns, and this object campaigns no more."""
        self._drive(self._resign(in_thread=True, for_good=True))

    def leader(self) -> LockInfo | None:
        """Who leads, by the database; None if nobody does."""
        return self._lock._drive(self._who_leads())

    def observe(self, every: float = 1.0) -> Iterator[Term]:
        """Yield the present `Term`, then each change of it, also that nobody leads; without end.

        It reads the row every so many seconds; a term that is shorter may be missed. Raises LockStoreError.
        """
        known: Term | None = None
        while True:
            yield (known := self._drive(self._next_term(known, every)))

    def run(self, body: Callable[[int], None]) -> Callable[[], None]:
        """Decorate `body(term)`: the result campaigns, leads by calling `body`, resigns, and begins anew.

        It returns after `stop()`, and raises what `body` raises, after the term has ended. A body whose `check()` says
        that it was deposed is left for the next campaign, and a database that fails is asked again.
        """
        if inspect.iscoroutinefunction(body):
            raise TypeError(f"{body!r} is a coroutine function: let the leader of an async engine run it")

        @functools.wraps(body)
        def lead() -> None:
            if self.options.interrupt:
                refuse_interrupt()
            while self._stopped_in is not runtime.current:
                self._drive(*self._driving(self._turn, body))

        return lead

    @block_begin
    def __enter__(self, its: Loaded) -> Self:
        if self.options.interrupt:
            refuse_interrupt()
        self._drive(*self._driving(self._enter, its))
        return self


class AsyncLeader(BaseLeader, Awaiting):
    """A candidate whose methods are coroutines; see SyncLeader for what each does.

    `self` may be any leader, so that a synchronous one can use these methods as its asynchronous twins.
    """

    async def campaign(self: BaseLeader, timeout: Seconds | None = None) -> bool:
        """Wait until this object leads; False if the time was up, or if the candidacy was withdrawn."""
        return bool(await self._adrive(*self._driving(self._campaign, valid_timeout(timeout))))

    async def resign(self: BaseLeader) -> None:
        """End the term, or withdraw the candidacy; without either, nothing happens."""
        await self._adrive(self._resign())

    async def stop(self: BaseLeader) -> None:
        """Resign for good: a function of `run` returns, and this object campaigns no more."""
        await self._adrive(self._resign(for_good=True))

    async def leader(self: BaseLeader) -> LockInfo | None:
        """Who leads, by the database; None if nobody does."""
        return await self._lock._adrive(self._who_leads())

    async def observe(self: BaseLeader, every: float = 1.0) -> AsyncIterator[Term]:
        """Yield the present `Term`, then each change of it, also that nobody leads; without end."""
        known: Term | None = None
        while True:
            yield (known := await self._adrive(self._next_term(known, every)))

    def run(
        self: BaseLeader, body: Callable[[int], Coroutine[Any, Any, None]]
    ) -> Callable[[], Coroutine[Any, Any, None]]:
        """Decorate `async def body(term)`: see SyncLeader.run. The result is a coroutine function."""
        if not inspect.iscoroutinefunction(body):
            raise TypeError(f"{body!r} is not a coroutine function: let the leader of a sync engine run it")

        @functools.wraps(body)
        async def lead() -> None:
            while self._stopped_in is not runtime.current:
                await self._adrive(*self._driving(self._turn, body))

        return lead

    @block_begin
    async def __aenter__(self: L, its: Loaded) -> L:  # noqa: PYI019 - any leader may use it
        await self._adrive(*self._driving(self._enter, its))
        return self
