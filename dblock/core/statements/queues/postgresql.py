"""The queue's statements for PostgreSQL; see `dblock.core.statements.postgresql` for clock and durability.

None but `accept` has to be durable: a crash that loses another one loses a place in the queue, or leaves the key with
its last holder until that one's lease ends. The flush of `accept` makes the grant before it durable too.

Order of row locks, so that no two can deadlock: a waiter's row first, then the key's row. `join` inserts a row that
nobody else sees yet.
"""

from __future__ import annotations

from typing import Final

from dblock.core.statements.base import Queue, Reply, Statement

# Safe: the ticket is drawn under the lock on the key's row, so a later ticket is a later place, and both become visible
# at once. A release that was waiting for that lock sees the new `last_ticket`, though not yet the waiter, and looks
# again. For the same reason the waiter need not look: if the key is held now, its release will see the ticket. (Those
# before it are counted as of the beginning: some may be missed, and it looks sooner than need be.)
JOIN: Final = Statement(
    "join",
    """
WITH announced AS (
    UPDATE locks SET
        last_ticket = greatest(last_ticket + 1, CAST(extract(epoch FROM clock_timestamp()) * 1000000 AS bigint))
    WHERE lock_key = :key AND set_config('synchronous_commit', 'off', true) IS NOT NULL
      AND set_config('lock_timeout', '20ms', true) IS NOT NULL
    RETURNING last_ticket, served_ticket,
              CASE WHEN owner IS NULL THEN least(expires_at, clock_timestamp()) ELSE expires_at END AS held_until
), joined AS (
INSERT INTO lock_waiters (owner, lock_key, ticket, ttl, label, host, pid, thread, program, celery_task_id, channel,
                          joined_at, expires_at)
SELECT :owner, :key, last_ticket, :ttl, :label, :host, CAST(:pid AS integer), :thread, :program, :task, :channel,
       clock_timestamp(), clock_timestamp() + make_interval(secs => :place)
FROM announced
RETURNING ticket
)
SELECT ticket,
       CAST(extract(epoch FROM held_until - clock_timestamp()) AS double precision),
       served_ticket + 1,
       (SELECT count(*) FROM (
            SELECT 1 FROM lock_waiters AS other
            WHERE other.lock_key = :key AND other.ticket > served_ticket AND other.expires_at > clock_timestamp()
            LIMIT 16) AS before)
FROM joined, announced
""",
    Reply.ROWS,
)

# Safe: only upwards, and not once the ticket has been passed over.
ANNOUNCE: Final = Statement(
    "announce",
    """
UPDATE locks SET last_ticket = greatest(last_ticket, CAST(:ticket AS bigint))
WHERE lock_key = :key AND served_ticket < CAST(:ticket AS bigint)
  AND set_config('synchronous_commit', 'off', true) IS NOT NULL
  AND set_config('lock_timeout', '20ms', true) IS NOT NULL
""",
    Reply.COUNT,
)

# Safe: reads only.
QUEUE_STATUS: Final = Statement(
    "queue_status",
    """
SELECT CASE WHEN locks.owner = :owner THEN 1 ELSE 0 END,
       CAST(extract(epoch FROM CASE WHEN locks.owner IS NULL THEN least(locks.expires_at, clock_timestamp())
                                    ELSE locks.expires_at END - clock_timestamp()) AS double precision),
       served_ticket + 1,
       last_ticket,
       (SELECT count(*) FROM (
            SELECT 1 FROM lock_waiters AS other
            WHERE other.lock_key = :key AND other.ticket > served_ticket AND other.ticket < CAST(:ticket AS bigint)
              AND other.expires_at > clock_timestamp()
            LIMIT 16) AS before),
       (SELECT count(*) FROM lock_waiters AS me WHERE me.owner = :owner)
FROM locks WHERE lock_key = :key
""",
    Reply.ROWS,
)

