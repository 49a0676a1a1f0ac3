"""What the lock inspector in the admin can do: end a tenure, ask for it back, tidy up; show who waits, what happened.

Rule: each is a page of its own that says what will happen, has a permission of its own, changes something by POST only,
and names the tenure that was shown by its fence: a successor is never touched.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from concurrent.futures import Future
from functools import partial
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from django import forms
from django.contrib import admin, messages
from django.contrib.admin.utils import label_for_field, quote, unquote
from django.core.exceptions import PermissionDenied
from django.http import HttpRequest, HttpResponse, HttpResponseRedirect
from django.template.response import TemplateResponse
from django.urls import URLPattern, path, reverse
from django.utils.html import format_html, format_html_join
from django.utils.safestring import SafeString
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy, ngettext

from dblock.core.errors import LockError, LockStoreError
from dblock.core.pinned import Pinned
from dblock.core.protocol.drive import drive
from dblock.core.protocol.steps import Steps
from dblock.core.text import printable
from dblock.core.validation import TEXT_LENGTH
from dblock.core.values import LockInfo
from dblock.core.worker import start
from dblock.kinds import reap
from dblock.models import Lock
from dblock.operating import administration
from dblock.operating.administration import EventInfo, WaiterInfo
from dblock.operating.pins import pinned
from dblock.operating.timeline import told
from dblock.operating.wording import named, pin_told, span
from dblock.place import default_alias
from dblock.store import store_for

if TYPE_CHECKING:
    from django.utils.functional import _StrPromise as StrPromise

    _ModelAdmin = admin.ModelAdmin[Lock]
else:
    _ModelAdmin = admin.ModelAdmin

REQUEST = 3.0
"""Seconds for which a request waits until all is tidied up."""
SHOWN = 200
"""Waiters, or events, on one page."""
QUEUED = 50
"""Waiters on the page of a key, which has much else."""


class ReasonForm(forms.Form):
    """Why, and which tenure was shown."""

    fence = forms.IntegerField(min_value=0, max_value=2**63 - 1, widget=forms.HiddenInput)
    reason = forms.CharField(
        label=gettext_lazy("Reason"),
        help_text=gettext_lazy("The holder is told this reason and your name. The log of the admin keeps both."),
        max_length=150,
        widget=forms.Textarea(attrs={"rows": 2, "autofocus": True}),
    )


class Ending(NamedTuple):
    """What can be done to a tenure."""

    template: str
    """What will happen to whom."""
    end: Callable[[Any, str, int, str], Steps[bool]]
    title: StrPromise
    done: StrPromise
    log: StrPromise


FORCE_RELEASE: Final = Ending(
    "force_release",
    administration.force_release,
    gettext_lazy("Force release"),
    gettext_lazy("The lock on “%(key)s” was released."),
    gettext_lazy("Forced its release: %(reason)s"),
)
REVOKE: Final = Ending(
    "revoke",
    administration.revoke,
    gettext_lazy("Ask for it back"),
    gettext_lazy("The holder of “%(key)s” is asked to release it."),
    gettext_lazy("Asked for it back: %(reason)s"),
)


class Inspector(_ModelAdmin):
    """The pages beside the list and the details."""

    def get_urls(self) -> list[URLPattern]:
        """Those of ours come first: a key that is called as one of them has a slash behind it."""

        def page(route: str, name: str, needs: str, view: Callable[..., HttpResponse]) -> URLPattern:
            def allowed(request: HttpRequest, **given: str) -> HttpResponse:
                if not self.may(request, needs):
                    raise PermissionDenied
                return view(request, **given)

            return path(route, self.admin_site.admin_view(allowed), name=f"dblock_lock_{name}")

        return [
            page("waiters/", "waiters", "", self.waiters_view),
            page("events/", "events", "", self.events_view),
            page("reap/", "reap", "reap", self.reap_view),
            page("<path:object_id>/release/", "release", "force_release", partial(self._end, ending=FORCE_RELEASE)),
            page("<path:object_id>/revoke/", "revoke", "revoke", partial(self._end, ending=REVOKE)),
            *super().get_urls(),
        ]

    def may(self, request: HttpRequest, what: str = "") -> bool:
        """Whether the user may see locks, and has that permission of ours."""
        return self.has_view_permission(request) and (not what or request.user.has_perm(f"dblock.{what}_lock"))

    def _page(self, request: HttpRequest, template: str, title: str, **context: Any) -> TemplateResponse:
        known = {**self.admin_site.each_context(request), "opts": self.opts, "media": self.media, "title": title}
        return TemplateResponse(request, f"admin/dblock/lock/{template}.html", {**known, **context})

    # -- ending a tenure, or asking for it back

    def _end(self, request: HttpRequest, object_id: str, ending: Ending) -> HttpResponse:
        key = unquote(object_id)
        row = self.get_object(request, key)
        if row is None:
            return self._get_obj_does_not_exist_redirect(request, self.opts, printable(key))  # type: ignore[attr-defined,no-any-return]
        back = self._address("change", quote(key))
        but = ""
        if ending is FORCE_RELEASE and vars(row).get("pinned"):
            but = _("A transaction pins this key: nobody can take it before that ends, whatever becomes of the lock.")
        if not row.owner and request.method != "POST":
            messages.warning(request, _("Nobody holds “%(key)s”.") % {"key": printable(key)})
            return HttpResponseRedirect(back)
        form = ReasonForm(request.POST if request.method == "POST" else None, initial={"fence": row.fence})
        if form.is_valid():
            reason, fence = form.cleaned_data["reason"], form.cleaned_data["fence"]
            words = f"{request.user.get_username()}: {' '.join(reason.split())}"[:TEXT_LENGTH]
            if self._told(request, ending.end(store_for(default_alias()), key, fence, words)):
                messages.success(request, ending.done % {"key": printable(key)})
                if but:
                    messages.warning(request, but)
                self.log_change(request, row, ending.log % {"reason": printable(" ".join(reason.split()))})
            return HttpResponseRedirect(back)
        waits = state_of(row) == "waiting"
        fields = ("next_to_enter", "waiting_for") if waits else ("held_by", "held_for")
        names = ("shown_key", "state", *(["pinned_by"] if but else []), *fields, "shown_fence")
        facts = [(label_for_field(name, Lock, self), self._shown(row, name)) for name in names]
        told = {"object": row, "form": form, "back": back, "but": but, "facts": facts, "waits": waits}
        return self._page(request, ending.template, str(ending.title), **told)

    def _told(self, request: HttpRequest, end: Steps[bool]) -> bool:
        """Whether it was done; if not, the user is told why."""
        try:
            if drive(end):
                return True
            messages.warning(request, _("That lock was over already. Nothing was changed."))
        except (LockError, ValueError) as error:
            messages.error(request, str(error))
        return False

    def _address(self, page: str, *names: str) -> str:
        """Of a page of this site: a project may have several."""
        return reverse(f"admin:dblock_lock_{page}", args=names, current_app=self.admin_site.name)

    def _shown(self, row: Lock, name: str) -> Any:
        """A column's value, as the list has it."""
        return getattr(self, name)(row)

    # -- all others

    def reap_view(self, request: HttpRequest) -> HttpResponse:
        """Delete what nobody uses any more."""
        back = self._address("changelist")
        if request.method == "POST":
            reaped = Future[int]()

            def work() -> None:
                try:
                    reaped.set_result(reap())
                except LockError as error:
                    reaped.set_exception(error)

            if store_for(default_alias()).renewable:
                _running = start(work, "housekeeping")
            else:
                work()
            try:
                count = reaped.result(REQUEST)
                messages.success(request, ngettext("%d row was deleted.", "%d rows were deleted.", count) % count)
            except LockError as error:
                messages.error(request, str(error))
            except TimeoutError:
                messages.success(request, _("There is much to tidy up: it goes on in the background."))
            return HttpResponseRedirect(back)
        return self._page(request, "reap", _("Tidy up"), form=forms.Form(), back=back)

    def waiters_view(self, request: HttpRequest) -> HttpResponse:
        """Who waits, for whatever key, those first who have waited for the longest."""
        store = store_for(default_alias())
        found = drive(administration.all_waiters(store, SHOWN + 1))
        more, found = SHOWN if len(found) > SHOWN else 0, found[:SHOWN]
        rows = self.get_queryset(request).in_bulk({each.key for each in found})
        waiters = [
            {**shown(each), "holder": self._shown(rows[each.key], "held_by") if each.key in rows else "–"}
            for each in found
        ]
        return self._page(request, "waiters", _("Who waits"), waiters=waiters, more=more)

    def events_view(self, request: HttpRequest) -> HttpResponse:
        """What happened last, to whatever key, where a history is kept."""
        found = self.history(request, administration.all_events(store_for(default_alias()), SHOWN))
        return self._page(request, "history", _("What happened"), events=told(found))

    def history(self, request: HttpRequest, events: Steps[list[EventInfo]]) -> list[EventInfo]:
        """The events; none, and the user is told why, where their table is missing or may not be read."""
        try:
            return drive(events)
        except LockStoreError as error:
            messages.warning(request, str(error))
            return []


