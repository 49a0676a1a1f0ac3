"""The statements on the shares of a key: the rows of readers and of permits, beside the key's own row, the door.

A share is a row of `locks` whose key is derived from that of the door, so that renewal, loss, tokens, pins and
administration are those of any lock. A reader's row is inserted when it begins, and deleted when it ends. A permit's
row, a slot, is numbered and kept.

Why no writer is in beside a reader: a reader's row is inserted under a share lock on the door's row, which shows that
no writer has the door. A writer takes the door first, by the ordinary `take`, and then looks for shares (`alone`), in a
statement that begins after that commit. So a reader either committed before the take, and its row is found; or it came
to the door later, and was refused. An expired row counts until it is deleted under its own lock: a renewal that was
faster leaves nothing to delete.

While `reading` = 1 the last tenure of the door was a reader's. It began when no transaction pinned the door, and no
writer's has begun since, so no writer's pin can exist, and readers need not ask for one. `reading` may be 1 while the
door has a holder: a reader that came through the queue, beside which others enter.

That at most N permits are held follows from the N slots, each of which is a lock of its own. The door orders those
that wait: its holder is the next, and gets the first slot that becomes free.
"""

from __future__ import annotations

from typing import Any

from dblock.core.statements.base import Reply, Shares, Statement, WhenLocked
from dblock.core.statements.common import TENURE, release, take_if
from dblock.core.statements.vocabulary import Vocabulary


def shares(words: Vocabulary, **own: Any) -> Shares:
    """The statements on shares: the common ones in the vocabulary of a database, and its `own`."""
    common: dict[str, Any] = {"leave_read": delete_share(words), "leave_slot": release(words)}
    return Shares(
        take_slot=take_slot(words),
        alone=alone(words),
        await_leaving=await_leaving(words),
        listed=listed(words),
        end_expired=end_expired(words),
        awaited=awaited(words),
        **{**common, **own},
    )


def no_writer_waits(words: Vocabulary, door: str) -> str:
    """The condition that no live waiter of the door's queue wants to write, or that the reader need not care."""
    return f"""({words.integer(":admitted")} = 1 OR {door}.last_ticket = {door}.served_ticket
       OR NOT EXISTS (SELECT 1 FROM lock_waiters AS waiter{words.by_ticket}
                      WHERE waiter.lock_key = :door AND waiter.ticket > {door}.served_ticket
                        AND waiter.expires_at > {words.now} AND waiter.reading = 0))"""


def read(words: Vocabulary) -> Statement:
    """Safe where one transaction writes at a time: what it sees of the door is so until it has inserted its row.

    Nor can a transaction pin a row there while this one writes.
    """
    sql = f"""
INSERT INTO locks ({TENURE})
SELECT :key, :owner, door.fence + 1, 1, :ttl, {words.now}, {words.after(":life")},
       :label, :host, :pid, :thread, :program, :task, :kind, 1
FROM locks AS door{words.by_key}
WHERE door.lock_key = :door AND door.kind = :kind
  AND ((:holder = '' AND (door.reading = 1 OR door.owner IS NULL OR door.expires_at <= {words.now}))
       OR (door.owner = :holder AND door.fence = :holders_fence AND door.expires_at > {words.now}))
  AND {no_writer_waits(words, "door")}
ON CONFLICT (lock_key) DO NOTHING
RETURNING fence
"""
    return Statement("read", sql, Reply.ROWS, priority=True, row_locked=WhenLocked.SKIP)


def take_slot(words: Vocabulary) -> Statement:
    """Safe: as `take`. What the door's row says decides about the order alone."""
    # Neither database of MySQL's family reads the table that it updates, except through a table that it makes first.
    free = f"""EXISTS (SELECT 1 FROM (
      SELECT door.lock_key FROM locks AS door{words.by_key}
      WHERE door.lock_key = :door AND door.kind = {words.integer(":kind")}
        AND (door.last_ticket = door.served_ticket OR {words.integer(":fair")} = 0)
        AND (door.owner IS NULL OR door.expires_at <= {words.now})
      LIMIT 1 {words.read_at_once}) AS seen)"""
    return Statement("take_slot", take_if(words, free), words.numbers, row_locked=WhenLocked.SKIP)


