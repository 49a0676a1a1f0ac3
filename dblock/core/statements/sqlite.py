"""The statements for SQLite (3.35 and later, for RETURNING).

The clock is SQLite's own `'now'`, stable within one statement and in milliseconds; times are text of one width
('2026-01-02 03:04:05.678000', as Django and SQLAlchemy write them), so they compare as text. Statements of different
connections never overlap (one writer at a time), and each reads the clock after it got the write lock or re-reads
nothing: what a statement saw is what it changed.

A pin is a write of the guarded transaction to the row: from then on nobody else can write until it ends.

Commits: in WAL mode the lock's own connections run with `synchronous=NORMAL`. A crash of a process loses nothing then;
a crash of the machine may lose the last commits, but ends every holder too, since all of them live on that machine.
"""

from __future__ import annotations

from typing import Final

from dblock.core.statements.base import Dialect, Failure, Reply, Statement
from dblock.core.statements.queues.sqlite import QUEUE

# Safe: an UPDATE holds the database's write lock from before it looks. A loser's WHERE is false: it writes nothing.
# Waiters come first: the row says whether there may be some.
TAKE: Final = Statement(
    "take",
    """
UPDATE locks SET
    owner = :owner,
    fence = max(fence + 1, CAST(strftime('%s', 'now') AS integer) * 1000000
                           + CAST(substr(strftime('%f', 'now'), 4) AS integer) * 1000),
    count = 1,
    ttl = :ttl,
    acquired_at = strftime('%Y-%m-%d %H:%M:%f000', 'now'),
    expires_at = strftime('%Y-%m-%d %H:%M:%f000', 'now', printf('+%.3f seconds', :life)),
    label = :label,
    host = :host,
    pid = :pid,
    thread = :thread,
    program = :program,
    celery_task_id = :task
WHERE lock_key = :key AND (owner IS NULL OR expires_at <= strftime('%Y-%m-%d %H:%M:%f000', 'now'))
  AND (last_ticket = served_ticket OR :fair = 0)
RETURNING fence
""",
    Reply.ROWS,
)

# Safe: DO NOTHING writes nothing when the key exists. The row is missing, so the fence starts at the clock; the
# protocol lets one tick of that clock pass first, so that it exceeds the fence of a row deleted just now.
CREATE: Final = Statement(
    "create",
    """
INSERT INTO locks (lock_key, owner, fence, count, ttl, acquired_at, expires_at,
                   label, host, pid, thread, program, celery_task_id)
VALUES (:key, :owner, CAST(strftime('%s', 'now') AS integer) * 1000000
                      + CAST(substr(strftime('%f', 'now'), 4) AS integer) * 1000, 1, :ttl,
        strftime('%Y-%m-%d %H:%M:%f000', 'now'),
        strftime('%Y-%m-%d %H:%M:%f000', 'now', printf('+%.3f seconds', :life)),
        :label, :host, :pid, :thread, :program, :task)
ON CONFLICT (lock_key) DO NOTHING
RETURNING fence
""",
    Reply.ROWS,
)

# Safe: reads only; in WAL mode it waits for nobody.
INSPECT: Final = Statement(
    "inspect",
    """
SELECT owner, fence, count, ttl,
       round((julianday('now') - julianday(acquired_at)) * 86400.0, 3),
       CASE WHEN expires_at > strftime('%Y-%m-%d %H:%M:%f000', 'now')
            THEN max(0.001, round((julianday(expires_at) - julianday('now')) * 86400.0, 3)) ELSE 0.0 END,
       label, host, pid, thread, program, celery_task_id
FROM locks WHERE lock_key = :key
""",
    Reply.ROWS,
)

# Safe: names the tenure and sets the count that its one flow keeps, so sending it twice is harmless.
REENTER: Final = Statement(
    "reenter",
    """
UPDATE locks SET
    count = :count + 1,
    expires_at = max(expires_at, strftime('%Y-%m-%d %H:%M:%f000', 'now', printf('+%.3f seconds', :life)))
WHERE lock_key = :key AND owner = :owner AND fence = :fence
  AND expires_at > strftime('%Y-%m-%d %H:%M:%f000', 'now')
""",
    Reply.COUNT,
    keeps=True,
)

