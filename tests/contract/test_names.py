"""Tables of other names, in other schemas; and tables of the usual names that are another application's."""

from __future__ import annotations

import asyncio
import contextlib
import re
import sqlite3
import subprocess
import sys
import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import IO, Any

import pytest
from django.core.checks import run_checks
from django.core.exceptions import ImproperlyConfigured
from django.core.management import call_command
from django.core.management.base import SystemCheckError
from django.db import OperationalError, connections
from django.test import override_settings
from sqlalchemy import Engine, create_engine, inspect, make_url, text
from sqlalchemy.ext.asyncio import create_async_engine

from dblock import db_lock as db_lock_of_django
from dblock.celery import states
from dblock.core.errors import LockStoreError, UnsupportedDatabase
from dblock.core.protocol.drive import drive
from dblock.core.statements import DIALECTS, dialect_for
from dblock.core.statements.base import Tables
from dblock.core.validation import valid_tables
from dblock.models import table
from dblock.operating.statements.tables import plain_sql
from dblock.store import DjangoStore
from sqlalchemy_dblock import attach, db_lock, metadata, metadata_for, reap
from tests.conftest import INNODB, observer, own_engine, url
from tests.contract.test_driver_errors import statements
from tests.project.test_schema import apply, describe, plain_ddl
from tests.statements.laboratory import Session
from tests.support.lab import cycle, hold_of, renew, there, until

pytestmark = pytest.mark.direct

ROOT = Path(__file__).parents[2]
PREFIX = "App-1_"
STRANGERS = "CREATE TABLE {} (id integer PRIMARY KEY, door integer NOT NULL)"
ASYNC = {"sqlite": "aiosqlite", "postgresql": "asyncpg", "mariadb": "aiomysql", "mysql": "asyncmy"}


class Place:
    """A database in which another application has the usual names, and ours have others."""

    def __init__(self, database: str, tmp_path: Path) -> None:
        self.database = database
        self.url = make_url(url(database))
        self.home = self.url.database
        self.schema = {"sqlite": None, "postgresql": "Ops"}.get(database, f"{self.url.database}_ops")
        if database == "sqlite":
            self.url = self.url.set(database=f"{tmp_path}/names.sqlite3")
        else:
            name = f"{self.url.database}_names"
            force = " WITH (FORCE)" if database == "postgresql" else ""
            self.sql(f"DROP DATABASE IF EXISTS {name}{force}", f"CREATE DATABASE {name}")
            self.url = self.url.set(database=name)
        self.engine = self._engine()
        self.clean()
        self.sql(STRANGERS.format("locks"), STRANGERS.format("lock_waiters"), engine=self.engine)

    def sql(self, *statements: str, engine: Engine | None = None) -> None:
        with (engine or observer(self.database)).connect() as connection:
            apart = connection.execution_options(isolation_level="AUTOCOMMIT")
            for statement in statements:
                apart.execute(text(statement))

    def _engine(self) -> Engine:
        return create_engine(self.url, execution_options={"dblock_prefix": PREFIX, "dblock_schema": self.schema})

    def as_for_django(self) -> None:
        """Where its migration makes the schema, or there can be none."""
        if self.database == "postgresql":
            self.sql('DROP SCHEMA "Ops"', engine=self.engine)
        else:
            self.schema = None
            self.engine.dispose()
            self.engine = self._engine()

    def clean(self) -> None:
        """Have an empty schema."""
        if self.database == "postgresql":
            self.sql('DROP SCHEMA IF EXISTS "Ops" CASCADE', 'CREATE SCHEMA "Ops"', engine=self.engine)
        elif self.database in INNODB:
            self.sql(f"DROP DATABASE IF EXISTS {self.schema}", f"CREATE DATABASE {self.schema}")

    def asynchronous(self) -> Any:
        options = self.engine.get_execution_options()
        driver = self.url.set(drivername=f"{self.url.get_backend_name()}+{ASYNC[self.database]}", query={})
        return create_async_engine(driver, execution_options=dict(options))

    def looks(self) -> Any:
        """Our tables, as the catalogue has them."""
        named: Any = describe(self.engine, self.database, PREFIX, self.schema)
        return named


