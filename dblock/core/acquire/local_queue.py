"""The local queue: the flows of one process that want the same key, first come, first served.

Only the first of a local queue joins the key's queue in the database, for all of them: a process has one place there
and one waiter that polls. If a flow of this process holds the key, the first waits for a moment before it joins: the
critical section may be short, and then the holder hands the key to it with one statement (`hand_over_local`), which
ends one tenure and begins another. Such hand-overs overtake the database's queue at most
`handover.MOST_LOCAL` times in a row; then the key goes to that queue, and the first of the local queue joins it.

Theory
------
A flow that acquires a key is at one `Stage`; `MOVES` lists all transitions, those of the local queue and those of the
database's. It has one owner token for both ways to get the key, from a holder of this process and by a place in the
database's queue, and accepts no tenure of another token. So a local queue never decides who has the key, only who is
offered it next. What the database may have under its token, the stage says, and so what an interrupt leaves to undo:

    OUTSIDE       the tenure of a take, while the flow has a token
    TAKING        the same
    WAITING       nothing
    OFFERED       a tenure, which a holder of this process is handing over
    QUEUED        a place, and the tenure that is granted to it, or that such a holder was handing over

A flow that is OFFERED or QUEUED was handed the key once it has a `grant`.

- A flow that finds no local queue makes one when it tries to take the key (`TAKING`): those that come meanwhile wait
  behind it, and need not try. It waits there as the first if it fails.
- The holder offers the key to the first (`offer`), sends the statement, and reports: `confirm`, `retract`, or
  nothing if the answer was lost. Then, or without a report in time, the heir reads from the database what its token
  holds, and joins the database's queue with the same token: so it finds a tenure that begins later, too.
- An heir that has left gets no report (`confirm` is False), and the holder releases a tenure that it has, or may have,
  begun. If both are interrupted at once, a tenure is left that no flow relies on; its lease expires.
- A flow that leaves without the key transfers its place to the next (`leave`), once, which moves that one to QUEUED. It
  adopts the place by a statement (`queue.adopt_place`), which finds the place gone if the key was granted to it in the
  meantime. Then the adopter releases that tenure; the flow that left does not, and has nothing under that token.

Every entry ends by time: a flow without activity for `Timing.unresponsive_after`, or for `attention` while it tries to
take the key, is passed over with its place, and may enter again. `handover_expected_until`, the local time until which
the first waits for an offer, is at most `Timing.local_handover_wait` ahead.

Rule: one mutex, held for a few instructions; the next operation repairs what an interrupt between two of them leaves.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from dataclasses import KW_ONLY, dataclass, field, replace
from enum import Enum
from typing import Final

from dblock.core.acquire.request import Request, about
from dblock.core.protocol.queue import QueuePlace
from dblock.core.protocol.sending import Database
from dblock.core.values import Grant, LockInfo
from dblock.core.wakeup.registry import Wakeup


class Stage(Enum):
    """Stage of a flow that acquires a key."""

    OUTSIDE = "is in no queue: it has the key, has given up, or tries to take the key beside a local queue"
    TAKING = "tries to take the key, and those that come meanwhile wait behind it"
    WAITING = "waits in its local queue for its turn, or for an offer of the key"
    OFFERED = "a holder of this process is handing it the key, or lost the answer"
    QUEUED = "waits in the database's queue, for all of its local queue"

    __hash__ = object.__hash__  # Enum's own is written in Python


MOVES: Final = {
    Stage.OUTSIDE: {Stage.TAKING, Stage.WAITING},
    Stage.TAKING: {Stage.WAITING, Stage.OUTSIDE},
    Stage.WAITING: {Stage.OFFERED, Stage.QUEUED, Stage.OUTSIDE},
    Stage.OFFERED: {Stage.WAITING, Stage.QUEUED, Stage.OUTSIDE},
    Stage.QUEUED: {Stage.WAITING, Stage.OUTSIDE},
}


@dataclass(slots=True, eq=False, repr=False)
class Waiting:
    """The part of an attempt to acquire the key (`dblock.core.acquire.waiting`) that its local queue knows."""

    request: Request
    _: KW_ONLY
    stage: Stage = Stage.OUTSIDE
    owner: str = ""
    """The token of the tenure that it may get, or has; empty outside of the queues while it certainly has none."""
    given_up: tuple[str, ...] = ()
    """Tokens of places and tenures that it may have and does not want."""
    grant: Grant | None = None
    """The tenure that a holder of this process handed to it."""
    place: QueuePlace | None = None
    """Its place in the database's queue; with another token than its own, one that it has to adopt."""
    seen: float = 0.0
    """The local time of its last activity in the local queue."""
    wakeup: Wakeup = field(init=False)
    local_queue: LocalQueue = field(init=False)

    def move(self, stage: Stage) -> None:
        """Change to another stage."""
        if stage not in MOVES[self.stage]:
            raise RuntimeError(f"a waiter moves from {self.stage.name} to {stage.name}: a defect of dblock")
        self.stage = stage

    def give_up_tokens(self) -> None:
        """Remember what the database may have under its tokens, as unwanted; from now on it has none."""
        tokens = [self.owner] if self.owner and self.stage is not Stage.WAITING else []
        if self.place is not None and self.place.owner != self.owner:
            tokens.append(self.place.owner)
        self.given_up += tuple(tokens)
        self.place, self.owner = None, ""


