"""What a fourth database costs: a pretended one, which keeps time as microseconds since 1970 in a bigint.

It runs on SQLite's engine, whose own vocabulary keeps time as text, through the SQLAlchemy face and all of the core.
Everything that such a database needs is in this file, and would be one module of `dblock.core.statements`.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Final

import pytest
from sqlalchemy import create_engine

import sqlalchemy_dblock
from dblock.core.statements.base import Failure, Reply, Statement, WhenLocked
from dblock.core.statements.common import (
    REVOKED,
    TENURE,
    WAITER,
    dialect,
    hand_over_local,
)
from dblock.core.statements.shares import read, shares
from dblock.core.statements.vocabulary import Vocabulary
from tests.support.lab import together, until

# -- the database


class Pretend(Vocabulary):
    now = micros = "CAST((julianday('now') - 2440587.5) * 86400000000 AS integer)"
    greatest = "max"
    least = "min"
    time = "bigint"
    serial = "integer NOT NULL PRIMARY KEY"

    def after(self, seconds: str, start: str = "") -> str:
        return f"{start or self.now} + CAST({seconds} * 1000000 AS integer)"

    def before(self, seconds: str) -> str:
        return f"{self.now} - CAST({seconds} * 1000000 AS integer)"

    def since(self, time: str) -> str:
        return f"({self.now} - {time}) / 1000000.0"

    def until(self, time: str) -> str:
        return f"({time} - {self.now}) / 1000000.0"

    def records(self, parameter: str, columns: Mapping[str, str]) -> str:
        values = ", ".join(f"json_extract(value, '$.{name}') AS {name}" for name in columns)
        return f"(SELECT {values} FROM json_each({parameter})) AS record"

    def delete_listed(self, table: str, name: str, condition: str) -> str:
        return f"DELETE FROM {table} WHERE {name} IN (SELECT value FROM json_each(:names)) AND {condition}"


SQL: Final = Pretend()
_DUE: Final = f"""
WHERE lock_key = json_extract(due.value, '$.key') AND owner = json_extract(due.value, '$.owner')
  AND fence = json_extract(due.value, '$.fence') AND expires_at > {SQL.now}"""

CREATE: Final = Statement(
    "create",
    f"""
INSERT INTO locks ({TENURE})
VALUES (:key, :owner, {SQL.micros}, 1, :ttl, {SQL.now}, {SQL.after(":life")},
        :label, :host, :pid, :thread, :program, :task, :kind, :reading)
ON CONFLICT (lock_key) DO NOTHING
RETURNING fence
""",
    Reply.ROWS,
    row_locked=WhenLocked.SKIP,
)
RENEW: Final = Statement(
    "renew",
    f"""
UPDATE locks SET expires_at = max(expires_at, {SQL.after("json_extract(due.value, '$.life')")})
FROM json_each(:leases) AS due {_DUE} AND (revoked_fence <> fence OR json_extract(due.value, '$.not_notified') = 0)
""",
    Reply.COUNT,
    critical=True,
    row_locked=WhenLocked.RAISE,
)
ALIVE: Final = Statement(
    "alive",
    f"SELECT lock_key, owner, fence, {REVOKED} FROM json_each(:leases) AS due CROSS JOIN locks {_DUE}",
    Reply.ROWS,
    critical=True,
)
PIN: Final = Statement(
    "pin",
    f"""
UPDATE locks SET expires_at = max(expires_at, {SQL.after(":life")})
WHERE lock_key = :key AND fence = :fence AND owner <> '' AND expires_at > {SQL.now}
RETURNING 1
""",
    Reply.ROWS,
)
JOIN: Final = Statement(
    "join",
    f"""
INSERT INTO lock_waiters ({WAITER})
SELECT :owner, lock_key,
       max(last_ticket + 1, {SQL.micros},
           (SELECT coalesce(max(ticket) + 1, 0) FROM lock_waiters WHERE lock_waiters.lock_key = :key)),
       :ttl, :label, :host, :pid, :thread, :program, :task, :channel, :reading, {SQL.now}, {SQL.after(":waiter_ttl")}
FROM locks WHERE lock_key = :key AND kind = :kind
RETURNING ticket
""",
    Reply.ROWS,
)
GRANT: Final = Statement(
    "grant",
    f"""
