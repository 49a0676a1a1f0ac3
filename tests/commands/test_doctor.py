"""`dblock doctor`: finds what is wrong, and says how to mend it."""

from __future__ import annotations

import gc
import json
import re
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from celery import Celery
from sqlalchemy import create_engine, text
from sqlalchemy.engine import URL, make_url
from sqlalchemy.exc import DBAPIError
from sqlalchemy.pool import NullPool

from dblock.celery import locked_task
from dblock.core.errors import LockStoreError
from dblock.operating.commands import checkup
from dblock.operating.commands.checkup import Checkup, Finding, Level
from dblock.operating.commands.context import Context
from dblock.operating.commands.doctor import tasks
from sqlalchemy_dblock import db_lock, metadata, reap
from sqlalchemy_dblock.store import store_for
from tests.commands.conftest import Shell
from tests.conftest import DATABASES, INNODB, POOLER, SERVERS, observer, ready, run, timed, url
from tests.servers.test_pooler import missing
from tests.support.hung import hung
from tests.support.lab import until
from tests.support.servers import HINTS, PgBouncer, PostgreSQL, Standby, running

POOLED = {"listen"} if POOLER else frozenset()
"""What the doctor rightly says where everything goes through a pooler."""
COLUMNS = "lock_key, fence, count, ttl, acquired_at, expires_at, label, host, pid, thread, program, celery_task_id"


def findings(database: str | URL, *only: Any, **options: Any) -> dict[str, list[Finding]]:
    """By the check's name, all of them or some; over an engine of its own."""
    engine = create_engine(url(database) if isinstance(database, str) else database, **options)
    context = Context(store_for(engine), lambda key, **given: db_lock(engine, key, **given), lambda: None, (), "here")
    found: dict[str, list[Finding]] = {}
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(checkup, "CHECKS", only or checkup.CHECKS)
            for each in Checkup(context).findings():
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
    others = ("celery", "dblock.", *POOLED)  # of the process and its settings
    ours = [each for each in found if each["level"] in {"warning", "error"} and not each["check"].startswith(others)]
    assert ours == []
    assert done.returncode == max((1 for each in found if each["level"] == "warning"), default=0)
    looked = {each["check"] for each in found}
    assert {"reachable", "tables", "probe", "clock"} <= looked
    assert ("listen" in looked) == (shell.database != "sqlite")
    assert ("collation" in looked) == (shell.database in INNODB)
    told = shell("doctor").stdout
    assert "ok       probe: a key was taken" in told


def test_no_table_for_a_history(sqlite: Path) -> None:
    """That is named, and nothing that keeps from locking."""
    run("sqlite", "ALTER TABLE lock_events RENAME TO hidden")
    try:
        found = findings("sqlite")
        [_, _, events, _] = found["tables"]
        assert events.level is Level.NOTE
        assert "has no table `lock_events`:" in events.text
        assert "probe" in found
    finally:
        run("sqlite", "ALTER TABLE hidden RENAME TO lock_events")


def test_tables_of_another_shape(database: str) -> None:
    """One is missing; a column is."""
    run(database, "ALTER TABLE lock_waiters RENAME TO hidden")
    try:
        _, waiters, *_ = findings(database)["tables"]
        assert waiters.level is Level.ERROR
        assert "lock_waiters" in waiters.text
        assert "migrate" in waiters.hint
    finally:
        run(database, "ALTER TABLE hidden RENAME TO lock_waiters")
    run(database, "ALTER TABLE lock_events RENAME TO hidden")
    try:
        events = findings(database)["tables"][2]
        assert (events.level, "lock_events" in events.text) == (Level.NOTE, True), "no history is no fault"
    finally:
        run(database, "ALTER TABLE hidden RENAME TO lock_events")
    run(database, "ALTER TABLE locks RENAME COLUMN revocation TO other")
    try:
        found = findings(database)
        assert "locks lacks revocation" in found["tables"][0].text
        assert "probe" not in found, "and nothing else is looked at"
    finally:
        run(database, "ALTER TABLE locks RENAME COLUMN other TO revocation")
    assert bad(findings(database)) == []


