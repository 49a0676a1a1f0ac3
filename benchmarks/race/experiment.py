"""Polling against listening on one protocol each, with distance and work: `python -m benchmarks.race experiment`.

Each system has a contestant that listens and one that polls: the same row or key, the same statements that take it and
give it back, and another way to wait. What polls tries without waiting, and then pauses; its pauses are of this module.
Clients take, hold for the section, give back, and begin again without a pause, so that the key is always wanted.
"""

from __future__ import annotations

import functools
import itertools
import random
import secrets
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, nullcontext
from dataclasses import replace
from importlib import import_module
from typing import Any

import psycopg
from psycopg import sql
from rich.table import Table
from sqlalchemy import Engine, create_engine

from benchmarks import FORK
from benchmarks.race import peers
from benchmarks.race.clients import Make, warm_up
from benchmarks.race.figures import Client, Figures, crowd_figures
from benchmarks.race.peers import TTL, EtcdClient, Lock, Peer
from benchmarks.race.processes import a_process, tell
from benchmarks.race.scenarios import Measure, Scenario
from benchmarks.race.servers import Place, far_away
from dblock.core.timing import DEFAULT, Timing
from sqlalchemy_dblock import LockStoreError, db_lock
from sqlalchemy_dblock.store import store_for

NAME = "experiment"
DISTANCES, SECTIONS, CLIENTS = (0.0, 0.001, 0.02), (0.0, 0.005, 0.05), (2, 8, 64)
PROCESSES = 16
"""With more clients than that, each process has several in threads."""
PATIENT = 2.0
"""Seconds that a try of this project may take, which is a setting for tests."""
DRAIN = 10.0
"""Seconds after the end of a cell for which those that still wait are waited for."""
Pause = Callable[[], Iterator[float]]


def fixed() -> Iterator[float]:
    """The same pause always."""
    return itertools.repeat(0.01)


def at_random() -> Iterator[float]:
    """With the same mean."""
    while True:
        yield random.uniform(0, 0.02)


def growing() -> Iterator[float]:
    """Twice as long each time."""
    return (min(0.001 * 2**tries, 0.1) for tries in itertools.count())


def polled(attempt: Callable[[], object], give: Callable[[], object], pause: Pause = fixed) -> Lock:
    """Try, and pause, until it succeeds."""

    def take() -> None:
        pauses = pause()
        while not attempt():
            time.sleep(next(pauses))

    return Lock(take, give)


@functools.cache
def _engine(url: str, timing: Timing | None = None) -> Engine:
    """One for all threads of a process, as an application has it, with a connection."""
    engine = create_engine(url)
    store = store_for(engine)
    store.database = replace(store.database, own_timing=timing)
    with db_lock(engine, f"experiment-{secrets.token_hex(4)}", timeout=None):
        return engine


def listening(url: str, key: str) -> Lock:
    """This project as it is."""
    lock = db_lock(_engine(url), key, ttl=TTL, timeout=None)
    return Lock(lock.acquire, lock.release)


def polling(pause: Pause) -> Make:
    """This project without its queue: each try takes the row if it is free, and reads who has it if not.

    A try has time for its answer, so that one which a busy machine delays does not end with its connection.
    """

    def make(url: str, key: str) -> Lock:
        lock = db_lock(_engine(url, DEFAULT._replace(single_try=PATIENT)), key, ttl=TTL, timeout=None)

        def attempt() -> bool:
            try:
                return lock.acquire(blocking=False)
            except LockStoreError:  # no answer in the time of one try; the lock gives back what it may have got
                return False

        return polled(attempt, lock.release, pause)

    return make


ROW = """
CREATE TABLE IF NOT EXISTS experiment (key text PRIMARY KEY, owner text) WITH (fillfactor = 50);
INSERT INTO experiment VALUES (%s, NULL) ON CONFLICT DO NOTHING
"""
ROW_TAKE = "UPDATE experiment SET owner = %s WHERE key = %s AND owner IS NULL"
ROW_GIVE = "UPDATE experiment SET owner = NULL WHERE owner = %s AND key = %s"
ROW_GIVE_AND_NOTIFY = f"WITH gone AS ({ROW_GIVE}) SELECT pg_notify(%s, '')"
MISSED = 1.0
"""Seconds without a notification after which a listener tries nevertheless."""


def bare_row(url: str, key: str, *, listens: bool = False) -> Lock:
    """A row with the name of its owner; giving back notifies all who wait, if they listen."""
    connection = psycopg.connect(url.replace("+psycopg", ""), autocommit=True, prepare_threshold=0)
    create, insert = ROW.split(";")
    with connection.transaction():
        _ = connection.execute("SELECT pg_advisory_xact_lock(1)")
        _ = connection.execute(create)
        _ = connection.execute(insert, (key,))
    me = secrets.token_hex(8)

    def attempt() -> bool:
        return connection.execute(ROW_TAKE, (me, key)).rowcount == 1

    if not listens:
        return polled(attempt, lambda: connection.execute(ROW_GIVE, (me, key)))
    channel = key.replace("-", "_")
    _ = connection.execute(sql.SQL("LISTEN {}").format(sql.Identifier(channel)))

    def take() -> None:
        while not attempt():
            for _ in connection.notifies(timeout=MISSED, stop_after=1):
                pass

    return Lock(take, lambda: connection.execute(ROW_GIVE_AND_NOTIFY, (me, key, channel)))


