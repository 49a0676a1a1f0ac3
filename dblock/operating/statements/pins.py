"""The statements that find the transactions which keep a key from being taken: by a pin, or by a lock on its row.

They read the server's own views, and are sent only for administration and for the error of a refused acquire. SQLite
needs none: a transaction that writes there keeps all others from writing to the whole file.

Rule: each may be sent at any time, and twice. The one that takes locks holds them for the statement only, and waits for
none.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Final, cast

from dblock.core.statements import DIALECTS
from dblock.core.statements.base import EXACT, Reply, Statement

if TYPE_CHECKING:
    from dblock.core.statements.postgresql import PostgreSQL

# Safe: reads only. A pin is found by the number of its advisory lock; a transaction that has locked or changed the row,
# by the number that the row carries. (Rows that several transactions have locked carry a MultiXact number, by which
# none is found; if such a number equals that of a transaction, that one has locked no rows of this table.) The
# statements of the lock's own sessions, which are over in a moment, are left out. Every user may read the locks; most
# columns of other users' sessions are shown to members of pg_monitor only. A prepared transaction has no session, and
# is found by its number. (By the functions behind the views pg_locks, pg_stat_activity and pg_prepared_xacts: planning
# those takes a new session 20 ms.)
_DATABASE: Final = "(SELECT oid FROM pg_database WHERE datname = current_database())"


@cache
def postgresql_pinning() -> Statement:
    """Which transactions pin the keys of the array `keys`."""
    words = cast("PostgreSQL", DIALECTS["postgresql"].words)
    sql = f"""
WITH due AS MATERIALIZED (
    SELECT name, {words.pin('name COLLATE "C"')} AS number
    FROM json_array_elements_text(CAST(:keys AS json)) AS due (name)
), held AS MATERIALIZED (
    SELECT * FROM pg_lock_status() WHERE granted
), pinning AS (
    SELECT name, held.pid, virtualtransaction, false AS is_row
    FROM due JOIN held ON number = (CAST(classid AS bigint) << 32) | CAST(objid AS bigint)
    WHERE locktype = 'advisory' AND objsubid = 1 AND mode = 'ShareLock' AND database = {_DATABASE}
    UNION
    SELECT name, held.pid, virtualtransaction, true
    FROM due JOIN locks ON {words.looked_up("lock_key", "name")} JOIN held ON transactionid = locks.xmax
    WHERE mode = 'ExclusiveLock' AND virtualtransaction IN (
        SELECT virtualtransaction FROM held AS rows
        WHERE relation = CAST('locks' AS regclass) AND mode IN ('RowShareLock', 'RowExclusiveLock')
          AND database = {_DATABASE})
)
SELECT name, coalesce(pinning.pid, 0), coalesce(gid, ''),
       {words.since("coalesce(xact_start, prepared)")},
       coalesce(pg_get_userbyid(coalesce(usesysid, ownerid)), ''), coalesce(application_name, ''),
       coalesce(host(client_addr), ''), coalesce(state, ''), {words.since("state_change")}
FROM pinning
LEFT JOIN LATERAL pg_stat_get_activity(coalesce(pinning.pid, 0)) AS session ON true
LEFT JOIN held AS own ON pinning.pid IS NULL AND own.pid IS NULL
    AND own.virtualtransaction = pinning.virtualtransaction AND own.locktype = 'transactionid'
LEFT JOIN pg_prepared_xact() AS twophase ON transaction = own.transactionid
WHERE NOT is_row
   OR NOT starts_with(coalesce(application_name, ''), 'dblock: ')
      AND coalesce(xact_start, prepared, '-infinity') < {words.before("0.1")}
ORDER BY name, coalesce(xact_start, prepared), pinning.pid
"""
    return Statement("pinning", sql, Reply.ROWS)


_KEYS: Final = f"JSON_TABLE(:keys, '$[*]' COLUMNS (name varchar(255) {EXACT} PATH '$')) AS due"

# Safe: it takes locks that last for the statement, and waits for none. A key that can be taken is locked for a moment,
# in which a take or a renewal finds it busy, and retries. It needs no more rights than a take.
LOCKED: Final = Statement(
    "locked",
    f"""
SELECT due.name, /*M! 1 */ /*!80017 0 */
FROM {_KEYS} STRAIGHT_JOIN locks AS seen FORCE INDEX (PRIMARY) ON seen.lock_key = due.name
WHERE NOT EXISTS (SELECT 1 FROM locks AS mine FORCE INDEX (locks_pin) WHERE mine.lock_key = due.name
                  LIMIT 1 FOR UPDATE SKIP LOCKED)
""",
    Reply.ROWS,
)

_AGE: Final = "TIMESTAMPDIFF(SECOND, trx_started, CONVERT_TZ(UTC_TIMESTAMP(), '+00:00', 'SYSTEM'))"
_SESSION: Final = f"""trx_mysql_thread_id, {_AGE}, COALESCE(user, ''), '', COALESCE(host, ''),
       CASE WHEN command = 'Sleep' THEN 'idle' ELSE LOWER(command) END, time"""
_PROCESS: Final = "LEFT JOIN information_schema.processlist ON id = trx_mysql_thread_id"

# Safe: reads only. `shown` is what `lock_data` has for a key. It needs SELECT on data_locks, and PROCESS.
HOLDING: Final = Statement(
    "holding",
    f"""
SELECT DISTINCT due.name, {_SESSION}
FROM JSON_TABLE(:shown, '$[*]' COLUMNS (name varchar(255) {EXACT} PATH '$[0]',
                                        shown varchar(600) {EXACT} PATH '$[1]')) AS due
JOIN performance_schema.data_locks AS held ON held.lock_data = due.shown COLLATE utf8mb4_bin
JOIN information_schema.innodb_trx ON trx_id = engine_transaction_id
{_PROCESS}
WHERE object_schema = COALESCE(NULLIF(:schema, ''), DATABASE()) AND object_name = :table_name
  AND lock_type = 'RECORD' AND lock_status = 'GRANTED' AND trx_mysql_thread_id <> CONNECTION_ID()
ORDER BY due.name, trx_mysql_thread_id
""",
    Reply.ROWS,
)

# Safe: reads only. The oldest transactions that have locked a row of any table. MariaDB shows no more of a lock that no
# transaction waits for. It needs PROCESS.
SUSPECTS: Final = Statement(
    "suspects",
    f"""
SELECT {_SESSION} FROM information_schema.innodb_trx {_PROCESS}
WHERE trx_rows_locked > 0 AND trx_mysql_thread_id <> CONNECTION_ID()
ORDER BY trx_started LIMIT 5
""",
    Reply.ROWS,
)
