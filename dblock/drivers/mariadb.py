"""Prepared statements on a MariaDB connection, through SQL's own PREPARE and EXECUTE.

Parsing a take costs the server about as much as executing it, and formatting it costs the client more; `EXECUTE name
USING values` saves both. PyMySQL and mysqlclient send text only, so values are written as literals. MySQL allows only
user variables there, which would cost another round trip, so this is not used there.

Rule: values are written by `dblock.drivers.literals`.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

from dblock.core.protocol.steps import Parameters, Rows
from dblock.core.statements.base import Masked, Reply, Statement, numbers, perform, rendered
from dblock.drivers.literals import literal

OFTEN = 5
"""Uses of a statement on a connection before it is prepared, which takes a round trip."""
_UNKNOWN = 1243
_TOO_MANY = 1461


class Prepared:
    """Runs statements on one connection, preparing those that change something when they are used often."""

    def __init__(self, connection: Any) -> None:
        self._connection = connection
        self._known: dict[str, tuple[str, ...]] = {}
        self._uses: Counter[str] = Counter()
        self._room = True

    def execute(self, statement: Statement, parameters: Parameters) -> Rows:
        """Run one statement."""
        order = None if statement.reply is Reply.ROWS else self._known.get(statement.sql) or self._prepare(statement)
        connection = self._connection
        if order is None:
            with connection.cursor() as cursor:
                return perform(cursor, statement, parameters, "pyformat")
        values = Masked(",".join([literal(parameters[name]) for name in order]))
        try:
            connection.query(f"EXECUTE dblock_{statement.name} USING {values}")
        except Exception as error:
            if error.args and error.args[0] == _UNKNOWN:  # the session was reset: a conflict, which is retried
                self._known.clear()
            raise
        changed: int = connection.affected_rows()
        if statement.reply is Reply.COUNT:
            return [()] * changed
        return numbers(connection.insert_id(), changed)

    def _prepare(self, statement: Statement) -> tuple[str, ...] | None:
        self._uses[statement.sql] += 1
        if not self._room or self._uses[statement.sql] < OFTEN:
            return None
        text, order = rendered(statement.sql, "qmark")
        if not order:  # no parameters for USING
            return None
        try:
            self._connection.query(f"PREPARE dblock_{statement.name} FROM {literal(text)}")
        except Exception as error:
            if error.args and error.args[0] == _TOO_MANY:  # max_prepared_stmt_count, which counts the whole server's
                self._room = False
                return None
            raise
        self._known[statement.sql] = order
        return order
