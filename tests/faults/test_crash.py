"""The database dies right after its reply, and comes back."""

from __future__ import annotations

import contextlib
import itertools
import multiprocessing
import os
import signal
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import psycopg
import pytest
from sqlalchemy import Engine, create_engine, text

from dblock.core import runtime, timing
from dblock.core.acquire.request import Request
from dblock.core.errors import LockError, Loss, Reason
from dblock.core.holding.flow import Hold
from dblock.core.protocol import epoch, queue, tenures
from dblock.core.protocol.drive import drive
from dblock.core.protocol.queue import QueuePlace
from dblock.core.protocol.sending import send
from dblock.core.values import Tenure
from dblock.core.wakeup.registry import Message
from sqlalchemy_dblock import LockLost, db_lock, metadata
from tests.conftest import timed
from tests.support.failover import KINDS, URLS, elsewhere, locking
from tests.support.lab import LONG, cycle, hold_of, there, until
from tests.support.servers import MariaDB, MySQL, PostgreSQL, Server, running

MADE: dict[str, Callable[[], Server]] = {"postgresql": PostgreSQL, "mariadb": MariaDB, "mysql": MySQL}
SERVERS = {kind: (MADE[kind], URLS[kind]) for kind in KINDS} | {
    # Without asynchronous commits the worst that a session may be told is what the server's default is.
    "postgresql-off": (
        lambda: PostgreSQL(options=("synchronous_commit=off", "wal_writer_delay=10s")),
        URLS["postgresql"],
    ),
}
ASKED = Request("k", 60.0, 60.0, "", 1, "flow", "h", 1, "t", "p", "")
"""What a waiter of another process wants."""


def joined(lock: Any, channel: str = "", owner: str = "heir") -> QueuePlace:
    """The place of a waiter of another process, which has come for the key of that lock."""
    database = lock._place.store().database
    return there(drive(queue.join(database, ASKED.parameters(owner, channel), database.now() + 5)))[0]


def granted(lock: Any, hold: Hold) -> Any:
    """What the waiter is granted to which the holder hands the key over."""
    return there(drive(queue.grant(lock._place.store().database, "k", 1, hold.tenure)))[1]


def crash(server: Server, engine: Engine) -> None:
    """Kill the server, and start it again."""
    engine.dispose()
    server.stop(signal.SIGKILL)
    server.start()


@pytest.mark.parametrize("name", SERVERS)
def test_what_was_granted_survives(name: str) -> None:
    """Killed after each kind of statement: takes and extensions are there; fences never come back.

    The count of a re-entry that lengthens no lease may be lost: the next entry or end of a block writes it again.
    """
    with locking(*SERVERS[name]) as (server, engine):

        def row() -> tuple[Any, ...]:
            crash(server, engine)
            with engine.connect() as connection:
                [row] = connection.execute(text("SELECT owner, fence, count, ttl FROM locks WHERE lock_key = 'k'"))
                return tuple(row)

        lock, fences = db_lock(engine, "k", ttl=600), []
        steps: list[tuple[Callable[[], object], set[int], float]] = [
            (lock.acquire, {1}, 600.0),
            (lambda: lock.extend(900), {1}, 900.0),
            (lock.acquire, {1, 2}, 900.0),
        ]
        for step, counts, ttl in steps:
            step()
            owner, fence, count, left = row()
            assert (owner, fence, left) == (lock.owner, lock.fence, ttl)
            assert count in counts
            assert lock.verify()
        fences.append(lock.fence)
        lock.release()
        lock.release()
        crash(server, engine)  # the release may be lost: the key is then held until its lease ends, late but not wrong
        other = db_lock(engine, "k")
        if not other.acquire(blocking=False):
            with engine.begin() as connection:
                connection.execute(text("UPDATE locks SET expires_at = acquired_at"))
            assert other.acquire(blocking=False)
        fences.append(other.fence)
        with engine.begin() as connection:
            connection.execute(text("DELETE FROM locks"))
        with pytest.raises(LockLost):
            other.release()
        again = db_lock(engine, "k")
        assert again.acquire(blocking=False)
        fences.append(again.fence)
        assert fences == sorted(set(fences), key=lambda fence: fence or 0)
        again.release()