# Safe: names the tenure; an ended lease is never revived, and sending it twice is harmless.
EXTEND: Final = Statement(
    "extend",
    """
UPDATE locks SET
    ttl = :ttl,
    expires_at = strftime('%Y-%m-%d %H:%M:%f000', 'now', printf('+%.3f seconds', :life))
WHERE lock_key = :key AND owner = :owner AND fence = :fence AND expires_at > strftime('%Y-%m-%d %H:%M:%f000', 'now')
""",
    Reply.COUNT,
    keeps=True,
)

# Safe: names the tenures, revives none and shortens none, so it may arrive late and twice.
RENEW: Final = Statement(
    "renew",
    """
UPDATE locks SET expires_at = max(
    expires_at,
    strftime('%Y-%m-%d %H:%M:%f000', 'now', printf('+%.3f seconds', json_extract(due.value, '$.life')))
)
FROM json_each(:leases) AS due
WHERE lock_key = json_extract(due.value, '$.key') AND owner = json_extract(due.value, '$.owner')
  AND fence = json_extract(due.value, '$.fence') AND expires_at > strftime('%Y-%m-%d %H:%M:%f000', 'now')
""",
    Reply.COUNT,
    keeps=True,
)

# Safe: reads only.
ALIVE: Final = Statement(
    "alive",
    """
SELECT lock_key, owner, fence FROM json_each(:leases) AS due CROSS JOIN locks
WHERE lock_key = json_extract(due.value, '$.key') AND owner = json_extract(due.value, '$.owner')
  AND fence = json_extract(due.value, '$.fence') AND expires_at > strftime('%Y-%m-%d %H:%M:%f000', 'now')
""",
    Reply.ROWS,
    keeps=True,
)

# Safe: names the tenure and revives none. Counts from what the row says, so sending it twice may count twice: the key
# is then free later, at the end of the lease.
ATTACH: Final = Statement(
    "attach",
    """
UPDATE locks SET
    count = count + 1,
    expires_at = max(expires_at, strftime('%Y-%m-%d %H:%M:%f000', 'now', printf('+%.3f seconds', :life))),
    host = :host,
    pid = :pid,
    thread = :thread,
    program = :program,
    celery_task_id = :task
WHERE lock_key = :key AND owner = :owner AND fence = :fence
  AND expires_at > strftime('%Y-%m-%d %H:%M:%f000', 'now')
RETURNING count
""",
    Reply.ROWS,
)

# Safe: names the tenure. Leaves it alive, at count 0 too: its token's bearer has until the end of the lease. With a
# `count` it sets that, as the release does, and so may be sent twice, unless the row shows that somebody has attached
# or that there are more. Without one it counts from what the row says, and is sent once.
DETACH: Final = Statement(
    "detach",
    """
UPDATE locks SET
    count = CASE WHEN :count > 0 THEN :count ELSE count END - 1,
    expires_at = max(expires_at, strftime('%Y-%m-%d %H:%M:%f000', 'now', printf('+%.3f seconds', :life)))
WHERE lock_key = :key AND owner = :owner AND fence = :fence
  AND expires_at > strftime('%Y-%m-%d %H:%M:%f000', 'now')
  AND (:count = 0 OR (count <= :count AND host = :host AND pid = :pid AND thread = :thread))
""",
    Reply.COUNT,
    keeps=True,
)

# Safe: names the tenure and sets the count, so sending it twice is harmless. (RETURNING must not ask for `owner IS
# NULL`: SQLite 3.40 takes it for false because the WHERE says `owner = ...`.)
RELEASE: Final = Statement(
    "release",
    """
UPDATE locks SET
    owner = CASE WHEN :count > 1 THEN owner END,
    expires_at = CASE WHEN :count > 1 THEN expires_at ELSE strftime('%Y-%m-%d %H:%M:%f000', 'now') END,
    count = :count - 1
WHERE lock_key = :key AND owner = :owner AND fence = :fence
RETURNING CASE WHEN count = 0 AND last_ticket > served_ticket THEN served_ticket + 1 ELSE 0 END
""",
    Reply.ROWS,
    keeps=True,
)