@pytest.fixture
def place(database: str, tmp_path: Path) -> Iterator[Place]:
    place = Place(database, tmp_path)
    yield place
    place.engine.dispose()
    if place.database in INNODB:
        place.sql(f"DROP DATABASE {place.home}_ops")


@pytest.mark.parametrize("vendor", DIALECTS)
def test_no_statement_keeps_a_usual_name(vendor: str) -> None:
    """All but the pin, which is named when it is known where the lock's own sessions look."""
    schema = "" if vendor == "sqlite" else "ops"
    dialect = dialect_for(vendor, Tables("my_", schema))
    for statement in statements(dialect):
        usual = re.findall(r"\b(?:locks|lock_waiters)(?:_pin|_queue)?\b", statement.sql)
        assert bool(usual) == (statement.name == "pin"), statement.name
    made = plain_sql(vendor, dialect.tables)
    assert "my_locks_pin" in made
    assert not re.search(r"\b(locks|lock_waiters)", made)
    assert dialect_for(vendor, Tables()) == DIALECTS[vendor]


def test_plain_names_only() -> None:
    """What would have to be escaped somewhere is refused at the door; and SQLite has no schemas."""
    for bad in ('a"b', "a`b", "a b", "a.b", "ä", "a%b", "a:key", "x" * 46):
        with pytest.raises(ValueError, match="prefix of tables"):
            valid_tables(bad, None)
    with pytest.raises(TypeError, match="a schema is text"):
        valid_tables("", 1)
    with pytest.raises(ValueError, match="prefix"):
        metadata_for(prefix="x;")
    engine = create_engine("sqlite://", execution_options={"dblock_schema": "ops"})
    with pytest.raises(UnsupportedDatabase, match="SQLite has no schemas, such as 'ops'"):
        db_lock(engine, "k")


def test_two_ways_make_them(place: Place) -> None:
    """`metadata_for` and `dblock schema`, and `create_all` leaves the other application's tables alone."""
    made = metadata_for(prefix=PREFIX, schema=place.schema)
    made.create_all(place.engine)
    by_metadata = place.looks()
    assert [len(table[0]) for table in by_metadata] == [22, 15, 13, 6]
    made.drop_all(place.engine)
    assert set(inspect(place.engine).get_table_names()) == {"locks", "lock_waiters"}
    options = ["--prefix", PREFIX, *(["--schema", place.schema] if place.schema else [])]
    apply(place.engine, plain_ddl(place.database, *options))
    assert place.looks() == by_metadata


def test_every_statement_is_about_them(place: Place) -> None:
    """The server accepts each, beside tables of the usual names that have none of its columns."""
    metadata_for(prefix=PREFIX, schema=place.schema).create_all(place.engine)
    dialect = dialect_for(place.database, valid_tables(PREFIX, place.schema))
    session = Session(place.database, place.url.render_as_string(hide_password=False))
    for statement in statements(dialect):
        named = statement.over(dialect.tables, dialect.quote) if statement is dialect.pin else statement
        given = {"leases": "[]", "owners": "[]", "keys": "[]", "number": 0, "fair": 1, "most": 1}
        session.send(named, given | ({"key": "reader"} if statement.name == "read" else {}))
        if statement.name == "call" and place.database in INNODB:  # nobody has that name
            session.error = None
        assert session.error is None, (statement.name, session.error)
    session.close()


def test_states_are_under_that_name_too(place: Place) -> None:
    """Made by who enters one, or by hand from what `dblock schema --states` prints."""
    metadata_for(prefix=PREFIX, schema=place.schema).create_all(place.engine)
    store = db_lock(place.engine, "k")._place.store()
    enter = partial(states.enter, store.database, "k")
    assert drive(enter(7)) == ("", 0)
    assert drive(states.write(store.database, "k", 7, 1, "told"))
    made = inspect(place.engine).get_columns(f"{PREFIX}lock_states", schema=place.schema)
    name = store.database.dialect.tables.name("lock_states", store.database.dialect.quote)
    with place.engine.begin() as connection:
        connection.execute(text(f"DROP TABLE {name}"))
    schema = ["--schema", place.schema] if place.schema else []
    printed = plain_ddl(place.database, "--prefix", PREFIX, *schema, "--states")
    apply(place.engine, printed[printed.index("CREATE TABLE IF NOT EXISTS") :])
    assert str(inspect(place.engine).get_columns(f"{PREFIX}lock_states", schema=place.schema)) == str(made)
    assert drive(enter(8)) == ("", 0)


