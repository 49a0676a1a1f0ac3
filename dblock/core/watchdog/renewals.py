"""Renewing the leases of one database, one statement for all that are due.

Rule: it fails softly. What could not be renewed is tried again, by the watchdog's clock.
"""

from __future__ import annotations

import threading
from collections.abc import Coroutine, Mapping, Sequence
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Protocol

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


class Keeper(Protocol):
    """Who wants the leases renewed."""

    observers: Observers | None
    """Those who want to hear what becomes of locks; None if nobody does."""

    def keeps(self, hold: Hold, /) -> bool:
        """Has it not been given back?"""
        ...

    def look(self) -> None:
        """Look again at what is due."""
        ...

    def revoke(self, hold: Hold, words: str, /) -> None:
        """Somebody has asked for it back."""
        ...


class Renewal:
    """Leases of one database that are to be renewed by one statement."""

    def __init__(self, store: Store, holds: Sequence[Hold], keeper: Keeper) -> None:
        self.store = store
        self.leases = [Due(hold, *hold.lease.renewal()) for hold in holds]
        self._keeper = keeper

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
        self._keeper.look()

    def give_up(self) -> None:
        """Nobody can run this."""
        for due in self.leases:
            due.hold.lease.renewing, due.hold.lease.reason_if_lost = False, None

    def _renew(self, leases: Sequence[Due], patience: float) -> Steps[None]:
        database = self.store.database
        lives: dict[Tenure, float] = {}  # two flows may hold one tenure: the longer life counts
        for hold, _, life, _ in leases:
            lives[hold.tenure] = max(life, lives.get(hold.tenure, 0.0))
        unaware = {due.hold.tenure for due in leases if due.hold.revoked is None}
        try:
            sent, alive = yield from tenures.renew(database, list(lives.items()), database.now() + patience, unaware)
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
        met: list[Due] = []
        renewed: list[Due] = []
        for due in leases:
            tenure = due.hold.tenure
            kept = alive is None or (tenure in alive and (alive[tenure] is None or tenure not in unaware))
            (renewed if kept else met).append(due)
        if self._keeper.observers is not None:
            self._keeper.observers.renewed(self.store, sent, [due.hold for due in renewed])
        for hold, ttl, _, epoch in renewed:
            _ = hold.lease.lengthen(Grant(hold.tenure, sent, ttl), epoch)
        yield from self._meet(met, alive or {}, patience)

    def _meet(self, met: Sequence[Due], alive: Mapping[Tenure, str | None], patience: float) -> Steps[None]:
        """They were not renewed: some were asked back, which their holders are told first; the others are over."""
        revoked = [due for due in met if due.hold.tenure in alive]
        for due in revoked:
            self._keeper.revoke(due.hold, alive[due.hold.tenure] or "")
        if revoked:
            yield from self._renew(revoked, patience)
        for hold in (due.hold for due in met if due.hold.tenure not in alive):
            if self._keeper.keeps(hold):
                try:
                    loss = Loss(*(yield from tenures.why_lost(self.store.database, hold.tenure)))
                except LockError:
                    loss = Loss(Reason.EXPIRED)
                if self._keeper.keeps(hold):  # not given back meanwhile
                    _ = hold.lease.lose(loss)


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
