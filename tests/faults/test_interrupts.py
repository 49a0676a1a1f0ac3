"""Signals whose handlers raise, at any moment of taking, waiting, holding and leaving (requirement 27).

CPython runs signal handlers when a function begins or goes on, after a call, and at a jump backwards. A trace function
finds these moments in the code of this project, so that each of them, told apart by the whole stack, can be struck
once; a timer strikes at random, in the drivers' code and the standard library's too.
"""

from __future__ import annotations

import asyncio
import contextlib
import dis
import functools
import gc
import itertools
import logging
import random
import re
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, Self

import pytest

from dblock.core import runtime, timing
from dblock.core.acquire import local_queue as lines_of
from dblock.core.connections.deadlines import Deadlines
from dblock.core.errors import LockLost
from dblock.core.runtime import current_flow
from tests.conftest import ready
from tests.support.lab import LONG, SOME, SYNC, alive, close_django, threads, times, until
from tests.support.subjects import MATRIX, Actor, Subject

TTL = 0.4
ROOT = Path(__file__).parents[2]
OURS = (f"{ROOT}/dblock/", f"{ROOT}/sqlalchemy_dblock/")
ASYNC = [subject for subject in MATRIX if subject.face == "async"]
STRUCK = [*SYNC, *ASYNC] if LONG else SOME
"""Each database, variant and face at least once."""

pytestmark = [
    pytest.mark.usefixtures("pruned_soon"),
    pytest.mark.filterwarnings("ignore::ResourceWarning"),  # of drivers that were interrupted while they connected
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]


class Interrupted(BaseException):
    """As Celery's soft time limit, or Ctrl-C."""


@functools.cache
def moments(code: CodeType) -> frozenset[int]:
    """The offsets of instructions before which a signal handler may run, inside of the same `try` as its cause."""
    table = dis._parse_exception_table(code)  # type: ignore[attr-defined]

    def handler(offset: int) -> int | None:
        return next((each.target for each in table if each.start <= offset < each.end), None)

    found = set()
    for before, after in itertools.pairwise(dis.get_instructions(code)):
        name, at = before.opname, after.offset
        if name.startswith("JUMP_BACKWARD") and "NO_INTERRUPT" not in name:
            at = before.argval
        elif not ((name == "RESUME" and before.arg in {0, 1}) or (name.startswith("CALL") and "INTRINSIC" not in name)):
            continue
        if handler(before.offset) == handler(at) and after.opname != "GET_AWAITABLE" and code.co_name != "_adrive":
            found.add(at)  # a coroutine is made and awaited in one
    return frozenset(found)


class Strike:
    """Raises once, at the first moment of this flow that none of its predecessors has struck."""

    def __init__(self, struck: set[Any], *, every: int = 1, often: int = 4) -> None:
        self.fired = False
        self._struck, self._every, self._often = struck, every, often
        self._counts: dict[Any, int] = {}
        self._flow = current_flow()

    def arm(self) -> None:
        """From now on."""
        sys.settrace(self._begin)

    def disarm(self) -> None:
        sys.settrace(None)

    def __enter__(self) -> Self:
        self.arm()
        return self

    def __exit__(self, kind: object, *_: object) -> bool:
        self.disarm()
        return kind in {Interrupted, LockLost}  # a busy machine renews late

    def _begin(self, frame: FrameType, event: str, argument: object) -> Any:
        if not frame.f_code.co_filename.startswith(OURS):
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        return self._step

    def _step(self, frame: FrameType, event: str, argument: object) -> Any:
        if event == "opcode" and frame.f_lasti in moments(frame.f_code) and self._is_new(frame):
            self.fired = True
            raise Interrupted
        return self._step

    def _is_new(self, frame: FrameType | None) -> bool:
        if current_flow() is not self._flow:  # another one's on our event loop
            return False
        stack = []
        while frame is not None:
            if frame.f_code.co_filename.startswith(OURS):
                stack.append((frame.f_code, frame.f_lasti))
            frame = frame.f_back
        place = tuple(stack)
        count = self._counts[place] = self._counts.get(place, 0) + 1
        if count > self._often or (place, count) in self._struck:
            return False
        self._struck.add((place, count))
        return len(self._struck) % self._every == 0


