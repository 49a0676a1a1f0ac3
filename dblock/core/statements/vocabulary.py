"""The expressions in which databases differ, for the common statements.

Rule: an expression means the same on every database; features of a single database are in its own statements.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from dblock.core.statements.base import Reply
from dblock.core.values import MARGIN

Text = Callable[..., str]
"""A text with places for others: `"CAST({} AS bigint)".format`."""
_AS_IT_IS: Final = "{}".format


class Vocabulary:
    """A database's expressions for the common statements. `seconds` is a parameter or a column."""

    now: str
    """The clock, at this moment or at the start of the statement; never at the start of a transaction."""
    micros: str
    """The same as a number: microseconds since 1970."""
    greatest = "greatest"
    least = "least"
    numbers = Reply.ROWS
    """The kind of reply of a statement that answers one number."""
    by_key = by_owner = by_ticket = by_pin = ""
    """Forces a table to be read through an index: `locks` by the key, or by the index that pins lock, `lock_waiters` by
    the owner, or by the key and the ticket."""
    join = "JOIN"
    """A join of two tables that reads the first one first, if the database has such a join."""
    read_at_once = ""
    """The end of a query in an UPDATE whose rows it would wait for otherwise."""
    at_once = ""
    """Prefix of a statement that must not wait for another transaction's lock on a row."""
    durable = ""
    """The end of a condition: commit on disk before the answer, and wait a bounded time for the row."""
    asynchronous = ""
    """The same, but the commit may be lost in a crash of the server."""
    table_options = ""
    server = ""
    """Text that a server and its replicas never share; empty if databases of this kind have no replicas."""
    history = ""
    """What a restart keeps; a restored dump changes it, and a promotion if the database has timelines."""
    undumped = ""
    """The `history`, if it is a number that a dump of a `float` changes; empty if it is a text."""
    unserved = ""
    """The end of a condition: the place was not served; empty if a grant deletes or ends the place."""

    shares_of_locks: str
    """A query of the shares, as `share`, of the key in a row of `locks` outside; ends in a condition."""

    join_places_of: Text
    """A join with the rows of `lock_waiters`, as `waiter`, whose tokens begin with a flow's name.

    Tokens are hexadecimal digits, and `g` comes after all of these.
    """
    before: Text
    """The time so many seconds ago."""
    since: Text
    """Seconds from a time until now."""
    until: Text
    """Seconds from now until a time; more than 0 only if it has not come."""
    integer: Text = _AS_IT_IS
    """A number of 32 bits, if the database needs a cast."""
    bigint: Text = _AS_IT_IS
    """A number of 64 bits, if the database needs a cast."""
    number: Text = _AS_IT_IS
    """A number with a fraction, if the database needs a cast."""
    looked_up: Text = "{} = {}".format
    """`column = value`, where `value` is a column of another table, through the index on `column`.

    With a plain equality the planner may read the whole table or index and compare. That is cheap while the table is
    small, but the plan may be kept, or made from old statistics, when it no longer is.
    """
    remember: Text = _AS_IT_IS
    """The number, remembered as the statement's answer (see `returning`)."""
    returning: Text = "RETURNING {}".format
    """The end of a statement that answers the new value of that column, set by `remember`."""
    unchanged: Text = "".format
    """An assignment for a statement that answers a column that it does not change."""
    answering: Text = "RETURNING {1}".format
    """The end of an UPDATE that answers a number, which is not negative, and rounded if necessary.

    Two texts express it, by the old row and by the new row; a database uses one of them.
    """
    unpinned: Text = "({})".format
    """The condition, and that no transaction pins the key, without waiting for that."""
    is_latest: Text = "abs(epoch.floor) < {}.fence".format
    """The condition on the row of `epoch` that the tenure in a row began in it, so that no later one was lost."""
    asynchronous_unless: Text = "".format
    """The end of a condition: as `asynchronous`, or as `durable` if the condition holds."""
    change_at_once: Text = "UPDATE locks{} SET".format
    """As `change`, without waiting for the row, which it reaches through an index."""
    of_listed: Text = _AS_IT_IS
    """The condition on the keys of the list `:names`; with that list, if it might be evaluated for others."""

    def after(self, seconds: str, start: str = "") -> str:
        """The time so many seconds after `start`, by default after now."""
        raise NotImplementedError

    def is_open(self, row: str = "locks", *, also: str | None = None) -> str:
        """The end of a condition: a tenure may begin in this epoch (see `dblock.core.statements.epoch`).

        `row` has the key's last tenure; empty if the key has no row. `also`: one more condition on the row of `epoch`,
        by default that the tenure in `row`, which is over by this server's clock, is over by an old primary's as well.
        """
        if not self.server:
            return ""
        kept = f" AND (epoch.floor < {row}.fence OR {self.after(f'{row}.ttl', 'epoch.since')} <= {self.now})"
        if also is None:
            over = f"{row}.owner IS NULL OR {self.after(str(MARGIN), f'{row}.expires_at')} <= {self.now}"
            also = row and f"({self.is_latest(row)} OR {over})"
        return f"""AND EXISTS (SELECT 1 FROM lock_epoch AS epoch
              WHERE epoch.id = 1 AND {self.wrote("epoch")}
                AND epoch.opens_at <= {self.now}{kept if row else ""}{also and f" AND {also}"})"""

    def wrote(self, row: str) -> str:
        """The condition that this server wrote the row of `lock_epoch`, and not the restoring of a dump."""
        return f"{row}.server = {self.server}" + (f" AND {row}.history = {self.undumped}" if self.undumped else "")

    def change(self) -> str:
        """The beginning of an UPDATE of the key's row that may wait for it for a short time."""
        return f"UPDATE locks{self.by_key} SET"

    def delete_listed(self, table: str, name: str, condition: str) -> str:
        """Delete the table's rows in the JSON list `:names` for which the condition holds.

        `name` is the primary key. `at_once` and the condition decide how long it waits for locked rows.
        """
        raise NotImplementedError
