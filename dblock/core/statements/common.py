"""The statements that all databases have in common, told once, in the words of each.

A database gives a `Vocabulary`, some twenty expressions, and the few statements that truly differ; `dialect` makes the
whole of it. The text is put together from constants when the module is imported, and never again.

Every statement is a transaction of its own on one row by primary key. What the databases differ in (clock, durability,
how long a row is waited for, how a transaction pins one) is told in their own modules, once for all statements.

Rule: each statement says why it is safe to send, late and twice included.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from dblock.core.statements.base import Dialect, Failure, Queue, Reply, Statement, WhenLocked
from dblock.core.statements.vocabulary import Vocabulary

WHO: Final = "label, host, pid, thread, program, celery_task_id"
REVOKED: Final = "CASE WHEN revoked_fence = locks.fence THEN revocation END"
"""By whom and why the tenure in a row was asked back; null if it was not."""
TENURE: Final = f"lock_key, owner, fence, count, ttl, acquired_at, expires_at, {WHO}"
WAITER: Final = f"owner, lock_key, ticket, ttl, {WHO}, channel, joined_at, expires_at"


def dialect(
    words: Vocabulary,
    *,
    name: str,
    classify: Callable[[BaseException], Failure],
    create: Statement,
    renew: Statement,
    alive: Statement,
    pin: Statement,
    locate: Statement | None,
    join: Statement,
    grant: Statement,
    leave_queue: Statement,
    heartbeat: Statement,
    call: Statement | None = None,
    hear: Statement | None = None,
    unlogged: Statement | None = None,
    listen: Statement | None = None,
    join_answers: bool = False,
    grant_answers: bool = False,
    grant_leaves: bool = False,
    single_writer: bool = False,
    tick: float = 0.0,
    pins_prepared: bool = True,
    quote: str = '"',
) -> Dialect:
    """All that a database needs: the common statements in its words, and its own. See `Dialect` for what each does."""
    queue = Queue(
        join=join,
        announce=announce(words),
        queue_status=queue_status(words),
        grant=grant,
        accept=accept(words),
        hand_over_local=hand_over_local(words),
        leave_queue=leave_queue,
        inherit=inherit(words),
        first_waiter=first_waiter(words),
        call=call,
        hear=hear,
        unlogged=unlogged,
        listen=listen,
        heartbeat=heartbeat,
        waits=waits(words),
        clear=clear(words),
        dead=dead(words),
        forget=forget(words),
        join_answers=join_answers,
        grant_answers=grant_answers,
        grant_leaves=grant_leaves,
    )
    return Dialect(
        name=name,
        take=take(words),
        create=create,
        inspect=inspect(words),
        reenter=reenter(words),
        extend=extend(words),
        renew=renew,
        alive=alive,
        attach=attach(words),
        adopt=adopt(words),
        detach=detach(words),
        release=release(words),
        leave=leave(words),
        pin=pin,
        locate=locate,
        stale=stale(words),
        reap=reap(words),
        tick=tick,
        single_writer=single_writer,
        classify=classify,
        ddl=tables(words),
        queue=queue,
        pins_prepared=pins_prepared,
        quote=quote,
    )


# -- the row of a key


def next_fence(words: Vocabulary) -> str:
    """Greater than the row's last one, and than those of all rows that the key had before: the clock has gone on."""
    return f"{words.greatest}(fence + 1, {words.micros})"


def _begun(words: Vocabulary, *, count: str = "") -> str:
    """The assignments of a row whose tenure begins."""
    return f"""
    fence = {words.remember(next_fence(words))},{count}
    ttl = :ttl,
    acquired_at = {words.now},
    expires_at = {words.after(":life")},
    label = :label,
    host = :host,
    pid = :pid,
    thread = :thread,
    program = :program,
    celery_task_id = :task"""


def _alive(words: Vocabulary) -> str:
    """The condition that names a tenure whose lease is good."""
    return f"lock_key = :key AND owner = :owner AND fence = :fence AND expires_at > {words.now}"


def _longer(words: Vocabulary) -> str:
    """The assignment of a lease that lasts at least one life more."""
    return f"expires_at = {words.greatest}(expires_at, {words.after(':life')})"


