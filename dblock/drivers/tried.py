"""The databases and drivers that the lock is tested with. It refuses others before it connects.

A driver decides which text goes to the server, what a row count means, and which error means a lost connection. With a
driver that differs in these, a fence may be wrong or a mistake may look like an outage.
"""

from __future__ import annotations

from typing import Final

from dblock.core.errors import UnsupportedDatabase

_MYSQL: Final = ("pymysql", "mysqldb", "aiomysql", "asyncmy")
TRIED: Final = {
    "postgresql": ("psycopg", "psycopg2", "asyncpg"),
    "mysql": _MYSQL,
    "mariadb": _MYSQL,
    "sqlite": ("sqlite3", "aiosqlite"),
}
"""The drivers of each database, by the names of their modules in lower case."""
_SAME: Final = {"psycopg_async": "psycopg", "pysqlite": "sqlite3"}
"""SQLAlchemy's names of some of them."""


def refuse_untried(vendor: str, driver: str, where: str) -> None:
    """Raise UnsupportedDatabase for any other database or driver; `where` names its owner in the message."""
    if vendor not in TRIED:
        raise UnsupportedDatabase(f"{where} speaks {vendor}; the lock needs PostgreSQL, MySQL, MariaDB or SQLite")
    name = driver.lower()
    if _SAME.get(name, name) not in TRIED[vendor]:
        tried = ", ".join(TRIED[vendor])
        raise UnsupportedDatabase(
            f"{where} has the driver {driver}, which the lock is not tested with; it is tested with {tried}"
        )
