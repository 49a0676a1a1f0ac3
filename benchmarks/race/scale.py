"""What grows with rows, held leases, waiters, and connections through a pooler: this project alone."""

from __future__ import annotations

import asyncio
import random
import statistics
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any
from unittest import mock

from sqlalchemy import Engine, create_engine, text
from sqlalchemy.ext.asyncio import create_async_engine

from benchmarks.race.figures import Figures, percentile
from benchmarks.race.peers import Peer
from benchmarks.race.processes import a_process, connections, size, tell, threads
from benchmarks.race.servers import Counters, Place, Pooler
from benchmarks.reaping import OLD
from dblock.core.protocol import reaping, tenures
from dblock.core.protocol.drive import drive
from dblock.core.runtime import current_flow
from dblock.operating import administration
from sqlalchemy_dblock import db_lock
from sqlalchemy_dblock.store import EngineStore, store_for
from tests.support.servers import PostgreSQL, running

Measure = Callable[[Peer, Place], Figures]
KEYS = 100
"""How many keys are tried, leases renewed and rows listed at each size."""
TTL = 600.0
YEARS = 10 * 365 * 86400.0


def rows(many: int) -> Measure:
    """Seconds of each operation in a table of so many rows, most of them free."""

    def measure(peer: Peer, place: Place) -> Figures:
        def work(pipe: Any) -> None:
            engine = create_engine(place.url())
            _fill(engine, many, place.name)
            store, figures = store_for(engine), Figures()
            locks = [db_lock(engine, f"key:{number:08d}", ttl=TTL) for number in random.sample(range(many), KEYS)]
            for _ in range(2):  # the second time counts
                figures["take"] = _median([lock.acquire for lock in locks])
                figures["renew"] = _renewal(store)
                figures["ls"] = _seconds(partial(_held, store))
                figures["release"] = _median([lock.release for lock in locks])
            starts = [f"key:{random.randrange(many):08d}" for _ in range(5)]
            figures["list"] = _median([partial(_page, store, after) for after in starts])
            figures["reap"] = _reap(store)
            if look := _admin(place):
                figures["admin"] = _median([look] * 3)
            tell(pipe, figures)

        with a_process(work) as read:
            found: Figures = read()
        return found

    return measure


def held(many: int) -> Measure:
    """What one process needs that holds so many leases, and what a renewal of all costs the server."""

    def measure(peer: Peer, place: Place) -> Figures:
        def work(pipe: Any) -> None:
            engine, prefix, at_first = create_engine(place.url()), random.randrange(10**9), connections()
            with db_lock(engine, f"{prefix}:first"):
                pass
            before, store = size(), store_for(engine)
            locks = [db_lock(engine, f"{prefix}:{number}", ttl=TTL) for number in range(many)]
            taken = [_seconds(lock.acquire) for lock in locks]
            figures = {"take": statistics.median(taken[-KEYS:]), "bytes": (size() - before) / many}
            figures |= {"threads": threads(), "connections": connections() - at_first}
            with Counters(place) as counters:
                counters.begin()
                computed = place.computed()
                figures["renew"] = _renewal(store)
                computed = place.computed() - computed
                counters.end()
                if "log" in counters.counted():
                    figures["renew_log"] = counters.counted()["log"] / (RENEWALS * many)
            if computed >= 0.05:  # else it is within what the kernel's clock ticks differ by
                figures["renew_cpu"] = computed / (RENEWALS * many / 1000)
            figures["release"] = statistics.median([_seconds(lock.release) for lock in locks][-KEYS:])
            tell(pipe, figures)

        with a_process(work) as read:
            found: Figures = read()
        return found

    return measure


def waiting(many: int, *, in_tasks: bool) -> Measure:
    """What one process needs in which so many tasks, or threads, wait for one key; and how long all take to get it."""

    def measure(peer: Peer, place: Place) -> Figures:
        key = f"{random.randrange(10**9)}:wanted"

        def hold(pipe: Any) -> None:
            with db_lock(create_engine(place.url()), key, ttl=TTL):
                tell(pipe, "held")
                tell(pipe, "to be released when this is read")
            tell(pipe, "released")

        def work(pipe: Any) -> None:
            (_wait_in_tasks if in_tasks else _wait_in_threads)(pipe, place, key, many)

        with a_process(hold) as holder, a_process(work) as read:
            holder()
            _ = read()  # it waits
            before, begun = place.computed(), time.monotonic()
            figures: Figures = read()
            figures["server_cpu"] = (place.computed() - before) / (time.monotonic() - begun)
            _ = holder(), holder()  # it releases
            figures["rate"] = many / read()
        return figures

    return measure


