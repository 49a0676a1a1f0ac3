"""Processes of clients for the nemesis: `python -m tests.support.nemesis_client` forks them as its input asks for them.

In each, threads and tasks of both faces take, hold, verify, extend and release locks of every kind, and write under
them, until SIGTERM. What each does is appended to a file, a line an operation, so that a process that is killed loses
at most what it was about to say. Synchronous faces run the same coroutines as asynchronous ones, in which nothing
suspends. Importing everything costs a second of a processor: it is done once, and not by each process.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import json
import os
import random
import select
import signal
import sys
import threading
import time
import traceback
from collections.abc import Awaitable, Callable
from contextvars import ContextVar
from functools import cached_property
from pathlib import Path
from typing import Any

import asyncpg
import django
import sqlalchemy.exc
from django.conf import settings
from django.db import connections, transaction
from sqlalchemy import text

import dblock
import sqlalchemy_dblock
from dblock.core import clock
from dblock.core.errors import LockError, LockLost
from dblock.core.observing.events import Kind as Event
from dblock.core.protocol import queue
from dblock.core.protocol.steps import Steps
from tests.conftest import ALIASES
from tests.support import majorities
from tests.support.history import Kind, Recorder
from tests.support.servers import end_with_parent
from tests.support.subjects import Subject, at_once

TTL = 1.0
PERMITS = 3
QUARANTINE = 3.0
"""Longer than a ttl, as the documentation has it."""
COLD = 40
"""Keys that are seldom wanted by two at a time."""
COUNTER = "nemesis_counter"
MEMBERS = "nemesis_members"
DRIVERS_ERRORS = (sqlalchemy.exc.SQLAlchemyError, django.db.Error, OSError, asyncpg.PostgresError)
"""What the application's own connections raise; SQLAlchemy passes on what asyncpg raises while it connects."""
UNEXPECTED = (Exception, asyncio.CancelledError)
"""What no client should see; nobody cancels its tasks."""
_tickets: dict[tuple[object, str], list[tuple[int, float]]] = {}
"""By flow and key: the tickets of its latest attempt, and when each was known."""
_how: dict[tuple[str, int], str] = {}
"""By key and fence: how a tenure has begun."""
_flow: ContextVar[Flow | None] = ContextVar("flow", default=None)
_flows: dict[int, Flow] = {}
"""By what stands for a database in the protocol: one of the clients that use it."""


def note_queue(number: int, path: Path) -> None:
    """Remember the tickets that this process is given, and how its tenures begin; record what it grants to waiters."""
    recorder, join, grant = Recorder(path, str(number)), queue.join, queue.grant  # flows end before the background does
    _ = dblock.observe(lambda event: _how.__setitem__((event.key, event.fence), event.how), Event.ACQUIRED)

    def user_of(database: Any) -> Flow | None:
        flow = _flow.get() or _flows.get(id(database))  # threads of the background have none
        if flow is not None and len(flow.databases) == 1:
            _flows[id(database)] = flow
        return flow

    def joined(database: Any, request: Any, until: float) -> Steps[Any]:
        _ = user_of(database)
        found = yield from join(database, request, until)
        if found is not None:
            _tickets.setdefault((this_flow(), request["key"]), []).append((found[0].ticket, clock.now()))
        return found

    def granted(database: Any, key: str, *given: Any, **options: Any) -> Steps[Any]:
        begin, flow = clock.now(), user_of(database)
        found = yield from grant(database, key, *given, **options)
        if found is not None and flow is not None:
            told = {"key": flow.key(key), "begin": begin, "end": clock.now()}
            _ = recorder.note(name="grant", ticket=found[1].ticket, fence=found[1].fence, **told)
        return found

    setattr(queue, "join", joined)  # noqa: B010 - for type checkers it is another function
    setattr(queue, "grant", granted)  # noqa: B010


def unexpected(error: BaseException) -> str:
    """The outcome, whose traceback goes to the log."""
    traceback.print_exception(error)
    return f"unexpected {type(error).__name__}: {error}"


