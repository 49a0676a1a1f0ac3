"""System checks of the settings and of the database that the lock lives in."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from django.apps import AppConfig
from django.conf import settings
from django.core.checks import CheckMessage, Error, Warning, register
from django.db import connections

from dblock import conf
from dblock.core.statements import DIALECTS
from dblock.core.values import valid_retention, valid_timeout, valid_ttl


@register("dblock")
def check_settings(app_configs: Sequence[AppConfig] | None, **_: Any) -> list[CheckMessage]:
    """E001 unknown name, E002 bad value, E003 no such alias, E004 unsupported database."""
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
    """W001: a SQLite file without write-ahead log, where each commit waits for the disk and readers block writers."""
    from dblock.locks import default_alias  # noqa: PLC0415 - needs the settings

    if not isinstance(conf.given(), dict):
        return []
    if conf.given().get("USING") is not None and conf.given()["USING"] not in connections:
        return []
    alias = default_alias()
    connection = connections[alias]
    if alias not in (databases or ()) or connection.vendor != "sqlite" or connection.is_in_memory_db():  # type: ignore[attr-defined]
        return []
    with connection.cursor() as cursor:
        cursor.execute("PRAGMA journal_mode")
        if cursor.fetchone()[0] == "wal":
            return []
    return [
        Warning(
            f"The locks live in the SQLite database {alias!r}, which does not use a write-ahead log.",
            hint="Add OPTIONS={'init_command': 'PRAGMA journal_mode=WAL', 'transaction_mode': 'IMMEDIATE'}.",
            id="dblock.W001",
        )
    ]