@pytest.mark.direct
@pytest.mark.parametrize("database", SERVERS)
def test_missing_rights(lowly: Callable[..., URL], database: str) -> None:
    """Each is named, and what the hint says mends it; nobody needs more than these, and the doctor neither."""
    user = lowly(database, "SELECT", "INSERT")
    engine = create_engine(user)
    with pytest.raises(LockStoreError, match=r"its user needs SELECT, INSERT, UPDATE and DELETE .*\(GRANT\)"):
        db_lock(engine, "k").acquire()
    engine.dispose()
    found = findings(user)["rights"]
    assert [each.text.partition(":")[0] for each in found] == [
        "no right to UPDATE, DELETE in locks",
        "no right to UPDATE, DELETE in lock_waiters",
        "no right to UPDATE, DELETE in lock_epoch",
    ]
    for each in found:
        name = "lowly" if database == "postgresql" else "lowly@'%'"
        run(database, each.hint.replace("the user that connects here.", name))
    assert bad(findings(user)) == []


def test_a_file_that_may_not_be_written(sqlite: Path) -> None:
    """Nothing is inserted, updated or deleted there."""
    found = findings(make_url(f"sqlite:///file:{sqlite}?mode=ro&uri=true"))["rights"]
    assert found[0].text.startswith("no right to INSERT, UPDATE, DELETE in locks:")
    assert "readonly" in found[0].text


