"""The statements for PostgreSQL (13 and later).

The clock is `clock_timestamp()`: `now()` is the start of the transaction. It is read while the row is being rewritten,
so after the statement was sent: the lease in the row ends no earlier than send time + ttl. (PostgreSQL evaluates the
new row before it waits for another transaction's row lock, and again after it when that one changed the row: a wait can
make the lease shorter than ttl from *now*, never shorter than ttl from the *send time*, from which trust counts.)

Every statement is a transaction of its own under any isolation level: where READ COMMITTED re-reads a row that changed
meanwhile, REPEATABLE READ and SERIALIZABLE raise 40001 instead, and the protocol retries.

No statement waits for longer than 20 ms for a row that another transaction has locked (55P03, nothing has happened);
`lock_timeout` is set for the statement's own transaction, before it comes to the row.

A statement that must be durable sets that itself: a session with synchronous_commit=off gets `on` for that statement;
stronger settings such as remote_apply are left alone.

No SET touches an indexed column, so all updates are heap-only while the page has room (fillfactor).

A pin is a shared advisory lock of the guarded transaction, which ends with it and, unlike a lock on the row, neither
blocks a renewal nor fails because the row was renewed since the transaction's snapshot. A take needs the same lock
exclusively, and does not wait for it. Its number is a 64 bit hash of the key and the table: a collision makes a key
look busy for as long as the other one is pinned.

Row locks are taken in one order, so that no two statements can deadlock: a waiter's row first, then the key's row.
(`join` inserts a row that no other transaction sees yet.) A `join` that a crash undoes is never granted the key: the
row that a durable grant reads was durable with it at the latest. The other asynchronous statements of the queue can
lose at most a place in it.
"""

from __future__ import annotations

from typing import Final

from dblock.core.statements.base import Failure, causes
from dblock.core.statements.common import REVOKED, STEP, TENURE, THEIRS, WAITER, WHO, begun, ours_to_hand_over
from dblock.core.statements.dialect import Dialect
from dblock.core.statements.shares import AWAITED, no_writer_waits
from dblock.core.statements.vocabulary import Vocabulary


class PostgreSQL(Vocabulary):
    """The vocabulary of PostgreSQL."""

    now = "clock_timestamp()"
    micros = "CAST(extract(epoch FROM clock_timestamp()) * 1000000 AS bigint)"
    bounded = "AND set_config('lock_timeout', '20ms', true) IS NOT NULL"
    durably = (
        "(current_setting('synchronous_commit') <> 'off' OR set_config('synchronous_commit', 'on', true) IS NOT NULL)"
    )
    durable = f"{bounded} AND {durably}"
    asynchronously = "set_config('synchronous_commit', 'off', true) IS NOT NULL"
    asynchronous = f"{bounded} AND {asynchronously}"
    epoch_table = "CAST(CAST('lock_epoch' AS regclass) AS oid)"
    started = "CAST(extract(epoch FROM pg_postmaster_start_time()) * 1000000 AS bigint)"
    server = f"concat_ws(' ', {started}, {epoch_table})"
    timeline = "substr(pg_walfile_name(pg_current_wal_lsn()), 1, 8)"
    cluster = "(SELECT system_identifier FROM pg_control_system())"
    history = f"concat_ws(' ', {timeline}, {epoch_table}, {cluster})"
    shares_of_locks = """SELECT 1 FROM locks AS share
        WHERE share.lock_key > locks.lock_key || chr(31) AND share.lock_key < locks.lock_key || ' '"""
    # With a LIMIT, so that it is read by the index in order, for one flow at a time; a flow has one place, and those
    # that it could not delete.
    join_places_of = """, LATERAL (
        SELECT * FROM lock_waiters WHERE owner >= {0} AND owner < {0} || 'g'
        ORDER BY owner LIMIT 16) AS waiter""".format
    before = "clock_timestamp() - make_interval(secs => {})".format
    since = "CAST(extract(epoch FROM clock_timestamp() - {}) AS double precision)".format
    until = "CAST(extract(epoch FROM {} - clock_timestamp()) AS double precision)".format
    integer = "CAST({} AS integer)".format
    bigint = "CAST({} AS bigint)".format
    number = "CAST({} AS double precision)".format
    # An index serves it like an equality, one value at a time; but it allows no hash and merge joins.
    looked_up = "{} = ANY (ARRAY[{}])".format
    # A sequential scan might come to the condition first, and try the locks of other keys.
    of_listed = "lock_key = ANY (ARRAY(SELECT json_array_elements_text(CAST(:names AS json)))) AND ({})".format
    pin = "hashtextextended({}, CAST(CAST('locks' AS regclass) AS bigint))".format
    """The number of a key's advisory lock."""
    # CASE, so that only a take of a free key tries the advisory lock.
    unpinned = f"CASE WHEN {{}} THEN pg_try_advisory_xact_lock({pin('lock_key')}) ELSE false END".format
    asynchronous_unless = f"{bounded} AND CASE WHEN {{}} THEN {durably} ELSE {asynchronously} END".format

    def after(self, seconds: str, start: str = "") -> str:
        return f"{start or self.now} + make_interval(secs => {seconds})"

    def delete_listed(self, table: str, name: str, condition: str) -> str:
        listed = "json_array_elements_text(CAST(:names AS json)) AS due (name)"
        return f"DELETE FROM {table} USING {listed} WHERE {self.looked_up(name, 'due.name')} AND {condition}"


