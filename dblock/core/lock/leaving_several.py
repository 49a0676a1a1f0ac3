"""Leaving several locks at once: those of `db_locks`, and the permits of a semaphore.

Rule: each is left, whatever leaving another one raises, and also if an interrupt comes between two of them. A database
that could not release one of them is asked for no other: the rest ends with its leases.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from functools import partial
from typing import Any

from dblock.core.errors import AWAY, LockError, LockLost, LockNotHeld
from dblock.core.holding.flow import Block
from dblock.core.lock.leaving import block_to_release, leave_block
from dblock.core.protocol.steps import Steps, undone
from dblock.core.protocol.store import Store

Entered = list[tuple[Any, Block]]
"""Locks, and how each was entered, in the order in which they are left."""


def release_each(locks: Iterable[Any]) -> Steps[None]:
    """Release each of them once. Raises LockNotHeld for the first that is not held, else as `leave_each`."""
    held, error = Entered(), None
    for lock in locks:
        try:
            held.append((lock, block_to_release(lock)))
        except LockNotHeld as raised:
            error = error or raised
    yield from leave_each(held, error)
    if error is not None:
        raise error


def leave_each(entered: Entered, error: BaseException | None = None, store: Store | None = None) -> Steps[None]:
    """Leave all of them. Raises an interrupt, else the first error of a lock.

    With `error`, which its caller raises, an error of a lock becomes a note on that; `store`: the one that it is of.
    """
    return undone(partial(_leave, entered, error, store), partial(_leave_rest, entered), LockError)


def _leave_rest(entered: Entered) -> Steps[None]:
    """After an interrupt, which nothing replaces: leave those whose turn had not come."""
    with contextlib.suppress(LockError):
        yield from _leave([each for each in entered if each[1].entry in each[1].hold.entries], None)


def _leave(entered: Entered, error: BaseException | None, store: Store | None = None) -> Steps[None]:
    late, away = error, dict[Store, LockError]()
    if store is not None and isinstance(error, AWAY):
        away[store] = error
    for lock, block in entered:
        block.hold.away = away.get(block.hold.store)
        try:
            yield from leave_block(lock, block)
        except LockError as raised:
            failed = raised.__cause__ if isinstance(raised, LockLost) else raised
            if isinstance(failed, AWAY):
                _ = away.setdefault(block.hold.store, failed)
            if late is None:
                late = raised
            else:
                late.add_note(str(raised))
        finally:
            block.hold.away = None
    if late is not None and late is not error:
        raise late
