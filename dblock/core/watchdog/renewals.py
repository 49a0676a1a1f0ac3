"""Renewing the leases of one database, one statement for all that are due.

Rule: it fails softly. After a failure the watchdog tries again.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence
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

BATCH: Final = 10_000
"""Leases in one statement, at most."""


class Due(NamedTuple):
    """A hold's lease as it was when its renewal began."""

    hold: Hold
    lease: Lease
    """That of the tenure: `downgrade` gives the hold another one, which the answer does not lengthen."""
    ttl: float
    life: float
    resets: int
    tenure: Tenure
    """By another one, if the hold has that meanwhile, the answer says nothing."""


def renew(
    store: Store, holds: Sequence[Hold], watched: Container[Hold], revoke: Callable[[Hold, str], None]
) -> Steps[None]:
    """Renew the leases of the holds, and record the result in each.

    `watched`: the holds that are not released; `revoke`: informs a holder that it was asked back, by whom and why.
    """
    due = [Due(hold, lease, *lease.renewal(), hold.tenure) for hold in holds for lease in [hold.lease]]
    for each in due:
        each.lease.reason_if_lost = Reason.UNREACHABLE  # until it has succeeded: it may never be answered
    budget, over = min(each.lease.term for each in due) / 20, list[Due]()
    for first in range(0, len(due), BATCH):
        leases = due[first : first + BATCH]
        while leases:
            not_renewed, leases = (yield from _renew(store, leases, budget)), []
            for each, words in not_renewed:
                if words is not None:
                    revoke(each.hold, words)
                    leases.append(each)  # to be renewed, as its holder is informed
                elif each.hold in watched:
                    over.append(each)
    for each in over:
        try:
            loss = yield from tenures.why_lost(store.database, each.tenure)
        except LockError:
            loss = Loss(Reason.EXPIRED)
        if each.hold in watched and each.hold.tenure == each.tenure:  # not released meanwhile
            _ = each.lease.lose(loss)


def _renew(store: Store, leases: Sequence[Due], budget: float) -> Steps[list[tuple[Due, str | None]]]:
    """Send the renewal; the leases that it has not renewed, each with by whom and why it was asked back.

    The holder of such a lease is not informed yet. None: the tenure is over.
    """
    database = store.database
    lives = [(due.tenure, due.life) for due in leases]
    not_notified = {due.tenure for due in leases if due.hold.revoked is None}
    try:
        sent, alive = yield from tenures.renew(database, lives, database.now() + budget, not_notified)
    except LockError as error:
        if type(error) is StoreBusy and len(leases) > 1:
            # One row that a transaction has locked must not cost the others their leases.
            half = len(leases) // 2
            first = yield from _renew(store, leases[:half], 0.0)
            return [*first, *(yield from _renew(store, leases[half:], 0.0))]
        # On MySQL a take of the key locks its row for a moment: not logged until the renewal is late.
        if type(error) is not StoreBusy:
            database.away(error)
        elif any(due.lease.state != "held" for due in leases):
            warn("could not renew %d leases, trying again: %s", len(leases), error)
        for lease in (due.lease for due in leases):
            lease.due = min(lease.due, database.now() + min(1.0, lease.term / 20))
        return []
    renewed, not_renewed = list[Due](), list[tuple[Due, str | None]]()
    for due in leases:
        words = None if alive is None else alive.get(due.tenure)
        if (alive is None or due.tenure in alive) and (words is None or due.tenure not in not_notified):
            renewed.append(due)
        else:
            not_renewed.append((due, words))
    if observers:
        late = max((due.lease.lateness(sent) for due in renewed), default=0.0)  # before they are lengthened
        tell(store, Event(Kind.RENEWED, store.name, amount=len(renewed), lateness=late))
    for due in renewed:
        _ = due.lease.lengthen(Grant(due.tenure, sent, due.ttl), due.resets)
    return not_renewed
