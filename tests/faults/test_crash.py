"""The database dies right after its reply, and comes back."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from typing import Any

import pytest
from sqlalchemy import create_engine, text

from dblock.core import runtime
from dblock.core.acquire.local_queue import Request
from dblock.core.protocol import queue
from dblock.core.protocol.drive import drive
from dblock.core.runtime import current_flow
from sqlalchemy_dblock import LockLost, db_lock, metadata
from tests.support.servers import MariaDB, MySQL, PostgreSQL, Server, running

SERVERS: dict[str, tuple[Callable[[], Server], str]] = {
    "postgresql": (PostgreSQL, "postgresql+psycopg://dblock@127.0.0.1:{}/postgres"),
    # Without asynchronous commits the worst that a session may be told is what the server's default is.
    "postgresql-off": (
        lambda: PostgreSQL(options=("synchronous_commit=off", "wal_writer_delay=10s")),
        "postgresql+psycopg://dblock@127.0.0.1:{}/postgres",
    ),
    "mariadb": (MariaDB, "mysql+pymysql://root@127.0.0.1:{}/mysql?ssl_disabled=true"),
} | ({"mysql": (MySQL, "mysql+pymysql://root@127.0.0.1:{}/mysql?ssl_disabled=true")} if MySQL.installed() else {})


@pytest.mark.parametrize("name", SERVERS)
def test_what_was_granted_survives(name: str) -> None:
    """Killed after each kind of statement: takes, extensions and re-entries are there; fences never come back."""
    make, url = SERVERS[name]
    with running(make) as server:
        engine = create_engine(url.format(server.port))
        metadata.create_all(engine)

        def crash() -> tuple[Any, ...]:
            server.stop(signal.SIGKILL)
            server.start()
            with engine.connect() as connection:
                [row] = connection.execute(text("SELECT owner, fence, count, ttl FROM locks WHERE lock_key = 'k'"))
                return tuple(row)

        def dispose() -> None:
            engine.dispose()

        lock, fences = db_lock(engine, "k", ttl=600), []
        steps: list[tuple[Callable[[], object], int, float]] = [
            (lock.acquire, 1, 600.0),
            (lambda: lock.extend(900), 1, 900.0),
            (lock.acquire, 2, 900.0),
        ]
        for step, count, ttl in steps:
            step()
            dispose()
            assert crash() == (lock.owner, lock.fence, count, ttl)
            assert lock.verify()
        fences.append(lock.fence)
        lock.release()
        lock.release()
        dispose()
        crash()  # the release may be lost: the key is then held until its lease ends, late but not wrong
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
        engine.dispose()


@pytest.mark.parametrize("name", SERVERS)
def test_what_an_heir_relies_on_survives(name: str) -> None:
    """Killed after a heartbeat, and after a grant: neither is taken back, since the heir counts on both at once."""
    make, url = SERVERS[name]
    with running(make) as server:
        engine = create_engine(url.format(server.port))
        metadata.create_all(engine)
        lock = db_lock(engine, "k", ttl=600)
        lock.acquire()
        store = lock._store()
        now = store.database.now

        def crash(statement: str) -> Any:
            engine.dispose()
            server.stop(signal.SIGKILL)
            server.start()
            with engine.connect() as connection:
                [row] = connection.execute(text(statement))
                return row

        request = Request("k", 60.0, 60.0, "", 1, "flow", "h", 1, "t", "p", "")
        joined = drive(queue.join(store.database, request.parameters("heir"), now() + 5), store)
        assert joined is not None
        place, ends = joined[0], "SELECT expires_at FROM lock_waiters"
        with engine.connect() as connection:
            [(end,)] = connection.execute(text(ends))
        sent = place.sent
        time.sleep(0.3)
        drive(queue.heartbeat(store.database, [place], now() + 5), store)
        assert place.sent >= sent + 0.3
        [kept] = crash(ends)
        assert (kept - end).total_seconds() >= 0.29, "the place ends when its waiter believes"
        hold = lock._hold()
        assert hold is not None
        granted = drive(queue.grant(store.database, "k", 1, hold.tenure), store)
        assert granted is not None
        owner, fence, expires_at = crash("SELECT owner, fence, expires_at FROM locks")
        assert (owner, fence, expires_at) == ("heir", granted.message.fence, kept)
        grant = place.granted(granted.message, 60.0, store.database.timing.waiter_ttl)
        assert grant is not None
        assert (grant.tenure.owner, grant.tenure.fence) == (owner, fence)
        runtime.current.watchdog.discard(hold)
        current_flow().holds.clear()
        engine.dispose()
