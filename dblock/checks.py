"""System checks of the settings and of the database that the lock lives in.

`manage.py check` and `manage.py dblock doctor` run them. *db*: with `check --database default`; *deploy*: with
`check --deploy`. `SILENCED_SYSTEM_CHECKS = ["dblock.W005"]` silences one that does not apply.

===============  ======  ===============================================================================================
check            when    what it has found
===============  ======  ===============================================================================================
``dblock.E001``          `DBLOCK` is not a dict, or has an unknown setting
``dblock.E002``          an invalid value: a `TTL` of 0, a prefix that is not a name
``dblock.E003``          `USING` is not an alias of `DATABASES`
``dblock.E004``          `USING` is a database that dblock does not support
``dblock.E005``  db      a table with the name of one of the lock's belongs to another application
``dblock.E006``          `SCHEMA` on a database without schemas
``dblock.E007``          the database of the locks is opened read-only, by its `OPTIONS` or the `NAME` of its file
``dblock.E008``  db      the tables are missing, and `DATABASE_ROUTERS` keep `migrate` from making them
``dblock.W001``  db      a SQLite file without a write-ahead log
``dblock.W002``          `AUTOCOMMIT` is off: `release="auto"` does not see when transactions end
``dblock.W003``          `DATABASE_ROUTERS` choose where the locks live, and `USING` does not
``dblock.W004``  db      transactions on a SQLite file that begin without the right to write
``dblock.W005``  deploy  nothing is scheduled that deletes old rows
``dblock.W006``  deploy  `DISABLE_SERVER_SIDE_CURSORS`, as behind a pooler in transaction mode, together with `LISTEN`
``dblock.W007``          `ATOMIC_REQUESTS` under MySQL's REPEATABLE READ: a view may not see what was written before
``dblock.W008``  deploy  locks in memory, where no other process sees them
``dblock.W009``  deploy  a `TTL` below 2 s, or above an hour
``dblock.W010``  db      another program has made the tables, and `migrate` would make them again
``dblock.W011``          a `TTL` that is longer than keys are closed after a failover
===============  ======  ===============================================================================================

Rule: silence is better than a false alarm. What only matters in production is for `check --deploy`.
"""

from __future__ import annotations

import contextlib
import re
import sys
from collections.abc import Callable, Collection, Iterable
from typing import Any

from django.apps import apps
from django.conf import settings
from django.core.checks import CheckMessage, Error, Warning, register
from django.core.exceptions import ImproperlyConfigured
from django.db import DEFAULT_DB_ALIAS, DatabaseError, connections, router
from django.db.backends.base.base import BaseDatabaseWrapper
from django.db.migrations.recorder import MigrationRecorder
from django.db.models import Model

from dblock import conf
from dblock.core.statements import DIALECTS
from dblock.core.validation import valid_reaping, valid_retention, valid_ttl

Found = Iterable[CheckMessage]


def _check(
    *tags: str, locks: bool = False, **options: Any
) -> Callable[[Callable[..., Found]], Callable[..., list[CheckMessage]]]:
    """Register a function as a system check.

    With `locks` it gets the connection where the locks live, and is not called if the settings do not say so.
    """

    def registered(look: Callable[..., Found]) -> Callable[..., list[CheckMessage]]:
        def check(app_configs: Any = None, databases: Collection[str] | None = None, **_: Any) -> list[CheckMessage]:
            if not locks:
                return list(look())
            connection = _locks_connection()
            asked = connection is not None and ("database" not in tags or connection.alias in (databases or ()))
            return list(look(connection)) if asked else []

        made: Callable[..., list[CheckMessage]] = register("dblock", *tags, **options)(check)
        return made

    return registered


_SPAN = "Seconds or a timedelta. Documentation: Reference."
_READ: tuple[tuple[Callable[[], object], str], ...] = (
    (conf.ttl, _SPAN),
    (conf.timeout, _SPAN),
    (conf.slow_wait, _SPAN),
    (lambda: valid_retention(conf.settings().RETENTION), _SPAN),
    (
        lambda: valid_reaping(conf.settings().REAP_EVERY, 0, "DBLOCK['REAP_EVERY']"),
        "Seconds or a timedelta, or None for never. Documentation: Commands and the admin.",
    ),
    (conf.history, "For example 10000; 0 for none. Documentation: Commands and the admin."),
    (conf.quarantine, 'Seconds or a timedelta, "auto" or None. Documentation: Clusters and failover.'),
    (conf.tables, "A plain name, such as 'dblock_'. Documentation: Databases."),
)
"""What reads a setting and raises for a bad value, and what to write instead."""


