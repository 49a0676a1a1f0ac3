"""The SQL of the protocol.

Rule: `common` writes the statements once; a database's module gives its vocabulary and the few that truly differ.
"""

from __future__ import annotations

from typing import Final

from dblock.core.errors import UnsupportedDatabase
from dblock.core.statements import mysql, postgresql, sqlite
from dblock.core.statements.base import Tables
from dblock.core.statements.dialect import Dialect

DIALECTS: Final[dict[str, Dialect]] = {
    "postgresql": postgresql.DIALECT,
    "mysql": mysql.DIALECT,
    "mariadb": mysql.DIALECT,
    "sqlite": sqlite.DIALECT,
}
"""By the vendor names that Django and SQLAlchemy use."""


def dialect_for(vendor: str, tables: Tables) -> Dialect:
    """The statements for a database, over these tables. UnsupportedDatabase for a schema on SQLite."""
    if vendor == "sqlite" and tables.schema:
        raise UnsupportedDatabase(f"SQLite has no schemas, such as {tables.schema!r}: choose a prefix for the tables")
    return DIALECTS[vendor].over(tables)
