"""Many leases, renewed over and over: what it costs PostgreSQL (requirement 18)."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
from sqlalchemy import create_engine

import sqlalchemy_dblock.store
from dblock.core import clock, runtime
from dblock.core.holding.flow import Entry, Hold
from dblock.core.protocol.steps import Execute, Rows
from dblock.core.runtime import current_flow
from dblock.core.values import Grant, Tenure
from tests.conftest import own_engine, run, url
from tests.support.lab import times, until


def numbers(sql: str) -> list[int]:
    [row] = run("postgresql", sql)
    return [int(str(number)) for number in row]


def test_renewals_are_heap_only_and_the_table_stays_as_it_is(postgresql: object) -> None:
    """Hundreds of leases, renewed for a while: 95 % heap-only, no growth, no transaction that lasts."""
    engine, count, rounds = create_engine(url("postgresql")), times(300, 1000), times(7, 120)
    updates = "SELECT n_tup_upd, n_tup_hot_upd FROM pg_stat_user_tables WHERE relid = CAST('locks' AS regclass)"
    size = "SELECT pg_table_size('locks')"
    locks = [sqlalchemy_dblock.db_lock(engine, f"lease {n}", ttl=1.5) for n in range(count)]
    for lock in locks:
        assert lock.acquire()
    time.sleep(1)
    before, small = numbers(updates), numbers(size)
    oldest = 0.0
    end = time.monotonic() + rounds * 0.5
    while time.monotonic() < end:
        [(age,)] = run(
            "postgresql",
            "SELECT coalesce(max(extract(epoch FROM clock_timestamp() - xact_start)), 0)::float8 FROM pg_stat_activity"
            " WHERE backend_type = 'client backend' AND pid <> pg_backend_pid()",
        )
        oldest = max(oldest, float(str(age)))
        time.sleep(0.02)
    assert all(lock.state == "held" for lock in locks)
    large = numbers(size)
    engine.dispose()  # a session that ends reports its numbers
    for lock in locks:
        lock.release()
    engine.dispose()
    least = (rounds - 4) * count
    assert until(lambda: numbers(updates)[0] - before[0] >= least, 5)
    total, heap_only = (now - then for now, then in zip(numbers(updates), before, strict=True))
    assert heap_only / total >= 0.95
    assert large[0] <= small[0] * 1.1
    assert oldest < 0.3, "a transaction outlived its statement"
    assert until(lambda: not runtime.current.watchdog._holds, 1)


def test_ten_thousand_leases_are_renewed_by_one_statement(postgresql: object, monkeypatch: pytest.MonkeyPatch) -> None:
    """All are due at once: one statement, within three seconds, and every one of them lives on."""
    engine, count, ttl = own_engine("postgresql"), 10_000, 30.0
    run(
        "postgresql",
        "INSERT INTO locks SELECT 'lease ' || n, 'owner ' || n, n, 1, 30, now(), now() + interval '25 s',"
        f" '', 'h', 1, '', '', '' FROM generate_series(1, {count}) AS n",
    )
    store = sqlalchemy_dblock.store.store_for(engine)
    sent: list[tuple[str, float]] = []
    real: Callable[..., Rows] = store.execute

    def execute(step: Execute) -> Rows:
        began = time.monotonic()
        rows = real(step)
        sent.append((step.statement.name, time.monotonic() - began))
        return rows

    monkeypatch.setattr(store, "execute", execute)
    flow, began, holds = current_flow(), clock.now(), list[Hold]()
    for n in range(1, count + 1):
        lock: Any = sqlalchemy_dblock.db_lock(engine, f"lease {n}", ttl=ttl)
        grant = Grant(Tenure(lock.key, f"owner {n}", n), began - 5, ttl)
        holds.append(Hold(store, flow, grant, Entry(lock, "acquire"), lock.options))
    for hold in holds:
        hold.lease.due = 0.0
    runtime.current.watchdog._holds.update(dict.fromkeys(holds))
    start = time.monotonic()
    runtime.current.watchdog.wake()
    try:
        assert until(lambda: all(hold.lease.renewed > began for hold in holds), 10)
        took = time.monotonic() - start
    finally:
        for hold in holds:
            runtime.current.watchdog.discard(hold)
    assert [name for name, _ in sent] == ["renew"]
    assert took < 3
    assert run("postgresql", "SELECT count(*) FROM locks WHERE expires_at > now() + interval '26 s'") == [(count,)]
    assert all(hold.lease.state == "held" for hold in holds)
    run("postgresql", "DELETE FROM locks")