@_check()
def check_settings() -> Found:
    """E001 unknown name, E002 bad value, E003 no such alias, E004 unsupported database."""
    given: Any = conf.given()
    if not isinstance(given, dict):
        hint = "For example {'TTL': 30}. Documentation: Reference."
        yield Error("DBLOCK is not a dict.", hint=hint, id="dblock.E001")
        return
    for name in sorted(given.keys() - conf.NAMES, key=str):
        hint = f"It knows {', '.join(sorted(conf.NAMES))}. Documentation: Reference."
        yield Error(f"DBLOCK has no setting {name!r}.", hint=hint, id="dblock.E001")
    for read, hint in _READ:
        try:
            _ = read()
        except (TypeError, ValueError, ImproperlyConfigured) as error:
            yield Error(f"{error}.", hint=hint, id="dblock.E002")
    if not isinstance(given.get("LISTEN", True), bool):
        hint = "A bool. Documentation: Reference."
        yield Error("DBLOCK['LISTEN'] is neither True nor False.", hint=hint, id="dblock.E002")
    alias = given.get("USING")
    if alias is not None and alias not in connections:
        hint = f"DATABASES has {', '.join(sorted(connections))}. Documentation: Reference."
        yield Error(f"DBLOCK['USING'] names no database: {alias!r}.", hint=hint, id="dblock.E003")
    elif alias is not None and connections[alias].vendor not in DIALECTS:
        hint = "The lock needs PostgreSQL, MySQL, MariaDB or SQLite. Documentation: Databases."
        yield Error(f"DBLOCK['USING'] is {connections[alias].display_name}.", hint=hint, id="dblock.E004")


@_check(locks=True)
def check_schema(connection: BaseDatabaseWrapper) -> Found:
    """E006: a schema where there are none."""
    with contextlib.suppress(ImproperlyConfigured):  # E002
        if conf.tables().schema and connection.vendor != "postgresql":
            text = f"DBLOCK['SCHEMA'] is for PostgreSQL, and the locks' database is {connection.display_name}."
            hint = (
                "Choose TABLE_PREFIX, or on MySQL an alias of its own (USING) with another NAME. "
                "Documentation: Databases."
            )
            yield Error(text, hint=hint, id="dblock.E006")


@_check()
def check_transactions() -> Found:
    """W002: transactions that `release="auto"` cannot see. W007: snapshots that are older than any lock of a view."""
    for alias in connections:
        told = connections[alias].settings_dict
        if not told["AUTOCOMMIT"]:
            yield Warning(
                f"Database {alias!r} has AUTOCOMMIT off, so that its transactions are not atomic() blocks.",
                hint='A lock with release="auto" is given back before they end: commit before you leave it. '
                "Documentation: Transactions.",
                id="dblock.W002",
            )
        level = str(told["OPTIONS"].get("isolation_level")).lower()
        # A transaction may overwrite what it does not see. PostgreSQL refuses that.
        if told["ATOMIC_REQUESTS"] and connections[alias].vendor == "mysql" and level == "repeatable read":
            yield Warning(
                f"ATOMIC_REQUESTS of database {alias!r} begins a transaction before the view takes a lock, and under "
                "its isolation level that may not see what the lock's holder before has written.",
                hint="Set OPTIONS['isolation_level'] = 'read committed', which is Django's default, or take views with "
                "locks out of it (transaction.non_atomic_requests). Documentation: Transactions.",
                id="dblock.W007",
            )


@_check(locks=True)
def check_writable(connection: BaseDatabaseWrapper) -> Found:
    """E007: sessions of the locks' database that may only read."""
    if _READ_ONLY.search("{NAME}\n{OPTIONS}".format_map(connection.settings_dict)):
        text = f"The locks live in database {connection.alias!r}, whose settings have it opened for reading only."
        hint = (
            "Name an alias of the primary in DBLOCK['USING'], or change its NAME and OPTIONS. Documentation: Databases."
        )
        yield Error(text, hint=hint, id="dblock.E007")


