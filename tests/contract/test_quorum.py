"""Majority locks over databases of several kinds, on both faces."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import itertools
import re
import signal
import threading
import time
from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from prometheus_client import CollectorRegistry
from sqlalchemy import text

import dblock
import sqlalchemy_dblock
from dblock.contrib import opentelemetry, prometheus
from dblock.core import runtime
from dblock.core.errors import InvalidKey, LockLost, LockNotHeld, LockRevoked, LockTimeout, Reason
from dblock.core.lock import entering
from dblock.core.observing.events import Kind
from dblock.core.protocol.drive import drive
from dblock.majority.asking import Asks, the_asks
from dblock.majority.attempts import Attempts
from dblock.majority.base import BaseQuorumLock
from dblock.majority.held import Held
from dblock.majority.member import Member
from dblock.majority.options import REFUSED
from dblock.majority.protocol import QuorumUnavailable
from dblock.majority.statements import SERVER
from dblock.operating import administration
from tests.conftest import heard, observer, ready, run
from tests.support.lab import close_django, handling, in_child, interrupt, renew, together, until, without
from tests.support.majorities import THREE, close, count, engine, fences, holders, majority
from tests.support.subjects import PRODUCT, Actor, Subject

FACES = [("django", "sync"), ("django", "async"), ("sqlalchemy", "sync"), ("sqlalchemy", "async")]


class Place(NamedTuple):
    """A face, and flows."""

    variant: str
    face: str
    actors: list[Actor]

    def lock(self, key: str = "k", **options: Any) -> Any:
        return majority(self.variant, self.face, key, **{"ttl": 10, "answer": 2, **options})


WAITS = (0.0, 0.002, 0.005, 0.02, 0.1, 0.4)
PAIR = FACES if PRODUCT else [FACES[0], FACES[3]]


def of(faces: list[tuple[str, str]]) -> Any:
    """For a test of these faces alone."""
    return pytest.mark.parametrize("place", faces, indirect=True, ids="-".join)


each_face = of(FACES)
in_threads = of([each for each in PAIR if each[1] == "sync"])
in_tasks = of([each for each in PAIR if each[1] == "async"])


@pytest.fixture(scope="module", autouse=True)
def _engines() -> Iterator[None]:
    """Of all tests."""
    yield
    actor = Actor(Subject("sqlalchemy", "async", "postgresql", "asyncpg"))  # on the event loop of them all
    close(actor)
    actor.close()


@pytest.fixture(params=PAIR, ids="-".join)
def place(request: pytest.FixtureRequest) -> Iterator[Place]:
    for database in THREE:
        ready(request, database)
    count(*THREE)
    runtime.current.kept.clear()  # what another test has seen of the databases
    variant, face = request.param
    actors = [
        Actor(Subject(variant, face, "postgresql", "asyncpg" if (variant, face) == FACES[3] else "")) for _ in "ab"
    ]
    yield Place(variant, face, actors)
    assert until(lambda: not the_asks().busy)  # one that answers late is told all the same
    held = "SELECT lock_key FROM locks WHERE owner IS NOT NULL AND owner <> 'another'"
    assert until(lambda: not any(run(each, held) for each in THREE), 3), "the test has left something behind"
    for actor in actors:
        actor.close()
    if variant == "django":
        for database in THREE:
            close_django(database)


@pytest.fixture
def actor(place: Place) -> Actor:
    return place.actors[0]


@pytest.fixture
def other(place: Place) -> Actor:
    return place.actors[1]


def in_most(sql: str) -> None:
    """Run it in two of the three databases."""
    for database in ("postgresql", "mariadb"):
        run(database, sql)


@contextlib.contextmanager
def stranger(database: str) -> Iterator[None]:
    """Holds the key in one database, by a plain lock."""
    with (lock := Subject("sqlalchemy", "sync", database).lock("k")):
        yield
    lock._place._engine.dispose()


@each_face
def test_a_majority_is_taken_and_given_back(place: Place, actor: Actor, other: Actor) -> None:
    """In all databases, with one fence, which the rows show."""
    lock = actor.hold(place.lock())
    assert holders() == list(THREE), actor.get(lock, "answers")
    assert fences() == {actor.get(lock, "fence")}
    assert set(actor.get(lock, "answers").values()) == {"granted"}
    assert actor.get(lock, "state") == "held"
    assert 8 < actor.get(lock, "valid_for") <= 10
    actor.do(lock.check)
    assert actor.call(lock, "verify") is True
    actor.call(lock, "extend", 60)
    assert actor.get(lock, "valid_for") > 50
    rival = place.lock()
    assert other.call(rival, "acquire", blocking=False) is False
    assert other.get(lock, "fence") is None
    with pytest.raises(LockTimeout, match="held by"):
        other.within(place.lock(timeout=0.2))
    before = actor.get(lock, "fence")
    actor.call(lock, "release")
    assert until(lambda: holders() == [])  # one that answers late is told all the same
    assert actor.get(lock, "state") is None
    with pytest.raises(LockLost, match="not held"):
        actor.do(lock.check)
    with pytest.raises(LockNotHeld):
        actor.call(lock, "release")
    assert other.within(rival, lambda: rival.fence) > before


def test_the_flow_enters_again(place: Place, actor: Actor, other: Actor) -> None:
    """Through another object too; the last to leave gives it back."""
    lock, again = place.lock(), place.lock()
    actor.within(lock, lambda: None)
    assert actor.call(lock, "acquire") is True
    fence = actor.get(lock, "fence")
    assert actor.within(again, lambda: (again.fence, again.count)) == (fence, 2)
    assert actor.get(lock, "count") == 1
    assert other.call(place.lock(), "acquire", blocking=False) is False
    actor.call(lock, "release")


def test_only_its_flow_gives_it_back(place: Place, actor: Actor, other: Actor) -> None:
    """Another one that uses the same object may ask about the open block, and neither end nor extend it."""
    lock = place.lock()

    def elsewhere() -> None:
        for name in ("release", "extend"):
            with pytest.raises(LockNotHeld):
                other.call(lock, name)
        assert other.get(lock, "state") == "held"
        assert other.call(place.lock(), "acquire", blocking=False) is False

    actor.within(lock, actor.subject.aside(elsewhere))


@each_face
def test_a_decorated_function_holds_the_lock_of_its_key(place: Place, actor: Actor, other: Actor) -> None:
    """And is left out while others hold it, if that is asked for."""

    def sell(sku: str) -> list[str]:
        return holders(f"stock:{sku}")

    sold = actor.decorate(place.lock("stock:{sku}"), sell)
    assert sold("42") == list(THREE)
    assert holders("stock:42") == []
    skipped = actor.decorate(place.lock("stock:{sku}", on_busy="skip", otherwise="left out", timeout=0), sell)
    held = other.hold(place.lock("stock:42"))
    assert skipped("42") == "left out"
    other.call(held, "release")
    assert skipped("42") == list(THREE)
    with pytest.raises(TypeError, match="cannot be skipped"):
        actor.within(place.lock(on_busy="skip"))


def test_a_minority_that_others_hold_does_not_matter(place: Place, actor: Actor) -> None:
    """Whichever it is, the first one too: the lock waits there, and then it is taken in the others."""
    for database in ("mariadb", "postgresql"):
        with stranger(database):
            lock = actor.hold(place.lock(ttl=30), timeout=2)
            said = actor.get(lock, "answers")
            assert sum("held by" in answer for answer in said.values()) == 1, said
            actor.call(lock, "release")


def test_a_majority_that_others_hold_is_waited_for(place: Place, actor: Actor, other: Actor) -> None:
    """In the queue of the first database."""
    lock, next_one = actor.hold(place.lock()), place.lock()
    waiting = other.begin(next_one, "acquire", timeout=20)
    time.sleep(0.3)
    assert not waiting.done()
    before = actor.get(lock, "fence")
    actor.call(lock, "release")
    assert waiting.result(10) is True
    assert other.get(next_one, "fence") > before
    other.call(next_one, "release")


def test_a_database_that_was_lost_is_taken_again(place: Place, actor: Actor) -> None:
    """While the others keep the lock: a majority that has worn down grows again."""
    lost: list[Any] = []
    lock = actor.hold(place.lock(ttl=3, on_lost=lambda *told: lost.append(told)))  # renewed each second
    fence = actor.get(lock, "fence")
    run("postgresql", "UPDATE locks SET owner = NULL, expires_at = acquired_at WHERE lock_key = 'k'")
    assert holders() == ["sqlite", "mariadb"]
    renew()
    assert until(lambda: holders() == list(THREE), 15)
    assert actor.get(lock, "state") == "held"
    assert min(fences()) >= fence
    run("mariadb", "UPDATE locks SET owner = NULL, expires_at = acquired_at WHERE lock_key = 'k'")
    renew()
    assert until(lambda: holders() == list(THREE), 15)
    assert until(lambda: set(actor.get(lock, "answers").values()) == {"granted"}, 15), actor.get(lock, "answers")
    actor.do(lock.check)
    assert not lost
    actor.call(lock, "release")


def test_a_lost_majority_stays_lost(place: Place, actor: Actor, other: Actor) -> None:
    """Its holder is told once, and the rest is given back."""
    told: list[Any] = []
    lock = actor.hold(place.lock(ttl=30, on_lost=lambda *given: told.append(given)))
    in_most("UPDATE locks SET owner = 'another', fence = fence + 1 WHERE lock_key = 'k'")
    renew()
    assert until(lambda: told, 15)
    assert told == [(lock, Reason.TAKEN_OVER)]
    assert not [hold for hold in runtime.current.watchdog._holds if hold.lease.renewing], "nobody relies on the rest"
    assert any(answer.startswith("lost, ") for answer in actor.get(lock, "answers").values())
    with pytest.raises(LockLost, match="fewer than 2 of 3 databases") as lost:
        actor.do(lock.check)
    assert lost.value.reason is Reason.TAKEN_OVER
    assert actor.get(lock, "state") == "lost"
    assert actor.get(lock, "valid_for") == 0.0
    in_most("UPDATE locks SET owner = NULL WHERE lock_key = 'k'")
    renew()
    time.sleep(0.1)  # nothing renews it
    assert actor.get(lock, "state") == "lost"
    with pytest.raises(LockLost):
        actor.call(lock, "verify")
    with pytest.raises(LockLost):
        actor.call(lock, "release")
    assert other.within(place.lock(timeout=20), lambda: "in") == "in"
    assert len(told) == 1


def test_a_with_whose_majority_was_lost_raises_at_its_end(place: Place, actor: Actor) -> None:
    with pytest.raises(LockLost, match="says nothing of what you have committed"):
        actor.within(place.lock(ttl=1.5), lambda: in_most("DELETE FROM locks WHERE lock_key = 'k'"))


def test_a_new_database_does_not_count_at_once(place: Place, actor: Actor) -> None:
    """Nor one that came back empty: its locks may be relied on for as long as the longest lease lasts."""
    run("postgresql", "DELETE FROM locks")
    lock = actor.hold(place.lock(ttl=1.5))
    assert until(lambda: holders() == ["sqlite", "mariadb"], 1), "what it has granted meanwhile is given back"
    answers = actor.get(lock, "answers")
    assert sum("new, or restarted: counts in" in answer for answer in answers.values()) == 1
    assert until(lambda: holders() == list(THREE), 5), "it counts in the end"
    actor.call(lock, "release")
    run("sqlite", "DELETE FROM locks")
    run("mariadb", "DELETE FROM locks")
    lock = place.lock("other", ttl=1.5)
    with pytest.raises(QuorumUnavailable, match="counts in") as few:
        actor.call(lock, "acquire", timeout=0)
    assert len(few.value.answers) == 2 or len(few.value.answers) == 3
    assert holders("other") == []
    assert actor.call(lock, "acquire", timeout=5) is True
    actor.call(lock, "release")


def test_a_longer_lease_makes_the_quarantine_longer(place: Place, actor: Actor) -> None:
    """Also one that was extended."""
    lock = actor.hold(place.lock(ttl=7))
    assert {longest(database) for database in THREE} == {7}, actor.get(lock, "answers")
    actor.call(lock, "extend", 11)
    assert {longest(database) for database in THREE} == {11}
    actor.call(lock, "release")


def test_the_longest_lease_is_known_from_the_first_time_that_a_database_was_asked(place: Place, actor: Actor) -> None:
    """Also to a copy that knew of a shorter one, and lacks the rest."""
    for database in THREE:
        run(database, "UPDATE locks SET label = 'another', ttl = 3 WHERE lock_key = :key", key=SERVER)
    for ttl in (7, 5):
        with pytest.raises(QuorumUnavailable, match="restarted"):
            actor.call(place.lock(ttl=ttl), "acquire", timeout=0)
        assert {longest(database) for database in THREE} == {7}


def test_a_server_that_has_started_again_does_not_count_at_once(place: Place, actor: Actor) -> None:
    """What a row says that an earlier server wrote is not believed."""
    run("postgresql", "UPDATE locks SET label = '1 2 3.5' WHERE lock_key = :key", key=SERVER)
    run("mariadb", "UPDATE locks SET label = replace(label, ' ', ' x') WHERE lock_key = :key", key=SERVER)
    with pytest.raises(QuorumUnavailable, match="restarted"):
        actor.call(place.lock(), "acquire", timeout=0)


def test_fewer_than_a_majority_that_can_be_asked(place: Place, actor: Actor) -> None:
    """Say so in time, with what each has said; and it is no LockTimeout."""
    with without("mariadb", "locks"):
        with without("postgresql", "locks"):
            lock = place.lock()
            began = time.monotonic()
            with pytest.raises(QuorumUnavailable, match="fewer than 2 of 3 databases can be asked") as few:
                actor.call(lock, "acquire", timeout=0.3)
            assert time.monotonic() - began < 3
            assert sum(answer.startswith("has no table") for answer in few.value.answers.values()) == 2
            assert list(few.value.answers) == lock.names, "in their order"
            assert not isinstance(few.value, LockTimeout)
            with stranger("sqlite"):  # the time passes in the queue of the one that can be asked
                for _ in range(2):
                    with pytest.raises(QuorumUnavailable, match="held by") as few:
                        actor.call(place.lock(), "acquire", timeout=0.1)
                    assert sum(answer.startswith("has no table") for answer in few.value.answers.values()) == 2
        with stranger("sqlite"), stranger("postgresql"):
            assert actor.call(place.lock(), "acquire", timeout=0.1) is False, "others have most of them"


@pytest.mark.parametrize("has_row", [True, False])
def test_a_majority_that_somebodys_transaction_has_locked(place: Place, actor: Actor, has_row: bool) -> None:
    """Nobody holds the key there, so it is no LockTimeout, which would have the caller see to the holder."""
    if has_row:
        actor.call(place.lock(), "acquire")
        actor.call(place.lock(), "release")
    with observer("postgresql").connect() as one, observer("mariadb").connect() as two:
        one.execute(text("LOCK TABLE locks IN SHARE MODE"))
        two.execute(text("SELECT * FROM locks WHERE lock_key >= 'k' FOR UPDATE"))
        for timeout in (0, 0.3):
            with pytest.raises(QuorumUnavailable, match="can be asked") as few:
                actor.call(place.lock(), "acquire", timeout=timeout)
            locked = [answer.startswith("nobody holds it, but") for answer in few.value.answers.values()]
            assert locked == [False, True, True]
        one.rollback()
        two.rollback()
    assert actor.call(place.lock(), "acquire", timeout=5)
    actor.call(place.lock(), "release")


@each_face
def test_what_is_refused(place: Place, actor: Actor) -> None:
    lock = place.lock()
    with pytest.raises(TypeError, match=r"lock\.fence"):
        lock.guard()
    with pytest.raises(ValueError, match="given twice"):
        majority(place.variant, place.face, "k", ("postgresql", "sqlite", "postgresql"))
    with pytest.raises(TypeError, match="databases|engines"):
        majority(place.variant, place.face, "k", ())
    for name, why in REFUSED.items():
        refused: dict[str, Any] = {name: True}
        with pytest.raises(TypeError, match=re.escape(f"{name} is not for majority locks: {why}")):
            place.lock(**refused)
    for name in ("detach", "sequencer", "owner"):
        with pytest.raises(AttributeError, match=re.escape(REFUSED[name])):
            getattr(lock, name)
    with pytest.raises(TypeError, match="unexpected|colour"):
        place.lock(colour="red")
    with pytest.raises(InvalidKey):
        place.lock("")
    with pytest.raises(ValueError, match="answer"):
        place.lock(answer=-1)
    for name in ("db_semaphore", "db_rwlock"):
        with pytest.raises(TypeError, match="majority"):
            if place.variant == "django":
                getattr(dblock, name)("k", using=["default", "postgresql", "mariadb"])
            else:
                getattr(sqlalchemy_dblock, name)([engine(place.face, each) for each in THREE], "k")
    with pytest.warns(RuntimeWarning, match="db_lock"):
        one = majority(place.variant, place.face, "k", ("postgresql",))
    assert actor.within(one, lambda: one.fence) > 0


def test_of_two_databases_both_are_needed(place: Place, actor: Actor) -> None:
    two = majority(place.variant, place.face, "k", ("postgresql", "mariadb"), ttl=10, answer=2)
    with stranger("mariadb"):
        assert actor.call(two, "acquire", blocking=False) is False
        assert holders() == ["mariadb"]
    assert actor.within(two, holders) == ["postgresql", "mariadb"]


def test_what_the_databases_show(place: Place, actor: Actor, other: Actor) -> None:
    """The row of each of them, and whether most of them show a holder."""
    lock, rival = place.lock(label="books"), place.lock()
    assert other.call(rival, "locked") is False
    assert actor.call(lock, "acquire") is True
    assert other.call(rival, "locked") is True
    assert (actor.call(lock, "owned"), other.call(rival, "owned")) == (True, False)
    shown = other.call(rival, "inspect")
    assert list(shown) == lock.names
    assert {(info.state, info.label, info.owner) for info in shown.values()} == {("held", "books", "***")}
    run("postgresql", "UPDATE locks SET owner = NULL WHERE lock_key = 'k'")
    assert other.call(rival, "locked") is True, "two of three"
    run("mariadb", "UPDATE locks SET owner = NULL WHERE lock_key = 'k'")
    assert other.call(rival, "locked") is False
    in_most("UPDATE locks SET owner = 'another', fence = fence + 1 WHERE lock_key = 'k'")
    assert actor.call(lock, "owned") is False
    with without("postgresql", "locks"), without("mariadb", "locks"):
        with pytest.raises(QuorumUnavailable, match="no answer"):
            other.call(rival, "locked")
        assert len(other.call(rival, "inspect")) == 1
    with pytest.raises(LockLost):
        actor.call(lock, "release")


def test_it_is_asked_back_in_one_of_the_databases(place: Place, actor: Actor) -> None:
    """The holder hears of it once."""
    told: list[Any] = []
    lock = actor.hold(place.lock(ttl=1.5, on_revoke=lambda *given: told.append(given)))
    for database in ("postgresql", "mariadb"):
        store = sqlalchemy_dblock.db_lock(engine("sync", database), "k")._place.store()
        assert drive(administration.revoke(store, "k", actor.get(lock, "fence"), "root: deploying"))
    assert until(lambda: told, 3)
    assert actor.get(lock, "revoked") == "root: deploying"
    with pytest.raises(LockRevoked, match="deploying"):
        actor.do(lock.check)
    time.sleep(0.6)
    assert told == [(lock, "root: deploying")]
    actor.call(lock, "release")


@in_tasks
def test_the_body_is_interrupted_when_it_is_lost(place: Place, actor: Actor) -> None:
    """With `interrupt=True`, a task; and its cancellation goes no further."""
    lock = place.lock(ttl=1.5, interrupt=True)

    async def body() -> None:
        await asyncio.to_thread(in_most, "UPDATE locks SET owner = 'another' WHERE lock_key = 'k'")
        await asyncio.sleep(30)

    began = time.monotonic()
    with pytest.raises(LockLost):
        actor.within(lock, body)
    assert time.monotonic() - began < 10
    assert actor.do(lambda: asyncio.current_task().cancelling()) == 0  # type: ignore[union-attr]


def test_what_observers_hear(place: Place, actor: Actor, other: Actor) -> None:
    """Of the majority, beside what they hear of each database."""
    events = heard()

    def ours() -> list[tuple[str, str, int]]:
        found = [each for each in events if "Quorum" in str(each.sender)]
        assert {each.database for each in found} <= {", ".join(lock.names)}
        return [(each.kind, each.how or each.reason, each.depth) for each in found]

    lock, rival = actor.hold(place.lock(ttl=1.5)), place.lock()
    fence = actor.get(lock, "fence")
    actor.within(lock)
    assert other.call(rival, "acquire", blocking=False) is False
    actor.call(lock, "release")
    first = [("acquired", "at_once", 1), ("acquired", "reentered", 2), ("released", "released", 1)]
    assert ours() == [*first, ("contended", "", 0), ("gave_up", "timeout", 0), ("released", "released", 0)]
    assert {each.fence for each in events if each.kind in {Kind.ACQUIRED, Kind.RELEASED}} == {fence}
    theirs = [each for each in events if each.majority == ", ".join(lock.names)]
    heard_there = {(each.kind, each.database) for each in theirs}
    assert heard_there == {(kind, name) for kind in (Kind.ACQUIRED, Kind.RELEASED) for name in lock.names}
    events.clear()
    assert actor.call(lock, "acquire") is True
    in_most("DELETE FROM locks WHERE lock_key = 'k'")
    with pytest.raises(LockLost):
        actor.call(lock, "release")
    assert until(lambda: len(ours()) == 2)
    assert ours() == [("acquired", "at_once", 1), ("lost", "freed", 1)]


@of([FACES[0]])
def test_a_minority_that_is_away_is_named(place: Place, actor: Actor, caplog: pytest.LogCaptureFixture) -> None:
    """In the log, in the events and by the metrics, which count no lock as lost."""
    events, ends = heard(Kind.LOST), [prometheus.instrument(registry=(registry := CollectorRegistry()))]
    meters = MeterProvider([reader := InMemoryMetricReader()])
    ends += [opentelemetry.instrument(spans=False, meter_provider=meters), meters.shutdown]
    lock = place.lock(ttl=1.5)
    [*_, mariadb] = lock.names

    def missing(name: str) -> float | None:
        return registry.get_sample_value("dblock_majority_missing", {"database": name})

    try:
        assert actor.call(lock, "acquire") is True
        assert [missing(name) for name in lock.names] == [0, 0, 0]
        run("mariadb", "UPDATE locks SET owner = 'another', fence = fence + 1 WHERE lock_key = 'k'")
        assert until(lambda: [missing(name) for name in lock.names] == [0, 0, 1], 5)
        data: Any = reader.get_metrics_data()
        gauges = [each for each in data.resource_metrics[0].scope_metrics[0].metrics if each.name.endswith(".missing")]
        found = {point.attributes["dblock.database"]: point.value for each in gauges for point in each.data.data_points}
        assert [found[name] for name in lock.names] == [0, 0, 1]
        assert actor.get(lock, "state") == "held"
        assert until(lambda: events, 3)
        assert [(each.database, each.majority) for each in events] == [(mariadb, ", ".join(lock.names))]
        assert f"in {mariadb}, one database of a majority lock: " in caplog.text
        run("mariadb", "UPDATE locks SET owner = NULL WHERE lock_key = 'k'")
        assert until(lambda: missing(mariadb) == 0, 5)
        actor.call(lock, "release")
        lost = [each for family in registry.collect() for each in family.samples if each.name == "dblock_lost_total"]
        assert sum(each.value for each in lost) == 0
    finally:
        for end in ends:
            end()


@in_threads
def test_a_forked_child_leaves_the_lock_to_its_parent(place: Place, actor: Actor) -> None:
    """Also at the end of a block that was open."""
    lock = place.lock()

    def child() -> None:
        with pytest.raises(LockNotHeld):
            lock.__exit__(None, None, None)

    def body() -> None:
        in_child(child)
        lock.check()
        assert holders() == list(THREE)

    actor.within(lock, body)


def longest(database: str) -> float:
    """The longest life that a database has recorded."""
    [(ttl,)] = run(database, "SELECT ttl FROM locks WHERE lock_key = :key", key=SERVER)
    return float(str(ttl))


def test_release_all_gives_it_up(place: Place, actor: Actor) -> None:
    """In one database, and so in all: nothing is taken again."""
    told: list[Any] = []
    lock = actor.hold(place.lock(ttl=1.5, on_lost=lambda *given: told.append(given)))
    if place.variant == "django":
        assert actor.call(dblock, "release_all", using="postgresql") == 1
    else:
        assert actor.do(lambda: sqlalchemy_dblock.release_all(engine(place.face, "postgresql"))) == 1
    assert until(lambda: told, 3)
    assert told == [(lock, Reason.RELEASED)]
    with pytest.raises(LockLost):
        actor.call(lock, "release")


@pytest.mark.parametrize("where", ["_leaves", "_left", "give", "_end", "renew_no_more"])
def test_a_block_whose_leaving_is_interrupted_is_given_back(
    place: Place, actor: Actor, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Wherever that happens; and the same flow may take it again."""
    lock, home = place.lock(), Held if where in vars(Held) else BaseQuorumLock
    with pytest.raises(KeyboardInterrupt):
        actor.within(lock, lambda: interrupt(monkeypatch, home, where))
    assert until(lambda: not holders(), 3)
    actor.within(lock, lock.check)


