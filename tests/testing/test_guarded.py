"""The kit and guarded blocks: a lock that is taken away before, in and after one, in memory and over a database."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from django.db import connections
from sqlalchemy import text

import dblock
import sqlalchemy_dblock
from dblock import LockLost, testing
from tests.conftest import ALIASES, observer, ready, run
from tests.support.lab import before

MOMENTS = ("before the guard", "in the body", "after the commit")


@pytest.fixture(params=["in memory", "over the database"])
def database(request: pytest.FixtureRequest) -> Iterator[str]:
    """That of the transactions, and perhaps of the locks."""
    memory = request.param == "in memory"
    name = ready(request, "sqlite" if memory else "postgresql")
    run(name, "CREATE TABLE IF NOT EXISTS guarded (n integer)")
    run(name, "DELETE FROM guarded")
    with testing.memory() if memory else contextlib.nullcontext():
        yield name
    connections.close_all()


def in_django(database: str, body: Callable[[], None], taken: Callable[[Any], None]) -> None:
    lock = dblock.db_lock("k", using=ALIASES[database], ttl=30)
    taken(lock)
    with lock.atomic(), connections[ALIASES[database]].cursor() as cursor:
        cursor.execute("INSERT INTO guarded VALUES (1)")
        body()


def in_sqlalchemy(database: str, body: Callable[[], None], taken: Callable[[Any], None]) -> None:
    engine = observer(database)
    lock = sqlalchemy_dblock.db_lock(engine, "k", ttl=30)
    taken(lock)
    with lock.begin(engine) as connection:
        connection.execute(text("INSERT INTO guarded VALUES (1)"))
        body()


@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.parametrize("block", [in_django, in_sqlalchemy])
def test_a_lock_that_is_taken_away(database: str, block: Callable[..., None], moment: str) -> None:
    """LockLost and nothing committed; or it was committed, and the block ends without an error."""

    def taken(lock: Any) -> None:
        if moment != "in the body":
            before(lock, "guard" if moment == "before the guard" else "__exit__", lambda: testing.take_away("k"))

    def body() -> None:
        if moment == "in the body":
            testing.take_away("k")

    if moment == "before the guard":
        with pytest.raises(LockLost, match="taken away by a test"):
            block(database, body, taken)
    else:
        block(database, body, taken)
    assert run(database, "SELECT count(*) FROM guarded") == [(0 if moment == "before the guard" else 1,)]
    block(database, lambda: None, lambda _: None)