WATCHED = 5.0
"""Seconds for which waiters are watched: the life of a place in the queue, so that its heartbeats are in it."""


class _Needs:
    """What this process needs more than when this was made."""

    def __init__(self, many: int) -> None:
        self.many, self.size, self.connections = many, size(), connections()

    def figures(self) -> Figures:
        """Now."""
        grown = (size() - self.size) / self.many
        return {"bytes": grown, "threads": threads(), "connections": connections() - self.connections}


def _wait_in_tasks(pipe: Any, place: Place, key: str, many: int) -> None:
    async def main() -> None:
        engine = create_async_engine(place.url().replace("+psycopg", "+asyncpg"))
        needs = _Needs(many)

        async def one() -> None:
            async with db_lock(engine, key, ttl=TTL, timeout=None):
                pass

        tasks = [asyncio.create_task(one()) for _ in range(many)]
        await asyncio.sleep(1 + many / 2000)
        await asyncio.to_thread(tell, pipe, "waiting")
        computed = time.process_time()
        await asyncio.sleep(WATCHED)
        figures = needs.figures() | {"client_cpu": (time.process_time() - computed) / WATCHED}
        begun = time.monotonic()
        await asyncio.to_thread(tell, pipe, figures)
        _ = await asyncio.gather(*tasks)
        await asyncio.to_thread(tell, pipe, time.monotonic() - begun)

    asyncio.run(main())


def _wait_in_threads(pipe: Any, place: Place, key: str, many: int) -> None:
    engine = create_engine(place.url())
    needs = _Needs(many)

    def one() -> None:
        with db_lock(engine, key, ttl=TTL, timeout=None):
            pass

    crowd = [threading.Thread(target=one) for _ in range(many)]
    for each in crowd:
        each.start()
    time.sleep(1 + many / 500)
    tell(pipe, "waiting")
    computed = time.process_time()
    time.sleep(WATCHED)
    figures = needs.figures() | {"client_cpu": (time.process_time() - computed) / WATCHED}
    begun = time.monotonic()
    tell(pipe, figures)
    for each in crowd:
        each.join()
    tell(pipe, time.monotonic() - begun)


POOLED = 32
"""Sessions of the server that a pooler lends to all of its clients."""
OFFERED = 300.0
"""Locks a second that all clients of a pooler together want."""
IN_A_PROCESS = 250
STARTING = 100.0
"""Clients that start in a second: each opens a connection, and SQLAlchemy examines the server."""


def pooled(clients: int, seconds: float) -> Measure:
    """So many clients, each with a connection of its own to PgBouncer, that want a few hundred locks a second."""

    def measure(peer: Peer, place: Place) -> Figures:
        assert isinstance(place.server, PostgreSQL)
        server = place.server
        prefix = random.randrange(10**9)
        groups = [range(clients)[n : n + IN_A_PROCESS] for n in range(0, clients, IN_A_PROCESS)]
        with ExitStack() as opened:
            pooler = opened.enter_context(running(lambda: Pooler(server, POOLED)))
            parts = [
                opened.enter_context(
                    a_process(partial(_clients, place.url(pooler.port), prefix, numbers, clients / OFFERED, seconds))
                )
                for numbers in groups
            ]
            connected = sum(part() for part in parts)
            sessions = 0
            engine = create_engine(place.url())
            with engine.connect() as connection:
                counting = "SELECT count(*) FROM pg_stat_activity WHERE backend_type = 'client backend'"
                sessions = connection.execute(text(counting)).scalar_one() - 1
            engine.dispose()
            before = place.computed()
            found: list[tuple[list[float], int]] = [part() for part in parts]
            computed = place.computed() - before
        waits = [wait for each, _ in found for wait in each]
        return {
            "rate": len(waits) / seconds,
            "mean": statistics.fmean(waits),
            **{f"p{percent}": percentile(waits, percent) for percent in (50, 99)},
            "errors": sum(errors for _, errors in found),
            "connections": connected,
            "sessions": sessions,
            "server_cpu": computed / (len(waits) / 1000),
        }

    return measure


