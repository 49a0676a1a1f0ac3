"""The lock inspector in Django's admin: who holds what, since when and for how long. Nothing can be changed here.

Rule: states and spans are computed from the clock of the database that holds the rows, asked in the same query, and the
owner token is never shown, nor asked for: an answer to a look-up tells as much.
"""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any

from django.contrib import admin
from django.db.backends.base.base import BaseDatabaseWrapper
from django.db.models import DateTimeField, F, Func, Q, QuerySet
from django.db.models.constants import LOOKUP_SEP
from django.http import HttpRequest
from django.utils.html import format_html
from django.utils.safestring import SafeString
from django.utils.translation import gettext, ngettext
from django.utils.translation import gettext_lazy as _

from dblock.locks import default_alias
from dblock.models import Lock

if TYPE_CHECKING:
    _ModelAdmin = admin.ModelAdmin[Lock]
else:
    _ModelAdmin = admin.ModelAdmin


class DatabaseClock(Func):
    """The present by the clock that leases are judged with, whatever the session's time zone."""

    template = "CURRENT_TIMESTAMP"
    arity = 0
    output_field = DateTimeField()

    def as_postgresql(self, compiler: Any, connection: BaseDatabaseWrapper, **context: Any) -> Any:
        return self.as_sql(compiler, connection, template="clock_timestamp()", **context)

    def as_mysql(self, compiler: Any, connection: BaseDatabaseWrapper, **context: Any) -> Any:
        return self.as_sql(compiler, connection, template="UTC_TIMESTAMP(6)", **context)

    def as_sqlite(self, compiler: Any, connection: BaseDatabaseWrapper, **context: Any) -> Any:
        # Doubled twice: for this template, and for the query that Django formats parameters into.
        template = "strftime('%%%%Y-%%%%m-%%%%d %%%%H:%%%%M:%%%%f000', 'now')"
        return self.as_sql(compiler, connection, template=template, **context)


STATES = {
    "held": (_("held"), Q(owner__isnull=False, expires_at__gt=F("clock")), "#2f8f4e"),
    "expired": (_("expired"), Q(owner__isnull=False, expires_at__lte=F("clock")), "#d0453b"),
    "free": (_("free"), Q(owner__isnull=True), "var(--body-quiet-color, #666)"),
}


class StateFilter(admin.SimpleListFilter):
    """Held, expired or free at this moment."""

    title = _("state")
    parameter_name = "state"

    def lookups(self, request: HttpRequest, model_admin: Any) -> list[tuple[str, Any]]:
        return [(name, label) for name, (label, _, _) in STATES.items()]

    def queryset(self, request: HttpRequest, queryset: QuerySet[Lock]) -> QuerySet[Lock]:
        value = self.value()
        return queryset.filter(STATES[value][1]) if value in STATES else queryset


@admin.register(Lock)
class LockAdmin(_ModelAdmin):
    """A read-only list: rows belong to the protocol."""

    list_display = ("lock_key", "state", "holder", "held_for", "time_left", "label")
    list_filter = (StateFilter,)
    search_fields = ("lock_key", "label", "host", "program", "celery_task_id")
    ordering = ("lock_key",)
    fields = readonly_fields = (
        "lock_key",
        "state",
        "label",
        "held_for",
        "time_left",
        "acquired_at",
        "expires_at",
        "ttl",
        "count",
        "fence",
        "host",
        "pid",
        "program",
        "thread",
        "celery_task_id",
    )

    def get_queryset(self, request: HttpRequest) -> QuerySet[Lock]:
        return super().get_queryset(request).using(default_alias()).annotate(clock=DatabaseClock())

    def lookup_allowed(self, lookup: str, value: Any, request: HttpRequest | None = None) -> bool:
        """What the query string may filter by: the columns that are shown."""
        return lookup.split(LOOKUP_SEP, maxsplit=1)[0] in self.fields

    def has_add_permission(self, request: HttpRequest) -> bool:
        return False

    def has_change_permission(self, request: HttpRequest, obj: Lock | None = None) -> bool:
        return False

    def has_delete_permission(self, request: HttpRequest, obj: Lock | None = None) -> bool:
        return False

    @admin.display(description=_("state"))
    def state(self, row: Lock) -> SafeString:
        name = _state(row)
        label, _condition, colour = STATES[name]
        return format_html('<strong style="color: {}" data-state="{}">{}</strong>', colour, name, label)

    @admin.display(description=_("holder"), ordering="host")
    def holder(self, row: Lock) -> str:
        if _state(row) == "free":
            return "–"
        parts = [row.program, gettext("pid %(pid)s on %(host)s") % {"pid": row.pid, "host": row.host}, row.thread]
        if row.celery_task_id:
            parts.append(gettext("Celery task %s") % row.celery_task_id)
        return ", ".join(part for part in parts if part)

    @admin.display(description=_("held for"), ordering="acquired_at")
    def held_for(self, row: Lock) -> str:
        return "–" if _state(row) == "free" else span(_clock(row) - row.acquired_at)

    @admin.display(description=_("time left"), ordering="expires_at")
    def time_left(self, row: Lock) -> str:
        left = row.expires_at - _clock(row)
        state = _state(row)
        if state == "expired":
            return gettext("ended %s ago") % span(-left)
        return span(left) if state == "held" else "–"


def span(length: timedelta) -> str:
    """A length of time as people say it: 0.4 s, 12 s, 3 min 20 s, 5 h 2 min, 3 days."""
    seconds = max(0.0, length.total_seconds())
    if seconds < 10:
        return f"{seconds:.1f} s"
    if seconds < 60:
        return f"{seconds:.0f} s"
    minutes, rest = divmod(int(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest} s"
    hours, minutes = divmod(minutes, 60)
    if hours < 48:
        return f"{hours} h {minutes} min"
    return ngettext("%d day", "%d days", hours // 24) % (hours // 24)


def _clock(row: Lock) -> datetime:
    clock: datetime = vars(row)["clock"]  # annotated by get_queryset
    return clock


def _state(row: Lock) -> str:
    if row.owner is None:
        return "free"
    return "held" if row.expires_at > _clock(row) else "expired"
