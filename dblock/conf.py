"""The one settings dict, `DBLOCK`: read when first needed, read again when Django says that it changed.

Rule: reading never raises for a bad value; the system checks tell about all of them at once, and a bad value
fails where it is used.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import cache
from typing import Any, TypeVar

from django.conf import settings as django_settings
from django.core.exceptions import ImproperlyConfigured
from django.core.signals import setting_changed

from dblock.core.statements.base import Tables
from dblock.core.validation import (
    valid_history,
    valid_quarantine,
    valid_reaping,
    valid_slow_wait,
    valid_tables,
    valid_timeout,
    valid_ttl,
)
from dblock.core.values import TTL, Seconds
from dblock.operating.history import record

T = TypeVar("T")
_kept: list[Any] = []


def kept(reading: Callable[[], T]) -> Callable[[], T]:
    """Keep what a function reads from the settings until Django says that they have changed."""
    found = cache(reading)
    _kept.append(found)
    return found


@dataclass(frozen=True)
class Settings:
    """What `DBLOCK` may contain. All of it is optional; lengths of time are seconds or timedeltas."""

    TTL: Seconds = TTL
    """Life of a lease in seconds, unless db_lock() is told otherwise."""
    TIMEOUT: Seconds | None = 10.0
    """Longest wait in seconds, None for ever, unless db_lock() is told otherwise."""
    USING: str | None = None
    """The database alias; None asks the database routers where to write the model `dblock.Lock`."""
    RETENTION: Seconds = 3600.0
    """Seconds for which the reaper leaves free and expired rows."""
    REAP_EVERY: Seconds | None = None
    """Seconds after which, as a rule, a process that takes locks reaps in the background; None: others see to it."""
    SLOW_WAIT: Seconds | None = 5.0
    """Seconds from which a wait is logged, None for never, unless db_lock() is told otherwise."""
    HISTORY: int = 0
    """About how many events of keys are kept in `lock_events`; 0: this process writes none."""
    LISTEN: bool = True
    """Whether PostgreSQL notifies waiters with NOTIFY. It takes one connection for each process that waits."""
    FAILOVER_QUARANTINE: Seconds | str | None = "auto"
    """Seconds for which keys are closed after a failover; "auto": 60, None: none, for synchronous standbys only."""
    TABLE_PREFIX: str = ""
    """Stands before the tables' names, `locks` and `lock_waiters`. Read when Django starts, as models are."""
    SCHEMA: str | None = None
    """The schema of the tables, in PostgreSQL; None for the first one in the search path of their sessions."""


NAMES = frozenset(field.name for field in fields(Settings))


def given() -> dict[str, Any]:
    """`settings.DBLOCK` as the user wrote it."""
    try:
        found: dict[str, Any] = getattr(django_settings, "DBLOCK", {})
    except ImproperlyConfigured as error:
        if not django_settings.configured:
            error.add_note("dblock.db_lock is for Django; for SQLAlchemy there is sqlalchemy_dblock.db_lock")
        raise
    return found


@kept
def settings() -> Settings:
    """`settings.DBLOCK` with the defaults filled in."""
    found: Any = given()
    if not isinstance(found, dict):  # which a system check tells
        return Settings()
    return Settings(**{name: value for name, value in found.items() if name in NAMES})


def _checked(name: str, valid: Callable[[Any, str], T]) -> Callable[[], T]:
    """What returns that setting as `valid` has it. It raises TypeError or ValueError for a bad value."""
    return kept(lambda: valid(getattr(settings(), name), f"DBLOCK[{name!r}]"))


ttl = _checked("TTL", valid_ttl)
timeout = _checked("TIMEOUT", valid_timeout)
slow_wait = _checked("SLOW_WAIT", valid_slow_wait)
quarantine = _checked("FAILOVER_QUARANTINE", valid_quarantine)
history = _checked("HISTORY", valid_history)
reaping = _checked("REAP_EVERY", lambda every, what: valid_reaping(every, settings().RETENTION, what))
"""How often a process reaps, and what it keeps."""


def tables() -> Tables:
    """What the tables are called. Raises ImproperlyConfigured for a bad name."""
    try:
        return valid_tables(settings().TABLE_PREFIX, settings().SCHEMA)
    except (TypeError, ValueError) as error:
        raise ImproperlyConfigured(f"DBLOCK['TABLE_PREFIX'], DBLOCK['SCHEMA']: {error}") from None


def follow_history() -> None:
    """Have what happens noted, if a history is to be kept."""
    if django_settings.configured and settings().HISTORY:
        record()


def _changed(*, setting: str, **_: object) -> None:
    if setting in {"DBLOCK", "DATABASE_ROUTERS"}:
        for reading in _kept:
            reading.cache_clear()
        follow_history()


setting_changed.connect(_changed, dispatch_uid="dblock.conf")