def _clients(url: str, prefix: int, numbers: Sequence[int], every: float, seconds: float, pipe: Any) -> None:
    """Threads with an engine each, as processes would be; each takes and gives back its own key now and then."""
    at_first, waits, errors = connections(), list[float](), list[BaseException]()
    ready, go = threading.Barrier(len(numbers) + 1), threading.Event()

    def one(number: int) -> None:
        lock = db_lock(create_engine(url), f"{prefix}:{number}", ttl=30.0, timeout=30.0)
        time.sleep(number / STARTING)
        while not lock.acquire():  # that is not counted
            pass
        lock.release()
        _ = ready.wait()
        _ = go.wait()
        end, due = time.monotonic() + seconds, time.monotonic() + random.uniform(0, every)
        while due < end:
            time.sleep(max(0.0, due - time.monotonic()))
            begun = time.monotonic()
            try:
                lock.acquire()
                waits.append(time.monotonic() - begun)
                lock.release()
            except Exception as error:  # noqa: BLE001 - counted
                errors.append(error)
            due += every

    crowd = [threading.Thread(target=one, args=(number,), daemon=True) for number in numbers]
    for each in crowd:
        each.start()
    _ = ready.wait(numbers[-1] / STARTING + 120)
    tell(pipe, connections() - at_first)
    go.set()
    for each in crowd:
        each.join()
    tell(pipe, (waits, len(errors)))


_COUNTING = "WITH RECURSIVE numbers(n) AS (SELECT {first} UNION ALL SELECT n + 1 FROM numbers WHERE n < {last})"
_NUMBERS = {
    "PostgreSQL": ("'key:' || lpad(CAST(n AS text), 8, '0')", "generate_series({first}, {last}) AS n"),
    "MariaDB": ("CONCAT('key:', LPAD(seq, 8, '0'))", "seq_{first}_to_{last}"),
    "SQLite": ("printf('key:%08d', n)", f"({_COUNTING} SELECT n FROM numbers)"),
}
"""A key, and where its number comes from."""


def _fill(engine: Engine, many: int, name: str) -> None:
    """Insert the rows that are missing, by one statement."""
    key, numbers = _NUMBERS[name]
    with engine.begin() as connection:
        there = connection.execute(text("SELECT count(*) FROM locks WHERE lock_key LIKE 'key:%'")).scalar_one()
        if there < many:
            source = numbers.format(first=there, last=many - 1)
            insert = (
                "INSERT INTO locks (lock_key, fence, count, ttl, acquired_at, expires_at, label, host, pid, thread,"
                f" program, celery_task_id) SELECT {key}, 1, 0, 30, {OLD[name]}, {OLD[name]}, '', 'h', 1, '', '', ''"
                f" FROM {source}"
            )
            _ = connection.exec_driver_sql(insert.replace("%", "%%") if name == "MariaDB" else insert)
            _ = connection.exec_driver_sql({"MariaDB": "ANALYZE TABLE locks"}.get(name, "ANALYZE locks"))


RENEWALS = 5


def _renewal(store: EngineStore) -> float:
    """Of all that this flow holds, in one statement."""
    leases = [(hold.tenure, TTL) for hold in current_flow().holds.values()]

    def renew() -> None:
        _ = drive(tenures.renew(store.database, leases, store.database.now() + 1))

    return _median([renew] * RENEWALS)


def _page(store: EngineStore, after: str) -> None:
    """As `dblock ls --all` lists a page."""
    _ = drive(administration.survey(store, after, KEYS, free=True))


def _held(store: EngineStore) -> None:
    """As `dblock ls` lists what is held."""
    assert len(drive(administration.survey(store))) >= KEYS


def _reap(store: EngineStore) -> float:
    """Of a pass that deletes nothing: its statements, and the pauses after them, which are not waited for."""
    rests = list[float]()
    with mock.patch.object(store, "rest", rests.append):
        begun = time.monotonic()
        assert drive(reaping.reap(store.database, YEARS)) == (0, 0)
        return time.monotonic() - begun + sum(rests)


def _admin(place: Place) -> Callable[[], object] | None:
    """A look at the admin's first page, where the race has set up Django."""
    from django.conf import settings

    from benchmarks.race.peers import find_by_django

    if not settings.configured or place.name != "PostgreSQL":
        return None
    find_by_django(place.url())
    from django.contrib import admin
    from django.contrib.auth.models import User
    from django.test import RequestFactory

    from dblock.models import Lock

    request: Any = RequestFactory().get("/admin/dblock/lock/")
    request.user = User(is_staff=True, is_active=True, is_superuser=True)
    view = admin.site._registry[Lock]
    return lambda: view.changelist_view(request).render()  # type: ignore[attr-defined]


def _seconds(action: Callable[[], Any]) -> float:
    begun = time.monotonic()
    action()
    return time.monotonic() - begun


def _median(actions: list[Callable[[], Any]]) -> float:
    return statistics.median(_seconds(action) for action in actions)
