"""The watchdog on real servers: what strangers do to rows must not cost others their leases."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from sqlalchemy import text

from sqlalchemy_dblock import db_lock
from tests.conftest import SERVERS, observer, own_engine, url
from tests.support.lab import renewed, there, until
from tests.support.proxy import Proxy
from tests.support.servers import free_port
from tests.support.subjects import Subject


@pytest.mark.parametrize("database", SERVERS, indirect=True)
def test_a_row_locked_by_a_stranger(database: str) -> None:
    """Only its own lease is late; all others are renewed, and it too when the stranger has gone."""
    engine = own_engine(database)
    locks = [db_lock(engine, f"k{number}", ttl=3) for number in range(20)]
    for lock in locks:
        assert lock.acquire()
    with observer(database).begin() as stranger:
        stranger.execute(text("SELECT * FROM locks WHERE lock_key = 'k7' FOR UPDATE"))
        assert until(lambda: locks[7].state == "at_risk", 2.5)
        assert [lock.state for lock in locks] == ["held"] * 7 + ["at_risk"] + ["held"] * 12
    assert until(lambda: {lock.state for lock in locks} == {"held"})
    assert renewed(Subject("sqlalchemy", "sync", database))
    for lock in locks:
        assert lock.verify()
        lock.release()


def test_a_database_that_does_not_answer_delays_no_exit(postgresql: object) -> None:
    """A process that ends while its packets are swallowed ends all the same."""
    wire = free_port()
    with Proxy(wire, int(os.environ["DBLOCK_TEST_POSTGRESQL_PORT"])) as proxy:
        place = url("postgresql").replace(os.environ["DBLOCK_TEST_POSTGRESQL_PORT"], str(wire))
        code = (
            "import sys; from sqlalchemy import create_engine; from sqlalchemy_dblock import db_lock\n"
            f"db_lock(create_engine({place!r}), 'k').acquire(); print('held', flush=True); sys.stdin.read()"
        )
        command = [sys.executable, "-c", code]
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert there(process.stdout).readline() == "held\n"
        proxy.black_hole = True
        process.communicate(timeout=30)
        assert process.returncode == 0
