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
_DEFAULT: Final = "celery.backend_cleanup"
"""The entry that the scheduler adds itself."""


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
        """Send it, and write that down."""
        super().apply_entry(entry, producer)
        self.sync()

    def sync(self) -> None:
        """Write down what was sent; what is only claimed is not."""
        claimed = self._dirty & ({self._claim.entry.name} if self._claim else set())
        self._dirty -= claimed
        try:
            super().sync()
        finally:
            self._dirty |= claimed

    def _take_over(self) -> None:
        self._schedule, self._initial_read, self._dirty = None, True, set[str]()
        super()._take_over()

    def _date(self, entry: Any, sent: Sent) -> None:
        super()._date(entry, sent)
        model = entry.model
        if (model.last_run_at, model.total_run_count) != (entry.last_run_at, entry.total_run_count):
            model.last_run_at, model.total_run_count = entry.last_run_at, entry.total_run_count
            self._dirty.add(entry.name)

    def _catch_up(self, entry: Any, sent: Sent) -> None:
        if self._told_by(entry) < datetime.fromisoformat(sent.moment):
            self._date(entry, sent)

    def _told_by(self, entry: Any) -> datetime:
        """The time to which the row's last run is true.

        Without a `last_run_at` that is the row's last change: it is to begin anew, as one that was enabled again. But
        rows of entries from the app's settings are changed by each beat that starts.
        """
        told: datetime = maybe_make_aware(entry.last_run_at)
        changed = entry.model.date_changed
        if changed is None or told not in {maybe_make_aware(changed), maybe_make_aware(changed) - _IN_THE_PAST}:
            return told
        ours = entry.name == _DEFAULT or entry.name in self.app.conf.beat_schedule
        return told - _IN_THE_PAST if ours else maybe_make_aware(changed)
