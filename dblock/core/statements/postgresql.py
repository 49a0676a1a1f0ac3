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

Row locks are taken in one order, so that no two statements can deadlock: a waiter's row first, then the key's row.
(`join` inserts a row that nobody else sees yet.) Of the queue's statements `grant` and `accept` are durable, since the
heir relies on them; and `heartbeat`: the heir trusts its tenure for as long as its place, and a crash that took a
heartbeat back would let the row end before that. A `join` that a crash takes back is never granted anything: the row
that a durable grant reads was durable with it at the latest. The others lose a place in the queue at most.
"""

from __future__ import annotations

from typing import Final

from dblock.core.statements.base import Failure, Reply, Statement, WhenLocked
from dblock.core.statements.common import REVOKED, TENURE, WAITER, WHO, dialect
from dblock.core.statements.vocabulary import Vocabulary


class PostgreSQL(Vocabulary):
    """The words of PostgreSQL."""

    now = "clock_timestamp()"
    micros = "CAST(extract(epoch FROM clock_timestamp()) * 1000000 AS bigint)"
    bounded = "AND set_config('lock_timeout', '20ms', true) IS NOT NULL"
    durably = (
        "(current_setting('synchronous_commit') <> 'off' OR set_config('synchronous_commit', 'on', true) IS NOT NULL)"
    )
    durable = f"{bounded} AND {durably}"
    asynchronous = f"{bounded} AND set_config('synchronous_commit', 'off', true) IS NOT NULL"
    text = 'varchar({}) COLLATE "C"'
    time = "timestamp with time zone"
    table_options = " WITH (fillfactor = 50)"

    def after(self, seconds: str, start: str = "") -> str:
        return f"{start or self.now} + make_interval(secs => {seconds})"

    def before(self, seconds: str) -> str:
        return f"{self.now} - make_interval(secs => {seconds})"

    def since(self, time: str) -> str:
        return f"CAST(extract(epoch FROM {self.now} - {time}) AS double precision)"

    def until(self, time: str) -> str:
        return f"CAST(extract(epoch FROM {time} - {self.now}) AS double precision)"

    def integer(self, parameter: str) -> str:
        return f"CAST({parameter} AS integer)"

    def bigint(self, parameter: str) -> str:
        return f"CAST({parameter} AS bigint)"

    def pin(self, key: str) -> str:
        """The number of a key's advisory lock."""
        return f"hashtextextended({key}, CAST(CAST('locks' AS regclass) AS bigint))"

    def unpinned(self, condition: str) -> str:
        # CASE, so that only who may have the key tries the advisory lock.
        return f"CASE WHEN {condition} THEN pg_try_advisory_xact_lock({self.pin('lock_key')}) ELSE false END"


SQL: Final = PostgreSQL()
_KEY: Final = 'CAST(:key AS text) COLLATE "C"'
_DUE: Final = (
    "json_to_recordset(CAST(:leases AS json))"
    " AS due (key text, owner text, fence bigint, life double precision, unaware integer)"
)

# Safe: DO NOTHING neither locks nor writes when the key exists; and a pin outlasts the row that it was for. Durable, as
# the take. The row is missing, so the fence starts at the clock; it exceeds every fence of a deleted row, because that
# began before it was deleted.
CREATE: Final = Statement(
    "create",
    f"""
INSERT INTO locks ({TENURE})
SELECT CAST(:key AS text), :owner, {SQL.micros}, 1, :ttl, {SQL.now}, {SQL.after(":life")},
       :label, :host, CAST(:pid AS integer), :thread, :program, :task
WHERE pg_try_advisory_xact_lock({SQL.pin(_KEY)})
  {SQL.durable}
ON CONFLICT (lock_key) DO NOTHING
RETURNING fence
""",
    Reply.ROWS,
    row_locked=WhenLocked.SKIP,
)

# Safe: names the tenures, revives none and shortens none, so it may arrive late and twice. Its row locks last for the
# statement; nobody else's statement locks two rows, save another process's renewal of a tenure that both hold (40P01,
# which is tried again). Durable: the longer leases are relied on.
RENEW: Final = Statement(
    "renew",
    f"""
UPDATE locks SET expires_at = greatest(expires_at, {SQL.after("due.life")})
FROM {_DUE}
WHERE lock_key = due.key AND locks.owner = due.owner AND locks.fence = due.fence AND expires_at > {SQL.now}
  AND (revoked_fence <> locks.fence OR unaware = 0)
  {SQL.durable}
""",
    Reply.COUNT,
    keeps=True,
    row_locked=WhenLocked.RAISE,
)

