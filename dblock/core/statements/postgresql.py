"""The statements for PostgreSQL (13 and later).

The clock is `clock_timestamp()`: `now()` is the start of the transaction. It is read while the row is being rewritten,
so after the statement was sent: the lease in the row ends no earlier than send time + ttl. (PostgreSQL evaluates the
new row before it waits for another transaction's row lock, and again after it when that one changed the row: a wait can
make the lease shorter than ttl from *now*, never shorter than ttl from the *send time*, from which trust counts.)

Every statement is a transaction of its own under any isolation level: where READ COMMITTED re-reads a row that changed
meanwhile, REPEATABLE READ and SERIALIZABLE raise 40001 instead, and the protocol tries again.

No statement waits for longer than 20 ms for a row that another transaction has locked (55P03, nothing has happened);
`lock_timeout` is set for the statement's own transaction, before it comes to the row.

What must be durable says so itself: a session with synchronous_commit=off gets `on` for that statement; stronger
settings such as remote_apply are left alone.

No SET touches an indexed column, so all updates are heap-only while the page has room (fillfactor).

A pin is a shared advisory lock of the guarded transaction, which ends with it and, unlike a lock on the row, neither
blocks a renewal nor minds that the row has been renewed since the transaction's snapshot. A take needs the same lock
exclusively, and does not wait for it. Its number is a 64 bit hash of the key and the table: a collision makes a key
look busy for as long as the other one is pinned.
"""

from __future__ import annotations

from typing import Final

from dblock.core.statements.base import Dialect, Failure, Reply, Statement
from dblock.core.statements.queues.postgresql import QUEUE

# Safe: one row, by primary key, and only if nobody's lease is alive on it and no transaction pins it; a concurrent
# change is waited for and the condition is checked again on the row that it left. A loser's WHERE is false, so it locks
# and writes nothing (CASE, so that it does not even try the advisory lock). Commits durably: whoever hears of the grant
# relies on it. Waiters come first: the row says whether there may be some.
TAKE: Final = Statement(
    "take",
    """
UPDATE locks SET
    owner = :owner,
    fence = greatest(fence + 1, CAST(extract(epoch FROM clock_timestamp()) * 1000000 AS bigint)),
    count = 1,
    ttl = :ttl,
    acquired_at = clock_timestamp(),
    expires_at = clock_timestamp() + make_interval(secs => :life),
    label = :label,
    host = :host,
    pid = :pid,
    thread = :thread,
    program = :program,
    celery_task_id = :task
WHERE lock_key = :key
  AND CASE WHEN owner IS NULL OR expires_at <= clock_timestamp()
           THEN pg_try_advisory_xact_lock(hashtextextended(lock_key, CAST(CAST('locks' AS regclass) AS bigint)))
           ELSE false END
  AND (last_ticket = served_ticket OR CAST(:fair AS integer) = 0)
  AND set_config('lock_timeout', '20ms', true) IS NOT NULL
  AND (current_setting('synchronous_commit') <> 'off' OR set_config('synchronous_commit', 'on', true) IS NOT NULL)
RETURNING fence
""",
    Reply.ROWS,
)

# Safe: DO NOTHING neither locks nor writes when the key exists; and a pin outlasts the row that it was for. Durable, as
# the take. The row is missing, so the fence starts at the clock; it exceeds every fence of a deleted row, because that
# began before it was deleted.
CREATE: Final = Statement(
    "create",
    """
INSERT INTO locks (lock_key, owner, fence, count, ttl, acquired_at, expires_at,
                   label, host, pid, thread, program, celery_task_id)
SELECT CAST(:key AS text), :owner, CAST(extract(epoch FROM clock_timestamp()) * 1000000 AS bigint), 1, :ttl,
       clock_timestamp(), clock_timestamp() + make_interval(secs => :life),
       :label, :host, CAST(:pid AS integer), :thread, :program, :task
WHERE set_config('lock_timeout', '20ms', true) IS NOT NULL
  AND (current_setting('synchronous_commit') <> 'off' OR set_config('synchronous_commit', 'on', true) IS NOT NULL)
  AND pg_try_advisory_xact_lock(hashtextextended(CAST(:key AS text) COLLATE "C",
                                                 CAST(CAST('locks' AS regclass) AS bigint)))
ON CONFLICT (lock_key) DO NOTHING
RETURNING fence
""",
    Reply.ROWS,
)

