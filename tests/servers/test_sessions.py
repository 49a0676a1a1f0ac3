"""The lock's sessions on the server: how many there are, what they are called, and how soon a dead one is noticed."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import pytest
from django.db import connections
from sqlalchemy import Engine, create_engine, event
from sqlalchemy.ext.asyncio import create_async_engine

from dblock.core.errors import LockStoreError
from dblock.drivers import sessions
from sqlalchemy_dblock import db_lock, db_rwlock, db_semaphore
from tests.conftest import INNODB, MYSQL_DRIVER, SERVERS, own_engine, run, timed, url
from tests.faults.conftest import ALL_WIRES, SEVERAL_WIRES, Wire, actors, name_of, wire
from tests.support.lab import SOME, cycle, threads, until
from tests.support.pages import block
from tests.support.subjects import MATRIX, Actor, Subject

__all__ = ["actors", "wire"]

SESSIONS = {
    "postgresql": "SELECT pid FROM pg_stat_activity WHERE application_name LIKE 'dblock: %'",
    **dict.fromkeys(INNODB, "SELECT id FROM information_schema.processlist WHERE db = database()"),
}
CROWD = 12
SERVED = [subject for subject in MATRIX if subject.database != "sqlite"]


async def hold_for_a_moment(subject: Subject, lock: Any) -> None:
    """Take it, and give it back 20 ms later."""
    async with subject.within(lock):
        await subject.pause(0.02)


@pytest.mark.direct
@pytest.mark.parametrize("subject", [each for each in SOME if each.database != "sqlite"], ids=str, indirect=True)
def test_a_process_that_turns_quiet_keeps_one_session(
    subject: Subject, actors: Callable[..., Actor], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A crowd that holds and waits needs several; a while after the last of it one is left, and no thread."""
    timed(monkeypatch, idle_session=0.8, trusted_idle=0.8, attention=0.5, linger=0.5)

    def found() -> set[Any]:
        return {session for (session,) in run(subject.database, SESSIONS[subject.database])}

    crowd = [actors(subject) for _ in range(CROWD)]
    source = subject.lock("k")._place.store()._source
    crowd[0].do(subject.engine.dispose if subject.face == "async" and subject.variant != "django" else source.close_all)
    assert until(lambda: not source._idle)
    others = found()

    def burst() -> int:
        locks = [subject.lock(f"k{n // 2}", timeout=60) for n in range(CROWD)]
        for begun in [
            actor.start(partial(hold_for_a_moment, subject, lock)) for actor, lock in zip(crowd, locks, strict=True)
        ]:
            begun.result(60)
        return len(found() - others)

    assert until(lambda: burst() >= 4, 20)
    assert until(lambda: len(found() - others) == 1, 20)
    assert until(lambda: not threads("dblock "), 10), threads()
    assert len(found() - others) == 1


@pytest.mark.direct
@pytest.mark.parametrize("database", SERVERS, indirect=True)
def test_a_session_that_takes_no_writes_is_left(database: str) -> None:
    """Its server was demoted, say: the statement is sent again over another connection."""
    subject = Subject("sqlalchemy", "sync", database)
    lock = subject.lock("k", timeout=10)
    cycle(lock)
    pool = lock._place.store()._source
    [idle] = pool._idle
    read_only = {"postgresql": "SET default_transaction_read_only = on"}
    idle.raw.cursor().execute(read_only.get(database, "SET SESSION TRANSACTION READ ONLY"))
    with lock:
        assert idle.closed


