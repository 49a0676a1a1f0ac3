"""The SQL of the protocol.

Rule: `common` writes the statements once; a database's module gives its vocabulary and the few that truly differ.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from importlib import import_module
from typing import TYPE_CHECKING, Final

from dblock.core.errors import UnsupportedDatabase
from dblock.core.statements.base import Tables

if TYPE_CHECKING:
    from dblock.core.statements.dialect import Dialect


class _Dialects(Mapping[str, "Dialect"]):
    """The dialects; each is imported when first needed."""

    _homes: Final = {"postgresql": "postgresql", "mysql": "mysql", "mariadb": "mysql", "sqlite": "sqlite"}

    def __getitem__(self, vendor: str) -> Dialect:
        found: Dialect = import_module(f"{__name__}.{self._homes[vendor]}").DIALECT
        return found

    def __iter__(self) -> Iterator[str]:
        return iter(self._homes)

    def __len__(self) -> int:
        return len(self._homes)


DIALECTS: Final = _Dialects()
"""By the vendor names that Django and SQLAlchemy use."""


def dialect_for(vendor: str, tables: Tables) -> Dialect:
    """The statements for a database, over these tables. UnsupportedDatabase for a schema on SQLite."""
    if vendor == "sqlite" and tables.schema:
        raise UnsupportedDatabase(f"SQLite has no schemas, such as {tables.schema!r}: choose a prefix for the tables")
    return DIALECTS[vendor].over(tables)
