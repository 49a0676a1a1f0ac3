"""What the modules of the databases have in common: a statement, its reply, and how to read a driver's error.

Rule: a statement's text is a constant; values reach it as parameters only.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from enum import Enum
from functools import lru_cache
from typing import Any, Final, Protocol


class Reply(Enum):
    """How a statement's answer becomes rows."""

    ROWS = "the rows it returns"
    COUNT = "one empty row for each row that it changed"
    NUMBER = "one row with the number left by LAST_INSERT_ID(expr), if it changed something"


class Failure(Enum):
    """What an error of the driver means for the protocol."""

    CONFLICT = "refused for a passing reason, nothing happened"
    BUSY = "another transaction has locked the row, nothing happened"
    LOCKED = "another transaction has locked the whole database, nothing happened"
    DUPLICATE = "the row is there already, nothing happened"
    SPENT = "the session is of no more use: the server takes no writes, or its plan is out of date; nothing happened"
    STALE = "the transaction has read what others have changed since: it can never write"
    DISCONNECTED = "the connection broke, the outcome is unknown"
    NO_TABLE = "the table is missing"
    OTHER_TABLE = "the table lacks a column or an index that the statement names"
    NO_RIGHT = "the user may not do that to the table; nothing happened"
    OTHER = "anything else; nothing happened"


class WhenLocked(Enum):
    """What is done about a row, or a whole database, that another transaction has locked."""

    RETRY = "the statement is sent again, as long as there is time"
    SKIP = "it has found nothing: whoever is changing the row, or pins it, goes first"
    RAISE = "whoever sent it does something else meanwhile"


@dataclass(frozen=True, slots=True)
class Tables:
    """What the tables are called, and where they are: `prefix` stands before their names and their indexes'."""

    prefix: str = ""
    schema: str = ""
    """In MySQL's words a database; where sessions look for tables that name none, if empty."""

    def name(self, table: str, quote: str) -> str:
        """The full name of `locks`, say, as SQL that quotes names with `quote`."""
        parts = [self.schema, self.prefix + table] if self.schema else [self.prefix + table]
        return ".".join(quote + part.replace(quote, quote * 2) + quote for part in parts)

    def named(self, sql: str, quote: str) -> str:
        """`sql` over these tables instead of `locks`, `lock_waiters`, `lock_events` and `lock_states`."""

        def name(found: re.Match[str]) -> str:
            table, index = found[1], found[2]
            return Tables(self.prefix).name(table + index, quote) if index else self.name(table, quote)

        return sql if self == Tables() else _TABLE.sub(name, sql)


_TABLE: Final = re.compile(r"\b(locks|lock_waiters|lock_events|lock_states)(_pin|_queue|_of_key|)\b")


@dataclass(frozen=True, slots=True)
class Statement:
    """SQL with `:name` parameters."""

    name: str
    sql: str
    reply: Reply
    keeps: bool = False
    """Is it sent for somebody who holds or waits? Then it never waits for a connection behind those that take."""
    urgent: bool = False
    """Does an attempt go on with it, or depend what is held on it? Then it gets the next connection."""
    row_locked: WhenLocked = WhenLocked.RETRY
    database_locked: WhenLocked = WhenLocked.RETRY

    def over(self, tables: Tables, quote: str) -> Statement:
        """The same over these tables."""
        return replace(self, sql=tables.named(self.sql, quote))


@lru_cache(maxsize=64)
def urgently(statement: Statement) -> Statement:
    """The same for whoever goes on with what has begun, where others only ask."""
    return replace(statement, urgent=True)


