"""How a flow waits for a key that somebody else has: in its process's local queue, and in the database's queue.

Rule: a waiter holds no connection while it pauses, and no pause overshoots the timeout or the end of the holder's
lease. Why the queue works is said in `dblock.core.protocol.queue`; how often to look is decided here.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Literal

from dblock.core.acquire import handover
from dblock.core.acquire.handover import undo_take
from dblock.core.acquire.local_queue import LocalQueue, LocalWaiter, Request, Stage
from dblock.core.acquire.services import WaiterServices
from dblock.core.acquire.site import Site
from dblock.core.errors import LockStoreError, LockTimeout, StoreBusy, StoreConflict, StoreUnanswered
from dblock.core.holding.held import Held
from dblock.core.protocol import queue
from dblock.core.protocol.queue import Place, QueueStatus
from dblock.core.protocol.sending import pauses
from dblock.core.protocol.steps import Steps, sleep, wait
from dblock.core.protocol.tenures import look
from dblock.core.timing import Timing
from dblock.core.values import Grant, LockInfo
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
    contended: Callable[[LockInfo | None], None] | None = None
    """To be called when it begins to wait."""
    slow_wait: Callable[[], float] = lambda: math.inf
    """Seconds from which a wait is to be logged."""
    owner: str = ""
    """The token under which the key may be ours; empty if it is not, for sure."""
    trying: bool = False
    """Does whoever comes wait for us, who try to take the key?"""


@dataclass(slots=True)
class Waiter:
    """A flow that waits for a key: in a local queue, and when it is the first there, in the queue of the database."""

    attempt: Attempt
    services: WaiterServices
    holds_other_keys: bool
    channel: str = ""
    """Where its process was going to listen when it joined the queue."""
    heartbeat_due: float = 0.0
    """The local time from which the place is to be kept, if nobody else does it."""
    deadlock_check_due: float = 0.0
    """The local time from which to look for a deadlock."""
    waiting_since: float = 0.0
    slow_from: float = math.inf
    """The local time from which the log is to know."""
    undo_until: float = math.inf
    """The local time until which it tries to leave nothing behind, once it has been interrupted."""
    holder: LockInfo | None = None
    """Whom it found holding the key before it began to wait."""
    wakeup: Wakeup = field(init=False)
    me: LocalWaiter = field(init=False)
    site: Site = field(init=False)
    request: Request = field(init=False)
    timing: Timing = field(init=False)

    def __post_init__(self) -> None:
        self.site, self.request = self.attempt.site, self.attempt.request
        self.timing, self.wakeup = self.site.database.timing, Wakeup(self.site.database)
        self.me = LocalWaiter(self.request, self.wakeup)

    def wait(
        self, holder: LockInfo | None, *, first: bool = False
    ) -> Steps[Grant | LockInfo | Literal[Outcome.TAKE_AGAIN]]:
        """A grant, or the row as it was at the deadline; or TAKE_AGAIN.

        `holder` is who was seen holding the key; `first`: before all those who came while we tried to take it.
        """
        try:
            self.site.database.before_waiting()  # before anybody counts on us
        except LockTimeout as refused:
            refused.holder = None if holder is None else holder.masked()
            raise
        me, queues, key, services = self.me, self.site.local_queues, self.request.key, self.services
        self.holder, self.attempt.owner = holder, me.owner
        self.waiting_since = self.site.database.now()
        self.slow_from = self.waiting_since + self.attempt.slow_wait()
        try:
            if self.request.fair and services.shared and not self.holds_other_keys:
                local_queue = queues.enter(me, hopeful=services.holds(key), first=first)
                if first:
                    queues.end_try(key, got=False)
                    self.attempt.trying = False
            else:
                local_queue = queues.alone(me)
            if holder is not None:
                local_queue.holder = holder
            found = yield from self._until_found(local_queue)
            left_over = local_queue.leave(me, got=found if isinstance(found, Grant) else None)
            if left_over is not None:  # it was handed the key inside the process meanwhile
                yield from queue.leave_queue(self.site.database, [left_over.owner], self._left())
        except BaseException as error:
            may_have_it = me.stage is not Stage.WAITING
            place = None if me.local_queue is None else me.local_queue.leave(me)
            if not isinstance(error, GeneratorExit):
                patience = self._left if isinstance(error, LockStoreError) else self._left_to_undo
                owners = [me.owner] if may_have_it else []
                if self.attempt.owner != me.owner:
                    owners.append(self.attempt.owner)
                if place is not None:
                    yield from queue.leave_queue(self.site.database, [place.owner], patience())
                    owners.append(place.owner)
                for owner in dict.fromkeys(owners):
                    yield from undo_take(self.site, key, owner, patience())
                self.attempt.owner = ""
            raise
        self.attempt.owner = found.tenure.owner if isinstance(found, Grant) else ""
        return found

    def _parameters(self) -> dict[str, Any]:
        return self.request.parameters(self.me.owner, self.channel)

    def _until_found(self, local_queue: LocalQueue) -> Steps[Grant | LockInfo | Literal[Outcome.TAKE_AGAIN]]:
        """Wait in the local queue to be handed the key; when it is for us, ask the database for it."""
        me, now, growing = self.me, self.site.database.now, pauses()
        while True:
            if (grant := me.grant) is not None:
                if (yield from self._of_use(grant)):
                    return grant
                _ = local_queue.begin_again(me, grant)
                self.attempt.owner = me.owner
            left = self.attempt.deadline - now()
            if left <= 0:
                return (yield from self._time_is_up(local_queue))
            pause = local_queue.until_asking(me)
            if pause > 0:
                self._others_have_it()
                yield from wait(min(pause, left), self.wakeup)  # not at all if something has been said already
                _ = self.wakeup.consume()
                continue
            try:
                found = yield from self._ask(local_queue)
            except (StoreBusy, StoreUnanswered) as error:
                # Of a StoreBusy: a stranger's transaction has locked what we need to write; reading is possible.
                yield from self._begin_again(local_queue)
                if isinstance(error, StoreUnanswered) and self.attempt.until - now() < self.timing.worthwhile:
                    raise
                yield from sleep(min(next(growing), max(self.attempt.deadline - now(), 0.0)))
                continue
            if found is Outcome.PASSED_OVER:
                yield from self._begin_again(local_queue)
            elif found is not None:
                return found

    def _others_have_it(self) -> None:
        """And we wait for them: to be told when that begins, and logged when it takes long."""
        if (contended := self.attempt.contended) is not None:
            self.attempt.contended, local_queue = None, self.me.local_queue
            contended(self.holder or (local_queue.holder if local_queue else None))
        self._log_slow_wait()

    def _log_slow_wait(self) -> None:
        now, slow_from = self.site.database.now(), self.slow_from
        if now < slow_from:
            return
        from dblock.core.acquire import slow  # noqa: PLC0415 - for those who wait for long

        self.slow_from = now + slow.INTERVAL
        slow.say(self.site, self.request, now - self.waiting_since, self.me.local_queue, self.services)

    def _begin_again(self, local_queue: LocalQueue) -> Steps[None]:
        """Go on with another token, and give up what may come under this one; not if we have just been told of it."""
        owners = [self.me.owner, self.me.place.owner] if self.me.place else [self.me.owner]
        if local_queue.begin_again(self.me):
            for owner in dict.fromkeys(owners):
                yield from self._give_up(owner)
            self.attempt.owner = self.me.owner

    def _give_up(self, owner: str) -> Steps[None]:
        """Leave the queue, and give back what was granted under that token."""
        yield from queue.leave_queue(self.site.database, [owner], self._left())
        yield from undo_take(self.site, self.request.key, owner, self._left())

    def _of_use(self, grant: Grant) -> Steps[bool]:
        """Is a tenure still to be trusted? One of which we heard too late is given back."""
        if self.site.database.now() < grant.trusted_until:
            return True
        _ = yield from handover.free(self.site, Held.of(grant), 1)
        return False

    def _time_is_up(self, local_queue: LocalQueue) -> Steps[Grant | LockInfo | Literal[Outcome.TAKE_AGAIN]]:
        """What we were granted at the last moment; else whom to name as the holder; or TAKE_AGAIN."""
        me, place, info = self.me, self.me.place, None
        self._log_slow_wait()
        if place is None or local_queue.bequeath(me):
            pass
        elif place.owner != me.owner:  # one that we were left, and have not taken over
            yield from self._give_up(place.owner)
        else:
            yield from queue.leave_queue(self.site.database, [place.owner], self._left())
            info = yield from self._last_look()
            me.place = None
            if info is not None and info.owner == me.owner:  # our turn came as we were leaving
                grant = yield from queue.accept(
                    self.site.database, self._parameters(), place.ticket, self.attempt.until
                )
                if grant is not None and (yield from self._of_use(grant)):
                    return grant
        if info is None:
            info = local_queue.holder or (yield from self._last_look())
            local_queue.holder = info
        offered = me.stage is Stage.OFFERED
        _ = local_queue.leave(me)
        if me.grant is not None:  # we were told at the last moment
            if (yield from self._of_use(me.grant)):
                return me.grant
        elif offered:  # and whoever offered it may never know what became of that
            yield from undo_take(self.site, self.request.key, me.owner, self._left())
        return info or Outcome.TAKE_AGAIN

    def _ask(self, local_queue: LocalQueue) -> Steps[Grant | Outcome | None]:
        """Stand in the database's queue until we are granted the key; or an outcome.

        Or None if there is something else to see to: the time is up, or we were handed the key inside the process.
        """
        me, database, sockets = self.me, self.site.database, self.site.sockets
        before = local_queue.begin_asking(me)
        if before is Stage.TOLD:
            return None
        if before is Stage.OFFERED:  # and whoever offered it the key has not said what became of that
            grant = yield from queue.accept(database, self._parameters(), 0, self.attempt.until)
            if grant is not None:
                return grant if (yield from self._of_use(grant)) else Outcome.PASSED_OVER
        self.channel = self.services.channel
        socket = self.wakeup.socket = sockets.lend() if self.channel else None
        if socket is not None:
            self.channel = socket.channel
        try:
            standing = yield from self._stand()
            if standing is None:
                return Outcome.TAKE_AGAIN
            place, view = standing
            found = yield from self._keep_place(place, view)
        finally:
            self.wakeup.socket = None
            sockets.take_back(socket)
        if isinstance(found, Grant) and found.ticket:
            me.place = None
            if not (self.services.tidies or database.dialect.queue.grant_leaves):  # its row does no harm meanwhile
                yield from queue.leave_queue(database, [place.owner], self.timing.handover_retry / 10)
        if isinstance(found, Grant) and not (yield from self._of_use(found)):
            return Outcome.PASSED_OVER
        return found

    def _keep_place(self, place: Place, view: QueueStatus | None) -> Steps[Grant | Outcome | None]:
        """What becomes of a place, which is kept meanwhile."""
        key, served, alone = self.request.key, False, True
        self.site.wakeups.register(key, place.ticket, self.wakeup)
        try:
            alone = not self.services.keep(place)
            found = yield from self._await_grant(place, view, alone=alone)
            served = isinstance(found, Grant) and found.ticket > 0
            return found
        finally:
            self.site.wakeups.unregister(key, place.ticket, self.wakeup)
            self.services.leave(place.owner, served=served)

    def _stand(self) -> Steps[tuple[Place, QueueStatus | None] | None]:
        """A place in the queue; None if there is no row, or no ticket."""
        try:
            standing: tuple[Place, QueueStatus | None] | None = yield from self._inherit()
            if standing is None:
                standing = yield from queue.join(self.site.database, self._parameters(), self.attempt.until)
        except (GeneratorExit, LockStoreError):
            raise
        except BaseException:  # interrupted: it may be on its way; a place that was left to us is seen to further out
            yield from queue.leave_queue(self.site.database, [self.me.owner], self._left_to_undo())
            raise
        self.me.place = None if standing is None else standing[0]
        return standing

    def _inherit(self) -> Steps[tuple[Place, None] | None]:
        """The place that somebody of this process has left; None if there is none."""
        me, database, left = self.me, self.site.database, self.me.place
        if left is None:
            return None
        if (yield from queue.inherit(database, self._parameters(), left.owner, self.attempt.until)):
            return Place(me.owner, left.ticket, left.sent, database.now(), left.joined), None
        yield from undo_take(self.site, self.request.key, left.owner, self.timing.handover_retry)
        return None

    def _last_look(self) -> Steps[LockInfo | None]:
        """The row when our time is up, or as we saw it last; StoreBusy if the database has never said it."""
        try:
            return (yield from look(self.site.database, self.request.key, self.attempt.until))
        except (StoreConflict, StoreUnanswered) as error:
            if self.holder is not None:
                return self.holder
            raise StoreBusy(f"the time was up before the database had said who holds it: {error}") from error

    def _left(self) -> float:
        """Seconds for leaving in order."""
        return min(self.timing.handover_retry, max(self.attempt.until - self.site.database.now(), 0.0))

    def _left_to_undo(self) -> float:
        """Seconds for leaving nothing behind, of those that there are from the first call on."""
        now = self.site.database.now()
        self.undo_until = min(self.undo_until, now + self.timing.undo_timeout)
        return max(self.undo_until - now, 0.0)

    def _await_grant(self, place: Place, view: QueueStatus | None, *, alone: bool) -> Steps[Grant | Outcome | None]:
        """A grant; an outcome; or None when the time is up, or we were handed the key inside the process.

        `view` is how we stand if that is known; `alone`: nobody else keeps the place.
        """
        database, key, now = self.site.database, self.request.key, self.site.database.now
        growing = pauses(longest=self.timing.grant_retry)
        first, since = 0, now()
        self.heartbeat_due = now() + self.timing.heartbeat_interval
        while self.me.grant is None:
            if self.wakeup.consume():
                if (grant := (yield from self._told(place))) is not None:
                    return grant
                view = None
            if view is None:
                found = yield from self._look(place)
                if not isinstance(found, QueueStatus):
                    return found
                view = found
            served = place.ticket < view.first or not view.present
            if view.mine and view.remaining > 0:  # by the queue, or by a holder of this process that has not said so
                ticket = place.ticket if served else 0
                grant = yield from queue.accept(database, self._parameters(), ticket, self.attempt.until)
                return grant or Outcome.PASSED_OVER
            if served:
                return Outcome.PASSED_OVER
            if view.first != first:
                first, since = view.first, now()
            if view.last < place.ticket:  # the row is another one
                yield from queue.announce(database, key, place.ticket, self.attempt.until)
            self.services.listen()
            pause = self._until_next_look(view, now() - since, called=self.services.called)
            pause = min(pause, self.request.ttl / 2)  # what we are granted lasts no longer before we accept it
            if self._due(view) > 0:
                growing = pauses(longest=self.timing.grant_retry)
                self._others_have_it()
            else:  # if nobody gets it, a transaction pins it, and that may last
                _ = yield from handover.grant(self.site, key, view.first, until=self.attempt.until)
                pause = next(growing)
            soonest = yield from self._duties(place, alone=alone)
            left = self.attempt.deadline - now()
            if left <= 0:
                return None
            pause = min(pause, soonest)
            yield from wait(min(pause, left), self.wakeup)  # not at all if the key has just been handed to us
            view = None
        return None

    def _told(self, place: Place) -> Steps[Grant | None]:
        """The tenure that we were told of, if that was not a stranger's word; whole, if that is needed."""
        message, self.wakeup.message = self.wakeup.message, None  # it is weighed once
        grant = None if message is None else place.granted(message, self.request.ttl, self.timing.waiter_ttl)
        if grant is None or (self.request.prompt and self.site.database.now() < grant.late_from):
            return grant
        return (yield from queue.accept(self.site.database, self._parameters(), place.ticket, self.attempt.until))

    def _look(self, place: Place) -> Steps[QueueStatus | Outcome | None]:
        """How we stand; TAKE_AGAIN; or None if the database did not say it before the time was up."""
        database, attempt = self.site.database, self.attempt
        try:
            view = yield from queue.status(database, self.request.key, attempt.until, place.owner, place.ticket)
        except (StoreConflict, StoreUnanswered):
            if database.now() < self.attempt.deadline:
                raise
            return None
        return view or Outcome.TAKE_AGAIN

    def _duties(self, place: Place, *, alone: bool) -> Steps[float]:
        """What is due now; seconds until something else is."""
        database, now = self.site.database, self.site.database.now
        soonest = math.inf
        self.me.seen = place.seen = now()
        if alone:
            if now() >= self.heartbeat_due:
                yield from queue.heartbeat(database, [place], self.attempt.until)
                self.heartbeat_due = now() + self.timing.heartbeat_interval
            soonest = self.heartbeat_due - now()
        if self.holds_other_keys:
            if now() >= self.deadlock_check_due:
                from dblock.core.protocol.deadlock import deadlock  # noqa: PLC0415 - for those who wait for long

                error = yield from deadlock(database, place.owner, self.attempt.held(), self.attempt.until)
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