UPDATE locks SET
    owner = next.owner, fence = max(fence + 1, {SQL.micros}), count = 1, reading = next.reading,
    ttl = next.ttl,
    acquired_at = {SQL.now}, expires_at = min(next.expires_at, {SQL.after("next.ttl")}), label = next.label,
    host = next.host, pid = next.pid, thread = next.thread, program = next.program,
    celery_task_id = next.celery_task_id,
    last_ticket = max(last_ticket, next.ticket), served_ticket = next.ticket
FROM (
    SELECT * FROM lock_waiters WHERE lock_key = :key AND ticket >= :first AND expires_at > {SQL.now}
    ORDER BY ticket LIMIT 1
) AS next
WHERE locks.lock_key = :key AND served_ticket < next.ticket
  AND (locks.owner IS NULL OR locks.expires_at <= {SQL.now} OR (locks.owner = :owner AND locks.fence = :fence))
RETURNING served_ticket, (SELECT channel FROM lock_waiters WHERE lock_waiters.owner = locks.owner), owner, fence,
       0, NULL
""",
    Reply.ROWS,
    critical=True,
    row_locked=WhenLocked.SKIP,
)
LEAVE_QUEUE: Final = Statement(
    "leave_queue",
    "DELETE FROM lock_waiters WHERE owner IN (SELECT value FROM json_each(:owners))",
    Reply.COUNT,
    critical=True,
)
HEARTBEAT: Final = Statement(
    "heartbeat",
    f"""
UPDATE lock_waiters SET expires_at = max(expires_at, {SQL.after(":waiter_ttl")})
WHERE owner IN (SELECT value FROM json_each(:owners)) AND expires_at > {SQL.now}
  AND ticket > (SELECT served_ticket FROM locks WHERE locks.lock_key = lock_waiters.lock_key)
RETURNING owner
""",
    Reply.ROWS,
    critical=True,
)


def classify(error: BaseException) -> Failure:
    return Failure.LOCKED if "locked" in str(error) else Failure.OTHER


DIALECT: Final = dialect(
    SQL,
    name="pretend",
    classify=classify,
    create=CREATE,
    renew=RENEW,
    alive=ALIVE,
    pin=PIN,
    locate=None,
    join=JOIN,
    grant=GRANT,
    hand_over_local=hand_over_local(SQL),
    leave_queue=LEAVE_QUEUE,
    heartbeat=HEARTBEAT,
    shares=shares(SQL, read=read(SQL)),
    grant_answers=True,
    single_writer=True,
    tick=0.001,
)

# -- what it is good for


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr("dblock.core.statements.sqlite.DIALECT", DIALECT)
    path = tmp_path / "pretend.sqlite3"
    engine = create_engine(f"sqlite:///{path}")
    with engine.begin() as connection:
        connection.connection.cursor().executescript("PRAGMA journal_mode = WAL;" + DIALECT.ddl)
    engine.dispose()
    return f"sqlite:///{path}"


def test_a_lock_on_it_excludes_queues_renews_and_is_reaped(path: str) -> None:
    """The statements that are told once need no more than a vocabulary."""
    engines = [create_engine(path) for _ in range(2)]
    inside, most, order = [0], [0], list[int]()

    def work(number: int) -> None:
        for _ in range(5):
            with sqlalchemy_dblock.db_lock(engines[number % 2], "k", ttl=6, timeout=30) as lock, lock:
                inside[0] += 1
                most[0] = max(most[0], inside[0])
                order.append(lock.fence)
                time.sleep(0.01)
                assert lock.verify()
                inside[0] -= 1

    assert together(*(partial(work, number) for number in range(4))) == []
    assert (most[0], len(order)) == (1, 20)
    assert order == sorted(set(order))
    with sqlalchemy_dblock.db_lock(engines[0], "long", ttl=1.0) as held:
        time.sleep(1.5)
        assert held.verify()
    row = held.inspect()
    assert row is not None
    assert row.state == "free"
    reaped = list[int]()

    def all_reaped() -> bool:  # a row stays while the place of its last waiter lasts
        reaped.append(sqlalchemy_dblock.reap(engines[1], retention=0.01))
        return sum(reaped) == 2

    assert until(all_reaped, 8.0)
    for engine in engines:
        engine.dispose()