@dataclass(frozen=True, eq=False, repr=False)
class Dialect:
    """All that the protocol needs of one database; below each statement: what it does -> the columns it answers."""

    name: str
    take: Statement
    """Begin a tenure on a row that is free or expired -> fence."""
    create: Statement
    """Begin the first tenure of a key that has no row -> fence."""
    inspect: Statement
    """Read a key's row: owner, fence, count, ttl, age, remaining, label, host, pid, thread, program, task,
    revoked_fence, freed_fence, revocation."""
    reenter: Statement
    """Raise the count of a live tenure by one; the lease never gets shorter."""
    extend: Statement
    """Set the lease of a live tenure to end one life from now."""
    renew: Statement
    """Let the leases of many live tenures last at least one life more -> how many there were. One that was asked back
    is left out if its holder is `unaware` of that."""
    alive: Statement
    """Those of many tenures that are alive -> key, owner, fence, revocation (null if nobody has asked it back)."""
    attach: Statement
    """Enter a live tenure by its token -> count."""
    adopt: Statement
    """Enter a live tenure that nobody is in, and set its lease to end one life from now."""
    detach: Statement
    """Leave a live tenure to whoever bears its token: set the count to one less than `count` if it is no higher and
    nobody has attached since the flow with `host`, `pid` and `thread`; lower it by one where `count` is 0."""
    release: Statement
    """Set the count to one less than `count`; at zero the key is free -> the first ticket not served, 0 for none."""
    leave: Statement
    """Lower the count by one; at zero the key is free, once `min_hold` is over -> as `release`."""
    pin: Statement
    """In the caller's transaction: keep everybody from beginning a new tenure until it ends -> does it see this one?

    Always over `locks`: sessions may mean different tables by a name, so `tenures.pin` says which.
    """
    locate: Statement | None
    """Where the lock's own sessions find `locks` -> its schema, and something on a node of a Galera cluster."""
    stale: Statement
    """The next keys after `after`, a hundred at most, in order -> key, have they been free or expired for longer than
    `retention`."""
    reap: Statement
    """Delete such rows, of those that `names` names; none if one of them is locked."""
    tick: float
    """Seconds between two readings of the database's clock that are sure to differ; 0.0 if any two statements' do."""
    single_writer: bool
    """Does one transaction at a time write to the whole database, and keep all others from it?"""
    classify: Callable[[BaseException], Failure]
    """What a driver's error means."""
    ddl: str
    """The tables, in plain SQL."""
    queue: Queue
    """The statements of those who wait."""
    pins_prepared: bool = True
    """Does `pin` last until a two-phase transaction ends, and not only until it is prepared, or the server restarts?"""
    quote: str = '"'
    """What names are quoted with."""
    tables: Tables = Tables()

    def over(self, tables: Tables) -> Dialect:
        """The same over these tables."""
        if tables == self.tables:
            return self
        queue = replace(self.queue, **_over(self.queue, tables, self.quote))
        ddl = tables.named(self.ddl, self.quote)
        statements = _over(self, tables, self.quote) | {"pin": self.pin}
        return replace(self, **statements, tables=tables, queue=queue, ddl=ddl)


@dataclass(frozen=True, eq=False, repr=False)
class Queue:
    """The statements on `lock_waiters`, and on the two ticket numbers of a key's row."""

    join: Statement
    """Stand in a key's queue -> ticket; and, if `join_answers`, seconds until the lease ends and first ticket not
    served (as `queue_status`); nothing if the key has no row, or somebody else has just drawn that ticket."""
    announce: Statement
    """Let the key's row say that the ticket was given out, where `join` does not, or the row is another one since ->
    milliseconds until the lease ends, 0 if nobody holds the key."""
    queue_status: Statement
    """How a waiter stands: is the key its own, seconds until the lease ends (less than 0: since it ended, or the key
    was given back), first ticket not served, last ticket, live waiters before it (16 at most), has it a place."""
    grant: Statement
    """Let the first live waiter from ticket `first` on begin a tenure that ends with its place, if nobody else holds
    the key -> its ticket, channel, owner token, fence, how many milliseconds after joining it ends if that may be
    earlier than the place, else 0, and something if it has called its process, which one not `here` is. If not
    `grant_answers`: let the live waiter `heir` begin it -> fence."""
    accept: Statement
    """Let the lease of a waiter's new tenure last a whole life -> fence."""
    inherit: Statement
    """Let another flow of the same process have a waiter's place, under its own token `heir`."""
    hand_over_local: Statement
    """End a tenure and begin one of the owner `heir`, if nobody is in the queue or some `handovers_left` -> fence."""
    leave_queue: Statement
    """Let waiters leave their queues."""
    first_waiter: Statement
    """The first live waiter from ticket `first` on: ticket, channel, owner token."""
    call: Statement | None
    """Call the process that listens on a channel, where the database can."""
    hear: Statement | None
    """Where a call cannot say what it is about: wait `seconds` for one, unless a waiter of `places` has been granted
    its key -> ticket, fence, owner token and key of each; a row without a token when the time is up."""
    unlogged: Statement | None
    """There: keep what the session does out of the server's log of slow statements."""
    listen: Statement | None
    """There: let the session be called by `channel`, if no other one is, for `seconds` (whole ones) -> 1."""
    heartbeat: Statement
    """Let the places of many waiters last for longer, if they have not ended and nobody was granted the key there ->
    the owner tokens of those; or, from a database that cannot, one empty row for each."""
    waits: Statement
    """Who waits for what, and who holds that: owner, key, ticket, host, pid, thread; owner, host, pid, thread."""
    clear: Statement
    """Forget a queue in which nobody is alive, unless somebody came after ticket `last`."""
    dead: Statement
    """The next waiters after the owner token `after`, likewise -> owner token, have they been dead for longer than
    `retention`."""
    forget: Statement
    """Delete such rows, likewise."""
    join_answers: bool
    """Does `join` announce the ticket as well, and answer whether somebody has the key?"""
    grant_answers: bool
    """Does `grant` choose the heir itself, and answer whom to call?"""
    grant_leaves: bool
    """Does `grant` take the heir out of the queue as well? Else its row stays, and counts no more."""


