"""Remake the pictures of the docs, `docs/pictures/*.png`: `make screenshots [ARGS=admin|shop]`.

A small world at a moment that does not pass: SQLite's clock and the browser's stand still, so that what has not changed
gives the same picture again, with the same version of the browser. The shop is alive: its pictures differ each time.
"""

from __future__ import annotations

import io
import sqlite3
import sys
import threading
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from unittest.mock import Mock, patch

import django
from django.db.backends.signals import connection_created
from django.test import override_settings
from playwright.sync_api import Browser, Page, expect
from rich.console import Console

from dblock.operating.commands import top as watching
from tests import conftest
from tests.browser.shop import Shop, opened
from tests.browser.site import CHROMIUM, LIST, PERMISSIONS, chromium, family, served, session, world
from tests.support.lab import ROOT

NOW = datetime(2026, 11, 23, 2, 14, 5, tzinfo=UTC)
DAY, TIME = f"{NOW:%F %T}".split()
PICTURES = ROOT / "docs/pictures"
MOST = 150_000
"""Bytes of a picture."""
STOCK = f"{LIST}stock_3A42/"
SHOTS: dict[str, dict[str, Any]] = {
    "details": {"address": f"{STOCK}change/", "size": (1100, 960)},
    "release": {"address": f"{STOCK}release/", "size": (1100, 660)},
    "semaphore": {"address": f"{LIST}api_3Apayments/change/", "size": (1100, 860)},
    "phone": {"address": LIST, "size": (390, 1000)},
}


WIDE, NARROW = (1200, 860), (390, 844)
SHOP: list[tuple[str, str, tuple[int, int], bool]] = [
    # name, address, size, whether the whole page is shown
    ("shop", "/", WIDE, False),
    ("shop-phone", "/", NARROW, False),
    ("item", "/item/lamp/", WIDE, False),
    ("item-phone", "/item/lamp/", NARROW, True),
    ("rivals", "/rivals/", (1200, 980), False),
    ("rivals-phone", "/rivals/", NARROW, True),
    ("back-room", "/back-room/", WIDE, False),
    ("back-room-phone", "/back-room/", NARROW, True),
    ("tasks", "/tasks/", (1200, 960), False),
    ("tasks-phone", "/tasks/", (390, 1400), False),
]
"""Each in light and in dark, to be looked at in `.build/pictures`; the docs show some."""
IN_DOCS = ("shop", "rivals", "rivals-dark", "back-room-dark")


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

    console = Console(record=True, width=140, height=18, file=io.StringIO(), force_terminal=True)
    with patch("time.strftime", return_value=TIME):
        rows = sorted(context("default").survey(), key=lambda row: -row.waiters)
        console.print(watching._view(context("default"), rows, watching.Rates(), console.height, console.width))
    page = browser.new_page(viewport={"width": 1400, "height": 320})
    page.set_content(f"<body style='margin:0'>{console.export_svg(title='manage.py dblock top')}")
    save(page, "top")


def shoot_shop(browser: Browser, shop: Shop) -> None:
    """The shop, after a race, some tasks, some sales and the death of a leader."""
    page = browser.new_page(base_url=shop.address)
    page.goto("/back-room/")
    leader = page.locator("[data-pid]")
    first = leader.inner_text()
    page.get_by_role("button", name="Kill the leader").click()
    expect(leader).not_to_have_text(first)
    page.goto("/rivals/")
    page.get_by_role("button", name="Sell the last 10").click()
    expect(page.locator("#with .verdict")).to_have_text("Exactly 10 sold", timeout=30_000)
    for till in ("Buy one", "Buy at the market stall"):
        page.goto("/item/lamp/")
        page.get_by_role("button", name=till).click()
    page.goto("/tasks/")
    for policy in ("queue", "raise", "skip", "retry"):
        page.get_by_role("button", name=f"Send three with {policy}").click()
    expect(page.locator("#sent").locator(".pending, .started, .retry")).to_have_count(0, timeout=30_000)
    for name, address, (width, height), full in SHOP:
        for scheme in ("light", "dark"):
            context = browser.new_context(
                base_url=shop.address, viewport={"width": width, "height": height}, color_scheme=scheme
            )
            page = context.new_page()
            page.goto(address)
            named = f"{name}-dark" if scheme == "dark" else name
            save(page, named, PICTURES if named in IN_DOCS else ROOT / ".build/pictures", full_page=full)
            context.close()


def save(page: Page, name: str, folder: Path = PICTURES, *, full_page: bool = False) -> None:
    """What the page shows, as a file that is not too large for docs."""
    path = folder / f"{name}.png"
    picture = page.screenshot(path=path, animations="disabled", caret="hide", full_page=full_page)
    assert len(picture) < MOST, f"{name}.png has {len(picture)} bytes"
    print(f"{path.relative_to(ROOT)}  {len(picture) / 1000:.0f} kB")  # noqa: T201


def main() -> None:
    """All of them."""
    if CHROMIUM is None:
        sys.exit("there is no browser: apt-get install chromium")
    PICTURES.mkdir(exist_ok=True)
    if "shop" not in sys.argv:
        shoot_all_of_admin()
    if "admin" not in sys.argv:
        with opened() as shop, chromium() as browser:
            shoot_shop(browser, shop)


def shoot_all_of_admin() -> None:
    """The inspector, and the terminal."""
    django.setup()
    connection_created.connect(stand_still)
    conftest._migrate("default")
    world(NOW)
    family(NOW)
    cookie = session("ann", *PERMISSIONS)
    now = patch("django.template.defaulttags.datetime", Mock(now=lambda **_: NOW))  # {% now %}
    with override_settings(TIME_ZONE="UTC"), now, served() as site, chromium() as browser:
        shoot(browser, site, cookie)
        shoot_terminal(browser)


if __name__ == "__main__":
    main()
