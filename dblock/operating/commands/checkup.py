"""What the doctor looks at: each check is a few questions to the database and what follows from the answers.

Rule: a check changes no row (`probe` takes and gives back a key of its own), and one that cannot look says so and keeps
the others from nothing.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shlex
import time
from collections.abc import Callable, Iterator
from enum import StrEnum
from typing import Any, Final, NamedTuple

from dblock.core.errors import LockError, LockTimeout, StoreBusy, StoreConflict, StoreUnanswered
from dblock.core.observing.events import DOCTOR
from dblock.core.statements.base import Tables
from dblock.core.text import printable
from dblock.core.wakeup.registry import Wakeups
from dblock.operating import administration
from dblock.operating.commands.console import pins_of, span
from dblock.operating.commands.context import Context
from dblock.operating.statements import vocabulary


class Level(StrEnum):
    """How bad it is."""

    OK = "ok"
    NOTE = "note"
    WARNING = "warning"
    ERROR = "error"


class Finding(NamedTuple):
    """What a check has found."""

    level: Level
    check: str
    text: str
    hint: str = ""


Checked = Iterator[Finding]
OLD_SNAPSHOT: Final = 600.0
"""Seconds after which an open snapshot keeps enough dead versions of hot rows to slow them down."""
OLD_XMIN: Final = 1_000_000
"""Transactions after which that is so for a replication slot or a standby, of which no time is known."""
UPDATES: Final = 10_000
"""So many updates suffice to say whether they are heap-only."""
DEAD: Final = 100_000
"""Dead row versions that vacuuming would have removed."""
CLOCK: Final = 2.0
"""Seconds that clocks may differ by before somebody reads a time wrongly."""


class Checkup:
    """The checks of one database."""

    def __init__(self, context: Context) -> None:
        self.context = context
        self.dialect = context.store.database.dialect
        self.kind = self.dialect.name
        self.words = vocabulary(self.kind)

    def findings(self) -> Iterator[Finding]:
        """Of all checks that concern this kind of database; only the first of them where no lock can be taken there."""
        for check in CHECKS:
            try:
                found = list(check(self))
            except StoreBusy as error:
                found = [Finding(Level.ERROR, "locked", str(error), self.who_locks())]
            except LockError as error:
                why = Finding(Level.WARNING, check.__name__, f"could not look: {error}", "Look into that first.")
                found = [why._replace(level=Level.ERROR) if check in _FIRST else why]
            yield from found
            needed = check in _FIRST or check is replication
            if needed and any(each.level is Level.ERROR for each in found):
                if check is probe:  # a pin may be why
                    with contextlib.suppress(LockError):
                        yield from holders(self)
                return

    def value(self, sql: str) -> Any:
        """The one value that a query answers, None if there is none."""
        rows = self.context.query(sql)
        return rows[0][0] if rows else None

    def variable(self, name: str) -> str:
        """A server variable, as text; empty if there is no such."""
        if self.kind == "postgresql":
            return str(self.value(f"SELECT coalesce(current_setting('{name}', true), '')"))
        home = "/*M! information_schema */ /*!80017 performance_schema */"
        sql = f"SELECT variable_value FROM {home} .global_variables WHERE variable_name = '{name}'"
        return str(self.value(sql) or "")

    def status(self, name: str) -> str:
        """A status variable of MariaDB or MySQL, as text; empty if there is no such."""
        home = "/*M! information_schema */ /*!80017 performance_schema */"
        return str(self.value(f"SELECT variable_value FROM {home} .global_status WHERE variable_name = '{name}'") or "")

    def who_locks(self) -> str:
        """What to do about a session that has locked a whole table, or waits to change it."""
        if self.kind == "sqlite":
            return "A program keeps a transaction that writes open: have it commit sooner, or end it (fuser names it)."
        if waiting := self.who_alters():
            return waiting
        if self.kind == "mysql":
            return "SHOW FULL PROCESSLIST names its session; KILL that, if it is not to be waited for."
        found = self.value(f"""
