"""Children own nothing of their parent's, and what a process still holds when it ends."""

from __future__ import annotations

import itertools
import os
import signal
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.contract.test_queue import waiters
from tests.support.lab import FEW, LONG, PAIR, SYNC, Remote, alive, until
from tests.support.loaded import completed
from tests.support.subjects import MATRIX, Subject

pytestmark = [
    pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this system"),
    pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning"),
]

SETUP = """
import sys
import django
django.setup()
from tests.support.subjects import Subject
subject = Subject(*sys.argv[1:])
"""


def process(subject: Subject, body: str, *, code: int = 0) -> str:
    """Run a program to its end, and what it printed."""
    done = completed(SETUP + body, subject.variant, subject.face, subject.database, subject.driver)
    assert done.returncode == code, done.stderr
    return done.stdout


IN_A_LOOP = [each for each in MATRIX if each.face == "async" and each.driver not in {"", "asyncmy"}]
ACQUIRE = {
    "sync": "lock.acquire()\nlock.acquire()\n",
    "async": "import asyncio\nasyncio.run(lock.acquire())\n",
}


@pytest.mark.parametrize(
    ("subject", "how", "code"),
    [
        *((each, "", 0) for each in (*(SYNC if LONG else PAIR), *IN_A_LOOP)),
        (FEW[1], "sys.exit(3)", 3),
        (FEW[1], "raise ValueError", 1),
        (FEW[1], "import os; os.kill(os.getpid(), 2)", -signal.SIGINT),
    ],
    indirect=["subject"],
    ids=str,
)
def test_what_is_held_is_released_at_a_normal_exit(subject: Subject, how: str, code: int) -> None:
    """However the program ends in order: the key is free at once, not after its ttl; re-entered ones too.

    An event loop is closed by then, and its connections with it.
    """
    if subject.driver == "aiosqlite" and sys.version_info[:2] == (3, 12):
        pytest.skip("Python 3.12 starts no threads at its end, and aiosqlite needs one: the lease ends by itself")
    process(subject, f"lock = subject.lock('k', ttl=600)\n{ACQUIRE[subject.face]}{how}", code=code)
    assert subject.row("k")["owner"] is None
    assert alive(subject) == 0


OF_OBJECTS = """
import threading
semaphore, leader = subject.api("db_semaphore", "s", 3, ttl=600), subject.api("db_leader", "l", ttl=600)
assert semaphore.acquire() and leader.campaign()
ended = threading.Thread(target=semaphore.acquire)
ended.start()
ended.join()

def work():
    assert semaphore.acquire()
    begun.set()
    threading.Event().wait()

begun = threading.Event()
threading.Thread(target=work, daemon=True).start()
assert begun.wait(20)
"""


@pytest.mark.parametrize("subject", [FEW[1]], indirect=True, ids=str)
def test_what_objects_hold_is_released_at_a_normal_exit(subject: Subject) -> None:
    """A term, and permits, but for that of a thread which is still at work."""
    process(subject, OF_OBJECTS)
    assert alive(subject) == 1
    assert subject.row("l")["owner"] is None


@pytest.mark.parametrize("subject", PAIR, indirect=True, ids=str)
def test_a_process_that_ends_leaves_no_place_that_was_served(subject: Subject) -> None:
    """Where its row is deleted some time after the key was granted there: at the end, if that has not come yet."""
    holder = subject.lock("k", ttl=60)
    assert holder.acquire()
    with ThreadPoolExecutor(1) as pool:
        ends = pool.submit(process, subject, "with subject.lock('k', timeout=30): pass\n")
        assert until(lambda: waiters(subject) == 1, 20)
        holder.release()
        _ = ends.result(30)
    assert subject.run("SELECT * FROM lock_waiters") == []


FORKS = """
import asyncio, os, signal, time
from pathlib import Path
import dblock
parent = os.getpid()
reads, writes = os.pipe()

def fork(*_):
    if os.fork() == 0:
        os.close(writes)
        os.read(reads, 1)  # its parent has been granted the key
        LEAVE
    else:
        Path("FORKED").touch()

lock = subject.lock("k", timeout=20)
"""
IN_A_THREAD = """
signal.signal(signal.SIGALRM, fork)
signal.setitimer(signal.ITIMER_REAL, 0.3)
try:
    assert lock.acquire()
except dblock.LockNotHeld:
    assert os.getpid() != parent
    os._exit(0)
assert os.getpid() == parent, "two holders"
os.write(writes, b"x")
os.wait()
assert lock.verify()
lock.release()
"""
IN_A_TASK = """
async def wait():
    assert await getattr(lock, subject.method("acquire"))()
    assert os.getpid() == parent, "two holders"
    os.write(writes, b"x")
    await asyncio.sleep(0.8)  # the child, which has the same selector, takes seconds for its end
    assert await getattr(lock, subject.method("verify"))()
    await getattr(lock, subject.method("release"))()

async def main():
    waiting = asyncio.create_task(wait())
    await asyncio.sleep(0.3)
    fork()
    await waiting
    os.wait()

asyncio.run(main())
"""


