"""The statements for MySQL (8.0.17 and later) and MariaDB (10.6 and later, for JSON_TABLE).

The clock is `UTC_TIMESTAMP(6)`: no session time zone touches it. It is the start of the statement, so no earlier than
the send time from which trust counts; a wait for a row lock can only make a new lease shorter and an old one look
longer, both on the safe side.

Every statement is a transaction of its own on one row by primary key, so two of them cannot deadlock with each other
under any isolation level; what is left (1213 and 1205 behind other people's transactions, and on Galera at commit) is
tried again. InnoDB locks a row before it looks at the WHERE: that is why losers read (`inspect`) before they write.

Neither database has UPDATE ... RETURNING: `LAST_INSERT_ID(expr)` brings the fence back in the same round trip. SET
assigns from left to right and later expressions see earlier results, so `count` comes after those that read it. Row
counts may mean "matched" or "changed" depending on a flag of the client; every SET below changes the row it matches,
so both are the same.

A pin is a shared lock of the guarded transaction on the row's entry in the index `locks_pin`. A covering read locks
that entry and not the row, and reads the latest state whatever the transaction's snapshot. A take reaches its row
through that index and so has to lock the entry exclusively; all other statements go through the primary key and never
meet it. Above READ COMMITTED, InnoDB sometimes locks the gap before the entry as well (seen when a neighbour had just
been deleted): the creation of a neighbouring key is then "busy" until the transaction ends.

Most statements must not wait for another transaction's lock on their row: 1205 or 3572, nothing has happened. MariaDB
sets that for one statement (`SET STATEMENT ... FOR`). MySQL has NOWAIT for reads alone, so there an update first reads
its row in a derived table with FOR UPDATE NOWAIT, and changes what it has locked; LIMIT keeps the optimizer from
merging the two. The others wait for one second, by the session's settings (`dblock.sessions`).

`/*M! */` is SQL for MariaDB and a comment for MySQL, `/*!80017 */` the other way round.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from dblock.core.statements.base import Dialect, Failure, Reply, Statement
from dblock.core.statements.queues.mysql import QUEUE

# Safe: one row, by unique key, and only if nobody's lease is alive on it and no transaction pins it. Somebody else's
# lock on it, a concurrent take's or a pin, is not waited for and means "busy". Commits durably: whoever hears of the
# grant relies on it. Waiters come first: the row says whether there may be some.
TAKE: Final = Statement(
    "take",
    """
/*M! SET STATEMENT innodb_lock_wait_timeout = 0, lock_wait_timeout = 0 FOR */
UPDATE /*!80017 (SELECT lock_key AS name FROM locks FORCE INDEX (locks_pin) WHERE lock_key = :key LIMIT 1
                 FOR UPDATE NOWAIT) AS mine STRAIGHT_JOIN */
    locks FORCE INDEX (locks_pin) /*!80017 ON locks.lock_key = mine.name */ SET
    owner = :owner,
    fence = LAST_INSERT_ID(GREATEST(fence + 1, TIMESTAMPDIFF(MICROSECOND, '1970-01-01', UTC_TIMESTAMP(6)))),
    count = 1,
    ttl = :ttl,
    acquired_at = UTC_TIMESTAMP(6),
    expires_at = UTC_TIMESTAMP(6) + INTERVAL ROUND(:life * 1000000) MICROSECOND,
    label = :label,
    host = :host,
    pid = :pid,
    thread = :thread,
    program = :program,
    celery_task_id = :task
WHERE lock_key = :key AND (owner IS NULL OR expires_at <= UTC_TIMESTAMP(6))
  AND (last_ticket = served_ticket OR :fair = 0)
""",
    Reply.NUMBER,
)

# Safe: the primary key admits one; a loser gets 1062, which means "somebody was faster". Not INSERT IGNORE (it hides
# other errors too) and not ON DUPLICATE KEY UPDATE (it locks exclusively and its row count is ambiguous). The row is
# missing, so the fence starts at the clock; it exceeds every fence of a deleted row, because that began earlier. Not
# waited for either: the gap that another transaction may have locked (a pin does, next to a row that was just deleted).
CREATE: Final = Statement(
    "create",
    """
/*M! SET STATEMENT innodb_lock_wait_timeout = 0, lock_wait_timeout = 0 FOR */
INSERT INTO locks (lock_key, owner, fence, count, ttl, acquired_at, expires_at,
                   label, host, pid, thread, program, celery_task_id)
VALUES (:key, :owner, LAST_INSERT_ID(TIMESTAMPDIFF(MICROSECOND, '1970-01-01', UTC_TIMESTAMP(6))), 1, :ttl,
        UTC_TIMESTAMP(6), UTC_TIMESTAMP(6) + INTERVAL ROUND(:life * 1000000) MICROSECOND,
        :label, :host, :pid, :thread, :program, :task)
