"""The statements that all databases have in common, written once over a `Vocabulary`; `Dialect` says what each does.

Every statement is a transaction of its own on one row by primary key. The modules of the databases explain their
differences (clock, durability, how long a statement waits for a row, how a transaction pins a row) for all statements.

Rule: each statement says why it is safe to send, late and twice included.
"""

from __future__ import annotations

from typing import Final

from dblock.core.statements.vocabulary import Vocabulary
from dblock.core.values import MACHINE

WHO: Final = "label, host, pid, thread, program, celery_task_id"
_BEARER: Final = "host = :host, pid = :pid, thread = :thread, program = :program, celery_task_id = :task"
"""The assignments of the flow that a statement is about."""
THEIRS: Final = ", ".join(f"{name} = next.{name}" for name in WHO.split(", "))
"""The assignments of a row of `locks` from the row `next` of the waiter that gets the key."""
STEP: Final = "CASE kind WHEN 1 THEN 2 ELSE 1 END"
"""By how much a fence grows at least."""
REVOKED: Final = "CASE WHEN revoked_fence = locks.fence THEN revocation END"
"""By whom and why the tenure in a row was asked back; null if it was not."""
AWAITING: Final = "CASE WHEN locks.awaiting_fence = locks.fence THEN 1 ELSE 0 END"
"""1 if the last tenure of a door waits, or has waited in vain, until shares are left."""
TENURE: Final = f"lock_key, owner, fence, count, ttl, acquired_at, expires_at, {WHO}, kind, reading"
WAITER: Final = f"owner, lock_key, ticket, ttl, {WHO}, channel, reading, joined_at, expires_at"


# -- the row of a key


def next_fence(words: Vocabulary) -> str:
    """Greater than the row's last fence, and than those of earlier rows of the key, as the clock has advanced.

    Of a read-write lock by two at least: between two tenures of the door are those of readers, whose fence is one more
    than the door's.
    """
    return f"{words.greatest}(fence + {STEP}, {words.micros})"


def begun(words: Vocabulary, *, expires_at: str = "", fence: str = "") -> str:
    """The assignments of a row whose tenure begins."""
    return f"""
    fence = {words.remember(fence or next_fence(words))},
    count = 1,
    reading = {words.integer(":reading")},
    ttl = :ttl,
    acquired_at = {words.now},
    expires_at = {expires_at or words.after(":life")},
    label = :label,
    {_BEARER}"""


def _alive(words: Vocabulary, owner: str = "= :owner") -> str:
    """The condition that names a tenure whose lease has not ended."""
    return f"lock_key = :key AND owner {owner} AND fence = :fence AND expires_at > {words.now}"


_BY_EITHER: Final = "IN (:owner, :heir)"
"""Under its owner, or under the heir that the statement gives it."""


def _longer(words: Vocabulary) -> str:
    """The assignment of a lease that lasts at least one life more."""
    return f"expires_at = {words.greatest}(expires_at, {words.after(':life')})"


def take(words: Vocabulary) -> str:
    """Safe: one row, by unique key, and only if no lease is alive on it and no transaction pins it.

    A loser's condition is false: it writes nothing. Durable: the holder relies on the answer. Waiters come first: the
    row says whether there may be some.
    """
    return take_if(words, f"(last_ticket = served_ticket OR {words.integer(':fair')} = 0)")


def take_if(words: Vocabulary, condition: str, *, fence: str = "", answer: str = "fence") -> str:
    """Take a row if it is free, of the right kind and unpinned, and the condition holds.

    `fence` is the new one; `answer` has it first.
    """
    free = words.unpinned(f"owner IS NULL OR expires_at <= {words.now}")
    return f"""
{words.change_at_once(words.by_pin)}
    owner = :owner,{begun(words, fence=fence)}
WHERE lock_key = :key AND kind = {words.integer(":kind")} AND {free}
  AND {condition}
  {words.is_open()} {words.durable}
{words.returning(answer)}
"""


def inspect(words: Vocabulary) -> str:
    """Safe: reads only, without locks."""
    return f"""
SELECT owner, fence, count, ttl, {words.since("acquired_at")}, {words.until("expires_at")}, {WHO},
       revoked_fence, freed_fence, revocation, kind, reading, {AWAITING}
FROM locks WHERE lock_key = :key
"""


