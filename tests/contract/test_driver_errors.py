"""No driver's error leaves the lock as it is: every statement, on every driver, driven into errors of every kind."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest

from dblock.core.errors import LockStoreError, StoreUnanswered
from dblock.core.protocol.steps import Execute
from dblock.core.statements.base import Statement
from dblock.core.statements.dialect import Dialect
from tests.support.steps import NO_STORE
from tests.support.subjects import Actor, Subject

# What the server, or the driver by itself, refuses: grammar, arithmetic, a missing table and column, a broken
# constraint; a statement without rows where some were to come; a parameter that is out of range.
REFUSED: dict[str, str | dict[str, str]] = {
    "syntax": "SELEC 1",
    "data": {"postgresql": "SELECT 1 / 0", "sqlite": "SELECT json('{{')", "": "SELECT EXP(100000)"},
    "table": "SELECT * FROM nowhere",
    "column": "SELECT nothing FROM locks",
    "integrity": "INSERT INTO locks (lock_key) VALUES (NULL)",
    "no rows": "DELETE FROM locks WHERE lock_key = 'x'",
    "range": {"": "UPDATE locks SET pid = :fence WHERE lock_key = 'k'", "sqlite": "SELECT abs(:fence)"},
}
CUT = {"postgresql": "SELECT pg_terminate_backend(pg_backend_pid())", "": "KILL CONNECTION_ID()"}
HUGE = -(2**63)


def statements(dialect: Dialect) -> list[Statement]:
    return [each for each in vars(dialect).values() if isinstance(each, Statement)]


def sql(given: str | dict[str, str], database: str) -> str:
    return given if isinstance(given, str) else given.get(database) or given[""]


def outcome(subject: Subject, actor: Actor, statement: Statement) -> BaseException | None:
    """What comes of it, through the store of that face."""
    store = subject.lock("k")._place.store()
    step = Execute(NO_STORE, statement, {"fence": HUGE} if ":fence" in statement.sql else {}, math.inf)
    run = store.aexecute if subject.face == "async" else store.execute
    try:
        actor.do(lambda: run(step))
    except BaseException as error:
        return error
    return None


@pytest.mark.direct
def test_every_statement(driver: Subject, actor: Actor) -> None:
    """A LockStoreError, with the driver's as its cause; and the next statement finds a connection that works."""
    for kind in REFUSED if driver.database == "sqlite" else (*REFUSED, "cut"):  # a file is not disconnected
        every_statement(driver, actor, kind)


def every_statement(driver: Subject, actor: Actor, kind: str) -> None:
    lock = driver.lock("k", timeout=5)
    actor.call(lock, "acquire")
    text = sql(CUT if kind == "cut" else REFUSED[kind], driver.database)
    for statement in statements(driver.protocol.dialect):
        wrong = replace(statement, name=f"wrong_{statement.name}", sql=text)  # prepared under a name of its own
        error = outcome(driver, actor, wrong)
        if error is None:  # some drivers see nothing wrong in it
            assert kind == "no rows", (statement.name, kind)
            continue
        assert isinstance(error, LockStoreError), (statement.name, kind, repr(error))
        if kind != "cut" or driver.database != "mysql":  # which tells some of the killed that nothing was done
            assert isinstance(error, StoreUnanswered) == (kind == "cut"), (statement.name, kind, repr(error))
        cause: Any = error.__cause__
        assert cause is not None, statement.name
        assert not type(cause).__module__.startswith(("dblock", "sqlalchemy_dblock")), repr(cause)
    assert actor.call(lock, "verify") is True
    actor.call(lock, "release")
