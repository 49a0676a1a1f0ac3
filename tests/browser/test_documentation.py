"""The documentation site, as `make docs` has built it, in a browser: `make faults` builds it first."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from playwright.sync_api import Page

from tests.browser.site import AXE, assert_readable, chromium
from tests.browser.test_inspector import LOOKS
from tests.support.lab import ROOT
from tests.support.subjects import LONG

BUILT = ROOT / ".build/docs/html"
PAGES = [
    *("index", "start", "choosing", "pictures", "clusters", "celery", "monitoring", "runbook", "run", "kubernetes"),
    *("benchmarks", "coming-from", "operating"),
    *("reference", "api/dblock", "api/celery", "zh/start"),
]
"""One of each kind: cards, examples, tables, drawings, plots, signatures, Chinese text."""
CUT = """[...document.querySelectorAll("article :is(pre, img, .table-wrapper)")].filter(
    each => each.scrollWidth > each.clientWidth + 1 || each.getBoundingClientRect().right > innerWidth
).map(each => each.textContent.slice(0, 60))"""
"""Code, pictures and tables of which a part is seen only by scrolling sideways."""


@pytest.fixture(scope="module")
def page() -> Iterator[Page]:
    if not LONG:
        pytest.skip("the site is not built in the short form: make docs, then DBLOCK_FAULTS=long")
    assert (BUILT / "index.html").exists(), "make docs"
    with chromium() as browser:
        page = browser.new_page()
        page.add_init_script(AXE)
        yield page


@pytest.mark.timeout(120)
@pytest.mark.parametrize("name", PAGES)
def test_everybody_can_read_it(page: Page, name: str) -> None:
    """No violation of a rule of axe-core, in light or in dark, wide or on a phone, which it is no wider than."""
    errors: list[str] = []
    page.on("pageerror", note := lambda error: errors.append(str(error)))
    for scheme, width in LOOKS:
        page.goto(f"file://{BUILT}/{name}.html")
        assert_readable(page, scheme, width)
        assert page.evaluate(CUT) == [], (scheme, width)
    page.remove_listener("pageerror", note)
    assert not errors
