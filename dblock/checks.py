"""System checks of the settings and of the database that the lock lives in."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Sequence
from typing import Any

from django.apps import AppConfig, apps
from django.conf import settings
from django.core.checks import CheckMessage, Error, Warning, register
from django.core.exceptions import ImproperlyConfigured
from django.db import DEFAULT_DB_ALIAS, DatabaseError, connections
from django.db.backends.base.base import BaseDatabaseWrapper

from dblock import conf
from dblock.core.statements import DIALECTS
from dblock.core.validation import valid_reaping, valid_retention, valid_slow_wait, valid_timeout, valid_ttl


@register("dblock")
def check_settings(app_configs: Sequence[AppConfig] | None, **_: Any) -> list[CheckMessage]:
    """E001 unknown name, E002 bad value, E003 no such alias, E004 unsupported database, E006 no schemas there."""
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
    spans: dict[str, Callable[[object], object]] = {
        "TTL": valid_ttl,
        "TIMEOUT": valid_timeout,
        "RETENTION": valid_retention,
        "SLOW_WAIT": valid_slow_wait,
    }
    for name, valid in spans.items():
        try:
            if name in given:
                valid(given[name])
        except (TypeError, ValueError) as error:
            found.append(Error(f"DBLOCK[{name!r}]: {error}.", hint="Seconds or a timedelta.", id="dblock.E002"))
    try:
        valid_reaping(given.get("REAP_EVERY"), 0, "DBLOCK['REAP_EVERY']")
    except (TypeError, ValueError) as error:
        found.append(Error(f"{error}.", hint="Seconds or a timedelta, or None for never.", id="dblock.E002"))
    if not isinstance(given.get("LISTEN", True), bool):
        found.append(Error("DBLOCK['LISTEN'] is neither True nor False.", hint="A bool.", id="dblock.E002"))
    alias = given.get("USING")
    if alias is not None and alias not in connections:
        hint = f"DATABASES has {', '.join(sorted(connections))}."
        found.append(Error(f"DBLOCK['USING'] names no database: {alias!r}.", hint=hint, id="dblock.E003"))
    elif alias is not None and connections[alias].vendor not in DIALECTS:
        hint = "The lock needs PostgreSQL, MySQL, MariaDB or SQLite."
        found.append(Error(f"DBLOCK['USING'] is {connections[alias].display_name}.", hint=hint, id="dblock.E004"))
    return found + _check_names(given)


def _check_names(given: dict[str, Any]) -> list[CheckMessage]:
    """Of the tables."""
    from dblock.locks import default_alias  # noqa: PLC0415 - needs the settings

    try:
        schema = conf.tables().schema
    except ImproperlyConfigured as error:
        return [Error(f"{error}.", hint="A plain name, such as 'dblock_'.", id="dblock.E002")]
    if not schema or (given.get("USING") or DEFAULT_DB_ALIAS) not in connections:
        return []
    connection = connections[default_alias()]
    if connection.vendor == "postgresql":
        return []
    hint = "Choose TABLE_PREFIX, or on MySQL an alias of its own (USING) with another NAME."
    text = f"DBLOCK['SCHEMA'] is for PostgreSQL, and the locks' database is {connection.display_name}."
    return [Error(text, hint=hint, id="dblock.E006")]


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


@register("dblock", deploy=True)
def check_reaping(app_configs: Sequence[AppConfig] | None, **_: Any) -> list[CheckMessage]:
    """W005: nothing is known to delete the rows of keys that nobody uses any more."""
    if (isinstance(conf.given(), dict) and conf.given().get("REAP_EVERY") is not None) or _is_reaped():
        return []
    text = "No schedule is known to have the task dblock.reap_expired, and rows of keys that nobody uses stay."
    hint = (
        "Add dblock.celery.beat_schedule() to Celery's, or run manage.py dblock schedule-reaper; or set "
        "DBLOCK['REAP_EVERY']; or have dblock.reap() called by cron, and silence this."
    )
    return [Warning(text, hint=hint, id="dblock.W005")]


def _is_reaped() -> bool:
    celery = sys.modules.get("celery")  # not imported for this
    schedule = getattr(settings, "CELERY_BEAT_SCHEDULE", None) or {}
    schedule = schedule if celery is None else {**celery.current_app.conf.beat_schedule, **schedule}
    task = "dblock.reap_expired"
    if any(entry.get("task") == task for entry in schedule.values()):
        return True
    if not apps.is_installed("django_celery_beat"):
        return False
    with contextlib.suppress(DatabaseError):
        model: Any = apps.get_app_config("django_celery_beat").get_model("PeriodicTask")
        return bool(model.objects.filter(task=task, enabled=True).exists())
    return False


@register("dblock", "database")
def check_databases(
    app_configs: Sequence[AppConfig] | None, databases: Sequence[str] | None = None, **_: Any
) -> list[CheckMessage]:
    """E005: tables of those names that are not ours.

    W001: a SQLite file without write-ahead log, where each commit waits for the disk and readers block writers.
    W004: one where a transaction that has read may find that it cannot write any more.
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
    if connection.vendor == "sqlite" and not connection.is_in_memory_db():  # type: ignore[attr-defined]
        found += _check_file(connection)
    return found


def _check_file(connection: BaseDatabaseWrapper) -> list[CheckMessage]:
    found: list[CheckMessage] = []
    hint = "Add OPTIONS={'init_command': 'PRAGMA journal_mode=WAL', 'transaction_mode': 'IMMEDIATE'}."
    with connection.cursor() as cursor:
        cursor.execute("PRAGMA journal_mode")
        wal = cursor.fetchone()[0] == "wal"
    if not wal:
        text = f"The locks live in the SQLite database {connection.alias!r}, which does not use a write-ahead log."
        found.append(Warning(text, hint=hint, id="dblock.W001"))
    if str(connection.settings_dict["OPTIONS"].get("transaction_mode")).upper() not in {"IMMEDIATE", "EXCLUSIVE"}:
        text = (
            f"Transactions on the SQLite database {connection.alias!r}, in which the locks live, begin without the "
            "right to write: one that reads first may find that others have written since, and fail."
        )
        found.append(Warning(text, hint=hint, id="dblock.W004"))
    return found


def _strangers(connection: BaseDatabaseWrapper) -> list[CheckMessage]:
    """Tables of our names without our columns; not in a schema of our own, where nobody else's are."""
    from dblock.models import Lock, Waiter  # noqa: PLC0415 - needs the app registry

    found: list[CheckMessage] = []
    with connection.cursor() as cursor:
        there = connection.introspection.table_names(cursor)
        for table in (Lock._meta.db_table, Waiter._meta.db_table):
            if table not in there:
                continue
            try:
                columns = {column.name for column in connection.introspection.get_table_description(cursor, table)}
            except DatabaseError:  # it is not ours to read, whatever it is
                columns = set()
            if not {"lock_key", "owner", "expires_at"} <= columns:
                text = f"The table `{table}` in database {connection.alias!r} is another application's."
                hint = "Give dblock's tables other names with DBLOCK['TABLE_PREFIX'] or DBLOCK['SCHEMA']."
                found.append(Error(text, hint=hint, id="dblock.E005"))
    return found
