"""What the peers race in. Each scenario measures one peer once; the race interleaves the peers, and repeats."""

from __future__ import annotations

import random
import secrets
import time
from collections.abc import Callable
from importlib import import_module
from typing import Any, NamedTuple

from sqlalchemy import create_engine

from benchmarks.handoff import between_processes, tails
from benchmarks.race import peers, scale
from benchmarks.race.clients import Told, together
from benchmarks.race.figures import Figures, crowd_figures
from benchmarks.race.peers import Lock, Peer
from benchmarks.race.processes import a_process, connections, size, tell, threads
from benchmarks.race.servers import Counters, Place, far_away
from sqlalchemy_dblock import db_lock
from tests.support.proxy import Proxy
from tests.support.servers import end_with_parent

Measure = Callable[[Peer, Place], Figures]
LOSERS = 8


ROWS = (1_000, 10_000, 100_000, 1_000_000)
HELD = (10, 100, 1_000, 10_000)
TASKS, THREADS = (100, 1_000, 10_000), (10, 100, 1_000)
POOLED = (32, 250, 1_000, 2_000)


class Scenario(NamedTuple):
    """One line of the programme."""

    name: str
    setting: dict[str, Any]
    measure: Measure
    runs: Callable[[Peer], bool]
    once: bool = False
    """Whether it is measured once, rather than in each round."""


def _key() -> str:
    """Of one measurement: a client that has failed may hold it for a while."""
    return f"race-{secrets.token_hex(4)}"


def cycles(clients: int, seconds: float, *, own: bool, section: float = 0.0, distance: float = 0.0) -> Measure:
    """Clients that take and give back, each a key of its own or all the same."""

    def measure(peer: Peer, place: Place) -> Figures:
        told = [Told(f"{key}:{number}" if own else key) for key in [_key()] for number in range(clients)]
        if distance:
            assert place.server is not None
            with far_away(place.server.port, distance) as port:
                found, server = together(peer.make, place.url(port), told, section, seconds, place.computed)
        else:
            found, server = together(peer.make, place.url(), told, section, seconds, place.computed)
        return crowd_figures(found, seconds, server)

    return measure


def hand_off(count: int) -> Measure:
    """From the beginning of a release to the end of the take of a process that waits."""

    def measure(peer: Peer, place: Place) -> Figures:
        def make(url: str, key: str) -> Lock:
            end_with_parent()  # made in both processes
            return peer.make(url, key)

        def pause() -> float:
            return random.uniform(0.15, 0.25)

        def both(pipe: Any) -> None:
            tell(pipe, between_processes(make, place.url(), _key(), count=count, pause=pause))

        with a_process(both) as read:
            p50, p99 = tails(read())
        return {"p50": p50, "p99": p99}

    return measure


def losers(seconds: float) -> Measure:
    """Clients that try in vain what another one holds, which works at the same server meanwhile."""

    def measure(peer: Peer, place: Place) -> Figures:
        def run(many: int) -> tuple[float, float, float]:
            key = _key()
            told = [Told(key, "hold"), *[Told(key, "try")] * many]
            found, server = together(peer.make, place.url(), told, 0.0, seconds, place.computed)
            return sum(len(each.waits) for each in found) / seconds, sum(each.tries for each in found) / seconds, server

        alone, _, before = run(0)
        beside, tries, server = run(LOSERS)
        more = max(0.0, server - before * beside / alone)  # than for the holder's own work
        return {
            "alone": alone,
            "rate": beside,
            "kept": beside / alone,
            "tries": tries,
            "server_cpu": more / (tries * seconds / 1000),
        }

    return measure


def costs(count: int) -> Measure:
    """What an uncontended lock costs in round trips, statements, and bytes of the server's log."""

    def measure(peer: Peer, place: Place) -> Figures:
        def work(url: str) -> Callable[[Any], None]:
            def take_and_give(pipe: Any) -> None:
                lock = peer.make(url, _key())
                for rounds in (5, count):
                    for _ in range(rounds):
                        lock.take()
                        lock.give()
                    tell(pipe, rounds)

            return take_and_give

        figures = Figures()
        with Counters(place) as counters, a_process(work(place.url())) as read:
            read()
            counters.begin()
            read()
            counters.end()
        figures |= {name: value / count for name, value in counters.counted().items()}
        if place.server is not None:
            with Proxy(0, place.server.port) as proxy, a_process(work(place.url(proxy.port))) as read:
                read()
                before = proxy.round_trips
                read()
                figures["round_trips"] = (proxy.round_trips - before) / count
        return figures

    return measure


