"""A flow's belief that it holds a key, and when that belief ends.

Rule: a hold is trusted until a moment of the local clock, which only a statement that succeeded in time moves later.
Once somebody has seen that moment pass, it is lost for good: an answer that comes afterwards does not revive it.

The flow that took the key enters and leaves; the watchdog renews. Both meet here, under a lock that is held for a few
instructions; a look at the state takes it only when there is something to decide.
"""

from __future__ import annotations

import copy
import math
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from dblock.core.errors import Reason
from dblock.core.values import Grant, LockInfo, State

if TYPE_CHECKING:
    from dblock.core.face.base import BaseLock
    from dblock.core.holding.flows import Flow
    from dblock.core.protocol.drive import Store


_WHAT_HAPPENED = {
    Reason.EXPIRED: "the lease ended before the work did; use a longer ttl, or let it be renewed (for longer)",
    Reason.TAKEN_OVER: "the lease ended, and it was taken over",
    Reason.FREED: "it was freed by somebody",
    Reason.GONE: "its row is gone",
    Reason.UNREACHABLE: "the database did not answer in time to renew the lease",
    Reason.RELEASED: "its process has given all its locks back, with release_all()",
    Reason.BLOCKED: "its event loop was blocked for so long that no renewal of the lease could run there",
}


class Loss(NamedTuple):
    """Why a hold was lost, and who took the key over, if somebody did."""

    reason: Reason
    holder: LockInfo | None = None
    early: bool = False
    """Did somebody take it over while the lease was good?"""

    def __str__(self) -> str:
        early = "it was freed by somebody (or the database's clock set forward) before its lease ended, and taken over"
        what = early if self.early else _WHAT_HAPPENED[self.reason]
        if self.holder is None:
            return what
        then = "" if self.reason is Reason.TAKEN_OVER else "; it was taken over"
        return f"{what}{then} by {self.holder}"


class Entry:
    """One entering of a hold."""

    __slots__ = ("_lock", "detached", "kind")

    def __init__(self, lock: BaseLock, kind: str) -> None:
        # Nobody but its own block can leave a `with`, and that refers to the lock for as long as it is open.
        self._lock: Callable[[], BaseLock | None] = weakref.ref(lock) if kind == "with" else lambda: lock
        self.kind = kind
        """`acquire`, `with`, or `attach`, which a `with` may still take over."""
        self.detached = False
        """Was its hold handed over? A `with` that is left afterwards releases nothing."""

    @property
    def lock(self) -> BaseLock | None:
        """The lock object that it was entered through; None once there is nobody left to leave it."""
        return self._lock()

    def is_block(self, lock: BaseLock) -> bool:
        """Is it a `with` of this very lock object?"""
        return self.kind == "with" and self._lock() is lock


class Block(NamedTuple):
    """A `with` that is open, and what it holds."""

    entry: Entry
    hold: Hold


class Lease(NamedTuple):
    """A hold's lease as it was when a renewal was written."""

    hold: Hold
    ttl: float
    life: float
    epoch: int


