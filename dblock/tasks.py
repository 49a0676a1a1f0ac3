"""The Celery task that tidies up; Celery finds it by itself in an installed app.

Rule: it may run any number of times at once, and is never in anybody's way for longer than one row takes.
"""

from __future__ import annotations

from celery import shared_task

from dblock.core.protocol.drive import drive
from dblock.kinds import reaping
from dblock.place import default_alias


@shared_task(name="dblock.reap_expired")  # type: ignore[untyped-decorator]
def reap_expired(using: str | list[str] | None = None, retention: float | None = None) -> dict[str, dict[str, int]]:
    """Delete the rows that nobody has held for `retention` seconds; how many there were, by database and table.

    Args:
        using: an alias or several; by default that of the locks.
        retention: seconds; DBLOCK["RETENTION"] by default.
    """
    aliases = [using or default_alias()] if using is None or isinstance(using, str) else using
    return {alias: drive(reaping(retention, alias))._asdict() for alias in aliases}
