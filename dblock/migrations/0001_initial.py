from __future__ import annotations

from typing import Any

from django.db import migrations, models
from django.db.backends.base.schema import BaseDatabaseSchemaEditor

import dblock.models
from dblock import conf
from dblock.core.errors import UnsupportedDatabase
from dblock.core.statements import DIALECTS


def suit_the_database(apps: Any, schema_editor: BaseDatabaseSchemaEditor) -> None:
    """What a model cannot say.

    In PostgreSQL half of each page stays free for new versions of its rows, so that updates stay heap-only. In MySQL
    `lock.guard()` locks the entries of a second index; the others have it too, so that there is one table for all. And an
    index, where Django would make a constraint. And the first row of `lock_epoch`.
    """
    quote: str = schema_editor.connection.ops.quote_name("name")[0]
    statements = [
        "CREATE UNIQUE INDEX locks_pin ON locks (lock_key)",
        "CREATE UNIQUE INDEX lock_waiters_queue ON lock_waiters (lock_key, ticket)",
        "CREATE INDEX lock_events_of_key ON lock_events (lock_key, id)",
    ]
    if schema_editor.connection.vendor == "postgresql":
        statements += [f"ALTER TABLE {table} SET (fillfactor = 50)" for table in ("locks", "lock_waiters")]
    epoch = DIALECTS[schema_editor.connection.vendor].epoch
    if epoch is not None:
        statements.append(epoch.first.sql)
    for statement in statements:
        schema_editor.execute(conf.tables().named(statement, quote))


def make_the_schema(apps: Any, schema_editor: BaseDatabaseSchemaEditor) -> None:
    """The schema, if the setting says one and there is none.

    In a new database, a test's above all, nobody else makes it.
    """
    connection, schema = schema_editor.connection, conf.tables().schema
    if not schema:
        return
    if connection.vendor != "postgresql":
        raise UnsupportedDatabase(
            f"DBLOCK['SCHEMA'] is for PostgreSQL, and database {connection.alias!r} is {connection.display_name}: let a "
            "database router keep dblock out of it (allow_migrate), or choose TABLE_PREFIX"
        )
    if not schema_editor.collect_sql:
        with connection.cursor() as cursor:
            cursor.execute("SELECT 1 FROM pg_namespace WHERE nspname = %s", [schema])
            if cursor.fetchone():  # no right to make one is needed then
                return
    schema_editor.execute(f'CREATE SCHEMA IF NOT EXISTS "{schema}"')


def whose() -> list[tuple[str, Any]]:
    """The columns that say whose a row is."""
    return [
        ("label", dblock.models.ExactCharField(max_length=255, verbose_name="label")),
        ("host", dblock.models.ExactCharField(max_length=255, verbose_name="host")),
        ("pid", models.IntegerField(verbose_name="process")),
        ("thread", dblock.models.ExactCharField(max_length=255, verbose_name="thread or task")),
        ("program", dblock.models.ExactCharField(max_length=255, verbose_name="program")),
        ("celery_task_id", dblock.models.ExactCharField(max_length=255, verbose_name="Celery task")),
    ]


class RunThroughTheEditor(migrations.RunPython):
    """All that the function does goes through the schema editor, so that `sqlmigrate` can print it."""

    reduces_to_sql = True

    def describe(self) -> str:
        return str(self.code.__doc__).partition("\n")[0]