def alone(words: Vocabulary) -> Statement:
    """Safe: names the tenure, and shortens nothing; true until the door's tenure ends, as no share begins before.

    It is an UPDATE so that no proxy sends it to a replica. The tenure counts from now on, for `min_hold`, and its
    holder no longer waits, which `await_leaving` reads from the number of no tenure. Asynchronous: nobody relies on the
    longer lease.
    """
    sql = f"""
{words.change()} awaiting_fence = -fence,
    acquired_at = {words.now},
    expires_at = {words.greatest}(expires_at, {words.after(":life")})
WHERE lock_key = :key AND owner = :owner AND fence = {words.bigint(":fence")} AND expires_at > {words.now}
  AND NOT EXISTS (SELECT 1 FROM (
      SELECT share.lock_key FROM locks AS share{words.by_key}
      WHERE share.lock_key > :low AND share.lock_key < :high LIMIT 1) AS seen)
  {words.asynchronous}
"""
    return Statement("alone", sql, Reply.COUNT, critical=True, priority=True)


def await_leaving(words: Vocabulary) -> Statement:
    """Safe: names the tenure, and revives none. Durable: the lease is relied on.

    It gives the door the lease of a waiter, which may be shorter than the one before. The holder relies on nothing
    until it has another answer; and one that arrives once a writer is in (`alone`) changes nothing.
    """
    sql = f"""
{words.change()}
    awaiting_fence = fence,
    awaiting_channel = :channel,
    expires_at = {words.after(":life")}
WHERE lock_key = :key AND owner = :owner AND fence = {words.bigint(":fence")} AND expires_at > {words.now}
  AND awaiting_fence <> -fence
  {words.durable}
"""
    return Statement("await_leaving", sql, Reply.COUNT, critical=True, priority=True)


def listed(words: Vocabulary) -> Statement:
    """Safe: reads only, without locks."""
    sql = f"""
SELECT lock_key, owner, fence,
       CASE WHEN owner IS NULL THEN {words.least}({words.until("expires_at")}, 0) ELSE {words.until("expires_at")} END
FROM locks{words.by_key} WHERE lock_key > :low AND lock_key < :high
ORDER BY lock_key LIMIT {words.bigint(":most")}
"""
    return Statement("listed", sql, Reply.ROWS, priority=True, owners=(1,))


def end_expired(words: Vocabulary) -> Statement:
    """Safe: rows by primary key, each only if it is still over, and no transaction pins it.

    A renewal that was faster is seen. Asynchronous: a row that a crash brings back is as expired as before.
    """
    over = f"owner IS NULL OR expires_at <= {words.now}"
    over = f"{words.unpinned(words.of_listed('lock_key', ':names', over))} {words.is_open()}"
    sql = words.delete_listed("locks", "lock_key", f"{over} {words.asynchronous}")
    return Statement("end_expired", sql, Reply.COUNT, row_locked=WhenLocked.SKIP, priority=True)


def delete_share(words: Vocabulary) -> Statement:
    """Safe: names the tenure, so it may arrive late and twice. Asynchronous, as a release."""
    sql = f"""
DELETE FROM locks WHERE lock_key = :key AND owner = :owner AND fence = :fence {words.asynchronous}
"""
    return Statement("leave_read", sql, Reply.COUNT, critical=True)


AWAITED = "CASE WHEN awaiting_fence = {0}.fence AND {0}.owner IS NOT NULL THEN awaiting_channel END"
"""Where the holder of a door waits; null if it does not."""


def awaited(words: Vocabulary) -> Statement:
    """Safe: reads only, without locks.

    It is sent after a share was left; the door's holder looks for shares after it has said that it waits. So one of the
    two sees the other.
    """
    sql = f"SELECT {AWAITED.format('locks')}, fence FROM locks{words.by_key} WHERE lock_key = :door"
    return Statement("awaited", sql, Reply.ROWS, critical=True)