def redis_polled(url: str, key: str) -> Lock:
    """redis-py's Lock, with a pause of its own."""
    client = import_module("redis").Redis.from_url(url)
    lock = client.lock(key, timeout=TTL, sleep=0.01)
    return Lock(lock.acquire, lock.release)


def etcd_polled(url: str, key: str) -> Lock:
    """A key that is put if it is not there."""
    client, name = EtcdClient(url), key.encode()
    lease, encoded = client.lease(600), peers._encoded
    absent = encoded(2, 1) + encoded(3, name) + encoded(5, 0)  # it was created at revision 0
    put = encoded(2, encoded(1, name) + encoded(3, lease))

    def attempt() -> bool:
        return bool(client.call("/etcdserverpb.KV/Txn", (1, absent), (2, put)).get(2))

    return polled(attempt, lambda: client.call("/etcdserverpb.KV/DeleteRange", (1, name)))


def etcd_mutex(url: str, key: str) -> Lock:
    """The recipe of etcd's own clients: put a key with a lease, and watch the one that was created before it.

    They let the watch begin at a revision that has passed, which etcd 3.4 serves every 100 ms only. Here it begins at
    once, and the client reads again whether the one before is still there.
    """
    client = EtcdClient(url)
    lease, encoded = client.lease(600), peers._encoded
    mine = f"{key}/{lease:x}".encode()
    watch = client._channel.stream_stream("/etcdserverpb.Watch/Watch", lambda data: data, peers._decoded)

    def before(revision: int) -> bytes | None:
        """The key that was created last before `revision`."""
        span = (1, f"{key}/".encode()), (2, f"{key}0".encode())
        latest = (3, 1), (5, 2), (6, 2), (8, 1), (13, revision - 1)
        found = client.call("/etcdserverpb.KV/Range", *span, *latest).get(2)
        return None if found is None else peers._decoded(found)[1]

    def take() -> None:
        header = client.call("/etcdserverpb.KV/Put", (1, mine), (3, lease))[1]
        revision = peers._decoded(header)[3]
        while (other := before(revision)) is not None:
            answers = watch(iter([encoded(1, encoded(1, other))]))
            _ = next(answers)  # it watches
            if before(revision) == other:
                _ = next(answer for answer in answers if 11 in answer)
            answers.cancel()

    return Lock(take, lambda: client.call("/etcdserverpb.KV/DeleteRange", (1, mine)))


SYSTEMS = {"dblock": "dblock", "SQL": "bare SQL", "Redis": "Redis", "etcd": "etcd"}
"""The beginnings of the contestants' names, and what sentences call them."""
LISTENS, POLLS = WAYS = ", listens", ", polls 10 ms"
CONTESTANTS = [
    Peer("dblock, listens", "PostgreSQL", listening, "in its queue, notified by the one before", ours=True),
    Peer("dblock, polls 10 ms", "PostgreSQL", polling(fixed), "tries every 10 ms", ours=True),
    Peer("dblock, polls 0 to 20 ms", "PostgreSQL", polling(at_random), "tries after a random pause", ours=True),
    Peer("dblock, polls 1 to 100 ms", "PostgreSQL", polling(growing), "tries after a pause that doubles", ours=True),
    Peer(
        "SQL, listens",
        "PostgreSQL",
        functools.partial(bare_row, listens=True),
        "a row of PostgreSQL; `LISTEN`: giving back notifies all who wait, and all try",
    ),
    Peer("SQL, polls 10 ms", "PostgreSQL", bare_row, "the same row, tried every 10 ms"),
    Peer("Redis, listens", "Redis", peers.redis_lock, "python-redis-lock (`BLPOP`)", package="redis_lock"),
    Peer("Redis, polls 10 ms", "Redis", redis_polled, "redis-py's Lock with `sleep=0.01`", package="redis"),
    Peer("etcd, listens", "etcd", etcd_mutex, "the mutex of etcd's clients: watches the one before", package="grpc"),
    Peer("etcd, polls 10 ms", "etcd", etcd_polled, "a key that is put if it is absent, every 10 ms", package="grpc"),
]