def take(words: Vocabulary) -> Statement:
    """Safe: one row, by unique key, and only if nobody's lease is alive on it and no transaction pins it.

    A loser's condition is false: it writes nothing. Durable: whoever hears of the grant relies on it. Waiters come
    first: the row says whether there may be some.
    """
    free = words.unpinned(f"owner IS NULL OR expires_at <= {words.now}")
    sql = f"""
{words.change_at_once(words.by_pin)}
    owner = :owner,{_begun(words, count=" count = 1,")}
WHERE lock_key = :key AND {free}
  AND (last_ticket = served_ticket OR {words.integer(":fair")} = 0)
  {words.durable}
{words.returning("fence")}
"""
    return Statement("take", sql, words.numbers, row_locked=WhenLocked.SKIP, database_locked=WhenLocked.RAISE)


def inspect(words: Vocabulary) -> Statement:
    """Safe: reads only, without locks."""
    sql = f"""
SELECT owner, fence, count, ttl, {words.since("acquired_at")}, {words.until("expires_at")}, {WHO},
       revoked_fence, freed_fence, revocation
FROM locks WHERE lock_key = :key
"""
    return Statement("inspect", sql, Reply.ROWS)


def reenter(words: Vocabulary) -> Statement:
    """Safe: names the tenure and sets the count that its flow keeps, so sending it twice is harmless.

    Durable: the longer lease is relied on.
    """
    sql = f"""
{words.change()}
    count = {words.integer(":count")} + 1,
    {_longer(words)}
WHERE {_alive(words)} {words.durable}
"""
    return Statement("reenter", sql, Reply.COUNT, keeps=True)


def extend(words: Vocabulary) -> Statement:
    """Safe: names the tenure; an ended lease is never revived, and sending it twice is harmless.

    Durable: the longer lease is relied on.
    """
    sql = f"""
{words.change()}
    ttl = :ttl,
    expires_at = {words.after(":life")}
WHERE {_alive(words)} {words.durable}
"""
    return Statement("extend", sql, Reply.COUNT, keeps=True)


def attach(words: Vocabulary) -> Statement:
    """Safe: names the tenure and revives none.

    Counts from what the row says, so sending it twice may count twice: the key is then free later, at the end of the
    lease. Durable: the longer lease is relied on.
    """
    sql = f"""
{words.change()}
    count = {words.remember("count + 1")},
    {_longer(words)},
    host = :host,
    pid = :pid,
    thread = :thread,
    program = :program,
    celery_task_id = :task
WHERE {_alive(words)} {words.durable}
{words.returning("count")}
"""
    return Statement("attach", sql, words.numbers)


def adopt(words: Vocabulary) -> Statement:
    """Safe: names the tenure and revives none, and lets nobody in where somebody is.

    Sent again after a lost answer it finds somebody in, who is itself: nobody enters until the lease ends that it has
    set. Durable: that is relied on.
    """
    sql = f"""
{words.change()}
    count = 1,
    ttl = :ttl,
    expires_at = {words.after(":life")},
    host = :host,
    pid = :pid,
    thread = :thread,
    program = :program,
    celery_task_id = :task
WHERE {_alive(words)} AND count = 0 {words.durable}
"""
    return Statement("adopt", sql, Reply.COUNT)


def detach(words: Vocabulary) -> Statement:
    """Safe: names the tenure. Leaves it alive, at count 0 too: its token's bearer has until the end of the lease.

    With a `count` it sets that, as the release does, and so may be sent twice, unless the row shows that somebody has
    attached or that there are more. Without one it counts from what the row says, and is sent once.
    """
    given = words.integer(":count")
    sql = f"""
{words.change()}
    count = CASE WHEN {given} > 0 THEN {given} ELSE count END - 1,
    {_longer(words)}
WHERE {_alive(words)}
  AND ({given} = 0 OR (count <= {given} AND host = :host AND pid = :pid AND thread = :thread))
  {words.durable}
"""
    return Statement("detach", sql, Reply.COUNT, keeps=True)


