"""A panel for django-debug-toolbar (extra `debug-toolbar`): which locks a request took, and how long it waited.

    DEBUG_TOOLBAR_PANELS = [..., "dblock.contrib.debug_toolbar.LocksPanel"]

A request is known by its context, which Django hands on to the threads of sync code and asyncio to tasks. A lock that
is given back or lost is known by its tenure.

Rule: what is kept is text and numbers, as the toolbar's history needs it, and no owner's token.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any, Final

from debug_toolbar.panels import Panel
from django.http import HttpRequest, HttpResponse
from django.template.loader import render_to_string
from django.utils.formats import number_format
from django.utils.translation import gettext, ngettext
from django.utils.translation import gettext_lazy as _

from dblock.core.observing.events import Event, Kind
from dblock.core.observing.observers import observe
from dblock.core.text import printable
from dblock.operating.wording import said

KINDS: Final = (Kind.ACQUIRED, Kind.CONTENDED, Kind.GAVE_UP, Kind.RELEASED, Kind.LOST)
LATE: Final = 0.1
"""Seconds for which a request that has left a lock open waits, once, to hear that it was lost: a thread tells that."""

_current: ContextVar[LocksPanel | None] = ContextVar("dblock_debug_toolbar", default=None)


class LocksPanel(Panel):  # type: ignore[misc]
    """The locks of one request."""

    title = _("Locks")
    template = "dblock/debug_toolbar/locks.html"
    is_async = True

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._locks: list[dict[str, Any]] = []
        self._open: dict[tuple[str, str, int, int], dict[str, Any]] = {}
        """By tenure and depth."""
        self._holders: dict[tuple[str, str], str] = {}
        """Whom it waits for, by database and key."""
        self._lost = threading.Event()
        self._stop: Callable[[], None] | None = None

    @property
    def nav_subtitle(self) -> str:
        """Short, beside the panel's name."""
        stats = self.get_stats()
        count, lost = len(stats.get("locks", ())), stats.get("lost", 0)
        text = ngettext("%(count)d lock, waited %(wait)s ms", "%(count)d locks, waited %(wait)s ms", count) % {
            "count": count,
            "wait": number_format(f"{stats.get('wait', 0.0):.1f}"),
        }
        return ", ".join([text, gettext("%d lost") % lost] if lost else [text])

    @property
    def content(self) -> str:
        """The table, in the language of the user who opens it; what is kept is in none."""
        locks = [
            {
                **lock,
                **{name: printable(lock[name]) for name in ("key", "label", "holder")},
                "how": _words(lock["how"]),
                "end": _words(lock["end"]),
                "taken": lock["how"][:7] != "gave up",
            }
            for lock in self.get_stats().get("locks", ())
        ]
        return render_to_string(self.template, {"locks": locks})

    def enable_instrumentation(self) -> None:
        """Listen to this request."""
        if self._stop is None:
            self._stop = observe(self._hear, *KINDS)
            _current.set(self)

    def disable_instrumentation(self) -> None:
        """Listen no more."""
        if self._stop is not None:
            if self._open:
                self._lost.wait(LATE)
            self._stop()
            self._stop = None
            _current.set(None)

    def generate_stats(self, request: HttpRequest, response: HttpResponse) -> None:
        """Keep what was heard."""
        lost = sum(each["end"].startswith("lost") for each in self._locks)
        wait = sum(each["wait"] for each in self._locks)
        self.record_stats({"locks": self._locks, "wait": wait, "lost": lost})

    def generate_server_timing(self, request: HttpRequest, response: HttpResponse) -> None:
        """The browser's own tools show it as well: in English, since it is a header."""
        if self._locks:
            self.record_server_timing("wait", "Waiting for locks", self.get_stats()["wait"])

    def _hear(self, event: Event) -> None:
        if event.kind is Kind.LOST:
            for tenure in [each for each in self._open if each[:3] == (event.database, event.key, event.fence)]:
                self._close(tenure, event, f"lost: {event.reason}")
                self._lost.set()
        elif event.kind is Kind.RELEASED:
            self._close((event.database, event.key, event.fence, event.depth + 1), event, event.how)
        elif _current.get() is self:
            self._begin(event)

    def _close(self, tenure: tuple[str, str, int, int], event: Event, end: str) -> None:
        lock = self._open.pop(tenure, None)
        if lock is not None:
            lock |= {"held": event.held * 1000, "end": end}

    def _begin(self, event: Event) -> None:
        where = event.database, event.key
        if event.holder is not None:
            label = f' "{event.holder.label}"' if event.holder.label else ""
            self._holders[where] = f"{event.holder.identity}{label}"
        if event.kind is Kind.CONTENDED:
            return
        lock = {
            "key": event.key,
            "label": event.label,
            "database": event.database,
            "how": event.how.replace("_", " ") or f"gave up: {event.reason}",
            "wait": event.wait * 1000,
            "holder": self._holders.pop(where, ""),
            "held": None,
            "end": "",
        }
        self._locks.append(lock)
        if event.kind is Kind.ACQUIRED:
            self._open[*where, event.fence, event.depth] = lock


def _words(kept: str) -> str:
    """How a lock was taken or ended, and why, as in `lost: freed`."""
    return ": ".join(said(word) for word in kept.split(": "))
