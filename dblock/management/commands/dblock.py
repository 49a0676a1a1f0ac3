"""`manage.py dblock`."""

from __future__ import annotations

import json
from argparse import ArgumentTypeError
from typing import Any

from django.apps import apps
from django.core.management.base import BaseCommand, CommandError, CommandParser

from dblock.celery import beat_schedule


class Command(BaseCommand):
    """What an administrator asks of dblock."""

    help = "Administer the locks in the database."

    def add_arguments(self, parser: CommandParser) -> None:
        """One command each."""
        commands = parser.add_subparsers(dest="command", required=True)
        reaper = commands.add_parser(
            "schedule-reaper",
            help="have django-celery-beat run the task dblock.reap_expired; once more: change how often",
        )
        reaper.add_argument("--every", type=_seconds, default=600, metavar="SECONDS", help="600 by default")
        reaper.add_argument("--using", action="append", metavar="ALIAS", help="reap there; may be given several times")

    def handle(self, *_: Any, **options: Any) -> None:
        """Run it."""
        if not apps.is_installed("django_celery_beat"):
            raise CommandError(
                "django_celery_beat is not in INSTALLED_APPS. Without it the schedule is in the settings: "
                "CELERY_BEAT_SCHEDULE = {**dblock.celery.beat_schedule(every=600), ...}"
            )
        every, using = options["every"], options["using"]
        [(name, entry)] = beat_schedule(every, **({"using": using} if using else {})).items()
        models = apps.get_app_config("django_celery_beat")
        intervals = models.get_model("IntervalSchedule")._default_manager
        wanted = {"every": every, "period": "seconds"}
        interval = intervals.filter(**wanted).first() or intervals.create(**wanted)
        others = ("crontab", "solar", "clocked")
        told = {
            "task": entry["task"],
            "kwargs": json.dumps(entry["kwargs"]),
            "interval": interval,
            "expire_seconds": every,
            "enabled": True,
            **dict.fromkeys(others),
        }
        models.get_model("PeriodicTask")._default_manager.update_or_create(name=name, defaults=told)
        self.stdout.write(f"django-celery-beat runs {name} every {every} s")


def _seconds(text: str) -> int:
    seconds = int(text)
    if seconds < 1:
        raise ArgumentTypeError("is a whole number of seconds, 1 at least")
    return seconds