SQL: Final = PostgreSQL()
_KEY: Final = 'CAST(:key AS text) COLLATE "C"'
_DUE: Final = (
    "json_to_recordset(CAST(:leases AS json))"
    " AS due (key text, owner text, fence bigint, life double precision, not_notified integer)"
)
_OWNERS: Final = "json_array_elements_text(CAST(:owners AS json)) AS due (holder)"
_FREE: Final = SQL.unpinned(
    f"locks.owner IS NULL OR locks.expires_at <= {SQL.now}"
    " OR (locks.owner = :owner AND locks.fence = CAST(:fence AS bigint))"
)
_IN_REACH: Final = "left(channel, length(:here)) = :here"
"""Whether the heir is on the machine of the releaser."""
_NEAR: Final = f"(channel = '' OR {_IN_REACH})"
"""Whether the database need not notify the heir, as the releaser does, or it has no channel."""
_STRANGE: Final = "channel !~ '^dblock_[0-9a-f]{8}_[0-9a-f]{16}([.][0-9]+)?$'"
"""Whether the channel lacks the form that the lock's processes use (`dblock.core.wakeup.registry`)."""
_ENDS: Final = f"least(next.expires_at, {SQL.after('next.ttl')})"
_ALONE: Final = "current_setting('synchronous_standby_names') = ''"
"""Whether commits wait for no standby."""
_COVERED: Final = f"""locks.owner IS NOT NULL AND {_NEAR}
      AND locks.reading <= next.reading
      AND {_ALONE}
      AND locks.expires_at - {SQL.now} >= ({_ENDS} - {SQL.now}) * 0.75"""
_ASYNCHRONOUS: Final = "current_setting('synchronous_commit') = 'off'"
"""Whether a crash may undo this grant."""
_LASTS: Final = "CAST(floor(extract(epoch FROM locks.expires_at - next.joined_at) * 1000) AS bigint)"
_PROOF: Final = f"""CASE WHEN {_ALONE}
    THEN encode(sha256(convert_to(concat_ws(' ', ticket, fence, lasts, owner), 'UTF8')), 'hex') ELSE '-' END"""
"""As `dblock.core.protocol.queue.proof` has it."""
_LEFT: Final = f"locks.expires_at - {SQL.now}"
_LEFT_MS: Final = f"greatest(CAST(floor(extract(epoch FROM {_LEFT}) * 1000) AS bigint), 1)"
"""The rest of the lease in whole milliseconds, at least 1, as 0 means that the hand-over was not covered."""
_RELAYED_UNTIL: Final = f"least({SQL.after(':life')}, CASE WHEN {_ASYNCHRONOUS} THEN expires_at END)"
_DOOR: Final = f"""
WITH door AS MATERIALIZED (
    SELECT {AWAITED.format("locks")} AS channel, fence FROM locks WHERE lock_key = :door {SQL.asynchronous} FOR SHARE
), gone AS ("""
_ANSWER: Final = """    RETURNING 1
)
SELECT door.channel, door.fence FROM gone LEFT JOIN door ON true
"""
_MEANINGS: Final = {
    # Serialization failure, deadlock; cancelled, by statement_timeout or an administrator.
    **dict.fromkeys(("40001", "40P01", "57014"), Failure.CONFLICT),
    # Prepared statements that a pooler gave to another client, or that were discarded; one for a table that has changed
    # since.
    **dict.fromkeys(("26000", "42P05", "0A000"), Failure.SPENT),
    "25006": Failure.READ_ONLY,  # a standby, or a setting
    "55P03": Failure.BUSY,  # lock_timeout
    "42P01": Failure.NO_TABLE,
    "42703": Failure.OTHER_TABLE,
    "42501": Failure.NO_RIGHT,
}
# Connection exceptions; the server ended the session, or its idle or long transaction.
_LOST = ("08", "57P", "25P03", "25P04")
_CLIENT_LOST = frozenset(
    {"OperationalError", "InterfaceError", "DatabaseError", "InternalError", "InternalClientError"}
)


