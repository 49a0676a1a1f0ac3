"""Leader election: of many candidates for one name, one leads at a time, for a term.

A term is a tenure of the lock on that name, and its number is the fence of that tenure. Candidates are elected first
come, first served, by the queue of the key. The leader object owns the tenure: any thread may ask it, or resign.

Rule: the belief ends before the term. `is_leader` turns False a margin before the lease ends, and before the statement
of a resignation is sent. What runs for the leader (a body) ends before a resignation releases the key.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import sys
import threading
import time
import weakref
from collections.abc import AsyncIterator, Callable, Generator, Iterator
from enum import Enum
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Self, TypedDict, TypeVar, cast

from dblock.core import clock, runtime, timing
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
from dblock.core.holding.flow import Flow, Hold, current_task
from dblock.core.lock import entering, leaving, operations
from dblock.core.lock.base import BaseLock
from dblock.core.lock.bookkeeping import forget
from dblock.core.lock.failures import timed_out
from dblock.core.lock.locks import gives_way, refuse_interrupt, refuses, was_ours
from dblock.core.log import warn
from dblock.core.options import unknown_options
from dblock.core.protocol.sending import pauses
from dblock.core.protocol.steps import Sleep, Step, Steps, Wait
from dblock.core.runtime import current_flow
from dblock.core.validation import valid_timeout
from dblock.core.values import LockInfo, Seconds
from dblock.core.wakeup.registry import Wakeup

T = TypeVar("T")
Body = Callable[[int], Any]
Told = Callable[[Any], object]
Deposed = Callable[[Any, Reason], object]

TTL: Final = 15.0
"""Seconds after which another candidate is elected, by default, if the leader has died."""


class Stage(Enum):
    """What a leader object does."""

    IDLE = "neither a candidate nor the leader"
    CAMPAIGNING = "a candidate: its take of the key is under way, or waits"
    LEADING = "elected; the lease may be over by now"
    RESIGNING = "believes no more that it leads; the key is not released yet"


MOVES: Final = {
    Stage.IDLE: {Stage.CAMPAIGNING},
    Stage.CAMPAIGNING: {Stage.LEADING, Stage.IDLE},
    Stage.LEADING: {Stage.RESIGNING},
    Stage.RESIGNING: {Stage.IDLE},
}
"""The legal moves."""


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


class _Withdrawn(BaseException):
    """Thrown into the steps of a campaign that `resign()` ends; they clean up as after any interrupt."""


class _NotYetReleased(LockError):
    """Another flow resigns: it waits for the end of the body, or sends the release."""


class _Running:
    """A body that runs for the leader: the block of a `with`, or a call of `run`'s function."""

    def __init__(self) -> None:
        self.flow = current_flow()
        self.task = current_task()
        self.inside = False
        """Whether the code of the body runs, which `interrupt=True` may cancel."""
        self.over = False
        # No Event: its set() and wait(), interrupted by a signal handler, leave its lock locked.
        self._gate = threading.Lock()
        _ = self._gate.acquire()

    def can_run(self) -> bool:
        """Whether it is not over, and its thread lives, or its task on an open event loop."""
        return not self.over and not self.flow.ended()

    def end(self) -> None:
        """It is over."""
        self.over = True
        with contextlib.suppress(RuntimeError):
            self._gate.release()

    def wait(self) -> None:
        """Return when it is over, or can run no more; the gate opens for one waiter, the others poll."""
        while self.can_run():
            _ = self._gate.acquire(timeout=timing.DEFAULT.local_poll)


