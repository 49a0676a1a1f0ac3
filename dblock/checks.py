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
from typing import Any, Final

from django.apps import apps
from django.conf import settings
from django.core.checks import CheckMessage, Error, Warning, register
from django.core.exceptions import ImproperlyConfigured
from django.db import DatabaseError, connections, router
from django.db.backends.base.base import BaseDatabaseWrapper
from django.db.migrations.recorder import MigrationRecorder

from dblock import conf
from dblock.core.statements import DIALECTS
from dblock.core.validation import valid_reaping, valid_retention, valid_ttl

Found = Iterable[CheckMessage]
_OPTIONS: Final = (
    "Add OPTIONS={'init_command': 'PRAGMA journal_mode=WAL', 'transaction_mode': 'IMMEDIATE'}. "
    "Documentation: Transactions."
)
HINTS: Final = {
    "E001": f"A dict with any of {', '.join(sorted(conf.NAMES))}. Documentation: Reference.",
    "E002": "What each setting may be: Documentation: Reference.",
    "E003": "Name one of them. Documentation: Reference.",
    "E004": "The lock needs PostgreSQL, MySQL, MariaDB or SQLite. Documentation: Databases.",
    "E005": "Give dblock's tables other names with DBLOCK['TABLE_PREFIX'] or DBLOCK['SCHEMA']. "
    "Documentation: Databases.",
    "E006": "Choose TABLE_PREFIX, or on MySQL an alias of its own (USING) with another NAME. Documentation: Databases.",
    "E007": "Name an alias of the primary in DBLOCK['USING'], or change its NAME and OPTIONS. "
    "Documentation: Databases.",
    "E008": "Let allow_migrate() return None or True for the app 'dblock' there, or make the tables by "
    "`manage.py dblock schema`. Documentation: Databases.",
    "W001": _OPTIONS,
    "W002": 'A lock with release="auto" is given back before they end: commit before you leave it. '
    "Documentation: Transactions.",
    "W003": "Each process asks them once. Name the database of the locks in DBLOCK['USING']. "
    "Documentation: Connections and time.",
    "W004": _OPTIONS,
    "W005": "Add dblock.celery.beat_schedule() to Celery's, or run manage.py dblock schedule-reaper; or set "
    "DBLOCK['REAP_EVERY']; or have dblock.reap() called by cron, and silence this. "
    "Documentation: Commands and the admin.",
    "W006": "Set DBLOCK['LISTEN'] = False if that will do. Or let DBLOCK['USING'] name an alias that connects "
    "directly, and write in guarded blocks through that alias too. Documentation: Connections and time.",
    "W007": "Set OPTIONS['isolation_level'] = 'read committed', which is Django's default, or take views with locks "
    "out of it (transaction.non_atomic_requests). Documentation: Transactions.",
    "W008": "Let them live in a database that all processes share: DBLOCK['USING']. Documentation: Databases.",
    "W009": "It is no limit of the work: as long as that lasts leases are renewed. The default of 30 s suits most. "
    "Documentation: Choosing.",
    "W010": "Run `manage.py migrate dblock --database {alias} --fake-initial` first. Documentation: Databases.",
    "W011": "Make DBLOCK['FAILOVER_QUARANTINE'] as long as the longest ttl and grace in use. "
    "Documentation: Clusters and failover.",
}
"""What to do about each."""


def _told(name: str, text: str, alias: str = "") -> CheckMessage:
    """The message of the check `dblock.<name>`."""
    hint = HINTS[name].replace("{alias}", alias)
    return (Error if name.startswith("E") else Warning)(text, hint=hint, id=f"dblock.{name}")


_READ: Final[tuple[Callable[[], object], ...]] = (
    *(conf.ttl, conf.timeout, conf.slow_wait, conf.history, conf.quarantine, conf.tables),
    lambda: valid_retention(conf.settings().RETENTION),
    lambda: valid_reaping(conf.settings().REAP_EVERY, 0, "DBLOCK['REAP_EVERY']"),
)
"""What reads a setting, and raises for a bad value."""