def set_count(words: Vocabulary) -> str:
    """Safe: names the tenure and sets the number of entries, so it may arrive late and twice.

    A count that came too late, or never, is only shown: the holder releases its tenure whatever the count.
    Asynchronous; durable where the lease gets longer, which is relied on.
    """
    return f"""
{words.change()}
    count = {words.integer(":count")},
    {_longer(words)}
WHERE {_alive(words)}
  {words.asynchronous_unless(f"{words.after(':life')} > expires_at")}
"""


def extend(words: Vocabulary) -> str:
    """Safe: names the tenure; an ended lease is never revived, and sending it twice is harmless.

    Durable: the longer lease is relied on.
    """
    return f"""
{words.change()}
    ttl = :ttl,
    expires_at = {words.after(":life")}
WHERE {_alive(words)} {words.durable}
"""


def detach(words: Vocabulary) -> str:
    """Safe: names the tenure by the flow's owner token, or by the token's secret that takes its place.

    So it may be sent twice, and late: it revives none, and changes nothing once the token was used. From then on the
    flow cannot renew or release the tenure. The lease gets no shorter, as a flow without an answer trusts it. Durable:
    a crash that undid it would make the token worthless that its bearer relies on.
    """
    return f"""
{words.change()}
    owner = :heir,
    count = 0,
    ttl = :life,
    {_longer(words)}
WHERE {_alive(words, _BY_EITHER)} {words.durable}
"""


def attach(words: Vocabulary) -> str:
    """Safe: names the tenure by the token's secret, or by the owner token that this attempt has made of it.

    One attempt changes the owner, and every other one finds an owner that is not the secret. A second sending of the
    same attempt may come late, when the bearer has extended the lease: it shortens nothing. It revives none. Durable: a
    crash that undid it would let the token be used again beside its bearer. Not before keys are open: a standby that
    was promoted may lack the attach of another bearer, which believes in its lease until then.
    """
    sent_again = "CASE WHEN owner = :heir THEN {} ELSE {} END"
    ttl = sent_again.format(f"{words.greatest}(ttl, :ttl)", ":ttl")
    ends = sent_again.format(f"{words.greatest}(expires_at, {words.after(':life')})", words.after(":life"))
    return f"""
{words.change()}
    count = 1,
    ttl = {ttl},
    expires_at = {ends},
    owner = :heir,
    {_BEARER}
WHERE {_alive(words, _BY_EITHER)} {words.is_open(also="")} {words.durable}
"""


def release(words: Vocabulary) -> str:
    """Safe: names the tenure, so it may arrive late and twice.

    An empty owner keeps the key closed for the rest of `min_hold`. Asynchronous: if a crash loses it the key stays
    taken until the lease ends, which is late, not wrong. Durable where `min_hold` keeps the key closed, which may be
    for longer than the lease. (`min_hold` of 0 closes nothing, even if the clock was set back. Its answer must not ask
    for `owner IS NULL`: in a RETURNING clause SQLite 3.40 takes that for false.)
    """
    not_before, no_sooner = words.after(":min_hold", "acquired_at"), f"{words.greatest}({words.now}, acquired_at)"
    first = "CASE WHEN {} AND last_ticket > served_ticket THEN served_ticket + 1 ELSE 0 END"
    free_before, free_after = f"{not_before} <= {no_sooner}", f"expires_at <= {words.now}"
    return f"""
{words.change()}
    owner = CASE WHEN {not_before} > {no_sooner} THEN '' END,
    expires_at = CASE WHEN {not_before} > {no_sooner} THEN {not_before} ELSE {words.now} END,
    count = 0
WHERE lock_key = :key AND owner = :owner AND fence = :fence
  {words.asynchronous_unless(f"{not_before} > {words.now}")}
{words.answering(first.format(free_before), first.format(free_after))}
"""


def stale(words: Vocabulary) -> str:
    """Safe: reads only, without locks. `expires_at` of a free row is the time of its release.

    The row of a key with a share that is alive is none of them. (A reader that comes before the row is deleted is safe
    too: a writer looks for shares, whatever row it has.)
    """
    unshared = f"(kind = 0 OR NOT EXISTS ({words.shares_of_locks} AND share.expires_at > {words.now}))"
    return _page(words, f"locks{words.by_key}", "lock_key", f" AND {unshared}")


def _page(words: Vocabulary, table: str, name: str, also: str = "") -> str:
    """The next rows by primary key, old or not: so it is short, however many rows the table has.

    (An index on `expires_at` would do that too, but prevent heap-only updates.)
    """
    return f"""
SELECT {name}, CASE WHEN expires_at < {words.before(":retention")}{also} THEN 1 ELSE 0 END
FROM {table} WHERE {name} > :after ORDER BY {name} LIMIT 100
"""


