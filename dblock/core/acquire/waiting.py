"""How a flow waits for a key that somebody else has: in the line of its process, and in the queue of the database.

Rule: a waiter holds no connection while it pauses, and no pause overshoots the timeout or the end of the holder's
lease. Why the queue works is said in `dblock.core.protocol.queue`; how often to look is decided here.
"""

from __future__ import annotations

import contextlib
import math
import random
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Final, Literal, Protocol

from dblock.core.acquire import local_queue
from dblock.core.acquire.local_queue import OFFER_TIMEOUT, HandoverOffer, LocalQueue, LocalWaiter, TakeAttempt
from dblock.core.errors import LockStoreError, StoreBusy, StoreConflict, StoreUnanswered
from dblock.core.holding.flows import new_owner
from dblock.core.protocol import queue
from dblock.core.protocol.queue import View, give_back
from dblock.core.protocol.steps import Steps, sleep, wait
from dblock.core.protocol.tenures import PATIENCE, WORTH, Database, extend, inspect, pauses
from dblock.core.values import Grant, LockInfo, Tenure
from dblock.core.wakeup import registry
from dblock.core.wakeup.registry import Wakeup

POLL_MIN: Final = 0.003
"""Seconds between two looks of the head of the queue, at least, where nobody can call it."""
POLL_MAX: Final = 1.0
"""Seconds between two looks of any waiter that nobody can call, at most."""
POLL_NOTIFIED: Final = 2.0
"""Seconds between two looks of a waiter that will be called."""
APART: Final = 0.02
"""Seconds between two neighbours' looks when a holder's lease has ended: the first of them sees to it for all."""
GRANT_RETRY: Final = 0.1
"""Seconds between two tries to have a free key granted, at most."""
LOCAL_HANDOVER_WAIT: Final = 0.1
"""Seconds for which the first of a line waits to be handed the key before it stands in the queue."""
DEADLOCK_CHECK: Final = 0.5
"""Seconds between two looks for a deadlock, of a waiter that holds other keys."""
LEAVE_TIMEOUT: Final = WORTH
"""Seconds after its time is up for which a waiter tries to leave in order; its place ends by itself."""


class WaiterServices(Protocol):
    """What the process of a waiter does for it."""

    def keep(self, owner: str, wakeup: Wakeup, /) -> bool:
        """See to it that a place in the queue, named by its owner token, is kept; False if the waiter has to.

        `wakeup` is the waiter's, and tells whether it can still answer.
        """
        ...

    def leave(self, owner: str, /) -> None:
        """The place is needed no more."""
        ...

    def enter(self, key: str, member: LocalWaiter, trial: TakeAttempt | None, /) -> LocalQueue | None:
        """Wait with those of this process who want the key too; None where everybody waits alone."""
        ...

    def listen(self) -> None:
        """Begin to listen, if need be."""
        ...

    @property
    def channel(self) -> str:
        """Where the process listens, or soon will; empty where it cannot."""
        ...

    @property
    def called(self) -> bool:
        """Does the database call it there now, from wherever the key is given back?"""
        ...


class PollingOnly:
    """Nobody attends to the waiter: it keeps its place and looks for itself."""

    channel = ""
    called = False

    def keep(self, owner: str, wakeup: Wakeup) -> bool:
        return False

    def leave(self, owner: str) -> None:
        pass

    def enter(self, key: str, member: LocalWaiter, trial: TakeAttempt | None) -> None:
        pass

    def listen(self) -> None:
        pass


class Outcome(Enum):
    """What else may become of a place in the queue."""

    LOST = "passed over: join anew"
    GONE = "no row, or no ticket: try to take the key again"


