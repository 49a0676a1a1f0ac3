"""Notifications across processes: what a waiter hears, and what happens when it hears nothing."""

from __future__ import annotations

import secrets
import socket
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import psycopg
import pytest
from django.db import connections
from django.test import override_settings
from sqlalchemy import URL

from dblock.core import runtime
from dblock.core.protocol import queue
from dblock.core.protocol.drive import drive
from dblock.core.protocol.steps import Execute
from dblock.core.wakeup.registry import MOST, Message, Wakeup, Wakeups
from dblock.drivers.kill_query import KillQueryListener
from dblock.drivers.listening import PsycopgSubscription
from dblock.store import store_for
from sqlalchemy_dblock import db_lock
from tests.conftest import INNODB, SELDOM, SERVERS, observer, own_engine, run, timed, url
from tests.contract.test_queue import stranger, waiters
from tests.faults.conftest import LISTENERS
from tests.faults.test_crash import joined
from tests.support.lab import LONG, SOME, Remote, hold_of, there, threads, times, until
from tests.support.steps import NO_STORE
from tests.support.subjects import MATRIX, PSYCOPG2, Actor, Subject

ROUNDS = times(3, 20)
CALLED = [each for each in (MATRIX if LONG else (*SOME, PSYCOPG2)) if each.database != "sqlite"]
"""Every variant that a database can notify."""


