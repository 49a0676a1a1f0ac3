"""A primary and a replica that can be made to lag and promoted, of each kind of server."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Callable, Iterator
from typing import Any

import psycopg
import pymysql
from sqlalchemy import Engine, create_engine

from dblock.core import runtime
from dblock.core.runtime import current_flow
from sqlalchemy_dblock import create_tables
from tests.conftest import INNODB
from tests.support.lab import hold_of, until
from tests.support.servers import MariaDB, MySQL, PostgreSQL, S, Standby, running

KINDS = ("postgresql", *(name for name in INNODB if name == "mariadb" or MySQL.installed()))
URLS = {
    "postgresql": "postgresql+psycopg://dblock@127.0.0.1:{}/postgres",
    "mariadb": "mysql+pymysql://root@127.0.0.1:{}/mysql?ssl_disabled=true",
    "mysql": "mysql+pymysql://root@127.0.0.1:{}/mysql?ssl_disabled=true",
}

Asked = PostgreSQL | MariaDB


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

    def __init__(self, kind: str, primary: Asked, replica: Asked) -> None:
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
        table = "locks" if self.kind == "postgresql" else "mysql.locks"
        sql = f"SELECT fence, count FROM {table} WHERE lock_key = '{key}'"
        with contextlib.suppress(psycopg.Error, pymysql.MySQLError):  # the table has not come yet
            rows = self.replica.ask(sql)
            return bool(rows) and rows == self.primary.ask(sql)
        return False

    def cut(self) -> None:
        """From now on nothing comes to the replica."""
        if isinstance(self.replica, PostgreSQL):
            self.replica.alter("SET primary_conninfo = ''")
            assert until(lambda: not self.replica.ask("SELECT 1 FROM pg_stat_wal_receiver"))
        else:
            self.replica.ask("STOP SLAVE" if self.kind == "mariadb" else "STOP REPLICA")

    def promote(self) -> None:
        """The primary dies, and the replica takes its place."""
        self.primary.stop(signal.SIGKILL)
        if self.kind == "postgresql":
            assert self.replica.ask("SELECT pg_promote(true, 30)") == [(True,)]
        else:
            self.cut()
            self.replica.ask("RESET SLAVE ALL" if self.kind == "mariadb" else "RESET REPLICA ALL")


def _follow(pair: Pair) -> None:
    host, port = "127.0.0.1", pair.primary.port
    if pair.kind == "mariadb":
        source = f"MASTER_HOST='{host}', MASTER_PORT={port}, MASTER_USER='root', MASTER_USE_GTID=slave_pos"
        pair.replica.ask(f"CHANGE MASTER TO {source}, MASTER_CONNECT_RETRY=1")
        pair.replica.ask("START SLAVE")
    elif pair.kind == "mysql":
        [(log, position, *_)] = pair.primary.ask("SHOW BINARY LOG STATUS")
        source = f"SOURCE_HOST='{host}', SOURCE_PORT={port}, SOURCE_USER='root', SOURCE_SSL=0, GET_SOURCE_PUBLIC_KEY=1"
        where = f"SOURCE_LOG_FILE='{log}', SOURCE_LOG_POS={position}"
        pair.replica.ask(f"CHANGE REPLICATION SOURCE TO {source}, {where}, SOURCE_CONNECT_RETRY=1")
        pair.replica.ask("START REPLICA")


@contextlib.contextmanager
def pair_of(kind: str, *, synchronous: bool = False, ahead: float = 0.0) -> Iterator[Pair]:
    """A running pair; `synchronous`: each commit of the primary, PostgreSQL, waits for the standby.

    `ahead`: seconds by which the replica's clock is ahead of the primary's.
    """
    with contextlib.ExitStack() as stack:
        primary: Asked
        replica: Asked
        if kind == "postgresql":
            primary = first = stack.enter_context(running(PostgreSQL))
            replica = Standby(first)
        else:
            make = {"mariadb": MariaDB, "mysql": MySQL}[kind]
            primary, replica = stack.enter_context(running(logged(make, 1))), logged(make, 2)()
        replica.ahead = ahead
        pair = Pair(kind, primary, stack.enter_context(running(lambda: replica)))
        _ = stack.callback(pair.close)
        _follow(pair)
        if synchronous:  # the standby, which has been copied, will not wait for another one
            first.alter("SET synchronous_standby_names = '*'")
            assert until(lambda: first.ask("SELECT 1 FROM pg_stat_replication WHERE sync_state = 'sync'"))
        make_tables(URLS[kind].format(primary.port))
        yield pair
