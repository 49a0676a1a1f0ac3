"""The local queue: the flows of one process that want the same key, first come, first served.

Only the first of a local queue asks the database: it stands in the key's queue for all of them, so that a process has
one place there and one waiter that looks, however many wait inside it. For a moment even that one does not, if a flow
of this process holds the key: its section may be short, and then it hands the key to the first of the local queue with
one statement (`hand_over_local`), which ends one tenure and begins another. Others in the database's queue are
overtaken by that a bounded number of times in a row, `Timing.max_local_handovers`; then the key is theirs, and the
first of the local queue stands in the database's again.

The holder chooses whom to offer the key to, and tells it what became of that. If that one leaves the local queue in the
meantime, it is for the holder to give the key back; if the holder does not know what became of it, or does not say, the
one that was chosen looks for itself.

Rule: a local queue only says who is next in this process; who has the key is in the database. Nobody relies on being
chosen, nor on those before it: the first one soon asks for itself, and one that has not been seen for long is passed
over.
"""

from __future__ import annotations

import secrets
import threading
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

from dblock.core.protocol.sending import Database
from dblock.core.values import Grant, LockInfo, Tenure
from dblock.core.wakeup.registry import Wakeup

CONTENDED: Final = 1000
"""How many keys are known to have been waited for, at most."""


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

    def new_owner(self) -> str:
        """A token that nobody can guess, for one attempt to begin a tenure.

        So a row that shows it shows this attempt's tenure and no other: not an earlier one of the same flow whose
        release was lost, nor one that the flow took through another engine.
        """
        return self.flow + secrets.token_hex(16)

    def parameters(self, owner: str, channel: str = "") -> dict[str, Any]:
        """As the statements name them, with the token of an attempt, and where its process listens."""
        return {**self._asdict(), "owner": owner, "channel": channel}


class HandoverOffer(NamedTuple):
    """That a holder is about to hand its tenure to a waiter of the local queue."""

    heir: LocalWaiter
    token: str
    """The owner token of the tenure that this begins."""
    tenure: Tenure
    """The tenure that this ends; the statement takes no effect once that is over."""
    time: float
    """The local time."""


@dataclass(slots=True, eq=False)
class LocalWaiter:
    """A flow that waits in a local queue."""

    request: Request
    wakeup: Wakeup = field(default_factory=Wakeup)
    seen: float = 0.0
    """The local time at which it last did something, as its local queue's clock has it."""
    accepts_handover: bool = False
    """Does it wait to be handed the key, rather than ask the database for it?"""
    offer: HandoverOffer | None = None
    """What it was offered, as long as it does not know what became of that."""
    chosen: bool = False
    """Has the holder that offered it not said yet what became of it? Until it does, or `offer_timeout`, it does not
    look by itself."""
    grant: Grant | None = None
    left: bool = False
    """Does it wait no more?"""
    local_queue: LocalQueue | None = None
    """Where it stands."""

    def present(self, since: float) -> bool:
        """Has it been seen since that local time?"""
        return self.wakeup.responsive() and since < self.seen

    def claim(self) -> str:
        """The owner token of what it has been granted, or may be."""
        if self.grant is not None:
            return self.grant.tenure.owner
        return "" if self.offer is None else self.offer.token


