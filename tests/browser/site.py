"""The admin in a browser: its pages served by this process, Debian's Chromium, and a small world to look at."""

from __future__ import annotations

import contextlib
import importlib.resources
import os
import shutil
import threading
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from typing import Any
from unittest.mock import patch

import pytest
from django.contrib.staticfiles.handlers import StaticFilesHandler
from django.core.handlers.wsgi import WSGIHandler
from django.core.servers.basehttp import ThreadedWSGIServer, WSGIRequestHandler
from django.http import HttpRequest
from django.test import Client, override_settings
from playwright.sync_api import Browser, Page, sync_playwright

CHROMIUM = shutil.which("chromium")
FLAGS = [
    *("--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
]
LIST = "/admin/dblock/lock/"
PERMISSIONS = ("view_lock", "force_release_lock", "revoke_lock", "reap_lock")


class _Quiet(WSGIRequestHandler):
    def log_message(self, *_: Any) -> None:
        """Says nothing."""


class _StaticFiles(StaticFilesHandler):
    def serve(self, request: HttpRequest) -> Any:
        answer: Any = super().serve(request)
        answer["Cache-Control"] = "max-age=3600"
        return answer


@contextlib.contextmanager
def served() -> Iterator[str]:
    """The address of the site, which is served meanwhile, its static files too."""
    with override_settings(STATIC_URL="/static/", ALLOWED_HOSTS=["127.0.0.1"]):
        server = ThreadedWSGIServer(("127.0.0.1", 0), _Quiet)
        server.set_app(_StaticFiles(WSGIHandler()))
        thread = threading.Thread(target=server.serve_forever, args=(0.05,))
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}"
        finally:
            server.shutdown()
            thread.join()
            server.server_close()


@contextlib.contextmanager
def chromium() -> Iterator[Browser]:
    """A browser. Playwright keeps an event loop running in this thread, where Django would refuse to do anything."""
    if CHROMIUM is None:
        pytest.skip("no browser: apt-get install chromium")
    with patch.dict(os.environ, DJANGO_ALLOW_ASYNC_UNSAFE="1"), sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        yield browser
        browser.close()


AXE = (importlib.resources.files("axe_playwright_python") / "axe.min.js").read_text()
"""A script that each page has to have for `violations`."""


def violations(page: Page) -> list[str]:
    """What axe-core finds on a page."""
    found = page.evaluate("axe.run({resultTypes: ['violations'], preload: false})")["violations"]
    return [
        f"{each['id']}: {node['html']}: {node['failureSummary']}"
        for each in found
        for node in each["nodes"]
        # Django's own: the search field of any list is labelled by a picture of a magnifying glass.
        if (each["id"], node["target"]) != ("label-title-only", ["#searchbar"])
    ]


def assert_readable(page: Page, scheme: Any, width: int) -> None:
    """In these colours the page violates no rule of axe-core, and is no wider than the window."""
    page.emulate_media(color_scheme=scheme, reduced_motion="reduce")
    page.set_viewport_size({"width": width, "height": 800})
    assert violations(page) == [], (page.url, scheme, width)
    assert page.evaluate("document.documentElement.scrollWidth") == width, (page.url, scheme, width)


def session(name: str, *permissions: str) -> str:
    """The cookie of somebody of the staff who may do so much, and has logged in."""
    from django.contrib.auth.models import Permission, User

    user, _ = User.objects.get_or_create(username=name, is_staff=True)
    user.user_permissions.set(Permission.objects.filter(codename__in=permissions, content_type__app_label="dblock"))
    client = Client()
    client.force_login(user)
    return client.cookies["sessionid"].value


