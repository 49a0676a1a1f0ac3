"""What docs/proof.md says: requirements and mutants have tests, and its table of mutants is as the code has it."""

from __future__ import annotations

from fnmatch import fnmatchcase

import pytest

from tests.statements.mutants import MUTANTS, excuses
from tests.support.proof import PAGE, STATEMENTS, WORLDS, defined, mutants, requirements, whole


def test_the_table_of_mutants_is_as_the_code_has_it() -> None:
    """To write it anew: `python -m tests.support.proof`."""
    page = PAGE.read_text()
    assert whole(page) == page


def test_each_requirement_has_tests(request: pytest.FixtureRequest) -> None:
    """36 of them, and tests that exist; a run of the whole suite also says whether pytest collects them."""
    found = requirements()
    assert len(found) == 36
    named = {test for tests in found for test in tests}
    assert not [test for test in named if not defined(test)]
    assert all(found)
    config = request.config
    if config.args == config.getini("testpaths") and config.option.markexpr in {"", "not workers"}:
        chosen = config.option.keyword or getattr(config.option, "lf", False)
        assert chosen or named <= {item.nodeid.partition("[")[0] for item in request.session.items}


def test_each_mutant_has_a_test() -> None:
    """Two dozen and more, over everything; those of statements are among what `make mutants` takes away, unexcused."""
    found = list(mutants())
    assert {about for about, *_ in found} >= {"protocol", "trust", "queue", "quarantine", "family", "majority"}
    assert len({name for _, name, _, _ in found}) == len(found) >= 24
    assert not [test for *_, test in found if not defined(test)]
    assert all(said for _, _, said, _ in found)
    assert len(WORLDS) == 3
    for _, statement, change, _ in STATEMENTS:
        chosen = [
            each for each in MUTANTS if each[:2] == ("postgresql", statement) and fnmatchcase(each[2].change, change)
        ]
        assert chosen, f"{statement}: {change}"
        assert not any(excuses(*each) for each in chosen)