def pins_of(keys: Collection[str]) -> dict[str, Pinned]:
    """The transactions that keep keys from being taken; none where the database could not say."""
    store = store_for(default_alias())
    try:
        return drive(pinned(store.database, keys))
    except LockStoreError:
        return {}


def state_of(row: Lock) -> str:
    """The state of a row that was asked for, one of `dblock.admin.STATES`."""
    read: str = vars(row)["read"]
    if read == "free" and vars(row).get("shared"):
        return "shared"
    return "pinned" if read in {"free", "expired"} and vars(row).get("pinned") else read


def pins_shown(pinned: Pinned) -> SafeString:
    """The transactions, each with the SQL that ends it; and what may not be seen of them."""
    line = '<div class="dblock-pin">{}. {} <code>{}</code></div>'
    lines = format_html_join("", line, [(pin_told(pin), _("To end it:"), printable(pin.end)) for pin in pinned.pins])
    return format_html("{}{}", lines, pinned.hidden and _(pinned.hidden))


def shown(row: LockInfo | WaiterInfo) -> dict[str, Any]:
    """A holder or a waiter, as the templates show it."""
    return {
        "key": row.key,
        "shown": printable(row.key),
        "since": span(row.age),
        "identity": named(row.identity),
        "label": printable(row.label),
    }