def this_flow() -> object:
    """The task, or the thread."""
    with contextlib.suppress(RuntimeError):
        return asyncio.current_task() or threading.get_ident()
    return threading.get_ident()


async def settled(value: Any) -> Any:
    """The value, awaited if it can be."""
    return await value if inspect.isawaitable(value) else value


class Closed(Subject):
    """A subject whose keys are closed for so long after a promotion."""

    @cached_property
    def engine(self) -> Any:
        return self._made(execution_options={"dblock_failover_quarantine": QUARANTINE})

    @classmethod
    def of(cls, variant: str, face: str, database: str) -> Closed:
        """Of a database; a node of a cluster is a MariaDB server to it."""
        known = "mariadb" if database == "galera" else database
        return cls(variant, face, known, majorities.DRIVERS[known] if face == "async" else "")


class Flow:
    """A client: one face on one database, or the majority lock."""

    def __init__(self, name: str, databases: list[str], seed: int, path: Path, over: threading.Event) -> None:
        self.name, self._recorder = name, Recorder(path, name)
        self.note = self._recorder.note
        self.databases, self.chance, self.over = databases, random.Random(seed), over
        self.database = databases[0]
        self.variant, self.face = name.split("-")[1:]
        self.subjects = [Closed.of(self.variant, self.face, each) for each in databases]
        self.subject = self.subjects[0]

    def method(self, lock: Any, name: str) -> Callable[..., Any]:
        return getattr(lock, self.subject.method(name))  # type: ignore[no-any-return]

    async def did(self, name: str, key: str, call: Callable[[], Any], **more: Any) -> bool:
        """Make a call and record it with its outcome (a take that succeeds: later); whether it succeeded."""
        begin, outcome = clock.now(), "ok"
        if name == "take":
            for each in list(_tickets):  # a copy, as other threads add theirs
                if each[0] == this_flow():
                    del _tickets[each]
        try:
            outcome = "refused" if await settled(call()) is False else "ok"
        except LockError as error:
            outcome = type(error).__name__
        except UNEXPECTED as error:
            outcome = unexpected(error)
        if not (name == "take" and outcome == "ok"):
            _ = self.note(name=name, key=key, begin=begin, end=clock.now(), outcome=outcome, **more)
        return outcome == "ok"

    # -- a tenure

    async def hold(
        self, lock: Any, tenures: list[tuple[str, Kind, int, int]], begin: float, *, barging: bool = False
    ) -> None:
        """What a holder does: it believes, verifies, extends and writes; each time it looks whether it still holds."""
        now = clock.now()
        try:
            lock.check()  # the process may have been stopped since
        except LockLost:
            self.note(name="take", key=self.key(tenures[0][0]), begin=begin, end=now, outcome="lost")
            raise
        names = list[str]()
        for key, kind, fence, slot in tenures:
            place: dict[str, Any] = {"slot": slot, "permits": PERMITS} if kind == "permit" else {}
            if kind == "exclusive":
                (ticket, joined), *again = _tickets.get((this_flow(), key), [(0, 0.0)])
                place = {"ticket": ticket, "joined": joined, "again": again}
                place |= {"how": _how.pop((key, fence), ""), "barging": barging}
            told = {"name": "take", "key": self.key(key), "begin": begin, "end": now, "until": now}
            names.append(self.note(**told, kind=kind, fence=fence, **place))
        for _ in range(self.chance.choice((1, 1, 1, 1, 2, 4))):
            what = self.chance.random()
            if what < 0.3 and hasattr(lock, "verify"):
                _ = await self.did("verify", self.key(tenures[0][0]), self.method(lock, "verify"))
            elif what < 0.4 and hasattr(lock, "extend"):
                _ = await self.did("extend", self.key(tenures[0][0]), self.method(lock, "extend"))
            else:
                await self.subject.pause(self.chance.choice((0.0, 0.0, 0.0, 0.001, 0.004)))
            if self.chance.random() < 0.001:
                await self.subject.pause(1.5 * TTL)  # the lease is renewed
            held = clock.now()
            lock.check()
            for name in names:
                _ = self.note(id=name, until=held)

    def key(self, key: str) -> str:
        """What the history calls a key."""
        return f"{'+'.join(self.databases)}/{key}"

    async def within(
        self, lock: Any, tenures: Callable[[], list[tuple[str, Kind, int, int]]], body: Any = None, **more: Any
    ) -> None:
        """Take, hold and release a lock, `body` being done while it is held."""
        begin, key = clock.now(), self.key(getattr(lock, "key", None) or lock.keys[0])
        if not await self.did("take", key, self.method(lock, "acquire"), kind=more.pop("kind", "exclusive")):
            await self.subject.pause(0.002)
            return
        try:
            await self.hold(lock, tenures(), begin, **more)
            if body is not None:
                await body()
        except LockLost:
            pass
        finally:
            _ = await self.did("release", key, self.method(lock, "release"))

    def timed(self) -> dict[str, Any]:
        return {"ttl": TTL, "timeout": self.chance.choice((0, 0.05, 3, 3, 3))}

    # -- what there is to do

    async def lock(self, key: str = "") -> None:
        key, fair = key or f"cold {self.chance.randrange(COLD)}", self.chance.random() < 0.9
        lock = self.subject.api("db_lock", key, fair=fair, **self.timed())
        await self.within(lock, lambda: [(key, "exclusive", lock.fence, 0)], barging=not fair)

    async def hot(self) -> None:
        await self.lock(self.chance.choice("ab"))

    async def write(self) -> None:
        """Read a counter, add one, and be a member of a set, in a guarded transaction."""
        lock = self.subject.api("db_lock", "w", **self.timed())

        async def body() -> None:
            begin, fence = clock.now(), lock.fence
            name = self._recorder.next_id()
            outcome, read = "failed", [-1]
            try:
                transact = self.django_transaction if self.variant == "django" else self.sqlalchemy_transaction
                async for step in transact(lock, name, read):
                    outcome = step
            except (LockError, *DRIVERS_ERRORS):
                pass
            record = {"begin": begin, "end": clock.now(), "fence": fence, "id": name}
            _ = self.note(name="write", key=self.key("w"), outcome=outcome, value=read[0], **record)

        await self.within(lock, lambda: [("w", "exclusive", lock.fence, 0)], body)

    async def sqlalchemy_transaction(self, lock: Any, name: str, read: list[int]) -> Any:
        """Yields what the outcome is if the next step fails."""
        connection = await settled(self.subject.engine.connect())
        try:
            _ = await settled(connection.begin())
            try:
                await settled(lock.guard(connection))
            except OSError as error:
                if isinstance(error, LockError):
                    raise
                raise RuntimeError("the guard passes on what a driver has raised") from error
            read[0] = (await settled(connection.execute(text(f"SELECT n FROM {COUNTER}")))).scalar()
            await settled(connection.execute(text(f"UPDATE {COUNTER} SET n = :n"), {"n": read[0] + 1}))
            insert = text(f"INSERT INTO {MEMBERS} (name, value_read) VALUES (:name, :value)")
            await settled(connection.execute(insert, {"name": name, "value": read[0]}))
            yield "unknown"
            await settled(connection.commit())
            yield "ok"
        finally:
            with contextlib.suppress(sqlalchemy.exc.SQLAlchemyError):
                await settled(connection.close())

    async def django_transaction(self, lock: Any, name: str, read: list[int]) -> Any:
        """The same."""
        with transaction.atomic(self.subject.alias):
            lock.guard()
            with connections[self.subject.alias].cursor() as cursor:
                cursor.execute(f"SELECT n FROM {COUNTER}")
                read[0] = cursor.fetchone()[0]
                cursor.execute(f"UPDATE {COUNTER} SET n = %s", [read[0] + 1])
                cursor.execute(f"INSERT INTO {MEMBERS} (name, value_read) VALUES (%s, %s)", [name, read[0]])
            yield "unknown"
        yield "ok"

    async def read(self) -> None:
        lock = self.subject.api("db_rwlock", "rw", **self.timed()).read()
        await self.within(lock, lambda: [("rw", "reader", lock.fence, 0)], kind="reader")

    async def modify(self) -> None:
        """Write; and sometimes read on."""
        lock = self.subject.api("db_rwlock", "rw", **self.timed()).write()

        async def body() -> None:
            if self.chance.random() < 0.5:
                begin = clock.now()
                if await self.did("downgrade", self.key("rw"), self.method(lock, "downgrade")):
                    await self.hold(lock, [("rw", "reader", lock.fence, 0)], begin)

        await self.within(lock, lambda: [("rw", "writer", lock.fence, 0)], body, kind="writer")

    async def permits(self) -> None:
        semaphore = self.subject.api("db_semaphore", "s", PERMITS, **self.timed())
        n, begin = self.chance.choice((1, 1, 2)), clock.now()
        acquire = self.method(semaphore, "acquire")
        if not await self.did("take", self.key("s"), lambda: acquire(n=n), kind="permit"):
            await self.subject.pause(0.002)
            return
        try:
            await self.hold(_All(held := list(semaphore.held)), [("s", "permit", p.fence, p.slot) for p in held], begin)
        except LockLost:
            pass
        finally:
            release = self.method(semaphore, "release")
            _ = await self.did("release", self.key("s"), lambda: release(n))

    async def several(self) -> None:
        locks = self.subject.api("db_locks", *self.chance.sample("ab", 2), **self.timed())
        await self.within(locks, lambda: [(key, "exclusive", fence, 0) for key, fence in locks.fences.items()])

    async def lead(self) -> None:
        leader, begin = self.subject.api("db_leader", "boss", ttl=TTL), clock.now()
        campaign = self.method(leader, "campaign")
        if not await self.did("take", self.key("boss"), lambda: campaign(timeout=0.1), kind="leader"):
            return
        with contextlib.suppress(LockLost):
            await self.hold(leader, [("boss", "leader", leader.term, 0)], begin)
        _ = await self.did("release", self.key("boss"), self.method(leader, "resign"))

    async def majority(self) -> None:
        given: dict[str, Any] = {"ttl": TTL, "timeout": self.chance.choice((0.5, 3))}
        if self.variant == "django":
            lock: Any = dblock.db_quorum_lock("m", using=[each.alias for each in self.subjects], **given)
        else:
            lock = sqlalchemy_dblock.db_quorum_lock([each.engine for each in self.subjects], "m", **given)
        await self.within(lock, lambda: [("m", "majority", lock.fence, 0)], kind="majority")

    async def live(self, pause: float) -> None:
        """Do one thing after the other, until it is over."""
        _ = _flow.set(self)
        plain = [self.lock] * 16 + [self.hot] * 3 + [self.read] * 3
        family = [self.write, self.write, self.modify, self.permits, self.several, self.lead]
        if (self.variant, self.face) == ("django", "async"):
            family = family[2:]  # its transactions belong to the thread that asynchronous code shares
        if self.database == "galera" and int(self.name[0]) % 2:  # the other node: guards and readers hold on one only
            plain, family = plain[:-3], [self.permits, self.several, self.lead]
        choices: list[Callable[[], Awaitable[None]]] = [*plain, *family]
        if len(self.databases) > 1:
            choices = [self.majority]
        while not self.over.is_set():
            try:
                await self.chance.choice(choices)()
            except LockError as error:  # while it looked at what it holds
                _ = self.note(**self._misfortune(type(error).__name__))
            except UNEXPECTED as error:
                _ = self.note(**self._misfortune(unexpected(error)))
            await self.subject.pause(pause * self.chance.random())
        self._recorder.close()
        for each in self.subjects if self.variant == "sqlalchemy" else ():
            with contextlib.suppress(Exception):
                await settled(each.engine.dispose())
        if self.variant == "django" and self.face == "sync":
            connections.close_all()

    def _misfortune(self, outcome: str) -> dict[str, Any]:
        now = clock.now()
        return {"name": "other", "key": self.key(""), "begin": now, "end": now, "outcome": outcome}


