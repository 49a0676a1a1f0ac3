"""What the fault tests share: other processes, subjects behind a proxy, and how often to try."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import pickle
import select
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ParamSpec, Self, TypeVar

import pytest
from django.db import connections

from dblock.core import clock, runtime
from dblock.core.holding.flow import Hold
from dblock.core.lock.base_store import BaseStore
from dblock.core.protocol.steps import Execute, Rows
from dblock.core.runtime import current_flow
from tests.conftest import ALIASES, INNODB, run
from tests.support.loaded import Process
from tests.support.subjects import LONG as LONG  # noqa: PLC0414 - for those who import it from here
from tests.support.subjects import MATRIX, PSYCOPG2, Subject

ROOT = Path(__file__).parents[2]
P = ParamSpec("P")
T = TypeVar("T")
SYNC = [subject for subject in MATRIX if subject.face == "sync"]

FEW = (
    SYNC
    if LONG
    else [
        Subject("django", "sync", "sqlite"),
        Subject("django", "sync", "postgresql"),
        *(Subject("sqlalchemy", "sync", database) for database in INNODB),
    ]
)
"""For tests that take long."""
PAIR = FEW if LONG else [FEW[1], FEW[2]]
"""For those that take long and start processes: a server of each kind, by each variant."""
SOME = (
    list(MATRIX)
    if LONG
    else [*FEW[1:], Subject("django", "async", "sqlite"), Subject("sqlalchemy", "async", "postgresql", "asyncpg")]
)
"""For those that both kinds of faces should take: each database, and each variant with each kind of face."""
DRIVEN = list(MATRIX) if LONG else [*SOME, *(each for each in MATRIX if each.driver and each not in SOME)]
"""For those that a driver may answer in its own way: the same, and every asynchronous driver of SQLAlchemy."""

PROTOCOL = [Subject("sqlalchemy", "sync", database) for database in ALIASES]
"""What the database decides: each of them, on one face."""
FACES = [
    Subject("django", "sync", "postgresql"),
    Subject("django", "async", "postgresql"),
    Subject("sqlalchemy", "sync", "postgresql"),
    Subject("sqlalchemy", "async", "postgresql", "asyncpg"),
]
"""What the API decides: each face, on one database."""
PAIR_OF_FACES = [Subject("django", "sync", "sqlite"), FACES[3]]
"""The same for those that wait for seconds: each variant, and each kind of face."""
EVERYWHERE = list(MATRIX)
"""The essential promises: every database, face and asynchronous driver."""
DRIVERS = [
    each for each in dict.fromkeys((*MATRIX, PSYCOPG2)) if each.variant == "sqlalchemy" or each.database == "postgresql"
]
"""What a driver answers in its own way: each of them, and one through Django."""


def times(short: int, long: int) -> int:
    """How often to try."""
    return long if LONG else short


@dataclass(frozen=True)
class Wired(Subject):
    """A subject whose statements go through a proxy; the aliases of Django for that end in `_wire`."""

    port: int = 0

    @property
    def url(self) -> str:
        direct = os.environ[f"DBLOCK_TEST_{self.database.upper()}_PORT"]
        return super().url.replace(f":{direct}/", f":{self.port}/")

    @property
    def alias(self) -> str:
        return f"{self.database}_wire"


class RemoteError(Exception):
    """What went wrong in another process; `kind` is the name of the exception's class there."""

    def __init__(self, kind: str, text: str) -> None:
        super().__init__(f"{kind}: {text}")
        self.kind = kind


PROGRAM = "import sys; from tests.support.remote import main; main(*sys.argv[1:])"


