"""The queue's statements for SQLite; see `dblock.core.statements.sqlite` for clock and commits.

One statement writes at a time and sees all that was written before it.
"""

from __future__ import annotations

from typing import Final

from dblock.core.statements.base import Queue, Reply, Statement

# Safe: a row of its own.
JOIN: Final = Statement(
    "join",
    """
INSERT INTO lock_waiters (owner, lock_key, ticket, ttl, label, host, pid, thread, program, celery_task_id, channel,
                          joined_at, expires_at)
SELECT :owner, lock_key,
       max(last_ticket + 1, CAST(strftime('%s', 'now') AS integer) * 1000000
                            + CAST(substr(strftime('%f', 'now'), 4) AS integer) * 1000,
           (SELECT coalesce(max(ticket) + 1, 0) FROM lock_waiters WHERE lock_waiters.lock_key = :key)),
       :ttl, :label, :host, :pid, :thread, :program, :task, :channel,
       strftime('%Y-%m-%d %H:%M:%f000', 'now'),
       strftime('%Y-%m-%d %H:%M:%f000', 'now', printf('+%.3f seconds', :place))
FROM locks WHERE lock_key = :key
RETURNING ticket
""",
    Reply.ROWS,
)

# Safe: only upwards, and not once the ticket has been passed over.
ANNOUNCE: Final = Statement(
    "announce",
    """
UPDATE locks SET last_ticket = max(last_ticket, :ticket) WHERE lock_key = :key AND served_ticket < :ticket
""",
    Reply.COUNT,
)

# Safe: reads only.
QUEUE_STATUS: Final = Statement(
    "queue_status",
    """
SELECT CASE WHEN locks.owner = :owner THEN 1 ELSE 0 END,
       CASE WHEN locks.owner IS NOT NULL AND expires_at > strftime('%Y-%m-%d %H:%M:%f000', 'now')
            THEN max(0.001, round((julianday(expires_at) - julianday('now')) * 86400.0, 3))
            ELSE min(0.0, round((julianday(expires_at) - julianday('now')) * 86400.0, 3)) END,
       served_ticket + 1,
       last_ticket,
       (SELECT count(*) FROM (
            SELECT 1 FROM lock_waiters AS other
            WHERE other.lock_key = :key AND other.ticket > served_ticket AND other.ticket < :ticket
              AND other.expires_at > strftime('%Y-%m-%d %H:%M:%f000', 'now')
            LIMIT 16)),
       (SELECT count(*) FROM lock_waiters AS me WHERE me.owner = :owner)
FROM locks WHERE lock_key = :key
""",
    Reply.ROWS,
)

# Safe: as the take, for somebody else: only if nobody's lease is alive on the key but the one that is being given back.
# The lease ends with the waiter's place, and is no longer than the waiter asked for: `accept` makes it whole.
GRANT: Final = Statement(
    "grant",
    """
UPDATE locks SET
    owner = next.owner,
    fence = max(fence + 1, CAST(strftime('%s', 'now') AS integer) * 1000000
                           + CAST(substr(strftime('%f', 'now'), 4) AS integer) * 1000),
    count = 1,
    ttl = next.ttl,
    acquired_at = strftime('%Y-%m-%d %H:%M:%f000', 'now'),
    expires_at = min(next.expires_at, strftime('%Y-%m-%d %H:%M:%f000', 'now', printf('+%.3f seconds', next.ttl))),
    label = next.label,
    host = next.host,
    pid = next.pid,
    thread = next.thread,
    program = next.program,
    celery_task_id = next.celery_task_id,
    last_ticket = max(last_ticket, next.ticket),
    served_ticket = next.ticket
FROM (
    SELECT * FROM lock_waiters
    WHERE lock_key = :key AND ticket >= :first AND expires_at > strftime('%Y-%m-%d %H:%M:%f000', 'now')
    ORDER BY ticket LIMIT 1
) AS next
WHERE locks.lock_key = :key AND served_ticket < next.ticket
  AND (locks.owner IS NULL OR locks.expires_at <= strftime('%Y-%m-%d %H:%M:%f000', 'now')
       OR (locks.owner = :owner AND locks.fence = :fence))
RETURNING served_ticket, (SELECT channel FROM lock_waiters WHERE lock_waiters.owner = locks.owner)
""",
    Reply.ROWS,
    keeps=True,
)

# Safe: reads only.
CHANNEL: Final = Statement(
    "channel",
    """
SELECT ticket, channel FROM lock_waiters
WHERE lock_key = :key AND ticket >= :ticket AND expires_at > strftime('%Y-%m-%d %H:%M:%f000', 'now')
ORDER BY ticket LIMIT 1
""",
    Reply.ROWS,
)