class LocalQueue:
    """Those of this process who want one key of one database."""

    def __init__(self, key: str, queues: LocalQueues) -> None:
        self._key, self._queues = key, queues
        self._now, self._timing = queues.database.now, queues.database.timing
        self._waiters: list[LocalWaiter] = []
        self.held_in_process = False
        """Does a flow of this process hold the key, who will hand it over?"""
        self.asking = False
        """Is one of the local queue finding out who holds the key?"""
        self._holder: LockInfo | None = None
        self._seen = 0.0

    @property
    def holder(self) -> LockInfo | None:
        """The holder of the key, if it was looked for lately."""
        return self._holder if self._now() < self._seen + self._timing.holder_cache else None

    @holder.setter
    def holder(self, info: LockInfo | None) -> None:
        self._holder, self._seen = info, self._now()

    def add(self, waiter: LocalWaiter) -> None:
        """Stand last."""
        waiter.local_queue, waiter.seen = self, self._now()
        self._waiters.append(waiter)

    def first(self) -> LocalWaiter | None:
        """The first one who has been seen lately; whoever has not been is put out, and may come again."""
        since = self._now() - self._timing.unresponsive_after
        while self._waiters:
            first = self._waiters[0]
            if first.present(since) or (first.chosen and first.offer and since < first.offer.time):
                return first
            self._remove(first)
            self.held_in_process = False
        return None

    def _remove(self, waiter: LocalWaiter) -> None:
        if waiter in self._waiters:
            self._waiters.remove(waiter)
        if not self._waiters:
            self._queues.forget(self._key, self)

    def leave(self, waiter: LocalWaiter, *, got: bool) -> None:
        """Wait no more; `got`: it has the key."""
        with self._queues.mutex:
            waiter.left = True
            behind = waiter in self._waiters and self._waiters[0] is not waiter
            self._remove(waiter)
            first = self.first()
            if not behind and first is not None:  # also if we were interrupted here before
                self.held_in_process = got
                first.wakeup.notify()

    def stand_in(self, leaving: LocalWaiter, waiter: LocalWaiter) -> bool:
        """Let a waiter stand where another one stood; False if that one does not stand here any more."""
        if leaving not in self._waiters:
            return False
        self._waiters[self._waiters.index(leaving)] = waiter
        waiter.local_queue, waiter.seen = self, self._now()
        return True

    def has(self, waiter: LocalWaiter) -> bool:
        """Does it stand here?"""
        return waiter in self._waiters

    def is_first(self, waiter: LocalWaiter) -> bool:
        """Is nobody before it who has been seen lately?"""
        with self._queues.mutex:
            return self.first() is waiter

    def withdraw(self, waiter: LocalWaiter) -> bool:
        """It no longer waits to be handed the key, but asks the database; False if it was chosen in the meantime."""
        with self._queues.mutex:
            waiter.accepts_handover = waiter.chosen
            return not waiter.chosen

    def choose(self, tenure: Tenure) -> HandoverOffer | None:
        """Offer a tenure to the first one; None if that one does not wait to be handed it."""
        with self._queues.mutex:
            first = self.first()
            if first is None or not first.accepts_handover or first.claim():
                return None
            first.offer = HandoverOffer(first, first.request.new_owner(), tenure, self._now())
            first.chosen = True
            return first.offer

    def tell(self, offer: HandoverOffer, grant: Grant) -> bool:
        """Tell the chosen one what it was granted; False if it does not wait any more."""
        heir = offer.heir
        with self._queues.mutex:
            if heir.offer is not offer:  # it has seen to that itself
                return True
            heir.offer, heir.chosen = None, False
            if heir.left:
                return False
            heir.grant = grant
            heir.wakeup.notify()
            return True

    def freed(self) -> None:
        """A flow of this process has given the key back to the database."""
        self.held_in_process = False
        first = self.first()
        if first is not None:
            first.wakeup.notify()


class TakeAttempt:
    """A flow's try to take a key at once; whoever wants the key meanwhile waits behind it."""

    __slots__ = ("_queues", "local_queue", "request", "waiter")

    def __init__(self, queues: LocalQueues, request: Request) -> None:
        self._queues, self.request = queues, request
        self.local_queue: LocalQueue | None = None
        self.waiter: LocalWaiter | None = None
        """Keeps the flow's place in that local queue."""

    def begin(self) -> None:
        """Try to take the key for all of this process; unless somebody else does."""
        self._queues.try_first(self)

    def end(self, *, got: bool) -> None:
        """It has, or has not, got the key; and does not wait for it."""
        self._queues.tried(self)
        if self.local_queue is not None and self.waiter is not None:
            self.local_queue.leave(self.waiter, got=got)

    def wait(self, waiter: LocalWaiter) -> LocalQueue | None:
        """The flow waits from now on, as that waiter: first in the local queue that has formed behind it, if any."""
        with self._queues.mutex:
            self._queues.tried(self)
            local_queue, kept = self.local_queue, self.waiter
            if local_queue is None or kept is None or not local_queue.stand_in(kept, waiter):
                return None
            self.local_queue = None
            return local_queue


