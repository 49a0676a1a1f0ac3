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
from dblock.core.lock.base import BaseLock
from dblock.core.lock.bookkeeping import take_out
from dblock.core.log import warn
from dblock.core.protocol.sending import Database
from dblock.core.protocol.steps import Steps
from dblock.core.protocol.store import Store
from dblock.core.values import Grant, State
from dblock.core.wakeup.registry import Wakeup
from dblock.majority import member, protocol
from dblock.majority.asking import Ask, the_asks
from dblock.majority.member import No, listed, short
from dblock.majority.protocol import QuorumUnavailable

if TYPE_CHECKING:
    from dblock.majority.base import BaseQuorumLock


@dataclass(frozen=True)
class Place:
    """The databases of a majority lock, where a plain lock has its store; in whichever order they are given."""

    stores: frozenset[Store]
    name: str = field(compare=False)
    database: Database = field(compare=False)
    """The first of them, which has the local clock."""
    renewable: ClassVar = False
    history: ClassVar = ""


class _Loss(Loss):
    """The loss of a majority, of which its words say all."""

    def __str__(self) -> str:
        return self.words


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
                moments = (hold.lease.trusted_until for hold in held.parts.values())
                self.trusted_until = protocol.trusted_until(moments, held.quorum)
            return super().remaining()

    @property
    def state(self) -> State:
        """As of a lock: `held` if a majority of its leases are."""
        if self.remaining() <= 0:
            return "lost"
        good = sum(hold.lease.state == "held" for hold in list(self._held.parts.values()))
        return "held" if good >= self._held.quorum else "at_risk"

    def lose(self, loss: Loss | None = None) -> bool:
        """Mark it lost, for good; without a loss for the reason of a database. False if it was already."""
        held = self._held
        with self._mutex:
            reasons = [found.reason for hold in held.parts.values() if (found := hold.lease.loss) is not None]
            reason = loss.reason if loss is not None else reasons[-1] if reasons else Reason.EXPIRED
            return super().lose(_Loss(reason, words=held.why())) and held.renew_no_more()


