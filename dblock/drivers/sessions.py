"""Setting up a session of the lock, for both faces and every driver: time limits, isolation, encoding, name.

Settings last as long as the session, so they are made only if the connection leads to one session: PgBouncer and its
like invent the process id that they give their clients, which then differs from the session's own. Statements that must
not wait for another transaction's lock on their row limit that themselves, also behind a pooler; the time limits here
are for locks on the whole table, and for a slow server. On PostgreSQL the isolation level is READ COMMITTED, whatever
the default: a renewal must not be among the conflicts of a guarded SERIALIZABLE transaction. Each statement is planned
once, and never as a sequential scan: a plan lasts as long as the session. In a table of one page a sequential scan is
the cheapest plan, and the session would keep it when the table has a million rows; a bitmap scan would read all waiters
of a key to find the first. Every statement finds rows by their keys, through an index, so it needs no other plan, and
no compiled one. Contrary settings of the role or of the database are overridden.

On MySQL and MariaDB the character set is utf8mb4, for the driver too, and the SQL mode is fixed: text drivers write
values into the statement, and both decide where a literal ends and what the server reads. On a node of a Galera cluster
each statement waits until the node has applied earlier commits of others: otherwise a waiter that is notified of its
tenure would not find it there yet, and take it for lost.

Each session has a name on the server, its purpose before the application's own name: `dblock: locks of shop`. On
PostgreSQL that is the `application_name`. On MySQL and MariaDB it is the connection attribute `program_name`, which a
face gives its driver (`options`) when it connects.

Every driver gives up a server that accepts a connection and does not answer. Otherwise each try would leave a thread
and a socket behind.

The kernel sends keepalives on an idle connection, so that devices on the way do not drop it, and ends a connection
whose other side is silent. Shorter times of the application are kept.

Rule: it takes a few round trips when the connection is opened, with a deadline like any statement.
"""

from __future__ import annotations

import contextlib
import math
import os
import socket
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Final

from dblock.core import clock, runtime, timing
from dblock.core.connections.connection import PooledConnection, Wire
from dblock.core.protocol.steps import Parameters, Rows
from dblock.core.statements.base import Reply, Statement
from dblock.drivers import asyncpg, mariadb
from dblock.drivers.defaults import restore

KEEPALIVE: Final = {
    "TCP_KEEPIDLE": 15,  # seconds of silence before the first one
    "TCP_KEEPALIVE": 15,  # the same on macOS
    "TCP_KEEPINTVL": 5,  # seconds between two
    "TCP_KEEPCNT": 3,  # so many without an answer end the connection
    "TCP_USER_TIMEOUT": 30_000,  # milliseconds; so does anything sent that is not acknowledged for so long
}
"""Options of a TCP socket, as far as the system supports them."""
PREFIX: Final = "dblock: "
"""Prefix of the names of sessions."""
_NAMING: Final = {"pymysql", "aiomysql", "asyncmy"}
"""Drivers of MySQL and MariaDB that take a `program_name`."""
_BOUNDS: Final = {
    "asyncpg": ("timeout",),
    "pymysql": ("connect_timeout", "read_timeout", "write_timeout"),  # the first is not for the handshake
}
"""The options of drivers that bound the opening of a connection; all others have a `connect_timeout`, in seconds."""
_POSTGRESQL = """
SELECT CASE WHEN pg_backend_pid() = {process}
            THEN set_config('lock_timeout', '20ms', false) || set_config('statement_timeout', '5s', false)
                 || set_config('default_transaction_isolation', 'read committed', false)
                 || set_config('plan_cache_mode', 'force_generic_plan', false)
                 || set_config('enable_seqscan', 'off', false) || set_config('enable_bitmapscan', 'off', false)
                 || set_config('enable_indexscan', 'on', false) || set_config('enable_nestloop', 'on', false)
                 || set_config('jit', 'off', false) || set_config('client_encoding', 'UTF8', false)
                 || set_config('application_name',
                               concat_ws(' of ', '{name}', nullif(current_setting('application_name'), '')),
                               false) END
"""
# In whole seconds; MySQL does not allow zero.
_MYSQL = """
SET NAMES utf8mb4, SESSION sql_mode = 'TRADITIONAL', innodb_lock_wait_timeout = 1,
    lock_wait_timeout = /*M! 0 */ /*!80017 1 */, sql_safe_updates = 0
"""
# Returns `version` on MariaDB, whatever version a proxy or a setting reports, `wsrep_on` on a Galera node, and the name
# of its group on a server of group replication, with the mode if each member of the group takes writes.
_SERVER = """
SHOW SESSION VARIABLES WHERE variable_name = 'wsrep_on' AND value = 'ON' /*M! OR variable_name = 'version' */
    /*!80017 OR variable_name = 'group_replication_group_name' AND value <> ''
        OR variable_name = 'group_replication_single_primary_mode' AND value = 'OFF' */
"""


