from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from playwright.sync_api import Browser, BrowserContext, Page, expect

from tests.browser.site import PERMISSIONS, chromium, served, session
from tests.conftest import ready

expect.set_options(timeout=20_000)


@pytest.fixture(scope="module")
def _browser() -> Iterator[tuple[Browser, str]]:
    """One for all tests, and the address of the site; it is not the tests' own thread that answers there."""
    with served() as address, chromium() as browser:
        yield browser, address


@pytest.fixture
def look(request: pytest.FixtureRequest, _browser: tuple[Browser, str]) -> Iterator[Callable[..., Page]]:
    """`look(*permissions, **options)`: an empty page for `ann`, who may do that much (all, if nothing is said)."""
    ready(request, "sqlite")
    browser, address = _browser
    contexts: list[BrowserContext] = []

    def look(*permissions: str, **options: Any) -> Page:
        context = browser.new_context(base_url=address, **options)
        contexts.append(context)
        cookie = session("ann", *(permissions or PERMISSIONS))
        context.add_cookies([{"name": "sessionid", "value": cookie, "url": address}])
        return context.new_page()

    yield look
    for context in contexts:
        context.close()
