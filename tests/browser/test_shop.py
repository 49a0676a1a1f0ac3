"""The example shop as `make serve` runs it, all of its processes: in browsers, while others want the same."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from playwright.sync_api import Browser, BrowserContext, Page, expect

from tests.browser.shop import opened
from tests.browser.site import AXE, assert_readable, chromium
from tests.conftest import POOLER
from tests.support.subjects import LONG

Visit = Callable[..., Page]


SERVERS: list[dict[str, str]] = [{}]
"""What the shop is told to run on: nothing but files; in `make faults` servers too."""
if LONG:
    SERVERS += [{"DB": "postgresql", "BROKER": "redis"}, {"DB": "mysql"}]


@pytest.fixture(scope="module", params=SERVERS, ids=lambda servers: servers.get("DB", "sqlite"))
def _open(request: pytest.FixtureRequest) -> Iterator[tuple[str, Browser]]:
    """One shop and one browser program for all tests."""
    if POOLER:
        pytest.skip("not through PgBouncer")
    with chromium() as browser, opened(**request.param) as shop:
        yield shop, browser


@pytest.fixture
def visit(_open: tuple[str, Browser]) -> Iterator[Visit]:
    """`visit(address, **options)`: a page of the shop, in a browser that shares nothing with others."""
    shop, browser = _open
    contexts: list[BrowserContext] = []

    def visit(address: str, **options: Any) -> Page:
        contexts.append(browser.new_context(base_url=shop, **options))
        page = contexts[-1].new_page()
        _ = page.goto(address)
        return page

    yield visit
    for context in contexts:
        context.close()


@pytest.mark.parametrize(("sku", "tills"), [("clock", ("/checkout", "/checkout")), ("stool", ("/checkout", "http"))])
def test_two_browsers_buy_the_last_item(visit: Visit, sku: str, tills: tuple[str, str]) -> None:
    """One gets it, the other is told that it is sold out: both from Django, or one from FastAPI's market stall."""
    pages = [visit(f"/item/{sku}/") for _ in tills]
    if sku == "stool":  # there are two of them
        pages[0].get_by_role("button", name="Buy one").click()
        pages[1].reload()
    for page, till in zip(pages, tills, strict=True):  # the second comes while the first one pays
        page.evaluate(f"document.querySelector('form[action^=\"{till}\"]').requestSubmit()")
    for page in pages:
        expect(page.locator("main .stock")).to_have_text("Sold out")
    told = [page.locator(".message").inner_text() for page in pages]
    assert sorted("sold out" in each for each in told) == [False, True], told
    assert sorted("You bought one" in each for each in told) == [False, True], told
    pages[0].reload()
    assert pages[0].locator("tbody tr").count() == (2 if sku == "stool" else 1), "sales in the books"


def test_fifty_rivals(visit: Visit) -> None:
    """They oversell without the lock and never with it, which the page shows as it happens."""
    page = visit("/rivals/")
    page.get_by_role("button", name="Sell the last 10").click()
    without, with_ = page.locator("#without"), page.locator("#with")
    page.evaluate("window.loaded = 'once'")
    expect(with_.locator(".verdict")).to_have_text("Comes next.")
    expect(without.locator("[role=status]")).to_have_text(re.compile(r"\d+ sold, \d+ too many"))
    expect(with_.locator(".verdict")).to_have_text("Exactly 10 sold", timeout=30_000)
    assert page.evaluate("window.loaded") == "once"
    assert int(without.locator("dd").nth(1).inner_text().split()[0]) > 1
    assert with_.locator("dd").all_inner_texts()[:2] == ["0 left", "1 at most"]
    with_.get_by_text("All 50 holders").click()
    rows = [row.split("\t") for row in with_.locator("tbody tr").all_inner_texts()]
    fences = [int(row[4]) for row in rows]
    assert fences == sorted(set(fences))
    assert [row[3] for row in rows] == ["bought one"] * 10 + ["sold out"] * 40
    faces = [face for face in ("Django", "FastAPI") for row in rows if face in row[0]]
    assert faces == ["Django"] * 25 + ["FastAPI"] * 25
    still = visit("/rivals/", java_script_enabled=False)
    expect(still.locator("#with .verdict")).to_have_text("Exactly 10 sold")


def test_a_killed_leader_is_replaced(visit: Visit) -> None:
    """By one of the candidates, in a later term, when its lease has ended; the page shows it without a reload."""
    page = visit("/back-room/")
    leader = page.locator("#leader")
    expect(leader.locator("[data-pid]")).to_be_visible()
    pid, term = (leader.locator(f"[data-{name}]").inner_text() for name in ("pid", "term"))
    name = leader.locator(".who b").inner_text()
    page.get_by_role("button", name="Kill the leader").click()
    expect(page.locator(".message")).to_contain_text(f"{name} (process {pid}) was killed")
    page.evaluate("window.loaded = 'once'")
    expect(leader.locator("[data-pid]")).not_to_have_text(pid)
    assert int(leader.locator("[data-term]").inner_text()) > int(term)
    assert page.evaluate("window.loaded") == "once"
    with contextlib.suppress(ProcessLookupError):
        os.kill(int(pid), 0)
        pytest.fail("it is alive")
    assert page.locator("#imports .slots li").count() == 3


def test_tasks_of_each_policy(visit: Visit) -> None:
    """One gets the key; those that come meanwhile do what their policy says."""
    page = visit("/tasks/")
    policies = ("raise", "skip", "wait", "queue")
    for policy in policies:
        page.get_by_role("button", name=f"Send three with {policy}").click()
    rows = page.locator("#sent tbody tr")
    expect(rows).to_have_count(12)
    expect(rows.locator(".pending, .started, .retry")).to_have_count(0, timeout=30_000)
    seen = {name: [row.split("\t") for row in rows.all_inner_texts() if f"\t{name}\t" in row] for name in policies}
    states = {name: {row[3] for row in seen[name]} for name in policies}
    assert states == {
        "raise": {"success", "failure"},
        "skip": {"success", "skipped"},
        "wait": {"success"},
        "queue": {"success"},
    }
    assert sorted(int(row[4]) for row in seen["wait"]) == [13, 14, 15], "each one put its item back"
    assert len({row[2] for row in seen["queue"]}) < 3, "fewer runs than results"


LOOKS: list[tuple[str, Any, int]] = [
    ("/", "dark", 390),
    ("/item/mug/", "light", 1280),
    ("/rivals/", "dark", 1280),
    ("/back-room/", "light", 390),
    ("/tasks/", "dark", 390),
]


def test_everybody_can_read_it(visit: Visit) -> None:
    """No page violates a rule of axe-core, in light or in dark, wide or on a phone, which none is wider than."""
    page = visit("/")
    page.add_init_script(AXE)
    for address, scheme, width in LOOKS:
        page.goto(address)
        assert_readable(page, scheme, width)