Wait = Callable[[Any], Any]
Run = Callable[[Statement, Parameters], Rows]


def at_once(answer: Any) -> Any:
    """The `wait` of synchronous drivers, whose methods return what they answer."""
    return answer


def set_up(
    connection: PooledConnection, vendor: str, driver: Any, wait: Wait = at_once, *, may_prepare: bool = True
) -> None:
    """Set up the session, find out whether the connection leads to a single one, and choose what runs its statements.

    `connection.raw` is the DB-API connection, `driver` the driver's own. `wait` awaits the results of an asynchronous
    driver's methods.
    """
    if hasattr(driver, "pgconn"):
        from dblock.drivers import psycopg  # noqa: PLC0415 - imports the driver, which need not be installed

        def run(*, prepare: bool) -> Run:
            prepared = psycopg.Prepared(driver, prepare=prepare)
            return prepared.execute if wait is at_once else lambda *given: wait(prepared.aexecute(*given))

        _begin(connection, vendor, driver, wait, lambda sql: run(prepare=False)(_question(sql), {}))
        # Behind a pooler too, where nothing may be prepared: a cursor may interpolate parameters.
        if driver.pgconn.parameter_status(b"client_encoding") == b"UTF8":
            connection.prepared = run(prepare=connection.direct and may_prepare)
        if not connection.direct:
            driver.prepare_threshold = None  # psycopg must not prepare on its own there either
    elif hasattr(driver, "get_server_pid"):
        unnamed = asyncpg.Prepared(driver, named=False)
        _begin(connection, vendor, driver, wait, lambda sql: wait(unnamed.execute(_question(sql), {})))
        connection.question = lambda: wait(driver.execute("SELECT 1"))
        runner = asyncpg.Prepared(driver, named=True) if connection.direct else unnamed
        connection.prepared = lambda *given: wait(runner.execute(*given))
    else:
        ask = partial(_rows, connection.raw)
        _begin(connection, vendor, driver, wait, ask)
        if connection.mariadb and wait is at_once and ask("SELECT CONNECTION_ID()") == [(_process(driver),)]:
            connection.prepared = mariadb.Prepared(driver).execute


def _begin(connection: PooledConnection, vendor: str, driver: Any, wait: Wait, ask: Callable[[str], Rows]) -> None:
    """Set up the session; `ask` returns the rows of a statement."""
    with contextlib.suppress(OSError, AttributeError, TypeError):
        connection.descriptor = _fileno(driver)
        connection.wire = Wire(fileno=os.dup(connection.descriptor))
        _keep_alive(connection.wire)
    if vendor != "sqlite":
        connection.question = partial(_rows, connection.raw, "SELECT 1")
    runtime.current.deadlines.bound(connection, partial(_set_up, connection, vendor, driver, wait, ask))


