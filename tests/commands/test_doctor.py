"""`dblock doctor`: finds what is wrong, and says how to mend it."""

from __future__ import annotations

import gc
import json
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from sqlalchemy import create_engine, text

from dblock.commands.checkup import Checkup, Finding, Level
from dblock.commands.desk import Desk
from sqlalchemy_dblock import db_lock
from sqlalchemy_dblock.store import store_for
from tests.commands.conftest import Shell
from tests.conftest import DATABASES, INNODB, observer, ready, run, url
from tests.support.lab import until


def findings(database: str, **options: Any) -> dict[str, list[Finding]]:
    """By the check's name; over an engine of its own."""
    engine = create_engine(url(database), **options)
    desk = Desk(store_for(engine), lambda key, **given: db_lock(engine, key, **given), lambda: None, (), "here")
    found: dict[str, list[Finding]] = {}
    try:
        for each in Checkup(desk).findings():
            found.setdefault(each.check, []).append(each)
    finally:
        engine.dispose()
        del desk
        gc.collect()
    return found


def bad(found: dict[str, list[Finding]]) -> list[Finding]:
    return [each for some in found.values() for each in some if each.level in {Level.WARNING, Level.ERROR}]


def test_a_healthy_database(shell: Shell) -> None:
    """As the suite's are: nothing to mend, and it says what it has looked at."""
    done = shell("doctor", "--json")
    found = json.loads(done.stdout)
    ours = [each for each in found if each["level"] in {"warning", "error"} and not each["check"].startswith("dblock.")]
    assert ours == []
    assert done.returncode == max((1 for each in found if each["level"] == "warning"), default=0)
    looked = {each["check"] for each in found}
    assert {"reachable", "tables", "probe", "clock"} <= looked
    assert ("listen" in looked) == (shell.database == "postgresql")
    assert ("collation" in looked) == (shell.database in INNODB)
    told = shell("doctor").stdout
    assert "ok       probe: a key was taken" in told


def test_tables_of_another_shape(database: str) -> None:
    """One is missing; a column is."""
    run(database, "ALTER TABLE lock_waiters RENAME TO hidden")
    try:
        [_, waiters] = findings(database)["tables"]
        assert waiters.level is Level.ERROR
        assert "lock_waiters" in waiters.text
        assert "migrate" in waiters.hint
    finally:
        run(database, "ALTER TABLE hidden RENAME TO lock_waiters")
    run(database, "ALTER TABLE locks RENAME COLUMN revocation TO other")
    try:
        found = findings(database)
        assert "locks lacks revocation" in found["tables"][0].text
        assert "probe" not in found, "and nothing else is looked at"
    finally:
        run(database, "ALTER TABLE locks RENAME COLUMN other TO revocation")
    assert bad(findings(database)) == []


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
def test_a_server_that_may_forget_a_take(request: pytest.FixtureRequest, database: str) -> None:
    """innodb_flush_log_at_trx_commit."""
    ready(request, database)
    [(before,)] = run(database, "SELECT @@global.innodb_flush_log_at_trx_commit")
    try:
        run(database, "SET GLOBAL innodb_flush_log_at_trx_commit = 2")
        found = [each for each in findings(database)["durability"] if each.level is Level.ERROR]
        assert "innodb_flush_log_at_trx_commit = 2" in found[0].text
        run(database, "SET GLOBAL innodb_flush_log_at_trx_commit = 1")
        assert not [each for each in findings(database).get("durability", []) if each.level is Level.ERROR]
    finally:
        run(database, f"SET GLOBAL innodb_flush_log_at_trx_commit = {before}")


def test_listening_that_does_not_arrive(request: pytest.FixtureRequest) -> None:
    """Switched off here; behind a pooler it is the same."""
    ready(request, "postgresql")
    [found] = findings("postgresql", execution_options={"dblock_listen": False})["listen"]
    assert found.level is Level.WARNING


def test_nothing_reaps(database: str) -> None:
    """A thousand rows that nobody has used for days."""
    columns = "lock_key, fence, count, ttl, acquired_at, expires_at, label, host, pid, thread, program, celery_task_id"
    values = ", ".join(
        f"('old {n}', 1, 0, 30, '2020-01-01 00:00:00', '2020-01-01 00:00:00', '', 'h', 1, '', '', '')"
        for n in range(1000)
    )
    run(database, f"INSERT INTO locks ({columns}) VALUES {values}".replace(":00:00", "\\:00\\:00"))
    try:
        [found] = findings(database)["reaper"]
        assert found.level is Level.WARNING
        assert found.text.startswith("1000 rows")
    finally:
        run(database, "DELETE FROM locks")
    assert "reaper" not in findings(database)


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
    assert until(lambda: "holders" in findings(busy), 5)
    found = findings(busy)
    [hot] = found["contended"]
    assert hot.level is Level.WARNING
    assert "'hot' has 1 waiters" in hot.text
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
        [found] = findings(database)["waiters"]
        assert found.text.startswith("1 ")
    run(database, "DELETE FROM lock_waiters")


def test_an_old_snapshot(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """It slows every hot row."""
    monkeypatch.setattr("dblock.commands.checkup.OLD_SNAPSHOT", -1.0)
    for database in [each for each in DATABASES if each != "sqlite"]:
        ready(request, database)
        engine = create_engine(url(database), isolation_level="REPEATABLE READ")
        with engine.connect() as connection:
            connection.execute(text("SELECT count(*) FROM locks"))
            [found] = findings(database)["snapshot"]
            assert found.level is Level.WARNING
        engine.dispose()


def test_what_cannot_be_looked_at_is_told(database: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """And keeps no other check from looking."""
    monkeypatch.setattr(Checkup, "variable", lambda self, _: self.value("SELECT nothing FROM nowhere"))
    found = findings(database)
    assert "probe" in found
    if database != "sqlite":
        assert found["durability"][0].text.startswith("could not look")
