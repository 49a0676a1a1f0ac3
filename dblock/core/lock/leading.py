"""Leader election: of many candidates for one name, one leads at a time, for a term.

A term is a tenure of the lock on that name, and its number is the fence of that tenure. Candidates are elected first
come, first served, by the queue of the key. The leader object owns the tenure: any thread may ask it, or resign.

The steps of each method are written once; SyncLeader and AsyncLeader drive them.

Rule: the belief ends before the term. `is_leader` turns False a margin before the lease ends, and before the statement
of a resignation is sent. What runs for the leader (a body) ends before a resignation releases the key.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import sys
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
from dblock.core.lock.candidacy import Candidacy, say_late
from dblock.core.lock.locks import gives_way, of_the_end, refuse_interrupt, refuses, was_ours
from dblock.core.lock.refusals import timed_out
from dblock.core.log import warn
from dblock.core.options import unknown_options
from dblock.core.protocol.sending import pauses
from dblock.core.protocol.steps import Cancel, Cancelled, Steps, call, wait
from dblock.core.validation import valid_timeout
from dblock.core.values import LockInfo, Seconds
from dblock.core.wakeup.registry import Wakeup

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


_Block = tuple[Callable[[], Any], Candidacy]


def _tell(
    this: Callable[[], BaseLeader | None], handler: Callable[..., object], lock: BaseLock, *given: object
) -> None:
    leader = this()
    if leader is not None:
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
        self._on_elected, self._interrupt = options.pop("on_elected", None), options.pop("interrupt", False)
        given: dict[str, Any] = {"ttl": TTL, "timeout": None, **options}
        this = weakref.ref(self)  # a leader object that was dropped hears of nothing
        for of_lock, ours in (("on_lost", "on_deposed"), ("on_at_risk", "on_at_risk"), ("on_revoke", "on_revoke")):
            handler = given.pop(ours, None)
            given[of_lock] = handler and functools.partial(_tell, this, handler)
        lock: Any = make_lock(name, release="now", slow_wait=None, **given)
        lock._stands_by = True
        self._lock = lock
        """Whose copies the candidacies take; it is never held itself."""
        self._blocks: list[_Block] = []
        """The blocks without an end of their own, as an ExitStack begins them, each behind a reference to its flow."""
        self._begin_anew()

    def _begin_anew(self) -> None:
        """Lead nothing, and be no candidate."""
        self._guard = threading.RLock()  # a signal handler may resign
        self._stopped = False
        self._runtime = runtime.current
        """That of the process in which it began; a forked child has another."""
        self._candidacy: Candidacy | None = None
        """The latest."""

    def _leave_to_parent(self) -> None:
        """In a forked child: the term and the candidacy are the parent's."""
        if self._runtime is not runtime.current:
            self._begin_anew()

    # -- what is known without I/O

    @property
    def name(self) -> str:
        """The name of what is led, and the key of the lock on it."""
        name: str = self._lock.key
        return name

    @property
    def is_leader(self) -> bool:
        """Whether this object surely leads at this moment, by the local clock alone; no I/O."""
        return self._leading() is not None

    @property
    def term(self) -> int | None:
        """The number of the term, greater than every earlier one of the name (the fence); None unless leading."""
        hold = self._leading()
        return None if hold is None else hold.tenure.fence

    @property
    def remaining(self) -> float:
        """Seconds for which this object may still rely on leading, 0.0 if it may not; by the local clock alone."""
        hold = self._leading()
        return 0.0 if hold is None else hold.lease.remaining()

    def check(self) -> None:
        """Raise LockLost unless this object surely leads, LockRevoked if it was asked to resign; no I/O."""
        self._elected().check()

    def _elected(self) -> Any:
        """The lock of the term; raises LockLost without one, or if it was resigned."""
        candidacy = self._candidacy
        elected = candidacy is not None and candidacy.hold is not None and not candidacy.resigned
        if candidacy is None or not elected or self._runtime is not runtime.current:
            why = "it was not elected, or has resigned"
            raise LockLost(f"this object does not lead {self.name!r}: {why}", key=self.name)
        return candidacy.lock

    def _leading(self) -> Hold | None:
        candidacy = self._candidacy
        if candidacy is None or not candidacy.leads() or self._runtime is not runtime.current:
            return None
        return candidacy.hold

    def __repr__(self) -> str:
        does = f"leads, term {self.term}" if self.is_leader else "does not lead"
        return f"<{type(self).__name__} {self.name!r}: {does}>"

    # -- a candidacy, from its beginning to its end

    def _driving(
        self, steps: Callable[..., Steps[T]], *arguments: object, has_body: bool = False
    ) -> tuple[Steps[T], Cancel]:
        """The steps that drive a new candidacy, and the flag that withdraws it."""
        candidacy = Candidacy(self._lock, interrupt=self._interrupt, has_body=has_body)
        return candidacy.drive(steps(candidacy, *arguments)), candidacy.cancel

    def _begin(self, candidacy: Candidacy) -> Steps[bool]:
        """Become a candidate, unless that was withdrawn; a key whose release has failed is released before."""
        self._leave_to_parent()
        with self._guard:
            former = self._candidacy
            if former is not None and former is not candidacy:
                self._refuse_beside(former)
            self._candidacy = candidacy
            if self._stopped:  # read last: stop() says so first, and then ends what it finds
                self._candidacy = former
                raise LockError(f"stop() was called: this object is no candidate for {self.name!r} any more")
        while former is not None and former.holds() and not former.leads():
            if (late := (yield from former.release())) is not None and former.holds():
                raise late
            if former.releasing:  # by another flow
                yield from wait(self._lock._store(), timing.DEFAULT.local_poll, Wakeup())
        return not candidacy.cancel.is_set

    def _refuse_beside(self, former: Candidacy) -> None:
        if former.resigned and former.holds() and former.is_driven_elsewhere():
            raise LockError(f"resign() has not yet released {self.name!r}: wait for its end")
        if former.leads() or (former.hold is None and former.is_driven()):
            does = "is a candidate for" if former.hold is None else "leads"
            raise LockError(f"this object {does} {self.name!r} already: make a db_leader() for each candidate")

    def _elect(self, candidacy: Candidacy, timeout: float | None) -> Steps[Hold | Refused | None]:
        """The hold of the term, once `on_elected` was called; the refusal if the time was up, None if withdrawn."""
        try:
            if not (yield from self._begin(candidacy)):
                return None
            found = yield from entering.acquire(candidacy.lock, timeout, "with", end=candidacy.end_of_block)
        except Cancelled:
            return None
        if isinstance(found, Refused):
            return found
        if not candidacy.elect(found):  # withdrawn while the take was under way
            say_late((yield from candidacy.end()), None)
            return None
        if self._on_elected is not None and (error := (yield from call(self._on_elected, self)).error) is not None:
            say_late((yield from candidacy.end()), error)
            raise error
        return found

    # -- the methods

    def _campaign(self, candidacy: Candidacy, timeout: float | None) -> Steps[bool]:
        try:
            return isinstance((yield from self._elect(candidacy, timeout)), Hold)
        except LockTimeout:  # waiting would have been pointless
            if timeout is None:
                raise
            return False

    def _resign(self, *, for_good: bool = False) -> Steps[None]:
        """End the term that this object has now, or withdraw its candidacy."""
        self._leave_to_parent()
        if for_good:
            self._stopped = True
        candidacy = self._candidacy
        if candidacy is None or not candidacy.withdraw():
            return
        wakeup = Wakeup()
        candidacy.waiting.append(wakeup)
        while candidacy.is_driven_elsewhere():
            yield from wait(self._lock._store(), timing.DEFAULT.local_poll, wakeup)
        late = yield from candidacy.release()
        if late is not None and not isinstance(late, LockLost):  # of a loss on_deposed and check() have told
            raise late

    def _refuse_to_wait(self) -> None:
        """Raise SynchronousOnlyOperation where a resignation would block the event loop of the body."""
        task = None if self._candidacy is None else self._candidacy.task
        asyncio = sys.modules.get("asyncio.events")
        if task is not None and asyncio is not None and task.get_loop() is asyncio._get_running_loop():
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
                yield from wait(self._lock._store(), every, Wakeup())
            leader = yield from self._who_leads()
            term = Term(None if leader is None else leader.fence, leader)
            if known is None or term.number != known.number:
                return term

    def _has_stopped(self) -> bool:
        self._leave_to_parent()
        return self._stopped

    def _turn(self, candidacy: Candidacy, body: Body) -> Steps[None]:
        """One turn of `run`: campaign, through outages too, lead by calling the body, and resign."""
        growing = pauses(timing.DEFAULT.attention)
        while True:
            try:
                hold = yield from self._elect(candidacy, None)
                break
            except LockStoreError as away:
                warn("cannot campaign for %r, and will try again: %s", self.name, away)
            except LockError:
                if self._stopped:
                    return
                raise
            with contextlib.suppress(Cancelled):
                yield from wait(self._lock._store(), next(growing), Wakeup())
        if not isinstance(hold, Hold):
            return
        error: BaseException | None = None
        if candidacy.leads():
            candidacy.begin_body()
            error = (yield from call(body, hold.tenure.fence)).error
            candidacy.inside = False
        over = was_ours(hold, error) or error is None or _is_deposition(error, candidacy)
        say_late((yield from candidacy.end()), error)
        try:
            if error is not None and not over:
                raise error
        finally:
            del error  # it refers to this frame

    def _enter(self, candidacy: Candidacy, its: Loaded | None) -> Steps[None]:
        """Begin the block of a `with`, which has loaded `its`."""
        candidacy.end_of_block = its.end if its else None
        found = yield from self._elect(candidacy, self._lock._timeout)
        if isinstance(found, Refused):
            raise (yield from timed_out(candidacy.lock, found)) from found.busy
        if not candidacy.leads():
            raise LockError(f"the candidacy for {self.name!r} was withdrawn by resign()", key=self.name)
        candidacy.begin_body()
        (self._blocks if its is None else its.opened).append((candidacy.flow.ref, candidacy))

    def _leave(self, error: BaseException | None, opened: list[_Block] | None) -> Steps[None]:
        """End the block of a `with`; `error` is the body's, `opened`: the blocks of its end."""
        for blocks in (self._blocks, opened or []):
            blocks[:] = [block for block in blocks if block[1].driven]
        _, candidacy = innermost(opened or self._blocks, [self.name], "make a db_leader() for each block")
        late = yield from candidacy.drive(candidacy.end())
        if candidacy.hold is not None and was_ours(candidacy.hold, error):
            late = late or LockError(f"the term of {self.name!r} was ended by resign()", key=self.name)
            raise of_the_end(late) from error
        if late is not None and not gives_way(late, error):
            raise late


