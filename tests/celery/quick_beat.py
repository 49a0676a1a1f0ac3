"""The example project's Celery app with a beat that does not take its time."""

from __future__ import annotations

from dblock.celery import beat_schedule
from example_project.celery import app

app.conf.beat_schedule = {name: {**entry, "schedule": 1.0} for name, entry in beat_schedule().items()}
app.conf.worker_hijack_root_logger = True