def world(now: datetime | None = None) -> None:
    """A row in every state, which it keeps for a minute at least; `stock:42` has three waiters."""
    from dblock.models import Lock, LockEvent, Waiter

    LockEvent.objects.all().delete()
    now = now or datetime.now(UTC)
    web = {"program": "gunicorn", "thread": "ThreadPoolExecutor-0_0", "celery_task_id": ""}
    task = {"program": "celery", "thread": "MainThread", "celery_task_id": "5f1c6f0e-7d0a-4f3e-9b57-2f6c1f0d9a11"}
    locks: list[tuple[str, float, float, float, int, str | None, str, str, int, dict[str, str]]] = [
        # key, seconds held, seconds left, ttl, entries, owner, label, host, pid, who
        ("import:customers", 5025, -754, 600, 1, "x", "CRM export", "worker-3", 23, {**task, "celery_task_id": ""}),
        ("invoice:2026-11", 43, 101, 120, 2, "x", "month-end close", "web-1", 811, web),
        ("newsletter", 312, 288, 600, 0, "", "weekly issue", "worker-1", 17, task),
        ("report:daily", 1262, 187, 600, 1, "x", "", "worker-2", 31, {**task, "program": "celery beat"}),
        ("stock:42", 200, 276, 300, 1, "x", "restock from supplier", "worker-1", 17, task),
        ("stock:7", 900, -880, 30, 0, None, "", "web-2", 802, web),
    ]
    for number, (key, held, left, ttl, count, owner, label, host, pid, who) in enumerate(locks):
        acquired, expires = now - timedelta(seconds=held), now + timedelta(seconds=left)
        fence = 1_795_428_000_000_000 + number
        columns = {"owner": owner, "count": count, "ttl": ttl, "label": label, "host": host, "pid": pid, **who}
        Lock.objects.create(lock_key=key, fence=fence, acquired_at=acquired, expires_at=expires, **columns)
    happened = [
        # seconds ago, kind, seconds, detail, fence, who
        (1730, "acquired", 0.2, "at_once", 1, ("web-1", 811, web)),
        (1490, "released", 240, "released", 1, ("web-1", 811, web)),
        (1490, "acquired", 96, "waited", 2, ("web-2", 802, web)),
        (1105, "lost", 385, "expired", 2, ("web-2", 802, web)),
        (1080, "acquired", 310, "waited", 3, ("worker-1", 17, task)),
        (620, "released", 460, "released", 3, ("worker-1", 17, task)),
        (590, "gave_up", 400, "timeout", 0, ("web-1", 811, web)),
        (560, "acquired", 0.1, "at_once", 4, ("web-2", 802, web)),
        (330, "released", 230, "released", 4, ("web-2", 802, web)),
        (200, "acquired", 0.1, "at_once", 1_795_428_000_000_004, ("worker-1", 17, task)),
    ]
    for ago, kind, seconds, detail, fence, (host, pid, who) in happened:
        columns = {"kind": kind, "seconds": seconds, "detail": detail, "fence": fence, "host": host, "pid": pid, **who}
        moment = now - timedelta(seconds=ago)
        label = "order 1107" if who is web else "restock from supplier"
        LockEvent.objects.create(lock_key="stock:42", label=label, happened_at=moment, **columns)
    for ticket, (waited, host) in enumerate(((141, "web-1"), (95, "web-2"), (8, "worker-2")), start=1):
        joined, expires = now - timedelta(seconds=waited), now + timedelta(seconds=600)
        columns = {"owner": f"x{ticket}", "ticket": ticket, "ttl": 600, "label": "order 1107", "channel": ""}
        columns |= {"host": host, "pid": 810 + ticket, **web}
        Waiter.objects.create(lock_key="stock:42", joined_at=joined, expires_at=expires, **columns)


def family(now: datetime | None = None) -> None:
    """More rows, for the same minute: two permits and who wants one, readers and a writer that waits, a leader."""
    from dblock.core.share_keys import reader_key, slot_key
    from dblock.core.values import KeyKind
    from dblock.models import Lock, Waiter

    now = now or datetime.now(UTC)
    api, catalogue, leader = "api:payments", "catalogue", "leader:mails"
    rows: list[tuple[str, KeyKind, float, float, str, str, int, dict[str, Any]]] = [
        # key, kind, seconds held, seconds left, label, host, pid, what else
        (slot_key(api, 0), KeyKind.LOCK, 4, 27, "refund 88", "worker-1", 17, {}),
        (slot_key(api, 1), KeyKind.LOCK, 2, 29, "order 1104", "worker-2", 31, {}),
        (api, KeyKind.SEMAPHORE, 1, 29, "order 1109", "worker-3", 23, {}),
        (reader_key(catalogue, "0006612904fa1c3b"), KeyKind.LOCK, 12, 25, "price list", "web-1", 811, {"reading": 1}),
        (catalogue, KeyKind.READ_WRITE, 3, 27, "new prices", "web-2", 802, {"awaiting_fence": 1_795_428_000_000_104}),
        (leader, KeyKind.LOCK, 90_000, 24, "mail poller", "worker-2", 44, {}),
    ]
    for number, (key, kind, held, left, label, host, pid, more) in enumerate(rows):
        acquired, expires = now - timedelta(seconds=held), now + timedelta(seconds=left)
        columns = {"owner": f"f{number}", "count": 1, "ttl": 30, "label": label, "host": host, "pid": pid}
        columns |= {"kind": kind, **more}
        columns |= {"program": "celery" if "worker" in host else "gunicorn", "thread": "MainThread"}
        fence = 1_795_428_000_000_100 + number
        Lock.objects.create(lock_key=key, fence=fence, acquired_at=acquired, expires_at=expires, **columns)
    for ticket, (waited, host, pid) in enumerate(((80_000, "worker-1", 45), (7_200, "worker-3", 46)), start=1):
        columns = {"owner": f"l{ticket}", "ticket": ticket, "ttl": 600, "label": "mail poller", "channel": ""}
        columns |= {"host": host, "pid": pid, "program": "python", "thread": "MainThread", "celery_task_id": ""}
        joined, expires = now - timedelta(seconds=waited), now + timedelta(seconds=600)
        Waiter.objects.create(lock_key=leader, joined_at=joined, expires_at=expires, **columns)
