"""Health: locks are to be had, or why not, in time; and what django-health-check makes of it."""

from __future__ import annotations

import asyncio
import json
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from django.db import transaction
from django.http import HttpRequest
from django.test import AsyncRequestFactory
from fastapi import HTTPException
from health_check.views import HealthCheckView
from sqlalchemy import Engine, create_engine
from sqlalchemy.ext.asyncio import create_async_engine

from dblock import LockStoreError, LockTimeout
from dblock.contrib.health import acheck, check
from dblock.contrib.health_check import Locks
from dblock.core.observing.events import DOCTOR, HEALTH, Kind
from sqlalchemy_dblock import db_lock, metadata
from tests.conftest import ALIASES, heard, own_engine, ready, run, timed, url
from tests.support.lab import cycle, together, until, without
from tests.support.pages import block
from tests.support.servers import free_port


def test_every_face(request: pytest.FixtureRequest) -> None:
    """A key of this machine's is taken and given back, which leaves one row, however often it is asked."""
    for database, driver in (("sqlite", "aiosqlite"), ("postgresql", "psycopg")):
        ready(request, database)
        engine, async_engine = create_engine(url(database)), create_async_engine(url(database, driver))

        async def on_a_loop(alias: str, engine: Any) -> tuple[float, float]:
            found = await acheck(alias), await check(engine)
            await engine.dispose()
            return found

        took = [check(ALIASES[database]), check(engine), *asyncio.run(on_a_loop(ALIASES[database], async_engine))]
        assert all(0 < each < 2 for each in took)
        [(key, owner)] = run(database, "SELECT lock_key, owner FROM locks")
        assert str(key).startswith(HEALTH)
        assert owner is None
        engine.dispose()
    assert check() > 0


def test_nobody_is_told(sqlite: object) -> None:
    """A probe a second, or a doctor, is no group of the metrics, and fills no history."""
    engine, told = own_engine("sqlite", execution_options={"dblock_history": 100}), heard()
    _ = check(engine)
    for key in (DOCTOR, "k"):
        cycle(db_lock(engine, key))
    assert [(event.key, event.kind) for event in told] == [("k", Kind.ACQUIRED), ("k", Kind.RELEASED)]
    assert until(lambda: run("sqlite", "SELECT lock_key FROM lock_events") == [("k",)] * 2, 10)


def test_inside_a_transaction(postgresql: object) -> None:
    """A view under ATOMIC_REQUESTS keeps the key no longer than any other."""
    with transaction.atomic("postgresql"):
        assert check("postgresql") > 0
        assert run("postgresql", "SELECT owner FROM locks") == [(None,)]


def test_probes_of_one_machine_take_turns(engine: Engine) -> None:
    """Each of them says that all is well."""
    assert together(*[lambda: check(engine, timeout=50)] * 8) == []


def test_what_is_not_well_is_raised(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """No table, a key that stays busy, nobody there; and not for ever."""
    nothing = own_engine("sqlite://")
    with pytest.raises(LockStoreError, match="no table"):
        check(nothing)
    monkeypatch.setattr("dblock.contrib.health.process_identity", lambda: {"host": "here"})
    lock = db_lock(engine, f"{HEALTH}here", ttl=60)
    with ThreadPoolExecutor(1) as elsewhere:
        assert elsewhere.submit(lock.acquire).result()
        with pytest.raises(LockTimeout, match="here"):
            check(engine, timeout=0.2)
        elsewhere.submit(lock.release).result()
    away = own_engine(f"postgresql+psycopg://dblock@127.0.0.1:{free_port()}/postgres")
    began = time.monotonic()
    with pytest.raises(LockStoreError, match="cannot connect"):
        check(away, timeout=0.5)
    assert time.monotonic() - began < 5


ready_view = HealthCheckView.as_view(checks=["dblock.contrib.health_check.Locks"])


def test_django_health_check(sqlite: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its page says that locks are to be had, or which kind of failure it was, and nothing else of the database."""

    def ask() -> tuple[int, Any]:
        request: HttpRequest = AsyncRequestFactory().get("/ready/", headers={"accept": "application/json"})
        response = asyncio.run(ready_view(request))
        return response.status_code, json.loads(response.content)

    timed(monkeypatch, answer_grace=0.1)
    status, told = ask()
    assert (status, list(told.values())) == (200, ["OK"])
    with without("sqlite", "locks"):
        status, told = ask()
    assert status == 500
    assert "No lock could be taken and given back: LockStoreError" in json.dumps(told)
    assert "default" not in json.dumps(list(told.values()))
    assert "postgresql" in repr(Locks(alias="postgresql"))


def test_documented(engine: Engine) -> None:
    """The page's endpoints, as they stand."""
    space: dict[str, Any] = {"engine": engine}
    exec(block("docs/monitoring.md", "health"), space)
    assert space["ready"]()["locks"] > 0
    metadata.drop_all(engine)
    with pytest.raises(HTTPException, match="503"):
        space["ready"]()
    exec(block("docs/monitoring.md", "health-django"), space)
    assert [pattern.name for pattern in space["urlpatterns"]] == ["ready"]
