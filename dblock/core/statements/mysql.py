"""The statements for MySQL (8.0.17 and later) and MariaDB (10.6 and later, for JSON_TABLE).

The clock is `UTC_TIMESTAMP(6)`: no session time zone touches it. It is the start of the statement, so no earlier than
the send time from which trust counts; a wait for a row lock can only make a new lease shorter and an old one look
longer, both on the safe side.

Every statement is a transaction of its own on one row by primary key, so two of them cannot deadlock with each other
under any isolation level (those that name many rows say why they do not either); other conflicts (1213 and 1205 behind
transactions of the application, and on Galera at commit) are retried. InnoDB locks a row before it evaluates the WHERE:
so a flow that was refused once reads (`inspect`, `queue_status`) before it writes again.

Neither database has UPDATE ... RETURNING: `LAST_INSERT_ID(expr)` brings the fence back in the same round trip. SET
assigns from left to right and later expressions see earlier results, so `count` comes after those that read it. Row
counts may mean "matched" or "changed" depending on a flag of the client; every SET below changes the row it matches,
so both are the same. (Where `set_count`, `detach` or `renew` may not, who sends it reads the row before it believes in
a loss.)

A pin is a shared lock of the guarded transaction on the row's entry in the index `locks_pin`. A covering read locks
that entry and not the row, and reads the latest state whatever the transaction's snapshot. A take reaches its row
through that index and so has to lock the entry exclusively; all other statements go through the primary key and never
meet it. Above READ COMMITTED, MariaDB locks the gap before the entry as well, and MySQL sometimes does (seen when a
neighbour had just been deleted): the creation of a row right before it, a reader's included, is then "busy" until the
transaction ends.

Most statements must not wait for another transaction's lock on their row: 1205 or 3572, nothing has happened. MariaDB
sets that for one statement (`SET STATEMENT ... FOR`). MySQL has NOWAIT for reads alone, so there an update first reads
its row in a derived table with FOR UPDATE NOWAIT, and changes what it has locked; LIMIT keeps the optimizer from
merging the two. The others wait for one second, by the session's settings (`dblock.drivers.sessions`).

`/*M! */` is SQL for MariaDB and a comment for MySQL, `/*!80017 */` the other way round.

Joining the queue takes two statements, since a statement changes only one table here: the waiter's row first, then the
number on the key's row, so that a releaser that sees the number sees the waiter. In between, the place may already be
served.
"""

from __future__ import annotations

from typing import Final

from dblock.core.statements.base import EXACT, NAMES_OF_SERVERS, Failure, Reply, causes
from dblock.core.statements.common import REVOKED, STEP, TENURE, WAITER, WHO
from dblock.core.statements.dialect import Dialect
from dblock.core.statements.shares import no_writer_waits
from dblock.core.statements.vocabulary import Vocabulary

COLLATIONS: Final = {"mysql": "utf8mb4_0900_bin", "mariadb": "utf8mb4_nopad_bin"}
"""The collations that compare code point by code point, trailing blanks included."""
_LOCKED: Final = """(SELECT lock_key AS name FROM locks{0} WHERE lock_key = :key LIMIT 1 FOR UPDATE NOWAIT) AS mine
    STRAIGHT_JOIN"""
"""The key's row, locked without waiting."""


