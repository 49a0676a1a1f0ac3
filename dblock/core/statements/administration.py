"""The statements of whoever looks after the locks of others; most who lock need none of them."""

from __future__ import annotations

from functools import cache
from typing import Final, NamedTuple

from dblock.core.statements import mysql, postgresql, sqlite
from dblock.core.statements.base import Reply, Statement
from dblock.core.statements.common import WHO
from dblock.core.statements.vocabulary import Vocabulary


class Administration(NamedTuple):
    """Below each statement: what it does -> the columns that it answers."""

    list_keys: Statement
    """Up to `most` keys after the key `after`, of which there are rows to show -> key; those of `inspect`; waiters."""
    list_waiters: Statement
    """Who waits for a key, in the order in which they are served -> ticket, seconds since it joined, seconds that its
    place lasts, label, host, pid, thread, program, task."""
    list_all_waiters: Statement
    """Up to `most` of all who wait, for whatever key, those first who came first -> key; as `list_waiters`."""
    free: Statement
    """End a tenure from outside, and say by whom and why."""
    revoke: Statement
    """Ask for a tenure back."""
    note: Statement
    """Write events down, a JSON array of objects: their `age` is in seconds, the rest as the columns."""
    trim: Statement
    """Delete the oldest events, a thousand at most, so that some `keep` are left."""
    list_events: Statement
    """The last events of a key, `most` at most, the latest first -> key, kind, fence, seconds since, seconds, detail,
    label, host, pid, thread, program, task."""
    list_all_events: Statement
    """The last of all keys -> as `list_events`."""


def _statements(words: Vocabulary) -> Administration:
    info = f"""locks.owner, locks.fence, locks.count, locks.ttl, {words.since("locks.acquired_at")},
       {words.until("locks.expires_at")}, {", ".join(f"locks.{name}" for name in WHO.split(", "))},
       revoked_fence, freed_fence, revocation"""
    waiting = f"""SELECT count(*) FROM lock_waiters AS waiter
        WHERE waiter.lock_key = locks.lock_key AND waiter.ticket > locks.served_ticket
          AND waiter.expires_at > {words.now}"""
    # Safe: reads only, without locks; a page at a time, by primary key.
    list_keys = f"""
SELECT lock_key, {info}, ({waiting}) FROM locks
WHERE lock_key > :after AND (owner IS NOT NULL OR {words.integer(":free")} = 1)
ORDER BY lock_key LIMIT {words.integer(":most")}
"""
    waiters = f"""waiter.ticket, {words.since("waiter.joined_at")}, {words.until("waiter.expires_at")},
       {", ".join(f"waiter.{name}" for name in WHO.split(", "))}
FROM lock_waiters AS waiter JOIN locks ON locks.lock_key = waiter.lock_key
WHERE waiter.ticket > locks.served_ticket AND waiter.expires_at > {words.now}"""
    # Safe: both read only, without locks.
    list_waiters = f"SELECT {waiters} AND waiter.lock_key = :key ORDER BY ticket"
    list_all_waiters = f"""
SELECT waiter.lock_key, {waiters} ORDER BY waiter.joined_at, waiter.ticket LIMIT {words.integer(":most")}
"""
    # Safe: names the tenure by its fence, which no other one of the key ever has, so it may be sent twice, or late.
    # Durable: who asked for it is told that it has happened.
    free = f"""
{words.change()}
    owner = NULL,
    expires_at = {words.now},
    count = 0,
    freed_fence = :fence,
    revocation = :words
WHERE lock_key = :key AND fence = :fence AND owner IS NOT NULL {words.durable}
"""
    # Safe: as above; it changes nothing but what the holder is told.
    revoke = f"""
{words.change()}
    revoked_fence = :fence,
    revocation = :words
WHERE lock_key = :key AND fence = :fence AND owner <> '' AND expires_at > {words.now} {words.durable}
"""
    columns = f"lock_key, kind, fence, seconds, detail, {WHO}"
    types = dict.fromkeys(columns.split(", "), "text") | {"fence": "bigint", "pid": "bigint"}
    types |= dict.fromkeys(("seconds", "age"), "double precision")
    # Safe: rows of its own, which nothing is decided by. Sent twice it would tell twice, so it is not.
    note = f"""
INSERT INTO lock_events ({columns}, happened_at)
SELECT {", ".join(f"record.{name}" for name in columns.split(", "))}, {words.before("record.age")}
FROM {words.records(":events", types)}
WHERE record.age >= 0 {words.asynchronous}
"""
    # Safe: rows that are never written again; whoever else deletes them deletes the same. Some numbers were never used.
    trim = f"""
DELETE FROM lock_events
WHERE id <= (SELECT least FROM (SELECT {words.least}((SELECT max(id) FROM lock_events) - {words.bigint(":keep")},
                                       (SELECT min(id) FROM lock_events) + 999) AS least) AS old)
  {words.asynchronous}
"""
    events = f"""
SELECT lock_key, kind, fence, {words.since("happened_at")}, seconds, detail, {WHO} FROM lock_events"""
    # Safe: both read only, without locks.
    list_events = f"{events} WHERE lock_key = :key ORDER BY id DESC LIMIT {words.integer(':most')}"
    list_all_events = f"{events} ORDER BY id DESC LIMIT {words.integer(':most')}"
    return Administration(
        Statement("list_keys", list_keys, Reply.ROWS),
        Statement("list_waiters", list_waiters, Reply.ROWS),
        Statement("list_all_waiters", list_all_waiters, Reply.ROWS),
        Statement("free", free, Reply.COUNT),
        Statement("revoke", revoke, Reply.COUNT),
        Statement("note", note, Reply.COUNT),
        Statement("trim", trim, Reply.COUNT),
        Statement("list_events", list_events, Reply.ROWS),
        Statement("list_all_events", list_all_events, Reply.ROWS),
    )


WORDS: Final[dict[str, Vocabulary]] = {"postgresql": postgresql.SQL, "mysql": mysql.SQL, "sqlite": sqlite.SQL}
"""By the dialect's name."""


@cache
def administration(dialect: str) -> Administration:
    """Of a database, by its dialect's name."""
    return _statements(WORDS[dialect])
