"""Four ways to make the table, one table. (The fifth is Alembic's: `tests.sqlalchemy.test_alembic`.)"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from django.core.management import call_command
from django.db.migrations.loader import MigrationLoader
from sqlalchemy import Engine, create_engine, inspect, make_url, text

from dblock.cli import main
from sqlalchemy_dblock import metadata
from tests.conftest import ALIASES, INNODB, observer, url
from tests.support.loaded import run


def plain_ddl(database: str, *options: str) -> str:
    """What the command `dblock schema` prints."""
    with redirect_stdout(StringIO()) as printed:
        assert main(["schema", database, *options]) == 0
    return printed.getvalue()


@pytest.fixture
def scratch(database: str, tmp_path: Path) -> Iterator[Engine]:
    """An empty database of the same server."""
    if database == "sqlite":
        engine = create_engine(f"sqlite:///{tmp_path}/scratch.sqlite3")
    else:
        name = f"{make_url(url(database)).database}_scratch"
        with observer(database).connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
            connection.execute(text(f"DROP DATABASE IF EXISTS {name}"))
            connection.execute(text(f"CREATE DATABASE {name}"))
        engine = create_engine(make_url(url(database)).set(database=name))
    yield engine
    engine.dispose()


def apply(engine: Engine, sql: str) -> None:
    """Run a script, as its user would by hand."""
    connection: Any = engine.raw_connection()
    if engine.dialect.name == "sqlite":
        connection.driver_connection.executescript(sql)
    else:
        cursor = connection.cursor()
        for statement in sql.split(";\n"):
            if re.sub(r"^--.*$", "", statement, flags=re.MULTILINE).strip():
                cursor.execute(statement)
        cursor.close()
        connection.commit()
    connection.close()


TABLES = ("locks", "lock_waiters", "lock_events", "lock_epoch")


def describe(engine: Engine, database: str, prefix: str = "", schema: str | None = None) -> Any:
    """The tables as the database's own catalogue has them."""
    return [_describe(engine, database, prefix + table, schema) for table in TABLES]


def _describe(engine: Engine, database: str, table: str, schema: str | None) -> Any:
    there = f"'{schema}'" if schema else "current_schema()" if database == "postgresql" else "database()"
    oid = f"""'{f'"{schema}".' if schema else ""}"{table}"'::regclass"""
    queries = {
        "sqlite": [f"PRAGMA table_info('{table}')", f"SELECT count(*) FROM sqlite_master WHERE tbl_name = '{table}'"],
        "postgresql": [
            "SELECT ordinal_position, column_name, data_type, character_maximum_length, collation_name, is_nullable,"
            " column_default, datetime_precision FROM information_schema.columns"
            f" WHERE table_name = '{table}' AND table_schema = {there} ORDER BY 1",
            f"SELECT reloptions FROM pg_class WHERE oid = {oid}",
            "SELECT indisprimary, indisunique, indkey::text, indcollation::text FROM pg_index"
            f" WHERE indrelid = {oid} ORDER BY 1, 2",
            f"SELECT contype, pg_get_constraintdef(oid) FROM pg_constraint WHERE conrelid = {oid} ORDER BY 1, 2",
        ],
        "mysql": [
            "SELECT ordinal_position, column_name, column_type, collation_name, is_nullable, column_default, column_key"
            f" FROM information_schema.columns WHERE table_name = '{table}' AND table_schema = {there} ORDER BY 1",
            f"SELECT engine FROM information_schema.tables WHERE table_name = '{table}' AND table_schema = {there}",
            "SELECT index_name, column_name FROM information_schema.statistics"
            f" WHERE table_name = '{table}' AND table_schema = {there} ORDER BY 1, 2",
        ],
    }["mysql" if database in INNODB else database]
    with engine.connect() as connection:
        return [
            [tuple(value.lower() if isinstance(value, str) else str(value) for value in row) for row in rows]
            for rows in ([*connection.execute(text(query))] for query in queries)
        ]


@pytest.mark.direct
def test_three_ways_make_one_table(database: str, scratch: Engine) -> None:
    """Django's migration, SQLAlchemy's metadata and `dblock schema`: same columns, types, collations and indexes."""
    by_django = describe(observer(database), database)
    assert [len(table[0]) for table in by_django] == [22, 15, 13, 6]
    metadata.create_all(scratch)
    assert describe(scratch, database) == by_django
    metadata.drop_all(scratch)
    apply(scratch, plain_ddl(database))
    assert describe(scratch, database) == by_django


def sqlmigrate(database: str, *options: str) -> str:
    """What Django's command prints of all migrations."""
    names = [name for app, name in MigrationLoader(None).disk_migrations if app == "dblock"]
    printed = StringIO()
    for name in sorted(names, reverse="--backwards" in options):
        call_command("sqlmigrate", "dblock", name, *options, database=ALIASES[database], stdout=printed)
    return printed.getvalue()


@pytest.mark.direct
def test_sqlmigrate_prints_all_of_it(database: str, scratch: Engine) -> None:
    """Applied by hand it makes the table that `migrate` makes; and backwards none."""
    assert "CANNOT BE WRITTEN" not in sqlmigrate(database)
    apply(scratch, sqlmigrate(database))
    assert describe(scratch, database) == describe(observer(database), database)
    apply(scratch, sqlmigrate(database, "--backwards"))
    assert inspect(scratch).get_table_names() == []


DJANGO = """
from django.conf import settings
settings.configure(
    DATABASES={"default": {"ENGINE": "django.db.backends.sqlite3", "NAME": "locks.sqlite3"}}, INSTALLED_APPS=["dblock"]
)
import django
django.setup()
from django.core.management import call_command
"""
"""A program of a project whose database is `locks.sqlite3`."""
LATER = """
from dblock import db_lock
call_command("migrate", "dblock", fake_initial=True)
with db_lock("k") as lock:
    print("taken", lock.fence > 0)
"""


def test_django_comes_later(tmp_path: Path, engine: Engine) -> None:
    """Its first migration takes the tables as they are, if it is told that they may be there."""
    metadata.create_all(engine)
    engine.dispose()
    assert "taken True" in run(DJANGO + LATER, tmp_path)
