"""A cluster of MariaDB servers each of which takes writes: what one commits, another applies a moment later."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from sqlalchemy import text

from dblock import LockStoreError
from sqlalchemy_dblock import db_lock
from tests.conftest import own_engine
from tests.support.failover import make_tables
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
def nodes() -> Iterator[list[Galera]]:
    """Two of them."""
    try:
        _ = Galera.provider()
    except MissingServer as missing:
        pytest.skip(str(missing))
    with running(Galera) as first, running(lambda: Galera(first)) as second:
        first.create_database("locks")
        make_tables(address(first))
        yield [first, second]


def address(node: Galera) -> str:
    return f"mysql+pymysql://root@127.0.0.1:{node.port}/locks"


def test_one_at_a_time_across_nodes(nodes: list[Galera], tmp_path: Path) -> None:
    """And nobody is told of a loss."""
    workers = [
        subprocess.Popen(
            [sys.executable, "-c", STRANGERS, address(node), str(tmp_path / "mutex"), str(SECONDS)],
            stdout=subprocess.PIPE,
            cwd=ROOT,
            text=True,
        )
        for node in (*nodes, *nodes)
    ]
    told = [json.loads(worker.communicate(timeout=50)[0] or "[]") for worker in workers]
    assert [worker.returncode for worker in workers] == [0] * len(workers)
    fences = [fence for each in told for fence in each]
    assert len(set(fences)) == len(fences)
    assert all(each == sorted(each) for each in told)


def test_a_tenure_is_seen_where_it_has_yet_to_arrive(nodes: list[Galera], caplog: pytest.LogCaptureFixture) -> None:
    """A waiter that is told of a tenure that another node has granted asks its own node, which is behind."""
    here, there = (own_engine(address(node), isolation_level="AUTOCOMMIT") for node in nodes)
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


def test_without_a_majority_nobody_gets_a_key(nodes: list[Galera]) -> None:
    """A try says why, and a waiter waits until the nodes are together again; a holder is told in time."""
    one, other = (own_engine(address(node)) for node in nodes)

    def believe() -> set[str]:
        """What the nodes say of themselves: whether they are of the majority."""
        return {node.status("wsrep_ready") for node in nodes}

    for node in nodes:
        node.provide("evs.suspect_timeout=PT0.7S")
    held = db_lock(one, "held", ttl=2)
    assert held.acquire()
    with db_lock(other, "k"):  # which opens the connection that the waiter will have
        pass
    nodes[1].provide("gmcast.isolate=1")
    assert until(lambda: believe() == {"OFF"}, 15), "each has one vote of two"
    with ThreadPoolExecutor(1) as pool:
        waiter = pool.submit(db_lock(other, "k", timeout=40).acquire)
        with pytest.raises(LockStoreError, match="WSREP has not yet prepared node"):
            db_lock(one, "k").acquire(blocking=False)
        assert until(lambda: held.state == "lost", 5)
        assert not waiter.done()
        nodes[1].provide("gmcast.isolate=0")
        assert waiter.result(40)
    assert until(lambda: believe() == {"ON"}, 15)
    for node in nodes:
        node.provide("evs.suspect_timeout=PT5S")  # as by default
