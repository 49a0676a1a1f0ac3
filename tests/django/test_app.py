"""Settings, checks, admin and the app's place in a project."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import threading
import time
from collections.abc import Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from celery import Celery, current_app
from django.core import checks
from django.db import connections
from django.test import override_settings

import dblock
from dblock import (
    Lock,
    LockLost,
    areap,
    conf,
    db_lock,
    lock_acquired,
    lock_at_risk,
    lock_lost,
    lock_reaped,
    lock_released,
    reap,
    signals,
)
from dblock.celery import beat_schedule
from dblock.checks import HINTS
from dblock.core.errors import LockStoreError, Reason, StoreConflict
from dblock.core.observing.events import Event, Kind
from dblock.core.observing.observers import observers
from dblock.store import store_for
from tests.conftest import ALIASES, ready, run
from tests.support.lab import ROOT, cycle, fail, until
from tests.support.loaded import python, without


def test_a_bare_decorator(sqlite: Path) -> None:
    """Locks a key that is the function's module and qualified name, whether it is a coroutine function or not."""

    def held() -> list[object]:
        return [key for (key,) in run("sqlite", "SELECT lock_key FROM locks WHERE owner IS NOT NULL")]

    @db_lock
    def rebuild(n: int = 2) -> tuple[int, list[object]]:
        return n, held()

    @db_lock
    async def arebuild() -> list[object]:
        return held()

    name = f"{__name__}.test_a_bare_decorator.<locals>."
    assert rebuild() == (2, [name + "rebuild"])
    assert rebuild(3) == (3, [name + "rebuild"])
    assert asyncio.run(arebuild()) == [name + "arebuild"]
    assert held() == []
    for kind in (staticmethod, classmethod):
        wrong: Any = kind(len)  # type: ignore[arg-type]
        with pytest.raises(TypeError, match=f"put @{kind.__name__} above @db_lock"):
            db_lock(wrong)


def test_without_settings_it_points_to_the_other_face() -> None:
    """In a process that has Django and no settings, at the first use."""
    code = "from dblock import db_lock\ntry:\n with db_lock('a'): pass\nexcept Exception as e: print(e, e.__notes__)"
    done = python("-c", code, environment=without("DJANGO_SETTINGS_MODULE"))
    assert "settings are not configured" in done.stdout
    assert "for SQLAlchemy there is sqlalchemy_dblock.db_lock" in done.stdout


def ids(databases: Sequence[str] = (), **options: Any) -> list[str]:
    """The ids of the system checks' messages about dblock."""
    return [str(message.id) for message in checks.run_checks(tags=["dblock"], databases=list(databases), **options)]


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, []),
        ({"TTL": 5, "TIMEOUT": None, "USING": "postgresql", "RETENTION": timedelta(days=1), "LISTEN": False}, []),
        ({"TLL": 5}, ["dblock.E001"]),
        ({"TTL": 0}, ["dblock.E002"]),
        ({"TIMEOUT": "soon"}, ["dblock.E002"]),
        ({"RETENTION": -1, "TTL": None}, ["dblock.E002", "dblock.E002"]),
        ({"LISTEN": "no"}, ["dblock.E002"]),
        ({"REAP_EVERY": None}, []),
        ({"REAP_EVERY": timedelta(hours=1)}, []),
        ({"REAP_EVERY": "hourly"}, ["dblock.E002"]),
        ({"REAP_EVERY": 0}, ["dblock.E002"]),
        ({"USING": "nowhere"}, ["dblock.E003"]),
    ],
)
def test_checks_of_the_settings(settings: dict[str, Any], expected: list[str]) -> None:
    """Each mistake has an id, a place and a hint."""
    with override_settings(DBLOCK=settings):
        found = checks.run_checks(tags=["dblock"])
        assert [message.id for message in found] == expected
        assert all(message.hint for message in found)


def test_a_database_that_is_not_configured_is_refused_as_an_unsupported_one() -> None:
    """Django's dummy, of `DATABASES = {}` or an empty `default` beside others, has no driver."""
    code = """
import django
from django.conf import settings
settings.configure(INSTALLED_APPS=["dblock"])
django.setup()
from dblock import UnsupportedDatabase, db_lock
try:
    db_lock("k").acquire()
except UnsupportedDatabase as error:
    print(error)
"""
    told = python("-c", code, environment=without("DJANGO_SETTINGS_MODULE")).stdout
    assert "speaks unknown" in told