class MySQL(Vocabulary):
    """The vocabulary of MySQL and MariaDB."""

    now = "UTC_TIMESTAMP(6)"
    micros = "TIMESTAMPDIFF(MICROSECOND, '1970-01-01', UTC_TIMESTAMP(6))"
    greatest = "GREATEST"
    least = "LEAST"
    numbers = Reply.NUMBER
    by_key = by_owner = " FORCE INDEX (PRIMARY)"
    by_pin = " FORCE INDEX (locks_pin)"
    by_ticket = " FORCE INDEX (lock_waiters_queue)"
    join = "STRAIGHT_JOIN"
    read_at_once = "/*!80017 FOR SHARE NOWAIT */"
    at_once = "/*M! SET STATEMENT innodb_lock_wait_timeout = 0, lock_wait_timeout = 0 FOR */ "
    table_options = " ENGINE = InnoDB"
    history = undumped = "1234567"
    server = f"/*M! {NAMES_OF_SERVERS[True]} */ /*!80017 {NAMES_OF_SERVERS[False]} */"
    # A range is found by a column of a table of the same query; by one of an outer query the table is scanned.
    shares_of_locks = f"""SELECT 1 FROM locks AS door{by_key}
        {join} locks AS share{by_key} ON share.lock_key > CONCAT(door.lock_key, CHAR(31 USING utf8mb4))
            AND share.lock_key < CONCAT(door.lock_key, ' ')
        WHERE door.lock_key = locks.lock_key"""
    join_places_of = f""" {join} lock_waiters AS waiter{by_owner}
        ON waiter.owner >= {{0}} AND waiter.owner < CONCAT({{0}}, 'g')""".format
    before = "UTC_TIMESTAMP(6) - INTERVAL ROUND({} * 1000000) MICROSECOND".format
    since = "TIMESTAMPDIFF(MICROSECOND, {}, UTC_TIMESTAMP(6)) / 1e6".format
    until = "TIMESTAMPDIFF(MICROSECOND, UTC_TIMESTAMP(6), {}) / 1e6".format
    remember = "LAST_INSERT_ID({})".format
    returning = "".format
    unchanged = "{0} = LAST_INSERT_ID({0}), ".format
    answering = "AND LAST_INSERT_ID({0}) >= 0".format
    change_at_once = f"""{at_once}UPDATE /*!80017 {_LOCKED} */ locks{{0}}
        /*!80017 ON locks.lock_key = mine.name */ SET""".format

    def after(self, seconds: str, start: str = "") -> str:
        return f"{start or self.now} + INTERVAL ROUND({seconds} * 1000000) MICROSECOND"

    def delete_listed(self, table: str, name: str, condition: str) -> str:
        index = self.by_pin if table == "locks" else self.by_key
        return f"""
{self.at_once}DELETE {table} FROM /*!80017 (SELECT due.name FROM */
JSON_TABLE(:names, '$[*]' COLUMNS (name varchar(255) {EXACT} PATH '$')) AS due
    /*!80017 STRAIGHT_JOIN {table} AS mine{index} ON mine.{name} = due.name
    FOR UPDATE OF mine NOWAIT) AS due */
STRAIGHT_JOIN {table}{self.by_key} ON {table}.{name} = due.name
WHERE {condition}
"""


SQL: Final = MySQL()
_DUE: Final = f"""name varchar(255) {EXACT} PATH '$.key',
    holder varchar(64) {EXACT} PATH '$.owner',
    number bigint PATH '$.fence'"""
_OF_DUE: Final = f"""
    ON lock_key = due.name AND owner = due.holder AND fence = due.number AND expires_at > {SQL.now}"""