_JOINING: Final = 10_000_000
"""Microseconds after which a flow with a ticket is in the queue, or never will be."""


def reap(words: Vocabulary) -> str:
    """Safe: rows by primary key, each only if it is still stale: a take in between has moved expires_at.

    It locks rows that were not used for long, and waits for none of them (20 ms on PostgreSQL), so it is part of no
    deadlock; on MySQL it waits for places in queues, whose transactions wait for no key. Asynchronous: a lost deletion
    leaves a row for longer. A row whose fence is ahead of the clock, as that was set back, stays: the next row's fence
    would be lower. So does a row whose queue a flow may just be joining: PostgreSQL re-reads a row that has changed in
    the meantime, but not the places in its queue.
    """
    old = f"""expires_at < {words.before(":retention")} AND fence < {words.micros}
  AND (last_ticket <= served_ticket OR last_ticket < {words.micros} - {_JOINING}) {words.is_open()}
  {words.asynchronous}
  AND NOT EXISTS (SELECT 1 FROM lock_waiters AS waiter{words.by_ticket}
                  WHERE {words.looked_up("waiter.lock_key", "locks.lock_key")}
                    AND waiter.ticket > served_ticket AND waiter.expires_at > {words.now})"""
    return words.delete_listed("locks", "lock_key", old)


# -- the queue


def announce(words: Vocabulary) -> str:
    """Safe: only upwards, and not once the ticket has been passed over.

    (Its answer must not test `owner IS NULL`: see `release`.)
    """
    ticket = words.bigint(":ticket")
    left = f"CASE WHEN owner >= '' THEN {words.greatest}({words.until('expires_at')}, 0) * 1000 ELSE 0 END"
    return f"""
{words.change_at_once(words.by_key)}
    last_ticket = {words.greatest}(last_ticket, {ticket})
WHERE lock_key = :key AND served_ticket < {ticket}
  {words.asynchronous}
{words.answering(left, left)}
"""


def queue_status(words: Vocabulary) -> str:
    """Safe: reads only, without locks.

    Of the places before the waiter's it reads the 16 nearest, however many there are. If all 16 are dead, one before
    them may be alive: then it answers 1, so that a live waiter is never missed.
    """
    left = words.until("locks.expires_at")
    return f"""
SELECT CASE WHEN locks.owner = :owner THEN 1 ELSE 0 END,
       CASE WHEN locks.owner IS NULL THEN {words.least}({left}, 0) ELSE {left} END,
       served_ticket + 1,
       last_ticket,
       (SELECT CASE WHEN count(*) = 16 AND count(alive) = 0 THEN 1 ELSE count(alive) END FROM (
            SELECT CASE WHEN other.expires_at > {words.now} THEN 1 END AS alive
            FROM lock_waiters AS other{words.by_ticket}
            WHERE other.lock_key = :key AND other.ticket < {words.bigint(":ticket")}
              AND other.ticket > (SELECT served_ticket FROM locks AS theirs WHERE theirs.lock_key = :key)
            ORDER BY other.ticket DESC LIMIT 16) AS nearest),
       (SELECT count(*) FROM lock_waiters AS me WHERE me.owner = :owner AND me.expires_at > {words.now})
FROM locks WHERE locks.lock_key = :key
"""


def first_waiter(words: Vocabulary) -> str:
    """Safe: reads only, without locks."""
    return f"""
SELECT ticket, channel, owner FROM lock_waiters{words.by_ticket}
WHERE lock_key = :key AND ticket >= {words.bigint(":first")} AND expires_at > {words.now}
ORDER BY ticket LIMIT 1
"""


def accept(words: Vocabulary) -> str:
    """Safe: names the owner, whose token is of this attempt alone, and shortens nothing, so it may arrive late.

    The tenure counts from now on, for `min_hold`: its holder may begin once it has the answer. Durable: the lease is
    relied on.
    """
    return f"""
{words.change_at_once(words.by_key)}
    {words.unchanged("fence")}acquired_at = {words.now},
    {_longer(words)}
WHERE lock_key = :key AND owner = :owner AND expires_at > {words.now} {words.is_open(also="")} {words.durable}
{words.returning("fence")}
"""


