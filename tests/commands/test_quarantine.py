"""`dblock quarantine`, and where else a quarantine shows: `ls`, the doctor, the error, the metric."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from datetime import timedelta

import pytest
from django.test import override_settings
from prometheus_client import CollectorRegistry, generate_latest
from sqlalchemy import URL, Engine, create_engine

from dblock import conf
from dblock.checks import check_durable, check_quarantine, check_settings
from dblock.contrib import prometheus
from dblock.operating.commands import checkup
from sqlalchemy_dblock import LockTimeout, attach, db_lock
from tests.commands.conftest import Shell
from tests.commands.test_doctor import findings
from tests.conftest import SERVERS, ready, run, url
from tests.support.failover import SOON


@pytest.fixture(params=SERVERS)
def closed(request: pytest.FixtureRequest) -> Iterator[str]:
    """A database whose server was promoted 34 seconds ago; its keys open in 26."""
    database = ready(request, request.param)
    soon = SOON[database]
    run(database, f"UPDATE lock_epoch SET since = {soon.format(-34)}, opens_at = {soon.format(26)}")
    yield database
    run(database, "UPDATE lock_epoch SET opens_at = since, floor = 0")


@pytest.fixture
def engine(closed: str) -> Iterator[Engine]:
    engine = create_engine(url(closed))
    yield engine
    engine.dispose()


def test_it_is_shown_and_ended(closed: str, engine: Engine) -> None:
    """By the command, which asks first, by `ls`, the doctor and the metric; then keys are open."""
    shell = Shell("sqlalchemy", closed)
    shown = shell("quarantine")
    assert shown.returncode == 1
    assert "promoted 34 s ago: keys open in 2" in shown.stdout
    assert json.loads(shell("quarantine", "--json").stdout)["opens_in"] == pytest.approx(26, abs=5)
    assert "promoted 3" in shell("ls").stderr
    [found] = findings(closed, checkup.failover)["failover"]
    assert (found.level, "quarantine --end" in found.hint) == (checkup.Level.WARNING, True)
    assert "probe" not in findings(closed, checkup.probe), "nor does the doctor say that a key cannot be taken"
    with pytest.raises(LockTimeout, match=r"promoted 3\d s ago: keys open in 2\d s"), db_lock(engine, "k", timeout=0):
        pass
    tried = shell("run", "--nb", "k", "--", "true")
    assert (tried.returncode, "'k' is closed: the database server was promoted 3" in tried.stderr) == (75, True)
    registry = CollectorRegistry()
    end = prometheus.instrument(registry=registry)
    shows = [line for line in generate_latest(registry).decode().splitlines() if "quarantine_seconds{" in line]
    end()
    assert any(20 < float(line.rsplit(" ", 1)[1]) < 26 for line in shows if str(engine.url.port) in line)
    assert shell("quarantine", "--end").returncode == 2, "nobody could be asked"
    ended = shell("quarantine", "--end", "--yes")
    assert (ended.returncode, "keys are open" in ended.stdout) == (0, True)
    with db_lock(engine, "k", timeout=1):
        pass


def test_a_token_waits_for_the_keys(closed: str, engine: Engine) -> None:
    """The error says until when; the tenure stays, and its bearer enters it afterwards."""
    opens = f"UPDATE lock_epoch SET opens_at = {SOON[closed]}"
    run(closed, opens.format(-1))
    with db_lock(engine, "k", ttl=60) as lock:
        fence, token = lock.fence, lock.detach()
        run(closed, opens.format(26))
        told = r"could not enter 'k' by its token: the database server was promoted 3\d s ago: keys open in 2\d s"
        with pytest.raises(LockTimeout, match=told):
            attach(engine, token)
        run(closed, opens.format(-1))
        with attach(engine, token) as again:
            assert again.fence == fence


def test_sqlite_has_none(request: pytest.FixtureRequest) -> None:
    """It has no replicas."""
    ready(request, "sqlite")
    shown = Shell("sqlalchemy", "sqlite")("quarantine", "--end", "--yes")
    assert (shown.returncode, "no replicas" in shown.stdout) == (0, True)


def test_a_lease_that_outlasts_it() -> None:
    """Is told by a system check; not where there is no quarantine, nor on SQLite."""

    def ids(**settings: object) -> list[str | None]:
        with override_settings(DBLOCK=settings):
            return [each.id for each in (*check_settings(None), *check_quarantine(None))]

    assert ids(USING="postgresql", TTL=60) == []
    assert ids(USING="postgresql", TTL=61) == ["dblock.W011"]
    assert ids(USING="postgresql", TTL=61, FAILOVER_QUARANTINE=timedelta(minutes=2)) == []
    assert ids(USING="postgresql", TTL=61, FAILOVER_QUARANTINE=None) == []
    assert ids(USING="default", TTL=61) == []
    for bad in ("sometimes", 0, -1, True):
        assert ids(USING="postgresql", FAILOVER_QUARANTINE=bad) == ["dblock.E002"]


def test_whether_takes_wait_for_the_disk(request: pytest.FixtureRequest, caplog: pytest.LogCaptureFixture) -> None:
    """It is a property of the tables, which the first take of an engine sets, and a command takes back."""
    ready(request, "postgresql")
    shell = Shell("sqlalchemy", "postgresql")
    assert "all takes wait for the disk" in shell("durability").stdout
    light = create_engine(url("postgresql"), execution_options={"dblock_durable": False})
    try:
        for _ in range(2):
            with db_lock(light, "k"):
                pass
        assert "leases of up to 30 s do not wait for the disk" in shell("durability").stdout
        assert json.loads(shell("durability", "--json").stdout) == {"asynchronous_ttl": 30.0}
        assert "leases of up to 30 s" in shell("ls").stderr
        [found] = findings("postgresql", checkup.failover)["durability"]
        assert "--restore" in found.hint
        assert "wait for the disk again; the next restart" in shell("durability", "--restore").stdout
    finally:
        run("postgresql", "UPDATE lock_epoch SET asynchronous_ttl = 0")
        light.dispose()
    db_lock(create_engine("sqlite://", execution_options={"dblock_durable": False}), "k")._store()
    assert "dblock_durable=False has no effect" in caplog.text
    with pytest.raises(TypeError, match="dblock_durable is True or False"):
        db_lock(create_engine(url("postgresql"), execution_options={"dblock_durable": 0}), "k")._store()


def test_without_the_right_to_say_it(lowly: Callable[..., URL], caplog: pytest.LogCaptureFixture) -> None:
    """A user who may read `lock_epoch`, and not write it: takes wait for the disk, which a warning says once."""
    where = lowly("postgresql", "SELECT", "INSERT", "UPDATE", "DELETE")
    run("postgresql", "REVOKE INSERT, UPDATE, DELETE ON lock_epoch FROM lowly")
    light = create_engine(where, execution_options={"dblock_durable": False})
    for key in ("a", "b", "a"):
        with db_lock(light, key, ttl=5) as lock:
            assert lock.verify()
            lock.extend(6)
    light.dispose()
    assert run("postgresql", "SELECT asynchronous_ttl FROM lock_epoch") == [(0.0,)]
    [warned] = [record.getMessage() for record in caplog.records if "DURABLE" in record.getMessage()]
    assert warned.startswith("takes wait for the disk, though DURABLE is False: ")
    assert "lock_epoch" in warned


def test_the_setting() -> None:
    """How long keys are closed follows TTL; a value that is no bool, and other databases, are told by system checks."""

    def ids(**settings: object) -> list[str | None]:
        with override_settings(DBLOCK=settings):
            return [each.id for each in (*check_settings(None), *check_durable(None))]

    for ttl, seconds in ((30, 30.0), (1, 2.5), (3600, 60.0)):
        with override_settings(DBLOCK={"DURABLE": False, "TTL": ttl}):
            assert conf.asynchronous_ttl() == seconds
    assert conf.asynchronous_ttl() == 0.0
    assert ids(USING="postgresql", DURABLE=False) == []
    assert ids(USING="default", DURABLE=False) == ["dblock.W012"]
    assert ids(USING="default") == []
    assert ids(USING="postgresql", DURABLE="no") == ["dblock.E002"]
