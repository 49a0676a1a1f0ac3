"""Decorating what real code has: wrapped functions, methods, views, tasks; and refusing what cannot be guarded."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable
from typing import Any

import pytest
from celery import shared_task
from django.http import HttpRequest, HttpResponse
from django.test import RequestFactory
from django.utils.decorators import method_decorator
from django.views import View
from sqlalchemy import Engine, text

from sqlalchemy_dblock import InvalidKey, db_lock


def held(engine: Engine) -> list[str]:
    """Which keys are held at the moment."""
    with engine.connect() as connection:
        return [*connection.scalars(text("SELECT lock_key FROM locks WHERE owner IS NOT NULL"))]


@pytest.mark.parametrize(
    ("key", "expected"), [("views", "views"), ("item:{pk}", "item:7"), ("{0.method}:{pk}", "GET:7")]
)
def test_a_class_based_view(engine: Engine, key: str, expected: str) -> None:
    """Through Django's method_decorator, whose wrapper takes less than what it wraps."""

    @method_decorator(db_lock(engine, key), name="get")
    class Page(View):
        def get(self, request: HttpRequest, pk: int) -> HttpResponse:
            return HttpResponse(",".join(held(engine)))

    response = Page.as_view()(RequestFactory().get("/"), pk=7)
    assert isinstance(response, HttpResponse)
    assert response.content == expected.encode()
    assert held(engine) == []


def test_a_wrapper_that_adds_arguments(engine: Engine) -> None:
    """The key may name what the caller passes."""

    def inject(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def wrapper(sku: str) -> Any:
            return function("injected", sku)

        return wrapper

    @db_lock(engine, "stock:{sku}")
    @inject
    def sell(service: str, sku: str) -> tuple[str, list[str]]:
        return service, held(engine)

    assert sell("42") == ("injected", ["stock:42"])


def test_methods_of_all_kinds(engine: Engine) -> None:
    """Below @staticmethod and @classmethod; above them it says so, and above @shared_task, whose task has no lock."""

    class Shop:
        name = "shop"

        @db_lock(engine, "{self.name}")
        def plain(self) -> list[str]:
            return held(engine)

        @staticmethod
        @db_lock(engine, "static:{n}")
        def static(n: int) -> list[str]:  # noqa: ARG004
            return held(engine)

        @classmethod
        @db_lock(engine, "{cls.__name__}")
        def of_class(cls) -> list[str]:
            return held(engine)

    shop = Shop()
    assert (shop.plain(), shop.static(1), Shop.static(n=2), shop.of_class()) == (
        ["shop"],
        ["static:1"],
        ["static:2"],
        ["Shop"],
    )
    for kind in (staticmethod, classmethod, property, shared_task):
        wrong: Any = kind(ship)
        with pytest.raises(TypeError, match=f"put @{kind.__name__} above @db_lock"):
            db_lock(engine, "k")(wrong)


def ship(n: Any, made: Callable[[], None] = lambda: None) -> None:
    pytest.fail("unreachable")


def test_bad_keys_are_refused_at_decoration(engine: Engine) -> None:
    """With a word on what to write instead."""
    for key, message in {"{}": "name the argument", "{n": "format string", "{other}": "'other'"}.items():
        with pytest.raises(InvalidKey, match=message):
            db_lock(engine, key)(ship)


def test_keys_that_cannot_be_formed_name_the_function(engine: Engine) -> None:
    """At the call, before any I/O. With an address in it each object, and each process, would have a key of its own."""
    for key in ("{n.nothing}", "{n:q}", "{5}", "{n!z}", "{n:{nested}}"):
        with pytest.raises(InvalidKey, match="ship") as caught:
            db_lock(engine, key)(ship)(1)
        assert caught.value.__cause__ is not None
    for key in ("order:{n}", "order:{n!r}", "order:{made}"):
        with pytest.raises(InvalidKey, match="ship has the address of an object in it"):
            db_lock(engine, key)(ship)(object())
    assert held(engine) == []


def test_wrong_calls_are_a_type_error(engine: Engine) -> None:
    """That names the function and the key; so is that of a coroutine in disguise, which would run without the lock."""
    with pytest.raises(TypeError, match="ship.*{n}"):
        db_lock(engine, "{n}")(ship)(1, 2, 3)  # type: ignore[call-arg, arg-type]
    with pytest.raises(TypeError, match="after the lock"):
        _ = db_lock(engine, "k")(lambda: asyncio.sleep(0))()