class LocalQueue:
    """The flows of this process that wait for one key of one database."""

    def __init__(self, key: str, beside: LocalQueues) -> None:
        """`beside`: the local queues of the database."""
        self._key, self._beside = key, beside
        self._now = beside.database.now
        self._waiters: OrderedDict[Waiting, None] = OrderedDict()
        """In order; finding, adding and removing one takes as long among ten thousand as among two."""
        self.handover_expected_until = 0.0
        """The local time until which a holder of this process may yet offer the key to the first."""
        self.last_seen: tuple[LockInfo | None, float] = None, 0.0
        """The row as last read, however long ago, and the local time of that."""

    @property
    def holder(self) -> LockInfo | None:
        """The holder of the key, if it was read lately."""
        info, seen = self.last_seen
        ago = self._now() - seen
        lately = ago < self._beside.database.timing.attention
        return replace(info, age=info.age + ago) if info is not None and lately else None

    @holder.setter
    def holder(self, info: LockInfo | None) -> None:
        self.last_seen = info, self._now()

    def first(self) -> Waiting | None:
        """The first waiter with recent activity; those before it are removed, and may enter again."""
        timing, now = self._beside.database.timing, self._now()
        while self._waiters:
            first = next(iter(self._waiters))
            taking = first.stage is Stage.TAKING
            lasts = timing.attention if taking else timing.unresponsive_after
            if now < first.seen + lasts and (taking or first.wakeup.responsive()):
                return first
            self._remove(first)
        return None

    def _remove(self, waiter: Waiting) -> None:
        _ = self._waiters.pop(waiter, None)
        if not self._waiters and self._beside.get(self._key) is self:
            del self._beside[self._key]

    def add(self, waiter: Waiting, stage: Stage) -> None:
        """Add a waiter at the end; one that tried to take the key keeps its turn."""
        waiter.local_queue, waiter.seen = self, self._now()
        if waiter.stage is not stage:
            waiter.move(stage)
        _ = self._waiters.setdefault(waiter)

    def until_queueing(self, waiter: Waiting) -> float:
        """Seconds until that waiter should join the database's queue, as far as is known; 0.0: now."""
        with self._beside.mutex:
            self.add(waiter, waiter.stage)  # it may have been removed as unresponsive
            if self.first() is not waiter:
                return self._beside.database.timing.poll_notified
            return 0.0 if waiter.stage is Stage.QUEUED else max(self.handover_expected_until - waiter.seen, 0.0)

    def begin_queueing(self, waiter: Waiting) -> Stage:
        """Move the waiter to QUEUED, unless it has just been handed the key; returns its stage before."""
        with self._beside.mutex:
            before = waiter.stage
            if waiter.grant is None and before is not Stage.QUEUED:
                waiter.move(Stage.QUEUED)
            return before

    def begin_again(self, waiter: Waiting, over: Grant | None = None) -> None:
        """Wait again with a new token, as the grant or place is over; nothing changes if it was handed another grant.

        From then on a tenure of the old token is released by the flow that began it.
        """
        with self._beside.mutex:
            if waiter.grant is over:
                waiter.give_up_tokens()
                waiter.grant, waiter.owner = None, waiter.request.new_owner()
                if waiter.stage is not Stage.WAITING:
                    waiter.move(Stage.WAITING)

    def leave(self, waiter: Waiting, got: Grant | None = None) -> None:
        """Leave, with the tenure `got` or the one that was handed over, if any; else the tokens are given up.

        Without a tenure its place in the database's queue goes to the next, if that waits for its turn.
        """
        with self._beside.mutex:
            got, was_first = got or waiter.grant, len(self._waiters) > 1 and self.first() is waiter
            self._remove(waiter)
            first = self.first() if was_first else None
            if first is not None:
                if got is not None:
                    self.holder = about(waiter.request, got)
                    self.expect_handover()
                elif waiter.place is not None and first.stage is Stage.WAITING:
                    if waiter.place.owner != waiter.owner:  # it was adopting it, which may have been executed
                        waiter.given_up += (waiter.owner,)
                    first.place, waiter.place = waiter.place, None
                    first.move(Stage.QUEUED)
                    waiter.owner = ""  # the next one finds out what was granted to it
                first.wakeup.notify()
            if got is None:
                waiter.give_up_tokens()
            waiter.grant = got
            waiter.move(Stage.OUTSIDE)

    def offer(self) -> Waiting | None:
        """Offer the key to the first waiter; None if there is none at stage WAITING."""
        with self._beside.mutex:
            first = self.first()
            if first is None or first.stage is not Stage.WAITING:
                return None
            self.expect_handover()
            first.move(Stage.OFFERED)
            return first

    def confirm(self, heir: Waiting, grant: Grant) -> bool:
        """Report a successful hand-over to the heir; False if the heir has left or has another token by now."""
        with self._beside.mutex:
            if heir.owner != grant.tenure.owner:
                return False
            if heir.stage in {Stage.OFFERED, Stage.QUEUED}:  # else it has read that from the database
                heir.grant = grant
                heir.wakeup.notify()
            return True

    def retract(self, heir: Waiting) -> None:
        """Report that a hand-over was certainly not executed."""
        with self._beside.mutex:
            if heir.stage is Stage.OFFERED:
                heir.move(Stage.WAITING)

    def expect_handover(self) -> None:
        """Let the first waiter expect an offer for a moment."""
        self.handover_expected_until = self._now() + self._beside.database.timing.local_handover_wait


