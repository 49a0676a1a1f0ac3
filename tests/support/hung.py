"""A holder that hangs in a guarded transaction, after its lease has ended."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator

from sqlalchemy import Connection, create_engine, text
from sqlalchemy.pool import NullPool

from dblock.core.errors import LockError
from sqlalchemy_dblock import db_lock
from tests.conftest import INNODB, run, url

MINE = {"postgresql": "SELECT pg_backend_pid()", **dict.fromkeys(INNODB, "SELECT CONNECTION_ID()")}
"""What a session's number is."""
SHOWN = 0.12
"""Seconds after which InnoDB's views of locks and transactions show what is: they are renewed every 100 ms."""


@contextlib.contextmanager
def hung(database: str, *keys: str) -> Iterator[tuple[Connection, str]]:
    """Its connection, and the number of its session; the transaction ends with the block."""
    engine = create_engine(url(database), poolclass=NullPool)
    locks = [db_lock(engine, key, renew=False, label="hangs") for key in keys]
    for lock in locks:
        lock.acquire()
    with engine.connect() as connection:
        session = str(connection.execute(text(MINE[database])).scalar_one())
        connection.rollback()
        for lock in locks:
            lock.guard(connection)
        run(database, "UPDATE locks SET expires_at = acquired_at")
        time.sleep(SHOWN)
        yield connection, session
        connection.invalidate()
    for lock in locks:
        with contextlib.suppress(LockError):
            lock.release()
    engine.dispose()
