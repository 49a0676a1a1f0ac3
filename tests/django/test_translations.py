"""German and Chinese: all that the lock inspector says."""

from __future__ import annotations

import gettext
import io
import re
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from html.parser import HTMLParser
from pathlib import Path
from typing import Any, get_args
from unittest.mock import patch

import pytest
from babel.messages.catalog import Catalog
from babel.messages.extract import DEFAULT_KEYWORDS, extract
from babel.messages.pofile import read_po
from django.conf import settings
from django.contrib import admin
from django.test import Client, override_settings
from django.utils.translation import deactivate, override
from django.utils.translation.template import templatize

from dblock.core.errors import Reason
from dblock.core.observing.events import How
from dblock.models import LockEvent
from dblock.operating.wording import said, span
from tests.browser.site import LIST, PERMISSIONS, session, world
from tests.conftest import run

SOURCES = Path(__file__).parents[2] / "dblock"
CATALOGUES = ("de", "zh_Hans")
LANGUAGES = {"de": "de", "zh-CN": "zh-hans"}
"""What a browser asks for, and what Django calls it."""
KEYWORDS = {"gettext_noop": None, **DEFAULT_KEYWORDS} | {f"{name}_lazy": how for name, how in DEFAULT_KEYWORDS.items()}
SAME = {"Host", "Fence", "s", "min", "h", "d", "UTC"}
"""Words that are no English alone."""


def marked() -> set[tuple[str | None, tuple[str, ...]]]:
    """What the sources have translated: contexts, and texts with their plurals."""
    found = set()
    for path in [*SOURCES.rglob("*.py"), *SOURCES.rglob("*.html")]:
        text = path.read_text()
        if path.suffix == ".html":
            text = "\n".join(line.strip() for line in templatize(text, origin=str(path)).splitlines())
        for _, message, _, context in extract("python", io.BytesIO(text.encode()), KEYWORDS):
            found.add((context, _all(message)))
    return found


def catalogue(language: str, app: Path = SOURCES) -> Catalog:
    with (app / f"locale/{language}/LC_MESSAGES/django.po").open("rb") as file:
        return read_po(file, locale=language)


def _all(text: Any) -> tuple[str, ...]:
    """A text, or one with its plurals."""
    return (text,) if isinstance(text, str) else tuple(text)


def kept(text: str) -> list[str]:
    """What a translation leaves as it is: placeholders, tags, code."""
    return sorted(re.findall(r"%\(\w+\)[ds]|%[ds]|<[^>]*>|\w+\(\)|DBLOCK\S+|\w+_\w+", text))


@pytest.mark.parametrize("language", CATALOGUES)
def test_the_catalogues_are_whole(language: str) -> None:
    """They have what the sources have and no more, translated, with the same placeholders and tags; compiled too."""
    plain = catalogue(language)
    told = {(each.context, _all(each.id)): _all(each.string) for each in plain if each.id}
    assert set(told) == marked(), "make messages"
    assert not plain.obsolete, "make messages"
    assert not any(each.fuzzy for each in plain)
    compiled = dict[Any, str]()
    for (context, originals), strings in told.items():
        assert len(strings) == (plain.num_plurals if len(originals) > 1 else 1), originals
        name = f"{context}\x04{originals[0]}" if context else originals[0]
        for number, string in enumerate(strings):
            assert string.strip(), originals
            assert kept(string) == kept(originals[-1]), originals
            compiled[(name, number) if len(originals) > 1 else name] = string
    with (SOURCES / f"locale/{language}/LC_MESSAGES/django.mo").open("rb") as file:
        found: Any = gettext.GNUTranslations(file)
    assert {name: text for name, text in found._catalog.items() if name} == compiled, "make messages"
    assert found.info()["plural-forms"] == plain.plural_forms


def test_what_the_protocol_says_has_words() -> None:
    """How a lock was taken or ended, and why it was lost; and lengths of time as each language writes them."""
    for language in LANGUAGES.values():
        with override(language):
            for word in {*get_args(How), *Reason} - {""}:
                assert said(word) not in {word, word.replace("_", " ")}
    for language, spans in {
        "en": ["0.4 s", "3 min 20 s", "5 h 2 min", "3 d"],
        "de": ["0,4 s", "3 min 20 s", "5 h 2 min", "3 d"],
        "zh-hans": ["0.4 秒", "3 分 20 秒", "5 小时 2 分", "3 天"],
    }.items():
        with override(language):
            assert [span(seconds) for seconds in (0.4, 200, 18_120, 260_000)] == spans


