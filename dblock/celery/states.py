"""A *state*: a short text that a holder of a key leaves to the next holder.

Each tenure *enters* the state with its fence before it reads it. From then on writes of earlier tenures are refused,
however late they come (Kleppmann 2016, "How to do distributed locking"; Burrows 2006, section 2.4), so what it has read
stays valid until it writes itself. That needs no clock, and holds whatever happens to the lease.

States are in the table `lock_states`, which is made when a tenure first enters a state: most applications need none.

Rule: a `write` that is answered is on disk, and so is the `enter` before it.
"""

from __future__ import annotations

from typing import Final, NamedTuple

from dblock.core.errors import PASSING, LockStoreError
from dblock.core.protocol.sending import Database, ask
from dblock.core.protocol.steps import Parameters, Steps
from dblock.core.statements import mysql, postgresql, sqlite
from dblock.core.statements.base import EXACT, Reply, Statement
from dblock.core.statements.vocabulary import Vocabulary


class States(NamedTuple):
    """The statements on `lock_states`, and the one that makes that table."""

    make: Statement
    enter: Statement
    read: Statement
    write: Statement


def _states(words: Vocabulary, *, key: str, text: str, if_there: str) -> States:
    make = f"""
CREATE TABLE IF NOT EXISTS lock_states (
    lock_key {key} NOT NULL PRIMARY KEY,
    fence bigint NOT NULL,
    writes bigint NOT NULL,
    state {text} NOT NULL
){words.table_options}
"""
    # Safe: the fence only grows, so it may arrive twice.
    enter = f"""
INSERT INTO lock_states (lock_key, fence, writes, state) VALUES (:key, :fence, 0, '')
{if_there} fence = {words.greatest}(lock_states.fence, {words.bigint(":fence")})
"""
    read = "SELECT state, writes FROM lock_states WHERE lock_key = :key AND fence = :fence"
    # Safe: names the tenure and the number of the write; after a later write it changes nothing.
    write = f"""
UPDATE lock_states SET writes = {words.bigint(":number")}, state = :state
WHERE lock_key = :key AND fence = :fence AND writes < {words.bigint(":number")} {words.durable}
"""
    return States(
        Statement("make_states", make, Reply.COUNT, critical=True),
        Statement("enter_state", enter, Reply.COUNT, critical=True),
        Statement("read_state", read, Reply.ROWS, critical=True),
        Statement("write_state", write, Reply.COUNT, critical=True),
    )


_CONFLICT: Final = "ON CONFLICT (lock_key) DO UPDATE SET"
STATES: Final = {
    "postgresql": _states(postgresql.SQL, key='varchar(255) COLLATE "C"', text="text", if_there=_CONFLICT),
    "mysql": _states(
        mysql.SQL,
        key=f"varchar(255) {EXACT}",
        text="longtext CHARACTER SET utf8mb4",
        if_there="ON DUPLICATE KEY UPDATE",
    ),
    "sqlite": _states(sqlite.SQL, key="varchar(255)", text="text", if_there=_CONFLICT),
}
"""By the dialect's name."""


def enter(database: Database, key: str, fence: int) -> Steps[tuple[str, int] | None]:
    """Enter a state: its text, "" at first, and the number of its last write, below those of later ones.

    None if a later tenure has entered it already.
    """
    states = STATES[database.dialect.name]
    parameters: Parameters = {"key": key, "fence": fence}
    try:
        _ = yield from ask(database, states.enter, parameters)
    except PASSING:
        raise
    except LockStoreError:  # probably no table; if not, the next one fails too
        _ = yield from ask(database, states.make, {})
        _ = yield from ask(database, states.enter, parameters)
    rows = yield from ask(database, states.read, parameters)
    return (str(rows[0][0]), int(rows[0][1])) if rows else None


def write(database: Database, key: str, fence: int, number: int, state: str) -> Steps[bool]:
    """Write a state; False if a later tenure has entered it, or this one has not.

    `number` is higher than those of all earlier writes, answered or not: then an abandoned write that still reaches the
    server does no harm.
    """
    states = STATES[database.dialect.name]
    parameters: Parameters = {"key": key, "fence": fence, "number": number, "state": state}
    if (yield from ask(database, states.write, parameters)):
        return True
    rows = yield from ask(database, states.read, {"key": key, "fence": fence})  # its first sending was not answered
    return bool(rows) and int(rows[0][1]) == number
