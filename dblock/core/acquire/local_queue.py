"""The local queue: the flows of one process that want the same key, first come, first served.

Only the first of a line asks the database: it stands in the key's queue for all of them, so that a process has one
place there and one waiter that looks, however many wait inside it. For a moment even that one does not, if a flow of
this process holds the key: its section may be short, and then it hands the key to the first of the line with one
statement (`hand_over_local`), which ends one tenure and begins another. Others in the queue are overtaken by that a
bounded number of times in a row, `MAX_LOCAL_HANDOVERS`; then the key is theirs, and the line stands in the queue again.

The holder chooses whom to offer the key to, and tells it what became of that. If that one leaves the line in the
meantime, it is for the holder to give the key back; if the holder does not know what became of it, or does not say, the
one that was chosen looks for itself.

Rule: a line only says who is next in this process; who has the key is in the database. Nobody relies on being chosen,
nor on those before it: the first one soon asks for itself, and one that has not been seen for long is passed over.
"""

from __future__ import annotations

import secrets
import threading
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

from dblock.core.protocol.sending import Database
from dblock.core.values import Grant, LockInfo, Tenure
from dblock.core.wakeup.registry import Wakeup

MAX_LOCAL_HANDOVERS: Final = 8
"""How often in a row a key is handed over inside a process while others wait for it."""
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
    """That a holder is about to hand its tenure to a member of the line."""

    heir: LocalWaiter
    token: str
    """The owner token of the tenure that this begins."""
    tenure: Tenure
    """The tenure that this ends; the statement takes no effect once that is over."""
    time: float
    """The local time."""


@dataclass(slots=True, eq=False)
class LocalWaiter:
    """A flow that waits in a line."""

    request: Request
    wakeup: Wakeup = field(default_factory=Wakeup)
    seen: float = 0.0
    """The local time at which it last did something, as its line's clock has it."""
    content: bool = False
    """Does it wait to be handed the key, rather than ask for it?"""
    offer: HandoverOffer | None = None
    """What it was offered, if it does not know what became of that."""
    chosen: bool = False
    """Is it for the holder to find that out?"""
    grant: Grant | None = None
    gone: bool = False
    line: LocalQueue | None = None
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
        self._key, self._queues, self._mutex = key, queues, queues.mutex
        self._now, self._timing = queues.database.now, queues.database.timing
        self._members: list[LocalWaiter] = []
        self.held_in_process = False
        """Does a flow of this process hold the key, who will hand it over?"""
        self.asking = False
        """Is one of the line finding out who holds the key?"""
        self._holder: LockInfo | None = None
        self._seen = 0.0

    @property
    def holder(self) -> LockInfo | None:
        """The holder of the key, if it was looked for lately."""
        return self._holder if self._now() < self._seen + self._timing.holder_cache else None

    @holder.setter
    def holder(self, info: LockInfo | None) -> None:
        self._holder, self._seen = info, self._now()

    def add(self, member: LocalWaiter) -> None:
        """Stand last."""
        member.line, member.seen = self, self._now()
        self._members.append(member)

    def first(self) -> LocalWaiter | None:
        """The first one who has been seen lately; whoever has not been is put out, and may come again."""
        since = self._now() - self._timing.unresponsive_after
        while self._members:
            first = self._members[0]
            if first.present(since) or (first.chosen and first.offer and since < first.offer.time):
                return first
            self._remove(first)
            self.held_in_process = False
        return None

    def _remove(self, member: LocalWaiter) -> None:
        if member in self._members:
            self._members.remove(member)
        if not self._members:
            self._queues.forget(self._key, self)

    def leave(self, member: LocalWaiter, *, got: bool) -> None:
        """Wait no more; `got`: it has the key."""
        with self._mutex:
            member.gone = True
            behind = member in self._members and self._members[0] is not member
            self._remove(member)
            first = self.first()
            if not behind and first is not None:  # also if we were interrupted here before
                self.held_in_process = got
                first.wakeup.notify()

    def keep_place(self, leaving: LocalWaiter, member: LocalWaiter) -> bool:
        """Let a member stand where another one stood; False if that one does not stand here any more."""
        if leaving not in self._members:
            return False
        self._members[self._members.index(leaving)] = member
        member.line, member.seen = self, self._now()
        return True

    def has(self, member: LocalWaiter) -> bool:
        """Does it stand here?"""
        return member in self._members

    def is_first(self, member: LocalWaiter) -> bool:
        """Is nobody before it who has been seen lately?"""
        with self._mutex:
            return self.first() is member

    def withdraw(self, member: LocalWaiter) -> bool:
        """It no longer waits to be handed the key, but asks the database; False if it was chosen in the meantime."""
        with self._mutex:
            member.content = member.chosen
            return not member.chosen

    def choose(self, tenure: Tenure) -> HandoverOffer | None:
        """HandoverOffer a tenure to the first one; None if that one does not wait for it."""
        with self._mutex:
            first = self.first()
            if first is None or not first.content or first.claim():
                return None
            first.offer = HandoverOffer(first, first.request.new_owner(), tenure, self._now())
            first.chosen = True
            return first.offer

    def tell(self, offer: HandoverOffer, grant: Grant) -> bool:
        """Tell the chosen one what it was granted; False if it does not wait any more."""
        heir = offer.heir
        with self._mutex:
            if heir.offer is not offer:  # it has seen to that itself
                return True
            heir.offer, heir.chosen = None, False
            if heir.gone:
                return False
            heir.grant = grant
            heir.wakeup.notify()
            return True

    def freed(self) -> None:
        """A flow of ours has given the key back, and not to us, as far as it knows."""
        self.held_in_process = False
        first = self.first()
        if first is not None:
            first.wakeup.notify()