def test_an_unsupported_database_is_a_check(monkeypatch: pytest.MonkeyPatch) -> None:
    """E004, by its name."""
    monkeypatch.setattr(connections["postgresql"], "vendor", "oracle")
    with override_settings(DBLOCK={"USING": "postgresql"}):
        assert ids() == ["dblock.E004"]


def test_a_rollback_journal_is_a_warning(sqlite: Path, tmp_path: Path) -> None:
    """W001 for a SQLite file without a write-ahead log, W004 where transactions begin deferred."""
    assert ids(databases=["default"]) == []
    wal = {"init_command": "PRAGMA journal_mode=WAL"}
    for options, expected in (({}, ["dblock.W001", "dblock.W004"]), (wal, ["dblock.W004"])):
        connections["default"].close()
        with changed("default", NAME=tmp_path / f"{len(options)}.sqlite3", OPTIONS=options):
            assert ids(databases=["default"]) == expected
            connections["default"].close()


@contextlib.contextmanager
def changed(alias: str, **settings: Any) -> Iterator[None]:
    """The settings of a database are others."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in settings.items():
            patch.setitem(connections.settings[alias], name, value)
        yield


@pytest.mark.parametrize(
    ("alias", "options"),
    [
        ("postgresql", {"options": "-c default_transaction_read_only=on"}),
        ("mariadb", {"init_command": "SET tx_read_only = 1"}),
    ],
)
@pytest.mark.direct
def test_sessions_that_may_only_read(request: pytest.FixtureRequest, alias: str, options: dict[str, str]) -> None:
    """No lock can be had, which E007 says before."""
    ready(request, alias)
    pool: Any = store_for(alias)._source
    settings = {**connections[alias].settings_dict["OPTIONS"], **options}
    with override_settings(DBLOCK={"USING": alias}), changed(alias, OPTIONS=settings):
        pool.close_all()
        assert ids() == ["dblock.E007"]
        with pytest.raises(LockStoreError, match="(?i)read.only"):
            db_lock("k", timeout=0.7).acquire()
    pool.close_all()


def options(**given: str) -> dict[str, Any]:
    """The settings of a database with these OPTIONS."""
    return {"OPTIONS": given}


def level(name: str) -> dict[str, Any]:
    """The settings of one where each request is a transaction of that isolation level."""
    return options(isolation_level=name) | {"ATOMIC_REQUESTS": True}


def deployed(**settings: Any) -> list[str]:
    with override_settings(DBLOCK={"REAP_EVERY": 3600, **settings}):
        return ids(include_deployment_checks=True)


@pytest.mark.parametrize(
    ("alias", "settings", "expected"),
    [
        ("postgresql", {}, ""),
        ("postgresql", {"AUTOCOMMIT": False}, "W002"),  # where release="auto" does not see transactions end
        ("default", {"NAME": "file:/x?mode=ro"}, "E007"),
        ("default", {"NAME": "file:/x?cache=private&immutable=1"}, "E007"),
        ("default", {"NAME": "file:/x?mode=rwc"}, ""),
        ("default", {"NAME": "/mode=ro"}, ""),
        ("postgresql", options(options="-c default_transaction_read_only=off"), ""),
        ("postgresql", options(options="-c default_transaction_read_only=on -c default_transaction_read_only=0"), ""),
        ("postgresql", options(options="-c a.b=on"), ""),
        ("postgresql", options(target_session_attrs="read-write"), ""),
        ("postgresql", options(target_session_attrs="standby"), "E007"),
        ("mariadb", options(init_command="SET SESSION TRANSACTION ISOLATION LEVEL READ COMMITTED"), ""),
        ("mariadb", options(init_command="set session transaction isolation level read committed, read only"), "E007"),
        ("mariadb", level("repeatable read"), "W007"),  # of a snapshot that is older than the lock
        ("mariadb", level("REPEATABLE READ") | {"ATOMIC_REQUESTS": False}, ""),
        ("mariadb", level("read committed"), ""),
        ("mariadb", options() | {"ATOMIC_REQUESTS": True}, ""),
        ("postgresql", level("repeatable read"), ""),
        ("default", options() | {"ATOMIC_REQUESTS": True}, ""),
        ("postgresql", {"DISABLE_SERVER_SIDE_CURSORS": True}, "W006"),  # as behind a pooler
        ("default", {"NAME": ":memory:"}, "W008"),
        ("default", {"NAME": "file:locks?mode=memory&cache=shared"}, "W008"),
    ],
)
def test_checks_of_a_database(alias: str, settings: dict[str, Any], expected: str) -> None:
    """By its settings, whether they are always wrong, or only for what is deployed (W006 and W008)."""
    told = [f"dblock.{expected}"] if expected else []
    with changed(alias, **settings), override_settings(DBLOCK={"USING": alias}):
        assert ids() == ([] if expected in {"W006", "W008"} else told)
        assert deployed(USING=alias) == told


def test_what_is_for_a_desk_only() -> None:
    """A pooler does not matter where nobody listens, or locks live elsewhere. W009: a life that is no lease's."""
    with changed("postgresql", DISABLE_SERVER_SIDE_CURSORS=True):
        assert deployed(USING="postgresql", LISTEN=False) == []
        assert deployed() == []
    for ttl, expected in ((1, ["dblock.W009"]), (2, []), (timedelta(hours=1), []), (7200, ["dblock.W009"])):
        assert deployed(TTL=ttl) == expected
    assert deployed(TTL=-1) == ["dblock.E002"]


