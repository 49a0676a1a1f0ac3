"""Signals whose handlers raise, at any moment of taking, waiting, holding and leaving (requirement 27).

Each moment of our own code is struck once (`tests.support.strikes`); a timer strikes at random, in the drivers' code
and the standard library's too.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import itertools
import logging
import random
import re
import signal
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Coroutine, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from dblock.core import runtime, timing
from dblock.core.acquire import local_queue as lines_of
from dblock.core.connections.deadlines import Deadlines
from dblock.core.errors import LockError, LockLost
from dblock.core.holding.flow import Hold
from dblock.core.runtime import current_flow
from dblock.core.values import SHARE
from tests.conftest import watched_places
from tests.faults.conftest import NOISY
from tests.support.lab import LONG, SOME, SYNC, alive, handling, there, threads, times, until
from tests.support.model import Interrupted
from tests.support.strikes import RENEWED, TTL, CancelledAt, Stage, Strike, nothing, play
from tests.support.subjects import Subject

pytestmark = [pytest.mark.usefixtures("pruned_soon"), *NOISY]


async def block(stage: Stage, key: str, strike: Strike) -> None:
    with strike:
        await stage.within(stage.lock(key), nothing)


async def block_in_block(stage: Stage, key: str, strike: Strike) -> None:
    with strike:
        await stage.within(stage.lock(key), lambda: stage.within(stage.lock(key), nothing))


async def acquire_and_release(stage: Stage, key: str, strike: Strike) -> None:
    lock = stage.lock(key)
    with strike:
        await stage.call(lock, "acquire")
        await stage.call(lock, "release")
    if lock.state is not None:
        with contextlib.suppress(LockLost):  # a busy machine renews late
            await stage.call(lock, "release")


async def acquire_after_a_stranger(stage: Stage, key: str, strike: Strike) -> None:
    """Which has died; its lease ends soon."""

    async def die() -> None:
        await stage.call(stage.lock(key, foreign=True, ttl=0.03, renew=False), "acquire")

    await stage.finish(stage.start(die))
    await acquire_and_release(stage, key, strike)


async def acquire_after_one_of_ours(stage: Stage, key: str, strike: Strike) -> None:
    """In the local queue of this process."""
    begun = []

    async def hold() -> None:
        begun.append(True)
        await stage.pause(0.01)

    done = stage.start(lambda: stage.within(stage.lock(key), hold))
    while not begun:
        await stage.pause()
    await acquire_and_release(stage, key, strike)
    await stage.finish(done)


async def leave_for_one_of_ours(stage: Stage, key: str, strike: Strike, *, foreign: bool = False) -> None:
    """Somebody waits for the key, and gets it, in time."""
    heirs = []

    async def follow() -> None:
        await stage.within(stage.lock(key, foreign=foreign, timeout=TTL + 1), nothing)

    def waits() -> bool:
        local_queue = runtime.current.site(stage.lock(key)._place.store()).local_queues.get(key)
        return any(waiting == key for waiting, _ in runtime.current.wakeups._registered) or (
            local_queue is not None and any(waiter.stage is lines_of.Stage.WAITING for waiter in local_queue._waiters)
        )

    async def body() -> None:
        heirs.append(stage.start(follow))
        while not waits():
            await stage.pause()
        strike.arm()

    with strike:
        strike.disarm()
        await stage.within(stage.lock(key), body)
    await stage.finish(heirs[0])


async def leave_for_a_stranger(stage: Stage, key: str, strike: Strike) -> None:
    await leave_for_one_of_ours(stage, key, strike, foreign=True)


SCENES = {
    block: 90,
    block_in_block: 180,
    acquire_after_a_stranger: 360,
    acquire_after_one_of_ours: 180,
    leave_for_one_of_ours: 44,
    leave_for_a_stranger: 44,
}
"""Of how many moments one is struck where there is no time for all. (Other ways to use a lock: `KINDS`.)"""


async def strike_each(stage: Stage) -> list[str]:
    """Strike each moment of each scene; the keys that were used."""
    keys = list[str]()
    await stage.within(stage.lock("warm"), nothing)
    for scene, every in SCENES.items():
        struck, missed = set[Any](), 0
        while missed < 3:  # what happens in a wait is not the same each time
            keys.append(f"{scene.__name__} {len(keys)}")
            strike = Strike(struck, every=1 if LONG else every)
            await scene(stage, keys[-1], strike)
            missed = 0 if strike.fired else missed + 1
    await stage.within(stage.lock("the last"), nothing)  # taking a lock puts away what can be left no more
    return keys


def lines() -> list[str]:
    """The keys of the local queues; a flow that comes to one passes over those that have not been seen for long."""
    queues = [each for site in runtime.current._sites.values() for each in (site.local_queues, site.trying)]
    for local_queues in queues:
        for key in list(local_queues):
            local_queues.released(key)
    return [key for each in queues for key in each]


def settled(subject: Subject, keys: list[str]) -> None:
    """Every key is free, nothing is renewed, and nothing of this process makes a free key slow."""
    gc.collect()
    assert until(lambda: not alive(subject), TTL + 1), [key for key in keys if alive(subject, key)]
    assert not list(runtime.current.watchdog._holds)
    assert until(lambda: not lines(), timing.DEFAULT.unresponsive_after + 1), "a dead one is passed over"
    assert until(lambda: not watched_places(runtime.current.watchdog), 8), "a place that nobody has is kept no more"
    assert not runtime.current.wakeups.anybody_waits()
    assert until(lambda: not threads(), 5), threads()


@pytest.fixture
def warnings(caplog: pytest.LogCaptureFixture) -> Iterator[Callable[[], Counter[str]]]:
    """How often each key was said to have a block that nobody can leave."""
    caplog.set_level(logging.WARNING, "dblock")
    yield lambda: Counter(re.findall(r"a `with` on '(.*?)' was interrupted", caplog.text))
    gc.collect()  # what was broken off says so here, where that is expected, and not in some other test


@pytest.mark.parametrize("subject", SOME, ids=str, indirect=True)
def test_every_moment_of_a_lock_may_be_interrupted(subject: Subject, warnings: Callable[[], Counter[str]]) -> None:
    """Struck at each moment at which a signal handler can run, alone and among others: nothing lasts."""
    stage = Stage(subject)
    keys = list[str]()

    async def main() -> None:
        keys.extend(await strike_each(stage))
        end = time.monotonic() + TTL + 1
        while time.monotonic() < end and alive(subject):
            await stage.pause(0.02)
        await stage.within(stage.lock("the last"), nothing)
        assert not current_flow().holds

    try:
        stage.run(main())
        settled(subject, keys)
    finally:
        sys.settrace(None)
        stage.close()
    assert set(warnings().values()) <= {1}, "one warning for each"


Body = Callable[[], Coroutine[Any, Any, None]]


class Kind(NamedTuple):
    """What is begun and ended. A new kind, and a new way to begin one, are named in `KINDS`, and nowhere else."""

    make: Callable[[Stage, str], Any]
    """Its object, which is used once, and then dropped or kept."""
    stranger: Callable[[Stage, str], Any] | None = None
    """What somebody has acquired who has died, while one waits to begin; None if it never waits."""
    begin: tuple[Any, ...] = ("with",)
    """`with`, `()` for a decorated function, `run`, or a method and its arguments."""
    end: tuple[Any, ...] = ("release",)
    """The method that ends what a method has begun."""
    holds: Callable[[Any], object] = lambda made: made.state
    """Whether the object says so, or how many. It is ended then, as its caller does when a method was interrupted."""
    inside: Callable[[Stage, str, Any], Any] | None = None
    """The lock in whose block it begins."""

    @property
    def is_block(self) -> bool:
        """Whether nobody can end it who did not begin it."""
        return self.begin[0] in {"with", "()", "run"}


def one(function: str, which: str = "", **options: Any) -> Callable[[Stage, str], Any]:
    """Makes what `db_lock` and so on give; `which`: the method that makes a lock of it."""

    def make(stage: Stage, key: str) -> Any:
        made = stage.made(function, key, **options)
        return getattr(made, which)() if which else made

    return make


def dead(function: str, which: str = "") -> Callable[[Stage, str], Any]:
    """The same, for a stranger who dies, and whose lease ends soon."""
    return one(function, which, foreign=True, ttl=0.03, renew=False)


def two(stage: Stage, key: str) -> Any:
    return stage.made("db_locks", f"{key}, a", key)


KINDS = {
    "lock": Kind(one("db_lock"), dead("db_lock")),
    "lock, acquired": Kind(one("db_lock"), dead("db_lock"), ("acquire",)),
    "lock, decorated": Kind(one("db_lock"), None, ("()",)),
    "lock, inside another object": Kind(one("db_lock"), inside=lambda stage, key, _: one("db_lock")(stage, key)),
    "lock, inside itself": Kind(one("db_lock"), inside=lambda _stage, _key, made: made),
    "read": Kind(one("db_rwlock", "read"), dead("db_rwlock", "write")),
    "write": Kind(one("db_rwlock", "write"), dead("db_rwlock", "read")),
    "read, inside write": Kind(
        one("db_rwlock", "read"), inside=lambda stage, key, _: one("db_rwlock", "write")(stage, key)
    ),
    "permit": Kind(one("db_semaphore", "permit"), dead("db_semaphore")),
    "semaphore": Kind(one("db_semaphore"), dead("db_semaphore")),
    "semaphore, acquired": Kind(
        one("db_semaphore", permits=2),
        dead("db_semaphore"),
        ("acquire", True, 3, 2),
        ("release", 2),
        lambda made: len(made.held),
    ),
    "locks": Kind(two, dead("db_lock")),
    "locks, acquired": Kind(two, dead("db_lock"), ("acquire",)),
    "leader": Kind(one("db_leader"), dead("db_lock")),
    "leader, elected": Kind(one("db_leader"), dead("db_lock"), ("campaign",), ("resign",), lambda made: made.is_leader),
    "leader, run": Kind(one("db_leader"), dead("db_lock"), ("run",)),
    "majority": Kind(Stage.majority, Stage.most_of_it),
    "majority, acquired": Kind(Stage.majority, Stage.most_of_it, ("acquire",)),
}


class Over(Exception):
    """Ends the body of `run`."""


async def use(stage: Stage, kind: Kind, key: str, made: Any, body: Body) -> None:
    """Begin it, run the body, and end it."""
    if kind.inside is not None:
        outer, again = kind.inside(stage, key, made), kind._replace(inside=None)
        await stage.within(outer, lambda: use(stage, again, key, made, body))
    elif kind.begin[0] == "with":
        await stage.within(made, body)
    elif kind.begin[0] == "()":
        await stage.call(made(function(stage, body)), "__call__")
    elif kind.begin[0] == "run":
        with contextlib.suppress(Over):
            await stage.call(made.run(function(stage, body, Over)), "__call__")
    else:
        await stage.call(made, *kind.begin)
        await body()
        await stage.call(made, *kind.end)


def function(stage: Stage, body: Body, error: type[Exception] | None = None) -> Any:
    """A function that runs the body, and raises the error."""

    async def work(*_: object) -> None:
        await body()
        if error is not None:
            raise error

    return (lambda *_: play(work())) if stage.sync else work


async def strike(stage: Stage, kind: Kind, named: tuple[str, Any], how: Strike | CancelledAt, phase: str) -> bool:
    """Use an object of that key once, and interrupt that; whether the interrupt came through."""
    key, made = named

    async def die() -> None:
        assert kind.stranger is not None
        with contextlib.suppress(LockLost):  # on a busy machine its lease ends before it has the last of several
            await stage.call(kind.stranger(stage, key), "acquire")

    async def body() -> None:
        if phase == "end":
            how.arm()
        else:
            how.disarm()

    if phase.endswith("wait"):
        await stage.finish(stage.start(die))
    try:
        if phase != "end":
            how.arm()
        await how.run(use(stage, kind, key, made, body))
    except Interrupted:
        return True
    except asyncio.CancelledError:
        there(asyncio.current_task()).uncancel()
        return True
    finally:
        how.disarm()
        if not kind.is_block and (left := kind.holds(made)):
            with contextlib.suppress(LockLost):
                await stage.call(made, kind.end[0], *[left] * len(kind.end[1:]))
    return False


class Case(NamedTuple):
    """When it is interrupted, and what becomes of its object."""

    phase: str
    """`begin`, `end`, or `wait` for a beginning that waits; `cancel` for each pause of a task, also in a wait."""
    life: str
    """`dropped`, or `kept` as an object of a module is."""


CASES = [
    *(Case(phase, life) for phase in ("begin", "end", "wait") for life in ("dropped", "kept")),
    *(Case(phase, "kept") for phase in ("cancel", "cancel, wait")),
]


class Struck(NamedTuple):
    """A key that was struck."""

    name: str
    """Of its kind."""
    case: Case
    place: str
    kept: Any


def strikes(stage: Stage, case: Case) -> Iterator[Any]:
    """How a case is interrupted: at each moment; in the short form at those of the functions that its user calls."""
    if case.phase.startswith("cancel"):
        if not stage.sync:
            yield from map(CancelledAt, itertools.count(1))
    elif LONG:
        places, every = set[Any](), 1 if stage.subject.database == "sqlite" else 20
        while True:
            yield Strike(places, every=4 * every if case.phase == "wait" else every)
    elif case.life == "kept":
        places, shallow = set[Any](), 2 + (not stage.sync and case.phase == "end")
        while True:
            yield Strike(places, shallow=1 if case.phase == "wait" else shallow, often=2)


async def sweep(stage: Stage, names: Collection[str]) -> dict[tuple[str, Case], list[str]]:
    """Interrupt those kinds in each way, and see that nothing is left; what is, by kind and case."""
    struck, failed, renewed = dict[str, Struck](), defaultdict[tuple[str, Case], list[str]](list), set[str]()
    for name in names:
        await use(stage, KINDS[name], f"{name} warm", KINDS[name].make(stage, f"{name} warm"), nothing)
    for name, case in itertools.product(names, CASES):
        missed, kind = 0, KINDS[name]
        for how in strikes(stage, case) if kind.stranger or not case.phase.endswith("wait") else ():
            key = f"{name} {case.phase} {case.life} {len(struck)}"
            made = kind.make(stage, key)
            came = await strike(stage, kind, (key, made), how, case.phase)
            struck[key] = Struck(name, case, how.place, made if case.life == "kept" else None)
            del made
            if case.life == "kept" and how.fired:
                renewed |= {key} & _keys(
                    [hold.key for hold in list(runtime.current.watchdog._holds) if _is_renewed(hold)]
                )
            if how.fired and not came:
                failed[name, case].append(f"{how.place}: the interrupt was lost")
            missed = 0 if how.fired else missed + 1
            if missed > 2 * (LONG and case.phase.endswith("wait")):  # what happens in a wait is not the same each time
                break
    left, deadline = _keys(stage.alive()), time.monotonic() + RENEWED + 1
    while left and time.monotonic() < deadline:
        await stage.pause(0.1)
        left &= _keys(stage.alive())
    left |= renewed  # also where a busy machine has lost the lease meanwhile
    for key, (name, case, place, kept) in struck.items():
        if key in left:
            failed[name, case].append(f"{place}: it is held")
            continue
        began, kind = time.monotonic(), KINDS[name]
        try:
            await use(stage, kind, key, kind.make(stage, key) if kept is None else kept, nothing)
        except LockError as error:
            failed[name, case].append(f"{place}: it cannot be begun again, {error!r}")
        if (took := time.monotonic() - began) > 1:
            failed[name, case].append(f"{place}: beginning it again took {took:.1f} s")
    struck.clear()
    kept = None
    gc.collect()  # an object that is dropped is renewed no more
    await stage.release_all()
    while stage.alive() and time.monotonic() < deadline + RENEWED + 1:
        await stage.pause(0.1)
    return failed


def _is_renewed(hold: Hold) -> bool:
    """Whether it is renewed for as long as its object lives."""
    return hold.lease.renewing and hold.can_be_released and not hold.orphaned


def _keys(rows: list[str]) -> set[str]:
    """The keys of those rows, as they were given to the objects."""
    return {key.partition(SHARE)[0].removesuffix(", a") for key in rows}


FILE = Subject("sqlalchemy", "sync", "sqlite"), Subject("sqlalchemy", "async", "sqlite", "aiosqlite")
SERVED = Subject("django", "sync", "postgresql"), Subject("sqlalchemy", "async", "postgresql", "asyncpg")
SWEPT: list[tuple[Subject, tuple[str, ...]]] = [
    (FILE[0], tuple(KINDS)),
    (FILE[1], ("lock", "semaphore", "locks", "leader, elected", "leader, run")),
    (SERVED[0], ("semaphore",)),
]
"""Kinds that share the wait for the end of their leases."""
if LONG:
    SWEPT = [
        (subject, (name,))
        for subject in (*FILE, *SERVED)
        for name in KINDS
        if subject in FILE or not name.startswith("majority")
    ]


@pytest.mark.skipif(sys.version_info >= (3, 14), reason="a block has no end of its own (see dblock.core.lock.blocks)")
@pytest.mark.parametrize(
    ("subject", "names"),
    SWEPT,
    ids=lambda given: str(given) if isinstance(given, Subject) else "; ".join(given)[:40],
    indirect=["subject"],
)
def test_every_moment_of_every_kind_may_be_interrupted(
    subject: Subject, names: tuple[str, ...], tmp_path: Path
) -> None:
    """As it begins, waits and ends, of an object that is dropped or kept: the key is free a ttl later, and not slow."""
    stage, found = Stage(subject), dict[tuple[str, Case], list[str]]()
    if any(name.startswith("majority") for name in names):
        stage.files(tmp_path)

    async def main() -> None:
        found.update(await sweep(stage, names))

    try:
        stage.run(main())
    finally:
        sys.settrace(None)
        stage.close()
    assert not found


@pytest.mark.parametrize("subject", [Subject("sqlalchemy", "sync", "postgresql")], ids=str, indirect=True)
def test_nothing_watches_over_a_statement_that_was_not_sent(subject: Subject, monkeypatch: pytest.MonkeyPatch) -> None:
    """Struck between the two: else the connection would be kept, and cut when its time is up."""
    lock, armed, arm = subject.lock("k"), list[Any](), Deadlines.arm
    with lock:
        pass  # with a connection that is idle

    def struck(deadlines: Deadlines, cut: Any, moment: float) -> None:
        arm(deadlines, cut, moment)
        armed.append(cut)
        if len(armed) == 1:
            raise Interrupted

    monkeypatch.setattr(Deadlines, "arm", struck)
    with pytest.raises(Interrupted):
        lock.acquire()
    assert armed[0] not in runtime.current.deadlines._due
    subject.engine.dispose()


@pytest.mark.skipif(
    sys.version_info[:2] == (3, 14), reason="a handler that raises leaves Python's own locks locked (gh-148874)"
)
@pytest.mark.parametrize("subject", SYNC if LONG else [SYNC[0], SYNC[4]], ids=str, indirect=True)
def test_signals_at_random_moments_leave_nothing(subject: Subject, warnings: Callable[[], Counter[str]]) -> None:
    """Wherever they come, in the drivers too: every key is free a ttl later, and nothing renews it."""
    stage, chance, keys, reach, struck = Stage(subject), random.Random(), list[str](), 0.003, 0

    def strike(*_: object) -> None:
        raise Interrupted

    with contextlib.closing(stage), handling(signal.SIGALRM, strike):
        play(stage.within(stage.lock("warm"), nothing))
        while struck < times(50, 2000):
            keys.append(f"k{len(keys)}")
            try:
                signal.setitimer(signal.ITIMER_REAL, chance.uniform(1e-5, reach))
                with stage.lock(keys[-1]):
                    pass
                signal.setitimer(signal.ITIMER_REAL, 0)
                reach /= 1.1
            except Interrupted:
                struck += 1
                reach = min(reach * 1.1, 0.02)
            finally:
                signal.setitimer(signal.ITIMER_REAL, 0)
        settled(subject, keys)
    assert set(warnings().values()) <= {1}