@pytest.fixture
def deaf(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody polls for an hour."""
    timed(monkeypatch, **SELDOM)


ELSEWHERE = (
    "(setattr(runtime.current.sockets(), 'neighbourhood', 'dblock_elsewhere_'),"
    " object.__setattr__(subject.protocol.dialect, 'call', None))"  # the grant itself is to notify
)
FULL = "setattr(runtime.current.sockets(), 'notify', lambda *_: False)"


@pytest.mark.direct
@pytest.mark.usefixtures("deaf")
@pytest.mark.parametrize("before", [ELSEWHERE, FULL], ids=["elsewhere", "full"])
@pytest.mark.parametrize("subject", CALLED, ids=str, indirect=True)
def test_the_database_calls(subject: Subject, before: str) -> None:
    """A waiter hears of a release on another machine long before it would have polled again, and of a neighbour's that
    finds its socket full."""
    hand_overs(subject, before)


@pytest.mark.usefixtures("deaf")
@pytest.mark.parametrize("subject", SOME, ids=str, indirect=True)
def test_a_neighbour_notifies(subject: Subject) -> None:
    """A release in another process of this machine wakes the waiter, on every database; PostgreSQL notifies nobody."""
    hand_overs(subject)


@pytest.mark.direct
@pytest.mark.parametrize("before", ["None", ELSEWHERE])
def test_a_neighbour_is_not_notified(postgresql: object, before: str) -> None:
    """A notification wakes every session that listens to anything: it is for those who are somewhere else."""
    with psycopg.connect(url("postgresql").replace("+psycopg", ""), autocommit=True) as connection:
        connection.execute(f"LISTEN {runtime.current.sockets().channel}")
        hand_overs(Subject("sqlalchemy", "sync", "postgresql"), before)
        heard = [message.payload.split(" ", 4)[4] for message in connection.notifies(timeout=0.1)]
    assert heard == (["k"] * ROUNDS if before == ELSEWHERE else [])


THERE = "dblock_00000000_0123456789abcdef"
"""The channel of a process of another machine."""


@pytest.mark.direct
def test_a_notification_proves_what_was_granted(postgresql: object) -> None:
    """With the heir's own token, so that it may begin at once."""
    subject = Subject("sqlalchemy", "sync", "postgresql")
    with psycopg.connect(url("postgresql").replace("+psycopg", ""), autocommit=True) as connection:
        connection.execute(f"LISTEN {THERE}")
        with subject.lock("k", renew=False) as lock:
            database, hold, _ = lock._place.store().database, hold_of(lock), joined(lock, f"{THERE}.1")
            assert drive(queue.grant(database, "k", 1, hold.tenure, here="here")) is not None
            hold.grant.handed_over = True
        [called] = connection.notifies(timeout=10, stop_after=1)
    message = there(Message.read(called.payload))
    assert message.proof == queue.proof(message.ticket, message.fence, message.lasts, "heir")


@pytest.mark.direct
def test_a_listener_takes_no_place_in_a_pool(postgresql: object, monkeypatch: pytest.MonkeyPatch) -> None:
    """Django's pool may be as small as the number of threads."""
    connections["postgresql"].close()  # which came from no pool
    options = {**connections.settings["postgresql"]["OPTIONS"], "pool": {"min_size": 1, "max_size": 1}}
    monkeypatch.setitem(connections.settings["postgresql"], "OPTIONS", options)
    monkeypatch.setitem(connections.settings["postgresql"], "CONN_MAX_AGE", 0)
    subscription = store_for("postgresql").subscribe(runtime.current.sockets().channel, Wakeups())
    assert isinstance(subscription, PsycopgSubscription)
    assert not hasattr(subscription._connection, "_pool")
    subscription.close()


def test_whether_to_listen_is_yes_or_no() -> None:
    """A word from an environment variable would always be true."""
    engine = own_engine("sqlite://", execution_options={"dblock_listen": "no"})
    with pytest.raises(TypeError, match="dblock_listen"):
        db_lock(engine, "k").locked()


STRANGE = ["victim", "dblock_victim", "dblock_00000000_0000000000000000x", "*", "1"]
"""Channels that no process of ours has."""


@pytest.mark.direct
@pytest.mark.parametrize("database", SERVERS, indirect=True)
def test_only_channels_of_our_own_form_are_notified(database: str) -> None:
    """A row in `lock_waiters` does not choose whose query is ended, or which session is notified."""
    subject = Subject("sqlalchemy", "sync", database)
    with victim(database) as disturbed:
        for number, channel in enumerate(STRANGE):
            key = f"k{number}"
            with subject.lock(key):
                stranger(subject, 2**61, 60, key, key=key, channel=channel)
                subject.run("UPDATE locks SET last_ticket = :last WHERE lock_key = :key", last=2**61, key=key)
            assert subject.row(key)["owner"] == key, "the key was granted to that row"
        assert not disturbed()


@contextmanager
def victim(database: str) -> Iterator[Callable[[], bool]]:
    """A session of the releaser's user that answers to strange channels; whether it has been disturbed."""
    with observer(database).connect() as connection:
        if database == "postgresql":
            for channel in STRANGE:
                _ = connection.exec_driver_sql(f'LISTEN "{channel}"')
            connection.commit()
            driver: Any = connection.connection.driver_connection
            yield lambda: bool(list(driver.notifies(timeout=0.3)))
            return
        for channel in STRANGE:
            [(mine,)] = connection.exec_driver_sql(f"SELECT GET_LOCK('{channel}', 5)").all()
            assert mine == 1
        with ThreadPoolExecutor(1) as thread:
            asleep = thread.submit(lambda: connection.exec_driver_sql("SELECT SLEEP(1)").all())
            yield lambda: asleep.result(20) != [(0,)]
        for channel in STRANGE:
            _ = connection.exec_driver_sql(f"SELECT RELEASE_LOCK('{channel}')")


@pytest.mark.parametrize("database", INNODB, indirect=True)
def test_several_listen(database: str) -> None:
    """Engines of one process have one name: the one that has it lets those who wait at the others poll, and leaves it
    to them in the end."""
    subject, wakeups = Subject("sqlalchemy", "sync", database), Wakeups()
    store, channel = subject.lock("k")._place.store(), f"dblock_test_{secrets.token_hex(4)}"
    elsewhere = Wakeup("another engine")
    wakeups.register("k", 1, elsewhere)
    first, second = (store.subscribe(channel, wakeups) for _ in range(2))
    assert isinstance(first, KillQueryListener)
    assert isinstance(second, KillQueryListener)
    assert (first.named, second.named) == (True, False)
    asleep = (
        f"SELECT 1 FROM information_schema.processlist WHERE id = IS_USED_LOCK('{channel}') AND state = 'User sleep'"
    )
    with ThreadPoolExecutor(1) as thread:
        heard = thread.submit(first.listen, 30)
        assert until(lambda: run(database, asleep) != [])
        _ = store.execute(Execute(NO_STORE, store.database.dialect.call, {"channel": channel}))
        assert heard.result(5) == []
    assert not elsewhere.notified()
    assert first.listen(60) == []  # at once: it was notified
    assert elsewhere.notified()
    assert [second.listen(1), second.named] == [[], False]
    first.close()
    assert [second.listen(5), second.named] == [[], True]
    second.close()


@pytest.mark.parametrize("database", INNODB, indirect=True)
def test_another_user_rings_in_vain(database: str, lowly: Callable[..., URL]) -> None:
    """A server lets users end their own statements only: the waiter polls, and its session is left alone."""
    subject = Subject("sqlalchemy", "sync", database)
    other = lowly(database, "SELECT", "INSERT", "UPDATE", "DELETE").render_as_string(hide_password=False)
    actor = Actor(subject)
    with Remote(subject) as remote:
        remote.do("setattr(runtime.current.sockets(), 'neighbourhood', 'dblock_elsewhere_')")
        remote.do(f"vars(subject).update(engine=__import__('sqlalchemy').create_engine({other!r}))")
        remote.do("(lock := subject.lock('k', ttl=600)).acquire()")
        lock = subject.lock("k", timeout=60)
        waited = actor.start(lock.acquire)
        assert until(lambda: waiters(subject) == 1)
        time.sleep(0.5)  # it listens
        remote.do("lock.release()")
        assert waited.result(2.5 + 1) is True
        actor.call(lock, "release")
    actor.close()


@pytest.mark.parametrize(
    "subject",
    [each for each in SOME if each.database in {"sqlite", "postgresql"} and each.variant != "sqlalchemy"]
    + [Subject("sqlalchemy", "async", "postgresql", "asyncpg")],
    ids=str,
    indirect=True,
)
def test_a_flood_costs_a_waiter_next_to_nothing(subject: Subject, monkeypatch: pytest.MonkeyPatch) -> None:
    """Datagrams that name its ticket make it look a few times; then it polls, and has the key when that is free."""
    looks, status = list[float](), queue.status

    def count(*args: Any, **options: Any) -> Any:
        looks.append(time.monotonic())
        return status(*args, **options)

    monkeypatch.setattr(queue, "status", count)
    holder, actor = Actor(subject), Actor(subject)
    held, lock = holder.hold(subject.lock("k")), subject.lock("k", timeout=60)
    waited = actor.begin(lock, "acquire")
    assert until(lambda: waiters(subject) == 1)
    [(channel, ticket)] = subject.run("SELECT channel, ticket FROM lock_waiters")
    end = time.monotonic() + 0.7
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK) as stranger:
        refused = False
        while time.monotonic() < end and not refused:
            try:
                stranger.sendto(Message("k", ticket).text().encode(), "\0" + channel)
            except ConnectionRefusedError:
                refused = True
            except BlockingIOError:
                time.sleep(0.001)
    assert refused, "it has left its socket"
    assert len(looks) < 3 * MOST
    assert not waited.done()
    holder.call(held, "release")
    assert waited.result(10) is True
    actor.call(lock, "release")
    holder.close()
    actor.close()


