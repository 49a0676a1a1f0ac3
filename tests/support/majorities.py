"""What the tests of majority locks share."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from typing import Any

from sqlalchemy import Engine, text

import dblock
import sqlalchemy_dblock
from dblock.core.protocol.drive import drive
from dblock.majority import protocol
from dblock.majority.statements import SERVER
from tests.conftest import ALIASES, run
from tests.support.subjects import Actor, Subject

THREE = ("sqlite", "postgresql", "mariadb")
DRIVERS = {"sqlite": "aiosqlite", "postgresql": "asyncpg", "mariadb": "aiomysql", "mysql": "asyncmy"}


def count(*databases: str) -> None:
    """Let databases count at once, as if they had been there for long."""
    for database in databases:
        count_on(engine("sync", database))


def count_on(engine: Engine) -> None:
    """The same of the database of an engine."""
    store = sqlalchemy_dblock.db_lock(engine, "any")._place.store()
    _ = drive(protocol.standing(store.database, 1.0, store.database.now() + 5))
    with engine.begin() as connection:
        old = text("UPDATE locks SET acquired_at = '2000-01-01 00:00:00' WHERE lock_key = :key")
        connection.execute(old, {"key": SERVER})


def majority(variant: str, face: str, key: str, databases: Sequence[str] = THREE, **options: Any) -> Any:
    """A majority lock on those databases."""
    if variant == "django":
        return dblock.db_quorum_lock(key, using=[ALIASES[each] for each in databases], **options)
    return sqlalchemy_dblock.db_quorum_lock([engine(face, each) for each in databases], key, **options)


def engine(face: str, database: str) -> Any:
    """The engine of a database."""
    driver = DRIVERS[database] if face == "async" else ""
    return _subjects.setdefault((face, database), Subject("sqlalchemy", face, database, driver)).engine


_subjects: dict[tuple[str, str], Subject] = {}


def close(actor: Actor) -> None:
    """Close the engines; `actor` is of the event loop that the asynchronous ones ran on, if there are any."""
    for subject in _subjects.values():
        actor.do(subject.engine.dispose)
    _subjects.clear()
    gc.collect()


def holders(key: str = "k") -> list[str]:
    """The databases whose row says that somebody holds the key."""
    sql = "SELECT owner FROM locks WHERE lock_key = :key AND owner IS NOT NULL"
    return [each for each in THREE if run(each, sql, key=key)]


def fences() -> set[int]:
    """The fences that the databases show."""
    rows = [row for each in THREE for row in run(each, "SELECT fence FROM locks WHERE lock_key = 'k'")]
    return {int(str(fence)) for (fence,) in rows}
