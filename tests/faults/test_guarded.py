"""Answers that are lost, and holders that sleep, in a guarded block: an error of the lock is told of no commit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from django.db import DatabaseError, connections
from sqlalchemy import text
from sqlalchemy.exc import DBAPIError

from dblock.core.errors import LockError, LockStoreError
from tests.conftest import run
from tests.faults.conftest import EACH_WIRE, Wire, name_of
from tests.support.lab import PAIR, Remote, RemoteError, ledger, until
from tests.support.remote import before
from tests.support.subjects import Subject

pytestmark = [
    pytest.mark.filterwarnings("ignore::ResourceWarning"),  # of drivers whose connections were cut
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]
TTL = 0.4


@pytest.mark.parametrize("what", ["replies", "requests"])
@pytest.mark.parametrize("where", ["guard", "commit", "release"])
@pytest.mark.parametrize("wire", EACH_WIRE, indirect=True, ids=name_of)
def test_a_lost_answer(wire: Wire, where: str, what: str) -> None:
    """Of the guard: an error of the lock, and nothing was committed; of COMMIT: its own, which says nothing of that.

    Whatever the release meets is no error once the transaction has been committed.
    """
    database = wire.subject.database
    ledger(database)
    lock = wire.subject.lock("k", ttl=1.0)

    armed = list[int]()

    def cut() -> None:
        if armed:
            setattr(wire.proxy, f"cut_{what}", 1)

    def body_of(given: Any) -> None:
        if where == "commit":
            cut()

    for method, moment in (("guard", "guard"), ("__exit__", "release"), ("__aexit__", "release")):
        if moment == where and hasattr(lock, method):
            before(lock, method, cut)

    def block() -> Any:
        if wire.subject.variant == "django":
            with lock.atomic(), connections[lock.using].cursor() as cursor:
                cursor.execute("INSERT INTO ledger VALUES (1)")
                body_of(cursor)
            return None
        if wire.subject.face == "sync":
            with lock.begin(wire.subject.engine) as connection:
                connection.execute(text("INSERT INTO ledger VALUES (1)"))
                body_of(connection)
            return None

        async def ablock() -> None:
            async with lock.begin(wire.subject.engine) as connection:
                await connection.execute(text("INSERT INTO ledger VALUES (1)"))
                body_of(connection)

        return ablock()

    wire.actor.do(block)  # which asks for what later guards know
    ledger(database)
    armed.append(1)
    error = None
    try:
        wire.actor.do(block)
    except (LockError, DatabaseError, DBAPIError, OSError) as raised:
        error = raised
    if where == "guard":
        assert isinstance(error, LockStoreError)
    elif where == "commit":
        assert error is not None
        assert not isinstance(error, LockError)
    else:
        assert error is None
    [(count,)] = run(database, "SELECT count(*) FROM ledger")
    if where == "commit" and what == "replies":
        assert until(lambda: run(database, "SELECT count(*) FROM ledger") == [(1,)])
    else:
        assert count == (1 if where == "release" else 0)
    after = wire.direct.lock("k", timeout=5)  # released, or ended with its lease
    with after:
        pass


@pytest.mark.parametrize("moment", ["before the guard", "in the body", "after the commit"])
@pytest.mark.parametrize("subject", [each for each in PAIR if each.database != "sqlite"], indirect=True, ids=str)
def test_a_holder_that_sleeps(subject: Subject, moment: str) -> None:
    """Stopped for longer than its lease: LockLost and nothing committed, or committed and no error at all."""
    with Remote(subject) as process:
        process.do(f"(lock := subject.lock('k', ttl={TTL}))")
        process.send(f"guarded_block(subject, lock, {moment!r})")
        stat = Path(f"/proc/{process.process.pid}/stat")
        assert until(lambda: stat.read_text().rpartition(")")[2].split()[0] == "T")
        theirs = subject.lock("k", ttl=30)
        taken = theirs.acquire(timeout=3 * TTL + 1)
        assert taken is (moment != "in the body")
        committed = {"before the guard": 0, "in the body": 1, "after the commit": 1}[moment]
        assert len(run(subject.database, "SELECT n FROM ledger")) == (committed if taken else 0)
        process.thaw()
        if moment == "before the guard":
            with pytest.raises(RemoteError, match="LockLost"):
                process.answer()
        else:
            assert process.answer() == "done"
        assert len(run(subject.database, "SELECT n FROM ledger")) == committed
        if not taken:
            assert theirs.acquire(timeout=3)
        theirs.release()
