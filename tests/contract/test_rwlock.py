"""Read-write locks, on every database and both faces."""

from __future__ import annotations

import asyncio
import os
import re
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any

import pytest
from django.db import transaction
from sqlalchemy.orm import Session

import dblock
import sqlalchemy_dblock
from dblock.core.errors import (
    LockLost,
    LockNotHeld,
    LockTimeout,
    LockUpgradeRefused,
    Reason,
    WrongKind,
)
from dblock.core.share_keys import END
from tests.conftest import ALIASES, INNODB, run, timed
from tests.contract.test_administration import Desk
from tests.contract.test_queue import lined_up, waiters
from tests.contract.test_several import several
from tests.support.lab import PROTOCOL, apart, cycle, hold_of, remaining, renewed, until
from tests.support.subjects import Actor, Actors, Subject


def rwlock(subject: Subject, key: str = "k", **options: Any) -> Any:
    return subject.api("db_rwlock", key, **options)


def readers(subject: Subject) -> int:
    """Rows of readers."""
    between = "lock_key > :low AND lock_key < :high"
    [(number,)] = subject.run(f"SELECT count(*) FROM locks WHERE {between}", low="k\x1f", high="k\x1fs")
    return int(number)


def test_readers_share_and_a_writer_excludes(everywhere: Subject, actors: Actors) -> None:
    """Both are locks, with the methods and attributes of one; the row of a reader is gone once it has left."""
    one, two, three = actors(3)
    rw = rwlock(everywhere)
    assert rw.key == "k"
    read, again, write = one.hold(rw.read(), blocking=False), two.hold(rw.read(), blocking=False), rw.write()
    assert renewed(everywhere)
    assert readers(everywhere) == 2
    assert three.call(write, "acquire", blocking=False) is False
    for actor, lock in ((one, read), (two, again)):
        assert actor.get(lock, "state") == "held"
        assert actor.get(lock, "key") == "k"
        assert actor.call(lock, "verify") is True
        actor.do(lock.check)
        actor.call(lock, "extend", 60)
        assert actor.get(lock, "remaining") > 31
        assert actor.call(lock, "owned") is True
        assert actor.call(lock, "inspect").owner == "***"
    assert three.call(read, "locked") is True
    assert three.call(write, "locked") is False
    assert three.get(write, "state") is None
    fence = one.get(read, "fence")
    one.call(read, "release")
    two.call(again, "release")
    assert readers(everywhere) == 0
    assert three.call(read, "locked") is False
    assert three.call(write, "acquire", blocking=False) is True
    assert three.call(write, "locked") is True
    wrote = three.get(write, "fence")
    assert wrote > fence
    assert one.call(read, "acquire", blocking=False) is False
    assert one.call(read, "acquire", timeout=0.05) is False
    three.call(write, "release")
    assert one.call(read, "acquire", blocking=False) is True
    assert one.get(read, "fence") > wrote
    one.call(read, "release")
    with pytest.raises(LockNotHeld):
        one.call(read, "release")


def test_first_come_first_served(protocol: Subject, actors: Actors) -> None:
    """A writer that waits is not passed by readers that come later, which then enter together."""
    flows = actors(5)
    rw, order = rwlock(protocol, timeout=30), list[str]()
    left, both = threading.Event(), threading.Barrier(2)

    def enter(actor: Actor, name: str, lock: Any, inside: Callable[[], object]) -> Future[Any]:
        def body() -> None:
            order.append(name)
            inside()

        return actor.enter(lock, protocol.aside(body))

    done = [enter(flows[0], "r1", rw.read(), partial(left.wait, 30))]
    assert until(lambda: order == ["r1"])
    others: list[tuple[str, Any, Callable[[], object]]] = [
        *(("w1", rw.write(), int), ("r2", rw.read(), both.wait)),
        *(("r3", rw.read(), both.wait), ("w2", rw.write(), int)),
    ]
    for number, (name, lock, inside) in enumerate(others):
        done.append(enter(flows[number + 1], name, lock, inside))
        if name == "w1":  # it waits at the door, for r1
            assert until(lambda: protocol.row("k")["owner"] is not None)
        else:
            assert until(lambda: max(waiters(protocol), lined_up(protocol)) >= number)  # noqa: B023 - called here
    left.set()
    for each in done:
        each.result(30)
    assert order[:2] == ["r1", "w1"]
    assert sorted(order[2:4]) == ["r2", "r3"]
    assert order[4:] == ["w2"]
    assert readers(protocol) == waiters(protocol) == 0


