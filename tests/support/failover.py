"""A primary and a replica that can be made to lag and promoted, of each kind of server."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Callable, Iterator
from typing import Any

from sqlalchemy import Engine, create_engine, text
from sqlalchemy.exc import DBAPIError

from dblock.core import runtime
from dblock.core.runtime import current_flow
from sqlalchemy_dblock import create_tables
from tests.conftest import INNODB
from tests.support.lab import hold_of, until
from tests.support.servers import MariaDB, MySQL, PostgreSQL, S, Server, Standby, running

KINDS = ("postgresql", *(name for name in INNODB if name == "mariadb" or MySQL.installed()))
URLS = {
    "postgresql": "postgresql+psycopg://dblock@127.0.0.1:{}/postgres",
    "mariadb": "mysql+pymysql://root@127.0.0.1:{}/mysql?ssl_disabled=true",
    "mysql": "mysql+pymysql://root@127.0.0.1:{}/mysql?ssl_disabled=true",
}

SOON = {
    "postgresql": "clock_timestamp() + make_interval(secs => {})",
    "mysql": "UTC_TIMESTAMP(6) + INTERVAL {} SECOND",
    "mariadb": "UTC_TIMESTAMP(6) + INTERVAL {} SECOND",
}
"""So many seconds from now, in SQL."""


@contextlib.contextmanager
def locking(make: Callable[[], S], url: str = URLS["postgresql"]) -> Iterator[tuple[S, Engine]]:
    """A server of its own with the tables, and an engine for it."""
    with running(make) as server:
        engine = create_engine(url.format(server.port))
        create_tables(engine)
        yield server, engine
        engine.dispose()


def make_tables(url: str) -> None:
    """Make the tables in a database."""
    engine = create_engine(url)
    create_tables(engine)
    engine.dispose()


def elsewhere(lock: Any) -> float:
    """Leave the tenure to its row, as if its holder were another process; until when that one trusts it."""
    hold = hold_of(lock)
    runtime.current.watchdog.discard(hold)
    current_flow().holds.clear()
    return hold.lease.trusted_until


def logged(kind: type[MariaDB], number: int) -> type[MariaDB]:
    """A server that writes a binary log, as a replication needs it."""

    class Logged(kind):  # type: ignore[valid-type,misc]
        def prepare(self) -> None:
            super().prepare()
            (self.directory / "data" / "auto.cnf").unlink(missing_ok=True)  # MySQL's own name, if it is a copy's

        def command(self) -> list[str]:
            plain = [flag for flag in super().command() if flag != "--skip-log-bin"]
            return [*plain, f"--server-id={number}", "--log-bin=bin"]

    return Logged


class Pair:
    """A primary with tables, and a replica that follows it at once."""

    def __init__(self, kind: str, primary: Server, replica: Server) -> None:
        self.kind, self.primary, self.replica = kind, primary, replica
        self._engines = list[Engine]()

    def engines(self, quarantine: float | None) -> list[Engine]:
        """One for each of the two, until the end of the pair; with that quarantine after a failover."""
        named = {"dblock_failover_quarantine": quarantine}
        self._engines += [
            create_engine(URLS[self.kind].format(each.port), execution_options=named)
            for each in (self.primary, self.replica)
        ]
        return self._engines

    def close(self) -> None:
        for each in self._engines:
            each.dispose()

    def has(self, key: str) -> bool:
        """Whether the replica has the latest row of that key."""
        sql = "SELECT fence, count FROM locks WHERE lock_key = :key"
        with contextlib.suppress(DBAPIError):  # the table has not come yet
            return self.ask(self.replica, sql, key=key) == self.ask(self.primary, sql, key=key) != []
        return False

    def ask(self, server: Server, sql: str, **parameters: Any) -> list[Any]:
        """The rows that a server answers with, over a connection of its own; none without a table, as yet."""
        engine = create_engine(URLS[self.kind].format(server.port))
        try:
            with engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
                found = connection.execute(text(sql), parameters)
                return list(found.all()) if found.returns_rows else []
        finally:
            engine.dispose()

    def cut(self) -> None:
        """From now on nothing comes to the replica."""
        if self.kind == "postgresql":
            self.ask(self.replica, "ALTER SYSTEM SET primary_conninfo = ''")
            self.ask(self.replica, "SELECT pg_reload_conf()")
            assert until(lambda: not self.ask(self.replica, "SELECT 1 FROM pg_stat_wal_receiver"))
        else:
            self.ask(self.replica, "STOP SLAVE" if self.kind == "mariadb" else "STOP REPLICA")

    def promote(self) -> None:
        """The primary dies, and the replica takes its place."""
        self.primary.stop(signal.SIGKILL)
        if self.kind == "postgresql":
            assert self.ask(self.replica, "SELECT pg_promote(true, 30)") == [(True,)]
        else:
            self.cut()
            self.ask(self.replica, "RESET SLAVE ALL" if self.kind == "mariadb" else "RESET REPLICA ALL")


def _follow(pair: Pair) -> None:
    host, port = "127.0.0.1", pair.primary.port
    if pair.kind == "mariadb":
        source = f"MASTER_HOST='{host}', MASTER_PORT={port}, MASTER_USER='root', MASTER_USE_GTID=slave_pos"
        pair.ask(pair.replica, f"CHANGE MASTER TO {source}, MASTER_CONNECT_RETRY=1")
        pair.ask(pair.replica, "START SLAVE")
    elif pair.kind == "mysql":
        [(log, position, *_)] = pair.ask(pair.primary, "SHOW BINARY LOG STATUS")
        source = f"SOURCE_HOST='{host}', SOURCE_PORT={port}, SOURCE_USER='root', SOURCE_SSL=0, GET_SOURCE_PUBLIC_KEY=1"
        where = f"SOURCE_LOG_FILE='{log}', SOURCE_LOG_POS={position}"
        pair.ask(pair.replica, f"CHANGE REPLICATION SOURCE TO {source}, {where}, SOURCE_CONNECT_RETRY=1")
        pair.ask(pair.replica, "START REPLICA")


@contextlib.contextmanager
def pair_of(kind: str, *, synchronous: bool = False, ahead: float = 0.0) -> Iterator[Pair]:
    """A running pair; `synchronous`: each commit of the primary, PostgreSQL, waits for the standby.

    `ahead`: seconds by which the replica's clock is ahead of the primary's.
    """

    def following(make: Callable[[], Server]) -> Server:
        server = make()
        server.ahead = ahead
        return server

    primary: Server
    replica: Server
    with contextlib.ExitStack() as stack:
        if kind == "postgresql":
            first = stack.enter_context(running(PostgreSQL))
            primary, replica = first, stack.enter_context(running(lambda: following(lambda: Standby(first))))
        else:
            make = {"mariadb": MariaDB, "mysql": MySQL}[kind]
            primary = stack.enter_context(running(logged(make, 1)))
            replica = stack.enter_context(running(lambda: following(logged(make, 2))))
        pair = Pair(kind, primary, replica)
        _ = stack.callback(pair.close)
        _follow(pair)
        if synchronous:  # the standby, which has been copied, will not wait for another one
            pair.ask(primary, "ALTER SYSTEM SET synchronous_standby_names = '*'")
            pair.ask(primary, "SELECT pg_reload_conf()")
            assert until(lambda: pair.ask(primary, "SELECT 1 FROM pg_stat_replication WHERE sync_state = 'sync'"))
        make_tables(URLS[kind].format(primary.port))
        yield pair
