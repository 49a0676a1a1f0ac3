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
from typing import Any, Literal, NamedTuple
from unittest.mock import Mock, patch

import django
from django.db.backends.signals import connection_created
from django.test import override_settings
from playwright.sync_api import Browser, Page, expect
from rich.console import Console

from dblock.operating.commands import top as watching
from tests import conftest
from tests.browser.shop import opened
from tests.browser.site import CHROMIUM, LIST, PERMISSIONS, chromium, family, served, session, world
from tests.support.lab import ROOT

NOW = datetime(2026, 11, 23, 2, 14, 5, tzinfo=UTC)
DAY, TIME = f"{NOW:%F %T}".split()
PICTURES = ROOT / "docs/pictures"
MOST = 150_000
"""Bytes of a picture."""
STOCK = f"{LIST}stock_3A42/"


class Shot(NamedTuple):
    """A picture: its name, and what it shows."""

    name: str
    address: str
    size: tuple[int, int]
    scheme: Literal["light", "dark"] = "light"


ADMIN = [
    Shot("details", f"{STOCK}change/", (1100, 960)),
    Shot("release", f"{STOCK}release/", (1100, 660)),
    Shot("semaphore", f"{LIST}api_3Apayments/change/", (1100, 860)),
    Shot("phone", LIST, (390, 1000)),
]
SHOP = [
    Shot("shop", "/", (1200, 860)),
    Shot("rivals", "/rivals/", (1200, 980)),
    Shot("rivals-dark", "/rivals/", (1200, 980), "dark"),
    Shot("back-room-dark", "/back-room/", (1200, 860), "dark"),
]


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


def shoot(browser: Browser, site: str, shots: list[Shot], cookie: str = "") -> None:
    """Pages of the shop; with a cookie, those of the admin at NOW."""
    for name, address, (width, height), scheme in shots:
        viewport: Any = {"width": width, "height": height}
        context = browser.new_context(
            base_url=site, viewport=viewport, color_scheme=scheme, locale="en-GB", timezone_id="UTC"
        )
        page = context.new_page()
        if cookie:
            context.add_cookies([{"name": "sessionid", "value": cookie, "url": site}])
            page.add_init_script("localStorage.setItem('django.admin.navSidebarIsOpen', 'false')")
            page.clock.set_fixed_time(NOW)
        page.goto(address)
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


def shoot_shop(browser: Browser, shop: str) -> None:
    """The shop, after a race, some sales and the death of a leader."""
    page = browser.new_page(base_url=shop)
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
    shoot(browser, shop, SHOP)


def save(page: Page, name: str) -> None:
    """What the page shows, as a file that is not too large for docs."""
    path = PICTURES / f"{name}.png"
    picture = page.screenshot(path=path, animations="disabled", caret="hide")
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
        shoot(browser, site, ADMIN, cookie)
        shoot_terminal(browser)


if __name__ == "__main__":
    main()