def _first_unserved(words: Vocabulary, free_before: str, free_after: str) -> str:
    """The end of a release, which answers with the first ticket not served if the key is free now, else 0."""
    first = "CASE WHEN {} AND last_ticket > served_ticket THEN served_ticket + 1 ELSE 0 END"
    return words.answering(first.format(free_before), first.format(free_after))


def release(words: Vocabulary) -> Statement:
    """Safe: names the tenure and sets the count, so sending it twice is harmless.

    Asynchronous: if a crash loses it the key stays taken until the lease ends, which is late, not wrong. (It must not
    ask for `owner IS NULL` afterwards: in a RETURNING clause SQLite 3.40 takes that for false.)
    """
    count = words.integer(":count")
    sql = f"""
{words.change()}
    owner = CASE WHEN {count} > 1 THEN owner END,
    expires_at = CASE WHEN {count} > 1 THEN expires_at ELSE {words.now} END,
    count = {count} - 1
WHERE lock_key = :key AND owner = :owner AND fence = :fence
  {words.asynchronous}
{_first_unserved(words, ":count = 1", "count = 0")}
"""
    return Statement("release", sql, words.numbers, keeps=True)


def leave(words: Vocabulary) -> Statement:
    """Safe: names the tenure. Counts from what the row says, so it is sent twice only where nobody else counts.

    An owner that is nobody's keeps the key closed for the rest of `min_hold`. Asynchronous, as the release.
    """
    not_before = words.after(":min_hold", "acquired_at")
    sql = f"""
{words.change()}
    owner = CASE WHEN count > 1 THEN owner WHEN {not_before} > {words.now} THEN '' END,
    expires_at = CASE WHEN count > 1 THEN expires_at ELSE {words.greatest}({words.now}, {not_before}) END,
    count = {words.greatest}(count - 1, 0)
WHERE lock_key = :key AND owner = :owner AND fence = :fence
  {words.asynchronous}
{_first_unserved(words, f"count <= 1 AND {not_before} <= {words.now}", f"expires_at <= {words.now}")}
"""
    return Statement("leave", sql, words.numbers, keeps=True)


def stale(words: Vocabulary) -> Statement:
    """Safe: reads only, without locks. `expires_at` of a free row is when it was released."""
    return Statement("stale", _page(words, "locks", "lock_key"), Reply.ROWS)


def _page(words: Vocabulary, table: str, name: str) -> str:
    """The next rows by primary key, old or not: so it is short, however many rows there are before or behind them.

    (An index on `expires_at` would make it so as well, and end heap-only updates.)
    """
    return f"""
SELECT {name}, CASE WHEN expires_at < {words.before(":retention")} THEN 1 ELSE 0 END
FROM {table}{words.by_key} WHERE {name} > :after ORDER BY {name} LIMIT 100
"""


_JOINING: Final = 10_000_000
"""Microseconds after which who has drawn a ticket stands in the queue, or never will."""


def reap(words: Vocabulary) -> Statement:
    """Safe: rows by primary key, each only if it is still stale: a take in between has moved expires_at.

    It locks those that nobody has used for long, and waits for none of them (20 ms on PostgreSQL), so it is part of no
    deadlock; on MySQL it waits for places in queues, whose transactions wait for no key. Asynchronous: a lost deletion
    leaves a row for longer. A row whose fence the clock has not reached, since that was set back, stays: the next
    row's fence would be lower. So does one that somebody may just be joining: PostgreSQL reads a row anew that has
    changed in the meantime, but not the places in its queue.
    """
    old = f"""expires_at < {words.before(":retention")} AND fence < {words.micros}
  AND (last_ticket <= served_ticket OR last_ticket < {words.micros} - {_JOINING})
  {words.asynchronous}
  AND NOT EXISTS (SELECT 1 FROM lock_waiters AS waiter{words.by_ticket}
                  WHERE waiter.lock_key = locks.lock_key
                    AND waiter.ticket > served_ticket AND waiter.expires_at > {words.now})"""
    sql = words.delete_listed("locks", "lock_key", old)
    return Statement("reap", sql, Reply.COUNT, row_locked=WhenLocked.SKIP)


# -- the queue