class Stage:
    """Where the flows of a test meet; what they do is written once for both faces.

    A coroutine of a synchronous subject never waits for anything, so that anybody can run it.
    """

    def __init__(self, subject: Subject) -> None:
        self.subject, self.sync = subject, subject.face == "sync"
        driver = subject.driver or ("" if self.sync else DRIVERS[subject.database])
        self.foreign = Subject("sqlalchemy", subject.face, subject.database, driver)
        """As another process: it shares neither local queue nor store with the subject."""
        self._actor = Actor(subject) if self.sync else None

    def lock(self, key: str, *, foreign: bool = False, **options: Any) -> Any:
        return (self.foreign if foreign else self.subject).lock(key, **{"ttl": TTL, "timeout": 3, **options})

    async def call(self, lock: Any, name: str) -> Any:
        if self.sync:
            return getattr(lock, name)()
        return await (getattr(lock, f"a{name}", None) or getattr(lock, name))()

    async def within(self, lock: Any, body: Callable[[], Coroutine[Any, Any, None]]) -> None:
        if self.sync:
            with lock:
                await body()
        else:
            async with lock:
                await body()

    async def pause(self, seconds: float = 0.0005) -> None:
        if not self.sync:
            await asyncio.sleep(seconds)
        else:
            threading.Event().wait(seconds)  # this coroutine runs on no event loop

    def start(self, work: Callable[[], Coroutine[Any, Any, None]]) -> Any:
        """Begin it in another flow."""
        return asyncio.create_task(work()) if self._actor is None else self._actor.start(lambda: play(work()))

    async def finish(self, done: Any) -> None:
        """Wait for its end."""
        if self._actor is None:
            await asyncio.wait_for(done, 10)
        else:
            done.result(10)

    def run(self, work: Coroutine[Any, Any, None]) -> None:
        """The whole play."""
        if self.sync:
            play(work)
        else:
            asyncio.run(self._and_dispose(work))

    async def _and_dispose(self, work: Coroutine[Any, Any, None]) -> None:
        try:
            await work
        finally:
            for subject in (self.subject, self.foreign):
                if subject.variant == "sqlalchemy":
                    await subject.engine.dispose()

    def close(self) -> None:
        if self._actor is not None:
            self._actor.close()
            for subject in (self.subject, self.foreign):
                if subject.variant == "sqlalchemy":
                    subject.engine.dispose()
                else:
                    close_django(subject.database)


DRIVERS = {"sqlite": "aiosqlite", "postgresql": "psycopg", "mariadb": "aiomysql"}


def play(work: Coroutine[Any, Any, None]) -> None:
    """Run a coroutine that never waits."""
    try:
        work.send(None)
    except StopIteration:
        return
    raise AssertionError("it waits")


async def nothing() -> None:
    pass


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
        local_queue = runtime.current.site(stage.lock(key)._store()).local_queues.get(key)
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
    acquire_and_release: 68,
    acquire_after_a_stranger: 360,
    acquire_after_one_of_ours: 180,
    leave_for_one_of_ours: 44,
    leave_for_a_stranger: 44,
}
"""Of how many moments one is struck where there is no time for all."""


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
    queues = [site.local_queues for site in runtime.current._sites.values()]
    for local_queue in [local_queue for each in queues for local_queue in list(each.values())]:
        local_queue.expect_no_handover()
    return [key for each in queues for key in each]


def settled(subject: Subject, keys: list[str]) -> None:
    """Every key is free, nothing is renewed, and nothing of this process makes a free key slow."""
    gc.collect()
    assert until(lambda: not alive(subject), TTL + 1), [key for key in keys if alive(subject, key)]
    assert not list(runtime.current.watchdog._holds)
    assert until(lambda: not lines(), timing.DEFAULT.unresponsive_after + 1), "a dead one is passed over"
    assert until(lambda: not runtime.current.watchdog._places, 8), "a place that nobody has is kept no more"
    assert not runtime.current.wakeups.anybody_waits()
    assert until(lambda: not threads(), 5), threads()


@pytest.fixture
def warnings(caplog: pytest.LogCaptureFixture) -> Iterator[Callable[[], Counter[str]]]:
    """How often each key was said to have a block that nobody can leave."""
    caplog.set_level(logging.WARNING, "dblock")
    yield lambda: Counter(re.findall(r"a `with` on '(.*?)' was interrupted", caplog.text))
    gc.collect()  # what was broken off says so here, where that is expected, and not in some other test


@pytest.mark.parametrize("subject", STRUCK, ids=str)
def test_every_moment_of_a_lock_may_be_interrupted(
    request: pytest.FixtureRequest, subject: Subject, warnings: Callable[[], Counter[str]]
) -> None:
    """Struck at each moment at which a signal handler can run, alone and among others: nothing lasts."""
    ready(request, subject.database)
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


@pytest.mark.parametrize("subject", [Subject("sqlalchemy", "sync", "postgresql")], ids=str)
def test_nothing_watches_over_a_statement_that_was_not_sent(
    request: pytest.FixtureRequest, subject: Subject, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Struck between the two: else the connection would be kept, and cut when its time is up."""
    ready(request, subject.database)
    lock, armed, arm = subject.lock("k"), list[Any](), Deadlines.arm
    with lock:
        pass  # with a connection that is idle

    def struck(deadlines: Deadlines, connection: Any, moment: float) -> None:
        arm(deadlines, connection, moment)
        armed.append(connection)
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
@pytest.mark.parametrize("subject", SYNC if LONG else [SYNC[0], SYNC[4]], ids=str)
def test_signals_at_random_moments_leave_nothing(
    request: pytest.FixtureRequest, subject: Subject, warnings: Callable[[], Counter[str]]
) -> None:
    """Wherever they come, in the drivers too: every key is free a ttl later, and nothing renews it."""
    ready(request, subject.database)
    stage, chance, keys, reach, struck = Stage(subject), random.Random(), list[str](), 0.003, 0

    def strike(*_: object) -> None:
        raise Interrupted

    before = signal.signal(signal.SIGALRM, strike)
    try:
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
    finally:
        signal.signal(signal.SIGALRM, before)
        stage.close()
    assert set(warnings().values()) <= {1}
