"""Calls across processes: what a waiter of PostgreSQL hears, and what happens when it hears nothing."""

from __future__ import annotations

import time
from typing import Any

import pytest
from django.test import override_settings
from sqlalchemy import create_engine

from dblock.core import listener, waiting
from tests.conftest import ready, run, url
from tests.contract.subjects import MATRIX, Actor, Subject
from tests.contract.test_queue import waiters
from tests.faults.lab import Remote, until

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
    monkeypatch.setattr(waiting, "FALLBACK", 3600.0)


def listening() -> list[Any]:
    """The channels that this process's waiters gave."""
    return [channel for (channel,) in run("postgresql", "SELECT channel FROM lock_waiters")]


@pytest.mark.usefixtures("deaf")
def test_a_release_in_another_process_calls(subject: Subject) -> None:
    """The waiter has the key long before it would have looked again; nobody else was called."""
    actor = Actor(subject)
    other = Subject("sqlalchemy", "sync", "postgresql")
    with Remote(other) as remote:
        for _ in range(20):
            remote.do("(lock := subject.lock('k', ttl=600)).acquire()")
            lock = subject.lock("k", timeout=60)
            waited = actor.start(getattr(lock, subject.method("acquire")))
            assert until(lambda: waiters(subject) == 1)
            assert listening() == [listener.channel()]
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
    vars(store).pop("attendants", None)
    actor = Actor(subject)
    ears = "SELECT 1 FROM pg_stat_activity WHERE query LIKE 'LISTEN%'"
    assert until(lambda: run("postgresql", ears) == [])  # those of earlier tests are gone
    with override_settings(DBLOCK={"LISTEN": False}), Remote(Subject("sqlalchemy", "sync", "postgresql")) as remote:
        for n in range(3):
            remote.do("(lock := subject.lock('k', ttl=600)).acquire()")
            lock = subject.lock("k", timeout=60)
            waited = actor.start(lock.acquire)
            assert until(lambda: waiters(subject) == 1)
            assert listening() == [""]
            if n == 0:  # the other process may listen later
                assert run("postgresql", ears) == []
            remote.do("lock.release()")
            assert waited.result(10) is True
            actor.call(lock, "release")
    actor.close()
    vars(store).pop("attendants", None)
    subject.engine.dispose()
    assert len([message for message in caplog.messages if "cannot call" in message]) == 1
