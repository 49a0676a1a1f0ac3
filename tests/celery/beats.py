"""An app whose beat sends the name of each entry, and when; with Django if it is there, else without."""

from __future__ import annotations

import os
import time

import celery
from celery.beat import BeatLazyFunc
from sqlalchemy import create_engine

from dblock.celery import PersistentScheduler, SingleBeat

app = celery.Celery("beats", broker=os.environ["BEATS_BROKER"], set_as_current=False)
app.conf.task_default_queue = os.environ["BEATS_QUEUE"]
app.conf.beat_schedule = {
    f"e{n}": {"task": "t", "schedule": 1.0, "args": (f"e{n}", BeatLazyFunc(time.time))} for n in range(4)
}
SingleBeat.lock_ttl = float(os.environ.get("BEATS_TTL", "3"))


class Beat(PersistentScheduler):
    """Without Django."""

    engine = create_engine(os.environ.get("BEATS_DATABASE", "sqlite://"))


if "DJANGO_SETTINGS_MODULE" in os.environ:
    import django

    django.setup()
    app.conf.beat_schedule = {}
    app.conf.beat_scheduler = "dblock.celery:DatabaseScheduler"
else:
    app.conf.beat_scheduler = "tests.celery.beats:Beat"
