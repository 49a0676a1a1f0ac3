"""Renewing the leases of one database, one statement for all that are due.

Rule: it fails softly. After a failure the watchdog tries again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

from dblock.core.errors import LockError, Loss, Reason, StoreBusy
from dblock.core.holding.flow import Hold
from dblock.core.holding.lease import Lease
from dblock.core.log import warn
from dblock.core.observing.events import Event, Kind
from dblock.core.observing.observers import observers, tell
from dblock.core.protocol import tenures
from dblock.core.protocol.steps import Steps
from dblock.core.protocol.store import Store
from dblock.core.values import Grant, Tenure
from dblock.core.watchdog.watched import Watched

BATCH: Final = 10_000
"""Leases in one statement, at most."""


class Due(NamedTuple):
    """A hold's lease as it was when its renewal began."""

    hold: Hold
    lease: Lease
    """That of the tenure: `downgrade` gives the hold another one, which the answer does not lengthen."""
    ttl: float
    life: float
    epoch: int
    tenure: Tenure
    """By another one, if the hold has that meanwhile, the answer says nothing."""

    def ends_in(self, watched: Watched) -> bool:
        """Whether the tenure is still held, so that its end is a loss."""
        return watched.is_watching(self.hold) and self.hold.tenure == self.tenure


def renew(store: Store, holds: Sequence[Hold], watched: Watched) -> Steps[None]:
    """Renew the leases of the holds, and record the result in each."""
    due = [Due(hold, lease, *lease.renewal(), hold.tenure) for hold in holds for lease in [hold.lease]]
    for each in due:
        each.lease.reason_if_lost = Reason.UNREACHABLE  # until it has succeeded: it may never be answered
    budget = min(each.lease.term for each in due) / 20
    for first in range(0, len(due), BATCH):
        yield from _renew(store, due[first : first + BATCH], watched, budget)
    _ = watched.wake()


def _renew(store: Store, leases: Sequence[Due], watched: Watched, budget: float) -> Steps[None]:
    database = store.database
    lives = [(due.tenure, due.life) for due in leases]
    not_notified = {due.tenure for due in leases if due.hold.revoked is None}
    try:
        sent, alive = yield from tenures.renew(database, lives, database.now() + budget, not_notified)
    except LockError as error:
        if type(error) is StoreBusy and len(leases) > 1:
            # One row that a transaction has locked must not cost the others their leases.
            half = len(leases) // 2
            yield from _renew(store, leases[:half], watched, 0.0)
            yield from _renew(store, leases[half:], watched, 0.0)
            return
        # On MySQL a take of the key locks its row for a moment: not logged until the renewal is late.
        if type(error) is not StoreBusy:
            database.away(error)
        elif any(due.lease.state != "held" for due in leases):
            warn("could not renew %d leases, trying again: %s", len(leases), error)
        for lease in (due.lease for due in leases):
            lease.due = min(lease.due, database.now() + min(1.0, lease.term / 20))
        return
    not_renewed: list[Due] = []
    renewed: list[Due] = []
    for due in leases:
        tenure = due.tenure
        kept = alive is None or (tenure in alive and (alive[tenure] is None or tenure not in not_notified))
        (renewed if kept else not_renewed).append(due)
    if observers:
        late = max((due.lease.lateness(sent) for due in renewed), default=0.0)  # before they are lengthened
        tell(store, Event(Kind.RENEWED, store.name, amount=len(renewed), lateness=late))
    for due in renewed:
        _ = due.lease.lengthen(Grant(due.tenure, sent, due.ttl), due.epoch)
    yield from _handle_not_renewed(store, not_renewed, alive or {}, watched, budget)


def _handle_not_renewed(
    store: Store, not_renewed: Sequence[Due], alive: Mapping[Tenure, str | None], watched: Watched, budget: float
) -> Steps[None]:
    """Handle tenures that were not renewed: inform the holders of those asked back, then renew; end the others."""
    revoked = [due for due in not_renewed if due.tenure in alive]
    for due in revoked:
        watched.revoke(due.hold, alive[due.tenure] or "")
    if revoked:
        yield from _renew(store, revoked, watched, budget)
    for due in not_renewed:
        if due.tenure not in alive and due.ends_in(watched):
            try:
                loss = yield from tenures.why_lost(store.database, due.tenure)
            except LockError:
                loss = Loss(Reason.EXPIRED)
            if due.ends_in(watched):  # not released meanwhile
                _ = due.lease.lose(loss)
