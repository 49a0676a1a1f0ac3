"""The lock inspector as people use it: with a mouse, a keyboard, a phone, a screen reader, and without JavaScript."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
from playwright.sync_api import Locator, Page, Route, expect

from tests.browser.site import AXE, LIST, assert_readable, violations, world
from tests.conftest import run

Look = Callable[..., Page]
STOCK = f"{LIST}stock_3A42/"
ALL = ["import:customers", "report:daily", "invoice:2026-11", "stock:42", "newsletter", "stock:7"]
"""Trouble first, what is free last."""


def keys(page: Page) -> Locator:
    """Those of the list, in its order."""
    return page.locator("#result_list .field-shown_key")


def said(page: Page) -> Locator:
    """The site's messages to a user who has done something."""
    return page.locator(".messagelist")


class Watched:
    """The list of what is held, and a clock that stands still but for what the test says."""

    def __init__(self, page: Page) -> None:
        world()
        page.clock.install(time="2026-11-23T02:00:00")
        page.clock.pause_at("2026-11-23T02:00:01")
        page.goto(f"{LIST}?state=held")
        self.page = page
        self.label = page.locator("tr", has_text="stock:42").locator(".field-held_by b")
        self.time, self.trouble = page.locator(".dblock-live > span"), page.locator(".dblock-live > output")
        self.asked = 0
        expect(self.label).to_have_text("restock from supplier")
        page.on("request", self._ask)

    def _ask(self, _: object) -> None:
        self.asked += 1

    def shows(self, words: str) -> None:
        """A change in the database appears after two seconds, and when that was."""
        self.time.evaluate("each => each.textContent = 'some time ago'")
        self._relabel(words)
        with self.page.expect_request_finished():
            self.page.clock.run_for(2000)
        expect(self.label).to_have_text(words)
        expect(self.time).to_have_text(re.compile(r"updated \d\d:\d\d:\d\d"))  # the site's clock

    def ignores(self, words: str) -> None:
        """It does not appear, and nobody asks for it."""
        before = self.asked, self.label.inner_text(), self.time.inner_text()
        self._relabel(words)
        self.page.clock.run_for(20_000)
        assert (self.asked, self.label.inner_text(), self.time.inner_text()) == before

    def _relabel(self, words: str) -> None:
        run("sqlite", "UPDATE locks SET label = :words WHERE lock_key = 'stock:42'", words=words)


def test_live_refresh(look: Look) -> None:
    """What changes is shown, without a reload, unless somebody wants to read in peace."""
    page = look()
    live = Watched(page)
    page.evaluate("window.loaded = 'once'")
    live.shows("one")
    expect(keys(page)).to_have_text(["invoice:2026-11", "stock:42"])  # the filter is kept
    page.get_by_role("button", name="Pause").click()
    live.ignores("two")
    page.get_by_role("button", name="Resume").click()
    expect(live.label).to_have_text("two")
    link = page.get_by_role("link", name="stock:42")
    link.focus()
    live.ignores("three")
    expect(link).to_be_focused()
    link.blur()
    page.evaluate("getSelection().selectAllChildren(document.querySelector('h1'))")
    live.ignores("four")
    page.evaluate("getSelection().removeAllRanges()")
    live.shows("five")
    assert page.evaluate("window.loaded") == "once"


def test_a_refresh_that_is_under_way(look: Look) -> None:
    """It takes the focus from nobody who came to a link after it was asked for."""
    page = look()
    live = Watched(page)
    link = page.get_by_role("link", name="stock:42")

    def come_to_the_link(route: Route) -> None:
        link.focus()
        route.continue_()

    page.route(page.url, come_to_the_link)
    page.clock.run_for(2000)
    page.evaluate("fetch(location.href).then(each => each.text())")  # which is answered after the other
    assert live.asked == 2
    expect(link).to_be_focused()
    page.unroute(page.url)
    link.blur()
    live.shows("one")


def test_what_cannot_be_refreshed(look: Look) -> None:
    """That is said, and when it last was; it is tried again, but not after the session has ended."""
    page = look()
    live = Watched(page)
    live.shows("one")
    when = live.time.inner_text()
    page.context.set_offline(True)
    page.clock.run_for(2000)
    expect(live.trouble).to_have_text("could not be refreshed")
    expect(live.time).to_have_text(when)
    page.context.set_offline(False)
    live.shows("two")
    expect(live.trouble).to_be_empty()
    page.context.clear_cookies()
    page.clock.run_for(2000)
    expect(live.trouble).to_contain_text("no longer refreshed: you are logged out")
    expect(page.get_by_role("button", name="Pause")).to_be_hidden()
    live.ignores("three")


def test_a_laptop(look: Look) -> None:
    """At 1280 pixels, with Django's sidebar open, all columns are in view: who holds what, and who waits for what."""
    world()
    run("sqlite", "UPDATE locks SET label = :words WHERE lock_key = 'report:daily'", words="the daily report " * 5)
    page = look(viewport={"width": 1280, "height": 800})
    for address, table in ((LIST, ".results"), (f"{LIST}waiters/", "#queue"), (f"{STOCK}change/", "#queue")):
        page.goto(address)
        expect(page.locator("#nav-sidebar")).to_be_visible()
        cut = page.locator(table).evaluate("each => each.scrollWidth - each.clientWidth")
        assert cut <= 0, (address, cut)
    page.goto(f"{LIST}waiters/")
    expect(page.locator("#queue tbody tr").first).to_contain_text("order 1107")
    expect(page.locator("#queue tbody td:nth-child(4)").first).to_contain_text("restock from supplier")