_READ_ONLY = re.compile(
    r"read_only\s*=\s*'?(on|true|yes|1|t|y)\b(?!.*read_only)|\bsession transaction\b[^;]*\bread only\b"
    r"|'target_session_attrs': '(read-only|standby)'|^file:.*[?&](mode=ro|immutable=1)(&|$)",
    re.IGNORECASE | re.MULTILINE,
)
"""The ways in which `NAME` and `OPTIONS` ask each database for that; of several values of a setting the last counts."""


def _locks_connection() -> BaseDatabaseWrapper | None:
    """Where the locks live; None if the settings do not say so, which is told elsewhere."""
    from dblock.place import default_alias  # noqa: PLC0415 - needs the settings

    using = conf.settings().USING
    if not isinstance(conf.given(), dict) or (using is not None and using not in connections):
        return None
    connection = connections[default_alias()]
    return connection if connection.vendor in DIALECTS else None


@_check(locks=True)
def check_quarantine(connection: BaseDatabaseWrapper) -> Found:
    """W011: leases that outlast the quarantine after a failover."""
    with contextlib.suppress(TypeError, ValueError):  # E002
        ttl, quarantine = conf.ttl(), conf.quarantine()
        if DIALECTS[connection.vendor].epoch is not None and 0 < quarantine < ttl:
            hint = (
                "Make DBLOCK['FAILOVER_QUARANTINE'] as long as the longest ttl and grace in use."
                " Documentation: Clusters and failover."
            )
            text = f"DBLOCK['TTL'] ({ttl:g} s) is longer than keys are closed after a failover ({quarantine:g} s)."
            yield Warning(text, hint=hint, id="dblock.W011")


@_check()
def check_routers() -> Found:
    """W003: database routers, which might send two processes to two databases."""
    if settings.DATABASE_ROUTERS and isinstance(conf.given(), dict) and conf.given().get("USING") is None:
        hint = (
            "Each process asks them once. Name the database of the locks in DBLOCK['USING']."
            " Documentation: Connections and time."
        )
        yield Warning("DATABASE_ROUTERS choose the database that locks live in.", hint=hint, id="dblock.W003")


@_check(deploy=True)
def check_reaping() -> Found:
    """W005: nothing is known to delete the rows of keys that nobody uses any more."""
    if conf.settings().REAP_EVERY is None and not _is_reaped():
        text = "No schedule is known to have the task dblock.reap_expired, and rows of keys that nobody uses stay."
        hint = (
            "Add dblock.celery.beat_schedule() to Celery's, or run manage.py dblock schedule-reaper; or set "
            "DBLOCK['REAP_EVERY']; or have dblock.reap() called by cron, and silence this. "
            "Documentation: Commands and the admin."
        )
        yield Warning(text, hint=hint, id="dblock.W005")


@_check(locks=True, deploy=True)
def check_deployment(connection: BaseDatabaseWrapper) -> Found:
    """What is fine in development only: W006 a pooler and LISTEN, W008 locks in memory, W009 an implausible ttl."""
    pooled = connection.vendor == "postgresql" and connection.settings_dict.get("DISABLE_SERVER_SIDE_CURSORS")
    if pooled and conf.settings().LISTEN is True:
        text = (
            f"Database {connection.alias!r} seems to be behind a pooler in transaction mode "
            "(DISABLE_SERVER_SIDE_CURSORS), through which waiters cannot be notified: they poll."
        )
        hint = (
            "Set DBLOCK['LISTEN'] = False if that will do. Or let DBLOCK['USING'] name an alias that connects "
            "directly, and write in guarded blocks through that alias too. Documentation: Connections and time."
        )
        yield Warning(text, hint=hint, id="dblock.W006")
    if connection.vendor == "sqlite" and connection.is_in_memory_db():  # type: ignore[attr-defined]
        text = f"The locks live in memory (database {connection.alias!r}): no other process sees them."
        hint = "Let them live in a database that all processes share: DBLOCK['USING']. Documentation: Databases."
        yield Warning(text, hint=hint, id="dblock.W008")
    with contextlib.suppress(TypeError, ValueError):  # E002
        ttl = valid_ttl(conf.settings().TTL)
        if not LEAST_TTL <= ttl <= MOST_TTL:
            text = f"DBLOCK['TTL'] is {ttl:g} s: " + (
                "a process that pauses for as long loses all its locks."
                if ttl < LEAST_TTL
                else "when a process dies, its keys stay closed for as long."
            )
            hint = (
                "It is no limit of the work: as long as that lasts leases are renewed. The default of 30 s suits most. "
                "Documentation: Choosing."
            )
            yield Warning(text, hint=hint, id="dblock.W009")


