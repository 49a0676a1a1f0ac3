"""The statements for SQLite (3.35 and later, for RETURNING).

The clock is SQLite's own `'now'`, stable within one statement and in milliseconds; times are text of one width
('2026-01-02 03:04:05.678000', as Django and SQLAlchemy write them), so they compare as text. Statements of different
connections never overlap (one writer at a time), and each reads the clock after it got the write lock or re-reads
nothing: what a statement saw is what it changed.

A pin is a write of the guarded transaction to the row: from then on no other connection can write until it ends.

Commits: in WAL mode the lock's own connections run with `synchronous=NORMAL`. A crash of a process loses nothing then;
a crash of the machine may lose the last commits, but ends every holder too, since all of them live on that machine.
"""

from __future__ import annotations

from typing import Final

from dblock.core.statements.base import Failure, causes
from dblock.core.statements.common import REVOKED, STEP, TENURE, THEIRS, WAITER
from dblock.core.statements.dialect import Dialect
from dblock.core.statements.shares import no_writer_waits
from dblock.core.statements.vocabulary import Vocabulary


class SQLite(Vocabulary):
    """The vocabulary of SQLite. A Julian day is exact to some 40 us: rounded to the clock's milliseconds it is exact.

    Each read of a table names the index, and each join the order: with statistics (ANALYZE) from a time when a table
    was small, SQLite would read the whole table.
    """

    now = "strftime('%Y-%m-%d %H:%M:%f000', 'now')"
    micros = (
        "CAST(strftime('%s', 'now') AS integer) * 1000000 + CAST(substr(strftime('%f', 'now'), 4) AS integer) * 1000"
    )
    greatest = "max"
    least = "min"
    by_key = by_pin = " INDEXED BY locks_pin"
    by_ticket = " INDEXED BY lock_waiters_queue"
    by_owner = " INDEXED BY sqlite_autoindex_lock_waiters_1"
    join = "CROSS JOIN"
    unserved = "AND ticket > (SELECT served_ticket FROM locks WHERE locks.lock_key = lock_waiters.lock_key)"
    shares_of_locks = f"""SELECT 1 FROM locks AS share{by_key}
        WHERE share.lock_key > locks.lock_key || char(31) AND share.lock_key < locks.lock_key || ' '"""
    join_places_of = f""" {join} lock_waiters AS waiter{by_owner}
        ON waiter.owner >= {{0}} AND waiter.owner < {{0}} || 'g'""".format
    before = "strftime('%Y-%m-%d %H:%M:%f000', 'now', printf('-%.3f seconds', {}))".format
    since = "round((julianday('now') - julianday({})) * 86400.0, 3)".format
    until = "round((julianday({}) - julianday('now')) * 86400.0, 3)".format
    # For an equality SQLite may build a Bloom filter, for which it reads the whole table.
    looked_up = "{} IN (SELECT {})".format

    def after(self, seconds: str, start: str = "'now'") -> str:
        return f"strftime('%Y-%m-%d %H:%M:%f000', {start}, printf('+%.3f seconds', {seconds}))"

    def delete_listed(self, table: str, name: str, condition: str) -> str:
        index = self.by_pin if table == "locks" else self.by_owner
        return f"DELETE FROM {table}{index} WHERE {name} IN (SELECT value FROM json_each(:names)) AND {condition}"


SQL: Final = SQLite()
_DUE: Final = """(
    SELECT json_extract(value, '$.key') AS name, json_extract(value, '$.owner') AS holder,
           json_extract(value, '$.fence') AS number, json_extract(value, '$.life') AS life,
           json_extract(value, '$.not_notified') AS not_notified
    FROM json_each(:leases) LIMIT -1
) AS due"""
"""The leases; the LIMIT keeps SQLite from reading them anew for each row of a table that it takes for small."""
_TENURE_DUE: Final = f"""
WHERE {SQL.looked_up("lock_key", "due.name")}
  AND owner = due.holder AND fence = due.number AND expires_at > {SQL.now}"""