class LocalQueues(dict[str, LocalQueue]):
    """The local queues of this process for one database, by key: those that have waiters."""

    def __init__(self, database: Database) -> None:
        super().__init__()
        self.database = database
        self.mutex = threading.RLock()
        """Held for a few instructions; a signal handler may run between any two of them."""

    def enter(self, waiter: Waiting, *, alone: bool, handover_expected: bool) -> None:
        """Wait in the local queue of a key, or with `alone` in one without other waiters.

        `handover_expected`: a flow of this process holds the key, and may hand it over to the first.
        """
        key = waiter.request.key
        with self.mutex:
            local_queue = (None if alone else self.get(key)) or LocalQueue(key, self)
            if handover_expected and not local_queue.handover_expected_until:
                local_queue.expect_handover()
            local_queue.add(waiter, Stage.WAITING)
            if not alone:
                self[key] = local_queue  # only now, so that an interrupt leaves no empty queue

    def enter_taking(self, waiter: Waiting) -> None:
        """Let those that come while this flow tries to take the key wait behind it, unless some wait already."""
        key = waiter.request.key
        if key not in self:  # without the mutex: of two at a time one is found, and the other one is alone
            local_queue = LocalQueue(key, self)
            local_queue.add(waiter, Stage.TAKING)
            _ = self.setdefault(key, local_queue)

    def released(self, key: str) -> None:
        """Let the first waiter join the database's queue: a flow of this process released the key, and offers none."""
        local_queue = self.get(key)
        if local_queue is not None:
            with self.mutex:
                local_queue.handover_expected_until = 0.0
                first = local_queue.first()
                if first is not None and first.stage is not Stage.TAKING:
                    first.wakeup.notify()

    def leave_to_parent(self) -> None:
        """Empty them in a forked child: the waiters are the parent's, and so may be the mutex."""
        self.mutex = threading.RLock()
        self.clear()