def wait_for_it(engine: Engine, turns: list[int | None]) -> None:
    with db_lock(engine, "k", timeout=20) as mine:
        turns.append(mine.fence)


def test_locks_live_there(place: Place) -> None:
    """Held, renewed, entered again, guarded, handed over, waited for and reaped, with nothing in the usual tables."""
    metadata_for(prefix=PREFIX, schema=place.schema).create_all(place.engine)
    engine, turns = place.engine, list[int | None]()
    waiters = [threading.Thread(target=wait_for_it, args=(engine, turns)) for _ in range(2)]
    with db_lock(engine, "k", ttl=20, timeout=5) as lock:
        turns.append(lock.fence)
        for each in waiters:
            each.start()
        with db_lock(engine, "k", ttl=20):
            assert lock.verify()
        lease = hold_of(lock).lease
        before = lease.renewed
        renew()
        assert until(lambda: lease.renewed > before, 10), "it was not renewed"
        with engine.connect() as connection, connection.begin():
            lock.guard(connection)
            if place.database != "sqlite":  # where it would be the second writer
                # In tables of yet another name the same key is another lock: a guard of the one keeps no other.
                metadata_for(prefix="more").create_all(place.engine)
                more = own_engine(place.url, execution_options={"dblock_prefix": "more"})
                cycle(db_lock(more, "k", timeout=1))
        token = lock.detach()
    with attach(engine, token) as same:
        assert same.fence == turns[0]
    for each in waiters:
        each.join()
    assert sorted(turns, key=str) == turns
    assert len(turns) == 3
    assert until(lambda: reap(engine, retention=0) == 1), "a file that somebody writes to is left to the next time"


def test_an_asynchronous_engine_and_django_know_them_too(place: Place) -> None:
    """`migrate` makes them where the setting says, as `metadata_for` does; each face sees what the other holds."""
    place.as_for_django()
    command = [sys.executable, "-c", SITE, place.database, str(place.url.database), PREFIX, place.schema or ""]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT) as site:
        assert site.stdin is not None
        assert site.stdout is not None
        assert site.stdout.readline() == "migrated\n"
        by_django = place.looks()

        async def hold(stdin: IO[str], stdout: IO[str]) -> None:
            engine = place.asynchronous()
            async with db_lock(engine, "k", ttl=60) as lock:
                stdin.write(f"{lock.fence}\n")
                stdin.flush()
                assert await asyncio.to_thread(stdout.readline) == "seen\n"
            await engine.dispose()

        asyncio.run(hold(site.stdin, site.stdout))
        assert site.stdout.readline() == "taken\n"
    assert site.returncode == 0
    made = metadata_for(prefix=PREFIX, schema=place.schema)
    made.drop_all(place.engine)
    made.create_all(place.engine)
    assert place.looks() == by_django


SITE = """
import sys
from django.conf import settings
from tests import settings as ours
database, name, prefix, schema = sys.argv[1:]
known = {name: value for name, value in vars(ours).items() if name.isupper()}
known["DATABASES"] = {"default": {**ours.DATABASES["default" if database == "sqlite" else database], "NAME": name}}
known["DBLOCK"] = {"TABLE_PREFIX": prefix, "SCHEMA": schema or None}
settings.configure(**known)
import django
django.setup()
from django.contrib.auth.models import User
from django.core.management import call_command
from django.db import transaction
from django.test import Client
from dblock import db_lock
from dblock.models import Lock

call_command("migrate", verbosity=0)
call_command("makemigrations", "dblock", check=True, verbosity=0)
call_command("check", databases=["default"], stdout=sys.stderr)
print("migrated", flush=True)
fence = int(input())
lock = db_lock("k", timeout=20)
assert not lock.acquire(timeout=0.3)
assert Lock.objects.get(lock_key="k").fence == fence
settings.ALLOWED_HOSTS = ["*"]
browser = Client()
browser.force_login(User.objects.create_superuser("root"))
page = browser.get("/admin/dblock/lock/")
assert page.status_code == 200 and ">k<" in page.content.decode(), page
print("seen", flush=True)
with lock:
    assert lock.fence > fence
    with transaction.atomic():
        lock.guard()
print("taken", flush=True)
"""