@pytest.mark.direct
def test_a_stranger_who_has_locked_the_table(database: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is said before anybody asks why locks time out, and on PostgreSQL who it is."""
    timed(monkeypatch, retry_budget=4.0 if database == "mysql" else 1.0)  # which waits for a second at least
    lock = {"sqlite": "BEGIN EXCLUSIVE", "postgresql": "LOCK TABLE locks IN SHARE MODE"}.get(
        database, "LOCK TABLES locks READ"
    )
    engine = create_engine(url(database), poolclass=NullPool)
    with engine.connect() as stranger:
        stranger.execute(text(lock))
        found = findings(database)
        assert [each.level for each in bad(found)] == [Level.ERROR]
        [locked] = found["locked"]
        assert "probe" not in found
        if database == "postgresql":
            [(process,)] = stranger.execute(text("SELECT pg_backend_pid()"))
            assert f"pg_terminate_backend({process})" in locked.hint
            run(database, locked.hint.partition(": ")[2])
            assert bad(findings(database)) == []
        stranger.invalidate()
    assert bad(findings(database)) == []


def test_a_probe_that_gets_no_lock(sqlite: Path) -> None:
    """Somebody keeps the doctor's own key."""
    with db_lock(observer("sqlite"), "dblock doctor", label="another doctor"):
        found: list[Finding] = []
        asking = threading.Thread(target=lambda: found.extend(findings("sqlite", checkup.probe)["probe"]))
        asking.start()
        asking.join()
    assert found[0].level is Level.ERROR
    assert "another doctor" in found[0].text


@pytest.mark.parametrize("database", DATABASES)
def test_clocks_that_differ(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, database: str) -> None:
    """By so much."""
    ready(request, database)
    clock = time.time
    monkeypatch.setattr(time, "time", lambda: clock() + 3900)
    [found] = findings(database, checkup.clock)["clock"]
    assert found.level is Level.WARNING
    assert "1 h" in found.text


def test_a_journal_that_blocks(tmp_path: Path) -> None:
    """SQLite's; and with the hint's statement it is well."""
    file = make_url(f"sqlite:///{tmp_path}/locks.sqlite3")
    engine = create_engine(file)
    metadata.create_all(engine)
    note, journal = findings(file)["sqlite"]
    assert (note.level, journal.level) == (Level.NOTE, Level.WARNING)
    with engine.connect() as connection:
        connection.execute(text(journal.hint.partition(",")[0]))
    engine.dispose()
    assert [each.level for each in findings(file)["sqlite"]] == [Level.NOTE]
    [memory] = findings_in_memory()["sqlite"]
    assert "in memory" in memory.text


def findings_in_memory() -> dict[str, list[Finding]]:
    engine = create_engine("sqlite://")
    metadata.create_all(engine)
    context = Context(store_for(engine), lambda key, **given: db_lock(engine, key, **given), lambda: None, (), "here")
    found = {each.check: [each] for each in Checkup(context).findings()}
    engine.dispose()
    return found


@pytest.mark.direct
def test_replication_of_postgresql(request: pytest.FixtureRequest, postgresql: PostgreSQL) -> None:
    """None; asynchronous; synchronous, even if the session's commits are not; and a standby itself."""
    ready(request, "postgresql")
    told = findings("postgresql")
    assert "replication" not in told
    assert rows(told) == ["a single server"]
    away = {"connect_args": {"options": "-c synchronous_commit=local"}}
    off = {"connect_args": {"options": "-c synchronous_commit=off"}}
    try:
        with running(lambda: Standby(postgresql)) as standby:
            assert until(lambda: run("postgresql", "SELECT 1 FROM pg_stat_replication WHERE state = 'streaming'"), 20)
            told = findings("postgresql")
            assert rows(told) == ["PostgreSQL, asynchronous standby"]
            [found] = told["replication"]
            assert found.level is Level.NOTE
            assert found.text.startswith("asynchronous, 1 standbys")
            assert "synchronous_standby_names" in found.hint
            postgresql_setting("synchronous_standby_names", "*")
            for options in ({}, off):
                told = findings("postgresql", **options)
                assert rows(told) == ["PostgreSQL, synchronous standby"]
                [found] = told["replication"]
                assert (found.level, found.text[:11]) == (Level.OK, "synchronous")
            [found] = findings("postgresql", **away)["replication"]
            assert (found.level, found.text[:12]) == (Level.NOTE, "asynchronous")
            assert "synchronous_commit = on" in found.hint
            there = findings(make_url(url("postgresql")).set(port=standby.port))
            assert there["replication"][0].level is Level.ERROR
            assert "probe" not in there, "nothing can be had from it"
        assert until(lambda: not run("postgresql", "SELECT 1 FROM pg_stat_replication"), 20)
        found, *more = bad(findings("postgresql"))
        assert (found.level, found.check, more) == (Level.ERROR, "replication", [])
        assert found.text.startswith("no standby is connected")
    finally:
        postgresql_setting("synchronous_standby_names", None)
    assert bad(findings("postgresql")) == []


def rows(found: dict[str, list[Finding]]) -> list[str]:
    """The rows of the page about clusters that are said to apply; the page has each."""
    named = [re.findall('the row "(.*)" of docs/clusters.md', each.text)[0] for each in found["cluster"]]
    page = (Path(__file__).parents[2] / "docs/clusters.md").read_text()
    assert all(f"\n| {row} |" in page for row in named), named
    return named


def postgresql_setting(name: str, value: str | None) -> None:
    """Change it for the whole server; None: as it was."""
    with observer("postgresql").execution_options(isolation_level="AUTOCOMMIT").connect() as connection:
        before = connection.scalar(text(f"SHOW {name}"))
        connection.execute(text(f"ALTER SYSTEM SET {name} = '{value}'" if value else f"ALTER SYSTEM RESET {name}"))
        connection.execute(text("SELECT pg_reload_conf()"))
        assert until(lambda: connection.scalar(text(f"SHOW {name}")) != before, 10)


@pytest.mark.direct
@pytest.mark.parametrize("name", ["fsync", "full_page_writes"])
def test_a_server_that_a_crash_may_corrupt(request: pytest.FixtureRequest, name: str) -> None:
    """PostgreSQL with its safeguards off; synchronous_commit is none of them."""
    ready(request, "postgresql")
    postgresql_setting(name, "off")
    try:
        [found] = findings("postgresql")["durability"]
        assert found.level is Level.ERROR
        assert found.text.startswith(f"{name} is off")
    finally:
        postgresql_setting(name, None)
    run("postgresql", "ALTER ROLE dblock SET synchronous_commit = off")
    try:
        assert bad(findings("postgresql")) == []
    finally:
        run("postgresql", "ALTER ROLE dblock RESET synchronous_commit")


@pytest.mark.parametrize("database", INNODB)
def test_a_server_that_takes_no_writes(request: pytest.FixtureRequest, database: str) -> None:
    """A replica, as a rule."""
    ready(request, database)
    run(database, "SET GLOBAL read_only = 1")
    try:
        [found] = findings(database)["replication"]
        assert (found.level, found.text) == (Level.ERROR, "this server is read-only")
    finally:
        run(database, "SET GLOBAL super_read_only = 0" if database == "mysql" else "SELECT 1")
        run(database, "SET GLOBAL read_only = 0")
    assert bad(findings(database)) == []


def test_settings_of_other_servers(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Galera, and a binary log that may not have what the server has: nothing that must be mended."""
    ready(request, "mariadb")
    told = {"wsrep_on": "ON", "log_bin": "ON", "sync_binlog": "0", "innodb_flush_log_at_trx_commit": "2"}
    asked = Checkup.variable
    monkeypatch.setattr(Checkup, "variable", lambda self, name: told.get(name) or asked(self, name))
    found = findings("mariadb")
    assert found["galera"][0].level is Level.NOTE
    assert rows(found) == ["Galera"]
    assert "all nodes at once" in found["durability"][0].text
    assert found["durability"][1].text.startswith("sync_binlog = 0")
    assert bad(found) == []


@pytest.mark.direct
def test_updates_that_are_not_heap_only(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """An index on what changes; with what the hint says done, all is well."""
    ready(request, "postgresql")
    monkeypatch.setattr("dblock.operating.commands.checkup.UPDATES", 100)
    monkeypatch.setattr("dblock.operating.commands.checkup.DEAD", 50)
    with observer("postgresql").execution_options(isolation_level="AUTOCOMMIT").connect() as stranger:

        def do(*statements: str) -> None:
            for statement in statements:
                stranger.execute(text(statement))

        def found() -> list[Finding]:
            do("SELECT pg_stat_force_next_flush()")
            return findings("postgresql", checkup.heap_only).get("heap-only", [])

        do("ALTER TABLE locks SET (autovacuum_enabled = off)", "VACUUM FULL locks")
        do(
            "CREATE INDEX hindering ON locks (expires_at)",
            f"INSERT INTO locks ({COLUMNS}) SELECT n, 1, 0, 30, now(), now(), '', '', 1, '', '', ''"
            " FROM generate_series(1, 5) AS n",
        )
        try:
            update = "UPDATE locks SET expires_at = clock_timestamp()"

            def counted() -> bool:  # again where another session's counts came late
                do("SELECT pg_stat_reset_single_table_counters('locks'::regclass)", *[update] * 25)
                return until(lambda: len(found()) == 2, 10) and "only 0 %" in found()[0].text

            assert until(counted, 30)
            share, dead = found()
            assert "row versions" in dead.text
            do("DROP INDEX hindering", *share.hint.partition("; ")[2].replace("then count anew: ", "").split("; "))
            do(*[update] * 25, dead.hint.partition(": ")[2])
            assert until(lambda: not found(), 10)
        finally:
            do("DROP INDEX IF EXISTS hindering", "ALTER TABLE locks RESET (autovacuum_enabled)", "DELETE FROM locks")


@pytest.mark.parametrize("database", INNODB)
def test_a_collation_that_folds_keys(request: pytest.FixtureRequest, database: str) -> None:
    """Two keys would be one."""
    ready(request, database)
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


@pytest.mark.parametrize("database", INNODB)
def test_an_engine_without_transactions(request: pytest.FixtureRequest, database: str) -> None:
    """As where another one is the default of the server; the hint mends it."""
    ready(request, database)
    assert findings(database, checkup.engine) == {}
    run(database, "ALTER TABLE lock_waiters ENGINE = MEMORY")
    [found] = findings(database, checkup.engine)["engine"]
    assert (found.level, found.text[:22]) == (Level.ERROR, "lock_waiters is kept b")
    run(database, found.hint)
    assert findings(database, checkup.engine) == {}


@pytest.mark.parametrize("database", INNODB)
def test_a_server_that_may_forget_a_take(request: pytest.FixtureRequest, database: str) -> None:
    """innodb_flush_log_at_trx_commit."""
    ready(request, database)
    [(before,)] = run(database, "SELECT @@global.innodb_flush_log_at_trx_commit")
    try:
        run(database, "SET GLOBAL innodb_flush_log_at_trx_commit = 2")
        found = [each for each in findings(database, checkup.durability)["durability"] if each.level is Level.ERROR]
        assert "innodb_flush_log_at_trx_commit = 2" in found[0].text
        run(database, found[0].hint.partition(",")[0])
        assert not [
            each for each in findings(database, checkup.durability).get("durability", []) if each.level is Level.ERROR
        ]
    finally:
        run(database, f"SET GLOBAL innodb_flush_log_at_trx_commit = {before}")


def test_a_binary_log_that_may_forget_a_take(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """A server that has one goes by it after a crash."""
    ready(request, "mariadb")
    told = {"log_bin": "ON", "sync_binlog": "0"}
    asked = Checkup.variable
    monkeypatch.setattr(Checkup, "variable", lambda self, name: told.get(name) or asked(self, name))
    [found] = findings("mariadb", checkup.durability)["durability"]
    assert (found.level, found.text.partition(":")[0]) == (Level.ERROR, "sync_binlog = 0")


@pytest.mark.parametrize("server", ["postgresql", "mariadb"])
def test_listening_that_does_not_arrive(request: pytest.FixtureRequest, server: str) -> None:
    """Switched off here; behind a pooler it is the same."""
    ready(request, server)
    [found] = findings(server, execution_options={"dblock_listen": False})["listen"]
    assert found.level is Level.WARNING


@pytest.mark.direct
@pytest.mark.skipif(missing(), reason=HINTS["pgbouncer"])
def test_a_pooler(request: pytest.FixtureRequest, postgresql: PostgreSQL) -> None:
    """In transaction mode: all is well but that nobody is notified."""
    ready(request, "postgresql")
    with running(lambda: PgBouncer(postgresql)) as pooler:
        there = make_url(url("postgresql")).set(port=pooler.port)
        [found] = bad(findings(there, connect_args={"prepare_threshold": None}))
        assert (found.check, found.level) == ("listen", Level.WARNING)


def test_nothing_reaps(database: str) -> None:
    """A thousand rows that nobody has used for days."""
    values = ", ".join(
        f"('old {n}', 1, 0, 30, '2020-01-01 00:00:00', '2020-01-01 00:00:00', '', 'h', 1, '', '', '')"
        for n in range(1000)
    )
    run(database, f"INSERT INTO locks ({COLUMNS}) VALUES {values}".replace(":00:00", "\\:00\\:00"))
    try:
        [found] = findings(database, checkup.reaping)["reaper"]
        assert found.level is Level.WARNING
        assert found.text.startswith("1000 rows")
        assert "`dblock reap`" in found.hint
    finally:
        run(database, "DELETE FROM locks")
    assert "reaper" not in findings(database, checkup.reaping)


@pytest.fixture
def busy(database: str) -> Iterator[str]:
    """A key that is held with a label, and waited for."""
    engine = observer(database)
    with db_lock(engine, "hot", ttl=60, label="slow import"):
        stop = threading.Event()
        waiting = threading.Thread(target=lambda: db_lock(engine, "hot", timeout=20).acquire() and stop.wait(1))
        waiting.start()
        assert until(lambda: run(database, "SELECT 1 FROM lock_waiters"), 10)
        yield database
    stop.set()
    waiting.join()


def test_a_key_that_is_always_contended(busy: str) -> None:
    """With its holder's label; and a lease that ended without being given back."""
    run(busy, "UPDATE lock_waiters SET joined_at = '2020-01-01 00\\:00\\:00'")
    thread = threading.Thread(target=lambda: db_lock(observer(busy), "dead", ttl=0.05, renew=False).acquire())
    thread.start()
    thread.join()
    assert until(lambda: "holders" in findings(busy, checkup.holders), 5)
    found = findings(busy, checkup.holders)
    [hot] = found["contended"]
    assert hot.level is Level.WARNING
    assert "'hot' has waiters in 1 process," in hot.text
    assert '"slow import"' in hot.text
    assert "'dead'" in found["holders"][0].text


def test_who_died_while_it_waited(database: str) -> None:
    """Is passed over."""
    with db_lock(observer(database), "k"):
        run(
            database,
            "INSERT INTO lock_waiters (owner, lock_key, ticket, ttl, label, host, pid, thread, program, celery_task_id,"
            " channel, joined_at, expires_at) SELECT 'dead', lock_key, last_ticket + 1, 30, '', 'h', 1, '', '', '', '',"
            " '2020-01-01 00\\:00\\:00', '2020-01-01 00\\:00\\:05' FROM locks",
        )
        [found] = findings(database, checkup.waiters)["waiters"]
        assert found.text.startswith("1 ")
        assert "reaping" in found.hint
    reap(observer(database), retention=0)
    assert "waiters" not in findings(database, checkup.waiters)
    assert run(database, "SELECT count(*) FROM lock_waiters") == [(0,)]


@pytest.mark.direct
@pytest.mark.parametrize("database", SERVERS)
def test_an_old_snapshot(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, database: str) -> None:
    """It slows every hot row; the hint ends the one that is meant."""

    told = list[Finding]()

    def is_found() -> bool:
        time.sleep(0.2)  # InnoDB tells what was, as long as somebody asks again within a tenth of a second
        told[:] = findings(database, checkup.snapshots).get("snapshot", [])
        return bool(told)

    ready(request, database)
    assert not is_found()
    monkeypatch.setattr("dblock.operating.commands.checkup.OLD_SNAPSHOT", 0.5)
    engine = create_engine(url(database), isolation_level="REPEATABLE READ", poolclass=NullPool)
    me = {"postgresql": "pg_backend_pid()"}.get(database, "connection_id()")
    with engine.connect() as connection:
        mine = connection.scalar(text(f"SELECT {me} FROM (SELECT count(*) FROM locks) AS one"))
        assert until(is_found, 10)
        with engine.connect() as younger:
            younger.execute(text("SELECT count(*) FROM locks"))
            assert until(is_found, 10)
            [found] = told
        assert found.level is Level.WARNING
        assert re.search(rf"open for \d+(\.\d)? s \(session {mine}\)", found.text), found.text
        run(database, found.hint.partition(": ")[2])
        assert until(lambda: not is_found(), 10)
        connection.invalidate()


def test_what_else_keeps_dead_versions(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of PostgreSQL: a transaction of another database that has written, a prepared one, a slot; each with its end."""
    monkeypatch.setattr(checkup, "OLD_SNAPSHOT", 0.0)
    monkeypatch.setattr(checkup, "OLD_XMIN", -1)
    with running(lambda: PostgreSQL(options=("max_prepared_transactions=2", "hot_standby_feedback=on"))) as server:
        where = make_url(f"postgresql+psycopg://dblock@127.0.0.1:{server.port}/postgres")
        engine = create_engine(where, isolation_level="AUTOCOMMIT", poolclass=NullPool)
        metadata.create_all(engine)
        with engine.connect() as ours:
            ours.execute(text("CREATE DATABASE other"))
            with create_engine(where.set(database="other"), poolclass=NullPool).connect() as theirs:
                theirs.execute(text("SELECT 1"))
                assert "snapshot" not in findings(where, checkup.snapshots), "a transaction that only reads is no harm"
                theirs.execute(text("CREATE TABLE written (n integer)"))
                [found] = findings(where, checkup.snapshots)["snapshot"]
                assert re.search(r"\(session \d+ in database other\)", found.text), found.text
                ours.execute(text(found.hint.partition(": ")[2]))
                theirs.invalidate()
            lock = db_lock(engine, "k", renew=False)
            lock.acquire()
            with create_engine(where, poolclass=NullPool).connect() as twophase:
                lock.guard(twophase)
                twophase.execute(text("CREATE TABLE prepared (n integer)"))
                twophase.execute(text("PREPARE TRANSACTION 'it''s'"))
            ours.execute(text("UPDATE locks SET expires_at = acquired_at"))
            [found] = findings(where, checkup.snapshots)["snapshot"]
            assert "(prepared transaction it's in database postgres)" in found.text
            [pinned] = findings(where, checkup.holders)["pinned"]
            assert "prepared transaction" in pinned.hint
            end = "ROLLBACK PREPARED 'it''s'"
            assert end in pinned.hint
            assert found.hint.endswith(f": {end}")
            ours.execute(text(end))
            assert set(findings(where, checkup.snapshots, checkup.holders)) <= {"holders"}
            ours.execute(text("SELECT pg_create_physical_replication_slot('idle')"))
            assert "snapshot" not in findings(where, checkup.snapshots), "a slot that keeps no row versions"
        lock.release()
        engine.dispose()


def test_row_level_security(lowly: Callable[..., URL]) -> None:
    """Which hides rows is named before anything else fails of it."""
    user = lowly("postgresql", "SELECT", "INSERT", "UPDATE", "DELETE")
    assert "row-security" not in findings(user, checkup.row_security)
    run("postgresql", "ALTER TABLE locks ENABLE ROW LEVEL SECURITY")
    try:
        [found] = findings(user)["row-security"]
        assert found.level is Level.WARNING
        assert "row-security" not in findings("postgresql", checkup.row_security), "not for a superuser"
        run("postgresql", found.hint.partition(", or")[0])
        assert "row-security" not in findings(user, checkup.row_security)
    finally:
        run("postgresql", "ALTER TABLE locks DISABLE ROW LEVEL SECURITY")


@pytest.mark.parametrize("database", INNODB)
def test_a_binary_log_of_statements(
    request: pytest.FixtureRequest, database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In which many of the lock's statements are unsafe; a server without one is left alone."""
    ready(request, database)
    assert "binary-log" not in findings(database, checkup.binary_log)
    settings = {"log_bin": "ON", "binlog_format": "STATEMENT"}
    monkeypatch.setattr(Checkup, "variable", lambda _, name: settings[name])
    [found] = findings(database, checkup.binary_log)["binary-log"]
    assert (found.level, "owner tokens" in found.text) == (Level.WARNING, True)
    settings["binlog_format"] = "MIXED"
    assert "binary-log" not in findings(database, checkup.binary_log)


@pytest.mark.direct
@pytest.mark.parametrize("database", SERVERS, indirect=True)
def test_ddl_behind_a_guard(database: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """While an ALTER waits for a guarded transaction, and all else for the ALTER, that is said; the hint ends it."""
    timed(monkeypatch, retry_budget=4.0 if database == "mysql" else 1.0)  # which waits for a second at least
    with hung(database, "k") as (_, session):
        altering = threading.Thread(target=alter, args=(database,))
        altering.start()
        waiting = {
            "postgresql": "SELECT 1 FROM pg_locks WHERE NOT granted AND mode = 'AccessExclusiveLock'",
        }.get(database, "SELECT 1 FROM information_schema.processlist WHERE state LIKE 'Waiting for table metadata%'")
        assert until(lambda: run(database, waiting), 10)
        [locked] = findings(database)["locked"]
        assert "waits to change a table (ALTER TABLE locks ADD COLUMN" in locked.hint
        if database == "postgresql":
            assert f"until session {session} has ended" in locked.hint
        run(database, locked.hint.rpartition(": ")[2])
        altering.join(30)
        assert not altering.is_alive()
        assert "locked" not in findings(database, checkup.reachable, checkup.tables)


def alter(database: str) -> None:
    """Wait to change the table, until somebody ends that."""
    with pytest.raises(DBAPIError):
        run(database, "ALTER TABLE locks ADD COLUMN another integer")


def test_what_cannot_be_looked_at_is_told(database: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """And keeps no other check from looking."""
    monkeypatch.setattr(Checkup, "variable", lambda self, _: self.value("SELECT nothing FROM nowhere"))
    found = findings(database)
    assert "probe" in found
    if database != "sqlite":
        assert found["durability"][0].text.startswith("could not look")


APP = """
from celery import Celery
app = Celery("shop", broker="memory://", include=["{name}_tasks"], set_as_current=False)
app.conf.task_time_limit = 60
"""
TASKS = """
from sqlalchemy import create_engine
from dblock.celery import locked_task
from {name} import app

@app.task(name="{name}.work")
@locked_task("k", bind=create_engine("sqlite://"), ttl=5, renew={renew})
def work(): ...
"""


@pytest.mark.parametrize("face", ["django", "sqlalchemy"])
@pytest.mark.parametrize("renew", [True, False])
def test_limits_of_celery(
    sqlite: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, face: str, renew: bool
) -> None:
    """Of the tasks that a worker of that app would have, in its own words."""
    monkeypatch.setenv("CELERY_SKIP_CHECKS", "yes")  # from Django 6.1 on they ask every database there is
    name = f"shop_{face}_{renew}"
    (tmp_path / f"{name}.py").write_text(APP.format(name=name))
    (tmp_path / f"{name}_tasks.py").write_text(TASKS.format(name=name, renew=renew))
    monkeypatch.syspath_prepend(tmp_path)
    told = json.loads(Shell(face, "sqlite")("doctor", "--json", "--celery", name).stdout)
    found = [each["text"] for each in told if name in each["text"] and each["level"] == "warning"]
    said = f"task {name}.work may run for 60 s (time_limit), and loses its lock after 5 s"
    assert [text.startswith(said) for text in found] == ([] if renew else [True])
    assert "celery" in {each["check"] for each in told}


def test_the_app_that_a_project_loads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Is looked at without being named; nothing is said where there is none, and what is no app is a warning."""
    monkeypatch.setenv("CELERY_SKIP_CHECKS", "yes")  # from Django 6.1 on they ask every database there is
    app = Celery("loaded", broker="memory://", set_as_current=False)

    @app.task(name="loaded.work", time_limit=10)
    @locked_task("k", max_hold=5)
    def work() -> None: ...

    monkeypatch.setattr("dblock.celery.checks.current_app", SimpleNamespace(_get_current_object=lambda: app))
    assert sum("loaded.work" in each.text for each in tasks(None)) == 1
    [nothing] = tasks("nothing_of_that_name")
    assert (nothing.level, "nothing_of_that_name" in nothing.text) == (Level.WARNING, True)
    monkeypatch.delitem(sys.modules, "celery")
    assert list(tasks(None)) == []


@pytest.mark.direct
@pytest.mark.parametrize("database", SERVERS)
def test_how_many_sessions_there_are(request: pytest.FixtureRequest, database: str) -> None:
    """By what they are for; where the server keeps no names of them, nothing is said."""
    ready(request, database)
    shown = database == "postgresql" or run(database, "SELECT @@performance_schema") == [(1,)]
    found = findings(database, checkup.sessions)
    assert list(found) == ["sessions"] * shown
    for each in found.values():
        assert each[0].level is Level.OK
        assert re.search(r"[1-9]\d* named 'dblock: locks'", each[0].text)
