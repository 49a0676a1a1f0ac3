"""What a statement reads does not depend on how many rows there are beside those that it is about.

A plan may be older than the rows: prepared sessions keep theirs, and others are made by statistics of a time when the
tables were small. So the tables grow by some ten thousand rows after every statement has been planned, and no statement
may read more than a few pages, index entries or steps for each row that it looks up.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import psycopg
import pytest

from dblock.operating.statements.tables import plain_sql
from tests.conftest import INNODB, ready, url
from tests.statements.large import LIVE, MINE, Counting, Growing, Prepared
from tests.support.servers import PostgreSQL, running

pytestmark = pytest.mark.direct

_ROLE: Final = """
ALTER ROLE dblock SET enable_seqscan = on;
ALTER ROLE dblock SET enable_indexscan = off;
ALTER ROLE dblock SET enable_nestloop = off;
ALTER ROLE dblock SET plan_cache_mode = auto;
"""
"""Settings of a user who knows better."""
_KINDS: Final = {"own": "", "pooled": "", "own, against the role's settings": _ROLE}
"""Sessions of PostgreSQL: the lock's own, and those behind a pooler, where nothing is prepared or set."""
TABLES: Final = [
    *(("postgresql", version, kind) for version in PostgreSQL.installed() for kind in _KINDS),
    *((name, "", "") for name in INNODB),
    *(("sqlite", "", kind) for kind in ("", "analysed")),
]


@pytest.fixture(params=TABLES, ids=lambda param: "-".join(filter(None, param)))
def growing(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Growing]:
    """Small tables of a database, for which all statements have been planned."""
    database, version, kind = request.param
    if database == "postgresql":
        with _postgresql(version, kind) as tables:
            yield tables
        return
    address = url(ready(request, database)) if database != "sqlite" else f"sqlite:///{tmp_path}/locks.sqlite3"
    if database == "sqlite":
        file = sqlite3.connect(tmp_path / "locks.sqlite3")
        _ = file.executescript(plain_sql("sqlite"))
        file.close()
    tables = Growing(database, address, Counting(database, address))
    try:
        if kind or database != "sqlite":
            tables.analyse()
        yield tables
    finally:
        if database != "sqlite":
            tables.empty()
        tables.close()


@contextmanager
def _postgresql(version: str, kind: str) -> Iterator[Growing]:
    server = PostgreSQL(options=("autovacuum=off",), bin_directory=PostgreSQL.installed()[version])
    with running(lambda: server):
        where: dict[str, Any] = {"host": "127.0.0.1", "port": server.port, "user": "dblock", "dbname": "postgres"}
        with psycopg.connect(**where, autocommit=True) as connection:
            _ = connection.execute(plain_sql("postgresql") + _KINDS[kind])
        address = f"postgresql+psycopg://dblock@127.0.0.1:{server.port}/postgres"
        tables = Growing("postgresql", address, Prepared("postgresql", address, pooled=kind == "pooled"))
        tables.analyse()
        yield tables
        tables.close()


def test_no_statement_reads_more_when_the_tables_have_grown(growing: Growing) -> None:
    """By plans and statistics of the small tables; and by those of the large ones."""
    _ = growing.excess()
    growing.grow()
    assert growing.excess() == {}
    the_dead_at_the_head_of_a_queue_are_read_once(growing)
    growing.analyse()
    assert growing.excess() == {}


def the_dead_at_the_head_of_a_queue_are_read_once(growing: Growing) -> None:
    """Ten thousand of them: by the grant that passes over them, and never by those who look how they stand."""
    last = {"key": "dead", "owner": "last", "ticket": MINE}
    assert growing.reads("queue_status", last) <= growing.bound()
    granting = {"key": "dead", "owner": "other", "fence": 7, "first": 1, "heir": "last"}
    _ = growing.reads("grant", granting, "COMMIT")
    [(fence,)] = growing.session.rows("SELECT fence FROM locks WHERE lock_key = 'dead' AND owner = 'last'")
    _ = growing.reads("join", {**last, "owner": "next", "waiter_ttl": LIVE.seconds}, "COMMIT")
    [(ticket,)] = growing.session.rows("SELECT ticket FROM lock_waiters WHERE owner = 'next'")
    following = {**last, "owner": "next", "ticket": ticket, "first": MINE + 1}
    for name in ("queue_status", "first_waiter"):
        assert growing.reads(name, following) <= growing.bound(), name
    granting |= {"owner": "last", "fence": fence, "first": MINE + 1, "heir": "next"}
    assert growing.reads("grant", granting, "COMMIT") <= growing.bound()
    assert growing.session.rows("SELECT owner FROM locks WHERE lock_key = 'dead'") == [("next",)]
