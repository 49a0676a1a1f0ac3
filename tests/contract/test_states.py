"""The state of a key: the last word of its holder, and nobody's after the next one has entered it."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pymysql
import pytest
from sqlalchemy import make_url

from dblock.celery import states
from dblock.core.errors import LockStoreError, StoreUnanswered
from dblock.core.lock.base_store import BaseStore
from dblock.core.protocol.drive import drive
from dblock.core.protocol.steps import Execute, Rows
from sqlalchemy_dblock import db_lock
from tests.conftest import INNODB, own_engine, run, url
from tests.support.lab import fail, there
from tests.support.subjects import Subject

pytestmark = pytest.mark.usefixtures("sync_protocol")


class States:
    """The functions of `states`, over one subject's database."""

    def __init__(self, subject: Subject) -> None:
        self.store = subject.lock("k")._place.store()
        self.database = self.store.database
        self.number = 0

    def enter(self, fence: int, key: str = "k") -> str | None:
        state, number = drive(states.enter(self.database, key, fence)) or (None, 0)
        self.number = max(self.number, number)
        return state

    def write(self, fence: int, state: str, key: str = "k", number: int | None = None) -> bool:
        if number is None:
            self.number = number = self.number + 1
        return drive(states.write(self.database, key, fence, number, state))


@pytest.fixture
def over(subject: Subject) -> Iterator[States]:
    """Where there is no table yet."""
    run(subject.database, "DROP TABLE IF EXISTS lock_states")
    yield States(subject)
    run(subject.database, "DROP TABLE IF EXISTS lock_states")


def test_the_next_one_reads_what_the_last_one_wrote(over: States) -> None:
    """Word by word, however long it is; the table is made when somebody needs it."""
    assert over.enter(7) == ""
    text = '{"a": "%s:x \\" é😀"}' * 3000
    assert over.write(7, text)
    assert over.write(7, text), "again"
    assert over.enter(8) == text
    assert over.write(8, "")
    assert over.enter(9) == ""
    assert over.enter(9) == "", "again"


def test_the_table_is_made_as_often_as_it_is_missing(over: States, subject: Subject) -> None:
    """On one connection, and by a statement without parameters."""
    for _ in range(8):
        assert over.enter(7) == ""
        run(subject.database, "DROP TABLE lock_states")


def test_an_earlier_tenure_writes_nothing_once_a_later_one_has_entered(over: States) -> None:
    """Nor does it enter any more; it may have been frozen for as long as it likes."""
    assert over.enter(7) == ""
    assert over.write(7, "seven")
    assert over.enter(2**62) == "seven"
    assert not over.write(7, "late")
    assert over.enter(7) is None
    assert over.write(2**62, "last")
    assert not over.write(7, "late")
    assert over.enter(2**62) == "last"


def test_a_write_that_was_given_up_and_comes_late_changes_nothing(over: States) -> None:
    """Its tenure goes on, and has written since: that is the last word."""
    assert over.enter(7) == ""
    assert over.write(7, "second", number=2)
    assert not over.write(7, "first", number=1)
    assert over.write(7, "second", number=2), "the same once more"
    assert over.enter(8) == "second"


def test_nobody_writes_without_entering(over: States) -> None:
    """A fence that is not the last one to enter, be it higher."""
    assert over.enter(7) == ""
    assert not over.write(8, "early")
    assert over.enter(8) == ""


def test_each_key_has_its_own(over: States) -> None:
    """Code point by code point."""
    assert over.enter(7) == ""
    assert over.write(7, "k")
    for key in ("K", "k "):
        assert over.enter(5, key) == ""
        assert over.write(5, "other", key)
    assert over.enter(8) == "k"


def test_of_many_who_enter_at_once_the_last_fence_writes(over: States) -> None:
    """And what the others have written before is read by it."""
    assert over.enter(1) == ""
    start = threading.Barrier(8)

    def one(fence: int) -> bool:
        start.wait()
        mine = over.enter(fence)
        return mine is not None and over.write(fence, f"{mine} {fence}")

    with ThreadPoolExecutor(8) as pool:
        wrote = list(pool.map(one, range(2, 10)))
    assert there(over.enter(10)).split() == [str(fence) for fence in range(2, 10) if wrote[fence - 2]]
    assert wrote[-1]


def test_a_lost_answer_is_no_refusal(over: States, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was sent twice is written, and answered as if it had been sent once."""
    lost = list[str]()
    real = BaseStore.execute

    def execute(store: BaseStore, step: Execute) -> Rows:
        rows = real(store, step)
        if step.statement.name not in lost:
            lost.append(step.statement.name)
            raise StoreUnanswered("lost")
        return rows

    assert over.enter(6) == ""
    monkeypatch.setattr(BaseStore, "execute", execute)
    assert over.enter(7) == ""
    assert over.write(7, "seven")
    assert lost == ["enter_state", "read_state", "write_state"]
    monkeypatch.setattr(BaseStore, "execute", real)
    assert over.enter(8) == "seven"


def test_a_driver_that_counts_what_has_changed(subject: Subject, over: States) -> None:
    """And not what was found: the same state written again is no refusal."""
    if subject.database not in INNODB:
        pytest.skip("these count what was found")
    arguments = make_url(url(subject.database)).translate_connect_args(username="user")
    engine = own_engine("mysql+pymysql://", creator=lambda: pymysql.connect(**arguments))
    store = db_lock(engine, "k")._place.store()
    assert drive(states.enter(store.database, "k", 7)) == ("", 0)
    for number in (1, 1, 2):
        assert drive(states.write(store.database, "k", 7, number, "same"))


def test_who_may_not_make_the_table_is_told_so(over: States, monkeypatch: pytest.MonkeyPatch) -> None:
    """And not that there is none, which is what made it try."""
    fail(monkeypatch, LockStoreError, "make_states")
    with pytest.raises(LockStoreError, match="out of order"):
        over.enter(7)
