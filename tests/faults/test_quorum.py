"""Majority locks over five servers of several kinds, of which a minority fails in all ways."""

from __future__ import annotations

import contextlib
import signal
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, cast

import psycopg
import pytest
from sqlalchemy import Engine, create_engine, text

from dblock.core.errors import LockLost
from dblock.majority.asking import the_asks
from dblock.majority.protocol import QuorumUnavailable
from sqlalchemy_dblock import create_tables, db_quorum_lock
from tests.conftest import INNODB
from tests.faults.conftest import make_read_only
from tests.support.failover import URLS
from tests.support.lab import apart, until
from tests.support.majorities import count_on
from tests.support.proxy import Proxy
from tests.support.servers import MariaDB, MySQL, PostgreSQL, Server, Standby, _working_in, running, send

TTL = 1.5
OPENS_SOON = {"dblock_failover_quarantine": None}
"""After a promotion keys are closed for as short a time as can be: what is tested is the quarantine of the majority."""
pytestmark = pytest.mark.timeout(900)


@dataclass
class Member:
    """A server, and the way to it through a proxy."""

    server: Server
    proxy: Proxy
    engine: Engine
    direct: Engine

    def run(self, sql: str) -> None:
        with self.direct.connect() as connection:
            connection.execute(text(sql))
            connection.commit()


@contextlib.contextmanager
def member(make: Callable[[], Server]) -> Iterator[Member]:
    with running(make) as server, Proxy(0, server.port) as proxy:
        url = URLS["postgresql"]
        if isinstance(server, MariaDB):
            server.create_database("quorum")
            url = "mysql+pymysql://{user}@127.0.0.1:{}/quorum?ssl_disabled=true"
        made = Member(
            server,
            proxy,
            create_engine(url.format(proxy.port, user="application"), execution_options=OPENS_SOON),
            create_engine(url.format(server.port, user="root")),
        )
        create_tables(made.direct)
        if isinstance(server, MariaDB):  # root may write where others may only read
            made.run("CREATE USER application@'%'")
            made.run("GRANT ALL ON quorum.* TO application@'%'")
        yield made
        made.engine.dispose()
        made.direct.dispose()


@pytest.fixture(scope="module")
def servers() -> Iterator[list[Member]]:
    kinds = [PostgreSQL, MariaDB, MySQL if "mysql" in INNODB and MySQL.installed() else MariaDB, PostgreSQL, MariaDB]
    with contextlib.ExitStack() as stack:
        yield [stack.enter_context(member(kind)) for kind in kinds]


@pytest.fixture
def five(servers: list[Member]) -> Iterator[list[Engine]]:
    """Five databases that count."""
    for each in servers:
        each.run("DELETE FROM locks")
        each.run("DELETE FROM lock_waiters")
        count_on(each.direct)
    yield [each.engine for each in servers]
    assert until(lambda: not the_asks().busy, 20)
    for each in servers:
        each.engine.dispose()
        each.direct.dispose()
        each.proxy.black_hole = each.proxy.refusing = False


def lock(five: list[Engine], **options: Any) -> Any:
    return db_quorum_lock(five, "k", **{"ttl": TTL, "timeout": 10, **options})


def stop(each: Member) -> Callable[[], None]:
    pids = [*_working_in(each.server.directory)]
    send(pids, signal.SIGSTOP)
    return lambda: send(pids, signal.SIGCONT)


def kill(each: Member) -> Callable[[], None]:
    each.proxy.refusing = True  # it ends when its target refuses
    each.server.stop(signal.SIGKILL)
    each.proxy.cut()
    each.direct.dispose()

    def start() -> None:
        each.server.start()
        each.proxy.refusing = False

    return start


def cut_off(each: Member) -> Callable[[], None]:
    each.proxy.black_hole = True

    def again() -> None:
        each.proxy.black_hole = False
        each.proxy.cut()

    return again


def refuse(each: Member) -> Callable[[], None]:
    each.proxy.refusing = True
    each.proxy.cut()
    return lambda: setattr(each.proxy, "refusing", False)


def wipe(each: Member) -> Callable[[], None]:
    each.run("TRUNCATE TABLE locks")
    return lambda: None


def read_only(each: Member) -> Callable[[], None]:
    make_read_only(each.direct, True)
    return lambda: make_read_only(each.direct, False)


FAULTS = {
    "stopped": stop,
    "killed": kill,
    "cut off": cut_off,
    "refusing": refuse,
    "wiped": wipe,
    "read-only": read_only,
}


def cycle(five: list[Engine], **options: Any) -> float:
    """How many seconds it takes to acquire and to release the lock."""
    began = time.monotonic()
    with lock(five, **options):
        pass
    return time.monotonic() - began


