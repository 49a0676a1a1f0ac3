"""The local queue: the flows of one process that want the same key, first come, first served.

Only the first of a local queue asks the database: it stands in the key's queue for all of them, so that a process has
one place there and one waiter that looks, however many wait inside it. For a moment even that one does not, if a flow
of this process holds the key: its section may be short, and then it hands the key to the first of the local queue with
one statement (`hand_over_local`), which ends one tenure and begins another. Others in the database's queue are
overtaken by that a bounded number of times in a row, `Timing.max_local_handovers`; then the key is theirs, and the
first of the local queue stands in the database's again.

Theory
------
Each flow is at one `Stage`, and `MOVES` has all ways from one to another. It has one owner token for whatever way it
gets the key, by its holder or by its place in the database's queue, and believes in no tenure of another token. So a
local queue never decides who has the key, only who is next to be offered it:

- The holder offers it to the first (`choose`), sends the statement, and says what became of it: `tell`, `withdraw`, or,
  if it does not know, nothing. Then, or if it is not told in time, the heir asks the database what its token holds, and
  stands in the database's queue with the same token: whatever comes later, it finds.
- An heir that has left is not told (`tell` is False), and the holder gives back what it has just begun, or may have. If
  both are broken off at once, a tenure is left that nobody relies on, and ends with its lease.
- Whoever leaves without the key hands its place to the next (`leave`), once; that one adopts it by a statement
  (`queue.inherit`) which finds it gone if the key was granted there in the meantime, and then gives that back: the one
  who left does not, and has nothing under that token.

Every entry ends by time: whoever has not been seen for `Timing.unresponsive_after` is passed over, with its place, and
may come again. `hope_until`, the local time until which the first waits for an offer, is at most
`Timing.local_handover_wait` ahead; `RECENT` where somebody is trying to take the key.

Rule: one mutex, held for a few instructions, and an interrupt between any two of them leaves what the next look mends.
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
from dblock.core.values import Grant, Identity, LockInfo
from dblock.core.wakeup.registry import Wakeup

CONTENDED: Final = 1000
"""How many keys are known to be tried, or to have been waited for, at most."""
RECENT: Final = 1.0
"""Seconds for which that is thought to be so, if nobody says otherwise."""


class Stage(Enum):
    """How far a flow that waits in a local queue has come."""

    WAITING = "for those before it, or to be offered the key"
    OFFERED = "a holder of this process is handing it the key, or does not know whether it has"
    ASKING = "stands in the database's queue, for all of its local queue"
    TOLD = "was handed the key by a holder of this process"
    LEFT = "waits no more"

    __hash__ = object.__hash__  # Enum's own is written in Python


MOVES: Final = {
    Stage.WAITING: {Stage.OFFERED, Stage.ASKING, Stage.LEFT},
    Stage.OFFERED: {Stage.WAITING, Stage.ASKING, Stage.TOLD, Stage.LEFT},
    Stage.ASKING: {Stage.WAITING, Stage.TOLD, Stage.LEFT},
    Stage.TOLD: {Stage.WAITING, Stage.LEFT},
    Stage.LEFT: set[Stage](),
}


class Request(NamedTuple):
    """What a flow asks for, as the row is to say it. Frozen: whoever hands the key over reads it in another thread."""

    key: str
    ttl: float
    life: float
    """Seconds for which the row is closed: ttl + grace."""
    label: str
    fair: int
    """1: not before those who wait."""
    flow: str
    """What the owner tokens of the flow begin with."""
    host: str
    pid: int
    thread: str
    program: str
    task: str
    """The id of the Celery task, or nothing."""
    prompt: bool = False
    """May it begin on the lease of its place in the queue, because the watchdog will make it whole?"""

    def new_owner(self) -> str:
        """A token that nobody can guess, for one attempt to begin a tenure.

        So a row that shows it shows this attempt's tenure and no other: not an earlier one of the same flow whose
        release was lost, nor one that the flow took through another engine.
        """
        return self.flow + os.urandom(16).hex()

    def parameters(self, owner: str, channel: str = "") -> dict[str, Any]:
        """As the statements name them, with the token of an attempt, and where its process listens."""
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
    """The token under which it may get the key."""
    seen: float = 0.0
    """The local time at which it last did something."""
    grant: Grant | None = None
    """What it was told."""
    local_queue: LocalQueue | None = None
    """Where it waits."""
    place: Place | None = None
    """Where it stands in the database's queue; with another token than its own, what somebody has left to it."""

    def __post_init__(self) -> None:
        self.owner = self.request.new_owner()

    def move(self, stage: Stage) -> None:
        """Come to another stage."""
        if stage not in MOVES[self.stage]:
            raise RuntimeError(f"a flow that waits comes from {self.stage.name} to {stage.name}: a defect of dblock")
        self.stage = stage


