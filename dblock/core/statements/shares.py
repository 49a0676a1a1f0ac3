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

from dblock.core.statements.common import take_if
from dblock.core.statements.vocabulary import Vocabulary


def no_writer_waits(words: Vocabulary, door: str) -> str:
    """The condition that no live waiter of the door's queue wants to write, or that the reader need not care."""
    return f"""({words.integer(":admitted")} = 1 OR {door}.last_ticket = {door}.served_ticket
       OR NOT EXISTS (SELECT 1 FROM lock_waiters AS waiter{words.by_ticket}
                      WHERE waiter.lock_key = :door AND waiter.ticket > {door}.served_ticket
                        AND waiter.expires_at > {words.now} AND waiter.reading = 0))"""


def take_slot(words: Vocabulary) -> str:
    """Safe: as `take`. What the door's row says decides about the order alone."""
    # Neither database of MySQL's family reads the table that it updates, except through a table that it makes first.
    free = f"""EXISTS (SELECT 1 FROM (
      SELECT door.lock_key FROM locks AS door{words.by_key}
      WHERE door.lock_key = :door AND door.kind = {words.integer(":kind")}
        AND (door.last_ticket = door.served_ticket OR {words.integer(":fair")} = 0)
        AND (door.owner IS NULL OR door.expires_at <= {words.now})
      LIMIT 1 {words.read_at_once}) AS seen)"""
    return take_if(words, free)


def alone(words: Vocabulary) -> str:
    """Safe: names the tenure, and shortens nothing; true until the door's tenure ends, as no share begins before.

    It is an UPDATE so that no proxy sends it to a replica. The tenure counts from now on, for `min_hold`, and its
    holder no longer waits, which `await_leaving` reads from the number of no tenure. Asynchronous: nobody relies on the
    longer lease.
    """
    return f"""
{words.change()} awaiting_fence = -fence,
    acquired_at = {words.now},
    expires_at = {words.greatest}(expires_at, {words.after(":life")})
WHERE lock_key = :key AND owner = :owner AND fence = {words.bigint(":fence")} AND expires_at > {words.now}
  AND NOT EXISTS (SELECT 1 FROM (
      SELECT share.lock_key FROM locks AS share{words.by_key}
      WHERE share.lock_key > :low AND share.lock_key < :high LIMIT 1) AS seen)
  {words.asynchronous}
"""


def await_leaving(words: Vocabulary) -> str:
    """Safe: names the tenure, and revives none. Durable: the lease is relied on.

    It gives the door the lease of a waiter, which may be shorter than the one before. The holder relies on nothing
    until it has another answer; and one that arrives once a writer is in (`alone`) changes nothing.
    """
    return f"""
{words.change()}
    awaiting_fence = fence,
    awaiting_channel = :channel,
    expires_at = {words.after(":life")}
WHERE lock_key = :key AND owner = :owner AND fence = {words.bigint(":fence")} AND expires_at > {words.now}
  AND awaiting_fence <> -fence
  {words.durable}
"""


def listed(words: Vocabulary) -> str:
    """Safe: reads only, without locks."""
    return f"""
SELECT lock_key, owner, fence,
       CASE WHEN owner IS NULL THEN {words.least}({words.until("expires_at")}, 0) ELSE {words.until("expires_at")} END
FROM locks{words.by_key} WHERE lock_key > :low AND lock_key < :high
ORDER BY lock_key LIMIT {words.bigint(":most")}
"""


def end_expired(words: Vocabulary) -> str:
    """Safe: rows by primary key, each only if it is still over, and no transaction pins it.

    A renewal that was faster is seen. Asynchronous: a row that a crash brings back is as expired as before.
    """
    over = f"owner IS NULL OR expires_at <= {words.now}"
    over = f"{words.unpinned(words.of_listed(over))} {words.is_open()}"
    return words.delete_listed("locks", "lock_key", f"{over} {words.asynchronous}")


def delete_share(words: Vocabulary) -> str:
    """Safe: names the tenure, so it may arrive late and twice. Asynchronous, as a release."""
    return f"""
DELETE FROM locks WHERE lock_key = :key AND owner = :owner AND fence = :fence {words.asynchronous}
"""


AWAITED = "CASE WHEN awaiting_fence = {0}.fence AND {0}.owner IS NOT NULL THEN awaiting_channel END"
"""Where the holder of a door waits; null if it does not."""


def awaited(words: Vocabulary) -> str:
    """Safe: reads only, without locks.

    It is sent after a share was left; the door's holder looks for shares after it has said that it waits. So one of the
    two sees the other.
    """
    return f"SELECT {AWAITED.format('locks')}, fence FROM locks{words.by_key} WHERE lock_key = :door"
