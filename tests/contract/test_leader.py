"""Leader election, on every database and both faces."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import signal
import threading
import time
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from functools import partial
from typing import Any

import pytest

from dblock.core.deliveries import deliveries
from dblock.core.errors import (
    LockError,
    LockLost,
    LockRevoked,
    LockStoreError,
    LockTimeout,
    Reason,
    StoreConflict,
    SynchronousOnlyOperation,
)
from dblock.core.lock import leaving
from tests.conftest import timed
from tests.contract.test_administration import Desk
from tests.contract.test_queue import waiters
from tests.support.lab import apart, fail, handling, in_child, interrupt, remaining, renewed, until
from tests.support.subjects import Actor, Actors, Subject

KEY = "k"
Candidate = Callable[..., Any]
"""Makes one, with such options."""


@pytest.fixture
def candidate(subject: Subject) -> Iterator[Callable[..., Any]]:
    """Makes candidates."""
    made: list[Any] = []

    def make(**options: Any) -> Any:
        made.append(subject.api("db_leader", KEY, **options))
        return made[-1]

    yield make
    with contextlib.closing(Actor(subject)) as cleaner:
        for leader in made:
            cleaner.call(leader, "stop")


def test_who_is_elected_leads_until_it_resigns(
    everywhere: Subject, actor: Actor, other: Actor, candidate: Candidate
) -> None:
    """Every thread may ask, and the thread that resigns may be another one than the one that campaigned."""
    elected = list[int]()
    leader = candidate(on_elected=lambda it: elected.append(it.term))
    assert (leader.is_leader, leader.term, leader.remaining) == (False, None, 0.0)
    with pytest.raises(LockLost, match="was not elected"):
        leader.check()
    assert actor.call(leader, "campaign") is True
    assert leader.is_leader
    leader.check()
    assert elected == [leader.term] == [everywhere.row(KEY)["fence"]]
    assert 0 < leader.remaining <= 15
    assert other.call(leader, "leader").fence == leader.term
    assert repr(leader).endswith(f"'k': leads, term {leader.term}>")
    other.call(leader, "resign")
    assert (leader.is_leader, leader.term) == (False, None)
    assert other.call(leader, "leader") is None
    other.call(leader, "resign")  # nothing happens
    assert actor.call(leader, "campaign", timeout=1) is True
    assert leader.term > elected[0]


def test_a_candidacy_ends_by_time_or_is_withdrawn(
    either: Subject, actor: Actor, other: Actor, candidate: Candidate
) -> None:
    """The object can campaign again afterwards; no place is left in the queue."""
    first, second = candidate(), candidate()
    assert actor.call(first, "campaign")
    assert other.call(second, "campaign", timeout=0.2) is False
    assert until(lambda: waiters(either) == 0)
    waiting = other.start(getattr(second, either.method("campaign")))
    assert until(lambda: waiters(either) == 1)
    with pytest.raises(LockError, match="is already a candidate for 'k'"):
        actor.call(second, "campaign")
    begun = time.monotonic()
    actor.call(second, "resign")
    assert waiting.result(10) is False
    assert time.monotonic() - begun < 1.5
    assert until(lambda: waiters(either) == 0)
    with pytest.raises(LockError, match="already leads 'k'"):
        actor.call(first, "campaign")
    actor.call(first, "resign")
    assert other.call(second, "campaign", timeout=5) is True


def test_a_leader_that_is_deposed_is_told(either: Subject, actor: Actor, candidate: Candidate) -> None:
    """By `on_deposed`, `check()` and the end of its block; it can campaign again."""
    told: list[tuple[Any, Reason]] = []
    leader = candidate(ttl=1.2, on_deposed=lambda *given: told.append(given))

    def body() -> None:
        assert leader.is_leader
        either.run("UPDATE locks SET owner = 'somebody', fence = fence + 1 WHERE lock_key = 'k'")
        assert until(lambda: not leader.is_leader)
        assert leader.term is None
        with pytest.raises(LockLost):
            leader.check()

    with pytest.raises(LockLost) as caught:
        actor.within(leader, either.aside(body))
    assert caught.value.key == KEY
    assert until(lambda: told == [(leader, Reason.TAKEN_OVER)])
    either.run("UPDATE locks SET owner = NULL WHERE lock_key = 'k'")
    assert actor.call(leader, "campaign", timeout=5) is True


def test_a_leader_that_was_asked_to_resign_is_told(either: Subject, actor: Actor, candidate: Candidate) -> None:
    """It still leads, and `check()` raises LockRevoked."""
    told: list[tuple[Any, str]] = []
    leader = candidate(on_revoke=lambda *given: told.append(given))
    assert actor.call(leader, "campaign")
    assert Desk(either).revoke(KEY, leader.term, "root: maintenance")
    assert until(lambda: told == [(leader, "root: maintenance")])
    assert leader.is_leader
    with pytest.raises(LockRevoked):
        leader.check()


def test_with_is_one_term(face: Subject, actor: Actor, other: Actor, candidate: Candidate) -> None:
    """A `timeout` ends the wait with LockTimeout; a resignation from elsewhere with LockError."""
    first, second, hasty = candidate(), candidate(), candidate(timeout=0.1)
    terms: list[int | None] = []
    actor.within(first, lambda: terms.append(first.term))
    assert terms != [None]
    assert not first.is_leader
    assert face.row(KEY)["owner"] is None
    assert actor.call(first, "campaign")
    with pytest.raises(LockTimeout, match="could not acquire 'k'"):
        other.within(hasty)
    waiting = other.enter(second)
    assert until(lambda: waiters(face) == 1)
    actor.call(second, "resign")
    with pytest.raises(LockError, match="was withdrawn"):
        waiting.result(10)


def test_run_leads_again_and_again(
    face: Subject, actor: Actor, other: Actor, candidate: Candidate, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Term after term, through an outage and a deposition, until `stop()`; a failing body ends it."""
    timed(monkeypatch, retry_budget=0.1)
    leader, terms = candidate(ttl=1.2), list[int]()
    goes_on = threading.Event()

    def body(term: int) -> None:
        terms.append(term)
        if len(terms) == 2:
            face.run("UPDATE locks SET owner = NULL WHERE lock_key = 'k'")
            while True:
                time.sleep(0.02)
                leader.check()  # raises LockLost
        if len(terms) == 3:
            goes_on.set()
            assert until(lambda: not leader.is_leader, 30)

    run = leader.run(body if face.face == "sync" else asynchronous(body))
    outages = iter([True])
    fail(monkeypatch, LockStoreError, "take", "create", when=lambda: next(outages, None))
    running = actor.start(run)
    assert goes_on.wait(30)
    assert leader.term == terms[-1]
    other.call(leader, "stop")
    running.result(30)
    assert len(terms) == 3
    assert terms == sorted(set(terms))
    assert face.row(KEY)["owner"] is None
    with pytest.raises(LockError, match="stop"):
        actor.call(leader, "campaign")


