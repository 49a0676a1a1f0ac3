"""Renewing the leases of one database, one statement for all that are due.

Rule: it fails softly. What could not be renewed is tried again, by the watchdog's clock.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Coroutine, Sequence
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from dblock.core.errors import LockError, Reason, StoreBusy
from dblock.core.holding.flow import Hold
from dblock.core.holding.lease import Loss
from dblock.core.log import warn
from dblock.core.protocol import tenures
from dblock.core.protocol.drive import drive
from dblock.core.protocol.steps import Steps
from dblock.core.protocol.store import Store
from dblock.core.values import Grant, Tenure
from dblock.core.watchdog.heartbeats import Heartbeat

if TYPE_CHECKING:
    from dblock.core.holding.observers import Observers

BATCH: Final = 10_000
"""Leases in one statement, at most."""


class Due(NamedTuple):
    """A hold's lease as it was when its renewal was written."""

    hold: Hold
    ttl: float
    life: float
    epoch: int


class Renewal:
    """Leases of one database that are to be renewed by one statement."""

    def __init__(
        self,
        store: Store,
        holds: Sequence[Hold],
        keeps: Callable[[Hold], bool],
        look: Callable[[], None],
        observers: Observers | None = None,
    ) -> None:
        """`keeps`: has a hold not been given back? `look` tells the watchdog to look again."""
        self.store = store
        self.leases = [Due(hold, *hold.lease.renewal()) for hold in holds]
        self._keeps, self._look, self._observers = keeps, look, observers

    def set_reason_if_lost(self, reason: Reason) -> None:
        """What to report if a lease is lost before this has succeeded."""
        for due in self.leases:
            due.hold.lease.reason_if_lost = reason

    def steps(self) -> Steps[None]:
        """Renew, and let every hold know."""
        self.set_reason_if_lost(Reason.UNREACHABLE)  # until it has succeeded: it may never be answered
        patience = min(due.hold.lease.term for due in self.leases) / 20
        for start in range(0, len(self.leases), BATCH):
            yield from self._renew(self.leases[start : start + BATCH], patience)
        self._look()

    def give_up(self) -> None:
        """Nobody can run this."""
        for due in self.leases:
            due.hold.lease.renewing, due.hold.lease.reason_if_lost = False, None

    def _renew(self, leases: Sequence[Due], patience: float) -> Steps[None]:
        database = self.store.database
        lives: dict[Tenure, float] = {}  # two flows may hold one tenure: the longer life counts
        for hold, _, life, _ in leases:
            lives[hold.tenure] = max(life, lives.get(hold.tenure, 0.0))
        try:
            sent, alive = yield from tenures.renew(database, list(lives.items()), database.now() + patience)
        except LockError as error:
            if type(error) is StoreBusy and len(leases) > 1:
                # One row that a stranger has locked must not cost the others their leases.
                half = len(leases) // 2
                yield from self._renew(leases[:half], 0.0)
                yield from self._renew(leases[half:], 0.0)
                return
            # Somebody who tries to take the key locks its row for a moment on MySQL: that is no news until it is late.
            if type(error) is not StoreBusy or any(hold.lease.state != "held" for hold, *_ in leases):
                warn("could not renew %d leases, trying again: %s", len(leases), error)
            for hold, _, _, _ in leases:
                hold.lease.due = min(hold.lease.due, database.now() + min(1.0, hold.lease.term / 20))
            return
        over = self._lengthen(leases, sent, alive)
        for hold in over:
            if self._keeps(hold):
                try:
                    loss = Loss(*(yield from tenures.why_lost(database, hold.tenure)))
                except LockError:
                    loss = Loss(Reason.EXPIRED)
                if self._keeps(hold):  # not given back meanwhile
                    _ = hold.lease.lose(loss)

    def _lengthen(self, leases: Sequence[Due], sent: float, alive: Collection[Tenure] | None) -> list[Hold]:
        """Let those that were renewed know; the others (`alive` is None if there are none)."""
        renewed = [due for due in leases if alive is None or due.hold.tenure in alive]
        if self._observers is not None:
            self._observers.renewed(self.store, sent, [due.hold for due in renewed])
        for hold, ttl, _, epoch in renewed:
            _ = hold.lease.lengthen(Grant(hold.tenure, sent, ttl), epoch)
        return [] if alive is None else [due.hold for due in leases if due.hold.tenure not in alive]


class Renewer(threading.Thread):
    """Sends the renewals and heartbeats of one database."""

    def __init__(self, store: Store) -> None:
        super().__init__(name="dblock renewal", daemon=True)
        self.store = store
        self.batches: SimpleQueue[Renewal | Heartbeat | None] = SimpleQueue()
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
                warn("keeping %d leases or places in queues failed: %r", len(batch.leases), error)
            finally:
                self.done += 1
                del batch


async def quietly(work: Coroutine[Any, Any, None]) -> None:
    """Run it in a task; what it raises is logged."""
    try:
        await work
    except Exception as error:  # noqa: BLE001 - must not end in the loop's exception handler
        warn("a renewal failed: %r", error)