# Safe: reads only.
INSPECT: Final = Statement(
    "inspect",
    """
SELECT owner, fence, count, ttl,
       CAST(extract(epoch FROM clock_timestamp() - acquired_at) AS double precision),
       CAST(extract(epoch FROM expires_at - clock_timestamp()) AS double precision),
       label, host, pid, thread, program, celery_task_id
FROM locks WHERE lock_key = :key
""",
    Reply.ROWS,
)

# Safe: names the tenure and sets the count that its flow keeps, so sending it twice is harmless. Durable: the longer
# lease is relied on.
REENTER: Final = Statement(
    "reenter",
    """
UPDATE locks SET
    count = CAST(:count AS integer) + 1,
    expires_at = greatest(expires_at, clock_timestamp() + make_interval(secs => :life))
WHERE lock_key = :key AND owner = :owner AND fence = :fence AND expires_at > clock_timestamp()
  AND set_config('lock_timeout', '20ms', true) IS NOT NULL
  AND (current_setting('synchronous_commit') <> 'off' OR set_config('synchronous_commit', 'on', true) IS NOT NULL)
""",
    Reply.COUNT,
    keeps=True,
)

# Safe: names the tenure; an ended lease is never revived, and sending it twice is harmless. Durable: the longer lease
# is relied on.
EXTEND: Final = Statement(
    "extend",
    """
UPDATE locks SET
    ttl = :ttl,
    expires_at = clock_timestamp() + make_interval(secs => :life)
WHERE lock_key = :key AND owner = :owner AND fence = :fence AND expires_at > clock_timestamp()
  AND set_config('lock_timeout', '20ms', true) IS NOT NULL
  AND (current_setting('synchronous_commit') <> 'off' OR set_config('synchronous_commit', 'on', true) IS NOT NULL)
""",
    Reply.COUNT,
    keeps=True,
)

# Safe: names the tenures, revives none and shortens none, so it may arrive late and twice. Its row locks last for the
# statement; nobody else's statement locks two rows, save another process's renewal of a tenure that both hold (40P01,
# which is tried again). Durable: the longer leases are
# relied on.
RENEW: Final = Statement(
    "renew",
    """
UPDATE locks SET expires_at = greatest(expires_at, clock_timestamp() + make_interval(secs => due.life))
FROM json_to_recordset(CAST(:leases AS json)) AS due (key text, owner text, fence bigint, life double precision)
WHERE lock_key = due.key AND locks.owner = due.owner AND locks.fence = due.fence AND expires_at > clock_timestamp()
  AND set_config('lock_timeout', '20ms', true) IS NOT NULL
  AND (current_setting('synchronous_commit') <> 'off' OR set_config('synchronous_commit', 'on', true) IS NOT NULL)
""",
    Reply.COUNT,
    keeps=True,
)

# Safe: reads only.
ALIVE: Final = Statement(
    "alive",
    """
SELECT lock_key, locks.owner, locks.fence
FROM json_to_recordset(CAST(:leases AS json)) AS due (key text, owner text, fence bigint, life double precision)
JOIN locks ON lock_key = due.key AND locks.owner = due.owner AND locks.fence = due.fence
WHERE expires_at > clock_timestamp()
""",
    Reply.ROWS,
    keeps=True,
)

