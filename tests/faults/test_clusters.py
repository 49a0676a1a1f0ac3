"""Clusters whose members fail under load: no two flows believe at once that they have a key, and fences go up.

`docs/clusters.md` names these tests.
"""

from __future__ import annotations

import random
import re
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from typing import cast

import pytest
from sqlalchemy import create_engine, text

from dblock.core import clock
from sqlalchemy_dblock import LockError, StaleSnapshot, db_lock
from tests.faults.conftest import long_run
from tests.support.beliefs import Belief, Crowd, check, crowd
from tests.support.clusters import Arbitrator, Etcd, GroupMember, Patroni, Pgpool, missing
from tests.support.failover import URLS, make_tables, pair_of
from tests.support.lab import LONG, until
from tests.support.network import Network, possible
from tests.support.proxy import Proxy
from tests.support.servers import Galera, MySQL, PgBouncer, PostgreSQL, Standby, free_port, running

MARIADB = {"ENGINE": "django.db.backends.mysql", "USER": "root", "OPTIONS": {"ssl_disabled": True}}
"""Django's settings for private servers."""
OF_MYSQL = "mysql+pymysql://root@127.0.0.1:{}/locks?ssl_disabled=true"
NO_MYSQL = "" if MySQL.installed() else "needs MySQL itself: make mysql"

pytestmark = [
    pytest.mark.direct,
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),  # sockets that a cut has ended
]


@pytest.mark.timeout(120)
@pytest.mark.parametrize("number", range(20 if LONG else 1))
def test_a_synchronous_standby_is_promoted(number: int) -> None:
    """It has all that was answered, so that nobody has to wait for the end of a lease."""
    chance = random.Random(number)
    with pair_of("postgresql", synchronous=True) as pair, Proxy(0, pair.primary.port) as proxy:
        places = [URLS["postgresql"].format(proxy.port)] * 3, [{"PORT": str(proxy.port)}]
        with crowd(*places, chance, quarantine=None, longest=12.0) as load:
            time.sleep(chance.uniform(0.3, 1.5))
            pair.promote()
            proxy.lead_to(pair.replica.port)
            promoted = clock.now()
            assert opened(load, 0.0), "before the leases of six seconds have ended"
            time.sleep(6.0 if LONG else 1.0)
        assert [each for each in load.beliefs if each.since < promoted]


def leader(members: list[Patroni], old: Patroni | None = None) -> Patroni:
    """The one that leads, as soon as one does that is not the old one."""

    def found() -> list[Patroni]:
        return [each for each in members if each is not old and each.process and each.leads()]

    assert until(found, 60)
    return found()[0]


def opened(load: Crowd, seconds: float) -> bool:
    """Whether keys are taken, so many seconds from now or later."""
    moment = clock.now() + seconds
    return until(lambda: load.since(moment), seconds + 25)


@long_run(1800, missing("etcd", "patroni"))
def test_patroni_elects_another_leader() -> None:
    """The leader is killed with its Patroni, is cut off from etcd, or hands over; clients know all members."""
    chance, rounds = random.Random(37), 6
    with ExitStack() as stack:
        etcd = stack.enter_context(running(Etcd))
        members = [stack.enter_context(running(lambda: Patroni(etcd))) for _ in range(3)]
        hosts = "&".join(f"host=127.0.0.1:{each.port}" for each in members)
        url = f"postgresql+psycopg://dblock@/postgres?{hosts}&target_session_attrs=read-write"
        django = {
            "HOST": ",".join(["127.0.0.1"] * 3),
            "PORT": ",".join(str(each.port) for each in members),
            "OPTIONS": {"target_session_attrs": "read-write"},
        }
        make_tables(url)
        load = stack.enter_context(crowd([url] * 3, [django], chance, quarantine=5))
        for number in range(rounds):
            time.sleep(chance.uniform(1.0, 4.0))
            old, how = leader(members), ("kill", "cut", "switch")[number % 3]
            if how == "kill":
                old.stop(signal.SIGKILL)
            elif how == "cut":
                old.cut_off()
            else:
                old.hand_over()
            _ = leader(members, old)
            assert opened(load, 5.0)
            time.sleep(1.0)
            if how == "kill":
                old.start()
            elif how == "cut":
                old.cut_off(False)
            assert until(lambda: all(each.ready() for each in members), 60)