def crowd(
    peer: Peer, place: Place, port: int | None, *, clients: int, section: float, acquisitions: int, cap: float
) -> Figures:
    """Of so many clients with one key, until they have acquired it so often in all, or the time is up.

    Those that wait at the end are waited for, so that no wait is counted by a part of it; for some seconds only, and
    `unserved` are those that wait on.
    """
    threads = -(-clients // PROCESSES)
    origin, end, left, go = FORK.Value("d"), FORK.Value("d"), FORK.Value("i", acquisitions), FORK.Event()
    url, key = place.url(port), f"experiment-{secrets.token_hex(4)}"

    def cycle(lock: Lock, waits: list[tuple[float, float]], failed: list[Exception]) -> None:
        try:
            turns(lock, waits)
        except Exception as error:  # noqa: BLE001 - that of any library
            failed.append(error)

    def turns(lock: Lock, waits: list[tuple[float, float]]) -> None:
        while (begun := time.monotonic()) < end.value:
            _ = lock.take()
            taken = time.monotonic()
            if section:
                time.sleep(section)
            _ = lock.give()
            if taken < origin.value:
                continue
            waits.append((begun - origin.value, taken - begun))
            with left.get_lock():
                left.value -= 1
                if not left.value:
                    end.value = min(end.value, time.monotonic())

    def work(pipe: Any) -> None:
        locks = [peer.make(url, key) for _ in range(threads)]
        tell(pipe, None)
        _ = go.wait()
        waits, failed = [list[tuple[float, float]]() for _ in locks], list[Exception]()
        members = [
            threading.Thread(target=cycle, args=(lock, own, failed), daemon=True)
            for lock, own in zip(locks, waits, strict=True)
        ]
        for member in members:
            member.start()
        time.sleep(max(0.0, origin.value - time.monotonic()))
        computed = time.process_time()
        for member in members:
            while member.is_alive() and time.monotonic() < end.value + DRAIN:
                member.join(0.2)
        if failed:
            raise failed[0]
        computed = (time.process_time() - computed) / threads
        tell(pipe, [Client(each[:], computed, member.is_alive()) for each, member in zip(waits, members, strict=True)])

    with ExitStack() as stack:
        reads = [stack.enter_context(a_process(work)) for _ in range(clients // threads)]
        for read in reads:
            read()
        origin.value = time.monotonic() + warm_up(clients)
        end.value = origin.value + cap
        go.set()
        time.sleep(max(0.0, origin.value - time.monotonic()))
        before = place.computed()
        found = [client for read in reads for client in read()]
        seconds = end.value - origin.value
        figures = crowd_figures(found, seconds, place.computed() - before)
    unserved = sum(client.tries for client in found)
    return figures | {"locks": figures["rate"] * seconds, "cut": float(left.value > 0), "unserved": float(unserved)}


def cell(distance: float, acquisitions: int, cap: float, *, clients: int, section: float) -> Measure:
    """One cell of the grid."""

    def measure(peer: Peer, place: Place) -> Figures:
        assert place.server is not None
        with far_away(place.server.port, distance) if distance else nullcontext() as port:
            return crowd(peer, place, port, clients=clients, section=section, acquisitions=acquisitions, cap=cap)

    return measure


def programme(*, quick: bool, acquisitions: int, cap: float) -> list[Scenario]:
    """The grid, or a small part of it."""
    every = [(clients, section, distance) for clients in CLIENTS for section in SECTIONS for distance in DISTANCES]
    few = [(8, 0.0, 0.0), (8, 0.0, 0.02), (8, 0.005, 0.0), (2, 0.0, 0.0), (2, 0.005, 0.0)]
    return [
        Scenario(
            NAME,
            {"clients": clients, "distance": distance, "section": section},
            cell(distance, acquisitions, cap, clients=clients, section=section),
            lambda _: True,
        )
        for clients, section, distance in (few if quick else every)
    ]


def expected(setting: dict[str, float], acquisitions: int, cap: float) -> tuple[float, bool]:
    """Seconds of one contestant in a cell, roughly, and whether the time will be up before all acquisitions.

    An acquisition takes the section, two round trips and 2 ms, or 10 ms where very many poll. To begin takes some round
    trips for each thread.
    """
    clients, section, distance = (setting[name] for name in ("clients", "section", "distance"))
    each = section + 2 * distance + (0.002 if clients <= PROCESSES else 0.01)
    counted = acquisitions * each
    begin = 0.2 + 0.02 * min(clients, PROCESSES) + (0.02 + 15 * distance) * -(-clients // PROCESSES)
    return begin + warm_up(int(clients)) + min(counted, cap) + clients * each, counted > cap


def plan(cells: list[Scenario], contestants: int, rounds: int, acquisitions: int, cap: float) -> Table:
    """What the run will take, before it begins; `*`: such a cell is cut at the cap."""
    distances = sorted({each.setting["distance"] for each in cells})
    found = {tuple(each.setting.values()): expected(each.setting, acquisitions, cap) for each in cells}
    minutes = sum(seconds for seconds, _ in found.values()) * contestants * rounds / 60
    table = Table(
        *("clients", "inside", *(f"{distance * 1e3:g} ms away" for distance in distances)),
        title=f"{len(cells)} cells, {contestants} contestants, {rounds} rounds: about {minutes:.0f} minutes",
        caption=f"seconds of one contestant in one round; * ends at {cap:g} s, before {acquisitions} acquisitions",
    )
    for clients, section in dict.fromkeys((each.setting["clients"], each.setting["section"]) for each in cells):
        known = (found.get((clients, distance, section)) for distance in distances)
        shown = (f"{each[0]:.1f}{'*' * each[1]}" if each else "" for each in known)
        table.add_row(f"{clients}", f"{section * 1e3:g} ms", *shown)
    return table
