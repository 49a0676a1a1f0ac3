"""`session=`: a lock that was left while the session's transaction is open is kept until that has ended."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import itertools
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import pytest
from sqlalchemy import Engine, create_engine, event, text
from sqlalchemy.ext.asyncio import (
    AsyncEngine,
    AsyncSession,
    async_scoped_session,
    async_sessionmaker,
    create_async_engine,
)
from sqlalchemy.orm import Session, scoped_session, sessionmaker
from sqlalchemy.util import greenlet_spawn

from sqlalchemy_dblock import LockError, LockNotHeld, LockStoreError, db_lock
from tests.conftest import INNODB, SERVERS, ready, run, url
from tests.support.lab import until

DRIVERS = [
    ("sqlite", "aiosqlite"),
    ("postgresql", "psycopg"),
    ("postgresql", "asyncpg"),
    *itertools.product(INNODB, ("aiomysql", "asyncmy")),
]
ENDS = ("commit", "rollback", "close")


@pytest.fixture(params=["sqlite", "postgresql"])
def database(request: pytest.FixtureRequest) -> str:
    """A server, and SQLite for the rules of its one writer; drivers that await are tested by themselves."""
    return ready(request, request.param)


@pytest.fixture
def engine(database: str) -> Iterator[Engine]:
    """An engine of each database, with a table of the user's."""
    prepare(database)
    made = create_engine(url(database))
    yield made
    made.dispose()


@pytest.fixture
def session(engine: Engine) -> Iterator[Session]:
    """One whose transaction is open."""
    with Session(engine) as session:
        session.execute(text("SELECT 1"))
        yield session


def prepare(database: str) -> None:
    run(database, "CREATE TABLE IF NOT EXISTS kept (n integer)")
    run(database, "DELETE FROM kept")


def others_get_in(database: str, key: str = "k") -> bool:
    """Whether a stranger gets the key without waiting. On SQLite a writer may leave it no room."""
    engine = create_engine(url(database))
    lock = db_lock(engine, key)
    try:
        acquired = lock.acquire(blocking=False)
        if acquired:
            lock.release()
    except LockStoreError:
        if database != "sqlite":
            raise
        return False
    finally:
        engine.dispose()
    return acquired


def write(session: Session) -> None:
    session.execute(text("INSERT INTO kept VALUES (1)"))


def kept(database: str) -> object:
    return run(database, "SELECT count(*) FROM kept")[0][0]


@pytest.mark.parametrize("how", ENDS)
def test_it_is_kept_until_the_transaction_ends(database: str, engine: Engine, how: str) -> None:
    """By commit, rollback or close; others come in at once afterwards. The session's next transaction is another."""
    session = Session(engine)
    lock = db_lock(engine, "k", session=session)
    for round_ in (1, 2):
        with lock:
            write(session)
            assert lock.verify()
        assert lock.state is None
        with pytest.raises(LockNotHeld):
            lock.release()
        assert not others_get_in(database)
        getattr(session, how)()
        assert others_get_in(database)
        assert kept(database) == (round_ if how == "commit" else 0)
    session.close()


def test_an_end_that_is_interrupted(database: str, engine: Engine) -> None:
    """While the connection goes back to its pool, after the commit: the session never says that it has ended."""

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    session = Session(engine)
    with db_lock(engine, "k", session=session):
        write(session)
    assert not others_get_in(database)
    event.listen(engine, "reset", interrupt, once=True)
    with pytest.raises(KeyboardInterrupt):
        session.commit()
    assert others_get_in(database)
    assert kept(database) == 1
    session.close()


@pytest.mark.parametrize("database", ["postgresql"], indirect=True)
def test_a_closing_that_is_interrupted(database: str, engine: Engine) -> None:
    """Nobody will ever see the transaction's end, though the session is kept: the key ends with its lease."""

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    session = Session(engine)
    with db_lock(engine, "k", session=session, ttl=0.5):
        write(session)
    event.listen(engine, "rollback", interrupt, once=True)
    with pytest.raises(KeyboardInterrupt):
        session.close()
    assert until(lambda: others_get_in(database), 15)
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


def test_savepoints_are_not_the_end(database: str, engine: Engine) -> None:
    """Neither their release nor their rollback, whether the lock was taken inside or outside."""
    for how in ("commit", "rollback"):
        with Session(engine) as session:
            with db_lock(engine, "k", session=session):
                write(session)
                nested = session.begin_nested()
            getattr(nested, how)()
            assert not others_get_in(database)
            nested = session.begin_nested()
            getattr(nested, how)()
            assert not others_get_in(database)
            session.commit()
            assert others_get_in(database)


def test_without_a_transaction_it_is_given_back_at_once(database: str, engine: Engine) -> None:
    """And so it is with release="now"."""
    with Session(engine) as session:
        with db_lock(engine, "k", session=session):
            pass
        assert others_get_in(database)
        with db_lock(engine, "k", session=session):
            write(session)
            session.commit()
        assert others_get_in(database)
        session.execute(text("SELECT 1"))
        with db_lock(engine, "k", session=session, release="now"):
            pass
        assert others_get_in(database)


