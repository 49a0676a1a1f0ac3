"""Settings, checks, admin and the app's place in a project."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from celery import Celery, current_app
from django.contrib import admin
from django.core import checks
from django.db import connections
from django.test import Client, override_settings

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
from dblock.checks import _READ
from dblock.core.errors import LockStoreError, Reason, StoreConflict
from dblock.core.observing.events import Event, Kind
from dblock.core.observing.observers import observers
from dblock.core.protocol.steps import Execute, Rows
from dblock.store import store_for
from tests.conftest import ALIASES, ready, run
from tests.support.lab import LONG, until

ROOT = Path(__file__).parent.parent.parent


@db_lock
def rebuild(n: int = 2) -> tuple[int, list[str]]:
    """A function of this module."""
    return n, [str(row[0]) for row in run("sqlite", "SELECT lock_key FROM locks WHERE owner IS NOT NULL")]


@db_lock
async def arebuild() -> list[str]:
    """A coroutine function of this module."""
    return rebuild.__wrapped__()[1]  # type: ignore[attr-defined,no-any-return]


def test_a_bare_decorator(sqlite: Path) -> None:
    """Locks a key that is the function's module and qualified name, whether it is a coroutine function or not."""
    run("sqlite", "DELETE FROM locks")
    name = "tests.django.test_app."
    assert rebuild() == (2, [name + "rebuild"])
    assert rebuild(3) == (3, [name + "rebuild"])
    assert asyncio.run(arebuild()) == [name + "arebuild"]
    assert run("sqlite", "SELECT count(*) FROM locks WHERE owner IS NOT NULL") == [(0,)]

    class Shop:
        @staticmethod
        @db_lock
        def sell() -> list[str]:
            return rebuild.__wrapped__()[1]  # type: ignore[attr-defined,no-any-return]

    assert Shop.sell() == [name + "test_a_bare_decorator.<locals>.Shop.sell"]
    for kind in (staticmethod, classmethod):
        wrong: Any = kind(len)  # type: ignore[arg-type]
        with pytest.raises(TypeError, match=f"put @{kind.__name__} above @db_lock"):
            db_lock(wrong)


def test_without_settings_it_points_to_the_other_face() -> None:
    """In a process that has Django and no settings, at the first use."""
    code = "from dblock import db_lock\ntry:\n with db_lock('a'): pass\nexcept Exception as e: print(e, e.__notes__)"
    env = {name: value for name, value in os.environ.items() if name != "DJANGO_SETTINGS_MODULE"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT, env=env)
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


def test_an_unsupported_database_is_a_check(monkeypatch: pytest.MonkeyPatch) -> None:
    """E004, by its name."""
    monkeypatch.setattr(connections["postgresql"], "vendor", "oracle")
    with override_settings(DBLOCK={"USING": "postgresql"}):
        assert ids() == ["dblock.E004"]


