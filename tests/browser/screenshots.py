"""Remake the pictures of the docs, `docs/pictures/*.png`: `make screenshots`.

A small world at a moment that does not pass: SQLite's clock and the browser's stand still, so that what has not changed
gives the same picture again, with the same version of the browser.
"""

from __future__ import annotations

import io
import sqlite3
import sys
import threading
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any
from unittest.mock import Mock, patch

import django
from django.db.backends.signals import connection_created
from django.test import override_settings
from playwright.sync_api import Browser, Page
from rich.console import Console

from dblock.operating.commands import top as watching
from tests import conftest
from tests.browser.site import CHROMIUM, LIST, PERMISSIONS, chromium, served, session, world
from tests.support.lab import ROOT

NOW = datetime(2026, 11, 23, 2, 14, 5, tzinfo=UTC)
DAY, TIME = f"{NOW:%F %T}".split()
PICTURES = ROOT / "docs/pictures"
MOST = 150_000
"""Bytes of a picture."""
STOCK = f"{LIST}stock_3A42/"
SHOTS: dict[str, dict[str, Any]] = {
    "list": {"address": LIST, "size": (1400, 660)},
    "details": {"address": f"{STOCK}change/", "size": (1100, 960)},
    "details-dark": {"address": f"{STOCK}change/", "size": (1100, 960), "color_scheme": "dark"},
    "release": {"address": f"{STOCK}release/", "size": (1100, 660)},
    "phone": {"address": LIST, "size": (390, 780)},
}


def stand_still(connection: Any, **_: Any) -> None:
    """Let NOW be the present on a connection to SQLite."""
    clock, turn = sqlite3.connect(":memory:", check_same_thread=False), threading.Lock()

    def at(function: str) -> Callable[..., Any]:
        def told(*given: Any) -> Any:
            moments = [f"{DAY} {TIME}" if each == "now" else each for each in given]
            with turn:
                return clock.execute(f"SELECT {function}({', '.join('?' * len(moments))})", moments).fetchone()[0]

        return told

    for function in ("strftime", "julianday"):
        connection.connection.create_function(function, -1, at(function))


def shoot(browser: Browser, site: str, cookie: str) -> None:
    """The pages of the admin."""
    for name, shot in SHOTS.items():
        width, height = shot["size"]
        context = browser.new_context(
            base_url=site,
            viewport={"width": width, "height": height},
            color_scheme=shot.get("color_scheme", "light"),
            locale="en-GB",
            timezone_id="UTC",
        )
        context.add_cookies([{"name": "sessionid", "value": cookie, "url": site}])
        context.add_init_script("localStorage.setItem('django.admin.navSidebarIsOpen', 'false')")
        page = context.new_page()
        page.clock.set_fixed_time(NOW)
        page.goto(shot["address"])
        save(page, name)
        context.close()


def shoot_terminal(browser: Browser) -> None:
    """`dblock top`, as a terminal shows it."""
    from dblock.management.commands.dblock import context

    console = Console(record=True, width=140, height=12, file=io.StringIO(), force_terminal=True)
    with patch("time.strftime", return_value=TIME):
        rows = sorted(context("default").survey(), key=lambda row: -row.waiters)
        console.print(watching._view(context("default"), rows, watching.Rates(), console.height, console.width))
    page = browser.new_page(viewport={"width": 1400, "height": 198})
    page.set_content(f"<body style='margin:0'>{console.export_svg(title='manage.py dblock top')}")
    save(page, "top")


def save(page: Page, name: str) -> None:
    """What the page shows, as a file that is not too large for docs."""
    picture = page.screenshot(path=PICTURES / f"{name}.png", animations="disabled", caret="hide")
    assert len(picture) < MOST, f"{name}.png has {len(picture)} bytes"
    print(f"docs/pictures/{name}.png  {len(picture) / 1000:.0f} kB")  # noqa: T201


def main() -> None:
    """All of them."""
    if CHROMIUM is None:
        sys.exit("there is no browser: apt-get install chromium")
    django.setup()
    connection_created.connect(stand_still)
    conftest._migrate("default")
    world(NOW)
    cookie = session("ann", *PERMISSIONS)
    PICTURES.mkdir(exist_ok=True)
    now = patch("django.template.defaulttags.datetime", Mock(now=lambda **_: NOW))  # {% now %}
    with override_settings(TIME_ZONE="UTC"), now, served() as site, chromium() as browser:
        shoot(browser, site, cookie)
        shoot_terminal(browser)


if __name__ == "__main__":
    main()
