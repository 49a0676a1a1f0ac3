"""The queue's statements for MySQL and MariaDB; see `dblock.core.statements.mysql` for clock and row locks.

No statement changes two rows here, so standing in the queue takes two: the waiter's row first, then the number on the
key's row, so that whoever sees the number sees the waiter. In between, the place may already be served.
"""

from __future__ import annotations

from typing import Final

from dblock.core.statements.base import Queue, Reply, Statement

# Safe: a row of its own. Two that join in the same microsecond may draw one ticket: the later gets 1062 and tries
# anew.
JOIN: Final = Statement(
    "join",
    """
/*M! SET STATEMENT innodb_lock_wait_timeout = 0, lock_wait_timeout = 0 FOR */
INSERT INTO lock_waiters (owner, lock_key, ticket, ttl, label, host, pid, thread, program, celery_task_id, channel,
                          joined_at, expires_at)
SELECT :owner, lock_key,
       LAST_INSERT_ID(GREATEST(last_ticket + 1, TIMESTAMPDIFF(MICROSECOND, '1970-01-01', UTC_TIMESTAMP(6)))),
       :ttl, :label, :host, :pid, :thread, :program, :task, :channel,
       UTC_TIMESTAMP(6), UTC_TIMESTAMP(6) + INTERVAL ROUND(:place * 1000000) MICROSECOND
FROM locks WHERE lock_key = :key /*!80017 FOR SHARE NOWAIT */
""",
    Reply.NUMBER,
)

# Safe: only upwards, and not once the ticket has been passed over.
ANNOUNCE: Final = Statement(
    "announce",
    """
/*M! SET STATEMENT innodb_lock_wait_timeout = 0, lock_wait_timeout = 0 FOR */
UPDATE /*!80017 (SELECT lock_key AS name FROM locks FORCE INDEX (PRIMARY) WHERE lock_key = :key LIMIT 1
                 FOR UPDATE NOWAIT) AS mine STRAIGHT_JOIN */
    locks FORCE INDEX (PRIMARY) /*!80017 ON locks.lock_key = mine.name */ SET
    last_ticket = GREATEST(last_ticket, :ticket)
WHERE lock_key = :key AND served_ticket < :ticket
""",
    Reply.COUNT,
)

# Safe: reads only, without locks.
QUEUE_STATUS: Final = Statement(
    "queue_status",
    """
SELECT CASE WHEN locks.owner = :owner THEN 1 ELSE 0 END,
       TIMESTAMPDIFF(MICROSECOND, UTC_TIMESTAMP(6),
                     CASE WHEN locks.owner IS NULL THEN LEAST(locks.expires_at, UTC_TIMESTAMP(6))
                          ELSE locks.expires_at END) / 1e6,
       served_ticket + 1,
       last_ticket,
       (SELECT COUNT(*) FROM (
            SELECT 1 FROM lock_waiters AS other JOIN locks AS theirs ON theirs.lock_key = other.lock_key
            WHERE other.lock_key = :key AND other.ticket > theirs.served_ticket AND other.ticket < :ticket
              AND other.expires_at > UTC_TIMESTAMP(6)
            LIMIT 16) AS earlier),
       (SELECT COUNT(*) FROM lock_waiters AS me WHERE me.owner = :owner)
FROM locks WHERE locks.lock_key = :key
""",
    Reply.ROWS,
)

