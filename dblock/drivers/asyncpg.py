"""Statements on an asyncpg connection, prepared when they are first used.

SQLAlchemy's cursor would look each one up and wrap its answer, a third of the processor time of a statement.

Behind a pooler nothing may be prepared. A pooler keeps a client on one session from the beginning of a transaction to
its end. asyncpg sends the text of a statement and its parameters in two exchanges, and may close an earlier prepared
statement in between, which ends the transaction: the parameters may then reach another session, and the last statement
there. So each text is sent once to learn its types; after that the text goes with the parameters, in one exchange,
which is a transaction of its own.
"""

from __future__ import annotations

from typing import Any

from dblock.core.protocol.steps import Parameters, Rows
from dblock.core.statements.base import Reply, Statement, rendered


class Prepared:
    """Runs statements on one connection. Those without names do not outlive their transactions."""

    def __init__(self, connection: Any, *, named: bool) -> None:
        """`named`: the connection leads to one session."""
        self._connection, self._named = connection, named
        self._known: dict[str, tuple[Any, tuple[str, ...]]] = {}
        """Prepared statements and their parameters."""

    async def execute(self, statement: Statement, parameters: Parameters) -> Rows:
        """Run one statement."""
        known = self._known.get(statement.sql)
        if known is None:
            text, order = rendered(statement.sql, "numeric_dollar")
            assert order is not None  # noqa: S101 - the style has no names
            prepared = await self._connection.prepare(text, name=None if self._named else "")
            if not self._named:
                prepared._state.mark_unprepared()  # as asyncpg does itself without a statement cache
            known = self._known[statement.sql] = prepared, order
        prepared, order = known
        rows: Rows = await prepared.fetch(*map(parameters.__getitem__, order))
        if statement.reply is Reply.COUNT:
            changed = prepared.get_statusmsg().rpartition(" ")[2]
            return [()] * (int(changed) if changed.isdigit() else 0)  # CREATE TABLE says no number
        return rows