class Hold:
    """One tenure, as one flow holds it."""

    __slots__ = (
        "__weakref__",
        "_mutex",
        "acquired",
        "cancelling",
        "deferred",
        "due",
        "entries",
        "epoch",
        "failure",
        "flow",
        "grace",
        "handovers",
        "interrupted",
        "is_snapshot",
        "leaving",
        "loop",
        "loss",
        "loss_reported",
        "max_hold",
        "min_hold",
        "outer",
        "renewed",
        "renewing",
        "risk_reported",
        "shared_entries",
        "store",
        "tenure",
        "ticket",
        "transactions",
        "trusted_until",
        "ttl",
        "unused_tokens",
        "who",
    )

    def __init__(self, store: Store, flow: Flow, grant: Grant, entry: Entry, outer: Hold | None) -> None:
        lock = cast("BaseLock", entry.lock)  # in the hands of whoever takes it
        self._mutex = threading.RLock()  # a signal handler may run between any two lines
        self.store = store
        self.flow = flow.ref
        """The flow that has it, for as long as that lives; the block of a `with` may outlive it."""
        self.who = flow.who
        self.tenure = grant.tenure
        self.ticket = grant.ticket
        self.handovers = grant.turn
        self.ttl = grant.ttl
        self.grace: float = lock.options.grace
        self.min_hold: float = lock.options.min_hold
        self.max_hold: float = lock.options.max_hold
        self.renewing: bool = lock.options.renew
        self.acquired = self.renewed = grant.sent
        self.trusted_until = grant.trusted_until
        self.entries = [entry]
        """How it was entered, outermost first; empty when only an open transaction keeps it."""
        self.leaving: BaseLock | None = None
        """The lock object through which it is being left, or whose leaving an open transaction puts off."""
        self.is_snapshot = False
        """Is this a copy for looking only?"""
        self.outer = outer
        """A lost hold of the same key, further out in the same flow, which has yet to be told so."""
        self.shared_entries: int | None = None
        """How many entries of others the row counts, as far as we know; None while no token has been handed out."""
        self.unused_tokens = 0
        """How many tokens were handed out from inside of it, and may not have been used yet."""
        self.loss: Loss | None = None
        self.failure: Reason | None = None
        """What it is to be lost of if the renewal that is due does not succeed any more; None while none is due."""
        self.risk_reported = False
        """Has somebody been told that a renewal is late?"""
        self.loss_reported = False
        """Have those who want to know been told that it is lost?"""
        self.epoch = 0
        """How often the ttl was set: the answer to a renewal sent before does not count."""
        self.deferred = False
        """Is it to be given back when a transaction ends?"""
        self.cancelling = 0
        """How many cancellations its task had been asked for when the body began."""
        self.interrupted = False
        """Have we asked for one?"""
        self.transactions: tuple[Any, ...] = ()
        """Those of the caller's that were open when it was taken, as the face knows them."""
        self.loop: Any = None
        """The event loop that its statements run on, where they do."""
        self.due = grant.sent + grant.ttl / 3 if self.renewing else grant.trusted_until
        """The local time at which the watchdog has to do something about it."""

    @property
    def count(self) -> int:
        return len(self.entries) + (self.shared_entries or 0)

    @property
    def life(self) -> float:
        return self.ttl + self.grace

    def outers(self) -> Iterator[Hold]:
        """The lost holds of the same key, further and further out in the same flow."""
        outer = self.outer
        while outer is not None:
            yield outer
            outer = outer.outer

    def snapshot(self) -> Hold:
        """A copy that changes no more when its flow enters and leaves."""
        twin = copy.copy(self)
        twin.is_snapshot, twin._mutex, twin.outer = True, threading.RLock(), None
        twin.entries = [*self.entries, Entry(self.leaving, "acquire")] if self.leaving else list(self.entries)
        return twin

    def entered_by(self, lock: BaseLock) -> bool:
        """Was it entered through this very lock object?"""
        return any(entry.lock is lock for entry in self.entries)

    def locks(self) -> list[BaseLock]:
        """The lock objects that it was entered through, each once."""
        return list({id(lock): lock for entry in self.entries if (lock := entry.lock) is not None}.values())

    def open_entries(self, but: Entry | None = None) -> list[Entry]:
        """Those that somebody can still leave, outermost first, without one of them.

        A block that was interrupted on its way in or out leaves one that nobody can.
        """
        return [entry for entry in self.entries if entry is not but and entry.lock is not None]

    @property
    def adrift(self) -> bool:
        """Has its flow ended without leaving it? A `with` belongs to its lock object, and may be left elsewhere."""
        flow = self.flow()
        ended = flow is None or flow.ended()
        return ended and not any(entry.kind == "with" and entry.lock is not None for entry in self.entries)

    @property
    def wanted(self) -> bool:
        """Is there anybody who can still give it back?"""
        return self.deferred or any(entry.lock is not None for entry in self.entries)

    def lease(self) -> Lease:
        """What a renewal is to say, and what its answer will be worth."""
        with self._mutex:
            return Lease(self, self.ttl, self.life, self.epoch)

    def now(self) -> float:
        return self.store.database.now()

    def remaining(self) -> float:
        """Seconds of trust left; 0.0 once it has been lost."""
        while self.loss is None:
            left = self.trusted_until - self.now()
            if left > 0:
                return left
            _ = self.lose()
        return 0.0

    @property
    def state(self) -> State:
        if self.remaining() <= 0:
            return "lost"
        return "at_risk" if self.renewing and self.now() >= self.late_from else "held"

    @property
    def late_from(self) -> float:
        """The local time from which a renewal that has not happened is late; no renewal, no lateness."""
        return min(self.renewed + self.ttl / 2, self.trusted_until) if self.renewing else math.inf

    def lengthen(self, grant: Grant, epoch: int | None = None) -> bool:
        """Trust it for longer; False if it is lost, or was before the answer came."""
        with self._mutex:
            if self.loss is not None or self.now() >= self.trusted_until:
                return False
            if epoch is None or epoch == self.epoch:
                self.trusted_until = max(self.trusted_until, grant.trusted_until)
                if grant.sent > self.renewed:
                    self.renewed = grant.sent
                    self.due = grant.sent + self.ttl / 3 if self.renewing else self.trusted_until
                    self.failure = None
            return True

    def reset(self, ttl: float, until: float) -> None:
        """A new ttl is on its way: trust no more than it gives, and no answer to a renewal with the old one."""
        with self._mutex:
            self.epoch += 1
            self.ttl = ttl
            self.trusted_until = min(self.trusted_until, until)
            self.due = min(self.due, self.now() + ttl / 3) if self.renewing else self.trusted_until

    def lose(self, loss: Loss | None = None) -> bool:
        """It is lost, for good; False if it was before. Without a loss: because trust has run out."""
        with self._mutex:
            if self.loss is not None or (loss is None and self.now() < self.trusted_until):
                return False
            loss = loss or Loss(self.failure or Reason.EXPIRED)
            self.loss = loss._replace(early=loss.holder is not None and self.now() < self.trusted_until)
            self.trusted_until = -math.inf
            return True

    def explain(self, loss: Loss) -> None:
        """It is lost, says the database, and why. We may know better: what this process did, or that it was good."""
        with self._mutex:
            if not self.lose(loss):
                before = self.loss or loss
                known = before.early or before.reason in {Reason.BLOCKED, Reason.RELEASED}
                self.loss = before._replace(holder=loss.holder) if known else loss
