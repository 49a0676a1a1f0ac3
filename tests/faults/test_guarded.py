"""Answers that are lost in a guarded block: an error of the lock is told of no commit."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from django.db import DatabaseError, connections
from sqlalchemy import text
from sqlalchemy.exc import DBAPIError

from dblock.core.errors import LockError, LockStoreError
from tests.conftest import run
from tests.faults.conftest import EACH_WIRE, NOISY, Wire, name_of
from tests.support.lab import before, cycle, ledger, there, until

pytestmark = NOISY


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

    def cut() -> None:
        setattr(wire.proxy, f"cut_{what}", 1)

    async def block(written: Callable[[], object]) -> None:
        django = wire.subject.variant == "django"
        async with wire.subject.within(lock.atomic() if django else lock.begin(wire.subject.engine)) as given:
            if django:
                with connections[lock.using].cursor() as cursor:
                    cursor.execute("INSERT INTO ledger VALUES (1)")
            else:
                await wire.subject.ask(given, "execute", text("INSERT INTO ledger VALUES (1)"))
            _ = written()

    wire.actor.do(lambda: block(bool))  # which asks for what later guards know
    ledger(database)
    for method, moment in (("guard", "guard"), ("__exit__", "release"), ("__aexit__", "release")):
        if moment == where and hasattr(lock, method):
            before(lock, method, cut)
    error = None
    try:
        wire.actor.do(lambda: block(cut if where == "commit" else bool))
    except (LockError, DatabaseError, DBAPIError, OSError) as raised:
        error = raised
    if where == "guard":
        assert isinstance(error, LockStoreError)
    elif where == "commit":
        assert not isinstance(there(error), LockError)
    else:
        assert error is None
    committed = where == "release" or (where, what) == ("commit", "replies")
    assert until(lambda: run(database, "SELECT count(*) FROM ledger") == [(committed,)])
    after = wire.direct.lock("k", timeout=5)  # released, or ended with its lease
    cycle(after)