""",
    Reply.NUMBER,
)

# Safe: reads only, without locks.
INSPECT: Final = Statement(
    "inspect",
    """
SELECT owner, fence, count, ttl,
       TIMESTAMPDIFF(MICROSECOND, acquired_at, UTC_TIMESTAMP(6)) / 1e6,
       TIMESTAMPDIFF(MICROSECOND, UTC_TIMESTAMP(6), expires_at) / 1e6,
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
UPDATE locks FORCE INDEX (PRIMARY) SET
    count = :count + 1,
    expires_at = GREATEST(expires_at, UTC_TIMESTAMP(6) + INTERVAL ROUND(:life * 1000000) MICROSECOND)
WHERE lock_key = :key AND owner = :owner AND fence = :fence AND expires_at > UTC_TIMESTAMP(6)
""",
    Reply.COUNT,
    keeps=True,
)

# Safe: names the tenure; an ended lease is never revived, and sending it twice is harmless. Durable: the longer lease
# is relied on.
EXTEND: Final = Statement(
    "extend",
    """
UPDATE locks FORCE INDEX (PRIMARY) SET
    ttl = :ttl,
    expires_at = UTC_TIMESTAMP(6) + INTERVAL ROUND(:life * 1000000) MICROSECOND
WHERE lock_key = :key AND owner = :owner AND fence = :fence AND expires_at > UTC_TIMESTAMP(6)
""",
    Reply.COUNT,
    keeps=True,
)

# Safe: names the tenures, revives none and shortens none, so it may arrive late and twice. STRAIGHT_JOIN: it must look
# up one row for each lease, never scan the table, since InnoDB locks what it scans. Its row locks last for the
# statement; nobody else's statement locks two rows, save another process's renewal of a tenure that both hold (1213,
# which is tried again). Durable: the longer leases are relied on.
RENEW: Final = Statement(
    "renew",
    """
/*M! SET STATEMENT innodb_lock_wait_timeout = 0, lock_wait_timeout = 0 FOR */
UPDATE /*!80017 (SELECT due.name, holder, number, life FROM */ JSON_TABLE(:leases, '$[*]' COLUMNS (
    name varchar(255) CHARACTER SET utf8mb4
        /*M! COLLATE utf8mb4_nopad_bin */ /*!80017 COLLATE utf8mb4_0900_bin */ PATH '$.key',
    holder varchar(64) CHARACTER SET utf8mb4
        /*M! COLLATE utf8mb4_nopad_bin */ /*!80017 COLLATE utf8mb4_0900_bin */ PATH '$.owner',
    number bigint PATH '$.fence',
    life double PATH '$.life'
)) AS due /*!80017 STRAIGHT_JOIN locks AS mine FORCE INDEX (PRIMARY) ON mine.lock_key = due.name
    LIMIT 18446744073709551615 FOR UPDATE OF mine NOWAIT) AS due */ STRAIGHT_JOIN locks FORCE INDEX (PRIMARY)
    ON lock_key = due.name AND owner = due.holder AND fence = due.number AND expires_at > UTC_TIMESTAMP(6)
SET expires_at = GREATEST(expires_at, UTC_TIMESTAMP(6) + INTERVAL ROUND(due.life * 1000000) MICROSECOND)
""",
    Reply.COUNT,
    keeps=True,
)

# Safe: reads only, without locks.
ALIVE: Final = Statement(
    "alive",
    """
SELECT lock_key, owner, fence
FROM JSON_TABLE(:leases, '$[*]' COLUMNS (
    name varchar(255) CHARACTER SET utf8mb4
        /*M! COLLATE utf8mb4_nopad_bin */ /*!80017 COLLATE utf8mb4_0900_bin */ PATH '$.key',
    holder varchar(64) CHARACTER SET utf8mb4
        /*M! COLLATE utf8mb4_nopad_bin */ /*!80017 COLLATE utf8mb4_0900_bin */ PATH '$.owner',
    number bigint PATH '$.fence'
)) AS due STRAIGHT_JOIN locks FORCE INDEX (PRIMARY)
    ON lock_key = due.name AND owner = due.holder AND fence = due.number AND expires_at > UTC_TIMESTAMP(6)
""",
    Reply.ROWS,
    keeps=True,
)

# Safe: names the tenure and revives none. Counts from what the row says, so sending it twice may count twice: the key
# is then free later, at the end of the lease. Durable: the longer lease is relied on.
ATTACH: Final = Statement(
    "attach",
    """
UPDATE locks FORCE INDEX (PRIMARY) SET
    count = LAST_INSERT_ID(count + 1),
    expires_at = GREATEST(expires_at, UTC_TIMESTAMP(6) + INTERVAL ROUND(:life * 1000000) MICROSECOND),
    host = :host,
    pid = :pid,
    thread = :thread,
    program = :program,
    celery_task_id = :task