def test_the_same_transaction_enters_again(database: str, engine: Engine, session: Session) -> None:
    """The same tenure, with the same fence; entered again and held, it outlives the transaction."""
    lock, fences = db_lock(engine, "k", session=session), list[Any]()
    for _ in range(3):
        with lock:
            fences.append(lock.fence)
            assert lock.count == 1
        assert not others_get_in(database)
    assert len(set(fences)) == 1
    lock.acquire()
    session.commit()
    assert lock.verify()
    assert not others_get_in(database)
    lock.release()
    assert others_get_in(database)


def test_entering_it_again_does_not_end_it(database: str, engine: Engine, session: Session) -> None:
    """Without the session, or with `release="now"`: what it keeps is kept until its end."""
    with db_lock(engine, "k", session=session):
        pass
    for again in (db_lock(engine, "k"), db_lock(engine, "k", session=session, release="now")):
        with again, again:
            pass
        assert not others_get_in(database)
        again.acquire()
        again.release()
        assert not others_get_in(database)
    session.commit()
    assert others_get_in(database)


@pytest.mark.parametrize("first", [0, 1])
@pytest.mark.parametrize("how", ["in a row", "nested", "nested, and entered by neither"])
def test_two_sessions(database: str, engine: Engine, how: str, first: int) -> None:
    """Each keeps it, and the last one to end gives it back."""
    sessions = [Session(engine), Session(engine)]
    for session in sessions:
        session.execute(text("SELECT 1"))
    one, other = (db_lock(engine, "k", session=session) for session in sessions)
    if how == "in a row":
        with one:
            pass
        with other:
            pass
    else:
        with db_lock(engine, "k") if "neither" in how else contextlib.nullcontext(), one, other:
            pass
    sessions.pop(first).commit()
    assert not others_get_in(database)
    sessions.pop().rollback()
    assert others_get_in(database)


def test_what_a_session_keeps_is_not_handed_over(database: str, engine: Engine, session: Session) -> None:
    """The session's end would release it beside its bearer."""
    lock = db_lock(engine, "k", session=session)
    with lock:
        pass
    lock.acquire()
    with pytest.raises(LockError, match="cannot be detached while a transaction keeps it"):
        lock.detach()
    lock.release()
    assert not others_get_in(database)
    session.commit()
    assert others_get_in(database)


def test_a_scoped_session(database: str, engine: Engine) -> None:
    """Means the one of this thread."""
    sessions = scoped_session(sessionmaker(engine))
    with db_lock(engine, "k", session=sessions):
        sessions.execute(text("INSERT INTO kept VALUES (1)"))
    assert not others_get_in(database)
    sessions.commit()
    assert others_get_in(database)
    sessions.remove()


def test_several_locks_of_one_transaction(database: str, engine: Engine, session: Session) -> None:
    """All are given back at its end."""
    for key in ("a", "b", "c"):
        with db_lock(engine, key, session=session):
            pass
    assert not any(others_get_in(database, key) for key in ("a", "b", "c"))
    session.rollback()
    assert all(others_get_in(database, key) for key in ("a", "b", "c"))


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


def asynchronously(
    request: pytest.FixtureRequest, where: tuple[str, str], main: Callable[..., Awaitable[None]]
) -> None:
    """Run `main(database, engine)`."""
    database, driver = where
    ready(request, database)
    prepare(database)

    async def run_main() -> None:
        engine = create_async_engine(url(database, driver))
        try:
            await main(database, engine)
        finally:
            await engine.dispose()

    asyncio.run(run_main())


@pytest.mark.parametrize(("where", "how"), [*zip(DRIVERS, itertools.cycle(ENDS), strict=False)])
def test_an_asynchronous_session(request: pytest.FixtureRequest, where: tuple[str, str], how: str) -> None:
    """The same on an event loop."""

    async def main(database: str, engine: AsyncEngine) -> None:
        session = AsyncSession(engine)
        lock = db_lock(engine, "k", session=session)
        for round_ in (1, 2):
            async with lock:
                await session.execute(text("INSERT INTO kept VALUES (1)"))
            assert lock.state is None
            assert not await asyncio.to_thread(others_get_in, database)
            await getattr(session, how)()
            assert await asyncio.to_thread(others_get_in, database)
            assert kept(database) == (round_ if how == "commit" else 0)
        await session.close()

    asynchronously(request, where, main)


def test_an_asynchronous_session_that_is_scoped_or_dropped(request: pytest.FixtureRequest) -> None:
    """It is that of the current task; one that was dropped leaves its transaction to its inner session."""

    async def main(database: str, engine: AsyncEngine) -> None:
        async def free() -> bool:
            return await asyncio.to_thread(others_get_in, database)

        maker = async_sessionmaker(engine)
        sessions = async_scoped_session(maker, scopefunc=asyncio.current_task)
        async with db_lock(engine, "k", session=sessions):
            await sessions.execute(text("INSERT INTO kept VALUES (1)"))
        assert not await free()
        await sessions.commit()
        assert await free()
        await sessions.remove()
        session = maker()
        inner, lock = session.sync_session, db_lock(engine, "k", session=session)
        await lock.acquire()
        await session.execute(text("SELECT 1"))
        del session  # the transaction is the inner one's
        gc.collect()
        await lock.release()
        assert not await free()
        await greenlet_spawn(inner.close)
        assert await free()

    asynchronously(request, ("postgresql", "asyncpg"), main)
