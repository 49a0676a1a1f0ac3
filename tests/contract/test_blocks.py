"""The block of a `with` belongs to the lock object that entered it, wherever its end runs.

And a thread of a pool is not one owner for all who run something in it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import sys
import time
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextvars import copy_context
from functools import partial
from itertools import permutations
from operator import call
from typing import Any

import pytest
from asgiref.sync import async_to_sync, sync_to_async
from django.db import connections

from dblock import LockError, LockLost, LockNotHeld, LockTimeout
from dblock.core import runtime
from dblock.core.holding.flow import is_over
from dblock.core.runtime import current_flow
from sqlalchemy_dblock import SynchronousOnlyOperation
from tests.conftest import collect
from tests.contract.test_rwlock import rwlock
from tests.contract.test_semaphore import in_use, semaphore
from tests.contract.test_several import several
from tests.support.lab import PROTOCOL, alive, cycle, renewed, until
from tests.support.subjects import FAMILY, Actor, Actors, Subject


def enter(subject: Subject, lock: Any) -> Callable[[], Any]:
    return lock.__enter__ if subject.face == "sync" else lock.__aenter__  # type: ignore[no-any-return]


def leave(subject: Subject, lock: Any) -> Callable[[], Any]:
    end = lock.__exit__ if subject.face == "sync" else lock.__aexit__
    return lambda: end(None, None, None)


def tenures(subject: Subject) -> set[Any]:
    """All that is held."""
    return set(subject.run("SELECT lock_key, fence FROM locks WHERE owner IS NOT NULL"))


def test_a_block_may_end_elsewhere(
    either: Subject, actor: Actor, other: Actor, caplog: pytest.LogCaptureFixture
) -> None:
    """In another thread or task, though the one that entered it has ended: renewed until then, and given back."""
    lock = either.lock("k", ttl=30)
    actor.do(enter(either, lock))
    fence, flow = actor.get(lock, "fence"), actor.do(lambda: weakref.ref(current_flow()))
    actor.close()
    assert until(lambda: is_over(flow))
    assert renewed(either)
    assert (other.get(lock, "state"), other.get(lock, "fence"), other.get(lock, "count")) == ("held", fence, 1)
    other.do(lock.check)
    assert other.call(lock, "verify") is True
    assert other.get(either.lock("k"), "state") is None, "of another object"
    assert other.call(either.lock("k"), "acquire", blocking=False) is False, "re-entry stays with the flow"
    other.do(leave(either, lock))
    assert either.row("k")["owner"] is None
    assert other.get(lock, "state") is None
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


def test_its_other_entries_stay_where_they_are(either: Subject, actor: Actor, other: Actor) -> None:
    """The flow that entered the block has entered the same key outside of it, too."""
    outer, inner = actor.hold(either.lock("k", ttl=30)), either.lock("k", ttl=30)
    actor.do(enter(either, inner))
    other.do(leave(either, inner))
    assert either.row("k")["count"] == 1
    assert actor.get(outer, "state") == "held"
    actor.call(outer, "release")
    assert either.row("k")["owner"] is None


ENDS: dict[str, type[LockError] | None] = {"lost": LockLost, "released": LockNotHeld, "detached": None}


@pytest.mark.parametrize("how", ENDS)
def test_an_end_elsewhere_says_what_it_says_in_its_own_flow(
    either: Subject, actor: Actor, other: Actor, how: str
) -> None:
    """That the lock was lost meanwhile, or released by hand already; of a lock that was handed over nothing."""
    for key, last in (("a", actor), ("b", other)):
        lock = either.lock(key, ttl=0.6 if how == "lost" else 30)
        actor.do(enter(either, lock))
        if how == "lost":
            either.run("DELETE FROM locks")
            assert until(lambda: other.get(lock, "state") == "lost", 15)  # noqa: B023 - called here
            with pytest.raises(LockLost):
                other.do(lock.check)
        else:
            actor.call(lock, {"released": "release", "detached": "detach"}[how])
        error = ENDS[how]
        with contextlib.nullcontext() if error is None else pytest.raises(error):
            last.do(leave(either, lock))
        assert last.get(lock, "state") is None
        assert (key in {held for held, _ in tenures(either)}) is (how == "detached")


def test_two_blocks_of_one_object_cannot_be_told_apart(either: Subject, actor: Actor, other: Actor) -> None:
    """An error that names thread pools; they are renewed as long as their flow can leave them."""
    lock = either.lock("k", ttl=30)
    actor.do(enter(either, lock))
    actor.do(enter(either, lock))
    with pytest.raises(LockNotHeld, match="pool of threads"):
        other.do(leave(either, lock))
    assert renewed(either)
    for _ in range(2):
        assert actor.get(lock, "state") == "held"
        actor.do(leave(either, lock))
    assert either.row("k")["owner"] is None
    lock = either.lock("k", ttl=0.6)
    actor.do(enter(either, lock))
    actor.do(enter(either, lock))
    actor.close()
    again = either.lock("k")
    # Its flow is over once its thread is; those were two blocks, of which neither is renewed any more then.
    assert until(lambda: leaves_in_vain(other, either, lock) and other.call(again, "acquire", timeout=1))


def leaves_in_vain(other: Actor, subject: Subject, block: Any) -> bool:
    """Whether an end in a flow without a block of its own is refused."""
    with pytest.raises(LockNotHeld, match="pool of threads"):
        other.do(leave(subject, block))
    return True


SHARED: dict[str, Callable[[Subject], Any]] = {
    "a semaphore": lambda subject: semaphore(subject, 3),
    "the lock of a reader": lambda subject: rwlock(subject).read(),
    "the locks of readers": lambda subject: several(subject, rwlock(subject, "a").read(), rwlock(subject, "b").read()),
}
"""Objects of which several flows may have a block open."""


@pytest.mark.parametrize("what", SHARED)
def test_the_end_of_a_block_leaves_no_other_flows(either: Subject, actors: Actors, what: str) -> None:
    """An end in a flow without a block is that of the one block whose flow is over; else it is refused."""
    innocent, ending, alive, foreign = actors(4)
    block = SHARED[what](either)
    innocent.do(enter(either, block))
    theirs = tenures(either)
    alive.do(enter(either, block))
    both = tenures(either)
    assert leaves_in_vain(foreign, either, block)
    assert tenures(either) == both, "that of another one was left"
    alive.do(leave(either, block))
    ending.do(enter(either, block))
    ending.end()
    assert until(lambda: len(tenures(either)) == len(both))
    foreign.do(leave(either, block))
    assert tenures(either) == theirs
    innocent.do(leave(either, block))
    assert tenures(either) == set()


def test_a_semaphore_has_one_block_in_each_flow(either: Subject, actor: Actor, other: Actor) -> None:
    """As two generators of a thread have them: nothing would say which of the two ends."""
    sem = semaphore(either, 3)
    permit = actor.do(enter(either, sem))
    with pytest.raises(LockError, match=r"enter a semaphore\.permit\(\) of its own for each block"):
        actor.do(enter(either, sem))
    second = other.do(enter(either, sem))
    actor.do(leave(either, sem))
    assert (permit.state, second.state) == (None, "held")
    third = actor.do(enter(either, sem))
    other.do(leave(either, sem))
    assert third.state == "held"
    actor.do(leave(either, sem))
    assert tenures(either) == set()
    assert sem._withs == [], "it keeps no block that has ended"
    assert actor.call(third, "acquire")
    assert sem.held == [], "nor a permit: this one is its caller's now"
    actor.call(third, "release")
    assert tenures(either) == set()


# -- ends that no `with` has loaded


def test_an_end_that_somebody_looks_at(either: Subject, actor: Actor) -> None:
    """As duck typing does, before code calls the methods of the class, as an ExitStack does; of every kind."""
    names = ("__enter__", "__exit__") if either.face == "sync" else ("__aenter__", "__aexit__")
    for what, make in FAMILY.items():
        made = make(partial(either.api, ttl=30))
        begin, end = (getattr(type(made), name) for name in names)
        assert all(hasattr(made, name) for name in names)
        actor.do(partial(begin, made))
        assert all(hasattr(made, name) for name in names)
        begun = tenures(either)
        assert begun, what
        assert renewed(either), what
        assert (tenures(either), alive(either)) == (begun, len(begun)), f"{what} is held still"
        actor.do(partial(end, made, None, None, None))
        assert tenures(either) == set(), what
        with pytest.raises(LockNotHeld):  # there is no other one to end
            actor.do(partial(end, made, None, None, None))
        assert made._withs == [], what


def test_a_permit_object_is_one_permit(either: Subject, actor: Actor, other: Actor) -> None:
    """Who shares it among threads or tasks is told, also while it is being taken: else all would be inside at once."""
    sem = semaphore(either, 1)
    for lock in (permit := sem.permit(), several(either, permit)):
        actor.do(enter(either, lock))
        with pytest.raises(LockError, match=r"another thread's or task's: make a semaphore\.permit\(\) for each block"):
            other.do(enter(either, lock))
        actor.do(enter(either, lock))
        actor.do(leave(either, lock))
        assert permit.state == "held"
        actor.do(leave(either, lock))
        assert in_use(either) == []
        other.do(enter(either, lock))
        other.do(leave(either, lock))
    actor.call(sem, "acquire")
    waiting = other.start(enter(either, permit))
    assert until(lambda: permit._is_being_taken)
    with pytest.raises(LockError, match="for each block"):
        actor.do(enter(either, permit))
    actor.call(sem, "release")
    waiting.result(10)
    assert in_use(either) == [0]
    other.do(leave(either, permit))
    assert in_use(either) == []


ORDERS = [order for order in sorted(set(permutations("001122"))) if order.index("1") < order.index("2")]
"""Of the beginnings and ends of three blocks, of which the two that others begin are alike."""


def by_calls(made: Any) -> Callable[[], Any]:
    """Begin a block by its methods; how to end it."""
    made.__enter__()
    return partial(made.__exit__, None, None, None)


def by_generator(made: Any) -> Callable[[], Any]:
    """Begin it as FastAPI does; how to end it."""

    def body() -> Iterator[None]:
        with made:
            yield

    generator = body()
    next(generator)
    return partial(next, generator, None)


BEGUN = [(by_calls, what) for what in SHARED if what != "the locks of readers"]
if sys.version_info < (3, 14):  # since then the block of a `with` has no end of its own (see dblock.core.lock.blocks)
    BEGUN += [(by_generator, what) for what in SHARED]


@pytest.mark.parametrize("subject", [Subject("sqlalchemy", "sync", "sqlite")], indirect=True, ids=str)
@pytest.mark.parametrize(("begin", "what"), BEGUN)
def test_all_orders_of_blocks_in_a_pool(subject: Subject, begin: Callable[[Any], Callable[[], Any]], what: str) -> None:
    """One flow begins and ends a block itself; of two others each call has a context of its own, as AnyIO has it.

    While a body has not ended, its tenure is held: an end leaves its own, or is refused. The end of a `with` leaves its
    own in whatever context it runs, and is never refused.
    """
    collect()  # an end that is looked for collects garbage, many times here
    for order in ORDERS:
        made, running, pooled = SHARED[what](subject), dict[str, tuple[Callable[[], Any], set[Any]]](), set[str]()
        for who in order:
            run: Callable[..., Any] = copy_context().run if who in "12" else call
            before = tenures(subject)
            if who not in running:
                end = run(begin, made)
                running[who] = end, tenures(subject) - before
                pooled |= {who} & {*"12"}
                continue
            end, its = running.pop(who)
            try:
                run(end)
            except LockNotHeld:
                assert (begin, tenures(subject), len(pooled)) == (by_calls, before, 2), order
            else:
                assert tenures(subject) == before - its, order
                pooled -= {who}
        if begin is by_generator:
            assert tenures(subject) == set(), order
        del made, running, end
        subject.run("DELETE FROM locks WHERE lock_key > 'k'")


def test_a_thread_of_a_pool_is_not_one_owner(sync_face: Subject) -> None:
    """Each call in a copy of its caller's context, as AnyIO and asyncio.to_thread have it: one gets the key."""
    with ThreadPoolExecutor(1) as pool:
        lock, other = sync_face.lock("k"), sync_face.lock("k")
        mine, theirs = copy_context(), copy_context()
        assert pool.submit(mine.run, lock.acquire).result() is True
        assert pool.submit(theirs.run, other.acquire, blocking=False).result() is False
        assert pool.submit(theirs.run, lambda: other.state).result() is None
        assert pool.submit(mine.run, other.acquire).result() is True, "the same caller enters once more"
        for _ in range(2):
            pool.submit(mine.run, lock.release).result()
        assert sync_face.row("k")["owner"] is None


