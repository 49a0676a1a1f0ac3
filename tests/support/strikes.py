"""Strikes: an exception, as from a signal handler, at each moment at which one can be raised in our own code.

CPython runs signal handlers when a function begins or goes on, after a call, and at a jump backwards. A trace function
finds these moments in the code of this project, so that each of them, told apart by the whole stack, can be struck
once.
"""

from __future__ import annotations

import asyncio
import dis
import functools
import itertools
import sys
from collections.abc import Callable, Coroutine, Generator
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, Self

from sqlalchemy import create_engine, text
from sqlalchemy.ext.asyncio import create_async_engine

import sqlalchemy_dblock
from dblock.core.errors import LockLost
from dblock.core.runtime import current_flow
from dblock.majority.statements import SERVER
from tests.support import majorities
from tests.support.lab import ROOT, alive_keys, close_django, there
from tests.support.model import Interrupted
from tests.support.subjects import Actor, Subject, at_once

OURS = (f"{ROOT}/dblock/", f"{ROOT}/sqlalchemy_dblock/")
TTL = 0.4
RENEWED = 1.5
"""The ttl of what is to be renewed for as long as something holds it, also on a busy machine."""


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

    def __init__(self, struck: set[Any], *, every: int = 1, often: int = 4, shallow: int = 0) -> None:
        """One moment of `every` so many is struck; with `shallow` those alone at which at most so many of ours run."""
        self.fired = False
        self.place = ""
        """Where it has struck, the innermost function first."""
        self._struck, self._every, self._often, self._shallow = struck, every, often, shallow
        self._counts: dict[Any, int] = {}
        self._flow = current_flow()

    def arm(self) -> None:
        """From now on."""
        sys.settrace(self._begin)

    def disarm(self) -> None:
        sys.settrace(None)

    async def run(self, work: Coroutine[Any, Any, None]) -> None:
        """Run what is to be struck."""
        await work

    def __enter__(self) -> Self:
        self.arm()
        return self

    def __exit__(self, kind: object, *_: object) -> bool:
        self.disarm()
        return kind in {Interrupted, LockLost}  # a busy machine renews late

    def _begin(self, frame: FrameType, event: str, argument: object) -> Any:
        if not _is_ours(frame) or (self._shallow and len(_ours(frame)) > self._shallow):
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        return self._step

    def _step(self, frame: FrameType, event: str, argument: object) -> Any:
        if event == "opcode" and frame.f_lasti in moments(frame.f_code) and self._is_new(frame):
            self.fired = True
            raise Interrupted
        return self._step

    def _is_new(self, frame: FrameType) -> bool:
        if current_flow() is not self._flow:  # another one's on our event loop
            return False
        place = _ours(frame)
        if any(code.co_name == "__del__" for code, _ in place):  # where Python drops it
            return False
        count = self._counts[place] = self._counts.get(place, 0) + 1
        if count > self._often or (place, count) in self._struck:
            return False
        self._struck.add((place, count))
        self.place = " < ".join(f"{code.co_name}+{at}" for code, at in place)
        return len(self._struck) % self._every == 0


def _is_ours(frame: FrameType) -> bool:
    return frame.f_code.co_filename.startswith(OURS)


def _ours(frame: FrameType | None) -> tuple[tuple[CodeType, int], ...]:
    """The functions of ours that run, and how far each is, the innermost first."""
    stack = []
    while frame is not None:
        if _is_ours(frame):
            stack.append((frame.f_code, frame.f_lasti))
        frame = frame.f_back
    return tuple(stack)


class CancelledAt:
    """Cancels the work at that pause of its task, as `task.cancel()` would during it."""

    def __init__(self, number: int) -> None:
        self.fired, self.place, self._number = False, f"pause {number}", number

    def arm(self) -> None:
        """Nothing is to be done."""

    disarm = arm

    async def run(self, work: Coroutine[Any, Any, None]) -> None:
        """Run what is to be cancelled."""
        await _Pausing(work, self._at)

    def _at(self, number: int) -> None:
        if number == self._number:
            self.fired = True
            there(asyncio.current_task()).cancel()


class _Pausing:
    """The work; before each pause `at` is called with its number."""

    def __init__(self, work: Coroutine[Any, Any, None], at: Callable[[int], None]) -> None:
        self._work, self._at = work, at

    def __await__(self) -> Generator[Any, Any, None]:
        error: BaseException | None = None
        for number in itertools.count(1):
            try:
                pause = self._work.send(None) if error is None else self._work.throw(error)
            except StopIteration:
                return
            self._at(number)
            error = None
            try:
                yield pause
            except BaseException as raised:  # it is for the work
                error = raised


