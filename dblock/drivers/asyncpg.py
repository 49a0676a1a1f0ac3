"""Statements on an asyncpg connection behind a pooler.

A pooler keeps a client on one session from the beginning of a transaction to its end. asyncpg sends the text of a
statement and its parameters in two exchanges, and may close an earlier prepared statement in between, which ends the
transaction: the parameters may then reach another session, and the last statement there. So each text is sent once to
learn its types; after that the text goes with the parameters, in one exchange, which is a transaction of its own.
"""

from __future__ import annotations

from typing import Any

from dblock.core.protocol.steps import Execute, Rows
from dblock.core.statements.base import Reply, in_order, rendered


class Unnamed:
    """Runs statements on one connection, without names; none outlives its transaction."""

    def __init__(self, connection: Any) -> None:
        self._connection = connection
        self._known: dict[str, Any] = {}

    async def execute(self, step: Execute) -> Rows:
        """Run one statement."""
        _, statement, parameters, *_ = step
        text, order = rendered(statement.sql, "numeric_dollar")
        assert order is not None  # noqa: S101 - the style has no names
        known = await self._typed(text)
        rows: Rows = await known.fetch(*in_order(parameters, order))
        if statement.reply is Reply.COUNT:
            return [()] * int(known.get_statusmsg().rpartition(" ")[2])
        return rows

    async def ask(self, sql: str) -> Any:
        """The only value that a query returns."""
        return await (await self._typed(sql)).fetchval()

    async def _typed(self, text: str) -> Any:
        known = self._known.get(text)
        if known is None:
            known = await self._connection.prepare(text, name="")
            known._state.mark_unprepared()  # as asyncpg does itself without a statement cache
            self._known[text] = known
        return known
