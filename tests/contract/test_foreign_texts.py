"""What others wrote into the tables, or a driver says, is clean where it is raised or logged, on every database."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from dblock import LockError, LockLost, LockRevoked, LockStoreError, LockTimeout
from tests.contract.test_administration import Desk, desk
from tests.support.lab import LATER, there, until
from tests.support.subjects import Actor, Subject
from tests.support.texts import FRIENDLY, HOSTILE, TEXT, assert_clean

__all__ = ["desk"]

KEY = f"k {HOSTILE}"
WORDS = f"{FRIENDLY}: {HOSTILE}"
NAMES = ("host", "thread", "program", "celery_task_id", "label")


@pytest.fixture(autouse=True)
def _lines(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """Whatever is logged meanwhile is clean."""
    caplog.set_level(logging.DEBUG, "dblock")
    yield
    for record in caplog.get_records("call"):
        if record.name == "dblock":
            assert_clean(record.getMessage())


def logged(caplog: pytest.LogCaptureFixture, text: str) -> list[str]:
    return [line for record in caplog.records if text in (line := record.getMessage())]


def foreign(subject: Subject, table: str = "locks") -> None:
    """Let all that the rows say of their holders be a stranger's text."""
    text = TEXT if subject.database == "postgresql" else f"{TEXT}\0"  # which stores no NUL
    changed = ", ".join(f"{name} = :text" for name in NAMES)
    subject.run(f"UPDATE {table} SET {changed}", text=text)


def refused(kind: type[LockError], function: Callable[[], Any]) -> LockError:
    """The error, which is clean as all behind it of ours are."""
    with pytest.raises(kind) as caught:
        function()
    error: BaseException | None = caught.value
    while error is not None:
        for text in (str(error), *getattr(error, "__notes__", ())) if isinstance(error, LockError) else ():
            assert_clean(text)
        error = error.__cause__ or error.__context__
    return caught.value


def rename() -> None:
    """Call the flow that runs this so."""
    try:
        task = asyncio.current_task()
    except RuntimeError:
        task = None
    if task is None:
        threading.current_thread().name = TEXT
    else:
        task.set_name(TEXT)


def test_a_holder_that_keeps_others_waiting(
    protocol: Subject, actor: Actor, other: Actor, caplog: pytest.LogCaptureFixture
) -> None:
    """LockTimeout and the line about a slow wait name it, its label and the key; attributes keep what is stored."""
    for each in (actor, other):
        each.do(rename)
    holder = actor.hold(protocol.lock(KEY, label=TEXT))
    foreign(protocol)
    waiter = protocol.lock(KEY, timeout=0.6, slow_wait=0.05, label=TEXT)
    error = refused(LockTimeout, lambda: other.within(waiter))
    assert isinstance(error, LockTimeout)
    assert FRIENDLY in str(error)
    assert error.key == KEY
    assert error.holder is not None
    assert error.holder.label.startswith(TEXT)
    assert_clean(str(error.holder))
    assert FRIENDLY in logged(caplog, "has been waiting")[0]
    at_once = protocol.lock(KEY, timeout=0, label=TEXT)
    assert refused(LockTimeout, lambda: other.within(at_once)).key == KEY
    assert_clean(repr(at_once))
    actor.call(holder, "release")


def test_words_of_who_asks_for_it_back(
    protocol: Subject, actor: Actor, desk: Desk, caplog: pytest.LogCaptureFixture
) -> None:
    """In the log and in LockRevoked; `revoked` keeps them."""
    lock = actor.hold(protocol.lock(KEY, ttl=1.5))
    assert desk.revoke(KEY, actor.get(lock, "fence"), WORDS)
    assert until(lambda: actor.get(lock, "revoked") is not None, 10)
    assert FRIENDLY in str(refused(LockRevoked, lambda: actor.do(lock.check)))
    assert actor.get(lock, "revoked") == WORDS
    assert until(lambda: bool(logged(caplog, "was asked back")), 10)
    assert FRIENDLY in logged(caplog, "was asked back")[0]
    actor.call(lock, "release")


def test_words_of_who_frees_it(protocol: Subject, actor: Actor, desk: Desk, caplog: pytest.LogCaptureFixture) -> None:
    """In the log and in each LockLost; so is who has taken it over, by whatever names."""
    lock = actor.hold(protocol.lock(KEY, ttl=1.5))
    assert desk.force(KEY, actor.get(lock, "fence"), WORDS)
    foreign(protocol)
    taken = f"owner = 'stranger', fence = fence + 5, count = 1, expires_at = {LATER[protocol.database]}"
    protocol.run(f"UPDATE locks SET {taken}", seconds=3600)
    assert until(lambda: actor.get(lock, "state") == "lost", 10)
    error = refused(LockLost, lambda: actor.call(lock, "release"))
    assert isinstance(error, LockLost)
    assert str(error).count(FRIENDLY) >= 2, "by whom it was freed, and who has it"
    assert there(error.holder).identity.host.startswith(TEXT)
    assert FRIENDLY in logged(caplog, "lost the lease")[0]


@pytest.mark.parametrize("subject", [Subject("sqlalchemy", "sync", "postgresql")], indirect=True, ids=str)
def test_what_the_database_says(subject: Subject, actor: Actor) -> None:
    """An error of the server with a stranger's text in it, of a trigger for example."""
    body = f"RAISE EXCEPTION USING MESSAGE = '{WORDS}', DETAIL = '{WORDS}'"
    subject.run(f"CREATE FUNCTION rude() RETURNS trigger AS $$ BEGIN {body}; END $$ LANGUAGE plpgsql")
    subject.run("CREATE TRIGGER rude BEFORE INSERT ON locks FOR EACH ROW EXECUTE FUNCTION rude()")
    try:
        error = refused(LockStoreError, lambda: actor.call(subject.lock(KEY), "acquire"))
    finally:
        subject.run("DROP FUNCTION rude() CASCADE")
    assert FRIENDLY in str(error)
