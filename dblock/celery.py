"""What a Celery app adds to its beat schedule.

Write `app.conf.beat_schedule = {**dblock.celery.BEAT_SCHEDULE, ...}`.

Rule: no import of Celery here, so that settings may use it too.
"""

from __future__ import annotations

from typing import Any, Final

BEAT_SCHEDULE: Final[dict[str, dict[str, Any]]] = {
    "dblock.reap_expired": {"task": "dblock.reap_expired", "schedule": 600.0, "options": {"expires": 600}},
}
"""Reap every ten minutes; a message that nobody fetched by then is dropped."""
