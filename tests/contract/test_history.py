"""What happened to keys, as it is written down (`HISTORY`, `dblock_history`), and what nobody waits for."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
from sqlalchemy import create_engine

from dblock.core import runtime
from dblock.core.errors import LockStoreError
from dblock.core.observing.observers import observers
from dblock.core.protocol.drive import drive
from dblock.core.protocol.steps import Sleep
from dblock.operating import administration, history
from dblock.operating.administration import EventInfo
from sqlalchemy_dblock import db_lock
from sqlalchemy_dblock.store import store_for
from tests.conftest import observer, own_engine, run, timed
from tests.contract.conftest import with_settings
from tests.contract.test_queue import waiters
from tests.faults.test_shutdown import process
from tests.support.lab import cycle, expire, renew, until
from tests.support.subjects import Actor, Actors, Subject


@pytest.fixture
def subject(subject: Subject) -> Iterator[Subject]:
    """With a history."""
    with kept(subject, 1000) as own:
        yield own


@pytest.fixture
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is written a tenth of a second later, in place of a second."""
    timed(monkeypatch, attention=0.1)
    runtime.current.watchdog.wake()


@contextlib.contextmanager
def kept(plain: Subject, most: int) -> Iterator[Subject]:
    """A subject whose history is kept while the block lasts."""
    run(plain.database, "DELETE FROM lock_events")
    watchdog = runtime.current.watchdog
    with with_settings(plain, history=most) as own:
        yield own
        assert until(lambda: not watchdog._unfinished, 10)


def written(subject: Subject, count: int, key: str = "k") -> list[EventInfo]:
    """The events of a key, once there are so many, the first one first."""
    store = store_for(observer(subject.database))

    def events() -> list[EventInfo]:
        found: list[EventInfo] = drive(administration.events(store, key, 1000))
        return found[::-1]

    assert until(lambda: len(events()) >= count, 10), events()
    return events()


@pytest.mark.usefixtures("either", "soon")
def test_what_became_of_a_lock(subject: Subject, actors: Actors) -> None:
    """Who took it, who could not, when it was given back and handed over; when that was, by the database's clock."""
    actor, other, third = actors(3)
    began, lock = time.monotonic(), actor.hold(subject.lock("k", label="tea"))
    actor.call(lock, "acquire")  # nobody else's business
    fence = actor.get(lock, "fence")
    assert not other.call(subject.lock("k"), "acquire", timeout=0)
    waiting = third.begin(subject.lock("k"), "acquire", timeout=30)
    assert until(lambda: waiters(subject), 10)
    time.sleep(0.2)
    for _ in range(2):
        actor.call(lock, "release")
    assert waiting.result(30)
    took, gave_up, left, next_ = sorted(written(subject, 4), key=lambda event: (event.fence > fence, -event.age))
    told = [(event.kind, event.detail) for event in (took, gave_up, left)]
    assert told == [("acquired", "at_once"), ("gave_up", "timeout"), ("released", "released")]
    assert (next_.kind, next_.detail in {"waited", "handed_over"}) == ("acquired", True)
    assert (took.fence, left.fence, gave_up.fence, next_.fence > fence) == (fence, fence, 0, True)
    assert (took.label, left.label, next_.label) == ("tea", "tea", "")
    assert all(event.identity.pid == os.getpid() for event in (took, gave_up, left, next_))
    assert took.identity == left.identity != gave_up.identity
    assert 0.2 <= left.seconds <= took.age - left.age + 1
    third.call(subject.lock("k"), "release")
    assert 0.1 <= next_.seconds < 30
    assert 0 <= left.age <= gave_up.age <= took.age <= time.monotonic() - began + 0.01


@pytest.mark.usefixtures("sync_protocol", "soon")
def test_what_went_wrong_with_it(subject: Subject, actor: Actor) -> None:
    """A loss and a forced release, by whom and why; the flow that had it tells who that was."""
    lost = actor.hold(subject.lock("k", ttl=30))
    expire(subject)
    store = lost._place.store()
    assert drive(administration.force_release(store, "k", actor.get(lost, "fence"), "root: enough"))
    renew()
    assert until(lambda: actor.get(lost, "state") == "lost", 10)
    acquired, *more = written(subject, 3)
    assert sorted(event.kind for event in more) == ["forced", "lost"]
    for event in more:
        assert event.fence == acquired.fence
        assert (event.detail == "root: enough") is (event.kind == "forced")
        assert event.kind == "forced" or event.identity == acquired.identity


def test_a_tenure_has_ended_before_the_next_began() -> None:
    """Whichever flow has told of it first, and where the clock shows no difference."""

    def row(kind: str, fence: int, ago: float, pid: int, key: str = "k") -> tuple[Any, ...]:
        return (key, kind, fence, ago, 0.0, "", "", "host", pid, "thread", "program", "")

    after = row("released", 1, 2.0, 1), row("acquired", 2, 2.1, 2), row("acquired", 1, 9.0, 1)
    at_once = row("acquired", 2, 0.1, 1), row("released", 1, 0.1, 1), row("acquired", 1, 0.1, 1)
    for rows in (after, at_once, [row("acquired", 3, 2.05, 3, "j"), *after]):
        told = administration._by_time(list(rows))
        assert [(each.kind, each.fence) for each in told if each.key == "k"] == [
            ("acquired", 2),
            ("released", 1),
            ("acquired", 1),
        ]