SELECT string_agg(DISTINCT concat('pg_terminate_backend(', pid, ')'), ', ')
FROM {self._locked_tables} AND granted
""")
        return f"Wait for the session that has locked the table, or end it: SELECT {found}" if found else "Try again."

    @property
    def _locked_tables(self) -> str:
        """In PostgreSQL: the locks on our tables that statements of ours wait for."""
        return f"""pg_locks JOIN pg_class ON pg_class.oid = relation JOIN pg_database ON pg_database.oid = database
WHERE relname IN ({self.names_in_sql}) AND datname = current_database()
  AND mode IN ('ShareLock', 'ShareRowExclusiveLock', 'ExclusiveLock', 'AccessExclusiveLock')"""

    @property
    def names_in_sql(self) -> str:
        """The names of the two tables as text in SQL, in which no table is to be recognised."""
        prefix = self.dialect.tables.prefix
        return f"concat('{prefix}', 'lock', 's'), concat('{prefix}', 'lock', '_waiters')"

    def who_alters(self) -> str:
        """What to do about a statement that waits to change a table, behind which all later ones wait; else empty.

        MySQL and MariaDB show a user without PROCESS its own sessions only.
        """
        sql = f"""
SELECT waiting.pid, left(coalesce(query, ''), 60), array_to_string(pg_blocking_pids(waiting.pid), ', ')
FROM (SELECT DISTINCT pid FROM {self._locked_tables} AND NOT granted) AS waiting
LEFT JOIN pg_stat_activity AS session ON session.pid = waiting.pid
"""
        if self.kind == "mysql":
            sql = f"""
SELECT id, left(info, 60), '' FROM information_schema.processlist
WHERE state = 'Waiting for table metadata lock' AND info LIKE concat('%{self.dialect.tables.prefix}', 'lock', '%')
  AND info REGEXP '^ *(ALTER|CREATE|DROP|RENAME|TRUNCATE|OPTIMIZE|LOCK) '
