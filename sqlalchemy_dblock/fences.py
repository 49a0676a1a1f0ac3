"""Statements that refuse stale writers: each row stores the newest fence that wrote it, and refuses older ones."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar

from sqlalchemy import BigInteger, Update
from sqlalchemy.orm import Mapped, mapped_column

from dblock.core.lock.fencing import fence_of

if TYPE_CHECKING:
    from sqlalchemy import ColumnElement

    from dblock.core.lock.base import BaseLock

U = TypeVar("U", bound=Update)


class FencedMixin:
    """Gives a declarative class the column that `fenced_update` needs."""

    fence: Mapped[int] = mapped_column(BigInteger, default=0, server_default="0")


def fenced_update(statement: U, lock: BaseLock | int, column: ColumnElement[int] | None = None) -> U:
    """The UPDATE, restricted to rows that no newer tenure has written, and storing the lock's fence in them.

    `lock` is held by this flow (LockNotHeld otherwise), or a fence that came in a message; `column` is the column for
    it, by default the table's `fence`. A lost lock still has its fence: the rows decide. The result's `rowcount` is the
    number of updated rows.
    """
    if not isinstance(statement, Update):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise TypeError(f"fenced_update takes an update(...) and then a lock, not {statement!r}")
    fence = fence_of(lock)
    if column is None and "fence" not in statement.table.c:
        raise TypeError(f"{statement.table} has no column `fence`: say which column it is, or use FencedMixin")
    where: Any = statement.table.c["fence"] if column is None else column
    return statement.where(where <= fence).values({where: fence})
