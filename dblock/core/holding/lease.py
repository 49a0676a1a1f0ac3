"""A flow's belief that it holds a key, and when that belief ends.

Rule: a lease is trusted until a moment of the local clock, which only a statement that succeeded in time moves later.
Once somebody has seen that moment pass, it is lost for good: an answer that comes afterwards does not revive it.

The flow that took the key and the watchdog that renews the lease meet here, under a lock that is held for a few
instructions; a look at the state takes it only when there is something to decide.
"""

from __future__ import annotations

import copy
import math
import threading
from collections.abc import Callable
from typing import NamedTuple

from dblock.core.errors import Reason
from dblock.core.values import Grant, LockInfo, State, printable

_WHAT_HAPPENED = {
    Reason.EXPIRED: "the lease ended before the work did; use a longer ttl, or let it be renewed (for longer)",
    Reason.TAKEN_OVER: "the lease ended, and it was taken over",
    Reason.FREED: "it was freed by somebody",
    Reason.GONE: "its row was deleted, or taken back by a crash of the database or a failover",
    Reason.UNREACHABLE: "the database did not answer in time to renew the lease",
    Reason.RELEASED: "its process has given all its locks back, with release_all()",
    Reason.BLOCKED: "its event loop was blocked for so long that no renewal of the lease could run there",
}
_STOOD_STILL = "no renewal of the lease was sent in time (its process stood still, or was short of processor time)"
_WHEN_STALLED = {
    Reason.EXPIRED: f"{_STOOD_STILL}; a longer ttl outlasts that",
    Reason.TAKEN_OVER: f"{_STOOD_STILL}, and it was taken over",
}


class Loss(NamedTuple):
    """Why a lease was lost, and who took the key over, if somebody did."""

    reason: Reason
    holder: LockInfo | None = None
    words: str = ""
    """By whom and why it was freed, where that was said."""
    early: bool = False
    """Did somebody take it over while the lease was good?"""
    stalled: bool = False
    """Was it to be renewed, and no renewal sent?"""

    def __str__(self) -> str:
        early = "it was freed by somebody (or the database's clock set forward) before its lease ended, and taken over"
        happened = _WHAT_HAPPENED | (_WHEN_STALLED if self.stalled else {})
        what = early if self.early and not self.words else happened[self.reason]
        what += f" ({printable(self.words)})" if self.words else ""
        if self.holder is None:
            return what
        then = "" if self.reason is Reason.TAKEN_OVER else "; it was taken over"
        return f"{what}{then} by {self.holder}"


class Lease:
    """Until when a tenure is trusted, when that is to be renewed, and why it was lost."""

    loss: Loss | None = None
    reason_if_lost: Reason | None = None
    """What to report if trust runs out before the renewal that is due succeeds; None while none is due."""
    epoch = 0
    """How often the ttl was set: the answer to a renewal sent before does not count."""

    def __init__(
        self, grant: Grant, now: Callable[[], float], *, grace: float, renewing: bool, pace: float = math.inf
    ) -> None:
        self._mutex = threading.RLock()  # a signal handler may run between any two lines
        self.now = now
        """The local clock."""
        self.ttl = grant.ttl
        self.grace = grace
        self.renewing = renewing
        self.pace = pace
        """It is renewed after so many seconds even if a third of the term is longer: renewals also bring news."""
        self.acquired, self.renewed = now(), grant.sent
        self.term = grant.lasts
        """The seconds that the last statement gave; less than the ttl if the tenure began with the lease of a place."""
        self.trusted_until = grant.trusted_until
        self.due = grant.sent + min(self.term / 3, pace) if renewing else grant.trusted_until
        """The local time at which the watchdog has to do something about it."""

    @property
    def life(self) -> float:
        """Seconds for which the row stays closed after a renewal was sent."""
        return self.ttl + self.grace

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
        return min(self.renewed + self.term / 2, self.trusted_until) if self.renewing else math.inf

    def renewal(self) -> tuple[float, float, int]:
        """What a renewal is to say, the ttl and the life; and the epoch, which `lengthen` is to be told."""
        with self._mutex:
            return self.ttl, self.life, self.epoch

    def lengthen(self, grant: Grant, epoch: int | None = None) -> bool:
        """Trust it for longer; False if it is lost, or was before the answer came."""
        with self._mutex:
            if self.loss is not None or self.now() >= self.trusted_until:
                return False
            if epoch is None or epoch == self.epoch:
                self.trusted_until = max(self.trusted_until, grant.trusted_until)
                if grant.sent > self.renewed:
                    self.renewed, self.term = grant.sent, self.ttl
                    self.due = grant.sent + min(self.term / 3, self.pace) if self.renewing else self.trusted_until
                    self.reason_if_lost = None
            return True

    def reset(self, ttl: float, until: float) -> None:
        """A new ttl is on its way: trust no more than it gives, and no answer to a renewal with the old one."""
        with self._mutex:
            self.epoch += 1
            self.ttl, self.term = ttl, min(self.term, ttl)
            self.trusted_until = min(self.trusted_until, until)
            self.due = min(self.due, self.now() + ttl / 3) if self.renewing else self.trusted_until

    def lose(self, loss: Loss | None = None) -> bool:
        """It is lost, for good; False if it was before. Without a loss: because trust has run out."""
        with self._mutex:
            if self.loss is not None or (loss is None and self.now() < self.trusted_until):
                return False
            if loss is None:
                stalled = self.renewing and self.reason_if_lost is None
                loss = Loss(self.reason_if_lost or Reason.EXPIRED, stalled=stalled)
            self.loss = loss._replace(early=loss.holder is not None and self.now() < self.trusted_until)
            self.trusted_until = -math.inf
            return True

    def give_up(self) -> bool:
        """It is lost because its process gives all locks back; False if it was lost for another reason before."""
        _ = self.lose(Loss(Reason.RELEASED))
        return self.loss is not None and self.loss.reason is Reason.RELEASED

    def explain(self, loss: Loss) -> None:
        """The database says that the tenure is over, and why.

        A reason that this process knows itself is kept (its event loop was blocked, it gave all locks back, somebody
        took over a lease that was good); then only the new holder is added.
        """
        with self._mutex:
            if not self.lose(loss):
                before = self.loss or loss
                known = before.early or before.reason in {Reason.BLOCKED, Reason.RELEASED}
                told = before if known else loss
                self.loss = told._replace(holder=loss.holder, words=loss.words, stalled=before.stalled)

    def snapshot(self) -> Lease:
        """A copy that changes no more."""
        twin = copy.copy(self)
        twin._mutex = threading.RLock()
        return twin
