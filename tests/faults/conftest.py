"""Subjects, and subjects behind a proxy."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
from sqlalchemy import Engine, create_engine, make_url, text

from dblock.connections import DjangoPool
from dblock.core.holding.flow import Hold
from dblock.store import store_for
from tests.conftest import INNODB, POOLER, collect, ready, url
from tests.support.lab import FEW, LONG, Wired, close_django, ended, hold_of, ledger, nobody_withdraws, threads, until
from tests.support.proxy import Proxy
from tests.support.subjects import Actor, Subject

NOISY = [
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]
"""For tests of which drivers complain: their connections were cut, or they were interrupted while they connected."""
ALL_WIRES = [
    ("django", "sync", "postgresql", ""),
    ("django", "sync", "mariadb", ""),
    ("sqlalchemy", "sync", "postgresql", ""),
    ("sqlalchemy", "sync", "mariadb", ""),
    ("sqlalchemy", "async", "postgresql", "asyncpg"),
    ("sqlalchemy", "async", "postgresql", "psycopg"),
    ("sqlalchemy", "async", "mariadb", "aiomysql"),
    *(
        wire
        for wire in (
            ("django", "sync", "mysql", ""),
            ("sqlalchemy", "sync", "mysql", ""),
            ("sqlalchemy", "async", "mysql", "asyncmy"),
        )
        if "mysql" in INNODB
    ),
]
WIRES = ALL_WIRES if LONG else [ALL_WIRES[0], ALL_WIRES[4], *ALL_WIRES[8:9]]
SEVERAL_WIRES = ALL_WIRES if LONG else [ALL_WIRES[0], ALL_WIRES[3], ALL_WIRES[4], ALL_WIRES[-1]]
"""Each database, variant and face at least once, and four drivers."""
EACH_WIRE = ALL_WIRES if LONG else [ALL_WIRES[0], ALL_WIRES[3], ALL_WIRES[4], *ALL_WIRES[9:]]
"""Those of the last that make each database, variant and face: for tests that wait for seconds."""
LISTENERS = {
    "postgresql": "SELECT pid FROM pg_stat_activity WHERE application_name LIKE 'dblock: listener%'",
    **dict.fromkeys(
        INNODB, "SELECT id FROM information_schema.processlist WHERE info LIKE 'SELECT lock_waiters.ticket%'"
    ),
}
"""The sessions that listen."""
if POOLER:  # where asyncpg learns a statement's types in round trips of their own
    WIRES = [ALL_WIRES[0], ALL_WIRES[2], ALL_WIRES[5]]


def long_run(seconds: int, missing: str = "") -> Callable[[Any], Any]:
    """Marks a test as a part of `make faults` that takes at most so many seconds, and may be without what it needs."""

    def marked(test: Any) -> Any:
        test = pytest.mark.skipif(bool(missing), reason=missing)(test)
        test = pytest.mark.skipif(not LONG, reason="part of `make faults`")(test)
        return pytest.mark.timeout(seconds)(test)

    return marked


def name_of(wire: tuple[str, ...]) -> str:
    """How a wire is shown."""
    return "-".join(filter(None, wire))


@pytest.fixture(params=FEW, ids=str)
def subject(request: pytest.FixtureRequest) -> Iterator[Subject]:
    """Each synchronous variant, and each database, with empty tables."""
    subject: Subject = request.param
    ready(request, subject.database)
    ledger(subject.database)
    yield subject
    if subject.variant == "django":
        close_django(subject.database)


@contextlib.contextmanager
def proxied(
    database: str, driver: str = "", make: Callable[..., Any] = create_engine, **options: Any
) -> Iterator[tuple[Proxy, Any]]:
    """A proxy before a server, and an engine whose connections go through it."""
    where = make_url(url(database, driver))
    assert where.port is not None
    with Proxy(0, where.port) as proxy:
        engine = make(where.set(port=proxy.port), **options)
        yield proxy, engine
        if make is create_engine:
            engine.dispose()


READ_ONLY = {
    "postgresql": ("ALTER SYSTEM SET default_transaction_read_only = {}", "SELECT pg_reload_conf()"),
    "mariadb": ("SET GLOBAL read_only = {}",),
    "mysql": ("SET GLOBAL super_read_only = {}", "SET GLOBAL read_only = {}"),
}


def make_read_only(engine: Engine, on: bool) -> None:
    """Let a server take no writes, or take them again; only who may do anything can still write to MariaDB."""
    with engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
        for sql in READ_ONLY["mariadb" if getattr(engine.dialect, "is_mariadb", False) else engine.dialect.name]:
            connection.execute(text(sql.format("ON" if on else "OFF")))


@dataclass
class Wire:
    """A subject whose statements go through a proxy, and the same without it."""

    subject: Wired
    direct: Subject
    proxy: Proxy
    actor: Actor
    """A flow that uses the subject."""

    def acquired(self, **options: Any) -> tuple[Any, Hold]:
        """A lock that the actor has acquired, and its hold."""
        lock = self.subject.lock("k", **options)
        assert self.actor.call(lock, "acquire")
        return lock, self.actor.do(lambda: hold_of(lock))


@pytest.fixture(params=WIRES, ids=name_of)
def wire(request: pytest.FixtureRequest) -> Iterator[Wire]:
    """Some kinds of driver on the servers, through a proxy."""
    variant, face, database, driver = request.param
    ready(request, database)
    port = int(os.environ[f"DBLOCK_TEST_{database.upper()}_WIRE"])
    with Proxy(port, int(os.environ[f"DBLOCK_TEST_{database.upper()}_PORT"])) as proxy:
        subject = Wired(variant, face, database, driver, port)
        direct = Subject("sqlalchemy", "sync", database)
        actor = Actor(subject)
        yield Wire(subject, direct, proxy, actor)
        actor.close()
        proxy.black_hole, proxy.refusing, proxy.delay = False, False, 0.0
        proxy.cut()
        assert until(nobody_withdraws, 10)  # a statement after its end would open an engine's pool again
        if variant == "django":
            close_django(database, "_wire")
            # The next test's first take would be sent on one of these, which are dead, and withdrawn in the background.
            pool = store_for(f"{database}_wire")._source
            assert isinstance(pool, DjangoPool)
            pool.close_all()
        elif face == "sync":
            subject.engine.dispose()
        else:
            Actor(subject).do(subject.engine.dispose)
            collect()  # what aiomysql says about connections that were cut, it says now
        direct.engine.dispose()


@pytest.fixture(autouse=True)
def _collected() -> Iterator[None]:
    """What was broken off is collected at its end, where its warnings may be expected, and not in some other test."""
    yield
    # What arrives for somebody who was interrupted is dropped by the thread that opens it.
    _ = until(lambda: not threads("dblock connect"), 5)
    collect()


@pytest.fixture
def actors() -> Iterator[Callable[[Subject], Actor]]:
    """Makes flows of control that end with the test."""
    with ended(Actor) as make:
        yield make