_GRANTED: Final = f"""
FROM JSON_TABLE(:places, '$[*]' COLUMNS (name varchar(255) {EXACT} PATH '$[0]', number bigint PATH '$[1]')) AS due
STRAIGHT_JOIN lock_waiters FORCE INDEX (lock_waiters_queue)
    ON lock_waiters.lock_key = due.name AND lock_waiters.ticket = due.number
STRAIGHT_JOIN locks FORCE INDEX (PRIMARY) ON locks.lock_key = due.name AND locks.owner = lock_waiters.owner
"""
_OWNERS: Final = f"JSON_TABLE(:owners, '$[*]' COLUMNS (holder varchar(64) {EXACT} PATH '$')) AS due"
_MEANINGS: Final = {
    # Deadlock; a record that changed (MariaDB's snapshot isolation); a prepared statement that a reset of the session
    # dropped; interrupted, by KILL QUERY or a time limit; rolled back by its group, where another member was first.
    **dict.fromkeys((1213, 1020, 1243, 1317, 1969, 3024, 3101), Failure.CONFLICT),
    # Lock wait timeout, NOWAIT.
    **dict.fromkeys((1205, 3572), Failure.BUSY),
    # read_only, twice; a read-only transaction; a node that is not part of its cluster, of Galera, or its group.
    **dict.fromkeys((1290, 1836, 1792, 1047, 3796), Failure.READ_ONLY),
    # Gone away, lost during a query, lost with an error, cannot connect, out of sync, shutdown, aborted, network,
    # connection killed, session killed, idle too long; 0 is PyMySQL's "already closed".
    **dict.fromkeys((2006, 2013, 2055, 2002, 2003, 2014, 1053, 1152), Failure.DISCONNECTED),
    **dict.fromkeys((1158, 1159, 1160, 1161, 1927, 3169, 4031, 0), Failure.DISCONNECTED),
    # A member of a group rolls back what it could not commit before it left; the others may have heard of it in time.
    3100: Failure.DISCONNECTED,
    1062: Failure.DUPLICATE,
    1146: Failure.NO_TABLE,
    **dict.fromkeys((1054, 1176), Failure.OTHER_TABLE),
    **dict.fromkeys((1142, 1143), Failure.NO_RIGHT),
}
_DURING_COMMIT: Final = 1180
"""What a group that has rolled a transaction back may say; it may be a broken disk as well."""


