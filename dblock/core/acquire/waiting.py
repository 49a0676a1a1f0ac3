"""How a flow waits for a key that somebody else has: in its process's local queue, and in the database's queue.

Rule: a waiter holds no connection while it pauses, and no pause overshoots the timeout or the end of the holder's
lease. Why the queue works is said in `dblock.core.protocol.queue`; how often to look is decided here.
"""

from __future__ import annotations

import contextlib
import math
import random
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Literal

from dblock.core.acquire import handover
from dblock.core.acquire.handover import undo_take
from dblock.core.acquire.local_queue import HandoverOffer, LocalQueue, LocalWaiter, Request, TakeAttempt
from dblock.core.acquire.services import WaiterServices
from dblock.core.acquire.site import Site
from dblock.core.errors import LockStoreError, StoreBusy, StoreConflict, StoreUnanswered
from dblock.core.protocol import queue
from dblock.core.protocol.deadlock import deadlock
from dblock.core.protocol.queue import QueueStatus
from dblock.core.protocol.sending import pauses
from dblock.core.protocol.steps import Steps, sleep, wait
from dblock.core.protocol.tenures import extend, inspect
from dblock.core.timing import Timing
from dblock.core.values import Grant, LockInfo, Tenure
from dblock.core.wakeup.registry import Wakeup


class Outcome(Enum):
    """What else may become of a place in the queue."""

    PASSED_OVER = "passed over: join anew"
    TAKE_AGAIN = "no row, or no ticket: try to take the key again"


@dataclass(slots=True)
class Attempt:
    """A flow's attempt to get a key, until it has it, gives up or is interrupted."""

    site: Site
    request: Request
    deadline: float
    until: float
    """The local time after which no statement is of use."""
    services: Callable[[], WaiterServices]
    held: Callable[[], Collection[str]]
    """The owner tokens of what the flow holds."""
    owner: str = ""
    """The token under which the key may be ours; empty if it is not, for sure."""


