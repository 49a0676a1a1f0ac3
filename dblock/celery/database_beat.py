"""One active beat over django-celery-beat's `DatabaseScheduler`.

That one writes down when an entry was sent minutes later, or not at all if it is killed; so what the state says is
believed where it is newer, after each reading of its tables, and written there by whoever is active.
"""

from __future__ import annotations

from typing import Any, ClassVar

from django.db import Error
from django_celery_beat import schedulers

from dblock.celery.beat import SingleBeat


class DatabaseScheduler(SingleBeat, schedulers.DatabaseScheduler):  # type: ignore[misc]
    """The scheduler of django-celery-beat, of which any number may run."""

    _passing: ClassVar[tuple[type[Exception], ...]] = (*SingleBeat._passing, Error)
    _remembers: ClassVar[bool] = True

    def all_as_schedule(self) -> Any:
        """Read its tables."""
        entries = super().all_as_schedule()
        for entry in entries.values():
            self._date(entry)
        return entries

    def _read_schedule(self) -> None:
        self._schedule, self._initial_read, self._dirty = None, True, set[str]()
        super()._read_schedule()

    def _date(self, entry: Any) -> None:
        before = entry.last_run_at
        super()._date(entry)
        if entry.last_run_at != before:
            entry.model.last_run_at, entry.model.total_run_count = entry.last_run_at, entry.total_run_count
            self._dirty.add(entry.name)