@contextmanager
def members_of_patroni(size: int, **settings: bool) -> Iterator[list[Patroni]]:
    """A Patroni cluster with our tables; the first one leads, and if it is synchronous the others have the tables."""
    with ExitStack() as stack:
        etcd = stack.enter_context(running(Etcd))
        members = [stack.enter_context(running(lambda: Patroni(etcd, **settings))) for _ in range(size)]
        assert leader(members) is members[0]
        make_tables(URLS["postgresql"].format(members[0].port))
        yield members


@long_run(600, missing("etcd", "patroni"))
def test_patroni_dies_and_its_postgresql_lives_on() -> None:
    """Who goes through the leader's endpoint never meets the old primary, which goes on granting to the others.

    A guard on the new primary refuses what the old one has granted.
    """
    with (
        members_of_patroni(2) as members,
        Proxy(0, members[0].port) as endpoint,
        Proxy(0, members[0].port) as stale,
    ):
        old, other = members
        url = URLS["postgresql"].format(endpoint.port)
        stays, new = (create_engine(URLS["postgresql"].format(port)) for port in (stale.port, other.port))
        with crowd([url] * 3, [{"PORT": str(endpoint.port)}], random.Random(37), quarantine=5) as load:
            time.sleep(3.0)
            assert load.beliefs
            old.die_alone()
            endpoint.refusing = True  # as a proxy does whose check of the leader has failed
            endpoint.cut()
            assert leader(members, old) is other
            endpoint.lead_to(other.port)
            endpoint.refusing = False
            assert opened(load, 5.0)
            hosts = "&".join(f"host=127.0.0.1:{each.port}" for each in members)
            listed = create_engine(f"postgresql+psycopg://dblock@/postgres?{hosts}&target_session_attrs=read-write")
            with listed.connect() as connection:
                assert connection.scalar(text("SELECT inet_server_port()")) == old.port, "it answers as a primary"
            there = db_lock(stays, "there", ttl=300, renew=False)
            assert there.acquire()
            with db_lock(new, "there", timeout=20) as here:
                assert there.verify()
                assert here.verify()
                assert there.state == here.state == "held", "two holders: a watchdog's task to prevent"
            stale.lead_to(other.port, cut=False)  # the lock's own session stays with the old one
            with stays.begin() as connection:
                assert connection.scalar(text("SELECT inet_server_port()")) == other.port
                with pytest.raises(StaleSnapshot):  # the row there is not of the tenure that the old one still shows
                    there.guard(connection)
            with suppress(LockError):
                there.release()
            old.start()  # Patroni finds that it leads no more
            assert until(lambda: all(each.ready() for each in members) and not old.leads(), 90)
            assert opened(load, 0.0)
        for each in (stays, new, listed):
            each.dispose()


@long_run(600, missing("etcd", "patroni"))
@pytest.mark.parametrize("strict", [True, False], ids=["strict", "stopped"])
def test_patroni_dies_where_commits_wait_for_the_other_one(strict: bool) -> None:
    """The old primary waits for ever for the standby that has left it: it grants nothing to those who stay.

    Nor while Patroni starts there again, with `synchronous_mode_strict`. Without it Patroni takes the waiting away
    before it demotes: so PostgreSQL is stopped first.
    """
    with (
        members_of_patroni(2 + strict, synchronous_mode=True, synchronous_mode_strict=strict) as members,
        Proxy(0, members[0].port) as endpoint,
    ):
        old = members[0]
        assert until(lambda: any(each.is_awaited() for each in members), 60)
        [other] = [each for each in members if each.is_awaited()]
        stays, follows = (URLS["postgresql"].format(port) for port in (old.port, endpoint.port))
        direct = create_engine(stays)
        with crowd([stays, follows] * 2, [{"PORT": str(endpoint.port)}], random.Random(37), quarantine=None) as load:
            time.sleep(3.0)
            assert load.beliefs
            old.die_alone()
            assert leader(members, old) is other
            endpoint.lead_to(other.port)
            assert opened(load, 2.5)
            with pytest.raises(LockError), db_lock(direct, "there", timeout=5):
                pass
            time.sleep(5.0)
            if not strict:
                old.stop(signal.SIGKILL)
            old.start()
            assert until(lambda: all(each.ready() for each in members) and not old.leads(), 90)
            assert opened(load, 0.0)
        direct.dispose()


