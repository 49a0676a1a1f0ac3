"""Flows of one process that want the same key: one place in the queue, and hand-overs inside the process."""

from __future__ import annotations

from typing import Any

import pytest

from dblock.core.acquire import handover
from dblock.core.errors import LockTimeout
from dblock.core.observing.events import Kind
from tests.conftest import heard, timed
from tests.contract.test_queue import lined_up, listen_in, stranger, waiters
from tests.support.lab import LATER, until
from tests.support.subjects import Actor, Actors, Subject


@pytest.fixture
def hopeful(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first of a local queue waits for a local hand-over for as long as it takes."""
    timed(monkeypatch, local_handover_wait=60.0, waiter_ttl=120.0)


def start(subject: Subject, actor: Actor, **options: Any) -> tuple[Any, Any]:
    """Let a flow want the key, which a flow of this process holds; returns once it is in the local queue."""
    before = lined_up(subject)
    lock = subject.lock("k", **{"timeout": 30, **options})
    waiting = actor.begin(lock, "acquire")
    assert until(lambda: lined_up(subject) == before + 1)
    return lock, waiting


@pytest.mark.usefixtures("hopeful")
def test_one_statement_hands_the_key_on(
    either: Subject, actor: Actor, other: Actor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It ends one tenure and begins the next, which is what the next one asked for; the last one releases."""
    told = heard(Kind.ACQUIRED)
    holder = actor.hold(either.lock("k", ttl=60, label="first"))
    fence = actor.get(holder, "fence")
    lock, waiting = start(either, other, ttl=20, label="second")
    assert waiters(either) == 0
    sent = listen_in(either, monkeypatch)
    actor.call(holder, "release")
    assert waiting.result(30) is True
    assert until(lambda: [event.how for event in told] == ["at_once", "handed_over"], 5)
    assert [name for name, _ in sent] == ["hand_over_local"]
    row = either.row("k")
    assert (row["ttl"], row["label"], row["count"]) == (20, "second", 1)
    assert (row["owner"], row["fence"]) == (other.get(lock, "owner"), other.get(lock, "fence"))
    assert row["fence"] > fence
    assert 17 < other.get(lock, "remaining") <= 20
    assert (actor.get(holder, "state"), other.get(lock, "state")) == (None, "held")
    assert other.call(lock, "verify") is True
    sent.clear()
    other.call(lock, "release")
    assert [name for name, _ in sent] == ["release"]


@pytest.mark.usefixtures("hopeful")
def test_others_have_their_turn(either: Subject, actor: Actor, actors: Actors, monkeypatch: pytest.MonkeyPatch) -> None:
    """While somebody of another process waits, the key stays in this one for a bounded number of tenures only."""
    monkeypatch.setattr(handover, "MOST_LOCAL", 2)
    holder = actor.hold(either.lock("k"))
    stranger(either, 7, 600)
    either.run("UPDATE locks SET last_ticket = 7")
    crowd = [(other, *start(either, other, timeout=1.0 if n == 2 else 30)) for n, other in enumerate(actors(3))]
    actor.call(holder, "release")
    for other, lock, got in crowd[:2]:
        assert got.result(30) is True
        other.call(lock, "release")
    assert either.row("k")["owner"] == "s"
    assert crowd[2][2].result(30) is False
    alive = f"SELECT 1 FROM lock_waiters WHERE expires_at > {LATER[either.database]}"
    # The stranger's place, where it is not left as the key is granted; one that could not be left in time ends.
    assert until(lambda: len(either.run(alive, seconds=0)) <= 1, 10)


def test_a_waiter_that_gives_up_names_the_holder_of_that_moment(
    either: Subject, actor: Actor, other: Actor, actors: Actors, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whichever way the key went on inside the process, and not whom the first of them saw."""
    # The first is granted the key by the database. No listener: it would listen for a minute, beside later tests.
    timed(monkeypatch, local_handover_wait=0.01, attention=60.0, linger=60.0, listen_after=60.0)
    holder, next_, late = (either.lock("k", label=label, timeout=1.4) for label in ("first", "second", "third"))
    actor.call(holder, "acquire")
    second = other.begin(next_, "acquire")
    assert until(lambda: waiters(either) == 1)
    last, patient = actors(2)
    with pytest.raises(LockTimeout, match="first"):
        last.within(either.lock("k", timeout=0.1))
    fourth, waits = start(either, patient)
    third = last.enter(late)
    assert until(lambda: lined_up(either) == 3)
    actor.call(holder, "release")
    assert second.result(5) is True
    with pytest.raises(LockTimeout, match="second") as caught:
        third.result(10)
    assert caught.value.holder is not None
    assert caught.value.holder.label == "second"
    assert caught.value.holder.age > 0.5, "and since when that one had it"
    other.call(next_, "release")
    assert waits.result(5) is True
    patient.call(fourth, "release")