def asynchronous(body: Callable[[int], object]) -> Any:
    async def lead(term: int) -> None:
        await asyncio.to_thread(body, term)

    return lead


def test_what_a_body_raises_ends_run(either: Subject, actor: Actor, candidate: Candidate) -> None:
    """After the term has ended."""
    leader = candidate()

    def body(term: int) -> None:
        raise KeyError(term)

    with pytest.raises(KeyError):
        actor.do(leader.run(body if either.face == "sync" else asynchronous(body)))
    assert not leader.is_leader
    assert either.row(KEY)["owner"] is None
    if either.variant == "sqlalchemy":
        with pytest.raises(TypeError):
            leader.run(asynchronous(body) if either.face == "sync" else body)


@pytest.mark.parametrize("asked", [False, True], ids=["it fails", "it is asked to resign"])
def test_on_elected_that_raises_ends_the_term(either: Subject, actor: Actor, candidate: Candidate, asked: bool) -> None:
    """The campaign raises that error; if the error says that the term is to end, the campaign was in vain."""

    def prepare(leader: Any) -> None:
        if not asked:
            raise KeyError("not ready")
        assert Desk(either).revoke(KEY, leader.term, "root: maintenance")
        while True:
            time.sleep(0.02)
            leader.check()  # raises LockRevoked

    leader = candidate(ttl=1.5, on_revoke=lambda *_: None, on_elected=prepare)
    with contextlib.nullcontext() if asked else pytest.raises(KeyError):
        assert actor.call(leader, "campaign") is False
    assert not leader.is_leader
    assert either.row(KEY)["owner"] is None