@pytest.mark.parametrize("name", SERVERS)
def test_what_an_heir_relies_on_survives(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Killed after a heartbeat, and after a grant: neither is taken back, since the heir counts on both at once."""
    timed(monkeypatch, waiter_ttl=60.0)  # a server takes seconds to start again
    with locking(*SERVERS[name]) as (server, engine):
        lock = db_lock(engine, "k", ttl=600)
        lock.acquire()
        database, hold = lock._place.store().database, hold_of(lock)

        def after(statement: str) -> Any:
            crash(server, engine)
            _ = drive(epoch.read(database, database.now() + 20))  # the first who finds a free key closed does it
            with engine.connect() as connection:
                [row] = connection.execute(text(statement))
                return row

        place, ends = joined(lock), "SELECT expires_at FROM lock_waiters"
        with engine.connect() as connection:
            [(end,)] = connection.execute(text(ends))
        sent = place.sent
        time.sleep(0.3)
        drive(queue.heartbeat(database, [place], database.now() + 5))
        assert place.sent >= sent + 0.3
        [kept] = after(ends)
        assert (kept - end).total_seconds() >= 0.29, "the place ends when its waiter believes"
        with engine.begin() as connection:  # what is handed over does not cover it
            connection.execute(text("UPDATE locks SET fence = fence + 600000000"))
        hold.tenure = hold.tenure._replace(fence=hold.tenure.fence + 600_000_000)
        given = granted(lock, hold)
        assert given.lasts == 0
        owner, fence, expires_at = after("SELECT owner, fence, expires_at FROM locks")
        assert (owner, fence, expires_at) == ("heir", given.fence, kept)
        grant = there(place.granted(given, 60.0, database.timing.waiter_ttl))
        assert (grant.tenure.owner, grant.tenure.fence) == (owner, fence)
        _ = elsewhere(lock)


LAZY: dict[str, Any] = {"options": ("wal_writer_delay=10s", "wal_writer_flush_after=1GB")}
"""What did not wait for the disk is not there for long."""


def test_a_hand_over_that_is_taken_back_lets_nobody_in() -> None:
    """What was handed over keeps the key closed for as long as the heir believes; fences go on."""
    with locking(lambda: PostgreSQL(**LAZY)) as (server, engine):
        lock, other = db_lock(engine, "k", ttl=4.5, renew=False), db_lock(engine, "k", timeout=10)
        with lock:
            database, hold, place = lock._place.store().database, hold_of(lock), joined(lock)
            given = granted(lock, hold)
            hold.grant.handed_over = True
            grant = there(place.granted(given, 60.0, database.timing.waiter_ttl))
            assert 4 <= grant.lasts <= 4.5, "as long as what it was given by"
            place.sent += 3.0  # a heartbeat, that has found the place which the crash brings back
            later = there(place.granted(given, 60.0, database.timing.waiter_ttl))
            assert later.sent + later.lasts == pytest.approx(grant.sent + grant.lasts)
            crash(server, engine)
            with engine.connect() as connection:
                [(owner, fence)] = connection.execute(text("SELECT owner, fence FROM locks"))
            assert (owner, fence) == (hold.tenure.owner, hold.tenure.fence), "the hand-over was taken back"
            assert drive(tenures.why_lost(database, grant.tenure)) == Loss(Reason.GONE)
        assert other.acquire(blocking=False) is False, "who has handed it over frees it no more"
        with other:
            assert database.now() >= grant.trusted_until
            assert other.fence > grant.tenure.fence


def test_a_hand_over_in_a_process_that_is_taken_back_lets_nobody_in() -> None:
    """The heir loses the key when it hears of that; nobody else has it before the lease that was handed over ends."""
    with locking(lambda: PostgreSQL(**LAZY)) as (server, engine), ThreadPoolExecutor(1) as pool:
        lock, heir = db_lock(engine, "k", ttl=3), db_lock(engine, "k", ttl=3, timeout=20)
        other = db_lock(engine, "k", timeout=10)
        lock.acquire()
        store, owner, fence = lock._place.store(), lock.owner, lock.fence
        waiting = pool.submit(heir.acquire)
        assert until(lambda: runtime.current.site(store).local_queues.get("k"))
        lock.release()
        assert waiting.result(10)
        hold = there(pool.submit(heir._hold).result())
        lasts, believed = hold.lease.term, hold.lease.trusted_until
        crash(server, engine)
        with engine.connect() as connection:
            [found] = connection.execute(text("SELECT owner, fence FROM locks"))
        assert tuple(found) == (owner, fence), "the hand-over was taken back"
        assert other.acquire(blocking=False) is False
        with other:
            assert lasts < 3
            assert store.database.now() >= believed
            assert hold.tenure.fence < other.fence
            with pytest.raises(LockLost):
                pool.submit(heir.release).result(20)


def test_nothing_covers_a_hand_over_where_standbys_are_waited_for() -> None:
    """What is seen of a lease may then be more than what they have, and so may what is told by a notification."""
    options = ("synchronous_standby_names=nobody", "synchronous_commit=local")
    channel = "dblock_00000000_0123456789abcdef"
    with locking(lambda: PostgreSQL(options=options)) as (server, engine):
        listening = psycopg.connect(
            host="127.0.0.1", port=server.port, user="dblock", dbname="postgres", autocommit=True
        )
        with db_lock(engine, "k", renew=False) as lock, listening:
            listening.execute(f"LISTEN {channel}")
            database, hold, _ = lock._place.store().database, hold_of(lock), joined(lock)
            given = granted(lock, hold)
            assert given.lasts == 0
            hold.grant.handed_over = True
            _ = joined(lock, f"{channel}.1", "next")
            assert drive(queue.grant(database, "k", 2, Tenure("k", "heir", given.fence), here="here")) is not None
            [called] = listening.notifies(timeout=10, stop_after=1)
            message = there(Message.read(called.payload))
            assert (message.key, message.proof) == ("k", "-"), "the waiter that hears it polls, and accepts"
        with db_lock(engine, "local", renew=False) as lock:
            hold = hold_of(lock)
            values = {**ASKED.parameters(hold.tenure.owner), **hold.tenure._asdict(), "heir": "heir"}
            values |= {"handovers_left": 0, "covers": 1}
            [(_, lasts)] = drive(send(database, database.dialect.hand_over_local, values, database.now() + 5))[1]
            assert lasts == 0
            hold.grant.handed_over = True


def test_what_is_seen_may_not_be_durable() -> None:
    """A take whose answer is lost is not believed because its row is there: the standby that it waited for lacks it."""
    standby = ("synchronous_standby_names=nobody",)
    with running(lambda: PostgreSQL(options=standby)) as server, ThreadPoolExecutor(1) as pool:
        url = URLS["postgresql"].format(server.port)
        waits = create_engine(url)
        waits_not = create_engine(f"{url}?options=-csynchronous_commit%3Dlocal", isolation_level="AUTOCOMMIT")
        metadata.create_all(waits_not)
        cycle(db_lock(waits_not, "k"))
        lock, other = db_lock(waits, "k", ttl=2), db_lock(waits_not, "k", timeout=10)
        with waits_not.connect() as admin:

            def ended() -> bool:
                waiting = "FROM pg_stat_activity WHERE wait_event = 'SyncRep' AND query LIKE '%locks%'"
                return bool(admin.execute(text(f"SELECT pg_terminate_backend(pid) {waiting}")).all())

            taking = pool.submit(lock.acquire, timeout=2)
            assert until(ended)
            shown = text("SELECT count(*) FROM locks WHERE owner IS NOT NULL")
            assert until(lambda: admin.execute(shown).scalar() == 1), "by the wait that was ended"
            with contextlib.suppress(LockError):
                assert taking.result(10) is False
            assert lock.state is None
            assert until(lambda: not ended()), "whatever else waits keeps the row locked"
        cycle(other)
        waits.dispose()
        waits_not.dispose()


MEMBERS_TTL = 4.0 if LONG else 2.0
"""Seconds, of the locks of a crowd."""


@pytest.mark.slow
def test_crashes_amid_a_queue_that_moves_on() -> None:
    """Processes hand the key over all the time: no two believe that they have it, and fences go up."""
    with locking(lambda: PostgreSQL(**LAZY)) as (server, _):
        spawn = multiprocessing.get_context("spawn")
        stay, stop, told, count = spawn.Event(), spawn.Event(), spawn.Queue(), spawn.Value("i", 0)

        def many() -> bool:
            before = count.value
            return until(lambda: count.value > before + 150, 60)

        url = URLS["postgresql"].format(server.port)
        members = [spawn.Process(target=_member, args=(url, stay, stop, told, count), daemon=True) for _ in range(4)]
        for member in members:
            member.start()
        for _ in range(10 if LONG else 1):
            assert many()
            time.sleep(1.25 * MEMBERS_TTL)  # what comes back then is over
            stay.set()
            time.sleep(0.05)
            for member in members:
                os.kill(member.pid or 0, signal.SIGSTOP)
            time.sleep(0.05)
            server.lose_power()
            server.start()
            for member in members:
                os.kill(member.pid or 0, signal.SIGCONT)
            time.sleep(0.75 * MEMBERS_TTL)
            stay.clear()
        assert many()  # who handed the key over before the crash may have it for a ttl, by its row
        stop.set()
        stays = sorted(each for _ in members for each in told.get(timeout=60))
        for member in members:
            member.join(60)
    assert len(stays) == count.value
    for (_, end, fence), (begin, _, later) in itertools.pairwise(stays):
        assert end <= begin, "two had it"
        assert fence < later


def _member(url: str, stay: Any, stop: Any, told: Any, count: Any) -> None:
    """Takes the key again and again, and stays if told to; says when it was sure to have it, and by which fence."""
    timing.DEFAULT = timing.DEFAULT._replace(poll_notified=0.05)  # to be there when the key is free
    engine, stays = create_engine(url), list[tuple[float, float, int]]()
    while not stop.is_set():
        lock = db_lock(engine, "k", ttl=MEMBERS_TTL, timeout=5)
        try:
            with lock:
                begin, sure, fence = time.monotonic(), lock.remaining, lock.fence
                if sure:
                    time.sleep(0.002)
                    while stay.is_set() and lock.remaining:
                        time.sleep(0.002)
                    stays.append((begin, min(time.monotonic(), begin + sure), fence))
                    with count:
                        count.value += 1
        except LockError:
            time.sleep(0.01)
    told.put(stays)