class NoTables:
    """A router that has the tables made nowhere."""

    def allow_migrate(self, db: str, app_label: str, **hints: Any) -> bool | None:
        return False if app_label == "dblock" else None


def test_routers_that_keep_the_tables_from_being_made(sqlite: Path, tmp_path: Path) -> None:
    """E008, once they are missing."""
    with override_settings(DATABASE_ROUTERS=[NoTables()], DBLOCK={"USING": "default"}):
        assert ids(databases=["default"]) == []
        connections["default"].close()
        with changed("default", NAME=tmp_path / "empty.sqlite3"):
            assert ids(databases=["default"]) == ["dblock.E008", "dblock.E008"]
            assert ids() == []
            connections["default"].close()
    with changed("default", NAME=tmp_path / "empty.sqlite3"), override_settings(DBLOCK={"USING": "default"}):
        assert ids(databases=["default"]) == [], "migrate makes them"
        connections["default"].close()


def test_every_check_is_documented() -> None:
    """In the table, under its id; each hint names a page, by its title: no wheel contains the file."""
    source = (ROOT / "dblock/checks.py").read_text()
    assert sorted(HINTS) == re.findall(r"^``dblock\.([EW]\d+)``", source, re.MULTILINE)
    assert {*HINTS} == {*re.findall(r'_told\(\s*"([EW]\d+)"', source)}
    pages = [re.findall(r"Documentation: ([A-Z][\w ]+)\.", hint) for hint in HINTS.values()]
    titles = {page.read_text().partition("\n")[0] for page in (ROOT / "docs").glob("*.md")}
    assert {f"# {page}" for [page] in pages} <= titles


def test_every_setting_and_signal_is_explained() -> None:
    """By a docstring, of which the reference is made."""
    settings, signals = ((ROOT / f"dblock/{name}.py").read_text() for name in ("conf", "signals"))
    assert {*re.findall(r'^    ([A-Z_]+): .+\n    """', settings, re.MULTILINE)} == conf.NAMES
    told = re.findall(r'^(lock_\w+) = .+\n"""', signals, re.MULTILINE)
    assert sorted(told) == sorted(name for name in dblock.__all__ if name.startswith("lock_"))
    assert len(told) == 8


def test_rows_that_nobody_reaps_are_a_warning_before_deployment() -> None:
    """W005, unless processes reap by themselves, or a schedule of Celery's has the task; others, nobody knows here."""
    app = Celery("reaped", set_as_current=False)
    with override_settings(DBLOCK={"REAP_EVERY": 3600}):
        assert ids(include_deployment_checks=True) == []
    with override_settings(CELERY_BEAT_SCHEDULE={"other": {"task": "other", "schedule": 1}}):
        assert ids(include_deployment_checks=True) == ["dblock.W005"]
        assert ids() == []
    with override_settings(CELERY_BEAT_SCHEDULE=beat_schedule(every=60)):
        assert ids(include_deployment_checks=True) == []
    before = current_app._get_current_object()
    try:
        app.set_current()
        assert ids(include_deployment_checks=True) == ["dblock.W005"]
        app.conf.beat_schedule = beat_schedule()
        assert ids(include_deployment_checks=True) == []
    finally:
        before.set_current()


def test_settings_are_read_late(sqlite: Path) -> None:
    """Also by a lock that was made before they changed."""
    lock = db_lock("k")
    assert (lock.ttl, lock.using) == (30.0, "default")
    with override_settings(DBLOCK={"TTL": 7, "TIMEOUT": 0, "RETENTION": timedelta(0)}):
        assert lock.ttl == 7.0
        with db_lock("other", ttl=timedelta(seconds=3)) as other:
            assert other.ttl == 3.0
    assert lock.ttl == 30.0


