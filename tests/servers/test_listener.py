"""Calls across processes: what a waiter of PostgreSQL hears, and what happens when it hears nothing."""

from __future__ import annotations

import hashlib
import socket
import time

import psycopg
import pytest
from django.db import connections
from django.test import override_settings
from sqlalchemy import create_engine

from dblock.core import runtime
from dblock.drivers.listening import PsycopgSubscription
from dblock.store import store_for
from sqlalchemy_dblock import db_lock
from tests.conftest import SELDOM, ready, run, timed, url
from tests.contract.test_queue import waiters
from tests.support.lab import Remote, times, until
from tests.support.subjects import MATRIX, Actor, Subject

ROUNDS = times(5, 20)
CALLED = [subject for subject in MATRIX if subject.database == "postgresql"]


@pytest.fixture(params=CALLED, ids=str)
def subject(request: pytest.FixtureRequest) -> Subject:
    """Everything that PostgreSQL can call."""
    subject: Subject = request.param
    ready(request, subject.database)
    return subject


@pytest.fixture
def deaf(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who will be called does not look for an hour."""
    timed(monkeypatch, poll_notified=3600.0, unresponsive_after=9000.0)


ELSEWHERE = (
    "(setattr(runtime.current.sockets(), 'neighbourhood', 'dblock_elsewhere_'),"
    " object.__setattr__(subject.protocol.dialect.queue, 'call', None))"  # the grant itself is to call
)
FULL = "setattr(runtime.current.sockets(), 'notify', lambda *_: False)"


@pytest.mark.usefixtures("deaf")
@pytest.mark.parametrize("before", [ELSEWHERE, FULL], ids=["elsewhere", "full"])
def test_the_database_calls(subject: Subject, before: str) -> None:
    """A waiter hears of a release on another machine long before it would have looked again, and of a neighbour's that
    finds its socket full."""
    hand_overs(subject, before)


@pytest.mark.usefixtures("deaf")
@pytest.mark.parametrize("subject", MATRIX, ids=str)
def test_a_neighbour_notifies(
    request: pytest.FixtureRequest, subject: Subject, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A release in another process of this machine wakes the waiter, on every database; PostgreSQL calls nobody."""
    ready(request, subject.database)
    timed(monkeypatch, **SELDOM)
    hand_overs(subject)


def test_a_stranger_is_not_believed(request: pytest.FixtureRequest) -> None:
    """Whatever a process of this machine says to a waiter of whom it does not know the owner token."""
    ready(request, "sqlite")
    subject = Subject("sqlalchemy", "sync", "sqlite")
    actor, other = Actor(subject), Actor(subject)
    holder = subject.lock("k")
    actor.call(holder, "acquire")
    timeout = 30
    lock = subject.lock("k", timeout=timeout)
    waiting = other.start(lock.acquire)
    assert until(lambda: waiters(subject) == 1)
    [(ticket, fence)] = subject.run("SELECT ticket, fence FROM lock_waiters JOIN locks USING (lock_key)")
    [(channel,)] = subject.run("SELECT channel FROM lock_waiters")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as stranger:
        for proof in ("", "-", "0" * 64, "\u00e9", hashlib.sha256(f"{ticket} {fence} ".encode()).hexdigest()):
            for said in (fence, fence + 1, 0):
                _ = stranger.sendto(f"{ticket} {said} {proof} k".encode(), "\0" + channel)
                time.sleep(0.01)
        _ = stranger.sendto(b"\xff 1 2 k", "\0" + channel)
    assert not waiting.done()
    assert actor.get(holder, "state") == "held"
    actor.call(holder, "release")
    assert waiting.result(5) is True
    other.call(lock, "release")
    for each in (actor, other):
        each.close()
    subject.engine.dispose()


@pytest.mark.direct
@pytest.mark.parametrize("before", ["None", ELSEWHERE])
def test_a_neighbour_is_not_notified(request: pytest.FixtureRequest, before: str) -> None:
    """A notification wakes every session that listens to anything: it is for those who are somewhere else."""
    ready(request, "postgresql")
    with psycopg.connect(url("postgresql").replace("+psycopg", ""), autocommit=True) as connection:
        connection.execute(f"LISTEN {runtime.current.sockets().channel}")
        subject = Subject("sqlalchemy", "sync", "postgresql")
        hand_overs(subject, before)
        subject.engine.dispose()
        heard = [message.payload.split(" ", 3)[3] for message in connection.notifies(timeout=0.1)]
    assert heard == (["k"] * ROUNDS if before == ELSEWHERE else [])


@pytest.mark.direct
def test_a_listener_takes_no_place_in_a_pool(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Django's pool may be as small as the number of threads."""
    ready(request, "postgresql")
    connections["postgresql"].close()  # which came from no pool
    options = {**connections.settings["postgresql"]["OPTIONS"], "pool": {"min_size": 1, "max_size": 1}}
    monkeypatch.setitem(connections.settings["postgresql"], "OPTIONS", options)
    monkeypatch.setitem(connections.settings["postgresql"], "CONN_MAX_AGE", 0)
    subscription = store_for("postgresql").subscribe(runtime.current.sockets().channel)
    assert isinstance(subscription, PsycopgSubscription)
    assert not hasattr(subscription._connection, "_pool")
    subscription.close()


def test_whether_to_listen_is_yes_or_no() -> None:
    """A word from an environment variable would always be true."""
    engine = create_engine("sqlite://", execution_options={"dblock_listen": "no"})
    with pytest.raises(TypeError, match="dblock_listen"):
        db_lock(engine, "k").locked()
    engine.dispose()


def test_nonsense_does_no_harm(request: pytest.FixtureRequest, caplog: pytest.LogCaptureFixture) -> None:
    """Anybody may send anything to the waiter's socket."""
    ready(request, "postgresql")
    subject = Subject("sqlalchemy", "sync", "postgresql")
    holder, actor = subject.lock("k"), Actor(subject)
    holder.acquire()
    waited = actor.start(subject.lock("k", timeout=60).acquire)
    assert until(lambda: waiters(subject) == 1)
    [(channel,)] = subject.run("SELECT channel FROM lock_waiters")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as stranger:
        for nonsense in (b"", b"\xff", b"x k", b"-1 k", b"1", "² k".encode(), b"1 " + b"k" * 9000):
            stranger.sendto(nonsense, "\0" + channel)
    time.sleep(0.1)
    assert not waited.done()
    holder.release()
    assert waited.result(5) is True
    assert "cannot listen" not in caplog.text
    actor.close()
    subject.engine.dispose()


def hand_overs(subject: Subject, before: str = "None") -> None:
    """Wait for what another process holds, again and again."""
    actor = Actor(subject)
    other = Subject("sqlalchemy", "sync", subject.database)
    with Remote(other) as remote:
        remote.do(before)
        for _ in range(ROUNDS):
            remote.do("(lock := subject.lock('k', ttl=600)).acquire()")
            lock = subject.lock("k", timeout=60)
            waited = actor.start(getattr(lock, subject.method("acquire")))
            assert until(lambda: waiters(subject) == 1)
            [(channel,)] = subject.run(
                "SELECT channel FROM lock_waiters JOIN locks USING (lock_key) WHERE ticket > served_ticket"
            )
            assert channel.rpartition(".")[0] == runtime.current.sockets().channel
            time.sleep(0.05)
            assert not waited.done()
            remote.do("lock.release()")
            assert waited.result(5) is True
            actor.call(lock, "release")
    actor.close()


@pytest.mark.parametrize("variant", ["django", "sqlalchemy"])
def test_whoever_is_told_not_to_listen_looks(
    request: pytest.FixtureRequest, variant: str, caplog: pytest.LogCaptureFixture
) -> None:
    """`LISTEN: False`, or the engine's option: no connection listens, the key is handed over, one warning in all."""
    ready(request, "postgresql")
    subject = Subject(variant, "sync", "postgresql")
    subject.__dict__["engine"] = create_engine(url("postgresql"), execution_options={"dblock_listen": False})
    store = subject.lock("k")._store()
    vars(store).pop("_waiter_services", None)
    actor = Actor(subject)
    ears = "SELECT 1 FROM pg_stat_activity WHERE query LIKE 'LISTEN%'"
    assert until(lambda: run("postgresql", ears) == [])  # those of earlier tests are gone
    with override_settings(DBLOCK={"LISTEN": False}), Remote(Subject("sqlalchemy", "sync", "postgresql")) as remote:
        for n in range(3):
            remote.do("(lock := subject.lock('k', ttl=600)).acquire()")
            lock = subject.lock("k", timeout=60)
            waited = actor.start(lock.acquire)
            assert until(lambda: waiters(subject) == 1)
            if n == 0:  # the other process may listen later
                assert run("postgresql", ears) == []
            remote.do("lock.release()")
            assert waited.result(10) is True
            actor.call(lock, "release")
    actor.close()
    vars(store).pop("_waiter_services", None)
    subject.engine.dispose()
    assert len([message for message in caplog.messages if "cannot call" in message]) == 1