def test_tables_of_another_application(place: Place) -> None:
    """They are called that, with what to do."""
    engine = create_engine(place.url)
    metadata.tables["lock_epoch"].create(engine)
    with pytest.raises(LockStoreError, match=r"`locks`.* in .* is not as dblock made it: .*metadata_for\(prefix="):
        db_lock(engine, "k").acquire()
    engine.dispose()


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The file of a database of its own, which Django knows as `other`."""
    path = tmp_path / "other.sqlite3"
    monkeypatch.setitem(connections.settings, "other", {**connections.settings["default"], "NAME": str(path)})
    yield path
    connections["other"].close()
    del connections["other"]


def test_django_names_them_before_it_migrates(path: Path) -> None:
    """E005, and not the database's words for it; none for our own tables, nor without any."""
    with override_settings(DBLOCK={"USING": "other"}):
        assert [each.id for each in run_checks(tags=["dblock"], databases=["other"])] == []
        with contextlib.closing(sqlite3.connect(path)) as database:
            database.execute(STRANGERS.format("lock_waiters"))
        with pytest.raises(SystemCheckError, match="`lock_waiters` in database 'other' is another application's"):
            call_command("migrate", database="other", verbosity=0, skip_checks=False)
        with contextlib.closing(sqlite3.connect(path)) as database:
            database.execute("DROP TABLE lock_waiters")
        call_command("migrate", database="other", verbosity=0, skip_checks=False)
        assert [each.id for each in run_checks(tags=["dblock"], databases=["other"])] == []


def test_tables_that_migrate_did_not_make(path: Path) -> None:
    """W010 says how it takes them over, which it does; silence where it would not make them."""
    engine = create_engine(f"sqlite:///{path}")
    metadata.create_all(engine)
    engine.dispose()
    with override_settings(DBLOCK={"USING": "other"}):

        def ids() -> list[str]:
            return [str(each.id) for each in run_checks(tags=["dblock"], databases=["other"])]

        [found] = run_checks(tags=["dblock"], databases=["other"])
        assert found.id == "dblock.W010"
        with override_settings(MIGRATION_MODULES={"dblock": None}):
            assert ids() == []
        command = there(re.search(r"`manage\.py (.+?)`", str(found.hint)))
        with pytest.raises(OperationalError, match="already exists"):
            call_command("migrate", database="other", verbosity=0)
        call_command(*command.group(1).split(), verbosity=0, skip_checks=False)
        assert ids() == []
        call_command("migrate", database="other", verbosity=0, skip_checks=False)
        cycle(db_lock_of_django("k"))


def test_settings_that_make_no_name() -> None:
    """A system check reports them, and so does taking a lock."""
    for wrong in ({"TABLE_PREFIX": "a b"}, {"SCHEMA": 1}):
        with override_settings(DBLOCK=wrong):
            assert [each.id for each in run_checks(tags=["dblock"])] == ["dblock.E002"]
            assert table("locks") == "locks"
            with pytest.raises(ImproperlyConfigured, match=r"DBLOCK\['TABLE_PREFIX'\]"):
                DjangoStore("default")
    with override_settings(DBLOCK={"SCHEMA": "ops", "USING": None}):
        assert [each.id for each in run_checks(tags=["dblock"])] == ["dblock.E006"]
        with pytest.raises(UnsupportedDatabase, match="SCHEMA.* is for PostgreSQL"):
            DjangoStore("default")
    for nonsense in (list[str](), "x"):
        with override_settings(DBLOCK=nonsense):
            assert [each.id for each in run_checks(tags=["dblock"])] == ["dblock.E001"]
            assert table("locks") == "locks"
    with override_settings(DBLOCK={"SCHEMA": "ops", "USING": "postgresql", "TABLE_PREFIX": "my_"}):
        assert table("locks") == '"ops"."my_locks"'