class BaseLeader:
    """A candidate for the leadership of a name, apart from how its statements are run."""

    def __init__(
        self,
        make_lock: Callable[..., BaseLock],
        name: str,
        *,
        ttl: Seconds = TTL,
        timeout: Seconds | None = None,
        on_elected: Told | None = None,
        on_deposed: Deposed | None = None,
        on_at_risk: Told | None = None,
        on_revoke: Callable[[Any, str], object] | None = None,
        interrupt: bool = False,
        **options: Any,
    ) -> None:
        """`make_lock(name, **options)` makes a lock of the face."""
        if unknown := options.keys() - Options.__annotations__.keys():
            raise unknown_options(sorted(unknown), Options.__annotations__, "db_leader")
        this = weakref.ref(self)  # so that the lease of a leader object that was dropped is renewed no more
        for handler, what in ((on_elected, "on_elected"), (on_deposed, "on_deposed")):
            if handler is not None and not callable(handler):
                raise TypeError(f"{what} is a function or None, not {handler!r}")
        lock: Any = make_lock(
            name,
            ttl=ttl,
            timeout=timeout,
            release="now",
            slow_wait=None,
            on_lost=on_deposed and functools.partial(_tell, this, on_deposed),
            on_at_risk=on_at_risk and functools.partial(_tell, this, on_at_risk),
            on_revoke=on_revoke and functools.partial(_tell, this, on_revoke),
            **options,
        )
        lock._stands_by = True
        lock._interrupt_body = functools.partial(_interrupt_body, this)
        self._lock = lock
        self._on_elected = on_elected
        self._interrupt = interrupt
        self._begin_anew()

    def _begin_anew(self) -> None:
        """Lead nothing, and be no candidate."""
        self._guard = threading.RLock()  # a signal handler may resign
        self._stopped = False
        self._runtime = runtime.current
        """That of the process in which it began; a forked child has another."""
        this = weakref.ref(self)
        self._flow: Flow = runtime.current.flows.of_object(f"leader {self.name}", self, lambda: _is_idle(this()))
        self._lock._flow = self._flow
        self._stage = Stage.IDLE
        self._hold: Hold | None = None
        self._running: _Running | None = None
        self._withdrawn = False
        self._candidacy: object = None
        """Identifies the latest candidacy."""
        self._releasing = False
        """Whether a flow sends the release; no other one may."""
        self._wakeup: Wakeup | None = None

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
        self._refuse_unless_elected()
        self._lock.check()

    def _refuse_unless_elected(self) -> None:
        if self._stage is not Stage.LEADING or self._runtime is not runtime.current:
            why = "it was not elected, or has resigned"
            raise LockLost(f"this object does not lead {self.name!r}: {why}", key=self.name)

    def _leading(self) -> Hold | None:
        hold = self._hold
        if hold is None or self._stage is not Stage.LEADING or self._runtime is not runtime.current:
            return None
        return hold if hold.lease.remaining() > 0 else None

    def __repr__(self) -> str:
        does = f"leads, term {self.term}" if self.is_leader else "does not lead"
        return f"<{type(self).__name__} {self.name!r}: {does}>"

    # -- the moves

    def _move(self, stage: Stage) -> None:
        """Make a legal move; one that a signal handler of this very thread has overtaken is left out."""
        if stage in MOVES[self._stage]:
            self._stage = stage

    def _has_stopped(self) -> bool:
        self._leave_to_parent()
        return self._stopped

    def _stop(self) -> None:
        self._leave_to_parent()
        self._stopped = True

    def _begin(self, running: _Running | None, candidacy: object) -> Hold | None:
        """Become a candidate; a hold that is to be released before. `candidacy`: an object of the caller's own."""
        self._leave_to_parent()
        with self._guard:
            if self._stopped:
                raise LockError(f"stop() was called: this object is no candidate for {self.name!r} any more")
            if self._releasing or self._is_held_by_a_body():
                raise _NotYetReleased(f"resign() has not yet released {self.name!r}: wait for its end")
            if self._stage is Stage.LEADING and self._leading() is None:
                self._move(Stage.RESIGNING)  # deposed
            if self._stage in {Stage.CAMPAIGNING, Stage.LEADING}:
                does = "leads" if self._stage is Stage.LEADING else "is a candidate for"
                raise LockError(f"this object {does} {self.name!r} already: make a db_leader() for each candidate")
            unreleased, self._hold = self._hold or self._flow.holds.get((self._lock._store(), self.name)), None
            if unreleased is not None and unreleased.lease.remaining() <= 0:
                unreleased.entries = []
                forget(unreleased)
                unreleased = None
            if self._stage is Stage.RESIGNING:
                self._move(Stage.IDLE)
            self._withdrawn, self._wakeup, self._running, self._candidacy = False, None, running, candidacy
            self._move(Stage.CAMPAIGNING)
            return unreleased

    def _is_held_by_a_body(self) -> bool:
        """Whether a term that was resigned goes on while its body, in another flow, comes to its end."""
        body, hold = self._running, self._hold
        if self._stage is not Stage.RESIGNING or hold is None or hold.lease.remaining() <= 0:
            return False
        return body is not None and body.flow is not current_flow() and body.can_run()

    def _campaign(self, timeout: float | None, running: _Running | None) -> Steps[Hold | Refused | None]:
        """The hold of the term; the refusal if the time was up, None if the candidacy was withdrawn."""
        found, elected, candidacy = None, False, object()
        try:
            unreleased = self._begin(running, candidacy)
            if unreleased is not None:
                yield from leaving.release(self._lock) if unreleased.entries else leaving.leave_again(unreleased)
            found = yield from self._until_withdrawn(entering.acquire(self._lock, timeout, "with", self._flow))
        except _Withdrawn:
            pass
        finally:
            if self._candidacy is candidacy:  # else it was refused
                try:
                    elected = self._settle()
                except BaseException:  # interrupted
                    _ = self._settle()
                    raise
        if isinstance(found, Hold) and not elected:
            yield from self._release(found)
            return None
        return found

    def _settle(self) -> bool:
        """The end of a campaign, however it came; whether this object leads."""
        with self._guard:
            if self._stage is not Stage.CAMPAIGNING:  # an interrupt came after the first call
                return self._leading() is not None
            hold = self._flow.holds.get((self._lock._store(), self.name))
            self._hold = hold if hold is not None and hold.entries and hold.lease.remaining() > 0 else None
            self._move(Stage.LEADING if self._hold else Stage.IDLE)
            elected = self._hold is not None and not self._withdrawn
            if self._hold and self._withdrawn:  # while the take was under way
                self._move(Stage.RESIGNING)
            if not elected:
                self._running = None
            return elected

    def _until_withdrawn(self, steps: Steps[T]) -> Generator[Step, Any, T]:
        """The steps; once the candidacy is withdrawn, their next wait is interrupted.

        A bare `yield`, against the rule of `protocol.steps`: it stands between the steps and whatever drives them.
        """
        reply: Any = None
        error: BaseException | None = None
        interrupted = False

        def is_due(step: Step) -> bool:
            return self._withdrawn and not interrupted and isinstance(step, (Wait, Sleep))

        while True:
            try:
                step = steps.send(reply) if error is None else steps.throw(error)
            except StopIteration as done:
                result: T = done.value
                return result
            reply = error = None
            try:
                if isinstance(step, Wait):
                    self._wakeup = step.wakeup  # before the flag is read: a resignation sets it, and then notifies
                if not is_due(step):
                    reply = yield step
                if is_due(step):
                    interrupted, error = True, _Withdrawn()
            except GeneratorExit:
                steps.close()
                raise
            except BaseException as raised:  # noqa: BLE001 - it is for the steps
                error = raised

    def _begin_to_resign(self) -> tuple[Hold | None, _Running | None]:
        """Believe no more; the hold of the term that ends, and its body if that runs in another flow."""
        self._leave_to_parent()
        with self._guard:
            if self._stage is Stage.CAMPAIGNING:
                self._withdrawn = True
                if self._wakeup is not None:
                    self._wakeup.notify()
            hold, running = self._hold, self._running
            if running is not None and (running.flow is current_flow() or not running.can_run()):
                running = None
            if hold is not None and running is None:
                hold.lease.renewing = False  # nobody relies on it, and an interrupt may prevent the release
            if self._stage is Stage.LEADING:
                self._move(Stage.RESIGNING)
            if self._stage is not Stage.RESIGNING:
                return None, None
        if running is not None:
            self._interrupt_body()
        return hold, running

    def _release(self, hold: Hold | None) -> Steps[None]:
        """Release the key of that term, which was resigned, unless another flow does or has done.

        Raises LockLost if the term was over.
        """
        claimed, over = False, False
        try:
            with self._guard:
                if hold is None or self._hold is not hold or self._stage is not Stage.RESIGNING or self._releasing:
                    return
                claimed = self._releasing = True
            yield from leaving.release(self._lock) if hold.entries else leaving.leave_again(hold)
            over = True
        except LockLost:
            over = True
            raise
        except (GeneratorExit, LockError):  # the lease is renewed no more; resign() can be called again
            raise
        except BaseException:
            if claimed and hold is not None and hold.entries:  # interrupted before the release began
                with contextlib.suppress(LockError):
                    yield from leaving.release(self._lock)
            over = claimed
            raise
        finally:
            if claimed:
                self._releasing = False
                if over and self._hold is hold:
                    self._hold, self._stage = None, Stage.IDLE

    def _end(self, running: _Running) -> Steps[None]:
        """End the term of a body."""
        running.inside = False
        self._leave_to_parent()
        with self._guard:
            if self._running is not running:  # the body has resigned itself, or this is a forked child
                return
            if self._stage is Stage.LEADING:
                self._move(Stage.RESIGNING)
            hold = self._hold
        yield from self._release(hold)

    def _ran(self, running: _Running) -> None:
        """What ran for the leader has ended."""
        running.end()
        if self._running is running:
            self._running = None

    def _mine(self) -> _Running | None:
        """The body that this flow runs."""
        running = self._running
        return running if running is not None and running.flow is current_flow() else None

    def _interrupt_body(self) -> None:
        """Cancel the asyncio task of the body, with `interrupt=True`."""
        running, hold = self._running, self._hold
        if not self._interrupt or running is None or running.task is None or hold is None:
            return

        def cancel() -> None:
            if running.inside and not hold.interrupted:
                hold.interrupted = True
                running.task.cancel()

        with contextlib.suppress(RuntimeError):  # the loop is closed
            running.task.get_loop().call_soon_threadsafe(cancel)

    def _withdrew(self) -> LockError:
        return LockError(f"the candidacy for {self.name!r} was withdrawn by resign()", key=self.name)


