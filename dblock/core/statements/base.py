"""The common types of the databases' modules: a statement, its reply, and the meaning of a driver's error.

Rule: a statement's text is a constant; values reach it as parameters only, and no parameter is in a comment. Drivers
that write values into the text quote them, and quotes mean nothing in a comment: a value that contains `*/` would
continue as SQL. So text for MySQL alone or MariaDB alone (`/*!80017 */`, `/*M! */`, a comment for the other) is
resolved before values are bound.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum, unique
from functools import lru_cache
from typing import Any, Final

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
    row_locked: WhenLocked = WhenLocked.RETRY
    database_locked: WhenLocked = WhenLocked.RETRY
    owners: tuple[int, ...] = ()
    """The columns of its answer that are owner tokens, which `without_secrets` masks."""

    def over(self, tables: Tables, quote: str) -> Statement:
        """The same statement over these tables."""
        return replace(self, sql=tables.named(self.sql, quote))


@lru_cache(maxsize=64)
def beside_writers(statement: Statement) -> Statement:
    """The same statement, which is left out while another transaction has locked the whole database."""
    return replace(statement, database_locked=WhenLocked.SKIP)


_NAME: Final = re.compile(r"(?<!\w):([a-z_]+)")
_COMMENT: Final = re.compile(r"/\*(M!|!80017)?(.*?)\*/", re.DOTALL)


NAMES_OF_SERVERS: Final = {True: "CONCAT_WS(' ', @@server_id, @@hostname, @@port)", False: "@@server_uuid"}
"""What names a server of MariaDB, and of MySQL."""
EXACT: Final = "CHARACTER SET utf8mb4 /*M! COLLATE utf8mb4_nopad_bin */ /*!80017 COLLATE utf8mb4_0900_bin */"
"""MySQL's and MariaDB's character set and collation of text in JSON; without them MariaDB reads it in the database's
own character set."""
CLUSTER: Final = "'cluster'"
"""What names every node of a cluster whose commits are certified, so that no node lacks one."""


@lru_cache(maxsize=256)
def on_server(statement: Statement, *, mariadb: bool, certified: bool = False) -> Statement:
    """The statement as MariaDB, or MySQL, reads it: its own conditional text uncommented, the other's left out.

    `certified`: the server is a node of a Galera cluster, or of a replication group.
    """
    ours = "M!" if mariadb else "!80017"
    sql = _COMMENT.sub(lambda found: found[2] if found[1] == ours else "" if found[1] else found[0], statement.sql)
    return replace(statement, sql=sql.replace(NAMES_OF_SERVERS[mariadb], CLUSTER) if certified else sql)


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
    if paramstyle == "numeric_dollar":
        order = list(dict.fromkeys(names))
        return _NAME.sub(lambda found: f"${order.index(found[1]) + 1}", sql), tuple(order)
    return _NAME.sub("?", sql), tuple(names)  # qmark


def perform(cursor: Any, statement: Statement, parameters: Mapping[str, Any], paramstyle: str) -> list[Any]:
    """Run `statement` on a DB-API cursor and give its answer as rows; the driver's errors pass through."""
    text, order = rendered(statement.sql, paramstyle)
    cursor.execute(text, parameters if order is None else tuple(map(parameters.__getitem__, order)))
    if statement.reply is Reply.ROWS:
        return list(cursor.fetchall())
    if statement.reply is Reply.COUNT:
        return [()] * cursor.rowcount
    return numbers(cursor.lastrowid, cursor.rowcount)


def numbers(number: int, changed: int) -> list[Any]:
    """The answer of a statement that leaves a number; one that changes rows of two tables still answers one row."""
    return [(number,)] * min(changed, 1)
