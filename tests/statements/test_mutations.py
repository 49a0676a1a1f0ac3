"""What a mutant is, by example."""

from __future__ import annotations

import pytest

from tests.statements.mutations import effective, mutants


@pytest.mark.parametrize(
    ("sql", "changes"),
    [
        ("SELECT a FROM t WHERE b = :b", ["b = :b -> TRUE"]),
        ("UPDATE t SET a = 1 WHERE b AND (c OR d)", ["b -> TRUE", "(c OR d) -> TRUE", "c -> FALSE", "d -> FALSE"]),
        ("DELETE FROM t WHERE a OR b AND c", ["a -> FALSE", "b -> TRUE", "b AND c -> FALSE", "c -> TRUE"]),
        ("UPDATE t SET a = f(1, 2), b = 2", ["a = f(1, 2) -> nothing", "b = 2 -> nothing"]),
        ("UPDATE t SET a = greatest(a, g(1, 2))", ["greatest(a, g(1, 2)) -> (a)", "greatest(a, g(1, 2)) -> (g(1, 2))"]),
        ("SELECT max(a) FROM t", []),
        ("SELECT a, b OR c FROM t", ["b -> FALSE", "c -> FALSE"]),
        ("SELECT CASE WHEN a THEN b END FROM t", ["a -> FALSE", "a -> TRUE"]),
        (
            "DELETE FROM t WHERE CASE WHEN a THEN b ELSE false END",
            ["CASE WHEN a THEN b ELSE false END -> TRUE", "a -> FALSE", "a -> TRUE", "b -> TRUE", "false -> TRUE"],
        ),
        ("DELETE FROM t WHERE NOT EXISTS (SELECT 1 FROM u WHERE a)", ["a -> TRUE", "NOT EXISTS (... -> TRUE"]),
        (
            "SELECT a FROM t ORDER BY a LIMIT 1 FOR UPDATE SKIP LOCKED",
            [
                "ORDER BY a -> nothing",
                "ORDER BY a -> ORDER BY a DESC",
                "LIMIT 1 -> nothing",
                "FOR UPDATE SKIP LOCKED -> nothing",
                "SKIP LOCKED -> nothing",
            ],
        ),
        ("INSERT INTO t SELECT 1 ON CONFLICT (a) DO NOTHING", ["ON CONFLICT (a) DO NOTHING -> nothing"]),
        (
            "SET STATEMENT x = 0, y = 0 FOR UPDATE u STRAIGHT_JOIN t FORCE INDEX (i) ON a = 'b AND (c' SET d = 1",
            [
                "SET STATEMENT x = 0, y = 0 FOR -> nothing",
                "x = 0 -> nothing",
                "y = 0 -> nothing",
                "STRAIGHT_JOIN -> JOIN",
                "FORCE -> IGNORE",
                "a = 'b AND (c' -> TRUE",
            ],
        ),
        ("SELECT set_config('a', 'b', true)", ["true -> FALSE"]),
        ("SELECT 1 FROM t WHERE a JOIN u ON a", ["a -> TRUE", "a -> TRUE (2)"]),
    ],
)
def test_mutants(sql: str, changes: list[str]) -> None:
    """Each is the text but for one thing."""
    found = [mutant.change.replace("(SELECT 1 FROM u WHERE a)", "(...") for mutant in mutants(sql)]
    assert sorted(found) == sorted(changes)
    for mutant in mutants(sql):
        assert mutant.sql != sql


@pytest.mark.parametrize("sql", ["SELECT 1 WHERE a BETWEEN 1 AND 2", "SELECT 1 WHERE NOT (a AND b)", "SELECT 1)"])
def test_what_is_not_understood(sql: str) -> None:
    """It is an error: no condition goes untried in silence."""
    with pytest.raises(ValueError, match=r"not understood|no bracket"):
        mutants(sql)


def test_conditional_comments() -> None:
    """Each database reads its own."""
    sql = "/*M! SET x = 0 FOR */ SELECT /*+ hint */ a /* why */ COLLATE /*M! nopad_bin */ /*!80017 0900_bin */"
    assert effective(sql, "mariadb") == "SET x = 0 FOR SELECT /*+ hint */ a COLLATE nopad_bin"
    assert effective(sql, "mysql") == "SELECT /*+ hint */ a COLLATE 0900_bin"