def test_on_elected_that_meets_an_outage(either: Subject, actor: Actor, other: Actor, candidate: Candidate) -> None:
    """The term ends, and `run` campaigns again."""
    elected, terms, failures = list[int](), list[int](), iter([True])

    def prepare(leader: Any) -> None:
        elected.append(leader.term)
        for _ in failures:
            raise LockStoreError("out of order")

    def body(term: int) -> None:
        terms.append(term)
        assert until(lambda: not leader.is_leader, 30)

    leader = candidate(on_elected=prepare)
    running = actor.start(leader.run(body if either.face == "sync" else asynchronous(body)))
    assert until(lambda: len(terms) == 1, 10), running
    other.call(leader, "stop")
    running.result(30)
    assert terms == elected[1:]


def test_a_release_that_the_database_refuses(
    either: Subject, actor: Actor, candidate: Candidate, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The belief is over all the same, and the key is free once the lease has ended."""
    leader = candidate(ttl=1.5)
    assert actor.call(leader, "campaign")
    with monkeypatch.context() as patch:
        fail(patch, LockStoreError, "release")
        with pytest.raises(LockStoreError):
            actor.call(leader, "resign")
    assert not leader.is_leader
    assert either.row(KEY)["owner"]
    actor.call(leader, "resign")  # nothing happens
    assert actor.call(leader, "campaign", timeout=2.5) is True


def test_who_leads_can_be_observed(either: Subject, actor: Actor, other: Actor, candidate: Candidate) -> None:
    """Each change, also that nobody leads."""
    leader, observer = candidate(), candidate()
    if either.face == "sync":
        terms = observer.observe(0.02)
        read: Callable[[], Any] = lambda: next(terms)  # noqa: E731
    else:
        aterms = getattr(observer, either.method("observe"))(0.02)
        read = lambda: anext(aterms)  # noqa: E731
    assert other.do(read) == (None, None)
    reading = other.start(read)
    assert actor.call(leader, "campaign")
    number, info = reading.result(10)
    assert (number, info.fence, info.state) == (leader.term, leader.term, "held")
    assert info.owner != either.row(KEY)["owner"], "the token is a secret"
    reading = other.start(read)
    actor.call(leader, "resign")
    assert reading.result(10) == (None, None)
    if either.face == "async":
        other.do(aterms.aclose)


def test_a_leader_object_that_is_dropped_leads_no_more(either: Subject, actor: Actor) -> None:
    """Its lease is not renewed."""
    leader = either.api("db_leader", KEY, ttl=1.5)  # which no fixture keeps
    assert actor.call(leader, "campaign")
    assert renewed(either)
    assert leader.is_leader
    del leader
    assert until(lambda: remaining(either) < 0, 5)


@pytest.mark.parametrize("subject", [Subject("django", "sync", "postgresql")], indirect=True, ids=str)
def test_a_forked_child_does_not_lead(subject: Subject, actor: Actor, candidate: Candidate) -> None:
    """Nor resign for its parent, whose body it does not wait for. It is a candidate, also if its parent has stopped."""
    leader, led = candidate(), list[Any]()

    def child() -> tuple[Any, ...]:
        for refused in (leader.check, leader.guard):
            with pytest.raises(LockLost):
                refused()
        known = leader.is_leader, leader.term
        leader.resign()
        return *known, leader.campaign(timeout=0)

    def body() -> None:
        led.append(in_child(child))
        assert leader.is_leader
        assert subject.row(KEY)["owner"]
        leader.stop()
        led.append(in_child(child))

    actor.within(leader, body)
    actor.do(lambda: led.append(in_child(child)))
    assert led == [(False, None, False), (False, None, False), (False, None, True)], "a term lasts as long as its body"


def test_interrupt_cancels_the_body(
    async_face: Subject, actor: Actor, other: Actor, candidate: Candidate, request: pytest.FixtureRequest
) -> None:
    """Of a leader that is deposed, while its callback hangs; and of one that is made to resign."""
    inside, go = threading.Event(), threading.Event()
    request.addfinalizer(go.set)
    leader = candidate(ttl=1.2, interrupt=True, on_deposed=lambda *_: go.wait(60))
    deliveries.put(partial(go.wait, 60))

    async def block() -> None:
        async with leader:
            inside.set()
            await asyncio.sleep(60)

    running = actor.start(block)
    assert inside.wait(10)
    async_face.run("UPDATE locks SET owner = NULL WHERE lock_key = 'k'")
    with pytest.raises(LockLost):
        running.result(10)
    inside.clear()
    running = actor.start(block)
    assert inside.wait(10)
    other.call(leader, "resign")
    with pytest.raises(LockError, match="was ended by resign"):
        running.result(10)
    assert async_face.row(KEY)["owner"] is None


@pytest.mark.parametrize("subject", [Subject("django", "async", "sqlite")], indirect=True, ids=str)
def test_a_body_that_nobody_goes_on_with(subject: Subject, candidate: Candidate) -> None:
    """Its term is over and not renewed, and the object can campaign again: its coroutine was closed."""
    leader, loop = candidate(ttl=1.5), asyncio.new_event_loop()

    @leader.run
    async def lead(term: int) -> None:
        await asyncio.Event().wait()

    async def main() -> None:
        running = lead()
        waiting: Any = running.send(None)
        while not leader.is_leader:
            await asyncio.sleep(0.01)
            if waiting is None or waiting.done():
                waiting = running.send(None)
        running.close()

    loop.run_until_complete(main())
    assert not leader.is_leader
    assert until(lambda: remaining(subject) < 0, 5)
    assert loop.run_until_complete(leader.acampaign(timeout=5))
    loop.close()


def test_an_interrupted_release_leaves_nothing(
    either: Subject, actor: Actor, candidate: Candidate, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The key is released all the same, and the object can campaign again."""
    leader = candidate()
    assert actor.call(leader, "campaign")
    interrupt(monkeypatch, leaving, "forget")
    with pytest.raises(KeyboardInterrupt):
        actor.call(leader, "resign")
    assert either.row(KEY)["owner"] is None
    assert actor.call(leader, "campaign", timeout=1)


@pytest.mark.parametrize("refused", [False, True], ids=["released", "refused"])
def test_a_term_that_was_resigned_is_not_released_under_its_body(
    either: Subject, actors: Actors, candidate: Candidate, monkeypatch: pytest.MonkeyPatch, refused: bool
) -> None:
    """The belief ends at once, the tenure after the body; the object's next campaign is refused until then.

    If the database refuses the release, the block is told, and the flow that resigned is not.
    """
    actor, other, third = actors(3)
    leader, inside, go_on = candidate(ttl=1.5 if refused else 15), threading.Event(), threading.Event()
    failures = iter([refused])
    fail(monkeypatch, LockStoreError, "release", when=lambda: next(failures, None))

    def body() -> None:
        inside.set()
        assert go_on.wait(30)

    running = actor.enter(leader, either.aside(body))
    assert inside.wait(30)
    resigning = other.start(getattr(leader, either.method("resign")))
    assert until(lambda: not leader.is_leader)
    with pytest.raises(LockLost):
        leader.check()
    with pytest.raises(LockError, match="has not yet released 'k'"):
        third.call(leader, "campaign")
    time.sleep(0.1)
    assert not resigning.done()
    assert either.row(KEY)["owner"]
    go_on.set()
    assert isinstance(running.exception(30), LockStoreError) == refused
    resigning.result(30)
    assert not leader.is_leader
    assert until(lambda: remaining(either) < 0, 2.5) if refused else either.row(KEY)["owner"] is None
    assert third.call(leader, "campaign", timeout=5)


def test_an_outage_does_not_end_run(
    either: Subject,
    actors: Actors,
    candidate: Candidate,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Nor does the release that another flow sends meanwhile. The log says that the term could not be ended."""
    actor, other = actors(2)
    timed(monkeypatch, retry_budget=0.4)
    leader, terms, go_on, away = candidate(ttl=2), list[int](), threading.Event(), threading.Event()

    def body(term: int) -> None:
        terms.append(term)
        assert go_on.wait(30)

    fail(monkeypatch, StoreConflict, "take", "create", "release", when=away.is_set)
    running = actor.start(leader.run(body if either.face == "sync" else asynchronous(body)))
    assert until(lambda: len(terms) == 1)
    resigning = other.start(getattr(leader, either.method("resign")))
    assert until(lambda: not leader.is_leader)
    away.set()
    go_on.set()
    assert isinstance(resigning.exception(30), LockStoreError | None)
    assert not running.done(), running.exception()
    assert until(lambda: "could not end a term" in caplog.text)
    away.clear()
    assert until(lambda: len(terms) > 1), running
    other.call(leader, "stop")
    running.result(30)


def leads(leader: Any) -> Generator[None, None, None]:
    """Leads from one `next` to the other."""
    with leader:
        yield


@pytest.mark.parametrize("subject", [Subject("sqlalchemy", "sync", "sqlite")], indirect=True, ids=str)
def test_a_body_in_a_thread_that_has_ended(subject: Subject, other: Actor, candidate: Candidate) -> None:
    """Holds up no resignation: a generator began it, and nobody goes on with that."""
    leader = candidate()
    generator = leads(leader)
    apart(partial(next, generator))
    assert leader.is_leader
    resigning = other.start(leader.resign)
    resigning.result(10)
    assert not leader.is_leader
    assert subject.row(KEY)["owner"] is None
    assert other.call(leader, "campaign", timeout=5)
    generator.close()
    assert leader.is_leader, "the end of the first body has ended the second term"


@pytest.mark.parametrize("subject", [Subject("sqlalchemy", "sync", "sqlite")], indirect=True, ids=str)
def test_a_body_whose_context_is_gone(subject: Subject, other: Actor, candidate: Candidate) -> None:
    """Is waited for: a pool runs each part of a generator in a copy of its caller's context."""
    leader = candidate()
    generator = leads(leader)
    with ThreadPoolExecutor(1) as pool:
        pool.submit(copy_context().run, next, generator).result()
        _ = gc.collect()
        resigning = other.start(leader.resign)
        assert until(lambda: not leader.is_leader)
        time.sleep(0.2)
        assert not resigning.done()
        assert subject.row(KEY)["owner"]
        pool.submit(copy_context().run, lambda: next(generator, None)).result()
    resigning.result(10)
    assert subject.row(KEY)["owner"] is None


@pytest.mark.parametrize("subject", [Subject("sqlalchemy", "async", "sqlite", "aiosqlite")], indirect=True, ids=str)
def test_a_body_on_a_loop_that_was_closed(subject: Subject, other: Actor, candidate: Candidate) -> None:
    """Holds up no resignation either."""
    leader, loop, inside = candidate(ttl=2), asyncio.new_event_loop(), asyncio.Event()

    async def leads() -> None:
        async with leader:
            inside.set()
            await asyncio.Event().wait()

    task = loop.create_task(leads())
    loop.run_until_complete(inside.wait())
    loop.close()
    other.start(leader.stop).result(10)
    assert not leader.is_leader
    assert until(lambda: subject.row(KEY)["owner"] is None or remaining(subject) < 0, 3)
    task._log_destroy_pending = False  # type: ignore[attr-defined]
    with contextlib.suppress(RuntimeError):
        task.get_coro().close()


def test_stop_at_any_moment_ends_run(async_face: Subject, actor: Actor, candidate: Candidate) -> None:
    """Also when the body has just ended; nothing cancels the task of `run`."""

    async def main(delay: int) -> None:
        leader, terms = candidate(interrupt=True), list[int]()

        @leader.run
        async def lead(term: int) -> None:
            terms.append(term)

        running = asyncio.create_task(lead())
        while not terms:  # noqa: ASYNC110 - the body may have ended many times
            await asyncio.sleep(0.001)
        for _ in range(delay):
            await asyncio.sleep(0)
        await getattr(leader, async_face.method("stop"))()
        assert await asyncio.wait_for(running, 10) is None
        assert not leader.is_leader

    for delay in range(0, 40, 2):
        actor.do(partial(main, delay))
    assert async_face.row(KEY)["owner"] is None


def test_a_deposition_inside_a_task_group(
    async_face: Subject, actor: Actor, other: Actor, candidate: Candidate
) -> None:
    """Is one: the next campaign begins."""
    leader, terms = candidate(ttl=1.2), list[int]()

    async def step() -> None:
        while True:
            leader.check()
            await asyncio.sleep(0.02)

    @leader.run
    async def lead(term: int) -> None:
        terms.append(term)
        if len(terms) == 1:
            await asyncio.to_thread(async_face.run, "UPDATE locks SET owner = NULL WHERE lock_key = 'k'")
            async with asyncio.TaskGroup() as group:
                _ = group.create_task(step())
        while leader.is_leader:  # noqa: ASYNC110 - that is its interface
            await asyncio.sleep(0.02)

    running = actor.start(lead)
    assert until(lambda: len(terms) == 2, 20)
    other.call(leader, "stop")
    running.result(10)


@pytest.mark.filterwarnings("ignore:the lock of an Engine blocks")
@pytest.mark.parametrize(
    "subject", [Subject("django", "async", "sqlite"), Subject("sqlalchemy", "sync", "sqlite")], indirect=True, ids=str
)
def test_nothing_blocks_the_loop_of_its_own_body(
    subject: Subject, actor: Actor, other: Actor, candidate: Candidate
) -> None:
    """A blocking call in the task that leads is refused; in a callback it returns, and the body's end frees the key."""
    leader, rival = candidate(), candidate()

    async def main() -> None:
        async with subject.within(leader):
            if subject.face == "async":
                with pytest.raises(SynchronousOnlyOperation):
                    leader.stop()
                assert leader.is_leader
            _ = asyncio.get_running_loop().call_soon(leader.resign)
            await asyncio.sleep(0.05)
            assert not leader.is_leader
            assert not await asyncio.to_thread(other.call, rival, "campaign", 0)
        assert await asyncio.to_thread(other.call, rival, "campaign", 0)

    actor.do(main if subject.face == "async" else lambda: asyncio.run(main()))


@pytest.mark.parametrize("block", ["run", "with"])
@pytest.mark.parametrize(
    "subject",
    [Subject("sqlalchemy", "sync", "postgresql"), Subject("django", "sync", "sqlite")],
    indirect=True,
    ids=str,
)
def test_a_body_ends_before_the_next_term_begins(
    subject: Subject, other: Actor, candidate: Candidate, block: str
) -> None:
    """Also if a signal handler calls `stop()` in its thread, which cannot wait for it."""
    leader, rival, seen = candidate(), candidate(), list[Any]()

    def body(_: int) -> None:
        signal.raise_signal(signal.SIGALRM)
        seen.append((leader.is_leader, leader.term, other.call(rival, "campaign", 0.3)))
        with pytest.raises(LockLost):
            leader.check()

    with handling(signal.SIGALRM, lambda *_: leader.stop()):
        if block == "run":
            leader.run(body)()
        else:
            with leader:
                body(0)
    assert seen == [(False, None, False)], "two led at once"
    assert other.call(rival, "campaign", 5)
    other.call(rival, "resign")


@pytest.mark.parametrize("subject", [Subject("sqlalchemy", "sync", "postgresql")], indirect=True, ids=str)
def test_stop_in_a_signal_handler(subject: Subject, candidate: Candidate) -> None:
    """At any moment of short terms: `run` returns, and the key is free."""
    for number in range(25):
        leader = candidate(ttl=20)

        @leader.run
        def lead(term: int) -> None:
            pass

        with handling(signal.SIGALRM, lambda *_, leader=leader: leader.stop()):
            _ = signal.setitimer(signal.ITIMER_REAL, 0.01 + number * 0.0007)
            lead()
        leader.resign()
        assert not leader.is_leader
        assert until(lambda: subject.row(KEY)["owner"] is None, 2), number
