"""Setting up a session of the lock's own, for both faces and whatever driver: how long it waits, and what it sees.

What is set lasts as long as the session, so it is set only where the connection is wired to one: PgBouncer and its like
make up the process id that they greet clients with, so that it is not the one that the session itself tells. Statements
that must not wait for another transaction's lock on their row say so themselves, which holds behind a pooler too; this
is for locks on the whole table, and for whatever else makes a server slow. On PostgreSQL the level is READ COMMITTED,
whatever the default: a renewal must not be among the conflicts of a guarded transaction that is SERIALIZABLE. There is
one plan for each of our statements, since they look rows up by their keys: the server need not make five to find out.
On a node of a Galera cluster each statement waits until the node has applied what others committed before: whoever is
told of a tenure would not find it there yet, and take it for lost.

Rule: a few round trips, when the connection is opened, which end in time like any statement.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from functools import partial
from typing import Any

from dblock.core import clock, runtime, timing
from dblock.core.connections.pool import PooledConnection

_POSTGRESQL = """
SELECT CASE WHEN pg_backend_pid() = {process}
            THEN set_config('lock_timeout', '20ms', false) || set_config('statement_timeout', '5s', false)
                 || set_config('default_transaction_isolation', 'read committed', false)
                 || set_config('plan_cache_mode', 'force_generic_plan', false) END
"""
# In whole seconds; MySQL knows no zero.
_MYSQL = "SET SESSION innodb_lock_wait_timeout = 1, lock_wait_timeout = /*M! 0 */ /*!80017 1 */, sql_safe_updates = 0"
_GALERA = "SHOW SESSION VARIABLES WHERE variable_name = 'wsrep_on' AND value = 'ON'"


def set_up(connection: PooledConnection, vendor: str, driver: Any, ask: Callable[[str], Any] | None = None) -> None:
    """Bound what the session waits for, and find out whether the connection is wired to one.

    `connection.raw` is the connection as DB-API knows it, `driver` as the driver made it. `ask` answers with the first
    value of a statement's first row, by default through a cursor.
    """
    with contextlib.suppress(OSError, AttributeError, TypeError):
        connection.descriptor = _fileno(driver)
        connection.wire = os.dup(connection.descriptor)
    deadlines = runtime.current.deadlines
    deadlines.watch(connection, clock.now() + timing.DEFAULT.answer)
    try:
        _set_up(connection, vendor, driver, ask or partial(_ask, connection.raw))
    finally:
        in_time = deadlines.answered(connection)
    if not in_time:
        raise TimeoutError("the server was silent while the session was set up")


def _set_up(connection: PooledConnection, vendor: str, driver: Any, ask: Callable[[str], Any]) -> None:
    if vendor == "postgresql":
        process = _process(driver)
        connection.wired = process is not None and bool(ask(_POSTGRESQL.format(process=process)))
        return
    connection.wired = True
    if vendor == "sqlite":
        connection.busy_timeout = int(timing.DEFAULT.sqlite_busy * 500)  # a try is to see here too that it is busy
        _ = ask(f"PRAGMA busy_timeout = {connection.busy_timeout}")
        if ask("PRAGMA journal_mode") == "wal":
            _ = ask("PRAGMA synchronous = NORMAL")
            connection.wal = True
        return
    _ = ask(_MYSQL)
    connection.galera = ask(_GALERA) is not None
    if connection.galera:
        _ = ask("SET SESSION wsrep_sync_wait = 7")  # reads, updates, inserts


def _fileno(driver: Any) -> int:
    if hasattr(driver, "fileno"):  # psycopg, psycopg2, mysqlclient
        return int(driver.fileno())
    transport = getattr(driver, "_transport", None)  # asyncpg, asyncmy
    if transport is None and getattr(driver, "_writer", None) is not None:  # aiomysql
        transport = driver._writer.transport
    wire = driver._sock if transport is None else transport.get_extra_info("socket")  # PyMySQL
    return int(wire.fileno())


def _process(driver: Any) -> int | None:
    """The server process that the driver believes to speak to."""
    if hasattr(driver, "get_server_pid"):  # asyncpg
        return int(driver.get_server_pid())
    return int(driver.info.backend_pid) if hasattr(driver, "info") else None


def _ask(raw: Any, sql: str) -> Any:
    cursor = raw.cursor()
    try:
        cursor.execute(sql)
        row = cursor.fetchone() if cursor.description else None
        return row[0] if row else None
    finally:
        cursor.close()