class Remote:
    """Another process, see `tests.support.remote`; names that a command assigns with `:=` stay."""

    def __init__(self, subject: Subject, **environment: str) -> None:
        self.process: Process | subprocess.Popen[str]
        given = PROGRAM, subject.variant, subject.database
        if not environment:
            self.process = Process(*given)
        else:  # of which some is read when its modules are imported
            self.process = subprocess.Popen(
                [sys.executable, "-c", *given],
                cwd=ROOT,
                env={**os.environ, **environment},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
        self._started = False

    def send(self, command: str) -> None:
        """Begin a command without waiting for its end."""
        if not self._started:
            self._started = True
            self.answer()
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(command) + "\n")
        self.process.stdin.flush()

    def answer(self, seconds: float = 30) -> Any:
        """The result of the command that was sent; RemoteError for its exception."""
        assert self.process.stdout is not None
        ready, _, _ = select.select([self.process.stdout], [], [], seconds)
        assert ready, "the other process does not answer"
        reply = json.loads(self.process.stdout.readline())
        if "error" in reply:
            raise RemoteError(reply["error"], reply["text"])
        return reply["ok"]

    def do(self, command: str) -> Any:
        """Run a command to its end."""
        self.send(command)
        return self.answer()

    def fails(self, command: str) -> str:
        """The name of the exception that a command raises."""
        try:
            result = self.do(command)
        except RemoteError as error:
            return error.kind
        raise AssertionError(f"{command} gave {result!r}")

    def freeze(self) -> None:
        """Stop it wherever it is, as a paused machine would."""
        self.process.send_signal(signal.SIGSTOP)

    def thaw(self) -> None:
        self.process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(30)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                with contextlib.suppress(BrokenPipeError):
                    pipe.close()


def until(condition: Callable[[], object], seconds: float = 15.0) -> bool:
    """Whether `condition` comes true within so many seconds; it is tried once more after them.

    It is tried every 5 ms at first, and less often the longer it takes: to ask a database costs a processor a
    millisecond.
    """
    began, took = time.monotonic(), 0.0
    while not condition():
        if took > seconds:
            return False
        time.sleep(min(max(0.005, took / 20), 0.025))
        took = time.monotonic() - began
    return True


def together(*work: Callable[[], object]) -> list[BaseException]:
    """What goes wrong when each is done in a thread of its own, at the same moment."""
    errors, start = list[BaseException](), threading.Barrier(len(work))

    def do(each: Callable[[], object]) -> None:
        try:
            _ = start.wait(30)
            each()
        except BaseException as error:
            errors.append(error)

    flows = [threading.Thread(target=do, args=(each,)) for each in work]
    for flow in flows:
        flow.start()
    for flow in flows:
        flow.join()
    return errors


def cycle(*locks: AbstractContextManager[object]) -> None:
    """Take each of these locks, and give it back."""
    for lock in locks:
        with lock:
            pass


def there(found: T | None) -> T:
    """It, which is not None."""
    assert found is not None
    return found


def apart(function: Callable[[], T]) -> T:
    """What it returns, or raises, in a thread of its own, which has ended then."""
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(function).result()


@contextlib.contextmanager
def ended(make: Callable[P, T]) -> Iterator[Callable[P, T]]:
    """The same, and whatever it has made is closed at the end."""
    made = list[Any]()

    def making(*args: P.args, **options: P.kwargs) -> T:
        each = make(*args, **options)
        made.append(each)
        return each

    yield making
    for each in made:
        each.close()


def in_child(function: Callable[[], Any]) -> Any:
    """What `function` returns in a forked child, which leaves like a prefork worker's."""
    reader, writer = os.pipe()
    pid = os.fork()
    if not pid:
        try:
            result: Any = ("ok", function())
        except BaseException:
            result = ("error", traceback.format_exc())
        os.write(writer, pickle.dumps(result))
        sys.stdout.flush()
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader, "rb") as pipe:
        kind, value = pickle.loads(pipe.read())
    os.waitpid(pid, 0)
    assert kind == "ok", value
    return value


def threads(name: str = "dblock ") -> list[threading.Thread]:
    """The library's own threads in this process that run.

    A signal handler that raises inside `Thread.start` may leave the lock of its event locked. Then the new thread waits
    for that lock for ever, before it comes to any code of ours, and `enumerate` lists it (gh-148874).
    """
    return [thread for thread in threading.enumerate() if thread.name.startswith(name) and thread.is_alive()]