WHERE lock_key = :key AND owner = :owner AND fence = :fence AND expires_at > UTC_TIMESTAMP(6)
""",
    Reply.NUMBER,
)

# Safe: names the tenure. Leaves it alive, at count 0 too: its token's bearer has until the end of the lease. With a
# `count` it sets that, as the release does, and so may be sent twice, unless the row shows that somebody has attached
# or that there are more. Without one it counts from what the row says, and is sent once.
DETACH: Final = Statement(
    "detach",
    """
UPDATE locks FORCE INDEX (PRIMARY) SET
    count = CASE WHEN :count > 0 THEN :count ELSE count END - 1,
    expires_at = GREATEST(expires_at, UTC_TIMESTAMP(6) + INTERVAL ROUND(:life * 1000000) MICROSECOND)
WHERE lock_key = :key AND owner = :owner AND fence = :fence AND expires_at > UTC_TIMESTAMP(6)
  AND (:count = 0 OR (count <= :count AND host = :host AND pid = :pid AND thread = :thread))
""",
    Reply.COUNT,
    keeps=True,
)

# Safe: names the tenure and sets the count, so sending it twice is harmless. It would do to commit asynchronously, but
# InnoDB's flush setting is the server's alone, so this one is as durable as the rest.
RELEASE: Final = Statement(
    "release",
    """
UPDATE locks FORCE INDEX (PRIMARY) SET
    owner = CASE WHEN :count > 1 THEN owner END,
    expires_at = CASE WHEN :count > 1 THEN expires_at ELSE UTC_TIMESTAMP(6) END,
    count = :count - 1
WHERE lock_key = :key AND owner = :owner AND fence = :fence
  AND LAST_INSERT_ID(CASE WHEN :count = 1 AND last_ticket > served_ticket THEN served_ticket + 1 ELSE 0 END) >= 0
""",
    Reply.NUMBER,
    keeps=True,
)

# Safe: names the tenure. Counts from what the row says, so it is sent twice only where nobody else counts. An owner
# that is nobody's keeps the key closed for the rest of `min_hold`.
LEAVE: Final = Statement(
    "leave",
    """
UPDATE locks FORCE INDEX (PRIMARY) SET
    owner = CASE WHEN count > 1 THEN owner
                 WHEN acquired_at + INTERVAL ROUND(:min_hold * 1000000) MICROSECOND > UTC_TIMESTAMP(6) THEN '' END,
    expires_at = CASE WHEN count > 1 THEN expires_at
                      ELSE GREATEST(UTC_TIMESTAMP(6),
                                    acquired_at + INTERVAL ROUND(:min_hold * 1000000) MICROSECOND) END,
    count = GREATEST(count - 1, 0)
WHERE lock_key = :key AND owner = :owner AND fence = :fence
  AND LAST_INSERT_ID(CASE WHEN count <= 1 AND last_ticket > served_ticket THEN served_ticket + 1 ELSE 0 END) >= 0
""",
    Reply.NUMBER,
    keeps=True,
)

# Runs in the caller's transaction, which it lasts as long as. Safe: no take can begin a tenure until then; one that is
# under way is waited for, and the look at the row that follows sees what it did. The inner SELECT is not a locking one
# and reads by the transaction's snapshot, the first of it if there is none yet. A snapshot that shows the tenure also
# shows what was committed under earlier pins, since the take needed them gone; one that does not is older. Under
# SERIALIZABLE all reads of a transaction lock and none goes by a snapshot: the row is not read, because that would keep
# it from being renewed. (The variable is the session's level; SET TRANSACTION for one transaction does not show in it.)
PIN: Final = Statement(
    "pin",
    """
SELECT /*M! @@tx_isolation */ /*!80017 @@transaction_isolation */ = 'SERIALIZABLE' OR EXISTS (
    SELECT 1 FROM locks AS seen WHERE seen.lock_key = :key AND seen.fence = :fence
        AND /*M! @@tx_isolation */ /*!80017 @@transaction_isolation */ <> 'SERIALIZABLE')
FROM locks FORCE INDEX (locks_pin) WHERE lock_key = :key LOCK IN SHARE MODE
""",
    Reply.ROWS,
)

# Safe: reads only, without locks. Servers that know nothing of Galera have no such variable.
LOCATE: Final = Statement(
    "locate",
    """
SELECT DATABASE(),
       (SELECT COUNT(*) FROM /*M! information_schema */ /*!80017 performance_schema */ .global_variables
        WHERE variable_name = 'wsrep_on' AND variable_value = 'ON')
""",
    Reply.ROWS,
)

# Safe: reads only, without locks. `expires_at` of a free row is when it was released.
STALE: Final = Statement(
    "stale",
    """