class TakeAttempt:
    """A flow's try to take a key at once; whoever wants the key meanwhile waits behind it."""

    __slots__ = ("_queues", "line", "member", "request")

    def __init__(self, queues: LocalQueues, request: Request) -> None:
        self._queues, self.request = queues, request
        self.line: LocalQueue | None = None
        self.member: LocalWaiter | None = None
        """Keeps the flow's place in that line."""

    def begin(self) -> None:
        """Try to take the key for all of this process; unless somebody else does."""
        self._queues.try_first(self)

    def end(self, *, got: bool) -> None:
        """It has, or has not, got the key; and does not wait for it."""
        self._queues.tried(self)
        if self.line is not None and self.member is not None:
            self.line.leave(self.member, got=got)

    def wait(self, member: LocalWaiter) -> LocalQueue | None:
        """The flow waits from now on, as that member, first in the line that has formed behind it, if any has."""
        with self._queues.mutex:
            self._queues.tried(self)
            line, kept = self.line, self.member
            if line is None or kept is None or not line.keep_place(kept, member):
                return None
            self.line = None
            return line


class LocalQueues:
    """The local queues of one process for one database, by key."""

    def __init__(self, database: Database) -> None:
        self.database = database
        self.mutex = threading.RLock()
        """Held for a few instructions; a signal handler may run between any two of them."""
        self._lines: dict[str, LocalQueue] = {}
        self._attempts: dict[str, TakeAttempt] = {}
        self._contended: dict[str, float] = {}
        """When somebody last waited for a key."""

    def enter(self, member: LocalWaiter) -> tuple[LocalQueue, bool]:
        """Wait for a key behind those who do, and whoever tries to take it; the line, and whether it is a new one."""
        key = member.request.key
        with self.mutex:
            line = self._lines.get(key)
            new = line is None
            if line is None:
                line = LocalQueue(key, self)
                attempt = self._attempts.get(key)
                if attempt is not None:
                    attempt.line, attempt.member = line, LocalWaiter(attempt.request)
                    line.add(attempt.member)
            line.add(member)
            self._lines[key] = line  # only now: who is interrupted leaves no empty one
        return line, new

    def standing(self, member: LocalWaiter) -> LocalQueue:
        """The line in which a member stands; if it was put out of one, it comes again."""
        with self.mutex:
            member.seen = self.database.now()
            if member.line is None or not member.line.has(member):
                return self.enter(member)[0]
            return member.line

    def settle(self, member: LocalWaiter, offer: HandoverOffer) -> None:
        """A member has found out itself what became of an offer."""
        with self.mutex:
            if member.offer is offer:
                member.offer, member.chosen = None, False

    def forget(self, key: str, line: LocalQueue) -> None:
        """Nobody stands in that line any more."""
        if self._lines.get(key) is line:
            del self._lines[key]

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
        return key in self._attempts or key in self._lines

    def line_for(self, key: str) -> LocalQueue | None:
        """The line for a key, if anybody waits for it in this process."""
        return self._lines.get(key) if self._lines else None

    def freed(self, key: str, offer: HandoverOffer | None = None, *, known: bool = True) -> str:
        """A flow of this process has given a key back to the database; `known`: and not to whom it had offered it.

        The owner token of a tenure that it is to give back if there is one, since whom it had chosen has gone. Somebody
        else of ours may have the key by now, and have chosen as well.
        """
        with self.mutex:
            line = self.line_for(key)
            if line is not None:
                line.freed()
            if offer is None or offer.heir.offer is not offer:
                return ""
            heir = offer.heir
            heir.chosen = False
            if known:
                heir.offer = None
            heir.wakeup.notify()
            return offer.token if heir.gone and not known else ""

    def note_contention(self, key: str) -> None:
        """Somebody waited for that key just now."""
        if len(self._contended) >= CONTENDED:
            self._contended.clear()
        self._contended[key] = self.database.now()

    def is_contended(self, key: str) -> bool:
        """Is it likely that somebody waits for that key? A guess, which saves two statements when it is right."""
        return bool(self._contended) and self.database.now() < self._contended.get(key, -1.0) + 1.0