def _interrupt_body(this: Callable[[], BaseLeader | None], _: Hold) -> None:
    """Called by the watching thread when the term has ended by itself."""
    leader = this()
    if leader is not None:
        leader._interrupt_body()


def _tell(
    this: Callable[[], BaseLeader | None], handler: Callable[..., object], lock: BaseLock, *given: object
) -> None:
    leader = this()
    if leader is not None:
        _ = handler(leader, *given)


class SyncLeader(BaseLeader):
    """A candidate whose methods block the calling thread."""

    def campaign(self, timeout: Seconds | None = None) -> bool:
        """Wait until this object leads: its place in the queue of candidates is kept meanwhile.

        `timeout` is in seconds; None, the default, waits for ever. Returns False if the time was up, or if `resign()`
        withdrew the candidacy. `on_elected` is called before this returns; if it fails, the term ends.

        Raises LockStoreError if the database fails, LockError if this object leads or is a candidate already.
        """
        wait = valid_timeout(timeout)
        try:
            found = self._lock._drive(self._campaign(wait, None))
        except LockTimeout:  # waiting would have been pointless
            if wait is None:
                raise
            return False
        return isinstance(found, Hold) and self._tell_elected(None)

    def resign(self) -> None:
        """End the term, or withdraw the candidacy; without either, nothing happens.

        `is_leader` is False at once. If a body runs in another thread or task, this waits for its end, and the key is
        released then. Raises LockStoreError if the database fails: call it again, or the lease ends by itself.
        """
        self._refuse_to_wait()
        term, running = self._begin_to_resign()
        if running is not None:
            running.wait()
        with contextlib.suppress(LockLost):  # on_deposed and check() have told
            self._lock._drive(self._release(term))

    def stop(self) -> None:
        """Resign for good: a function of `run` returns, and this object campaigns no more."""
        self._refuse_to_wait()
        self._stop()
        self.resign()

    def _refuse_to_wait(self) -> None:
        """Raise SynchronousOnlyOperation where a resignation would block an event loop."""
        waited = self._running
        if waited is not None and waited.task is not None and waited.task.get_loop() is _running_loop():
            raise SynchronousOnlyOperation(
                "this would wait for a task of the running event loop: await aresign(), astop()"
            )
        self._lock._drive(_nothing())  # refuses what may not block

    def leader(self) -> LockInfo | None:
        """Who leads, by the database; None if nobody does."""
        return _who_leads(self._lock._drive(operations.inspect(self._lock)))

    def observe(self, every: float = 1.0) -> Iterator[Term]:
        """Yield the present `Term`, then each change of it, also that nobody leads; without end.

        It reads the row every so many seconds; a term that is shorter may be missed. Raises LockStoreError.
        """
        known: Term | None = None
        while True:
            term = _term_of(self.leader())
            if known is None or term.number != known.number:
                known = term
                yield term
            time.sleep(every)

    def run(self, body: Body) -> Callable[[], None]:
        """Decorate `body(term)`: the result campaigns, leads by calling `body`, resigns, and begins anew.

        It returns after `stop()`, and raises what `body` raises, after the term has ended. A body whose `check()` says
        that it was deposed is left for the next campaign, and a database that fails is asked again.
        """
        if inspect.iscoroutinefunction(body):
            raise TypeError(f"{body!r} is a coroutine function: let the leader of an async engine run it")
        _refuse_other_bodies(body)

        @functools.wraps(body)
        def lead() -> None:
            growing = pauses(timing.DEFAULT.attention)
            while not self._has_stopped():
                running = _Running()
                try:
                    try:
                        elected = isinstance(self._enter(None, running), Hold)
                    except LockStoreError as error:
                        warn("cannot campaign for %r, and will try again: %s", self.name, error)
                        self._pause(next(growing))
                        continue
                    except _NotYetReleased:
                        self._pause(timing.DEFAULT.local_poll)
                        continue
                    except LockError:
                        if self._has_stopped():
                            return
                        raise
                    if elected:
                        growing = pauses(timing.DEFAULT.attention)
                        self._lead(body, running)
                except BaseException:  # interrupted, perhaps before the body began
                    with contextlib.suppress(LockError):
                        self._exit(running)
                    raise

        return lead

    def _pause(self, seconds: float) -> None:
        until = clock.now() + seconds
        while not self._stopped and (left := until - clock.now()) > 0:
            time.sleep(min(left, timing.DEFAULT.local_poll))

    def _lead(self, body: Body, running: _Running) -> None:
        failed: BaseException | None = None
        try:
            if (term := self.term) is not None:
                _ = body(term)
        except BaseException as error:
            failed = error
            if not _is_deposition(error, self):
                raise
        finally:
            try:
                self._exit(running)
            except LockError as late:
                _say_late(late, failed)

    def _enter(self, timeout: float | None, running: _Running) -> Hold | Refused | None:
        """Begin a body: it is known from the campaign on, so that no resignation overlooks it."""
        refuse_interrupt(self._interrupt)
        found: Hold | Refused | None = self._lock._drive(self._campaign(timeout, running))
        if isinstance(found, Hold):
            _ = self._tell_elected(running)
        return found

    def _exit(self, running: _Running | None) -> None:
        if running is None:  # the body has resigned itself
            return
        try:
            self._lock._drive(self._end(running))
        except LockError:
            raise
        except BaseException:  # interrupted, perhaps before it began
            with contextlib.suppress(LockError):
                self._lock._drive(self._end(running))
            raise
        finally:
            self._ran(running)

    def _tell_elected(self, running: _Running | None) -> bool:
        """Call `on_elected`; True. If that fails, the term ends."""
        if self._on_elected is not None:
            try:
                _ = self._on_elected(self)
            except BaseException as error:
                try:
                    self.resign() if running is None else self._exit(running)
                except LockError as late:
                    error.add_note(str(late))
                raise
        return True

    def __enter__(self) -> Self:
        running = _Running()
        try:
            found = self._enter(self._lock._timeout, running)
            if isinstance(found, Refused):
                raise self._lock._drive(timed_out(self._lock, found)) from found.busy  # noqa: TRY301
            if self._stage is not Stage.LEADING:
                raise self._withdrew()  # noqa: TRY301 - the term ends below
        except BaseException:
            with contextlib.suppress(LockError):
                self._exit(running)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self._exit(self._mine())
        except LockError as late:
            if not gives_way(late, error):
                raise
        except BaseException:
            with contextlib.suppress(LockError):
                self._exit(self._mine())
            raise

    if not TYPE_CHECKING:  # hidden from type checkers
        __aenter__ = __aexit__ = refuses("this leader blocks its thread: use `with`, or the leader of an AsyncEngine")