# Safe: names the tenure and revives none. Counts from what the row says, so sending it twice may count twice: the key
# is then free later, at the end of the lease. Durable: the longer lease is relied on.
ATTACH: Final = Statement(
    "attach",
    """
UPDATE locks SET
    count = count + 1,
    expires_at = greatest(expires_at, clock_timestamp() + make_interval(secs => :life)),
    host = :host,
    pid = :pid,
    thread = :thread,
    program = :program,
    celery_task_id = :task
WHERE lock_key = :key AND owner = :owner AND fence = :fence AND expires_at > clock_timestamp()
  AND set_config('lock_timeout', '20ms', true) IS NOT NULL
  AND (current_setting('synchronous_commit') <> 'off' OR set_config('synchronous_commit', 'on', true) IS NOT NULL)
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
    count = CASE WHEN CAST(:count AS integer) > 0 THEN CAST(:count AS integer) ELSE count END - 1,
    expires_at = greatest(expires_at, clock_timestamp() + make_interval(secs => :life))
WHERE lock_key = :key AND owner = :owner AND fence = :fence AND expires_at > clock_timestamp()
  AND (CAST(:count AS integer) = 0
       OR (count <= CAST(:count AS integer) AND host = :host AND pid = :pid AND thread = :thread))
  AND set_config('lock_timeout', '20ms', true) IS NOT NULL
  AND (current_setting('synchronous_commit') <> 'off' OR set_config('synchronous_commit', 'on', true) IS NOT NULL)
""",
    Reply.COUNT,
    keeps=True,
)

# Safe: names the tenure and sets the count, so sending it twice is harmless. Commits asynchronously, for its own
# transaction only (set_config's third argument): if a crash loses it the key stays taken until expires_at, which is
# late, not wrong.
RELEASE: Final = Statement(
    "release",
    """
UPDATE locks SET
    owner = CASE WHEN CAST(:count AS integer) > 1 THEN owner END,
    expires_at = CASE WHEN CAST(:count AS integer) > 1 THEN expires_at ELSE clock_timestamp() END,
    count = CAST(:count AS integer) - 1
WHERE lock_key = :key AND owner = :owner AND fence = :fence
  AND set_config('lock_timeout', '20ms', true) IS NOT NULL
  AND set_config('synchronous_commit', 'off', true) IS NOT NULL
RETURNING CASE WHEN owner IS NULL AND last_ticket > served_ticket THEN served_ticket + 1 ELSE 0 END
""",
    Reply.ROWS,
    keeps=True,
)

# Safe: names the tenure. Counts from what the row says, so it is sent twice only where nobody else counts. An owner
# that is nobody's keeps the key closed for the rest of `min_hold`. Asynchronous, as the release.
LEAVE: Final = Statement(
    "leave",
    """
UPDATE locks SET
    owner = CASE WHEN count > 1 THEN owner
                 WHEN acquired_at + make_interval(secs => :min_hold) > clock_timestamp() THEN '' END,
    expires_at = CASE WHEN count > 1 THEN expires_at
                      ELSE greatest(clock_timestamp(), acquired_at + make_interval(secs => :min_hold)) END,
    count = greatest(count - 1, 0)
WHERE lock_key = :key AND owner = :owner AND fence = :fence
  AND set_config('lock_timeout', '20ms', true) IS NOT NULL
  AND set_config('synchronous_commit', 'off', true) IS NOT NULL
RETURNING CASE WHEN owner IS NULL AND last_ticket > served_ticket THEN served_ticket + 1 ELSE 0 END
""",
    Reply.ROWS,
    keeps=True,
)

# Runs in the caller's transaction, which it lasts as long as. Safe: no take can begin a tenure until then; one that is
# under way is waited for, and the look at the row that follows sees what it did. A snapshot that shows the tenure also
# shows what was committed under earlier pins, since the take needed them gone; one that does not is older. (Under
# SERIALIZABLE that is a read like any other: where the server makes every transaction serializable, the lock's own
# included, a renewal counts among the conflicts.)
PIN: Final = Statement(
    "pin",
    """
SELECT EXISTS (SELECT 1 FROM locks WHERE lock_key = :key AND fence = :fence)
FROM pg_advisory_xact_lock_shared(hashtextextended(CAST(:key AS text) COLLATE "C",
                                                   CAST(CAST('locks' AS regclass) AS bigint)))
""",
    Reply.ROWS,
)

