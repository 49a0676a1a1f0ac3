"""Keys over several databases, on both faces: which database has a key, and a key that moves to another one."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Iterator
from functools import partial
from typing import Any, NamedTuple

import pytest

import dblock
import sqlalchemy_dblock
from dblock.core import runtime
from dblock.core.errors import LockDeadlock, LockLost, LockStoreError, LockTimeout, Reason
from dblock.core.protocol import quorum
from dblock.core.protocol.drive import drive
from dblock.core.watchdog.renewals import Renewal
from tests.conftest import ready, run
from tests.contract.test_quorum import FACES
from tests.support.lab import close_django, hold_of, until
from tests.support.majorities import close, engine
from tests.support.subjects import Actor, Subject

OLD, NEW = "postgresql", "mariadb"
TWO = (OLD, NEW)


class Site(NamedTuple):
    """A face, flows, and the databases of three stages of a deployment."""

    variant: str
    face: str
    actors: list[Actor]
    stages: tuple[Any, Any, Any]
    """The old list, both, and the new list; every key moves."""
    spread: Any
    """Both databases at once."""

    def make(self, name: str, stage: Any, *args: Any, **options: Any) -> Any:
        place = self.stages[stage] if isinstance(stage, int) else stage
        if self.variant == "django":
            return getattr(dblock, name)(*args, using=place, **options)
        return getattr(sqlalchemy_dblock, name)(place, *args, **options)

    def lock(self, stage: Any = 1, key: str = "k", **options: Any) -> Any:
        return self.make("db_lock", stage, key, **{"ttl": 10, "timeout": 5, **options})


def names(variant: str, face: str, *databases: str) -> Any:
    return list(databases) if variant == "django" else {each: engine(face, each) for each in databases}


@pytest.fixture(params=FACES, ids="-".join)
def site(request: pytest.FixtureRequest) -> Iterator[Site]:
    for database in TWO:
        ready(request, database)
    variant, face = request.param
    old, new, both = (names(variant, face, *each) for each in ((OLD,), (NEW,), TWO))
    stages = dblock.rendezvous(old), dblock.rendezvous(new, before=old), dblock.rendezvous(new)
    actors = [Actor(Subject(variant, face, OLD, "asyncpg" if (variant, face) == FACES[3] else "")) for _ in "ab"]
    yield Site(variant, face, actors, stages, dblock.rendezvous(both))
    close(actors[0])
    for actor in actors:
        actor.close()
    if variant == "django":
        for database in TWO:
            close_django(database)


def held(key: str = "k") -> list[str]:
    return [each for each in TWO if run(each, "SELECT 1 FROM locks WHERE lock_key = :k AND owner IS NOT NULL", k=key)]


def rows(column: str, key: str = "k") -> list[int]:
    return [int(str(run(each, f"SELECT {column} FROM locks WHERE lock_key = :k", k=key)[0][0])) for each in TWO]


def test_each_key_is_in_its_database(site: Site) -> None:
    """All kinds of locks, decorators too, whose key is known at the call; tokens and sequencers find theirs."""
    [actor, other], where = site.actors, site.spread
    keys = [f"k{number}" for number in range(6)]
    assert {where.names(key)[0] for key in keys} == set(TWO)
    for key in keys:
        lock, home = site.lock(where, key), list(where.names(key))
        assert actor.within(lock, partial(held, key)) == home
        assert other.call(site.make("db_rwlock", where, f"{key}rw").read(), "acquire")
        assert [each for each in TWO if run(each, "SELECT 1 FROM locks WHERE lock_key = :k", k=f"{key}rw")] == list(
            where.names(f"{key}rw")
        )
    [reading] = [other.call(site.make("db_rwlock", where, "k0rw").read(), "inspect")]
    assert reading is not None
    for number in range(6):
        other.call(site.make("db_rwlock", where, f"k{number}rw").read(), "release")

    def seen(key: str) -> list[str]:
        return held(f"of {key}")

    for key in keys:
        assert actor.decorate(site.lock(where, "of {key}"), seen)(key) == list(where.names(f"of {key}"))
    permits = site.make("db_semaphore", where, "permit {key}", 2)
    assert actor.decorate(permits, lambda key: key)("{k}") == "{k}"
    assert run(where.names("permit {k}")[0], "SELECT 1 FROM locks WHERE lock_key = 'permit {k}'")
    bundle = site.make("db_locks", where, *keys)
    assert actor.within(bundle, lambda: [held(key) for key in keys]) == [list(where.names(key)) for key in keys]
    pair = site.make("db_locks", where, "of {one}", "of {two}")
    assert actor.decorate(pair, lambda one, two: held(f"of {one}") + held(f"of {two}"))("k1", "k2") == [
        *where.names("of k1"),
        *where.names("of k2"),
    ]
    leader = site.make("db_leader", where, "leads", ttl=5)
    assert actor.call(leader, "campaign", timeout=5)
    assert held("leads") == list(where.names("leads"))
    actor.call(leader, "resign")


def test_a_token_finds_the_database_of_its_key(site: Site) -> None:
    [actor, other], where = site.actors, site.spread
    for key in ("k0", "{k}"):
        lock = site.lock(where, key)
        assert actor.call(lock, "acquire")
        sequencer, token = actor.get(lock, "sequencer"), actor.call(lock, "detach")
        if site.variant == "django":
            name = "attach" if site.face == "sync" else "aattach"
            taken = other.do(partial(getattr(dblock.db_lock, name), token, using=where))
            check = getattr(dblock, actor.subject.method("check_sequencer"))
            assert actor.do(partial(check, sequencer, using=where)).key == key
        else:

            async def attach(token: str = token) -> Any:
                return await sqlalchemy_dblock.attach(where, token)

            sync = site.face == "sync"
            taken = other.do(partial(sqlalchemy_dblock.attach, where, token) if sync else attach)
            assert actor.do(partial(sqlalchemy_dblock.check_sequencer, where, sequencer)).key == key
        assert held(key) == list(where.names(key))
        other.call(taken, "release")
        assert held(key) == []


def test_a_moved_key_is_held_in_both_databases(site: Site) -> None:
    """Against those that have the old list alone, and those that have the new one; entered again, and left."""
    lock, [actor, other] = site.lock(), site.actors
    assert actor.call(lock, "acquire") is True
    assert held() == list(TWO)
    assert rows("fence") == [actor.get(lock, "fence")] * 2
    assert actor.get(lock, "state") == "held"
    assert 8 < actor.get(lock, "remaining") <= 10
    for stage in range(3):
        assert other.call(site.lock(stage), "acquire", timeout=0.1) is False
        assert other.call(site.lock(stage), "locked") is True
    assert other.get(site.lock(), "state") is None
    fence = actor.get(lock, "fence")
    again = site.lock()
    assert actor.within(again, lambda: (again.fence, again.count, rows("count"))) == (fence, 2, [2, 2])
    actor.do(lock.check)
    assert actor.call(lock, "verify") is True
    assert actor.call(lock, "owned") is True
    assert actor.call(lock, "inspect").fence == fence
    actor.call(lock, "extend", 60)
    assert actor.get(lock, "remaining") > 50
    actor.call(lock, "release")
    assert held() == []
    assert actor.get(lock, "state") is None
    assert actor.within(site.lock(), held) == list(TWO)


@pytest.mark.parametrize("ahead", TWO)
def test_fences_grow_from_stage_to_stage(site: Site, ahead: str) -> None:
    """Though the numbers of one database are far above those of the other, as after a wrong clock."""
    [actor, _], seen = site.actors, list[int]()
    for each in TWO:
        run(each, "DELETE FROM locks")
        actor.within(site.lock(0 if each == OLD else 2))
    run(ahead, "UPDATE locks SET fence = fence + 1000000000000")
    order = [(0, 0, 1, 0, 1, 1), (1, 2, 1, 2, 2)]
    if ahead == NEW:
        order[0] = (1, 0, 1, 0, 1, 1)
    for stage in (*order[0], *order[1]):
        lock = site.lock(stage)
        seen.append(actor.within(lock, partial(getattr, lock, "fence")))
    assert seen == sorted(set(seen)), seen


def test_the_raised_fence_is_renewed(site: Site) -> None:
    """The lease outlives its ttl in both databases, and nobody reports a loss."""
    [actor, other], lost = site.actors, list[Any]()
    lock = site.lock(ttl=0.9, on_lost=lambda *given: lost.append(given))
    assert actor.call(lock, "acquire")
    deadline = time.monotonic() + 1.5
    while time.monotonic() < deadline:
        assert actor.get(lock, "state") == "held"
        time.sleep(0.05)
    assert actor.call(lock, "verify")
    for stage in (0, 2):
        assert other.call(site.lock(stage), "acquire", timeout=0) is False
    actor.call(lock, "release")
    assert lost == []


@pytest.mark.parametrize("stolen", TWO)
def test_it_is_lost_with_one_of_its_databases(site: Site, stolen: str) -> None:
    """`on_lost` is called once, with this lock; what is left of it is given back."""
    [actor, _], told = site.actors, list[Any]()
    lock = site.lock(ttl=1, on_lost=lambda lost, reason: told.append((lost, lost.fence, reason)))
    assert actor.call(lock, "acquire")
    fence = actor.get(lock, "fence")
    run(stolen, "UPDATE locks SET owner = 'thief', fence = fence + 1 WHERE lock_key = 'k'")
    assert until(lambda: told)
    assert actor.get(lock, "state") == "lost"
    assert actor.get(lock, "remaining") == 0
    with pytest.raises(LockLost):
        actor.do(lock.check)
    with pytest.raises(LockLost):
        actor.call(lock, "release")
    time.sleep(0.4)
    assert told == [(lock, fence, Reason.TAKEN_OVER)]
    assert held() == [stolen]


@pytest.mark.parametrize("stage", [0, 2])
def test_it_is_not_left_in_one_while_the_other_is_busy(site: Site, stage: int) -> None:
    [actor, other] = site.actors
    busy = site.lock(stage)
    assert other.call(busy, "acquire")
    lock = site.lock()
    assert actor.call(lock, "acquire", blocking=False) is False
    assert actor.call(lock, "acquire", timeout=0.2) is False
    with pytest.raises(LockTimeout, match="held by"):
        actor.within(site.lock(timeout=0.1))
    assert held() == [TWO[stage // 2]]
    skipping = site.lock(timeout=0.1, on_busy="skip", otherwise="busy")
    assert actor.decorate(skipping, lambda: "ran")() == "busy"
    with pytest.raises(TypeError, match="for decorators"):
        actor.within(skipping)
    waiting = actor.start(getattr(lock, actor.subject.method("acquire")))
    time.sleep(0.2)
    other.call(busy, "release")
    assert waiting.result(20) is True
    assert held() == list(TWO)
    actor.call(lock, "release")
    assert actor.decorate(skipping, held)() == list(TWO)
    assert held() == []


def test_several_keys_of_which_some_move(site: Site) -> None:
    """Each of them shows one fence; two flows that take them in any order do not wait in a circle."""
    [actor, other] = site.actors
    old, new = (names(site.variant, site.face, *each) for each in (TWO, (NEW,)))
    moving = dblock.rendezvous(new, before=old)
    keys = [f"k{number}" for number in range(8)]
    moved = [key for key in keys if len(moving.names(key)) == 2]
    assert 0 < len(moved) < len(keys)
    locks = site.make("db_locks", moving, *keys, timeout=20)
    fences = actor.within(locks, lambda: (locks.fences, locks.state, [held(key) for key in keys]))
    assert fences[1] == "held"
    assert fences[2] == [sorted(moving.names(key), key=TWO.index) for key in keys]
    for key in moved:
        assert rows("fence", key) == [fences[0][key]] * 2
    guard, inside = threading.Lock(), set[str]()

    def body(some: list[str]) -> None:
        with guard:
            assert not inside & set(some)
            inside.update(some)
        time.sleep(0.002)
        with guard:
            inside.difference_update(some)

    def work(flow: Actor, some: list[str]) -> None:
        for _ in range(6):
            flow.within(site.make("db_locks", moving, *some, timeout=20), lambda: body(some))
            flow.within(site.lock(moving, some[0], timeout=20), lambda: body(some[:1]))

    threads = [threading.Thread(target=work, args=(flow, some)) for flow, some in ((actor, keys), (other, keys[::-1]))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not any(held(key) for key in keys)
    with pytest.raises(TypeError, match="guard"):
        actor.within(locks, locks.guard)


def test_what_is_refused_while_a_key_moves(site: Site) -> None:
    """It would name one of two tenures, or count what has no order."""
    [actor, _], lock = site.actors, site.lock()
    assert actor.call(lock, "acquire")
    for name in ("guard", "detach"):
        with pytest.raises(TypeError, match="moving"):
            actor.call(lock, name)
    with pytest.raises(TypeError, match="moving"):
        actor.get(lock, "sequencer")
    actor.call(lock, "release")
    old = site.lock(0)
    assert actor.call(old, "acquire")
    token = actor.call(old, "detach")
    attach: Any = sqlalchemy_dblock.attach
    with pytest.raises(TypeError, match="moving"):
        actor.do(
            lambda: (
                dblock.db_lock.attach(token, using=site.stages[1])
                if site.variant == "django"
                else attach(site.stages[1], token)
            )
        )
    for make in ("db_rwlock", "db_semaphore", "db_leader"):
        with pytest.raises(TypeError, match="moving"):
            site.make(make, 1, "x")
    for bad in ({"ttl": -1}, {"no_such": 1}):
        for key in ("k", "{k}"):
            with pytest.raises((TypeError, ValueError)):
                site.lock(key=key, **bad)
    with pytest.raises((TypeError, ValueError)):
        site.lock(key="")
    with pytest.raises(TypeError):
        site.make("db_quorum_lock", 1, "k")


@pytest.mark.parametrize("error", [LockStoreError, KeyboardInterrupt])
def test_a_fence_that_cannot_be_raised(site: Site, error: type[BaseException], monkeypatch: pytest.MonkeyPatch) -> None:
    """Then nothing is held, though the row may have the one fence or the other."""
    if error is KeyboardInterrupt and site.face == "async":
        pytest.skip("tasks are cancelled instead")
    [actor, _], confirm = site.actors, quorum.confirm

    def fails(*args: Any) -> Any:
        yield from confirm(*args)
        raise error("no answer")

    monkeypatch.setattr(quorum, "confirm", fails)
    lock = site.lock()
    with pytest.raises(error, match="no answer"):
        actor.call(lock, "acquire")
    assert actor.get(lock, "state") is None
    assert held() == []
    with pytest.raises(error, match="no answer"):
        actor.within(lock)
    assert held() == []
    monkeypatch.undo()
    assert actor.within(lock, held) == list(TWO)


def test_a_renewal_of_the_fence_before_says_nothing(request: pytest.FixtureRequest) -> None:
    """It finds no such tenure, as the fence was raised meanwhile; the lease is as good as before."""
    ready(request, "sqlite")
    lock = dblock.db_lock("k", using="default", ttl=10)
    assert lock.acquire()
    hold = hold_of(lock)
    renewal = Renewal(hold.store, [hold], runtime.current.watchdog)
    run("sqlite", "UPDATE locks SET fence = fence + 7 WHERE lock_key = 'k'")
    hold.tenure = hold.record.tenure = hold.tenure._replace(fence=hold.tenure.fence + 7)
    drive(renewal.steps(), hold.store)
    assert lock.state == "held"
    drive(Renewal(hold.store, [hold], runtime.current.watchdog).steps(), hold.store)
    assert lock.state == "held"
    lock.release()


def test_a_cancelled_task_leaves_nothing(site: Site) -> None:
    """Wherever it was between the two databases."""
    if site.face == "sync":
        pytest.skip("a thread is not cancelled")
    [actor, other] = site.actors
    for stage in (0, 2):
        busy = site.lock(stage)
        assert other.call(busy, "acquire")

        async def main() -> None:
            task = asyncio.ensure_future(getattr(site.lock(timeout=20), actor.subject.method("acquire"))())
            await asyncio.sleep(0.3)
            _ = task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task

        actor.do(main)
        other.call(busy, "release")
        assert until(lambda: held() == [])


def test_reentrant_false_waits_for_itself(site: Site) -> None:
    [actor, _], lock = site.actors, site.lock()
    assert actor.call(lock, "acquire")
    with pytest.raises(LockDeadlock):
        actor.call(site.lock(reentrant=False), "acquire", timeout=None)
    assert rows("count") == [1, 1]
    actor.call(lock, "release")
