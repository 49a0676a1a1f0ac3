"""The admin in a browser: its pages served by this process, Debian's Chromium, and a small world to look at."""

from __future__ import annotations

import contextlib
import os
import shutil
import threading
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from typing import Any
from unittest.mock import patch

from django.contrib.staticfiles.handlers import StaticFilesHandler
from django.core.handlers.wsgi import WSGIHandler
from django.core.servers.basehttp import ThreadedWSGIServer, WSGIRequestHandler
from django.http import HttpRequest
from django.test import Client, override_settings
from playwright.sync_api import Browser, sync_playwright

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
    with patch.dict(os.environ, DJANGO_ALLOW_ASYNC_UNSAFE="1"), sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        yield browser
        browser.close()


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
        LockEvent.objects.create(lock_key="stock:42", label="", happened_at=moment, **columns)
    for ticket, (waited, host) in enumerate(((141, "web-1"), (95, "web-2"), (8, "worker-2")), start=1):
        joined, expires = now - timedelta(seconds=waited), now + timedelta(seconds=600)
        columns = {"owner": f"x{ticket}", "ticket": ticket, "ttl": 600, "label": "order 1107", "channel": ""}
        columns |= {"host": host, "pid": 810 + ticket, **web}
        Waiter.objects.create(lock_key="stock:42", joined_at=joined, expires_at=expires, **columns)
