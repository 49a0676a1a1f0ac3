"""A cluster of MariaDB servers each of which takes writes: what one commits, another applies a moment later."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from sqlalchemy import Connection, create_engine, text

from dblock import LockStoreError
from sqlalchemy_dblock import db_lock, metadata
from tests.support.lab import ROOT, until
from tests.support.servers import Galera, MissingServer, running

SECONDS = 2.0
STRANGERS = """
import fcntl, json, sys, time
from sqlalchemy import create_engine
from dblock.core import runtime
from sqlalchemy_dblock import db_lock

url, path, seconds = sys.argv[1:]
runtime.current.sockets().neighbourhood = "dblock_of_a_machine_of_its_own_"
engine, end = create_engine(url), time.monotonic() + float(seconds)
fences, mutex = [], open(path, "a")
while time.monotonic() < end:
    with db_lock(engine, "k", ttl=5, timeout=30) as lock:
        fcntl.flock(mutex, fcntl.LOCK_EX | fcntl.LOCK_NB)  # BlockingIOError if somebody else is in here
        time.sleep(0.002)
        fences.append(lock.fence)
        fcntl.flock(mutex, fcntl.LOCK_UN)
print(json.dumps(fences))
"""


@pytest.fixture(scope="module")
def nodes() -> Iterator[list[str]]:
    """The URLs of two."""
    try:
        _ = Galera.provider()
    except MissingServer as missing:
        pytest.skip(str(missing))
    with running(Galera) as first, running(lambda: Galera(first)) as second:
        first.create_database("locks")
        urls = [f"mysql+pymysql://root@127.0.0.1:{node.port}/locks" for node in (first, second)]
        engine = create_engine(urls[0])
        metadata.create_all(engine)
        engine.dispose()
        yield urls


def test_one_at_a_time_across_nodes(nodes: list[str], tmp_path: Path) -> None:
    """And nobody is told of a loss."""
    workers = [
        subprocess.Popen(
            [sys.executable, "-c", STRANGERS, url, str(tmp_path / "mutex"), str(SECONDS)],
            stdout=subprocess.PIPE,
            cwd=ROOT,
            text=True,
        )
        for url in (*nodes, *nodes)
    ]
    told = [json.loads(worker.communicate(timeout=50)[0] or "[]") for worker in workers]
    assert [worker.returncode for worker in workers] == [0] * len(workers)
    fences = [fence for each in told for fence in each]
    assert len(set(fences)) == len(fences)
    assert all(each == sorted(each) for each in told)


def test_a_tenure_is_seen_where_it_has_yet_to_arrive(nodes: list[str], caplog: pytest.LogCaptureFixture) -> None:
    """A waiter that is told of a tenure that another node has granted asks its own node, which is behind."""
    here, there = (create_engine(url, isolation_level="AUTOCOMMIT") for url in nodes)
    holder, heir = db_lock(here, "behind", ttl=30), db_lock(there, "behind", ttl=30, timeout=30)
    seen = list[bool]()

    def inherit() -> None:
        with heir:
            heir.verify()
            seen.append(True)

    waiter = threading.Thread(target=inherit)
    with there.connect() as stranger, here.connect() as observer:
        assert holder.acquire()
        waiter.start()
        assert until(lambda: "the database cannot notify this process" in caplog.text), "from another node"
        assert until(lambda: observer.execute(text("SELECT count(*) FROM lock_waiters")).scalar() == 1)
        _ = stranger.execute(text("FLUSH TABLES WITH READ LOCK"))  # nothing is applied there
        holder.release()
        waiter.join(0.5)
        assert waiter.is_alive()
        _ = stranger.execute(text("UNLOCK TABLES"))
        waiter.join(10)
    assert seen == [True]
    here.dispose()
    there.dispose()


def test_without_a_majority_nobody_gets_a_key(nodes: list[str]) -> None:
    """A try says why, and a waiter waits until the nodes are together again; a holder is told in time."""
    one, other = engines = [
        create_engine(url, isolation_level="AUTOCOMMIT", pool_reset_on_return=None) for url in nodes
    ]
    with one.connect() as first, other.connect() as second, ThreadPoolExecutor(1) as pool:

        def provide(connection: Connection, option: str) -> str:
            """Set an option of Galera; the text that sets it back, where it is shown."""
            name = option.partition("=")[0]
            found = connection.execute(text("SELECT @@wsrep_provider_options")).scalar()
            connection.execute(text(f"SET GLOBAL wsrep_provider_options = '{option}'"))
            return "".join(f"{name}={value}" for value in re.findall(rf"{name} = ([^;]*);", str(found)))

        def primary() -> list[bool]:
            """Whether the nodes believe to be of the majority."""
            status = text("SHOW STATUS LIKE 'wsrep_ready'")
            return [connection.execute(status).one()[1] == "ON" for connection in (first, second)]

        before = provide(first, "evs.suspect_timeout=PT0.7S"), provide(second, "evs.suspect_timeout=PT0.7S")
        held = db_lock(one, "held", ttl=2)
        assert held.acquire()
        with db_lock(other, "k"):  # which opens the connection that the waiter will have
            pass
        _ = provide(second, "gmcast.isolate=1")
        assert until(lambda: primary() == [False, False], 15), "each has one vote of two"
        waiter = pool.submit(db_lock(other, "k", timeout=40).acquire)
        with pytest.raises(LockStoreError, match="WSREP has not yet prepared node"):
            db_lock(one, "k").acquire(blocking=False)
        assert until(lambda: held.state == "lost", 5)
        assert not waiter.done()
        _ = provide(second, "gmcast.isolate=0")
        assert waiter.result(40)
        assert until(lambda: all(primary()), 15)
        for connection, setting in zip((first, second), before, strict=True):
            _ = provide(connection, setting)
    for engine in engines:
        engine.dispose()
