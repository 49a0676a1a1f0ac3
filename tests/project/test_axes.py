"""The axes of the contract: each cell that `make product` has is on one of them by its database, face or driver."""

from __future__ import annotations

import ast
from pathlib import Path

from tests.conftest import DATABASES
from tests.contract.conftest import AXES
from tests.support.lab import DRIVERS, EVERYWHERE, FACES, PAIR_OF_FACES, PROTOCOL, ROOT
from tests.support.pages import syntax
from tests.support.subjects import EVERY, Subject

CONTRACT = sorted((ROOT / "tests/contract").glob("test_*.py"))


def faces(cells: list[Subject]) -> set[tuple[str, str]]:
    return {(each.variant, each.face) for each in cells}


def test_the_axes_are_what_they_say() -> None:
    """Each database on one face, each face on one database, each driver once; two faces without a thing in common."""
    assert [each.database for each in PROTOCOL] == list(DATABASES)
    assert faces(PROTOCOL) == {("sqlalchemy", "sync")}
    assert faces(FACES) == faces([*EVERY])
    assert (len(FACES), {each.database for each in FACES}) == (4, {"postgresql"})
    assert faces(PAIR_OF_FACES) == {("django", "sync"), ("sqlalchemy", "async")}
    assert {each.driver for each in DRIVERS} == {each.driver for each in EVERY}
    assert {each.database for each in DRIVERS} == {*DATABASES}
    assert faces(DRIVERS) == faces([*EVERY])


def test_essential_promises_are_kept_everywhere() -> None:
    """Some tests of locks, and of each kind of them, run on each database and face, and on each driver in use."""
    assert {(each.database, each.variant) for each in EVERYWHERE} == {(each.database, each.variant) for each in EVERY}
    assert {(each.database, each.face) for each in EVERYWHERE} == {(each.database, each.face) for each in EVERY}
    assert {each.driver for each in EVERYWHERE} >= {each.driver for each in EVERY} - {"psycopg2"}
    where = [path.stem for path, axes in chosen().values() if axes == {"everywhere"}]
    assert 14 <= len(where) <= 30
    assert {*where} >= {
        f"test_{name}" for name in ("lock", "lease", "queue", "several", "rwlock", "semaphore", "leader")
    }


def test_each_test_is_on_one_axis() -> None:
    """Two would be a product."""
    assert not [name for name, (_, axes) in chosen().items() if len(axes) > 1]


def chosen() -> dict[str, tuple[Path, set[str]]]:
    """The axes that each test of the contract names."""
    return {
        f"{path.stem}::{node.name}": (path, AXES.keys() & {each.arg for each in node.args.args})
        for path in CONTRACT
        for node in syntax(path).body
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")
    }
