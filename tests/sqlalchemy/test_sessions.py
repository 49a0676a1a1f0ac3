"""`session=`: a lock that was left while the session's transaction is open is kept until that has ended.

What goes for Django's transactions too: `tests.contract.test_kept`.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import itertools
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import pytest
from sqlalchemy import Engine, event, text
from sqlalchemy.ext.asyncio import (
    AsyncEngine,
    AsyncSession,
    async_scoped_session,
    async_sessionmaker,
    create_async_engine,
)
from sqlalchemy.orm import Session, scoped_session, sessionmaker
from sqlalchemy.util import greenlet_spawn

from sqlalchemy_dblock import LockError, db_lock
from tests.conftest import INNODB, SERVERS, each_of, own_engine, url
from tests.contract.test_guard import Rival, empty, notes, rival
from tests.contract.test_guarded import write
from tests.support.lab import cycle, until

__all__ = ["rival"]

DRIVERS = [
    ("sqlite", "aiosqlite"),
    ("postgresql", "psycopg"),
    ("postgresql", "asyncpg"),
    *itertools.product(INNODB, ("aiomysql", "asyncmy")),
]


database = each_of(["sqlite", "postgresql"])
"""A server, and SQLite for the rules of its one writer; drivers that await are tested by themselves."""


@pytest.fixture
def engine(database: str) -> Engine:
    """An engine of each database, with a table of the user's."""
    empty(database)
    return own_engine(database)


@pytest.fixture
def session(engine: Engine) -> Iterator[Session]:
    """One whose transaction is open."""
    with Session(engine) as session:
        session.execute(text("SELECT 1"))
        yield session


def interrupt(*_: object) -> None:
    raise KeyboardInterrupt


def test_an_end_that_is_interrupted(database: str, engine: Engine, rival: Rival) -> None:
    """While the connection goes back to its pool, after the commit: the session never says that it has ended."""
    session = Session(engine)
    with db_lock(engine, "k", session=session):
        write(session)
    assert not rival.gets_in()
    event.listen(engine, "reset", interrupt, once=True)
    with pytest.raises(KeyboardInterrupt):
        session.commit()
    assert rival.gets_in()
    assert notes(database) == 1
    session.close()


@pytest.mark.parametrize("database", ["postgresql"], indirect=True)
def test_a_closing_that_is_interrupted(database: str, engine: Engine, rival: Rival) -> None:
    """Nobody will ever see the transaction's end, though the session is kept: the key ends with its lease."""
    session = Session(engine)
    with db_lock(engine, "k", session=session, ttl=0.5):
        write(session)
    event.listen(engine, "rollback", interrupt, once=True)
    with pytest.raises(KeyboardInterrupt):
        session.close()
    assert until(rival.gets_in, 15)
    session.close()


@pytest.mark.parametrize("database", SERVERS, indirect=True)
def test_a_two_phase_transaction(database: str, engine: Engine) -> None:
    """On PostgreSQL it keeps the key; elsewhere it would not once it is prepared, and is not guarded."""
    lock = db_lock(engine, "k")
    with lock, engine.connect() as connection:
        transaction = connection.begin_twophase()
        if database in INNODB:
            with pytest.raises(ValueError, match="two-phase"):
                lock.guard(connection)
        else:
            lock.guard(connection)
        transaction.rollback()


def test_without_a_transaction_it_is_given_back_at_once(database: str, engine: Engine, rival: Rival) -> None:
    """And where it has ended by then."""
    with Session(engine) as session:
        cycle(db_lock(engine, "k", session=session))
        assert rival.gets_in()
        with db_lock(engine, "k", session=session):
            write(session)
            session.commit()
        assert rival.gets_in()


@pytest.mark.parametrize("first", [0, 1])
@pytest.mark.parametrize("how", ["in a row", "nested", "nested, and entered by neither"])
def test_two_sessions(database: str, engine: Engine, rival: Rival, how: str, first: int) -> None:
    """Each keeps it, and the last one to end gives it back."""
    sessions = [Session(engine), Session(engine)]
    for session in sessions:
        session.execute(text("SELECT 1"))
    one, other = (db_lock(engine, "k", session=session) for session in sessions)
    if how == "in a row":
        cycle(one, other)
    else:
        with db_lock(engine, "k") if "neither" in how else contextlib.nullcontext(), one, other:
            pass
    sessions.pop(first).commit()
    assert not rival.gets_in()
    sessions.pop().rollback()
    assert rival.gets_in()


