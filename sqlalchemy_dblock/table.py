"""The lock's tables for SQLAlchemy and Alembic: the same as the Django migration makes.

Rule: only the protocol's statements write them. Only SQLAlchemy's own types and options describe them, since Alembic
can write only these into a migration.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from sqlalchemy import (
    DDL,
    BigInteger,
    Column,
    Connection,
    DateTime,
    Double,
    Identity,
    Index,
    Integer,
    MetaData,
    String,
    Table,
    event,
    text,
)
from sqlalchemy.dialects import mysql, sqlite
from sqlalchemy.dialects.postgresql.base import PGDialect
from sqlalchemy.types import TypeEngine

from dblock.core.statements import DIALECTS
from dblock.core.statements.base import Tables
from dblock.core.statements.common import WHO
from dblock.core.statements.mysql import COLLATIONS
from dblock.core.validation import valid_tables


def _exact(length: int) -> TypeEngine[str]:
    """Text compared code point by code point: case, accents, trailing blanks and normal form all count."""
    return String(length).with_variant(String(length, collation="C"), "postgresql")


# All text here has this collation, so it is set for the table. MySQL and MariaDB have different names for it, and an
# engine or a migration for MySQL may connect to either: the text for one of them is a comment for the other.
_INNODB: dict[str, Any] = {
    "mysql_engine": "InnoDB",
    "mysql_collate": f"/*!80017 {COLLATIONS['mysql']} */ /*M! {COLLATIONS['mariadb']} */",
    "mariadb_engine": "InnoDB",
    "mariadb_collate": COLLATIONS["mariadb"],
}

_moment = DateTime(timezone=True).with_variant(mysql.DATETIME(fsp=6), "mysql", "mariadb")
_seconds: TypeEngine[float] = Double().with_variant(sqlite.REAL(), "sqlite")

# Half of each page stays free for new versions of its rows, so that updates stay heap-only. SQLAlchemy 2.0 has no
# option for that, but writes the text behind USING unchanged, and WITH comes next. Before 2.0.26 an Alembic migration
# needs `op.execute("ALTER TABLE locks SET (fillfactor = 50)")` by hand.
_KNOWN = {name for kind, names in PGDialect.construct_arguments or () if kind is Table for name in names}
_WAYS: dict[str, Any] = {"with": {"fillfactor": 50}, "using": "heap WITH (fillfactor = 50)"}
_ROOM: dict[str, Any] = next(({f"postgresql_{name}": way} for name, way in _WAYS.items() if name in _KNOWN), {})


def metadata_for(prefix: str = "", schema: str | None = None) -> MetaData:
    """The tables under other names: `prefix` comes before their names and their indexes', `schema` contains them.

    The engines for these locks need the same options: `create_engine(..., execution_options={"dblock_prefix": prefix,
    "dblock_schema": schema})`. The schema (on MySQL: the database) has to exist. Raises TypeError or ValueError for a
    name that is not plain.
    """
    tables = valid_tables(prefix, schema)
    made = MetaData(schema=tables.schema or None)
    _add_locks(made, prefix)
    _add_lock_waiters(made, prefix)
    if not _ROOM:
        for table in made.tables.values():
            make_room = DDL("ALTER TABLE %(fullname)s SET (fillfactor = 50)").execute_if(dialect="postgresql")  # type: ignore[no-untyped-call]
            event.listen(table, "after_create", make_room)
    _add_lock_events(made, prefix)
    _add_lock_epoch(made, prefix)
    return made


def _whose() -> list[Column[Any]]:
    """Whose row it is."""
    return [Column(name, Integer if name == "pid" else _exact(255), nullable=False) for name in WHO.split(", ")]


def _add_locks(made: MetaData, prefix: str) -> None:
    _ = Table(
        f"{prefix}locks",
        made,
        Column("lock_key", _exact(255), primary_key=True),
        Column("owner", _exact(64), nullable=True),
        Column("fence", BigInteger, nullable=False),
        Column("count", Integer, nullable=False),
        Column("ttl", _seconds, nullable=False),
        Column("acquired_at", _moment, nullable=False),
        Column("expires_at", _moment, nullable=False),
        *_whose(),
        Column("last_ticket", BigInteger, nullable=False, server_default=text("0")),
        Column("served_ticket", BigInteger, nullable=False, server_default=text("0")),
        Column("revoked_fence", BigInteger, nullable=False, server_default=text("0")),
        Column("freed_fence", BigInteger, nullable=False, server_default=text("0")),
        Column("revocation", _exact(255), nullable=False, server_default=""),
        Column("kind", Integer, nullable=False, server_default=text("0")),
        Column("reading", Integer, nullable=False, server_default=text("0")),
        Column("awaiting_fence", BigInteger, nullable=False, server_default=text("0")),
        Column("awaiting_channel", _exact(63), nullable=False, server_default=""),
        # On MySQL `lock.guard()` locks its entries; the others have it too, so that Alembic sees one table everywhere.
        Index(f"{prefix}locks_pin", "lock_key", unique=True),
        **_INNODB,
        **_ROOM,
    )


def _add_lock_waiters(made: MetaData, prefix: str) -> None:
    _ = Table(
        f"{prefix}lock_waiters",
        made,
        Column("owner", _exact(64), primary_key=True),
        Column("lock_key", _exact(255), nullable=False),
        Column("ticket", BigInteger, nullable=False),
        Column("ttl", _seconds, nullable=False),
        *_whose(),
        Column("channel", _exact(63), nullable=False),
        Column("circle", _exact(64), nullable=False, server_default=""),
        Column("reading", Integer, nullable=False, server_default=text("0")),
        Column("joined_at", _moment, nullable=False),
        Column("expires_at", _moment, nullable=False),
        Index(f"{prefix}lock_waiters_queue", "lock_key", "ticket", unique=True),
        **_INNODB,
        **_ROOM,
    )


def _add_lock_events(made: MetaData, prefix: str) -> None:
    _ = Table(
        f"{prefix}lock_events",
        made,
        Column("id", BigInteger().with_variant(Integer, "sqlite"), Identity(), primary_key=True),
        Column("lock_key", _exact(255), nullable=False),
        Column("kind", _exact(64), nullable=False),
        Column("fence", BigInteger, nullable=False),
        Column("seconds", _seconds, nullable=False),
        Column("detail", _exact(255), nullable=False),
        *_whose(),
        Column("happened_at", _moment, nullable=False),
        Index(f"{prefix}lock_events_of_key", "lock_key", "id"),
        sqlite_autoincrement=True,
        **_INNODB,
    )


def _add_lock_epoch(made: MetaData, prefix: str) -> None:
    table = Table(
        f"{prefix}lock_epoch",
        made,
        Column("id", Integer, primary_key=True, autoincrement=False),
        Column("server", _exact(255), nullable=False),
        Column("history", _exact(255).with_variant(mysql.FLOAT(), "mysql", "mariadb"), nullable=False),
        Column("since", _moment, nullable=False),
        Column("opens_at", _moment, nullable=False),
        Column("floor", BigInteger, nullable=False),
        **_INNODB,
    )
    # An Alembic migration without this row closes the keys for FAILOVER_QUARANTINE at the first use, on MySQL, MariaDB,
    # and a PostgreSQL server that was promoted before.
    event.listen(table, "after_create", partial(_first_epoch, prefix=prefix))


def _first_epoch(table: Table, connection: Connection, *, prefix: str, **_: object) -> None:
    """Write the row of a table that nobody has used."""
    name, schema = connection.dialect.name, connection.schema_for_object(table)
    if name in DIALECTS and (epoch := DIALECTS[name].over(Tables(prefix, schema or "")).epoch) is not None:
        connection.execute(DDL(epoch.first.sql))  # type: ignore[no-untyped-call]


metadata = metadata_for()
"""The tables, for Alembic's `target_metadata`; `create_tables(engine)` makes them."""

locks = metadata.tables["locks"]
"""A key's row; read it with SQLAlchemy, but leave writing to the protocol."""
lock_waiters = metadata.tables["lock_waiters"]
"""A place in the queue of a key."""
lock_events = metadata.tables["lock_events"]
"""An event of a key, if a history is kept."""
