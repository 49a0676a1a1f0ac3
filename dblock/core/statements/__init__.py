"""The SQL of the protocol: one module per database, the same statements in the same order."""

from __future__ import annotations

from typing import Final

from dblock.core.statements import mysql, postgresql, sqlite
from dblock.core.statements.base import Dialect

DIALECTS: Final[dict[str, Dialect]] = {
    "postgresql": postgresql.DIALECT,
    "mysql": mysql.DIALECT,
    "mariadb": mysql.MARIADB,
    "sqlite": sqlite.DIALECT,
}
"""By the vendor names that Django and SQLAlchemy use."""