def test_what_a_session_keeps_is_not_handed_over(database: str, engine: Engine, rival: Rival, session: Session) -> None:
    """The session's end would release it beside its bearer."""
    lock = db_lock(engine, "k", session=session)
    cycle(lock)
    lock.acquire()
    with pytest.raises(LockError, match="cannot be detached while a transaction keeps it"):
        lock.detach()
    lock.release()
    assert not rival.gets_in()
    session.commit()
    assert rival.gets_in()


def test_a_scoped_session(database: str, engine: Engine, rival: Rival) -> None:
    """Means the one of this thread."""
    sessions = scoped_session(sessionmaker(engine))
    with db_lock(engine, "k", session=sessions):
        write(sessions)
    assert not rival.gets_in()
    sessions.commit()
    assert rival.gets_in()
    sessions.remove()


def test_what_is_no_session_is_refused(database: str, engine: Engine) -> None:
    """TypeError, also for the other kind of session."""
    asynchronous = create_async_engine(url(database, dict(DRIVERS)[database]))
    with engine.connect() as connection:
        wrong: list[Any] = [connection, engine, "session", 5, AsyncSession(asynchronous), Session]
        for bad in wrong:
            with pytest.raises(TypeError, match="session"):
                db_lock(engine, "k", session=bad)
    wrong = [asynchronous, "session", Session(engine)]
    for other in wrong:
        with pytest.raises(TypeError, match="session"):
            db_lock(asynchronous, "k", session=other)


def asynchronously(database: str, driver: str, main: Callable[[AsyncEngine], Awaitable[None]]) -> None:
    """Run `main(engine)`."""
    empty(database)

    async def run_main() -> None:
        engine = create_async_engine(url(database, driver))
        try:
            await main(engine)
        finally:
            await engine.dispose()

    asyncio.run(run_main())


ENDED = [(*each, how) for each, how in zip(DRIVERS, itertools.cycle(("commit", "rollback", "close")), strict=False)]


@pytest.mark.parametrize(("database", "driver", "how"), ENDED, indirect=["database"])
def test_an_asynchronous_session(database: str, driver: str, how: str, rival: Rival) -> None:
    """The same on an event loop."""

    async def main(engine: AsyncEngine) -> None:
        session = AsyncSession(engine)
        lock = db_lock(engine, "k", session=session)
        for round_ in (1, 2):
            async with lock:
                await session.run_sync(write)
            assert lock.state is None
            assert not await asyncio.to_thread(rival.gets_in)
            await getattr(session, how)()
            assert await asyncio.to_thread(rival.gets_in)
            assert notes(database) == (round_ if how == "commit" else 0)
        await session.close()

    asynchronously(database, driver, main)


@pytest.mark.parametrize("database", ["postgresql"], indirect=True)
def test_an_asynchronous_session_that_is_scoped_or_dropped(database: str, rival: Rival) -> None:
    """It is that of the current task; one that was dropped leaves its transaction to its inner session."""

    async def main(engine: AsyncEngine) -> None:
        maker = async_sessionmaker(engine)
        sessions = async_scoped_session(maker, scopefunc=asyncio.current_task)
        async with db_lock(engine, "k", session=sessions):
            await sessions.execute(text("INSERT INTO guarded VALUES (1)"))
        assert not await asyncio.to_thread(rival.gets_in)
        await sessions.commit()
        assert await asyncio.to_thread(rival.gets_in)
        await sessions.remove()
        session = maker()
        inner, lock = session.sync_session, db_lock(engine, "k", session=session)
        await lock.acquire()
        await session.execute(text("SELECT 1"))
        del session  # the transaction is the inner one's
        gc.collect()
        await lock.release()
        assert not await asyncio.to_thread(rival.gets_in)
        await greenlet_spawn(inner.close)
        assert await asyncio.to_thread(rival.gets_in)

    asynchronously(database, "asyncpg", main)