class PostgreSQLDialect(Dialect):
    """The statements for PostgreSQL."""

    name = "postgresql"
    words = SQL
    join_answers = grant_answers = grant_leaves = True

    @staticmethod
    def classify(error: BaseException) -> Failure:
        """By SQLSTATE (PostgreSQL manual, appendix A), which every driver reports in its own attribute."""
        states = (getattr(each, "sqlstate", None) or getattr(each, "pgcode", None) for each in causes(error))
        state = next(filter(None, states), None)
        if state in _MEANINGS:
            return _MEANINGS[state]
        if state is None:  # raised by the client itself: the connection is gone, or the call was wrong
            lost = any(isinstance(each, OSError) or type(each).__name__ in _CLIENT_LOST for each in causes(error))
            return Failure.DISCONNECTED if lost else Failure.OTHER
        return Failure.DISCONNECTED if state.startswith(_LOST) else Failure.OTHER

    # Safe: DO NOTHING neither locks nor writes when the key exists; and a pin outlasts the row that it was for.
    # Durable, as the take. The row is missing, so the fence starts at the clock; it exceeds every fence of a deleted
    # row, because that began before it was deleted.
    CREATE = f"""
INSERT INTO locks ({TENURE})
SELECT CAST(:key AS text), :owner, {SQL.micros}, 1, :ttl, {SQL.now}, {SQL.after(":life")},
       :label, :host, CAST(:pid AS integer), :thread, :program, :task,
       CAST(:kind AS integer), CAST(:reading AS integer)
WHERE pg_try_advisory_xact_lock({SQL.pin(_KEY)})
  {SQL.is_open("")} {SQL.durable}
ON CONFLICT (lock_key) DO NOTHING
RETURNING fence
"""
    # Safe: names the tenures, revives none and shortens none, so it may arrive late and twice. Its row locks last for
    # the statement; no other statement locks two rows of one process's holds. Durable: the longer leases are relied on.
    RENEW = f"""
UPDATE locks SET expires_at = greatest(expires_at, {SQL.after("due.life")})
FROM {_DUE}
WHERE {SQL.looked_up("lock_key", "due.key")}
  AND locks.owner = due.owner AND locks.fence = due.fence AND expires_at > {SQL.now}
  AND (revoked_fence <> locks.fence OR not_notified = 0)
  {SQL.durable}
"""
    # Safe: reads only.
    ALIVE = f"""
SELECT lock_key, locks.owner, locks.fence, {REVOKED}
FROM {_DUE}
JOIN locks ON {SQL.looked_up("lock_key", "due.key")} AND locks.owner = due.owner AND locks.fence = due.fence
WHERE expires_at > {SQL.now}
"""
    # Runs in the caller's transaction, and lasts as long. Safe: no take can begin a tenure until then; the pin waits
    # for a take that is under way, and the read of the row that follows sees its result. A snapshot that shows the
    # tenure also shows what was committed under earlier pins, since the take needed them gone; one that does not show
    # it is older. (Under SERIALIZABLE that is a read like any other: where the server makes every transaction
    # serializable, the lock's own included, a renewal counts among the conflicts.)
    PIN = f"""
SELECT EXISTS (SELECT 1 FROM locks WHERE lock_key = :key AND fence = :fence)
FROM pg_advisory_xact_lock_shared({SQL.pin(_KEY)})
"""
    # Safe: reads only.
    LOCATE = """
SELECT nspname, 0
FROM pg_class JOIN pg_namespace ON pg_namespace.oid = relnamespace
WHERE pg_class.oid = CAST('locks' AS regclass)
"""
    # Safe: the ticket is assigned under the lock on the key's row, so a later ticket is a later place, and both become
    # visible at once. A release that was waiting for that lock sees the new `last_ticket`, though not yet the waiter,
    # and reads again. For the same reason the waiter need not poll: if the key is held now, its release will see the
    # ticket.
    JOIN = f"""
WITH announced AS (
    UPDATE locks SET last_ticket = greatest(last_ticket + 1, {SQL.micros})
    WHERE lock_key = :key AND kind = CAST(:kind AS integer) {SQL.asynchronous}
    RETURNING last_ticket, served_ticket,
              CASE WHEN owner IS NULL THEN least(expires_at, {SQL.now}) ELSE expires_at END AS held_until
), joined AS (
    INSERT INTO lock_waiters ({WAITER})
    SELECT :owner, :key, last_ticket, :ttl, :label, :host, CAST(:pid AS integer), :thread, :program, :task, :channel,
           CAST(:reading AS integer), {SQL.now}, {SQL.after(":waiter_ttl")}
    FROM announced
)
SELECT last_ticket, {SQL.until("held_until")}, served_ticket + 1 FROM announced
"""
    # Safe: as the take, for a waiter: only if no lease is alive on the key except the tenure that is being released,
    # and no transaction pins it. The waiter's row is locked first, and deleted by the same transaction: a waiter that
    # is leaving is passed over, one that begins to leave waits and then finds its tenure, and a later heartbeat finds
    # no place to extend. (By its ticket: the statement sees the row as of its beginning, and another flow of the same
    # process may have adopted it since, under another token.) The lease ends with the place, and is no longer than the
    # waiter asked for.
    #
    # Durable, since the heir relies on it as soon as it is notified, by the notification of the database too, which is
    # sent after the commit; or *covered*, and then asynchronous: the new lease ends no later than that of the tenure
    # that is handed over (it is cut to that), so that whatever a crash undoes, the key stays closed for as long as the
    # heir trusts its lease. Then the database notifies no waiter (the releaser does, once it has the answer), and the
    # fence comes from the clock, which a crash does not set back. A reader's tenure, beside which other readers enter,
    # covers no writer's. At least three quarters of the heir's full lease must be covered: so one durable grant in many
    # renews the lease that covers the others. Not where commits wait for standbys: a statement that was ended while it
    # waited has committed rows that the standbys may lack. There a notification carries no proof either, and the heir
    # polls, and accepts.
    GRANT = f"""
WITH next AS MATERIALIZED (
    SELECT owner, ticket, ttl, {WHO}, channel, reading, joined_at, expires_at
    FROM lock_waiters
    WHERE lock_key = :key AND ticket >= CAST(:first AS bigint) AND expires_at > {SQL.now}
      {SQL.bounded}
    ORDER BY ticket LIMIT 1 FOR UPDATE
), granted AS (
    UPDATE locks SET
        owner = next.owner,
        fence = greatest(locks.fence + {STEP}, {SQL.micros}),
        count = 1,
        reading = next.reading,
        ttl = next.ttl,
        acquired_at = {SQL.now},
        expires_at = least({_ENDS}, CASE WHEN {_ASYNCHRONOUS} THEN locks.expires_at END),
        {THEIRS},
        last_ticket = greatest(last_ticket, next.ticket),
        served_ticket = next.ticket
    FROM next
    WHERE locks.lock_key = :key AND served_ticket < next.ticket
      AND {_FREE}
      {SQL.is_open()}
      AND CASE WHEN locks.fence < {SQL.micros} AND {_COVERED}
               THEN {SQL.asynchronously} ELSE {SQL.durably} END
    RETURNING next.ticket, next.channel, next.owner, locks.fence,
              CASE WHEN {_ASYNCHRONOUS} THEN {_LASTS} ELSE 0 END AS lasts
), gone AS (
    DELETE FROM lock_waiters WHERE lock_key = :key AND ticket = (SELECT ticket FROM granted)
)
SELECT ticket, channel, owner, fence, lasts,
       CASE WHEN {_IN_REACH} OR {_STRANGE} THEN NULL
            ELSE CAST(pg_notify(split_part(channel, '.', 1),
                                concat_ws(' ', ticket, fence, lasts, {_PROOF}, :key)) AS text) END
FROM granted
"""
    # Safe: a release and a take in one (`common.hand_over_local`). Durable; or covered, as a grant may be, and for the
    # same reasons, if the heir's watchdog will make the lease whole (`covers`). The database notifies no waiter: the
    # holder notifies the heir, which is in its process, once it has the answer.
    HAND_OVER_LOCAL = f"""
UPDATE locks SET
    owner = :heir,{begun(SQL, expires_at=_RELAYED_UNTIL)}
WHERE {ours_to_hand_over(SQL)}
  AND CASE WHEN fence < {SQL.micros}
            AND CAST(:covers AS integer) = 1 AND {_ALONE}
            AND reading <= CAST(:reading AS integer)
            AND {_LEFT} >= make_interval(secs => :life) * 0.75
           THEN {SQL.asynchronously} ELSE {SQL.durably} END
  {SQL.bounded}
RETURNING fence, CASE WHEN {_ASYNCHRONOUS} THEN {_LEFT_MS} ELSE 0 END
"""
    # Safe: changes nothing.
    CALL = "SELECT CAST(pg_notify(:channel, CAST(:message AS text)) AS text)"

    # Safe: one row for each waiter, by primary key, which is its own.
    LEAVE_QUEUE = (
        f"DELETE FROM lock_waiters USING {_OWNERS} WHERE {SQL.looked_up('owner', 'due.holder')} {SQL.asynchronous}"
    )

    # Safe: shortens nothing and revives none, so it may arrive late and twice. Durable: a place that its answer names
    # is trusted to last, by the heir that is granted the key there.
    HEARTBEAT = f"""
UPDATE lock_waiters SET expires_at = greatest(expires_at, {SQL.after(":waiter_ttl")})
FROM {_OWNERS}
WHERE {SQL.looked_up("owner", "due.holder")} AND expires_at > {SQL.now} {SQL.durable}
RETURNING owner
"""
    # Safe: a row of its own, under a share lock on the door's (`dblock.core.statements.shares` says why). After a
    # writer's tenure the reader needs the door unpinned, as a take does; it tries the same advisory lock, and a reader
    # that is refused for another one's try comes through the queue; so does one that finds a writer's lease over, since
    # a renewal that is waiting for this lock decided before. Durable: the reader relies on the answer.
    READ = f"""
WITH door AS MATERIALIZED (
    SELECT fence FROM locks
    WHERE lock_key = :door AND kind = CAST(:kind AS integer)
      AND CASE WHEN CAST(:holder AS text) <> ''
                    THEN owner = :holder AND fence = CAST(:holders_fence AS bigint) AND expires_at > {SQL.now}
               WHEN reading = 1 THEN true
               ELSE {SQL.unpinned("owner IS NULL")} END
      AND {no_writer_waits(SQL, "locks")}
      {SQL.is_open(also=f"(CAST(:holder AS text) <> '' OR {SQL.is_latest('locks')})")} {SQL.durable}
    FOR SHARE
)
INSERT INTO locks ({TENURE})
SELECT CAST(:key AS text), :owner, door.fence + 1, 1, :ttl, {SQL.now}, {SQL.after(":life")},
       :label, :host, CAST(:pid AS integer), :thread, :program, :task, CAST(:kind AS integer), 1
FROM door
ON CONFLICT (lock_key) DO NOTHING
RETURNING fence
"""
    # Safe: each names the tenure, so it may arrive late and twice. The share lock on the door's row makes it wait for a
    # holder that is just saying that it waits; one that says so later looks for shares after this has been committed.
    LEAVE_READ = f"""{_DOOR}
    DELETE FROM locks WHERE lock_key = :key AND owner = :owner AND fence = CAST(:fence AS bigint) {SQL.asynchronous}
{_ANSWER}"""
    LEAVE_SLOT = f"""{_DOOR}
    UPDATE locks SET owner = NULL, count = 0, expires_at = {SQL.now}
    WHERE lock_key = :key AND owner = :owner AND fence = CAST(:fence AS bigint) {SQL.asynchronous}
{_ANSWER}"""


DIALECT: Final = PostgreSQLDialect()
