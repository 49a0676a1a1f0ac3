"""No driver's error leaves the lock as it is: each sort of statement, on each driver, in errors of each kind."""

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
# constraint; a statement without rows where some were to come; a parameter that is out of range. Or the session ends.
REFUSED: dict[str, str | dict[str, str]] = {
    "syntax": "SELEC 1",
    "data": {"postgresql": "SELECT 1 / 0", "sqlite": "SELECT json('{{')", "": "SELECT EXP(100000)"},
    "table": "SELECT * FROM nowhere",
    "column": "SELECT nothing FROM locks",
    "integrity": "INSERT INTO locks (lock_key) VALUES (NULL)",
    "no rows": "DELETE FROM locks WHERE lock_key = 'x'",
    "range": {"": "UPDATE locks SET pid = :fence WHERE lock_key = 'k'", "sqlite": "SELECT abs(:fence)"},
    "cut": {"postgresql": "SELECT pg_terminate_backend(pg_backend_pid())", "": "KILL CONNECTION_ID()"},
}
HUGE = -(2**63)


def statements(dialect: Dialect) -> list[Statement]:
    return [each for each in vars(dialect).values() if isinstance(each, Statement)]


def sorts(dialect: Dialect, name: str, sql: str) -> set[Statement]:
    """The same text as each sort of the statements: by what they do where something is locked, say."""
    return {replace(each, name=name, sql=sql, owners=()) for each in statements(dialect)}


def error_of(subject: Subject, actor: Actor, statement: Statement) -> BaseException | None:
    """What the store of that face raises for it, if anything."""
    store = subject.lock("k")._place.store()
    step = Execute(NO_STORE, statement, {"fence": HUGE} if ":fence" in statement.sql else {}, math.inf)
    run = store.aexecute if subject.face == "async" else store.execute
    return actor.start(lambda: run(step)).exception(60)


@pytest.mark.direct
def test_every_sort_of_statement(driver: Subject, actor: Actor) -> None:
    """A LockStoreError, with the driver's as its cause; and the next statement finds a connection that works."""
    lock = actor.hold(driver.lock("k", timeout=5))
    for kind, given in REFUSED.items():
        if (kind, driver.database) == ("cut", "sqlite"):  # a file is not disconnected
            continue
        text = given if isinstance(given, str) else given.get(driver.database) or given[""]
        for wrong in sorts(driver.protocol.dialect, f"wrong_{kind.replace(' ', '_')}", text):
            error = error_of(driver, actor, wrong)
            if error is None:  # some drivers see nothing wrong in it
                assert kind == "no rows", wrong
                continue
            assert isinstance(error, LockStoreError), (wrong, repr(error))
            if kind != "cut" or driver.database != "mysql":  # which tells some of the killed that nothing was done
                assert isinstance(error, StoreUnanswered) == (kind == "cut"), (wrong, repr(error))
            cause: Any = error.__cause__
            assert cause is not None, wrong
            assert not type(cause).__module__.startswith(("dblock", "sqlalchemy_dblock")), repr(cause)
        assert actor.call(lock, "verify") is True
    actor.call(lock, "release")
