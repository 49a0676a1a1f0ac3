"""The common types of the databases' modules: a statement, its reply, and the meaning of a driver's error.

Rule: a statement's text is a constant; values reach it as parameters only, and no parameter is in a comment. Drivers
that write values into the text quote them, and quotes mean nothing in a comment: a value that contains `*/` would
continue as SQL. So text for MySQL alone or MariaDB alone (`/*!80017 */`, `/*M! */`, a comment for the other) is
resolved before values are bound.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from enum import Enum, unique
from functools import lru_cache
from typing import Any, Final, Protocol

from dblock.core.errors import (
    LockError,
    LockStoreError,
    StaleSnapshot,
    StoreBusy,
    StoreConflict,
    StoreLocked,
    StoreReadOnly,
    StoreUnanswered,
)


class Reply(Enum):
    """How a statement's answer becomes rows."""

    ROWS = "the rows it returns"
    COUNT = "one empty row for each row that it changed"
    NUMBER = "one row with the number left by LAST_INSERT_ID(expr), if it changed something"


_KEPT: Final = "{database} kept refusing to {what}: {detail}"
_REFUSED: Final = "{database} refused to {what}: {detail}"
_NOT_OURS: Final = (
    "{tables} in {database} is not as dblock made it: {detail}. If it is dblock's, run its migrations to their end"
    "{create_index}; if it is another application's, {rename_tables}"
)


@unique
class Failure(Enum):
    """The meaning of a driver's error: the lock's error, its text, and whether the connection is of use no more.

    A connection that is of none is closed, with all that are idle.
    """

    CONFLICT = StoreConflict, _KEPT
    """Refused for a passing reason; nothing happened."""
    BUSY = StoreBusy, "{database} could not {what}, because another transaction has locked it: {detail}"
    """Another transaction has locked the row; nothing happened."""
    LOCKED = StoreLocked, _KEPT + "; {why_locked}"
    """Another transaction has locked the whole database; nothing happened."""
    DUPLICATE = StoreConflict, _REFUSED
    """The row is there already; nothing happened. To the protocol this is an answer without rows."""
    SPENT = StoreConflict, _KEPT, True
    """The session is unusable: its plan is out of date; nothing happened."""
    READ_ONLY = StoreReadOnly, _KEPT, True
    """The server or the session takes no writes; nothing happened."""
    STALE = (
        StaleSnapshot,
        _REFUSED + "; the transaction has read what others have changed since: take the lock, and then begin it",
    )
    """The transaction has read what others have changed since: it can never write."""
    DISCONNECTED = StoreUnanswered, "{database} did not answer when asked to {what}: {detail}", True
    """The connection broke; the outcome is unknown."""
    NO_TABLE = LockStoreError, "{database} has no table {tables}: {create_table}"
    """The table is missing."""
    OTHER_TABLE = LockStoreError, _NOT_OURS
    """The table lacks a column or an index that the statement names."""
    NO_RIGHT = (
        LockStoreError,
        _REFUSED + "; its user needs SELECT, INSERT, UPDATE and DELETE on the lock's tables (GRANT)",
    )
    """The user may not do that to the table; nothing happened."""
    OTHER = LockStoreError, _REFUSED
    """Anything else; nothing happened."""

    def __init__(self, raises: type[LockError], text: str, closes: bool = False) -> None:
        self.raises, self.text, self.closes = raises, text, closes


def causes(error: BaseException) -> Iterator[BaseException]:
    """The error and its causes, the driver's own among them; an adapter may keep its number or state to itself."""
    behind: BaseException | None = error
    while behind is not None:
        yield behind
        behind = behind.__cause__


class WhenLocked(Enum):
    """What to do if another transaction has locked the row, or the whole database."""

    RETRY = "the statement is resent, as long as there is time"
    SKIP = "it counts as having found nothing: the transaction that changes or pins the row goes first"
    RAISE = "the error is raised, and the sender does something else meanwhile"


