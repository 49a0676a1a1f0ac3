"""The statements of the administration; taking and releasing locks needs none of them."""

from __future__ import annotations

from functools import cache
from typing import Any, Final, NamedTuple

from dblock.core.protocol import sending
from dblock.core.protocol.sending import Database
from dblock.core.protocol.steps import Parameters, Rows, Steps
from dblock.core.statements import DIALECTS, common
from dblock.core.statements.base import EXACT, Reply, Statement
from dblock.core.statements.common import WHO


class _Events(NamedTuple):
    """What databases say differently about events."""

    records: str
    """The parameter `events`, a JSON array of objects, as the table `record` with these columns."""
    column: str
    """One of them, by its name and its type."""
    up_to: str
    """Delete the rows whose primary key is at most a number."""
    of_key: str = "lock_key = :key ORDER BY id DESC"
    """The condition for the events of one key, and their order, as in the index on both."""
    types: tuple[str, str, str] = ("text", "bigint", "double precision")


_UP_TO: Final = "DELETE FROM lock_events WHERE id <= (SELECT last FROM (SELECT {} AS last) AS due)"
_EVENTS: Final = {
    # With an equality the order is that of `id` alone, and a planner that estimates the key as frequent reads all
    # events, the latest first.
    "postgresql": _Events(
        "json_to_recordset(CAST(:events AS json)) AS record ({})",
        "{0} {1}",
        _UP_TO,
        "lock_key >= :key AND lock_key <= :key ORDER BY lock_key DESC, id DESC",
    ),
    # The number is known before the table is read; MariaDB takes none from a subquery in a condition for a range.
    "mysql": _Events(
        "JSON_TABLE(:events, '$[*]' COLUMNS ({})) AS record",
        "{0} {1} PATH '$.{0}'",
        "DELETE lock_events FROM (SELECT {} AS last) AS due"
        " STRAIGHT_JOIN lock_events FORCE INDEX (PRIMARY) ON id <= due.last",
        types=(f"varchar(255) {EXACT}", "bigint", "double"),
    ),
    "sqlite": _Events("(SELECT {} FROM json_each(:events)) AS record", "json_extract(value, '$.{0}') AS {0}", _UP_TO),
}


