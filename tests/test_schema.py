"""Three ways to make the table, one table; and Alembic agrees."""

from __future__ import annotations

import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from sqlalchemy import Engine, create_engine, text

from sqlalchemy_dblock import metadata
from tests.conftest import observer, url


def plain_ddl(database: str) -> str:
    """What the command `dblock schema` prints."""
    done = subprocess.run(
        [sys.executable, "-m", "dblock.cli", "schema", database], capture_output=True, text=True, check=True
    )
    return done.stdout


@pytest.fixture
def scratch(database: str, tmp_path: Path) -> Iterator[Engine]:
    """An empty database of the same server."""
    if database == "sqlite":
        engine = create_engine(f"sqlite:///{tmp_path}/scratch.sqlite3")
    else:
        with observer(database).connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
            connection.execute(text("DROP DATABASE IF EXISTS scratch"))
            connection.execute(text("CREATE DATABASE scratch"))
        engine = create_engine(url(database).rpartition("/")[0] + "/scratch")
    yield engine
    engine.dispose()


def describe(engine: Engine, database: str) -> Any:
    """The table as the database's own catalogue has it."""
    queries = {
        "sqlite": ["PRAGMA table_info(locks)", "SELECT count(*) FROM sqlite_master WHERE tbl_name = 'locks'"],
        "postgresql": [
            "SELECT ordinal_position, column_name, data_type, character_maximum_length, collation_name, is_nullable,"
            " column_default, datetime_precision FROM information_schema.columns WHERE table_name = 'locks' ORDER BY 1",
            "SELECT reloptions FROM pg_class WHERE oid = 'locks'::regclass",
            "SELECT indisprimary, indkey::text, indcollation::text FROM pg_index WHERE indrelid = 'locks'::regclass",
            "SELECT contype, pg_get_constraintdef(oid) FROM pg_constraint WHERE conrelid = 'locks'::regclass",
        ],
        "mariadb": [
            "SELECT ordinal_position, column_name, column_type, collation_name, is_nullable, column_default, column_key"
            " FROM information_schema.columns WHERE table_name = 'locks' AND table_schema = database() ORDER BY 1",
            "SELECT engine FROM information_schema.tables WHERE table_name = 'locks' AND table_schema = database()",
            "SELECT index_name, column_name FROM information_schema.statistics"
            " WHERE table_name = 'locks' AND table_schema = database()",
        ],
    }[database]
    with engine.connect() as connection:
        return [
            [tuple(value.lower() if isinstance(value, str) else str(value) for value in row) for row in rows]
            for rows in ([*connection.execute(text(query))] for query in queries)
        ]


def test_three_ways_make_one_table(database: str, scratch: Engine) -> None:
    """Django's migration, SQLAlchemy's metadata and `dblock schema`: same columns, types, collations and indexes."""
    by_django = describe(observer(database), database)
    assert len(by_django[0]) == 13
    metadata.create_all(scratch)
    assert describe(scratch, database) == by_django
    metadata.drop_all(scratch)
    if database == "sqlite":
        connection: Any = scratch.raw_connection()
        assert isinstance(connection.driver_connection, sqlite3.Connection)
        connection.driver_connection.executescript(plain_ddl(database))
        connection.close()
    else:
        with scratch.begin() as transaction:
            transaction.execute(text(plain_ddl(database)))
    assert describe(scratch, database) == by_django


@pytest.mark.parametrize("made_by", ["django", "sqlalchemy"])
def test_alembic_sees_no_difference(database: str, scratch: Engine, made_by: str) -> None:
    """Autogenerate after an upgrade has nothing to do, types included."""
    engine = observer(database) if made_by == "django" else scratch
    metadata.create_all(engine)
    with engine.connect() as connection:
        context = MigrationContext.configure(
            connection,
            opts={"compare_type": True, "include_name": lambda name, kind, _: kind != "table" or name == "locks"},
        )
        assert compare_metadata(context, metadata) == []


def test_mysql_has_its_own_name_for_the_collation() -> None:
    """MariaDB and MySQL call the exact collation differently."""
    assert "utf8mb4_nopad_bin" in plain_ddl("mariadb")
    assert "utf8mb4_0900_bin" in plain_ddl("mysql")
    assert "nopad" not in plain_ddl("mysql")
