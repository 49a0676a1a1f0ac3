"""Each statement on real servers, in two sessions: every condition that it has makes a difference to some case."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.conftest import DATABASES
from tests.statements.cases import Case
from tests.statements.families import CASES
from tests.statements.laboratory import Laboratory

pytestmark = pytest.mark.direct


@pytest.mark.parametrize(
    ("database", "case"),
    [
        pytest.param(database, case, id=f"{database}-{case}")
        for database in DATABASES
        for case in CASES
        if database in case.on
    ],
)
def test_case(laboratory: Callable[[str], Laboratory], database: str, case: Case) -> None:
    """What a statement answers and changes, and nothing else."""
    assert laboratory(database).differences(case) == []
