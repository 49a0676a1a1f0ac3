"""The database dies right after its reply, and comes back."""

from __future__ import annotations

import signal
from collections.abc import Callable
from typing import Any

import pytest
from sqlalchemy import create_engine, text

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