# Safe: as the take, for somebody else: only if nobody's lease is alive on the key but the one that is being given back,
# and no transaction pins it. The waiter's row is locked first: one that is leaving is passed over, and one that wants
# to leave waits and then finds its tenure. Nothing is waited for while that lock is held. The lease ends with the
# waiter's place, and is no longer than the waiter asked for: `accept` makes it whole.
GRANT: Final = Statement(
    "grant",
    """
/*M! SET STATEMENT innodb_lock_wait_timeout = 0, lock_wait_timeout = 0 FOR */
UPDATE (
    SELECT owner AS heir, ticket, ttl AS life, label AS note, host AS place, pid AS process, thread AS strand,
           program AS command, celery_task_id AS task, expires_at AS until
    FROM lock_waiters FORCE INDEX (lock_waiters_queue)
    WHERE lock_key = :key AND ticket >= :first AND expires_at > UTC_TIMESTAMP(6)
    ORDER BY ticket LIMIT 1 /*M! LOCK IN SHARE MODE */ /*!80017 FOR SHARE NOWAIT */
) AS next
/*!80017 STRAIGHT_JOIN (SELECT lock_key AS name FROM locks FORCE INDEX (locks_pin) WHERE lock_key = :key LIMIT 1
                        FOR UPDATE NOWAIT) AS mine */
STRAIGHT_JOIN locks FORCE INDEX (locks_pin)
    ON locks.lock_key = :key AND locks.served_ticket < next.ticket
       AND (locks.owner IS NULL OR locks.expires_at <= UTC_TIMESTAMP(6)
            OR (locks.owner = :owner AND locks.fence = :fence))
SET locks.owner = next.heir,
    locks.fence = GREATEST(locks.fence + 1, TIMESTAMPDIFF(MICROSECOND, '1970-01-01', UTC_TIMESTAMP(6))),
    locks.count = 1,
    locks.ttl = next.life,
    locks.acquired_at = UTC_TIMESTAMP(6),
    locks.expires_at = LEAST(next.until, UTC_TIMESTAMP(6) + INTERVAL ROUND(next.life * 1000000) MICROSECOND),
    locks.label = next.note,
    locks.host = next.place,
    locks.pid = next.process,
    locks.thread = next.strand,
    locks.program = next.command,
    locks.celery_task_id = next.task,
    locks.last_ticket = GREATEST(locks.last_ticket, next.ticket),
    locks.served_ticket = LAST_INSERT_ID(next.ticket)
""",
    Reply.NUMBER,
    keeps=True,
)

# Safe: reads only, without locks.
CHANNEL: Final = Statement(
    "channel",
    """
SELECT ticket, channel FROM lock_waiters FORCE INDEX (lock_waiters_queue)
WHERE lock_key = :key AND ticket >= :ticket AND expires_at > UTC_TIMESTAMP(6)
ORDER BY ticket LIMIT 1
""",
    Reply.ROWS,
)

# Safe: names the owner, whose token is of this place in the queue alone, and shortens nothing, so it may arrive late.
# Durable: the lease is relied on.
ACCEPT: Final = Statement(
    "accept",
    """
/*M! SET STATEMENT innodb_lock_wait_timeout = 0, lock_wait_timeout = 0 FOR */
UPDATE /*!80017 (SELECT lock_key AS name FROM locks FORCE INDEX (PRIMARY) WHERE lock_key = :key LIMIT 1
                 FOR UPDATE NOWAIT) AS mine STRAIGHT_JOIN */
    locks FORCE INDEX (PRIMARY) /*!80017 ON locks.lock_key = mine.name */ SET
    fence = LAST_INSERT_ID(fence),
    expires_at = GREATEST(expires_at, UTC_TIMESTAMP(6) + INTERVAL ROUND(:life * 1000000) MICROSECOND)
WHERE lock_key = :key AND owner = :owner AND expires_at > UTC_TIMESTAMP(6)
""",
    Reply.NUMBER,
    keeps=True,
)

# Safe: as a release and a take in one, which names the tenure that it ends, so it may arrive late, and begins one that
# only this process can tell of. Not while a transaction pins the key. Durable: the lease is relied on.
HAND_OVER_LOCAL: Final = Statement(
    "hand_over_local",
    """
/*M! SET STATEMENT innodb_lock_wait_timeout = 0, lock_wait_timeout = 0 FOR */
UPDATE /*!80017 (SELECT lock_key AS name FROM locks FORCE INDEX (locks_pin) WHERE lock_key = :key LIMIT 1
                 FOR UPDATE NOWAIT) AS mine STRAIGHT_JOIN */
    locks FORCE INDEX (locks_pin) /*!80017 ON locks.lock_key = mine.name */ SET
    owner = :heir,
    fence = LAST_INSERT_ID(GREATEST(fence + 1, TIMESTAMPDIFF(MICROSECOND, '1970-01-01', UTC_TIMESTAMP(6)))),
    ttl = :ttl,
    acquired_at = UTC_TIMESTAMP(6),
    expires_at = UTC_TIMESTAMP(6) + INTERVAL ROUND(:life * 1000000) MICROSECOND,
    label = :label,
    host = :host,
    pid = :pid,
    thread = :thread,
    program = :program,
    celery_task_id = :task
WHERE lock_key = :key AND owner = :owner AND fence = :fence AND count = 1 AND expires_at > UTC_TIMESTAMP(6)
  AND (last_ticket = served_ticket OR :turns > 0)
""",
    Reply.NUMBER,
    keeps=True,
)

