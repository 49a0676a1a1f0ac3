"""A majority that a flow holds: how long it is trusted, how it grows again, and how it is left.

It is a hold, as that of a plain lock: with entries, a lease, and a report of its loss. Its lease is the trust in those
of the databases, each of which is an ordinary hold of the flow, which the watchdog renews.

Rule: a majority that was found lost is lost for good, whatever its databases say later. Once it was left, no database
is added to it.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

from dblock.core import clock, runtime
from dblock.core.errors import LockError, LockStoreError, Loss, Reason
from dblock.core.holding.flow import Entry, Flow, Hold
from dblock.core.holding.lease import Lease
from dblock.core.lock.bookkeeping import take_out
from dblock.core.log import warn
from dblock.core.protocol.sending import Database
from dblock.core.protocol.steps import Steps
from dblock.core.protocol.store import Store
from dblock.core.values import Grant, State
from dblock.core.wakeup.registry import Wakeup
from dblock.majority import protocol
from dblock.majority.asking import Ask, the_asks
from dblock.majority.member import Member, No, answers, listed, short, too_few

if TYPE_CHECKING:
    from dblock.majority.base import BaseQuorumLock


@dataclass(frozen=True)
class Databases:
    """The databases of a majority lock, where a plain lock has its store; in whichever order they are given."""

    stores: frozenset[Store]
    name: str = field(compare=False)
    database: Database = field(compare=False)
    """The first of them, which has the local clock."""
    renewable: ClassVar = False
    history: ClassVar = ""


class Trust(Lease):
    """The lease of a majority: it is trusted until the q-th latest moment of those of its databases."""

    def __init__(self, held: Held, grant: Grant) -> None:
        super().__init__(grant, held.store.database.now, grace=0.0, renewing=False)
        self._held = held

    def remaining(self) -> float:
        """Seconds of trust left; 0.0 once it was lost, or left."""
        held = self._held
        with self._mutex:
            if not held.entries:
                return 0.0
            if self.loss is None:
                moments = (hold.lease.trusted_until for hold in held.holds())
                self.trusted_until = protocol.trusted_until(moments, held.quorum)
            return super().remaining()

    @property
    def state(self) -> State:
        """As of a lock: `held` if a majority of its leases are."""
        if self.remaining() <= 0:
            return "lost"
        good = sum(hold.lease.state == "held" for hold in self._held.holds())
        return "held" if good >= self._held.quorum else "at_risk"

    def lose(self, loss: Loss | None = None) -> bool:
        """Mark it lost, for good; without a loss for the reason of a database. False if it was already."""
        held = self._held
        with self._mutex:
            lost = {each.name: each.loss.reason for each in held.members if each.loss is not None}
            reason = loss.reason if loss is not None else [Reason.EXPIRED, *lost.values()][-1]
            said = listed({**answers(held.members), **{name: f"lost, {why}" for name, why in lost.items()}})
            words = f"fewer than {held.quorum} of {len(held.members)} databases could be trusted: {said}"
            return super().lose(Loss(reason, words=words)) and held.renew_no_more()


class Held(Hold):
    """A majority that a flow holds, and all that its threads and callbacks need of it."""

    def __init__(self, lock: BaseQuorumLock, flow: Flow, members: Sequence[Member], grant: Grant, entry: Entry) -> None:
        super().__init__(lock._place.store(), flow, grant, entry, lock.options, outer=lock._hold_here(flow))
        self.lock, self.members, self.quorum = lock, members, lock._quorum
        self.lease: Trust = Trust(self, grant)
        self.loop = asyncio.get_running_loop() if members[0].store.asynchronous else None
        for each in members:
            told: Any = each.lock
            told._majority = self.store.name
            told._interrupt_body = partial(self._on_lost, each)
            told._who_hears = self._who_hears

    def holds(self) -> list[Hold]:
        """What is held of the databases, or was lost."""
        return [hold for each in self.members if (hold := each.hold) is not None]

    def alive(self) -> object:
        """None once nobody can leave it who has not; then its databases are renewed no more."""
        return None if self.entries and not self.open_entries() else self

    def renew_no_more(self) -> bool:
        """Let the leases of its databases end."""
        for hold in self.holds():
            hold.lease.renewing = False
        return True

    # -- called from other threads, which must not wait

    def _on_lost(self, member: Member, hold: Hold) -> None:
        """A database is lost: perhaps all is; else it is taken again."""
        loss = hold.lease.loss
        if not self.entries or loss is None or member.hold is not hold:
            return
        member.note(f"lost, {loss.reason}")
        if loss.reason is Reason.RELEASED:  # by release_all()
            _ = self.lease.lose(loss)
        if self.lease.remaining() > 0:
            self.grow_at(clock.now())
        else:
            runtime.current.watchdog.announce(self)

    def _who_hears(self, of: str, **known: Any) -> list[Callable[[], object]]:
        """What happens in one of the databases is told once: that all is at risk, and that it was asked back."""
        told = True
        if of == "on_at_risk":
            told, self.risk_reported = self.risk_reported, self.lease.state == "at_risk"
            told = told or not self.risk_reported
        elif of == "on_revoke":
            told, self.revoked = self.revoked is not None, known["words"]
        return [] if told else self.lock._who_hears(of, **known)

    # -- growing again

    def _is_live(self) -> bool:
        """Whether databases may be added: it is trusted, and its flow can still leave it."""
        good = clock.now() < self.lease.acquired + self.max_hold and self.lease.remaining() > 0
        return good and self.can_be_released and not self.orphaned

    def missing(self) -> list[Member]:
        """The databases that are not held."""
        return [each for each in self.members if each.hold is None or each.loss is not None]

    def grow_at(self, moment: float) -> None:
        """Ask the missing databases again at that local time, and so on."""
        if self.missing():
            runtime.current.deadlines.arm(self._grow, moment)

    def _grow(self) -> None:
        """Ask the missing databases, without waiting for their answers: the moment has come."""
        try:
            if self._is_live():
                self.grow_at(clock.now() + self.lease.ttl / 3)  # first: what is lost from now on is asked at once
                if self.loop is None:
                    self._ask_missing()
                elif not self.loop.is_closed():
                    self.loop.call_soon_threadsafe(self._ask_missing)
        except Exception as error:  # noqa: BLE001 - others depend on this thread
            warn("could not ask the missing databases of %r: %r", self.key, error)

    def _ask_missing(self) -> None:
        for each in self.missing():
            _ = the_asks().ask(Ask(each.store, self._take_again(each), Wakeup()))

    def _take_again(self, member: Member) -> Steps[None]:
        """Take one more database, with the fence that the majority has at least."""
        grant: Grant | None = None
        why = ""
        try:
            found = yield from member.take()
            if isinstance(found, No):
                why = found.why
            else:
                fence, until = max(self.tenure.fence, found.tenure.fence), clock.now() + self.lock._limit
                grant = yield from member.confirm(found, fence, until)
        except LockStoreError as error:
            why = short(error, member)
        with self.lease._mutex:
            is_missing = member in self.missing()  # else another ask has got it meanwhile
            if grant is not None and is_missing and self._is_live():
                yield from member.enter(grant, self.entries[0].kind, self.alive)
                member.note("granted")
                return
            if why and is_missing:
                member.note(why)
        if grant is not None:
            yield from member.give_back(grant.tenure.owner)

    # -- asking all that are held

    def each(self, steps: Callable[[Member], Steps[bool]]) -> Steps[bool]:
        """Whether a majority of the databases answers True; raises LockLost, or QuorumUnavailable."""
        limit, said = self.lock._limit, answers(self.members)
        asked = {each: steps(each) for each in self.members if each not in self.missing()}
        heard = yield from the_asks().hear(asked, limit)
        for each in asked:
            answer = heard.get(each, f"no answer in {limit:.2g} s")
            if answer is not True:
                said[each.name] = short(answer, each) if isinstance(answer, LockError) else answer or "lost"
        if sum(answer is True for answer in heard.values()) >= self.quorum:
            return True
        if self.lease.remaining() <= 0:
            raise self.lock._lost(self)
        raise too_few(self.key, "", len(self.members), f"have confirmed {self.key!r}", said)

    # -- leaving

    def give(self) -> Steps[bool]:
        """Leave what is held of each database; False if too few of them were not lost, as far as is known.

        Where others probably wait, the database in whose queue they do comes last, so that the waiter that is granted
        the key there finds the others free.
        """
        self._end()
        lost, held = 0, [each for each in self.members if each.hold is not None]
        likely = self.members[0].site.expects_contention(self.key)
        for some in (held[1:], held[:1]) if likely else (held,):
            heard = yield from the_asks().hear({each: each.leave() for each in some}, self.lock._limit, anyway=True)
            lost += sum(answer is not True for answer in heard.values())
        return len(held) - lost >= self.quorum

    def abandon(self, entry: Entry) -> None:
        """After an interrupt leave by the entry, the last one in the background; in a forked child nothing is done."""
        self.entries = self.open_entries(but=entry)
        if not self.entries and self.who["pid"] == os.getpid():
            self._end()
            for each in self.members:
                if each.hold is not None and not each.leaving:
                    _ = the_asks().ask(Ask(each.store, each.leave(), Wakeup()), anyway=True)

    def _end(self) -> None:
        """Nothing is added from now on."""
        with self.lease._mutex:
            self.entries = []
        _ = self.renew_no_more()
        take_out(self)