class _All:
    """Several permits as one lock."""

    def __init__(self, locks: list[Any]) -> None:
        self._locks = locks

    def check(self) -> None:
        for lock in self._locks:
            lock.check()


def flows(number: int, databases: list[str]) -> list[tuple[str, list[str]]]:
    """The clients of a process: two faces on each database, other ones in the next process; and a majority of all."""
    faces = ("django-sync", "sqlalchemy-async", "sqlalchemy-sync", "django-async")
    found = [
        (f"{number}.{database}-{faces[(2 * ((number + place) % 2) + more) % 4]}", [database])
        for place, database in enumerate(databases)
        for more in range(2 if len(databases) > 1 else 4)
    ]
    if len(databases) > 2:
        found.append((f"{number}.majority-{faces[number % 3]}", databases[:3]))
    return found


def _sleep(seconds: Any) -> None:
    _ = select.select((), (), (), max(float(seconds), 0.0))


def note_stalls(number: int, path: Path) -> None:
    """Note, as a fault without a name, whenever the process does not run for long: a busy machine is like a pause."""
    recorder, pause = Recorder(path, str(number)), 0.05
    while True:
        begin = clock.now()
        time.sleep(pause)
        if (end := clock.now()) - begin > pause + TTL / 3:
            _ = recorder.note(name="fault", key="", begin=begin, end=end)