def announce(words: Vocabulary) -> Statement:
    """Safe: only upwards, and not once the ticket has been passed over.

    (It must not ask for `owner IS NULL` where it answers: see `release`.)
    """
    ticket = words.bigint(":ticket")
    left = f"CASE WHEN owner >= '' THEN {words.greatest}({words.until('expires_at')}, 0) * 1000 ELSE 0 END"
    sql = f"""
{words.change_at_once(words.by_key)}
    last_ticket = {words.greatest}(last_ticket, {ticket})
WHERE lock_key = :key AND served_ticket < {ticket}
  {words.asynchronous}
{words.answering(left, left)}
"""
    return Statement("announce", sql, words.numbers)


def queue_status(words: Vocabulary) -> Statement:
    """Safe: reads only, without locks."""
    left = words.until("locks.expires_at")
    sql = f"""
SELECT CASE WHEN locks.owner = :owner THEN 1 ELSE 0 END,
       CASE WHEN locks.owner IS NULL THEN {words.least}({left}, 0) ELSE {left} END,
       served_ticket + 1,
       last_ticket,
       (SELECT count(*) FROM (
            SELECT 1 FROM lock_waiters AS other JOIN locks AS theirs ON theirs.lock_key = other.lock_key
            WHERE other.lock_key = :key AND other.ticket > theirs.served_ticket
              AND other.ticket < {words.bigint(":ticket")} AND other.expires_at > {words.now}
            LIMIT 16) AS earlier),
       (SELECT count(*) FROM lock_waiters AS me WHERE me.owner = :owner AND me.expires_at > {words.now})
FROM locks WHERE locks.lock_key = :key
"""
    return Statement("queue_status", sql, Reply.ROWS, urgent=True)


def first_waiter(words: Vocabulary) -> Statement:
    """Safe: reads only, without locks."""
    sql = f"""
SELECT ticket, channel, owner FROM lock_waiters{words.by_ticket}
WHERE lock_key = :key AND ticket >= {words.bigint(":first")} AND expires_at > {words.now}
ORDER BY ticket LIMIT 1
"""
    return Statement("first_waiter", sql, Reply.ROWS, urgent=True)


def accept(words: Vocabulary) -> Statement:
    """Safe: names the owner, whose token is of this attempt alone, and shortens nothing, so it may arrive late.

    Durable: the lease is relied on.
    """
    sql = f"""
{words.change_at_once(words.by_key)}
    {words.unchanged("fence")}{_longer(words)}
WHERE lock_key = :key AND owner = :owner AND expires_at > {words.now} {words.durable}
{words.returning("fence")}
"""
    return Statement("accept", sql, words.numbers, keeps=True, urgent=True)


def hand_over_local(words: Vocabulary) -> Statement:
    """Safe: as a release and a take in one, which names the tenure that it ends, so it may arrive late.

    It begins one that only this process can tell of, and not while a transaction pins the key. Durable: the lease is
    relied on.
    """
    ours = words.unpinned(
        f"owner = :owner AND fence = {words.bigint(':fence')} AND count = 1 AND expires_at > {words.now}"
    )
    sql = f"""
{words.change_at_once(words.by_pin)}
    owner = :heir,{_begun(words)}
WHERE lock_key = :key AND {ours}
  AND (last_ticket = served_ticket OR {words.integer(":handovers_left")} > 0)
  {words.durable}
{words.returning("fence")}
"""
    return Statement("hand_over_local", sql, words.numbers, keeps=True, row_locked=WhenLocked.SKIP)


def inherit(words: Vocabulary) -> Statement:
    """Safe: one row, by primary key; the place keeps its ticket and its end, and its old token is nobody's any more.

    A grant holds a lock on the row or has taken it away, so one of the two comes first. Asynchronous: if a crash loses
    it, what is granted goes to the old token, and ends with the place.
    """
    sql = f"""
{words.at_once}UPDATE lock_waiters SET
    owner = :heir,
    ttl = :ttl,
    label = :label,
    host = :host,
    pid = :pid,
    thread = :thread,
    program = :program,
    celery_task_id = :task,
    channel = :channel
WHERE owner = :owner AND expires_at > {words.now} {words.unserved} {words.asynchronous}
"""
    return Statement("inherit", sql, Reply.COUNT, keeps=True)