class Held(Hold):
    """A majority that a flow holds, and all that its threads and callbacks need of it."""

    shutdown_fd = 0
    """The moment at which missing databases are asked again is among the deadlines, as a connection is."""

    def __init__(
        self, lock: BaseQuorumLock, flow: Flow, members: Sequence[BaseLock], grant: Grant, entry: Entry
    ) -> None:
        before = lock._hold_here(flow)
        outer = before if before is not None and before.open_entries() else None
        super().__init__(lock._store(), flow, grant, entry, lock.options, outer=outer)
        self.lock, self.members, self.quorum = lock, members, lock._quorum
        self.parts: dict[int, Hold] = {}
        """What is held of each database, by its number."""
        self.said: dict[str, str] = {}
        """The last answer of each database."""
        self.lease: Trust = Trust(self, grant)
        self.loop = asyncio.get_running_loop() if members[0]._store().asynchronous else None
        self._begun = set[int]()
        """The databases that are being left."""
        self._at_risk = False
        for number, each in enumerate(members):
            told: Any = each
            told._majority = self.store.name
            told._interrupt_body = partial(self._on_lost, number)
            told._who_hears_of_loss = lambda _: []
            told._who_hears_of_risk = self._on_at_risk
            told._who_hears_of_revocation = self._on_revoked

    def why(self) -> str:
        """Why it is lost, for people."""
        names, told = self.lock.names, dict(self.said)
        for number, hold in list(self.parts.items()):
            if (loss := hold.lease.loss) is not None:
                told[names[number]] = f"lost, {loss.reason}"
        return f"fewer than {self.quorum} of {len(names)} databases could be trusted: {listed(told)}"

    def alive(self) -> object:
        """None once nobody can leave it who has not; then its databases are renewed no more."""
        return None if self.entries and not self.open_entries() else self

    def renew_no_more(self) -> bool:
        """Let the leases of its databases end."""
        for hold in list(self.parts.values()):
            hold.lease.renewing = False
        return True

    def begin(self) -> None:
        """It is the flow's from now on, and grows."""
        flow = self.flow()
        assert flow is not None  # noqa: S101 - it runs
        self.grow_at(clock.now() + self.lease.ttl / 3)
        the_asks().held.add(self)
        flow.holds[self.store, self.key] = self

    # -- called from other threads, which must not wait

    def _on_lost(self, number: int, hold: Hold) -> None:
        """A database is lost: perhaps all is; else it is taken again."""
        loss = hold.lease.loss
        if not self.entries or loss is None or self.parts.get(number) is not hold:
            return
        self.said[self.lock.names[number]] = f"lost, {loss.reason}"
        if loss.reason is Reason.RELEASED:  # by release_all()
            _ = self.lease.lose(loss)
        if self.lease.remaining() > 0:
            self.grow_at(clock.now())
        else:
            runtime.current.watchdog.announce(self)

    def _on_at_risk(self) -> list[Callable[[], object]]:
        """A renewal is late in one of the databases; who hears of that."""
        before, self._at_risk = self._at_risk, self.lease.state == "at_risk"
        return self.lock._who_hears_of_risk() if self._at_risk and not before else []

    def _on_revoked(self, words: str) -> list[Callable[[], object]]:
        """It was asked back in one of the databases; who hears of that."""
        before, self.revoked = self.revoked, words
        return self.lock._who_hears_of_revocation(words) if before is None else []

    # -- growing again

    def _is_live(self) -> bool:
        """Whether databases may be added: it is trusted, and its flow can still leave it."""
        if self.orphaned or self.flow() is None or not self.can_be_released or self.who["pid"] != os.getpid():
            return False
        return clock.now() < self.lease.acquired + self.max_hold and self.lease.remaining() > 0

    def _missing(self) -> list[int]:
        """The databases that are not held."""
        held = [number for number, hold in list(self.parts.items()) if hold.lease.loss is None]
        return [number for number in range(len(self.members)) if number not in held]

    def missing(self) -> list[str]:
        """The names of the databases that it goes without."""
        return [self.lock.names[number] for number in self._missing()] if self.entries and not self.lease.loss else []

    def grow_at(self, moment: float) -> None:
        """Ask the missing databases again at that local time, and so on."""
        if self._missing():
            runtime.current.deadlines.arm(self, moment)

    def cut(self) -> None:
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
        for number in self._missing():
            _ = the_asks().ask(Ask(self.members[number]._store(), self._take_again(number), Wakeup()))

    def _take_again(self, number: int) -> Steps[None]:
        """Take one more database, with the fence that the majority has at least."""
        lock, name = self.members[number], self.lock.names[number]
        found: Grant | No | None = None
        grant: Grant | No | None = None
        try:
            found = grant = yield from member.take(lock, 0.0)
            if isinstance(found, Grant):
                fence, until = max(self.tenure.fence, found.tenure.fence), clock.now() + self.lock._limit
                grant = yield from member.confirm(lock, found, fence, until)
        except LockStoreError as error:
            grant = No(short(error, lock._store()))
        with self.lease._mutex:
            flow, is_missing = self.flow(), number in self._missing()  # else another ask has got it meanwhile
            if isinstance(grant, Grant) and is_missing and flow is not None and self._is_live():
                self.parts[number] = yield from member.hold(lock, flow, grant, self.entries[0].kind, self.alive)
                self.said[name] = "granted"
                return
            if isinstance(grant, No) and is_missing:
                self.said[name] = grant.why
        if isinstance(found, Grant) and not isinstance(grant, No):
            yield from member.give_back(lock, found.tenure.owner)

    # -- asking all that are held

    def each(self, steps: Callable[[BaseLock, Hold], Steps[bool]]) -> Steps[bool]:
        """Whether a majority of the databases answers True; raises LockLost, or QuorumUnavailable."""
        limit, names, said = self.lock._limit, self.lock.names, dict(self.said)
        asked = {
            number: (hold.store, steps(self.members[number], hold))
            for number, hold in sorted(self.parts.items())
            if hold.lease.loss is None
        }
        heard = yield from the_asks().hear(asked, limit)
        good = sum(answer is True for answer in heard.values())
        for number in asked:
            answer = heard.get(number)
            if isinstance(answer, LockError):
                said[names[number]] = short(answer, self.parts[number].store)
            elif not answer:
                said[names[number]] = "lost" if number in heard else f"no answer in {limit:.2g} s"
        if good >= self.quorum:
            return True
        if self.lease.remaining() <= 0:
            raise self.lock._lost(self)
        message = f"fewer than {self.quorum} of {len(names)} databases have confirmed {self.key!r}"
        raise QuorumUnavailable(f"{message}: {listed(said)}", key=self.key, answers=said)

    # -- leaving

    def give(self) -> Steps[bool]:
        """Leave what is held of each database; False if too few of them were not lost, as far as is known.

        Where others probably wait, the database in whose queue they do comes last, so that the waiter that is granted
        the key there finds the others free.
        """
        self._end()
        lost, order = 0, sorted(self.parts)
        likely = runtime.current.site(self.members[0]._store()).expects_contention(self.key)
        for some in (order[1:], order[:1]) if likely else (order,):
            leaving = {number: (self.parts[number].store, self._leave(number)) for number in some}
            heard = yield from the_asks().hear(leaving, self.lock._limit, anyway=True)
            lost += sum(answer is not True for answer in heard.values())
        return len(self.parts) - lost >= self.quorum

    def abandon(self, entry: Entry) -> Steps[None]:
        """After an interrupt leave by the entry, the last one in the background; in a forked child nothing is done."""
        self.entries = self.open_entries(but=entry)
        if not self.entries and self.who["pid"] == os.getpid():
            self._end()
            for number in set(self.parts) - self._begun:
                the_asks().begin(self.parts[number].store, self._leave(number))
        yield from ()

    def _leave(self, number: int) -> Steps[bool]:
        self._begun.add(number)
        return member.leave(self.members[number], self.parts[number])

    def _end(self) -> None:
        """Nothing is added from now on."""
        with self.lease._mutex:
            self.entries = []
        _ = self.renew_no_more()
        take_out(self)