FAST = "evs.keepalive_period=PT0.3S;evs.inactive_check_period=PT0.1S;evs.suspect_timeout=PT2S;evs.inactive_timeout=PT4S"
"""Galera's times, so that a member that is gone is missed after seconds."""


@long_run(1800)
@pytest.mark.parametrize("arbitrator", [False, True], ids=["three nodes", "two and garbd"])
def test_nodes_of_galera_fail(arbitrator: bool) -> None:
    """One is killed, or cut off: it refuses, the others go on, and it comes back."""
    if why := missing("mariadbd", *["garbd"] * arbitrator):
        pytest.skip(why)
    chance = random.Random(37)
    with ExitStack() as stack:
        first = stack.enter_context(running(lambda: Galera(None, FAST)))
        nodes = [first, *(stack.enter_context(running(lambda: Galera(first, FAST))) for _ in range(2 - arbitrator))]
        if arbitrator:
            _ = stack.enter_context(running(lambda: Arbitrator(first, FAST)))
        first.create_database("locks")
        urls = [OF_MYSQL.format(node.port) for node in nodes]
        make_tables(urls[0])
        assert until(lambda: first.status("wsrep_cluster_size") == "3", 30)
        django = [{**MARIADB, "NAME": "locks", "PORT": str(node.port)} for node in nodes]
        load = stack.enter_context(crowd(urls, django, chance))
        for number in range(6):
            time.sleep(chance.uniform(1.0, 3.0))
            assert opened(load, 0.0)
            failing = nodes[number % len(nodes)]
            others = [node for node in nodes if node is not failing]
            if number % 2:
                failing.stop(signal.SIGKILL)
            else:
                failing.provide("gmcast.isolate=1")
                assert until(lambda: failing.status("wsrep_cluster_status") == "non-Primary", 20)  # noqa: B023
            assert until(lambda: all(node.ready() for node in others), 20)  # noqa: B023
            assert opened(load, 0.0), "the majority goes on"
            time.sleep(chance.uniform(0.0, 4.0))
            if number % 2:
                failing.first = others[0]
                failing.start()
            else:
                failing.provide("gmcast.isolate=0")
            assert until(lambda: all(node.ready() for node in nodes), 60)


@long_run(180, missing("pgpool"))
@pytest.mark.parametrize(
    "settings", [(), ("write_function_list = 'nextval,setval'",)], ids=["as it is", "functions named"]
)
def test_a_proxy_sends_reads_to_the_standby(settings: tuple[str, ...]) -> None:
    """The lock's writes reach the primary, and so do its reads, which ask for the clock, unless functions are named."""
    with pair_of("postgresql") as pair:
        primary, replica = cast("PostgreSQL", pair.primary), cast("Standby", pair.replica)
        with running(lambda: Pgpool(primary, replica, *settings)) as proxy:
            url = URLS["postgresql"].format(proxy.port)
            with crowd([url] * 3, [{"PORT": str(proxy.port)}], random.Random(37)) as load:
                time.sleep(8.0)
            assert len(load.beliefs) > 30
            engine = create_engine(url)
            with engine.begin() as connection:
                connection.execute(text("CREATE TABLE stock AS SELECT 1 AS unguarded, 2 AS guarded"))
            assert until(lambda: replica.ask("SELECT 1 FROM pg_class WHERE relname = 'stock'"))
            with db_lock(engine, "k") as lock:
                with engine.begin() as connection:
                    connection.execute(text("SELECT unguarded FROM stock"))
                with engine.begin() as connection:
                    lock.guard(connection)
                    connection.execute(text("SELECT guarded FROM stock"))
            engine.dispose()
            here, there = proxy.statements()
    ours = [each for each in there if re.search(r"\block(s|_waiters|_epoch)\b", each)]
    assert any(" locks" in each for each in here)
    assert [each for each in ours if not each.startswith("SELECT")] == []
    assert bool(ours) == bool(settings)
    assert "SELECT unguarded FROM stock" in there, "what the application reads may be old"
    assert ("SELECT guarded FROM stock" in there) == bool(settings)


