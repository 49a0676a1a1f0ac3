"""A cluster of MariaDB servers each of which takes writes: what one commits, another applies a moment later."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from sqlalchemy import create_engine, text

from sqlalchemy_dblock import db_lock, metadata
from tests.support.lab import ROOT, until
from tests.support.servers import Galera, MissingServer, running

SECONDS = 4.0
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