def quoted(name: str, quote: str) -> str:
    """A name in a database's quotation marks."""
    return quote + name.replace(quote, quote * 2) + quote


@dataclass(frozen=True, slots=True)
class Tables:
    """Names and schema of the tables; `prefix` is part of their names and of their indexes'."""

    prefix: str = ""
    schema: str = ""
    """On MySQL a database; if empty, the session's default."""

    def name(self, table: str, quote: str) -> str:
        """The full name of a table such as `locks`, as SQL that quotes names with `quote`."""
        parts = [self.schema, self.prefix + table] if self.schema else [self.prefix + table]
        return ".".join(quoted(part, quote) for part in parts)

    def named(self, sql: str, quote: str) -> str:
        """`sql` over these tables instead of `locks`, `lock_waiters`, `lock_events`, `lock_states`, `lock_epoch`."""

        def name(found: re.Match[str]) -> str:
            made, table, index = found.groups()
            return quoted(f"{made}{self.prefix}{table}{index}", quote) if index else self.name(table, quote)

        return sql if self == Tables() else _TABLE.sub(name, sql)


_TABLE: Final = re.compile(
    r"\b(sqlite_autoindex_|)(locks|lock_waiters|lock_events|lock_states|lock_epoch)(_pin|_queue|_of_key|_1|)\b"
)


@dataclass(frozen=True, slots=True)
class Statement:
    """SQL with `:name` parameters; for MySQL and MariaDB `on_server` resolves it first."""

    name: str
    sql: str
    reply: Reply
    critical: bool = False
    """Whether it serves a holder or a waiter: it never waits for a connection behind takes."""
    priority: bool = False
    """Whether it continues an attempt, or held locks depend on it: it gets the next connection."""
    row_locked: WhenLocked = WhenLocked.RETRY
    database_locked: WhenLocked = WhenLocked.RETRY
    owners: tuple[int, ...] = ()
    """The columns of its answer that are owner tokens, which `without_secrets` masks."""

    def over(self, tables: Tables, quote: str) -> Statement:
        """The same statement over these tables."""
        return replace(self, sql=tables.named(self.sql, quote))


@lru_cache(maxsize=64)
def with_priority(statement: Statement) -> Statement:
    """The same statement as part of an attempt, with priority."""
    return replace(statement, priority=True)


