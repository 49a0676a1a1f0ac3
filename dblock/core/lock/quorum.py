"""The majority lock: a key that is held in most of several independent databases.

`dblock.core.protocol.quorum` has the theory. An attempt runs as steps of the calling flow; the databases are asked by
threads or tasks (`dblock.core.protocol.asking`), so that a slow one delays nobody. What is held of each database is an
ordinary hold of the calling flow, which the watchdog renews; databases that did not grant, or were lost, are asked
again in the background.

Rule: a majority that was found lost is lost for good, whatever its databases say later. Whatever ends an attempt early,
what it took, and what it may have taken, is given back.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
import os
import random
import sys
import threading
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import EllipsisType, MappingProxyType, TracebackType
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple, NoReturn, Self, TypedDict, TypeVar, cast

from dblock.core import clock, runtime
from dblock.core.acquire import handover
from dblock.core.acquire.request import Refused
from dblock.core.errors import (
    LockError,
    LockLost,
    LockNotHeld,
    LockRevoked,
    LockStoreError,
    LockTimeout,
    Reason,
    StoreConflict,
    StoreUnanswered,
    UnsupportedDatabase,
)
from dblock.core.holding.flow import Block, Flow, Hold
from dblock.core.holding.handover_record import Bundle
from dblock.core.lock import entering, leaving, operations
from dblock.core.lock.base import BaseLock, Taking
from dblock.core.lock.entering import Granted
from dblock.core.lock.ignored import warn_if_ignored
from dblock.core.lock.key_template import Template
from dblock.core.lock.locks import Timeout, gives_way
from dblock.core.log import deliver, inform, warn
from dblock.core.protocol import quorum, tenures
from dblock.core.protocol.asking import Ask, Asks
from dblock.core.protocol.quorum import Answer, Majority, QuorumUnavailable, Round, What
from dblock.core.protocol.steps import Rows, Steps, sleep
from dblock.core.runtime import current_flow
from dblock.core.validation import acquire_timeout, valid_ttl
from dblock.core.values import Grant, LockInfo, Seconds, State
from dblock.core.wakeup.registry import Wakeup

if TYPE_CHECKING:
    from dblock.core.protocol.store import Store

T = TypeVar("T")
F = TypeVar("F", bound=Callable[..., Any])

ANSWER: Final = 0.5
"""Longest limit in seconds for the answer of one database, by default."""
PROBE: Final = 1.0
"""Seconds between two questions whether a database is alive in whose queue the flow waits."""
PAUSES: Final = (0.01, 0.3)
"""First and longest mean pause in seconds between two attempts."""
OF_ROWS: Final = frozenset({"ttl", "timeout", "label", "max_hold", "slow_wait"})
"""The options that each database's lock has; the others are the majority's."""


class Options(TypedDict, total=False):
    """The keyword arguments of `db_quorum_lock`, whose docstring explains them."""

    ttl: Seconds | None
    timeout: Seconds | EllipsisType | None
    answer: Seconds | None
    label: str
    on_lost: Callable[[Any, Reason], object] | None
    on_at_risk: Callable[[Any], object] | None
    max_hold: Seconds | None
    slow_wait: Seconds | None
    on_busy: Literal["raise", "skip"]
    otherwise: Any


class No(NamedTuple):
    """A database has not granted."""

    why: str
    held: LockInfo | None = None
    """The holder, if somebody else has it."""
    busy: bool = False
    """Whether it can be asked: others have the key."""


class Part(NamedTuple):
    """What is held of one database."""

    lock: BaseLock
    hold: Hold


Open = tuple["Flow", "Held"]
"""An open `with`: its flow, and what it has entered."""


class Held:
    """A majority that a flow holds, and all that its threads and callbacks need of it."""

    def __init__(self, lock: BaseQuorumLock, flow: Flow, locks: Sequence[BaseLock], fence: int) -> None:
        self.lock, self.flow, self.locks, self.fence = lock, flow.ref, locks, fence
        self.key, self.quorum = lock.key, lock._quorum
        self.ttl = lock._ttl
        self.parts: dict[int, Part] = {}
        self.entries = 1
        self.loss: Reason | None = None
        self.over = False
        """Whether it was left."""
        self.said: dict[str, str] = {}
        self.began = clock.now()
        self.process = os.getpid()
        self.loop: Any = sys.modules["asyncio"].get_running_loop() if locks[0]._store().asynchronous else None
        self._mutex = threading.RLock()  # a signal handler may run between any two lines
        self._growing = False
        """Whether missing databases will be asked again."""
        self._at_risk = False

    def remaining(self) -> float:
        """Seconds of trust left; 0.0 once it is lost."""
        with self._mutex:
            if self.loss is not None:
                return 0.0
            moments = (part.hold.lease.trusted_until for part in self.parts.values())
            left = quorum.trusted_until(moments, self.quorum) - clock.now()
            if left > 0:
                return left
            self._lose()
            return 0.0

    @property
    def state(self) -> State:
        """As of a lock: `held` if a majority of its leases are."""
        if self.remaining() <= 0:
            return "lost"
        good = sum(part.hold.lease.state == "held" for part in list(self.parts.values()))
        return "held" if good >= self.quorum else "at_risk"

    def _lose(self) -> None:
        reasons = [loss.reason for part in self.parts.values() if (loss := part.hold.lease.loss) is not None]
        self.loss = reasons[-1] if reasons else Reason.EXPIRED
        for part in self.parts.values():
            part.hold.lease.renewing = False
        if not self.over:
            warn("lost the majority lock on %r (fence %d): %s", self.key, self.fence, self.why())
            for call in self.lock._who_hears_of_loss(self.loss):
                deliver(call)

    def why(self) -> str:
        """Why it is lost, for people."""
        names, told = self.lock.names, dict(self.said)
        for number, part in self.parts.items():
            if (loss := part.hold.lease.loss) is not None:
                told[names[number]] = f"lost, {loss.reason}"
        return f"fewer than {self.quorum} of {len(names)} databases could be trusted: {_listed(told)}"

    def lost(self) -> LockLost:
        """The error for a majority that is over."""
        message = f"{self.key!r} (fence {self.fence}) is lost: {self.why()}"
        return LockLost(message, key=self.key, reason=self.loss or Reason.EXPIRED)

    def revoked(self) -> str | None:
        """By whom and why it was asked back in one of the databases."""
        return next((told for part in list(self.parts.values()) if (told := part.hold.revoked) is not None), None)

    # -- called from other threads

    def on_lost(self, number: int, _lock: object, reason: Reason) -> None:
        """A database is lost: perhaps all is; else it is taken again."""
        self.said[self.lock.names[number]] = f"lost, {reason}"
        if reason is Reason.RELEASED:  # by release_all()
            with self._mutex:
                if self.loss is None:
                    self._lose()
        elif self.remaining() > 0:
            self.grow_later(0.0)

    def on_at_risk(self, _lock: object) -> None:
        """A renewal is late in one of the databases."""
        if self.state != "at_risk":
            self._at_risk = False
        elif not self._at_risk:
            self._at_risk = True
            for call in self.lock._who_hears_of_risk():
                deliver(call)

    def is_live(self) -> bool:
        """Whether databases may be added: it is trusted, and its flow can still leave it."""
        flow = self.flow()
        alive = flow is not None and not flow.ended() and os.getpid() == self.process
        return alive and not self.over and clock.now() < self.began + self.lock._max_hold and self.remaining() > 0

    def missing(self) -> list[int]:
        """The databases that are not held."""
        return [
            number
            for number in range(len(self.locks))
            if number not in self.parts or self.parts[number].hold.lease.loss is not None
        ]

    def grow_later(self, seconds: float | None = None) -> None:
        """Ask the missing databases again after so many seconds, by default a third of the ttl; and so on."""
        if seconds is None and (self._growing or not self.missing()):
            return
        self._growing = True
        wait = self.ttl / 3 if seconds is None else seconds
        the_asks().scheduler.later(clock.now() + wait, self._grow)

    def _grow(self) -> None:
        self._growing = False
        if not self.is_live() or not self.missing():
            return
        if self.loop is None:
            self._ask_missing()
        else:
            with contextlib.suppress(RuntimeError):  # the loop is closed, and the flow with it
                self.loop.call_soon_threadsafe(self._ask_missing)
        self.grow_later()

    def _ask_missing(self) -> None:
        asks = the_asks()
        for number in self.missing():
            steps = self._take_again(number)
            _ = asks.ask(Ask(self.locks[number]._store(), steps, _nothing, Wakeup()))

    def _take_again(self, number: int) -> Steps[None]:
        """Take one more database, with the fence that the majority has at least."""
        lock, name = self.locks[number], self.lock.names[number]
        try:
            found = yield from take(lock, 0.0)
            if isinstance(found, No):
                self.said[name] = found.why
                return
            fence, until = max(self.fence, found.tenure.fence), clock.now() + self.lock._limit
            grant = yield from confirm(lock, found, fence, until)
        except LockStoreError as error:
            self.said[name] = _short(error)
            return
        with self._mutex:
            flow = self.flow()
            if grant is not None and flow is not None and self.is_live() and number in self.missing():
                self.parts[number] = Part(lock, (yield from _hold(lock, flow, grant)))
                self.said[name] = "granted"
                return
        yield from give_back(lock, found.tenure.owner)


def the_asks() -> Asks:
    """The asks of this process."""
    found = runtime.current.asks
    if found is None:
        found = runtime.current.asks = Asks()
    return found


# -- steps on one database


def take(lock: BaseLock, timeout: float | None, proposed: int = 0) -> Steps[Grant | No]:
    """Take the key in one database, if that counts (`quorum.standing`); with the proposed fence if it is free."""
    store = lock._store()
    database = store.database
    said: Rows = ()
    found: Grant | Refused | None = None
    likely = runtime.current.site(store).expects_contention(lock.key)
    if proposed and not likely and runtime.current.watchdog.hold_of(store, lock.key) is None and database.answers():
        found, said = yield from _take_at_once(lock, proposed)
    if found is None:
        found = yield from _take_or_wait(lock, timeout)
    if isinstance(found, Refused):
        return _refused(found)
    try:
        left = yield from quorum.standing(database, lock._ttl, database.now() + database.timing.single_try, said)
    except GeneratorExit:
        raise
    except BaseException:
        yield from give_back(lock, found.tenure.owner)
        raise
    if not left:
        return found
    yield from give_back(lock, found.tenure.owner)
    return No(f"new, or restarted: counts in {left:.1f} s")


def _take_at_once(lock: BaseLock, proposed: int) -> Steps[tuple[Grant | None, Rows]]:
    """Take a key that is free, with what its database says of itself."""
    store, flow = lock._store(), cast("Flow", lock._flow)
    database, request = store.database, entering.request_of(lock, store, flow, lock._ttl)
    owner = request.new_owner()
    try:
        until = database.now() + database.timing.single_try
        found = yield from quorum.take(database, request.parameters(owner), proposed, until)
    except StoreConflict:
        return None, ()
    except GeneratorExit:
        raise
    except BaseException as error:
        if isinstance(error, StoreUnanswered):
            _ = runtime.current.waiter_services(store).withdraw(lock.key, owner)
        elif not isinstance(error, LockStoreError):
            yield from give_back(lock, owner)
        raise
    return found or (None, ())


def _take_or_wait(lock: BaseLock, timeout: float | None) -> Steps[Grant | Refused]:
    store, flow = lock._store(), cast("Flow", lock._flow)
    return lock._take(
        Taking(
            runtime.current.site(store),
            entering.request_of(lock, store, flow, lock._ttl),
            timeout,
            functools.partial(runtime.current.waiter_services, store),
            held_in_process=runtime.current.watchdog.hold_of(store, lock.key) is not None,
            held=lambda: [each.tenure.owner for each in flow.holds.values() if not each.lease.loss],
            contended=None,
            slow_wait=lock._slow_wait,
        )
    )


def _refused(refused: Refused) -> No:
    holder, busy = refused
    if busy is not None:
        return No(_short(busy))
    if holder is not None and holder.state == "held":
        return No(f"held by {holder}", holder.masked(), busy=True)
    return No("others were faster, or a transaction guards it", busy=True)


def confirm(lock: BaseLock, grant: Grant, fence: int, until: float) -> Steps[Grant | None]:
    """Confirm a tenure; one that is not known to be confirmed is given back."""
    confirmed = None
    try:
        confirmed = yield from quorum.confirm(lock._store().database, grant, fence, lock._ttl, until)
    except GeneratorExit:
        raise
    except BaseException:
        yield from give_back(lock, grant.tenure.owner)
        raise
    return confirmed


def give_back(lock: BaseLock, owner: str) -> Steps[None]:
    """Free the tenure of an attempt, whichever fence it has; raises nothing."""
    return handover.undo_take(runtime.current.site(lock._store()), lock.key, owner, again=False)


def _hold(lock: BaseLock, flow: Flow, grant: Grant) -> Steps[Hold]:
    """Hold what has been confirmed, for the flow; no I/O."""
    found = yield from entering.acquire(lock, None, "acquire", flow, granted=Granted(grant, Bundle()))
    return cast("Hold", found)


def _leave(part: Part) -> Steps[bool]:
    """Leave what is held of one database; False if it was lost."""
    try:
        for entry in part.hold.entries:
            yield from leaving.leave_entry(part.lock, Block(entry, part.hold))
    except LockLost:
        return False
    return True


def _extend(part: Part, ttl: float) -> Steps[bool]:
    database = part.hold.store.database
    _ = yield from quorum.standing(database, ttl, database.now() + database.timing.single_try)  # the longest in use
    try:
        yield from operations.extend(part.lock, ttl)
    except (LockLost, LockNotHeld):
        return False
    return True


def _verify(part: Part) -> Steps[bool]:
    try:
        return (yield from operations.verify(part.lock))
    except LockLost:
        return False


def _look(lock: BaseLock, limit: float) -> Steps[LockInfo | None]:
    database = lock._store().database
    return tenures.look(database, lock.key, database.now() + limit)


def _nothing(_: object) -> Steps[None]:
    yield from ()


def _short(error: LockError) -> str:
    return str(error).partition(";")[0]


def _listed(answers: Mapping[str, str]) -> str:
    return "; ".join(f"{name}: {answer}" for name, answer in answers.items())


class _Attempts:
    """The attempts of one acquire."""

    def __init__(self, lock: BaseQuorumLock, flow: Flow, timeout: float | None) -> None:
        self.lock, self.flow, self.timeout = lock, flow, timeout
        self.locks = lock._for_flow(flow)
        self.limit, self.ttl = lock._limit, lock._ttl
        self.deadline = None if timeout is None else clock.now() + timeout
        self.asks: Asks = the_asks()
        self.granted: dict[int, Grant] = {}
        self.confirmed: dict[int, Grant] = {}
        self.said: dict[str, str] = {}
        self.proposed = 0
        self.cannot = set[int]()
        """The databases that could not be asked."""
        self.holder: LockInfo | None = None
        self.held: Held | None = None
        self._open: list[Ask[Any]] = []
        """Those whose result nobody has used yet."""

    def run(self) -> Steps[Held | None]:
        """Try until there is a majority, or the time is up."""
        mean = PAUSES[0]
        while True:
            got = yield from self._once()
            left = self._left()
            if got is not None or (left is not None and left <= 0):
                return got
            pause = random.uniform(0.5, 1.5) * mean  # noqa: S311 - to part contenders, not a secret
            yield from sleep(pause if left is None else min(pause, left))
            mean = min(mean * 2, PAUSES[1])

    def _left(self) -> float | None:
        return None if self.deadline is None else max(self.deadline - clock.now(), 0.0)

    def _once(self) -> Steps[Held | None]:
        self.granted, self.confirmed, self.said, self.cannot = {}, {}, {}, set()
        self.proposed = quorum.propose()
        held: Held | None = None
        try:
            got = yield from self._rounds()
            if got is not None:
                held = self.held = Held(self.lock, self.flow, self.locks, got.fence)
                yield from self._begin(held, got)
                if held.remaining() > 0:
                    return held
                held.over, self.held = True, None
        except GeneratorExit:
            raise
        except BaseException:
            for ask in self._open:
                ask.leave(self.asks)
            for number, lock in enumerate(self.locks) if held is not None else ():
                hold = self.flow.holds.get((lock._store(), lock.key))
                if held is not None and hold is not None and hold.entered_by(lock):  # interrupted before it was noted
                    held.parts[number] = Part(lock, hold)
            self.lock._abandon(held)
            self._give_back_in_background(held)
            raise
        parts = [] if held is None else list(held.parts.values())
        back = [(part.lock, _leave_quietly(part)) for part in parts]
        back += [(self.locks[number], self._give_back(number)) for number in self._not_held(held)]
        _ = yield from self._answers([self._ask(lock, steps) for lock, steps in back], leave=False)
        return None

    def _rounds(self) -> Steps[Majority | None]:
        attempt = quorum.attempt(len(self.locks), self.ttl)
        asked = next(attempt)
        while True:
            match asked.what:
                case What.QUEUE:
                    granted = yield from self._queue(asked)
                case What.TAKE:
                    granted = yield from self._take(asked)
                case What.CONFIRM:
                    granted = yield from self._confirm(asked)
            answers = {
                number: Answer(each.tenure.fence, each.trusted_until, _is_firm(each))
                for number, each in granted.items()
            }
            try:
                asked = attempt.send((answers, clock.now()))
            except StopIteration as done:
                majority: Majority | None = done.value
                return majority

    def _begin(self, held: Held, got: Majority) -> Steps[None]:
        """Hold what has been confirmed."""
        for number, lock in enumerate(self.locks):
            told: Any = lock
            told._who_hears_of_loss = functools.partial(_calls, functools.partial(held.on_lost, number, lock))
            told._who_hears_of_risk = functools.partial(_calls, functools.partial(held.on_at_risk, lock))
        for number in got.confirmed:
            lock, grant = self.locks[number], self.confirmed.get(number) or self.granted[number]
            held.parts[number] = Part(lock, (yield from _hold(lock, self.flow, grant)))
        held.said = dict(self.said)
        self._give_back_in_background(held)

    def _give_back_in_background(self, held: Held | None) -> None:
        for number in self._not_held(held):
            self.asks.begin(self.locks[number]._store(), self._give_back(number))

    def _not_held(self, held: Held | None) -> list[int]:
        return [number for number in self.granted if held is None or number not in held.parts]

    def _give_back(self, number: int) -> Steps[None]:
        return give_back(self.locks[number], self.granted[number].tenure.owner)

    # -- rounds

    def _queue(self, asked: Round) -> Steps[dict[int, Grant]]:
        """The first database that answers; those that were silent before come last.

        Or all of them at once, if nobody is known to want the key.
        """
        site = runtime.current.site(self.locks[0]._store())
        if not site.expects_contention(self.lock.key) and not self._is_held_here():
            granted = yield from self._take(Round(What.TAKE, asked.whom))
            if len(granted) >= quorum.majority(len(self.locks)):
                return granted
            site.note_contention(self.lock.key)
            yield from self._give_all_back()
            if self._left() == 0:
                return {}
            self.cannot.clear()
        silent = [number for number in asked.whom if self.asks.is_silent(self.locks[number]._store())]
        for number in (each for each in asked.whom if each not in silent):
            if (yield from self._wait_in_queue(number)):
                return dict(self.granted)
            if self._left() == 0 and number not in self.cannot:
                return {}
        return (yield from self._take(Round(What.TAKE, silent)))

    def _is_held_here(self) -> bool:
        """Whether a flow of this process has the key in a database."""
        return any(runtime.current.watchdog.holds(lock._store(), self.lock.key) for lock in self.locks)

    def _give_all_back(self) -> Steps[None]:
        """Give back what was granted, so that it is not in the way of others while the flow waits."""
        asks = [self._ask(self.locks[number], self._give_back(number)) for number in self.granted]
        _ = yield from self._answers(asks, leave=False)
        self.granted = {}

    def _wait_in_queue(self, number: int) -> Steps[bool]:
        """Take the key in one database, through its queue.

        Not any more when it does not answer, or when nobody has the key in a majority of the databases.
        """
        [ask] = asks = [self._ask_to_take(number, self._left())]
        yield from self.asks.gather(asks, min(self.limit, PROBE), self._wakeup, waits=True)
        while ask.pending():
            looks = [self._ask(each, _look(each, self.limit)) for each in self.locks]
            found = yield from self._answers(looks)
            if ask.pending() and number not in found:
                self.asks.not_answered(ask)
                break
            self.holder = found.get(number) or self.holder
            if ask.pending() and self._are_free(found):
                break
            yield from self.asks.gather(asks, PROBE, self._wakeup, waits=True)
        self._use({number: ask})
        return number in self.granted

    def _are_free(self, found: Mapping[int, LockInfo | None]) -> bool:
        """Whether nobody has the key in a majority of the databases."""
        free = [info is None or info.state != "held" for info in found.values()]
        return sum(free) >= quorum.majority(len(self.locks))

    def _take(self, asked: Round) -> Steps[dict[int, Grant]]:
        needed, before = quorum.majority(len(self.locks)), set(self.granted)
        asks = {number: self._ask_to_take(number, 0.0) for number in asked.whom}

        def enough() -> bool:
            return len(before) + sum(isinstance(ask.result, Grant) for ask in asks.values()) >= needed

        yield from self.asks.gather(list(asks.values()), self.limit, self._wakeup, enough)
        self._use(asks)
        return {number: grant for number, grant in self.granted.items() if number not in before}

    def _confirm(self, asked: Round) -> Steps[dict[int, Grant]]:
        until = clock.now() + self.limit
        asks = {
            number: self._ask(
                self.locks[number],
                confirm(self.locks[number], self.granted[number], asked.fence, until),
                functools.partial(_undo, self.locks[number]),
            )
            for number in asked.whom
        }
        yield from self.asks.gather(list(asks.values()), self.limit, self._wakeup)
        for number, ask in asks.items():
            if ask.pending():
                ask.leave(self.asks)
                self._cannot(number, self._no_answer)
            elif isinstance(grant := ask.use(), Grant):
                self.confirmed[number] = grant
            else:
                self._cannot(number, _short(ask.error) if ask.error else "lost before it was confirmed")
        self._open = []
        return self.confirmed

    def _use(self, asks: Mapping[int, Ask[Any]]) -> None:
        """Use the answers to takes, and leave the asks that are not answered."""
        for number, ask in asks.items():
            if ask.pending():
                ask.leave(self.asks)
                self._cannot(number, self._no_answer)
                continue
            found = ask.use()
            if isinstance(found, Grant):
                self.granted[number] = found
                self.said[self.lock.names[number]] = "granted"
            elif isinstance(found, No):
                self.said[self.lock.names[number]] = found.why
                self.holder = found.held or self.holder
                if not found.busy:
                    self.cannot.add(number)
            else:
                error = ask.error
                if error is not None and not isinstance(error, (LockStoreError, LockTimeout)):
                    raise error
                self._cannot(number, _short(error) if error else self._no_answer)
        self._open = [ask for ask in self._open if ask.pending()]

    def _cannot(self, number: int, why: str) -> None:
        self.cannot.add(number)
        self.said[self.lock.names[number]] = why

    @property
    def _no_answer(self) -> str:
        return f"no answer in {self.limit:.2g} s"

    @functools.cached_property
    def _wakeup(self) -> Wakeup:
        return Wakeup()

    def _ask(self, lock: BaseLock, steps: Steps[T], undo: Callable[[T], Steps[None]] = _nothing) -> Ask[T]:
        ask = Ask(lock._store(), steps, undo, self._wakeup)
        self._open = [*self._open, ask]
        return cast("Ask[T]", self.asks.ask(ask))

    def _ask_to_take(self, number: int, timeout: float | None) -> Ask[Grant | No]:
        lock = self.locks[number]
        return self._ask(lock, take(lock, timeout, self.proposed), functools.partial(_undo, lock))

    def _answers(self, asks: Sequence[Ask[T]], *, leave: bool = True) -> Steps[dict[int, T | None]]:
        """What asks whose results nobody has to undo have answered in time. The others are left, or go on."""
        yield from self.asks.gather(asks, self.limit, self._wakeup, lambda: True)
        found = {place: ask.use() for place, ask in enumerate(asks) if not ask.pending() and ask.error is None}
        for ask in asks if leave else ():
            ask.leave(self.asks)
        self._open = [ask for ask in self._open if ask not in asks]
        return found

    def error(self) -> LockError:
        """Why there is no majority: others have the key, or too few databases could be asked."""
        key, names = self.lock.key, self.lock.names
        waited = f"within {self.timeout:g} s" if self.timeout else "at one try"
        needed = quorum.majority(len(names))
        if len(names) - len(self.cannot) < needed:
            message = f"could not acquire {key!r} {waited}: fewer than {needed} of {len(names)} databases can be asked"
            return QuorumUnavailable(f"{message}: {_listed(self.said)}", key=key, answers=self.said)
        message = f"could not acquire {key!r} in {needed} of {len(names)} databases {waited}: {_listed(self.said)}"
        return LockTimeout(f"{message}; wait longer with timeout=, or see to the holder", key=key, holder=self.holder)


def _is_firm(grant: Grant) -> bool:
    """Whether a take has begun it, durably and for a whole lease."""
    return not (grant.ticket or grant.local_handovers or grant.term)


def _undo(lock: BaseLock, found: Grant | No | None) -> Steps[None]:
    if isinstance(found, Grant):
        yield from give_back(lock, found.tenure.owner)


def _calls(call: Callable[..., object], *given: object) -> list[Callable[[], object]]:
    return [functools.partial(call, *given)]


class _Refused(NamedTuple):
    """An acquire without success."""

    attempts: _Attempts


class BaseQuorumLock:
    """A majority lock, apart from how its steps are run."""

    def __init__(self, make: Sequence[Callable[..., BaseLock]], key: str, **options: Any) -> None:
        """`make(key, **options)` makes the lock of each database."""
        if unknown := options.keys() - Options.__annotations__.keys():
            from dblock.core.spelling import unknown_options  # noqa: PLC0415 - only for the error

            raise unknown_options(sorted(unknown), Options.__annotations__, "db_quorum_lock")
        if not make:
            raise TypeError("a majority lock needs databases")
        answer = options.pop("answer", None)
        self._answer = None if answer is None else valid_ttl(answer, "answer", "the longest wait for one database,")
        self._options = make[0](key, **options).options
        rows = {name: given for name, given in options.items() if name in OF_ROWS}
        self._members = [each(key, release="now", **rows) for each in make]
        self._withs: list[Open] = []
        """The open `with`s of this object."""
        self._last: Mapping[str, str] = MappingProxyType({})
        self._refuse_doubles()
        if len(make) == 1:
            warnings.warn("a majority of one database is what db_lock() gives", RuntimeWarning, stacklevel=4)

    def _refuse_doubles(self) -> None:
        """Raise ValueError for a database that is given twice; UnsupportedDatabase for one in memory."""
        if runtime.current.store_override is not None:  # in a test: one database in memory stands for all
            self._members = self._members[:1]
            return
        known = set[object]()
        for lock in self._members:
            store: Store = lock._store()
            place = store.location or store.name, store.database.dialect.tables
            if place in known:
                raise ValueError(f"{store.name} is given twice: a majority needs independent databases")
            if not store.renewable:
                raise UnsupportedDatabase(f"{store.name} is in memory, where no other thread sees it")
            known.add(place)

    def _who_hears_of_loss(self, reason: Reason) -> list[Callable[[], object]]:
        return [functools.partial(self._options.on_lost, self, reason)] if self._options.on_lost else []

    def _who_hears_of_risk(self) -> list[Callable[[], object]]:
        return [functools.partial(self._options.on_at_risk, self)] if self._options.on_at_risk else []

    # -- what is known without I/O

    @property
    def key(self) -> str:
        """The key of the lock."""
        return self._members[0].key

    @property
    def names(self) -> list[str]:
        """The names of the databases, in the order given."""
        return [lock._store().name for lock in self._members]

    @property
    def ttl(self) -> float:
        """The life of each lease in seconds."""
        held = self._held()
        return self._ttl if held is None else held.ttl

    @property
    def fence(self) -> int | None:
        """A number greater than that of each earlier holder of a majority; None unless this flow has one."""
        held = self._held()
        return None if held is None else held.fence

    @property
    def valid_for(self) -> float:
        """Seconds for which this flow may still rely on the lock, 0.0 if it may not; by the local clock alone."""
        held = self._held()
        return 0.0 if held is None else held.remaining()

    remaining = valid_for

    @property
    def state(self) -> State | None:
        """`held`, `at_risk` (renewals are late) or `lost` for what this flow holds, by the local clock, else None."""
        held = self._held()
        return None if held is None else held.state

    @property
    def count(self) -> int:
        """Number of entries of this flow."""
        held = self._held()
        return 0 if held is None else held.entries

    @property
    def answers(self) -> Mapping[str, str]:
        """What each database has said, by name, of the lock that this flow holds, else of the last attempt."""
        held = self._held()
        return MappingProxyType(dict(self._last if held is None else held.said))

    def check(self) -> None:
        """Raise LockLost unless this flow surely holds a majority at this moment; no I/O.

        Raises LockRevoked once it is known that the lock was asked back in one of the databases.
        """
        held = self._held()
        if held is None:
            never = "is not held by this thread or task, which has not acquired it or has released it already"
            raise LockLost(f"{self.key!r} {never}", key=self.key)
        if held.remaining() <= 0:
            raise held.lost()
        if (told := held.revoked()) is not None:
            raise LockRevoked(f"{self.key!r} (fence {held.fence}) was asked back: {told}", key=self.key)

    def guard(self, *_: object, **__: object) -> NoReturn:
        """Refused: a transaction of one database cannot keep the others from granting the key."""
        raise TypeError(
            "a majority lock has no guard(): a transaction keeps the key in its own database alone, and a majority of "
            "the others may grant it meanwhile. Store lock.fence with what is written, and refuse a lower one "
            "(fenced_update)"
        )

    aguard = guard

    def __repr__(self) -> str:
        held = self.state or "not held here"
        return f"<{type(self).__name__} {self.key!r} of {len(self._members)} databases: {held}>"

    # -- helpers

    @property
    def _quorum(self) -> int:
        return quorum.majority(len(self._members))

    @property
    def _ttl(self) -> float:
        return self._members[0]._ttl

    @property
    def _timeout(self) -> float | None:
        return self._members[0]._timeout

    @property
    def _max_hold(self) -> float:
        return self._members[0].options.max_hold

    @property
    def _limit(self) -> float:
        """Longest wait in seconds for the answer of one database."""
        return min(self._ttl / 10, ANSWER) if self._answer is None else self._answer

    def _for_flow(self, flow: Flow) -> list[BaseLock]:
        """Lock objects for one majority of the flow."""
        locks = [copy.copy(lock) for lock in self._members]
        for lock in locks:
            lock._flow = flow
        return locks

    def _place(self) -> object:
        return frozenset(lock._store() for lock in self._members), self.key

    def _held(self) -> Held | None:
        """What this flow holds, else what the only open `with` of this object does."""
        held = the_asks().held.get(current_flow(), {}).get(self._place())
        if held is None and len(self._withs) == 1:
            held = self._withs[0][1]
        return held if held is not None and not held.over and held.process == os.getpid() else None

    def _acquire(self, timeout: float | None, *, block: bool = False) -> Steps[Held | _Refused]:
        """A majority for this flow, or the refusal."""
        flow = current_flow()
        if not block:
            flow.ends_with_its_call()
        place = self._place()
        held: Held | None = the_asks().held.get(flow, {}).get(place)
        if held is not None and not held.over and held.remaining() > 0:
            held.entries += 1
            return held
        attempts = _Attempts(self, flow, timeout)
        try:
            held = yield from attempts.run()
            if held is None:
                return _Refused(attempts)
            held.grow_later()
            the_asks().held.setdefault(flow, {})[place] = held
        except BaseException:
            self._abandon(attempts.held)
            raise
        finally:
            self._last = dict(attempts.said)
        return held

    def _enter(self, timeout: float | None) -> Steps[None]:
        """Begin a `with`; raises LockTimeout or QuorumUnavailable."""
        found: Held | _Refused | None = None
        try:
            found = yield from self._acquire(timeout, block=True)
            if isinstance(found, _Refused):
                raise found.attempts.error()  # noqa: TRY301 - nothing is held then
            self._withs = [*self._withs, (current_flow(), found)]
        except BaseException:
            if isinstance(found, Held) and all(held is not found for _, held in self._withs):
                found.entries -= 1
                self._abandon(None if found.entries else found)
            raise

    def _got(self, found: Held | _Refused) -> bool:
        """The result of acquire()."""
        if not isinstance(found, _Refused):
            return True
        error = found.attempts.error()
        if not isinstance(error, LockTimeout):
            raise error
        return False

    def _release(self, held: Held | None = None) -> Steps[None]:
        """Leave once; the last time gives all back. Raises LockNotHeld, or LockLost."""
        held = self._held() if held is None else held
        if held is None or held.over:
            raise LockNotHeld(
                f"cannot release {self.key!r}: this thread or task does not hold it, or has released it already",
                key=self.key,
            )
        if held.entries > 1:
            held.entries -= 1
            return
        lost = held.remaining() <= 0
        good = yield from self._leave_all(held)
        if lost or good < held.quorum:
            with held._mutex:
                held.loss = held.loss or Reason.FREED
            raise held.lost()

    def _leave_all(self, held: Held) -> Steps[int]:
        """Leave what is held of each database; of how many it was not lost, as far as is known.

        The database in whose queue others wait comes last, so that the waiter that is granted the key there finds the
        others free.
        """
        parts = [held.parts[number] for number in sorted(held.parts)]
        asks, wakeup, left = the_asks(), Wakeup(), list(parts)
        lost = 0
        try:
            held.over = True
            self._forget(held)
            for part in parts:
                part.hold.lease.renewing = False
            for some in (parts[1:], parts[:1]):
                asked = []
                for part in some:
                    asked.append(Ask(part.hold.store, _leave(part), _nothing, wakeup))
                    left.remove(part)
                    asks.begin_ask(asked[-1])
                yield from asks.gather(asked, self._limit, wakeup, lambda: True)
                lost += sum(ask.use() is False for ask in asked if not ask.pending())
        except GeneratorExit:
            raise
        except BaseException:
            self._leave_in_background(left)
            raise
        return len(parts) - lost

    def _abandon(self, held: Held | None) -> None:
        """Give back, in the background, what an interrupted acquire has got."""
        if held is not None and not held.over:
            held.over = True
            self._forget(held)
            self._leave_in_background(held.parts.values())

    def _forget(self, held: Held) -> None:
        for holds in list(the_asks().held.values()):
            for place in [each for each, known in holds.items() if known is held]:
                del holds[place]

    def _leave_in_background(self, parts: Iterable[Part]) -> None:
        for part in parts:
            part.hold.lease.renewing = False
            the_asks().begin(part.hold.store, _leave_quietly(part))

    def _each(self, held: Held, steps: Callable[[Part], Steps[bool]]) -> Steps[bool]:
        """Whether a majority of the databases answers True; raises LockLost, or QuorumUnavailable."""
        asks, wakeup = the_asks(), Wakeup()
        asked = {
            number: asks.ask(Ask(part.hold.store, steps(part), _nothing, wakeup))
            for number, part in sorted(held.parts.items())
            if part.hold.lease.loss is None
        }
        yield from asks.gather(list(asked.values()), self._limit, wakeup, lambda: True)
        said = dict(held.said)
        good = 0
        for number, ask in asked.items():
            answer = None if ask.pending() else ask.use()
            good += answer is True
            if answer is None:
                said[self.names[number]] = _short(ask.error) if ask.error else f"no answer in {self._limit:.2g} s"
            elif not answer:
                said[self.names[number]] = "lost"
        if good >= held.quorum:
            return True
        if held.remaining() <= 0:
            raise held.lost()
        message = f"fewer than {held.quorum} of {len(self.names)} databases have confirmed {self.key!r}"
        raise QuorumUnavailable(f"{message}: {_listed(said)}", key=self.key, answers=said)

    def _surely_held(self, verb: str) -> Held:
        held = self._held()
        if held is None:
            raise LockNotHeld(f"cannot {verb} {self.key!r}: this thread or task does not hold it", key=self.key)
        if held.remaining() <= 0:
            raise held.lost()
        return held

    def _extend(self, ttl: Seconds | None) -> Steps[None]:
        held = self._surely_held("extend")
        seconds = held.ttl if ttl is None else valid_ttl(ttl)
        _ = yield from self._each(held, lambda part: _extend(part, seconds))
        held.ttl = seconds

    def _verify(self) -> Steps[bool]:
        held = self._held()
        if held is None or held.remaining() <= 0:
            self.check()
        return (yield from self._each(cast("Held", held), _verify))

    def _leave_block(self, block: Open) -> Steps[None]:
        """Leave the `with` that ends."""
        last = block[1].entries == 1
        self._withs = [each for each in self._withs if each is not block]
        try:
            yield from self._release(block[1])
        except (GeneratorExit, LockError):
            raise
        except BaseException:  # interrupted
            self._abandon(block[1] if last else None)
            raise

    def _interrupted(self, block: Open | None) -> None:
        """Give back, in the background, what a `with` holds whose leaving was interrupted before it began."""
        with contextlib.suppress(LockNotHeld):
            block = block or self._innermost()
            if block in self._withs:
                self._withs = [each for each in self._withs if each is not block]
                block[1].entries -= 1
                self._abandon(None if block[1].entries else block[1])

    def _innermost(self) -> Open:
        """The innermost open `with` of this flow, else the only one."""
        flow = current_flow()
        mine = [each for each in self._withs if each[0] is flow] or self._withs
        if not mine:
            raise LockNotHeld(f"cannot leave {self.key!r}: no block of this lock is open", key=self.key)
        if mine[0][0] is not flow and len(mine) > 1:
            raise LockNotHeld("blocks of this lock are open in other threads or tasks: make one for each", key=self.key)
        return mine[-1]

    def _refuse_to_skip(self) -> None:
        if self._options.on_busy == "skip":
            raise TypeError('the body of a `with` cannot be skipped: on_busy="skip" is for decorators')

    def _for_call(self, template: Template, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Self:
        """A separate lock for one call of a decorated function."""
        lock = copy.copy(self)
        lock._members = [member._for_call(template, args, kwargs) for member in self._members]
        lock._withs = []
        return lock

    def _may_skip(self, busy: LockTimeout) -> bool:
        if self._options.on_busy == "skip":
            inform("skipped a call: %s", str(busy))
        return self._options.on_busy == "skip"


def _leave_quietly(part: Part) -> Steps[None]:
    _ = yield from _leave(part)


class SyncQuorumLock(BaseQuorumLock):
    """A majority lock whose methods block the calling thread."""

    def _drive(self, steps: Steps[T]) -> T:
        driver: Any = self._members[0]
        result: T = driver._drive(steps)
        return result

    def _refuse_event_loop(self) -> None:
        """Raise SynchronousOnlyOperation where waiting for other threads would block an event loop."""
        for lock in self._members:
            with contextlib.suppress(LockTimeout):  # of a SQLite database: its transaction is this flow's
                lock._store().database.before_waiting()

    def acquire(self, blocking: bool = True, timeout: Timeout = ...) -> bool:
        """Take the lock in a majority of the databases, or re-enter it; False if others held it all the time.

        As `Lock.acquire`. Raises QuorumUnavailable if fewer than a majority could be asked.
        """
        self._refuse_event_loop()
        found = self._got(self._drive(self._acquire(acquire_timeout(blocking, timeout, self._timeout))))
        if not found:
            warn_if_ignored()
        return found

    def release(self) -> None:
        """Leave the lock once; the last time gives it back in all databases. Raises LockNotHeld, or LockLost."""
        self._drive(self._release())

    def extend(self, ttl: Seconds | None = None) -> None:
        """Let the leases end `ttl` seconds from now: sets, never adds. Raises LockLost, or QuorumUnavailable."""
        self._drive(self._extend(ttl))

    def verify(self) -> bool:
        """True if a majority of the databases still shows this flow's tenures; raises LockLost or QuorumUnavailable."""
        return self._drive(self._verify())

    def __enter__(self) -> Self:
        self._refuse_to_skip()
        self._refuse_event_loop()
        self._drive(self._enter(self._timeout))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        block = None
        try:
            block = self._innermost()
            self._drive(self._leave_block(block))
        except LockError as late:
            if not gives_way(late, error):
                raise
        except BaseException:
            self._interrupted(block)
            raise

    if not TYPE_CHECKING:  # hidden from type checkers

        def __aenter__(self) -> None:
            raise TypeError("this lock blocks its thread: use `with`, or AsyncEngines")

        __aexit__ = __aenter__

    def __call__(self, function: F) -> F:
        """Decorate `function`: each call holds the lock; the key is formatted with the call's arguments."""
        if inspect.iscoroutinefunction(function):
            raise TypeError(f"{function!r} is a coroutine function: decorate it with the lock of async engines")
        template = Template(self.key, function)

        @functools.wraps(function)
        def locked(*args: Any, **kwargs: Any) -> Any:
            lock = self._for_call(template, args, kwargs)
            try:
                lock._drive(lock._enter(lock._timeout))
            except LockTimeout as busy:
                if self._may_skip(busy):
                    return self._options.otherwise
                raise
            with contextlib.ExitStack() as ending:
                _ = ending.push(lock.__exit__)
                result = function(*args, **kwargs)
                if inspect.iscoroutine(result):
                    result.close()
                    raise TypeError(f"{function!r} returned a coroutine, which would run after the lock is released")
                return result

        return cast("F", locked)


