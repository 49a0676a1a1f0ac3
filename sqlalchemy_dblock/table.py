"""The tables `locks` and `lock_waiters` for SQLAlchemy and Alembic: the same as the Django migration's.

Rule: only the protocol's statements write it.
"""

from __future__ import annotations

from typing import Any

from sqlalchemy import DDL, BigInteger, Column, DateTime, Double, Index, Integer, MetaData, String, Table, event, text
from sqlalchemy.dialects import mysql, sqlite
from sqlalchemy.dialects.postgresql.base import PGDialect
from sqlalchemy.ext.compiler import compiles
from sqlalchemy.types import TypeEngine

from dblock.core.statements.mysql import COLLATIONS


class ExactString(String):
    """Text compared code point by code point: case, accents, trailing blanks and normal form all count."""

    __visit_name__ = "exact_string"
    cache_ok = True


@compiles(ExactString)
def _plain(type_: ExactString, compiler: Any, **_: Any) -> str:
    return f"VARCHAR({type_.length})"


@compiles(ExactString, "postgresql")
def _postgresql(type_: ExactString, compiler: Any, **_: Any) -> str:
    return f'VARCHAR({type_.length}) COLLATE "C"'


@compiles(ExactString, "mysql", "mariadb")
def _mysql(type_: ExactString, compiler: Any, **_: Any) -> str:
    server = "mariadb" if compiler.dialect.is_mariadb else "mysql"
    return f"VARCHAR({type_.length}) CHARACTER SET utf8mb4 COLLATE {COLLATIONS[server]}"


_moment = DateTime(timezone=True).with_variant(mysql.DATETIME(fsp=6), "mysql", "mariadb")
_seconds: TypeEngine[float] = Double().with_variant(sqlite.REAL(), "sqlite")

# Half of each page stays free for new versions of its rows, so that updates stay heap-only. SQLAlchemy 2.0 cannot say
# so in the table; there an Alembic migration wants `op.execute("ALTER TABLE locks SET (fillfactor = 50)")` by hand.
_CAN_SAY = any(kind is Table and "with" in options for kind, options in PGDialect.construct_arguments or ())
_ROOM: dict[str, Any] = {"postgresql_with": {"fillfactor": 50}} if _CAN_SAY else {}

metadata = MetaData()
"""For `metadata.create_all(engine)`, or in Alembic's `target_metadata`."""

locks = Table(
    "locks",
    metadata,
    Column("lock_key", ExactString(255), primary_key=True),
    Column("owner", ExactString(64), nullable=True),
    Column("fence", BigInteger, nullable=False),
    Column("count", Integer, nullable=False),
    Column("ttl", _seconds, nullable=False),
    Column("acquired_at", _moment, nullable=False),
    Column("expires_at", _moment, nullable=False),
    Column("label", ExactString(255), nullable=False),
    Column("host", ExactString(255), nullable=False),
    Column("pid", Integer, nullable=False),
    Column("thread", ExactString(255), nullable=False),
    Column("program", ExactString(255), nullable=False),
    Column("celery_task_id", ExactString(255), nullable=False),
    Column("last_ticket", BigInteger, nullable=False, server_default=text("0")),
    Column("served_ticket", BigInteger, nullable=False, server_default=text("0")),
    # In MySQL `lock.guard()` locks its entries; the others have it too, so that Alembic sees one table everywhere.
    Index("locks_pin", "lock_key", unique=True),
    mysql_engine="InnoDB",
    mariadb_engine="InnoDB",
    **_ROOM,
)
"""A key's row; read it with SQLAlchemy, but leave writing to the protocol."""

lock_waiters = Table(
    "lock_waiters",
    metadata,
    Column("owner", ExactString(64), primary_key=True),
    Column("lock_key", ExactString(255), nullable=False),
    Column("ticket", BigInteger, nullable=False),
    Column("ttl", _seconds, nullable=False),
    Column("label", ExactString(255), nullable=False),
    Column("host", ExactString(255), nullable=False),
    Column("pid", Integer, nullable=False),
    Column("thread", ExactString(255), nullable=False),
    Column("program", ExactString(255), nullable=False),
    Column("celery_task_id", ExactString(255), nullable=False),
    Column("channel", ExactString(63), nullable=False),
    Column("joined_at", _moment, nullable=False),
    Column("expires_at", _moment, nullable=False),
    Index("lock_waiters_queue", "lock_key", "ticket", unique=True),
    mysql_engine="InnoDB",
    mariadb_engine="InnoDB",
    **_ROOM,
)
"""A place in the queue of a key."""

if not _CAN_SAY:
    for _table in (locks, lock_waiters):
        _make_room = DDL("ALTER TABLE %(table)s SET (fillfactor = 50)").execute_if(dialect="postgresql")  # type: ignore[no-untyped-call]
        event.listen(_table, "after_create", _make_room)
