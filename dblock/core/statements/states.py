"""The statements on `lock_states`, and the one that makes that table, which few applications need."""

from __future__ import annotations

from typing import Final, NamedTuple

from dblock.core.statements import mysql, postgresql, sqlite
from dblock.core.statements.base import EXACT, Reply, Statement
from dblock.core.statements.vocabulary import Vocabulary


class States(NamedTuple):
    """The statements that `dblock.core.protocol.states` describes."""

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
    "postgresql": _states(postgresql.SQL, key=postgresql.SQL.text.format(255), text="text", if_there=_CONFLICT),
    "mysql": _states(
        mysql.SQL,
        key=f"varchar(255) {EXACT}",
        text="longtext CHARACTER SET utf8mb4",
        if_there="ON DUPLICATE KEY UPDATE",
    ),
    "sqlite": _states(sqlite.SQL, key="varchar(255)", text="text", if_there=_CONFLICT),
}
"""By the dialect's name."""
