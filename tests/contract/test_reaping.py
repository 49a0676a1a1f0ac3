"""Reaping in the background of a process that takes locks (`REAP_EVERY`, `dblock_reap_every`)."""

from __future__ import annotations

import contextlib
import math
import statistics
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from sqlalchemy import Engine

from dblock.core import clock, runtime
from dblock.core.errors import LockStoreError
from dblock.core.holding.flow import current_task
from dblock.core.protocol import reaping as steps
from dblock.core.protocol.steps import Execute, Steps
from dblock.core.protocol.store import Store
from dblock.core.watchdog.keeper import Keeper, in_background
from sqlalchemy_dblock import db_lock, metadata, reap
from sqlalchemy_dblock.store import store_for
from tests.conftest import own_engine, timed
from tests.contract.conftest import with_settings
from tests.faults.test_shutdown import process
from tests.support.lab import cycle, leave_rows, renewed, until
from tests.support.subjects import Actor, Actors, Subject

EVERY = 0.1
Making = Callable[..., Subject]


@pytest.fixture
def reaping(subject: Subject, monkeypatch: pytest.MonkeyPatch) -> Iterator[Making]:
    """The subject with other settings, and one row that nobody has used for years; the watchdog looks often."""
    timed(monkeypatch, attention=0.1)
    leave_rows(subject.database, "old")
    with contextlib.ExitStack() as stack:
        yield lambda **given: stack.enter_context(with_settings(subject, **given))
        end_reaping(monkeypatch)


@pytest.fixture
def actor(reaping: Making, actors: Actors) -> Actor:
    """One that ends before the settings are what they were."""
    return actors(1)[0]


def reapers() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "dblock housekeeping"]


