"""The exchange of prepared statements on psycopg's libpq layer: what psycopg's own cursors would have done."""

from __future__ import annotations

import asyncio
import os
import selectors
import signal
import threading

import pytest
from sqlalchemy import Engine, text
from sqlalchemy.ext.asyncio import AsyncEngine, create_async_engine

from dblock.core.errors import StoreUnanswered
from dblock.core.protocol.steps import Execute
from dblock.core.statements.base import Reply, Statement
from sqlalchemy_dblock import db_lock
from sqlalchemy_dblock.store import store_for
from tests.conftest import own_engine, ready
from tests.faults.conftest import proxied
from tests.support.lab import cycle
from tests.support.proxy import Proxy
from tests.support.steps import NO_STORE

pytestmark = pytest.mark.direct

SLOWLY = """
CREATE FUNCTION slowly() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    IF new.owner IS NOT NULL AND old.owner IS NULL THEN PERFORM pg_sleep(0.4); END IF;
    RETURN new;
END $$;
CREATE TRIGGER slowly BEFORE UPDATE ON locks FOR EACH ROW EXECUTE FUNCTION slowly();
"""


@pytest.fixture
def engine(request: pytest.FixtureRequest) -> Engine:
    """Its connection has prepared what a lock sends."""
    ready(request, "postgresql")
    engine = own_engine("postgresql")
    cycle(*[db_lock(engine, "k")] * 8)
    return engine


def test_an_interrupted_take_has_ended_on_the_server(engine: Engine) -> None:
    """Ctrl-C cancels it there: it does not take effect when nobody looks any more."""
    with engine.begin() as connection:
        connection.execute(text(SLOWLY))
    try:
        threading.Timer(0.15, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
        with pytest.raises(KeyboardInterrupt):
            db_lock(engine, "k").acquire()
        with engine.begin() as connection:  # whatever may still be under way has the row
            assert connection.scalar(text("SELECT owner FROM locks WHERE lock_key = 'k' FOR UPDATE")) is None
    finally:
        with engine.begin() as connection:
            connection.execute(text("DROP FUNCTION slowly CASCADE"))


def test_the_server_says_why_it_ends_a_session(engine: Engine) -> None:
    """And not only that the connection is gone."""
    store = store_for(engine)
    step = Execute(NO_STORE, store.database.dialect.inspect, {"key": "k"})
    for _ in range(8):
        store.execute(step)
    [[session]] = store.execute(Execute(NO_STORE, Statement("session", "SELECT pg_backend_pid()", Reply.ROWS), {}))
    with engine.connect() as other:
        other.execute(text("SELECT pg_terminate_backend(:session)"), {"session": session})
    with pytest.raises(StoreUnanswered, match="terminating connection due to administrator command"):
        store.execute(step)


class Turns(selectors.DefaultSelector):
    """Counts the turns of an event loop."""

    turns = 0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        """As any selector does."""
        self.turns += 1
        return super().select(timeout)


def test_a_task_that_awaits_an_answer_leaves_its_event_loop_asleep(postgresql: object) -> None:
    """Nothing polls the socket while the answer is under way."""
    selector = Turns()

    async def turns_of_a_cycle(proxy: Proxy, engine: AsyncEngine) -> int:
        for _ in range(4):
            async with db_lock(engine, "k"):
                pass
        proxy.delay = 0.1
        before = selector.turns
        async with db_lock(engine, "k"):
            pass
        cycle = selector.turns - before
        await engine.dispose()
        return cycle

    with (
        proxied("postgresql", make=create_async_engine) as (proxy, engine),
        asyncio.Runner(loop_factory=lambda: asyncio.SelectorEventLoop(selector)) as runner,
    ):
        assert runner.run(turns_of_a_cycle(proxy, engine)) < 40
