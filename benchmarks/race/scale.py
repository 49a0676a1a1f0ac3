"""What grows with the rows of the table, and with the leases that one process holds: this project alone."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

from sqlalchemy import Engine, create_engine, text

from benchmarks.race.figures import Figures
from benchmarks.race.peers import Peer
from benchmarks.race.processes import a_process, size, sockets, tell, threads
from benchmarks.race.servers import Place
from benchmarks.reaping import INSERT, OLD
from dblock.core.lock import administration
from dblock.core.protocol import tenures
from dblock.core.protocol.drive import drive
from dblock.core.runtime import current_flow
from sqlalchemy_dblock import db_lock, reap
from sqlalchemy_dblock.store import EngineStore, store_for

Measure = Callable[[Peer, Place], Figures]
KEYS = 100
"""How many keys are tried, leases renewed and rows listed at each size."""
TTL = 600.0


def rows(many: int) -> Measure:
    """Seconds of each operation in a table of so many rows, most of them free."""

    def measure(peer: Peer, place: Place) -> Figures:
        def work(pipe: Any) -> None:
            engine = create_engine(place.url())
            _fill(engine, many, OLD[place.name])
            store, figures = store_for(engine), Figures()
            locks = [db_lock(engine, f"key:{number:08d}", ttl=TTL) for number in random.sample(range(many), KEYS)]
            for _ in range(2):  # the second time counts
                figures["take"] = _median([lock.acquire for lock in locks])
                figures["renew"] = _renewal(store)
                figures["release"] = _median([lock.release for lock in locks])
            starts = [f"key:{random.randrange(many):08d}" for _ in range(5)]
            figures["list"] = _median([partial(_list, store, after) for after in starts])
            begun = time.monotonic()
            assert reap(engine, retention=10 * 365 * 86400) == 0
            figures["reap"] = time.monotonic() - begun
            tell(pipe, figures)

        with a_process(work) as read:
            found: Figures = read()
        return found

    return measure


def held(many: int) -> Measure:
    """What one process needs that holds so many leases."""

    def measure(peer: Peer, place: Place) -> Figures:
        def work(pipe: Any) -> None:
            engine, prefix = create_engine(place.url()), random.randrange(10**9)
            with db_lock(engine, f"{prefix}:first"):
                pass
            before, store = size(), store_for(engine)
            locks = [db_lock(engine, f"{prefix}:{number}", ttl=TTL) for number in range(many)]
            taken = [_seconds(lock.acquire) for lock in locks]
            grown = size() - before
            figures = {"take": statistics.median(taken[-KEYS:]), "renew": _renewal(store), "bytes": grown / many}
            figures |= {"threads": threads(), "sockets": sockets()}
            figures["release"] = statistics.median([_seconds(lock.release) for lock in locks][-KEYS:])
            tell(pipe, figures)

        with a_process(work) as read:
            found: Figures = read()
        return found

    return measure


def _fill(engine: Engine, many: int, old: str) -> None:
    with engine.begin() as connection:
        there = connection.execute(text("SELECT count(*) FROM locks WHERE lock_key LIKE 'key:%'")).scalar_one()
        for first in range(there, many, 10_000):
            keys = [{"key": f"key:{number:08d}"} for number in range(first, min(many, first + 10_000))]
            _ = connection.execute(text(INSERT.format(old=old)), keys)


def _renewal(store: EngineStore) -> float:
    """Of all that this flow holds, in one statement."""
    leases = [(hold.tenure, TTL) for hold in current_flow().holds.values()]

    def renew() -> None:
        _ = drive(tenures.renew(store.database, leases, store.database.now() + 1), store)

    return _median([renew] * 5)


def _list(store: EngineStore, after: str) -> None:
    _ = drive(administration.survey(store, after, KEYS, free=True), store)


def _seconds(action: Callable[[], Any]) -> float:
    begun = time.monotonic()
    action()
    return time.monotonic() - begun


def _median(actions: list[Callable[[], Any]]) -> float:
    return statistics.median(_seconds(action) for action in actions)
