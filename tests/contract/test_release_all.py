"""`release_all()`: what a process still holds when its work is done is free at once, and known to be lost."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from dblock import LockLost
from dblock.core import runtime
from dblock.core.errors import Reason, StoreBusy, StoreConflict
from dblock.core.lock.base_store import BaseStore
from dblock.core.protocol.steps import Execute
from tests.conftest import timed
from tests.support.lab import fail, until
from tests.support.subjects import Actor, Actors, Subject, twin


def test_it_gives_back_what_any_flow_holds(face: Subject, actors: Actors, caplog: pytest.LogCaptureFixture) -> None:
    """Entered twice, with `min_hold`, by another flow: the count, the rows, and what their flows are told."""
    mine, theirs, end = actors(3)
    told: list[Reason] = []
    twice = mine.hold(face.lock("twice", ttl=60, on_lost=lambda _, reason: told.append(reason)))
    assert mine.call(twice, "acquire")
    other = theirs.hold(face.lock("other"))
    assert mine.call(face.lock("short", min_hold=0.05), "acquire")
    assert end.do(lambda: face.api("release_all")) == 3
    assert end.do(lambda: face.api("release_all")) == 0
    assert face.row("twice")["owner"] is None
    assert face.row("other")["owner"] is None
    assert (mine.get(twice, "state"), theirs.get(other, "state"), mine.get(twice, "remaining")) == ("lost", "lost", 0)
    for actor, lock in ((mine, twice), (theirs, other)):
        with pytest.raises(LockLost, match="given all its locks back") as caught:
            actor.call(lock, "release")
        assert caught.value.reason is Reason.RELEASED
    assert until(lambda: told == [Reason.RELEASED], 5)
    assert theirs.call(face.lock("twice"), "acquire"), "and it can be taken again"
    theirs.call(face.lock("twice"), "release")
    assert not [record for record in caplog.records if record.levelno > logging.WARNING]


def test_who_waits_gets_the_key(either: Subject, actors: Actors) -> None:
    """In this process and behind another engine or alias; the others of the process wait on."""
    holder, near, far, end = actors(4)
    lock, elsewhere = holder.hold(either.lock("k", timeout=20)), twin(either).lock("k", timeout=20)
    waiting = near.begin(lock, "acquire")
    assert until(lambda: either.run("SELECT count(*) FROM lock_waiters") == [(1,)], 5)
    beyond = far.begin(elsewhere, "acquire")
    assert until(lambda: either.run("SELECT count(*) FROM lock_waiters") == [(2,)], 5)
    assert end.do(lambda: either.api("release_all")) == 1
    assert waiting.result(5) is True
    near.call(lock, "release")
    assert beyond.result(5) is True
    far.call(elsewhere, "release")
    with pytest.raises(LockLost):
        holder.call(lock, "release")


def test_a_database_that_fails_is_asked_once(
    either: Subject, actor: Actor, other: Actor, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """What it keeps ends with its lease: no renewal follows, and no error."""
    for key in "abc":
        actor.hold(either.lock(key, ttl=1.5))
    execute, asked = BaseStore.execute, []

    def refuse(store: BaseStore, step: Execute) -> Any:
        if step.statement.name == "release":
            asked.append(step.parameters["key"])
            raise StoreConflict("down")
        return execute(store, step)

    with monkeypatch.context() as patch:
        timed(patch, retry_budget=0.1)
        patch.setattr(BaseStore, "execute", refuse)
        assert other.do(lambda: either.api("release_all")) == 0
    assert set(asked) == {"c"}, "the last one taken comes first"
    assert "could not release 'c': down" in caplog.text
    assert not runtime.current.watchdog._holds
    assert other.call(either.lock("a", timeout=15), "acquire"), "within its ttl"
    other.call(either.lock("a"), "release")


def test_what_was_handed_over_is_not_released(protocol: Subject, actors: Actors) -> None:
    """What was detached is nobody's hold; what was attached is ours."""
    first, mine, end = actors(3)
    lock = first.hold(protocol.lock("k", ttl=60))
    token = first.call(lock, "detach")
    assert end.do(lambda: protocol.api("release_all")) == 0
    attach = mine.do(lambda: protocol.api("attach", token))
    assert end.do(lambda: protocol.api("release_all")) == 1
    assert protocol.row("k")["owner"] is None
    with pytest.raises(LockLost):
        mine.call(attach, "release")


def test_a_row_that_is_locked_is_passed_over(
    protocol: Subject, actor: Actor, other: Actor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By whomever: the others are given back."""
    for key in "abc":
        actor.call(protocol.lock(key, ttl=60), "acquire")
    with monkeypatch.context() as patch:
        timed(patch, retry_budget=1.0)
        fail(patch, StoreBusy, "release", key="c")
        assert other.do(lambda: protocol.api("release_all")) == 2
    assert [protocol.row(key)["owner"] for key in "ab"] == [None, None]
    assert protocol.row("c")["owner"] is not None


def test_a_call_that_is_broken_off(
    sync_protocol: Subject, actor: Actor, other: Actor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it has not released is renewed no more, and is free within its ttl."""
    for key in "ab":
        actor.call(sync_protocol.lock(key, ttl=1.5), "acquire")
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        fail(patch, KeyboardInterrupt, "release", key="b")
        other.do(lambda: sync_protocol.api("release_all"))
    assert not runtime.current.watchdog._holds
    for key in "ab":
        assert other.call(sync_protocol.lock(key, timeout=15), "acquire")
        other.call(sync_protocol.lock(key), "release")