def test_entering_again(either: Subject, actor: Actor, actors: Actors) -> None:
    """Read in read, read in write, write in write, also while a writer waits; read to write is refused at once."""
    [other] = actors(1)
    rw = rwlock(either, timeout=30)
    read, write = actor.hold(rw.read()), rw.write()
    waiting = other.begin(rw.write(), "acquire")
    time.sleep(0.1)
    assert actor.call(rw.read(), "acquire", blocking=False) is True
    assert actor.get(read, "count") == 2
    statements = either.run("SELECT count(*) FROM locks")
    with pytest.raises(LockUpgradeRefused, match="must release that before it writes"):
        actor.call(write, "acquire")
    with pytest.raises(RuntimeError):
        actor.within(write)
    assert actor.get(write, "state") is None, "the lock of the writer is not held by a reader"
    with pytest.raises(LockNotHeld):
        actor.call(write, "release")
    assert either.run("SELECT count(*) FROM locks") == statements
    actor.call(read, "release")
    assert not waiting.done()
    actor.call(read, "release")
    assert waiting.result(30) is True
    # and now the other one writes
    mine = other.hold(rw.read(), blocking=False)
    assert other.call(rw.write(), "acquire", blocking=False) is True
    assert other.get(mine, "count") == 3
    assert readers(either) == 0, "it is the writer's own tenure"
    assert actor.call(rw.read(), "acquire", blocking=False) is False
    for _ in range(3):
        assert other.get(mine, "state") == "held"
        other.call(mine, "release")
    assert actor.call(rw.read(), "acquire", blocking=False) is True


def test_downgrade(protocol: Subject, actors: Actors) -> None:
    """The writer becomes a reader without a moment in which a writer that waits could come between."""
    one, two, three = actors(3)
    rw = rwlock(protocol, timeout=30)
    write, other = one.hold(rw.write()), rw.write()
    fence = one.get(write, "fence")
    waiting = two.begin(other, "acquire")
    assert until(lambda: waiters(protocol) == 1)
    one.call(write, "downgrade")
    assert one.get(write, "fence") > fence
    assert one.get(write, "state") == "held"
    assert one.call(write, "verify")
    assert readers(protocol) == 1
    one.call(write, "downgrade")  # it is a reader already
    with pytest.raises(LockUpgradeRefused):
        one.call(rw.write(), "acquire")
    time.sleep(0.3)
    assert not waiting.done()
    one.call(write, "release")
    assert waiting.result(30) is True
    assert two.get(other, "fence") > fence
    two.call(other, "release")
    with pytest.raises(LockNotHeld):
        three.call(rw.write(), "downgrade")
    assert three.call(rw.read(), "acquire", blocking=False)


def test_downgrade_in_a_block(either: Subject, actor: Actor, other: Actor) -> None:
    """The block ends as that of a reader, and readers enter before that."""
    rw = rwlock(either)
    write, read = rw.write(), rw.read()

    async def block() -> Any:
        async with either.within(write):
            await either.ask(write, "downgrade")
            entering = other.begin(read, "acquire", blocking=False)
            while not entering.done():
                await either.pause(0.01)
            return entering.result(), write.state

    assert actor.do(block) == (True, "held")
    other.call(read, "release")
    assert readers(either) == 0
    assert other.call(rw.write(), "acquire", blocking=False) is True


def test_a_writer_that_gives_up_lets_readers_in(protocol: Subject, actors: Actors) -> None:
    """It had the door, and waited for a reader: those that stand behind it enter when its time is up."""
    one, two, three = actors(3)
    rw = rwlock(protocol, timeout=30)
    one.call(first := rw.read(), "acquire")
    gives_up = two.begin(rw.write(), "acquire", timeout=1)
    assert until(lambda: (info := one.call(rw.write(), "inspect")) is not None and info.waits)
    behind = three.begin(rw.read(), "acquire")
    assert until(lambda: waiters(protocol) == 1)
    assert gives_up.done() or not behind.done()
    assert gives_up.result(30) is False
    assert behind.result(30) is True
    with pytest.raises(LockTimeout, match="could not acquire 'k' within 0.1 s: it is held by") as caught:
        two.within(rwlock(protocol, timeout=0.1).write())
    assert caught.value.holder is not None
    one.call(first, "release")


