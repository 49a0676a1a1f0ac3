"""A flow's trust in its lease, and when that ends.

Rule: a lease is trusted until a moment of the local clock, which only a statement that succeeded in time moves later.
Once the flow or the watchdog has found that moment past, the lease is lost for good: a later answer does not revive it.

The flow that took the key and the watchdog that renews the lease both change it, under a lock that is held for a few
instructions. Reading the state takes the lock only when there is something to decide.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable

from dblock.core.errors import Loss, Reason
from dblock.core.values import Grant, State


class Lease:
    """Until when a tenure is trusted, when its renewal is due, and why it was lost."""

    loss: Loss | None = None
    reason_if_lost: Reason | None = None
    """The reason to report if trust runs out before the due renewal succeeds; None while none is due."""
    reported = False
    """Whether its end was reported."""
    resets = 0
    """Number of changes of the ttl; the answer to a renewal that was sent before the last change does not count."""

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
        """Longest time between two renewals, also where a third of the term is longer: renewals also bring news."""
        self.acquired, self.renewed = now(), grant.sent
        self.term = grant.lasts
        """The seconds that the last statement gave; less than the ttl if the tenure began with the lease of a place."""
        self.trusted_until = grant.trusted_until
        self.due = grant.sent + min(self.term / 3, pace) if renewing else grant.trusted_until
        """The local time at which the watchdog renews it, or reports it lost."""

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
        return "at_risk" if self.now() >= self.late_from else "held"

    @property
    def held(self) -> float:
        """Seconds since the tenure was acquired."""
        return self.now() - self.acquired

    def lateness(self, now: float) -> float:
        """Seconds since its renewal was due, at a local time."""
        return max(now - self.renewed - self.term / 3, 0.0)

    @property
    def late_from(self) -> float:
        """The local time from which a missing renewal is late; infinity if it is not renewed."""
        return min(self.renewed + self.term / 2, self.trusted_until) if self.renewing else math.inf

    def lengthen(self, grant: Grant, resets: int | None = None) -> bool:
        """Trust it for longer; False if it was lost before the answer came.

        A grant that ends earlier, of a re-entry with a shorter ttl, postpones no renewal. `resets`: how many there were
        when the renewal was begun.
        """
        with self._mutex:
            if self.loss is not None or self.now() >= self.trusted_until:
                return False
            if resets is None or resets == self.resets:
                renews = grant.lasts >= self.ttl or grant.trusted_until >= self.trusted_until
                self.trusted_until = max(self.trusted_until, grant.trusted_until)
                if renews and grant.sent > self.renewed:
                    self.renewed, self.term = grant.sent, min(self.ttl, grant.lasts)
                    self.due = grant.sent + min(self.term / 3, self.pace) if self.renewing else self.trusted_until
                    self.reason_if_lost = None
            return True

    def reset(self, ttl: float, until: float) -> None:
        """Called before a new ttl is sent: trust no longer than it gives, and ignore answers to earlier renewals."""
        with self._mutex:
            self.resets += 1
            self.ttl, self.term = ttl, min(self.term, ttl)
            self.trusted_until = min(self.trusted_until, until)
            self.due = min(self.due, self.now() + ttl / 3) if self.renewing else self.trusted_until

    def lose(self, loss: Loss | None = None) -> bool:
        """Mark it lost, for good; False if it was already. Without a loss: if trust has run out."""
        with self._mutex:
            if self.loss is not None or (loss is None and self.now() < self.trusted_until):
                return False
            if loss is None:
                stalled = self.renewing and self.reason_if_lost is None
                loss = Loss(self.reason_if_lost or Reason.EXPIRED, stalled=stalled)
            self.loss = loss._replace(early=loss.holder is not None and self.now() < self.trusted_until)
            self.trusted_until = -math.inf
            return True

    def claim_report(self) -> bool:
        """Claim the report of its end: True for the first caller only."""
        with self._mutex:
            told, self.reported = self.reported, True
        return not told

    def explain(self, loss: Loss) -> None:
        """Mark it lost for the reason that the database gives.

        A reason that only this process knows is kept (its event loop was blocked, it released all locks, a good lease
        was taken over); then only the new holder is added.
        """
        with self._mutex:
            if not self.lose(loss):
                before = self.loss or loss
                known = before.early or before.reason in {Reason.BLOCKED, Reason.RELEASED}
                told = before if known else loss
                self.loss = told._replace(holder=loss.holder, words=loss.words, stalled=before.stalled)