def nobody_withdraws() -> bool:
    """Whether all places are deleted that waiters have left behind them."""
    return not any(keeper.withdraws for keeper in list(runtime.current.watchdog._keepers.values()))


def keeper_rests(keeper: Any) -> bool:
    """Whether no renewal, heartbeat or other work of a database is under way, but for what has threads of its own."""
    if keeper.loop is not None:
        return keeper.loop.is_closed() or not keeper.tasks
    return keeper.given is None


def fail(
    monkeypatch: pytest.MonkeyPatch,
    error: type[BaseException],
    *names: str,
    key: str = "",
    when: Callable[[], object] = lambda: True,
) -> None:
    """Let the statements of these names fail, about one key or any, as long as `when` says so."""
    execute = BaseStore.execute

    def failing(self: BaseStore, step: Execute) -> Rows:
        if step.statement.name in names and key in {"", step.parameters.get("key")} and when():
            raise error("out of order")
        return execute(self, step)

    monkeypatch.setattr(BaseStore, "execute", failing)


def interrupt(
    monkeypatch: pytest.MonkeyPatch,
    place: Any,
    name: str,
    error: type[BaseException] = KeyboardInterrupt,
    *,
    at: int = 1,
    after: bool = False,
) -> None:
    """Let the `at`-th call of a function raise, before or after its work, as a signal handler does."""
    function, calls = getattr(place, name), itertools.count(1)

    def interrupted(*given: Any, **named: Any) -> Any:
        strikes = next(calls) == at
        found = None if strikes and not after else function(*given, **named)
        if strikes:
            raise error
        return found

    monkeypatch.setattr(place, name, interrupted)


def hold_of(lock: Any) -> Hold:
    """The hold of the flow that asks."""
    return current_flow().holds[lock._place.store(), lock.key]


def renews(hold: Hold, *, soon: bool = True, within: float = 5) -> bool:
    """Whether the lease is renewed once more: made due now, or `soon` is false, when it is due."""
    before = hold.lease.renewed
    if soon:
        hold.lease.due = 0.0
        runtime.current.watchdog.wake()
    return until(lambda: hold.lease.renewed > before, within)


def before(lock: Any, method: str, happens: Callable[[], object]) -> None:
    """Let something happen before a method of this very lock object, each time."""
    plain = getattr(lock, method)

    def later(*args: Any) -> Any:
        happens()
        return plain(*args)

    setattr(lock, method, later)


def ledger(database: str) -> None:
    """An empty table that guarded transactions write to."""
    run(database, "CREATE TABLE IF NOT EXISTS ledger (n bigint)")
    run(database, "DELETE FROM ledger")


def leave_rows(database: str, *keys: str, owner: str | None = None) -> None:
    """Leave rows of keys that were given back years ago, or whose leases ended then."""
    columns = "lock_key, owner, fence, count, ttl, acquired_at, expires_at, label, host, pid, thread, program"
    ago = "'2020-01-01 00:00:00.000000'"
    rows = [f"(:k{n}, :owner, 1, 0, 30, {ago}, {ago}, '', 'h', 1, 't', 'p', '')" for n in range(len(keys))]
    named = {f"k{n}": key for n, key in enumerate(keys)}
    run(database, f"INSERT INTO locks ({columns}, celery_task_id) VALUES {', '.join(rows)}", owner=owner, **named)


def remaining(subject: Subject, key: str = "k") -> float:
    """Seconds until the row's lease ends, by the database's clock, read by a stranger."""
    expressions = {
        "postgresql": "CAST(extract(epoch FROM expires_at - clock_timestamp()) AS double precision)",
        "mysql": "TIMESTAMPDIFF(MICROSECOND, UTC_TIMESTAMP(6), expires_at) / 1e6",
        "sqlite": "(julianday(expires_at) - julianday('now')) * 86400.0",
    }
    [(seconds,)] = run(
        subject.database, f"SELECT {expressions[subject.protocol.dialect.name]} FROM locks WHERE lock_key = :k", k=key
    )
    return float(str(seconds))