SELECT lock_key FROM locks
WHERE expires_at < UTC_TIMESTAMP(6) - INTERVAL ROUND(:retention * 1000000) MICROSECOND
ORDER BY lock_key LIMIT 1000
""",
    Reply.ROWS,
)

# Safe: one row, by primary key (a DELETE that scanned would lock all it passes), and only if it is still stale: a take
# in between has moved expires_at.
REAP: Final = Statement(
    "reap",
    """
/*M! SET STATEMENT innodb_lock_wait_timeout = 0, lock_wait_timeout = 0 FOR */
DELETE /*!80017 locks FROM (SELECT lock_key AS name FROM locks FORCE INDEX (locks_pin) WHERE lock_key = :key LIMIT 1
                            FOR UPDATE NOWAIT) AS mine
STRAIGHT_JOIN locks FORCE INDEX (PRIMARY) ON locks.lock_key = mine.name */ /*M! FROM locks */
WHERE lock_key = :key AND expires_at < UTC_TIMESTAMP(6) - INTERVAL ROUND(:retention * 1000000) MICROSECOND
  AND NOT EXISTS (SELECT 1 FROM lock_waiters AS waiter
                  WHERE waiter.lock_key = :key AND waiter.expires_at > UTC_TIMESTAMP(6))
""",
    Reply.COUNT,
)

COLLATIONS: Final = {"mysql": "utf8mb4_0900_bin", "mariadb": "utf8mb4_nopad_bin"}
"""The collations that compare code point by code point, trailing blanks included."""

_DDL: Final = """\
CREATE TABLE locks (
    lock_key varchar(255) CHARACTER SET utf8mb4 COLLATE {collation} NOT NULL PRIMARY KEY,
    owner varchar(64) CHARACTER SET utf8mb4 COLLATE {collation},
    fence bigint NOT NULL,
    count integer NOT NULL,
    ttl double precision NOT NULL,
    acquired_at datetime(6) NOT NULL,
    expires_at datetime(6) NOT NULL,
    label varchar(255) CHARACTER SET utf8mb4 COLLATE {collation} NOT NULL,
    host varchar(255) CHARACTER SET utf8mb4 COLLATE {collation} NOT NULL,
    pid integer NOT NULL,
    thread varchar(255) CHARACTER SET utf8mb4 COLLATE {collation} NOT NULL,
    program varchar(255) CHARACTER SET utf8mb4 COLLATE {collation} NOT NULL,
    celery_task_id varchar(255) CHARACTER SET utf8mb4 COLLATE {collation} NOT NULL,
    last_ticket bigint DEFAULT 0 NOT NULL,
    served_ticket bigint DEFAULT 0 NOT NULL,
    UNIQUE KEY locks_pin (lock_key)
) ENGINE = InnoDB;
"""

_MEANINGS: Final = {
    # Deadlock; a record that changed (MariaDB's snapshot isolation); a prepared statement that a reset of the session
    # took away; interrupted, by somebody or because it took too long.
    **dict.fromkeys((1213, 1020, 1243, 1317, 1969, 3024), Failure.CONFLICT),
    # Lock wait timeout, NOWAIT.
    **dict.fromkeys((1205, 3572), Failure.BUSY),
    # read_only, twice; a read-only transaction; a Galera node that is not part of its cluster.
    **dict.fromkeys((1290, 1836, 1792, 1047), Failure.READ_ONLY),
    # Gone away, lost during a query, lost with an error, cannot connect, out of sync, shutdown, aborted, network,
    # connection killed, session killed, idle too long; 0 is PyMySQL's "already closed".
    **dict.fromkeys((2006, 2013, 2055, 2002, 2003, 2014, 1053, 1152), Failure.LOST),
    **dict.fromkeys((1158, 1159, 1160, 1161, 1927, 3169, 4031, 0), Failure.LOST),
    1062: Failure.DUPLICATE,
    1146: Failure.NO_TABLE,
    **dict.fromkeys((1054, 1176), Failure.OTHER_TABLE),
}


def classify(error: BaseException) -> Failure:
    """By error number (MySQL error reference), the first argument of every driver's exception."""
    number = error.args[0] if error.args else None
    if number in _MEANINGS:
        return _MEANINGS[number]
    if isinstance(error, OSError) or type(error).__name__ == "InterfaceError":
        return Failure.LOST
    return Failure.OTHER


DIALECT: Final = Dialect(
    name="mysql",
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
    ddl=(_DDL + QUEUE.ddl).format(collation=COLLATIONS["mysql"]),
    queue=QUEUE,
    quote="`",
)
MARIADB: Final = replace(DIALECT, ddl=(_DDL + QUEUE.ddl).format(collation=COLLATIONS["mariadb"]))
