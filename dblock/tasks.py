"""The Celery task that tidies up; Celery finds it by itself in an installed app."""

from __future__ import annotations

from celery import shared_task

from dblock.locks import reap


@shared_task(name="dblock.reap_expired", ignore_result=True)  # type: ignore[untyped-decorator]
def reap_expired(using: str | None = None, retention: float | None = None) -> int:
    """Delete the rows of database `using` that nobody has held for `retention` seconds; how many there were."""
    return reap(using=using, retention=retention)
