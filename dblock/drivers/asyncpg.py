"""Statements on an asyncpg connection behind a pooler.

asyncpg sends the text of a statement and its parameters by two exchanges. They are one transaction, and a pooler leaves
both to one session, as long as nothing else is sent in between: the first ends with Flush, not with Sync. But asyncpg
closes there what it has prepared before and needs no more; what has no name it need not close.
"""

from __future__ import annotations

from typing import Any

from dblock.core.protocol.steps import Execute, Rows
from dblock.core.statements.base import Reply, rendered


async def execute(connection: Any, step: Execute) -> Rows:
    """Run one statement."""
    statement, parameters, _ = step
    text, order = rendered(statement.sql, "numeric_dollar")
    assert order is not None  # noqa: S101 - the style has no names
    prepared = await connection.prepare(text, name="")
    rows: Rows = await prepared.fetch(*map(parameters.__getitem__, order))
    if statement.reply is Reply.COUNT:
        return [()] * int(prepared.get_statusmsg().rpartition(" ")[2])
    return rows


async def ask(connection: Any, sql: str) -> Any:
    """The one value that a question is answered with; from then on asyncpg has nothing to close in between."""
    _ = await connection.prepare(sql, name="")
    return await (await connection.prepare(sql, name="")).fetchval()