ORDER BY time DESC
"""
        told = []
        for session, statement, before in self.context.query(sql):
            behind = f"session {before}" if before else "a transaction"
            changes = printable(" ".join(statement.split()))
            end = f"SELECT pg_cancel_backend({session})" if self.kind == "postgresql" else f"KILL QUERY {session}"
            told.append(
                f"Session {session} waits to change a table ({changes}) until {behind} has ended, a guard() perhaps, "
                "and every statement of the lock waits behind it: renewals come too late. End it, and let the next one "
                "wait for less than a third of the shortest ttl (SET lock_timeout; on MySQL and MariaDB "
                f"lock_wait_timeout): {end}"
            )
        return " ".join(told)


# -- can it work at all?


def reachable(checkup: Checkup) -> Checked:
    """The database answers."""
    began = time.monotonic()
    checkup.value("SELECT 1")
    took, least = time.monotonic() - began, checkup.context.store.database.timing.single_try
    yield Finding(Level.OK, "reachable", f"{checkup.context.where} answers ({took * 1000:.1f} ms)")
    if took > least:
        yield Finding(
            Level.NOTE,
            "reachable",
            f"connecting took longer than the {least:g} s that a try (timeout=0) has: a process's first one fails",
            "Give what begins with a try, a cron job for example, timeout=1.",
        )


def tables(checkup: Checkup) -> Checked:
    """They are there, with all of their columns; a history is kept by few."""
    wanted = _columns(checkup.dialect.ddl, checkup.dialect.tables)
    for table, columns in wanted.items():
        try:
            checkup.context.query(f"SELECT 1 FROM {table} WHERE 1 = 0")
        except (StoreConflict, StoreUnanswered):
            raise
        except LockError as error:
            yield Finding(
                Level.NOTE if table == "lock_events" else Level.ERROR,
                "tables",
                f"there is no table {table}, or no right to read it: {error}",
                "manage.py migrate, metadata.create_all(engine), or what `dblock schema` prints.",
            )
            continue
        missing = [column for column in columns if not _has(checkup, table, column)]
        if missing:
            yield Finding(
                Level.ERROR,
                "tables",
                f"{table} lacks {', '.join(missing)}",
                "It is another application's, or of another version of dblock: run the migrations, or give "
                "dblock's tables other names.",
            )
        else:
            yield Finding(Level.OK, "tables", f"{table} has all of its columns")


def _columns(ddl: str, names: Tables) -> dict[str, list[str]]:
    """The columns of each table that the plain SQL makes."""
    found: dict[str, list[str]] = {}
    for statement in ddl.split(";\n"):
        head, _, body = statement.partition("(\n")
        if head.startswith("CREATE TABLE"):
            plain_name = head.split()[2].replace('"', "").replace("`", "").rpartition(".")[2]
            table = plain_name.removeprefix(names.prefix)
            found[table] = [line.split()[0] for line in body.splitlines() if line.startswith("    ")]
    return found


def _has(checkup: Checkup, table: str, column: str) -> bool:
    try:
        checkup.context.query(f"SELECT {table}.{column} FROM {table} WHERE 1 = 0")
    except LockError:
        return False
    return True


def rights(checkup: Checkup) -> Checked:
    """Rows may be inserted, updated and deleted: a statement for no row is refused like any other."""
    statements = {
        "INSERT": "INSERT INTO {0} SELECT * FROM {0} WHERE 1 = 0",
        "UPDATE": "UPDATE {0} SET {1} = {1} WHERE 1 = 0",
        "DELETE": "DELETE FROM {0} WHERE 1 = 0",
    }
    for table in ("locks", "lock_waiters", *(["lock_epoch"] if checkup.dialect.epoch else ())):
        refused: dict[str, LockError] = {}
        for verb, sql in statements.items():
            try:
                checkup.context.run(sql.format(table, "server" if table == "lock_epoch" else "lock_key"))
            except (StoreConflict, StoreUnanswered):
                raise
            except LockError as error:
                refused[verb] = error
        if refused:
            name = checkup.dialect.tables.name(table, "")
            yield Finding(
                Level.ERROR,
                "rights",
                f"no right to {', '.join(refused)} in {name}: {next(iter(refused.values()))}",
                f"GRANT SELECT, INSERT, UPDATE, DELETE ON {name} TO the user that connects here."
                if checkup.kind != "sqlite"
                else "Let this user write the file and its directory, and open it for writing.",
            )


def row_security(checkup: Checkup) -> Checked:
    """PostgreSQL shows this user all rows."""
    if checkup.kind != "postgresql":
        return
    for table in ("locks", "lock_waiters"):
        if checkup.value(f"SELECT CAST(row_security_active(CAST('{table}' AS regclass)) AS integer)"):
            name = checkup.dialect.tables.name(table, "")
            yield Finding(
                Level.WARNING,
                "row-security",
                f"row-level security holds for this user on {name}: a key whose row a policy hides can never be taken, "
                "and looks as if others were faster each time",
                f"ALTER TABLE {name} DISABLE ROW LEVEL SECURITY, or let its policy show and accept all rows.",
            )


def probe(checkup: Checkup) -> Checked:
    """A key is taken and given back, by the way that all locks go."""
    lock = checkup.context.lock(DOCTOR, ttl=10, timeout=2, slow_wait=None)
    began = time.monotonic()
    try:
        with lock:
            taken = time.monotonic()
    except LockTimeout as error:
        closed = checkup.context.quarantine()
        if closed is not None and closed.opens_in > 0:
            return  # `failover` says so
        yield Finding(
            Level.ERROR,
            "probe",
            f"a key that hardly anybody wants could not be taken: {error}",
            f"Another doctor is done in a moment. If it stays so: dblock release '{DOCTOR}'.",
        )
        return
    given = time.monotonic()
    yield Finding(
        Level.OK,
        "probe",
        f"a key was taken ({(taken - began) * 1000:.1f} ms) and given back ({(given - taken) * 1000:.1f} ms)",
    )


# -- does it promise what it should?


def collation(checkup: Checkup) -> Checked:
    """Keys that differ are different keys."""
    if checkup.kind != "mysql":
        return
    names = checkup.dialect.tables
    where = f"'{names.schema}'" if names.schema else "DATABASE()"
    sql = f"""
