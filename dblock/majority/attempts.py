"""Acquiring a majority: the rounds of each attempt, and the error if there was none.

An attempt runs as steps of the calling flow; the databases are asked by threads or tasks (`protocol.asking`), so that a
slow one delays nobody.

Rule: whatever ends an attempt early, what it took, and what it may have taken, is given back.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar, cast

from dblock.core import clock, timing
from dblock.core.acquire.request import Refused
from dblock.core.errors import LockStoreError, LockTimeout
from dblock.core.holding.flow import Entry, Flow
from dblock.core.protocol.steps import Steps, sleep
from dblock.core.values import Grant, LockInfo
from dblock.core.wakeup.registry import Wakeup
from dblock.majority import protocol
from dblock.majority.asking import Ask, the_asks
from dblock.majority.held import Held
from dblock.majority.member import Member, No, answers, listed, short, too_few
from dblock.majority.protocol import Answer, Majority, What

if TYPE_CHECKING:
    from dblock.majority.base import BaseQuorumLock

T = TypeVar("T")
Enough = Callable[[Collection[Ask[Any]]], bool]
"""Whether these asks have been answered well enough."""


class Attempts:
    """The attempts of one acquire."""

    def __init__(
        self,
        lock: BaseQuorumLock,
        flow: Flow,
        timeout: float | None,
        entry: Entry,
        contended: Callable[[LockInfo | None], None] | None,
    ) -> None:
        """`contended` is called once others had it."""
        self.lock, self.flow, self.timeout, self.entry = lock, flow, timeout, entry
        self.members = lock._members_of(flow)
        self.limit, self.asks, self.needed = lock._limit, the_asks(), lock._quorum
        self.deadline = math.inf if timeout is None else clock.now() + timeout
        self.busy = False
        """Whether others had the key in a database, in the present attempt."""
        self.contended = contended
        self.holder: LockInfo | None = None
        self.held: Held | None = None
        """What the flow has entered."""
        self.asked: list[tuple[Member, Ask[Any]]] = []
        """What was asked in the present attempt."""
        self._wakeup = Wakeup()

    def run(self) -> Steps[Held | Refused]:
        """Try until there is a majority, or the time is up; raises QuorumUnavailable if too few could be asked."""
        mean = 2 * timing.DEFAULT.near
        while (got := (yield from self._once())) is None and (left := self._left()) > 0:
            pause = random.uniform(0.5, 1.5) * mean  # noqa: S311 - to part contenders, not a secret
            yield from sleep(self.members[0].store, min(pause, left))
            mean = min(mean * 2, 3 * timing.DEFAULT.farthest)
        if got is not None:
            return got
        # The time may have passed in the queue of one database: whether the others can be asked is still to be heard.
        _ = yield from self._look([each for each in self.members if not each.said])
        key, databases, said = self.lock.key, len(self.members), answers(self.members)
        waited = f"within {self.timeout:g} s" if self.timeout else "at one try"
        if sum(not each.cannot for each in self.members) < self.needed:
            raise too_few(key, f"could not acquire {key!r} {waited}: ", databases, "can be asked", said)
        message = f"could not acquire {key!r} in {self.needed} of {databases} databases {waited}: {listed(said)}"
        message += "; wait longer with timeout=, or see to the holder"
        return Refused(self.holder, error=LockTimeout(message, key=key, holder=self.holder))

    def _left(self) -> float:
        return max(self.deadline - clock.now(), 0.0)

    def _once(self) -> Steps[Held | None]:
        self.busy, self.held, self.asked = False, None, []
        for each in self.members:
            each.grant = None
        got = yield from self._rounds(protocol.propose())
        if got is None:
            yield from self._give_back()
            return None
        grants = [(each, each.grant) for each in self.members if each.grant and each.number in got.confirmed]
        _, first = grants[0]
        whole = replace(first, tenure=first.tenure._replace(fence=got.fence))
        self.held = held = Held(self.lock, self.flow, self.members, whole, self.entry)
        for each, grant in grants:
            yield from each.enter(grant, self.entry.kind, held.alive)
        yield from self._give_back()
        if held.lease.remaining() > 0:
            held.grow_at(clock.now() + held.lease.ttl / 3)
            self.asks.held.add(held)
            self.flow.holds[held.store, held.key] = held
            return held
        _ = yield from held.give()
        return None

    def abandon(self) -> None:
        """After an interrupt: give back, in the background, what the attempt has got, or gets later."""
        for each in self.members:
            hold = self.flow.holds.get((each.store, each.lock.key))
            if hold is not None and hold.entered_by(each.lock):  # interrupted before it was noted
                each.hold = hold
        for member, ask in self.asked:
            if member.hold is None:
                ask.leave(self.asks)
        if self.held is not None:
            self.held.abandon(self.entry)

    def _rounds(self, proposed: int) -> Steps[Majority | None]:
        attempt = protocol.attempt(len(self.members), self.lock._ttl)
        asked = next(attempt)
        while True:
            whom = [self.members[number] for number in asked.whom]
            match asked.what:
                case What.QUEUE:
                    granted = yield from self._queue(proposed)
                case What.TAKE:
                    granted = yield from self._take(whom, proposed)
                case What.CONFIRM:
                    granted = yield from self._confirm(whom, asked.fence)
            said = dict[int, Answer]()
            for each in granted:
                grant = cast("Grant", each.grant)
                firm = not (grant.ticket or grant.local_handovers or grant.term)
                said[each.number] = Answer(grant.tenure.fence, grant.trusted_until, firm)
            try:
                asked = attempt.send((said, clock.now()))
            except StopIteration as done:
                majority: Majority | None = done.value
                return majority

    # -- giving back

    def _give_back(self) -> Steps[None]:
        """Give back what was granted and is not held; what is not answered in time goes on."""
        back = {each: each.undo(each.grant) for each in self.members if each.grant is not None and each.hold is None}
        _ = yield from self.asks.hear(back, self.limit, anyway=True)

    # -- rounds

    def _queue(self, proposed: int) -> Steps[list[Member]]:
        """The first database that answers; those that are not waited for come last.

        Or all of them at once, if nobody is known to want the key.
        """
        site, key = self.members[0].site, self.lock.key
        if not site.expects_contention(key):
            granted = yield from self._take(self.members, proposed)
            if len(granted) >= self.needed:
                return granted
            if self.busy and self._left() > 0:  # else too few can be asked, or it does not wait
                site.note_contention(key)
            return []
        silent = [each for each in self.members if self.asks.is_silent(each.store)]
        for each in self.members:
            if each in silent:
                continue
            if (yield from self._wait_in_queue(each)):
                return [each]
            if self._left() == 0 and not each.cannot:
                return []
        return (yield from self._take(silent, proposed))

    def _wait_in_queue(self, member: Member) -> Steps[bool]:
        """Take the key in one database, through its queue.

        Not any more when it does not answer, or when nobody has the key in a majority of the databases.
        """
        ask = self._ask(member, member.take(self._left()))
        yield from self.asks.gather([ask], min(self.limit, timing.DEFAULT.attention), self._wakeup, waits=True)
        while ask.pending():
            self._note_busy()
            found = yield from self._look(self.members, lambda _: not ask.pending())
            if ask.pending() and member not in found:
                self.asks.not_answered(ask)
                break
            self.holder = found.get(member) or self.holder
            free = [each for each, info in found.items() if info is None or info.state != "held"]
            if ask.pending() and len(free) >= self.needed:
                ask.health.pinned = member in free
                ask.leave(self.asks)
                return False
            yield from self.asks.gather([ask], timing.DEFAULT.attention, self._wakeup, waits=True)
        self._note_takes(self._heard({member: ask}))
        return member.grant is not None

    def _look(self, whom: Sequence[Member], enough: Enough = lambda _: False) -> Steps[dict[Member, LockInfo | None]]:
        """The rows of databases. Where somebody has the key it can be asked for; else the row says nothing of that."""
        found = yield from self._answers({each: each.look(self.limit) for each in whom}, enough, reads=True)
        for each, info in found.items():
            if info is not None and info.state == "held":
                each.note(f"held by {info}")
        return found

    def _take(self, whom: Sequence[Member], proposed: int) -> Steps[list[Member]]:
        before = sum(each.grant is not None for each in self.members)
        takes = {each: each.take(0.0, proposed) for each in whom}
        found = yield from self._answers(
            takes, lambda asks: before + sum(isinstance(ask.result, Grant) for ask in asks) >= self.needed
        )
        self._note_takes(found)
        return [each for each in whom if each.grant is not None]

    def _confirm(self, whom: Sequence[Member], fence: int) -> Steps[list[Member]]:
        until = clock.now() + self.limit
        found = yield from self._answers({each: each.confirm(cast("Grant", each.grant), fence, until) for each in whom})
        for each, grant in found.items():
            if grant is None:
                each.note("lost before it was confirmed")
            else:
                each.grant = grant
        return [each for each, grant in found.items() if grant is not None]

    # -- asking

    def _ask(self, member: Member, steps: Steps[T], *, reads: bool = False) -> Ask[T]:
        """Begin the steps; what they get after the caller has gone is given back, unless they only read."""
        ask = Ask(member.store, steps, self._wakeup, None if reads else member.undo)
        self.asked = [*self.asked, (member, ask)]
        return self.asks.ask(ask)

    def _answers(
        self, steps: Mapping[Member, Steps[T]], enough: Enough = lambda _: False, *, reads: bool = False
    ) -> Steps[dict[Member, T]]:
        """What those have answered that do in time, or until there is enough."""
        asks = {each: self._ask(each, its, reads=reads) for each, its in steps.items()}
        yield from self.asks.gather(asks.values(), self.limit, self._wakeup, enough)
        return self._heard(asks)

    def _heard(self, asks: Mapping[Member, Ask[T]]) -> dict[Member, T]:
        """The results; the asks that are not answered are left, and failures noted."""
        found = dict[Member, T]()
        for member, ask in asks.items():
            if ask.pending():
                ask.leave(self.asks)
                if ask.prompt or not member.said:
                    member.note(f"no answer in {self.limit:.2g} s", cannot=True)
            elif ask.error is None:
                found[member] = cast("T", ask.result)
            elif isinstance(ask.error, (LockStoreError, LockTimeout)):
                member.note(short(ask.error, member), cannot=isinstance(ask.error, LockStoreError))
            else:
                raise ask.error
        return found

    def _note_takes(self, takes: Mapping[Member, Grant | No]) -> None:
        for member, found in takes.items():
            if isinstance(found, Grant):
                member.grant = found
                member.note("granted")
            else:
                self.holder = found.held or self.holder
                member.note(found.why)
            if isinstance(found, No) or found.ticket:
                self._note_busy()

    def _note_busy(self) -> None:
        """Others have the key; reported once."""
        contended, self.busy, self.contended = self.contended, True, None
        if contended is not None:
            contended(self.holder)