@pytest.mark.exact
@pytest.mark.parametrize("what", FAULTS)
def test_a_minority_that_fails_delays_nobody_after_its_first_failure(
    what: str, five: list[Engine], servers: list[Member]
) -> None:
    """A holder keeps the lock, gives it back, and the next one gets it; the first failure costs a limit a round."""
    for _ in range(5):
        _ = cycle(five)
    held = lock(five)
    assert held.acquire()
    minority = servers[0], servers[4]  # the first, in whose queue they wait
    heal = [FAULTS[what](each) for each in minority]
    try:
        ended = time.monotonic() + 1.5 * TTL
        while time.monotonic() < ended:
            held.check()
            time.sleep(0.01)
        assert held.state == "held"
        assert held.verify() is True
        before = held.fence
        began = time.monotonic()
        held.release()
        assert time.monotonic() - began < 1.5
        with lock(five) as next_one:
            assert next_one.fence > before
        took = [cycle(five) for _ in range(20)]
        assert statistics.median(took) < 0.2, "no round waits for the minority"
    finally:
        for each in heal:
            each()
    assert until(lambda: whole(five), 30), "they count again in the end"


def whole(five: list[Engine]) -> bool:
    try:
        with lock(five) as found:
            return set(found.answers.values()) == {"granted"}
    except LockLost:
        return False


@pytest.mark.exact
def test_a_member_that_somebody_has_write_locked_delays_nobody(five: list[Engine], servers: list[Member]) -> None:
    """It answers each take after a quarter of a second: that it is busy, and not that it has a holder."""
    before = statistics.median(cycle(five, answer=1) for _ in range(10))
    for each in servers[0], servers[4]:  # the first, in whose queue they wait
        with each.direct.connect() as stranger:
            stranger.execute(text("SELECT * FROM locks FOR UPDATE"))
            took = statistics.median(cycle(five, answer=1) for _ in range(20))
        assert took < max(10 * before, 0.1)


@pytest.mark.exact
def test_two_of_three_that_do_not_answer(five: list[Engine], servers: list[Member]) -> None:
    """A holder hears of it before its leases end, and others in their time."""
    told: list[Any] = []
    held = lock(five[:3], on_lost=lambda *given: told.append(given))
    assert held.acquire()
    heal = [cut_off(each) for each in servers[1:3]]
    try:
        assert until(lambda: told, 2 * TTL)
        assert held.state == "lost"
        with pytest.raises(LockLost, match="fewer than 2 of 3"):
            held.release()
        began = time.monotonic()
        with pytest.raises(QuorumUnavailable, match="no answer|being asked") as few:
            lock(five[:3]).acquire(timeout=1)
        assert time.monotonic() - began < 2.5
        assert len(few.value.answers) == 3
    finally:
        for each in heal:
            each()
    assert until(lambda: whole(five[:3]), 30)


def test_a_standby_that_is_promoted_counts_when_nobody_relies_on_its_primary_any_more(
    five: list[Engine], servers: list[Member]
) -> None:
    """It lacks the tenures that its primary has granted since it lagged."""
    ttl, three = 3.0, [five[0], five[1], five[4]]
    standby, healing = Standby(cast("PostgreSQL", servers[0].server)), contextlib.ExitStack()
    try:
        standby.prepare()
        standby.start()
        where = f"postgresql://dblock@127.0.0.1:{standby.port}/postgres"
        with psycopg.connect(where, autocommit=True) as session:
            session.execute("ALTER SYSTEM SET primary_conninfo = ''")
            session.execute("SELECT pg_reload_conf()")
            assert until(lambda: not session.execute("SELECT 1 FROM pg_stat_wal_receiver").fetchall())
            heal = refuse(servers[4])
            held, rival = (db_quorum_lock(three, "k", ttl=ttl, answer=1) for _ in "ab")
            assert held.acquire(timeout=5)
            assert [answer == "granted" for answer in held.answers.values()] == [True, True, False]
            _ = healing.callback(kill(servers[0]))
            session.execute("SELECT pg_promote()")
            promoted = time.monotonic()
            servers[0].proxy.lead_to(standby.port)
            servers[0].proxy.refusing = False
            heal()
            # The primary's tenure is still relied on: without it the promoted one and the last one would be a majority.

            def tries() -> str:
                with contextlib.suppress(QuorumUnavailable):
                    assert rival.acquire(timeout=1) is False
                return str(next(iter(rival.answers.values())))

            assert apart(tries).startswith(("new, or restarted", "closed", "held by"))
            with contextlib.suppress(LockLost):
                held.release()
            assert until(lambda: whole(three), 10)
            assert time.monotonic() - promoted > ttl
    finally:
        servers[0].proxy.lead_to(servers[0].server.port)
        healing.close()
        standby.close()