def test_a_waiting_writer_is_the_next_and_not_the_holder(protocol: Subject, actors: Actors) -> None:
    """The key is not locked for writing, and who is refused is told that others hold it.

    An unfair reader enters beside readers, and does not pass that writer, which has the door for every reader.
    """
    one, two, three = actors(3)
    rw, unfair = rwlock(protocol, timeout=30), rwlock(protocol, fair=False).read()
    first, second = one.hold(rw.read()), rw.write()
    three.hold(unfair, blocking=False)
    three.call(unfair, "release")
    entered = two.begin(second, "acquire")
    assert until(lambda: (info := three.call(rw.write(), "inspect")) is not None and info.waits)
    assert three.call(rw.write(), "locked") is False
    assert three.call(rw.read(), "locked") is True
    desk = Desk(protocol)
    assert [(row.state, row.info.key) for row in desk.survey()][:1] == [("waiting", "k")]
    with pytest.raises(LockTimeout, match="others hold it, and before this one comes .* until the readers have left"):
        three.within(rwlock(protocol, timeout=0.1).write())
    assert three.call(unfair, "acquire", timeout=0.1) is False
    one.call(first, "release")
    assert entered.result(30)
    assert three.call(rw.write(), "locked") is True
    assert two.call(rw.read(), "locked") is False, "it is the writer that asks"
    assert until(lambda: [(row.state, row.info.waits) for row in desk.survey()] == [("held", False)])
    two.call(second, "release")


@pytest.mark.parametrize("reads", [True, False], ids=["reader", "writer"])
def test_handing_it_over(either: Subject, actor: Actor, other: Actor, *, reads: bool) -> None:
    """detach() and attach() carry it to another flow as what it is; a sequencer proves it, and says if it is shared."""
    rw = rwlock(either)
    mine = actor.hold(rw.read() if reads else rw.write())
    sequencer = actor.get(mine, "sequencer")
    found = actor.do(lambda: either.api("check_sequencer", sequencer))
    assert (found.mode, found.fence) == ("shared" if reads else "exclusive", actor.get(mine, "fence"))
    token = actor.call(mine, "detach")
    assert actor.get(mine, "state") is None
    lock = other.do(lambda: either.api("attach", token))
    assert other.get(lock, "fence") == found.fence
    with pytest.raises(LockLost) as used:
        actor.do(lambda: either.api("attach", token))
    assert used.value.reason is Reason.USED
    assert actor.call(rw.write(), "acquire", blocking=False) is False
    assert other.call(rw.read(), "acquire", blocking=False) is True
    other.call(lock, "release")
    with pytest.raises(WrongKind):
        other.call(either.lock("k"), "acquire")
    assert other.get(lock, "state") == "held"
    other.call(lock, "release")
    assert actor.call(rw.write(), "acquire", blocking=False) is True


def test_a_reader_among_several(either: Subject, actor: Actor, other: Actor) -> None:
    """db_locks takes ready-made locks of mixed kinds."""
    home: Any = dblock if either.variant == "django" else sqlalchemy_dblock
    locks = actor.hold(home.db_locks(either.lock("a"), rwlock(either).read(), either.lock("z")))
    assert other.call(rwlock(either).read(), "acquire", blocking=False) is True
    assert other.call(several(either, "z"), "acquire", blocking=False) is False
    actor.call(locks, "release")


@pytest.mark.parametrize("reads", [True, False], ids=["reader", "writer"])
@pytest.mark.parametrize("subject", PROTOCOL[1:], indirect=True, ids=str)
def test_a_guarded_one_keeps_the_others_out(subject: Subject, *, reads: bool) -> None:
    """Until its transaction ends, whatever becomes of its lease, and also once it has been released."""

    def of(rw: Any, *, reader: bool) -> Any:
        return rw.read() if reader else rw.write()

    for lapsed in (False, True):
        with Session(subject.engine) as session:
            mine = of(rwlock(subject, ttl=30, renew=False), reader=reads)
            mine.acquire()
            mine.guard(session)
            if lapsed:
                subject.run("UPDATE locks SET expires_at = acquired_at WHERE owner IS NOT NULL")
                hold_of(mine).lease.trusted_until = 0.0
            else:
                mine.release()
            assert apart(partial(of(rwlock(subject), reader=not reads).acquire, timeout=0.3)) is False
            assert readers(subject) == reads
            session.commit()
        if lapsed:
            with pytest.raises(LockLost):
                mine.release()
        theirs = of(rwlock(subject), reader=not reads)
        assert theirs.acquire(timeout=15)
        assert readers(subject) == (not reads)
        theirs.release()