@long_run(120, missing("pgbouncer"))
@pytest.mark.parametrize("number", range(10))
def test_a_promotion_behind_pgbouncer(number: int) -> None:
    """Its clients stay connected, and find another server behind it; the standby lacks the last tenures."""
    chance = random.Random(number)
    with pair_of("postgresql") as pair:
        primary, replica = cast("PostgreSQL", pair.primary), cast("Standby", pair.replica)
        with running(lambda: PgBouncer(primary)) as pooler:
            url = URLS["postgresql"].format(pooler.port)
            with crowd([url] * 3, [{"PORT": str(pooler.port)}], chance, quarantine=3, longest=6.0) as load:
                time.sleep(chance.uniform(0.3, 1.5))
                pair.cut()
                time.sleep(chance.uniform(0.2, 1.0))
                pair.promote()
                pooler.lead_to(replica)
                promoted = clock.now()
                assert opened(load, 0.0)
                time.sleep(4.0)
            assert min(each.since for each in load.since(promoted)) > promoted + 2.5, "the new server was noticed"


@contextmanager
def group(size: int, *, single_primary: bool, network: Network | None = None) -> Iterator[list[GroupMember]]:
    """A MySQL group with our tables in the database `locks`; on machines of that network, if there is one."""
    machines = [network.machine() if network else None for _ in range(size)]
    seeds = [f"{machine.address if machine else '127.0.0.1'}:{free_port()}" for machine in machines]
    with ExitStack() as stack:
        members = [
            stack.enter_context(
                running(partial(GroupMember, seeds, number, single_primary=single_primary, machine=machine))
            )
            for number, machine in enumerate(machines)
        ]
        for member in members:
            member.start_group(first=member is members[0])
        members[0].ask("CREATE DATABASE locks")
        make_tables(OF_MYSQL.format(members[0].port))
        assert until(lambda: all(member.is_online() for member in members), 60)
        yield members


@long_run(300, NO_MYSQL)
def test_members_of_a_mysql_group_all_write() -> None:
    """What the group rolls back is tried again, and nobody misses a tenure that has yet to arrive at a member."""
    with group(2, single_primary=False) as members:
        urls = [OF_MYSQL.format(member.port) for member in members] * 2
        end = clock.now() + 12.0
        with ThreadPoolExecutor(len(urls)) as pool:
            turns = [turn for each in pool.map(lambda url: take_turns(url, end), urls) for turn in each]
    check(turns)
    assert len(turns) > 50


@contextmanager
def users_of(
    members: list[GroupMember], single_primary: bool, chance: random.Random
) -> Iterator[tuple[list[Proxy], Crowd]]:
    """Flows of both faces that use a group, and the ways on which they reach it: all lead to the one that writes."""
    with ExitStack() as stack:
        ways = [stack.enter_context(Proxy(0, member.port)) for member in members]
        if single_primary:
            for way in ways:
                way.lead_to(members[0].port)
        urls = [OF_MYSQL.format(way.port) for way in ways]
        django = [{**MARIADB, "NAME": "locks", "PORT": str(ways[0].port)}]
        with crowd(urls, django, chance) as load:
            yield ways, load