class Many(NamedTuple):
    """Of one process that holds many locks."""

    take: Callable[[int], object]
    keep: Callable[[], object] | None = None
    """What the caller has to do thrice in each lease, where the library does not."""


def leases(many: int, ttl: float, seconds: float) -> Measure:
    """One process takes many locks, and holds them for a while."""

    def measure(peer: Peer, place: Place) -> Figures:
        def work(pipe: Any) -> None:
            before, at_first = size(), connections()
            holder = HOLDERS[peer.name](place.url(), secrets.token_hex(4), ttl)
            begun = time.monotonic()
            for number in range(many):
                _ = holder.take(number)
            taken, grown = time.monotonic() - begun, size() - before
            tell(pipe, taken)
            computed, end = time.process_time(), time.monotonic() + seconds
            while (left := end - time.monotonic()) > 0:
                time.sleep(min(left, ttl / 3))
                if holder.keep is not None:
                    holder.keep()
            computed = time.process_time() - computed
            figures = {"bytes": grown / many, "threads": threads(), "connections": connections() - at_first}
            tell(pipe, figures | {"client_cpu": computed})

        with a_process(work) as read:
            rate = many / read()
            before, begun = place.computed(), time.monotonic()
            figures: Figures = read()
            passed = time.monotonic() - begun
            figures |= {"rate": rate, "server_cpu": (place.computed() - before) / passed}
        figures["client_cpu"] /= passed
        return figures

    return measure


def _ours(url: str, prefix: str, ttl: float) -> Many:
    engine = create_engine(url)
    held = list[Any]()

    def take(number: int) -> None:
        held.append(db_lock(engine, f"{prefix}:{number}", ttl=ttl))
        held[-1].acquire()

    return Many(take)


def _advisory(url: str, prefix: str, ttl: float) -> Many:
    cursor, first = peers._cursor(url), int(prefix, 16) % 1_000_000 * 100_000
    return Many(lambda number: cursor.execute("SELECT pg_advisory_lock(%s)", (first + number,)))


def _get_lock(url: str, prefix: str, ttl: float) -> Many:
    cursor = peers._cursor(url)
    return Many(lambda number: cursor.execute("SELECT GET_LOCK(%s, 60)", (f"{prefix}{number}",)))


def _redis_py(url: str, prefix: str, ttl: float) -> Many:
    client, held = peers._redis(url), list[Any]()

    def take(number: int) -> None:
        held.append(client.lock(f"{prefix}{number}", timeout=ttl))
        held[-1].acquire()

    def keep() -> None:
        for lock in held:
            lock.reacquire()

    return Many(take, keep)


def _etcd(url: str, prefix: str, ttl: float) -> Many:
    client = peers.EtcdClient(url)
    lease = client.lease(int(ttl))
    return Many(lambda number: client.lock(f"{prefix}{number}", lease), lambda: client.keep_alive(lease))


def _zookeeper(url: str, prefix: str, ttl: float) -> Many:
    client, held = peers.zookeeper(url), list[Any]()
    _ = import_module("kazoo.recipe.lock")

    def take(number: int) -> None:
        held.append(client.Lock(f"/{prefix}{number}"))
        held[-1].acquire()

    return Many(take)


HOLDERS: dict[str, Callable[[str, str, float], Many]] = {
    peers.MINE: _ours,
    "dblock (MariaDB)": _ours,
    "dblock (SQLite)": _ours,
    "pg_advisory_lock": _advisory,
    "GET_LOCK (MariaDB)": _get_lock,
    "redis-py": _redis_py,
    "etcd": _etcd,
    "ZooKeeper, kazoo": _zookeeper,
}