def test_using_may_come_from_the_settings_or_a_router(sqlite: Path) -> None:
    """In that order; a router is asked where to write the model."""
    with override_settings(DBLOCK={"USING": "postgresql"}):
        assert db_lock("k").using == "postgresql"
        assert db_lock("k", using="mariadb").using == "mariadb"
    with override_settings(DATABASE_ROUTERS=["tests.django.test_app.Router"]):
        assert db_lock("k").using == "mariadb"


class Router:
    """Sends the locks to a database of their own."""

    def db_for_write(self, model: Any, **hints: Any) -> str | None:
        return "mariadb" if model._meta.label == "dblock.Lock" else None


def test_reaping_follows_the_settings(sqlite: Path) -> None:
    """DBLOCK["RETENTION"], unless told otherwise; on an event loop too."""
    cycle(db_lock("k"))
    assert reap() == 0
    time.sleep(0.01)
    with override_settings(DBLOCK={"RETENTION": 0}):
        assert until(lambda: asyncio.run(areap()) == 1), "a file that somebody writes to is left to the next time"


@pytest.mark.direct
@pytest.mark.parametrize("name", ["sqlite", "postgresql"])
def test_a_users_own_test_case(request: pytest.FixtureRequest, name: str) -> None:
    """The example project's tests run with Django's own runner, which makes and drops a database."""
    ready(request, name)
    environment = {**os.environ, "DJANGO_SETTINGS_MODULE": "example_project.settings"}
    if name == "sqlite":
        environment |= {"DATABASE": "sqlite"}
    else:
        settings = connections[ALIASES[name]].settings_dict
        environment |= {"DATABASE": connections[ALIASES[name]].vendor}
        environment |= {f"DATABASE_{part}": str(settings[part]) for part in ("NAME", "USER", "PASSWORD", "PORT")}
    command = ["-W", "error", "manage.py", "test", "example_project", "--noinput"]
    assert "OK" in python(*command, environment=environment).stderr


def test_signals_of_the_lease(sqlite: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A late renewal and a loss reach every receiver, with the lock and the reason; one that fails disturbs nobody."""
    heard: list[tuple[object, ...]] = []
    done = threading.Event()

    def at_risk(sender: type, lock: Lock, **_: object) -> None:
        heard.append(("at risk", sender, lock.key, lock.state))

    def fails(**_: object) -> None:
        raise RuntimeError("mine")

    def lost(sender: type, lock: Lock, reason: Reason, **_: object) -> None:
        heard.append(("lost", sender, lock.key, lock.state, reason))
        done.set()

    fail(monkeypatch, StoreConflict, "renew")
    lock_at_risk.connect(at_risk)
    lock_lost.connect(fails)
    lock_lost.connect(lost)
    try:
        with pytest.raises(LockLost), db_lock("k", ttl=0.6):
            assert done.wait(20)
    finally:
        lock_at_risk.disconnect(at_risk)
        lock_lost.disconnect(fails)
        lock_lost.disconnect(lost)
    assert heard == [("at risk", Lock, "k", "at_risk"), ("lost", Lock, "k", "lost", Reason.UNREACHABLE)]


def test_signals_of_events(sqlite: Path) -> None:
    """Sent by the lock's class from the first receiver on until the last has gone; one that fails disturbs nobody."""
    heard: list[tuple[str, object, str]] = []

    def receive(sender: type, event: Event, **_: object) -> None:
        heard.append((str(event.kind), sender, event.key))

    def fails(**_: object) -> None:
        raise RuntimeError("mine")

    sent: list[signals.EventSignal] = [each for each in vars(signals).values() if isinstance(each, signals.EventSignal)]
    renewed = {Kind.RENEWED, Kind.AT_RISK, Kind.LOST}  # of the watchdog; two of them with signals of their own
    assert {each.kind for each in sent} == set(Kind) - renewed
    for signal in sent:
        signal.connect(fails)
        signal.connect(receive, sender=Lock)
        signal.connect(receive, sender=str, dispatch_uid="of something else")
    try:
        cycle(db_lock("k"))
        time.sleep(0.01)
        reap(retention=0)
    finally:
        for signal in sent:
            assert signal.disconnect(fails)
            assert signal.disconnect(receive, sender=Lock)
            assert signal.disconnect(sender=str, dispatch_uid="of something else")
    assert heard == [("acquired", Lock, "k"), ("released", Lock, "k"), ("reaped", Lock, "")]
    assert {lock_acquired, lock_released, lock_reaped} < set(sent)
    assert not observers, "and nothing is observed any more"
