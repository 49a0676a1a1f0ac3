"""Decorating what real code has: wrapped functions, methods, views, tasks; and refusing what cannot be guarded."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
from django.http import HttpRequest, HttpResponse
from django.test import RequestFactory
from django.utils.decorators import method_decorator
from django.views import View
from sqlalchemy import Engine, text

from sqlalchemy_dblock import InvalidKey, db_lock


@pytest.fixture
def held(engine: Engine) -> Callable[[], list[str]]:
    """Which keys are held at the moment."""

    def look() -> list[str]:
        with engine.connect() as connection:
            rows = connection.execute(text("SELECT lock_key FROM locks WHERE owner IS NOT NULL"))
            return [row[0] for row in rows]

    return look


@pytest.mark.parametrize(
    ("key", "expected"), [("views", "views"), ("item:{pk}", "item:7"), ("{0.method}:{pk}", "GET:7")]
)
def test_a_class_based_view(engine: Engine, held: Callable[[], list[str]], key: str, expected: str) -> None:
    """Through Django's method_decorator, whose wrapper takes less than what it wraps."""

    @method_decorator(db_lock(engine, key), name="get")
    class Page(View):
        def get(self, request: HttpRequest, pk: int) -> HttpResponse:
            return HttpResponse(",".join(held()))

    response = Page.as_view()(RequestFactory().get("/"), pk=7)
    assert isinstance(response, HttpResponse)
    assert response.content == expected.encode()
    assert held() == []


def test_a_wrapper_that_adds_arguments(engine: Engine, held: Callable[[], list[str]]) -> None:
    """The key may name what the caller passes."""

    def inject(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def wrapper(sku: str) -> Any:
            return function("injected", sku)

        return wrapper

    @db_lock(engine, "stock:{sku}")
    @inject
    def sell(service: str, sku: str) -> tuple[str, list[str]]:
        return service, held()

    assert sell("42") == ("injected", ["stock:42"])


def test_methods_of_all_kinds(engine: Engine, held: Callable[[], list[str]]) -> None:
    """Below @staticmethod and @classmethod; above them it says so."""

    class Shop:
        name = "shop"

        @db_lock(engine, "{self.name}")
        def plain(self) -> list[str]:
            return held()

        @staticmethod
        @db_lock(engine, "static:{n}")
        def static(n: int) -> list[str]:  # noqa: ARG004
            return held()

        @classmethod
        @db_lock(engine, "{cls.__name__}")
        def of_class(cls) -> list[str]:
            return held()

    shop = Shop()
    assert (shop.plain(), shop.static(1), Shop.static(n=2), shop.of_class()) == (
        ["shop"],
        ["static:1"],
        ["static:2"],
        ["Shop"],
    )
    for kind in (staticmethod, classmethod, property):
        wrong: Any = kind(len)  # type: ignore[arg-type]
        with pytest.raises(TypeError, match=f"put @{kind.__name__} above @db_lock"):
            db_lock(engine, "k")(wrong)


def test_a_task_is_decorated_from_outside(engine: Engine) -> None:
    """The wrong order would leave the registered task unlocked."""
    from celery import shared_task

    @shared_task
    def task() -> None: ...

    with pytest.raises(TypeError, match="put @shared_task above @db_lock"):
        db_lock(engine, "k")(task)


def test_bad_keys_are_refused_at_decoration(engine: Engine) -> None:
    """With a word on what to write instead."""

    def function(n: int) -> None: ...

    for key, message in {"{}": "name the argument", "{n": "format string", "{other}": "'other'"}.items():
        with pytest.raises(InvalidKey, match=message):
            db_lock(engine, key)(function)


def test_keys_that_cannot_be_formed_name_the_function(engine: Engine, held: Callable[[], list[str]]) -> None:
    """At the call, before any I/O."""

    def function(n: int) -> None:
        pytest.fail("unreachable")

    for key in ("{n.nothing}", "{n:q}", "{5}", "{n!z}", "{n:{nested}}"):
        with pytest.raises(InvalidKey, match="function") as caught:
            db_lock(engine, key)(function)(1)
        assert caught.value.__cause__ is not None
    assert held() == []


def test_a_key_with_an_address_is_refused(engine: Engine, held: Callable[[], list[str]]) -> None:
    """Each object, and each process, would have a key of its own."""

    class Order: ...

    def ship(order: Order, made: Callable[[], None] = lambda: None) -> None:
        pytest.fail("unreachable")

    for key in ("order:{order}", "order:{order!r}", "order:{made}"):
        with pytest.raises(InvalidKey, match="ship has the address of an object in it"):
            db_lock(engine, key)(ship)(Order())
    assert held() == []


def test_wrong_arguments_are_a_type_error(engine: Engine) -> None:
    """That names the function and the key."""

    @db_lock(engine, "{n}")
    def function(n: int) -> None: ...

    with pytest.raises(TypeError, match="function.*{n}"):
        function(1, 2)  # type: ignore[call-arg]


def test_a_coroutine_in_disguise_is_refused(engine: Engine) -> None:
    """It would run after the lock is released."""

    async def coroutine() -> None: ...

    with pytest.raises(TypeError, match="after the lock"):
        _ = db_lock(engine, "k")(lambda: coroutine())()  # noqa: PLW0108