class SyncLeader(BaseLeader):
    """A candidate whose methods block the calling thread."""

    def campaign(self, timeout: Seconds | None = None) -> bool:
        """Wait until this object leads: its place in the queue of candidates is kept meanwhile.

        `timeout` is in seconds; None, the default, waits for ever. Returns False if the time was up, or if `resign()`
        withdrew the candidacy. `on_elected` is called before this returns; if it fails, the term ends.

        Raises LockStoreError if the database fails, LockError if this object leads or is a candidate already.
        """
        won: bool = self._lock._drive(*self._driving(self._campaign, valid_timeout(timeout)))
        return won

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
        info: LockInfo | None = self._lock._drive(self._who_leads())
        return info

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
            refuse_interrupt(self._interrupt)
            while not self._has_stopped():
                self._lock._drive(*self._driving(self._turn, body, has_body=True))

        return lead

    @block_begin
    def __enter__(self, its: Loaded | None = None) -> Self:
        refuse_interrupt(self._interrupt)
        self._lock._drive(*self._driving(self._enter, its, has_body=True))
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
        won: bool = await self._lock._adrive(*self._driving(self._campaign, valid_timeout(timeout)))
        return won

    async def resign(self: BaseLeader) -> None:
        """End the term, or withdraw the candidacy; without either, nothing happens."""
        await self._lock._adrive(self._resign())

    async def stop(self: BaseLeader) -> None:
        """Resign for good: a function of `run` returns, and this object campaigns no more."""
        await self._lock._adrive(self._resign(for_good=True))

    async def leader(self: BaseLeader) -> LockInfo | None:
        """Who leads, by the database; None if nobody does."""
        info: LockInfo | None = await self._lock._adrive(self._who_leads())
        return info

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
            while not self._has_stopped():
                await self._lock._adrive(*self._driving(self._turn, body, has_body=True))

        return lead

    @block_begin
    async def __aenter__(self, its: Loaded | None = None) -> Self:
        return await aenter(self, its)

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


L = TypeVar("L", bound=BaseLeader)


async def aenter(leader: L, its: Loaded | None) -> L:
    """Begin an `async with`, which has loaded `its`."""
    await leader._lock._adrive(*leader._driving(leader._enter, its, has_body=True))
    return leader


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
