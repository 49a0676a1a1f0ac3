"""Waiting for a key that another flow holds: in the local queue of the process, and in the database's queue.

Rule: a waiter holds no connection while it pauses, and no pause overshoots the timeout or the end of the holder's
lease. `dblock.core.protocol.queue` says why the queue works; this module decides how often to poll.
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
from dblock.core.holding.handover_record import HandoverRecord
from dblock.core.protocol import queue
from dblock.core.protocol.queue import Place, QueueStatus
from dblock.core.protocol.sending import pauses
from dblock.core.protocol.steps import Steps, sleep, wait
from dblock.core.protocol.tenures import look
from dblock.core.timing import Timing
from dblock.core.values import MACHINE, Grant, LockInfo
from dblock.core.wakeup.registry import Wakeup


class Outcome(Enum):
    """Result of waiting in the database's queue without a grant."""

    PASSED_OVER = "passed over: join anew"
    TAKE_AGAIN = "no row, or no ticket: try to take the key again"


@dataclass(slots=True)
class Attempt:
    """A flow's attempt to acquire a key, until it has the key, gives up or is interrupted."""

    site: Site
    request: Request
    deadline: float
    until: float
    """The local time after which no statement is sent."""
    services: Callable[[], WaiterServices]
    held: Callable[[], Collection[str]]
    """The owner tokens of the flow's tenures."""
    contended: Callable[[LockInfo | None], None] | None = None
    """Called when the flow begins to wait."""
    slow_wait: Callable[[], float] = lambda: math.inf
    """Seconds after which a wait is logged."""
    owner: str = ""
    """The token of the tenure that this attempt may have begun; empty if it certainly has begun none."""
    trying: bool = False
    """Whether newcomers wait until this attempt has tried to take the key."""
    broken: bool = False
    """Whether a connection broke before a take was answered, so that the database may be down."""