class AsyncQuorumLock(BaseQuorumLock):
    """A majority lock whose methods are coroutines; see SyncQuorumLock for what each does.

    `self` may be any majority lock, so that a synchronous one can use these methods as its asynchronous twins.
    """

    async def acquire(self: BaseQuorumLock, blocking: bool = True, timeout: Timeout = ...) -> bool:
        """Take the lock in a majority of the databases, or re-enter it; False if others held it all the time."""
        wait = acquire_timeout(blocking, timeout, self._timeout)
        found = self._got(await self._members[0]._adrive(self._acquire(wait)))
        if not found:
            warn_if_ignored()
        return found

    async def release(self: BaseQuorumLock) -> None:
        """Leave the lock once; the last time gives it back in all databases."""
        await self._members[0]._adrive(self._release(), undisturbed=True)

    async def extend(self: BaseQuorumLock, ttl: Seconds | None = None) -> None:
        """Let the leases end `ttl` seconds from now."""
        await self._members[0]._adrive(self._extend(ttl))

    async def verify(self: BaseQuorumLock) -> bool:
        """True if a majority of the databases still shows this flow's tenures."""
        return await self._members[0]._adrive(self._verify())

    async def __aenter__(self) -> Self:
        self._refuse_to_skip()
        await enter(self)
        return self

    async def __aexit__(
        self: BaseQuorumLock, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        block = None
        try:
            block = self._innermost()
            await self._members[0]._adrive(self._leave_block(block), undisturbed=True)
        except LockError as late:
            if not gives_way(late, error):
                raise
        except BaseException:
            self._interrupted(block)
            raise

    if not TYPE_CHECKING:  # hidden from type checkers

        def __enter__(self) -> None:
            raise TypeError("this is the lock of an event loop: use `async with`")

        __exit__ = __enter__

    def __call__(self: BaseQuorumLock, function: F) -> F:
        """Decorate a coroutine function: each call holds the lock; the key is formatted with its arguments."""
        if not inspect.iscoroutinefunction(function):
            raise TypeError(f"{function!r} is not a coroutine function: decorate it with the lock of sync engines")
        template = Template(self.key, function)

        @functools.wraps(function)
        async def locked(*args: Any, **kwargs: Any) -> Any:
            lock = self._for_call(template, args, kwargs)
            try:
                await enter(lock)
            except LockTimeout as busy:
                if self._may_skip(busy):
                    return self._options.otherwise
                raise
            async with contextlib.AsyncExitStack() as ending:
                _ = ending.push_async_exit(functools.partial(AsyncQuorumLock.__aexit__, lock))
                return await function(*args, **kwargs)

        return cast("F", locked)


async def enter(lock: BaseQuorumLock) -> None:
    """Begin an `async with`."""
    await lock._members[0]._adrive(lock._enter(lock._timeout))