SELECT collation_name FROM information_schema.columns
WHERE table_schema = {where} AND table_name = CONCAT('{names.prefix}', 'lock', 's') AND column_name = 'lock_key'
"""
    found = str(checkup.value(sql) or "")
    if found.endswith("_bin") and ("nopad" in found or found.startswith("utf8mb4_0900")):
        yield Finding(Level.OK, "collation", f"keys are compared exactly ({found})")
    elif found:
        yield Finding(
            Level.ERROR,
            "collation",
            f"keys that differ in case, accents or blanks are one key ({found})",
            "ALTER the columns to utf8mb4_0900_bin (MySQL) or utf8mb4_nopad_bin (MariaDB), as migrate makes them.",
        )


def engine(checkup: Checkup) -> Checked:
    """MySQL keeps the tables as it keeps nothing that a crash may break."""
    if checkup.kind != "mysql":
        return
    names = checkup.dialect.tables
    where = f"'{names.schema}'" if names.schema else "DATABASE()"
    sql = f"""
SELECT table_name, engine FROM information_schema.tables WHERE table_schema = {where} AND engine <> 'InnoDB'
  AND table_name IN (CONCAT('{names.prefix}', 'lock', 's'), CONCAT('{names.prefix}', 'lock', '_waiters'))
"""
    for table, kind in checkup.context.query(sql):
        yield Finding(
            Level.ERROR,
            "engine",
            f"{table} is kept by {kind}: a crash may break it, and it knows neither transactions nor rows to lock",
            f"ALTER TABLE {table} ENGINE = InnoDB",
        )


def binary_log(checkup: Checkup) -> Checked:
    """MySQL writes down what a statement did, and not its text."""
    if checkup.kind != "mysql" or checkup.variable("log_bin") != "ON":
        return
    if checkup.variable("binlog_format") == "STATEMENT":
        yield Finding(
            Level.WARNING,
            "binary-log",
            "binlog_format = STATEMENT: many of the lock's statements are unsafe there, and the server's error log "
            "shows them, with owner tokens, which are secrets",
            "SET GLOBAL binlog_format = 'ROW' (or 'MIXED'), and so in the server's configuration; then connect anew.",
        )


def clock(checkup: Checkup) -> Checked:
    """This machine's against the database's: nothing depends on it but what people read."""
    before = time.time()
    theirs = int(checkup.value(f"SELECT {checkup.words.micros}")) / 1e6
    after = time.time()
    off = max(before - theirs, theirs - after, 0.0)
    if off > CLOCK:
        yield Finding(
            Level.WARNING,
            "clock",
            f"this machine's clock and the database's differ by {span(off)}",
            "Leases go by the database's alone; but times in logs do not fit together. Synchronise both (chrony, NTP).",
        )
    else:
        yield Finding(Level.OK, "clock", "this machine's clock agrees with the database's")


def durability(checkup: Checkup) -> Checked:
    """A take that was answered outlives a crash."""
    if checkup.kind == "postgresql":
        for name in ("fsync", "full_page_writes"):
            if checkup.variable(name) == "off":
                yield Finding(
                    Level.ERROR,
                    "durability",
                    f"{name} is off: a crash of the server may corrupt the table",
                    f"Set {name} = on.",
                )
    elif checkup.kind == "mysql":
        flush, binlog = checkup.variable("innodb_flush_log_at_trx_commit"), checkup.variable("sync_binlog")
        alone = checkup.variable("wsrep_on") != "ON"  # else the other nodes have it
        if flush in {"0", "2"}:
            crash = ("the server" if flush == "0" else "its machine") if alone else "all nodes at once"
            yield Finding(
                Level.ERROR if alone else Level.NOTE,
                "durability",
                f"innodb_flush_log_at_trx_commit = {flush}: a crash of {crash} may lose a take, and let two holders in",
                "SET GLOBAL innodb_flush_log_at_trx_commit = 1, and so in the server's configuration.",
            )
        if checkup.variable("log_bin") == "ON" and binlog != "1":
            yield Finding(
                Level.ERROR if alone else Level.NOTE,
                "durability",
                f"sync_binlog = {binlog}: a crash of its machine may lose a take, and let two holders in",
                "SET GLOBAL sync_binlog = 1, and so in the server's configuration.",
            )


def cluster(checkup: Checkup) -> Checked:
    """Names the setting as a row of the page about clusters does, as far as this user sees it."""
    seen, row = {"postgresql": _of_postgresql, "mysql": _of_mysql}.get(checkup.kind, _of_sqlite)(checkup)
    if row:
        yield Finding(Level.OK, "cluster", f'{seen}: the row "{row}" of docs/clusters.md')


def _of_postgresql(checkup: Checkup) -> tuple[str, str]:
    if checkup.value(_IN_RECOVERY):
        return "", ""
    standbys = int(checkup.value("SELECT count(*) FROM pg_stat_replication") or 0)
    names, commit = checkup.variable("synchronous_standby_names"), checkup.variable("synchronous_commit")
    seen = f"standbys: {standbys}"
    if names:
        seen += f", synchronous_standby_names = {names}, synchronous_commit = {commit}"
    if names and commit != "local":
        return seen, "PostgreSQL, synchronous standby"
    return seen, "PostgreSQL, asynchronous standby" if standbys else "a single server"


def _of_mysql(checkup: Checkup) -> tuple[str, str]:
    if checkup.variable("wsrep_on") == "ON":
        return f"nodes: {checkup.status('wsrep_cluster_size')}", "Galera"
    if checkup.variable("group_replication_group_name"):
        return "group replication", "MySQL group replication"
    replicas = int(
        checkup.value("SELECT count(*) FROM information_schema.processlist WHERE command LIKE 'Binlog Dump%'") or 0
    )
    waits = [checkup.variable(f"rpl_semi_sync_{name}_enabled") for name in ("master", "source")]
    seen = f"replicas: {replicas}" + (", semi-synchronous" if "ON" in waits else "")
    return seen, "MariaDB, MySQL: replica" if replicas else "a single server"


def _of_sqlite(_: Checkup) -> tuple[str, str]:
    return "a file", "SQLite"


_IN_RECOVERY: Final = "SELECT CAST(pg_is_in_recovery() AS integer)"


def _takes_writes(checkup: Checkup) -> bool:
    """Whether what writes is executed, wherever that is."""
    with contextlib.suppress(LockError):
        checkup.context.run("UPDATE lock_epoch SET server = server WHERE 1 = 0", within=1.0)
        return True
    return False


def replication(checkup: Checkup) -> Checked:
    """Says what a failover promises."""
    if checkup.kind == "postgresql":
        if checkup.value(_IN_RECOVERY):
            if _takes_writes(checkup):
                yield Finding(
                    Level.WARNING,
                    "cluster",
                    "a proxy sends reads to a standby, and writes to the primary: waiters wait longer, and what "
                    "verify(), locked() and the inspector show may be old: the row "
                    '"a proxy that sends reads to replicas" of docs/clusters.md',
                    "Let the lock's engine or alias connect to the primary directly.",
                )
                return
            yield Finding(
                Level.ERROR,
                "replication",
                "this server is a standby, and takes no writes",
                "Connect to the primary (target_session_attrs=read-write).",
            )
            return
        names, commit = checkup.variable("synchronous_standby_names"), checkup.variable("synchronous_commit")
        standbys = int(checkup.value("SELECT count(*) FROM pg_stat_replication") or 0)
        closed = span(checkup.context.store.database.quarantine())
        if names and commit != "local" and not standbys:
            yield Finding(
                Level.ERROR,
                "replication",
                f"no standby is connected, and every take waits for one (synchronous_standby_names = {names})",
                "Start it, or set synchronous_standby_names = '' until it is back.",
            )
        elif names and commit != "local":  # `off` is `on` for what must not be lost: the statements say so
            yield Finding(
                Level.OK,
                "replication",
                f"synchronous ({names}): a standby of these that is promoted has every tenure; keys are closed for "
                f"{closed} even so, as no server knows that it was one of these",
                "If nothing else can be promoted: FAILOVER_QUARANTINE = None.",
            )
        elif standbys:
            setting = "synchronous_commit = on" if names else "synchronous_standby_names"
            yield Finding(
                Level.NOTE,
                "replication",
                f"asynchronous, {standbys} standbys: one that is promoted may lack the last tenures, so "
                f"that keys are then closed for {closed} (FAILOVER_QUARANTINE)",
                f"That has to be longer than the longest ttl and grace in use; or set {setting}.",
            )
    elif checkup.kind == "mysql":
        if checkup.variable("read_only") == "ON" or checkup.variable("super_read_only") == "ON":
            yield Finding(Level.ERROR, "replication", "this server is read-only", "Connect to the primary.")
        if checkup.variable("wsrep_on") == "ON":
            yield Finding(
                Level.NOTE,
                "galera",
                "this is a Galera cluster: locks exclude across its nodes, guard() on one node only",
                "Let one node take all guarded writes.",
            )


def failover(checkup: Checkup) -> Checked:
    """Whether keys are closed after a failover."""
    found = checkup.context.quarantine()
    if found is not None and found.opens_in > 0:
        yield Finding(
            Level.WARNING,
            "failover",
            f"the server was {found}",
            f"Wait. If the old primary is dead and had sent everything: {checkup.context.command} quarantine --end.",
        )


def pooler(checkup: Checkup) -> Checked:
    """Whether the database notifies waiters."""
    subscribe = getattr(checkup.context.store, "subscribe", None)
    if checkup.kind == "sqlite" or subscribe is None:
        return
    channel = f"dblock_doctor_{os.getpid()}_{secrets.token_hex(4)}"
    subscription = subscribe(channel, Wakeups())
    hint = "Locks work, and a waiter on another machine polls up to once a second. Let the lock's engine or alias "
    if subscription is None:
        yield Finding(
            Level.WARNING,
            "listen",
            "the database cannot call those who wait: a pooler in transaction mode is "
            "in between, the driver cannot listen, or listening is switched off",
            hint + "connect directly, or in session mode.",
        )
        return
    heard = checkup.kind == "mysql"  # its listener has been tried
    try:
        if not heard:
            checkup.context.query(f"SELECT pg_notify('{channel}', 'x')")
        until = time.monotonic() + 2.0
        while not heard and time.monotonic() < until:
            heard = bool(subscription.listen(0.5))
    finally:
        subscription.close()
    if heard:
        yield Finding(Level.OK, "listen", "the database calls those who wait")
    else:
        yield Finding(Level.WARNING, "listen", "a NOTIFY did not arrive within 2 s", hint + "connect directly.")


def sqlite(checkup: Checkup) -> Checked:
    """A file of one machine."""
    if checkup.kind != "sqlite":
        return
    mode = str(checkup.value("PRAGMA journal_mode"))
    if mode == "memory":
        yield Finding(Level.WARNING, "sqlite", "the database is in memory: nobody but this process sees its locks")
        return
    yield Finding(
        Level.NOTE,
        "sqlite",
        "locks in SQLite exclude the processes of one machine",
        "For more than one machine use PostgreSQL, MySQL or MariaDB; never share the file over a network.",
    )
    if mode != "wal":
        yield Finding(
            Level.WARNING,
            "sqlite",
            f"the journal mode is {mode}: each commit waits for the disk, and readers block writers",
            "PRAGMA journal_mode=WAL, once.",
        )


def sessions(checkup: Checkup) -> Checked:
    """How many sessions the lock has there, by what they are for; where the server knows, and we may see it."""
    sql = {
        "postgresql": """