def touch(subject: Subject) -> None:
    cycle(subject.lock("other"))


@pytest.mark.parametrize("touched", [False, True], ids=["fresh", "touched"])
def test_tasks_that_share_a_thread_are_not_one_owner(sync_face: Subject, touched: bool) -> None:
    """By sync_to_async: the first has the key until it gives it back there, and the others have not.

    Whatever their parent has locked there before, which asgiref has carried back to it, and they inherit.
    """

    async def task() -> bool:
        lock = sync_face.lock("k")
        if not await sync_to_async(lock.acquire)(blocking=False):
            return False
        assert await sync_to_async(lambda: (lock.state, lock.count))() == ("held", 1)
        await asyncio.sleep(0.3)
        await sync_to_async(lock.release)()
        return True

    async def crowd() -> list[bool]:
        if touched:
            await sync_to_async(touch)(sync_face)
        return list(await asyncio.gather(task(), task(), task()))

    assert sorted(asyncio.run(crowd())) == [False, False, True]
    assert sync_face.row("k")["owner"] is None


def test_a_child_of_a_task_that_holds_is_another_owner(sync_face: Subject) -> None:
    """By sync_to_async, in the same thread, with its parent's context."""

    def enter() -> bool:
        with sync_face.lock("k", timeout=0) as lock:
            return bool(lock.count)

    async def main() -> None:
        lock, other = sync_face.lock("k"), sync_face.lock("other")
        assert await sync_to_async(lock.acquire)()
        assert await sync_to_async(other.acquire)()
        with pytest.raises(LockTimeout):
            await asyncio.create_task(sync_to_async(enter)())
        await sync_to_async(lock.release)()
        await sync_to_async(other.release)()
        assert await asyncio.create_task(sync_to_async(enter)())

    asyncio.run(main())


