"""What is noted until it is written: what becomes of it where nothing can run, and how much is written and deleted."""

from __future__ import annotations

import gc
import json
import weakref
from typing import Any

import pytest

from dblock.core.errors import LockStoreError
from dblock.core.observing.events import Event, Kind
from dblock.core.protocol.steps import Sleep
from dblock.operating import history
from dblock.operating.history import Histories, History
from tests.core.test_holds import FakeStore
from tests.support.steps import NO_STORE

WHO = {"host": "h", "pid": 1, "thread": "t", "program": "p"}


def made() -> FakeStore:
    """A store whose history is kept."""
    store = FakeStore()
    store.history = 100
    return store


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, Any]]:
    """The statements that were sent, and what was given to them."""
    sent: list[tuple[str, Any]] = []

    def ask(_: Any, name: str, given: Any, **__: Any) -> Any:
        yield Sleep(NO_STORE, 0)
        sent.append((name, given))

    monkeypatch.setattr(history, "ask", ask)
    return sent


def note(noting: History, store: FakeStore, count: int = 1) -> None:
    for number in range(count):
        noting.note(store, Event(Kind.ACQUIRED, "x", key=f"k{number}", fence=1, how="at_once"), WHO)


def write(noting: History, store: FakeStore) -> None:
    begun = noting.begin(store)
    assert begun
    assert all(isinstance(step, Sleep) for step in begun[0])


def test_what_happened_elsewhere_is_dropped(asked: list[tuple[str, Any]], caplog: pytest.LogCaptureFixture) -> None:
    """The store's name leads to another database since, be it when that is begun or when the next thing is noted."""
    noting, store = History(), made()
    store.location = "test"
    note(noting, store, 2)
    store.location = "real"
    write(noting, store)
    assert (asked, noting.pending) == ([], False)
    note(noting, store)
    store.location = "test"
    note(noting, store)
    write(noting, store)
    [(_, given), _] = asked
    assert [(each["lock_key"], each["kind"]) for each in json.loads(given["events"])] == [("k0", "acquired")]
    assert not caplog.text


def test_an_engine_that_is_thrown_away(asked: list[tuple[str, Any]]) -> None:
    """What happened there is written all the same, and it is kept no longer."""
    noting, store = Histories(), made()
    there, noting[store] = weakref.ref(store), History()
    note(noting[store], store)
    del store
    _ = gc.collect()
    [(_, _, steps)] = noting.begin()
    _ = list(steps)
    assert [name for name, _ in asked] == ["note", "trim"]
    del _, steps
    gc.collect()
    assert there() is None


def test_what_cannot_be_trimmed_is_not_filled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who may write and not delete writes once."""
    noting, store, written = History(), made(), list[str]()

    def ask(_: Any, name: str, *__: Any, **___: Any) -> Any:
        yield Sleep(NO_STORE, 0)
        written.append(name)
        if name == "trim":
            raise LockStoreError("DELETE command denied")

    monkeypatch.setattr(history, "ask", ask)
    for _ in range(2):
        note(noting, store)
        write(noting, store)
    assert written == ["note", "trim", "trim"]


def test_what_no_column_takes_is_left_out(asked: list[tuple[str, Any]]) -> None:
    """So that it does not take the others with it."""
    noting, store = History(), made()
    noting.note(store, Event(Kind.GAVE_UP, "x", key="k", reason="\0" + "x" * 300), WHO)
    write(noting, store)
    assert [each["detail"] for each in json.loads(asked[0][1]["events"])] == ["x" * 255]