def name_application(wire: Wire, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the application call its sessions `shop`."""
    subject = wire.subject
    option = {"application_name" if subject.database == "postgresql" else "program_name": "shop"}
    if subject.variant == "django":
        settings = connections.settings[f"{subject.database}_wire"]
        monkeypatch.setitem(settings, "OPTIONS", {**settings["OPTIONS"], **option})
        return
    arguments: Any = {"server_settings": option} if subject.driver == "asyncpg" else option
    vars(subject)["engine"] = subject._made(connect_args=arguments)


async def connect(subject: Subject) -> None:
    """Open a session of the application's own, and close it."""
    if subject.variant == "django":
        connection = connections.create_connection(f"{subject.database}_wire")
        connection.ensure_connection()
        connection.close()
        return
    async with subject.within(subject.engine.connect()):
        pass


@pytest.mark.direct
@pytest.mark.skipif(MYSQL_DRIVER == "mysqldb", reason="mysqlclient takes no program_name")
@pytest.mark.parametrize("wire", SEVERAL_WIRES, indirect=True, ids=name_of)
def test_sessions_say_what_they_are_for(
    wire: Wire, actors: Callable[..., Actor], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before the application's own name; its own sessions have that alone."""
    name_application(wire, monkeypatch)
    subject, heard = wire.subject, wire.proxy.heard
    holder, lock = wire.direct.lock("k", ttl=60), wire.subject.lock("k", timeout=60)
    assert holder.acquire()

    def named(name: str) -> bool:
        """Whether there is such a session; on MySQL and MariaDB whether there was: a client names it first of all."""
        if subject.database == "postgresql":
            return name in {called for called, _ in run("postgresql", block("docs/connections.md", "sessions"))}
        return any(b"program_name" + bytes([len(name)]) + name.encode() in said for said in heard)

    waiting = wire.actor.begin(lock, "acquire")
    assert until(lambda: named("dblock: locks of shop") and named("dblock: listener of shop"), 20)
    before = len(heard)
    actors(subject).do(lambda: connect(subject))
    if subject.database != "postgresql":
        said = b"".join(heard[before:])
        assert b"program_name\x04shop" in said
    holder.release()
    assert waiting.result(20)
    wire.actor.call(lock, "release")


@pytest.mark.parametrize("subject", SERVED, ids=str, indirect=True)
def test_the_kernel_watches_idle_connections(subject: Subject, actors: Callable[..., Actor]) -> None:
    """Keepalives, and an end to what is not acknowledged; times that are shorter than ours stay."""
    lock = subject.lock("k", timeout=20)
    actors(subject).within(lock)
    [connection, *_] = lock._place.store()._source._idle
    wire = connection.wire
    expected = {name: value for name, value in sessions.KEEPALIVE.items() if hasattr(socket, name)}

    def options() -> dict[str, int]:
        assert wire.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
        return {name: wire.getsockopt(socket.IPPROTO_TCP, getattr(socket, name)) for name in expected}

    assert options() == expected
    idle = socket.IPPROTO_TCP, socket.TCP_KEEPIDLE
    wire.setsockopt(*idle, 4)
    sessions._keep_alive(wire)
    assert options() == {**expected, "TCP_KEEPIDLE": 4}
    wire.setsockopt(*idle, expected["TCP_KEEPIDLE"])


@pytest.mark.parametrize("wire", ALL_WIRES, indirect=True, ids=name_of)
def test_a_question_is_one_round_trip(wire: Wire, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before what finds a connection that was idle; and none in hot use."""
    lock, proxy = wire.subject.lock("k", timeout=20), wire.proxy
    timed(monkeypatch, trusted_idle=0.0)
    for _ in range(8):  # prepared
        wire.actor.within(lock)

    def cycles() -> None:
        for _ in range(10):
            wire.actor.within(lock)

    assert proxy.counted(cycles) == 40, proxy.heard
    timed(monkeypatch, trusted_idle=5.0)
    assert proxy.counted(cycles) == 20, proxy.heard


@pytest.mark.direct
@pytest.mark.parametrize("subject", [each for each in SERVED if each.variant == "sqlalchemy"], ids=str, indirect=True)
def test_a_session_is_closed_whose_opening_an_event_handler_has_failed(subject: Subject) -> None:
    """SQLAlchemy drops such a connection without closing it."""
    make = create_engine if subject.face == "sync" else create_async_engine
    engine: Any = make(url(subject.database, subject.driver))
    kept: list[Any] = []

    def fails(connection: Any, _: Any) -> None:
        kept.append(connection)
        raise ValueError("no")

    event.listen(engine if subject.face == "sync" else engine.sync_engine, "connect", fails)
    before = set(run(subject.database, SESSIONS[subject.database]))
    actor = Actor(subject)
    with pytest.raises((ValueError, LockStoreError), match="no"):
        actor.call(db_lock(engine, "k"), "acquire", timeout=0)
    assert kept
    assert until(lambda: set(run(subject.database, SESSIONS[subject.database])) <= before, 5)
    actor.do(engine.dispose)
    actor.close()


@pytest.mark.exact
@pytest.mark.parametrize("database", SERVERS, indirect=True)
@pytest.mark.parametrize(("crowd", "timeout"), [(5, 0), (1, 0.001), (15, 0.001), (15, 0.1)])
def test_the_first_attempts_of_a_process_have_an_answer(database: str, crowd: int, timeout: float) -> None:
    """However short, and though each of a crowd has to connect: True or False, and no error of a healthy database."""

    def attempt(engine: Engine, make: Callable[[Engine], Any], gate: threading.Barrier) -> bool:
        lock = make(engine)
        _ = gate.wait()
        if got := lock.acquire(timeout=timeout):
            lock.release()
        return bool(got)

    makes: list[Callable[[Engine], Any]] = [
        lambda engine: db_lock(engine, "k"),
        lambda engine: db_rwlock(engine, "reads").read(),
        lambda engine: db_semaphore(engine, "permits", 3),
    ]
    for make in makes:
        engine, gate = own_engine(database), threading.Barrier(crowd)
        with ThreadPoolExecutor(crowd) as pool:
            found = list(pool.map(attempt, [engine] * crowd, [make] * crowd, [gate] * crowd))
        assert crowd > 1 or found == [True]
