"""`dblock quarantine`, and where else a quarantine shows: `ls`, the doctor, the error, the metric."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from datetime import timedelta

import pytest
from django.test import override_settings
from prometheus_client import CollectorRegistry, generate_latest
from sqlalchemy import Engine

from dblock.checks import check_database, check_settings
from dblock.contrib import prometheus
from dblock.operating.commands.checkup import Level
from sqlalchemy_dblock import LockTimeout, attach, db_lock
from tests.commands.conftest import Shell
from tests.commands.test_doctor import findings
from tests.conftest import SERVERS, own_engine, ready, run
from tests.support.lab import LATER, cycle, later


@pytest.fixture(params=SERVERS)
def closed(request: pytest.FixtureRequest) -> Iterator[str]:
    """A database whose server was promoted 34 seconds ago; its keys open in 26."""
    database = ready(request, request.param)
    since, opens_at = later(database, -34), later(database, 26)
    run(database, f"UPDATE lock_epoch SET since = {since}, opens_at = {opens_at}")
    yield database
    run(database, "UPDATE lock_epoch SET opens_at = since, floor = 0")


@pytest.fixture
def engine(closed: str) -> Engine:
    return own_engine(closed)


def assert_closed(engine: Engine, key: str, told: str) -> None:
    with pytest.raises(LockTimeout, match=told):
        db_lock(engine, key, timeout=0).__enter__()


def test_it_is_shown_and_ended(closed: str, engine: Engine) -> None:
    """By the command, which asks first, by `ls`, the doctor and the metric; then keys are open."""
    shell = Shell("sqlalchemy", closed)
    shown = shell("quarantine")
    assert shown.returncode == 1
    assert re.search(r"closed \d\d s ago, .*: keys open in \d+ s", shown.stdout)
    assert 0 < json.loads(shell("quarantine", "--json").stdout)["opens_in"] < 27
    assert "closed " in shell("ls").stderr
    [found] = findings(closed, "quarantine")["quarantine"]
    assert (found.level, "quarantine --end" in found.hint) == (Level.WARNING, True)
    assert "probe" not in findings(closed, "probe"), "nor does the doctor say that a key cannot be taken"
    assert_closed(engine, "k", r"closed \d\d s ago, .*: keys open in \d+ s")
    assert "'k' is closed: keys were closed " in shell.fails(75, "run", "--nb", "k", "--", "true")
    registry = CollectorRegistry()
    end = prometheus.instrument(registry=registry)
    shows = [line for line in generate_latest(registry).decode().splitlines() if "quarantine_seconds{" in line]
    end()
    assert any(0 < float(line.rsplit(" ", 1)[1]) < 26 for line in shows if str(engine.url.port) in line)
    assert shell("quarantine", "--end").returncode == 2, "nobody could be asked"
    ended = shell("quarantine", "--end", "--yes")
    assert (ended.returncode, "keys are open" in ended.stdout) == (0, True)
    cycle(db_lock(engine, "k", timeout=1))


def test_a_token_waits_for_the_keys(closed: str, engine: Engine) -> None:
    """The error says until when; the tenure stays, and its bearer enters it afterwards."""
    opens = f"UPDATE lock_epoch SET opens_at = {LATER[closed]}"
    run(closed, opens, seconds=-1)
    with db_lock(engine, "k", ttl=60) as lock:
        fence, token = lock.fence, lock.detach()
        run(closed, opens, seconds=26)
        told = r"could not enter 'k' by its token: keys were closed 3\d s ago, .*: keys open in 2\d s"
        with pytest.raises(LockTimeout, match=told):
            attach(engine, token)
        run(closed, opens, seconds=-1)
        with attach(engine, token) as again:
            assert again.fence == fence


@pytest.mark.parametrize("face", ["django", "sqlalchemy"])
def test_keys_are_closed_by_hand(closed: str, engine: Engine, face: str) -> None:
    """For the setting's length, also if no quarantine was under way; who holds a key goes on."""
    run(closed, f"UPDATE lock_epoch SET opens_at = {later(closed, -1)}")
    shell = Shell(face, closed)
    with db_lock(engine, "held", ttl=60) as held:
        assert shell("quarantine").returncode == 0
        assert shell("quarantine", "--begin").returncode == 2, "nobody could be asked"
        assert shell("quarantine", "--begin", "--end", "--yes").returncode == 2, "which of them?"
        begun = shell("quarantine", "--begin", "--yes")
        assert (begun.returncode, "keys open in " in begun.stdout) == (0, True)
        assert json.loads(shell("quarantine", "--json").stdout)["opens_in"] == pytest.approx(60, abs=10)
        assert_closed(engine, "k", r"closed \d+ s ago, .*: keys open in")
        held.extend(60)
    assert_closed(engine, "held", "keys were closed")
    assert shell("quarantine", "--end", "--yes").returncode in {0, 1}, "or open in a moment"


def test_a_lease_of_before_is_waited_for(closed: str, engine: Engine) -> None:
    """As it may be by another clock, its key is closed for a little longer than the others, and the error says so."""
    run(closed, f"UPDATE lock_epoch SET opens_at = {later(closed, -1)}, floor = {-(2**61)}")
    cycle(db_lock(engine, "k"))
    run(closed, f"UPDATE locks SET owner = 'x', expires_at = {later(closed, -0.1)} WHERE lock_key = 'k'")
    assert_closed(engine, "k", r"closed 3\d s ago, .*: keys open in [12] s")
    with db_lock(engine, "another", timeout=0), db_lock(engine, "k", timeout=10):
        pass


def test_sqlite_has_none(sqlite: object) -> None:
    """Keys cannot be closed there: the command fails, and says what to do before a backup is restored."""
    shell = Shell("sqlalchemy", "sqlite")
    for change in ([], ["--end", "--yes"]):
        shown = shell("quarantine", *change)
        assert (shown.returncode, "no replicas" in shown.stdout) == (0, True)
    refused = shell.fails(2, "quarantine", "--begin", "--yes")
    assert "nothing was done" in refused
    assert "first stop all processes that use the file" in refused


def test_a_lease_that_outlasts_it() -> None:
    """Is told by a system check; not where there is no quarantine, nor on SQLite."""

    def ids(**settings: object) -> list[str | None]:
        with override_settings(DBLOCK=settings):
            return [each.id for each in (*check_settings(None), *check_database(None))]

    assert ids(USING="postgresql", TTL=60) == []
    assert ids(USING="postgresql", TTL=61) == ["dblock.W011"]
    assert ids(USING="postgresql", TTL=61, FAILOVER_QUARANTINE=timedelta(minutes=2)) == []
    assert ids(USING="postgresql", TTL=61, FAILOVER_QUARANTINE=None) == []
    assert ids(USING="default", TTL=61) == []
    for bad in ("sometimes", 0, -1, True):
        assert ids(USING="postgresql", FAILOVER_QUARANTINE=bad) == ["dblock.E002"]
