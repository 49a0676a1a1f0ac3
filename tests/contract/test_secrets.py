"""Owner tokens are in no log at any level, no list of queries, no error and no report of one: with one anybody
can attach to the lock."""

from __future__ import annotations

import logging
import re
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import Any

import pytest
from django.db import connections

from dblock.core.acquire.request import Request
from dblock.core.errors import InvalidToken, LockError, LockStoreError, LockTimeout
from dblock.drivers.mariadb import OFTEN
from tests.conftest import DATABASES, run
from tests.contract.test_guard import Client, client, on
from tests.support.lab import without
from tests.support.subjects import Actor, Subject

__all__ = ["client"]

STEAL = "UPDATE locks SET owner = 'stranger', fence = fence + 5 WHERE lock_key = 'k'"


@pytest.fixture
def tokens(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The secret part of every owner token that is made."""
    made: list[str] = []
    draw = Request.new_owner

    def new_owner(self: Request) -> str:
        owner = draw(self)
        made.append(owner.removeprefix(self.flow))
        return owner

    monkeypatch.setattr(Request, "new_owner", new_owner)
    return made


def loudly(talker: Client) -> Client:
    """Let all that is under this client log all that it can."""
    if talker.django:

        def debug() -> None:
            connections[talker.alias].ensure_connection()
            connections[talker.alias].force_debug_cursor = True

        talker._django(debug)
    else:
        engine = getattr(talker.engine, "sync_engine", talker.engine)
        engine.echo = "debug"
        assert not engine.hide_parameters
    return talker


def queries(talker: Client) -> str:
    """What Django's connection remembers of its statements."""
    return str(talker._django(lambda: connections[talker.alias].queries)) if talker.django else ""


def said(error: BaseException | None) -> list[str]:
    """All that an error and those behind it have to say."""
    texts = ["".join(traceback.format_exception(error))] if error else []
    while error is not None:
        texts += [str(error), repr(error), str(vars(error))]
        error = error.__cause__ or error.__context__
    return texts


@on(DATABASES)
def test_no_token_is_told(
    database: str,
    client: Callable[..., Client],
    kind: str,
    caplog: pytest.LogCaptureFixture,
    tokens: list[str],
) -> None:
    """The log at DEBUG, while locks are taken, entered again, waited for, guarded, handed over, lost, left."""
    logs = ("", "django.db.backends", "django.db.backends.schema", "aiosqlite", "psycopg", "asyncio", "dblock")
    for name in logs:
        caplog.set_level(logging.DEBUG, name)
    holder, other = loudly(client(kind)), loudly(client(kind))
    lock, theirs = holder.lock("k", ttl=30), other.lock("k", ttl=30, timeout=60)
    told: list[str] = []

    def refused(function: Callable[[], Any]) -> None:
        with pytest.raises((LockError, ValueError)) as caught:
            function()
        told.extend(said(caught.value))

    holder.call(lock, "acquire")
    holder.call(lock, "acquire")
    holder.call(lock, "extend")
    holder.call(lock, "verify")
    holder.begin(read=False)
    holder.guard(lock)
    holder.write()
    holder.end("commit")
    assert other.call(theirs, "acquire", timeout=0.2) is False
    refused(lambda: other.call(theirs, "release"))
    waiting = other.actor.begin(theirs, "acquire")
    while not run(database, "SELECT 1 FROM lock_waiters"):
        assert not waiting.done()
    holder.call(lock, "release")
    token = holder.call(lock, "detach")
    refused(lambda: holder.attach(token[:-8]))
    attached = holder.attach(token)
    told += [repr(lock), repr(attached)]
    holder.call(attached, "release")
    assert waiting.result(60)
    other.begin(read=False)
    run_beside = database != "sqlite"
    if run_beside:
        run(database, STEAL)
        refused(lambda: other.guard(theirs))
    other.end("rollback")
    if not run_beside:
        run(database, STEAL)
    refused(lambda: other.call(theirs, "verify"))
    refused(lambda: other.call(theirs, "release"))
    refused(lambda: holder.attach(token))
    told += [queries(holder), queries(other)]
    for record in caplog.records:
        told += [record.getMessage(), str(vars(record)), *said(record.exc_info[1] if record.exc_info else None)]
    assert len(tokens) >= 2
    assert any(re.search(r"locks", text) for text in told)
    for text in told:
        assert not any(made in text for made in tokens), text


def reported(value: object, depth: int = 8) -> Iterator[str]:
    """A local as Sentry's SDK shows it (`sentry_sdk.serializer`): containers by what is in them, all else by `repr`."""
    if isinstance(value, Mapping) and depth:
        for name, each in list(value.items()):
            yield str(name)
            yield from reported(each, depth - 1)
    elif (
        isinstance(value, Sequence | AbstractSet)
        and not isinstance(value, str | bytes | bytearray | memoryview)
        and depth
    ):
        for each in value:
            yield from reported(each, depth - 1)
    else:
        yield repr(value)


def frames(error: BaseException | None) -> Iterator[tuple[str, str, str]]:
    """What a report shows of an error and of those behind it: function, local, and text; without the tests' frames."""
    while error is not None:
        for frame, _ in traceback.walk_tb(error.__traceback__):
            if not str(frame.f_globals["__name__"]).startswith("tests."):
                for name, value in list(frame.f_locals.items()):
                    for text in reported(value):
                        yield frame.f_code.co_qualname, name, text
        error = error.__cause__ or error.__context__


def test_no_report_of_an_error_shows_a_token(driver: Subject, actor: Actor, other: Actor, tokens: list[str]) -> None:
    """Whatever the database refuses: the locals of all frames, the driver's among them, are without owner tokens."""
    shown = list[tuple[str, str, str]]()

    def refused(function: Callable[[], Any], kind: type[BaseException] = LockStoreError) -> None:
        with pytest.raises(kind) as caught:
            function()
        shown.extend(frames(caught.value))

    held = actor.hold(driver.lock("held", ttl=30))
    for _ in range(OFTEN):  # MariaDB is then sent the values alone
        actor.call(held, "extend")
    refused(lambda: other.within(driver.lock("held", timeout=0)), LockTimeout)
    detached = actor.hold(driver.lock("detached", ttl=30))
    token = actor.call(detached, "detach")
    with without(driver.database, "locks"):
        refused(lambda: actor.call(held, "acquire"))
        refused(lambda: actor.call(held, "extend"))
        refused(lambda: actor.call(held, "verify"))
        refused(lambda: actor.call(held, "detach"))
        refused(lambda: actor.do(lambda: driver.api("attach", token)))
        refused(lambda: other.call(driver.lock("new"), "acquire"))
        refused(lambda: actor.call(held, "release"))
    refused(lambda: other.do(lambda: driver.api("attach", token[:-8])), InvalidToken)
    with without(driver.database, "lock_waiters"):
        refused(lambda: other.call(driver.lock("held", timeout=30), "acquire"), LockError)
    assert len(tokens) >= 3
    names = {function for function, _, _ in shown}
    assert {"BaseStore.execute", "send"} <= names
    secrets = [*tokens, token[20:]]
    assert not [each for each in shown if any(secret in each[2] for secret in secrets)]