@dataclass(slots=True)
class Waiter:
    """A flow that stands in the queue of a key, if need be in one place after the other."""

    database: Database
    request: dict[str, Any]
    deadline: float
    until: float
    """The local time after which no statement is of use."""
    services: WaiterServices
    holds_other_keys: bool
    heartbeat_due: float = 0.0
    """The local time from which the place is to be kept, if nobody else does it."""
    suspect: float = 0.0
    """The local time from which to look for a deadlock."""
    wakeup: Wakeup = field(default_factory=Wakeup)
    member: LocalWaiter | None = None
    """What it is in the line of its process."""
    holder: LockInfo | None = None
    """Whom it found holding the key before it began to wait."""

    def wait(
        self, holder: LockInfo | None, trial: TakeAttempt | None
    ) -> Steps[Grant | LockInfo | Literal[Outcome.GONE]]:
        """A grant, or the row as it was at the deadline; or GONE. `holder` is whom we saw when our trial had failed."""
        yield from wait(0.0, self.wakeup)  # refused where it could not end well, before anybody counts on us
        database, key, member = self.database, self.request["key"], LocalWaiter(self.request, self.wakeup)
        self.holder = holder
        try:
            together = self.request["fair"] and not self.holds_other_keys
            line = self.services.enter(key, member, trial) if together else None
            if line is None:
                if trial is not None:
                    trial.end(got=False)
                return (yield from self.stand())
            if holder is not None:
                line.holder = holder
            found = yield from self._behind(member)
            if found is None:
                self.member = member
                found = yield from self.stand()
            (member.line or line).leave(member, got=isinstance(found, Grant))
            if not isinstance(found, Grant):  # from now on nobody grants us anything
                found = (yield from self._late(member)) or found
            if isinstance(found, Grant):
                self.request["owner"] = found.tenure.owner
        except BaseException as error:
            if member.line is not None:
                member.line.leave(member, got=False)
            if member.claim() and not isinstance(error, GeneratorExit):
                patience = self._left() if isinstance(error, LockStoreError) else PATIENCE
                yield from give_back(database, key, member.claim(), patience)
            raise
        return found

    def _behind(self, member: LocalWaiter) -> Steps[Grant | LockInfo | Literal[Outcome.GONE] | None]:
        """Wait in a line to be handed the key; None when it is for us to stand in the queue."""
        database, now = self.database, self.database.now
        hope = math.inf
        doubt = 0.0
        while True:
            line = local_queue.standing(database, self.request["key"], member)
            if (offer := member.offer) is not None and (
                not member.chosen or now() >= max(doubt, offer.time + OFFER_TIMEOUT)
            ):
                doubt = now() + OFFER_TIMEOUT
                member.grant = yield from self._adopt(member, offer)
            if (grant := member.grant) is not None:
                if now() < grant.trusted_until:
                    return grant
                member.grant = None
                _ = yield from queue.release(database, grant.tenure, 1)  # we were told too late for it to be of use
            left = self.deadline - now()
            if left <= 0:
                return (yield from self._holder(line)) or Outcome.GONE
            pause = POLL_NOTIFIED
            if line.is_first(member):
                hope = min(hope, now() + LOCAL_HANDOVER_WAIT)
                if (not line.held_in_process or now() >= hope) and line.withdraw(member):
                    if member.offer is not None:
                        member.grant = yield from self._adopt(member, member.offer)
                    if member.grant is None:
                        return None
                    continue
                pause = hope - now() if now() < hope else LOCAL_HANDOVER_WAIT
            member.content = True
            yield from wait(min(pause, left), self.wakeup)  # not at all if something has been said already
            _ = self.wakeup.consume()

    def _holder(self, line: LocalQueue) -> Steps[LockInfo | None]:
        """Whom to name when the time is up; one of a line asks for all whose time is."""
        if line.holder is None and line.asking:
            yield from wait(LEAVE_TIMEOUT / 2, Wakeup())
        if line.holder is None:
            line.asking = True
            try:
                line.holder = yield from self._last_look()
            finally:
                line.asking = False
        return line.holder

    def _adopt(self, member: LocalWaiter, offer: HandoverOffer) -> Steps[Grant | None]:
        """The tenure that we were offered, if it has come about and nobody has told us."""
        database, key, ttl = self.database, self.request["key"], self.request["ttl"]
        info = yield from inspect(database, key, self.until)
        if info is not None and info.owner == offer.token:
            tenure = Tenure(key, offer.token, info.fence)
            grant = yield from extend(database, tenure, ttl, self.request["life"] - ttl)
            member.settle(offer)
            return grant
        if not member.chosen or info is None or info.remaining <= 0 or info.owner != offer.tenure.owner:
            member.settle(offer)  # it will not come about any more
        return member.grant

    def _late(self, member: LocalWaiter) -> Steps[Grant | None]:
        """What we were granted as we were leaving, if it is still of use."""
        grant = member.grant
        with contextlib.suppress(LockStoreError):
            if member.offer is not None and not member.chosen:
                grant = yield from self._adopt(member, member.offer)
            if grant is not None and self.database.now() >= grant.trusted_until:
                _ = yield from queue.release(self.database, grant.tenure, 1)
                grant = None
        return grant

    def stand(self) -> Steps[Grant | LockInfo | Literal[Outcome.GONE]]:
        """Stand in the queue of the database; returns as `wait`."""
        growing = pauses()
        while True:
            self.request |= {"owner": new_owner(), "channel": self.services.channel}
            try:
                found = yield from self._keep_place()
            except StoreBusy:  # a stranger's transaction has locked what we need to write; reading is possible
                if self.database.now() >= self.deadline:
                    return (yield from self._last_look()) or Outcome.GONE
            except StoreUnanswered:
                if self.until - self.database.now() < WORTH:
                    raise
            else:
                if found is not Outcome.LOST:
                    return found
                continue
            yield from sleep(min(next(growing), max(self.deadline - self.database.now(), 0.0)))

    def _keep_place(self) -> Steps[Grant | LockInfo | Outcome]:
        """One place, from joining the queue to leaving it, whatever happens."""
        database, key, owner = self.database, self.request["key"], self.request["owner"]
        ticket = 0
        try:
            joined = yield from queue.join(database, self.request, self.until)
            if joined is None:
                return Outcome.GONE
            ticket, view = joined
            registry.register(key, ticket, self.wakeup)
            found = yield from self._await_turn(ticket, view, alone=not self.services.keep(owner, self.wakeup))
            if not isinstance(found, Grant):
                yield from queue.quit_queue(database, owner, self._left())
                if found is not None:
                    return found
                info = yield from self._last_look()
                if info is None or info.owner != owner:
                    return info or Outcome.GONE
                # our turn came as we were leaving
                found = yield from queue.accept(database, self.request, ticket, self.until)
                if found is None:
                    return info
            if database.now() < found.trusted_until:
                return found
            _ = yield from queue.release(database, found.tenure, 1)  # the answer came too late to be of use
        except GeneratorExit:
            raise
        except LockStoreError:  # we have tried for long enough
            yield from queue.quit_queue(database, owner, self._left())
            yield from give_back(database, key, owner, self._left())
            raise
        except BaseException:  # what we may have been granted is given back by whoever began the attempt
            yield from queue.quit_queue(database, owner)
            raise
        else:
            return Outcome.LOST
        finally:
            try:
                self._wait_no_more(ticket)
            except BaseException:  # interrupted
                self._wait_no_more(ticket)
                raise

    def _wait_no_more(self, ticket: int) -> None:
        registry.unregister(self.request["key"], ticket, self.wakeup)
        self.services.leave(self.request["owner"])

    def _last_look(self) -> Steps[LockInfo | None]:
        """The row when our time is up, or as we saw it last; StoreBusy if the database has never said it."""
        try:
            return (yield from inspect(self.database, self.request["key"], self.until))
        except (StoreConflict, StoreUnanswered) as error:
            if self.holder is not None:
                return self.holder
            raise StoreBusy(f"the time was up before the database had said who holds it: {error}") from error

    def _left(self) -> float:
        """Seconds for leaving in order."""
        return min(queue.HANDOVER_RETRY, max(self.until - self.database.now(), 0.0))

    def _await_turn(self, ticket: int, view: View | None, *, alone: bool) -> Steps[Grant | Outcome | None]:
        """A grant; LOST or GONE; or None when the time is up.

        `view` is how we stand if that is known; `alone`: nobody else keeps the place.
        """
        database, key, now = self.database, self.request["key"], self.database.now
        growing = pauses(longest=GRANT_RETRY)
        first, since = 0, now()
        self.heartbeat_due = now() + queue.HEARTBEAT_INTERVAL
        while True:
            if self.wakeup.consume():
                grant = yield from queue.accept(database, self.request, ticket, self.until)
                if grant is not None:
                    return grant
            if view is None:
                found = yield from self._look(ticket)
                if not isinstance(found, View):
                    return found
                view = found
            if view.mine and view.remaining > 0:
                self.wakeup.notify()
                view = None
                continue
            if ticket < view.first or not view.present:
                return Outcome.LOST
            if view.first != first:
                first, since = view.first, now()
            if view.last < ticket:  # the row is another one
                yield from queue.announce(database, key, ticket, self.until)
            self.services.listen()
            called = self.services.called and self.services.channel == self.request["channel"]
            pause = _until_next_look(view, POLL_NOTIFIED if called else min(_often(view, now() - since), POLL_MAX))
            pause = min(pause, self.request["ttl"] / 2)  # what we are granted lasts no longer before we accept it
            if _due(view) > 0:
                growing = pauses(longest=GRANT_RETRY)
            else:  # if nobody gets it, a transaction pins it, and that may last
                _ = yield from queue.grant(database, key, view.first)
                pause = next(growing)
            soonest = yield from self._duties(alone=alone)
            left = self.deadline - now()
            if left <= 0:
                return None
            pause = min(pause, soonest)
            yield from wait(min(pause, left), self.wakeup)  # not at all if the key has just been handed to us
            view = None

    def _look(self, ticket: int) -> Steps[View | Outcome | None]:
        """How we stand; GONE; or None if the database did not say it before the time was up."""
        database, request = self.database, self.request
        try:
            return (
                yield from queue.status(database, request["key"], self.until, request["owner"], ticket)
            ) or Outcome.GONE
        except (StoreConflict, StoreUnanswered):
            if database.now() < self.deadline:
                raise
            return None

    def _duties(self, *, alone: bool) -> Steps[float]:
        """What is due now; seconds until something else is."""
        database, owner, now = self.database, self.request["owner"], self.database.now
        soonest = math.inf
        if self.member is not None:
            self.member.seen = now()
        if alone:
            if now() >= self.heartbeat_due:
                yield from queue.heartbeat(database, [owner], self.until)
                self.heartbeat_due = now() + queue.HEARTBEAT_INTERVAL
            soonest = self.heartbeat_due - now()
        if self.holds_other_keys:
            if now() >= self.suspect:
                error = yield from queue.deadlock(database, owner, self.until)
                if error is not None:
                    raise error
                self.suspect = now() + DEADLOCK_CHECK
            soonest = min(soonest, self.suspect - now())
        return max(soonest, 0.0)


def _often(view: View, unchanged: float) -> float:
    """Seconds until the next look, by its place and for how long the head of the queue has been the same.

    A twentieth of the time that the holder has had so far: a look in time costs the next holder little of what it waits
    anyway, and all waiters together look about as often as a few would.
    """
    return min(max(unchanged / 20, POLL_MIN), POLL_MAX / 10) * (view.ahead + 1)


def _due(view: View) -> float:
    """Seconds until it is for us to have a key granted that nobody holds: each leaves that to those before it first."""
    return view.remaining + view.ahead * APART


def _until_next_look(view: View, pause: float) -> float:
    """With jitter, and not beyond the time when a lease that ended is for us to see to."""
    pause *= random.uniform(0.75, 1.25)  # noqa: S311 - jitter, not a secret
    return min(pause, _due(view)) if _due(view) > 0 else pause
