"""The local queue: the flows of one process that want the same key, first come, first served.

Only the first of a local queue joins the key's queue in the database, for all of them: a process has one place there
and one waiter that polls. If a flow of this process holds the key, the first waits for a moment before it joins: the
critical section may be short, and then the holder hands the key to it with one statement (`hand_over_local`), which
ends one tenure and begins another. Such hand-overs overtake the database's queue at most
`Timing.max_local_handovers` times in a row; then the key goes to that queue, and the first of the local queue joins it.

Theory
------
Each flow is at one `Stage`; `MOVES` lists all transitions. It has one owner token for both ways to get the key, from
a holder of this process and by a place in the database's queue, and accepts no tenure of another token. So a local
queue never decides who has the key, only who is offered it next:

- The holder offers the key to the first (`offer`), sends the statement, and reports: `confirm`, `retract`, or
  nothing if the answer was lost. Then, or without a report in time, the heir reads from the database what its token
  holds, and joins the database's queue with the same token: so it finds a tenure that begins later, too.
- An heir that has left gets no report (`confirm` is False), and the holder releases a tenure that it has, or may have,
  begun. If both are interrupted at once, a tenure is left that no flow relies on; its lease expires.
- A flow that leaves without the key transfers its place to the next (`leave`), once. The next one adopts the place by a
  statement (`queue.adopt_place`), which finds the place gone if the key was granted to it in the meantime. Then the
  adopter releases that tenure; the flow that left does not, and has nothing under that token.

Every entry ends by time: a flow without activity for `Timing.unresponsive_after` is passed over with its place, and may
enter again. `handover_expected_until`, the local time until which the first waits for an offer, is at most
`Timing.local_handover_wait` ahead, or `RECENT` while another flow of this process tries to take the key.

Rule: one mutex, held for a few instructions; the next operation repairs what an interrupt between two of them leaves.
"""

from __future__ import annotations

import math
import os
import threading
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any, Final, NamedTuple

from dblock.core.protocol.queue import Place
from dblock.core.protocol.sending import Database
from dblock.core.statements.base import Masked
from dblock.core.values import Grant, Identity, LockInfo
from dblock.core.wakeup.registry import Wakeup

CONTENDED: Final = 1000
"""Most keys that are marked as being taken, or as contended."""
RECENT: Final = 1.0
"""Seconds after which such a mark expires."""


class Stage(Enum):
    """Stage of a flow in a local queue."""

    WAITING = "waits for its turn, or for an offer of the key"
    OFFERED = "a holder of this process is handing it the key, or lost the answer"
    IN_QUEUE = "waits in the database's queue, for all of its local queue"
    HANDED_OVER = "was handed the key by a holder of this process"
    LEFT = "has left the local queue"

    __hash__ = object.__hash__  # Enum's own is written in Python


MOVES: Final = {
    Stage.WAITING: {Stage.OFFERED, Stage.IN_QUEUE, Stage.LEFT},
    Stage.OFFERED: {Stage.WAITING, Stage.IN_QUEUE, Stage.HANDED_OVER, Stage.LEFT},
    Stage.IN_QUEUE: {Stage.WAITING, Stage.HANDED_OVER, Stage.LEFT},
    Stage.HANDED_OVER: {Stage.WAITING, Stage.LEFT},
    Stage.LEFT: set[Stage](),
}


