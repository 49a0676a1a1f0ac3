"""Acquiring a majority: the rounds of each attempt, and the error if there was none.

An attempt runs as steps of the calling flow; the databases are asked by threads or tasks (`protocol.asking`), so that a
slow one delays nobody.

Rule: whatever ends an attempt early, what it took, and what it may have taken, is given back.
"""

from __future__ import annotations

import copy
import functools
import math
import random
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar, cast

from dblock.core import clock, runtime, timing
from dblock.core.acquire.slow import SlowWait
from dblock.core.errors import LockStoreError, LockTimeout
from dblock.core.holding.flow import Entry, Flow
from dblock.core.protocol.steps import Steps, sleep
from dblock.core.values import Grant, LockInfo
from dblock.core.wakeup.registry import Wakeup
from dblock.majority import member, protocol
from dblock.majority.asking import Ask, the_asks
from dblock.majority.held import Held
from dblock.majority.member import No, listed, short
from dblock.majority.protocol import Answer, Majority, QuorumUnavailable, Round, What

if TYPE_CHECKING:
    from dblock.majority.base import BaseQuorumLock

T = TypeVar("T")


class Attempts:
    """The attempts of one acquire."""

    def __init__(self, lock: BaseQuorumLock, flow: Flow, timeout: float | None, entry: Entry) -> None:
        self.lock, self.flow, self.timeout, self.entry = lock, flow, timeout, entry
        self.locks = [copy.copy(each) for each in lock._members]
        for each in self.locks:
            each._flow = flow
        self.limit, self.asks, self.needed = lock._limit, the_asks(), lock._quorum
        self.began = clock.now()
        self.deadline = None if timeout is None else self.began + timeout
        self.silent_until = math.inf if timeout is None else self.began + max(timeout, self.limit)
        """The local time until which databases are waited for that did not answer before."""
        self.slow_wait = SlowWait(self.locks[0]._slow_wait)
        self.granted: dict[int, Grant] = {}
        self._said: dict[int, str] = {}
        """The last answer of each database, in whichever attempt."""
        self.cannot = set[int]()
        """The databases that could not be asked the last time."""
        self.busy = False
        """Whether others had the key in a database, in the present attempt."""
        self.contended: Callable[[LockInfo | None], None] | None = None
        """Called once others had it."""
        self.holder: LockInfo | None = None
        self.held: Held | None = None
        """What the flow has entered."""
        self._asked: list[tuple[int, Ask[Any]]] = []
        """What was asked in the present attempt, by the number of the database."""
        self._wakeup = Wakeup()

    def run(self) -> Steps[Held | None]:
        """Try until there is a majority, or the time is up."""
        mean = 2 * timing.DEFAULT.near
        while True:
            got = yield from self._once()
            left = self._left()
            if got is not None:
                return got
            if left == 0:
                break
            pause = random.uniform(0.5, 1.5) * mean  # noqa: S311 - to part contenders, not a secret
            yield from sleep(self.locks[0]._store(), pause if left is None else min(pause, left))
            mean = min(mean * 2, 3 * timing.DEFAULT.farthest)
        # The time may have passed in the queue of one database: whether the others can be asked is still to be heard.
        _ = yield from self._look([number for number in range(len(self.locks)) if number not in self._said])
        return None

    @property
    def said(self) -> dict[str, str]:
        """The last answer of each database by its name, in the order of the databases."""
        return {name: self._said[number] for number, name in enumerate(self.lock.names) if number in self._said}

    def error(self) -> LockTimeout | QuorumUnavailable:
        """Why there is no majority: others have the key, or too few databases could be asked."""
        key, names, needed = self.lock.key, self.lock.names, self.needed
        waited = f"within {self.timeout:g} s" if self.timeout else "at one try"
        if len(names) - len(self.cannot) < needed:
            message = f"could not acquire {key!r} {waited}: fewer than {needed} of {len(names)} databases can be asked"
            return QuorumUnavailable(f"{message}: {listed(self.said)}", key=key, answers=self.said)
        message = f"could not acquire {key!r} in {needed} of {len(names)} databases {waited}: {listed(self.said)}"
        return LockTimeout(f"{message}; wait longer with timeout=, or see to the holder", key=key, holder=self.holder)

    def _left(self) -> float | None:
        return None if self.deadline is None else max(self.deadline - clock.now(), 0.0)

    def _once(self) -> Steps[Held | None]:
        self.granted, self.busy, self.held, self._asked = {}, False, None, []
        got = yield from self._rounds(protocol.propose())
        if got is None:
            yield from self._give_all_back()
            return None
        grants = {number: self.granted[number] for number in got.confirmed}
        first = next(iter(grants.values()))
        whole = replace(first, tenure=first.tenure._replace(fence=got.fence))
        self.held = held = Held(self.lock, self.flow, self.locks, whole, self.entry)
        held.said = self.said
        for number, grant in grants.items():
            taking = member.hold(self.locks[number], self.flow, grant, self.entry.kind, held.alive)
            held.parts[number] = yield from taking
        self._give_back_later()
        if held.lease.remaining() > 0:
            held.begin()
            return held
        _ = yield from held.give()
        return None

    def abandon(self) -> Steps[None]:
        """After an interrupt: give back, in the background, what the attempt has got, or gets later."""
        held = self.held
        for number, lock in enumerate(held.members if held is not None else ()):
            hold = self.flow.holds.get((lock._store(), lock.key))
            if held is not None and hold is not None and hold.entered_by(lock):  # interrupted before it was noted
                held.parts[number] = hold
        for number, ask in self._asked:
            if held is None or number not in held.parts:
                ask.leave(self.asks)
        if held is not None:
            yield from held.abandon(self.entry)

    def _rounds(self, proposed: int) -> Steps[Majority | None]:
        attempt = protocol.attempt(len(self.locks), self.lock._ttl)
        asked = next(attempt)
        while True:
            match asked.what:
                case What.QUEUE:
                    granted = yield from self._queue(asked.whom, proposed)
                case What.TAKE:
                    granted = yield from self._take(asked.whom, proposed)
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

    # -- giving back

    def _give_back(self, number: int) -> Steps[None]:
        return member.give_back(self.locks[number], self.granted[number].tenure.owner)

    def _give_all_back(self) -> Steps[None]:
        """Give back what was granted; what is not answered in time goes on."""
        back = {number: (self.locks[number]._store(), self._give_back(number)) for number in self.granted}
        _ = yield from self.asks.hear(back, self.limit, anyway=True)
        self.granted = {}

    def _give_back_later(self) -> None:
        """Give back, in the background, what was granted and is not held."""
        for number in self.granted:
            if self.held is None or number not in self.held.parts:
                self.asks.begin(self.locks[number]._store(), self._give_back(number))

    # -- rounds

    def _queue(self, whom: Collection[int], proposed: int) -> Steps[Mapping[int, Grant]]:
        """The first database that answers; those that were silent before come last.

        Or all of them at once, if nobody is known to want the key.
        """
        site = runtime.current.site(self.locks[0]._store())
        held_here = any(runtime.current.watchdog.holds(lock._store(), self.lock.key) for lock in self.locks)
        if not site.expects_contention(self.lock.key) and not held_here:
            granted = yield from self._take(whom, proposed)
            if len(granted) >= self.needed:
                return granted
            if not self.busy:  # too few can be asked
                return {}
            site.note_contention(self.lock.key)
            yield from self._give_all_back()
            if self._left() == 0:
                return {}
        silent = [number for number in whom if self.asks.is_silent(self.locks[number]._store())]
        for number in (each for each in whom if each not in silent):
            if (yield from self._wait_in_queue(number)):
                return self.granted
            if self._left() == 0 and number not in self.cannot:
                return {}
        return (yield from self._take(silent, proposed))

    def _wait_in_queue(self, number: int) -> Steps[bool]:
        """Take the key in one database, through its queue.

        Not any more when it does not answer, or when nobody has the key in a majority of the databases.
        """
        ask = self._ask_to_take(number, self._left())
        yield from self.asks.gather([ask], min(self.limit, timing.DEFAULT.attention), self._wakeup, waits=True)
        while ask.pending():
            self._note_busy()
            found = yield from self._look(range(len(self.locks)), lambda: not ask.pending())
            if ask.pending() and number not in found:
                self.asks.not_answered(ask)
                break
            self.holder = found.get(number) or self.holder
            free = {each: info is None or info.state != "held" for each, info in found.items()}
            if ask.pending() and sum(free.values()) >= self.needed:
                ask.health.pinned = free[number]
                ask.leave(self.asks)
                return False
            yield from self.asks.gather([ask], timing.DEFAULT.attention, self._wakeup, waits=True)
        self._note_takes(self._heard({number: ask}))
        return number in self.granted

    def _look(
        self, whom: Collection[int], enough: Callable[[], bool] = lambda: False
    ) -> Steps[dict[int, LockInfo | None]]:
        """The rows of databases. Where somebody has the key it can be asked for; else the row says nothing of that."""
        looks = {number: self._ask(number, member.look(self.locks[number], self.limit), reads=True) for number in whom}
        found = yield from self._answers(looks, enough)
        for number, info in found.items():
            if info is not None and info.state == "held":
                self._note(number, f"held by {info}")
        return found

    def _take(self, whom: Collection[int], proposed: int) -> Steps[dict[int, Grant]]:
        before = set(self.granted)
        takes = {number: self._ask_to_take(number, 0.0, proposed) for number in whom}

        def enough() -> bool:
            return len(before) + sum(isinstance(ask.result, Grant) for ask in takes.values()) >= self.needed

        self._note_takes((yield from self._answers(takes, enough)))
        return {number: grant for number, grant in self.granted.items() if number not in before}

    def _confirm(self, asked: Round) -> Steps[dict[int, Grant]]:
        until = clock.now() + self.limit
        asks = {
            number: self._ask(number, member.confirm(self.locks[number], self.granted[number], asked.fence, until))
            for number in asked.whom
        }
        found = yield from self._answers(asks)
        confirmed = {number: grant for number, grant in found.items() if grant is not None}
        self.granted |= confirmed
        for number in found.keys() - confirmed.keys():
            self._note(number, "lost before it was confirmed")
        return confirmed

    # -- asks, and what was heard

    def _ask(self, number: int, steps: Steps[T], *, reads: bool = False) -> Ask[T]:
        lock = self.locks[number]
        ask = Ask(lock._store(), steps, self._wakeup, None if reads else functools.partial(member.undo, lock))
        self._asked = [*self._asked, (number, ask)]
        return cast("Ask[T]", self.asks.ask(ask))

    def _ask_to_take(self, number: int, timeout: float | None, proposed: int = 0) -> Ask[Grant | No]:
        return self._ask(number, member.take(self.locks[number], timeout, proposed, self.slow_wait))

    def _answers(self, asks: Mapping[int, Ask[T]], enough: Callable[[], bool] = lambda: False) -> Steps[dict[int, T]]:
        """What those have answered that do in time, or until there is enough; for silent ones, `silent_until`."""
        yield from self.asks.gather(asks.values(), self.limit, self._wakeup, enough, silent_until=self.silent_until)
        return self._heard(asks)

    def _heard(self, asks: Mapping[int, Ask[T]]) -> dict[int, T]:
        """The results; the asks that are not answered are left, and failures noted."""
        found = dict[int, T]()
        for number, ask in asks.items():
            if ask.pending():
                ask.leave(self.asks)
                if ask.prompt:
                    self._note(number, f"no answer in {self.limit:.2g} s", cannot=True)
                elif number not in self._said:
                    self._note(number, "no answer for a while", cannot=True)
            elif ask.error is None:
                found[number] = cast("T", ask.result)
            elif isinstance(ask.error, (LockStoreError, LockTimeout)):
                self._note(number, short(ask.error, ask.store), cannot=isinstance(ask.error, LockStoreError))
            else:
                raise ask.error
        return found

    def _note_takes(self, takes: Mapping[int, Grant | No]) -> None:
        for number, found in takes.items():
            if isinstance(found, Grant):
                self.granted[number] = found
                self._note(number, "granted")
                if found.ticket:
                    self._note_busy()
            else:
                self.holder = found.held or self.holder
                self._note(number, found.why, cannot=not found.busy)
                if found.busy:
                    self._note_busy()

    def _note(self, number: int, said: str, *, cannot: bool = False) -> None:
        self._said[number] = said
        if cannot:
            self.cannot.add(number)
        else:
            self.cannot.discard(number)

    def _note_busy(self) -> None:
        """Others have the key; reported once."""
        contended, self.busy, self.contended = self.contended, True, None
        if contended is not None:
            contended(self.holder)


def _is_firm(grant: Grant) -> bool:
    """Whether a take has begun it, durably and for a whole lease."""
    return not (grant.ticket or grant.local_handovers or grant.term)