def main(number: int, seed: int, path: str, pause: float, databases: list[str]) -> None:
    """Live until SIGTERM."""
    over = threading.Event()
    _ = signal.signal(signal.SIGTERM, lambda *_: over.set())
    _ = signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
    note_queue(number, Path(path))
    threading.Thread(target=note_stalls, args=(number, Path(path)), daemon=True).start()
    made = [
        Flow(name, given, seed * 100 + place, Path(path), over)
        for place, (name, given) in enumerate(flows(number, databases))
    ]

    def pause_of(flow: Flow) -> float:
        return 0.0 if flow.databases == ["sqlite"] else pause

    threads = [
        threading.Thread(target=at_once, args=(each.live(pause_of(each)),)) for each in made if each.face == "sync"
    ]
    for thread in threads:
        thread.start()

    async def tasks() -> None:
        await asyncio.gather(*(each.live(pause_of(each)) for each in made if each.face == "async"))

    asyncio.run(tasks())
    for thread in threads:
        thread.join()


def fork(*given: Any) -> int:
    """Begin a process of clients."""
    if pid := os.fork():
        return pid
    end_with_parent()
    status = 1
    try:
        main(*given)
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(status)


def wait(pid: int) -> int | None:
    """How a process has ended, or None if it does not."""
    ended = clock.now() + 300
    while clock.now() < ended:
        found, status = os.waitpid(pid, os.WNOHANG)
        if found:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.01)
    return None


def serve() -> None:
    """Answer each line of the input, the arguments of a new process or the number of one to wait for."""
    _ = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})  # until there is somebody who listens to it
    settings.DBLOCK = {"FAILOVER_QUARANTINE": QUARANTINE}
    django.setup()
    for module in (dblock, sqlalchemy_dblock):  # which imports the rest of it
        _ = [getattr(module, name) for name in module.__all__]
    for each, alias in ALIASES.items():  # and the drivers
        _ = connections[alias], *(Closed.of("sqlalchemy", face, each).engine for face in ("sync", "async"))
    if "LD_PRELOAD" in os.environ:  # libfaketime breaks sleeping until a moment of the monotonic clock
        time.sleep = _sleep
    for line in sys.stdin:
        given = json.loads(line)
        print(json.dumps(fork(*given) if isinstance(given, list) else wait(given)), flush=True)  # noqa: T201


if __name__ == "__main__":
    serve()
