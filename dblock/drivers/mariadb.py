"""Prepared statements on a MariaDB connection, through SQL's own PREPARE and EXECUTE.

Parsing a take costs the server about as much as executing it, and formatting it costs the client more; `EXECUTE name
USING values` spares both. PyMySQL and mysqlclient speak text only, so values are written as literals. MySQL allows only
user variables there, for which one more round trip would be needed: it goes without.

Rule: a literal means the same under every character set and sql_mode of the session: plain ASCII between quotes, all
else in hexadecimal.
"""

from __future__ import annotations

import re
from collections import Counter
from functools import lru_cache
from typing import Any

from dblock.core.protocol.steps import Execute, Rows
from dblock.core.statements.base import Reply, Statement, perform, rendered

OFTEN = 5
"""How often a statement is used on a connection before it is prepared, which takes a round trip."""
_UNKNOWN = 1243
_TOO_MANY = 1461
_FOR_MYSQL = re.compile(r"/\*!80017.*?\*/", re.DOTALL)
_PLAIN = re.compile(r"[ -&(-\[\]-~]*")
"""Printable ASCII but for the quote and the backslash."""


class Prepared:
    """Runs statements on one connection, preparing those that change something when they are used often."""

    def __init__(self, connection: Any) -> None:
        self._connection = connection
        self._known: dict[str, tuple[str, ...]] = {}
        self._uses: Counter[str] = Counter()
        self._room = True

    def execute(self, step: Execute) -> Rows:
        """Run one statement."""
        statement, parameters, _ = step
        order = None if statement.reply is Reply.ROWS else self._known.get(statement.sql) or self._prepare(statement)
        connection = self._connection
        if order is None:
            with connection.cursor() as cursor:
                return perform(cursor, statement, parameters, "pyformat")
        values = ",".join([_literal(parameters[name]) for name in order])
        try:
            connection.query(f"EXECUTE dblock_{statement.name} USING {values}")
        except Exception as error:
            if error.args and error.args[0] == _UNKNOWN:  # the session was reset: a conflict, which is tried again
                self._known.clear()
            raise
        changed: int = connection.affected_rows()
        if statement.reply is Reply.COUNT:
            return [()] * changed
        return [(connection.insert_id(),)] if changed else []

    def _prepare(self, statement: Statement) -> tuple[str, ...] | None:
        self._uses[statement.sql] += 1
        if not self._room or self._uses[statement.sql] < OFTEN:
            return None
        # What is for MySQL alone is a comment here, and its parameters none.
        text, order = rendered(_FOR_MYSQL.sub("", statement.sql), "qmark")
        if not order:  # nothing to be said with USING
            return None
        try:
            self._connection.query(f"PREPARE dblock_{statement.name} FROM {_literal(text)}")
        except Exception as error:
            if error.args and error.args[0] == _TOO_MANY:  # max_prepared_stmt_count, which counts the whole server's
                self._room = False
                return None
            raise
        self._known[statement.sql] = order
        return order


def prepared_for(connection: Any) -> Prepared | None:
    """A runner for a PyMySQL or mysqlclient connection; None where it must not or need not be."""
    return Prepared(connection) if "MariaDB" in connection.get_server_info() and _is_direct(connection) else None


def _is_direct(connection: Any) -> bool:
    with connection.cursor() as cursor:
        cursor.execute("SELECT CONNECTION_ID()")
        [session] = cursor.fetchone()
    return bool(session == connection.thread_id())


@lru_cache(maxsize=64, typed=True)
def _literal(value: str | float) -> str:
    if not isinstance(value, str):
        return repr(value)
    return f"'{value}'" if _PLAIN.fullmatch(value) else f"_utf8mb4 X'{value.encode().hex()}'"