class Request(NamedTuple):
    """Parameters of a flow's acquire, as the row will show them. Frozen: a holder reads them in another thread."""

    key: str
    ttl: float
    life: float
    """Seconds for which the row is closed: ttl + grace."""
    label: str
    fair: int
    """1: a take does not overtake waiters."""
    flow: str
    """Prefix of the owner tokens of the flow."""
    host: str
    pid: int
    thread: str
    program: str
    task: str
    """The id of the Celery task, else empty."""
    starts_on_place_lease: bool = False
    """Whether the tenure may begin with the lease of its place in the queue, since the watchdog will renew it."""
    kind: int = 0
    """What the key is used for, a `KeyKind`: a row of another kind is neither taken nor waited for."""
    reading: int = 0
    """1: a reader takes the key, which lets other readers in beside it."""

    def new_owner(self) -> str:
        """An unguessable token for one attempt to begin a tenure.

        A row with this token shows the tenure of this attempt, not an earlier one of the same flow whose release was
        lost, nor one that the flow took through another engine.
        """
        return Masked(self.flow + os.urandom(16).hex())

    def parameters(self, owner: str, channel: str = "") -> dict[str, Any]:
        """The statements' parameters, with the token of an attempt and the channel of its process."""
        return {**self._asdict(), "owner": owner, "channel": channel}


def about(request: Request, grant: Grant) -> LockInfo:
    """The row of a tenure that has just begun."""
    who = Identity(request.host, request.pid, request.thread, request.program, request.task)
    (key, owner, fence), ttl = grant.tenure, grant.ttl
    return LockInfo(key, owner, fence, 1, ttl, 0.0, request.life, request.label, who)


@dataclass(slots=True, eq=False)
class LocalWaiter:
    """A flow that waits in a local queue."""

    request: Request
    wakeup: Wakeup = field(default_factory=Wakeup)
    stage: Stage = Stage.WAITING
    owner: str = ""
    """The token of the tenure that it may get."""
    seen: float = 0.0
    """The local time of its last activity."""
    grant: Grant | None = None
    """The tenure that a holder of this process handed to it."""
    local_queue: LocalQueue | None = None
    place: Place | None = None
    """Its place in the database's queue; with another token than its own, a place that was transferred to it."""

    def __post_init__(self) -> None:
        self.owner = self.request.new_owner()

    def relies_on(self, owner: str) -> bool:
        """Whether it has, or will find, the tenure of that token."""
        return self.owner == owner and (self.stage is not Stage.LEFT or self.grant is not None)

    def move(self, stage: Stage) -> None:
        """Change to another stage."""
        if stage not in MOVES[self.stage]:
            raise RuntimeError(f"a waiting flow moves from {self.stage.name} to {stage.name}: a defect of dblock")
        self.stage = stage


