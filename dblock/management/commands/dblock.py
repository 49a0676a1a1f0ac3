"""`manage.py dblock`."""

from __future__ import annotations

import json
import sys
from argparse import SUPPRESS, Namespace
from typing import Any

from django.apps import apps
from django.core import checks
from django.core.management import call_command
from django.core.management.base import BaseCommand, CommandError, CommandParser
from django.db import DatabaseError, Error, connections

from dblock import conf
from dblock.cli import answered, ddl
from dblock.core.errors import UnsupportedDatabase
from dblock.core.text import printable
from dblock.core.validation import valid_retention
from dblock.operating.commands.checkup import Finding, Level, doctor
from dblock.operating.commands.context import Context
from dblock.operating.commands.parser import add_verbs, whole_number
from dblock.place import default_alias
from dblock.store import store_for


class Command(BaseCommand):
    """What an administrator asks of dblock."""

    help = "See who holds which lock, free one, run a command under one, find what is wrong."
    requires_system_checks = ()

    def add_arguments(self, parser: CommandParser) -> None:
        """One command each."""
        commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
        add_verbs(commands)
        schema = commands.add_parser("schema", help="print the tables as plain SQL")
        schema.add_argument("--states", action="store_true", help="and `lock_states`, which beats make if they may")
        for each in commands.choices.values():
            each.add_argument("--using", metavar="ALIAS", help="the database alias; by default that of the locks")
        reaper = commands.add_parser(
            "schedule-reaper",
            help="have django-celery-beat run the task dblock.reap_expired; once more: change how often",
        )
        reaper.add_argument("--every", type=whole_number, default=600, metavar="SECONDS", help="600 by default")
        reaper.add_argument("--using", action="append", metavar="ALIAS", help="reap there; may be given several times")
        # Django's own options, which stand behind the command as a rule; their defaults are said before it.
        for each in commands.choices.values():
            for name in ("--settings", "--pythonpath"):  # which Django has read by now
                each.add_argument(name, default=SUPPRESS, help=SUPPRESS)
            for name in ("--traceback", "--no-color", "--force-color"):
                each.add_argument(name, action="store_true", default=SUPPRESS, help=SUPPRESS)
            each.add_argument("-v", "--verbosity", type=int, choices=range(4), default=SUPPRESS, help=SUPPRESS)

    def handle(self, *_: Any, **options: Any) -> None:
        """Run it; any exit status but 0 is raised."""
        if options["command"] == "schedule-reaper":
            self.stdout.write(schedule_reaper(options["every"], options["using"]))
            return
        alias = options["using"] or default_alias()
        if alias not in connections:
            raise CommandError(f"there is no database {alias!r}: DATABASES has {', '.join(sorted(connections))}")
        if options["command"] == "schema":
            tables, connection = conf.tables(), connections[alias]
            kind = "mariadb" if getattr(connection, "mysql_is_mariadb", False) else connection.vendor
            self.stdout.write(ddl(kind, tables.prefix, tables.schema, states=options["states"]), ending="")
            return
        given = Namespace(**options)
        if given.verb is doctor:
            given.verb = lambda context, told: doctor(context, told, _system_checks(alias))
        try:
            status = answered(given, context(alias))
        except (ValueError, UnsupportedDatabase) as error:
            raise CommandError(printable(str(error)), returncode=2) from error
        if status:
            sys.exit(status)


def context(alias: str) -> Context:
    """The database of an alias, for the commands."""
    return Context(
        alias,
        store_for(alias),
        lambda: make_tables(alias),
        (DatabaseError,),
        f"database {alias!r}",
        "manage.py dblock",
        valid_retention(conf.settings().RETENTION),
    )


def make_tables(alias: str) -> None:
    """Run this app's migrations."""
    try:
        call_command("migrate", "dblock", database=alias, verbosity=0, interactive=False)
    except DatabaseError:
        connections[alias].close()  # which may be in the middle of something
        raise


def schedule_reaper(every: int, using: list[str] | None) -> str:
    """Have django-celery-beat reap; what to say about it."""
    if not apps.is_installed("django_celery_beat"):
        raise CommandError(
            "django_celery_beat is not in INSTALLED_APPS. Without it the schedule is in the settings: "
            "CELERY_BEAT_SCHEDULE = {**dblock.celery.beat_schedule(every=600), ...}"
        )
    from django_celery_beat.schedulers import ModelEntry, PeriodicTask  # noqa: PLC0415 - need Celery

    from dblock.celery import beat_schedule  # noqa: PLC0415 - likewise

    [(name, entry)] = beat_schedule(every, **({"using": using} if using else {})).items()
    schedules = dict.fromkeys(field for *_, field in ModelEntry.model_schedules)
    schedules["interval"], _ = ModelEntry.to_model_schedule(entry["schedule"])
    told = {"task": entry["task"], "kwargs": json.dumps(entry["kwargs"]), "expire_seconds": every, "enabled": True}
    PeriodicTask._default_manager.update_or_create(name=name, defaults={**schedules, **told})
    return f"django-celery-beat runs {name} every {every} s"


def _system_checks(alias: str) -> list[Finding]:
    """What Django's checks of this app say; where the database is away, those that do not ask it."""
    try:
        found = checks.run_checks(tags=["dblock"], include_deployment_checks=True, databases=[alias])
    except Error:
        found = checks.run_checks(tags=["dblock"], databases=[])
    levels = {checks.ERROR: Level.ERROR, checks.WARNING: Level.WARNING}
    return [
        Finding(levels.get(each.level, Level.NOTE), str(each.id), str(each.msg), str(each.hint or "")) for each in found
    ]