def programme(*, quick: bool) -> list[Scenario]:
    """All of it, in the order of the page."""
    seconds = 0.5 if quick else 1.2

    def all_of_them(peer: Peer) -> bool:
        return peer.hot or peer.floor

    def contends(peer: Peer) -> bool:
        return peer.hot and (peer.main or not quick)

    def races(peer: Peer) -> bool:
        return peer.hot and peer.main

    def waits_its_own_way(peer: Peer) -> bool:
        return races(peer) and (peer.ours or peer.name in OF_EACH_KIND)

    def leaves(peer: Peer) -> bool:
        return peer.hot and peer.main and peer.place != "SQLite" and peer.make is not peers.bare_queue

    def tries(peer: Peer) -> bool:
        return races(peer) and peer.make not in {peers.etcd, peers.bare_queue}

    def grows(peer: Peer) -> bool:
        return peer.ours and peer.main

    def mine(peer: Peer) -> bool:
        return peer.name == peers.MINE

    crowds = [
        Scenario(
            "hot",
            {"clients": clients, "section": section},
            cycles(clients, seconds * (1 + clients / 50), own=False, section=section),
            contends if clients == 8 else waits_its_own_way if (clients, section) == (100, 0.0) else races,
        )
        for section, sizes in (
            (0.0, (8,) if quick else (2, 8, 32, 100)),
            (0.005, (8, 32) if quick else (2, 8, 32, 100)),
        )
        for clients in sizes
    ]
    middle = () if quick else ((4, 0.0), (16, 0.0), (16, 0.005), (64, 0.005))
    crowds += [
        Scenario(
            "hot",
            {"clients": clients, "section": section},
            cycles(clients, seconds * (1 + clients / 50), own=False, section=section),
            lambda peer: peer.name in EXPERIMENT.values(),
        )
        for clients, section in middle
    ]
    alone = [
        Scenario("alone", {"clients": 1}, cycles(1, seconds, own=True), all_of_them),
        Scenario("own", {"clients": 8}, cycles(8, seconds, own=True), races_or_floor),
    ]
    far = [
        Scenario(
            "far",
            {"clients": clients, "distance": distance, "section": section},
            cycles(clients, max(seconds, 1.5), own=clients == 1, section=section, distance=distance),
            leaves,
        )
        for distance in (0.001, 0.02)
        for clients, section in ((1, 0.0), (8, 0.005))
    ]
    growth = [
        *(Scenario("held", {"leases": n}, scale.held(n), grows, once=True) for n in HELD),
        *(
            Scenario("waiting", {kind: n}, scale.waiting(n, in_tasks=kind == "tasks"), mine, once=True)
            for kind, sizes in (("tasks", TASKS), ("threads", THREADS))
            for n in sizes
        ),
        *(Scenario("pooled", {"clients": n}, scale.pooled(n, 8.0), mine, once=True) for n in POOLED),
        *(Scenario("rows", {"rows": n}, scale.rows(n), grows, once=True) for n in ROWS),
    ]
    many, ttl, hold = (500, 3.0, 1.5) if quick else (10_000, 15.0, 12.0)
    return [
        *alone,
        *crowds,
        Scenario("handoff", {}, hand_off(8 if quick else 20), contends),
        *([] if quick else far),
        *([] if quick else [Scenario("losers", {"clients": LOSERS}, losers(seconds), tries)]),
        Scenario("leases", {"leases": many}, leases(many, ttl, hold), lambda peer: peer.name in HOLDERS, once=True),
        Scenario("costs", {}, costs(50 if quick else 200), all_of_them, once=True),
        *([] if quick else growth),
    ]


def races_or_floor(peer: Peer) -> bool:
    """Not the variants of a face."""
    return peer.main and peer.make is not peers.bare_queue


OF_EACH_KIND = ("pg_advisory_lock", "GET_LOCK (MariaDB)", "redis-py", "python-redis-lock", "etcd", "ZooKeeper, kazoo")
"""One peer for each way to wait, where all would take minutes and say no more."""
EXPERIMENT = {"Redis, by polling": "redis-py", "etcd, by watching": "etcd", "dblock, notified": peers.MINE}
"""The systems of the published experiment, and this project."""