@lru_cache(maxsize=64)
def beside_writers(statement: Statement) -> Statement:
    """The same statement, which is left out while another transaction has locked the whole database."""
    return replace(statement, database_locked=WhenLocked.SKIP)


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class Dialect:
    """The statements and properties of one database; below each statement: its effect -> the columns of its answer."""

    name: str
    take: Statement
    """Begin a tenure on a row that is free or expired -> fence."""
    create: Statement
    """Begin the first tenure of a key that has no row -> fence."""
    inspect: Statement
    """Read a key's row: owner, fence, count, ttl, age, remaining, label, host, pid, thread, program, task,
    revoked_fence, freed_fence, revocation, kind, reading, awaiting."""
    set_count: Statement
    """Set the number of entries of a live tenure, and let its lease last at least one `life` more."""
    extend: Statement
    """Set the lease of a live tenure to end one life from now."""
    renew: Statement
    """Let the leases of many live tenures last at least one life more -> one row for each. A tenure that was asked back
    is left out if its holder is `not_notified` of that."""
    alive: Statement
    """Those of many tenures that are alive -> key, owner, fence, revocation (null if it was not asked back)."""
    detach: Statement
    """Give a live tenure, which no flow holds from then on, the owner `heir`, the secret of a token; its lease lasts at
    least one `life` more."""
    attach: Statement
    """Give the live tenure of a token the owner `heir`, a flow's; its lease ends one `life` from now."""
    release: Statement
    """End a tenure; the key is free once `min_hold` is over -> the first ticket not served if it is free now, 0 for
    none."""
    pin: Statement
    """In the caller's transaction: no new tenure can begin until it ends -> whether it sees this tenure.

    Always over `locks`: sessions may resolve that name to different tables, so `tenures.pin` qualifies it.
    """
    locate: Statement | None = None
    """Where the lock's own sessions find `locks` -> its schema; true on a node of a Galera cluster."""
    stale: Statement
    """The next keys after `after`, at most a hundred, in order -> key, whether it has been free or expired for longer
    than `retention`."""
    reap: Statement
    """Delete such rows among `names`; none if one of them is locked."""
    tick: float = 0.0
    """Seconds after which two readings of the database's clock surely differ; 0.0 if any two statements' do."""
    single_writer: bool = False
    """Whether only one transaction at a time can write to the whole database."""
    classify: Callable[[BaseException], Failure]
    """The meaning of a driver's error."""
    ddl: str
    """The tables, in plain SQL."""
    queue: Queue
    """The statements of waiters."""
    shares: Shares
    """The statements of readers, writers and permits."""
    epoch: Epochs | None = None
    """The statements on the epoch; None if databases of this kind have no replicas."""
    pins_prepared: bool = True
    """Whether `pin` lasts until a two-phase transaction ends, also if it is prepared and the server restarts."""
    quote: str = '"'
    """The quotation mark of names."""
    tables: Tables = Tables()

    def over(self, tables: Tables) -> Dialect:
        """The same dialect over these tables."""
        if tables == self.tables:
            return self
        queue = replace(self.queue, **_over(self.queue, tables, self.quote))
        shares = replace(self.shares, **_over(self.shares, tables, self.quote))
        ddl = tables.named(self.ddl, self.quote)
        statements = _over(self, tables, self.quote) | {"pin": self.pin}
        epoch = self.epoch and replace(self.epoch, **_over(self.epoch, tables, self.quote))
        return replace(self, **statements, tables=tables, queue=queue, shares=shares, epoch=epoch, ddl=ddl)


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class Queue:
    """The statements on `lock_waiters`, and on the two ticket numbers of a key's row."""

    join: Statement
    """Join a key's queue -> ticket; with `join_answers` also seconds until the lease ends and the first ticket not
    served (as `queue_status`); nothing if the key has no row, or another waiter has just got that ticket."""
    announce: Statement
    """Record in the key's row that the ticket was given out, if `join` does not, or the row was created anew since ->
    milliseconds until the lease ends, 0 if the key is not held."""
    queue_status: Statement
    """The queue as seen from a waiter: whether it has the key, seconds until the lease ends (less than 0: since it
    ended or was released), first ticket not served, last ticket, number of live waiters among the 16 nearest before it
    (1 if all of those are dead, as there may be others), whether it has a place."""
    grant: Statement
    """Let the first live waiter from ticket `first` on begin a tenure that ends with its place, if the key has no other
    holder -> its ticket, channel, owner token, fence, milliseconds from its join to the end of the tenure if that may
    be earlier than the place's, else 0, and not null if the database has notified its process, as one not `here`. If
    not `grant_answers`: let the live waiter `heir` begin it -> fence."""
    accept: Statement
    """Let a waiter's new tenure count from now, and its lease last a whole life -> fence."""
    adopt_place: Statement
    """Give a waiter's place to another flow of the same process, under its own token `heir`."""
    hand_over_local: Statement
    """End a tenure and begin one of the owner `heir`, if the queue is empty or `handovers_left` is positive -> fence;
    and milliseconds of its lease, if that may be less than a whole life (with `covers` 1), else 0."""
    leave_queue: Statement
    """Delete places."""
    first_waiter: Statement
    """The first live waiter from ticket `first` on -> ticket, channel, owner token."""
    call: Statement | None = None
    """Notify the process that listens on a channel, if the database can."""
    sleep_until_killed: Statement | None = None
    """If a notification has no payload: wait `seconds` for one, unless a waiter of `places` has been granted its key ->
    ticket and key of each; a row without a key when the time is up."""
    unlogged: Statement | None = None
    """For that: keep the session's statements out of the server's slow log, and let the server end it soon when it is
    silent."""
    listen: Statement | None = None
    """For that: let the session own the name `channel`, waiting whole `seconds` for it -> 1."""
    heartbeat: Statement
    """Extend the places of many waiters that have not ended and were not served -> their owner tokens; or one empty row
    for each, from a database that cannot return them."""
    chain: Statement
    """The key that the waiter `owner` waits for, the key that its holder waits for, and so on -> of the waiter owner,
    key, ticket, host, pid, thread; of its key's holder owner, host, pid, thread; the waiter's confirmed `circle`."""
    confirm: Statement
    """Record that the waiter `owner` sees itself in the `circle` of that digest."""
    clear: Statement
    """Clear a queue without live waiters, unless one has joined after ticket `last`."""
    dead: Statement
    """The next waiters after the owner token `after`, as `stale` -> owner token, whether dead for longer than
    `retention`."""
    forget: Statement
    """Delete such rows, as `reap`."""
    join_answers: bool = False
    """Whether `join` also announces the ticket, and answers whether the key is held."""
    grant_answers: bool = False
    """Whether `grant` chooses the heir itself, and answers which waiter to notify."""
    grant_leaves: bool = False
    """Whether `grant` also deletes the heir's place; else that stays, and no longer counts."""


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class Shares:
    """The statements on the shares of a key: the rows of its readers or permits, beside the key's own row, the door.

    The shares of a key are the rows with keys between `low` and `high`.
    """

    read: Statement
    """Begin a reader's tenure on a row of its own, if no writer has the door and, unless `admitted`, none waits there;
    with a `holder`, only if that one has the door, with the fence `holders_fence` -> fence."""
    take_slot: Statement
    """As `take`, for a slot, if the door is free and nobody waits there -> fence."""
    alone: Statement
    """If there is no share, let the tenure of the door's holder count from now on; its lease gets no shorter -> one
    row."""
    await_leaving: Statement
    """Let the lease of the door's holder end one life from now, and have it notified on `channel` when a share is left,
    unless it was `alone` -> one row."""
    listed: Statement
    """At most `most` shares, in the order of their keys -> key, owner token, fence, seconds until the lease ends (0 or
    less if the share is free)."""
    end_expired: Statement
    """Delete those of `names` that are free or expired and that no transaction pins."""
    leave_read: Statement
    """End a reader's tenure, and delete its row -> as `awaited`, if `leaving_answers`."""
    leave_slot: Statement
    """End a tenure of a share whose row is kept -> as `awaited`, if `leaving_answers`."""
    awaited: Statement
    """Read where the door's holder waits for the end of a share -> channel (null if it does not wait), fence."""
    leaving_answers: bool = False
    """Whether the statements that leave also answer that; else `awaited` is sent after them."""
    pins_gaps: bool = False
    """Whether the pin of a row may keep others from inserting the row before it."""


