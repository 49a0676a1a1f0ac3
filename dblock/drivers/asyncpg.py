"""Statements on an asyncpg connection behind a pooler.

asyncpg sends the text of a statement and its parameters by two exchanges, each a transaction of its own in autocommit
mode: a pooler may lend them two sessions, of which the second does not know the text, or knows another by that name.
Within a transaction both meet the same session, and without a name nothing stays behind there.

Rule: an error has undone the transaction, and otherwise it is committed before anybody reads what it answered.
"""

from __future__ import annotations

from typing import Any

from asyncpg import PostgresError

from dblock.core.protocol.steps import Execute, Rows
from dblock.core.statements.base import Reply, rendered


async def execute(connection: Any, step: Execute) -> Rows:
    """Run one statement."""
    statement, parameters, _ = step
    text, order = rendered(statement.sql, "numeric_dollar")
    assert order is not None  # noqa: S101 - the style has no names
    await connection.execute("BEGIN ISOLATION LEVEL READ COMMITTED")
    try:
        prepared = await connection.prepare(text, name="")
        rows: Rows = await prepared.fetch(*map(parameters.__getitem__, order))
    except PostgresError:
        await connection.execute("ROLLBACK")
        raise
    await connection.execute("COMMIT")
    if statement.reply is Reply.COUNT:
        return [()] * int(prepared.get_statusmsg().rpartition(" ")[2])
    return rows