@pytest.mark.usefixtures("protocol", "soon")
def test_a_busy_key_leaves_room_for_others(subject: Subject, actor: Actor, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of each key some events are written, and how many were not."""
    monkeypatch.setattr(history, "OF_KEY", 4)
    assert until(lambda: not runtime.current.watchdog._unfinished, 10)
    with monkeypatch.context() as patch:
        patch.setattr(history.Histories, "begin", lambda *_, **__: iter(()))  # nothing is written meanwhile
        for _ in range(5):
            actor.within(subject.lock("busy"))
        actor.within(subject.lock("k"))
    assert [event.kind for event in written(subject, 2)] == ["acquired", "released"]
    busy = written(subject, 5, "busy")
    assert [event.kind for event in busy] == ["acquired", "released", "acquired", "released", "omitted"]
    assert busy[-1].detail == "6"


@pytest.mark.usefixtures("protocol")
def test_the_table_is_bounded(subject: Subject) -> None:
    """Old rows are deleted as new ones are written."""
    with kept(subject, 20) as own:
        actor = Actor(own)
        for number in range(60):
            actor.within(own.lock(f"k{number}"))
        assert until(lambda: not runtime.current.watchdog._unfinished, 10)
        assert until(lambda: len(own.run("SELECT 1 FROM lock_events")) <= 20, 10)
        assert [event.kind for event in written(own, 2, "k59")] == ["acquired", "released"]
        actor.close()


@pytest.mark.usefixtures("sync_protocol")
def test_a_process_that_ends_at_once(subject: Subject) -> None:
    """What has happened in it is written before."""
    given = "DBLOCK={'HISTORY': 100}"
    body = f"""
from django.test import override_settings
override_settings({given}).enable()
if subject.variant != "django":
    subject.__dict__["engine"] = subject.engine.execution_options(dblock_history=100)
with subject.lock("k"):
    pass
subject.lock("k").acquire()
"""
    process(subject, body)
    assert [event.kind for event in written(subject, 3)] == ["acquired", "released", "acquired"]


@pytest.mark.usefixtures("protocol", "soon")
def test_it_keeps_no_lock_from_working(
    subject: Subject, actor: Actor, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """What cannot be written is dropped, and the log says why."""

    def refuse(*_: Any, **__: Any) -> Any:
        yield Sleep(subject.lock("k")._place.store(), 0)
        raise LockStoreError("no such table")

    with monkeypatch.context() as patched:
        patched.setattr(history, "ask", refuse)
        actor.within(subject.lock("k"))
        assert until(lambda: "could not write the history of locks: no such table" in caplog.text, 10)
        assert until(lambda: not runtime.current.watchdog._unfinished, 10)
    actor.within(subject.lock("k"))
    assert len(written(subject, 2)) == 2


def at(*cells: str) -> Any:
    """Each of these cells."""
    return pytest.mark.parametrize("subject", [Subject(*each.split()) for each in cells], indirect=True, ids=str)


@pytest.mark.usefixtures("soon")
@at("sqlalchemy sync sqlite")
def test_what_could_not_be_begun(subject: Subject, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a thread to be had that once: it is written later, as is what comes then."""
    start, refused = threading.Thread.start, list[str]()

    def refuse(self: threading.Thread) -> None:
        if self.name == "dblock housekeeping" and not refused:
            refused.append(self.name)
            raise RuntimeError("can't start new thread")
        start(self)

    monkeypatch.setattr(threading.Thread, "start", refuse)
    with subject.lock("k"):
        assert until(lambda: refused, 10)
    assert until(lambda: not runtime.current.watchdog._unfinished, 10)
    cycle(subject.lock("k"))
    assert [event.kind for event in written(subject, 4)] == ["acquired", "released"] * 2


@at("sqlalchemy async postgresql psycopg", "sqlalchemy async postgresql asyncpg")
def test_an_event_loop_that_ends_at_once(subject: Subject) -> None:
    """A script with `asyncio.run`, three times: nothing is lost, and no driver complains."""
    body = """
import asyncio
sys.stderr = sys.stdout
from sqlalchemy.ext.asyncio import create_async_engine
from sqlalchemy_dblock import db_lock
async def once():
    engine = create_async_engine(subject.engine.url, execution_options={"dblock_history": 100})
    async with db_lock(engine, "k"):
        pass
    await engine.dispose()
for _ in range(3):
    asyncio.run(once())
"""
    assert process(subject, body) == ""
    assert [event.kind for event in written(subject, 6)] == ["acquired", "released"] * 3


@at("sqlalchemy sync postgresql")  # SQLite's library does not like a fork while another thread is in it
def test_a_forked_child_writes_what_it_has_done_itself(subject: Subject) -> None:
    """And not once more what its parent has."""
    body = """
import os
subject.__dict__["engine"] = subject.engine.execution_options(dblock_history=100)
with subject.lock("k", label="parent"):
    pass
child = os.fork()
with subject.lock("k", label="child" if child == 0 else "parent"):
    pass
if child:
    os.waitpid(child, 0)
"""
    process(subject, body)
    labels = sorted(event.label for event in written(subject, 6))
    assert labels == ["child"] * 2 + ["parent"] * 4


def test_what_is_no_number_of_events() -> None:
    """Is said where the engine is first used."""
    for most, error in ((-1, ValueError), (10**8, ValueError), (True, TypeError), ("1", TypeError)):
        with pytest.raises(error, match="dblock_history"):
            store_for(create_engine("sqlite://", execution_options={"dblock_history": most}))


def test_where_no_history_is_kept_nothing_is_noted(sqlite: object) -> None:
    """Nor is anything loaded for it, nor in a database in memory, where nobody else could read it."""
    with db_lock(observer("sqlite"), "k"):
        assert not observers
        assert runtime.current.watchdog.histories is None
    engine = own_engine("sqlite://", execution_options={"dblock_history": 100})
    assert store_for(engine).history == 0
    assert not observers
