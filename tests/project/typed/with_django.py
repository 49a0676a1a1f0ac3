"""What a site might write: type checkers accept all of it, without a cast. Nothing runs it."""
# pyright: strict

from __future__ import annotations

import asyncio
from types import TracebackType
from typing import Self

from dblock import (
    Lock,
    LockLost,
    LockTimeout,
    Permit,
    db_leader,
    db_lock,
    db_locks,
    db_quorum_lock,
    db_rwlock,
    db_semaphore,
    observe,
    testing,
)

leader = db_leader("mail", ttl=10, on_deposed=lambda _, reason: written(len(reason.value)))
api = db_semaphore("api", 3, timeout=5)
connections: list[str] = ["a", "b", "c"]


class Audited(Lock):
    def __enter__(self) -> Self:
        assert self.key
        return super().__enter__()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        super().__exit__(kind, error, trace)


def written(fence: int) -> None:
    assert fence


@db_lock("stock:{sku}", timeout=5, on_busy="skip", otherwise=0)
def sell(sku: str, n: int = 1) -> int:
    return len(sku) * n


@db_semaphore("mail", permits=2)
async def mail(to: str) -> bool:
    return bool(to)


@leader.run
def lead(term: int) -> None:
    written(term)


@leader.run
async def alead(term: int) -> None:
    await asyncio.sleep(term)


def view() -> str:
    try:
        with db_lock("k", ttl=30) as lock, api as permit:
            written(lock.fence + permit.fence)
            lock.extend(60)
            return connections[permit.slot]
    except LockTimeout as busy:
        return "busy" if busy.holder is None else busy.holder.identity.host
    except LockLost as lost:
        return lost.reason.value


async def aview(token: str) -> None:
    async with db_lock("k") as lock, api as permit, db_locks("a", "b") as both, db_rwlock("r").read() as reading:
        written(lock.fence + permit.slot + both["a"].fence + reading.fence)
    async with db_lock.aattach(token) as attached, db_quorum_lock("q", using=["a", "b", "c"]) as quorum:
        written(attached.fence + quorum.fence)
    permits: list[Permit] = api.held
    written(sum(each.fence for each in permits) + await mail("me") + sell("book", n=2))
    await alead()


def by_hand() -> None:
    lock = Audited("k")
    if lock.acquire(blocking=False):
        written(lock.fence)
        lock.release()
    with leader as elected, lock as audited, lock.atomic() as guarded:
        written((elected.term or 0) + audited.fence + guarded.fence)
    stop = observe(lambda event: written(event.fence or 0))
    stop()
    lead()


def kit() -> None:
    with testing.memory() as locks, locks.busy("k", ttl=3), locks.busy(api):
        locks.clock.advance(3)
        locks.assert_locked("k", times=1)