def test_a_thread_that_lets_a_coroutine_run_is_the_same_afterwards(sync_face: Subject) -> None:
    """By async_to_sync, though what that calls by sync_to_async in this thread locks something too."""

    async def service() -> None:
        for _ in range(2):
            await sync_to_async(touch)(sync_face)

    def view() -> list[int]:
        lock, counts = sync_face.lock("k", timeout=0), list[int]()
        for _ in range(2):
            with lock, lock:
                async_to_sync(service)()
                assert lock.owned()
                with sync_face.lock("k", timeout=0) as again:
                    counts.append(again.count)
                async_to_sync(service)()
        lock.acquire()
        async_to_sync(service)()
        sync_face.lock("k").release()
        return counts

    with ThreadPoolExecutor(1) as pool:
        for run in (view, partial(copy_context().run, view)):
            assert pool.submit(run).result() == [3, 3]
            assert sync_face.row("k")["owner"] is None
        pool.submit(connections.close_all).result()


@pytest.mark.parametrize("subject", PROTOCOL, indirect=True, ids=str)
def test_a_synchronous_lock_on_an_event_loop(subject: Subject, actor: Actor) -> None:
    """A free one is taken, with a warning; for one that is held nobody waits, since all tasks would have to."""
    lock = subject.lock("k", timeout=20)

    async def take() -> bool:
        with pytest.warns(RuntimeWarning, match="blocks the event loop.*AsyncEngine"), lock:
            return lock.state is not None

    async def wait() -> None:
        with pytest.warns(RuntimeWarning), pytest.raises(SynchronousOnlyOperation, match="async context.*thread"):
            lock.acquire()

    assert asyncio.run(take()) is True
    actor.call(holder := subject.lock("k"), "acquire")
    start = time.monotonic()
    asyncio.run(wait())
    assert time.monotonic() - start < 5
    assert subject.run("SELECT * FROM lock_waiters") == []
    actor.call(holder, "release")
    assert subject.row("k")["owner"] is None

    async def hold_while_a_thread_waits() -> Future[Any]:
        with pytest.warns(RuntimeWarning):
            lock.acquire()
        waiting = actor.start(holder.acquire)
        assert until(lambda: bool(runtime.current.site(lock._place.store()).local_queues.get("k")))
        with pytest.warns(RuntimeWarning):
            lock.release()
        return waiting

    assert asyncio.run(hold_while_a_thread_waits()).result(5) is True
    actor.call(holder, "release")