# Safe: reads only.
LOCATE: Final = Statement(
    "locate",
    """
SELECT nspname, 0
FROM pg_class JOIN pg_namespace ON pg_namespace.oid = relnamespace
WHERE pg_class.oid = CAST('locks' AS regclass)
""",
    Reply.ROWS,
)

# Safe: reads only. `expires_at` of a free row is when it was released.
STALE: Final = Statement(
    "stale",
    """
SELECT lock_key FROM locks
WHERE expires_at < clock_timestamp() - make_interval(secs => :retention)
ORDER BY lock_key LIMIT 1000
""",
    Reply.ROWS,
)

# Safe: one row, by primary key, and only if it is still stale: a take in between has moved expires_at. Asynchronous: a
# lost deletion leaves a row for longer.
REAP: Final = Statement(
    "reap",
    """
DELETE FROM locks
WHERE lock_key = :key AND expires_at < clock_timestamp() - make_interval(secs => :retention)
  AND set_config('lock_timeout', '20ms', true) IS NOT NULL
  AND set_config('synchronous_commit', 'off', true) IS NOT NULL
  AND NOT EXISTS (SELECT 1 FROM lock_waiters AS waiter
                  WHERE waiter.lock_key = :key AND waiter.expires_at > clock_timestamp())
""",
    Reply.COUNT,
)

DDL: Final = """\
CREATE TABLE locks (
    lock_key varchar(255) COLLATE "C" NOT NULL PRIMARY KEY,
    owner varchar(64) COLLATE "C",
    fence bigint NOT NULL,
    count integer NOT NULL,
    ttl double precision NOT NULL,
    acquired_at timestamp with time zone NOT NULL,
    expires_at timestamp with time zone NOT NULL,
    label varchar(255) COLLATE "C" NOT NULL,
    host varchar(255) COLLATE "C" NOT NULL,
    pid integer NOT NULL,
    thread varchar(255) COLLATE "C" NOT NULL,
    program varchar(255) COLLATE "C" NOT NULL,
    celery_task_id varchar(255) COLLATE "C" NOT NULL,
    last_ticket bigint DEFAULT 0 NOT NULL,
    served_ticket bigint DEFAULT 0 NOT NULL
) WITH (fillfactor = 50);
CREATE UNIQUE INDEX locks_pin ON locks (lock_key);
"""

_MEANINGS: Final = {
    # Serialization failure, deadlock; a prepared statement that a pooler gave to somebody else; cancelled, by
    # statement_timeout or somebody who cancels what takes long.
    **dict.fromkeys(("40001", "40P01", "26000", "42P05", "57014"), Failure.CONFLICT),
    "55P03": Failure.BUSY,  # lock_timeout
    "25006": Failure.READ_ONLY,
    "42P01": Failure.NO_TABLE,
    "42703": Failure.OTHER_TABLE,
}
# Connection exceptions; the server ends sessions, one that is idle or one that takes long.
_LOST = ("08", "57P", "25P03", "25P04")
_CLIENT_LOST = frozenset(
    {"OperationalError", "InterfaceError", "DatabaseError", "InternalError", "InternalClientError"}
)


def classify(error: BaseException) -> Failure:
    """By SQLSTATE (PostgreSQL manual, appendix A), which every driver reports in its own attribute."""
    state = getattr(error, "sqlstate", None) or getattr(error, "pgcode", None)
    if state in _MEANINGS:
        return _MEANINGS[state]
    if isinstance(error, OSError):
        return Failure.LOST
    if state is None:  # raised by the client itself: the connection is gone, or the call was wrong
        return Failure.LOST if type(error).__name__ in _CLIENT_LOST else Failure.OTHER
    return Failure.LOST if state.startswith(_LOST) else Failure.OTHER


DIALECT: Final = Dialect(
    name="postgresql",
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
    locate=LOCATE,
    stale=STALE,
    reap=REAP,
    tick=0.0,
    classify=classify,
    ddl=DDL + QUEUE.ddl,
    queue=QUEUE,
)