# Safe: names the tenure. Counts from what the row says, so it is sent twice only where nobody else counts. An owner
# that is nobody's keeps the key closed for the rest of `min_hold`.
LEAVE: Final = Statement(
    "leave",
    """
UPDATE locks SET
    owner = CASE WHEN count > 1 THEN owner
                 WHEN strftime('%Y-%m-%d %H:%M:%f000', acquired_at, printf('+%.3f seconds', :min_hold))
                      > strftime('%Y-%m-%d %H:%M:%f000', 'now') THEN '' END,
    expires_at = CASE WHEN count > 1 THEN expires_at
                      ELSE max(strftime('%Y-%m-%d %H:%M:%f000', 'now'),
                               strftime('%Y-%m-%d %H:%M:%f000', acquired_at, printf('+%.3f seconds', :min_hold))) END,
    count = max(count - 1, 0)
WHERE lock_key = :key AND owner = :owner AND fence = :fence
RETURNING CASE WHEN count = 0 AND last_ticket > served_ticket THEN served_ticket + 1 ELSE 0 END
""",
    Reply.ROWS,
    keeps=True,
)

# Runs in the caller's transaction, which it lasts as long as. Safe: from then on nobody else can write at all, and a
# transaction whose snapshot is old cannot either (SQLITE_BUSY_SNAPSHOT). It renews the lease, since no other connection
# can as long as the transaction lasts. The fence names the tenure, without the owner's token: what runs in the caller's
# transaction is in the caller's logs. (An owner that is nobody's is that of a tenure given back.)
PIN: Final = Statement(
    "pin",
    """
UPDATE locks SET
    expires_at = max(expires_at, strftime('%Y-%m-%d %H:%M:%f000', 'now', printf('+%.3f seconds', :life)))
WHERE lock_key = :key AND fence = :fence AND owner <> ''
  AND expires_at > strftime('%Y-%m-%d %H:%M:%f000', 'now')
RETURNING 1
""",
    Reply.ROWS,
)

# Safe: reads only. `expires_at` of a free row is when it was released.
STALE: Final = Statement(
    "stale",
    """
SELECT lock_key FROM locks
WHERE expires_at < strftime('%Y-%m-%d %H:%M:%f000', 'now', printf('-%.3f seconds', :retention))
ORDER BY lock_key LIMIT 1000
""",
    Reply.ROWS,
)

# Safe: one row, by primary key, and only if it is still stale: a take in between has moved expires_at.
REAP: Final = Statement(
    "reap",
    """
DELETE FROM locks
WHERE lock_key = :key
  AND expires_at < strftime('%Y-%m-%d %H:%M:%f000', 'now', printf('-%.3f seconds', :retention))
  AND NOT EXISTS (SELECT 1 FROM lock_waiters AS waiter
                  WHERE waiter.lock_key = :key AND waiter.expires_at > strftime('%Y-%m-%d %H:%M:%f000', 'now'))
""",
    Reply.COUNT,
)

DDL: Final = """\
CREATE TABLE locks (
    lock_key varchar(255) NOT NULL PRIMARY KEY,
    owner varchar(64),
    fence bigint NOT NULL,
    count integer NOT NULL,
    ttl real NOT NULL,
    acquired_at datetime NOT NULL,
    expires_at datetime NOT NULL,
    label varchar(255) NOT NULL,
    host varchar(255) NOT NULL,
    pid integer NOT NULL,
    thread varchar(255) NOT NULL,
    program varchar(255) NOT NULL,
    celery_task_id varchar(255) NOT NULL,
    last_ticket bigint DEFAULT 0 NOT NULL,
    served_ticket bigint DEFAULT 0 NOT NULL
);
CREATE UNIQUE INDEX locks_pin ON locks (lock_key);
"""


def classify(error: BaseException) -> Failure:
    """By SQLite's result code (sqlite.org/rescode.html); connections to a file do not get lost."""
    code = getattr(error, "sqlite_errorname", "") or ""
    text = str(error)
    if code == "SQLITE_BUSY_SNAPSHOT":
        return Failure.STALE
    if code.startswith(("SQLITE_BUSY", "SQLITE_LOCKED")) or "is locked" in text:
        return Failure.LOCKED
    if "no such column" in text or "has no column named" in text:
        return Failure.OTHER_TABLE
    return Failure.NO_TABLE if "no such table" in text else Failure.OTHER


DIALECT: Final = Dialect(
    name="sqlite",
    take=TAKE,
    create=CREATE,
    inspect=INSPECT,
    reenter=REENTER,
    extend=EXTEND,
    renew=RENEW,
    alive=ALIVE,
    attach=ATTACH,
    detach=DETACH,
    release=RELEASE,
    leave=LEAVE,
    pin=PIN,
    locate=None,
    stale=STALE,
    reap=REAP,
    tick=0.001,
    classify=classify,
    ddl=DDL + QUEUE.ddl,
    queue=QUEUE,
)