@dataclass(frozen=True, eq=False, repr=False)
class Epochs:
    """The statements on the row of `lock_epoch` (see `dblock.core.statements.epoch`)."""

    first: Statement
    """Write the row of tables that were made a moment ago."""
    status: Statement
    """Read the row -> whether this server wrote it, seconds since it was first found, seconds until keys open (0 or
    less if they are open), floor; nothing if there is no row."""
    begin: Statement
    """Write the row, unless this server wrote it: keys are closed for `seconds`, unless it has only restarted."""
    end: Statement
    """Open the keys now, if this server wrote the row -> one row."""
    close: Statement
    """Close the keys for `seconds`, as for a server that is another one than the last."""


def _over(statements: Dialect | Queue | Shares | Epochs, tables: Tables, quote: str) -> dict[str, Any]:
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


_NAME: Final = re.compile(r"(?<!\w):([a-z_]+)")
_COMMENT: Final = re.compile(r"/\*(M!|!80017)?(.*?)\*/", re.DOTALL)


NAMES_OF_SERVERS: Final = {True: "CONCAT_WS(' ', @@server_id, @@hostname, @@port)", False: "@@server_uuid"}
"""What names a server of MariaDB, and of MySQL."""
EXACT: Final = "CHARACTER SET utf8mb4 /*M! COLLATE utf8mb4_nopad_bin */ /*!80017 COLLATE utf8mb4_0900_bin */"
"""MySQL's and MariaDB's character set and collation of text in JSON; without them MariaDB reads it in the database's
own character set."""
CLUSTER: Final = "'cluster'"
"""What names every node of a cluster whose commits are certified, so that no node lacks one."""