class AsyncLeader(BaseLeader):
    """A candidate whose methods are coroutines; see SyncLeader for what each does.

    `self` may be any leader, so that a synchronous one can use these methods as its asynchronous twins.
    """

    async def campaign(self: BaseLeader, timeout: Seconds | None = None) -> bool:
        """Wait until this object leads; False if the time was up, or if the candidacy was withdrawn."""
        wait = valid_timeout(timeout)
        try:
            found = await self._lock._adrive(self._campaign(wait, None))
        except LockTimeout:
            if wait is None:
                raise
            return False
        return isinstance(found, Hold) and await _atell_elected(self, None)

    async def resign(self: BaseLeader) -> None:
        """End the term, or withdraw the candidacy; without either, nothing happens."""
        term, running = self._begin_to_resign()
        if running is not None:
            while running.can_run():  # in another task, loop or thread
                await _sleep(2 * timing.DEFAULT.near)
        with contextlib.suppress(LockLost):
            await self._lock._adrive(self._release(term), undisturbed=True)

    async def stop(self: BaseLeader) -> None:
        """Resign for good: a function of `run` returns, and this object campaigns no more."""
        self._stop()
        await AsyncLeader.resign(self)

    async def leader(self: BaseLeader) -> LockInfo | None:
        """Who leads, by the database; None if nobody does."""
        return _who_leads(await self._lock._adrive(operations.inspect(self._lock)))

    async def observe(self: BaseLeader, every: float = 1.0) -> AsyncIterator[Term]:
        """Yield the present `Term`, then each change of it, also that nobody leads; without end."""
        known: Term | None = None
        while True:
            term = _term_of(await AsyncLeader.leader(self))
            if known is None or term.number != known.number:
                known = term
                yield term
            await _sleep(every)

    def run(self: BaseLeader, body: Body) -> Callable[[], Any]:
        """Decorate `async def body(term)`: see SyncLeader.run. The result is a coroutine function."""
        if not inspect.iscoroutinefunction(body):
            raise TypeError(f"{body!r} is not a coroutine function: let the leader of a sync engine run it")
        _refuse_other_bodies(body)

        @functools.wraps(body)
        async def lead() -> None:
            growing = pauses(timing.DEFAULT.attention)
            while not self._has_stopped():
                running = _Running()
                try:
                    try:
                        elected = isinstance(await _aenter(self, None, running), Hold)
                    except LockStoreError as error:
                        warn("cannot campaign for %r, and will try again: %s", self.name, error)
                        await _sleep(next(growing))
                        continue
                    except _NotYetReleased:
                        await _sleep(timing.DEFAULT.local_poll)
                        continue
                    except LockError:
                        if self._has_stopped():
                            return
                        raise
                    if elected:
                        growing = pauses(timing.DEFAULT.attention)
                        await _alead(self, body, running)
                except BaseException:  # interrupted, perhaps before the body began
                    with contextlib.suppress(LockError):
                        await _aexit(self, running)
                    raise

        return lead

    async def __aenter__(self) -> Self:
        return await aenter(self)

    async def __aexit__(
        self: BaseLeader, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        running, hold, late = self._mine(), self._hold, None
        if running is None:  # the body has resigned itself
            return
        try:
            await _aexit(self, running)
        except LockError as raised:
            late = raised
        if hold is not None and was_ours(hold, error):
            late = late or LockError(f"the term of {self.name!r} was ended by resign()", key=self.name)
            raise late from error
        if late is not None and not gives_way(late, error):
            raise late

    if not TYPE_CHECKING:  # hidden from type checkers
        __enter__ = __exit__ = refuses("this is the leader of an event loop: use `async with`")


L = TypeVar("L", bound=BaseLeader)


async def aenter(leader: L) -> L:
    """Begin an `async with`."""
    running = _Running()
    try:
        found = await _aenter(leader, leader._lock._timeout, running)
        if isinstance(found, Refused):
            raise (await leader._lock._adrive(timed_out(leader._lock, found))) from found.busy  # noqa: TRY301
        if leader._stage is not Stage.LEADING:
            raise leader._withdrew()  # noqa: TRY301 - the term ends below
    except BaseException:
        with contextlib.suppress(LockError):
            await _aexit(leader, running)
        raise
    return leader


async def _aenter(leader: BaseLeader, timeout: float | None, running: _Running) -> Hold | Refused | None:
    found = await leader._lock._adrive(leader._campaign(timeout, running))
    if isinstance(found, Hold):
        _ = await _atell_elected(leader, running)
        found.cancelling = current_task().cancelling()
        running.inside = True
    return cast("Hold | Refused | None", found)


async def _aexit(leader: BaseLeader, running: _Running) -> None:
    running.inside = False
    try:
        await leader._lock._adrive(leader._end(running), undisturbed=True)
    except LockError:
        raise
    except BaseException:  # interrupted, perhaps before it began
        with contextlib.suppress(LockError):
            await leader._lock._adrive(leader._end(running), undisturbed=True)
        raise
    finally:
        leader._ran(running)


async def _atell_elected(leader: BaseLeader, running: _Running | None) -> bool:
    if leader._on_elected is not None:
        try:
            told = leader._on_elected(leader)
            if inspect.isawaitable(told):
                await told
        except BaseException as error:
            try:
                await (AsyncLeader.resign(leader) if running is None else _aexit(leader, running))
            except LockError as late:
                error.add_note(str(late))
            raise
    return True


async def _alead(leader: BaseLeader, body: Body, running: _Running) -> None:
    failed: BaseException | None = None
    hold = leader._hold
    try:
        if (term := leader.term) is not None:
            await body(term)
    except BaseException as error:
        failed = error
        if not ((hold is not None and was_ours(hold, error)) or _is_deposition(error, leader)):
            raise
    finally:
        running.inside = False
        if hold is not None:
            _ = was_ours(hold, None)  # the body has ended in spite of a cancellation
        try:
            await _aexit(leader, running)
        except LockError as late:
            _say_late(late, failed)


async def _sleep(seconds: float) -> None:
    import asyncio  # noqa: PLC0415 - a third of the core's import time

    await asyncio.sleep(seconds)


def _refuse_other_bodies(body: Body) -> None:
    try:
        _ = inspect.signature(body).bind(1)
    except TypeError as error:
        raise TypeError(f"leader.run decorates a function of the term, `def body(term)`: {body!r}: {error}") from None


def _is_deposition(error: BaseException, leader: BaseLeader) -> bool:
    """Whether it says that the term is over, or is to end, so that the next campaign is the answer to it."""
    if isinstance(error, BaseExceptionGroup):
        return all(_is_deposition(each, leader) for each in error.exceptions)
    told = isinstance(error, (LockLost, LockRevoked)) and error.key == leader.name
    return told and (leader._leading() is None or leader._lock.revoked is not None)


def _is_idle(leader: BaseLeader | None) -> bool:
    """Whether the process may release the key as it ends: no body runs under it."""
    return leader is None or leader._running is None


def _running_loop() -> Any:
    """The event loop that runs in this thread, or None."""
    asyncio = sys.modules.get("asyncio.events")
    return None if asyncio is None else asyncio._get_running_loop()


def _nothing() -> Steps[None]:
    """No steps: a face that may not block here refuses to drive them."""
    yield from ()


def _say_late(late: LockError, failed: BaseException | None) -> None:
    """Log that a term could not be ended, or add it to the body's exception; a loss has been logged already."""
    if failed is not None:
        failed.add_note(str(late))
    elif not isinstance(late, LockLost):
        warn("could not end a term, which ends with its lease: %s", late)


def _who_leads(info: LockInfo | None) -> LockInfo | None:
    return info if info is not None and info.state == "held" and info.owner else None  # no owner during `min_hold`


def _term_of(leader: LockInfo | None) -> Term:
    return Term(None if leader is None else leader.fence, leader)
