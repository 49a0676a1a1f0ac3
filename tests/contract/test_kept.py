"""A lock that was taken and left inside a transaction of the caller's is kept until that has ended, on both faces.

What goes for those of Django alone: `tests.django.test_release_auto`; for sessions: `tests.sqlalchemy.test_sessions`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
from django.db import connections, transaction
from sqlalchemy import text
from sqlalchemy.orm import Session

from dblock import LockNotHeld
from dblock import db_lock as django_lock
from sqlalchemy_dblock import db_lock as sqlalchemy_lock
from tests.conftest import ALIASES, own_engine, timed
from tests.contract.test_guard import Django, Rival, clients, notes, rival
from tests.contract.test_guarded import write
from tests.support.lab import cycle

__all__ = ["rival"]

pytestmark = pytest.mark.parametrize("database", ["sqlite", "postgresql"], indirect=True)
"""A server, and SQLite for the rules of its one writer."""


class Client:
    """Who has locks, and transactions that keep them: those of Django, or of a session."""

    def __init__(self, kind: str, database: str, _: object) -> None:
        self.alias, self.django = ALIASES[database], kind == "django"
        self.engine = own_engine(database)
        self.session = Session(self.engine)
        self.given: Any = Django(self.alias) if self.django else self.session

    def lock(self, key: str = "k", **options: Any) -> Any:
        if self.django:
            return django_lock(key, using=self.alias, **options)
        return sqlalchemy_lock(self.engine, key, **{"session": self.session, **options})

    @contextlib.contextmanager
    def transaction(self, *, undone: bool = False) -> Iterator[None]:
        """One that commits at its end, or is rolled back, because of an error as well."""
        with transaction.atomic(self.alias) if self.django else self.given.begin():
            self.given.execute(text("SELECT 1"))
            yield
            if undone and self.django:
                transaction.set_rollback(True, using=self.alias)
            elif undone:
                self.session.rollback()

    def savepoint(self) -> Any:
        return transaction.atomic(self.alias) if self.django else self.session.begin_nested()

    def close(self) -> None:
        self.session.close()
        connections[self.alias].close()


@pytest.fixture(params=["django", "session"])
def client(request: pytest.FixtureRequest, database: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Client]:
    """On SQLite a try beside a writer, of whom each test has one, takes all of its time."""
    timed(monkeypatch, answer_grace=0.3)
    for make in clients(database, Client):
        yield make(request.param)


@pytest.mark.parametrize("end", ["commit", "rollback", "error", "error under the lock"])
def test_it_is_kept_until_the_transaction_ends(database: str, client: Client, rival: Rival, end: str) -> None:
    """Others come in at once afterwards, not before; for this flow it is over when its block is left.

    The next transaction is another one: nothing of the first is left on the connection or in the thread.
    """
    lock, fences = client.lock(), list[Any]()
    for number in (1, 2):
        with contextlib.suppress(ZeroDivisionError), client.transaction(undone=end == "rollback"):
            with lock:
                write(client.given)
                assert lock.verify()
                fences.append(lock.fence)
                _ = 1 / (end != "error under the lock")
            assert lock.state is None
            with pytest.raises(LockNotHeld):
                lock.release()
            assert not rival.gets_in()
            _ = 1 / (end != "error")
        assert rival.gets_in()
        assert notes(database) == (number if end == "commit" else 0)
    assert fences[0] != fences[1]


@pytest.mark.parametrize("undone", [False, True])
def test_a_savepoint_is_no_end(client: Client, rival: Rival, undone: bool) -> None:
    """Neither its release nor its rollback, whether the lock was taken inside or outside."""
    with client.transaction():
        with contextlib.suppress(ZeroDivisionError), client.savepoint():
            cycle(client.lock())
            _ = 1 / (not undone)
        assert not rival.gets_in()
        with contextlib.suppress(ZeroDivisionError), client.savepoint():
            _ = 1 / (not undone)
        assert not rival.gets_in()
    assert rival.gets_in()


def test_the_same_transaction_enters_again(client: Client, rival: Rival) -> None:
    """The same tenure, with the same fence; entered again and held, it outlives this transaction and the next one."""
    lock, fences = client.lock(), list[Any]()
    with client.transaction():
        for _ in range(3):
            with lock:
                fences.append(lock.fence)
                assert lock.count == 1
                with client.lock() as inner:
                    assert (inner.fence, inner.count) == (lock.fence, 2)
            assert not rival.gets_in()
        lock.acquire()
    assert len(set(fences)) == 1
    with client.transaction():
        pass
    assert lock.verify()
    assert not rival.gets_in()
    lock.release()
    assert rival.gets_in()


def test_release_now(database: str, client: Client, rival: Rival) -> None:
    """Given back without regard to transactions; but what was left to one stays that, though it is entered again.

    So it is where the session is not told.
    """
    lock = client.lock(release="now")
    with client.transaction():
        cycle(lock)
        assert not lock.locked()
        assert rival.gets_in() or (client.django and database == "sqlite")  # beside a writer nobody gets any lock
        cycle(client.lock())
        for again in (lock, *([] if client.django else [client.lock(session=None)])):
            with again, again:
                pass
            assert not rival.gets_in()
            again.acquire()
            again.release()
            assert lock.locked()
            assert not rival.gets_in()
    assert rival.gets_in()


def test_several_locks_of_one_transaction(client: Client, rival: Rival) -> None:
    """All are given back at its end."""
    with client.transaction(undone=True):
        for key in "abc":
            cycle(client.lock(key))
        assert not any(map(rival.gets_in, "abc"))
    assert all(map(rival.gets_in, "abc"))