@pytest.mark.parametrize("subject", PROTOCOL[1:], indirect=True, ids=str)
def test_a_guard_of_a_neighbour_keeps_no_reader_out(subject: Subject, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the next key, of another reader, nor of a reader of the next key: InnoDB may lock gaps between their rows.

    Also some time after the row behind a key's shares was reaped.
    """
    timed(monkeypatch, end_key_lasts=0.0)
    for _ in "ab":
        subject.reap(0)
        for key in ("j", "k"):
            cycle(rwlock(subject, key).read())
    behind = [key for (key,) in run(subject.database, "SELECT lock_key FROM locks") if str(key).endswith(END)]
    assert len(behind) == (2 if subject.database in INNODB else 0)

    def reads(key: str) -> bool:
        read = rwlock(subject, key).read()
        return all(read.acquire(timeout=5) and read.release() is None for _ in range(3))

    for lock in (subject.lock("k2"), rwlock(subject).read()):
        with Session(subject.engine) as session, lock, ThreadPoolExecutor() as pool:
            lock.guard(session)
            assert [pool.submit(reads, key).result() for key in ("k", "j", "i")] == [True, True, True]
            session.commit()


def test_a_wait_for_readers_is_logged(either: Subject, actors: Actors, caplog: pytest.LogCaptureFixture) -> None:
    """As any slow wait, with the reader that is in the way."""
    one, two = actors(2)
    one.call(rwlock(either).read(), "acquire")
    assert two.call(rwlock(either, slow_wait=0.05).write(), "acquire", timeout=0.6) is False
    [line] = [each.getMessage() for each in caplog.records if "has been waiting" in each.getMessage()]
    told = rf"for 'k': 'k \(reader [0-9a-f]{{16}}\)' is held by .* pid {os.getpid()}, .*, for \d\.\d s$"
    assert re.search(rf"has been waiting 0\.\d s {told}", line)


@pytest.mark.parametrize("database", ["postgresql", *INNODB], indirect=True)
def test_a_reader_that_its_transaction_keeps(database: str) -> None:
    """It refuses a writer, and says what keeps it; with release="now" it is no longer there."""
    subject = Subject("django", "sync", database)
    with transaction.atomic(using=ALIASES[database]):
        cycle(rwlock(subject).read())
        with pytest.raises(LockUpgradeRefused, match='its transaction keeps that until it ends: .* release="now"'):
            rwlock(subject).write().acquire()
        cycle(rwlock(subject, key="n", release="now").read(), rwlock(subject, key="n", release="now").write())
    cycle(rwlock(subject).write())
    subject = Subject("sqlalchemy", "sync", database)
    with Session(subject.engine) as session:
        _ = session.connection()
        cycle(rwlock(subject, session=session).read())
        with pytest.raises(LockUpgradeRefused, match="its transaction keeps that until it ends"):
            rwlock(subject).write().acquire()
    cycle(rwlock(subject).write())


@pytest.mark.parametrize(
    "subject", [Subject("sqlalchemy", "sync", "sqlite"), Subject("django", "sync", "sqlite")], indirect=True, ids=str
)
def test_it_is_no_lock_itself(subject: Subject) -> None:
    """Its use as one names read() and write(); so does db_locks()."""
    rw = rwlock(subject)

    async def enter() -> None:
        async with rw:
            pass

    def within() -> None:
        with rw:
            pass

    for wrong in (within, lambda: asyncio.run(enter()), lambda: rw(print)):
        with pytest.raises(TypeError, match=r"use \.read\(\) or \.write\(\)"):
            wrong()
    with pytest.raises(TypeError, match=r"a ReadWriteLock is none: use its read\(\) or write\(\)"):
        several(subject, "a", rw)


def test_a_writer_that_waits_lives_as_long_as_a_place(protocol: Subject, actors: Actors) -> None:
    """At the door; once it is in its lease lasts for a whole ttl, renewed or not."""
    one, two = actors(2)
    for renewing in (True, False):
        read = one.hold(rwlock(protocol).read())
        write = rwlock(protocol, renew=renewing, timeout=30).write()
        waiting = two.begin(write, "acquire")
        assert until(lambda: (info := one.call(rwlock(protocol).write(), "inspect")) is not None and info.waits)
        assert remaining(protocol) < 5.1
        one.call(read, "release")
        assert waiting.result(30) is True
        assert remaining(protocol) > 25
        assert renewing or two.get(write, "remaining") > 25
        assert two.call(write, "verify")
        two.call(write, "release")
    assert one.call(write, "acquire", blocking=False)
    assert one.get(write, "remaining") > 25, "one that finds nobody has it at once"
    one.call(write, "release")


def test_readers_that_do_not_wait_are_let_in_at_once(protocol: Subject, actors: Actors) -> None:
    """Right after a writer too, when all of them come to the door."""
    flows = actors(4)
    for _ in range(20):
        flows[0].within(rwlock(protocol).write())
        reads = [rwlock(protocol).read() for _ in flows]
        tries = [flow.begin(read, "acquire", blocking=False) for flow, read in zip(flows, reads, strict=True)]
        assert [each.result(30) for each in tries] == [True] * 4
        for flow, read in zip(flows, reads, strict=True):
            flow.call(read, "release")