# Safe: as the take, for somebody else: only if nobody's lease is alive on the key but the one that is being given back,
# and no transaction pins it. The waiter's row is locked first: one that is leaving is passed over, and one that wants
# to leave waits and then finds its tenure. The lease ends with the waiter's place, and is no longer than the waiter
# asked for: `accept` makes it whole.
GRANT: Final = Statement(
    "grant",
    """
WITH next AS MATERIALIZED (
    SELECT owner, ticket, ttl, label, host, pid, thread, program, celery_task_id, channel, expires_at
    FROM lock_waiters
    WHERE lock_key = :key AND ticket >= CAST(:first AS bigint) AND expires_at > clock_timestamp()
      AND set_config('lock_timeout', '20ms', true) IS NOT NULL
    ORDER BY ticket LIMIT 1 FOR UPDATE
), granted AS (
    UPDATE locks SET
        owner = next.owner,
        fence = greatest(locks.fence + 1, CAST(extract(epoch FROM clock_timestamp()) * 1000000 AS bigint)),
        count = 1,
        ttl = next.ttl,
        acquired_at = clock_timestamp(),
        expires_at = least(next.expires_at, clock_timestamp() + make_interval(secs => next.ttl)),
        label = next.label,
        host = next.host,
        pid = next.pid,
        thread = next.thread,
        program = next.program,
        celery_task_id = next.celery_task_id,
        last_ticket = greatest(last_ticket, next.ticket),
        served_ticket = next.ticket
    FROM next
    WHERE locks.lock_key = :key AND served_ticket < next.ticket
      AND CASE WHEN locks.owner IS NULL OR locks.expires_at <= clock_timestamp()
                    OR (locks.owner = :owner AND locks.fence = CAST(:fence AS bigint))
               THEN pg_try_advisory_xact_lock(hashtextextended(locks.lock_key,
                                                               CAST(CAST('locks' AS regclass) AS bigint)))
               ELSE false END
      AND set_config('synchronous_commit', 'off', true) IS NOT NULL
    RETURNING next.ticket, next.channel
)
SELECT ticket, channel, CASE WHEN channel <> '' AND left(channel, length(:here)) <> :here
                             THEN CAST(pg_notify(channel, ticket || ' ' || CAST(:key AS text)) AS text) END
FROM granted
""",
    Reply.ROWS,
    keeps=True,
)

# Safe: reads only.
CHANNEL: Final = Statement(
    "channel",
    """
SELECT ticket, channel FROM lock_waiters
WHERE lock_key = :key AND ticket >= CAST(:ticket AS bigint) AND expires_at > clock_timestamp()
ORDER BY ticket LIMIT 1
""",
    Reply.ROWS,
)

# Safe: changes nothing.
CALL: Final = Statement(
    "call",
    "SELECT CAST(pg_notify(:channel, CAST(:ticket AS text) || ' ' || CAST(:key AS text)) AS text)",
    Reply.ROWS,
)

# Safe: names the owner, whose token is of this place in the queue alone, and shortens nothing, so it may arrive late.
# Durable: the lease is relied on.
ACCEPT: Final = Statement(
    "accept",
    """
WITH mine AS MATERIALIZED (
    SELECT owner FROM lock_waiters
    WHERE owner = :owner AND set_config('lock_timeout', '20ms', true) IS NOT NULL FOR UPDATE
), accepted AS (
    UPDATE locks SET expires_at = greatest(expires_at, clock_timestamp() + make_interval(secs => :life))
    WHERE lock_key = :key AND owner = :owner AND expires_at > clock_timestamp()
      AND set_config('lock_timeout', '20ms', true) IS NOT NULL AND (SELECT count(*) FROM mine) >= 0
      AND (current_setting('synchronous_commit') <> 'off' OR set_config('synchronous_commit', 'on', true) IS NOT NULL)
    RETURNING fence
), gone AS (
    DELETE FROM lock_waiters WHERE owner = :owner AND EXISTS (SELECT 1 FROM accepted)
)
SELECT fence FROM accepted
""",
    Reply.ROWS,
    keeps=True,
)

# Safe: as a release and a take in one, which names the tenure that it ends, so it may arrive late, and begins one that
# only this process can tell of. Not while a transaction pins the key. Durable: the lease is relied on.
HAND_OVER_LOCAL: Final = Statement(
    "hand_over_local",
    """
UPDATE locks SET
    owner = :heir,
    fence = greatest(fence + 1, CAST(extract(epoch FROM clock_timestamp()) * 1000000 AS bigint)),
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
  AND CASE WHEN owner = :owner AND fence = CAST(:fence AS bigint) AND count = 1 AND expires_at > clock_timestamp()
           THEN pg_try_advisory_xact_lock(hashtextextended(lock_key, CAST(CAST('locks' AS regclass) AS bigint)))
           ELSE false END
  AND (last_ticket = served_ticket OR CAST(:turns AS integer) > 0)
  AND set_config('lock_timeout', '20ms', true) IS NOT NULL
  AND (current_setting('synchronous_commit') <> 'off' OR set_config('synchronous_commit', 'on', true) IS NOT NULL)
RETURNING fence
""",
    Reply.ROWS,
    keeps=True,
)