def forked(subject: Subject, body: str, made: Path) -> None:
    """Let another process fork while it waits for what we hold; it makes the file when it has done so."""
    holds = Subject(subject.variant, "sync", subject.database)
    holder = holds.lock("k", ttl=60)
    assert holder.acquire()
    with ThreadPoolExecutor(1) as pool:
        ends = pool.submit(process, subject, body.replace("FORKED", str(made)))
        assert until(lambda: (waiters(subject) == 1 and made.exists()) or ends.done(), 20)
        holder.release()
        _ = ends.result(30)
    assert subject.row("k")["owner"] is None
    if holds.variant == "sqlalchemy":
        holds.engine.dispose()


@pytest.mark.parametrize(
    ("subject", "leave"), [*((each, "sys.exit(0)") for each in PAIR), (FEW[1], "pass")], indirect=["subject"], ids=str
)
def test_a_fork_while_a_thread_waits(subject: Subject, leave: str, tmp_path: Path) -> None:
    """The child gives nothing back that its parent was granted, and does not get it either, however it goes on."""
    forked(subject, FORKS.replace("LEAVE", leave) + IN_A_THREAD, tmp_path / "forked")


IN_A_STATEMENT = """
from dblock.core.protocol.drive import drive
from dblock.core.protocol.sending import send
from dblock.core.statements.base import Reply, Statement

def fork(*_):
    os.fork()

store = lock._place.store()
sleeping = send(store.database, Statement("sleep", "SELECT SEVEN", Reply.ROWS), {}, store.database.now() + 5)
signal.signal(signal.SIGALRM, fork)
signal.setitimer(signal.ITIMER_REAL, 0.3)
try:
    _, rows = drive(sleeping)
except dblock.LockError:
    assert os.getpid() != parent
    os._exit(0)
assert os.getpid() == parent, "two heard the answer"
assert int(rows[0][0]) == 7
assert os.wait()[1] == 0
"""


@pytest.mark.parametrize("subject", [each for each in PAIR if each.database != "sqlite"], indirect=True, ids=str)
def test_a_fork_in_the_middle_of_a_statement(subject: Subject) -> None:
    """The answer is the parent's: the child neither hears it nor waits for another one."""
    seven = "7 FROM pg_sleep(1)" if subject.database == "postgresql" else "7 + SLEEP(1)"
    _ = process(subject, FORKS + IN_A_STATEMENT.replace("SEVEN", seven))


@pytest.mark.parametrize(
    "subject",
    [cell for cell in MATRIX if cell.driver in {"asyncpg", "aiomysql"} or (LONG and cell.driver == "psycopg")],
    indirect=True,
    ids=str,
)
def test_a_fork_while_a_task_waits(subject: Subject, tmp_path: Path) -> None:
    """Its event loop cancels the task in the child as well. (Drivers with threads keep a child from ending.)

    From Python 3.14 on the child's event loop catches SystemExit, and runs on: it `is not the running loop` any more.
    """
    leave = "sys.exit(0)" if sys.version_info < (3, 14) else "os._exit(0)"
    forked(subject, FORKS.replace("LEAVE", leave) + IN_A_TASK, tmp_path / "forked")


CHILDREN = """
import multiprocessing, os, time
from dblock.core import runtime

def child():
    assert subject.lock("own", ttl=600).acquire()
    time.sleep(0.5)
    assert [hold.tenure.key for hold in list(runtime.current.watchdog._holds)] == ["own"]

lock = subject.lock("k", ttl=2)
lock.acquire()
if METHOD == "os.fork":  # and leaves as a program does, with all its handlers
    if not (pid := os.fork()):
        child()
        sys.exit()
    status = os.waitpid(pid, 0)[1]
else:
    worker = multiprocessing.get_context("fork").Process(target=child)
    worker.start()
    worker.join()
    status = worker.exitcode
assert status == 0
ends = subject.row("k")["expires_at"]
while subject.row("k")["expires_at"] == ends:
    lock.check()
    time.sleep(0.01)  # it is renewed once more
assert lock.verify()
lock.release()
"""
FAMILIES = [*itertools.product((FEW[1], Subject("sqlalchemy", "sync", "mariadb")), ("fork", "os.fork"))]


@pytest.mark.parametrize(("subject", "method"), FAMILIES, indirect=["subject"], ids=str)
def test_a_child_releases_its_own_at_its_end(subject: Subject, method: str) -> None:
    """Of multiprocessing, or forked; it renews nothing of its parent's, whose watchdog goes on.

    What it can do with its parent's locks: `tests.servers.test_fork`.
    """
    _ = process(subject, f"METHOD = {method!r}\n{CHILDREN}")
    assert [subject.row(key)["owner"] for key in ("own", "k")] == [None, None]


@pytest.mark.parametrize("subject", PAIR, indirect=True, ids=str)
def test_the_parents_death_ends_the_lease_although_its_child_lives(subject: Subject) -> None:
    """The parent is killed, the child goes on: nobody renews, the next one holds after one ttl."""
    with Remote(subject) as holder:
        holder.do("(lock := subject.lock('k', ttl=0.6))")
        holder.do("lock.acquire()")
        child = holder.do("__import__('os').fork() or __import__('time').sleep(3) or __import__('os')._exit(0)")
        holder.kill()
        began = time.monotonic()
        lock = subject.lock("k")
        assert lock.acquire(timeout=2)
        lock.release()
        assert time.monotonic() - began < 0.6 + 1.0  # requirement 12
        os.kill(child, signal.SIGKILL)