def renew() -> None:
    """Let all leases of this process be due for renewal now, in place of a third of their ttl later."""
    for hold in list(runtime.current.watchdog._holds):
        if hold.lease.renewing:
            hold.lease.due = hold.lease.now()
    runtime.current.watchdog.wake()


def renewed(subject: Subject, key: str = "%") -> bool:
    """Whether the watchdog renews the tenures in the database once they are due, which they are at once.

    Such a test gives the lease time for a busy machine, and does not wait for a third of it.
    """
    return _is_lengthened(subject, f"locks WHERE owner IS NOT NULL AND lock_key LIKE '{key}'", renew, 10)


def kept(subject: Subject) -> bool:
    """Whether the watchdog keeps all places in queues once their heartbeats are due, which they are at once."""

    def keep() -> None:
        for keeper in list(runtime.current.watchdog._keepers.values()):
            keeper.due = clock.now()
        runtime.current.watchdog.wake()

    return _is_lengthened(subject, "lock_waiters", keep, 4)  # before its end: then a waiter joins anew


def _is_lengthened(subject: Subject, rows: str, begin: Callable[[], None], seconds: float) -> bool:
    """Whether there are such rows, and all of them end later than they do now."""

    def ends() -> dict[str, str]:
        found = run(subject.database, f"SELECT owner, expires_at FROM {rows}")
        return {str(owner): str(end) for owner, end in found}

    def end_later() -> bool:
        found = ends()
        return bool(then) and all(found.get(owner, "") > end for owner, end in then.items())

    then = ends()
    time.sleep(0.002)  # SQLite's clock ticks in milliseconds
    begin()
    return until(end_later, seconds)


def alive(subject: Subject, pattern: str = "%") -> int:
    """How many leases are alive, by the database's clock."""
    return len(alive_keys(subject, pattern))


def alive_keys(subject: Subject, pattern: str = "%") -> list[str]:
    """The keys of the rows whose leases are alive."""
    where = f"owner IS NOT NULL AND expires_at > {later(subject.database, 0)} AND lock_key LIKE :pattern"
    return [str(key) for (key,) in subject.run(f"SELECT lock_key FROM locks WHERE {where}", pattern=pattern)]


LATER = {
    "postgresql": "clock_timestamp() + make_interval(secs => :seconds)",
    **dict.fromkeys(("mysql", "mariadb"), "UTC_TIMESTAMP(6) + INTERVAL ROUND(:seconds * 1000000) MICROSECOND"),
    "sqlite": "strftime('%Y-%m-%d %H\\:%M\\:%f000', 'now', printf('%+.3f seconds', :seconds))",
}
"""So many seconds from now, by the database's clock."""


def later(database: str, seconds: float) -> str:
    """The same with the number in it."""
    return LATER[database].replace(":seconds", str(seconds))


def expire(subject: Subject, key: str = "k") -> None:
    """End the lease of a key now, as its time running out would."""
    run(subject.database, "UPDATE locks SET expires_at = acquired_at WHERE lock_key = :k", k=key)


@contextlib.contextmanager
def without(database: str, table: str) -> Iterator[None]:
    """A database that refuses all statements on a table."""
    run(database, f"ALTER TABLE {table} RENAME TO {table}_away")
    try:
        yield
    finally:
        run(database, f"ALTER TABLE {table}_away RENAME TO {table}")


def no_thread(monkeypatch: pytest.MonkeyPatch, refused: Callable[[str], object] = lambda _: True) -> None:
    """Let no thread be had that has such a name."""
    start = threading.Thread.start

    def starting(thread: threading.Thread) -> None:
        if refused(thread.name):
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", starting)


@contextlib.contextmanager
def handling(number: signal.Signals, handler: Callable[..., object]) -> Iterator[None]:
    """Let this handle a signal while the block lasts."""
    before = signal.signal(number, handler)
    try:
        yield
    finally:
        signal.signal(number, before)


def close_django(database: str, suffix: str = "") -> None:
    """Close this thread's connection."""
    connections[ALIASES[database] if not suffix else f"{database}{suffix}"].close()