def end_reaping(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let no keeper begin another pass, which would delete the rows of the next test."""
    monkeypatch.setattr(Keeper, "_next_reaping", lambda _: math.inf)  # also in a pass that begins at this moment
    for keeper in list(runtime.current.watchdog._keepers.values()):
        keeper.reap_at = math.inf
    assert until(lambda: not reapers()), "it goes on"


def taking(actor: Actor, subject: Subject, condition: Callable[[], object]) -> bool:
    """Whether the condition comes true while the actor takes a lock now and then."""

    def taken() -> object:
        actor.within(subject.lock("k"))
        return condition()

    return until(taken, 15)


def old(subject: Subject) -> bool:
    return subject.run("SELECT count(*) FROM locks WHERE lock_key = 'old'") == [(1,)]


@pytest.fixture
def passes(monkeypatch: pytest.MonkeyPatch) -> list[tuple[threading.Thread, bool, steps.Reaped]]:
    """The reapings that have ended: in which thread, whether in a task, and what they have deleted."""
    ended, plainly = list[tuple[threading.Thread, bool, steps.Reaped]](), steps.reap

    def noted(*given: Any) -> Steps[steps.Reaped]:
        ended.append((threading.current_thread(), current_task() is not None, (yield from plainly(*given))))
        return ended[-1][-1]

    monkeypatch.setattr(steps, "reap", noted)
    return ended


def test_a_process_that_takes_locks_reaps_now_and_then(
    protocol: Subject, reaping: Making, actor: Actor, passes: list[Any]
) -> None:
    """In a thread that keeps no process from ending, or in a task; what is held or was of late stays."""
    own = reaping(reap_every=EVERY)
    actor.within(own.lock("of late"), lambda: None)
    assert taking(actor, own, lambda: passes and not old(protocol))
    assert protocol.run("SELECT lock_key FROM locks ORDER BY lock_key") == [("k",), ("of late",)]
    on_loop = own.lock("k")._place.store().asynchronous
    assert {in_task for _, in_task, _ in passes} == {on_loop}
    assert on_loop or {(thread.name, thread.daemon) for thread, *_ in passes} == {("dblock housekeeping", True)}


def test_it_keeps_what_it_is_told_to_keep(either: Subject, reaping: Making, actor: Actor, passes: list[Any]) -> None:
    """What has been free for less than ten years, here; again and again."""
    own = reaping(reap_every=EVERY, retention=10 * 366 * 86400)
    assert taking(actor, own, lambda: len(passes) > 1)
    assert {reaped for *_, reaped in passes} == {steps.Reaped(0, 0)}
    assert old(either)


ENDING = """
from dblock.core import timing
from dblock.core.protocol import reaping as protocol
from tests.support.lab import until
from tests.support.subjects import Actor

begun, plainly = [], protocol.sleep

def sleep(store, seconds):
    begun.append(seconds)
    yield from plainly(store, 600.0)

protocol.sleep = sleep
timing.DEFAULT = timing.DEFAULT._replace(attention=0.1)
subject.__dict__["engine"] = subject.engine.execution_options(dblock_reap_every=0.1)
actor = Actor(subject)
assert until(lambda: actor.within(subject.lock("k")) or begun, 20)
print("begun")
"""


@pytest.mark.usefixtures("reaping")
@pytest.mark.parametrize("subject", [Subject("sqlalchemy", "sync", "postgresql")], indirect=True, ids=str)
def test_a_process_ends_in_the_middle_of_it(subject: Subject, actors: Actors) -> None:
    """At once and without a log line; the next reaper finds the rest."""
    leave_rows(subject.database, *(f"a{number:02}" for number in range(100)))  # the first page
    assert process(subject, ENDING) == "begun\n"
    assert old(subject)
    assert actors(1)[0].do(lambda: subject.reap(3600)) == 1


@pytest.mark.parametrize("option", ["dblock_reap_every", "dblock_retention"])
def test_what_is_no_time_is_refused_at_the_first_lock(option: str) -> None:
    """A word, nothing at all, or what has passed."""
    for value, error in (("soon", TypeError), (-1, ValueError), (float("nan"), ValueError)):
        engine = own_engine("sqlite://", execution_options={"dblock_reap_every": 60, option: value})
        with pytest.raises(error):
            db_lock(engine, "k")


def test_the_engines_retention_is_that_of_reap(engine: Engine) -> None:
    """Unless it is told otherwise."""
    own = engine.execution_options(dblock_retention=0)
    cycle(db_lock(own, "k"))
    assert until(lambda: reap(own, retention=60) == 0 and reap(own) == 1)


class Noting(Keeper):
    """A keeper that begins nothing."""

    def __init__(self, store: Store) -> None:
        super().__init__(store, None, threading.RLock(), runtime.current._withdraw)
        self.begun: list[Steps[None]] = []

    def begin(self, steps: Steps[object], *, long: bool = False) -> None:
        assert long
        self.begun.append(in_background(self.store, steps))


def test_a_database_in_memory_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another thread might see another one, or meet the caller's open transaction; it ends with the process."""
    engine = own_engine("sqlite://", execution_options={"dblock_reap_every": EVERY})
    metadata.create_all(engine)
    keeper = Noting(store_for(engine))
    assert keeper.reap_at == math.inf
    monkeypatch.setattr(store_for(engine), "renewable", True)
    assert Noting(store_for(engine)).reap_at < math.inf


def test_what_fails_is_logged_and_tried_again(tmp_path: Any, caplog: pytest.LogCaptureFixture) -> None:
    """Without the tables, say; and one is under way at a time."""
    engine = own_engine(f"sqlite:///{tmp_path}/locks.sqlite3", execution_options={"dblock_reap_every": 60})
    store = store_for(engine)
    keeper = Noting(store)
    assert statistics.fmean(keeper._next_reaping() - clock.now() for _ in range(1000)) == pytest.approx(60, rel=0.3)
    keeper.reap_at = 0.0
    _ = keeper.look()
    [steps] = keeper.begun
    assert keeper.reap_at > clock.now()
    step = next(steps)
    assert isinstance(step, Execute)
    keeper.reap_at = 0.0
    _ = keeper.look()
    assert len(keeper.begun) == 1
    try:
        store.execute(step)
    except LockStoreError as error:
        with pytest.raises(StopIteration):
            steps.throw(error)
    [record] = caplog.records
    assert "work in the background failed" in record.getMessage()
    assert "locks" in record.getMessage()
    _ = keeper.look()
    assert len(keeper.begun) == 2


@pytest.mark.parametrize("subject", [Subject("sqlalchemy", "sync", "postgresql")], indirect=True, ids=str)
def test_renewals_do_not_wait_for_it(subject: Subject, actors: Actors, monkeypatch: pytest.MonkeyPatch) -> None:
    """A lease is renewed while a reaping gets no answer, and the watchdog goes on."""
    [actor], go, waits = actors(1), threading.Event(), threading.Event()
    engine = own_engine(subject.database, execution_options={"dblock_reap_every": EVERY})
    store = store_for(engine)
    plainly = store.execute

    def execute(step: Execute) -> Any:
        if step.statement.name == "stale":
            waits.set()
            go.wait(30)
        return plainly(step)

    monkeypatch.setattr(store, "execute", execute)
    try:
        with db_lock(engine, "k", ttl=30) as lock:
            assert until(lambda: actor.within(db_lock(engine, "other")) or waits.is_set(), 15)
            assert renewed(subject, "k")
            assert lock.state == "held"
            assert lock.verify()
            assert len(reapers()) == 1
    finally:
        go.set()
        end_reaping(monkeypatch)