@dataclass(slots=True)
class Waiter:
    """A flow that stands in the queue of a key, if need be in one place after the other."""

    attempt: Attempt
    services: WaiterServices
    holds_other_keys: bool
    channel: str = ""
    """Where its process was going to listen when it joined the queue."""
    heartbeat_due: float = 0.0
    """The local time from which the place is to be kept, if nobody else does it."""
    deadlock_check_due: float = 0.0
    """The local time from which to look for a deadlock."""
    wakeup: Wakeup = field(default_factory=Wakeup)
    waiter: LocalWaiter | None = None
    """What it is in the local queue of its process."""
    holder: LockInfo | None = None
    """Whom it found holding the key before it began to wait."""
    site: Site = field(init=False)
    request: Request = field(init=False)
    timing: Timing = field(init=False)

    def __post_init__(self) -> None:
        self.site, self.request = self.attempt.site, self.attempt.request
        self.timing = self.site.database.timing

    def wait(
        self, holder: LockInfo | None, take_attempt: TakeAttempt | None
    ) -> Steps[Grant | LockInfo | Literal[Outcome.TAKE_AGAIN]]:
        """A grant, or the row as it was at the deadline; or TAKE_AGAIN. `holder` is who was seen holding the key."""
        yield from wait(0.0, self.wakeup)  # refused where it could not end well, before anybody counts on us
        key, waiter = self.request.key, LocalWaiter(self.request, self.wakeup)
        self.holder = holder
        try:
            together = self.request.fair and not self.holds_other_keys
            local_queue = self.services.enter(waiter, take_attempt) if together else None
            if local_queue is None:
                if take_attempt is not None:
                    take_attempt.end(got=False)
                return (yield from self.stand())
            if holder is not None:
                local_queue.holder = holder
            found = yield from self._behind(waiter)
            if found is None:
                self.waiter = waiter
                found = yield from self.stand()
            (waiter.local_queue or local_queue).leave(waiter, got=isinstance(found, Grant))
            if not isinstance(found, Grant):  # from now on nobody grants us anything
                found = (yield from self._late(waiter)) or found
            if isinstance(found, Grant):
                self.attempt.owner = found.tenure.owner
        except BaseException as error:
            if waiter.local_queue is not None:
                waiter.local_queue.leave(waiter, got=False)
            if waiter.claim() and not isinstance(error, GeneratorExit):
                patience = self._left() if isinstance(error, LockStoreError) else None
                yield from undo_take(self.site, key, waiter.claim(), patience)
            raise
        return found

    def _parameters(self) -> dict[str, Any]:
        return self.request.parameters(self.attempt.owner, self.channel)

    def _behind(self, waiter: LocalWaiter) -> Steps[Grant | LockInfo | Literal[Outcome.TAKE_AGAIN] | None]:
        """Wait in a local queue to be handed the key; None when it is for us to stand in the queue."""
        now = self.site.database.now
        handover_until, next_check = math.inf, 0.0
        while True:
            local_queue = self.site.local_queues.standing(waiter)
            if (offer := waiter.offer) is not None and (
                not waiter.chosen or now() >= max(next_check, offer.time + self.timing.offer_timeout)
            ):
                next_check = now() + self.timing.offer_timeout
                waiter.grant = yield from self._adopt(waiter, offer)
            if (grant := waiter.grant) is not None:
                if now() < grant.trusted_until:
                    return grant
                waiter.grant = None
                _ = yield from handover.release(self.site, grant.tenure, 1)  # we were told too late for it to be of use
            left = self.attempt.deadline - now()
            if left <= 0:
                return (yield from self._holder(local_queue)) or Outcome.TAKE_AGAIN
            pause = self.timing.poll_notified
            if local_queue.is_first(waiter):
                handover_until = min(handover_until, now() + self.timing.local_handover_wait)
                if (not local_queue.held_in_process or now() >= handover_until) and local_queue.withdraw(waiter):
                    if waiter.offer is not None:
                        waiter.grant = yield from self._adopt(waiter, waiter.offer)
                    if waiter.grant is None:
                        return None
                    continue
                pause = handover_until - now() if now() < handover_until else self.timing.local_handover_wait
            waiter.accepts_handover = True
            yield from wait(min(pause, left), self.wakeup)  # not at all if something has been said already
            _ = self.wakeup.consume()

    def _holder(self, local_queue: LocalQueue) -> Steps[LockInfo | None]:
        """Whom to name when the time is up; one of a local queue asks for all whose time is."""
        if local_queue.holder is None and local_queue.asking:
            yield from wait(self.timing.leave_timeout / 2, Wakeup())
        if local_queue.holder is None:
            local_queue.asking = True
            try:
                local_queue.holder = yield from self._last_look()
            finally:
                local_queue.asking = False
        return local_queue.holder

    def _adopt(self, waiter: LocalWaiter, offer: HandoverOffer) -> Steps[Grant | None]:
        """The tenure that we were offered, if it has come about and nobody has told us."""
        database, key, ttl = self.site.database, self.request.key, self.request.ttl
        info = yield from inspect(database, key, self.attempt.until)
        if info is not None and info.owner == offer.token:
            tenure = Tenure(key, offer.token, info.fence)
            grant = yield from extend(database, tenure, ttl, self.request.life - ttl)
            self.site.local_queues.settle(waiter, offer)
            return grant
        if not waiter.chosen or info is None or info.remaining <= 0 or info.owner != offer.tenure.owner:
            self.site.local_queues.settle(waiter, offer)  # it will not come about any more
        return waiter.grant

    def _late(self, waiter: LocalWaiter) -> Steps[Grant | None]:
        """What we were granted as we were leaving, if it is still of use."""
        grant = waiter.grant
        with contextlib.suppress(LockStoreError):
            if waiter.offer is not None and not waiter.chosen:
                grant = yield from self._adopt(waiter, waiter.offer)
            if grant is not None and self.site.database.now() >= grant.trusted_until:
                _ = yield from handover.release(self.site, grant.tenure, 1)
                grant = None
        return grant

    def stand(self) -> Steps[Grant | LockInfo | Literal[Outcome.TAKE_AGAIN]]:
        """Stand in the queue of the database; returns as `wait`."""
        growing = pauses()
        while True:
            self.attempt.owner, self.channel = self.request.new_owner(), self.services.channel
            try:
                found = yield from self._keep_place()
            except StoreBusy:  # a stranger's transaction has locked what we need to write; reading is possible
                if self.site.database.now() >= self.attempt.deadline:
                    return (yield from self._last_look()) or Outcome.TAKE_AGAIN
            except StoreUnanswered:
                if self.attempt.until - self.site.database.now() < self.timing.worthwhile:
                    raise
            else:
                if found is not Outcome.PASSED_OVER:
                    return found
                continue
            yield from sleep(min(next(growing), max(self.attempt.deadline - self.site.database.now(), 0.0)))

    def _keep_place(self) -> Steps[Grant | LockInfo | Outcome]:
        """One place, from joining the queue to leaving it, whatever happens."""
        database, key, owner = self.site.database, self.request.key, self.attempt.owner
        ticket = 0
        try:
            joined = yield from queue.join(database, self._parameters(), self.attempt.until)
            if joined is None:
                return Outcome.TAKE_AGAIN
            ticket, view = joined
            self.site.wakeups.register(key, ticket, self.wakeup)
            found = yield from self._await_grant(ticket, view, alone=not self.services.keep(owner, self.wakeup))
            if not isinstance(found, Grant):
                yield from queue.leave_queue(database, owner, self._left())
                if found is not None:
                    return found
                info = yield from self._last_look()
                if info is None or info.owner != owner:
                    return info or Outcome.TAKE_AGAIN
                # our turn came as we were leaving
                found = yield from queue.accept(database, self._parameters(), ticket, self.attempt.until)
                if found is None:
                    return info
            if database.now() < found.trusted_until:
                return found
            _ = yield from handover.release(self.site, found.tenure, 1)  # the answer came too late to be of use
        except GeneratorExit:
            raise
        except LockStoreError:  # we have tried for long enough
            yield from queue.leave_queue(database, owner, self._left())
            yield from undo_take(self.site, key, owner, self._left())
            raise
        except BaseException:  # what we may have been granted is given back by whoever began the attempt
            yield from queue.leave_queue(database, owner)
            raise
        else:
            return Outcome.PASSED_OVER
        finally:
            try:
                self._wait_no_more(ticket)
            except BaseException:  # interrupted
                self._wait_no_more(ticket)
                raise

    def _wait_no_more(self, ticket: int) -> None:
        self.site.wakeups.unregister(self.request.key, ticket, self.wakeup)
        self.services.leave(self.attempt.owner)

    def _last_look(self) -> Steps[LockInfo | None]:
        """The row when our time is up, or as we saw it last; StoreBusy if the database has never said it."""
        try:
            return (yield from inspect(self.site.database, self.request.key, self.attempt.until))
        except (StoreConflict, StoreUnanswered) as error:
            if self.holder is not None:
                return self.holder
            raise StoreBusy(f"the time was up before the database had said who holds it: {error}") from error

    def _left(self) -> float:
        """Seconds for leaving in order."""
        return min(self.timing.handover_retry, max(self.attempt.until - self.site.database.now(), 0.0))

    def _await_grant(self, ticket: int, view: QueueStatus | None, *, alone: bool) -> Steps[Grant | Outcome | None]:
        """A grant; LOST or TAKE_AGAIN; or None when the time is up.

        `view` is how we stand if that is known; `alone`: nobody else keeps the place.
        """
        database, key, now = self.site.database, self.request.key, self.site.database.now
        growing = pauses(longest=self.timing.grant_retry)
        first, since = 0, now()
        self.heartbeat_due = now() + self.timing.heartbeat_interval
        while True:
            if self.wakeup.consume():
                grant = yield from queue.accept(database, self._parameters(), ticket, self.attempt.until)
                if grant is not None:
                    return grant
            if view is None:
                found = yield from self._look(ticket)
                if not isinstance(found, QueueStatus):
                    return found
                view = found
            if view.mine and view.remaining > 0:
                self.wakeup.notify()
                view = None
                continue
            if ticket < view.first or not view.present:
                return Outcome.PASSED_OVER
            if view.first != first:
                first, since = view.first, now()
            if view.last < ticket:  # the row is another one
                yield from queue.announce(database, key, ticket, self.attempt.until)
            self.services.listen()
            called = self.services.called and self.services.channel == self.channel
            pause = self._until_next_look(view, now() - since, called=called)
            pause = min(pause, self.request.ttl / 2)  # what we are granted lasts no longer before we accept it
            if self._due(view) > 0:
                growing = pauses(longest=self.timing.grant_retry)
            else:  # if nobody gets it, a transaction pins it, and that may last
                _ = yield from handover.grant(self.site, key, view.first)
                pause = next(growing)
            soonest = yield from self._duties(alone=alone)
            left = self.attempt.deadline - now()
            if left <= 0:
                return None
            pause = min(pause, soonest)
            yield from wait(min(pause, left), self.wakeup)  # not at all if the key has just been handed to us
            view = None

    def _look(self, ticket: int) -> Steps[QueueStatus | Outcome | None]:
        """How we stand; TAKE_AGAIN; or None if the database did not say it before the time was up."""
        database, attempt = self.site.database, self.attempt
        try:
            view = yield from queue.status(database, self.request.key, attempt.until, attempt.owner, ticket)
        except (StoreConflict, StoreUnanswered):
            if database.now() < self.attempt.deadline:
                raise
            return None
        return view or Outcome.TAKE_AGAIN

    def _duties(self, *, alone: bool) -> Steps[float]:
        """What is due now; seconds until something else is."""
        database, owner, now = self.site.database, self.attempt.owner, self.site.database.now
        soonest = math.inf
        if self.waiter is not None:
            self.waiter.seen = now()
        if alone:
            if now() >= self.heartbeat_due:
                yield from queue.heartbeat(database, [owner], self.attempt.until)
                self.heartbeat_due = now() + self.timing.heartbeat_interval
            soonest = self.heartbeat_due - now()
        if self.holds_other_keys:
            if now() >= self.deadlock_check_due:
                error = yield from deadlock(database, owner, self.attempt.held(), self.attempt.until)
                if error is not None:
                    raise error
                self.deadlock_check_due = now() + self.timing.deadlock_check
            soonest = min(soonest, self.deadlock_check_due - now())
        return max(soonest, 0.0)

    def _until_next_look(self, view: QueueStatus, unchanged: float, *, called: bool) -> float:
        """Seconds, with jitter, and not beyond the time when a lease that ended is for us to see to.

        Where nobody calls us, by our place and for how long the head of the queue has been the same: a twentieth of the
        time that the holder has had so far. A look in time costs the next holder little of what it waits anyway, and
        all waiters together look about as often as a few would.
        """
        timing, pause = self.timing, self.timing.poll_notified
        if not called:
            pause = min(max(unchanged / 20, timing.poll_min), timing.poll_max / 10) * (view.ahead + 1)
            pause = min(pause, timing.poll_max)
        pause *= random.uniform(0.75, 1.25)  # noqa: S311 - jitter, not a secret
        due = self._due(view)
        return min(pause, due) if due > 0 else pause

    def _due(self, view: QueueStatus) -> float:
        """Seconds until it is for us to have a key granted that nobody holds: each leaves that to those before it."""
        return view.remaining + view.ahead * self.timing.look_stagger