class SQLiteDialect(Dialect):
    """The statements for SQLite."""

    name = "sqlite"
    words = SQL
    single_writer = True
    tick = 0.001
    grant_answers = True

    @staticmethod
    def classify(error: BaseException) -> Failure:
        """By SQLite's result code (sqlite.org/rescode.html); connections to a file do not get lost."""
        code = next(filter(None, (getattr(each, "sqlite_errorname", "") for each in causes(error))), "")
        text = str(error)
        if code == "SQLITE_BUSY_SNAPSHOT":
            return Failure.STALE
        if code.startswith(("SQLITE_BUSY", "SQLITE_LOCKED")) or "is locked" in text:
            return Failure.LOCKED
        if "no such column" in text or "has no column named" in text or "no such index" in text:
            return Failure.OTHER_TABLE
        return Failure.NO_TABLE if "no such table" in text else Failure.OTHER

    # Safe: DO NOTHING writes nothing when the key exists. The row is missing, so the fence starts at the clock; the
    # protocol lets one tick of that clock pass first, so that it exceeds the fence of a row deleted just now.
    CREATE = f"""
INSERT INTO locks ({TENURE})
VALUES (:key, :owner, {SQL.micros}, 1, :ttl, {SQL.now}, {SQL.after(":life")},
        :label, :host, :pid, :thread, :program, :task, :kind, :reading)
ON CONFLICT (lock_key) DO NOTHING
RETURNING fence
"""
    # Safe: names the tenures, revives none and shortens none, so it may arrive late and twice.
    RENEW = f"""
UPDATE locks{SQL.by_pin} SET expires_at = max(expires_at, {SQL.after("due.life")})
FROM {_DUE} {_TENURE_DUE}
  AND (revoked_fence <> fence OR due.not_notified = 0)
"""
    # Safe: reads only.
    ALIVE = f"SELECT lock_key, owner, fence, {REVOKED} FROM {_DUE} CROSS JOIN locks{SQL.by_pin} {_TENURE_DUE}"

    # Runs in the caller's transaction, and lasts as long. Safe: from then on no other connection can write at all, and
    # a transaction whose snapshot is old cannot either (SQLITE_BUSY_SNAPSHOT). It renews the lease, since no other
    # connection can while the transaction lasts. The fence names the tenure, without the owner's token: statements of
    # the caller's transaction are in the caller's logs. (An empty owner is that of a released tenure.)
    PIN = f"""
UPDATE locks SET expires_at = max(expires_at, {SQL.after(":life")})
WHERE lock_key = :key AND fence = :fence AND owner <> '' AND expires_at > {SQL.now}
RETURNING 1
"""
    # Safe: a row of its own.
    JOIN = f"""
INSERT INTO lock_waiters ({WAITER})
SELECT :owner, lock_key,
       max(last_ticket + 1, {SQL.micros},
           (SELECT coalesce(max(ticket) + 1, 0) FROM lock_waiters WHERE lock_waiters.lock_key = :key)),
       :ttl, :label, :host, :pid, :thread, :program, :task, :channel, :reading, {SQL.now}, {SQL.after(":waiter_ttl")}
FROM locks WHERE lock_key = :key AND kind = :kind
RETURNING ticket
"""
    # Safe: as the take, for a waiter: only if no lease is alive on the key except the tenure that is being released.
    # The lease ends with the waiter's place, and is no longer than the waiter asked for. The waiter's row stays, and no
    # longer counts: its ticket was served.
    GRANT = f"""
UPDATE locks SET
    owner = next.owner,
    fence = max(fence + {STEP}, {SQL.micros}),
    count = 1,
    reading = next.reading,
    ttl = next.ttl,
    acquired_at = {SQL.now},
    expires_at = min(next.expires_at, {SQL.after("next.ttl")}),
    {THEIRS},
    last_ticket = max(last_ticket, next.ticket),
    served_ticket = next.ticket
FROM (
    SELECT * FROM lock_waiters
    WHERE lock_key = :key AND ticket >= :first AND expires_at > {SQL.now}
    ORDER BY ticket LIMIT 1
) AS next
WHERE locks.lock_key = :key AND served_ticket < next.ticket
  AND (locks.owner IS NULL OR locks.expires_at <= {SQL.now} OR (locks.owner = :owner AND locks.fence = :fence))
RETURNING served_ticket, (SELECT channel FROM lock_waiters WHERE lock_waiters.owner = locks.owner), owner, fence,
       0, NULL
"""
    # Safe: one row for each waiter, by primary key, which is its own.
    LEAVE_QUEUE = f"DELETE FROM lock_waiters{SQL.by_owner} WHERE owner IN (SELECT value FROM json_each(:owners))"

    # Safe: shortens nothing and revives none, so it may arrive late and twice; nor does it extend a place that was
    # served.
    HEARTBEAT = f"""
UPDATE lock_waiters{SQL.by_owner} SET expires_at = max(expires_at, {SQL.after(":waiter_ttl")})
WHERE owner IN (SELECT value FROM json_each(:owners)) AND expires_at > {SQL.now} {SQL.unserved}
RETURNING owner
"""
    # Safe where one transaction writes at a time: what it sees of the door is so until it has inserted its row. Nor can
    # a transaction pin a row there while this one writes.
    READ = f"""
INSERT INTO locks ({TENURE})
SELECT :key, :owner, door.fence + 1, 1, :ttl, {SQL.now}, {SQL.after(":life")},
       :label, :host, :pid, :thread, :program, :task, :kind, 1
FROM locks AS door{SQL.by_key}
WHERE door.lock_key = :door AND door.kind = :kind
  AND ((:holder = '' AND (door.reading = 1 OR door.owner IS NULL OR door.expires_at <= {SQL.now}))
       OR (door.owner = :holder AND door.fence = :holders_fence AND door.expires_at > {SQL.now}))
  AND {no_writer_waits(SQL, "door")}
ON CONFLICT (lock_key) DO NOTHING
RETURNING fence
"""


DIALECT: Final = SQLiteDialect()
