"""One random run over everything: clients of every face and kind of lock, and a nemesis that mixes the faults.

What is recorded and checked: `tests.support.history`. Who lives, and what strikes: `tests.support.nemesis`.
"""

from __future__ import annotations

import os
import random

import pytest

from tests.conftest import INNODB
from tests.faults.conftest import long_run
from tests.support.lab import LONG
from tests.support.nemesis import MEANT, run

OPERATIONS = int(os.environ.get("OPERATIONS", "200000" if LONG else "5000"))
SEED = int(os.environ.get("SEED", str(random.SystemRandom().getrandbits(30))))


@pytest.mark.direct
@pytest.mark.timeout(86400 if LONG else 600)
def test_no_history_contradicts_the_promises(capsys: pytest.CaptureFixture[str]) -> None:
    """Whatever strikes: no rule of `tests.support.history` is broken, and everybody gets something done.

    OPERATIONS: how many are wanted; SEED: that of an earlier run.
    """
    result = run(OPERATIONS, SEED, databases=("sqlite", "postgresql", *(INNODB if LONG else INNODB[:1])))
    with capsys.disabled():
        print(f"\n{result.summary()}", end="")  # noqa: T201 - to be read, and SEED to be used again
    assert not result.violations, "\n".join(map(str, (f"SEED={SEED}", *result.violations)))
    assert set(result.tenures) == MEANT, "each kind of lock was held"
    assert result.outcomes["write: ok"] > OPERATIONS / 1000
    assert result.outcomes["take: ok"] > result.operations.total() / 10


@long_run(7200)
@pytest.mark.direct
@pytest.mark.parametrize("standby", ["asynchronous", "synchronous"])
def test_a_standby_is_promoted_again_and_again(standby: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The same beside a PostgreSQL standby that takes its primary's place; a synchronous one loses no guarded write."""
    result = run(OPERATIONS // 10, SEED, standby=standby)
    with capsys.disabled():
        print(f"\n{standby}: {result.summary()}", end="")  # noqa: T201
    assert not result.violations, "\n".join(map(str, (f"SEED={SEED}", *result.violations)))
    assert result.faults["standby promoted"]
