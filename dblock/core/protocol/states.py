"""A *state*: a short text that a holder of a key leaves to the next holder.

Each tenure *enters* the state with its fence before it reads it. From then on writes of earlier tenures are refused,
however late they come (Kleppmann 2016, "How to do distributed locking"; Burrows 2006, section 2.4), so what it has read
stays valid until it writes itself. That needs no clock, and holds whatever happens to the lease.

States are in the table `lock_states`, which is made when a tenure first enters a state: most applications need none.

Rule: a `write` that is answered is on disk, and so is the `enter` before it.
"""

from __future__ import annotations

from typing import NamedTuple

from dblock.core.errors import LockStoreError, StoreConflict, StoreUnanswered
from dblock.core.protocol.sending import Database, send
from dblock.core.protocol.steps import Parameters, Rows, Steps
from dblock.core.statements.base import Statement
from dblock.core.statements.states import STATES


def _send(database: Database, statement: Statement, parameters: Parameters) -> Steps[Rows]:
    over = statement.over(database.dialect.tables, database.dialect.quote)
    until = database.now() + database.timing.retry_budget
    _, rows = yield from send(database, over, parameters, until, resend=True)
    return rows


class Entered(NamedTuple):
    """A state as earlier tenures have left it."""

    state: str
    """Empty at first."""
    number: int
    """Number of the last write; later writes need higher ones."""


def enter(database: Database, key: str, fence: int) -> Steps[Entered | None]:
    """Enter a state: its text and number; None if a later tenure has entered it already."""
    states = STATES[database.dialect.name]
    parameters: Parameters = {"key": key, "fence": fence}
    try:
        _ = yield from _send(database, states.enter, parameters)
    except (StoreConflict, StoreUnanswered):
        raise
    except LockStoreError:  # probably no table; if not, the next one fails too
        _ = yield from _send(database, states.make, {})
        _ = yield from _send(database, states.enter, parameters)
    rows = yield from _send(database, states.read, parameters)
    return Entered(str(rows[0][0]), int(rows[0][1])) if rows else None


def write(database: Database, key: str, fence: int, number: int, state: str) -> Steps[bool]:
    """Write a state; False if a later tenure has entered it, or this one has not.

    `number` is higher than those of all earlier writes, answered or not: then an abandoned write that still reaches the
    server does no harm.
    """
    states = STATES[database.dialect.name]
    parameters: Parameters = {"key": key, "fence": fence, "number": number, "state": state}
    if (yield from _send(database, states.write, parameters)):
        return True
    rows = yield from _send(database, states.read, {"key": key, "fence": fence})  # its first sending was not answered
    return bool(rows) and int(rows[0][1]) == number
