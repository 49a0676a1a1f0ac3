"""Waiting for a key that another flow holds: in the local queue of the process, and in the database's queue.

Rule: a waiter holds no connection while it pauses, and no pause overshoots the timeout or the end of the holder's
lease. `dblock.core.protocol.queue` says why the queue works; this module decides how often to poll.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Collection
from dataclasses import dataclass, field, replace

from dblock.core.acquire import handover, slow
from dblock.core.acquire.local_queue import Stage, Waiting
from dblock.core.acquire.request import Refused, Request
from dblock.core.acquire.services import WaiterServices
from dblock.core.acquire.site import Site
from dblock.core.errors import PASSING, LockStoreError, LockTimeout, StoreBusy, StoreUnanswered
from dblock.core.protocol import epoch, queue
from dblock.core.protocol.deadlock import deadlock
from dblock.core.protocol.queue import QueuePlace, QueueStatus
from dblock.core.protocol.sending import Database, pauses
from dblock.core.protocol.steps import Parameters, Steps, sleep, wait
from dblock.core.protocol.tenures import inspect
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
    broken: bool = False
    """Whether a connection broke before a take was answered, so that the database may be down."""
    listen_at: float = 0.0
    """Local time, with jitter, from which the process listens for notifications of the database."""
    deadlock_check_due: float = 0.0
    """Local time of the next check for a deadlock."""
    database: Database = field(init=False)
    timing: Timing = field(init=False)

    def __post_init__(self) -> None:
        database = self.database = self.site.database
        timing, start = self.timing, self.start = database.timing, database.now()
        self.deadline = math.inf if self.timeout is None else start + self.timeout
        # One answer at least is awaited.
        distant = min(2 * database.latency.distance, timing.farthest)
        least = timing.single_try if self.deadline <= start else distant
        self.until = max(self.deadline + timing.answer_grace, start + least)

    def again(self, request: Request) -> Attempt:
        """An attempt to acquire what another request asks for, in the time that is left."""
        return replace(self, request=request, timeout=None if self.timeout is None else max(self._left(), 0.0))

    def enter(self, holder: LockInfo | None) -> None:
        """Begin to wait; `holder` is the holder as last read. Raises a LockError where a wait could not end."""
        site, request = self.site, self.request
        try:
            self.database.before_waiting()  # before other flows wait behind this one
        except LockTimeout as refused:
            refused.holder = None if holder is None else holder.masked()
            raise
        self.wakeup = Wakeup(self.database)
        alone = not (request.fair and self.find_services().queues_locally) or bool(self.held())
        if alone:
            self.leave()
        self.owner = request.new_owner()
        began = self.database.now()
        self.listen_at = began + self.timing.listen_after * random.uniform(0.75, 1.25)  # noqa: S311 - jitter
        self.slow_wait.begin(began)
        site.local_queues.enter(self, alone=alone, handover_expected=not alone and self.held_in_process)
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
        until, tokens = self.database.now() + self.timing.undo_timeout, self.given_up
        if queued and tokens:
            _ = yield from queue.leave_queue(self.database, tokens, self.timing.undo_timeout)
        seconds = max(until - self.database.now(), self.timing.near)  # whatever the places were granted, or handed
        yield from handover.undo_takes(self.site, [(owner, self.request.key) for owner in tokens], seconds)

    def refusal(self, error: LockStoreError) -> Refused:
        """The refusal in place of an error that only says that it took too long; any other one is raised."""
        late = self.database.now() >= self.deadline and self.database.only_late(error)
        if isinstance(error, StoreBusy) or (late and not self.broken):
            return Refused(busy=error)
        raise error

    def wait(self) -> Steps[Grant | Refused | None]:
        """Wait in the local queue for an offer of the key; when it is this flow's turn, in the database's queue.

        None if the flow should try again to take the key.
        """
        growing = pauses()
        while True:
            handed = self.grant
            if handed is None and self._left() <= 0:
                self.leave()
                if self.grant is not None:  # handed over at the last moment
                    continue
                yield from self._withdraw()
                holder = yield from self._known_holder()
                yield from self._report_wait()
                return Refused(holder)
            try:
                found = handed or (yield from self._wait_for_turn())
                if isinstance(found, Grant):
                    self.leave(found)
                    yield from self._delete_place(found)
                    if self.database.now() < found.trusted_until:
                        return found
                    handed = found  # its answer came too late
                    _ = yield from handover.end(self.site, handed)
                    found = Stage.WAITING
            except (StoreBusy, StoreUnanswered) as error:
                # StoreBusy: a transaction has locked a row that this flow needs to write; it can still be read.
                self.local_queue.begin_again(self, handed)
                yield from self._withdraw()
                too_late = self.until - self.database.now() < self.timing.min_retry_time
                known_and_late = self.local_queue.last_seen[0] and self.database.only_late(error)
                if isinstance(error, StoreUnanswered) and too_late and not known_and_late:
                    raise
                yield from sleep(self.database.store, min(next(growing), max(self._left(), 0.0)))
                continue
            if found is Stage.WAITING:
                self.local_queue.begin_again(self, handed)
            elif found is Stage.OUTSIDE:
                yield from self._delete_place()
                self.leave()
            yield from self._withdraw()
            if self.stage is Stage.OUTSIDE and self.grant is None:  # else it was handed over meanwhile
                return None

    def _wait_for_turn(self) -> Steps[Grant | Stage | None]:
        """Pause in the local queue, or wait in the database's: a tenure, or the stage to go back to.

        None after a pause, if the time is up, or if a flow of this process has handed over the key.
        """
        pause = self.local_queue.until_queueing(self)
        if pause > 0 or self._left() <= self._round_trip():
            yield from self._report_wait()
            yield from self._pause(pause or math.inf)
            _ = self.wakeup.consume()
            return None
        before = self.local_queue.begin_queueing(self)
        if self.grant is not None:
            return None
        key, services = self.request.key, self.find_services()
        if before is Stage.OFFERED:  # the flow that offered the key has not reported the result
            grant = yield from self._accept(0)
            if grant is not None:
                return grant
        channel = self.wakeup.listen(self.site.sockets()) if services.queues_locally else ""
        place: QueuePlace | None = None
        try:
            joined = yield from self._enqueue(self.request.parameters(self.owner, channel))
            if joined is None:  # there is no row, or another waiter has just got the same ticket
                return Stage.OUTSIDE
            self.place, view = joined
            place = self.place
            self.site.wakeups.register(key, place.ticket, self.wakeup)
            kept = services.keep(place)
            return (yield from self._await_grant(place, view, kept=kept))
        finally:
            self.wakeup.close()
            if place is not None:
                self.site.wakeups.unregister(key, place.ticket, self.wakeup)
                services.leave(place.owner)

    def _enqueue(self, request: Parameters) -> Steps[tuple[QueuePlace, QueueStatus | None] | None]:
        """Adopt the place that another flow of this process has left, else join the queue: as `queue.join`."""
        if (left := self.place) is not None:
            if (yield from queue.adopt_place(self.database, request, left.owner, self.until)):
                return QueuePlace(self.owner, left.ticket, left.sent, self.database.now(), left.joined), None
            yield from handover.undo_takes(self.site, [(left.owner, self.request.key)], self.timing.single_try)
            self.place = None
        return (yield from queue.join(self.database, request, self.until))

    def _await_grant(self, place: QueuePlace, view: QueueStatus | None, *, kept: bool) -> Steps[Grant | Stage | None]:
        """Wait for a grant to a place; the result is that of `_wait_for_turn`.

        `view` is the state of the queue if known; `kept`: the process sends the heartbeats of the place.
        """
        database, key, now = self.database, self.request.key, self.database.now
        growing = pauses(longest=self.timing.grant_retry)
        first, since = 0, now()
        while self.grant is None and (now() < self.deadline or self.wakeup.notified()):
            if self.wakeup.consume():
                if (grant := (yield from self._grant_by_message(place))) is not None:
                    return grant
                view = None
            if self._left() <= 2 * self._round_trip():  # an answer may come too late
                yield from self._pause(math.inf)
                continue
            found = yield from self._poll(place, view)
            if not isinstance(found, QueueStatus):
                return found
            view = found
            if view.first != first:
                first, since = view.first, now()
            if view.last < place.ticket:  # the row was deleted and created again
                yield from queue.announce(database, key, place.ticket, self.until)
            pause = self._until_next_poll(view, now() - since)
            if self._due(view) > 0:
                growing = pauses(longest=self.timing.grant_retry)
                yield from self._report_wait()
                yield from epoch.find_server(database, self.until)
            else:  # if it is granted to no waiter, a transaction pins it, or the server was promoted, which may last
                granted = yield from handover.grant(self.site, key, view.first, until=self.until)
                row, _ = self.local_queue.last_seen
                closed = 0.0 if granted else (yield from epoch.closed_for(database, row, self.until))
                pause = max(next(growing), min(closed, self.timing.poll_max))
            longest = yield from self._periodic_work(place, kept=kept)
            self.seen = place.seen = now()
            yield from self._pause(min(pause, longest))
            view = None
        return None

    def _poll(self, place: QueuePlace, view: QueueStatus | None) -> Steps[QueueStatus | Grant | Stage | None]:
        """The state of the queue, read unless it is known, or what follows from it; None: no answer in time."""
        database, key = self.database, self.request.key
        try:
            view = view or (yield from queue.status(database, key, self.until, place.owner, place.ticket))
        except PASSING:
            if database.now() < self.deadline:
                raise
            return None
        if view is None:  # there is no row any more
            return Stage.OUTSIDE
        served = place.ticket < view.first or not view.present
        if view.mine and view.remaining > 0:  # by a holder elsewhere, or the message was lost
            self.site.note_handover(key, here=False)
            ticket = place.ticket if served else 0  # 0: by a holder of this process without a report
            return (yield from self._accept(ticket)) or Stage.WAITING
        return Stage.WAITING if served else view

    def _accept(self, ticket: int) -> Steps[Grant | None]:
        """The tenure that its token may have, with a whole lease; `ticket`: the place that it was granted to, or 0."""
        return queue.accept(self.database, self.request.parameters(self.owner), ticket, self.until)

    def _periodic_work(self, place: QueuePlace, *, kept: bool) -> Steps[float]:
        """Send a heartbeat and look for a deadlock, where that is due; the most seconds until this is called again."""
        database, now, timing = self.database, self.database.now, self.timing
        longest = self.request.ttl / 2  # a grant lasts no longer until it is accepted
        if not kept:
            longest = min(longest, timing.heartbeat_interval)
            if now() >= place.sent + timing.heartbeat_interval:
                yield from queue.heartbeat(database, [place], self.until)
        if held := self.held():
            longest = min(longest, timing.deadlock_check)
            if now() >= self.deadlock_check_due:
                if (error := (yield from deadlock(database, place.owner, held, self.until))) is not None:
                    raise error
                self.deadlock_check_due = now() + timing.deadlock_check
        listens_in = self.listen_at - now()
        return min(longest, listens_in) if listens_in > 0 else longest

    def _pause(self, seconds: float) -> Steps[None]:
        """Pause until notified, at most so long, and not past the deadline.

        Shortly before the deadline, after a last poll, the holder is read, for the refusal.
        """
        until_reading = self._left() - 3 * self._round_trip() - self.timing.near
        if until_reading > 0.001:  # a clock may not resolve a shorter pause
            seconds = min(seconds, until_reading)
        else:
            if self._left() > self._round_trip():
                _ = yield from self._known_holder()
            seconds = max(self._left(), 0.0)
        yield from wait(self.database.store, seconds, self.wakeup)

    def _report_wait(self) -> Steps[None]:
        """Report, once, that the flow waits for a holder, and log a slow wait."""
        if (contended := self.contended) is not None:
            self.contended = None
            contended(self.local_queue.holder)
        if self.database.now() >= self.slow_wait.due:
            slow.say(self.slow_wait, self.site, self.request, (yield from self._known_holder()))

    def _known_holder(self) -> Steps[LockInfo | None]:
        """The row as it was read lately, else as it is now, else as last read; StoreBusy if it could never be read."""
        local_queue = self.local_queue
        if local_queue.holder is None:
            try:
                local_queue.holder = yield from inspect(self.database, self.request.key, self.until)
            except PASSING as error:
                if local_queue.last_seen[0] is None:
                    raise StoreBusy(f"the database did not say in time who holds it: {error}") from error
        return local_queue.holder or local_queue.last_seen[0]

    def _delete_place(self, grant: Grant | None = None) -> Steps[None]:
        """Delete its place, which the grant may have deleted, or has served: then in the background if possible."""
        if (place := self.place) is not None:
            served = grant is not None and grant.ticket == place.ticket  # so no other grant goes to that place
            deleted = served and self.database.dialect.grant_leaves
            if not (deleted or (served and self.find_services().withdraw("", place.owner))):
                _ = yield from queue.leave_queue(self.database, [place.owner], self._time_to_undo())
            self.place = None

    def _withdraw(self) -> Steps[None]:
        """Delete the places and release the tenures of unwanted tokens; in the background if the process does that."""
        key, services = self.request.key, self.find_services()
        left = [(owner, key) for owner in self.given_up if not services.withdraw(key, owner)]
        if left:
            yield from handover.withdraw(self.site, left, self._time_to_undo())
        self.given_up = ()

    def _left(self) -> float:
        """Seconds until the deadline."""
        return self.deadline - self.database.now()

    def _time_to_undo(self) -> float:
        """Seconds for an orderly clean-up."""
        return min(self.timing.single_try, max(self.until - self.database.now(), 0.0))

    def _round_trip(self) -> float:
        """Seconds before the deadline in which no statement is sent, as its answer would come too late."""
        return 1.25 * self.database.latency.distance

    def _grant_by_message(self, place: QueuePlace) -> Steps[Grant | None]:
        """The tenure that a notification proves, accepted unless it can begin as it is; None if it proves none."""
        message, self.wakeup.message = self.wakeup.message, None  # used once
        grant = None if message is None else place.granted(message, self.request.ttl, self.timing.waiter_ttl)
        if grant is not None and not self.find_services().notifications_ready:  # so it came by the socket
            self.site.note_handover(self.request.key, here=True)
        if grant is None or (self.request.starts_on_place_lease and self.database.now() < grant.late_from):
            return grant
        return (yield from self._accept(place.ticket))

    def _is_notified(self) -> bool:
        """Whether a release notifies this waiter: through the database, or from the same machine through its socket."""
        services = self.find_services()
        if services.notifications_ready:
            return True
        # The process listens at the database only for long waits: otherwise many processes that begin to wait at once
        # would all connect, which takes longer than most waits.
        if self.database.now() >= self.listen_at:
            services.listen()
            return False
        # Until then only a holder on this machine notifies: one whose token begins with the machine's name; or an
        # unknown one that is expected to be here, as the last hand-overs all were.
        holder, expected = self.local_queue.holder, self.site.expects_neighbour(self.request.key)
        near = expected if holder is None else (holder.owner or "").startswith(self.request.flow[:MACHINE])
        return near and self.wakeup.socket is not None

    def _until_next_poll(self, view: QueueStatus, unchanged: float) -> float:
        """Seconds until the next poll, with jitter, at most until this waiter should have an expired key granted.

        A waiter that is not notified polls after a twentieth of the time for which the head of the queue has been the
        same, times its position: the next holder loses little of its wait, and all waiters together poll seldom.
        """
        timing, pause = self.timing, self.timing.poll_notified
        if not self._is_notified():
            pause = min(max(unchanged / 20, timing.poll_min), timing.poll_max / 10) * (view.ahead + 1)
            pause = min(pause, timing.poll_max)
        pause *= random.uniform(0.75, 1.25)  # noqa: S311 - jitter, not a secret
        due = self._due(view)
        return min(pause, due) if due > 0 else pause

    def _due(self, view: QueueStatus) -> float:
        """Seconds until this waiter should have a key without a holder granted; those before it do so earlier."""
        return view.remaining + view.ahead * self.timing.settle