class Texts(HTMLParser):
    """What a page says: to the eye, to a screen reader, and to its script."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.language: str | None = ""
        self.found: set[str] = set()
        self._silent = False
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self._silent = tag in {"script", "style"}
        given = dict(attrs)
        if tag == "html":
            self.language = given.get("lang")
        names = {"aria-label", "title", "alt", "placeholder", *(name for name in given if name.startswith("data-"))}
        if given.get("type") == "submit":
            names.add("value")
        self.found |= {" ".join((given.get(name) or "").split()) for name in names - {"data-state"}}

    def handle_endtag(self, tag: str) -> None:
        self._silent = False

    def handle_data(self, data: str) -> None:
        if not self._silent:
            self.found.add(" ".join(data.split()))


def happened() -> None:
    """Events of every kind."""
    who = {"host": "web-1", "pid": 811, "thread": "MainThread", "program": "gunicorn", "celery_task_id": "5f1c"}
    kinds = ("acquired", "gave_up", "released", "lost", "at_risk", "forced", "reaped", "omitted")
    details = ("handed_over", "timeout", "released", "taken over", "", "ann: it_hangs", "3, 2", "17")
    for number, (kind, detail) in enumerate(zip(kinds, details, strict=True)):
        columns = {"fence": 7 + number // 2, "seconds": 3.0, "label": "order 1107", "detail": detail, **who}
        at = datetime.now(UTC) - timedelta(seconds=100 - number)
        LockEvent.objects.create(lock_key="stock:42", kind=kind, happened_at=at, **columns)


@pytest.fixture(autouse=True)
def _language_of_this_thread() -> Iterator[None]:
    """Is afterwards as it was: LocaleMiddleware leaves the one that was asked for."""
    yield
    deactivate()


def pages(language: str) -> Iterator[tuple[str, str]]:
    """All that the inspector says, page by page, in the same world for each language."""
    for table in ("locks", "lock_waiters", "lock_events", "django_admin_log"):
        run("sqlite", f"DELETE FROM {table}")
    client = Client(headers={"accept-language": language})
    client.cookies["sessionid"] = session("ann", *PERMISSIONS)
    stock = f"{LIST}stock_3A42/"

    def get(path: str) -> tuple[str, str]:
        return path, client.get(path, follow=True).content.decode()

    def post(path: str, **fields: str) -> tuple[str, str]:
        return f"POST {path}", client.post(path, fields, follow=True).content.decode()

    yield get(LIST)
    yield get(f"{LIST}events/")
    world()
    happened()
    for path in (LIST, f"{LIST}waiters/", f"{LIST}events/", f"{LIST}reap/"):
        yield get(path)
    for path in ("change/", "release/", "revoke/"):
        yield get(stock + path)
    with patch("dblock.operating.inspector.SHOWN", 2):
        yield get(f"{LIST}waiters/")
    yield get(f"{LIST}stock_3A7/change/")
    yield get(f"{LIST}stock_3A7/release/")  # which nobody holds
    fence = {"fence": "1795428000000004", "reason": "it hangs"}
    yield post(f"{stock}revoke/", **fence)
    yield get(f"{stock}change/")
    yield post(f"{stock}release/", **{**fence, "fence": "1"})
    yield post(f"{stock}release/", **fence)
    yield get(f"{stock}history/")
    yield post(f"{LIST}reap/")


def strangers() -> list[str]:
    """What others have written: keys, labels, hosts."""
    texts = {"ann", "it_hangs", "it hangs", "stock:42", "web-1 pid 811", "web-2 pid 802", "default"}
    for table in ("locks", "lock_waiters", "lock_events"):
        rows = run("sqlite", f"SELECT lock_key, label, host, thread, program, celery_task_id FROM {table}")
        texts |= {str(value) for row in rows for value in row if value}
    return sorted(texts, key=len, reverse=True)


def test_no_page_speaks_english(sqlite: object) -> None:
    """A user whose browser asks for German or Chinese sees no English but what strangers have written."""
    middleware = [*settings.MIDDLEWARE, "django.middleware.locale.LocaleMiddleware"]
    with override_settings(MIDDLEWARE=middleware, ALLOWED_HOSTS=["*"], TIME_ZONE="UTC"):
        english = [(Texts(page).found, strangers()) for _, page in pages("en")]
        djangos = {each.id for each in catalogue("en", Path(admin.__file__).parent)}
        for asked, language in LANGUAGES.items():
            for (name, page), (before, foreign) in zip(pages(asked), english, strict=True):
                told = Texts(page)
                assert told.language in {"", language}, name
                left = {text for text in told.found & before - djangos if _words(text, foreign)}
                assert not left, (language, name)
    run("sqlite", "DELETE FROM lock_events")


def _words(text: str, foreign: list[str]) -> str:
    """What is left of a text without what strangers have written."""
    for each in foreign:
        text = text.replace(each, "")
    return "".join(set(re.findall(r"[^\W\d_]+", text)) - SAME)
