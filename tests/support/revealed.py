"""What type checkers see of guarded blocks; `make lint` has mypy and pyright check it, and nothing runs it."""

# pyright: reportUnusedCallResult=false
from __future__ import annotations

from typing import assert_type

from sqlalchemy import Connection, Engine
from sqlalchemy.ext.asyncio import (
    AsyncConnection,
    AsyncEngine,
    AsyncSession,
    async_scoped_session,
    async_sessionmaker,
)
from sqlalchemy.orm import Session, scoped_session, sessionmaker

import dblock
from dblock.kinds import Permit, ReadLock
from sqlalchemy_dblock import db_lock, db_locks, db_rwlock, db_semaphore


class Own(Session):
    """A session class of an application."""


class AsyncOwn(AsyncSession):
    """Likewise."""


def of_django() -> None:
    lock = dblock.db_lock("k")
    with lock.atomic() as held:
        assert_type(held, dblock.Lock)
    with dblock.db_locks("a", "b").atomic(durable=True) as locks:
        assert_type(locks, dblock.Locks)
    with dblock.db_rwlock("k").read().atomic() as reading:
        assert_type(reading, ReadLock)
    with dblock.db_semaphore("k").permit().atomic() as permitted:
        assert_type(permitted, Permit)

    @lock.atomic()
    def sell(sku: str, n: int = 1) -> float:
        return n * len(sku) / 2

    assert_type(sell("book", n=2), float)


def of_engines(
    engine: Engine, make: sessionmaker[Own], scoped: scoped_session[Own], session: Session, plain: sessionmaker[Session]
) -> None:
    lock = db_lock(engine, "k")
    with lock.begin(engine) as connection:
        assert_type(connection, Connection)
    with lock.begin(make) as made:
        assert_type(made, Own)
    with lock.begin(plain) as of_the_maker:
        assert_type(of_the_maker, Session)
    with lock.begin(scoped) as of_the_thread:
        assert_type(of_the_thread, Own)
    with lock.begin(session) as same:
        assert_type(same, Session)
    with db_locks(engine, "a", "b").begin(make) as under_both:
        assert_type(under_both, Own)
    with db_rwlock(engine, "k").write().begin(make) as writing:
        assert_type(writing, Own)
    with db_semaphore(engine, "k").permit().begin(make) as permitted:
        assert_type(permitted, Own)

    @lock.begin(scoped)
    def sell(sku: str) -> int:
        return len(sku)

    assert_type(sell("book"), int)


async def of_async_engines(
    engine: AsyncEngine,
    make: async_sessionmaker[AsyncOwn],
    scoped: async_scoped_session[AsyncOwn],
    session: AsyncSession,
) -> None:
    lock = db_lock(engine, "k")
    async with lock.begin(engine) as connection:
        assert_type(connection, AsyncConnection)
    async with lock.begin(make) as made:
        assert_type(made, AsyncOwn)
    async with lock.begin(scoped) as of_the_task:
        assert_type(of_the_task, AsyncOwn)
    async with lock.begin(session) as same:
        assert_type(same, AsyncSession)
    async with db_locks(engine, "a", "b").begin(make) as under_both:
        assert_type(under_both, AsyncOwn)
    async with db_rwlock(engine, "k").read().begin(make) as reading:
        assert_type(reading, AsyncOwn)
    async with db_semaphore(engine, "k").permit().begin(make) as permitted:
        assert_type(permitted, AsyncOwn)

    @lock.begin(scoped)
    async def sell(sku: str) -> int:
        return len(sku)

    assert_type(await sell("book"), int)