def hand_overs(subject: Subject, before: str = "None", meanwhile: Callable[[], object] = bool) -> None:
    """Wait for what another process holds, again and again."""
    actor = Actor(subject)
    other = Subject("sqlalchemy", "sync", subject.database)
    with Remote(other) as remote:
        remote.do(before)
        for _ in range(ROUNDS):
            remote.do("(lock := subject.lock('k', ttl=600)).acquire()")
            lock = subject.lock("k", timeout=60)
            waited = actor.begin(lock, "acquire")
            assert until(lambda: waiters(subject) == 1)
            [(channel,)] = subject.run(
                "SELECT channel FROM lock_waiters JOIN locks USING (lock_key) WHERE ticket > served_ticket"
            )
            assert channel.rpartition(".")[0] == runtime.current.sockets().channel
            time.sleep(0.05)
            assert not waited.done()
            _ = meanwhile()
            remote.do("lock.release()")
            assert waited.result(5) is True
            actor.call(lock, "release")
    actor.close()


@pytest.mark.timeout(150)
@pytest.mark.parametrize("variant", ["django", "sqlalchemy"])
@pytest.mark.parametrize("database", ["postgresql", "mariadb"], indirect=True)
def test_a_process_that_is_told_not_to_listen_polls(
    database: str, variant: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """`LISTEN: False`, or the engine's option: no connection listens, the key is handed over, one warning in all."""
    timed(monkeypatch, listen_after=0.0)
    subject = Subject(variant, "sync", database).over(execution_options={"dblock_listen": False})
    store, listeners = subject.lock("k")._place.store(), list[Any]()
    vars(store).pop("_waiter_services", None)
    # Those of earlier tests, which may have let them rest for a minute.
    assert until(lambda: not threads("dblock listener") and run(database, LISTENERS[database]) == [], 70)
    with override_settings(DBLOCK={"LISTEN": False}):
        hand_overs(subject, meanwhile=lambda: listeners.append(run(database, LISTENERS[database])))
    assert listeners[0] == [], "the other process may listen later"
    vars(store).pop("_waiter_services", None)
    assert len([message for message in caplog.messages if "cannot notify this process" in message]) == 1