class MySQLDialect(Dialect):
    """The statements for MySQL and MariaDB."""

    name = "mysql"
    words = SQL
    quote = "`"
    pins_prepared = False
    pins_gaps = True

    @staticmethod
    def classify(error: BaseException) -> Failure:
        """By error number (MySQL error reference), the first argument of every driver's exception."""
        for number, *rest in (each.args for each in causes(error) if each.args):
            if number == _DURING_COMMIT and "Lock deadlock" in str(rest):
                return Failure.CONFLICT
            if number in _MEANINGS:
                return _MEANINGS[number]
        lost = any(isinstance(each, OSError) or type(each).__name__ == "InterfaceError" for each in causes(error))
        return Failure.DISCONNECTED if lost else Failure.OTHER

    # Safe: the primary key admits one; a loser gets 1062, which means "another one was faster". Not INSERT IGNORE (it
    # hides other errors too) and not ON DUPLICATE KEY UPDATE (it locks exclusively and its row count is ambiguous). The
    # row is missing, so the fence starts at the clock; it exceeds every fence of a deleted row, because that began
    # earlier. It does not wait for a gap that another transaction has locked either (as a pin does, next to a row that
    # was just deleted).
    CREATE = f"""
{SQL.at_once}INSERT INTO locks ({TENURE})
SELECT :key, :owner, {SQL.remember(SQL.micros)}, 1, :ttl, {SQL.now}, {SQL.after(":life")},
       :label, :host, :pid, :thread, :program, :task, :kind, :reading
FROM DUAL WHERE TRUE {SQL.is_open("")}
"""
    # Safe: names the tenures, revives none and shortens none, so it may arrive late and twice. STRAIGHT_JOIN: it must
    # look up one row for each lease, never scan the table, since InnoDB locks what it scans. Its row locks last for the
    # statement; no other statement locks two rows of one process's holds. Durable: the longer leases are relied on.
    RENEW = f"""
{SQL.at_once}UPDATE /*!80017 (SELECT due.name, holder, number, life, not_notified FROM */
JSON_TABLE(:leases, '$[*]' COLUMNS (
    {_DUE},
    life double PATH '$.life',
    not_notified integer PATH '$.not_notified'
)) AS due /*!80017 STRAIGHT_JOIN locks AS mine FORCE INDEX (PRIMARY) ON mine.lock_key = due.name
    LIMIT 18446744073709551615 FOR UPDATE OF mine NOWAIT) AS due */ STRAIGHT_JOIN locks FORCE INDEX (PRIMARY) {_OF_DUE}
    AND (revoked_fence <> fence OR not_notified = 0)
SET expires_at = GREATEST(expires_at, {SQL.after("due.life")})
"""
    # Safe: reads only, without locks.
    ALIVE = f"""
SELECT lock_key, owner, fence, {REVOKED}
FROM JSON_TABLE(:leases, '$[*]' COLUMNS ({_DUE})) AS due STRAIGHT_JOIN locks FORCE INDEX (PRIMARY) {_OF_DUE}
"""
    # Runs in the caller's transaction, and lasts as long. Safe: no take can begin a tenure until then; the pin waits
    # for a take that is under way, and the read of the row that follows sees its result. The inner SELECT is not a
    # locking one and reads by the transaction's snapshot, or makes it if there is none yet. A snapshot that shows the
    # tenure also shows what was committed under earlier pins, since the take needed them gone; one that does not show
    # it is older. Under SERIALIZABLE all reads of a transaction lock and none goes by a snapshot: the row is not read,
    # because that would keep it from being renewed. (The variable is the session's level; SET TRANSACTION for one
    # transaction does not show in it.) Not for XA: MariaDB drops the lock at PREPARE, and after a crash both restore a
    # prepared transaction without it.
    PIN = """
SELECT /*M! @@tx_isolation */ /*!80017 @@transaction_isolation */ = 'SERIALIZABLE' OR EXISTS (
    SELECT 1 FROM locks AS seen WHERE seen.lock_key = :key AND seen.fence = :fence
        AND /*M! @@tx_isolation */ /*!80017 @@transaction_isolation */ <> 'SERIALIZABLE')
FROM locks FORCE INDEX (locks_pin) WHERE lock_key = :key LOCK IN SHARE MODE
"""
    # Safe: reads only, without locks. Servers that know nothing of Galera have no such variable.
    LOCATE = """
SELECT DATABASE(),
       (SELECT COUNT(*) FROM /*M! information_schema */ /*!80017 performance_schema */ .global_variables
        WHERE variable_name = 'wsrep_on' AND variable_value = 'ON')
"""
    # Safe: a row of its own. Two flows that join in the same microsecond may get one ticket: the later gets 1062 and
    # tries again.
    JOIN = f"""
{SQL.at_once}INSERT INTO lock_waiters ({WAITER})
SELECT :owner, lock_key, {SQL.remember(f"GREATEST(last_ticket + 1, {SQL.micros})")},
       :ttl, :label, :host, :pid, :thread, :program, :task, :channel, :reading, {SQL.now}, {SQL.after(":waiter_ttl")}
FROM locks WHERE lock_key = :key AND kind = :kind /*!80017 FOR SHARE NOWAIT */
"""
    # Safe: as the take, for a waiter: only if no lease is alive on the key except the tenure that is being released,
    # and no transaction pins it. The row of a waiter that is leaving is locked, and not waited for; a waiter that
    # begins to leave waits and then finds its tenure. The lease ends with the waiter's place, and is no longer than the
    # waiter asked for. The place is set to end at its own beginning: no heartbeat began before that, so none takes it
    # for alive, however late it comes to the row. (The assignments of an UPDATE of two tables may be made in any order:
    # none reads what another one sets, since `next` and `place` are the same row, read twice.) MariaDB updates the
    # first of the tables without a temporary one, which takes half the time: there the key's row comes first. Neither
    # database waits for the second row while it has the first.
    GRANT = f"""
{SQL.at_once}UPDATE /*!80017 (
    SELECT * FROM lock_waiters
    WHERE owner = :heir AND lock_key = :key AND expires_at > {SQL.now}
    LIMIT 1 FOR UPDATE NOWAIT
) AS next
STRAIGHT_JOIN {_LOCKED.format(SQL.by_pin)} */ locks FORCE INDEX (locks_pin)
/*M! STRAIGHT_JOIN lock_waiters AS next FORCE INDEX (PRIMARY)
    ON next.owner = :heir AND next.lock_key = :key AND next.expires_at > {SQL.now} */
STRAIGHT_JOIN lock_waiters AS place FORCE INDEX (PRIMARY) ON place.owner = next.owner
SET place.expires_at = place.joined_at,
    locks.owner = next.owner,
    locks.fence = {SQL.remember(f"GREATEST(locks.fence + {STEP}, {SQL.micros})")},
    locks.count = 1,
    locks.reading = next.reading,
    locks.ttl = next.ttl,
    locks.acquired_at = {SQL.now},
    locks.expires_at = LEAST(next.expires_at, {SQL.after("next.ttl")}),
    {", ".join(f"locks.{name} = next.{name}" for name in WHO.split(", "))},
    locks.last_ticket = GREATEST(locks.last_ticket, next.ticket),
    locks.served_ticket = next.ticket
WHERE locks.lock_key = :key AND locks.served_ticket < next.ticket
  AND (locks.owner IS NULL OR locks.expires_at <= {SQL.now}
       OR (locks.owner = :owner AND locks.fence = :fence))
  {SQL.is_open()}
"""
    # The listener. Its session owns a user-level lock with the name of its channel: so every process can find the
    # session until it has ended, and KILL QUERY ends only its sleep. It sends a statement once a second. A session that
    # the network has dropped would keep the name from its successor for hours: the server ends it after `wait_timeout`.
    UNLOGGED = "SET SESSION long_query_time = 3600, wait_timeout = 10"
    LISTEN = "SELECT GET_LOCK(:channel, :seconds)"

    # Safe: the session of that name runs only `sleep_until_killed`. 1094 if no session owns the name, 1095 if another
    # user's does.
    CALL = "KILL QUERY IS_USED_LOCK(:channel)"

    # Safe: reads only, without locks. It reads before it sleeps, so that no notification is lost: the grant of one that
    # comes before it begins was committed earlier, so it finds that; one that comes later ends the sleep.
    SLEEP_UNTIL_KILLED = f"""
SELECT lock_waiters.ticket, locks.lock_key {_GRANTED}
UNION ALL
SELECT SLEEP(:seconds), '' FROM (SELECT 1) AS once WHERE NOT EXISTS (SELECT 1 {_GRANTED})
"""
    # Safe: one row for each waiter, by primary key, which is its own.
    LEAVE_QUEUE = f"""
{SQL.at_once}DELETE lock_waiters FROM {_OWNERS}
    STRAIGHT_JOIN lock_waiters FORCE INDEX (PRIMARY) ON owner = due.holder
"""
    # Safe: shortens nothing and revives none, so it may arrive late and twice. One row for each waiter, by primary key.
    HEARTBEAT = f"""
{SQL.at_once}UPDATE {_OWNERS}
    STRAIGHT_JOIN lock_waiters FORCE INDEX (PRIMARY) ON owner = due.holder AND expires_at > {SQL.now}
SET expires_at = GREATEST(expires_at, {SQL.after(":waiter_ttl")})
"""
    # Safe: a row of its own, under a share lock on the door's (`dblock.core.statements.shares` says why), which has to
    # be asked for: under READ COMMITTED an INSERT ... SELECT reads without locks. After a writer's tenure a reader
    # comes through the queue: no statement can lock either way, as the door's row says. (On a Galera cluster a share
    # lock is known to its node alone.)
    READ = f"""
{SQL.at_once}INSERT INTO locks ({TENURE})
SELECT :key, :owner, {SQL.remember("door.fence + 1")}, 1, :ttl, {SQL.now},
       {SQL.after(":life")}, :label, :host, :pid, :thread, :program, :task, :kind, 1
FROM locks AS door{SQL.by_key}
WHERE door.lock_key = :door AND door.kind = :kind
  AND ((:holder = '' AND door.reading = 1)
       OR (door.owner = :holder AND door.fence = :holders_fence AND door.expires_at > {SQL.now}))
  AND {no_writer_waits(SQL, "door")}
  {SQL.is_open("door", also=f"(:holder <> '' OR {SQL.is_latest('door')})")}
/*!80017 FOR SHARE OF door NOWAIT */ /*M! LOCK IN SHARE MODE */
"""


DIALECT: Final = MySQLDialect()
