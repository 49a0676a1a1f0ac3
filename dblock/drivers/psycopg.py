"""Statements on a psycopg connection, prepared when they are first used.

A cursor adapts parameters and results of any type; for the lock's few texts and numbers that costs more processor time
than all the rest of a take. This is the same exchange on psycopg's own libpq layer (`psycopg.pq`). Ctrl-C cancels the
statement on the server, as in psycopg, and is raised when the statement has ended.

Rule: only in autocommit mode. Behind a pooler nothing is prepared (see `dblock.drivers.sessions`). A statement's name
carries a digest of its text and never stands for another.
"""

from __future__ import annotations

import contextlib
import hashlib
import select
from collections.abc import Generator
from functools import lru_cache
from typing import Any, Final

from psycopg import errors, generators, postgres, pq, waiting
from psycopg.adapt import AdaptersMap, Transformer
from psycopg.types import numeric, string

from dblock.core import timing
from dblock.core.protocol.steps import Parameters, Rows
from dblock.core.statements.base import Reply, Statement, rendered

_ADAPTERS = AdaptersMap(types=postgres.types)
"""Adapters for numbers and texts, whatever the application has registered with psycopg or its connections."""
numeric.register_default_adapters(_ADAPTERS)
string.register_default_adapters(_ADAPTERS)
_INTERVAL: Final = 5.0
"""Seconds after which a task that awaits an answer polls its socket unasked; by default psycopg 3.3 does so at once."""
_OK = {pq.ExecStatus.TUPLES_OK, pq.ExecStatus.COMMAND_OK}


class Prepared:
    """Runs statements on one connection."""

    def __init__(self, connection: Any, *, prepare: bool) -> None:
        """`prepare`: the connection leads to one session."""
        self._connection = connection
        self._prepare = prepare
        self._known: dict[str, tuple[bytes, tuple[str, ...]]] = {}
        """Names and parameters of the prepared statements."""
        self._transformer = Transformer(_ADAPTERS)
        self._readable = None
        if hasattr(select, "poll"):
            self._readable = select.poll()
            self._readable.register(connection.pgconn.socket, select.POLLIN)

    def execute(self, statement: Statement, parameters: Parameters) -> Rows:
        """Run one statement on a Connection."""
        known, connection = self._known.get(statement.sql), self._connection
        if known is None or self._readable is None:
            with connection.lock:
                rows: Rows = connection.wait(self._exchange(statement, parameters))
            return rows
        pgconn, (name, order) = connection.pgconn, known
        try:
            pgconn.send_query_prepared(name, _encoded(parameters, order))
            if pgconn.flush():  # more than the socket takes at once
                return self._rows(statement, connection.wait(generators.execute(pgconn)))
            return self._rows(statement, _answer(pgconn, self._readable))
        except KeyboardInterrupt:
            if pgconn.transaction_status == pq.TransactionStatus.ACTIVE:
                with contextlib.suppress(Exception):  # the caller drops the connection
                    connection.cancel_safe(timeout=timing.DEFAULT.patience)
                    _ = _answer(pgconn, self._readable)
            raise

    async def aexecute(self, statement: Statement, parameters: Parameters) -> Rows:
        """Run one statement on an AsyncConnection.

        Not by the connection's own `wait`, which after a cancellation waits for seconds for the server to cancel.
        """
        exchange, connection = self._exchange(statement, parameters), self._connection
        async with connection.lock:
            return await waiting.wait_async(exchange, connection.pgconn.socket, _INTERVAL)

    def _exchange(self, statement: Statement, parameters: Parameters) -> Generator[Any, Any, Rows]:
        pgconn = self._connection.pgconn
        known = self._known.get(statement.sql)
        if known is None:
            name, text, order = _named(statement)
            if self._prepare:
                pgconn.send_prepare(name, text)
                _ = _checked((yield from generators.execute(pgconn)))
                known = self._known[statement.sql] = name, order
        if known is None:
            pgconn.send_query_params(text, _encoded(parameters, order))
        else:
            name, order = known
            pgconn.send_query_prepared(name, _encoded(parameters, order))
        return self._rows(statement, (yield from generators.execute(pgconn)))

    def _rows(self, statement: Statement, results: list[Any]) -> Rows:
        result = _checked(results)
        if statement.reply is Reply.COUNT:
            return [()] * (result.command_tuples or 0)
        self._transformer.set_pgresult(result)
        return self._transformer.load_rows(0, result.ntuples, tuple)


@lru_cache(maxsize=256)
def _named(statement: Statement) -> tuple[bytes, bytes, tuple[str, ...]]:
    text, order = rendered(statement.sql, "numeric_dollar")
    assert order is not None  # noqa: S101 - the style has no names
    digest = hashlib.blake2s(text.encode(), digest_size=8).hexdigest()
    return f"dblock_{statement.name}_{digest}".encode(), text.encode(), order


def _encoded(parameters: Parameters, order: tuple[str, ...]) -> list[bytes]:
    return list(map(str.encode, map(str, map(parameters.__getitem__, order))))


def _answer(pgconn: Any, readable: Any) -> list[Any]:
    """The results of a statement, waited for in `poll`, as psycopg's `generators.fetch_many` and `waiting.wait` do.

    Never in `get_result`, which keeps every other thread from running, so that none could cut the connection.
    """
    results: list[Any] = []
    while True:
        try:
            while pgconn.is_busy():
                readable.poll()
                pgconn.consume_input()
        except errors.OperationalError:
            if any(result.status not in _OK for result in results):
                return results  # they say why the server ends the session
            raise
        result = pgconn.get_result()
        if result is None:
            return results
        results.append(result)


def _checked(results: list[Any]) -> Any:
    """The last of the results; raises the first error: libpq adds another one, that the connection is gone."""
    for result in results:
        if result.status not in _OK:
            raise errors.error_from_result(result, encoding="utf-8")
    return results[-1]
