"""Prepared statements on a psycopg connection.

A cursor adapts parameters and results of any type; for the lock's dozen of texts and numbers that costs more processor
time than all the rest of a take. This is the same exchange on psycopg's own libpq layer (`psycopg.pq`), waiting as its
cursors wait, so that Ctrl-C and cancellation work as ever.

Rule: only in autocommit mode. PgBouncer and its like make up the key data that they greet clients with, so that the
process id in it is not the one that the session itself tells. A statement's name carries a digest of its text and never
stands for another.
"""

from __future__ import annotations

import hashlib
from collections.abc import Generator
from typing import Any

from psycopg import errors, generators, pq

from dblock.core.statements.base import Reply, Statement, rendered
from dblock.core.steps import Execute, Rows

_READERS = {20: int, 21: int, 23: int, 701: float}
"""How to read the text of int8, int2, int4 and float8; the rest is text."""
_OK = {pq.ExecStatus.TUPLES_OK, pq.ExecStatus.COMMAND_OK}


class Prepared:
    """Runs statements on one connection, preparing each at its first use."""

    def __init__(self, connection: Any) -> None:
        self._connection = connection
        self._known: dict[str, tuple[bytes, bytes, tuple[str, ...]]] = {}

    def execute(self, step: Execute) -> Rows:
        """Run one statement on a Connection."""
        with self._connection.lock:
            rows: Rows = self._connection.wait(self._exchange(step))
        return rows

    async def aexecute(self, step: Execute) -> Rows:
        """Run one statement on an AsyncConnection."""
        async with self._connection.lock:
            rows: Rows = await self._connection.wait(self._exchange(step))
        return rows

    def _exchange(self, step: Execute) -> Generator[Any, Any, Rows]:
        statement, parameters = step
        pgconn = self._connection.pgconn
        known = self._known.get(statement.sql)
        if known is None:
            known = _named(statement)
            pgconn.send_prepare(known[0], known[1])
            _ = _checked((yield from generators.execute(pgconn)))
            self._known[statement.sql] = known
        name, _, order = known
        values = [str(parameters[key]).encode() for key in order]
        pgconn.send_query_prepared(name, values)
        try:
            result = _checked((yield from generators.execute(pgconn)))
        except errors.InvalidSqlStatementName:  # somebody sent DISCARD or DEALLOCATE: nothing was executed
            self._known.clear()
            raise  # a conflict, which is tried again
        if statement.reply is Reply.COUNT:
            return [()] * (result.command_tuples or 0)
        readers = [_READERS.get(result.ftype(column), bytes.decode) for column in range(result.nfields)]
        return [
            [
                None if (value := result.get_value(row, column)) is None else read(value)
                for column, read in enumerate(readers)
            ]
            for row in range(result.ntuples)
        ]


def prepared_for(connection: Any, backend_pid: int) -> Prepared | None:
    """A runner for a psycopg connection whose session says that it is `backend_pid`; None where it must not be."""
    return Prepared(connection) if _is_direct(connection.pgconn, backend_pid) else None


def _is_direct(pgconn: Any, backend_pid: int) -> bool:
    return bool(pgconn.backend_pid == backend_pid and pgconn.parameter_status(b"client_encoding") == b"UTF8")


def _named(statement: Statement) -> tuple[bytes, bytes, tuple[str, ...]]:
    text, order = rendered(statement.sql, "numeric_dollar")
    assert order is not None  # noqa: S101 - the style has no names
    digest = hashlib.blake2s(text.encode(), digest_size=8).hexdigest()
    return f"dblock_{statement.name}_{digest}".encode(), text.encode(), order


def _checked(results: list[Any]) -> Any:
    result = results[-1]
    if result.status not in _OK:
        raise errors.error_from_result(result, encoding="utf-8")
    return result