SELECT split_part(application_name, ' of ', 1), count(*) FROM pg_stat_activity
WHERE starts_with(application_name, 'dblock: ') AND datname = current_database() GROUP BY 1 ORDER BY 1
""",
        "mysql": """
SELECT substring_index(attr_value, ' of ', 1), count(*) FROM performance_schema.session_connect_attrs
WHERE attr_name = 'program_name' AND left(attr_value, 8) = 'dblock: ' GROUP BY 1 ORDER BY 1
""",
    }.get(checkup.kind)
    if sql is None:
        return
    try:
        found = checkup.context.query(sql)
    except (StoreConflict, StoreUnanswered):
        raise
    except LockError:  # no right to see it
        return
    if found:
        counts = ", ".join(f"{count} named {name!r}" for name, count in found)
        yield Finding(Level.OK, "sessions", f"sessions of all processes: {counts}")


# -- is it in good order?


def reaping(checkup: Checkup) -> Checked:
    """Rows that nobody uses any more go away."""
    old = checkup.words.before("86400")
    stale = int(
        checkup.value(f"SELECT count(*) FROM (SELECT 1 FROM locks WHERE expires_at < {old} LIMIT 10000) AS stale")
    )
    if stale >= 1000:
        many = "10000 or more" if stale >= 10000 else str(stale)
        yield Finding(
            Level.WARNING,
            "reaper",
            f"{many} rows of keys that nobody has used for a day: nothing reaps",
            "Schedule the task dblock.reap_expired, or `dblock reap` by cron.",
        )


def heap_only(checkup: Checkup) -> Checked:
    """PostgreSQL: renewals and takes leave the indexes alone."""
    if checkup.kind != "postgresql":
        return
    names = checkup.dialect.tables
    where = f"'{names.schema}'" if names.schema else "current_schema()"
    rows = checkup.context.query(f"""
