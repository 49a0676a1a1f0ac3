"""Waiting for a key that another flow holds: in the local queue of the process, and in the database's queue.

Rule: a waiter holds no connection while it pauses, and no pause overshoots the timeout or the end of the holder's
lease. `dblock.core.protocol.queue` says why the queue works; this module decides how often to poll.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Collection
from dataclasses import dataclass, field, replace
from typing import Any

from dblock.core.acquire import handover, slow
from dblock.core.acquire.handover import undo_take
from dblock.core.acquire.local_queue import LocalQueue, Stage, Waiting
from dblock.core.acquire.request import Refused, Request
from dblock.core.acquire.services import WaiterServices
from dblock.core.acquire.site import Site
from dblock.core.errors import PASSING, LockTimeout, StoreBusy, StoreUnanswered
from dblock.core.protocol import epoch, queue
from dblock.core.protocol.deadlock import deadlock
from dblock.core.protocol.queue import QueuePlace, QueueStatus
from dblock.core.protocol.sending import pauses
from dblock.core.protocol.steps import Steps, sleep, wait
from dblock.core.protocol.tenures import look
from dblock.core.timing import Timing
from dblock.core.values import MACHINE, Grant, LockInfo
from dblock.core.wakeup.registry import Wakeup


@dataclass(slots=True, eq=False, repr=False)
class Attempt(Waiting):
    """One attempt of a flow to acquire a key, until it has the key, gives up or is interrupted.

    If the key is not free the flow waits, in a local queue, and once it is the first there, in the database's queue.
    Its `stage` says how far it is (`dblock.core.acquire.local_queue`).
    """

    site: Site
    request: Request
    timeout: float | None
    """Seconds from now on; None: for ever."""
    find_services: Callable[[], WaiterServices] = WaiterServices
    held: Callable[[], Collection[str]] = tuple
    """The owner tokens of the flow's tenures; with any, a wait may close a circle, which raises LockDeadlock."""
    contended: Callable[[LockInfo | None], None] | None = None
    """Called once if the flow waits, with the holder if that is known."""
    slow_wait: slow.SlowWait = field(default_factory=slow.SlowWait)
    """When the wait is logged."""
    held_in_process: bool = False
    """Whether another flow of this process probably holds the key, so that a take would fail."""

    start: float = field(init=False)
    deadline: float = field(init=False)
    until: float = field(init=False)
    """The local time after which no statement is sent."""
    stage: Stage = Stage.OUTSIDE
    owner: str = ""
    """The token of the tenure that it may get, or has; empty outside of the queues while it certainly has none."""
    given_up: tuple[str, ...] = ()
    """Tokens of places and tenures that it may have and does not want."""
    grant: Grant | None = None
    """The tenure that a holder of this process handed to it."""
    place: QueuePlace | None = None
    """Its place in the database's queue; with another token than its own, one that it has to adopt."""
    broken: bool = False
    """Whether a connection broke before a take was answered, so that the database may be down."""

    seen: float = 0.0
    """The local time of its last activity in the local queue."""
    channel: str = ""
    """The channel that its place names."""
    heartbeat_due: float = 0.0
    """Local time of the next heartbeat, if the waiter sends its own."""
    deadlock_check_due: float = 0.0
    """Local time of the next check for a deadlock."""
    listen_at: float = 0.0
    """Local time, with jitter, from which the process listens for notifications of the database."""
    has_read_holder: bool = False
    """Whether it has read the row shortly before its deadline."""
    local_queue: LocalQueue = field(init=False)
    services: WaiterServices = field(init=False)
    wakeup: Wakeup = field(init=False)
    timing: Timing = field(init=False)

    def __post_init__(self) -> None:
        database = self.site.database
        timing, start = self.timing, self.start = database.timing, database.now()
        self.deadline = math.inf if self.timeout is None else start + self.timeout
        # One answer at least is awaited.
        distant = min(2 * database.latency.distance, timing.farthest)
        least = timing.single_try if self.deadline <= start else distant
        self.until = max(self.deadline + timing.answer_grace, start + least)

    def again(self, request: Request) -> Attempt:
        """An attempt to acquire what another request asks for, in the time that is left."""
        left = None if self.timeout is None else max(self.deadline - self.site.database.now(), 0.0)
        return replace(self, request=request, timeout=left)

    def enter(self, holder: LockInfo | None) -> None:
        """Begin to wait; `holder` is the holder as last read. Raises a LockError where a wait could not end."""
        site, request = self.site, self.request
        try:
            site.database.before_waiting()  # before other flows wait behind this one
        except LockTimeout as refused:
            refused.holder = None if holder is None else holder.masked()
            raise
        self.services, self.wakeup = self.find_services(), Wakeup(site.database)
        alone = not (request.fair and self.services.queues_locally) or bool(self.held())
        if alone:
            self.leave()
        self.owner = request.new_owner()
        began = site.database.now()
        self.listen_at = began + self.timing.listen_after * random.uniform(0.75, 1.25)  # noqa: S311 - jitter
        self.slow_wait.begin(began)
        site.local_queues.enter(self, alone=alone, handover_expected=not alone and self.services.holds(request.key))
        if holder is not None:
            self.local_queue.holder = holder

    def leave(self, got: Grant | None = None) -> None:
        """Leave the queues, if it is in them, with a tenure or without one."""
        if self.stage is not Stage.OUTSIDE:
            self.local_queue.leave(self, got)

    def clean_up(self, *, behind: bool) -> Steps[None]:
        """Delete its place and release what it may have been granted: with `behind` in the background, else at once."""
        queued = self.stage is Stage.QUEUED or bool(self.place or self.given_up)
        self.leave()
        self.give_up_tokens()
        if behind:
            yield from self._withdraw()
            return
        database = self.site.database
        until = database.now() + database.timing.undo_timeout
        if queued and self.given_up:
            _ = yield from queue.leave_queue(database, self.given_up)
        for owner in self.given_up:
            yield from undo_take(self.site, self.request.key, owner, max(until - database.now(), 0.0))

    def _parameters(self) -> dict[str, Any]:
        return self.request.parameters(self.owner, self.channel)

    def wait(self) -> Steps[Grant | Refused | None]:
        """Wait in the local queue for an offer of the key; when it is this flow's turn, in the database's queue.

        None if the flow should try again to take the key.
        """
        local_queue, now, growing = self.local_queue, self.site.database.now, pauses()
        while True:
            if (grant := self.grant) is not None:
                if (yield from self._is_trusted(grant)):
                    return (yield from self._leave_with(grant))
                yield from self._begin_again(grant)
            left = self.deadline - now()
            if left <= 0:
                return (yield from self._give_up())
            pause = local_queue.until_queueing(self)
            if pause > 0 or left <= self._round_trip():
                yield from self._report_wait()
                if self._until_reading(left) <= 0:
                    yield from self._read_holder()
                    left = max(self.deadline - now(), 0.0)
                yield from wait(self.site.database.store, min(pause or left, self._until_reading(left)), self.wakeup)
                _ = self.wakeup.consume()
                continue
            try:
                found = yield from self._wait_in_queue()
            except (StoreBusy, StoreUnanswered) as error:
                # StoreBusy: a transaction has locked a row that this flow needs to write; it can still be read.
                yield from self._begin_again()
                late = isinstance(error, StoreUnanswered) and self.until - now() < self.timing.min_retry_time
                if late and not (local_queue.last_seen[0] and self.site.database.only_late(error)):
                    raise
                yield from sleep(self.site.database.store, min(next(growing), max(self.deadline - now(), 0.0)))
                continue
            if isinstance(found, Grant):
                return (yield from self._leave_with(found))
            if found is Stage.WAITING:
                yield from self._begin_again()
            elif found is Stage.OUTSIDE:
                yield from self._delete_place()
                self.leave()
                yield from self._withdraw()
                if self.grant is None:  # else it was handed over meanwhile
                    return None

    def _report_wait(self) -> Steps[None]:
        """Report, once, that the flow waits for a holder, and log a slow wait."""
        if (contended := self.contended) is not None:
            self.contended = None
            contended(self.local_queue.holder)
        if self.site.database.now() >= self.slow_wait.due:
            slow.say(self.slow_wait, self.site, self.request, (yield from self._known_holder()))

    def _begin_again(self, over: Grant | None = None) -> Steps[None]:
        """Go on with a new token, as a place or the grant is over, unless a grant has just been handed over."""
        self.local_queue.begin_again(self, over)
        yield from self._withdraw()

    def _withdraw(self) -> Steps[None]:
        """Delete the places and release the tenures of unwanted tokens; in the background if the process does that."""
        for owner in self.given_up:
            if not self.find_services().withdraw(self.request.key, owner):
                _ = yield from queue.leave_queue(self.site.database, [owner], self._left())
                yield from undo_take(self.site, self.request.key, owner, self._left(), again=False)
        self.given_up = ()

    def _leave_with(self, grant: Grant) -> Steps[Grant]:
        """Leave the queues with a tenure, which may have come without the place."""
        self.leave(grant)
        yield from self._delete_place()
        return grant

    def _delete_place(self) -> Steps[None]:
        if self.place is not None:
            _ = yield from queue.leave_queue(self.site.database, [self.place.owner], self._left())
            self.place = None

    def _is_trusted(self, grant: Grant) -> Steps[bool]:
        """Whether a tenure can still be trusted. One whose answer came too late is released."""
        if self.site.database.now() < grant.trusted_until:
            return True
        _ = yield from handover.end(self.site, grant)
        return False

    def _give_up(self) -> Steps[Grant | Refused | None]:
        """A grant of the last moment; else the refusal, which names the holder; None: it is unknown, so try again."""
        self.leave()
        if (grant := self.grant) is not None:  # handed over at the last moment
            if (yield from self._is_trusted(grant)):
                return (yield from self._leave_with(grant))
            self.give_up_tokens()
        yield from self._withdraw()
        holder = yield from self._known_holder()
        yield from self._report_wait()
        return None if holder is None else Refused(holder)

    def _round_trip(self) -> float:
        """Seconds before the deadline in which no statement is sent, as its answer would come too late."""
        return 1.25 * self.site.database.latency.distance

    def _until_reading(self, left: float) -> float:
        """Seconds until the holder should be read once more; until the deadline if it has been."""
        if self.has_read_holder:
            return left
        until_reading = left - 2 * self._round_trip() - self.timing.near
        return until_reading if until_reading > 0.001 else 0.0  # a clock may not resolve a shorter pause

    def _pause_to_the_end(self, place: QueuePlace) -> Steps[bool]:
        """Shortly before the deadline read the holder, then only wait for a notification; False at other times."""
        left = self.deadline - self.site.database.now()
        if self._until_reading(left) <= 0:
            yield from self._read_holder()
        holder, _ = self.local_queue.last_seen
        granted = holder is not None and holder.owner == place.owner
        if granted or not (self.has_read_holder or left <= self._round_trip()):
            return False
        yield from wait(self.site.database.store, max(self.deadline - self.site.database.now(), 0.0), self.wakeup)
        return True

    def _read_holder(self) -> Steps[None]:
        """Read the holder once, shortly before the deadline, for the error that may follow."""
        self.has_read_holder = True
        if self.deadline - self.site.database.now() > self._round_trip():
            _ = yield from self._known_holder()

    def _wait_in_queue(self) -> Steps[Grant | Stage | None]:
        """Wait in the database's queue: a grant, or the stage to go back to.

        None if the time is up, or a flow of this process has handed over the key.
        """
        database = self.site.database
        before = self.local_queue.begin_queueing(self)
        if before is Stage.HANDED_OVER:
            return None
        if before is Stage.OFFERED:  # the flow that offered the key has not reported the result
            grant = yield from queue.accept(database, self._parameters(), 0, self.until)
            if grant is not None:
                return grant if (yield from self._is_trusted(grant)) else Stage.WAITING
        self.channel = self.services.channel and self.wakeup.listen(self.site.sockets())
        try:
            joined = yield from self._enqueue()
            if joined is None:  # there is no row, or another waiter has just got the same ticket
                return Stage.OUTSIDE
            self.place, view = joined
            found = yield from self._keep_place(self.place, view)
        finally:
            self.wakeup.close()
        if isinstance(found, Grant) and found.ticket:
            place, self.place = self.place, None
            if not (database.dialect.grant_leaves or self.services.withdraw("", place.owner)):
                _ = yield from queue.leave_queue(database, [place.owner], self.timing.handover_retry / 10)
        if isinstance(found, Grant) and not (yield from self._is_trusted(found)):
            return Stage.WAITING
        return found

    def _keep_place(self, place: QueuePlace, view: QueueStatus | None) -> Steps[Grant | Stage | None]:
        """Wait for a grant to a place, with its heartbeats."""
        key = self.request.key
        self.site.wakeups.register(key, place.ticket, self.wakeup)
        try:
            kept = self.services.keep(place)
            return (yield from self._await_grant(place, view, kept=kept))
        finally:
            self.site.wakeups.unregister(key, place.ticket, self.wakeup)
            self.services.leave(place.owner)

    def _enqueue(self) -> Steps[tuple[QueuePlace, QueueStatus | None] | None]:
        """Adopt the place that another flow of this process has left, else join the queue: as `queue.join`."""
        database, left = self.site.database, self.place
        if left is not None:
            if (yield from queue.adopt_place(database, self._parameters(), left.owner, self.until)):
                return QueuePlace(self.owner, left.ticket, left.sent, database.now(), left.joined), None
            yield from undo_take(self.site, self.request.key, left.owner, self.timing.handover_retry)
            self.place = None
        return (yield from queue.join(database, self._parameters(), self.until))

    def _known_holder(self) -> Steps[LockInfo | None]:
        """The row as it was read lately, else as it is now, else as last read; StoreBusy if it could never be read."""
        local_queue = self.local_queue
        if local_queue.holder is None:
            try:
                local_queue.holder = yield from look(self.site.database, self.request.key, self.until)
            except PASSING as error:
                if local_queue.last_seen[0] is None:
                    raise StoreBusy(f"the database did not say in time who holds it: {error}") from error
        return local_queue.holder or local_queue.last_seen[0]

    def _left(self) -> float:
        """Seconds for an orderly clean-up."""
        database = self.site.database
        return min(database.timing.handover_retry, max(self.until - database.now(), 0.0))

    def _await_grant(self, place: QueuePlace, view: QueueStatus | None, *, kept: bool) -> Steps[Grant | Stage | None]:
        """A grant; an outcome; or None if the time is up, or a flow of this process has handed over the key.

        `view` is the state of the queue if known; `kept`: the process sends the heartbeats of the place.
        """
        database, key, now = self.site.database, self.request.key, self.site.database.now
        growing = pauses(longest=self.timing.grant_retry)
        first, since = 0, now()
        self.heartbeat_due = now() + self.timing.heartbeat_interval
        while self.grant is None and (now() < self.deadline or self.wakeup.notified()):
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
                return (yield from self._accept_polled(place.ticket if served else 0)) or Stage.WAITING
            if served:
                return Stage.WAITING
            if view.first != first:
                first, since = view.first, now()
            if view.last < place.ticket:  # the row was deleted and created again
                yield from queue.announce(database, key, place.ticket, self.until)
            pause = self._until_next_poll(view, now() - since, notified=self._is_notified())
            pause = min(pause, self.request.ttl / 2)  # a grant lasts no longer until it is accepted
            if self._due(view) > 0:
                growing = pauses(longest=self.timing.grant_retry)
                yield from self._report_wait()
                yield from epoch.find_server(database, self.until)
            else:  # if it is granted to no waiter, a transaction pins it, or the server was promoted, which may last
                granted = yield from handover.grant(self.site, key, view.first, until=self.until)
                row, _ = self.local_queue.last_seen
                closed = 0.0 if granted else (yield from epoch.closed_for(database, row, self.until))
                pause = max(next(growing), min(closed, self.timing.poll_max))
            soonest = yield from self._periodic_work(place, kept=kept)
            until_reading = self._until_reading(self.deadline - now())
            pause = max(min(pause, soonest, until_reading), 0.0)  # 0: granted to this flow
            yield from wait(database.store, pause, self.wakeup)
            view = None
        return None

    def _accept_polled(self, ticket: int) -> Steps[Grant | None]:
        """The tenure that a poll has found: a holder elsewhere granted it, or the message was lost."""
        self.site.note_handover(self.request.key, here=False)
        return (yield from queue.accept(self.site.database, self._parameters(), ticket, self.until))

    def _is_notified(self) -> bool:
        """Whether a release notifies this waiter: through the database, or from the same machine through its socket."""
        if self.services.notifications_ready:
            return not self.wakeup.flooded
        # The process listens at the database only for long waits: otherwise many processes that begin to wait at once
        # would all connect, which takes longer than most waits.
        if self.site.database.now() >= self.listen_at:
            self.services.listen()
            return False
        # Until then only a holder on this machine notifies: one whose token begins with the machine's name; or an
        # unknown one that is expected to be here, as the last hand-overs all were.
        holder, here = self.local_queue.holder, self.request.flow[:MACHINE]
        near = self.site.expects_neighbour(self.request.key)
        if holder is not None:
            near = (holder.owner or "").startswith(here)
        return near and self.wakeup.socket is not None

    def _grant_by_message(self, place: QueuePlace) -> Steps[Grant | None]:
        """The tenure that a notification proves, accepted unless it can begin as it is; None if it proves none."""
        message, self.wakeup.message = self.wakeup.message, None  # used once
        grant = None if message is None else place.granted(message, self.request.ttl, self.timing.waiter_ttl)
        if grant is not None and not self.services.notifications_ready:  # so it came by the socket
            self.site.note_handover(self.request.key, here=True)
        if grant is None or (self.request.starts_on_place_lease and self.site.database.now() < grant.late_from):
            return grant
        return (yield from queue.accept(self.site.database, self._parameters(), place.ticket, self.until))

    def _poll(self, place: QueuePlace) -> Steps[QueueStatus | Stage | None]:
        """The state of the queue; OUTSIDE if there is no row; None if there was no answer before the deadline."""
        database = self.site.database
        try:
            view = yield from queue.status(database, self.request.key, self.until, place.owner, place.ticket)
        except PASSING:
            if database.now() < self.deadline:
                raise
            return None
        return view or Stage.OUTSIDE

    def _periodic_work(self, place: QueuePlace, *, kept: bool) -> Steps[float]:
        """Do the periodic work that is due: heartbeat, deadlock check; returns the seconds until the next."""
        database, now = self.site.database, self.site.database.now
        listens_in = self.listen_at - now()
        soonest = listens_in if listens_in > 0 else math.inf
        self.seen = place.seen = now()
        if not kept:
            if now() >= self.heartbeat_due:
                yield from queue.heartbeat(database, [place], self.until)
                self.heartbeat_due = now() + self.timing.heartbeat_interval
            soonest = self.heartbeat_due - now()
        if held := self.held():
            if now() >= self.deadlock_check_due:
                error = yield from deadlock(database, place.owner, held, self.until)
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
        return view.remaining + view.ahead * self.timing.settle