# Safe: one row, by primary key, which is the waiter's own. A grant that has locked it is waited for.
LEAVE_QUEUE: Final = Statement(
    "leave_queue",
    """
/*M! SET STATEMENT innodb_lock_wait_timeout = 0, lock_wait_timeout = 0 FOR */
DELETE FROM lock_waiters WHERE owner = :owner
""",
    Reply.COUNT,
    keeps=True,
)

# Safe: shortens nothing, so it may arrive late and twice. One row for each waiter, by primary key.
HEARTBEAT: Final = Statement(
    "heartbeat",
    """
/*M! SET STATEMENT innodb_lock_wait_timeout = 0, lock_wait_timeout = 0 FOR */
UPDATE JSON_TABLE(:owners, '$[*]' COLUMNS (
    holder varchar(64) CHARACTER SET utf8mb4
        /*M! COLLATE utf8mb4_nopad_bin */ /*!80017 COLLATE utf8mb4_0900_bin */ PATH '$'
)) AS due STRAIGHT_JOIN lock_waiters FORCE INDEX (PRIMARY) ON owner = due.holder
SET expires_at = GREATEST(expires_at, UTC_TIMESTAMP(6) + INTERVAL ROUND(:place * 1000000) MICROSECOND)
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
WHERE waiter.expires_at > UTC_TIMESTAMP(6) AND held.expires_at > UTC_TIMESTAMP(6)
  AND held.owner IS NOT NULL AND held.owner <> waiter.owner AND held.count > 0
""",
    Reply.ROWS,
)

# Safe: every ticket up to `last` was visible when this began, since it had been read; a later one changes the row's
# `last_ticket`, and the condition is then false, also for an update that had to wait.
CLEAR: Final = Statement(
    "clear",
    """
/*M! SET STATEMENT innodb_lock_wait_timeout = 0, lock_wait_timeout = 0 FOR */
UPDATE /*!80017 (SELECT lock_key AS name FROM locks FORCE INDEX (PRIMARY) WHERE lock_key = :key LIMIT 1
                 FOR UPDATE NOWAIT) AS mine STRAIGHT_JOIN */
    locks FORCE INDEX (PRIMARY) /*!80017 ON locks.lock_key = mine.name */ SET served_ticket = last_ticket
WHERE lock_key = :key AND last_ticket = :last AND served_ticket < last_ticket
  AND NOT EXISTS (SELECT 1 FROM lock_waiters AS other
                  WHERE other.lock_key = :key AND other.ticket > served_ticket
                    AND other.expires_at > UTC_TIMESTAMP(6))
""",
    Reply.COUNT,
)

# Safe: reads only, without locks.
DEAD: Final = Statement(
    "dead",
    """
SELECT owner FROM lock_waiters
WHERE expires_at < UTC_TIMESTAMP(6) - INTERVAL ROUND(:retention * 1000000) MICROSECOND
ORDER BY owner LIMIT 1000
""",
    Reply.ROWS,
)

# Safe: one row, by primary key, and only if it is still dead; one that wakes up after so long stands in the queue anew.
FORGET: Final = Statement(
    "forget",
    """
/*M! SET STATEMENT innodb_lock_wait_timeout = 0, lock_wait_timeout = 0 FOR */
DELETE FROM lock_waiters
WHERE owner = :owner AND expires_at < UTC_TIMESTAMP(6) - INTERVAL ROUND(:retention * 1000000) MICROSECOND
""",
    Reply.COUNT,
)

DDL: Final = """\
CREATE TABLE lock_waiters (
    owner varchar(64) CHARACTER SET utf8mb4 COLLATE {collation} NOT NULL PRIMARY KEY,
    lock_key varchar(255) CHARACTER SET utf8mb4 COLLATE {collation} NOT NULL,
    ticket bigint NOT NULL,
    ttl double precision NOT NULL,
    label varchar(255) CHARACTER SET utf8mb4 COLLATE {collation} NOT NULL,
    host varchar(255) CHARACTER SET utf8mb4 COLLATE {collation} NOT NULL,
    pid integer NOT NULL,
    thread varchar(255) CHARACTER SET utf8mb4 COLLATE {collation} NOT NULL,
    program varchar(255) CHARACTER SET utf8mb4 COLLATE {collation} NOT NULL,
    celery_task_id varchar(255) CHARACTER SET utf8mb4 COLLATE {collation} NOT NULL,
    channel varchar(63) CHARACTER SET utf8mb4 COLLATE {collation} NOT NULL,
    joined_at datetime(6) NOT NULL,
    expires_at datetime(6) NOT NULL,
    UNIQUE KEY lock_waiters_queue (lock_key, ticket)
) ENGINE = InnoDB;
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
