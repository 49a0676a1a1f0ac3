"""Giving back what a process still holds when it ends."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from dblock.core.errors import StoreBusy
from dblock.core.holding.holds import Hold
from dblock.core.log import warn
from dblock.core.protocol import queue, tenures
from dblock.core.protocol.drive import Store, adrive, drive

if TYPE_CHECKING:
    from dblock.core.protocol.steps import Steps


def give_all_back(holds: Sequence[Hold]) -> None:
    """One after the other; a database that fails once is not asked again."""
    silent = set[Store]()
    for hold in holds:
        if hold.store in silent:
            continue
        try:
            _finish(hold)
        except Exception as error:  # noqa: BLE001 - nothing may keep the others from being given back
            warn("could not give %r back at exit: %s", hold.tenure.key, error)
            if not isinstance(error, StoreBusy):
                silent.add(hold.store)


def _finish(hold: Hold) -> None:
    steps = leave_for_good(hold)
    if hold.store.asynchronous:
        import asyncio  # noqa: PLC0415 - only where it is in use

        asyncio.run(adrive(steps, hold.store))
    else:
        drive(steps, hold.store)


def leave_for_good(hold: Hold) -> Steps[None]:
    """Give it back, however often it was entered."""
    database, alone = hold.store.database, hold.shared_entries is None
    if alone and not hold.min_hold:
        _ = yield from queue.release(database, hold.tenure, 1, hold.ticket)
        return
    for _ in range(max(1, len(hold.entries)) - bool(hold.unused_tokens)):  # each entry counts in the row
        _ = yield from queue.leave(database, hold.tenure, hold.min_hold, alone=alone)
    if hold.unused_tokens:
        _ = yield from tenures.detach(database, hold.tenure, hold.ttl, hold.grace)