class LocalQueue:
    """Those of this process who want one key of one database."""

    def __init__(self, key: str, queues: LocalQueues) -> None:
        self._key, self._queues = key, queues
        self._now, self._timing = queues.database.now, queues.database.timing
        self._waiters: list[LocalWaiter] = []
        self.hope_until = 0.0
        """The local time until which a holder of this process may yet offer the key to the first."""
        self._holder: tuple[LockInfo | None, float] = None, 0.0

    @property
    def last_seen(self) -> tuple[LockInfo | None, float]:
        """Whoever was seen holding it last, however long ago, and the local time of that."""
        return self._holder

    @property
    def holder(self) -> LockInfo | None:
        """The holder of the key, if somebody has looked lately."""
        info, seen = self._holder
        ago = self._now() - seen
        return replace(info, age=info.age + ago) if info is not None and ago < self._timing.holder_cache else None

    @holder.setter
    def holder(self, info: LockInfo | None) -> None:
        self._holder = info, self._now()

    def _first(self) -> LocalWaiter | None:
        """The first one that waits and has been seen lately; others are put out, and may come again."""
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
        """Stand last; or first, unless somebody asks the database already."""
        waiter.local_queue, waiter.seen = self, self._now()
        asked = bool(self._waiters) and self._waiters[0].stage is not Stage.WAITING
        self._waiters.insert(int(asked) if first else len(self._waiters), waiter)

    def until_asking(self, waiter: LocalWaiter) -> float:
        """Seconds until it is for that waiter to ask the database, as far as is known; 0.0 if it is now."""
        with self._queues.mutex:
            now = waiter.seen = self._now()
            if waiter not in self._waiters:  # it was put out
                self.add(waiter)
            if self._first() is not waiter:
                return self._timing.poll_notified
            return max(self.hope_until - now, 0.0)

    def begin_asking(self, waiter: LocalWaiter) -> Stage:
        """It asks the database from now on, unless it was just told; the stage at which it was before."""
        with self._queues.mutex:
            before = waiter.stage
            if before is not Stage.TOLD:
                waiter.move(Stage.ASKING)
            return before

    def begin_again(self, waiter: LocalWaiter, over: Grant | None = None) -> bool:
        """What it was told, or stood for, is over: it waits with another token; False if it was told something else.

        From then on whatever comes under the old token is given back by whoever brought that about.
        """
        with self._queues.mutex:
            if waiter.grant is not over:
                return False
            waiter.grant, waiter.place, waiter.owner = None, None, waiter.request.new_owner()
            waiter.move(Stage.WAITING)
            return True

    def bequeath(self, waiter: LocalWaiter) -> bool:
        """Leave, and leave the place in the database's queue to the next; False if there is nobody who has use for it.

        From then on whatever is granted there is none of its business.
        """
        with self._queues.mutex:
            if waiter.grant is not None or self._first() is not waiter:
                return False
            behind = [each for each in self._waiters[1:] if self._attends(each)]
            if not behind or behind[0].place is not None:
                return False
            return self.leave(waiter) is None

    def leave(self, waiter: LocalWaiter, got: Grant | None = None) -> Place | None:
        """Wait no more; the place in the database's queue that nobody else has use for. `got`: what it leaves with."""
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
                    self.hope_until = self._now() + self._timing.local_handover_wait
                # An heir gives back what was granted to the place that it was left: no tenure that somebody has.
                free = left is not None and (got is None or left.owner != got.tenure.owner)
                if free and first.place is None and first.stage in {Stage.WAITING, Stage.OFFERED}:
                    first.place, left = left, None
                first.wakeup.notify()
            waiter.place, waiter.grant = None, got or waiter.grant
            waiter.move(Stage.LEFT)
            return left

    def choose(self) -> LocalWaiter | None:
        """Offer a tenure to the first one; None if that one does not wait to be handed it."""
        with self._queues.mutex:
            first = self._first()
            if first is None or first.stage is not Stage.WAITING:
                return None
            self.hope_until = self._now() + self._timing.local_handover_wait
            first.move(Stage.OFFERED)
            return first

    def tell(self, heir: LocalWaiter, grant: Grant) -> bool:
        """Tell the chosen one what it was granted; False if it has no use for it any more."""
        with self._queues.mutex:
            if heir.grant is not None and heir.grant.tenure == grant.tenure:
                return True  # it has seen that itself
            if heir.stage not in {Stage.OFFERED, Stage.ASKING} or heir.owner != grant.tenure.owner:
                return False
            heir.grant = grant
            heir.move(Stage.TOLD)
            heir.wakeup.notify()
            return True

    def withdraw(self, heir: LocalWaiter) -> None:
        """What it was offered has not come about, for sure."""
        with self._queues.mutex:
            if heir.stage is Stage.OFFERED:
                heir.move(Stage.WAITING)

    def hope(self, seconds: float) -> None:
        """The first may expect to be offered the key for so long; not at all, and it asks the database."""
        with self._queues.mutex:
            self.hope_until = self._now() + seconds if seconds else 0.0
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
        """Until when whoever comes may expect that somebody who tries to take a key has it, or waits for it."""
        self._contended: dict[str, float] = {}
        """When somebody last waited for a key."""

    def enter(self, waiter: LocalWaiter, *, hopeful: bool, first: bool = False) -> LocalQueue:
        """Wait for a key behind those who do, and whoever tries to take it; `hopeful`: a flow of this process has it.

        `first`: it came before them, and has tried to take the key while they waited for that.
        """
        key, now = waiter.request.key, self.database.now()
        with self.mutex:
            local_queue = self._queues.get(key)
            if local_queue is None:
                local_queue = LocalQueue(key, self)
            if not (first or local_queue.hope_until):
                hope = now + self.database.timing.local_handover_wait if hopeful else 0.0
                local_queue.hope_until = max(hope, self._tried.get(key, 0.0))
            local_queue.add(waiter, first=first)
            self._queues[key] = local_queue  # only now: who is interrupted leaves no empty one
        return local_queue

    def begin_try(self, key: str) -> bool:
        """Let whoever comes in the next moment wait behind us, who try to take the key; False if somebody else does."""
        now = self.database.now()
        if now < self._tried.get(key, now):
            return False
        if len(self._tried) >= CONTENDED:
            self._tried.clear()
        self._tried[key] = now + RECENT
        return True

    def end_try(self, key: str, *, got: bool) -> None:
        """We have it; or wait for it, or have given up."""
        _ = self._tried.pop(key, None)
        local_queue = self.find(key)
        if local_queue is not None:
            local_queue.hope(self.database.timing.local_handover_wait if got else 0.0)

    def alone(self, waiter: LocalWaiter) -> LocalQueue:
        """Wait without others."""
        local_queue = LocalQueue(waiter.request.key, self)
        local_queue.add(waiter)
        return local_queue

    def forget(self, key: str, local_queue: LocalQueue) -> None:
        """Nobody stands in that local queue any more."""
        if self._queues.get(key) is local_queue:
            del self._queues[key]

    def find(self, key: str) -> LocalQueue | None:
        """The local queue for a key, if anybody waits for it in this process."""
        return self._queues.get(key) if self._queues else None

    def freed(self, key: str) -> None:
        """A flow of this process has given a key back to the database."""
        local_queue = self.find(key)
        if local_queue is not None:
            local_queue.hope(0.0)

    def leave_to_parent(self) -> None:
        """In a forked child: the waiters are the parent's, and so may be whoever had the mutex."""
        self.mutex = threading.RLock()
        self._queues.clear()
        self._tried.clear()

    def note_contention(self, key: str) -> None:
        """Somebody else waited for that key just now. Who had it granted to itself would believe that for ever."""
        if len(self._contended) >= CONTENDED:
            self._contended.clear()
        self._contended[key] = self.database.now()

    def is_crowded(self, key: str) -> bool:
        """Does somebody of this process wait for that key or try to take it, or is it likely that others wait?

        A guess, which saves two statements when it is right.
        """
        if not (self._queues or self._tried or self._contended):
            return False
        now = self.database.now()
        return (
            key in self._queues
            or now < self._tried.get(key, -math.inf)
            or now < self._contended.get(key, -math.inf) + RECENT
        )
