"""Owner tokens are in no log at any level, no list of queries and no error: whoever has one can attach to the lock."""

from __future__ import annotations

import logging
import re
import traceback
from collections.abc import Callable
from typing import Any

import pytest
from django.db import connections

from dblock.core.acquire.local_queue import Request
from dblock.core.errors import LockError
from tests.conftest import run
from tests.contract.test_guard import KINDS, Client, client

__all__ = ["client"]

STEAL = "UPDATE locks SET owner = 'stranger', fence = fence + 5 WHERE lock_key = 'k'"


@pytest.fixture
def tokens(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The secret part of every owner token that is made."""
    made: list[str] = []
    draw = Request.new_owner

    def new_owner(self: Request) -> str:
        made.append(draw(self).removeprefix(self.flow))
        return self.flow + made[-1]

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


@pytest.mark.parametrize("kind", KINDS)
def test_no_token_is_told(
    database: str,
    client: Callable[..., Client],
    kind: str,
    caplog: pytest.LogCaptureFixture,
    tokens: list[str],
) -> None:
    """Whoever listens at DEBUG while locks are taken, entered again, waited for, guarded, handed over, lost, left."""
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
    assert other.call(theirs, "acquire", timeout=0.5) is False
    refused(lambda: other.call(theirs, "release"))
    waiting = other.actor.start(getattr(theirs, other.subject.method("acquire")))
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