def the_others_go_on(others: list[GroupMember], ways: list[Proxy], load: Crowd, *, single_primary: bool) -> None:
    """They expel who is away, one of them writes, and keys are taken on the ways that lead to it."""
    assert until(lambda: all(each.size() == 2 for each in others), 60)
    assert until(lambda: any(each.writes() for each in others), 60)
    if single_primary:
        [new] = [each for each in others if each.writes()]
        for way in ways:
            way.lead_to(new.port)
    assert opened(load, 0.0), "the majority goes on"


def take_turns(url: str, end: float) -> list[Belief]:
    """Take a key again and again, for a moment each time; any error is raised."""
    engine, turns = create_engine(url), list[Belief]()
    while clock.now() < end:
        with db_lock(engine, "k", ttl=10, timeout=30) as lock:
            since = clock.now()
            time.sleep(0.002)
            turns.append(Belief("k", lock.fence, since, clock.now()))
    engine.dispose()
    return turns


@long_run(1800, NO_MYSQL)
@pytest.mark.parametrize("single_primary", [True, False], ids=["one writes", "each writes"])
def test_members_of_a_mysql_group_fail(single_primary: bool) -> None:
    """One is killed, or stands still and is expelled: the others go on, and it comes back."""
    chance = random.Random(37)
    with group(3, single_primary=single_primary) as members, users_of(members, single_primary, chance) as (ways, load):
        for number in range(4):
            time.sleep(chance.uniform(1.0, 3.0))
            assert opened(load, 0.0)
            failing = next(member for member in members if member.writes())
            others = [member for member in members if member is not failing]
            if number % 2:
                failing.freeze()
            else:
                failing.stop(signal.SIGKILL)
            the_others_go_on(others, ways, load, single_primary=single_primary)
            time.sleep(chance.uniform(0.0, 4.0))
            if number % 2:
                failing.thaw()  # it joins again by itself
            else:
                failing.start()
                failing.start_group()
            assert until(lambda: all(member.is_online() and member.size() == 3 for member in members), 90)


@long_run(1800, NO_MYSQL)
@pytest.mark.parametrize("single_primary", [True, False], ids=["one writes", "each writes"])
def test_a_member_of_a_mysql_group_is_cut_off(single_primary: bool) -> None:
    """It grants nothing to those who stay with it, the others go on, and it comes back when the cable is in again."""
    if not possible():
        pytest.skip("needs root, for networks of its own")
    chance = random.Random(37)
    with ExitStack() as stack:
        network = stack.enter_context(Network())
        members = stack.enter_context(group(3, single_primary=single_primary, network=network))
        ways, load = stack.enter_context(users_of(members, single_primary, chance))
        for number in range(4):
            time.sleep(chance.uniform(1.0, 3.0))
            assert opened(load, 0.0)
            [failing, *_] = [member for member in members if member.writes()]
            others = [member for member in members if member is not failing]
            # 0, the default, lets it wait for the others as long as they are away; else it leaves, and is read-only.
            failing.ask(f"SET GLOBAL group_replication_unreachable_majority_timeout = {4 * (number % 2)}")
            assert failing.machine is not None
            failing.machine.cut_off()
            cut = clock.now()
            to_the_new, to_the_old = ways[:2], ways[2]
            the_others_go_on(others, to_the_new, load, single_primary=single_primary)
            alone = create_engine(OF_MYSQL.format(failing.port))
            with pytest.raises(LockError), db_lock(alone, f"alone {number}", timeout=3):
                pass
            alone.dispose()
            time.sleep(max(chance.uniform(0.0, 4.0), cut + 6.0 - clock.now()))
            failing.machine.cut_off(False)
            if not until(failing.is_online, 30):  # it has left, and would try again after five minutes
                failing.ask("STOP GROUP_REPLICATION")
                failing.start_group()
            assert until(lambda: all(member.is_online() and member.size() == 3 for member in members), 90)
            if single_primary:
                to_the_old.lead_to(next(each for each in members if each.writes()).port)