SELECT n_tup_upd, n_tup_hot_upd, n_dead_tup FROM pg_stat_user_tables
WHERE relname = concat('{names.prefix}', 'lock', 's') AND schemaname = {where}
""")
    table = names.name("locks", "")
    for updates, hot, dead in rows:
        if int(updates) >= UPDATES and int(hot) < 0.8 * int(updates):
            share = 100 * int(hot) // int(updates)
            yield Finding(
                Level.WARNING,
                "heap-only",
                f"only {share} % of the updates of locks were heap-only",
                f"Drop indexes on columns that change; ALTER TABLE {table} SET (fillfactor = 50); VACUUM FULL {table}; "
                f"then count anew: SELECT pg_stat_reset_single_table_counters('{table}'::regclass)",
            )
        if int(dead) > DEAD:
            yield Finding(
                Level.WARNING,
                "heap-only",
                f"{table} has {dead} dead row versions",
                f"See that autovacuum runs: VACUUM {table}",
            )


_XMIN: Final = """
(SELECT CAST(extract(epoch FROM clock_timestamp() - xact_start) AS double precision), 0,
        concat('session ', pid, CASE WHEN datname <> current_database() THEN concat(' in database ', datname) END),
        concat('SELECT pg_terminate_backend(', pid, ')')
 FROM pg_stat_activity
 WHERE ((backend_xmin IS NOT NULL AND datname = current_database()) OR backend_xid IS NOT NULL)
   AND pid <> pg_backend_pid()
 ORDER BY xact_start LIMIT 1)