class LocalQueue:
    """The flows of this process that wait for one key of one database."""

    def __init__(self, key: str, queues: LocalQueues) -> None:
        self._key, self._queues = key, queues
        self._now, self._timing = queues.database.now, queues.database.timing
        self._waiters: list[LocalWaiter] = []
        self.handover_expected_until = 0.0
        """The local time until which a holder of this process may yet offer the key to the first."""
        self._holder: tuple[LockInfo | None, float] = None, 0.0

    @property
    def last_seen(self) -> tuple[LockInfo | None, float]:
        """The row as last read, however long ago, and the local time of that."""
        return self._holder

    @property
    def holder(self) -> LockInfo | None:
        """The holder of the key, if it was read lately."""
        info, seen = self._holder
        ago = self._now() - seen
        return replace(info, age=info.age + ago) if info is not None and ago < self._timing.holder_cache else None

    @holder.setter
    def holder(self, info: LockInfo | None) -> None:
        self._holder = info, self._now()

    def _first(self) -> LocalWaiter | None:
        """The first waiter with recent activity; those before it are removed, and may enter again."""
        while self._waiters:
            first = self._waiters[0]
            if self._attends(first):
                return first
            self._remove(first)
        return None

    def _attends(self, waiter: LocalWaiter) -> bool:
        since = self._now() - self._timing.unresponsive_after
        return waiter.stage is not Stage.LEFT and since < waiter.seen and waiter.wakeup.responsive()

    def _remove(self, waiter: LocalWaiter) -> None:
        if waiter in self._waiters:
            self._waiters.remove(waiter)
        if not self._waiters:
            self._queues.forget(self._key, self)

    def add(self, waiter: LocalWaiter, *, first: bool = False) -> None:
        """Add a waiter at the end; with `first` at the front, behind one that is past WAITING."""
        waiter.local_queue, waiter.seen = self, self._now()
        asked = bool(self._waiters) and self._waiters[0].stage is not Stage.WAITING
        self._waiters.insert(int(asked) if first else len(self._waiters), waiter)

    def until_queueing(self, waiter: LocalWaiter) -> float:
        """Seconds until that waiter should join the database's queue, as far as is known; 0.0: now."""
        with self._queues.mutex:
            now = waiter.seen = self._now()
            if waiter not in self._waiters:  # it was removed as unresponsive
                self.add(waiter)
            if self._first() is not waiter:
                return self._timing.poll_notified
            return max(self.handover_expected_until - now, 0.0)

    def begin_queueing(self, waiter: LocalWaiter) -> Stage:
        """Move the waiter to IN_QUEUE, unless it has just been handed the key; returns its stage before."""
        with self._queues.mutex:
            before = waiter.stage
            if before is not Stage.HANDED_OVER:
                waiter.move(Stage.IN_QUEUE)
            return before

    def begin_again(self, waiter: LocalWaiter, over: Grant | None = None) -> bool:
        """Wait again with a new token, as the grant or place is over; False if it was handed another grant.

        From then on a tenure of the old token is released by the flow that began it.
        """
        with self._queues.mutex:
            if waiter.grant is not over:
                return False
            waiter.grant, waiter.place, waiter.owner = None, None, waiter.request.new_owner()
            waiter.move(Stage.WAITING)
            return True

    def leave(self, waiter: LocalWaiter, got: Grant | None = None) -> Place | None:
        """Leave with the tenure `got`, if any; returns its place in the database's queue, unless the next adopts it."""
        with self._queues.mutex:
            if waiter.stage is Stage.LEFT:  # interrupted here before
                return None
            left, was_first = waiter.place, self._first() is waiter
            self._remove(waiter)
            first = self._first()
            if was_first and first is not None:
                got = got or waiter.grant
                if got is not None:
                    self.holder = about(waiter.request, got)
                    self.handover_expected_until = self._now() + self._timing.local_handover_wait
                # An adopter releases what was granted to the place, so the tenure `got` must not be the place's.
                free = left is not None and (got is None or left.owner != got.tenure.owner)
                if free and first.place is None and first.stage in {Stage.WAITING, Stage.OFFERED}:
                    first.place, left = left, None
                first.wakeup.notify()
            waiter.place, waiter.grant = None, got or waiter.grant
            waiter.move(Stage.LEFT)
            return left

    def offer(self) -> LocalWaiter | None:
        """Offer the key to the first waiter; None if there is none at stage WAITING."""
        with self._queues.mutex:
            first = self._first()
            if first is None or first.stage is not Stage.WAITING:
                return None
            self.handover_expected_until = self._now() + self._timing.local_handover_wait
            first.move(Stage.OFFERED)
            return first

    def confirm(self, heir: LocalWaiter, grant: Grant) -> bool:
        """Report a successful hand-over to the heir; False if the heir has left or has another token by now."""
        with self._queues.mutex:
            if heir.grant is not None and heir.grant.tenure == grant.tenure:
                return True  # it has read that from the database
            if heir.stage not in {Stage.OFFERED, Stage.IN_QUEUE} or heir.owner != grant.tenure.owner:
                return False
            heir.grant = grant
            heir.move(Stage.HANDED_OVER)
            heir.wakeup.notify()
            return True

    def retract(self, heir: LocalWaiter) -> None:
        """Report that a hand-over was certainly not executed."""
        with self._queues.mutex:
            if heir.stage is Stage.OFFERED:
                heir.move(Stage.WAITING)

    def expect_handover(self, seconds: float) -> None:
        """Let the first waiter expect an offer for so long; with 0 it joins the database's queue."""
        with self._queues.mutex:
            self.handover_expected_until = self._now() + seconds if seconds else 0.0
            first = self._first()
            if first is not None:
                first.wakeup.notify()


