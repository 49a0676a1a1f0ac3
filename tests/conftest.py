"""The databases of a test session: private servers, started when the first test asks for one."""

from __future__ import annotations

import os
import tempfile
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import create_engine, event, text
from sqlalchemy.engine import Dialect, Engine

from tests.servers import MariaDB, PgBouncer, PostgreSQL, free_port

DATABASES = ("sqlite", "postgresql", "mariadb")
POOLER = bool(os.environ.get("DBLOCK_POOLER"))
"""Are the tests to speak to PostgreSQL through PgBouncer in transaction mode?"""
ALIASES = {"sqlite": "default", "postgresql": "postgresql", "mariadb": "mariadb"}

_directory = tempfile.TemporaryDirectory(prefix="dblock-tests-")
_worker = os.environ.get("PYTEST_XDIST_WORKER", "")
if os.environ.get("DBLOCK_TEST_WORKER") != _worker:  # else this is a process that a test has started
    os.environ["DBLOCK_TEST_WORKER"] = _worker
    os.environ["DBLOCK_TEST_SQLITE"] = f"{_directory.name}/locks.sqlite3"
    for _name in ("POSTGRESQL_PORT", "MARIADB_PORT", "POSTGRESQL_WIRE", "MARIADB_WIRE"):
        os.environ[f"DBLOCK_TEST_{_name}"] = str(free_port())
os.environ.setdefault("DJANGO_SETTINGS_MODULE", "tests.settings")


def url(database: str, driver: str = "") -> str:
    """The SQLAlchemy URL of a test database."""
    if database == "sqlite":
        return f"sqlite{driver and f'+{driver}'}:///{os.environ['DBLOCK_TEST_SQLITE']}"
    if database == "postgresql":
        port = os.environ["DBLOCK_TEST_POSTGRESQL_PORT"]
        return f"postgresql+{driver or 'psycopg'}://dblock@127.0.0.1:{port}/postgres"
    return f"mysql+{driver or 'pymysql'}://root@127.0.0.1:{os.environ['DBLOCK_TEST_MARIADB_PORT']}/dblock"


def _prepare_nothing(dialect: Dialect, record: object, positional: object, options: dict[str, Any]) -> None:
    """What SQLAlchemy's documentation has engines do behind PgBouncer."""
    if dialect.driver == "asyncpg":
        options |= {"statement_cache_size": 0, "prepared_statement_cache_size": 0}
        options["prepared_statement_name_func"] = lambda: f"__asyncpg_{uuid.uuid4()}__"
    elif dialect.name == "postgresql":
        options["prepare_threshold"] = None


if POOLER:
    event.listen(Engine, "do_connect", _prepare_nothing)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Leave out what cannot be seen through PgBouncer."""
    for item in items if POOLER else ():
        if item.get_closest_marker("direct"):
            item.add_marker(pytest.mark.skip("not through PgBouncer"))


def pytest_configure() -> None:
    """Set Django up; it connects to nothing before the first test that needs it."""
    import django

    django.setup()


@pytest.fixture(scope="session")
def sqlite() -> Iterator[Path]:
    """A SQLite file with the table, made by Django's migration."""
    _migrate("default")
    yield Path(os.environ["DBLOCK_TEST_SQLITE"])


@pytest.fixture(scope="session")
def postgresql() -> Iterator[PostgreSQL]:
    """A PostgreSQL server with the table, made by Django's migration; with POOLER, PgBouncer is before it."""
    server = PostgreSQL()
    pooler = PgBouncer(server) if POOLER else None
    front = pooler or server
    front.port = int(os.environ["DBLOCK_TEST_POSTGRESQL_PORT"])
    try:
        for each in (server, pooler):
            if each is not None:
                each.prepare()
                each.start()
        _migrate("postgresql")
        yield server
    finally:
        if pooler is not None:
            pooler.close()
        server.close()


@pytest.fixture(scope="session")
def mariadb() -> Iterator[MariaDB]:
    """A MariaDB server with the table, made by Django's migration."""
    server = MariaDB()
    server.port = int(os.environ["DBLOCK_TEST_MARIADB_PORT"])
    try:
        server.prepare()
        server.start()
        server.create_database("dblock")
        _migrate("mariadb")
        yield server
    finally:
        server.close()


@pytest.fixture(params=DATABASES)
def database(request: pytest.FixtureRequest) -> str:
    """Each database in turn, running and with an empty table."""
    return ready(request, request.param)


def ready(request: pytest.FixtureRequest, database: str) -> str:
    """See that `database` runs and that its tables are empty."""
    if POOLER and database != "postgresql":
        pytest.skip("not through PgBouncer")
    request.getfixturevalue(database)
    run(database, "DELETE FROM locks")
    run(database, "DELETE FROM lock_waiters")
    return database


def run(database: str, sql: str, **parameters: object) -> list[tuple[object, ...]]:
    """Run one statement as a stranger would, beside every lock."""
    with observer(database).connect() as connection:
        result = connection.execute(text(sql), parameters)
        rows = [tuple(row) for row in result] if result.returns_rows else []
        connection.commit()
    return rows


def observer(database: str) -> Engine:
    """A plain engine of the tests' own."""
    if database not in _observers:
        _observers[database] = create_engine(url(database))
    return _observers[database]


_observers: dict[str, Engine] = {}


def _migrate(alias: str) -> None:
    from django.core.management import call_command

    call_command("migrate", database=alias, verbosity=0)
