"""`create_tables`, and the schema that an engine's `schema_translate_map` says."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import URL, Engine, create_engine, inspect, make_url, text
from sqlalchemy.exc import DBAPIError
from sqlalchemy.ext.asyncio import create_async_engine

from sqlalchemy_dblock import UnsupportedDatabase, create_tables, db_lock, metadata
from tests.conftest import SERVERS, own_engine, ready, run, url
from tests.support.lab import cycle, together
from tests.support.subjects import EVERY, Subject

pytestmark = pytest.mark.direct

AT_ONCE = 4
SCHEMA = "tenant_a"


@pytest.fixture
def empty(database: str, tmp_path: Path) -> Iterator[tuple[str, str | None]]:
    """The URL of a database that is there but has no tables, and the schema to use in it."""
    if database == "sqlite":
        yield f"sqlite:///{tmp_path}/new.sqlite3", None
    elif database == "postgresql":
        run(database, f"DROP SCHEMA IF EXISTS {SCHEMA} CASCADE")
        run(database, f"CREATE SCHEMA {SCHEMA}")
        yield url(database), SCHEMA
        run(database, f"DROP SCHEMA {SCHEMA} CASCADE")
    else:
        name = f"{make_url(url(database)).database}_{SCHEMA}"
        run(database, f"DROP DATABASE IF EXISTS {name}")
        run(database, f"CREATE DATABASE {name}")
        yield url(database), name
        run(database, f"DROP DATABASE {name}")


def tenants(where: str, schema: str | None, **options: Any) -> Engine:
    engine = create_engine(where, **options)
    return engine if schema is None else engine.execution_options(schema_translate_map={None: schema})


@pytest.mark.parametrize("level", [None, "AUTOCOMMIT", "SERIALIZABLE"])
def test_workers_that_start_at_once(empty: tuple[str, str | None], level: str | None) -> None:
    """On an empty database, at any isolation level: all go on, with tables that work."""
    engines = [tenants(*empty, **({} if level is None else {"isolation_level": level})) for _ in range(AT_ONCE)]
    assert together(*(lambda engine=engine: create_tables(engine) for engine in engines)) == []
    for engine in engines:
        cycle(db_lock(engine, "k", timeout=5))
        engine.dispose()
    named = [index["name"] for index in inspect(engines[0]).get_indexes("lock_waiters", schema=empty[1])]
    assert "lock_waiters_queue" in named
    engines[0].dispose()


@pytest.mark.parametrize("subject", [each for each in EVERY if each.face == "async" and each.driver], ids=str)
def test_an_asynchronous_worker(request: pytest.FixtureRequest, subject: Subject, tmp_path: Path) -> None:
    """Awaits it; with two of them, and one that is told twice."""
    database = subject.database
    where = url(ready(request, database), subject.driver)
    if database == "sqlite":
        where = f"sqlite+aiosqlite:///{tmp_path}/new.sqlite3"

    async def work() -> None:
        engine = create_async_engine(where, execution_options={"dblock_prefix": "async_"})
        await asyncio.gather(create_tables(engine), create_tables(engine))
        await create_tables(engine)
        lock = db_lock(engine, "k", timeout=5)
        async with lock:
            pass
        await engine.dispose()

    errors = together(*[lambda: asyncio.run(work())] * 2)
    for name in ("locks", "lock_waiters", "lock_events", "lock_epoch") if database != "sqlite" else ():
        run(database, f"DROP TABLE IF EXISTS async_{name}")
    assert errors == []


def test_what_is_missing_is_made(engine: Engine) -> None:
    """An index of a table that is there, too; rows stay."""
    with db_lock(engine, "k"), engine.begin() as connection:
        connection.execute(text("DROP INDEX lock_waiters_queue"))
        connection.execute(text("DROP TABLE lock_events"))
    create_tables(engine)
    made = inspect(engine)
    assert made.has_table("lock_events")
    assert [index["name"] for index in made.get_indexes("lock_waiters")] == ["lock_waiters_queue"]
    with engine.connect() as connection:
        assert connection.execute(text("SELECT count(*) FROM locks")).scalar() == 1


def test_a_database_that_refuses(tmp_path: Path) -> None:
    """SQLAlchemy's error, after a bounded number of tries."""
    (tmp_path / "read.sqlite3").touch()
    engine = own_engine(f"sqlite:///file:{tmp_path}/read.sqlite3?mode=ro&uri=true")
    with pytest.raises(DBAPIError):
        create_tables(engine)


@pytest.mark.parametrize("database", SERVERS)
def test_tables_that_are_all_there(lowly: Callable[..., URL], database: str) -> None:
    """The rights that the lock needs suffice; no right on the history's table does, where no history is kept."""
    engine = own_engine(lowly(database, "SELECT", "INSERT", "UPDATE", "DELETE"))
    create_tables(engine)
    cycle(db_lock(engine, "k", timeout=5))
    if database != "postgresql":
        with pytest.raises(DBAPIError, match="lock_events"):
            create_tables(engine.execution_options(dblock_history=10))


def test_a_translated_schema(empty: tuple[str, str | None], database: str) -> None:
    """The lock looks where the engine's tables are made, and shares no key with users of another schema."""
    where, schema = empty
    root, home = own_engine(where), own_engine(database)
    if schema is None:
        with pytest.raises(UnsupportedDatabase, match="SQLite has no schemas"):
            db_lock(root.execution_options(schema_translate_map={None: "main"}), "k")
        return
    engine = root.execution_options(schema_translate_map={None: schema, "ops": "elsewhere"})
    metadata.create_all(engine)
    with db_lock(engine, "k", timeout=5), db_lock(home, "k", timeout=5):
        with engine.connect() as connection:
            assert connection.execute(text(f"SELECT lock_key FROM {schema}.locks")).all() == [("k",)]
        again = root.execution_options(**engine.get_execution_options())
        with db_lock(again, "k", timeout=0) as same:  # the engine of another request, in the same flow
            assert same.count == 2
    named = root.execution_options(dblock_schema="ops", schema_translate_map={"ops": schema})
    cycle(db_lock(named, "k", timeout=5))