LEAST_TTL = 2.0
"""Seconds; a renewal may then be late by one, as a busy machine or a long garbage collection may have it."""
MOST_TTL = 3600.0
"""Seconds; somebody will have freed the key by hand before that."""


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


@_check("database", locks=True)
def check_file(connection: BaseDatabaseWrapper) -> Found:
    """W001: a SQLite file without write-ahead log, where each commit waits for the disk and readers block writers.

    W004: one where a transaction that has read may find that it cannot write any more.
    """
    if connection.vendor != "sqlite" or connection.is_in_memory_db():  # type: ignore[attr-defined]
        return
    hint = (
        "Add OPTIONS={'init_command': 'PRAGMA journal_mode=WAL', 'transaction_mode': 'IMMEDIATE'}. "
        "Documentation: Transactions."
    )
    with connection.cursor() as cursor:
        cursor.execute("PRAGMA journal_mode")
        wal = cursor.fetchone()[0] == "wal"
    if not wal:
        text = f"The locks live in the SQLite database {connection.alias!r}, which does not use a write-ahead log."
        yield Warning(text, hint=hint, id="dblock.W001")
    if str(connection.settings_dict["OPTIONS"].get("transaction_mode")).upper() not in {"IMMEDIATE", "EXCLUSIVE"}:
        text = (
            f"Transactions on the SQLite database {connection.alias!r}, in which the locks live, begin without the "
            "right to write: one that reads first may find that others have written since, and fail."
        )
        yield Warning(text, hint=hint, id="dblock.W004")


@_check("database", locks=True)
def check_tables(connection: BaseDatabaseWrapper) -> list[CheckMessage]:
    """E005: tables of those names that are not ours. E008: none, and routers that keep migrate from making them.

    W010: tables that are ours, of which migrate does not know. In a schema of our own, whose tables Django does not
    list, nobody else has any.
    """
    from dblock.models import Lock, Waiter  # noqa: PLC0415 - needs the app registry

    with connection.cursor() as cursor:
        there = connection.introspection.table_names(cursor)
    found: list[CheckMessage] = []
    for model in (Lock, Waiter):
        if model._meta.db_table in there:
            found += _check_ours(model, connection)
        elif not router.allow_migrate_model(connection.alias, model):
            text = (
                f"Database {connection.alias!r} has no table `{model._meta.db_table}`, and DATABASE_ROUTERS keep "
                "migrate from making it."
            )
            hint = (
                "Let allow_migrate() return None or True for the app 'dblock' there, or make the tables by "
                "`manage.py dblock schema`. Documentation: Databases."
            )
            found.append(Error(text, hint=hint, id="dblock.E008"))
    if not found and Lock._meta.db_table in there and _would_make_anew(Lock, connection):
        text = (
            f"The table `{Lock._meta.db_table}` in database {connection.alias!r} was made by another program than "
            "migrate, which will say that it exists already."
        )
        other = "" if connection.alias == DEFAULT_DB_ALIAS else f" --database {connection.alias}"
        hint = f"Run `manage.py migrate dblock{other} --fake-initial` first. Documentation: Databases."
        found.append(Warning(text, hint=hint, id="dblock.W010"))
    return found


def _check_ours(model: type[Model], connection: BaseDatabaseWrapper) -> list[CheckMessage]:
    """Whether the existing table has the columns of the model."""
    table = model._meta.db_table
    try:
        with connection.cursor() as cursor:
            columns = {column.name for column in connection.introspection.get_table_description(cursor, table)}
    except DatabaseError:  # it is not ours to read, whatever it is
        columns = set()
    if {"lock_key", "owner", "expires_at"} <= columns:
        return []
    text = f"The table `{table}` in database {connection.alias!r} is another application's."
    hint = "Give dblock's tables other names with DBLOCK['TABLE_PREFIX'] or DBLOCK['SCHEMA']. Documentation: Databases."
    return [Error(text, hint=hint, id="dblock.E005")]


def _would_make_anew(model: type[Model], connection: BaseDatabaseWrapper) -> bool:
    """Whether migrate would create the table although it exists."""
    label = model._meta.app_label
    if label in settings.MIGRATION_MODULES or not router.allow_migrate_model(connection.alias, model):
        return False
    return (label, "0001_initial") not in MigrationRecorder(connection).applied_migrations()
