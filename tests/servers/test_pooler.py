"""PostgreSQL through PgBouncer in transaction mode, where each transaction gets whichever session is free."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Iterator
from typing import Any

import pytest
from asyncpg.prepared_stmt import PreparedStatement
from sqlalchemy import event, make_url
from sqlalchemy.ext.asyncio import create_async_engine

from sqlalchemy_dblock import db_lock
from tests.conftest import POOLER, run, url
from tests.support.clusters import missing
from tests.support.lab import LONG, there
from tests.support.loaded import python, without
from tests.support.proxy import Proxy
from tests.support.servers import HINTS, PgBouncer, PostgreSQL, running

FEW = "postgresql and not (django and async) and not async-postgresql-psycopg and not session"
QUEUE = f"test_queue.py and {FEW}{'' if LONG else ' and not herd'}"
"""The drivers' own threads and tasks are no business of a pooler's, nor is who begins a connection's transaction."""


@pytest.mark.slow
@pytest.mark.skipif(POOLER, reason="this is it")
@pytest.mark.skipif(bool(missing("pgbouncer")), reason=HINTS["pgbouncer"])
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("which", "least"),
    [
        (("-k", f"({QUEUE}) or crowd_uses", "tests/contract/test_queue.py", "tests/sqlalchemy/test_engines.py"), 24),
        *([(("-k", FEW, "tests/contract/test_guard.py"), 20)] if LONG else []),
    ],
)
def test_the_short_form_of_make_pooler(which: tuple[str, ...], least: int) -> None:
    """What the lock, its queue and its guard promise holds there too, and where sessions change all the time."""
    environment = without("DBLOCK_TEST", "PYTEST") | {"DBLOCK_POOLER": "1"}
    done = python("-m", "pytest", "-q", "-n", "0", *which, environment=environment)
    assert int(there(re.search(r"(\d+) passed", done.stdout))[1]) >= least


@pytest.fixture
def pooler(postgresql: PostgreSQL) -> Iterator[PgBouncer]:
    """It lends sessions of the server of the tests."""
    with running(lambda: PgBouncer(postgresql)) as pooler:
        yield pooler


@pytest.mark.direct
@pytest.mark.skipif(bool(missing("pgbouncer")), reason=HINTS["pgbouncer"])
def test_a_frozen_process_keeps_no_row_locked(pooler: PgBouncer, monkeypatch: pytest.MonkeyPatch) -> None:
    """asyncpg sends a statement and the end of its transaction at once."""
    answered, fetch = asyncio.Event(), PreparedStatement.fetch

    async def freezing(self: PreparedStatement[Any], *values: Any) -> Any:
        rows = await fetch(self, *values)
        answered.set()
        await asyncio.sleep(0.3)  # stopped, or cut off, with the answer unread
        return rows

    async def main() -> None:
        engine = create_async_engine(where.set(port=proxy.port), connect_args={"statement_cache_size": 0})
        lock = db_lock(engine, "k")
        async with lock:
            pass
        before = proxy.round_trips
        async with lock:
            pass
        assert proxy.round_trips == before + 2
        monkeypatch.setattr(PreparedStatement, "fetch", freezing)
        taking = asyncio.create_task(lock.acquire())
        await answered.wait()
        rows = await asyncio.to_thread(run, "postgresql", "SELECT owner FROM locks FOR UPDATE NOWAIT")
        assert not taking.done()
        assert rows != [(None,)]
        assert await taking is True
        await engine.dispose()

    where = make_url(url("postgresql", "asyncpg"))
    with Proxy(0, pooler.port) as proxy:
        asyncio.run(main())


@pytest.mark.direct
@pytest.mark.skipif(bool(missing("pgbouncer")), reason=HINTS["pgbouncer"])
def test_the_applications_codecs_reach_no_renewal_there(pooler: PgBouncer) -> None:
    """asyncpg sends the list of what is renewed as text, whatever the application has JSON encoded by."""

    async def codec(driver: Any) -> None:
        await driver.set_type_codec("json", encoder=json.dumps, decoder=json.loads, schema="pg_catalog")

    async def main() -> None:
        where = make_url(url("postgresql", "asyncpg")).set(port=pooler.port)
        engine = create_async_engine(where, connect_args={"statement_cache_size": 0})
        event.listen(engine.sync_engine, "connect", lambda connection, _: connection.run_async(codec))
        async with db_lock(engine, "k", ttl=0.9) as lock:
            await asyncio.sleep(1.3)
            assert await lock.verify()
        await engine.dispose()

    asyncio.run(main())