@register("dblock")
def check_settings(app_configs: Any = None, **_: Any) -> Found:
    """E001 unknown name, E002 bad value, E003 no such alias, E004 unsupported database."""
    given: Any = conf.given()
    if not isinstance(given, dict):
        yield _told("E001", "DBLOCK is not a dict.")
        return
    for name in sorted(given.keys() - conf.NAMES, key=str):
        yield _told("E001", f"DBLOCK has no setting {name!r}.")
    for read in _READ:
        try:
            read()
        except (TypeError, ValueError, ImproperlyConfigured) as error:
            yield _told("E002", f"{error}.")
    if not isinstance(given.get("LISTEN", True), bool):
        yield _told("E002", "DBLOCK['LISTEN'] is neither True nor False.")
    alias = given.get("USING")
    if alias is not None and alias not in connections:
        yield _told("E003", f"DBLOCK['USING'] is none of DATABASES ({', '.join(sorted(connections))}): {alias!r}.")
    elif alias is not None and connections[alias].vendor not in DIALECTS:
        yield _told("E004", f"DBLOCK['USING'] is {connections[alias].display_name}.")


@register("dblock")
def check_settings_of_databases(app_configs: Any = None, **_: Any) -> Found:
    """W002: transactions that `release="auto"` cannot see. W007: snapshots that are older than any lock of a view.

    W003: routers, which might send two processes to two databases.
    """
    if settings.DATABASE_ROUTERS and isinstance(conf.given(), dict) and conf.given().get("USING") is None:
        yield _told("W003", "DATABASE_ROUTERS choose the database that locks live in.")
    for alias in connections:
        told = connections[alias].settings_dict
        if not told["AUTOCOMMIT"]:
            text = f"Database {alias!r} has AUTOCOMMIT off, so that its transactions are not atomic() blocks."
            yield _told("W002", text)
        level = str(told["OPTIONS"].get("isolation_level")).lower()
        # A transaction may overwrite what it does not see. PostgreSQL refuses that.
        if told["ATOMIC_REQUESTS"] and connections[alias].vendor == "mysql" and level == "repeatable read":
            yield _told(
                "W007",
                f"ATOMIC_REQUESTS of database {alias!r} begins a transaction before the view takes a lock, and under "
                "its isolation level that may not see what the lock's holder before has written.",
            )


@register("dblock")
def check_database(app_configs: Any = None, **_: Any) -> Found:
    """E006: a schema where there are none. E007: sessions that only read. W011: leases that outlast the quarantine."""
    if (connection := _locks_connection()) is None:
        return
    with contextlib.suppress(ImproperlyConfigured):  # E002
        if conf.tables().schema and connection.vendor != "postgresql":
            text = f"DBLOCK['SCHEMA'] is for PostgreSQL, and the locks' database is {connection.display_name}."
            yield _told("E006", text)
    if _READ_ONLY.search("{NAME}\n{OPTIONS}".format_map(connection.settings_dict)):
        text = f"The locks live in database {connection.alias!r}, whose settings have it opened for reading only."
        yield _told("E007", text)
    with contextlib.suppress(TypeError, ValueError):  # E002
        ttl, quarantine = conf.ttl(), conf.quarantine()
        if DIALECTS[connection.vendor].epoch is not None and 0 < quarantine < ttl:
            text = f"DBLOCK['TTL'] ({ttl:g} s) is longer than keys are closed after a failover ({quarantine:g} s)."
            yield _told("W011", text)


_READ_ONLY = re.compile(
    r"read_only\s*=\s*'?(on|true|yes|1|t|y)\b(?!.*read_only)|\bsession transaction\b[^;]*\bread only\b"
    r"|'target_session_attrs': '(read-only|standby)'|^file:.*[?&](mode=ro|immutable=1)(&|$)",
    re.IGNORECASE | re.MULTILINE,
)
"""The ways in which `NAME` and `OPTIONS` ask each database for that; of several values of a setting the last counts."""


def _locks_connection(among: Collection[str] | None = None) -> BaseDatabaseWrapper | None:
    """Where the locks live, if it is among these; None if the settings do not say so, which is told elsewhere."""
    from dblock.place import default_alias  # noqa: PLC0415 - needs the settings

    using = conf.settings().USING
    if not isinstance(conf.given(), dict) or (using is not None and using not in connections):
        return None
    connection = connections[default_alias()]
    asked = among is None or connection.alias in among
    return connection if asked and connection.vendor in DIALECTS else None