class Stage:
    """Where the flows of a test meet; what they do is written once for both faces.

    A coroutine of a synchronous subject never waits for anything, so that anybody can run it.
    """

    def __init__(self, subject: Subject) -> None:
        self.subject, self.sync = subject, subject.face == "sync"
        driver = subject.driver or ("" if self.sync else majorities.DRIVERS[subject.database])
        self.foreign = Subject("sqlalchemy", subject.face, subject.database, driver)
        """As another process: it shares neither local queue nor store with the subject."""
        self._actor = Actor(subject) if self.sync else None
        self._engines, self._foreign_engines, self._observers = list[Any](), list[Any](), list[Any]()

    def lock(self, key: str, *, foreign: bool = False, **options: Any) -> Any:
        return (self.foreign if foreign else self.subject).lock(key, **{"ttl": TTL, "timeout": 3, **options})

    def made(self, kind: str, *keys: str, foreign: bool = False, **options: Any) -> Any:
        """What `db_lock`, `db_leader` and so on give, for the database of the subject."""
        subject = self.foreign if foreign else self.subject
        options = {"ttl": RENEWED, "timeout": 3, **options}
        return subject.api(kind, *keys, **options)

    def majority(self, key: str) -> Any:
        """A majority lock on three databases in files, which `files()` makes."""
        return sqlalchemy_dblock.db_quorum_lock(self._engines, key, ttl=RENEWED, answer=1, timeout=3)

    def most_of_it(self, key: str) -> Any:
        """The plain locks of a stranger on two of them, whose leases end soon."""
        locks = [sqlalchemy_dblock.db_lock(each, key, ttl=0.15, renew=False) for each in self._foreign_engines[:2]]
        return sqlalchemy_dblock.db_locks(*locks)

    def files(self, folder: Path) -> None:
        """Make the databases of majority locks."""
        urls = [f"sqlite:///{folder}/{number}.db" for number in range(3)]
        for each in urls:
            engine = create_engine(each)
            self._observers.append(engine)
            sqlalchemy_dblock.create_tables(engine)
            majorities.count_on(engine)
        make = create_engine if self.sync else create_async_engine
        urls = [each if self.sync else each.replace("sqlite:", "sqlite+aiosqlite:") for each in urls]
        self._engines, self._foreign_engines = [make(each) for each in urls], [make(each) for each in urls]

    async def call(self, lock: Any, name: str, *given: Any) -> Any:
        if self.sync:
            return getattr(lock, name)(*given)
        return await (getattr(lock, f"a{name}", None) or getattr(lock, name))(*given)

    async def within(self, lock: Any, body: Callable[[], Coroutine[Any, Any, None]]) -> None:
        async with self.subject.within(lock):
            await body()

    def alive(self) -> list[str]:
        """The keys that somebody holds."""
        found = alive_keys(self.subject)
        for engine in self._observers:
            with engine.connect() as connection:
                now = "strftime('%Y-%m-%d %H\\:%M\\:%f000', 'now')"
                held = f"SELECT lock_key FROM locks WHERE owner IS NOT NULL AND expires_at > {now} AND lock_key <> :key"
                found += [key for (key,) in connection.execute(text(held), {"key": SERVER})]
        return found

    async def release_all(self) -> None:
        """Release what this process still holds."""
        if not self.alive():
            return
        if self.subject.variant == "django":
            assert self.sync
            self.subject.api("release_all")
            return
        for engine in (self.subject.engine, *self._engines):
            await self.call(sqlalchemy_dblock.release_all, "__call__", engine)

    async def pause(self, seconds: float = 0.0005) -> None:
        await self.subject.pause(seconds)

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
            await self._dispose()

    async def _dispose(self) -> None:
        own = [each.engine for each in (self.subject, self.foreign) if each.variant == "sqlalchemy"]
        for engine in (*self._engines, *self._foreign_engines, *own):
            await self.foreign.ask(engine, "dispose")

    def close(self) -> None:
        for engine in self._observers:
            engine.dispose()
        if self._actor is not None:
            self._actor.close()
            play(self._dispose())
            if self.subject.variant == "django":
                close_django(self.subject.database)


play = at_once
"""Runs a coroutine that never waits."""


async def nothing() -> None:
    pass
