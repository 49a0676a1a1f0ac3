"""A majority that a flow holds: how long it is trusted, how it grows again, and how it is left.

Rule: a majority that was found lost is lost for good, whatever its databases say later. Once it is over, no database is
added to it.
"""

from __future__ import annotations

import contextlib
import functools
import os
import sys
import threading
from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING, Any

from dblock.core import clock, runtime
from dblock.core.deliveries import deliveries
from dblock.core.errors import LockLost, LockStoreError, Reason
from dblock.core.holding.flow import Flow, Hold
from dblock.core.lock.base import BaseLock
from dblock.core.log import warn
from dblock.core.observing.events import Kind
from dblock.core.protocol.steps import Steps
from dblock.core.values import State
from dblock.core.wakeup.registry import Wakeup
from dblock.majority import member, protocol
from dblock.majority.asking import Ask, the_asks
from dblock.majority.member import No, Part, listed, nothing, short
from dblock.majority.protocol import QuorumUnavailable

if TYPE_CHECKING:
    from dblock.majority.base import BaseQuorumLock


class _Growth:
    """A moment at which missing databases are asked again; among the deadlines of the process, as a connection is."""

    shutdown_fd = 0

    def __init__(self, held: Held) -> None:
        self._held = held

    def cut(self) -> None:
        """The moment has come."""
        try:
            self._held.grow()
        except Exception as error:  # noqa: BLE001 - others depend on this thread
            warn("could not ask the missing databases of %r: %r", self._held.key, error)


