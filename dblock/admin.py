"""The lock inspector in Django's admin: who holds what, since when and for how long, and who waits.

Rows are not edited: what can be done is in `dblock.operating.inspector`.

Rule: states and spans are computed from the clock of the database that holds the rows, asked in the same query, and the
owner token is never shown and cannot be filtered by, since the answer to a look-up would tell as much.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any

from django.contrib import admin
from django.contrib.admin.utils import flatten
from django.contrib.admin.views.main import ChangeList
from django.core.paginator import Paginator
from django.db import connections
from django.db.models import (
    Case,
    Count,
    Exists,
    F,
    Field,
    FloatField,
    OuterRef,
    Q,
    QuerySet,
    Subquery,
    Value,
    When,
)
from django.db.models.constants import LOOKUP_SEP
from django.db.models.expressions import RawSQL
from django.db.models.functions import Coalesce
from django.http import HttpRequest, HttpResponse
from django.utils.html import format_html
from django.utils.safestring import SafeString
from django.utils.translation import gettext, pgettext_lazy
from django.utils.translation import gettext_lazy as _

from dblock.core.errors import InvalidKey, LockError
from dblock.core.protocol import epoch
from dblock.core.protocol.drive import drive
from dblock.core.share_keys import END, valid_row_key
from dblock.core.statements import DIALECTS
from dblock.core.statements.vocabulary import Vocabulary
from dblock.core.text import printable
from dblock.core.values import SHARE, Identity, KeyKind
from dblock.models import Lock, MomentField, Waiter
from dblock.operating import administration
from dblock.operating.administration import EventInfo
from dblock.operating.inspector import QUEUED, Inspector, pins_of, pins_shown, shown, state_of
from dblock.operating.timeline import timeline, told
from dblock.operating.wording import moment, named, said, span
from dblock.place import default_alias
from dblock.store import store_for


def _by_clock(told: Callable[[Vocabulary], str], kind: Field[Any, Any]) -> RawSQL:
    """What the clock says that leases are judged by, whatever the session's time zone."""
    sql = told(DIALECTS[connections[default_alias()].vendor].words)
    return RawSQL(sql.replace("%", "%%"), [], kind)  # noqa: S611 - it has no values


def _left() -> RawSQL:
    """Seconds until the lease ends; zero or less when it has ended."""
    return _by_clock(lambda words: words.until("expires_at"), FloatField())


_LIVING = Q(owner__isnull=False, left__gt=0) & ~Q(owner="")
STATES = ("held", "detached", "waiting", "at_risk", "pinned", "expired", "closed", "shared", "free")
"""`detached`: a token was made for it, and not used yet. `waiting`: the owner is the next to enter, and waits until
readers or holders of permits have left. `at_risk`: a lease that has been renewed before, and not for half of its ttl.
`closed`: released, and kept closed for the rest of its `min_hold`. `pinned`: expired or free, and a transaction
keeps everybody from taking it; `shared`: free, but readers hold it or permits are in use. No column says these two."""
_NOBODYS = {"shared", "free", "closed", "waiting"}
"""The states of keys whose rows name no holder: nobody, the last one, or the next to enter."""
_CALM = ("held", "detached", "waiting", "closed", "free")
"""The states in which nothing is wrong, and their order in the list; all others come before them."""
TROUBLE_FIRST = Case(*(When(read=name, then=Value(n)) for n, name in enumerate(_CALM, start=1)), default=Value(0))
_WAITS = ~Q(lock_key__contains=SHARE) & (Q(kind=int(KeyKind.SEMAPHORE)) | Q(awaiting_fence=F("fence")))
READ = Case(
    When(Q(owner__isnull=True) | Q(owner="", left__lte=0), then=Value("free")),
    When(owner="", then=Value("closed")),
    When(left__lte=0, then=Value("expired")),
    When(_WAITS, then=Value("waiting")),
    When(count=0, then=Value("detached")),
    When(left__lt=F("ttl") / 2, age__gt=F("ttl") * 1.01 - F("left"), then=Value("at_risk")),
    default=Value("held"),
)
"""The state, as far as columns say it."""
MANY = 10_000
"""The list counts so many rows, has pages for them, and sorts by state if there are fewer; beyond, the user filters."""


class StateFilter(admin.SimpleListFilter):
    """Held, detached, waiting, at risk, expired, closed or free at this moment."""

    title = _("state")
    parameter_name = "state"

    def lookups(self, request: HttpRequest, model_admin: Any) -> list[tuple[str, Any]]:
        return [(name, said(name)) for name in STATES if name not in {"pinned", "shared"}]

    def queryset(self, request: HttpRequest, queryset: QuerySet[Lock]) -> QuerySet[Lock]:
        return queryset.filter(Q(read=self.value())) if self.value() in STATES else queryset