UNION ALL
(SELECT CAST(extract(epoch FROM clock_timestamp() - prepared) AS double precision), 0,
        concat('prepared transaction ', gid, ' in database ', database),
        concat('ROLLBACK PREPARED ', quote_literal(gid))
 FROM pg_prepared_xacts ORDER BY prepared LIMIT 1)
UNION ALL
(SELECT 0, age(xmin), concat('replication slot ', slot_name),
        concat('SELECT pg_drop_replication_slot(', quote_literal(slot_name), '), if no standby needs it')
 FROM pg_replication_slots WHERE xmin IS NOT NULL ORDER BY age(xmin) DESC LIMIT 1)
UNION ALL
(SELECT 0, age(backend_xmin), concat('standby ', application_name), 'hot_standby_feedback = off on that standby'
 FROM pg_stat_replication WHERE backend_xmin IS NOT NULL ORDER BY age(backend_xmin) DESC LIMIT 1)
"""
"""The oldest of each kind that keeps row versions: seconds, or transactions, since when; what it is; what ends it.

Of other databases only transactions that have written count: the snapshots that are taken here begin with the oldest.
"""
_TRX: Final = """
SELECT timestampdiff(SECOND, trx_started, convert_tz(utc_timestamp(), '+00:00', 'SYSTEM')), 0,
       CASE trx_mysql_thread_id WHEN 0 THEN 'prepared with XA' ELSE concat('session ', trx_mysql_thread_id) END,
       CASE trx_mysql_thread_id WHEN 0 THEN 'XA RECOVER names it for XA ROLLBACK'
                                ELSE concat('KILL ', trx_mysql_thread_id) END
