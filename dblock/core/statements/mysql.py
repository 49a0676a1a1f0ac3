"""The statements for MySQL (8.0.17 and later) and MariaDB (10.5 and later).

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
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from dblock.core.statements.base import Dialect, Failure, Reply, Statement

# Safe: one row, by primary key, and only if nobody's lease is alive on it; a concurrent take is waited for and the
# condition is evaluated on the row that it left. Commits durably: whoever hears of the grant relies on it.
TAKE: Final = Statement(
    "take",
    """
UPDATE locks SET
    owner = :owner,
    fence = LAST_INSERT_ID(GREATEST(fence + 1, TIMESTAMPDIFF(MICROSECOND, '1970-01-01', UTC_TIMESTAMP(6)))),
    count = 1,
    ttl = :ttl,
    acquired_at = UTC_TIMESTAMP(6),
    expires_at = UTC_TIMESTAMP(6) + INTERVAL ROUND(:ttl * 1000000) MICROSECOND,
    label = :label,
    host = :host,
    pid = :pid,
    thread = :thread,
    program = :program,
    celery_task_id = :task
WHERE lock_key = :key AND (owner IS NULL OR expires_at <= UTC_TIMESTAMP(6))
""",
    Reply.NUMBER,
)

# Safe: the primary key admits one; a loser gets 1062, which means "somebody was faster". Not INSERT IGNORE (it hides
# other errors too) and not ON DUPLICATE KEY UPDATE (it locks exclusively and its row count is ambiguous). The row is
# missing, so the fence starts at the clock; it exceeds every fence of a deleted row, because that began earlier.
CREATE: Final = Statement(
    "create",
    """
INSERT INTO locks (lock_key, owner, fence, count, ttl, acquired_at, expires_at,
                   label, host, pid, thread, program, celery_task_id)
VALUES (:key, :owner, LAST_INSERT_ID(TIMESTAMPDIFF(MICROSECOND, '1970-01-01', UTC_TIMESTAMP(6))), 1, :ttl,
        UTC_TIMESTAMP(6), UTC_TIMESTAMP(6) + INTERVAL ROUND(:ttl * 1000000) MICROSECOND,
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
UPDATE locks SET
    count = :count + 1,
    expires_at = GREATEST(expires_at, UTC_TIMESTAMP(6) + INTERVAL ROUND(:ttl * 1000000) MICROSECOND)
WHERE lock_key = :key AND owner = :owner AND fence = :fence AND expires_at > UTC_TIMESTAMP(6)
""",
    Reply.COUNT,
)

# Safe: names the tenure; an ended lease is never revived, and sending it twice is harmless. Durable: the longer lease
# is relied on.
EXTEND: Final = Statement(
    "extend",
    """
UPDATE locks SET
    ttl = :ttl,
    expires_at = UTC_TIMESTAMP(6) + INTERVAL ROUND(:ttl * 1000000) MICROSECOND
WHERE lock_key = :key AND owner = :owner AND fence = :fence AND expires_at > UTC_TIMESTAMP(6)
""",
    Reply.COUNT,
)

# Safe: names the tenure and sets the count, so sending it twice is harmless. It would do to commit asynchronously, but
# InnoDB's flush setting is the server's alone, so this one is as durable as the rest.
RELEASE: Final = Statement(
    "release",
    """
UPDATE locks SET
    owner = CASE WHEN :count > 1 THEN owner END,
    expires_at = CASE WHEN :count > 1 THEN expires_at ELSE UTC_TIMESTAMP(6) END,
    count = :count - 1
WHERE lock_key = :key AND owner = :owner AND fence = :fence
""",
    Reply.COUNT,
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
DELETE FROM locks
WHERE lock_key = :key AND expires_at < UTC_TIMESTAMP(6) - INTERVAL ROUND(:retention * 1000000) MICROSECOND
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
    celery_task_id varchar(255) CHARACTER SET utf8mb4 COLLATE {collation} NOT NULL
) ENGINE = InnoDB;
"""

# 1205 lock wait timeout, 1213 deadlock, 1020 record changed (MariaDB's snapshot isolation), 3572 NOWAIT.
_CONFLICTS = frozenset({1020, 1205, 1213, 3572})
# 2006 gone away, 2013 lost during query, 2055 lost with an error, 2003 cannot connect, 2014 out of sync,
# 1053 shutdown, 1152 aborted, 1158-1161 network, 1927 connection killed, 3169 session killed, 4031 idle too long,
# 0 PyMySQL's "already closed".
_LOST = frozenset({0, 1053, 1152, 1158, 1159, 1160, 1161, 1927, 2002, 2003, 2006, 2013, 2014, 2055, 3169, 4031})


def classify(error: BaseException) -> Failure:
    """By error number (MySQL error reference), the first argument of every driver's exception."""
    number = error.args[0] if error.args else None
    if number in _CONFLICTS:
        return Failure.CONFLICT
    if number == 1062:
        return Failure.DUPLICATE
    if number == 1146:
        return Failure.NO_TABLE
    if isinstance(error, OSError) or number in _LOST or type(error).__name__ == "InterfaceError":
        return Failure.LOST
    return Failure.OTHER


DIALECT: Final = Dialect(
    name="mysql",
    take=TAKE,
    create=CREATE,
    inspect=INSPECT,
    reenter=REENTER,
    extend=EXTEND,
    release=RELEASE,
    stale=STALE,
    reap=REAP,
    tick=0.0,
    classify=classify,
    ddl=_DDL.format(collation=COLLATIONS["mysql"]),
)
MARIADB: Final = replace(DIALECT, ddl=_DDL.format(collation=COLLATIONS["mariadb"]))
