"""Leaving several locks at once: those of `db_locks`, and the permits of a semaphore.

Rule: each is left, whatever leaving another one raises, and also if an interrupt comes between two of them. A database
that could not release one of them is asked for no other: the rest ends with its leases.
"""

from __future__ import annotations

from typing import Any

from dblock.core.errors import AWAY, LockError, LockLost
from dblock.core.holding.flow import Block
from dblock.core.lock.leaving import leave_block
from dblock.core.protocol.steps import Steps, undone
from dblock.core.protocol.store import Store

Entered = list[tuple[Any, Block]]
"""Locks, and how each was entered, in the order in which they are left."""


def leave_each(entered: Entered, error: BaseException | None = None, store: Store | None = None) -> Steps[None]:
    """Leave all of them. Raises an interrupt, else the first error of a lock.

    With `error`, which its caller raises, an error of a lock becomes a note on that; `store`: the one that it is of.
    """
    errors = [error] if error is not None else []
    away: dict[Store, LockError] = {store: error} if store is not None and isinstance(error, AWAY) else {}

    def leave(those: Entered) -> Steps[None]:
        for lock, block in those:
            block.hold.away = away.get(block.hold.store)
            try:
                yield from leave_block(lock, block)
            except LockError as raised:
                failed = raised.__cause__ if isinstance(raised, LockLost) else raised
                if isinstance(failed, AWAY):
                    _ = away.setdefault(block.hold.store, failed)
                if errors:
                    errors[0].add_note(str(raised))
                errors.append(raised)
            finally:
                block.hold.away = None

    yield from undone(
        lambda: leave(entered), lambda: leave([each for each in entered if each[1].entry in each[1].hold.entries])
    )
    if errors and error is None:
        raise errors[0]
