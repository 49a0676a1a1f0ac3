"""One active beat over django-celery-beat's `DatabaseScheduler`.

Each message is written to its tables as soon as it is sent, and not minutes later. If a beat was killed before that,
or one that was deposed wrote late, the state is newer than the table, and is believed.
"""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import Any, ClassVar, Final

from celery.utils.time import maybe_make_aware
from django.db import Error
from django_celery_beat import schedulers

from dblock.celery.beat import Sent, SingleBeat

_IN_THE_PAST: Final = timedelta(days=365 * 30)
"""`ModelEntry` takes an entry with a `start_time` and no `last_run_at` to have run this long ago."""


class DatabaseScheduler(SingleBeat, schedulers.DatabaseScheduler):  # type: ignore[misc]
    """The scheduler of django-celery-beat, of which any number may run."""

    _passing: ClassVar[tuple[type[Exception], ...]] = (*SingleBeat._passing, Error)

    def all_as_schedule(self) -> Any:
        """Read the scheduler's tables."""
        entries = super().all_as_schedule()
        for name, sent in (self._runs or {}).items():
            if name in entries:
                self._catch_up(entries[name], sent)
        return entries

    def apply_entry(self, entry: Any, producer: Any = None) -> None:
        """Send it, and write that down; what is only claimed is not written down."""
        super().apply_entry(entry, producer)
        if entry.name in self._unsent:  # its row is as it was
            entry.model.last_run_at, entry.model.total_run_count = entry.last_run_at, entry.total_run_count
            self._dirty.discard(entry.name)
        self.sync()

    def should_sync(self) -> bool:
        """Whether Celery is to call `sync` too, with each message, sent or not, or every three minutes."""
        return False

    def _take_over(self) -> None:
        self._schedule, self._initial_read, self._dirty = None, True, set[str]()
        super()._take_over()

    def _catch_up(self, entry: Any, sent: Sent) -> None:
        """The same if the state is newer than the row.

        Where the row has no `last_run_at`, its last change counts: it is to begin anew, as one that was enabled again.
        """
        model = entry.model
        told, changed = maybe_make_aware(entry.last_run_at), maybe_make_aware(model.date_changed)
        if told == changed - _IN_THE_PAST:
            told = changed
        saved = told == changed and entry.name in self.app.conf.beat_schedule  # by each beat that becomes active
        if saved or told < datetime.fromisoformat(sent.moment):
            super()._catch_up(entry, sent)
            model.last_run_at, model.total_run_count = entry.last_run_at, entry.total_run_count
            self._dirty.add(entry.name)
