"""A forked child owns nothing and touches nothing of its parent's."""

from __future__ import annotations

import os
from typing import Any

import pytest
from django.db import connections, transaction
from sqlalchemy import text
from sqlalchemy.orm import scoped_session, sessionmaker

import dblock
import sqlalchemy_dblock
from dblock.core.errors import LockLost, LockNotHeld
from dblock.core.observing.events import Event
from tests.conftest import INNODB, MYSQL_DRIVER, own_engine
from tests.support.lab import FACES, SYNC, cycle, in_child
from tests.support.subjects import Subject

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this system")


@pytest.mark.parametrize("subject", SYNC, ids=str, indirect=True)
def test_a_child_owns_nothing(subject: Subject) -> None:
    """Neither what its parent has acquired, nor a block that is open at the fork.

    It cannot release, re-enter or extend its parent's lock, and is a rival of its parent's. It can lock on its own, as
    in every preforking server: by objects and decorated functions that were made, and used, before the fork.
    """
    lock, block, own = subject.lock("k"), subject.lock("block"), subject.lock("own", timeout=0)
    function = own(lambda: "done")
    assert function() == "done"

    def child() -> Any:
        refused = []
        for attempt in (lock.acquire, lock.release, lock.extend, block.check):
            try:
                attempt()
            except (LockNotHeld, LockLost) as error:
                refused.append(str(error))
        rival = subject.lock("k").acquire(blocking=False)
        with own:
            pids = subject.row("own")["pid"], os.getpid()
            known = lock.state, lock.owner, block.state, block.fence
            return refused, known, rival, own.verify(), own.owner, pids, function()

    lock.acquire()
    before = subject.row("k")
    with block:
        refused, known, rival, verified, owner, (written, pid), done = in_child(child)
        assert block.verify()
    assert len(refused) == 4
    assert str(os.getpid()) in refused[0]
    assert "not held by this thread" in refused[3]
    assert known == (None, None, None, None)
    assert (rival, verified, done) == (False, True, "done")
    assert owner != lock.owner
    assert written == pid != os.getpid()
    assert subject.row("k") == before
    assert lock.verify()  # on the connection that the child inherited, and left alone
    lock.release()
    assert subject.row("k")["owner"] is None
    assert function() == "done"


def test_a_child_ends_its_parents_session(database: str) -> None:
    """A session that keeps a lock, or has kept one: the child's transactions in it keep the child's locks only."""
    # Two processes cannot speak over one encrypted connection, and MySQL itself encrypts when it is not told otherwise.
    if database in INNODB and MYSQL_DRIVER == "mysqldb":
        pytest.skip("a connection of the application's that a child collects says good-bye to the server")
    engine = own_engine(database, connect_args={"ssl_disabled": True} if database == "mysql" else {})
    session = scoped_session(sessionmaker(engine))
    lock = sqlalchemy_dblock.db_lock(engine, "k", session=session)

    def child() -> list[bool]:
        session.commit()
        engine.dispose(close=False)
        session.execute(text("SELECT 1"))
        with sqlalchemy_dblock.db_lock(engine, "child's own", session=session) as own:
            pass
        kept = own.locked()
        session.commit()
        return [kept, own.locked()]

    for _ in range(2):
        session.execute(text("SELECT 1"))
        cycle(lock)
        assert in_child(child) == [True, False]
        assert lock.locked(), "the child gave back its parent's lock"
        session.commit()
        assert not lock.locked()
        assert in_child(child) == [True, False]
    session.remove()


@pytest.mark.parametrize("database", ["postgresql", "mariadb"], indirect=True)
def test_a_child_ends_its_parents_atomic_block(database: str) -> None:
    """Django's: what that keeps is the parent's to give back."""

    lock = dblock.db_lock("k", using=database)
    with transaction.atomic(database):
        cycle(lock)
        in_child(lambda: connections[database].atomic_blocks[-1].__exit__(None, None, None))
        assert lock.locked()
    assert not lock.locked()


@pytest.mark.parametrize("subject", [each for each in FACES if each.face == "sync"], ids=str, indirect=True)
def test_who_observes_goes_on_to_in_a_child(subject: Subject) -> None:
    """What a server subscribes before it forks its workers is subscribed in them; what a child ends, goes on here."""
    told: list[Event] = []
    stop = dblock.observe(told.append)
    try:
        cycle(subject.lock("k"))
        assert [event.kind for event in told] == ["acquired", "released"]

        def observed() -> list[str]:
            told.clear()
            cycle(subject.lock("k"))
            stop()
            cycle(subject.lock("k"))
            return [str(event.kind) for event in told]

        assert in_child(observed) == ["acquired", "released"]
        cycle(subject.lock("k"))
        assert len(told) == 4
    finally:
        stop()