# Safe: reads only.
ALIVE: Final = Statement(
    "alive",
    f"""
SELECT lock_key, locks.owner, locks.fence, {REVOKED}
FROM {_DUE}
JOIN locks ON lock_key = due.key AND locks.owner = due.owner AND locks.fence = due.fence
WHERE expires_at > {SQL.now}
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
    f"""
SELECT EXISTS (SELECT 1 FROM locks WHERE lock_key = :key AND fence = :fence)
FROM pg_advisory_xact_lock_shared({SQL.pin(_KEY)})
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

# Safe: the ticket is drawn under the lock on the key's row, so a later ticket is a later place, and both become visible
# at once. A release that was waiting for that lock sees the new `last_ticket`, though not yet the waiter, and looks
# again. For the same reason the waiter need not look: if the key is held now, its release will see the ticket. (Those
# before it are counted as of the beginning: some may be missed, and it looks sooner than need be.)
JOIN: Final = Statement(
    "join",
    f"""
WITH announced AS (
    UPDATE locks SET last_ticket = greatest(last_ticket + 1, {SQL.micros})
    WHERE lock_key = :key {SQL.asynchronous}
    RETURNING last_ticket, served_ticket,
              CASE WHEN owner IS NULL THEN least(expires_at, {SQL.now}) ELSE expires_at END AS held_until
), joined AS (
    INSERT INTO lock_waiters ({WAITER})
    SELECT :owner, :key, last_ticket, :ttl, :label, :host, CAST(:pid AS integer), :thread, :program, :task, :channel,
           {SQL.now}, {SQL.after(":waiter_ttl")}
    FROM announced
    RETURNING ticket
)
SELECT ticket, {SQL.until("held_until")}, served_ticket + 1,
       (SELECT count(*) FROM (
            SELECT 1 FROM lock_waiters AS other
            WHERE other.lock_key = :key AND other.ticket > served_ticket AND other.expires_at > {SQL.now}
            LIMIT 16) AS before)
FROM joined, announced
""",
    Reply.ROWS,
)

# Safe: as the take, for somebody else: only if nobody's lease is alive on the key but the one that is being given back,
# and no transaction pins it. The waiter's row is locked first, and deleted by the same transaction: one that is leaving
# is passed over, one that wants to leave waits and then finds its tenure, and a heartbeat that comes later finds no
# place to extend. (By its ticket: the statement sees the row as of its beginning, and another flow of the same process
# may have inherited it since, under another token.) The lease ends with the place, and is no longer than the waiter
# asked for. Durable: the heir relies on it as soon as it hears of it, by the notification among others, which goes out
# after the commit.
_FREE: Final = SQL.unpinned(
    f"locks.owner IS NULL OR locks.expires_at <= {SQL.now}"
    " OR (locks.owner = :owner AND locks.fence = CAST(:fence AS bigint))"
)
_PROOF: Final = "encode(sha256(convert_to(concat_ws(' ', ticket, fence, owner), 'UTF8')), 'hex')"
"""As `dblock.core.protocol.queue.proof` has it."""
GRANT: Final = Statement(
    "grant",
    f"""
WITH next AS MATERIALIZED (
    SELECT owner, ticket, ttl, {WHO}, channel, expires_at
    FROM lock_waiters
    WHERE lock_key = :key AND ticket >= CAST(:first AS bigint) AND expires_at > {SQL.now}
      {SQL.bounded}
    ORDER BY ticket LIMIT 1 FOR UPDATE
), granted AS (
    UPDATE locks SET
        owner = next.owner,
        fence = greatest(locks.fence + 1, {SQL.micros}),
        count = 1,
        ttl = next.ttl,
        acquired_at = {SQL.now},
        expires_at = least(next.expires_at, {SQL.after("next.ttl")}),
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
      AND {_FREE}
      AND {SQL.durably}
    RETURNING next.ticket, next.channel, next.owner, locks.fence
), gone AS (
    DELETE FROM lock_waiters USING granted WHERE lock_key = :key AND lock_waiters.ticket = granted.ticket
)
SELECT ticket, channel, owner, fence,
       CASE WHEN channel <> '' AND left(channel, length(:here)) <> :here
            THEN CAST(pg_notify(split_part(channel, '.', 1), concat_ws(' ', ticket, fence, {_PROOF}, :key)) AS text) END
FROM granted
""",
    Reply.ROWS,
    keeps=True,
    row_locked=WhenLocked.SKIP,
)

# Safe: changes nothing.
CALL: Final = Statement(
    "call",
    "SELECT CAST(pg_notify(:channel, CAST(:message AS text)) AS text)",
    Reply.ROWS,
)

_OWNERS: Final = "json_array_elements_text(CAST(:owners AS json)) AS due (holder)"

# Safe: one row for each waiter, by primary key, which is its own.
LEAVE_QUEUE: Final = Statement(
    "leave_queue",
    f"DELETE FROM lock_waiters USING {_OWNERS} WHERE owner = due.holder {SQL.asynchronous}",
    Reply.COUNT,
    keeps=True,
)

# Safe: shortens nothing and revives none, so it may arrive late and twice. Durable: what its answer names is trusted to
# last, by whoever is granted the key there.
HEARTBEAT: Final = Statement(
    "heartbeat",
    f"""
UPDATE lock_waiters SET expires_at = greatest(expires_at, {SQL.after(":waiter_ttl")})
FROM {_OWNERS}
WHERE owner = due.holder AND expires_at > {SQL.now} {SQL.durable}
RETURNING owner
""",
    Reply.ROWS,
    keeps=True,
)

_MEANINGS: Final = {
    # Serialization failure, deadlock; cancelled, by statement_timeout or somebody who cancels what takes long.
    **dict.fromkeys(("40001", "40P01", "57014"), Failure.CONFLICT),
    # Prepared statements that a pooler gave to somebody else, or somebody discarded; one for a table that has changed
    # since; a standby.
    **dict.fromkeys(("26000", "42P05", "0A000", "25006"), Failure.SPENT),
    "55P03": Failure.BUSY,  # lock_timeout
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
        return Failure.DISCONNECTED
    if state is None:  # raised by the client itself: the connection is gone, or the call was wrong
        return Failure.DISCONNECTED if type(error).__name__ in _CLIENT_LOST else Failure.OTHER
    return Failure.DISCONNECTED if state.startswith(_LOST) else Failure.OTHER


DIALECT: Final = dialect(
    SQL,
    name="postgresql",
    classify=classify,
    create=CREATE,
    renew=RENEW,
    alive=ALIVE,
    pin=PIN,
    locate=LOCATE,
    join=JOIN,
    grant=GRANT,
    leave_queue=LEAVE_QUEUE,
    heartbeat=HEARTBEAT,
    call=CALL,
    join_answers=True,
    grant_answers=True,
    grant_leaves=True,
)
