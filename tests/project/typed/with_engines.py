"""What a service might write: type checkers accept all of it, without a cast. Nothing runs it."""
# pyright: strict

from __future__ import annotations

from sqlalchemy import Engine, create_engine
from sqlalchemy.ext.asyncio import AsyncEngine, create_async_engine
from sqlalchemy.orm import Session, sessionmaker

from sqlalchemy_dblock import (
    AsyncLock,
    AsyncPermit,
    Lock,
    LockLost,
    LockTimeout,
    Permit,
    attach,
    check_sequencer,
    db_leader,
    db_lock,
    db_locks,
    db_quorum_lock,
    db_rwlock,
    db_semaphore,
    reap,
    release_all,
)

engine: Engine = create_engine("sqlite://")
async_engine: AsyncEngine = create_async_engine("sqlite+aiosqlite://")
make = sessionmaker(engine)
leader = db_leader(engine, "mail", ttl=10)
async_leader = db_leader(async_engine, "mail", on_elected=lambda _: None)
api, async_api = db_semaphore(engine, "api", 3), db_semaphore(async_engine, "api", 3)
connections: list[str] = ["a", "b", "c"]


def written(fence: int) -> None:
    assert fence


@db_lock(engine, "stock:{sku}", timeout=5)
def sell(sku: str, n: int = 1) -> int:
    return len(sku) * n


@db_lock(async_engine, "stock:{sku}")
async def asell(sku: str) -> int:
    return len(sku)


@leader.run
def lead(term: int) -> None:
    written(term)


@async_leader.run
async def alead(term: int) -> None:
    written(term)


def work(session: Session) -> str:
    try:
        with db_lock(engine, "k", session=session) as lock, api as permit:
            lock.guard(session)
            written(lock.fence + permit.fence)
            return connections[permit.slot]
    except LockTimeout as busy:
        return "busy" if busy.holder is None else busy.holder.identity.host
    except LockLost as lost:
        return lost.reason.value


async def awork() -> None:
    lock: AsyncLock = db_lock(async_engine, "k")
    async with lock as held, async_api as permit, db_locks(async_engine, "a", "b") as both:
        written(held.fence + permit.slot + both.fence)
    async with async_leader as elected, db_rwlock(async_engine, "r").write() as writing:
        written((elected.term or 0) + writing.fence)
    permits: list[AsyncPermit] = async_api.held
    written(len(permits) + await asell("book") + await reap(async_engine))
    if await lock.acquire(timeout=1):
        written(lock.fence)
        await lock.release()
    await alead()


def by_hand(token: str) -> None:
    lock: Lock = db_lock(engine, "k", ttl=5)
    with lock.begin(make) as session, leader as elected, attach(engine, token) as attached:
        written(attached.fence + (elected.term or 0) + len(session.new))
    with db_quorum_lock([engine, engine, engine], "q") as quorum:
        written(quorum.fence + check_sequencer(engine, lock.sequencer).fence + release_all(engine))
    permit: Permit = api.permit()
    written(permit.slot + sell("book", n=2))
    lead()