FROM information_schema.innodb_trx ORDER BY trx_started LIMIT 1
"""


def snapshots(checkup: Checkup) -> Checked:
    """No old transaction keeps dead versions of hot rows alive: of this database, of others, prepared, of a standby."""
    sql = {"postgresql": _XMIN, "mysql": _TRX}.get(checkup.kind)
    if sql is None:
        return
    try:
        oldest = checkup.context.query(sql)
    except (StoreConflict, StoreUnanswered):
        raise
    except LockError as error:  # MySQL asks for the right PROCESS
        yield Finding(Level.NOTE, "snapshot", f"the transactions of others cannot be seen: {error}")
        return
    for age, transactions, what, end in oldest:
        old = float(age or 0) > OLD_SNAPSHOT
        if old or int(transactions) > OLD_XMIN:
            since = f"a transaction has been open for {span(float(age))}"
            if not old:
                since = f"old row versions have been kept for {transactions} transactions"
            yield Finding(
                Level.WARNING,
                "snapshot",
                f"{since} ({printable(what)}): every hot row gets slower meanwhile, those of busy locks first",
                f"See what it does, or end it: {printable(end)}",
            )


# -- what is going on?


def holders(checkup: Checkup) -> Checked:
    """Keys that holders have died with, and keys that are always wanted."""
    ended, slow = [], []
    for row in checkup.context.survey():
        if row.pinned:
            yield Finding(
                Level.WARNING,
                "pinned",
                f"nobody holds {printable(row.info.key)!r}, and nobody can take it: a transaction guards it, or has "
                f"locked its row; waiters: {row.waiters}; last held by {row.info.identity}",
                f"{'; '.join(pins_of(row.pinned))}. What it has written is rolled back. The server can bound such "
                "transactions, see docs/fences.md.",
            )
        elif row.state == "expired":
            ended.append(repr(printable(row.info.key)))
        elif row.waiters:
            first = checkup.context.do(administration.waiters(checkup.context.store, row.info.key, 1))
            longest = max((each.age for each in first), default=0.0)
            if longest > max(row.info.ttl, 10.0):
                slow.append((longest, row))
    if ended:
        some = ", ".join(ended[:3]) + (", ..." if ended[3:] else "")
        yield Finding(
            Level.NOTE,
            "holders",
            f"not given back, and over: {some} ({len(ended)} in all)",
            "Their holders died, or the work took longer than renew=False or max_hold allowed. The keys are free.",
        )
    for age, row in sorted(slow, key=lambda each: -each[0])[:5]:
        label = f' "{row.info.label}"' if row.info.label else ""
        processes = "1 process" if row.waiters == 1 else f"{row.waiters} processes"
        yield Finding(
            Level.WARNING,
            "contended",
            f"{printable(row.info.key)!r} has waiters in {processes}, one of them for {span(age)}; "
            f"held by {row.info.identity}{printable(label)}",
            f"See what it does: dblock show {shlex.quote(printable(row.info.key))}",
        )


def waiters(checkup: Checkup) -> Checked:
    """Places in queues that nobody keeps any more."""
    dead = int(
        checkup.value(
            "SELECT count(*) FROM lock_waiters AS waiter JOIN locks ON locks.lock_key = waiter.lock_key"
            f" WHERE waiter.expires_at < {checkup.words.now} AND waiter.ticket > locks.served_ticket"
        )
    )
    if dead:
        yield Finding(
            Level.NOTE,
            "waiters",
            f"{dead} waiters died in a queue",
            "They are passed over; reaping deletes their rows.",
        )


Check = Callable[[Checkup], Checked]
_FIRST: Final[tuple[Check, ...]] = (reachable, tables, rights, probe)
"""If one of them cannot look, no lock can be had."""
CHECKS: Final[tuple[Check, ...]] = (
    reachable,
    tables,
    cluster,
    replication,
    rights,
    row_security,
    probe,
    failover,
    collation,
    engine,
    binary_log,
    clock,
    durability,
    pooler,
    sessions,
    sqlite,
    reaping,
    heap_only,
    snapshots,
    holders,
    waiters,
)
