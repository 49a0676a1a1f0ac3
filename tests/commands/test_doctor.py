"""`dblock doctor`: finds what is wrong, and says how to mend it."""

from __future__ import annotations

import gc
import json
import re
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Engine, create_engine, text
from sqlalchemy.engine import URL, make_url
from sqlalchemy.exc import DBAPIError
from sqlalchemy.pool import NullPool

from dblock.core.errors import LockStoreError
from dblock.core.statements import DIALECTS
from dblock.operating.commands import checkup
from dblock.operating.commands.checkup import Finding, Level
from dblock.operating.commands.context import Context
from sqlalchemy_dblock import db_lock
from sqlalchemy_dblock.store import store_for
from tests.commands.conftest import Shell
from tests.conftest import DATABASES, INNODB, POOLER, SERVERS, observer, ready, run, timed, url
from tests.support.clusters import missing
from tests.support.hung import hung
from tests.support.lab import apart, until
from tests.support.pages import block
from tests.support.servers import HINTS, PgBouncer, PostgreSQL, Standby, running

POOLED = {"pooler"} if POOLER else frozenset()
"""What the doctor rightly says where everything goes through a pooler."""


def findings(database: str | URL, *only: str, **options: Any) -> dict[str, list[Finding]]:
    """By the check's name, all of them or some; over an engine of its own."""
    engine = create_engine(url(database) if isinstance(database, str) else database, **options)
    context = Context(engine, store_for(engine), lambda: None, (), "here")
    checks = [check for check in checkup.CHECKS if not only or check.look.__name__ in only]
    found: dict[str, list[Finding]] = {}
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(checkup, "CHECKS", checks)
            for each in checkup.checkup(context):
                found.setdefault(each.check, []).append(each)
    finally:
        engine.dispose()
        del context
        gc.collect()
    return found


def bad(found: dict[str, list[Finding]]) -> list[Finding]:
    grave = {Level.WARNING, Level.ERROR}
    return [each for some in found.values() for each in some if each.level in grave and each.check not in POOLED]


def test_a_healthy_database(shell: Shell) -> None:
    """As the suite's are: nothing to mend, and it says what it has looked at."""
    done = shell("doctor", "--json")
    found = json.loads(done.stdout)
    others = ("dblock.", *POOLED)  # of the process and its settings
    ours = [each for each in found if each["level"] in {"warning", "error"} and not each["check"].startswith(others)]
    assert ours == []
    assert done.returncode == max((1 for each in found if each["level"] == "warning"), default=0)
    looked = {each["check"] for each in found}
    assert {"reachable", "tables", "probe", "clock"} <= looked
    assert ("pooler" in looked) == (shell.database != "sqlite")
    assert ("collation" in looked) == (shell.database in INNODB)
    told = shell("doctor").stdout
    assert "ok       probe: a key was acquired" in told


def test_the_page_has_each_check() -> None:
    """By its name."""
    page = (Path(__file__).parents[2] / "docs/operating.md").read_text()
    named = re.findall("`(.*?)`", " ".join(re.findall("^[|] (`.*?) [|]", page, re.MULTILINE)))
    assert {check.look.__name__ for check in checkup.CHECKS} <= {*named}


@pytest.mark.parametrize("change", ["TO hidden", "COLUMN {} TO hidden"])
@pytest.mark.parametrize(
    ("table", "column"), [("locks", "revocation"), ("lock_waiters", "label"), ("lock_epoch", "opens_at")]
)
def test_tables_of_another_shape(database: str, table: str, column: str, change: str) -> None:
    """One is missing, or a column is, and nothing else is looked at; SQLite has no use for `lock_epoch`."""
    if (database, table) == ("sqlite", "lock_epoch"):
        return
    run(database, f"ALTER TABLE {table} RENAME {change.format(column)}")
    try:
        found = findings(database)
    finally:
        renamed = f"hidden RENAME TO {table}" if change == "TO hidden" else f"{table} RENAME COLUMN hidden TO {column}"
        run(database, f"ALTER TABLE {renamed}")
    [finding] = found["tables"]
    assert (finding.level, list(found)) == (Level.ERROR, ["reachable", "tables"])
    assert (table if change == "TO hidden" else column) in finding.text
    assert "schema prints them" in finding.hint


@pytest.mark.direct
@pytest.mark.parametrize("database", SERVERS)
def test_missing_rights(lowly: Callable[..., URL], database: str) -> None:
    """Each is named, and what the hint says mends it; nobody needs more than these, and the doctor neither."""
    user = lowly(database, "SELECT", "INSERT")
    engine = create_engine(user)
    with pytest.raises(LockStoreError, match=r"its user needs SELECT, INSERT, UPDATE and DELETE .*\(GRANT\)"):
        db_lock(engine, "k").acquire()
    engine.dispose()
    [found] = findings(user)["rights"]
    assert (found.level, "locks" in found.text) == (Level.ERROR, True)
    name = "lowly" if database == "postgresql" else "lowly@'%'"
    grant, _, tables = found.hint.partition(" TO ")[0].partition(" ON ")
    for table in tables.split(", "):
        run(database, f"{grant} ON {table} TO {name}")
    assert bad(findings(user)) == []