class LocalQueues:
    """The local queues of one process for one database, by key."""

    def __init__(self, database: Database) -> None:
        self.database = database
        self.mutex = threading.RLock()
        """Held for a few instructions; a signal handler may run between any two of them."""
        self._queues: dict[str, LocalQueue] = {}
        self._tried: dict[str, float] = {}
        """Deadline of a take of a key that another flow of this process has in progress."""
        self._contended: dict[str, float] = {}
        """The local time at which a key was last found contended."""

    def enter(self, waiter: LocalWaiter, *, handover_expected: bool, first: bool = False) -> LocalQueue:
        """Enter the local queue of a key, behind its waiters and a take in progress.

        `handover_expected`: a flow of this process holds the key. `first`: go to the front, as the others came while
        this flow tried to take the key.
        """
        key, now = waiter.request.key, self.database.now()
        with self.mutex:
            local_queue = self._queues.get(key)
            if local_queue is None:
                local_queue = LocalQueue(key, self)
            if not (first or local_queue.handover_expected_until):
                expected_until = now + self.database.timing.local_handover_wait if handover_expected else 0.0
                local_queue.handover_expected_until = max(expected_until, self._tried.get(key, 0.0))
            local_queue.add(waiter, first=first)
            self._queues[key] = local_queue  # only now, so that an interrupt leaves no empty queue
        return local_queue

    def begin_try(self, key: str) -> bool:
        """Let flows that come while this one tries to take the key wait behind it; False if another flow tries."""
        now = self.database.now()
        if now < self._tried.get(key, now):
            return False
        if len(self._tried) >= CONTENDED:
            self._tried.clear()
        self._tried[key] = now + RECENT
        return True

    def end_try(self, key: str, *, got: bool) -> None:
        """End the take in progress: with the key if `got`, else the flow waits or has given up."""
        _ = self._tried.pop(key, None)
        local_queue = self.find(key)
        if local_queue is not None:
            local_queue.expect_handover(self.database.timing.local_handover_wait if got else 0.0)

    def alone(self, waiter: LocalWaiter) -> LocalQueue:
        """A local queue with this waiter only."""
        local_queue = LocalQueue(waiter.request.key, self)
        local_queue.add(waiter)
        return local_queue

    def forget(self, key: str, local_queue: LocalQueue) -> None:
        """Remove a local queue that is empty."""
        if self._queues.get(key) is local_queue:
            del self._queues[key]

    def find(self, key: str) -> LocalQueue | None:
        """The local queue of a key, if a flow of this process waits for it."""
        return self._queues.get(key) if self._queues else None

    def freed(self, key: str) -> None:
        """Record that a flow of this process released the key to the database: no offer follows."""
        local_queue = self.find(key)
        if local_queue is not None:
            local_queue.expect_handover(0.0)

    def leave_to_parent(self) -> None:
        """Empty the queues in a forked child: the waiters are the parent's, and so may be the mutex."""
        self.mutex = threading.RLock()
        self._queues.clear()
        self._tried.clear()

    def note_contention(self, key: str) -> None:
        """Mark the key as contended. Not called for one's own grant; otherwise the mark would never decay."""
        if len(self._contended) >= CONTENDED:
            self._contended.clear()
        self._contended[key] = self.database.now()

    def expects_contention(self, key: str) -> bool:
        """Whether a flow of this process waits for that key or tries to take it, or other processes probably wait.

        An estimate, which saves two statements when it is right.
        """
        if not (self._queues or self._tried or self._contended):
            return False
        now = self.database.now()
        return (
            key in self._queues
            or now < self._tried.get(key, -math.inf)
            or now < self._contended.get(key, -math.inf) + RECENT
        )