def hand_over_local(words: Vocabulary) -> str:
    """Safe: a release and a take in one, which names the tenure that it ends, so it may arrive late.

    The new tenure is known to this process only, and cannot begin while a transaction pins the key. Durable: the lease
    is relied on.
    """
    return f"""
{words.change_at_once(words.by_pin)}
    owner = :heir,{begun(words)}
WHERE {ours_to_hand_over(words)}
  {words.durable}
{words.returning("fence")}
"""


def ours_to_hand_over(words: Vocabulary) -> str:
    """The condition of `hand_over_local`."""
    ours = words.unpinned(f"owner = :owner AND fence = {words.bigint(':fence')} AND expires_at > {words.now}")
    return f"""lock_key = :key AND kind = {words.integer(":kind")} AND {ours}
  AND (last_ticket = served_ticket OR {words.integer(":handovers_left")} > 0) {words.is_open(also="")}"""


def adopt_place(words: Vocabulary) -> str:
    """Safe: one row, by primary key; the place keeps its ticket and its end, and its old token is no longer used.

    A grant holds a lock on the row or has deleted it, so one of the two comes first. Asynchronous: if a crash loses it,
    a grant goes to the old token, and ends with the place.
    """
    return f"""
{words.at_once}UPDATE lock_waiters SET
    owner = :heir,
    ttl = :ttl,
    label = :label,
    {_BEARER},
    reading = {words.integer(":reading")},
    channel = :channel
WHERE owner = :owner AND expires_at > {words.now} {words.unserved} {words.asynchronous}
"""


_WAIT: Final = """waiter.owner, waiter.lock_key, waiter.ticket, waiter.host, waiter.pid, waiter.thread,
       held.owner, waiter.circle"""
_LINK: Final = "owner, lock_key, ticket, host, pid, thread, holder, circle"
FLOW: Final = MACHINE + 16
"""Number of leading digits of an owner token that name its flow (machine, process, number) and are no secret; the rest
is secret. `Flows` makes them."""


def chain(words: Vocabulary) -> str:
    """Safe: reads only, and all of it as of one moment.

    Each step looks up the places of one flow, and the keys' rows `held` of those that wait and have not been served.
    UNION drops a wait that was found before, so a circle ends. With `+ 0` no index is used for the ticket: it could
    only be read as a whole, and once for each key.
    """
    wait = f"""{words.join} locks AS held{words.by_key} ON {words.looked_up("held.lock_key", "waiter.lock_key")}
WHERE waiter.expires_at > {words.now} AND held.expires_at > {words.now}
  AND waiter.ticket + 0 > held.served_ticket
  AND held.owner IS NOT NULL AND held.owner <> waiter.owner AND held.count > 0"""
    return f"""
WITH RECURSIVE linked ({_LINK}) AS (
    SELECT {_WAIT} FROM lock_waiters AS waiter {wait} AND waiter.owner = :owner
    UNION
    SELECT {_WAIT} FROM linked{words.join_places_of(f"substr(linked.holder, 1, {FLOW})")} {wait}
)
SELECT {_LINK} FROM linked
"""


def confirm(words: Vocabulary) -> str:
    """Safe: one row, by primary key, which is its waiter's own; no tenure depends on it.

    It records the circle that its waiter sees itself in, by a digest that no other circle has, so it may arrive late
    and twice. Asynchronous: after a crash it is repeated.
    """
    return f"""
{words.at_once}UPDATE lock_waiters{words.by_owner} SET circle = :circle
WHERE owner = :owner AND expires_at > {words.now} {words.asynchronous}
"""


def clear(words: Vocabulary) -> str:
    """Safe: every ticket up to `last` was visible when this began, since it had been read.

    A later one changes the row's `last_ticket`, and the condition is then false, also for an update that had to wait.
    """
    return f"""
{words.change_at_once(words.by_key)} served_ticket = last_ticket
WHERE lock_key = :key AND last_ticket = {words.bigint(":last")} AND served_ticket < last_ticket
  AND NOT EXISTS (SELECT 1 FROM lock_waiters AS other
                  WHERE other.lock_key = :key AND other.ticket > served_ticket AND other.expires_at > {words.now})
  {words.asynchronous}
"""


def dead(words: Vocabulary) -> str:
    """Safe: reads only, without locks."""
    return _page(words, f"lock_waiters{words.by_owner}", "owner")


def forget(words: Vocabulary) -> str:
    """Safe: rows by primary key, each only if it is still dead; a waiter that wakes up so late joins the queue anew."""
    old = f"expires_at < {words.before(':retention')} {words.asynchronous}"
    return words.delete_listed("lock_waiters", "owner", old)
