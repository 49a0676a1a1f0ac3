"""Renewing the leases of one database, one statement for all that are due.

Rule: it fails softly. After a failure the watchdog tries again.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence
from typing import NamedTuple

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

Revoke = Callable[[Hold, str], None]
"""Informs a holder that it was asked back, by whom and why."""


class Due(NamedTuple):
    """A hold's lease as it was when its renewal began."""

    hold: Hold
    lease: Lease
    """That of the tenure: `downgrade` gives the hold another one, which the answer does not lengthen."""
    resets: int
    """Read before the ttl: a change in between makes the answer void."""
    ttl: float
    tenure: Tenure
    """By another one, if the hold has that meanwhile, the answer says nothing."""


def renew(store: Store, holds: Sequence[Hold], watched: Container[Hold], revoke: Revoke) -> Steps[None]:
    """Renew the leases of the holds, and record the result in each; `watched`: the holds that are not released."""
    due = [Due(hold, lease, lease.resets, lease.ttl, hold.tenure) for hold in holds for lease in [hold.lease]]
    for each in due:
        each.lease.reason_if_lost = Reason.UNREACHABLE  # until it has succeeded: it may never be answered
    for each in (yield from _renew(store, due, min(each.lease.term for each in due) / 20, revoke)):
        try:
            loss = yield from tenures.why_lost(store.database, each.tenure)
        except LockError:
            loss = Loss(Reason.EXPIRED)
        if each.hold in watched and each.hold.tenure == each.tenure:  # not released meanwhile
            _ = each.lease.lose(loss)


def _renew(store: Store, leases: Sequence[Due], budget: float, revoke: Revoke) -> Steps[list[Due]]:
    """Send the renewal, and lengthen the leases; returns those whose tenures are over.

    The statement renews nothing that was asked back while its holder was not informed of that: it is due again then.
    """
    database = store.database
    lives = [(due.tenure, due.ttl + due.lease.grace) for due in leases]
    not_notified = {due.tenure for due in leases if due.hold.revoked is None}
    try:
        sent, alive = yield from tenures.renew(database, lives, database.now() + budget, not_notified)
    except LockError as error:
        if type(error) is StoreBusy and len(leases) > 1:
            # One row that a transaction has locked must not cost the others their leases.
            half = len(leases) // 2
            first = yield from _renew(store, leases[:half], 0.0, revoke)
            return [*first, *(yield from _renew(store, leases[half:], 0.0, revoke))]
        # On MySQL a take of the key locks its row for a moment: not logged until the renewal is late.
        if type(error) is not StoreBusy:
            database.away(error)
        elif any(due.lease.state != "held" for due in leases):
            warn("could not renew %d leases, trying again: %s", len(leases), error)
        for lease in (due.lease for due in leases):
            lease.due = min(lease.due, database.now() + min(1.0, lease.term / 20))
        return []
    renewed, over = list[Due](), list[Due]()
    for due in leases:
        words = None if alive is None else alive.get(due.tenure)
        if alive is not None and due.tenure not in alive:
            over.append(due)
        elif words is not None and due.tenure in not_notified:
            revoke(due.hold, words)
            due.lease.due = database.now()
        else:
            renewed.append(due)
    if observers:
        late = max((due.lease.lateness(sent) for due in renewed), default=0.0)  # before they are lengthened
        tell(store, Event(Kind.RENEWED, store.name, amount=len(renewed), lateness=late))
    for due in renewed:
        _ = due.lease.lengthen(Grant(due.tenure, sent, due.ttl), due.resets)
    return over
