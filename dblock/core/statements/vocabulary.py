"""How a database says what the statements have in common.

Rule: an expression here means the same on every database; what only one of them has is in that one's own statements.
"""

from __future__ import annotations

from collections.abc import Mapping

from dblock.core.statements.base import Reply


class Vocabulary:
    """How a database says what the statements have in common. `seconds` is a parameter or a column."""

    now: str
    """The clock, at this moment or at the start of the statement; never at the start of a transaction."""
    micros: str
    """The same as a number: microseconds since 1970."""
    greatest = "greatest"
    least = "least"
    numbers = Reply.ROWS
    """How the one number comes back that a statement answers with."""
    by_key = by_ticket = by_pin = ""
    """What makes sure that a table is read through the index on that."""
    at_once = ""
    """What stands before a statement that must not wait for another transaction's lock on a row."""
    durable = ""
    """The end of a condition: commit on disk before the answer, and wait a bounded time for the row."""
    asynchronous = ""
    """The same, but the commit may be lost in a crash of the server."""
    text = "varchar({})"
    """The type of text of so many characters, compared code point by code point."""
    seconds = "double precision"
    time: str
    serial: str
    """The type of a column that the database numbers by itself, as a primary key."""
    table_options = ""
    room = ""
    """What leaves room for new versions of rows in each page of a table."""

    def after(self, seconds: str, start: str = "") -> str:
        """So many seconds after `start`, now by default."""
        raise NotImplementedError

    def before(self, seconds: str) -> str:
        """So many seconds ago."""
        raise NotImplementedError

    def since(self, time: str) -> str:
        """Seconds from that time until now."""
        raise NotImplementedError

    def until(self, time: str) -> str:
        """Seconds from now until that time; more than 0 only if it has not come."""
        raise NotImplementedError

    def integer(self, parameter: str) -> str:
        """A number of 32 bits, where the database cannot tell."""
        return parameter

    def bigint(self, parameter: str) -> str:
        """A number of 64 bits."""
        return parameter

    def records(self, parameter: str, columns: Mapping[str, str]) -> str:
        """A parameter that is a JSON array of objects, as the table `record`; `columns`: their names, and their types.

        A type is `text`, `bigint` or `double precision`.
        """
        raise NotImplementedError

    def remember(self, number: str) -> str:
        """The number, which the statement answers with (see `returning`)."""
        return number

    def returning(self, column: str) -> str:
        """The end of a statement that answers with what it has set that column to, by `remember`."""
        return f"RETURNING {column}"

    def unchanged(self, column: str) -> str:
        """An assignment, as for a statement that answers with a column that it does not change."""
        return ""

    def answering(self, before: str, after: str) -> str:
        """The end of an UPDATE that answers with a number, which is not negative and is rounded where it has to be.

        It is told by the row as it was before, or as it is after; a database looks at one of them.
        """
        return f"RETURNING {after}"

    @property
    def unserved(self) -> str:
        """The end of a condition: the place was not served; where a grant deletes or ends it, none is needed."""
        return ""

    def unpinned(self, condition: str) -> str:
        """The condition, and that no transaction pins the key; it is not waited for."""
        return f"({condition})"

    def change(self) -> str:
        """The beginning of an UPDATE of the key's row that may wait for it, a short time."""
        return f"UPDATE locks{self.by_key} SET"

    def change_at_once(self, index: str) -> str:
        """The same, but it never waits for the row, which it reaches through an index."""
        return f"{self.at_once}UPDATE locks{index} SET"

    def delete_listed(self, table: str, name: str, condition: str) -> str:
        """Delete those rows for which the condition holds, of the table's rows that the JSON list `:names` names.

        `name` is the primary key. Rows that others have locked are waited for as by `at_once` and by the condition.
        """
        raise NotImplementedError