class Held:
    """A majority that a flow holds, and all that its threads and callbacks need of it."""

    def __init__(self, lock: BaseQuorumLock, flow: Flow, locks: Sequence[BaseLock], fence: int, kind: str) -> None:
        self.lock, self.flow, self.locks, self.fence = lock, flow.ref, locks, fence
        self.kind = kind
        """How it was entered: `with`, or `acquire`."""
        self.key, self.quorum, self.place = lock.key, lock._quorum, lock._place()
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
        self.revoked: str | None = None
        """By whom and why it was asked back in one of the databases."""
        self.interrupted, self.cancelling = False, 0
        """As of a hold."""
        self._mutex = threading.RLock()  # a signal handler may run between any two lines
        self._growing = False
        """Whether missing databases will be asked again."""
        self._at_risk = False
        self._observed = False
        """Whether its beginning was reported, and its end was not."""
        for number, each in enumerate(locks):
            told: Any = each
            told._majority = lock._all_names
            told._interrupt_body = functools.partial(self._on_lost, number)
            told._who_hears_of_loss = lambda _: []
            told._who_hears_of_risk = self._on_at_risk
            told._who_hears_of_revocation = self._on_revoked

    def add(self, number: int, part: Part) -> None:
        """Hold one more database."""
        with self._mutex:
            self.parts[number] = part

    def remaining(self) -> float:
        """Seconds of trust left; 0.0 once it is lost."""
        with self._mutex:
            if self.loss is not None or self.over:
                return 0.0
            moments = (part.hold.lease.trusted_until for part in self.parts.values())
            left = protocol.trusted_until(moments, self.quorum) - clock.now()
            if left <= 0:
                self.lose()
            return max(left, 0.0)

    @property
    def state(self) -> State:
        """As of a lock: `held` if a majority of its leases are."""
        if self.remaining() <= 0:
            return "lost"
        good = sum(part.hold.lease.state == "held" for part in list(self.parts.values()))
        return "held" if good >= self.quorum else "at_risk"

    def lose(self, reason: Reason | None = None) -> None:
        """Mark it lost, for good, and say so once. By default for the reason of a database."""
        with self._mutex:
            if self.loss is not None:
                return
            reasons = [loss.reason for part in self.parts.values() if (loss := part.hold.lease.loss) is not None]
            self.loss = reason or (reasons[-1] if reasons else Reason.EXPIRED)
            for part in self.parts.values():
                part.hold.lease.renewing = False
        warn("lost the majority lock on %r (fence %d): %s", self.key, self.fence, self.why())
        self._cancel_body()
        for call in self.lock._who_hears_of_loss(self.loss):
            deliveries.put(call)
        self.tell(Kind.LOST, reason=self.loss)

    def why(self) -> str:
        """Why it is lost, for people."""
        names, told = self.lock.names, dict(self.said)
        for number, part in list(self.parts.items()):
            if (loss := part.hold.lease.loss) is not None:
                told[names[number]] = f"lost, {loss.reason}"
        return f"fewer than {self.quorum} of {len(names)} databases could be trusted: {listed(told)}"

    def lost(self) -> LockLost:
        """The error for a majority that is over."""
        message = f"{self.key!r} (fence {self.fence}) is lost: {self.why()}"
        return LockLost(message, key=self.key, reason=self.loss or Reason.EXPIRED)

    def tell(self, kind: Kind, **known: Any) -> None:
        """Report an event of the majority to the observers."""
        observers = runtime.current.watchdog.observers
        begins = kind is Kind.ACQUIRED
        if observers is None or not (begins or self._observed):
            return
        self._observed = begins or (kind is Kind.RELEASED and self.entries > 0)
        held = 0.0 if begins else clock.now() - self.began
        event = self.lock._event(kind, self.fence)._replace(**{"depth": self.entries, "held": held, **known})
        if kind is Kind.LOST:
            deliveries.put(functools.partial(observers.call, event))
        else:
            observers.call(event)

    # -- called from other threads, which must not wait

    def _on_lost(self, number: int, hold: Hold) -> None:
        """A database is lost: perhaps all is; else it is taken again."""
        loss, part = hold.lease.loss, self.parts.get(number)
        if self.over or loss is None or part is None or part.hold is not hold:
            return
        self.said[self.lock.names[number]] = f"lost, {loss.reason}"
        if loss.reason is Reason.RELEASED:  # by release_all()
            self.lose()
        elif self.remaining() > 0:
            self.grow_later(0.0)

    def _on_at_risk(self) -> list[Callable[[], object]]:
        """A renewal is late in one of the databases; who hears of that."""
        before, self._at_risk = self._at_risk, self.state == "at_risk"
        return self.lock._who_hears_of_risk() if self._at_risk and not before else []

    def _on_revoked(self, words: str) -> list[Callable[[], object]]:
        """It was asked back in one of the databases; who hears of that."""
        before, self.revoked = self.revoked, words
        return self.lock._who_hears_of_revocation(words) if before is None else []

    def _cancel_body(self) -> None:
        """Cancel the asyncio task that runs in a block, with `interrupt=True`."""
        flow = self.flow()
        task = None if flow is None else flow.task
        if not self.lock.options.interrupt or task is None:
            return

        def cancel() -> None:
            if not self.interrupted and any(each[1] is self for each in self.lock._withs):
                self.interrupted = True
                task.cancel()

        with contextlib.suppress(RuntimeError):  # the loop is closed
            task.get_loop().call_soon_threadsafe(cancel)

    # -- growing again

    def _is_live(self) -> bool:
        """Whether databases may be added: it is trusted, and its flow can still leave it."""
        flow = self.flow()
        alive = flow is not None and (self.kind == "with" or not flow.ended()) and os.getpid() == self.process
        return alive and clock.now() < self.began + self.lock.options.max_hold and self.remaining() > 0

    def _missing(self) -> list[int]:
        """The databases that are not held."""
        held = [number for number, part in list(self.parts.items()) if part.hold.lease.loss is None]
        return [number for number in range(len(self.locks)) if number not in held]

    def missing(self) -> list[str]:
        """The names of the databases that it goes without."""
        return [] if self.over or self.loss else [self.lock.names[number] for number in self._missing()]

    def grow_later(self, seconds: float | None = None) -> None:
        """Ask the missing databases again after so many seconds, by default a third of the ttl; and so on."""
        if seconds is None and (self._growing or not self._missing()):
            return
        self._growing = True
        wait = self.ttl / 3 if seconds is None else seconds
        runtime.current.deadlines.arm(_Growth(self), clock.now() + wait)

    def grow(self) -> None:
        """Ask the missing databases, without waiting for their answers; and again later."""
        self._growing = False
        if not self._is_live() or not self._missing():
            return
        if self.loop is None:
            self._ask_missing()
        else:
            with contextlib.suppress(RuntimeError):  # the loop is closed, and the flow with it
                self.loop.call_soon_threadsafe(self._ask_missing)
        self.grow_later()

    def _ask_missing(self) -> None:
        for number in self._missing():
            _ = the_asks().ask(Ask(self.locks[number]._store(), self._take_again(number), nothing, Wakeup()))

    def _take_again(self, number: int) -> Steps[None]:
        """Take one more database, with the fence that the majority has at least."""
        lock, name = self.locks[number], self.lock.names[number]
        try:
            found = yield from member.take(lock, 0.0)
            if isinstance(found, No):
                self._note(number, found.why)
                return
            fence, until = max(self.fence, found.tenure.fence), clock.now() + self.lock._limit
            grant = yield from member.confirm(lock, found, fence, until)
        except LockStoreError as error:
            self._note(number, short(error, lock._store()))
            return
        with self._mutex:
            flow = self.flow()
            if grant is not None and flow is not None and self._is_live() and number in self._missing():
                self.parts[number] = yield from member.hold(lock, flow, grant, self.kind)
                self.said[name] = "granted"
                return
        yield from member.give_back(lock, found.tenure.owner)

    def _note(self, number: int, said: str) -> None:
        """Note what a database has said, unless another ask has got it meanwhile."""
        with self._mutex:
            if number in self._missing():
                self.said[self.lock.names[number]] = said

    # -- asking all that are held

    def each(self, steps: Callable[[Part], Steps[bool]]) -> Steps[bool]:
        """Whether a majority of the databases answers True; raises LockLost, or QuorumUnavailable."""
        asks, wakeup, limit, names = the_asks(), Wakeup(), self.lock._limit, self.lock.names
        asked = {
            number: asks.ask(Ask(part.hold.store, steps(part), nothing, wakeup))
            for number, part in sorted(self.parts.items())
            if part.hold.lease.loss is None
        }
        yield from asks.gather(list(asked.values()), limit, wakeup, lambda: True)
        said = dict(self.said)
        good = 0
        for number, ask in asked.items():
            answer = None if ask.pending() else ask.use()
            good += answer is True
            if answer is None:
                said[names[number]] = short(ask.error, ask.store) if ask.error else f"no answer in {limit:.2g} s"
            elif not answer:
                said[names[number]] = "lost"
        if good >= self.quorum:
            return True
        if self.remaining() <= 0:
            raise self.lost()
        message = f"fewer than {self.quorum} of {len(names)} databases have confirmed {self.key!r}"
        raise QuorumUnavailable(f"{message}: {listed(said)}", key=self.key, answers=said)

    def leave(self) -> Steps[int]:
        """Leave what is held of each database; of how many it was not lost, as far as is known.

        Where others probably wait, the database in whose queue they do comes last, so that the waiter that is granted
        the key there finds the others free.
        """
        asks, wakeup, begun, lost = the_asks(), Wakeup(), set[int](), 0
        try:
            self._end()
            order = sorted(self.parts)
            likely = runtime.current.site(self.locks[0]._store()).expects_contention(self.key)
            for some in (order[1:], order[:1]) if likely else (order,):
                asked = []
                for number in some:
                    part = self.parts[number]
                    asked.append(Ask(part.hold.store, member.leave(part), nothing, wakeup))
                    begun.add(number)
                    asks.begin_ask(asked[-1])
                yield from asks.gather(asked, self.lock._limit, wakeup, lambda: True)
                lost += sum(ask.use() is False for ask in asked if not ask.pending())
        except GeneratorExit:
            raise
        except BaseException:
            self._leave_in_background(but=begun)
            self.entries = 0
            self.tell(Kind.RELEASED, reason="interrupted")
            raise
        return len(self.parts) - lost

    def abandon(self) -> None:
        """Leave it in the background, after an interrupt; not if that has begun already, or in a forked child."""
        if not self.over and self.process == os.getpid():
            self._end()
            self._leave_in_background()
            self.entries = 0
            self.tell(Kind.RELEASED, reason="interrupted")

    def _end(self) -> None:
        """Nothing is added from now on."""
        with self._mutex:
            self.over = True
            for part in self.parts.values():
                part.hold.lease.renewing = False
        flow = self.flow()
        mine = {} if flow is None else the_asks().held.get(flow, {})
        if mine.get(self.place) is self:
            del mine[self.place]

    def _leave_in_background(self, but: Collection[int] = ()) -> None:
        for number, part in self.parts.items():
            if number not in but:
                member.leave_in_background(the_asks(), part)
