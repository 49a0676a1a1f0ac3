"""docs/proof.md: which tests show what is required, and the table of what is broken on purpose, and noticed by which.

`python -m tests.support.proof` writes the table of mutants, and with `--mutants` lists each of them.
`tests/project/test_proof.py` says whether the page is as it should be.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import re
import sys
from collections.abc import Iterator, Sequence
from functools import cache
from typing import Final

from tests.support.pages import ROOT, syntax

PAGE: Final = ROOT / "docs/proof.md"


def requirements() -> list[list[str]]:
    """The tests that the page's table names for each requirement, which are numbered."""
    table = PAGE.read_text().partition("<!-- requirements: begin -->")[2].partition("<!-- requirements: end -->")[0]
    _, _, *rows = table.split("\n| ")
    assert [row.partition(" ")[0] for row in rows] == [str(number) for number in range(1, len(rows) + 1)]
    return [[f"tests/{test}" for test in re.findall("`([^`]*::[^`]*)`", row)] for row in rows]


# -- mutants

WORLDS: Final = ("tests.core.test_small_worlds", "tests.core.test_sharing_worlds", "tests.core.test_pool_worlds")
"""Modules with a list MUTANTS, and a test `test_what_is_broken_is_noticed` over it."""
MAJORITY: Final = "tests.core.test_quorum_worlds"
"""Its mutants are tests of their own."""
ABOUT: Final = {
    "test_sharing_worlds": "family",
    **dict.fromkeys(("trusts_from_the_answer", "trusts_too_long", "covered_by_nothing", "takes_lightly"), "trust"),
    **dict.fromkeys(("opens_at_once", "any_server_will_do", "creates_without_asking"), "quarantine"),
    **dict.fromkeys(("grants_without_asking", "trusts_the_old_clock"), "quarantine"),
    **dict.fromkeys(("grants_what_is_held", "hands_over_what_is_over", "nothing_is_undone", "credulous"), "protocol"),
    **dict.fromkeys(("given_back_twice", "frees_what_it_handed_over"), "protocol"),
    "test_small_worlds": "queue",
    "test_pool_worlds": "connections",
}
"""What a mutant is about, by its name; else by that of its module."""
ORDER: Final = ("protocol", "trust", "queue", "quarantine", "family", "majority", "connections")
STATEMENTS: Final = (
    ("trust", "take", "fence = greatest(* -> nothing", "A take keeps the fence of the tenure before."),
    ("trust", "renew", "expires_at > clock_timestamp() -> TRUE", "A lease that has ended is renewed."),
    ("protocol", "renew", "locks.owner = due.owner -> TRUE", "The watchdog renews a successor's lease."),
    ("protocol", "renew", "locks.fence = due.fence -> TRUE", "It renews a later tenure of the same owner."),
    ("protocol", "release", "fence = :fence -> TRUE", "A release does not name the fence."),
    (
        "protocol",
        "free",
        "fence = :fence -> TRUE",
        "An administrator frees another tenure than the one that was shown.",
    ),
    ("queue", "grant", "expires_at > clock_timestamp() -> TRUE", "A dead waiter is granted the key."),
    ("quarantine", "grant", "epoch.opens_at <= clock_timestamp() -> TRUE", "A grant does not wait for the quarantine."),
)
"""Conditions of PostgreSQL's statements, for the table; `make mutants` takes all of them away, on each database."""


def words(name: str) -> str:
    """A name of a function, as words."""
    return name.removeprefix("test_").replace("_", " ").capitalize()


def mutants() -> Iterator[tuple[str, str, str, str]]:
    """What each is about, its name, what it does otherwise, and the test that notices it."""
    for module in WORLDS:
        test = f"{module.replace('.', '/')}.py::test_what_is_broken_is_noticed"
        for each in dict.fromkeys(entry[0] for entry in importlib.import_module(module).MUTANTS):
            said = (inspect.getdoc(each) or "").split("\n\n")[0].replace("\n", " ")
            about = ABOUT.get(each.__name__) or ABOUT[module.rpartition(".")[2]]
            yield about, each.__name__, said or f"{words(each.__name__)}.", test
    for about, statement, change, said in STATEMENTS:
        yield about, f"{statement}: {change.rstrip('*')}", said, "tests/statements/mutants.py::test_mutant"
    for name, function in vars(importlib.import_module(MAJORITY)).items():
        if name.startswith("test_") and re.search("_found|raises", inspect.getsource(function)):
            yield "majority", name, f"{words(name)}.", f"{MAJORITY.replace('.', '/')}.py::{name}"


def mutations() -> Iterator[str]:
    """The table: a row for each subject, with the first of its mutants and the tests that notice them all."""
    yield "| about | mutants | for example | noticed by |"
    yield "|---|---|---|---|"
    for about in ORDER:
        found = [each for each in mutants() if each[0] == about]
        tests = dict.fromkeys(f"`{test.removeprefix('tests/').partition('::')[0]}`" for *_, test in found)
        yield f"| {about} | {len(found)} | {' '.join(said for *_, said, _ in found[:1])} | {'<br>'.join(tests)} |"


# -- the page


def between(name: str, lines: Sequence[str], page: str) -> str:
    """The page with those lines in the part of that name."""
    begin, end = f"<!-- {name}: begin -->", f"<!-- {name}: end -->"
    head, rest = page.split(begin)
    _, tail = rest.split(end)
    return "\n".join([f"{head}{begin}", *lines, f"{end}{tail}"])


def whole(page: str) -> str:
    """The page with the table of mutants."""
    return between("mutants", list(mutations()), page)


def defined(test: str) -> bool:
    """Whether there is such a test."""
    path, _, name = test.partition("::")
    return name in _functions(path)


@cache
def _functions(path: str) -> set[str]:
    tree = syntax(ROOT / path)
    return {each.name for each in tree.body if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef)}


def main() -> None:
    if sys.argv[1:] == ["--mutants"]:
        sys.stdout.writelines("\t".join(each) + "\n" for each in mutants())
    else:
        _ = PAGE.write_text(whole(PAGE.read_text()))


if __name__ == "__main__":
    main()