def test_a_file_that_may_not_be_written(sqlite: Path) -> None:
    """It is said that it cannot be."""
    [found] = findings(make_url(f"sqlite:///file:{sqlite}?mode=ro&uri=true"))["rights"]
    assert (found.level, "readonly" in found.text) == (Level.ERROR, True)


@pytest.mark.direct
def test_a_stranger_who_has_locked_the_table(database: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is said before anybody asks why locks time out, with the page that has the SQL to find and end it."""
    timed(monkeypatch, retry_budget=4.0 if database == "mysql" else 0.4)  # which waits for a second at least
    lock = {"sqlite": "BEGIN EXCLUSIVE", "postgresql": "LOCK TABLE locks IN SHARE MODE"}.get(
        database, "LOCK TABLES locks READ"
    )
    engine = create_engine(url(database), poolclass=NullPool)
    with engine.connect() as stranger:
        stranger.execute(text(lock))
        found = findings(database)
        assert [each.level for each in bad(found)] == [Level.ERROR]
        [locked] = found["locked"]
        assert "Databases, Changing the tables" in locked.hint
        assert "probe" not in found
        if database == "postgresql":
            [(process,)] = stranger.execute(text("SELECT pg_backend_pid()"))
            assert [each[:2] for each in run(database, block("docs/databases.md", "who-locks-postgresql"))] == [
                (process, True)
            ]
            run(database, f"SELECT pg_terminate_backend({process})")
            assert bad(findings(database)) == []
        stranger.invalidate()
    assert bad(findings(database)) == []


def test_a_probe_that_gets_no_lock(sqlite: Path) -> None:
    """Somebody keeps the doctor's own key."""
    with db_lock(observer("sqlite"), "dblock doctor", label="another doctor"):
        [found] = apart(lambda: findings("sqlite", "probe"))["probe"]
    assert found.level is Level.ERROR
    assert "another doctor" in found.text
    assert "timeout=" not in found.text, "which is for a program"


@pytest.mark.parametrize("database", DATABASES, indirect=True)
def test_clocks_that_differ(monkeypatch: pytest.MonkeyPatch, database: str) -> None:
    """By so much."""
    clock = time.time
    monkeypatch.setattr(time, "time", lambda: clock() + 3900)
    [found] = findings(database, "clock")["clock"]
    assert found.level is Level.WARNING
    assert "1 h" in found.text


def test_a_journal_that_blocks(engine: Engine) -> None:
    """SQLite's; and with the hint's statement it is well."""
    [journal] = findings(engine.url)["journal_mode"]
    assert journal.level is Level.WARNING
    with engine.connect() as connection:
        connection.execute(text(journal.hint.partition(",")[0]))
    assert [each.level for each in findings(engine.url)["journal_mode"]] == [Level.OK]


@pytest.mark.direct
def test_replication_of_postgresql(postgresql: PostgreSQL) -> None:
    """Synchronous with a standby, and without; synchronous commits switched off; and a standby itself."""
    away = {"connect_args": {"options": "-c synchronous_commit=local"}}
    off = {"connect_args": {"options": "-c synchronous_commit=off"}}
    try:
        with running(lambda: Standby(postgresql)) as standby:
            assert until(lambda: run("postgresql", "SELECT 1 FROM pg_stat_replication WHERE state = 'streaming'"), 20)
            assert "replication" not in findings("postgresql"), "an asynchronous standby is no fault"
            postgresql_setting("synchronous_standby_names", "*")
            assert until(lambda: "replication" in findings("postgresql"), 10), "new sessions have it a moment later"
            for options in ({}, off):
                [found] = findings("postgresql", **options)["replication"]
                assert (found.level, "of which 1 are connected" in found.text) == (Level.OK, True)
            assert "replication" not in findings("postgresql", **away)
            there = findings(make_url(url("postgresql")).set(port=standby.port))
            [found] = there["replication"]
            assert (found.level, found.text[:26]) == (Level.ERROR, "this server takes no writes"[:26])
            assert "target_session_attrs" in found.hint
            assert "probe" not in there, "nothing can be had from it"
        assert until(lambda: not run("postgresql", "SELECT 1 FROM pg_stat_replication"), 20)
        found, *more = bad(findings("postgresql"))
        assert (found.level, found.check, more) == (Level.ERROR, "replication", [])
        assert "of which 0 are connected" in found.text
    finally:
        postgresql_setting("synchronous_standby_names", None)
    assert bad(findings("postgresql")) == []


def postgresql_setting(name: str, value: str | None) -> None:
    """Change it for the whole server; None: as it was."""
    with observer("postgresql").execution_options(isolation_level="AUTOCOMMIT").connect() as connection:
        before = connection.scalar(text(f"SHOW {name}"))
        connection.execute(text(f"ALTER SYSTEM SET {name} = '{value}'" if value else f"ALTER SYSTEM RESET {name}"))
        connection.execute(text("SELECT pg_reload_conf()"))
        assert until(lambda: connection.scalar(text(f"SHOW {name}")) != before, 10)


@pytest.mark.direct
@pytest.mark.parametrize("database", INNODB)
def test_a_server_that_takes_no_writes(lowly: Callable[..., URL], database: str) -> None:
    """A replica, as a rule."""
    user = lowly(database, "SELECT", "INSERT", "UPDATE", "DELETE")
    run(database, "SET GLOBAL read_only = 1")
    try:
        [found] = bad(findings(user))
        assert (found.level, found.check) == (Level.ERROR, "replication")
        assert "takes no writes" in found.text
    finally:
        run(database, "SET GLOBAL read_only = 0")
    assert bad(findings(user)) == []


@pytest.mark.parametrize("database", INNODB, indirect=True)
def test_a_collation_that_folds_keys(database: str) -> None:
    """Two keys would be one."""
    [(before,)] = run(
        database,
        "SELECT collation_name FROM information_schema.columns WHERE table_schema = DATABASE()"
        " AND table_name = 'locks' AND column_name = 'lock_key'",
    )
    change = "ALTER TABLE locks MODIFY lock_key varchar(255) CHARACTER SET utf8mb4 COLLATE {} NOT NULL"
    run(database, change.format("utf8mb4_general_ci"))
    try:
        [found] = findings(database)["collation"]
        assert found.level is Level.ERROR
        assert "utf8mb4_general_ci" in found.text
    finally:
        run(database, change.format(before))


@pytest.mark.parametrize("server", ["postgresql", "mariadb"])
def test_listening_that_does_not_arrive(request: pytest.FixtureRequest, server: str) -> None:
    """Switched off here; behind a pooler it is the same."""
    ready(request, server)
    [found] = findings(server, execution_options={"dblock_listen": False})["pooler"]
    assert found.level is Level.WARNING


@pytest.mark.direct
@pytest.mark.skipif(bool(missing("pgbouncer")), reason=HINTS["pgbouncer"])
def test_a_pooler(postgresql: PostgreSQL) -> None:
    """In transaction mode: all is well but that nobody is notified."""
    with running(lambda: PgBouncer(postgresql)) as pooler:
        there = make_url(url("postgresql")).set(port=pooler.port)
        [found] = bad(findings(there, connect_args={"prepare_threshold": None}))
        assert (found.check, found.level) == ("pooler", Level.WARNING)


def test_a_holder_that_has_died(database: str) -> None:
    """Its key is named, which is free; one that is held is not."""
    assert apart(db_lock(observer(database), "dead", ttl=0.05, renew=False).acquire)
    with db_lock(observer(database), "alive"):
        assert until(lambda: "old_holders" in findings(database, "old_holders"), 5)
        [found] = findings(database, "old_holders")["old_holders"]
    assert (found.level, "over: 'dead' (1 in all)" in found.text) == (Level.NOTE, True)


@pytest.mark.direct
@pytest.mark.parametrize("database", SERVERS, indirect=True)
def test_ddl_behind_a_guard(database: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """While an ALTER waits for a guarded transaction, and all else for the ALTER, the SQL of the page ends it."""
    timed(monkeypatch, retry_budget=4.0 if database == "mysql" else 0.4)  # which waits for a second at least
    if database == "postgresql":
        who, end = block("docs/databases.md", "who-locks-postgresql"), "SELECT pg_cancel_backend({})"
    else:
        who, end = block("docs/databases.md", "who-locks-mysql"), "KILL QUERY {}"
    with hung(database, "k"), ThreadPoolExecutor(1) as other:
        altering = other.submit(run, database, "ALTER TABLE locks ADD COLUMN another integer")
        assert until(lambda: run(database, who), 10)
        assert "locked" in findings(database)
        [(session, _, statement, *behind)] = run(database, who)
        assert all(behind), "on PostgreSQL whom it waits for"
        assert "ADD COLUMN another" in str(statement)
        run(database, end.format(session))
        with pytest.raises(DBAPIError):
            altering.result(30)
        assert "locked" not in findings(database)


def test_what_cannot_be_looked_at_is_told(database: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """And keeps no other check from looking."""
    monkeypatch.setattr(type(DIALECTS[database].words), "micros", "nothing FROM nowhere")
    found = findings(database)
    assert "probe" in found
    assert ("pooler" in found) == (database != "sqlite"), "which comes later"
    [told] = found["clock"]
    assert (told.level, told.text[:15]) == (Level.WARNING, "could not look:")


@pytest.mark.direct
@pytest.mark.parametrize("database", SERVERS, indirect=True)
def test_how_many_sessions_there_are(database: str) -> None:
    """By what they are for; where the server keeps no names of them, nothing is said."""
    shown = database == "postgresql" or run(database, "SELECT @@performance_schema") == [(1,)]
    found = findings(database, "sessions")
    assert list(found) == ["sessions"] * shown
    for each in found.values():
        assert each[0].level is Level.OK
        assert re.search(r"[1-9]\d* named 'dblock: locks'", each[0].text)
