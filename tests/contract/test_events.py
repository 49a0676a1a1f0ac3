"""What those who observe locks are told, on every face: each attempt and each tenure has one beginning and one end."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

import sqlalchemy_dblock
from dblock import LockLost, LockTimeout, observe
from dblock.core.deliveries import deliveries
from dblock.core.errors import Reason, StoreConflict
from dblock.core.observing.events import Event, Kind
from dblock.core.observing.observers import observers
from tests.conftest import ALIASES
from tests.support.lab import fail, renew, until
from tests.support.model import Interrupted
from tests.support.subjects import Actor, Subject


@pytest.fixture
def told() -> Iterator[list[Event]]:
    """All that is told during a test but renewals, for one of a lease of an earlier test may end now."""
    events: list[Event] = []
    stop = observe(events.append, *set(Kind) - {Kind.RENEWED})
    yield events
    stop()
    assert not observers


def brief(events: list[Event], key: str = "k") -> list[tuple[str, ...]]:
    """What happened to a key, in short; renewals apart, which come when they will."""
    return [(str(event.kind), event.how or event.reason) for event in events if event.key == key]


def test_a_lock_that_nobody_contends(face: Subject, actor: Actor, told: list[Event]) -> None:
    """Taken at once, entered once more, left twice; with whose it is, its fence, its label and its database."""
    lock = face.lock("k", label="tea")
    fence = actor.within(lock, lambda: lock.fence)
    acquired, released = told
    assert (acquired.kind, acquired.how, acquired.depth, acquired.contended) == (Kind.ACQUIRED, "at_once", 1, False)
    assert (released.kind, released.how, released.depth) == (Kind.RELEASED, "released", 0)
    assert 0 <= acquired.wait < 5
    assert 0 < released.held < 5
    for event in told:
        assert (event.key, event.fence, event.label, event.sender) == ("k", fence, "tea", type(lock))
        assert event.database == (ALIASES[face.database] if face.variant == "django" else str(lock._place.store().name))
    assert "@" not in acquired.database
    told.clear()
    assert [actor.call(lock, "acquire") for _ in range(2)] == [True, True]
    for _ in range(2):
        actor.call(lock, "release")
    depths = [(str(event.kind), event.how, event.depth) for event in told]
    assert depths == [
        ("acquired", "at_once", 1),
        ("acquired", "reentered", 2),
        ("released", "released", 1),
        ("released", "released", 0),
    ]


def test_who_waits(either: Subject, actor: Actor, other: Actor, told: list[Event]) -> None:
    """One event says that the key is contended, when the wait begins, and one how the wait ended, either way."""
    lock = actor.hold(either.lock("k", timeout=20, label="mine"))
    waiting = other.begin(either.lock("k", timeout=20), "acquire")
    assert until(lambda: brief(told)[1:] == [("contended", "")], 10)
    time.sleep(0.1)
    actor.call(lock, "release")
    assert waiting.result(20)
    other.call(either.lock("k"), "release")
    assert until(lambda: len(told) == 5, 5)
    [contended], [_, second] = (
        [event for event in told if event.kind is kind] for kind in (Kind.CONTENDED, Kind.ACQUIRED)
    )
    assert second.how in {"handed_over", "waited"}
    assert second.contended
    assert 0.1 <= second.wait < 20
    assert contended.holder is None or (contended.holder.label, contended.holder.owner) == ("mine", "***")
    assert sorted(str(event.kind) for event in told) == ["acquired", "acquired", "contended", "released", "released"]
    told.clear()

    assert actor.call(lock, "acquire")
    with pytest.raises(LockTimeout):
        other.within(either.lock("k", timeout=0.1))
    assert not other.call(either.lock("k"), "acquire", blocking=False)
    assert brief(told)[1:] == [("contended", ""), ("gave_up", "timeout")] * 2
    waited, refused = (event for event in told if event.kind is Kind.GAVE_UP)
    assert waited.wait >= 0.1
    assert waited.contended
    assert refused.contended
    assert refused.holder is not None
    assert (refused.holder.label, refused.holder.owner) == ("mine", "***")
    actor.call(lock, "release")


def test_a_tenure_that_goes_on_elsewhere(either: Subject, actor: Actor, other: Actor, told: list[Event]) -> None:
    """Detached by one flow, attached by the other: each had it once."""
    lock = actor.hold(either.lock("k"))
    token = actor.call(lock, "detach")
    same = other.do(lambda: either.api("attach", token))
    other.call(same, "release")
    assert brief(told) == [
        ("acquired", "at_once"),
        ("released", "detached"),
        ("acquired", "attached"),
        ("released", "released"),
    ]
    assert len({event.fence for event in told}) == 1


def test_a_lock_that_is_lost(either: Subject, actor: Actor, told: list[Event], monkeypatch: pytest.MonkeyPatch) -> None:
    """First at risk, then lost, for how long it was held and why; and what is lost is not released."""
    fail(monkeypatch, StoreConflict, "renew")
    ttl = 3.0  # the last renewal is sent a fifteenth of it before trust ends: an event loop has that long to begin it
    lock = either.lock("k", ttl=ttl, label="tea")
    began = time.monotonic()
    assert actor.call(lock, "acquire")
    took = time.monotonic() - began
    assert until(lambda: any(event.kind is Kind.LOST for event in told), 20)
    with pytest.raises(LockLost):
        actor.call(lock, "release")
    time.sleep(0.05)
    assert [event.kind for event in told] == [Kind.ACQUIRED, Kind.AT_RISK, Kind.LOST]
    _, risk, lost = told
    assert ttl / 9 < risk.lateness < ttl * 2 / 3
    assert (lost.reason, lost.label, lost.depth) == (Reason.UNREACHABLE, "tea", 1)
    assert lost.held > ttl * 8 / 9 - took, "trust counts from the sending"
    assert len({event.fence for event in told}) == 1


def test_renewals_and_reaping(either: Subject, actor: Actor, told: list[Event]) -> None:
    """One event for a statement, however many leases or rows it was about."""
    renewals: list[Event] = []
    stop = observe(renewals.append, Kind.RENEWED)
    locks = [actor.hold(either.lock(f"k{number}", ttl=20)) for number in range(3)]
    renew()
    assert until(lambda: any(event.amount == 3 for event in renewals), 20)
    stop()
    assert 0 <= renewals[-1].lateness < 10
    for lock in locks:
        actor.call(lock, "release")
    time.sleep(0.05)  # SQLite's clock goes by milliseconds
    actor.do(lambda: either.reap(0))
    [reaped] = [event for event in told if event.kind is Kind.REAPED]
    assert (reaped.amount, reaped.places, reaped.key) == (3, 0, "")
    assert reaped.sender is not None


def test_release_all(either: Subject, actor: Actor, told: list[Event]) -> None:
    """A flow that still works under a lock has lost it, and is told so."""
    assert actor.call(either.lock("k"), "acquire")
    actor.do(lambda: either.api("release_all"))
    assert until(lambda: len(told) == 2, 5)
    assert brief(told) == [("acquired", "at_once"), ("lost", str(Reason.RELEASED))]


def test_a_callback_that_fails(
    either: Subject, actor: Actor, told: list[Event], caplog: pytest.LogCaptureFixture
) -> None:
    """Is logged, and breaks neither the lock nor what others are told."""

    def fails(event: Event) -> None:
        raise RuntimeError(f"mine {event.kind}")

    stop = observe(fails, Kind.RELEASED)
    try:
        actor.within(either.lock("k"))
    finally:
        stop()
    assert brief(told) == [("acquired", "at_once"), ("released", "released")]
    [record] = [record for record in caplog.records if "observer" in record.message]
    assert "mine released" in record.message
    assert record.exc_info
    assert either.row("k")["owner"] is None


def test_an_interrupt_while_others_are_told(either: Subject, actor: Actor) -> None:
    """Who acquired has nothing; who left has left; and both are told once."""
    told: list[Event] = []

    def interrupt(event: Event) -> None:
        told.append(event)
        if event.kind is kind:
            raise Interrupted

    for kind in (Kind.ACQUIRED, Kind.RELEASED):  # noqa: B007 - for the callback
        told.clear()
        lock = either.lock("k")
        stop = observe(interrupt, Kind.ACQUIRED, Kind.RELEASED, Kind.GAVE_UP)
        with pytest.raises(Interrupted):
            actor.call(lock, "acquire")
            actor.call(lock, "release")
        stop()
        assert either.row("k")["owner"] is None
        assert actor.get(lock, "state") is None
        assert [event.kind for event in told] == [Kind.ACQUIRED, Kind.RELEASED]


def test_a_wait_that_is_broken_off(async_face: Subject, actor: Actor, other: Actor, told: list[Event]) -> None:
    """The attempt has ended, and what with."""
    assert actor.call(async_face.lock("k"), "acquire")

    async def cancelled() -> None:
        task = asyncio.ensure_future(getattr(async_face.lock("k", timeout=20), async_face.method("acquire"))())
        assert await asyncio.to_thread(until, lambda: any(event.kind is Kind.CONTENDED for event in told), 10)
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task

    other.do(cancelled)
    assert brief(told)[1:] == [("contended", ""), ("gave_up", "CancelledError")]
    actor.call(async_face.lock("k"), "release")


def test_it_is_for_functions_and_kinds() -> None:
    """A mistake is told at once; ending twice ends no other one; both faces have the same one."""
    assert sqlalchemy_dblock.observe is observe
    with pytest.raises(TypeError, match="none"):
        observe("me")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="told"):
        observe(print, "told")
    first, second = observe(print), observe(print)
    first()
    first()
    assert observers
    second()
    assert not observers


def test_events_of_the_watchdog_come_in_order_in_one_thread() -> None:
    """However many they are: a callback that takes its time holds up neither it, nor others' memory."""
    seen: list[tuple[int, str]] = []
    go = threading.Event()

    def slow(event: Event) -> None:
        assert go.wait(20)
        seen.append((event.amount, threading.current_thread().name))

    stop = observe(slow, Kind.RENEWED)
    [hear] = observers
    stop()
    store: Any = type("Somewhere", (), {"name": "x", "history": 0})
    for number in range(500):
        hear(Event(Kind.RENEWED, "x", amount=number), store, None)
        hear(Event(Kind.LOST, "x"), store, None)
    assert sum(thread.name == "dblock deliveries" for thread in threading.enumerate()) == 1
    go.set()
    assert until(lambda: len(seen) == 500, 20)
    assert seen == [(number, "dblock deliveries") for number in range(500)]
    assert deliveries.flush(5)


def test_what_is_lost_is_not_left(either: Subject, actor: Actor, told: list[Event]) -> None:
    """Not by its inner entries, either; `on_lost` is called once."""
    lost: list[Reason] = []
    lock = either.lock("k", on_lost=lambda _, reason: lost.append(reason))
    assert [actor.call(lock, "acquire") for _ in range(2)] == [True, True]
    either.run("UPDATE locks SET fence = fence + 1 WHERE lock_key = 'k'")
    for _ in range(2):
        with pytest.raises(LockLost):
            actor.call(lock, "release")
    assert until(lambda: len(told) == 3, 5)
    assert [(event.kind, event.how or event.depth) for event in told] == [
        (Kind.ACQUIRED, "at_once"),
        (Kind.ACQUIRED, "reentered"),
        (Kind.LOST, 2),
    ]
    assert deliveries.flush(20)
    assert lost == [Reason.TAKEN_OVER]