def test_a_rollback_journal_is_a_warning(sqlite: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """W001 for a SQLite file without a write-ahead log, W004 where transactions begin deferred."""
    assert ids(databases=["default"]) == []
    wal = {"init_command": "PRAGMA journal_mode=WAL"}
    for options, expected in (({}, ["dblock.W001", "dblock.W004"]), (wal, ["dblock.W004"])):
        connections["default"].close()
        name = tmp_path / f"{len(options)}.sqlite3"
        changed = {**connections["default"].settings_dict, "NAME": name, "OPTIONS": options}
        monkeypatch.setattr(connections["default"], "settings_dict", changed)
        assert ids(databases=["default"]) == expected
    connections["default"].close()


def test_transactions_that_are_no_blocks_are_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    """W002 for a database without autocommit, where release="auto" does not see the end of a transaction."""
    assert ids() == []
    changed = {**connections["postgresql"].settings_dict, "AUTOCOMMIT": False}
    monkeypatch.setattr(connections["postgresql"], "settings_dict", changed)
    assert ids() == ["dblock.W002"]


@contextlib.contextmanager
def changed(alias: str, **settings: Any) -> Iterator[None]:
    """The settings of a database are others."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in settings.items():
            patch.setitem(connections.settings[alias], name, value)
        yield


WRITES = [
    "-c default_transaction_read_only=off",
    "-c default_transaction_read_only=on -c default_transaction_read_only=0",
]


@pytest.mark.parametrize(
    ("alias", "good", "bad"),
    [
        (
            "postgresql",
            [*({"options": each} for each in WRITES), {"target_session_attrs": "read-write"}, {"options": "-c a.b=on"}],
            [{"options": "-c default_transaction_read_only=on"}, {"target_session_attrs": "standby"}],
        ),
        (
            "mariadb",
            [{"init_command": "SET SESSION TRANSACTION ISOLATION LEVEL READ COMMITTED"}],
            [
                {"init_command": "SET tx_read_only = 1"},
                {"init_command": "set session transaction isolation level read committed, read only"},
            ],
        ),
    ],
)
@pytest.mark.direct
def test_sessions_that_may_only_read(
    request: pytest.FixtureRequest, alias: str, good: list[dict[str, Any]], bad: list[dict[str, Any]]
) -> None:
    """E007, and no lock can be had; where one can, silence."""
    ready(request, alias)
    plain = connections[alias].settings_dict["OPTIONS"]
    pool: Any = store_for(alias)._source
    with override_settings(DBLOCK={"USING": alias}):
        for options in [*good, *bad]:
            with changed(alias, OPTIONS={**plain, **options}):
                assert ids() == (["dblock.E007"] if options in bad else []), options
                pool.close_all()
                if options == bad[0]:
                    with pytest.raises(LockStoreError, match="(?i)read.only"):
                        db_lock("k", timeout=0.7).acquire()
                elif options == good[0]:
                    with db_lock("k"):
                        pass
    pool.close_all()


def test_a_file_that_is_opened_for_reading(tmp_path: Path) -> None:
    """E007 too."""
    for name, expected in (
        (f"file:{tmp_path}/x?mode=ro", ["dblock.E007"]),
        (f"file:{tmp_path}/x?cache=private&immutable=1", ["dblock.E007"]),
        (f"file:{tmp_path}/x?mode=rwc", []),
        (f"{tmp_path}/mode=ro", []),
    ):
        with changed("default", NAME=name):
            assert ids() == expected


def test_requests_with_a_snapshot_that_is_older_than_the_lock() -> None:
    """W007: on MySQL, if requests are transactions of that level; anything else is silent."""
    for alias, level, atomic, expected in (
        ("mariadb", "repeatable read", True, ["dblock.W007"]),
        ("mariadb", "REPEATABLE READ", False, []),
        ("mariadb", "read committed", True, []),
        ("mariadb", None, True, []),
        ("postgresql", "repeatable read", True, []),
        ("default", None, True, []),
    ):
        with changed(alias, OPTIONS={"isolation_level": level} if level else {}, ATOMIC_REQUESTS=atomic):
            assert ids() == expected, (alias, level)


def deployed(**settings: Any) -> list[str]:
    with override_settings(DBLOCK={"REAP_EVERY": 3600, **settings}):
        return ids(include_deployment_checks=True)


def test_what_is_for_a_desk_only() -> None:
    """W006 a pooler that keeps the database from calling, W008 locks in memory, W009 a life that is no lease's."""
    assert deployed(USING="postgresql") == []
    with changed("postgresql", DISABLE_SERVER_SIDE_CURSORS=True):
        assert deployed(USING="postgresql") == ["dblock.W006"]
        assert deployed(USING="postgresql", LISTEN=False) == []
        assert deployed() == [], "locks live elsewhere"
        with override_settings(DBLOCK={"USING": "postgresql"}):
            assert ids() == []
    for name in (":memory:", "file:locks?mode=memory&cache=shared"):
        with changed("default", NAME=name):
            assert deployed() == ["dblock.W008"]
            assert ids() == []
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
    told = set(re.findall(r'id="(dblock\.[EW]\d+)"', source))
    assert sorted(told) == re.findall(r"^``(dblock\.[EW]\d+)``", source, re.MULTILINE)
    pages = re.findall(r"Documentation: ([A-Z][\w ]+)\.", source)
    titles = {page.read_text().partition("\n")[0] for page in (ROOT / "docs").glob("*.md")}
    assert {f"# {page}" for page in pages} <= titles
    assert len(pages) == len(re.findall(r"\bhint ?=(?! ?hint)", source)) + len({hint for _, hint in _READ})


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
    import asyncio

    run("sqlite", "DELETE FROM locks")
    with db_lock("k"):
        pass
    assert reap() == 0
    time.sleep(0.01)
    with override_settings(DBLOCK={"RETENTION": 0}):
        assert until(lambda: asyncio.run(areap()) == 1), "a file that somebody writes to is left to the next time"


class Everything:
    """Sends all models to one database."""

    alias = "default"

    def db_for_read(self, model: Any, **hints: Any) -> str:
        return self.alias

    db_for_write = db_for_read


@pytest.mark.parametrize("database", ["sqlite", "postgresql"] if LONG else ["sqlite"], indirect=True)
@override_settings(DATABASE_ROUTERS=["tests.django.test_app.Everything"], ALLOWED_HOSTS=["*"], DEBUG=False)
def test_the_admin_answers_nothing_about_owners(database: str) -> None:
    """Whatever the query string of somebody who may look: the answer is the same for right and for wrong digits."""
    from django.contrib.auth.models import Permission, User

    Everything.alias = alias = ALIASES[database]
    User.objects.filter(username="viewer").delete()
    viewer = User.objects.create_user("viewer", is_staff=True)
    viewer.user_permissions.add(Permission.objects.get(codename="view_lock"))
    client = Client()
    client.force_login(viewer)
    lock = db_lock("k", using=alias, ttl=600)
    with lock:
        owner = str(lock.owner)
        wrong = owner.translate(str.maketrans("0123456789abcdef", "123456789abcdef0"))
        for path in ("", "k/change/", "k/history/"):
            page = f"/admin/dblock/lock/{path}"
            assert owner[-8:] not in client.get(page).content.decode()
            for query in (
                *(f"owner__{lookup}={{0}}" for lookup in (LOOKUPS[:4] if path else LOOKUPS)),
                *("owner={0}", "owner={0}&state=held", "owner__startswith={0}&_facets=True&q=k"),
                *("pk__owner__startswith={0}", "lock_key__owner={0}", "clock__owner={0}", "q={0}", "o={0}&q={0}"),
                *("_to_field=owner&q={0}", "_to_field=owner&_popup=1&q={0}"),
            ):
                some = slice(-8, None) if "q=" in query else slice(None if "exact" in query or "in=" in query else 1)
                answers = {
                    (answer.status_code, answer.content.count(b"data-state="))
                    for digits in (owner[some], wrong[some])
                    for answer in [client.get(f"{page}?{query.format(digits)}")]
                }
                assert len(answers) == 1, query
                if not path and query.startswith("owner"):
                    assert answers == {(400, 0)}
        for key in ("a", "b"):
            with db_lock(key, using=alias):
                pass
        for order in (*range(-8, 9), "owner", "-owner"):
            orders = set()
            for first, second in (("0", "f"), ("f", "0")):
                for key, value in (("a", first), ("b", second)):
                    run(database, "UPDATE locks SET owner = :owner WHERE lock_key = :key", owner=value, key=key)
                text = client.get("/admin/dblock/lock/", {"o": order}).content.decode()
                orders.add(text.find("/admin/dblock/lock/a/change/") < text.find("/admin/dblock/lock/b/change/"))
            assert len(orders) == 1
    found = "/admin/autocomplete/?app_label=dblock&model_name=lock&field_name=owner&term="
    assert client.get(found).status_code == 403
    connections[alias].close()


LOOKUPS = (
    *("exact", "iexact", "in", "startswith", "istartswith", "endswith", "iendswith", "contains", "icontains", "regex"),
    *("iregex", "gt", "gte", "lt", "lte", "range", "isnull", "length", "length__gt", "nothing"),
)


def test_an_owner_is_found_whole_or_not_at_all(sqlite: Path) -> None:
    """In both models, by whatever filters there are: the ORM itself knows no look-up that tells some of it."""
    from django.core.exceptions import FieldError
    from django.db.models import CharField
    from django.db.models.functions import Length
    from django.test.utils import register_lookup

    from dblock import models

    run("sqlite", "DELETE FROM locks")
    run("sqlite", "DELETE FROM lock_waiters")
    with register_lookup(CharField, Length):
        for model, names in ((models.Lock, ["owner"]), (models.Waiter, ["owner", "pk"])):
            for name in names:
                for lookup in LOOKUPS:
                    value: Any = {"in": ["a"], "isnull": False, "range": ("a", "b")}.get(lookup, "a")
                    if lookup in {"exact", "in", "isnull"}:
                        assert list(model.objects.filter(**{f"{name}__{lookup}": value})) == []
                    else:
                        with pytest.raises(FieldError):
                            model.objects.filter(**{f"{name}__{lookup}": value})
            assert not model._meta.get_field("owner").editable
    assert not admin.site.is_registered(models.Waiter)


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
    done = subprocess.run(
        [sys.executable, "-W", "error", "manage.py", "test", "example_project", "--noinput"],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "OK" in done.stderr


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

    store = store_for("default")
    execute = store.execute

    def refuse(step: Execute) -> Rows:
        if step.statement.name == "renew":
            raise StoreConflict("down")
        return execute(step)

    monkeypatch.setattr(store, "execute", refuse)
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
        with db_lock("k"):
            pass
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