@cache
def administration(dialect: str) -> dict[str, Statement]:
    """The administration's statements for a database, by name; above each what it does -> the columns that it answers.

    `dialect`: that of the database, by its name.
    """
    words = DIALECTS[dialect].words
    info = f"""locks.owner, locks.fence, locks.count, locks.ttl, {words.since("locks.acquired_at")},
       {words.until("locks.expires_at")}, {", ".join(f"locks.{name}" for name in WHO.split(", "))},
       revoked_fence, freed_fence, revocation, kind, reading, {common.AWAITING}"""
    waiting = f"""SELECT count(*) FROM lock_waiters AS waiter
        WHERE waiter.lock_key = locks.lock_key AND waiter.ticket > locks.served_ticket
          AND waiter.expires_at > {words.now}"""
    # Safe: both read only, without locks; a page at a time, by primary key. No index lists the held keys, as takes
    # would have to change it: so the first statement bounds how far the second one reads.
    next_keys = f"""
SELECT max(lock_key) FROM (
    SELECT lock_key FROM locks{words.by_key} WHERE lock_key > :after ORDER BY lock_key LIMIT {words.integer(":most")}
) AS page
"""
    list_keys = f"""
SELECT lock_key, {info}, ({waiting}) FROM locks
WHERE lock_key > :after AND lock_key <= :upto
  AND (owner <> '' OR (owner IS NOT NULL AND expires_at > {words.now})
       OR last_ticket > served_ticket OR freed_fence = fence OR {words.integer(":free")} = 1)
ORDER BY lock_key LIMIT {words.integer(":most")}
"""
    # With `+ 0` no index is used for the ticket: it could only be read as a whole, and once for each key.
    waiters = f"""waiter.ticket, {words.since("waiter.joined_at")}, {words.until("waiter.expires_at")},
       {", ".join(f"waiter.{name}" for name in WHO.split(", "))}
FROM lock_waiters AS waiter {words.join} locks{words.by_key} ON {words.looked_up("locks.lock_key", "waiter.lock_key")}
WHERE waiter.ticket + 0 > locks.served_ticket AND waiter.expires_at > {words.now}"""
    # Safe: all read only, without locks.
    count_waiters = f"SELECT ({waiting}) FROM locks{words.by_key} WHERE lock_key = :key"
    list_waiters = f"""
SELECT {waiters} AND waiter.lock_key = :key ORDER BY waiter.ticket LIMIT {words.integer(":most")}
"""
    list_all_waiters = f"""
SELECT waiter.lock_key, {waiters} ORDER BY waiter.joined_at, waiter.ticket LIMIT {words.integer(":most")}
"""
    # Safe: names the tenure by its fence, which no other tenure of the key ever has, so it may be sent twice, or late.
    # Durable: the administrator gets the answer that it has happened.
    free = f"""
{words.change()}
    owner = NULL,
    expires_at = {words.now},
    count = 0,
    freed_fence = :fence,
    revocation = :words
WHERE lock_key = :key AND fence = :fence AND owner IS NOT NULL {words.durable}
"""
    # Safe: as above; it only informs the holder.
    revoke = f"""
{words.change()}
    revoked_fence = :fence,
    revocation = :words
WHERE lock_key = :key AND fence = :fence AND owner <> '' AND expires_at > {words.now} {words.durable}
"""
    columns = f"lock_key, kind, fence, seconds, detail, {WHO}"
    differs = _EVENTS[dialect]
    text, bigint, double = differs.types
    types = dict.fromkeys(columns.split(", "), text) | {"fence": bigint, "pid": bigint}
    types |= {"seconds": double, "age": double}
    records = differs.records.format(", ".join(differs.column.format(*each) for each in types.items()))
    # Safe: rows of its own, by which nothing is decided. Not sent twice, which would duplicate the events.
    note = f"""
INSERT INTO lock_events ({columns}, happened_at)
SELECT {", ".join(f"record.{name}" for name in columns.split(", "))}, {words.before("record.age")}
FROM {records}
WHERE record.age >= 0 {words.asynchronous}
"""
    # Safe: rows that are never written again; concurrent deletions delete the same. Some numbers were never used.
    last = f"""{words.least}((SELECT max(id) FROM lock_events) - {words.bigint(":keep")},
                             (SELECT min(id) FROM lock_events) + 999)"""
    trim = f"{differs.up_to.format(last)} {words.asynchronous}"
    events = f"""
SELECT lock_key, kind, fence, {words.since("happened_at")}, seconds, detail, {WHO} FROM lock_events"""
    # Safe: both read only, without locks.
    list_events = f"{events} WHERE {differs.of_key} LIMIT {words.integer(':most')}"
    list_all_events = f"{events} ORDER BY id DESC LIMIT {words.integer(':most')}"
    found = (
        # The last of the next `most` keys after the key `after` -> key, null if there are none.
        Statement("next_keys", next_keys, Reply.ROWS),
        # Up to `most` keys after the key `after` and up to the key `upto` that are held, may be waited for, or were
        # freed from outside; with `free` all that have rows -> key; columns of `inspect`; waiters.
        Statement("list_keys", list_keys, Reply.ROWS, owners=(1,)),
        # The number of waiters of a key.
        Statement("count_waiters", count_waiters, Reply.ROWS),
        # Up to `most` waiters of a key, in the order in which they are served -> ticket, seconds since it joined,
        # seconds that its place lasts, label, host, pid, thread, program, task.
        Statement("list_waiters", list_waiters, Reply.ROWS),
        # Up to `most` waiters of all keys, the earliest first -> key; as `list_waiters`.
        Statement("list_all_waiters", list_all_waiters, Reply.ROWS),
        # End a tenure from outside, with by whom and why.
        Statement("free", free, Reply.COUNT),
        # Ask for a tenure back.
        Statement("revoke", revoke, Reply.COUNT),
        # Insert events, a JSON array of objects: their `age` is in seconds, the rest as the columns.
        Statement("note", note, Reply.COUNT),
        # Delete the oldest events, at most a thousand, so that some `keep` are left.
        Statement("trim", trim, Reply.COUNT),
        # The last events of a key, at most `most`, the latest first -> key, kind, fence, seconds since, seconds,
        # detail, label, host, pid, thread, program, task.
        Statement("list_events", list_events, Reply.ROWS),
        # The last events of all keys -> as `list_events`.
        Statement("list_all_events", list_all_events, Reply.ROWS),
    )
    return {each.name: each for each in found}


def ask(database: Database, name: str, parameters: Parameters, **how: Any) -> Steps[Rows]:
    """The answer to the statement of that name; `how` as for `sending.ask`."""
    return sending.ask(database, administration(database.dialect.name)[name], parameters, **how)