def _over(statements: Dialect | Queue, tables: Tables, quote: str) -> dict[str, Any]:
    """Each of the statements over these tables, by the name of its field."""
    each = {field.name: getattr(statements, field.name) for field in fields(statements)}
    return {name: it.over(tables, quote) for name, it in each.items() if isinstance(it, Statement)}


class Cursor(Protocol):
    """The part of DB-API 2.0 (PEP 249) that the protocol needs."""

    @property
    def rowcount(self) -> int: ...
    @property
    def lastrowid(self) -> Any: ...
    def execute(self, operation: str, parameters: Any, /, **options: Any) -> Any: ...
    def fetchall(self) -> Any: ...


_NAME = re.compile(r"(?<!\w):([a-z_]+)")


class Values(dict[str, Any]):
    """A statement's parameters, which may be logged on their way to the database: owner tokens are among them."""

    def __repr__(self) -> str:
        return f"<values of {', '.join(self)}>"

    @classmethod
    def of(cls, statement: Statement, known: Mapping[str, Any]) -> Values:
        """Those that the statement names."""
        return cls((name, known[name]) for name in _NAME.findall(statement.sql))


@lru_cache(maxsize=256)
def rendered(sql: str, paramstyle: str) -> tuple[str, tuple[str, ...] | None]:
    """The text in a driver's parameter style and, for styles without names, the order of the parameters (PEP 249)."""
    sql = " ".join(sql.split())
    if paramstyle == "named":
        return sql, None
    if paramstyle == "pyformat":
        return _NAME.sub(r"%(\1)s", sql.replace("%", "%%")), None
    names: list[str] = _NAME.findall(sql)
    if paramstyle in {"numeric", "numeric_dollar"}:
        order = list(dict.fromkeys(names))
        mark = "$" if paramstyle == "numeric_dollar" else ":"
        return _NAME.sub(lambda found: f"{mark}{order.index(found[1]) + 1}", sql), tuple(order)
    if paramstyle == "format":
        return _NAME.sub("%s", sql.replace("%", "%%")), tuple(names)
    return _NAME.sub("?", sql), tuple(names)


def perform(
    cursor: Cursor,
    statement: Statement,
    parameters: Mapping[str, Any],
    paramstyle: str,
    **options: Any,
) -> list[Any]:
    """Run `statement` on a DB-API cursor and give its answer as rows; the driver's errors pass through."""
    text, order = rendered(statement.sql, paramstyle)
    values = Values(parameters) if order is None else tuple(parameters[name] for name in order)
    cursor.execute(text, values, **options)
    if statement.reply is Reply.ROWS:
        return list(cursor.fetchall())
    if statement.reply is Reply.COUNT:
        return [()] * cursor.rowcount
    return [(cursor.lastrowid,)] if cursor.rowcount else []