@dataclass(slots=True)
class Waiter:
    """A flow that waits for a key: in a local queue, and once it is the first there, in the database's queue."""

    attempt: Attempt
    services: WaiterServices
    holds_other_keys: bool
    channel: str = ""
    """The channel that its place names."""
    heartbeat_due: float = 0.0
    """Local time of the next heartbeat, if the waiter sends its own."""
    deadlock_check_due: float = 0.0
    """Local time of the next check for a deadlock."""
    listen_after: float = 0.0
    """Seconds of waiting, with jitter, after which the process listens for notifications of the database."""
    waiting_since: float = 0.0
    slow_from: float = math.inf
    """The local time from which the wait is logged."""
    undo_until: float = math.inf
    """The local time until which an interrupted waiter cleans up."""
    holder: LockInfo | None = None
    """The holder as last read."""
    has_read_holder: bool = False
    """Whether it has read the row shortly before its deadline."""
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

        `holder` is the holder as last read; `first`: enter before all flows that came while this one tried a take.
        """
        try:
            self.site.database.before_waiting()  # before other flows wait behind this one
        except LockTimeout as refused:
            refused.holder = None if holder is None else holder.masked()
            raise
        me, queues, key, services = self.me, self.site.local_queues, self.request.key, self.services
        self.holder, self.attempt.owner = holder, me.owner
        self.waiting_since = self.site.database.now()
        self.listen_after = self.timing.listen_after * random.uniform(0.75, 1.25)  # noqa: S311 - jitter
        self.slow_from = self.waiting_since + self.attempt.slow_wait()
        try:
            if self.request.fair and services.queues_locally and not self.holds_other_keys:
                local_queue = queues.enter(me, handover_expected=services.holds(key), first=first)
                if first:
                    queues.end_try(key, got=False)
                    self.attempt.trying = False
            else:
                local_queue = queues.alone(me)
            if holder is not None:
                local_queue.holder = holder
            found = yield from self._until_found(local_queue)
            left_over = local_queue.leave(me, got=found if isinstance(found, Grant) else None)
            if left_over is not None:  # a flow of this process handed it the key meanwhile
                _ = yield from queue.leave_queue(self.site.database, [left_over.owner], self._left())
        except GeneratorExit:  # nothing drives further steps
            _ = me.local_queue.leave(me) if me.local_queue else None
            raise
        except BaseException as error:
            yield from self._leave_nothing(behind=isinstance(error, LockStoreError))
            raise
        self.attempt.owner = found.tenure.owner if isinstance(found, Grant) else ""
        return found

    def _leave_nothing(self, *, behind: bool) -> Steps[None]:
        """Delete the place and release what may have been granted: with `behind` in the background, else at once."""
        me, owners = self.me, [self.attempt.owner]
        if me.stage is not Stage.WAITING:
            owners.insert(0, me.owner)
        elif self.attempt.owner == me.owner:
            owners = []
        place = me.local_queue.leave(me) if me.local_queue else None
        if place is not None:
            owners.append(place.owner)
            if not behind:
                _ = yield from queue.leave_queue(self.site.database, [place.owner], self._left_to_undo())
        for owner in dict.fromkeys(owners):
            if behind:
                yield from self._withdraw(owner)
            else:
                yield from undo_take(self.site, self.request.key, owner, self._left_to_undo())
        self.attempt.owner = ""

    def _parameters(self) -> dict[str, Any]:
        return self.request.parameters(self.me.owner, self.channel)

    def _until_found(self, local_queue: LocalQueue) -> Steps[Grant | LockInfo | Literal[Outcome.TAKE_AGAIN]]:
        """Wait in the local queue for an offer of the key; when it is this flow's turn, in the database's queue."""
        me, now, growing = self.me, self.site.database.now, pauses()
        while True:
            if (grant := me.grant) is not None:
                if (yield from self._is_trusted(grant)):
                    return grant
                _ = local_queue.begin_again(me, grant)
                self.attempt.owner = me.owner
            left = self.attempt.deadline - now()
            if left <= 0:
                return (yield from self._give_up(local_queue))
            pause = local_queue.until_queueing(me)
            if pause > 0 or left <= self._round_trip():
                self._report_wait()
                if self._until_reading(left) <= 0:
                    yield from self._read_holder()
                    left = max(self.attempt.deadline - now(), 0.0)
                yield from wait(min(pause or left, self._until_reading(left)), self.wakeup)
                _ = self.wakeup.consume()
                continue
            try:
                found = yield from self._wait_in_queue(local_queue)
            except (StoreBusy, StoreUnanswered) as error:
                # StoreBusy: a transaction has locked a row that this flow needs to write; it can still be read.
                yield from self._begin_again(local_queue)
                late = isinstance(error, StoreUnanswered) and self.attempt.until - now() < self.timing.min_retry_time
                if late and not (self.holder and error.late and self.site.database.answers()):
                    raise
                yield from sleep(min(next(growing), max(self.attempt.deadline - now(), 0.0)))
                continue
            if found is Outcome.PASSED_OVER:
                yield from self._begin_again(local_queue)
            elif found is not None:
                return found

    def _report_wait(self) -> None:
        """Report, once, that the flow waits for a holder, and log a slow wait."""
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
        """Go on with a new token and give up the old one with its place, unless a grant has just been handed over."""
        owners = [self.me.owner, self.me.place.owner] if self.me.place else [self.me.owner]
        if local_queue.begin_again(self.me):
            for owner in dict.fromkeys(owners):
                yield from self._withdraw(owner)
            self.attempt.owner = self.me.owner

    def _withdraw(self, owner: str) -> Steps[None]:
        """Delete the place of that token and release its tenure; in the background if the process does that."""
        if not self.services.withdraw(self.request.key, owner):
            _ = yield from queue.leave_queue(self.site.database, [owner], self._left())
            yield from undo_take(self.site, self.request.key, owner, self._left(), again=False)

    def _is_trusted(self, grant: Grant) -> Steps[bool]:
        """Whether a tenure can still be trusted. One whose answer came too late is released."""
        if self.site.database.now() < grant.trusted_until:
            return True
        _ = yield from handover.free(self.site, HandoverRecord.of(grant), 1)
        return False

    def _give_up(self, local_queue: LocalQueue) -> Steps[Grant | LockInfo | Literal[Outcome.TAKE_AGAIN]]:
        """A grant of the last moment; else the holder to name; or TAKE_AGAIN."""
        me = self.me
        self._log_slow_wait()
        offered = me.stage is Stage.OFFERED  # and the flow that offered it may have lost the answer
        place = local_queue.leave(me)
        owners = [place.owner] if place else []
        if me.grant is not None:  # handed over at the last moment
            if (yield from self._is_trusted(me.grant)):
                _ = yield from queue.leave_queue(self.site.database, owners, self._left())
                return me.grant
        elif offered:
            owners.append(me.owner)
        for owner in dict.fromkeys(owners):
            yield from self._withdraw(owner)
        return local_queue.holder or self.holder or (yield from self._last_read()) or Outcome.TAKE_AGAIN

    def _round_trip(self) -> float:
        """Seconds before the deadline in which no statement is sent, as its answer would come too late."""
        return 1.25 * self.site.database.latency.distance

    def _until_reading(self, left: float) -> float:
        """Seconds until the holder should be read once more; until the deadline if it has been."""
        if self.has_read_holder:
            return left
        until_reading = left - 2 * self._round_trip() - self.timing.last_read
        return until_reading if until_reading > 0.001 else 0.0  # a clock may not resolve a shorter pause

    def _pause_to_the_end(self, place: Place) -> Steps[bool]:
        """Shortly before the deadline read the holder, then only wait for a notification; False at other times."""
        left = self.attempt.deadline - self.site.database.now()
        if self._until_reading(left) <= 0:
            yield from self._read_holder()
        granted = self.holder is not None and self.holder.owner == place.owner
        if granted or not (self.has_read_holder or left <= self._round_trip()):
            return False
        yield from wait(max(self.attempt.deadline - self.site.database.now(), 0.0), self.wakeup)
        return True

    def _read_holder(self) -> Steps[None]:
        """Read the holder once, shortly before the deadline, for the error that may follow."""
        self.has_read_holder, local_queue = True, self.me.local_queue
        info = local_queue.holder if local_queue else None
        if info is None and self.attempt.deadline - self.site.database.now() > self._round_trip():
            info = yield from self._last_read()
            if local_queue:
                local_queue.holder = info
        self.holder = info or self.holder

    def _wait_in_queue(self, local_queue: LocalQueue) -> Steps[Grant | Outcome | None]:
        """Wait in the database's queue: a grant, or an outcome.

        None if the time is up, or a flow of this process has handed over the key.
        """
        me, database, sockets = self.me, self.site.database, self.site.sockets
        before = local_queue.begin_queueing(me)
        if before is Stage.HANDED_OVER:
            return None
        if before is Stage.OFFERED:  # the flow that offered the key has not reported the result
            grant = yield from queue.accept(database, self._parameters(), 0, self.attempt.until)
            if grant is not None:
                return grant if (yield from self._is_trusted(grant)) else Outcome.PASSED_OVER
        self.channel = self.services.channel
        socket = self.wakeup.socket = sockets.lend() if self.channel else None
        if socket is not None:
            self.channel = socket.channel
        try:
            joined = yield from self._enqueue()
            if joined is None:
                return Outcome.TAKE_AGAIN
            place, view = joined
            found = yield from self._keep_place(place, view)
        finally:
            self.wakeup.socket = None
            sockets.take_back(socket)
        if isinstance(found, Grant) and found.ticket:
            me.place = None
            if not (
                self.services.deletes_served_rows or database.dialect.queue.grant_leaves
            ):  # else it is deleted later
                _ = yield from queue.leave_queue(database, [place.owner], self.timing.handover_retry / 10)
        if isinstance(found, Grant) and not (yield from self._is_trusted(found)):
            return Outcome.PASSED_OVER
        return found

    def _keep_place(self, place: Place, view: QueueStatus | None) -> Steps[Grant | Outcome | None]:
        """Wait for a grant to a place, with its heartbeats."""
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

    def _enqueue(self) -> Steps[tuple[Place, QueueStatus | None] | None]:
        """Join the queue: the place, and how it stands if that is known; None if there is no row, or no ticket."""
        try:
            joined: tuple[Place, QueueStatus | None] | None = yield from self._adopt_place()
            if joined is None:
                joined = yield from queue.join(self.site.database, self._parameters(), self.attempt.until)
        except (GeneratorExit, LockStoreError):
            raise
        except BaseException:  # interrupted: the join may yet be executed; the caller deletes a place to be adopted
            _ = yield from queue.leave_queue(self.site.database, [self.me.owner], self._left_to_undo())
            raise
        self.me.place = None if joined is None else joined[0]
        return joined

    def _adopt_place(self) -> Steps[tuple[Place, None] | None]:
        """Adopt the place that another flow of this process has left; None if there is none."""
        me, database, left = self.me, self.site.database, self.me.place
        if left is None:
            return None
        if (yield from queue.adopt_place(database, self._parameters(), left.owner, self.attempt.until)):
            return Place(me.owner, left.ticket, left.sent, database.now(), left.joined), None
        yield from undo_take(self.site, self.request.key, left.owner, self.timing.handover_retry)
        return None

    def _last_read(self) -> Steps[LockInfo | None]:
        """The row at the deadline, else as last read; StoreBusy if it could never be read."""
        try:
            return (yield from look(self.site.database, self.request.key, self.attempt.until))
        except (StoreConflict, StoreUnanswered) as error:
            if self.holder is not None:
                return self.holder
            raise StoreBusy(f"the time was up before the database had said who holds it: {error}") from error

    def _left(self) -> float:
        """Seconds for an orderly clean-up."""
        return min(self.timing.handover_retry, max(self.attempt.until - self.site.database.now(), 0.0))

    def _left_to_undo(self) -> float:
        """Seconds left for the clean-up after an interrupt, counted from the first call."""
        now = self.site.database.now()
        self.undo_until = min(self.undo_until, now + self.timing.undo_timeout)
        return max(self.undo_until - now, 0.0)

    def _await_grant(self, place: Place, view: QueueStatus | None, *, alone: bool) -> Steps[Grant | Outcome | None]:
        """A grant; an outcome; or None if the time is up, or a flow of this process has handed over the key.

        `view` is the state of the queue if known; `alone`: the waiter sends its own heartbeats.
        """
        database, key, now = self.site.database, self.request.key, self.site.database.now
        growing = pauses(longest=self.timing.grant_retry)
        first, since = 0, now()
        self.heartbeat_due = now() + self.timing.heartbeat_interval
        while self.me.grant is None and (now() < self.attempt.deadline or self.wakeup.notified()):
            if self.wakeup.consume():
                if (grant := (yield from self._grant_by_message(place))) is not None:
                    return grant
                view = None
            if (yield from self._pause_to_the_end(place)):
                continue
            if view is None:
                found = yield from self._poll(place)
                if not isinstance(found, QueueStatus):
                    return found
                view = found
            served = place.ticket < view.first or not view.present
            if view.mine and view.remaining > 0:  # by the queue, or by a holder of this process without a report
                ticket = place.ticket if served else 0
                grant = yield from queue.accept(database, self._parameters(), ticket, self.attempt.until)
                return grant or Outcome.PASSED_OVER
            if served:
                return Outcome.PASSED_OVER
            if view.first != first:
                first, since = view.first, now()
            if view.last < place.ticket:  # the row was deleted and created again
                yield from queue.announce(database, key, place.ticket, self.attempt.until)
            pause = self._until_next_poll(view, now() - since, notified=self._is_notified())
            pause = min(pause, self.request.ttl / 2)  # a grant lasts no longer until it is accepted
            if self._due(view) > 0:
                growing = pauses(longest=self.timing.grant_retry)
                self._report_wait()
            else:  # if it is granted to no waiter, a transaction pins it, which may last
                _ = yield from handover.grant(self.site, key, view.first, until=self.attempt.until)
                pause = next(growing)
            soonest = yield from self._periodic_work(place, alone=alone)
            until_reading = self._until_reading(self.attempt.deadline - now())
            yield from wait(max(min(pause, soonest, until_reading), 0.0), self.wakeup)  # 0: granted to this flow
            view = None
        return None

    def _is_notified(self) -> bool:
        """Whether a release notifies this waiter: through the database, or from the same machine through its socket.

        The process listens at the database only for long waits: otherwise many processes that begin to wait at once
        would all connect, which takes longer than most waits. Until then only a holder on this machine notifies, that
        is one whose token begins with the machine's name, unless it was handed over.
        """
        if self.services.notifications_ready:
            return not self.wakeup.flooded
        waited = self.site.database.now() - self.waiting_since
        if waited >= self.listen_after:
            self.services.listen()
            return False
        holder, here = self.holder, self.request.flow[:MACHINE]
        near = holder is not None and (holder.owner or "").startswith(here) and not holder.bearers
        return near and self.wakeup.socket is not None

    def _grant_by_message(self, place: Place) -> Steps[Grant | None]:
        """The tenure that a notification proves, accepted unless it can begin as it is; None if it proves none."""
        message, self.wakeup.message = self.wakeup.message, None  # used once
        grant = None if message is None else place.granted(message, self.request.ttl, self.timing.waiter_ttl)
        if grant is None or (self.request.starts_on_place_lease and self.site.database.now() < grant.late_from):
            return grant
        return (yield from queue.accept(self.site.database, self._parameters(), place.ticket, self.attempt.until))

    def _poll(self, place: Place) -> Steps[QueueStatus | Outcome | None]:
        """The state of the queue; TAKE_AGAIN if there is no row; None if there was no answer before the deadline."""
        database, attempt = self.site.database, self.attempt
        try:
            view = yield from queue.status(database, self.request.key, attempt.until, place.owner, place.ticket)
        except (StoreConflict, StoreUnanswered):
            if database.now() < self.attempt.deadline:
                raise
            return None
        return view or Outcome.TAKE_AGAIN

    def _periodic_work(self, place: Place, *, alone: bool) -> Steps[float]:
        """Do the periodic work that is due: heartbeat, deadlock check; returns the seconds until the next."""
        database, now = self.site.database, self.site.database.now
        listens_in = self.waiting_since + self.listen_after - now()
        soonest = listens_in if listens_in > 0 else math.inf
        self.me.seen = place.seen = now()
        if alone:
            if now() >= self.heartbeat_due:
                yield from queue.heartbeat(database, [place], self.attempt.until)
                self.heartbeat_due = now() + self.timing.heartbeat_interval
            soonest = self.heartbeat_due - now()
        if self.holds_other_keys:
            if now() >= self.deadlock_check_due:
                from dblock.core.protocol.deadlock import deadlock  # noqa: PLC0415 - only for long waits

                error = yield from deadlock(database, place.owner, self.attempt.held(), self.attempt.until)
                if error is not None:
                    raise error
                self.deadlock_check_due = now() + self.timing.deadlock_check
            soonest = min(soonest, self.deadlock_check_due - now())
        return max(soonest, 0.0)

    def _until_next_poll(self, view: QueueStatus, unchanged: float, *, notified: bool) -> float:
        """Seconds until the next poll, with jitter, at most until this waiter should have an expired key granted.

        A waiter that is not notified polls after a twentieth of the time for which the head of the queue has been the
        same, times its position: the next holder loses little of its wait, and all waiters together poll seldom.
        """
        timing, pause = self.timing, self.timing.poll_notified
        if not notified:
            pause = min(max(unchanged / 20, timing.poll_min), timing.poll_max / 10) * (view.ahead + 1)
            pause = min(pause, timing.poll_max)
        pause *= random.uniform(0.75, 1.25)  # noqa: S311 - jitter, not a secret
        due = self._due(view)
        return min(pause, due) if due > 0 else pause

    def _due(self, view: QueueStatus) -> float:
        """Seconds until this waiter should have a key without a holder granted; those before it do so earlier."""
        return view.remaining + view.ahead * self.timing.look_stagger
