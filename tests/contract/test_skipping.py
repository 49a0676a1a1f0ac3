"""Decorated calls that are left out while the key is busy: what a scheduled job on many machines needs."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from typing import Any

import pytest
from sqlalchemy import Engine

from dblock import LockTimeout
from dblock.celery import locked_task
from dblock.core.deliveries import deliveries
from sqlalchemy_dblock import attach, db_lock
from tests.support.subjects import Actor, Subject


def job(actor: Actor, body: Callable[[str], object], **options: Any) -> Callable[[str], Any]:
    """A decorated function that runs `body`, to be called in that flow."""
    lock = actor.subject.lock("report:{name}", timeout=0.2, on_busy="skip", **options)
    return actor.decorate(lock, lambda name: body(name))  # noqa: PLW0108 - the key names its argument


def test_a_call_is_skipped_while_the_key_is_busy(
    face: Subject, actor: Actor, other: Actor, caplog: pytest.LogCaptureFixture
) -> None:
    """Its body does not run, `otherwise` is returned, and the log says who holds the key; another key is not busy."""
    ran: list[str] = []
    build, plain = job(other, ran.append, otherwise="skipped"), job(other, ran.append)
    holder = actor.hold(face.lock("report:daily", label="the first"))
    with caplog.at_level(logging.INFO, "dblock"):
        assert build("daily") == "skipped"
        assert plain("daily") is None
        assert deliveries.flush(5)
    told = [record.getMessage() for record in caplog.records if record.levelno == logging.INFO]
    assert len(told) == 2
    named = re.compile(r"skipped a call of tests\.\S+: could not acquire 'report:daily' .* \"the first\", for ")
    assert all(named.match(line) and "timeout=" not in line for line in told)
    assert ran == []
    assert build("weekly") is None
    actor.call(holder, "release")
    assert build("daily") is None
    assert ran == ["weekly", "daily"]
    assert not actor.call(holder, "locked")


def test_a_time_out_of_the_body_is_its_own(either: Subject, actor: Actor) -> None:
    """It is raised, and the lock is released."""

    def body(name: str) -> None:
        raise LockTimeout("of another lock", key=name)

    with pytest.raises(LockTimeout, match="of another lock"):
        job(actor, body)("daily")
    assert not actor.call(either.lock("report:daily"), "locked")


def test_a_flow_that_holds_the_key_is_not_skipped(either: Subject, actor: Actor) -> None:
    """It enters once more; with reentrant=False it is busy as anybody else's."""
    ran: list[str] = []
    holder = actor.hold(either.lock("report:daily"))
    job(actor, ran.append)("daily")
    assert ran == ["daily"]
    assert job(actor, ran.append, reentrant=False, otherwise=0)("daily") == 0
    assert ran == ["daily"]
    assert actor.get(holder, "count") == 1
    actor.call(holder, "release")


def test_where_nothing_can_be_skipped(either: Subject, actor: Actor, other: Actor) -> None:
    """A `with` says so at once, also while the key is free; `acquire` returns False, as ever."""
    lock = either.lock("k", on_busy="skip")
    with pytest.raises(TypeError, match="cannot be skipped"):
        actor.within(lock, lambda: pytest.fail("the body ran"))
    assert not actor.call(lock, "locked")
    assert actor.call(lock, "acquire")
    assert other.call(either.lock("k", on_busy="skip"), "acquire", blocking=False) is False
    actor.call(lock, "release")


def test_elsewhere_it_is_refused(engine: Engine) -> None:
    """An attachment enters a tenure that exists; a locked task has a result of its own. Nothing is held afterwards."""
    lock = db_lock(engine, "k")
    lock.acquire()
    token = lock.detach()
    with pytest.raises(TypeError, match="on_busy is for decorators"):
        attach(engine, token, on_busy="skip")
    attach(engine, token).release()
    assert not lock.locked()
    make: Any = locked_task
    with pytest.raises(TypeError, match="no option 'otherwise'"):
        make("k", on_busy="skip", otherwise=0)