# Safe: one row, by primary key, which is the waiter's own. A grant that has locked it is waited for.
LEAVE_QUEUE: Final = Statement(
    "leave_queue",
    """
DELETE FROM lock_waiters WHERE owner = :owner AND set_config('synchronous_commit', 'off', true) IS NOT NULL
  AND set_config('lock_timeout', '20ms', true) IS NOT NULL
""",
    Reply.COUNT,
    keeps=True,
)

# Safe: shortens nothing, so it may arrive late and twice.
HEARTBEAT: Final = Statement(
    "heartbeat",
    """
UPDATE lock_waiters SET expires_at = greatest(expires_at, clock_timestamp() + make_interval(secs => :place))
FROM json_array_elements_text(CAST(:owners AS json)) AS due (holder)
WHERE owner = due.holder AND set_config('synchronous_commit', 'off', true) IS NOT NULL
  AND set_config('lock_timeout', '20ms', true) IS NOT NULL
""",
    Reply.COUNT,
    keeps=True,
)

# Safe: reads only, and all of it as of one moment.
WAITS: Final = Statement(
    "waits",
    """
SELECT waiter.owner, waiter.lock_key, waiter.ticket, waiter.host, waiter.pid, waiter.thread,
       held.owner, held.host, held.pid, held.thread
FROM lock_waiters AS waiter JOIN locks AS held ON held.lock_key = waiter.lock_key
WHERE waiter.expires_at > clock_timestamp() AND held.expires_at > clock_timestamp()
  AND held.owner IS NOT NULL AND held.owner <> waiter.owner AND held.count > 0
""",
    Reply.ROWS,
)

# Safe: every ticket up to `last` was visible when this began, since it had been read; a later one changes the row's
# `last_ticket`, and the condition is then false, also for an update that had to wait.
CLEAR: Final = Statement(
    "clear",
    """
UPDATE locks SET served_ticket = last_ticket
WHERE lock_key = :key AND last_ticket = CAST(:last AS bigint) AND served_ticket < last_ticket
  AND NOT EXISTS (SELECT 1 FROM lock_waiters AS other
                  WHERE other.lock_key = :key AND other.ticket > served_ticket
                    AND other.expires_at > clock_timestamp())
  AND set_config('synchronous_commit', 'off', true) IS NOT NULL
  AND set_config('lock_timeout', '20ms', true) IS NOT NULL
""",
    Reply.COUNT,
)

# Safe: reads only.
DEAD: Final = Statement(
    "dead",
    """
SELECT owner FROM lock_waiters
WHERE expires_at < clock_timestamp() - make_interval(secs => :retention)
ORDER BY owner LIMIT 1000
""",
    Reply.ROWS,
)

# Safe: one row, by primary key, and only if it is still dead; one that wakes up after so long stands in the queue anew.
FORGET: Final = Statement(
    "forget",
    """
DELETE FROM lock_waiters
WHERE owner = :owner AND expires_at < clock_timestamp() - make_interval(secs => :retention)
  AND set_config('synchronous_commit', 'off', true) IS NOT NULL
  AND set_config('lock_timeout', '20ms', true) IS NOT NULL
""",
    Reply.COUNT,
)

DDL: Final = """\
CREATE TABLE lock_waiters (
    owner varchar(64) COLLATE "C" NOT NULL PRIMARY KEY,
    lock_key varchar(255) COLLATE "C" NOT NULL,
    ticket bigint NOT NULL,
    ttl double precision NOT NULL,
    label varchar(255) COLLATE "C" NOT NULL,
    host varchar(255) COLLATE "C" NOT NULL,
    pid integer NOT NULL,
    thread varchar(255) COLLATE "C" NOT NULL,
    program varchar(255) COLLATE "C" NOT NULL,
    celery_task_id varchar(255) COLLATE "C" NOT NULL,
    channel varchar(63) COLLATE "C" NOT NULL,
    joined_at timestamp with time zone NOT NULL,
    expires_at timestamp with time zone NOT NULL
) WITH (fillfactor = 50);
CREATE UNIQUE INDEX lock_waiters_queue ON lock_waiters (lock_key, ticket);
"""

QUEUE: Final = Queue(
    join=JOIN,
    announce=ANNOUNCE,
    queue_status=QUEUE_STATUS,
    grant=GRANT,
    accept=ACCEPT,
    hand_over_local=HAND_OVER_LOCAL,
    leave_queue=LEAVE_QUEUE,
    channel=CHANNEL,
    call=CALL,
    leaves=True,
    heartbeat=HEARTBEAT,
    waits=WAITS,
    clear=CLEAR,
    dead=DEAD,
    forget=FORGET,
    ddl=DDL,
)