def test_an_inner_block_whose_entering_is_interrupted_is_left(
    place: Place, actor: Actor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the outer one would not be the last."""
    lock = place.lock()

    async def body() -> None:
        interrupt(monkeypatch, entering, "Block")  # it has been entered, and is not noted
        with pytest.raises(KeyboardInterrupt):
            async with actor.subject.within(lock):
                pass

    actor.within(lock, body)


@in_threads
@pytest.mark.parametrize("where", ["_heard", "_note_takes", "note", "_give_back"])
def test_an_answer_that_an_interrupt_has_met_is_given_back(
    place: Place, actor: Actor, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before it was noted, or after: else one of the rows is left to its lease."""
    interrupt(monkeypatch, Member if where == "note" else Attempts, where, after=True)
    with pytest.raises(KeyboardInterrupt):
        actor.call(place.lock(), "acquire")


@in_threads
@pytest.mark.parametrize("asked", [0, 1, 2])
def test_a_release_whose_asking_an_interrupt_has_met_goes_on(
    place: Place, actor: Actor, asked: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After none, one or two of the databases were asked: the others are asked in the background."""
    lock = actor.hold(place.lock())
    interrupt(monkeypatch, Asks, "ask", at=asked + 1)
    with pytest.raises(KeyboardInterrupt):
        actor.call(lock, "release")


@contextlib.contextmanager
def leaves_nothing(place: Place, wait: float) -> Iterator[None]:
    """An attempt that ends after so long: whatever it has asked for so far; if that is long, in another one's queue."""
    other, busy = place.actors[1], place.lock()
    if wait > 0.05:
        assert other.call(busy, "acquire") is True
    yield
    if wait > 0.05:
        other.call(busy, "release")
    assert until(lambda: not the_asks().busy and not holders(), 3)
    if wait > 0.05:
        assert not run("sqlite", "SELECT 1 FROM lock_waiters")
    assert other.within(busy, holders) == list(THREE)


@pytest.mark.parametrize("wait", WAITS)
@of([FACES[0]])
def test_an_attempt_that_is_interrupted_leaves_nothing(place: Place, wait: float) -> None:
    """By a signal handler that raises."""
    lock = place.lock()
    timer = threading.Timer(wait, signal.pthread_kill, (threading.main_thread().ident, signal.SIGUSR1))
    interrupted = handling(signal.SIGUSR1, signal.default_int_handler)
    with interrupted, leaves_nothing(place, wait), contextlib.suppress(KeyboardInterrupt):
        timer.start()
        with lock:
            pass
        timer.join()


@pytest.mark.parametrize("wait", WAITS)
@of([FACES[3]])
def test_an_attempt_that_is_cancelled_leaves_nothing(place: Place, actor: Actor, wait: float) -> None:
    """A task."""
    lock = place.lock()

    async def block() -> None:
        async with lock:
            pass

    async def cancelled() -> None:
        task = asyncio.ensure_future(block())
        await asyncio.sleep(wait)
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task

    with leaves_nothing(place, wait):
        actor.do(cancelled)


def test_flows_take_turns(place: Place) -> None:
    """Never two at a time, and the fences grow."""
    actors = place.actors
    actors += [Actor(actors[0].subject) for _ in "cd"]
    tenures: list[tuple[float, float, int]] = []

    def work(lock: Any) -> None:
        began = time.monotonic()
        assert lock.state == "held"
        time.sleep(0.001)
        tenures.append((began, time.monotonic(), lock.fence))

    def again(actor: Actor) -> None:
        for _ in range(8):
            lock = place.lock(timeout=60)
            actor.within(lock, functools.partial(work, lock))

    assert together(*(functools.partial(again, actor) for actor in actors)) == []
    assert len(tenures) == 8 * len(actors)
    tenures.sort()
    for (_, ended, fence), (began, _, next_fence) in itertools.pairwise(tenures):
        assert ended <= began
        assert fence < next_fence
