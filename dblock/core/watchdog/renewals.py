"""Renewing the leases of one database, one statement for all that are due.

Rule: it fails softly. After a failure the watchdog tries again.
"""

from __future__ import annotations

from collections.abc import Coroutine, Mapping, Sequence
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Protocol

from dblock.core.connections.pool import background
from dblock.core.errors import LockError, Loss, Reason, StoreBusy
from dblock.core.holding.flow import Hold
from dblock.core.holding.lease import Lease
from dblock.core.log import warn
from dblock.core.protocol import tenures
from dblock.core.protocol.drive import drive
from dblock.core.protocol.steps import Steps
from dblock.core.protocol.store import Store
from dblock.core.values import Grant, Tenure
from dblock.core.watchdog.heartbeats import Heartbeat
from dblock.core.worker import start

if TYPE_CHECKING:
    from dblock.core.observing.observers import Observers

BATCH: Final = 10_000
"""Leases in one statement, at most."""


class Due(NamedTuple):
    """A hold's lease as it was when its renewal was made."""

    hold: Hold
    lease: Lease
    """That of the tenure: `downgrade` gives the hold another one, which the answer does not lengthen."""
    ttl: float
    life: float
    epoch: int
    tenure: Tenure
    """By another one, if the hold has that meanwhile, the answer says nothing."""

    @property
    def applies(self) -> bool:
        """Whether the hold still has the tenure."""
        return self.hold.tenure == self.tenure


class Keeper(Protocol):
    """What a renewal needs of the watchdog."""

    observers: Observers | None
    """The observers of locks; None if there are none."""

    def is_watching(self, hold: Hold, /) -> bool:
        """Whether the hold has not been released."""
        ...

    def wake(self) -> None:
        """Check again which leases are due."""
        ...

    def revoke(self, hold: Hold, words: str, /) -> None:
        """Report that the hold was asked back."""
        ...


class Renewal:
    """One statement for the renewals of many leases of one database."""

    def __init__(self, store: Store, holds: Sequence[Hold], keeper: Keeper) -> None:
        self.store = store
        self.leases = [Due(hold, lease, *lease.renewal(), hold.tenure) for hold in holds for lease in [hold.lease]]
        self._keeper = keeper

    def set_reason_if_lost(self, reason: Reason) -> None:
        """Set the reason to report if a lease is lost before this renewal has succeeded."""
        for due in self.leases:
            due.lease.reason_if_lost = reason

    def steps(self) -> Steps[None]:
        """Renew the leases, and record the result in each hold."""
        self.set_reason_if_lost(Reason.UNREACHABLE)  # until it has succeeded: it may never be answered
        budget = min(due.lease.term for due in self.leases) / 20
        for first in range(0, len(self.leases), BATCH):
            yield from self._renew(self.leases[first : first + BATCH], budget)
        self._keeper.wake()

    def give_up(self) -> None:
        """Called if the steps cannot be run."""
        for due in self.leases:
            due.lease.renewing, due.lease.reason_if_lost = False, None

    def _renew(self, leases: Sequence[Due], budget: float) -> Steps[None]:
        database = self.store.database
        lives = [(due.tenure, due.life) for due in leases]
        not_notified = {due.tenure for due in leases if due.hold.revoked is None}
        try:
            sent, alive = yield from tenures.renew(database, lives, database.now() + budget, not_notified)
        except LockError as error:
            if type(error) is StoreBusy and len(leases) > 1:
                # One row that a transaction has locked must not cost the others their leases.
                half = len(leases) // 2
                yield from self._renew(leases[:half], 0.0)
                yield from self._renew(leases[half:], 0.0)
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
        if self._keeper.observers is not None:
            self._keeper.observers.renewed(self.store, sent, [due.lease for due in renewed])
        for due in renewed:
            _ = due.lease.lengthen(Grant(due.tenure, sent, due.ttl), due.epoch)
        yield from self._handle_not_renewed(not_renewed, alive or {}, budget)

    def _handle_not_renewed(
        self, not_renewed: Sequence[Due], alive: Mapping[Tenure, str | None], budget: float
    ) -> Steps[None]:
        """Handle tenures that were not renewed: inform the holders of those asked back, then renew; end the others."""
        revoked = [due for due in not_renewed if due.tenure in alive]
        for due in revoked:
            self._keeper.revoke(due.hold, alive[due.tenure] or "")
        if revoked:
            yield from self._renew(revoked, budget)
        for due in (each for each in not_renewed if each.tenure not in alive):
            if self._keeper.is_watching(due.hold) and due.applies:
                try:
                    loss = yield from tenures.why_lost(self.store.database, due.tenure)
                except LockError:
                    loss = Loss(Reason.EXPIRED)
                if self._keeper.is_watching(due.hold) and due.applies:  # not released meanwhile
                    _ = due.lease.lose(loss)


class Renewer:
    """Sends the renewals and heartbeats of one database, in a thread that ends with the batch None."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self.batches: SimpleQueue[Renewal | Heartbeat | None] = SimpleQueue()
        self.given = self.done = 0
        self._is_alive = start(self._run, "renewal")

    @property
    def ready(self) -> bool:
        """Whether the thread runs and has nothing under way."""
        return self.given == self.done and self._is_alive()

    def _run(self) -> None:
        _ = background.set(True)
        while (batch := self.batches.get()) is not None:
            try:
                drive(batch.steps())
            except BaseException as error:  # noqa: BLE001 - must go on: other leases depend on it
                warn("renewing %d leases or places in queues failed: %r", len(batch.leases), error)
            finally:
                self.done += 1
                del batch


async def quietly(work: Coroutine[Any, Any, None]) -> None:
    """Run the work in a task, and log its exception."""
    try:
        await work
    except Exception as error:  # noqa: BLE001 - must not end in the loop's exception handler
        warn("a renewal failed: %r", error)
