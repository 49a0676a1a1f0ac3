"""A site with django-debug-toolbar, in a process of its own: the toolbar is set up with Django, once.

`python -m tests.contrib.toolbar_site directory` makes some requests, and prints as JSON what their panels show.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
import threading
from typing import Any

import django
from asgiref.sync import sync_to_async
from django.conf import settings
from django.core.management import call_command
from django.http import HttpRequest, HttpResponse
from django.test import AsyncClient, Client
from django.urls import include, path

PAGE = "<html><body>page</body></html>"


def configure(directory: str) -> None:
    """Set Django up."""
    settings.configure(
        DATABASES={"default": {"ENGINE": "django.db.backends.sqlite3", "NAME": f"{directory}/db.sqlite3"}},
        INSTALLED_APPS=["dblock", "django.contrib.staticfiles", "debug_toolbar"],
        MIDDLEWARE=["debug_toolbar.middleware.DebugToolbarMiddleware"],
        TEMPLATES=[{"BACKEND": "django.template.backends.django.DjangoTemplates", "APP_DIRS": True}],
        ROOT_URLCONF=__name__,
        STATIC_URL="static/",
        ALLOWED_HOSTS=["*"],
        DEBUG=True,
        SECRET_KEY="tests",
        DEBUG_TOOLBAR_CONFIG={"SHOW_TOOLBAR_CALLBACK": lambda _: True},
        DEBUG_TOOLBAR_PANELS=["debug_toolbar.panels.history.HistoryPanel", "dblock.contrib.debug_toolbar.LocksPanel"],
    )
    django.setup()
    call_command("migrate", verbosity=0)


def nothing() -> None:
    """Is to be done under a lock."""


def sync_view(request: HttpRequest) -> HttpResponse:
    """Locks, one inside another, one that is busy, one that is lost, and that of a thread of its own."""
    from dblock import LockLost, db_lock
    from dblock.testing import busy, take_away

    with db_lock("stock:<42>", label="sell"), db_lock("stock:<42>"):
        thread = threading.Thread(target=db_lock("another flow")(nothing))
        thread.start()
        thread.join()
    with busy("report", label="\x1b\u202esomebody"):
        assert not db_lock("report").acquire(blocking=False)
    with contextlib.suppress(LockLost), db_lock("gone"):
        take_away("gone")
    return HttpResponse(PAGE)


class Meeting:
    """Where two requests wait for each other."""

    def __init__(self) -> None:
        self._come, self._all = 0, asyncio.Event()

    async def wait(self) -> None:
        self._come += 1
        if self._come == 2:
            self._all.set()
        await self._all.wait()


meetings: list[Meeting] = []


async def async_view(request: HttpRequest) -> HttpResponse:
    """On the loop, in a task, and in Django's thread."""
    from dblock import db_lock

    async def child() -> None:
        async with db_lock(f"task {request.GET['n']}"):
            pass

    async with db_lock(f"loop {request.GET['n']}"):
        await asyncio.gather(child(), meetings[0].wait())
    await sync_to_async(db_lock(f"thread {request.GET['n']}")(nothing))()
    return HttpResponse(PAGE)


def quiet_view(request: HttpRequest) -> HttpResponse:
    """Without locks."""
    return HttpResponse(PAGE)


def failing_view(request: HttpRequest) -> HttpResponse:
    """Raises."""
    raise RuntimeError("of a view")


urlpatterns = [
    path("sync/", sync_view),
    path("async/", async_view),
    path("quiet/", quiet_view),
    path("failing/", failing_view),
]


async def both() -> None:
    """Two requests at once, which overlap."""
    meetings.append(Meeting())
    await asyncio.gather(*(AsyncClient().get("/async/", {"n": n}) for n in range(2)))


def panels() -> list[dict[str, Any]]:
    """Of all requests, as the toolbar's history finds them, and its page shows them."""
    from debug_toolbar.store import get_store
    from debug_toolbar.toolbar import StoredDebugToolbar

    found = []
    for request_id in get_store().request_ids():
        panel = StoredDebugToolbar.from_store(request_id).get_panel_by_id("LocksPanel")
        asked = {"request_id": request_id, "panel_id": "LocksPanel"}
        page = Client().get("/__debug__/render_panel/", asked).json()["content"]
        found.append({"stats": panel.get_stats(), "subtitle": panel.nav_subtitle, "page": page})
    get_store().clear()
    return found


def main() -> None:
    """Make the requests."""
    configure(sys.argv[1])
    from dblock.core import runtime

    told: dict[str, Any] = {}
    urlpatterns.append(path("__debug__/", include("debug_toolbar.urls")))  # type: ignore[arg-type]
    told["timing"] = Client().get("/sync/").headers["Server-Timing"]
    told["sync"] = panels()
    asyncio.run(both())
    told["async"] = panels()
    Client().get("/quiet/")
    told["quiet"] = panels()
    with contextlib.suppress(RuntimeError):
        Client().get("/failing/")
    told["observed"] = runtime.current.watchdog.observers is not None
    sys.stdout.write(json.dumps(told))


if __name__ == "__main__":
    main()
