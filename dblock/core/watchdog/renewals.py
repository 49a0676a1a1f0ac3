"""What the watchdog lets others run: renewals of leases, and of places in queues, one statement for all that are due.

Rule: it fails softly. What could not be renewed is tried again, by the watchdog's clock.
"""

from __future__ import annotations

import threading
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, Final

from dblock.core.errors import LockError, Reason, StoreBusy
from dblock.core.holding.holds import Hold, Lease, Loss
from dblock.core.log import warn
from dblock.core.protocol import queue, tenures
from dblock.core.protocol.drive import Store, drive
from dblock.core.values import Grant, Tenure
from dblock.core.wakeup.registry import Wakeup

if TYPE_CHECKING:
    from dblock.core.protocol.steps import Steps
    from dblock.core.watchdog.watchdog import Watchdog

BATCH: Final = 10_000
"""Leases in one statement, at most."""


@dataclass(slots=True)
class Place:
    """A place in a queue that is to be kept."""

    store: Store
    loop: Any
    wakeup: Wakeup
    """Of the flow that waits there."""
    due: float


class Batch:
    """Leases of one database that are to be renewed by one statement."""

    def __init__(self, watchdog: Watchdog, store: Store, holds: Sequence[Hold]) -> None:
        self.watchdog = watchdog
        self.store = store
        self.leases = [hold.lease() for hold in holds]

    def steps(self) -> Steps[None]:
        """Renew, and let every hold know."""
        for lease in self.leases:
            lease.hold.failure = Reason.UNREACHABLE  # until it has succeeded: it may never be answered
        patience = min(lease.ttl for lease in self.leases) / 20
        for start in range(0, len(self.leases), BATCH):
            yield from self._renew(self.leases[start : start + BATCH], patience)
        self.watchdog.look()

    def give_up(self) -> None:
        """Nobody can run this."""
        for lease in self.leases:
            lease.hold.renewing, lease.hold.failure = False, None

    def _renew(self, leases: Sequence[Lease], patience: float) -> Steps[None]:
        database = self.store.database
        lives: dict[Tenure, float] = {}  # two flows may hold one tenure: the longer life counts
        for lease in leases:
            lives[lease.hold.tenure] = max(lease.life, lives.get(lease.hold.tenure, 0.0))
        try:
            sent, alive = yield from tenures.renew(database, list(lives.items()), database.now() + patience)
        except LockError as error:
            if type(error) is StoreBusy and len(leases) > 1:
                # One row that a stranger has locked must not cost the others their leases.
                half = len(leases) // 2
                yield from self._renew(leases[:half], 0.0)
                yield from self._renew(leases[half:], 0.0)
                return
            warn("could not renew %d leases, trying again: %s", len(leases), error)
            for lease in leases:
                lease.hold.due = min(lease.hold.due, database.now() + min(1.0, lease.ttl / 20))
            return
        over: list[Hold] = []
        for hold, ttl, _, epoch in leases:
            if alive is None or hold.tenure in alive:
                _ = hold.lengthen(Grant(hold.tenure, sent, ttl), epoch)
            else:
                over.append(hold)
        for hold in over:
            if self.watchdog.keeps(hold):
                try:
                    loss = Loss(*(yield from tenures.why_lost(database, hold.tenure)))
                except LockError:
                    loss = Loss(Reason.EXPIRED)
                if self.watchdog.keeps(hold):  # not given back meanwhile
                    _ = hold.lose(loss)


class Places:
    """Places in the queues of one database that are to be kept by one statement."""

    def __init__(self, watchdog: Watchdog, store: Store, owners: Sequence[str]) -> None:
        self.watchdog = watchdog
        self.store = store
        self.leases = list(owners)
        self.answered = False

    def steps(self) -> Steps[None]:
        """Keep them."""
        try:
            yield from queue.heartbeat(
                self.store.database, self.leases, self.store.database.now() + queue.HEARTBEAT_INTERVAL / 2
            )
        except LockError as error:
            warn("could not keep %d places in queues, trying again: %s", len(self.leases), error)
        finally:
            self.answered = True

    def give_up(self) -> None:
        """Nobody can run this."""
        self.answered = True
        for owner in self.leases:
            self.watchdog.leave(owner)


class Renewer(threading.Thread):
    """Renews the leases of one database on connections of its own."""

    def __init__(self, store: Store) -> None:
        super().__init__(name="dblock renewal", daemon=True)
        self.store = store
        self.batches: SimpleQueue[Batch | Places | None] = SimpleQueue()
        self.given = self.done = 0

    @property
    def ready(self) -> bool:
        """Is it there, and not in the middle of something?"""
        return self.given == self.done and self.is_alive()

    def run(self) -> None:
        while (batch := self.batches.get()) is not None:
            try:
                drive(batch.steps(), self.store)
            except BaseException as error:  # noqa: BLE001 - must go on: other leases depend on it
                warn("a renewal of %d leases failed: %r", len(batch.leases), error)
            finally:
                self.done += 1
                del batch


async def quietly(work: Coroutine[Any, Any, None]) -> None:
    """Run it in a task; what it raises is logged."""
    try:
        await work
    except Exception as error:  # noqa: BLE001 - must not end in the loop's exception handler
        warn("a renewal failed: %r", error)