class WaitersFilter(admin.SimpleListFilter):
    """Whether the key has waiters."""

    title = _("waiters")
    parameter_name = "waiters"

    def lookups(self, request: HttpRequest, model_admin: Any) -> list[tuple[str, Any]]:
        return [("yes", _("somebody waits")), ("no", _("nobody waits"))]

    def queryset(self, request: HttpRequest, queryset: QuerySet[Lock]) -> QuerySet[Lock]:
        value = self.value()
        waited_for = Exists(_waiters())
        return queryset.filter({"yes": waited_for, "no": ~waited_for}[value]) if value in {"yes", "no"} else queryset


class HostFilter(admin.SimpleListFilter):
    """The holder's machine. Choices: the machines that hold something now; where there are many keys, of the first."""

    title = _("host")
    parameter_name = "host"

    def lookups(self, request: HttpRequest, model_admin: Any) -> list[tuple[str, Any]]:
        rows = model_admin.get_queryset(request)
        beyond = Subquery(rows.order_by("lock_key").values("lock_key")[MANY : MANY + 1])
        near = rows.filter(_LIVING, lock_key__lt=Coalesce(beyond, Value("\U0010ffff")))
        hosts = near.order_by("host").values_list("host", flat=True)
        return [(host, printable(host)) for host in hosts.distinct()[:50]]

    def queryset(self, request: HttpRequest, queryset: QuerySet[Lock]) -> QuerySet[Lock]:
        value = self.value()
        return queryset if value is None else queryset.filter(host=value, owner__isnull=False)


class BoundedPaginator(Paginator):  # type: ignore[type-arg]
    """Never counts a whole table."""

    @functools.cached_property
    def count(self) -> int:
        rows: Any = self.object_list
        return int(rows.order_by().values("pk")[:MANY].count())


def _waiters() -> QuerySet[Waiter]:
    """The live waiters of the current row's key."""
    now = _by_clock(lambda words: words.now, MomentField())
    return Waiter.objects.filter(
        lock_key=OuterRef("lock_key"), ticket__gt=OuterRef("served_ticket"), expires_at__gt=now
    )


def _shared(keys: list[str]) -> set[str]:
    """Those of the keys that readers hold, or of which permits are in use."""
    # In a correlated subquery the bounds would be no constants, and each database would read the whole table.
    shares = Q(*(Q(lock_key__gt=key + SHARE, lock_key__lt=key + END) for key in keys), _connector=Q.OR)
    rows = Lock.objects.using(default_alias()).alias(left=_left()).filter(_LIVING, shares)
    return {share.partition(SHARE)[0] for share in rows.values_list("lock_key", flat=True)[:MANY]} if keys else set()


def _identity(row: Lock) -> Identity:
    return Identity(row.host, row.pid, row.thread, row.program, row.celery_task_id)


def _labelled(row: Lock) -> str:
    who = named(_identity(row))
    return format_html("<b>{}</b><br>{}", printable(row.label), who) if row.label else who


def _column(description: Any, told: Callable[[Lock], Any], ordering: Any = None) -> Any:
    """A column, or a field of the details."""

    @admin.display(description=description, ordering=ordering)
    def column(inspector: LockAdmin, row: Lock) -> Any:
        return told(row)

    return column


def _shown(name: str) -> Any:
    """The column `name`, whose text comes from others, made printable."""
    verbose = Lock._meta.get_field(name).verbose_name  # type: ignore[union-attr]
    # Of a number too, which the site would group by thousands.
    return _column(verbose, lambda row: printable(str(getattr(row, name))) or "–", name)