class LocalQueues:
    """The local queues of one process for one database, by key."""

    def __init__(self, database: Database) -> None:
        self.database = database
        self.mutex = threading.RLock()
        """Held for a few instructions; a signal handler may run between any two of them."""
        self._queues: dict[str, LocalQueue] = {}
        self._attempts: dict[str, TakeAttempt] = {}
        self._contended: dict[str, float] = {}
        """When somebody last waited for a key."""

    def enter(self, waiter: LocalWaiter) -> tuple[LocalQueue, bool]:
        """Wait for a key behind those who do, and whoever tries to take it; the local queue, and whether it is new."""
        key = waiter.request.key
        with self.mutex:
            local_queue = self._queues.get(key)
            new = local_queue is None
            if local_queue is None:
                local_queue = LocalQueue(key, self)
                attempt = self._attempts.get(key)
                if attempt is not None:
                    attempt.local_queue, attempt.waiter = local_queue, LocalWaiter(attempt.request)
                    local_queue.add(attempt.waiter)
            local_queue.add(waiter)
            self._queues[key] = local_queue  # only now: who is interrupted leaves no empty one
        return local_queue, new

    def standing(self, waiter: LocalWaiter) -> LocalQueue:
        """The local queue in which a waiter stands; if it was put out of one, it comes again."""
        with self.mutex:
            waiter.seen = self.database.now()
            if waiter.local_queue is None or not waiter.local_queue.has(waiter):
                return self.enter(waiter)[0]
            return waiter.local_queue

    def settle(self, waiter: LocalWaiter, offer: HandoverOffer) -> None:
        """A waiter has found out itself what became of an offer."""
        with self.mutex:
            if waiter.offer is offer:
                waiter.offer, waiter.chosen = None, False

    def forget(self, key: str, local_queue: LocalQueue) -> None:
        """Nobody stands in that local queue any more."""
        if self._queues.get(key) is local_queue:
            del self._queues[key]

    def try_first(self, attempt: TakeAttempt) -> None:
        """Whoever comes from now on waits behind that attempt; unless somebody else tries already."""
        with self.mutex:
            _ = self._attempts.setdefault(attempt.request.key, attempt)

    def tried(self, attempt: TakeAttempt) -> None:
        """It has ended."""
        with self.mutex:
            if self._attempts.get(attempt.request.key) is attempt:
                del self._attempts[attempt.request.key]

    def busy(self, key: str) -> bool:
        """Does anybody of this process wait for the key, or try to take it?"""
        return key in self._attempts or key in self._queues

    def find(self, key: str) -> LocalQueue | None:
        """The local queue for a key, if anybody waits for it in this process."""
        return self._queues.get(key) if self._queues else None

    def freed(self, key: str, offer: HandoverOffer | None = None, *, known: bool = True) -> str:
        """A flow of this process has given a key back to the database, and did not hand it to `offer.heir`.

        `known`: that did not happen for sure. Else it may have, and if the heir has left this answers with the owner
        token of a tenure that is to be given back. (Another flow of the process may hold the key by now, and have made
        an offer of its own.)
        """
        with self.mutex:
            local_queue = self.find(key)
            if local_queue is not None:
                local_queue.freed()
            if offer is None or offer.heir.offer is not offer:
                return ""
            heir = offer.heir
            heir.chosen = False
            if known:
                heir.offer = None
            heir.wakeup.notify()
            return offer.token if heir.left and not known else ""

    def leave_to_parent(self) -> None:
        """In a forked child: the waiters are the parent's, and so may be whoever had the mutex."""
        self.mutex = threading.RLock()
        self._queues.clear()
        self._attempts.clear()

    def note_contention(self, key: str) -> None:
        """Somebody waited for that key just now."""
        if len(self._contended) >= CONTENDED:
            self._contended.clear()
        self._contended[key] = self.database.now()

    def is_contended(self, key: str) -> bool:
        """Is it likely that somebody waits for that key? A guess, which saves two statements when it is right."""
        return bool(self._contended) and self.database.now() < self._contended.get(key, -1.0) + 1.0