@register("dblock", deploy=True)
def check_deployment(app_configs: Any = None, **_: Any) -> Found:
    """What is fine in development only.

    W005: nothing is known to delete the rows of keys that nobody uses any more. W006: a pooler and LISTEN. W008: locks
    in memory. W009: an implausible ttl.
    """
    if (connection := _locks_connection()) is None:
        return
    if conf.settings().REAP_EVERY is None and not _is_reaped():
        text = "No schedule is known to have the task dblock.reap_expired, and rows of keys that nobody uses stay."
        yield _told("W005", text)
    pooled = connection.vendor == "postgresql" and connection.settings_dict.get("DISABLE_SERVER_SIDE_CURSORS")
    if pooled and conf.settings().LISTEN is True:
        yield _told(
            "W006",
            f"Database {connection.alias!r} seems to be behind a pooler in transaction mode "
            "(DISABLE_SERVER_SIDE_CURSORS), through which waiters cannot be notified: they poll.",
        )
    if connection.vendor == "sqlite" and connection.is_in_memory_db():  # type: ignore[attr-defined]
        text = f"The locks live in memory (database {connection.alias!r}): no other process sees them."
        yield _told("W008", text)
    with contextlib.suppress(TypeError, ValueError):  # E002
        ttl = valid_ttl(conf.settings().TTL)
        if ttl < LEAST_TTL:
            yield _told("W009", f"DBLOCK['TTL'] is {ttl:g} s: a process that pauses for as long loses all its locks.")
        elif ttl > MOST_TTL:
            yield _told("W009", f"DBLOCK['TTL'] is {ttl:g} s: when a process dies, its keys stay closed for as long.")


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
    with contextlib.suppress(DatabaseError, LookupError):  # it is not installed, or its tables are missing
        model: Any = apps.get_app_config("django_celery_beat").get_model("PeriodicTask")
        return bool(model.objects.filter(task=task, enabled=True).exists())
    return False


@register("dblock", "database")
def check_file(app_configs: Any = None, databases: Collection[str] | None = None, **_: Any) -> Found:
    """W001: a SQLite file without write-ahead log, where each commit waits for the disk and readers block writers.

    W004: one where a transaction that has read may find that it cannot write any more.
    """
    connection: Any = _locks_connection(databases or ())
    if connection is None or connection.vendor != "sqlite" or connection.is_in_memory_db():
        return
    with connection.cursor() as cursor:
        cursor.execute("PRAGMA journal_mode")
        wal = cursor.fetchone()[0] == "wal"
    if not wal:
        text = f"The locks live in the SQLite database {connection.alias!r}, which does not use a write-ahead log."
        yield _told("W001", text)
    if str(connection.settings_dict["OPTIONS"].get("transaction_mode")).upper() not in {"IMMEDIATE", "EXCLUSIVE"}:
        yield _told(
            "W004",
            f"Transactions on the SQLite database {connection.alias!r}, in which the locks live, begin without the "
            "right to write: one that reads first may find that others have written since, and fail.",
        )


@register("dblock", "database")
def check_tables(app_configs: Any = None, databases: Collection[str] | None = None, **_: Any) -> Found:
    """E005: tables of those names that are not ours. E008: none, and routers that keep migrate from making them.

    W010: tables that are ours, of which migrate does not know. In a schema of our own, whose tables Django does not
    list, nobody else has any.
    """
    from dblock.models import Lock, Waiter  # noqa: PLC0415 - needs the app registry

    if (connection := _locks_connection(databases or ())) is None:
        return
    with connection.cursor() as cursor:
        there = connection.introspection.table_names(cursor)
    fine = True
    for table, model in ((model._meta.db_table, model) for model in (Lock, Waiter)):
        if table in there and not _is_ours(table, connection):
            fine = False
            yield _told("E005", f"The table `{table}` in database {connection.alias!r} is another application's.")
        elif table not in there and not router.allow_migrate_model(connection.alias, model):
            fine = False
            text = f"Database {connection.alias!r} has no table `{table}`, and DATABASE_ROUTERS let migrate make none."
            yield _told("E008", text)
    table = Lock._meta.db_table
    migrates = "dblock" not in settings.MIGRATION_MODULES and router.allow_migrate_model(connection.alias, Lock)
    if fine and table in there and migrates and not _is_applied(connection):
        yield _told(
            "W010",
            f"The table `{table}` in database {connection.alias!r} was made by another program than migrate, which "
            "will say that it exists already.",
            connection.alias,
        )


def _is_applied(connection: BaseDatabaseWrapper) -> bool:
    """Whether migrate has made the tables."""
    return ("dblock", "0001_initial") in MigrationRecorder(connection).applied_migrations()


def _is_ours(table: str, connection: BaseDatabaseWrapper) -> bool:
    """Whether the existing table has the columns of the lock's."""
    try:
        with connection.cursor() as cursor:
            columns = {column.name for column in connection.introspection.get_table_description(cursor, table)}
    except DatabaseError:  # it is not ours to read, whatever it is
        return False
    return {"lock_key", "owner", "expires_at"} <= columns