def for_server(sql: str, *, mariadb: bool, certified: bool = False) -> str:
    """The text as MariaDB, or MySQL, reads it: its own conditional text uncommented, the other's left out.

    `certified`: the server is a node of a Galera cluster, or of a replication group.
    """
    ours = "M!" if mariadb else "!80017"
    sql = _COMMENT.sub(lambda found: found[2] if found[1] == ours else "" if found[1] else found[0], sql)
    return sql.replace(NAMES_OF_SERVERS[mariadb], CLUSTER) if certified else sql


@lru_cache(maxsize=256)
def on_server(statement: Statement, *, mariadb: bool, certified: bool = False) -> Statement:
    """The statement for MariaDB, or for MySQL."""
    return replace(statement, sql=for_server(statement.sql, mariadb=mariadb, certified=certified))


class Values(dict[str, Any]):
    """A statement's parameters; a `repr` in a log does not show them, as owner tokens are among them."""

    def __repr__(self) -> str:
        return f"<values of {', '.join(self)}>"

    @classmethod
    def of(cls, statement: Statement, known: Mapping[str, Any]) -> Values:
        """The parameters that the statement names."""
        return cls((name, known[name]) for name in _NAME.findall(statement.sql))


class Masked(str):
    """A text whose `repr` does not show it, as error reports call `repr` on the locals of frames.

    An owner token is masked from the moment at which it is made or read, and so are texts made of it.
    """

    __slots__ = ()

    def __repr__(self) -> str:
        return "'...'"


def without_secrets(statement: Statement, rows: Sequence[Sequence[Any]]) -> Sequence[Sequence[Any]]:
    """The answer of a statement with its owner tokens masked."""
    return [
        tuple([Masked(value) if type(value) is str and n in statement.owners else value for n, value in enumerate(row)])
        for row in rows
    ]


def in_order(parameters: Mapping[str, Any], order: Iterable[str]) -> tuple[Any, ...]:
    """The values for a style without names."""
    return tuple([Masked(value) if type(value) is str else value for value in map(parameters.__getitem__, order)])


@lru_cache(maxsize=256)
def rendered(sql: str, paramstyle: str) -> tuple[str, tuple[str, ...] | None]:
    """The text in a driver's parameter style and, for styles without names, the order of the parameters (PEP 249).

    Raises ValueError for a parameter in a comment.
    """
    sql = " ".join(sql.split())
    if any(_NAME.search(comment[0]) for comment in _COMMENT.finditer(sql)):
        raise ValueError(f"a parameter in a comment: {sql}")
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
    values = Values(parameters) if order is None else in_order(parameters, order)
    cursor.execute(text, values, **options)
    if statement.reply is Reply.ROWS:
        return list(cursor.fetchall())
    if statement.reply is Reply.COUNT:
        return [()] * cursor.rowcount
    return numbers(cursor.lastrowid, cursor.rowcount)


def numbers(number: int, changed: int) -> list[Any]:
    """The answer of a statement that leaves a number; one that changes rows of two tables still answers one row."""
    return [(number,)] * min(changed, 1)