def options(driver: str, given: Mapping[str, Any], purpose: str) -> dict[str, Any]:
    """What an application's driver options have to be for a connection of the lock to a server.

    An opening is bounded by the time for which a late one may be of use; a shorter time of the application is kept.
    """
    bound = math.ceil(timing.DEFAULT.surely_answered)
    found = {
        name: bound for name in _BOUNDS.get(driver, ("connect_timeout",)) if not 0 < _seconds(given, name) <= bound
    }
    return found | ({"program_name": name_of(purpose, given.get("program_name") or "")} if driver in _NAMING else {})


def _seconds(given: Mapping[str, Any], name: str) -> float:
    try:
        return float(given.get(name) or 0)
    except ValueError:  # for the driver to refuse
        return 1


def name_of(purpose: str, application: str) -> str:
    """Name of a session of the lock with that purpose."""
    return f"{PREFIX}{purpose} of {application}" if application else f"{PREFIX}{purpose}"


def _keep_alive(wire: socket.socket) -> None:
    """Let the kernel check sooner than by default whether the other side of a TCP connection is still there."""
    if wire.family not in {socket.AF_INET, socket.AF_INET6}:
        return
    wire.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in KEEPALIVE.items():
        if (option := getattr(socket, name, None)) is not None:
            known = wire.getsockopt(socket.IPPROTO_TCP, option)
            wire.setsockopt(socket.IPPROTO_TCP, option, min(value, known or value))


def _set_up(connection: PooledConnection, vendor: str, driver: Any, wait: Wait, ask: Callable[[str], Rows]) -> None:
    restore(vendor, driver, wait)
    begun = clock.now()
    if vendor == "postgresql":
        [[found]] = ask(_POSTGRESQL.format(process=_process(driver), name=name_of(connection.purpose, "")))
        connection.direct = found is not None
        connection.round_trip = clock.now() - begun
        return
    if vendor == "sqlite":
        connection.busy_timeout = int(timing.DEFAULT.single_try * 500)  # a try must find out here too that it is busy
        _ = ask(f"PRAGMA busy_timeout = {connection.busy_timeout}")
        if ask("PRAGMA journal_mode") == [("wal",)]:
            _ = ask("PRAGMA synchronous = NORMAL")
            connection.wal = True
        return
    _ = ask(_MYSQL)
    connection.round_trip = clock.now() - begun
    server = [str(name) for name, *_ in ask(_SERVER)]
    connection.mariadb, connection.direct = "version" in server, "wsrep_on" not in server
    connection.certified = not connection.direct or "group_replication_group_name" in server
    if not connection.direct:
        _ = ask("SET SESSION wsrep_sync_wait = 7")  # reads, updates, inserts
    elif connection.certified and "group_replication_single_primary_mode" in server:
        _ = ask("SET SESSION group_replication_consistency = 'BEFORE'")  # else a tenure may have yet to arrive here


def _fileno(driver: Any) -> int:
    if hasattr(driver, "fileno"):  # psycopg, psycopg2, mysqlclient
        return int(driver.fileno())
    transport = getattr(driver, "_transport", None)  # asyncpg, asyncmy
    if transport is None and getattr(driver, "_writer", None) is not None:  # aiomysql
        transport = driver._writer.transport
    sock = driver._sock if transport is None else transport.get_extra_info("socket")  # PyMySQL
    return int(sock.fileno())


def _process(driver: Any) -> int:
    """The server's process, or thread, that the driver believes to be connected to; not a pooler's."""
    if hasattr(driver, "thread_id"):  # PyMySQL, mysqlclient
        return int(driver.thread_id())
    return int(driver.get_server_pid() if hasattr(driver, "get_server_pid") else driver.info.backend_pid)


def _question(sql: str) -> Statement:
    return Statement("set_up", sql, Reply.ROWS)


def _rows(raw: Any, sql: str) -> Rows:
    with contextlib.closing(raw.cursor()) as cursor:
        cursor.execute(sql)
        return list(cursor.fetchall()) if cursor.description else []  # all: it may be a cursor on the server