# Safe: names the owner, whose token is of this place in the queue alone, and shortens nothing, so it may arrive late.
ACCEPT: Final = Statement(
    "accept",
    """
UPDATE locks SET
    expires_at = max(expires_at, strftime('%Y-%m-%d %H:%M:%f000', 'now', printf('+%.3f seconds', :life)))
WHERE lock_key = :key AND owner = :owner AND expires_at > strftime('%Y-%m-%d %H:%M:%f000', 'now')
RETURNING fence
""",
    Reply.ROWS,
    keeps=True,
)

# Safe: as a release and a take in one, which names the tenure that it ends, so it may arrive late, and begins one that
# only this process can tell of. Durable: the lease is relied on.
HAND_OVER_LOCAL: Final = Statement(
    "hand_over_local",
    """
UPDATE locks SET
    owner = :heir,
    fence = max(fence + 1, CAST(strftime('%s', 'now') AS integer) * 1000000
                           + CAST(substr(strftime('%f', 'now'), 4) AS integer) * 1000),
    ttl = :ttl,
    acquired_at = strftime('%Y-%m-%d %H:%M:%f000', 'now'),
    expires_at = strftime('%Y-%m-%d %H:%M:%f000', 'now', printf('+%.3f seconds', :life)),
    label = :label,
    host = :host,
    pid = :pid,
    thread = :thread,
    program = :program,
    celery_task_id = :task
WHERE lock_key = :key AND owner = :owner AND fence = :fence AND count = 1
  AND expires_at > strftime('%Y-%m-%d %H:%M:%f000', 'now')
  AND (last_ticket = served_ticket OR :turns > 0)
RETURNING fence
""",
    Reply.ROWS,
    keeps=True,
)

# Safe: one row, by primary key, which is the waiter's own.
LEAVE_QUEUE: Final = Statement("leave_queue", "DELETE FROM lock_waiters WHERE owner = :owner", Reply.COUNT, keeps=True)

# Safe: shortens nothing, so it may arrive late and twice.
HEARTBEAT: Final = Statement(
    "heartbeat",
    """
UPDATE lock_waiters SET
    expires_at = max(expires_at, strftime('%Y-%m-%d %H:%M:%f000', 'now', printf('+%.3f seconds', :place)))
WHERE owner IN (SELECT value FROM json_each(:owners))
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
WHERE waiter.expires_at > strftime('%Y-%m-%d %H:%M:%f000', 'now')
  AND held.expires_at > strftime('%Y-%m-%d %H:%M:%f000', 'now')
  AND held.owner IS NOT NULL AND held.owner <> waiter.owner AND held.count > 0
""",
    Reply.ROWS,
)

# Safe: only if nobody came since `last` was read.
CLEAR: Final = Statement(
    "clear",
    """
UPDATE locks SET served_ticket = last_ticket
WHERE lock_key = :key AND last_ticket = :last AND served_ticket < last_ticket
  AND NOT EXISTS (SELECT 1 FROM lock_waiters AS other
                  WHERE other.lock_key = :key AND other.ticket > served_ticket
                    AND other.expires_at > strftime('%Y-%m-%d %H:%M:%f000', 'now'))
""",
    Reply.COUNT,
)

# Safe: reads only.
DEAD: Final = Statement(
    "dead",
    """
SELECT owner FROM lock_waiters
WHERE expires_at < strftime('%Y-%m-%d %H:%M:%f000', 'now', printf('-%.3f seconds', :retention))
ORDER BY owner LIMIT 1000
""",
    Reply.ROWS,
)

# Safe: one row, by primary key, and only if it is still dead; one that wakes up after so long stands in the queue anew.
FORGET: Final = Statement(
    "forget",
    """
DELETE FROM lock_waiters
WHERE owner = :owner AND expires_at < strftime('%Y-%m-%d %H:%M:%f000', 'now', printf('-%.3f seconds', :retention))
""",
    Reply.COUNT,
)

DDL: Final = """\
CREATE TABLE lock_waiters (
    owner varchar(64) NOT NULL PRIMARY KEY,
    lock_key varchar(255) NOT NULL,
    ticket bigint NOT NULL,
    ttl real NOT NULL,
    label varchar(255) NOT NULL,
    host varchar(255) NOT NULL,
    pid integer NOT NULL,
    thread varchar(255) NOT NULL,
    program varchar(255) NOT NULL,
    celery_task_id varchar(255) NOT NULL,
    channel varchar(63) NOT NULL,
    joined_at datetime NOT NULL,
    expires_at datetime NOT NULL
);
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
    call=None,
    leaves=False,
    heartbeat=HEARTBEAT,
    waits=WAITS,
    clear=CLEAR,
    dead=DEAD,
    forget=FORGET,
    ddl=DDL,
)