def waits(words: Vocabulary) -> Statement:
    """Safe: reads only, and all of it as of one moment. Who was served waits no more, though its row may be there."""
    sql = f"""
SELECT waiter.owner, waiter.lock_key, waiter.ticket, waiter.host, waiter.pid, waiter.thread,
       held.owner, held.host, held.pid, held.thread
FROM lock_waiters AS waiter JOIN locks AS held ON held.lock_key = waiter.lock_key
WHERE waiter.expires_at > {words.now} AND held.expires_at > {words.now}
  AND waiter.ticket > held.served_ticket
  AND held.owner IS NOT NULL AND held.owner <> waiter.owner AND held.count > 0
"""
    return Statement("waits", sql, Reply.ROWS)


def clear(words: Vocabulary) -> Statement:
    """Safe: every ticket up to `last` was visible when this began, since it had been read.

    A later one changes the row's `last_ticket`, and the condition is then false, also for an update that had to wait.
    """
    sql = f"""
{words.change_at_once(words.by_key)} served_ticket = last_ticket
WHERE lock_key = :key AND last_ticket = {words.bigint(":last")} AND served_ticket < last_ticket
  AND NOT EXISTS (SELECT 1 FROM lock_waiters AS other
                  WHERE other.lock_key = :key AND other.ticket > served_ticket AND other.expires_at > {words.now})
  {words.asynchronous}
"""
    return Statement("clear", sql, Reply.COUNT)


def dead(words: Vocabulary) -> Statement:
    """Safe: reads only, without locks."""
    return Statement("dead", _page(words, "lock_waiters", "owner"), Reply.ROWS)


def forget(words: Vocabulary) -> Statement:
    """Safe: rows by primary key, each only if it is still dead; one that wakes up so late joins the queue anew."""
    sql = words.delete_listed(
        "lock_waiters", "owner", f"expires_at < {words.before(':retention')} {words.asynchronous}"
    )
    return Statement("forget", sql, Reply.COUNT, row_locked=WhenLocked.SKIP)


# -- the tables


def tables(words: Vocabulary) -> str:
    """What makes them."""
    short, long, name = words.text.format(64), words.text.format(255), words.text.format(63)
    who = f"""
    label {long} NOT NULL,
    host {long} NOT NULL,
    pid integer NOT NULL,
    thread {long} NOT NULL,
    program {long} NOT NULL,
    celery_task_id {long} NOT NULL,"""
    return f"""\
CREATE TABLE locks (
    lock_key {long} NOT NULL PRIMARY KEY,
    owner {short},
    fence bigint NOT NULL,
    count integer NOT NULL,
    ttl {words.seconds} NOT NULL,
    acquired_at {words.time} NOT NULL,
    expires_at {words.time} NOT NULL,{who}
    last_ticket bigint DEFAULT 0 NOT NULL,
    served_ticket bigint DEFAULT 0 NOT NULL,
    revoked_fence bigint DEFAULT 0 NOT NULL,
    freed_fence bigint DEFAULT 0 NOT NULL,
    revocation {long} DEFAULT '' NOT NULL
){words.room}{words.table_options};
CREATE UNIQUE INDEX locks_pin ON locks (lock_key);
CREATE TABLE lock_waiters (
    owner {short} NOT NULL PRIMARY KEY,
    lock_key {long} NOT NULL,
    ticket bigint NOT NULL,
    ttl {words.seconds} NOT NULL,{who}
    channel {name} NOT NULL,
    joined_at {words.time} NOT NULL,
    expires_at {words.time} NOT NULL
){words.room}{words.table_options};
CREATE UNIQUE INDEX lock_waiters_queue ON lock_waiters (lock_key, ticket);
CREATE TABLE lock_events (
    id {words.serial},
    lock_key {long} NOT NULL,
    kind {short} NOT NULL,
    fence bigint NOT NULL,
    seconds {words.seconds} NOT NULL,
    detail {long} NOT NULL,{who}
    happened_at {words.time} NOT NULL
){words.table_options};
CREATE INDEX lock_events_of_key ON lock_events (lock_key, id);
"""