@admin.register(Lock)
class LockAdmin(Inspector):
    """A read-only list: rows belong to the protocol."""

    list_display = ("shown_key", "state", "held_by", "waiters", "held_for", "time_left")
    list_filter = (StateFilter, WaitersFilter, HostFilter)
    # As it was typed, too: PostgreSQL's "C" collation, by which keys are told apart, knows the case of ASCII only.
    search_fields = (
        *("lock_key", "lock_key__contains", "label", "label__contains"),
        *("host", "program", "celery_task_id"),
    )
    search_help_text = _("key, label, host, program or Celery task")
    empty_value_display = "–"
    actions = None
    paginator = BoundedPaginator
    show_full_result_count = False
    show_facets = admin.ShowFacets.NEVER  # they would count the whole table
    fields = (
        ("shown_key", "state"),
        "pinned_by",
        ("shown_label", "asked_back"),
        ("held_for", "time_left"),
        ("acquired", "expires"),
        ("waiters", "entries"),
        ("life", "shown_fence"),
        ("shown_host", "shown_pid"),
        ("shown_program", "shown_thread"),
        "shown_celery_task_id",
    )
    fields_of_shared = (("shown_key", "state"), "pinned_by", ("waiters", "shown_fence"))
    """Of a key whose holders, if there are any, have rows of their own."""
    fields_of_nobodys = (*fields_of_shared, ("last_held_by", "released"))
    """Of a key that nobody holds; what its row has of the last holder is said to be so."""
    fields_of_waiting = (*fields_of_shared, ("next_to_enter", "waiting_for"), "asked_back")
    """Of a key whose holders have rows of their own, and whose owner waits for them."""
    readonly_fields = tuple(dict.fromkeys(flatten((*fields, *fields_of_nobodys, *fields_of_waiting))))

    class Media:
        css = {"all": ("dblock/inspector.css",)}  # noqa: RUF012 - as Django has it
        js = ("dblock/inspector.js",)

    def get_queryset(self, request: HttpRequest) -> QuerySet[Lock]:
        """All rows but internal ones; with their states, ages and the rest of their leases, and how many wait."""
        rows = Lock.objects.using(default_alias())
        rows = rows.exclude(lock_key__startswith=SHARE).exclude(lock_key__endswith=END)  # `is_internal`
        count = _waiters().order_by().values("lock_key").annotate(number=Count("*")).values("number")
        age = _by_clock(lambda words: words.since("acquired_at"), FloatField())
        return rows.annotate(left=_left(), age=age, read=READ, waiting=Coalesce(Subquery(count), 0))

    def get_object(self, request: HttpRequest, object_id: str, from_field: str | None = None) -> Lock | None:
        """The row of a key, who pins it, and whether it has shares; None for what can be no key, without a query."""
        try:
            row = super().get_object(request, valid_row_key(object_id), from_field)
        except InvalidKey:
            return None
        if row is not None:
            key = row.lock_key
            vars(row).update(pinned=pins_of([key]).get(key), shared=bool(row.kind and _shared([key])))
        return row

    def get_ordering(self, request: HttpRequest) -> tuple[Any, ...]:
        """Trouble first, free keys last; if there are very many rows, in the order of the index."""
        rows = Lock.objects.using(default_alias()).order_by().values("pk")[:MANY]
        return (TROUBLE_FIRST, "lock_key") if rows.count() < MANY else ("lock_key",)

    def get_changelist_instance(self, request: HttpRequest) -> ChangeList:
        """A page of the list. Rows that nobody holds also say whether they have shares, and whether they are pinned."""
        page = super().get_changelist_instance(request)
        rows: list[Lock] = list(page.result_list)
        free = [row for row in rows if state_of(row) == "free"]
        wanted = [row.lock_key for row in free if vars(row)["waiting"] > 0 or row.freed_fence == row.fence]
        pins = pins_of([*wanted, *(row.lock_key for row in rows if state_of(row) == "expired")])
        shared = _shared([row.lock_key for row in free if row.kind])
        for row in rows:
            vars(row).update(pinned=pins.get(row.lock_key), shared=row.lock_key in shared)
        page.result_list = rows
        return page

    def get_fields(self, request: HttpRequest, obj: Lock | None = None) -> Any:
        """The fields for the state of the key; the transaction that pins it only if there is one."""
        fields: tuple[Any, ...] = self.fields
        if obj is not None:
            if state_of(obj) == "waiting":
                fields = self.fields_of_waiting
            elif not obj.owner:
                has_shares = obj.kind == KeyKind.SEMAPHORE or state_of(obj) == "shared"
                fields = self.fields_of_shared if has_shares else self.fields_of_nobodys
        pinned = obj is not None and vars(obj).get("pinned")
        return [each for each in fields if pinned or each != "pinned_by"]

    def lookup_allowed(self, lookup: str, value: Any, request: HttpRequest | None = None) -> bool:
        """What the query string may filter by: columns that are shown, in ways that no database fails or hangs at."""
        column, _sep, way = lookup.partition(LOOKUP_SEP)
        return column in _COLUMNS and way in _WAYS and "\0" not in str(value)

    def has_add_permission(self, request: HttpRequest, obj: Lock | None = None) -> bool:
        return False

    has_change_permission = has_delete_permission = has_add_permission

    def changelist_view(self, request: HttpRequest, extra_context: dict[str, Any] | None = None) -> HttpResponse:
        context: dict[str, Any] = {"may_reap": self.may(request, "reap")}
        database = store_for(default_alias()).database
        with contextlib.suppress(LockError):
            until = database.now() + database.timing.single_try
            context["quarantine"] = drive(epoch.read(database, until, begins=False))
        return super().changelist_view(request, {**(extra_context or {}), **context})

    def render_change_form(
        self, request: HttpRequest, context: dict[str, Any], *args: Any, **options: Any
    ) -> HttpResponse:
        """The details of a key, and beside them who waits for it, who has shares, and what happened."""
        row: Lock = options["obj"]
        store, key = store_for(default_alias()), row.lock_key
        events = self.history(request, administration.events(store, key))
        waiters = drive(administration.waiters(store, key, QUEUED))
        shares = drive(administration.survey(store, key, QUEUED, prefix=key + SHARE))
        context |= {
            "events": told(events),
            "timeline": timeline(events, _holding(row)),
            "is_held": bool(row.owner),
            "may_revoke": self.may(request, "revoke"),
            "may_force_release": self.may(request, "force_release"),
            "waiters": [shown(each) for each in waiters],
            "more_waiters": max(vars(row)["waiting"] - len(waiters), 0),
            "shares": [shown(each.info) for each in shares],
            "is_next": state_of(row) == "waiting",
        }
        return super().render_change_form(request, context, *args, **options)

    shown_key, shown_label = _shown("lock_key"), _shown("label")
    shown_host, shown_program, shown_thread = _shown("host"), _shown("program"), _shown("thread")
    shown_celery_task_id, shown_pid, shown_fence = _shown("celery_task_id"), _shown("pid"), _shown("fence")

    pinned_by = _column(_("pinned by"), lambda row: pins_shown(found) if (found := vars(row).get("pinned")) else "–")
    held_by = _column(_("holder"), lambda row: "–" if state_of(row) in _NOBODYS else _labelled(row), "host")
    last_held_by = _column(_("last held by"), _labelled)
    next_to_enter = _column(_("next to enter"), _labelled)
    waiting_for = _column(_("waiting for"), lambda row: span(vars(row)["age"]))
    entries = _column(_("entries"), lambda row: str(row.count or "–"), "count")
    life = _column(_("time to live"), lambda row: span(row.ttl), "ttl")
    acquired = _column(_("acquired at"), lambda row: moment(row.acquired_at), "acquired_at")
    expires = _column(_("expires at"), lambda row: moment(row.expires_at), "expires_at")
    asked_back = _column(
        _("asked back"), lambda row: printable(row.revocation) if row.owner and row.revoked_fence == row.fence else "–"
    )
    waiters = _column(  # the next to enter waits too
        _("waiters"), lambda row: str(vars(row)["waiting"] + (state_of(row) == "waiting") or "–")
    )

    @admin.display(description=_("state"), ordering=TROUBLE_FIRST)
    def state(self, row: Lock) -> SafeString:
        name = state_of(row)
        return format_html('<span class="dblock-state" data-state="{}">{}</span>', name, said(name))

    @admin.display(description=pgettext_lazy("lock", "released"))
    def released(self, row: Lock) -> str:
        left: float = vars(row)["left"]
        if left > 0:
            return gettext("kept closed for another %s (min_hold)") % span(left)
        return gettext("%s ago") % span(-left)

    @admin.display(description=_("held for"), ordering="acquired_at")
    def held_for(self, row: Lock) -> str:
        age, left = vars(row)["age"], vars(row)["left"]
        if state_of(row) == "detached":
            return gettext("detached %s ago") % span(row.ttl - left)
        return "–" if state_of(row) in _NOBODYS else span(age + min(left, 0.0))

    @admin.display(description=_("time left"), ordering="expires_at")
    def time_left(self, row: Lock) -> str:
        left, state = vars(row)["left"], state_of(row)
        if state in {"expired", "pinned"}:
            return gettext("ended %s ago") % span(-left)
        if state in _NOBODYS - {"closed"}:
            return "–"
        most, words = max(row.ttl, left), span(left)
        whole = vars(row)["age"] + left
        if state in {"held", "at_risk"} and whole < row.ttl * 0.99:  # that of a place in the queue, until it is renewed
            most, words = whole, gettext("%(left)s of %(whole)s (handed over)") % {"left": words, "whole": span(whole)}
        return format_html(
            '<span class="dblock-left"><meter min="0" max="{}" value="{}" aria-hidden="true"></meter>{}</span>',
            f"{most:.3f}",
            f"{left:.3f}",
            words,
        )


_COLUMNS = {
    *("lock_key", "label", "host", "pid", "program", "thread", "celery_task_id", "fence", "count"),
    *("acquired_at", "expires_at", "state", "waiters"),
}
_WAYS = {"", "exact", "contains", "icontains", "startswith", "istartswith", "gt", "gte", "lt", "lte"}


def _holding(row: Lock) -> EventInfo | None:
    """Who holds the key, for the timeline; None if nobody does."""
    if not row.owner or state_of(row) == "waiting":
        return None
    over = max(-vars(row)["left"], 0.0)
    return EventInfo(row.lock_key, "held", row.fence, over, vars(row)["age"] - over, "", row.label, _identity(row))
