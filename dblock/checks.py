"""System checks of the settings and of the database that the lock lives in."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from django.apps import AppConfig
from django.conf import settings
from django.core.checks import CheckMessage, Error, Warning, register
from django.db import DEFAULT_DB_ALIAS, connections
from django.db.backends.base.base import BaseDatabaseWrapper

from dblock import conf
from dblock.core.statements import DIALECTS
from dblock.core.values import valid_retention, valid_timeout, valid_ttl


@register("dblock")
def check_settings(app_configs: Sequence[AppConfig] | None, **_: Any) -> list[CheckMessage]:
    """E001 unknown name, E002 bad value, E003 no such alias, E004 unsupported database, E006 no such thing there."""
    if not isinstance(conf.given(), dict):
        return [Error("DBLOCK is not a dict.", hint="For example {'TTL': 30}.", id="dblock.E001")]
    given = conf.given()
    found: list[CheckMessage] = [
        Error(
            f"DBLOCK has no setting {name!r}.",
            hint=f"It knows {', '.join(sorted(conf.NAMES))}.",
            id="dblock.E001",
        )
        for name in given
        if name not in conf.NAMES
    ]
    for name, valid in (("TTL", valid_ttl), ("TIMEOUT", valid_timeout), ("RETENTION", valid_retention)):
        try:
            if name in given:
                valid(given[name])
        except (TypeError, ValueError) as error:
            found.append(Error(f"DBLOCK[{name!r}]: {error}.", hint="Seconds or a timedelta.", id="dblock.E002"))
    if not isinstance(given.get("LISTEN", True), bool):
        found.append(Error("DBLOCK['LISTEN'] is neither True nor False.", hint="A bool.", id="dblock.E002"))
    alias = given.get("USING")
    if alias is not None and alias not in connections:
        hint = f"DATABASES has {', '.join(sorted(connections))}."
        found.append(Error(f"DBLOCK['USING'] names no database: {alias!r}.", hint=hint, id="dblock.E003"))
    elif alias is not None and connections[alias].vendor not in DIALECTS:
        hint = "The lock needs PostgreSQL, MySQL, MariaDB or SQLite."
        found.append(Error(f"DBLOCK['USING'] is {connections[alias].display_name}.", hint=hint, id="dblock.E004"))
    elif given.get("SCHEMA") and connections[alias or DEFAULT_DB_ALIAS].vendor == "sqlite":
        hint = "Choose DBLOCK['TABLE_PREFIX'], or say in USING which database has the tables."
        found.append(Error("DBLOCK['SCHEMA']: SQLite has no schemas.", hint=hint, id="dblock.E006"))
    return found


@register("dblock")
def check_transactions(app_configs: Sequence[AppConfig] | None, **_: Any) -> list[CheckMessage]:
    """W002: transactions that `release="auto"` cannot see."""
    return [
        Warning(
            f"Database {alias!r} has AUTOCOMMIT off, so that its transactions are not atomic() blocks.",
            hint='A lock with release="auto" is given back before they end: commit before you leave it.',
            id="dblock.W002",
        )
        for alias in connections
        if not connections[alias].settings_dict["AUTOCOMMIT"]
    ]


@register("dblock")
def check_routers(app_configs: Sequence[AppConfig] | None, **_: Any) -> list[CheckMessage]:
    """W003: database routers, which might send two processes to two databases."""
    if not settings.DATABASE_ROUTERS or not isinstance(conf.given(), dict) or conf.given().get("USING") is not None:
        return []
    hint = "Each process asks them once. Name the database of the locks in DBLOCK['USING']."
    return [Warning("DATABASE_ROUTERS choose the database that locks live in.", hint=hint, id="dblock.W003")]


@register("dblock", "database")
def check_databases(
    app_configs: Sequence[AppConfig] | None, databases: Sequence[str] | None = None, **_: Any
) -> list[CheckMessage]:
    """E005: tables of those names that are not ours.

    W001: a SQLite file without write-ahead log, where each commit waits for the disk and readers block writers.
    """
    from dblock.locks import default_alias  # noqa: PLC0415 - needs the settings

    if not isinstance(conf.given(), dict):
        return []
    if conf.given().get("USING") is not None and conf.given()["USING"] not in connections:
        return []
    alias = default_alias()
    connection = connections[alias]
    if alias not in (databases or ()):
        return []
    found = _strangers(connection)
    if connection.vendor != "sqlite" or connection.is_in_memory_db():  # type: ignore[attr-defined]
        return found
    with connection.cursor() as cursor:
        cursor.execute("PRAGMA journal_mode")
        if cursor.fetchone()[0] == "wal":
            return found
    return [
        *found,
        Warning(
            f"The locks live in the SQLite database {alias!r}, which does not use a write-ahead log.",
            hint="Add OPTIONS={'init_command': 'PRAGMA journal_mode=WAL', 'transaction_mode': 'IMMEDIATE'}.",
            id="dblock.W001",
        ),
    ]


def _strangers(connection: BaseDatabaseWrapper) -> list[CheckMessage]:
    """Tables of our names that have no column `lock_key`; not in a schema of our own, where nobody else's are."""
    from dblock.models import Lock, Waiter  # noqa: PLC0415 - needs the app registry

    found: list[CheckMessage] = []
    with connection.cursor() as cursor:
        there = connection.introspection.table_names(cursor)
        for table in (Lock._meta.db_table, Waiter._meta.db_table):
            if table not in there:
                continue
            columns = {column.name for column in connection.introspection.get_table_description(cursor, table)}
            if "lock_key" not in columns:
                text = f"The table `{table}` in database {connection.alias!r} is another application's."
                hint = "Give dblock's tables other names with DBLOCK['TABLE_PREFIX'] or DBLOCK['SCHEMA']."
                found.append(Error(text, hint=hint, id="dblock.E005"))
    return found
