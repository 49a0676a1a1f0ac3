"""The task that tidies up, for an app without Django.

Rule: with Django it is in `dblock.tasks`, where Celery finds it.
"""

from __future__ import annotations

from typing import Any

from celery import shared_task

from dblock.core.protocol.drive import drive
from dblock.core.values import Seconds


def reaper(engine: Any, *, retention: Seconds = 3600.0) -> Any:
    """Make the task `dblock.reap_expired` for the database of an Engine, for `beat_schedule()` to call.

    Args:
        engine: an Engine of SQLAlchemy's, or a function that returns one.
        retention: delete the rows that nobody has held for so many seconds.
    """

    @shared_task(name="dblock.reap_expired")  # type: ignore[untyped-decorator]
    def reap_expired(retention: Seconds = retention) -> dict[str, dict[str, int]]:
        """Delete the rows that nobody has held for `retention` seconds; how many there were, by database and table."""
        from sqlalchemy_dblock.kinds import reaping  # noqa: PLC0415 - needs SQLAlchemy

        found = engine() if callable(engine) else engine
        return {str(found.url.database): drive(reaping(found, retention))._asdict()}

    return reap_expired