def test_a_phone(look: Look) -> None:
    """The list has a card for each row, with the names of its columns, and is a table for screen readers."""
    world()
    page = look(viewport={"width": 390, "height": 780})
    page.goto(LIST)
    for _ in ("loaded", "refreshed"):
        row = page.get_by_role("row", name="stock:42")
        expect(row.get_by_role("rowheader")).to_have_text("stock:42")
        expect(row.get_by_role("cell")).to_have_count(5)
        waiters = row.locator(".field-waiters")
        assert waiters.evaluate("cell => getComputedStyle(cell, '::before').content") == '"Waiters"'
        edges = row.locator("td").evaluate_all("cells => cells.map(each => each.getBoundingClientRect().right)")
        assert max(edges) <= 390
        waiters.evaluate("cell => cell.removeAttribute('data-label')")
        expect(page.locator("td.field-waiters:not([data-label])")).to_have_count(0)  # when it is refreshed


def test_without_javascript(look: Look) -> None:
    """All of it works: filters, search, sorting, details, the queue, force release."""
    world()
    page = look(java_script_enabled=False)
    page.goto(LIST)
    expect(keys(page)).to_have_text(ALL)
    expect(page.locator(".dblock-live")).to_be_hidden()
    for choice, found in (
        ("at risk", ["report:daily"]),
        ("held", ["invoice:2026-11", "stock:42"]),
        ("nobody waits", ["invoice:2026-11"]),
        ("web-1", ["invoice:2026-11"]),
    ):
        page.locator("#changelist-filter").get_by_role("link", name=choice, exact=True).click()
        expect(keys(page)).to_have_text(found)
    page.goto(LIST)
    page.locator("#result_list th.column-time_left .text a").click()
    expect(keys(page)).to_have_text([ALL[5], ALL[0], ALL[2], ALL[1], ALL[3], ALL[4]])
    page.get_by_role("textbox", name="Search").fill("5f1c6f0e")
    page.get_by_role("button", name="Search").click()
    expect(keys(page)).to_have_text(["report:daily", "stock:42", "newsletter"])  # still sorted
    page.get_by_role("link", name="Who waits").click()
    expect(page.locator("#queue tbody tr")).to_have_count(3)
    page.get_by_role("link", name="stock:42").first.click()
    page.wait_for_url("**/change/")
    expect(page.locator("#queue td:nth-child(3)")).to_contain_text(["web-1 pid 811", "web-2 pid 812", "worker-2"])
    page.get_by_role("link", name="Force release").click()
    page.get_by_label("Reason").fill("it hangs, without JavaScript")
    page.get_by_role("button", name="Yes").click()
    expect(said(page)).to_contain_text("was released")


STOP = """() => {
    const stop = document.activeElement;
    const look = () => { const s = getComputedStyle(stop); return s.outline + s.backgroundColor + s.borderColor; };
    const focused = look();
    stop.blur();
    const seen = look() !== focused || !document.querySelector("#content").contains(stop);
    stop.focus();
    return [stop.value || stop.innerText || "", seen];
}"""


def test_with_the_keyboard_alone(look: Look) -> None:
    """From the list to a forced release; where the focus is can be seen at every stop of ours."""
    world()
    page = look()

    def tab_to(words: str) -> None:
        for _ in range(50):
            page.keyboard.press("Tab")
            found, seen = page.evaluate(STOP)
            assert seen, found
            if words in found:
                return
        raise AssertionError(f"no way to {words!r}")

    page.goto(LIST)
    tab_to("invoice:2026-11")
    page.keyboard.press("Enter")
    page.wait_for_url("**/change/")
    tab_to("FORCE RELEASE")
    page.keyboard.press("Enter")
    expect(page.get_by_label("Reason")).to_be_focused()
    assert page.get_by_label("Reason").evaluate("field => field.validity.valueMissing"), "a reason is asked for"
    page.keyboard.type("it hangs, with the keyboard")
    tab_to("Yes")
    page.keyboard.press("Enter")
    expect(said(page)).to_contain_text("The lock on “invoice:2026-11” was released.")


SHOWN = {  # each page, and a word on it
    LIST: "newsletter",
    f"{STOCK}change/": "web-2 pid 812",
    f"{LIST}import_3Acustomers/change/": "CRM export",
    f"{LIST}stock_3A7/change/": "Nobody waits.",
    f"{STOCK}release/": "Its holder is not stopped",
    f"{STOCK}revoke/": "is asked to finish",
    f"{LIST}reap/": "No lock that is held is touched",
    f"{LIST}waiters/": "web-2 pid 812",
    f"{LIST}events/": "waited 1 min 36 s",
}
TWICE = (LIST, f"{STOCK}change/", f"{STOCK}release/", f"{LIST}events/")
"""The others are made of the same parts."""
LOOKS: list[tuple[Any, int]] = [("light", 1280), ("dark", 390)]


@pytest.mark.timeout(120)
def test_everybody_can_read_it(look: Look) -> None:
    """No page violates a rule of axe-core, in light or in dark, wide or on a phone, which none is wider than."""
    world()
    page = look()
    page.add_init_script(AXE)
    for address, words in SHOWN.items():
        page.goto(address)
        expect(page.locator("#content")).to_contain_text(words)
        page.add_style_tag(content="* { transition: none !important; }")
        for scheme, width in LOOKS if address in TWICE else LOOKS[:1]:
            assert_readable(page, scheme, width)
    page.goto(f"{STOCK}release/")
    page.get_by_label("Reason").fill(" ")
    page.get_by_role("button", name="Yes").click()
    expect(page.locator(".errorlist")).to_have_text("This field is required.")
    assert violations(page) == [], "with an error"
