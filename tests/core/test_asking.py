"""Asks of databases: each result is used or undone, never both, in every order of the answer and the caller."""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from dblock.core.errors import LockStoreError
from dblock.core.protocol.drive import drive
from dblock.core.protocol.steps import Cancelled, Steps, sleep, wait
from dblock.core.wakeup.registry import Wakeup
from dblock.core.worker import start
from dblock.majority import asking
from dblock.majority.asking import Ask, Asks
from tests.conftest import timed
from tests.core.test_holds import FakeStore
from tests.support.lab import until


def test_each_result_that_was_left_is_undone_once() -> None:
    """The steps end and the caller leaves in either order, at any time, once or twice; else the caller has it."""
    statement: Any = object()
    for order in (["step"], ["leave"], ["step", "leave"], ["leave", "step"], ["step", "leave", "leave"]):
        undone: list[str] = []

        def undo(result: str, undone: list[str] = undone) -> Steps[None]:
            undone.append(result)
            yield from ()

        def steps() -> Steps[str]:
            yield statement  # no pause, so it is not interrupted
            return "granted"

        begun: list[Steps[None]] = []
        asks: Any = SimpleNamespace(begin=lambda _, steps, begun=begun: begun.append(steps))
        ask = Ask(FakeStore(), steps(), Wakeup(), undo)
        work = ask.work()
        _ = next(work)
        for what in [*order, *({"step"} - set(order))]:
            if what == "step":
                assert list(work) == []
            else:
                ask.leave(asks)
        for each in begun:
            assert list(each) == []
        assert (ask.result, ask.answered) == ("granted", True)
        assert undone == ["granted"] * ("leave" in order), order


def ask(store: FakeStore, steps: Steps[Any], undone: list[Any], wakeup: Wakeup) -> Ask[Any]:
    def undo(result: Any) -> Steps[None]:
        undone.append(result)
        yield from ()

    return Ask(store, steps, wakeup, undo)


def test_an_ask_that_waits_is_woken_when_it_is_left() -> None:
    """And cleans up as after an interrupt."""
    asks, said = Asks(), list[str]()

    def steps() -> Steps[None]:
        try:
            yield from wait(FakeStore(), 60, Wakeup())
        except Cancelled:
            said.append("interrupted")
            raise

    found = asks.ask(ask(FakeStore(), steps(), said, Wakeup()))
    assert until(lambda: found.cancel._wakeup)
    found.leave(asks)
    assert until(lambda: said == ["interrupted"])
    assert until(lambda: not asks.busy)


def test_a_database_that_does_not_answer_is_not_waited_for_again() -> None:
    """Until it answers; and meanwhile no more than one thread asks it."""
    asks, store, wakeup, undone, open_again = Asks(), FakeStore(), Wakeup(), list[Any](), threading.Event()

    def slow() -> Steps[str]:
        while not open_again.is_set():
            yield from sleep(store, 0.001)
        return "late"

    def quick() -> Steps[str]:
        yield from ()
        return "at once"

    first = asks.ask(ask(store, slow(), undone, wakeup))
    drive(asks.gather([first], 0.05, wakeup))
    assert asks.is_silent(store)
    second = asks.ask(ask(store, quick(), undone, wakeup))
    assert isinstance(second.error, LockStoreError)
    assert not second.pending()
    open_again.set()
    assert until(lambda: not first.pending())
    assert until(lambda: not asks.is_silent(store))
    third = asks.ask(ask(store, quick(), undone, wakeup))
    drive(asks.gather([third], 5, wakeup))
    assert (first.result, third.result, undone) == ("late", "at once", [])


class Unentered(threading.Condition):
    """An interrupt between the two lines of its `__enter__` would leave it locked."""

    def __enter__(self) -> bool:
        raise AssertionError("it is not for `with`")


def test_a_thread_whose_start_was_interrupted_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """And the asks that come after it are made."""
    timed(monkeypatch, linger=1.0)
    store = FakeStore()
    asks, threads, made = Asks(), list[Callable[[], bool]](), list[str]()

    def starts(*given: Any) -> Any:
        threads.append(start(*given))
        if len(threads) == 1:
            raise KeyboardInterrupt
        return threads[-1]

    def steps() -> Steps[None]:
        made.append("made")
        yield from ()

    monkeypatch.setattr(asking, "start", starts)
    asks._changed = Unentered(asks._mutex)
    with pytest.raises(KeyboardInterrupt):
        asks.begin(store, steps())
    for _ in range(3):
        asks.begin(store, steps())
    assert until(lambda: len(made) == 3 and not asks.busy)
    assert until(lambda: not any(is_alive() for is_alive in threads), 5)