class Migration(migrations.Migration):
    initial = True

    operations = [
        RunThroughTheEditor(make_the_schema, migrations.RunPython.noop, atomic=False),
        migrations.CreateModel(
            name="Lock",
            fields=[
                (
                    "lock_key",
                    dblock.models.ExactCharField(max_length=255, primary_key=True, serialize=False, verbose_name="key"),
                ),
                ("owner", dblock.models.OwnerField(editable=False, max_length=64, null=True, verbose_name="owner")),  # type: ignore[misc]
                ("fence", models.BigIntegerField(verbose_name="fence")),
                ("count", models.IntegerField(verbose_name="count")),
                ("ttl", models.FloatField(verbose_name="time to live")),
                ("acquired_at", dblock.models.MomentField(verbose_name="acquired at")),
                ("expires_at", dblock.models.MomentField(verbose_name="expires at")),
                *whose(),
                ("last_ticket", models.BigIntegerField(db_default=0, verbose_name="last ticket")),
                ("served_ticket", models.BigIntegerField(db_default=0, verbose_name="last ticket served")),
                ("revoked_fence", models.BigIntegerField(db_default=0, verbose_name="last fence asked back")),
                ("freed_fence", models.BigIntegerField(db_default=0, verbose_name="last fence freed")),
                (
                    "revocation",
                    dblock.models.ExactCharField(db_default="", max_length=255, verbose_name="by whom and why"),
                ),
                ("kind", models.IntegerField(db_default=0, verbose_name="kind")),
                ("reading", models.IntegerField(db_default=0, verbose_name="last taken to read")),
                (
                    "awaiting_fence",
                    models.BigIntegerField(db_default=0, verbose_name="last fence that waited for shares"),
                ),
                (
                    "awaiting_channel",
                    dblock.models.ExactCharField(db_default="", max_length=63, verbose_name="channel of that holder"),
                ),
            ],
            options={
                "verbose_name": "lock",
                "verbose_name_plural": "locks",
                "db_table": dblock.models.table("locks"),
                "permissions": (
                    ("force_release_lock", "Can end a lock that somebody holds"),
                    ("revoke_lock", "Can ask for a lock back"),
                    ("reap_lock", "Can delete the rows of unused locks"),
                ),
            },
        ),
        migrations.CreateModel(
            name="Waiter",
            fields=[
                (
                    "owner",
                    dblock.models.OwnerField(
                        editable=False, max_length=64, primary_key=True, serialize=False, verbose_name="owner"
                    ),
                ),
                ("lock_key", dblock.models.ExactCharField(max_length=255, verbose_name="key")),
                ("ticket", models.BigIntegerField(verbose_name="ticket")),
                ("ttl", models.FloatField(verbose_name="time to live")),
                *whose(),
                ("channel", dblock.models.ExactCharField(max_length=63, verbose_name="channel")),
                (
                    "circle",
                    dblock.models.ExactCharField(db_default="", max_length=64, verbose_name="deadlock that it is in"),
                ),
                ("reading", models.IntegerField(db_default=0, verbose_name="waits to read")),
                ("joined_at", dblock.models.MomentField(verbose_name="joined at")),
                ("expires_at", dblock.models.MomentField(verbose_name="expires at")),
            ],
            options={
                "verbose_name": "waiter",
                "verbose_name_plural": "waiters",
                "db_table": dblock.models.table("lock_waiters"),
            },
        ),
        migrations.CreateModel(
            name="LockEvent",
            fields=[
                ("id", models.BigAutoField(primary_key=True, serialize=False)),
                ("lock_key", dblock.models.ExactCharField(max_length=255, verbose_name="key")),
                ("kind", dblock.models.ExactCharField(max_length=64, verbose_name="what happened")),
                ("fence", models.BigIntegerField(verbose_name="fence")),
                ("seconds", models.FloatField(verbose_name="how long")),
                ("detail", dblock.models.ExactCharField(max_length=255, verbose_name="detail")),
                *whose(),
                ("happened_at", dblock.models.MomentField(verbose_name="happened at")),
            ],
            options={
                "verbose_name": "lock event",
                "verbose_name_plural": "lock events",
                "db_table": dblock.models.table("lock_events"),
            },
        ),
        migrations.CreateModel(
            name="LockEpoch",
            fields=[
                ("id", models.IntegerField(primary_key=True, serialize=False)),
                ("server", dblock.models.ExactCharField(max_length=255, verbose_name="server")),
                ("history", dblock.models.HistoryField(max_length=255, verbose_name="history of that server")),
                ("since", dblock.models.MomentField(verbose_name="first found at")),
                ("opens_at", dblock.models.MomentField(verbose_name="keys open at")),
                ("floor", models.BigIntegerField(verbose_name="fence above all of earlier servers")),
            ],
            options={
                "verbose_name": "lock epoch",
                "verbose_name_plural": "lock epochs",
                "db_table": dblock.models.table("lock_epoch"),
            },
        ),
        RunThroughTheEditor(suit_the_database, migrations.RunPython.noop, atomic=False),
    ]
